"""Models in the shapes of published checkpoints, with random weights: speed does not depend on
them."""

import copy

import torch

from model import Transformer
from runtime.config import Config
from runtime.parallel import Shard, rank_device
from runtime.weights import named_tensors

QWEN2 = dict(
    model_type="qwen2",
    vocab_size=151_936,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=2**20,
)
LLAMA3 = dict(model_type="llama", vocab_size=128_256, rms_norm_eps=1e-5, rope_theta=500_000.0)
TIED = dict(tie_word_embeddings=True)


def shape(d_model, d_ff, n_layers, n_heads, n_kv_heads, **fields):
    """The content of a config.json."""
    return QWEN2 | dict(
        hidden_size=d_model,
        intermediate_size=d_ff,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        **fields,
    )


SHAPES = {
    "tiny": shape(64, 128, 4, 4, 2, vocab_size=640, **TIED),  # for tests
    "0.5b": shape(896, 4864, 24, 14, 2, **TIED),  # Qwen2-0.5B
    "1.5b": shape(1536, 8960, 28, 12, 2, **TIED),  # Qwen2-1.5B
    "3b": shape(2048, 11_008, 36, 16, 2, **TIED),  # Qwen2.5-3B
    "8b": shape(4096, 14_336, 32, 32, 8, **LLAMA3),  # Llama-3-8B
    "70b": shape(8192, 28_672, 80, 64, 8, **LLAMA3),  # Llama-3-70B
}


def random_model(shape, device="cpu", dtype=torch.float32):
    """A Transformer with normal weights of standard deviation 0.02; under torchrun, this rank's
    part of one."""
    config = Config.from_fields(shape)
    torch.manual_seed(0)
    device = rank_device(device)
    shard = Shard.from_environment(device.type)
    return Transformer(config, shard, device, dtype).requires_grad_(False).eval()


def spread_heads(config, n=10):
    """n heads, fewer in a tiny model, spread evenly over the layers above the first fifth.

    The lowest of the ten best retrieval heads is in that layer in the median of the models in
    heads/."""
    first, L = config.n_layers // 5, config.n_layers
    return list(
        dict.fromkeys((first + i * (L - first) // n, 5 * i % config.n_heads) for i in range(n))
    )


def transformers_model(model, shape):
    """The same model in transformers. Random weights are shared; those of a checkpoint are read
    again, as ours may be packed. shape: its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if model.checkpoint:
        folder = model.checkpoint.folder
        hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
        hf_model.generation_config = GenerationConfig()
        return hf_model.to(model.device).eval()
    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    hf_model.load_state_dict(named_tensors(model), strict=False, assign=True)
    hf_model.tie_weights()
    # Its buffers are not in the state.
    hf_model.model.rotary_emb = type(hf_model.model.rotary_emb)(config)
    hf_model.generation_config = GenerationConfig()  # no end token, no sampling
    return hf_model.to(model.device).eval()


def with_shared_weights(hf_model):
    """A copy of a model of transformers, for hooks of its own. The weights are not copied."""
    return copy.deepcopy(hf_model, {id(p): p for p in hf_model.parameters()})
