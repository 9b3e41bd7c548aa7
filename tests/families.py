"""Tiny models of transformers with random weights, of families that our engine does not have."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
WINDOWS = dict(
    sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
)
EXPERTS = dict(
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    qk_head_dim=12,
    head_dim=4,
)
LAYERS = dict(  # a layer with heads of another number
    per_layer_config={0: dict(num_attention_heads=2, num_key_value_heads=2, head_dim=12)},
    layer_types=["sliding_attention", "full_attention", "full_attention"],
    sliding_window=6,
    mlp_layer_types=["dense", "sparse", "sparse"],
    use_dsa=False,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
)
SHORT = dict(  # no tie_word_embeddings
    layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=8,
    head_dim=8,
    d_rel=4,
    rel_extent=16,
    sliding_window_size=6,
    n_shared_experts=1,
)
MIXED = dict(
    layer_types=["linear_attention", "full_attention", "full_attention"],
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
MAMBA = dict(
    mamba_d_ssm=64,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_n_groups=1,
    mamba_d_state=8,
    mamba_chunk_size=8,
    head_dim=8,
)
VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)
GEMMA = SIZES | WINDOWS | dict(head_dim=12, query_pre_attn_scalar=12)
GEMMA4 = GEMMA | dict(
    global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96
)
FAMILIES = {
    "gemma2": dict(head_dim=12, query_pre_attn_scalar=12, sliding_window=6),
    "gemma3": dict(text_config=GEMMA, vision_config=VISION),
    "gemma3_text": GEMMA,
    "gemma4_text": GEMMA4,
    "gemma4": dict(text_config=GEMMA4, vision_config=VISION),
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "granite": dict(logits_scaling=3.0),
    "cohere": dict(logit_scale=0.3),
    "cohere2": WINDOWS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": WINDOWS | EXPERTS,
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "gpt2": {},
    "gptj": dict(rotary_dim=4),
    "gpt_neox": {},
    "falcon": {},
    "mpt": dict(d_model=32),
    "deepseek_v3": LATENT | EXPERTS | dict(n_group=1, topk_group=1),
    "llama4_text": EXPERTS | dict(head_dim=8, attention_chunk_size=8),
    "falcon_h1": MAMBA,
    "qwen3_next": MIXED | EXPERTS,
    "bert": dict(is_decoder=True),
    "bloom": {},
    "dots3_note_text": LATENT | EXPERTS | LAYERS,
    "inkling_text": EXPERTS | SHORT,
    "lfm2": dict(layer_types=["conv", "full_attention", "full_attention"]),
}
# Their query projection cannot be masked head by head.
NO_QUERY = """bert bloom phi3 olmo2 olmo3 gpt2 gpt_neox falcon mpt deepseek_v3 qwen3_next
    dots3_note_text inkling_text""".split()


def random_model(family, **changes):
    torch.manual_seed(1)
    facts = FAMILIES.get(family, {}) | changes
    if "text_config" not in facts:
        facts = SIZES | facts
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **facts))
    for name, p in model.named_parameters():
        p.data.normal_(1 if p.ndim == 1 and "weight" in name else 0, 0.2)
    return model.eval()


class Rounded(torch.nn.Linear):
    """Rounds the activations of a whole batch to 8 bits, as some quantized kernels do."""

    def forward(self, x):
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


def round_together(model):
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Rounded
    return model


def without_heads(model, heads):
    """A copy of the model that an HFModel wraps, with zeros in the heads' columns of its output
    projections."""
    other = copy.deepcopy(model.hf)
    names = {module: name for name, module in model.hf.named_modules()}
    for layer, head in heads:
        a = model.attention[layer]
        projection = other.get_submodule(names[a.projections["output"]])
        weight = next(projection.parameters()).data
        if type(projection).__name__ == "Conv1D":
            weight = weight.T
        weight.unflatten(1, (a.heads, -1))[:, head] = 0  # [D, H·K]
    return other
