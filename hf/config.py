"""Configurations of transformers: reading one, and what the engine needs to know of it."""

from contextlib import contextmanager
from types import SimpleNamespace

import transformers

from runtime.config import stretched
from runtime.errors import InputError, one_line, out_of_memory


def read_config(folder):
    """The configuration of a causal language model, as transformers reads it."""
    with naming(folder):
        c = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if c.is_encoder_decoder or type(c) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"{folder} ({c.model_type}) is not a causal language model of transformers"
        )
    return c


def describe(c):
    """The facts of a configuration of transformers that `HFModel.config` holds. n_heads: of
    the layer with most, as in per_layer_config."""
    c = c.get_text_config(decoder=True)
    layers = c.per_layer_config if getattr(c, "is_heterogeneous", False) else [c]
    length = getattr(c, "max_position_embeddings", None) or getattr(c, "max_seq_len", None)
    scaling = getattr(c, "rope_parameters", None)
    return SimpleNamespace(
        model_type=c.model_type,
        n_layers=c.num_hidden_layers,
        n_heads=max(layer.num_attention_heads for layer in layers),
        d_model=c.hidden_size,
        vocab_size=c.vocab_size,
        max_positions=stretched(length or 2**31, scaling),
        tied_embeddings=getattr(c, "tie_word_embeddings", False),
    )


@contextmanager
def naming(model):
    """Turn an error inside transformers, which may be of any kind, into an InputError that names
    the model."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = one_line(error)
        if not isinstance(error, ValueError | ImportError):
            kind = type(error).__name__
            reason = f"transformers fails ({kind}: {reason}); are its files damaged?"
        raise InputError(f"{model}: {reason}") from error
