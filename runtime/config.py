"""Reads config.json into a `Config`, and computes the rotary frequencies."""

import math
from dataclasses import dataclass
from functools import partial

from runtime.errors import InputError, one_line
from runtime.fields import COUNT, LARGEST, POSITIVE, field, located

DTYPES = ("float32", "float16", "bfloat16")
FLOAT32_UP_TO = 2_000_000_000  # bytes of weights, on a CPU, by default
LEAST_PREFIX = 64  # tokens; a pass of its own for fewer costs more than it saves


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
    dtype: str | None  # of DTYPES; None: config.json does not say; that of the weights

    @classmethod
    def from_fields(cls, c, place="config.json"):
        """Of the object in a config.json, read as transformers 5 does. InputError, that begins with
        its place, for missing or unsupported fields."""
        with located(place):
            return read_fields(c)


# One of the values that this engine computes.
supported = partial(field, hint=" (HFModel, or --transformers, decodes with others)")


def read_fields(c):
    """config.json → a `Config`."""
    model_type = supported(c, "model_type", [*FAMILIES])
    c = c | DEFAULTS | FAMILIES[model_type] | c  # an error names the file's fields first
    need = partial(field, c)
    supported(c, "hidden_act", ["silu", "swish"])
    supported(c, "mlp_bias", [False])
    supported(c, "is_causal", [True])
    supported(c, "quantization_config", [None, {}])
    supported(c, "per_layer_config", [None, {}])
    d_model = need("hidden_size", COUNT)
    n_heads = need("num_attention_heads", COUNT)
    n_kv_heads = need("num_key_value_heads", COUNT, null=n_heads)
    head_dim = need("head_dim", COUNT, null=d_model // n_heads)
    if n_heads % n_kv_heads or head_dim % 2 or head_dim < 2:
        raise InputError(
            f"{n_heads} heads of width {head_dim} with {n_kv_heads} key/value heads; "
            "the number of heads must be a multiple of the latter, and the width must be even"
        )
    # As in transformers. Qwen2 always has biases of q, k and v, and never one of o.
    bias = need("attention_bias", "true or false") and model_type in ("llama", "qwen3")
    max_positions = need("max_position_embeddings", COUNT)
    rope_theta, rope_scaling = read_rope(c, max_positions)
    dtype = c.get("dtype") or c.get("torch_dtype")
    return Config(
        model_type=model_type,
        vocab_size=need("vocab_size", COUNT),
        d_model=d_model,
        d_ff=need("intermediate_size", COUNT),
        n_layers=need("num_hidden_layers", COUNT),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        norm_eps=float(need("rms_norm_eps", POSITIVE)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=bias or model_type == "qwen2",
        o_bias=bias,
        qk_norm=model_type == "qwen3",
        tied_embeddings=need("tie_word_embeddings", "true or false"),
        windows=read_windows(c),
        max_positions=stretched(max_positions, rope_scaling),
        dtype=dtype and name_of_dtype(dtype),
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

TRAINED = "original_max_position_embeddings"
SCALINGS = {  # rope_type → its fields and their kinds
    "default": {},
    "linear": {"factor": POSITIVE},
    "llama3": {
        "factor": POSITIVE,
        "low_freq_factor": POSITIVE,
        "high_freq_factor": POSITIVE,
        TRAINED: COUNT,
    },
}


def default_dtype(checkpoint, device):
    """The name of the dtype in which a checkpoint computes by default; None: its own.

    On a CPU, float32 for models of fewer than a billion parameters that are not quantized."""
    stored = sum(path.stat().st_size for path in checkpoint.folder.glob("*.safetensors"))
    quantized = checkpoint.read("config.json").get("quantization_config")
    is_cpu = str(device).startswith("cpu")
    return "float32" if is_cpu and stored < FLOAT32_UP_TO and not quantized else None


def find_dtype(dtype):
    """A name or a dtype of torch → the dtype. InputError if weights cannot have it."""
    import torch  # configurations are read without it

    return getattr(torch, name_of_dtype(dtype))


def name_of_dtype(dtype):
    name = str(dtype).removeprefix("torch.")
    return field({"dtype": name}, "dtype", [*DTYPES])


def read_rope(c, max_positions):
    """(base of the rotary frequencies, `rope_scaling` for Config)."""
    key = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"
    inner = field({key: c.get(key) or {}}, key, "an object")
    for name, value in inner.items():
        if isinstance(value, dict):
            raise InputError(
                f"{key} has parameters of its own for {name}; HFModel, or --transformers, decodes "
                "with them"
            )
    rope = {
        "rope_type": inner.get("type", "default"),
        "rope_theta": c["rope_theta"],
        TRAINED: max_positions,
        "partial_rotary_factor": c["partial_rotary_factor"],
    } | inner
    rope[TRAINED] = c.get(TRAINED, rope[TRAINED])  # the outer one takes precedence
    with located(key):
        supported(rope, "partial_rotary_factor", [1], null=1)
        rope_type = supported(rope, "rope_type", [*SCALINGS])
        theta = float(field(rope, "rope_theta", POSITIVE))
        scaling = {name: field(rope, name, kind) for name, kind in SCALINGS[rope_type].items()}
        low, high = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", 1)
        if low >= high:
            raise InputError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return theta, {"rope_type": rope_type} | scaling if scaling else None


def stretched(length, scaling):
    """The context of a model with this `max_position_embeddings`, which linear and dynamic scaling
    multiply by their factor. Yarn may have multiplied it already, the other kinds have.

    scaling: rotary scaling by a configuration, or None."""
    scaling = scaling or {}
    factor = scaling.get("factor")
    if type(factor) not in (int, float) or not factor < LARGEST:
        return length
    trained = {"linear": length, "dynamic": length, "yarn": scaling.get(TRAINED) or length}
    return max(length, int(trained.get(scaling.get("rope_type"), 0) * factor))


def read_windows(c):
    """The window of each layer. Mistral's applies if it is a number, Qwen's if
    `use_sliding_window` is true."""
    need = partial(field, c)
    n_layers = c["num_hidden_layers"]
    family = c["model_type"]
    is_windowed = family == "mistral"
    if family in ("qwen2", "qwen3"):
        is_windowed = need("use_sliding_window", "true or false")
    window = need("sliding_window", COUNT, null=None) if is_windowed else None
    if family in ("llama", "mistral"):
        return (window,) * n_layers
    full, sliding = "full_attention", "sliding_attention"
    first = need("max_window_layers", "a whole number from 0")
    default = [sliding if window and i >= first else full for i in range(n_layers)]
    kinds = need("layer_types", "a list", null=default)
    known = [full, sliding] if window else [full]
    if len(kinds) != n_layers or any(kind not in known for kind in kinds):
        raise InputError(
            f"layer_types is {one_line(kinds, 80)}; with sliding_window {window} "
            f"it must be {n_layers} times {' or '.join(known)}"
        )
    return tuple(window if kind == sliding else None for kind in kinds)


def rope_frequencies(c):
    """Angle per position of each rotary pair, [K/2] float32.

    Operations and order are transformers': at position 4,000 one bit shows in the logits.
    `linear` slows down all pairs, `llama3` only those of long wavelengths."""
    import torch

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
