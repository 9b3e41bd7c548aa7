"""A checkpoint: its folder, downloaded from the hub if necessary, its weights, its fingerprint.

huggingface_hub reads HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT."""

import hashlib
import json
import os
import re
import shlex
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from runtime.errors import InputError, hub_reason, offline_if_unreachable
from runtime.files import read_json, short_hash
from runtime.special import read_optional

HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
FILE = re.compile(r"[^/\\]+\.safetensors")


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
            "single files are not read"
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
        ) from None
    folder = Path(folder)
    if weights and not any(folder.glob("*.safetensors")):
        offline_if_unreachable()  # the snapshot may be that of an earlier call without weights
        if constants.HF_HUB_OFFLINE:
            raise OSError(f"{hub_reason(None)}: the cache has no safetensors files of {name}")
    return folder


def gguf_name(path):
    """The model's name in that of a GGUF file: Qwen2.5-3B-Instruct-Q4_K_M.gguf."""
    return re.sub(r"[-.](I?Q\d\w*|B?F(16|32))$", "", path.stem, flags=re.IGNORECASE)


STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBEDDING = "model.embed_tokens.weight"
PREFIX = "model."  # absent from a checkpoint of the model without its head
HEAD = "lm_head.weight"
# Before the names of a model in torch.compile, PEFT, DataParallel or a module of one's own.
WRAPPERS = r"^((_orig_mod|base_model\.model|module|transformer)\.)+(?=model\.|lm_head\.)"

# Parameter → its tensors in a checkpoint and their axes. Several tensors are concatenated.
#     D model width          F feed-forward width   V vocabulary
#     H query heads × K      G key/value heads × K  K head width
NAMES = {
    "embed.weight": {EMBEDDING: "VD"},
    "norm.weight": {"model.norm.weight": "D"},
    "lm_head.weight": {HEAD: "VD"},
    "attn_norm.weight": {"input_layernorm.weight": "D"},
    "attn.qkv.weight": {
        "self_attn.q_proj.weight": "HD",
        "self_attn.k_proj.weight": "GD",
        "self_attn.v_proj.weight": "GD",
    },
    "attn.qkv.bias": {
        "self_attn.q_proj.bias": "H",
        "self_attn.k_proj.bias": "G",
        "self_attn.v_proj.bias": "G",
    },
    "attn.q_norm.weight": {"self_attn.q_norm.weight": "K"},
    "attn.k_norm.weight": {"self_attn.k_norm.weight": "K"},
    "attn.o.weight": {"self_attn.o_proj.weight": "DH"},
    "attn.o_bias": {"self_attn.o_proj.bias": "D"},
    "mlp_norm.weight": {"post_attention_layernorm.weight": "D"},
    "mlp.gate_up.weight": {"mlp.gate_proj.weight": "FD", "mlp.up_proj.weight": "FD"},
    "mlp.down.weight": {"mlp.down_proj.weight": "DF"},
}


def weight_table(model):
    """{parameter: {name in the checkpoint: (shape, this rank's slices)}}."""
    c = model.config
    K = c.head_dim
    part = model.shard.part
    heads, kv_heads = part(c.n_heads), part(c.n_kv_heads, copies=True)
    axes = {  # letter → (size, this rank's slice)
        "D": (c.d_model, slice(None)),
        "K": (K, slice(None)),
        "F": (c.d_ff, part(c.d_ff)),
        "V": (c.vocab_size, part(c.vocab_size)),
        "H": (c.n_heads * K, slice(heads.start * K, heads.stop * K)),
        "G": (c.n_kv_heads * K, slice(kv_heads.start * K, kv_heads.stop * K)),
    }
    table = {}
    for parameter, _ in model.named_parameters():
        layer, name = re.fullmatch(r"(layers\.\d+\.)?(.+)", parameter).groups()
        table[parameter] = {}
        for stored, letters in NAMES[name].items():
            shape, slices = zip(*(axes[letter] for letter in letters))
            table[parameter][f"model.{layer}{stored}" if layer else stored] = shape, slices
    return table


def named_tensors(model, of=lambda parameter: parameter):
    """{name in the checkpoint: view of a parameter, or of of(parameter)} of a model on one rank."""
    tensors = {}
    for parameter, pieces in weight_table(model).items():
        parts = of(model.get_parameter(parameter)).split([shape[0] for shape, _ in pieces.values()])
        tensors |= zip(pieces, parts)
    return tensors


def load_weights(model, folder, device):
    """Fills the parameters from safetensors. InputError for missing, unused or odd tensors."""
    files = weight_files(folder)
    stored = partial(stored_name, files=files)
    table = weight_table(model)
    for parameter, pieces in table.items():
        table[parameter] = {stored(name): x for name, x in pieces.items()}
    tied = model.config.tied_embeddings
    [(embedding, place)] = table["embed.weight"].items()
    head = stored(HEAD)
    if tied and embedding not in files:  # the matrix may be stored under its other name
        table["embed.weight"] = {head: place}
    names = {name for pieces in table.values() for name in pieces}
    # Old checkpoints store buffers of rotary frequencies.
    unused = {name for name in files.keys() - names if not name.endswith("inv_freq")}
    if tied:
        unused.discard(head)
    check_tensor_names(folder, names | {head}, names - files.keys(), unused)
    # Large matrices first: then the peak of the host's memory is the weights alone.
    for parameter, empty in sorted(model.named_parameters(), key=lambda pair: -pair[1].numel()):
        weight = torch.zeros(empty.shape, dtype=model.dtype, device=device)
        row = 0
        for name, (shape, slices) in table[parameter].items():
            values = read_slice(files[name], name, shape, slices)
            # The last rank may have fewer rows of the vocabulary.
            weight[row : row + len(values)] = values
            row += len(values)
        if not torch.isfinite(torch.stack(torch.aminmax(weight))).all():
            raise InputError(
                f"{files[name]}: {' or '.join(table[parameter])} is not finite in {model.dtype}; "
                "load in float32 or download the file again"
            )
        module, _, attribute = parameter.rpartition(".")
        setattr(model.get_submodule(module), attribute, nn.Parameter(weight, requires_grad=False))


def stored_name(name, files):
    """A name of NAMES as these files spell it: with the prefix of wrappers, or without PREFIX."""
    wrappers = re.match(WRAPPERS, min(files))
    if wrappers:
        return wrappers[0] + name
    bare = "norm.weight" in files and PREFIX + "norm.weight" not in files
    return name.removeprefix(PREFIX) if bare else name


def check_layers(folder, files):
    """InputError if config.json has more layers than the tensors of `weight_files`.

    Such a model would take minutes to build before its first missing tensor is found."""
    config = read_optional(folder / "config.json")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = text_config
    n_layers = config.get("num_hidden_layers")
    numbers = [int(part) for name in files for part in name.split(".") if part.isdecimal()]
    stored = max(numbers, default=-1) + 1
    if isinstance(n_layers, int) and n_layers > stored:
        raise InputError(
            f"{folder}: config.json has {n_layers} layers, the safetensors files have {stored}; do "
            "they belong together?"
        )


def check_tensor_names(folder, names, missing, unused):
    """InputError if tensors are missing or unused. Warns of tensors beside the model, such as a
    value or a classification head, which transformers leaves out too.

    names: those of the model's tensors."""
    inside = {part for name in names for part in name.split(".")[:2]}
    beside = {name for name in unused if name.split(".")[0] not in inside}
    if missing or unused - beside:
        raise InputError(
            f"{folder}: missing {sorted(missing)[:4]}, unused {sorted(unused)[:4]}; "
            "do config.json and the safetensors files belong together?"
        )
    if beside:
        warnings.warn(f"{folder}: {sorted(beside)[:4]} are not part of the model", stacklevel=2)


def read_slice(path, name, shape, slices):
    """A slice of a tensor of this shape. The file is closed again, which releases its pages."""
    with safe_open(path, "pt") as file:
        tensor = file.get_slice(name)
        dtype = tensor.get_dtype()
        if tuple(tensor.get_shape()) != shape or dtype not in STORED:
            raise InputError(
                f"{path}: {name} is {dtype} {tensor.get_shape()}; config.json requires F32, F16 "
                f"or BF16 {list(shape)}"
            )
        return tensor[slices]


def stored_dtype(files):
    """The dtype of the first weight, as transformers reads it if config.json has none."""
    name, path = next(iter(files.items()))
    with safe_open(path, "pt") as file:
        return STORED.get(file.get_slice(name).get_dtype(), torch.float32)


def weight_files(folder):
    """{name of a tensor: its safetensors file}. An index only gives the files' names."""
    single = "model.safetensors"
    index = "model.safetensors.index.json"
    if os.path.lexists(folder / single):  # takes precedence, as in transformers
        names = {single}
    elif os.path.lexists(folder / index):
        weight_map = read_json(folder / index).get("weight_map")
        names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
        if not names or not all(map(FILE.fullmatch, names)):
            raise InputError(
                f"{folder / index}: weight_map must map tensors to safetensors files of its own "
                "folder; download it again"
            )
    elif any(folder.glob("consolidated*.safetensors")):
        raise FileNotFoundError(
            f"{folder}: consolidated.safetensors has Mistral's own names of tensors; take "
            f"{single} or model-*.safetensors of the same repository"
        )
    else:
        raise FileNotFoundError(
            f"{folder}: no {single}. Pickles (.bin, .pt, .pth) are not read, because they can run "
            "code. If you trust one, load it with transformers and call save_pretrained"
        )
    files = {}
    for path in sorted(folder / name for name in names):
        try:
            path.open("rb").close()  # safe_open calls a file without permission missing
            with safe_open(path, "pt") as file:
                tensors = dict.fromkeys(file.keys(), path)
        except (SafetensorError, FileNotFoundError) as error:
            raise InputError(f"{path} is missing or damaged ({error}); download it again") from None
        for tensor in sorted(tensors.keys() & files.keys()):
            raise InputError(
                f"{tensor} is in two files, {files[tensor]} and {path.name}; download them again"
            )
        files |= tensors
    return files


def untie(config, files):
    """The configuration; as in transformers, without tied embeddings if the stored head differs."""
    names = [stored_name(name, files) for name in (EMBEDDING, HEAD)]
    if not config.tied_embeddings or not files.keys() >= {*names}:
        return config
    embedding, head = (safe_open(files[name], "pt").get_tensor(name) for name in names)
    same = embedding.dtype == head.dtype and torch.equal(embedding, head)
    return replace(config, tied_embeddings=same)


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


def fingerprint(name):
    """A checkpoint's content: {"weights" or a file's name: hash}. Takes seconds even for 70B.

    The weights' hash covers every tensor's name, type, shape and bytes; of a large one, eight
    evenly spread blocks. Training changes it; a change of one row may not. How tensors are spread
    over files does not matter."""
    folder = checkpoint_folder(name)
    files = [folder / file for file in HASHED]
    hashes = {file.name: short_hash(file.read_bytes()) for file in files if file.is_file()}
    weights = hashlib.sha256()
    for tensor, path in sorted(weight_files(folder).items()):
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))[tensor]
            first, last = header["data_offsets"]
            weights.update(json.dumps([tensor, header["dtype"], header["shape"]]).encode())
            n, size = BLOCKS, BLOCK
            if last - first <= LARGE:
                n, size = 1, last - first
            for i in range(n):
                file.seek(start + first + i * (last - first - size) // max(1, n - 1))
                weights.update(file.read(size))
    return hashes | {"weights": weights.hexdigest()[:16]}
