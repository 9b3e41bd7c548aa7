#!/usr/bin/env bash
# transformers 5.23.0: with dynamic RoPE, logits of a text depend on the text that was read before.
#
# Beyond `max_position_embeddings` the frequencies are stretched for the longest text so far. A
# shorter text resets them, but one of exactly the limit does not, nor does one between the limit
# and the longest: both get the scale of the earlier text. No cache is involved.
#
# Seen (limit 64, after a text of 200 tokens; largest difference from a fresh model's logits):
#     63 tokens: equal
#     64 tokens: differs
#     100 tokens: differs
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
export HF_HUB_OFFLINE=1
venv/bin/python - <<'END'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

rope = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
heads = dict(num_attention_heads=4, num_key_value_heads=4)
config = LlamaConfig(**sizes, **heads, rope_parameters=rope, max_position_embeddings=64)


@torch.no_grad()
def logits(*lengths):
    """Of the last text."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for n in lengths:
        out = model(torch.arange(n)[None] % 64, use_cache=False).logits
    return out


differs = []
for n in 63, 64, 100:
    differs.append(not torch.allclose(logits(n), logits(200, n), atol=1e-5))
    print(f"{n} tokens: {'differs' if differs[-1] else 'equal'}")
assert differs == [False, True, True]
END
