"""A checkpoint: its name → its folder, downloaded from the Hugging Face hub if need be → weights.

HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT mean what they mean to every user of huggingface_hub."""

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

from runtime.config import field
from runtime.files import brief, check_file, one_line, read_json, short_hash

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def checkpoint_folder(name, weights=True):
    """A folder as it is; a hub id ("owner/name") as the folder of its snapshot, with or without the weights.

    ValueError, FileNotFoundError or OSError, one line each, when there is nothing to return."""
    name, folder = str(name), Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if name and folder.exists():
        raise ValueError(f"{name} is a file: give the folder that holds config.json, tokenizer.json and the weights")
    if not HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"{name!r} is neither a folder here nor a hub id; a hub id reads owner/name, "
                                "for example meta-llama/Meta-Llama-3-8B-Instruct")
    return download(name, ["*.json", "*.jinja"] + ["*.safetensors"] * weights)


def download(name, patterns):
    """One line for everything that can go wrong between here and the hub."""
    page = f"{constants.ENDPOINT}/{name}"
    try:
        # Llama and Mistral repositories hold the weights twice: again in original/, or as consolidated*.safetensors.
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except errors.GatedRepoError:
        problem = f"{name} is gated: accept its terms at {page}, then run `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = (f"{name}: no such folder here and no such model on the hub ({page}); check the spelling, "
                   "or run `hf auth login` or set HF_TOKEN if it is private")
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is no hub id: {one_line(error)}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            problem = f"{name} is not wholly in the cache and HF_HUB_OFFLINE is set: unset it, or give a folder"
        else:
            problem = (f"{name} is not wholly in the cache and the hub could not be reached: check the connection, "
                       f"or give a folder ({one_line(error.__cause__ or error)})")
    except Exception as error:      # whatever the network library raises half-way through a file
        problem = f"downloading {name} failed: {one_line(error)}; what has arrived is kept, so run the command again"
    raise OSError(problem)


# -------------------------------------------------------------------------------------------------------------- loading

NOT_WEIGHTS = ("rotary_emb.inv_freq",)          # buffers that old checkpoints store


def stored(c, shard):
    """{parameter: [(the checkpoint's name, its whole shape, the slices that this rank reads), …]}.

    A merged matrix has several, one below the other. q, k, v, gate and up are split by rows of [out, in], o and down by
    columns, embedding and head by vocabulary; what has no slices every rank has whole."""
    D, K, whole = c.d_model, c.head_dim, slice(None)

    def share(n, width=1, copies=False):
        part = shard.part(n, copies)
        return slice(part.start * width, part.stop * width)

    heads, kv_heads = share(c.n_heads, K), share(c.n_kv_heads, K, copies=True)
    vocab, ff = share(c.vocab_size), share(c.d_ff)
    qkv = [("q_proj", c.n_heads * K, heads), *((name, c.n_kv_heads * K, kv_heads) for name in ("k_proj", "v_proj"))]
    table = {"embed.weight": [("model.embed_tokens.weight", (c.vocab_size, D), (vocab,))],
             "norm.weight": [("model.norm.weight", (D,), ())]}
    if not c.tied_embeddings:
        table["lm_head.weight"] = [("lm_head.weight", (c.vocab_size, D), (vocab,))]
    for i in range(c.n_layers):
        here, attn, mlp = f"layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        table |= {
            f"{here}.attn_norm.weight": [(f"model.layers.{i}.input_layernorm.weight", (D,), ())],
            f"{here}.mlp_norm.weight": [(f"model.layers.{i}.post_attention_layernorm.weight", (D,), ())],
            f"{here}.attn.qkv.weight": [(f"{attn}.{name}.weight", (n, D), (cut,)) for name, n, cut in qkv],
            f"{here}.attn.o.weight": [(f"{attn}.o_proj.weight", (D, c.n_heads * K), (whole, heads))],
            f"{here}.mlp.gate_up.weight": [(f"{mlp}.{x}_proj.weight", (c.d_ff, D), (ff,)) for x in ("gate", "up")],
            f"{here}.mlp.down.weight": [(f"{mlp}.down_proj.weight", (D, c.d_ff), (whole, ff))]}
        if c.qkv_bias:
            table[f"{here}.attn.qkv.bias"] = [(f"{attn}.{name}.bias", (n,), (cut,)) for name, n, cut in qkv]
        if c.o_bias:
            table[f"{here}.attn.o_bias"] = [(f"{attn}.o_proj.bias", (D,), ())]
        if c.qk_norm:
            table |= {f"{here}.attn.{x}_norm.weight": [(f"{attn}.{x}_norm.weight", (K,), ())] for x in "qk"}
    return table


def named_tensors(model, of=lambda parameter: parameter):
    """{the checkpoint's name: its part of a parameter} of a whole model: views. of: another tensor of that shape."""
    found = {}
    for parameter, pieces in stored(model.config, model.shard).items():
        parts = of(model.get_parameter(parameter)).split([shape[0] for _, shape, _ in pieces])
        found |= {name: part for (name, _, _), part in zip(pieces, parts, strict=True)}
    return found


def load_weights(model, folder, device):
    """Fill the model's parameters from the folder's safetensors files; strict both ways."""
    where, table = weight_files(folder), stored(model.config, model.shard)
    tied = {"lm_head.weight"} if model.config.tied_embeddings else set()
    if tied & set(where) and "model.embed_tokens.weight" not in where:          # the one matrix under its other name
        table["embed.weight"] = [("lm_head.weight", *table["embed.weight"][0][1:])]
    names = {name for pieces in table.values() for name, _, _ in pieces}
    missing = sorted(names - set(where))
    unused = sorted(n for n in set(where) - names - tied if not n.endswith(NOT_WEIGHTS))
    if missing or unused:
        raise ValueError(f"{folder}: missing {brief(missing)}, unused {brief(unused)}; "
                         "do config.json and the safetensors files belong together?")
    # Large matrices go first: the peak of the host's memory is the weights alone.
    for parameter, pieces in sorted(table.items(), key=lambda item: -math.prod(item[1][0][1])):
        module, kind = model.get_submodule(parameter.rpartition(".")[0]), parameter.rpartition(".")[2]
        weight = torch.zeros(getattr(module, kind).shape, dtype=model.dtype, device=device)
        at = 0
        for name, shape, cut in pieces:
            values = read_tensor(where[name], name, shape, cut)
            weight[at:at + len(values)] = values                # the last rank's share of the vocabulary may be shorter
            at += len(values)
        if not torch.isfinite(torch.stack(torch.aminmax(weight))).all():
            raise ValueError(f"{where[name]}: {' or '.join(name for name, _, _ in pieces)} holds values that are not "
                             f"finite in {model.dtype}; load in float32 or fetch the file again")
        setattr(module, kind, nn.Parameter(weight, requires_grad=False))


def read_tensor(path, name, shape, cut):
    """One tensor's slice. One open per tensor gives the file's pages back after each copy."""
    with safe_open(path, "pt") as file:
        piece = file.get_slice(name)
        if tuple(piece.get_shape()) != shape:
            raise ValueError(f"{path}: {name} has shape {piece.get_shape()}, config.json asks for {list(shape)}")
        if piece.get_dtype() not in ("F32", "F16", "BF16"):
            raise ValueError(f"{path}: {name} is stored as {piece.get_dtype()}; known: F32, F16, BF16")
        return piece[cut or (slice(None),)]


def weight_files(folder):
    """Tensor name → safetensors file. Where there is an index, it and its files have to agree."""
    folder = Path(folder)
    single, index, stated = folder / "model.safetensors", folder / "model.safetensors.index.json", None
    if single.exists() or single.is_symlink():          # before the index, as in transformers
        paths = [single]
    elif index.exists() or index.is_symlink():
        stated = field(read_json(index), index, "weight_map", dict, null={})
        for name in stated.values():
            if not isinstance(name, str) or not name.endswith(".safetensors"):
                raise ValueError(f"{index} names {one_line(repr(name), 80)}, which is no safetensors file; "
                                 "fetch it again")
            if Path(name).name != name:
                raise ValueError(f"{index} points outside its folder: {name!r}; this file is not to be trusted")
        if not stated:
            raise ValueError(f"{index} has no weight_map from tensors to files; fetch it again")
        paths = [folder / name for name in sorted(set(stated.values()))]
    else:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        why = (f"; {pickles[0]} is a pickle, which can run code when opened; if you trust it, convert it once: pip "
               f"""install transformers && python -c "f = {str(folder)!r}; import transformers; transformers."""
               """AutoModelForCausalLM.from_pretrained(f, dtype='auto').save_pretrained(f)\"""" if pickles else "")
        raise FileNotFoundError(f"{folder}: no model.safetensors{why}")
    where, twice = {}, []
    for path in paths:
        try:
            with safe_open(check_file(path), "pt") as file:
                names = file.keys()
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); fetch it again") from None
        twice += [name for name in names if name in where]
        where |= dict.fromkeys(names, path)
    if stated is not None:
        missing = [name for name in stated if where.get(name) != folder / stated[name]]
        unlisted = [name for name in where if name not in stated]
        if missing or unlisted or twice:
            raise ValueError(f"{index} and its files disagree: not where it says {brief(missing)}; not in it "
                             f"{brief(unlisted)}; in two files {brief(twice)}; fetch them again")
    return where


def untie(config, where):
    """The configuration, without tied embeddings if another lm_head is stored: transformers uses that one too.

    where: as `weight_files` gives it."""
    pair = ("model.embed_tokens.weight", "lm_head.weight")
    if not config.tied_embeddings or any(name not in where for name in pair):
        return config
    with safe_open(where[pair[0]], "pt") as one, safe_open(where[pair[1]], "pt") as other:
        embed, head = one.get_slice(pair[0]), other.get_slice(pair[1])
        rows = 4096                             # a part at a time: the whole may not fit in memory twice
        same = embed.get_shape() == head.get_shape() and all(
            torch.equal(embed[i:i + rows].float(), head[i:i + rows].float())
            for i in range(0, embed.get_shape()[0], rows))
    return config if same else replace(config, tied_embeddings=False)


# ---------------------------------------------------------------------------------------------------------- fingerprint

READ = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WHOLE, BLOCK, PLACES = 2**20, 2**12, 8          # bytes; tensors up to WHOLE are hashed whole, larger ones at PLACES


def fingerprint(name):
    """What a checkpoint holds → {"weights" or a file that is read: hash}; seconds even for 70B, nothing is loaded.

    The hash of the weights is over every tensor's name, type, shape and bytes; of a large tensor's bytes eight blocks,
    spread evenly. Training moves every tensor everywhere, so it shows; a single row of a large matrix may not. How the
    tensors are divided among files makes no difference."""
    folder = checkpoint_folder(name)
    found = {file: short_hash((folder / file).read_bytes()) for file in READ if (folder / file).is_file()}
    hashed = hashlib.sha256()
    for tensor, path in sorted(weight_files(folder).items()):
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            facts = json.loads(file.read(start - 8))[tensor]
            first, last = facts["data_offsets"]
            hashed.update(json.dumps([tensor, facts["dtype"], facts["shape"]]).encode())
            places = [(first, last - first)] if last - first <= WHOLE else [
                (first + i * (last - first - BLOCK) // (PLACES - 1), BLOCK) for i in range(PLACES)]
            for place, size in places:
                file.seek(start + place)
                hashed.update(file.read(size))
    return found | {"weights": hashed.hexdigest()[:16]}
