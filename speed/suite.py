"""Speed of a benchmark: evaluate.py compared with DeCoRe written with transformers.

    python -m speed.suite --shape 0.5b --task nq-swap --data DIR --limit 32

    evaluate     this project: batches of 16 prompts, the longest first
    one by one   as in the authors' code: one prompt at a time, two caches, two passes per token
    batches      the same in evaluate.py's batches, padded on the left

The contestants take turns at each batch, and the ratios are quartiles over the batches. Weights are
random, and the vocabulary is trained on the task's own texts, so that nothing is downloaded. Each
answer has the task's maximum length."""

import json
import sys
from itertools import chain
from operator import eq
from os.path import commonprefix
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer

import cli
from paper import tasks
from paper.tasks import data, prompts
from runtime.errors import InputError
from speed import decode
from speed.decode import origin, quartiles, take_turns
from speed.shapes import SHAPES, random_model

VOCABULARY = 32_000  # tokens, unless the shape has fewer
BATCH = 16  # prompts at once, as evaluate.py by default


def encode(task, items, demos, vocabulary):
    """The prompts' ids in the layout plain, by a vocabulary trained on the items, the longest
    first."""
    core = ByteLevelBPETokenizer()
    texts = [prompts.plain_text(task, item, demos) for item in items]
    core.train_from_iterator(texts, min(VOCABULARY, vocabulary), show_progress=False)
    return sorted((core.encode(text).ids for text in texts), key=len, reverse=True)


def contestants(model, task, shape):
    """{name: a function of a batch of prompts that returns the ids of the answers}.

    Packs the model, as loading does."""
    runs = decode.contestants(model, task.max_new_tokens - 1, ["decore-entropy", "two-pass"], shape)
    batches = runs["two-pass"]

    def one_by_one(batch, tick):
        return [batches([ids], tick)[0] for ids in batch]

    return {"evaluate": runs["decore-entropy"], "one by one": one_by_one, "batches": batches}


def summary(results, batches):
    """Rates and ratios, and how many answers agree with those of evaluate.py."""
    n = sum(map(len, batches))
    seconds, answers, rates, ratios, same = {}, {}, {}, {}, {}
    for name, rounds in results.items():
        answers[name] = list(chain.from_iterable(ids for ids, _ in rounds))
        seconds[name] = np.array([end - start for _, (start, *_, end) in rounds])
        rates[name] = round(n / seconds[name].sum(), 3)
        if name != "evaluate":
            ratios[name] = quartiles(seconds[name] / seconds["evaluate"])
            same[name] = sum(map(eq, answers[name], answers["evaluate"]))
    return dict(
        items=n,
        prompt_tokens=sum(map(len, chain.from_iterable(batches))),
        common_tokens=[len(commonprefix(batch)) for batch in batches],
        examples_per_second=rates,
        faster_than=ratios,
        same_answers=same,
    )


@torch.inference_mode()
def main():
    p = cli.parser(__doc__)
    p.add_argument("--shape", default="0.5b", choices=SHAPES, help="(default: 0.5b)")
    p.add_argument("--task", required=True, metavar="T", help="a task that generates")
    p.add_argument("--data", type=Path, metavar="DIR", help="data and demonstrations")
    p.add_argument("--limit", type=cli.positive, metavar="K", help="the first K items")
    args = p.parse_args()
    task = tasks.find_task(args.task)
    if task.choice:
        raise InputError(f"--task {task.name} scores answers; choose a task that generates")
    shape = SHAPES[args.shape]
    model = random_model(shape)
    items, _, demos, _ = data.load_data(task, args.data)
    ids = encode(task, items[: args.limit], demos, model.config.vocab_size)
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    runs = contestants(model, task, shape)
    take_turns(runs, [[batches[-1][-1][:32]]])  # warm-up
    row = dict(shape=args.shape, task=task.name, new_tokens=task.max_new_tokens)
    row |= summary(take_turns(runs, batches), batches) | origin(model.device, "speed.suite")
    print(json.dumps(row))


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
