#!/usr/bin/env bash
# tokenizers 0.23.3: a special token that is "normalized" is not skipped when ids are decoded.
#
# The first Llama's files mark <s> and </s> so. `skip_special_tokens=True` then leaves them in the
# text whenever the normalizer changes their spelling (as Llama's, which puts a space in front).
#
# Seen:
#     normalized=False: 'the'
#     normalized=True: '<s>the'
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
cd "$folder"
venv/bin/python - <<'END'
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

texts = []
for normalized in False, True:
    core = Tokenizer(models.BPE({"<s>": 0, "▁": 1, "t": 2, "h": 3, "e": 4, "<unk>": 5}, []))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence([decoders.Replace("▁", ""), decoders.Fuse()])
    core.add_special_tokens([AddedToken("<s>", special=True, normalized=normalized)])
    texts.append(core.decode([0, 2, 3, 4], skip_special_tokens=True))
    print(f"normalized={normalized}: {texts[-1]!r}")
assert texts == ["the", "<s>the"]
END
