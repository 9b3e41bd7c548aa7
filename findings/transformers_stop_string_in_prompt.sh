#!/usr/bin/env bash
# transformers 5.23.0: `stop_strings` can match a text that begins in the prompt.
#
# The stop string "\nQ" ends a generation whose first new token is "Q" if the prompt ends with a
# line break: no new text has the stop string, but prompt and answer together do. Harnesses that
# search the new text only go on.
#
# Seen:
#     prompt 'A:\n': 1 new token, 'Q'
#     prompt 'A: ': 8 new tokens, 'QQQQQQQQ'
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
export HF_HUB_OFFLINE=1
venv/bin/python - <<'END'
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
letters = {letter: i for i, letter in enumerate(alphabet)}
core = Tokenizer(models.BPE(letters, []))
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)

sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=len(letters))
heads = dict(num_attention_heads=1, num_key_value_heads=1, bos_token_id=None, eos_token_id=None)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
always = torch.nn.functional.one_hot(torch.tensor(letters["Q"]), len(letters)).float()
model.lm_head.register_forward_hook(lambda *_: always.expand(1, 1, -1))  # it always says Q

lengths = []
for prompt in "A:\n", "A: ":
    inputs = tokenizer(prompt, return_tensors="pt")
    options = dict(stop_strings=["\nQ"], tokenizer=tokenizer, max_new_tokens=8, do_sample=False)
    out = model.generate(inputs.input_ids, pad_token_id=0, **options)
    text = tokenizer.decode(out[0, inputs.input_ids.shape[1] :])
    lengths.append(len(text))
    print(f"prompt {prompt!r}: {len(text)} new token{'s' * (len(text) > 1)}, {text!r}")
assert lengths == [1, 8]
END
