"""Shapes of published checkpoints, filled with random weights: speed does not depend on their values."""

import torch

from model import Transformer
from runtime.config import Config
from runtime.weights import named_tensors


def llama(d_model, d_ff, n_layers, n_heads, n_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0, **more):
    fields = dict(model_type="llama", vocab_size=vocab_size, d_model=d_model, d_ff=d_ff, n_layers=n_layers,
                  n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=128, norm_eps=1e-5, rope_theta=rope_theta,
                  rope_scaling=None, qkv_bias=False, o_bias=False, qk_norm=False, tied_embeddings=False,
                  windows=(None,) * n_layers, max_positions=8192, dtype=torch.bfloat16)
    return Config(**(fields | more))


def qwen2(*sizes, n_kv_heads, vocab_size=151_936, **more):
    more = dict(model_type="qwen2", norm_eps=1e-6, qkv_bias=True, max_positions=32_768) | more
    return llama(*sizes, n_kv_heads, vocab_size, rope_theta=1_000_000.0, **more)


SHAPES = {
    "tiny": qwen2(64, 128, 4, 4, n_kv_heads=2, vocab_size=640, head_dim=16, tied_embeddings=True),      # for tests
    "0.5b": qwen2(896, 4864, 24, 14, n_kv_heads=2, head_dim=64, tied_embeddings=True),                  # Qwen2-0.5B
    "1.5b": qwen2(1536, 8960, 28, 12, n_kv_heads=2, tied_embeddings=True),                              # Qwen2-1.5B
    "7b": qwen2(3584, 18_944, 28, 28, n_kv_heads=4, vocab_size=152_064),                                # Qwen2-7B
    "8b": llama(4096, 14_336, 32, 32),                                                                  # Llama-3-8B
    "70b": llama(8192, 28_672, 80, 64),                                                                 # Llama-3-70B
}


def random_model(config, device="cpu", dtype=torch.float32):
    """A Transformer with normal weights of standard deviation 0.02."""
    torch.manual_seed(0)
    return Transformer(config, device=device, dtype=dtype).requires_grad_(False).eval()


def spread_heads(config, n=10):
    """n heads, fewer in a tiny model, spread evenly over the layers above the first fifth.

    The lowest of the ten best retrieval heads is in that layer in the median of the models in heads/."""
    first, L = config.n_layers // 5, config.n_layers
    return list(dict.fromkeys((first + i * (L - first) // n, 5 * i % config.n_heads) for i in range(n)))


def transformers_model(model):
    """The same model in transformers. Both share the weights' memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    c = model.config
    config = AutoConfig.for_model(
        c.model_type, vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_positions,
        rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta), tie_word_embeddings=c.tied_embeddings,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    twin.load_state_dict(named_tensors(model), strict=not c.tied_embeddings, assign=True)
    twin.tie_weights()
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)    # its buffers are not in the state
    return twin.eval()
