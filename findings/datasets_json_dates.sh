#!/usr/bin/env bash
# datasets 5.2.0 turns texts that look like ISO dates in a JSON file into timestamps.
#
# Question-answering data with {"answer": "2026-11-28"} come back as datetime objects, so the
# reference that a harness prints into a prompt, or compares with a model's answer, is
# "2026-11-28 00:00:00". `features` that call the column a string do not help: the dates are parsed
# first, and become strings with a time. A column in which one row is no date stays as it is.
#
# Seen:
#     all are dates: datetime 2026-11-28 00:00:00
#     one is not: str 2026-11-28
#     with features: str 2026-11-28 00:00:00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
cd "$folder"
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1
venv/bin/python - <<'END'
import json

from datasets import Features, Value, load_dataset


def first(answers, **options):
    with open(f"{len(options)}{answers[1]}.jsonl", "w") as file:
        file.writelines(json.dumps({"answer": answer}) + "\n" for answer in answers)
        name = file.name
    return load_dataset("json", data_files=name, split="train", **options)[0]["answer"]


dates = ["2026-11-28", "1999-01-01"]
cases = {
    "all are dates": first(dates),
    "one is not": first([dates[0], "Lyon"]),
    "with features": first(dates, features=Features(answer=Value("string"))),
}
for name, value in cases.items():
    print(f"{name}: {type(value).__name__} {value}")
assert type(cases["all are dates"]).__name__ == "datetime"
assert cases["one is not"] == "2026-11-28" and cases["with features"] == "2026-11-28 00:00:00"
END
