#!/usr/bin/env bash
# lm-eval 0.4.13: `--use_cache FILE` answers for a second model with the answers of the first.
#
# The key of an answer is the request alone: its kind, prompt and stop texts. Model, revision,
# precision and decoding method are not in it, nor in the file's name. Two runs that compare models
# with one FILE give the same scores, and the second never calls its model.
#
# Seen:
#     first model: exact match 1.0, 2 calls
#     second model, same file: exact match 1.0, 0 calls
#     second model, no file: exact match 0.0, 2 calls
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 lm-eval==0.4.13 datasets==5.2.0
cd "$folder"
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1 LOGLEVEL=ERROR
cat > capitals.yaml <<'END'
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 4}
END
cat > capitals.jsonl <<'END'
{"question": "What is the capital of France?", "answer": "Paris"}
{"question": "Where is the Louvre?", "answer": "Paris"}
END
venv/bin/python - <<'END'
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager


class Says(LM):
    """A model that always gives one answer."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.calls = 0

    def generate_until(self, requests):
        self.calls += len(requests)
        return [self.answer] * len(requests)

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluate(answer, **options):
    model = Says(answer)
    tasks = TaskManager(include_path=".", include_defaults=False)
    options |= dict(tasks=["capitals"], task_manager=tasks, bootstrap_iters=0)
    results = simple_evaluate(model, **options)["results"]["capitals"]
    return results["exact_match,none"], model.calls


runs = {
    "first model": evaluate("Paris", use_cache="answers"),
    "second model, same file": evaluate("Rome", use_cache="answers"),
    "second model, no file": evaluate("Rome"),
}
for name, (score, calls) in runs.items():
    print(f"{name}: exact match {score}, {calls} calls")
assert [*runs.values()] == [(1, 2), (1, 0), (0, 2)]
END
