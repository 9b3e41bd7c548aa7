"""hf: the engine over transformers, in the place of `model.Transformer`: other families, mixtures
of experts, quantized weights, layers spread over devices."""

try:
    import transformers  # noqa: F401
except ImportError:
    raise ImportError("hf needs transformers: pip install transformers") from None

from hf.model import HFModel  # noqa: F401
