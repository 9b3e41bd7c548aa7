"""A checkpoint: its folder, downloaded from the hub if necessary, and what its files say.

huggingface_hub reads HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT."""

import hashlib
import json
import os
import re
import shlex
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open

from runtime import special
from runtime.config import Config
from runtime.errors import InputError, hub_reason, offline_if_unreachable
from runtime.files import checkpoint_name, read_json, short_hash

HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
FILE = re.compile(r"[^/\\]+\.safetensors")
HASHED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/default.jinja",
)
LARGE = 2**20  # bytes up to which a tensor is hashed as a whole
BLOCKS = 8  # number of blocks of a larger one that are hashed
BLOCK = 2**12  # bytes of a block


class Checkpoint:
    """A model's folder, whose files are read when they are first asked for, and not again: its
    tokenizer, its weights and its head scores share one of these.

    path: a folder or a hub id. weights: whether to download the weights too."""

    def __init__(self, path, weights=False):
        self.path = path
        self.name = checkpoint_name(path)
        self.folder = checkpoint_folder(path, weights)
        self.contents = {}  # of JSON files

    @classmethod
    def of(cls, path, weights=False):
        """The checkpoint of a folder or a hub id; or a checkpoint as it is, with its weights."""
        if not isinstance(path, cls):
            return cls(path, weights)
        if weights:
            path.folder = checkpoint_folder(path.path)
        return path

    def read(self, file):
        """The object in a JSON file; {} without the file."""
        if file not in self.contents:
            path = self.folder / file
            exists = os.path.lexists(path)  # a dangling link is an error
            self.contents[file] = read_json(path) if exists else {}
        return self.contents[file]

    @cached_property
    def config(self):
        """The `Config`. InputError for missing or unsupported fields."""
        path = self.folder / "config.json"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing; convert a .gguf file (python -m integrations.gguf FILE OUT), "
                "and merge a LoRA adapter into its model (peft: merge_and_unload)"
            )
        return Config.from_fields(self.read("config.json"), path)

    @cached_property
    def settings(self):
        """tokenizer_config.json; in older folders special_tokens_map.json takes precedence, as in
        transformers."""
        settings = self.read("tokenizer_config.json")
        if "added_tokens_decoder" in settings:
            return settings
        return settings | self.read("special_tokens_map.json")

    special_tokens = cached_property(special.read_special_tokens)
    special_ids = cached_property(special.read_special_ids)
    tokenizer = cached_property(special.read_tokenizer)

    @cached_property
    def tensors(self):
        """{name of a tensor: its safetensors file}. An index only gives the files' names."""
        single = "model.safetensors"
        index = "model.safetensors.index.json"
        if os.path.lexists(self.folder / single):  # takes precedence, as in transformers
            names = {single}
        elif os.path.lexists(self.folder / index):
            weight_map = self.read(index).get("weight_map")
            names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
            if not names or not all(map(FILE.fullmatch, names)):
                raise InputError(
                    f"{self.folder / index}: weight_map must map tensors to safetensors files of "
                    "its own folder; download it again"
                )
        elif any(self.folder.glob("consolidated*.safetensors")):
            raise FileNotFoundError(
                f"{self.folder}: consolidated.safetensors has Mistral's own names of tensors; take "
                f"{single} or model-*.safetensors of the same repository"
            )
        else:
            raise FileNotFoundError(
                f"{self.folder}: no {single}. Pickles (.bin, .pt, .pth) are not read, because they "
                "can run code. If you trust one, load it with transformers and call save_pretrained"
            )
        files = {}
        for path in sorted(self.folder / name for name in names):
            try:
                path.open("rb").close()  # safe_open calls a file without permission missing
                with safe_open(path, "pt") as file:
                    tensors = dict.fromkeys(file.keys(), path)
            except (SafetensorError, FileNotFoundError) as error:
                raise InputError(
                    f"{path} is missing or damaged ({error}); download it again"
                ) from None
            for tensor in sorted(tensors.keys() & files.keys()):
                raise InputError(
                    f"{tensor} is in two files, {files[tensor]} and {path.name}; download them "
                    "again"
                )
            files |= tensors
        return files

    def check_layers(self):
        """InputError if config.json has more layers than the files of weights, or does not say that
        these are quantized.

        Such a model would take minutes to build before its first missing tensor is found."""
        config = self.read("config.json")
        quantization = self.read("hf_quant_config.json").get("quantization") or {}
        if quantization.get("quant_algo") and not config.get("quantization_config"):
            raise InputError(
                f"{self.folder}: hf_quant_config.json says that the weights are "
                f"{quantization['quant_algo']}, which config.json does not; take those that are "
                "not quantized"
            )
        text_config = config.get("text_config")
        if isinstance(text_config, dict):
            config = text_config
        n_layers = config.get("num_hidden_layers")
        parts = ".".join(self.tensors).split(".")
        numbers = [int(part) for part in parts if part.isdecimal()]
        stored = max(numbers, default=-1) + 1
        if isinstance(n_layers, int) and n_layers > stored:
            raise InputError(
                f"{self.folder}: config.json has {n_layers} layers, the safetensors files have "
                f"{stored}; do they belong together?"
            )

    @cached_property
    def fingerprint(self):
        """A checkpoint's content: {"weights" or a file's name: hash}. Takes seconds even for 70B.

        The weights' hash covers every tensor's name, type, shape and bytes; of a large one, eight
        evenly spread blocks. Training changes it; a change of one row may not. How tensors are
        spread over files does not matter."""
        files = [self.folder / file for file in HASHED]
        hashes = {file.name: short_hash(file.read_bytes()) for file in files if file.is_file()}
        weights = hashlib.sha256()
        headers = {path: read_header(path) for path in {*self.tensors.values()}}
        for tensor, path in sorted(self.tensors.items()):
            start, header = headers[path]
            header = header[tensor]
            first, last = header["data_offsets"]
            with open(path, "rb") as file:
                weights.update(json.dumps([tensor, header["dtype"], header["shape"]]).encode())
                n, size = BLOCKS, BLOCK
                if last - first <= LARGE:
                    n, size = 1, last - first
                for i in range(n):
                    file.seek(start + first + i * (last - first - size) // max(1, n - 1))
                    weights.update(file.read(size))
        return hashes | {"weights": weights.hexdigest()[:16]}


def checkpoint_folder(name, weights=True):
    """`name` itself if it is a folder, else the snapshot of the hub id "owner/name", of a branch or
    commit with "owner/name@revision".

    weights: whether to download the weights too. OSError if there is no such checkpoint."""
    name = str(name)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        _, kind, hub_id = folder.name.partition("models--")
        if kind and (folder / "snapshots").is_dir():
            hub_id = hub_id.replace("--", "/", 1)
            raise InputError(
                f"{name} is the cache of a hub id: give {hub_id}, or a folder of its snapshots/"
            )
        return folder
    if name.lower().endswith(".gguf") and folder.is_file():
        command = shlex.join(["python", "-m", "integrations.gguf", str(folder), gguf_name(folder)])
        raise InputError(f"{name} is not a checkpoint folder; make one: {command}")
    hub_id = HUB_ID.fullmatch(name)
    if not hub_id or folder.exists():
        raise FileNotFoundError(
            f"{name!r} is neither a folder nor a hub id like Qwen/Qwen2.5-3B-Instruct; "
            f"single files are not read{neighbour(folder)}"
        )
    # Slow to import, and folders do not need it.
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(
            hub_id[1],
            revision=hub_id[2],
            allow_patterns=["*.json", "*.jinja", *["*.safetensors"] * weights],
            # Llama and Mistral hold the weights again, in original/ or as consolidated*.
            ignore_patterns=["*/*.json", "*/*.safetensors", "consolidated*"],
        )
    except Exception as error:  # the network library raises many kinds
        raise OSError(
            f"{hub_reason(error)}: cannot download {name}; check the name and the connection, "
            "or give a folder; a gated one needs its terms accepted and HF_TOKEN"
            + neighbour(Path(name))
        ) from None
    folder = Path(folder)
    if weights and not any(folder.glob("*.safetensors")):
        offline_if_unreachable()  # the snapshot may be that of an earlier call without weights
        if constants.HF_HUB_OFFLINE:
            raise OSError(f"{hub_reason(None)}: the cache has no safetensors files of {name}")
    return folder


def neighbour(folder):
    """The end of a message: the checkpoint folder beside a missing one that is named most alike."""
    beside = [path.parent.name for path in folder.parent.glob("*/config.json")]
    near = get_close_matches(folder.name, beside, 1)
    return f"; did you mean {folder.parent / near[0]}?" if near else ""


def read_header(path):
    """Where the tensors of a safetensors file start, and {tensor: its dtype, shape and place}."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


def gguf_name(path):
    """The model's name in that of a GGUF file: Qwen2.5-3B-Instruct-Q4_K_M.gguf."""
    return re.sub(r"[-.](I?Q\d\w*|B?F(16|32))$", "", path.stem, flags=re.IGNORECASE)
