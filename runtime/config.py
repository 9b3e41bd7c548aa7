"""config.json → `Config`, and the rotary frequencies that follow from it."""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from runtime.files import one_line, read_json


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
