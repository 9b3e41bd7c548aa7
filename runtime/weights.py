"""Fills a model from the safetensors files of a checkpoint: the names and shapes of its tensors."""

import re
import warnings
from dataclasses import replace
from functools import partial

import torch
from safetensors import safe_open
from torch import nn

from runtime.errors import InputError

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBEDDING = "model.embed_tokens.weight"
PREFIX = "model."  # absent from a checkpoint of the model without its head
LM_HEAD = "lm_head.weight"
# Before the names of a model in torch.compile, PEFT, DataParallel or a module of one's own.
WRAPPERS = r"^((_orig_mod|base_model\.model|module|transformer)\.)+(?=model\.|lm_head\.)"

# Parameter → its tensors in a checkpoint and their axes. Several tensors are concatenated.
#     D model width          F feed-forward width   V vocabulary
#     H query heads × K      G key/value heads × K  K head width
NAMES = {
    "embed.weight": {EMBEDDING: "VD"},
    "norm.weight": {"model.norm.weight": "D"},
    "lm_head.weight": {LM_HEAD: "VD"},
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


def weight_table(model, spelling=str):
    """{parameter: {name in the checkpoint: (shape, this rank's slices)}}. spelling: of names."""
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
            full_name = f"model.{layer}{stored}" if layer else stored
            table[parameter][spelling(full_name)] = shape, slices
    return table


def named_tensors(model, of=lambda parameter: parameter):
    """{name in the checkpoint: view of a parameter, or of of(parameter)} of a model on one rank."""
    tensors = {}
    for parameter, pieces in weight_table(model).items():
        parts = of(model.get_parameter(parameter)).split([shape[0] for shape, _ in pieces.values()])
        tensors |= zip(pieces, parts)
    return tensors


def load_weights(model, checkpoint, device):
    """Fills the parameters from safetensors. InputError for missing, unused or odd tensors."""
    files = checkpoint.tensors
    stored = partial(stored_name, files=files)
    table = weight_table(model, stored)
    tied = model.config.tied_embeddings
    [(embedding, place)] = table["embed.weight"].items()
    head = stored(LM_HEAD)
    if tied and embedding not in files:  # the matrix may be stored under its other name
        table["embed.weight"] = {head: place}
    names = {name for pieces in table.values() for name in pieces}
    # Old checkpoints store buffers of rotary frequencies.
    unused = {name for name in files.keys() - names if not name.endswith("inv_freq")}
    if tied:
        unused.discard(head)
    check_tensor_names(checkpoint.folder, names | {head}, names - files.keys(), unused)
    dtype = model.dtype
    # Large matrices first: then the peak of the host's memory is the weights alone.
    for parameter, empty in sorted(model.named_parameters(), key=lambda pair: -pair[1].numel()):
        weight = torch.zeros(empty.shape, dtype=dtype, device=device)
        row = 0
        for name, (shape, slices) in table[parameter].items():
            values = read_slice(files[name], name, shape, slices)
            # The last rank may have fewer rows of the vocabulary.
            weight[row : row + len(values)] = values
            row += len(values)
        if not torch.isfinite(torch.stack(torch.aminmax(weight))).all():
            raise InputError(
                f"{files[name]}: {' or '.join(table[parameter])} is not finite in {dtype}; "
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


def untie(config, files):
    """The configuration; as in transformers, without tied embeddings if the stored head differs."""
    names = [stored_name(name, files) for name in (EMBEDDING, LM_HEAD)]
    if not config.tied_embeddings or not files.keys() >= {*names}:
        return config
    embedding, head = (safe_open(files[name], "pt").get_tensor(name) for name in names)
    same = embedding.dtype == head.dtype and torch.equal(embedding, head)
    return replace(config, tied_embeddings=same)
