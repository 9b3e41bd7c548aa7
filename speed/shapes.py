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
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_scaling=None,
    qkv_bias=True,
    o_bias=False,
    qk_norm=False,
    tied_embeddings=False,
    max_positions=2**20,
    dtype=torch.bfloat16,
)
LLAMA3 = dict(
    model_type="llama", vocab_size=128_256, norm_eps=1e-5, rope_theta=500_000.0, qkv_bias=False
)


def shape(d_model, d_ff, n_layers, n_heads, n_kv_heads, **more):
    return Config(
        d_model=d_model,
        d_ff=d_ff,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        windows=(None,) * n_layers,
        **QWEN2 | more,
    )


SHAPES = {
    "tiny": shape(64, 128, 4, 4, 2, vocab_size=640, head_dim=16, tied_embeddings=True),  # for tests
    "0.5b": shape(896, 4864, 24, 14, 2, head_dim=64, tied_embeddings=True),  # Qwen2-0.5B
    "1.5b": shape(1536, 8960, 28, 12, 2, tied_embeddings=True),  # Qwen2-1.5B
    "3b": shape(2048, 11_008, 36, 16, 2, tied_embeddings=True),  # Qwen2.5-3B
    "7b": shape(3584, 18_944, 28, 28, 4, vocab_size=152_064),  # Qwen2-7B
    "8b": shape(4096, 14_336, 32, 32, 8, **LLAMA3),  # Llama-3-8B
    "70b": shape(8192, 28_672, 80, 64, 8, **LLAMA3),  # Llama-3-70B
}


def random_model(config, device="cpu", dtype=torch.float32):
    """A Transformer with normal weights of standard deviation 0.02; under torchrun, this rank's
    part of one."""
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


def weight_bytes(model):
    """Bytes of a model's weights. Packed layers have buffers instead of parameters."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


def transformers_model(model):
    """The same model in transformers: of a checkpoint loaded again, else with the same weights in
    memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    c = model.config
    if model.folder:
        twin = AutoModelForCausalLM.from_pretrained(model.folder, dtype=model.dtype).to(
            model.device
        )
    else:
        config = AutoConfig.for_model(
            c.model_type,
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=c.d_ff,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.norm_eps,
            max_position_embeddings=c.max_positions,
            rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
            tie_word_embeddings=c.tied_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with torch.device("meta"):
            twin = AutoModelForCausalLM.from_config(
                config, dtype=model.dtype, attn_implementation="sdpa"
            )
        twin.load_state_dict(named_tensors(model), strict=not c.tied_embeddings, assign=True)
        twin.tie_weights()
        # Its buffers are not in the state.
        twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
    twin.generation_config = GenerationConfig()  # no end token, no sampling
    return twin.eval()


def with_shared_weights(twin):
    """A copy of a model of transformers, for hooks of its own. The weights are not copied."""
    return copy.deepcopy(twin, {id(parameter): parameter for parameter in twin.parameters()})
