"""A checkpoint: its name → its folder, downloaded from the Hugging Face hub if need be → configuration → weights.

HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT mean what they mean to every user of huggingface_hub."""

import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import constants, errors, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn

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


def read_json(path):
    """The object in a JSON file; ValueError, FileNotFoundError or OSError with its path."""
    text = read_text(path)
    try:
        value = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where a JSON object is needed")
    return value


def once(pairs):
    """The entries of a JSON object, none of them twice with different values."""
    entries = dict(pairs)
    for key, value in pairs:
        if entries[key] is not value and entries[key] != value:
            raise ValueError(f"{one_line(json.dumps(key), 60)} appears twice, with different values")
    return entries


def read_text(path):
    try:
        return check_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: its byte {error.start} is {error.object[error.start]:#04x}") from None


def check_file(path):
    """The path, if a file is there to be read; else FileNotFoundError or OSError."""
    path = Path(path)
    if path.is_dir():
        raise OSError(f"{path} is a folder where a file should be")
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a link to {path.readlink()}, which is not there; fetch the file again")
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; check the name, and that its folder is complete")
    return path


def one_line(error, most=300):
    """An error's message without its line breaks, cut where it stops being news."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[:most] + "…"


# --------------------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class Config:
    model_type: str
    vocab_size: int
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict | None                   # how positions are stretched: a row of SCALINGS with values, or None
    qkv_bias: bool                              # Qwen2 yes; Llama and Qwen3 with attention_bias; Mistral no
    o_bias: bool                                # Llama and Qwen3 with attention_bias: where ITI's edit sits
    qk_norm: bool                               # Qwen3 yes
    tied_embeddings: bool
    windows: tuple[int | None, ...]             # one per layer: keys a query may see, itself included; None = all
    max_positions: int
    dtype: torch.dtype

    @classmethod
    def from_checkpoint(cls, folder):
        """Read config.json as transformers 5 reads it, whichever version wrote it.

        What this project cannot compute is refused by name, and so is a value of another kind or out of range."""
        path = Path(folder) / "config.json"
        c = read_json(path)
        model_type = field(c, path, "model_type", str)
        if model_type not in FAMILIES:
            inner = c.get("text_config")
            inner = inner.get("model_type") if isinstance(inner, dict) else None
            refuse(path, "model_type", model_type, FAMILIES, f"; the {inner} model inside it is, in a folder of its own"
                   if isinstance(inner, str) and inner in FAMILIES else "")
        c = DEFAULTS | FAMILIES[model_type] | c
        need = partial(field, c, path)

        if quantization := c.get("quantization_config"):
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
            refuse(path, "quantization", method, ["none (float weights)"])
        if need("hidden_act", str) not in ("silu", "swish"):
            refuse(path, "hidden_act", c["hidden_act"], ["silu"])
        # transformers gives biases to all four projections of Llama and Qwen3 where the configuration says so, to
        # Qwen2's q, k and v whatever it says, and to no others.
        bias = need("attention_bias", bool)
        if bias and model_type == "mistral":
            refuse(path, "attention_bias of mistral", bias, ["false"])
        for key, allowed in (("mlp_bias", False), ("is_causal", True)):
            if need(key, bool) != allowed:
                refuse(path, key, c[key], [str(allowed).lower()])
        dtype = str(c.get("dtype") or c.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            refuse(path, "dtype", dtype, DTYPES)

        d_model, n_heads = need("hidden_size", int, 1, WIDEST), need("num_attention_heads", int, 1, WIDEST)
        n_kv_heads = need("num_key_value_heads", int, 1, n_heads, null=n_heads)
        if n_heads % n_kv_heads:
            raise ValueError(f"{path}: {n_kv_heads} key/value heads (num_key_value_heads) cannot serve {n_heads} heads "
                             "(num_attention_heads) evenly")
        head_dim = need("head_dim", int, 2, WIDEST, null=d_model // n_heads)
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"{path}: a head is {head_dim} wide; rotary embeddings turn pairs, so it must be even")
        n_layers, max_positions = need("num_hidden_layers", int, 1, DEEPEST), need("max_position_embeddings", *LENGTH)
        rope_theta, rope_scaling = read_rope(c, path, max_positions)
        return cls(
            model_type=model_type,
            vocab_size=need("vocab_size", int, 1, 10 * WIDEST),
            d_model=d_model,
            d_ff=need("intermediate_size", int, 1, WIDEST),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_eps=float(need("rms_norm_eps", float, TINY, 1)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            qkv_bias=bias or model_type == "qwen2",
            o_bias=bias and model_type != "qwen2",
            qk_norm=model_type == "qwen3",
            tied_embeddings=need("tie_word_embeddings", bool),
            windows=sliding_windows(c, path, n_layers),
            max_positions=max_positions,
            dtype=DTYPES[dtype],
        )


# What transformers takes where config.json is silent. The sizes that every checkpoint states have no default here.
DEFAULTS = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, is_causal=True, tie_word_embeddings=False,
                use_sliding_window=False, max_window_layers=28, rope_theta=10_000.0)
FAMILIES = {
    "llama": {},
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": dict(num_key_value_heads=32, sliding_window=4096),
    "qwen3": dict(num_key_value_heads=32, sliding_window=4096, head_dim=128),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object",
         list: "a list"}
WIDEST, DEEPEST, LONGEST, TINY, HUGE = 10**6, 10**4, 2**30, 1e-30, 1e30
POSITIVE, LENGTH = (float, TINY, HUGE), (int, 1, LONGEST)
SCALINGS = {                                    # rope_type → the fields it reads: kind, low, high, value of null
    "default": {},
    "linear": {"factor": POSITIVE},
    "llama3": {"factor": POSITIVE, "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE,
               "original_max_position_embeddings": LENGTH},
    "yarn": {"factor": POSITIVE, "beta_fast": (*POSITIVE, 32), "beta_slow": (*POSITIVE, 1), "truncate": (bool,),
             "attention_factor": (*POSITIVE, None), "mscale": (float, 0, HUGE, None),
             "mscale_all_dim": (float, 0, HUGE, None), "original_max_position_embeddings": LENGTH},
}


def field(values, where, key, kind, low=None, high=None, null=...):
    """One field of a configuration, of that kind and low ≤ value ≤ high; `null` where it is null or absent."""
    value = values.get(key)
    if value is None and null is not ...:
        return null
    if (type(value) is kind or (type(value), kind) == (int, float)) and (low is None or low <= value <= high):
        return value
    if key not in values:
        raise ValueError(f"{where}: no {key!r}; is this the configuration of a Llama, Mistral or Qwen model?")
    allowed = KINDS[kind] + (f" from {low} to {high}" if low is not None else "")
    raise ValueError(f"{where}: {key} is {one_line(json.dumps(value), 80)} where {allowed} is needed")


def refuse(where, what, found, known, more=""):
    raise ValueError(f"{where}: {what} {one_line(repr(found), 80)} is not supported{more}; known: {', '.join(known)}")


def read_rope(c, path, max_positions):
    """The base of the rotary frequencies, and how they are scaled: None, or a row of SCALINGS with its values."""
    key = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"
    outside = {k: c[k] for k in ("rope_theta", "partial_rotary_factor") if k in c}
    rope = {"truncate": True, "original_max_position_embeddings": max_positions} | outside | field(
        {key: c.get(key) or {}}, path, key, dict)
    if "original_max_position_embeddings" in c:         # beside the scaling it goes before the one within
        rope["original_max_position_embeddings"] = c["original_max_position_embeddings"]
    if any(isinstance(value, dict) for value in rope.values()):
        refuse(path, key, "that differs from layer to layer", ["one for all layers"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        refuse(path, "rope type", kind, SCALINGS)
    need = partial(field, rope, f"{path}: {key}")
    if need("partial_rotary_factor", float, null=1) != 1:
        refuse(path, "partial_rotary_factor", rope["partial_rotary_factor"], ["1"])
    scaling = {name: need(name, *allowed) for name, allowed in SCALINGS[kind].items()}
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in scaling and scaling[low] >= scaling[high]:
            raise ValueError(f"{path}: {key}: {low} {scaling[low]} must be less than {high} {scaling[high]}")
    theta = float(need("rope_theta", float, 2 if kind == "yarn" else TINY, HUGE))
    return theta, {"rope_type": kind} | scaling if scaling else None


def sliding_windows(c, path, n_layers):
    """One window per layer. Mistral's counts when it is a number; Qwen's only with `use_sliding_window`."""
    need = partial(field, c, path)
    if c["model_type"] == "llama":
        return (None,) * n_layers
    if c["model_type"] == "mistral":
        return (need("sliding_window", *LENGTH, null=None),) * n_layers
    window = need("sliding_window", *LENGTH, null=None) if need("use_sliding_window", bool) else None
    first = need("max_window_layers", int, 0, LONGEST)
    kinds = need("layer_types", list, null=["sliding_attention" if window and layer >= first else "full_attention"
                                            for layer in range(n_layers)])
    known = ("full_attention", "sliding_attention") if window else ("full_attention",)
    if len(kinds) != n_layers or any(kind not in known for kind in kinds):
        raise ValueError(f"{path}: layer_types {one_line(kinds, 80)} must name {' or '.join(known)} for each of "
                         f"{n_layers} layers" + ("" if window else ", since no window is in use"))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rope_frequencies(c):
    """Angle per position of each rotary pair, [K/2] float32, and the number that multiplies every cosine and sine.

    The same operations in the same order as in transformers: at position 4,000 a last bit more or less is seen in the
    logits. `linear` slows all pairs down, `llama3` and `yarn` (arXiv 2309.00071) only those that turn slowly."""
    power = c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    f, s = 1 / power, c.rope_scaling
    if s is None:
        return f, 1.0
    factor, trained = s["factor"], s.get("original_max_position_embeddings")
    if s["rope_type"] == "linear":
        return f / factor, 1.0
    if s["rope_type"] == "llama3":
        low, high, wavelength = s["low_freq_factor"], s["high_freq_factor"], 2 * math.pi / f
        keep = (trained / wavelength - low) / (high - low)
        between = (1 - keep) * f / factor + keep * f
        return f.where(wavelength < trained / high, (f / factor).where(wavelength > trained / low, between)), 1.0

    def pair(turns):                            # the pair that makes so many turns within the trained context
        return c.head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    def spread(mscale=1):
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    low, high = pair(s["beta_fast"]), pair(s["beta_slow"])
    if s["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.head_dim - 1)
    high += 0.001 * (low == high)
    ramp = (torch.arange(c.head_dim // 2).float() - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    f = 1 / (factor * power) * (1 - keep) + f * keep
    both = s["mscale"] and s["mscale_all_dim"]
    scale = spread(s["mscale"]) / spread(s["mscale_all_dim"]) if both else spread()
    return f, float(scale if s["attention_factor"] is None else s["attention_factor"])


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


def brief(names, most=4):
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return shown or "nothing"


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


def short_hash(content):
    return hashlib.sha256(content).hexdigest()[:16]
