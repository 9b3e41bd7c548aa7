#!/usr/bin/env bash
# datasets 5.2.0 reads a CSV file by guessing types: answers lose zeros, or vanish.
#
# The answers 007 and 12 become the numbers 7 and 12; "None", "NA" and "null" (a word, the sign of
# sodium) become missing values, of which a template makes "None". `keep_default_na=False` and
# `features` keep them.
#
# Seen:
#     guessed: [7, 12] [None, 'Na', None]
#     told: ['007', '12'] ['None', 'Na', 'NA']
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
cd "$folder"
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1
venv/bin/python - <<'END'
from datasets import Features, Value, load_dataset

options = dict(features=Features(answer=Value("string")), keep_default_na=False)
columns = {"numbers": ["007", "12"], "words": ["None", "Na", "NA"]}
for name, answers in columns.items():
    with open(f"{name}.csv", "w") as file:
        file.write("\n".join(["answer", *answers]) + "\n")


def read(**options):
    return [
        load_dataset("csv", data_files=f"{name}.csv", split="train", **options)["answer"][:]
        for name in columns
    ]


guessed, told = read(), read(**options)
print("guessed:", *guessed)
print("told:", *told)
assert guessed == [[7, 12], [None, "Na", None]] and told == [*columns.values()]
END
