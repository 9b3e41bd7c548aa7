#!/usr/bin/env bash
# transformers 5.23.0: AutoTokenizer ignores the tokenizer class that a Qwen2 folder names.
#
# tokenizer_config.json says PreTrainedTokenizerFast and sets no end token. With the model type
# "llama" that class is loaded; with "qwen2" it is Qwen2Tokenizer, which brings an end token of its
# own, adds it to the vocabulary, and replaces the normalizer. So a chat template that prints
# `eos_token` writes another prompt, though the tokenizer files are the same.
#
# Seen:
#     llama: TokenizersBackend, end token None, 'user: Hi'
#     qwen2: Qwen2Tokenizer, end token <|endoftext|>, 'user: Hi<|endoftext|>'
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
export HF_HUB_OFFLINE=1
venv/bin/python - <<'END'
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
seen = []
for model_type in "llama", "qwen2":
    folder = Path(model_type)
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(dict(model_type=model_type)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [dict(role="user", content="Hi")]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    seen.append((type(tokenizer).__name__, tokenizer.eos_token, text))
    print(f"{model_type}: {seen[-1][0]}, end token {seen[-1][1]}, {text!r}")
assert seen[0][1:] == (None, "user: Hi")
assert seen[1] == ("Qwen2Tokenizer", "<|endoftext|>", "user: Hi<|endoftext|>")
END
