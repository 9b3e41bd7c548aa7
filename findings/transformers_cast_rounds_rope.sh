#!/usr/bin/env bash
# transformers 5.23.0: `model.bfloat16()` rounds the rotary frequencies, loading in bfloat16 does not.
#
# The frequencies (`inv_freq`) are a buffer, and torch casts buffers with the weights;
# `from_pretrained(dtype=torch.bfloat16)` leaves them in float32. Same weights, same dtype, but far
# tokens are rotated by other angles, and a cast back to float32 does not restore them.
#
# Seen:
#     loaded: torch.float32, angles at position 4000 off by at most 0.0000 radians
#     cast: torch.bfloat16, angles at position 4000 off by at most 1.7477 radians
#     cast and back: torch.float32, angles at position 4000 off by at most 1.7477 radians
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

sizes = dict(hidden_size=256, intermediate_size=64, num_hidden_layers=1, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
model.save_pretrained("tiny")


def load(dtype):
    return LlamaForCausalLM.from_pretrained("tiny", dtype=dtype)


models = {
    "loaded": load(torch.bfloat16),
    "cast": load(torch.float32).bfloat16(),
    "cast and back": load(torch.float32).bfloat16().float(),
}
exact = load(torch.float32).model.rotary_emb.inv_freq
errors = []
for name, model in models.items():
    f = model.model.rotary_emb.inv_freq
    errors.append(4000 * (f.float() - exact).abs().max().item())
    print(f"{name}: {f.dtype}, angles at position 4000 off by at most {errors[-1]:.4f} radians")
assert errors[0] == 0 and errors[1] > 1 and errors[2] > 1
END
