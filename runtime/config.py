"""Reads config.json into a `Config`, and computes the rotary frequencies."""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from runtime.files import one_line, read_json

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

SMALL = 2_000_000_000  # bytes of weights up to which a CPU computes in float32 by default
HUGE = 10**12  # the largest number in a field


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
    rope_scaling: dict | None  # {"rope_type": a key of SCALINGS, its fields}, or None
    qkv_bias: bool  # Qwen2 yes; Llama, Qwen3 with attention_bias
    o_bias: bool  # Llama and Qwen3 with attention_bias, as ITI's models
    qk_norm: bool  # Qwen3 yes
    tied_embeddings: bool
    windows: tuple[int | None, ...]  # of each layer: keys that a query sees, or None for all
    max_positions: int
    dtype: torch.dtype | None  # None: config.json does not say; that of the weights

    @classmethod
    def from_checkpoint(cls, folder):
        """Read config.json as transformers 5 does. ValueError for missing or unsupported fields."""
        path = Path(folder) / "config.json"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing; convert a .gguf file (python -m integrations.gguf FILE OUT), "
                "and merge a LoRA adapter into its model (peft: merge_and_unload)"
            )
        c = read_json(path)
        model_type = field(c, path, "model_type", [*FAMILIES])
        c = DEFAULTS | FAMILIES[model_type] | c
        need = partial(field, c, path)
        need("hidden_act", ["silu", "swish"])
        need("mlp_bias", [False])
        need("is_causal", [True])
        need("quantization_config", [None, {}])
        d_model = need("hidden_size", int)
        n_heads = need("num_attention_heads", int)
        n_kv_heads = need("num_key_value_heads", int, null=n_heads)
        head_dim = need("head_dim", int, null=d_model // n_heads)
        if n_heads % n_kv_heads or head_dim % 2 or head_dim < 2:
            raise ValueError(
                f"{path}: {n_heads} heads of width {head_dim} with {n_kv_heads} key/value heads; "
                "the number of heads must be a multiple of the latter, and the width must be even"
            )
        # As in transformers. Qwen2 always has biases of q, k and v, and never one of o.
        bias = need("attention_bias", bool) and model_type in ("llama", "qwen3")
        max_positions = need("max_position_embeddings", int)
        rope_theta, rope_scaling = read_rope(c, path, max_positions)
        dtype = c.get("dtype") or c.get("torch_dtype")
        return cls(
            model_type=model_type,
            vocab_size=need("vocab_size", int),
            d_model=d_model,
            d_ff=need("intermediate_size", int),
            n_layers=need("num_hidden_layers", int),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_eps=float(need("rms_norm_eps", float)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            qkv_bias=bias or model_type == "qwen2",
            o_bias=bias,
            qk_norm=model_type == "qwen3",
            tied_embeddings=need("tie_word_embeddings", bool),
            windows=read_windows(c, path),
            max_positions=stretched(max_positions, rope_scaling),
            dtype=dtype and find_dtype(dtype, path),
        )


# transformers' values of absent fields, but not of sizes that every checkpoint has.
DEFAULTS = dict(
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    is_causal=True,
    tie_word_embeddings=False,
    use_sliding_window=False,
    max_window_layers=28,
    rope_theta=10_000.0,
    partial_rotary_factor=1,
)
FAMILIES = {
    "llama": {},
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": dict(num_key_value_heads=32, sliding_window=4096),
    "qwen3": dict(num_key_value_heads=32, sliding_window=4096, head_dim=128),
}

KINDS = {
    int: f"a whole number from 1 to {HUGE}",
    float: f"a positive number up to {HUGE}",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
TRAINED = "original_max_position_embeddings"
SCALINGS = {  # rope_type → its fields and their kinds
    "default": {},
    "linear": {"factor": float},
    "llama3": {"factor": float, "low_freq_factor": float, "high_freq_factor": float, TRAINED: int},
}


def field(fields, where, key, kind, null=...):
    """fields[key]. ValueError if it is not of that kind, one of KINDS or a list of all values.

    null: the value of a field that is null or absent; `...`: it is required."""
    value = fields.get(key)
    if value is None and null is not ...:
        return null
    if isinstance(kind, list):
        valid = value in kind
        expected = " or ".join(map(json.dumps, kind))
        if key != "dtype":
            expected += " (HFModel, or --transformers, decodes with others)"
    else:
        valid = type(value) is kind or (type(value), kind) == (int, float)
        if kind in (int, float):
            valid = valid and 0 < value <= HUGE
        expected = KINDS[kind]
    if not valid:
        present = one_line(json.dumps(value), 80) if key in fields else "missing"
        raise ValueError(f"{where}: {key} is {present}; it must be {expected}")
    return value


def default_dtype(folder, device):
    """The dtype in which a checkpoint computes by default; None: its own.

    On a CPU, float32 for models of fewer than a billion parameters that are not quantized."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    quantized = read_json(folder / "config.json").get("quantization_config")
    is_cpu = torch.device(device).type == "cpu"
    return torch.float32 if is_cpu and stored < SMALL and not quantized else None


def find_dtype(dtype, where="arguments"):
    """A name or a dtype of torch → the dtype. ValueError if weights cannot have it."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES[field({"dtype": name}, where, "dtype", [*DTYPES])]


def read_rope(c, path, max_positions):
    """(base of the rotary frequencies, `rope_scaling` for Config)."""
    key = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"
    inner = field({key: c.get(key) or {}}, path, key, dict)
    for name, value in inner.items():
        if isinstance(value, dict):
            raise ValueError(
                f"{path}: {key} has parameters of its own for {name}; HFModel, or --transformers, "
                "decodes with them"
            )
    rope = {
        "rope_type": inner.get("type", "default"),
        "rope_theta": c["rope_theta"],
        TRAINED: max_positions,
        "partial_rotary_factor": c["partial_rotary_factor"],
    } | inner
    rope[TRAINED] = c.get(TRAINED, rope[TRAINED])  # the outer one takes precedence
    need = partial(field, rope, f"{path}: {key}")
    need("partial_rotary_factor", [1], null=1)
    rope_type = need("rope_type", [*SCALINGS])
    theta = float(need("rope_theta", float))
    scaling = {name: need(name, kind) for name, kind in SCALINGS[rope_type].items()}
    low, high = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", 1)
    if low >= high:
        raise ValueError(
            f"{path}: {key}: low_freq_factor {low} must be below high_freq_factor {high}"
        )
    return theta, {"rope_type": rope_type} | scaling if scaling else None


def stretched(length, scaling):
    """The context of a model with this `max_position_embeddings`, which linear and dynamic scaling
    multiply by their factor. Yarn may have multiplied it already, the other kinds have.

    scaling: rotary scaling by a configuration, or None."""
    scaling = scaling or {}
    factor = scaling.get("factor")
    if type(factor) not in (int, float) or not factor < HUGE:
        return length
    trained = {"linear": length, "dynamic": length, "yarn": scaling.get(TRAINED) or length}
    return max(length, int(trained.get(scaling.get("rope_type"), 0) * factor))


def read_windows(c, path):
    """The window of each layer. Mistral's applies if it is a number, Qwen's if
    `use_sliding_window` is true."""
    need = partial(field, c, path)
    n_layers = c["num_hidden_layers"]
    family = c["model_type"]
    is_windowed = family == "mistral" or (family != "llama" and need("use_sliding_window", bool))
    window = need("sliding_window", int, null=None) if is_windowed else None
    if family in ("llama", "mistral"):
        return (window,) * n_layers
    full, sliding = "full_attention", "sliding_attention"
    first = c["max_window_layers"]
    if first != 0:
        need("max_window_layers", int)
    default = [sliding if window and i >= first else full for i in range(n_layers)]
    kinds = need("layer_types", list, null=default)
    known = [full, sliding] if window else [full]
    if len(kinds) != n_layers or any(kind not in known for kind in kinds):
        raise ValueError(
            f"{path}: layer_types is {one_line(kinds, 80)}; with sliding_window {window} "
            f"it must be {n_layers} times {' or '.join(known)}"
        )
    return tuple(window if kind == sliding else None for kind in kinds)


def rope_frequencies(c):
    """Angle per position of each rotary pair, [K/2] float32.

    Operations and order are transformers': at position 4,000 one bit shows in the logits.
    `linear` slows down all pairs, `llama3` only those of long wavelengths."""
    f = 1 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    scaling = c.rope_scaling
    if scaling is None:
        return f
    if scaling["rope_type"] == "linear":
        return f / scaling["factor"]
    factor, low, high, trained = (scaling[name] for name in SCALINGS["llama3"])
    wavelength = 2 * math.pi / f
    blend = (trained / wavelength - low) / (high - low)
    between = (1 - blend) * f / factor + blend * f
    slowed = (f / factor).where(wavelength > trained / low, between)
    return f.where(wavelength < trained / high, slowed)
