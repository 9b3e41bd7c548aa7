#!/usr/bin/env bash
# transformers 5.23.0: `prompt_lookup_num_tokens` drafts what followed the earliest match.
#
# The text ends in "1 2", which stands in it twice before: followed by 7 at its beginning, by 8 just
# before the end. The draft is what followed first, 7, however long ago that was. Look-up that
# takes the latest match, as others do, drafts 8: texts that go on as they just did save fewer
# passes here.
#
# Seen:
#     text 1 2 7 7 1 2 8 8 1 2, draft 7 7
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

sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=16)
heads = dict(num_attention_heads=1, num_key_value_heads=1, bos_token_id=None, eos_token_id=None)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
text = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]
read = []
forward = model.forward


def recorded(input_ids, **options):
    read.append(input_ids[0].tolist())
    return forward(input_ids, **options)


model.forward = recorded
options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=2)
ids = torch.tensor([text])
model.generate(ids, attention_mask=torch.ones_like(ids), **options)
draft = read[0][len(text) :]
print("text", *text, end=", ")
print("draft", *draft)
assert draft == [7, 7]
END
