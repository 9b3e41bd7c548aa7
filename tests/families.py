"""Tiny models of transformers with random weights, of families that our engine does not have."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tables import facts, rows

GROUPS = """
SIZES | hidden_size=32 intermediate_size=48 num_hidden_layers=3 num_attention_heads=4 \
    num_key_value_heads=2 vocab_size=96 max_position_embeddings=256 \
    pad_token_id=0 bos_token_id=1 eos_token_id=null
WINDOWS | sliding_window=6 \
    layer_types=["sliding_attention","full_attention","sliding_attention"]
EXPERTS | num_experts=4 num_local_experts=4 n_routed_experts=4 num_experts_per_tok=2 \
    moe_intermediate_size=24
LATENT | num_key_value_heads=4 q_lora_rank=16 kv_lora_rank=16 qk_nope_head_dim=8 \
    qk_rope_head_dim=4 v_head_dim=12 qk_head_dim=12 head_dim=4
"""
GROUPS = {name: facts(words) for name, words in rows(GROUPS)}
SIZES, WINDOWS, EXPERTS, _ = GROUPS.values()
FAMILIES = """
gemma2 | head_dim=12 query_pre_attn_scalar=12 sliding_window=6
gemma3_text | SIZES WINDOWS head_dim=12 query_pre_attn_scalar=12
gemma4_text | SIZES WINDOWS head_dim=12 query_pre_attn_scalar=12 global_head_dim=16 \
    hidden_size_per_layer_input=8 vocab_size_per_layer_input=96
phi
phi3
olmo2
olmo3 | WINDOWS
granite | logits_scaling=3.0
cohere | logit_scale=0.3
cohere2 | WINDOWS
qwen3_moe | EXPERTS
gpt_oss | WINDOWS EXPERTS
opt | ffn_dim=48 word_embed_proj_dim=32
gpt2
gptj | rotary_dim=4
gpt_neox
falcon
mpt | d_model=32
deepseek_v3 | LATENT EXPERTS n_group=1 topk_group=1
llama4_text | EXPERTS head_dim=8 attention_chunk_size=8
falcon_h1 | mamba_d_ssm=64 mamba_n_heads=8 mamba_d_head=8 mamba_n_groups=1 mamba_d_state=8 \
    mamba_chunk_size=8 head_dim=8
qwen3_next | EXPERTS layer_types=["linear_attention","full_attention","full_attention"] \
    head_dim=8 linear_num_key_heads=2 linear_num_value_heads=4 \
    linear_key_head_dim=8 linear_value_head_dim=8
bert | is_decoder=true
bloom
dots3_note_text | LATENT EXPERTS sliding_window=6 use_dsa=false n_shared_experts=1 n_group=1 \
    topk_group=1 layer_types=["sliding_attention","full_attention","full_attention"] \
    mlp_layer_types=["dense","sparse","sparse"]
inkling_text | EXPERTS layer_types=["hybrid_sliding","hybrid","hybrid_sliding"] head_dim=8 \
    swa_num_attention_heads=4 swa_num_key_value_heads=2 swa_head_dim=8 sliding_window_size=6 \
    d_rel=4 rel_extent=16 n_shared_experts=1
lfm2 | layer_types=["conv","full_attention","full_attention"]
"""
FAMILIES = {name: facts(" ".join(words), GROUPS) for name, *words in rows(FAMILIES)}
# A layer with heads of another number.
other = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=12)
FAMILIES["dots3_note_text"]["per_layer_config"] = {0: other}
VISION = facts("""hidden_size=16 intermediate_size=16 num_hidden_layers=1 num_attention_heads=2
    image_size=16 patch_size=8""")
for name in "gemma3", "gemma4":
    FAMILIES[name] = dict(text_config=FAMILIES[f"{name}_text"], vision_config=VISION)
# Their query projection cannot be masked head by head.
NO_QUERY = """bert bloom phi3 olmo2 olmo3 gpt2 gpt_neox falcon mpt deepseek_v3 qwen3_next
    dots3_note_text inkling_text""".split()


def random_model(family, **changes):
    torch.default_generator.manual_seed(1)  # torch's own also notes a seed for each GPU, slowly
    facts = FAMILIES.get(family, {}) | changes
    if "text_config" not in facts:
        facts = SIZES | facts
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **facts))
    for name, p in model.named_parameters():
        p.data.normal_(1 if p.ndim == 1 and "weight" in name else 0, 0.2)
    return model.eval()


def left_padded(prompts):
    """Prompts as `generate` of transformers reads them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[-1] * (longest - len(p)) + p for p in prompts])
    return dict(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long())


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
        a = model.head_places[layer]
        projection = other.get_submodule(names[a.projections["output"]])
        weight = next(projection.parameters()).data
        if type(projection).__name__ == "Conv1D":
            weight = weight.T
        weight.unflatten(1, (a.heads, -1))[:, head] = 0  # [D, H·K]
    return other
