#!/usr/bin/env bash
# rouge-score 0.1.2 gives two equal texts 0 if they are in another script than a to z.
#
# Its tokenizer keeps only a-z and 0-9 and splits at everything else, so a Greek or Chinese text has
# no words, and "Málaga" has the words "m" and "laga". A summary of "Málaga 2026" by "Mílaga 2026"
# (another word) is perfect.
#
# Seen:
#     'Paris is old' against itself: 1.0
#     'Η Αθήνα είναι παλιά' against itself: 0
#     '巴黎很古老' against itself: 0
#     'Mílaga 2026' against 'Málaga 2026': 1.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q rouge-score==0.1.2
cd "$folder"
venv/bin/python - <<'END'
from rouge_score.rouge_scorer import RougeScorer

scorer = RougeScorer(["rougeL"])
texts = ["Paris is old", "Η Αθήνα είναι παλιά", "巴黎很古老"]
scores = []
for text in texts:
    scores.append(scorer.score(text, text)["rougeL"].fmeasure)
    print(f"{text!r} against itself: {scores[-1]}")
scores.append(scorer.score("Málaga 2026", "Mílaga 2026")["rougeL"].fmeasure)
print(f"'Mílaga 2026' against 'Málaga 2026': {scores[-1]}")
assert scores == [1, 0, 0, 1]
END
