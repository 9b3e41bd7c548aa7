"""A checkpoint: its folder, downloaded from the Hugging Face hub if necessary, its weights and its fingerprint.

huggingface_hub reads HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT."""

import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import constants, errors, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn

from runtime.files import brief, check_file, one_line, read_json, short_hash

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def checkpoint_folder(name, weights=True):
    """Returns an existing folder itself, and for a hub id ("owner/name") the folder of its snapshot.

    weights: whether to download the weights too. ValueError or OSError if there is no such checkpoint."""
    name, folder = str(name), Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if name and folder.exists():
        raise ValueError(f"{name} is a file: give the folder that holds config.json, tokenizer.json and the weights")
    if not HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"{name!r} is neither a folder nor a hub id; a hub id reads owner/name, for example "
                                "meta-llama/Meta-Llama-3-8B-Instruct")
    return download(name, ["*.json", "*.jinja"] + ["*.safetensors"] * weights)


def download(name, patterns):
    """Downloads the files of a model that match the patterns → their folder. OSError, one line, if that fails."""
    page = f"{constants.ENDPOINT}/{name}"
    try:
        # Llama and Mistral repositories hold the weights twice: again in original/, or as consolidated*.safetensors.
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except errors.GatedRepoError:
        problem = f"{name} is gated: accept its terms at {page}, then run `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = (f"{name} is neither a folder nor a model on the hub ({page}): check the spelling; if it is private, "
                   "run `hf auth login` or set HF_TOKEN")
    except Exception as error:              # the network library raises many kinds
        problem = (f"downloading {name} failed: check the connection and HF_HUB_OFFLINE, then run the command again to "
                   f"continue, or give a folder ({one_line(error)})")
    raise OSError(problem)


# -------------------------------------------------------------------------------------------------------------- loading

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NOT_WEIGHTS = ("rotary_emb.inv_freq",)          # buffers in old checkpoints


def weight_table(c, shard):
    """{parameter: [(name in the checkpoint, its whole shape, this rank's slices), …]}.

    A merged parameter is the concatenation of several. q, k, v, gate and up are split by rows of [out, in], o and down
    by columns, embedding and head by vocabulary. Without slices, every rank has the whole tensor."""
    D, K, whole = c.d_model, c.head_dim, slice(None)

    def split(n, width=1, copies=False):
        part = shard.part(n, copies)
        return slice(part.start * width, part.stop * width)

    heads, kv_heads = split(c.n_heads, K), split(c.n_kv_heads, K, copies=True)
    vocab, ff = split(c.vocab_size), split(c.d_ff)
    qkv = [("q_proj", c.n_heads * K, heads), *((name, c.n_kv_heads * K, kv_heads) for name in ("k_proj", "v_proj"))]
    table = {"embed.weight": [(EMBEDDING, (c.vocab_size, D), (vocab,))],
             "norm.weight": [("model.norm.weight", (D,), ())]}
    if not c.tied_embeddings:
        table["lm_head.weight"] = [(HEAD, (c.vocab_size, D), (vocab,))]
    for i in range(c.n_layers):
        ours, attn, mlp = f"layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        table |= {
            f"{ours}.attn_norm.weight": [(f"model.layers.{i}.input_layernorm.weight", (D,), ())],
            f"{ours}.mlp_norm.weight": [(f"model.layers.{i}.post_attention_layernorm.weight", (D,), ())],
            f"{ours}.attn.qkv.weight": [(f"{attn}.{name}.weight", (n, D), (cut,)) for name, n, cut in qkv],
            f"{ours}.attn.o.weight": [(f"{attn}.o_proj.weight", (D, c.n_heads * K), (whole, heads))],
            f"{ours}.mlp.gate_up.weight": [(f"{mlp}.{x}_proj.weight", (c.d_ff, D), (ff,)) for x in ("gate", "up")],
            f"{ours}.mlp.down.weight": [(f"{mlp}.down_proj.weight", (D, c.d_ff), (whole, ff))]}
        if c.qkv_bias:
            table[f"{ours}.attn.qkv.bias"] = [(f"{attn}.{name}.bias", (n,), (cut,)) for name, n, cut in qkv]
        if c.o_bias:
            table[f"{ours}.attn.o_bias"] = [(f"{attn}.o_proj.bias", (D,), ())]
        if c.qk_norm:
            table |= {f"{ours}.attn.{x}_norm.weight": [(f"{attn}.{x}_norm.weight", (K,), ())] for x in "qk"}
    return table


def named_tensors(model, of=lambda parameter: parameter):
    """{name in the checkpoint: view of a parameter} of a model on one rank.

    of: maps a parameter to the tensor to view instead, for example its gradient."""
    tensors = {}
    for parameter, pieces in weight_table(model.config, model.shard).items():
        parts = of(model.get_parameter(parameter)).split([shape[0] for _, shape, _ in pieces])
        tensors |= {name: part for (name, _, _), part in zip(pieces, parts, strict=True)}
    return tensors


def load_weights(model, folder, device):
    """Fills the model's parameters from safetensors files. ValueError if tensors are missing, unused or not finite."""
    files, table, tied = weight_files(folder), weight_table(model.config, model.shard), model.config.tied_embeddings
    if tied and EMBEDDING not in files:                 # the shared matrix may be stored under its other name
        table["embed.weight"] = [(HEAD, *table["embed.weight"][0][1:])]
    names = {name for pieces in table.values() for name, _, _ in pieces}
    missing = sorted(names - files.keys())
    unused = sorted(n for n in files.keys() - names if not (tied and n == HEAD) and not n.endswith(NOT_WEIGHTS))
    if missing or unused:
        raise ValueError(f"{folder}: missing {brief(missing)}, unused {brief(unused)}; "
                         "do config.json and the safetensors files belong together?")
    # Large matrices first: then the peak of the host's memory is the weights alone.
    for parameter, pieces in sorted(table.items(), key=lambda item: -math.prod(item[1][0][1])):
        module, _, attribute = parameter.rpartition(".")
        module = model.get_submodule(module)
        weight = torch.zeros(getattr(module, attribute).shape, dtype=model.dtype, device=device)
        row = 0
        for name, shape, slices in pieces:
            values = read_tensor(files[name], name, shape, slices)
            weight[row:row + len(values)] = values      # the last rank's part of the vocabulary may be shorter
            row += len(values)
        if not torch.isfinite(torch.stack(torch.aminmax(weight))).all():
            raise ValueError(f"{files[name]}: {' or '.join(name for name, _, _ in pieces)} is not finite in "
                             f"{model.dtype}; load in float32 or download the file again")
        setattr(module, attribute, nn.Parameter(weight, requires_grad=False))


def read_tensor(path, name, shape, slices):
    """Reads a slice of one tensor. Opening the file for each tensor releases its pages after each copy."""
    with safe_open(path, "pt") as file:
        tensor = file.get_slice(name)
        if tuple(tensor.get_shape()) != shape or tensor.get_dtype() not in ("F32", "F16", "BF16"):
            raise ValueError(f"{path}: {name} is {tensor.get_dtype()} {tensor.get_shape()}; config.json requires F32, "
                             f"F16 or BF16 {list(shape)}")
        return tensor[slices or (slice(None),)]


def weight_files(folder):
    """{name of a tensor: its safetensors file}. Of an index only the names of the files are used."""
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() or single.is_symlink():          # takes precedence, as in transformers
        names = [single.name]
    elif index.exists() or index.is_symlink():
        names = read_json(index).get("weight_map")
        names = list(names.values()) if isinstance(names, dict) else [names]
        for name in names or [None]:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{index}: weight_map must map tensors to safetensors files of its own folder, not to "
                                 f"{one_line(repr(name), 80)}; download it again")
    else:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        why = (f"; {pickles[0]} is a pickle, which can run code when opened; if you trust it, convert it once: pip "
               f"""install transformers && python -c "f = {str(folder)!r}; import transformers; transformers."""
               """AutoModelForCausalLM.from_pretrained(f, dtype='auto').save_pretrained(f)\"""" if pickles else "")
        raise FileNotFoundError(f"{folder}: no model.safetensors{why}")
    files = {}
    for path in [folder / name for name in sorted(set(names))]:
        try:
            with safe_open(check_file(path), "pt") as file:
                tensors = file.keys()
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); download it again") from None
        for name in tensors:
            if name in files:
                raise ValueError(f"{path} and {files[name].name} both contain {name}; download them again")
            files[name] = path
    return files


def untie(config, files):
    """The configuration without tied embeddings, if the stored lm_head differs; transformers then uses it too.

    files: from `weight_files`."""
    if not config.tied_embeddings or EMBEDDING not in files or HEAD not in files:
        return config
    with safe_open(files[EMBEDDING], "pt") as first, safe_open(files[HEAD], "pt") as second:
        embedding, head = first.get_slice(EMBEDDING), second.get_slice(HEAD)
        rows = 4096                             # compared in parts, to save memory
        same = embedding.get_shape() == head.get_shape() and all(
            torch.equal(embedding[i:i + rows].float(), head[i:i + rows].float())
            for i in range(0, embedding.get_shape()[0], rows))
    return config if same else replace(config, tied_embeddings=False)


# ---------------------------------------------------------------------------------------------------------- fingerprint

READ = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WHOLE, BLOCK, BLOCKS = 2**20, 2**12, 8          # bytes; of a tensor larger than WHOLE, only BLOCKS blocks are hashed


def fingerprint(name):
    """Identifies a checkpoint by its content: {"weights" or a file's name: hash}. Takes seconds even for 70B.

    The weights' hash covers every tensor's name, type, shape and bytes; of a large tensor's bytes only eight evenly
    spread blocks. Any training changes it; a change of a single row of a large matrix may not. How the tensors are
    distributed over files does not matter."""
    folder = checkpoint_folder(name)
    hashes = {file: short_hash((folder / file).read_bytes()) for file in READ if (folder / file).is_file()}
    weights = hashlib.sha256()
    for tensor, path in sorted(weight_files(folder).items()):
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))[tensor]
            first, last = header["data_offsets"]
            weights.update(json.dumps([tensor, header["dtype"], header["shape"]]).encode())
            blocks = [(first, last - first)] if last - first <= WHOLE else [
                (first + i * (last - first - BLOCK) // (BLOCKS - 1), BLOCK) for i in range(BLOCKS)]
            for offset, size in blocks:
                file.seek(start + offset)
                weights.update(file.read(size))
    return hashes | {"weights": weights.hexdigest()[:16]}
