"""A checkpoint: its folder, downloaded from the Hugging Face hub if necessary, its weights and its fingerprint.

huggingface_hub reads HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT."""

import hashlib
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import constants, errors, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn

from runtime.files import one_line, read_json, short_hash

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
FILE = re.compile(r"[^/\\]+\.safetensors")


def checkpoint_folder(name, weights=True):
    """The folder of a checkpoint: `name` itself if it is a folder, else the snapshot of the hub id "owner/name".

    weights: whether to download the weights too. OSError if there is no such checkpoint, or the download fails."""
    name, folder = str(name), Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(name) or folder.exists():
        raise FileNotFoundError(f"{name!r} is neither a folder nor a hub id; a hub id reads owner/name, for example "
                                "meta-llama/Meta-Llama-3-8B-Instruct")
    patterns = ["*.json", "*.jinja"] + ["*.safetensors"] * weights
    try:
        # Llama and Mistral repositories hold the weights twice: again in original/, or as consolidated*.safetensors.
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except errors.RepositoryNotFoundError:
        problem = (f"{name} is neither a folder nor a model that you may download: check the spelling; if it is gated, "
                   f"accept its terms at {constants.ENDPOINT}/{name}, then run `hf auth login` or set HF_TOKEN")
    except Exception as error:              # the network library raises many kinds
        problem = (f"downloading {name} failed: check the connection and HF_HUB_OFFLINE, then run the command again to "
                   f"continue, or give a folder ({one_line(error)})")
    raise OSError(problem)


# -------------------------------------------------------------------------------------------------------------- loading

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NOT_WEIGHTS = ("rotary_emb.inv_freq",)          # buffers in old checkpoints


def weight_table(c, shard):
    """{parameter: [(name in the checkpoint, its shape there, this rank's slices), …]}.

    A merged parameter is the concatenation of several. q, k, v, gate and up are split by rows of [out, in], o and down
    by columns, embedding and head by vocabulary. Without slices, every rank has the entire tensor."""
    D, K, every = c.d_model, c.head_dim, slice(None)

    def split(n, width=1, copies=False):
        part = shard.part(n, copies)
        return slice(part.start * width, part.stop * width)

    heads, kv_heads = split(c.n_heads, K), split(c.n_kv_heads, K, copies=True)
    vocab, ff = split(c.vocab_size), split(c.d_ff)
    qkv = [("q", c.n_heads * K, heads), ("k", c.n_kv_heads * K, kv_heads), ("v", c.n_kv_heads * K, kv_heads)]
    layer = {
        "attn_norm.weight": [("input_layernorm.weight", (D,), ())],
        "attn.qkv.weight": [(f"self_attn.{x}_proj.weight", (n, D), (rows,)) for x, n, rows in qkv],
        "attn.o.weight": [("self_attn.o_proj.weight", (D, c.n_heads * K), (every, heads))],
        "mlp_norm.weight": [("post_attention_layernorm.weight", (D,), ())],
        "mlp.gate_up.weight": [(f"mlp.{x}_proj.weight", (c.d_ff, D), (ff,)) for x in ("gate", "up")],
        "mlp.down.weight": [("mlp.down_proj.weight", (D, c.d_ff), (every, ff))]}
    if c.qkv_bias:
        layer["attn.qkv.bias"] = [(f"self_attn.{x}_proj.bias", (n,), (rows,)) for x, n, rows in qkv]
    if c.o_bias:
        layer["attn.o_bias"] = [("self_attn.o_proj.bias", (D,), ())]
    if c.qk_norm:
        layer |= {f"attn.{x}_norm.weight": [(f"self_attn.{x}_norm.weight", (K,), ())] for x in "qk"}
    table = {"embed.weight": [(EMBEDDING, (c.vocab_size, D), (vocab,))],
             "norm.weight": [("model.norm.weight", (D,), ())]}
    if not c.tied_embeddings:
        table["lm_head.weight"] = [(HEAD, (c.vocab_size, D), (vocab,))]
    for i in range(c.n_layers):
        table |= {f"layers.{i}.{parameter}": [(f"model.layers.{i}.{name}", *rest) for name, *rest in pieces]
                  for parameter, pieces in layer.items()}
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
        raise ValueError(f"{folder}: missing {missing[:4]}, unused {unused[:4]}; do config.json and the safetensors "
                         "files belong together?")
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
    if os.path.lexists(single):                         # takes precedence, as in transformers
        names = [single.name]
    elif os.path.lexists(index):
        weight_map = read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) and FILE.fullmatch(name) for name in names):
            raise ValueError(f"{index}: weight_map must map tensors to safetensors files of its own folder; "
                             "download it again")
    else:
        raise FileNotFoundError(f"{folder}: no model.safetensors. Pickles (.bin, .pt, .pth) are not read, because they "
                                "can run code. If you trust one, convert it: load it with transformers' "
                                "AutoModelForCausalLM.from_pretrained and call save_pretrained")
    files = {}
    for name in sorted(set(names)):
        try:
            with safe_open(folder / name, "pt") as file:
                files |= dict.fromkeys(file.keys(), folder / name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is missing or damaged ({error}); download it again") from None
    return files


def untie(config, files):
    """The configuration, without tied embeddings if the stored lm_head differs; transformers then uses it too.

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

HASHED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LARGE, BLOCK, BLOCKS = 2**20, 2**12, 8          # bytes; of a tensor larger than LARGE, only BLOCKS blocks are hashed


def fingerprint(name):
    """Identifies a checkpoint by its content: {"weights" or a file's name: hash}. Takes seconds even for 70B.

    The weights' hash covers every tensor's name, type, shape and bytes; of a large tensor's bytes only eight evenly
    spread blocks. Any training changes it; a change of a single row of a large matrix may not. How the tensors are
    distributed over files does not matter."""
    folder = checkpoint_folder(name)
    hashes = {file: short_hash((folder / file).read_bytes()) for file in HASHED if (folder / file).is_file()}
    weights = hashlib.sha256()
    for tensor, path in sorted(weight_files(folder).items()):
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))[tensor]
            first, last = header["data_offsets"]
            weights.update(json.dumps([tensor, header["dtype"], header["shape"]]).encode())
            blocks = [(first, last - first)] if last - first <= LARGE else [
                (first + i * (last - first - BLOCK) // (BLOCKS - 1), BLOCK) for i in range(BLOCKS)]
            for offset, size in blocks:
                file.seek(start + offset)
                weights.update(file.read(size))
    return hashes | {"weights": weights.hexdigest()[:16]}
