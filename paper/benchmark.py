"""A benchmark's runs: each batch of items is decoded with each of them, into its file (runfile.py).

The runs share the keys and values of a batch's prompts, so that a sweep over N and α costs little
more than one run."""

import json
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from tqdm import tqdm

import cli
from model import Transformer
from paper import baselines, runfile, scoring
from paper.tasks import Task, data, prompts
from runtime import files

# Not stored: the data hold them.
PROMPT_FIELDS = ("context", "title", "text", "passages", "without_context")


class Benchmark(NamedTuple):
    task: Task
    n_data: int  # items in the data; `items` may be a part of them
    items: list
    data: list  # a record per file
    demos: list
    demo_record: dict | None
    layout: str | None = None
    template_args: dict | None = None  # arguments of the chat template
    encoded: list = ()  # the token ids of each item, a prompts.Encoded


def load_benchmark(task, args, model=None):
    """The benchmark of a task, by the command line.

    model: a `cli.Checkpoint`; None: without the layout and the token ids of the prompts."""
    items, *rest = data.load_data(task, args.data, args.demos)
    seed = args.sample_seed if args.sample else None
    drawn = data.draw_items(items, args.sample or args.limit, seed)
    bench = Benchmark(task, len(items), drawn, *rest)
    if model is None:
        return bench
    native = "mistral" if model.config.model_type == "mistral" else "chat"
    native = native if model.tokenizer.chat_template else "plain"
    layout = task.layout or args.layout or native
    if layout == "chat" and not model.tokenizer.has_system_turn:
        layout = "user"
    template_args = None
    if layout != "plain":
        template_args = cli.benchmark_template_args(model.tokenizer, args.template_args)
    how = bench.demos, model.tokenizer, layout, template_args
    encoded = [prompts.item_to_ids(task, item, *how) for item in drawn]
    return bench._replace(layout=layout, template_args=template_args, encoded=encoded)


class Run(NamedTuple):
    header: dict  # the first line of its file
    settings: dict  # the arguments of `generate` and `score`
    path: Path


def run_benchmark(bench, runs, model, tokenizer, ranks):
    """Answer the items that the runs' files lack. Returns the lines of each run in the data's
    order; None on other ranks than 0."""
    questions = {e.index: question_of(bench.items[e.index], e) for e in bench.encoded}
    batches = in_batches(bench.encoded, runs[0].header["batch_size"])
    batches += [[]] * (-len(batches) % ranks.replicas)  # for replicas without one at the end

    def lines_of(run, batch, done):
        if all(e.index in done for e in batch):
            return []
        start = time.perf_counter()
        answers = answer(bench, batch, run.header, run.settings, model, tokenizer)
        seconds = {"seconds": round((time.perf_counter() - start) / len(batch), 6)}
        lines = [questions[e.index] | line | seconds for e, line in zip(batch, answers)]
        return [line for line in lines if line["index"] not in done]

    with ExitStack() as stack:
        if ranks.rank == 0:
            for run in runs:
                stack.enter_context(files.locked(run.path))
        done = ranks.share(lambda: [runfile.open_run(r.path, r.header, questions) for r in runs])
        name = runs[0].path.stem if len(runs) == 1 else f"{bench.task.name}, {len(runs)} runs"
        total = len(bench.encoded) * len(runs)
        bar = stack.enter_context(tqdm(total=total, desc=name, unit="ex"))
        bar.update(sum(map(len, done)))
        models = [model, *(run.settings["amateur"] for run in runs if "amateur" in run.settings)]
        for first in range(0, len(batches), ranks.replicas):
            with prompts_read_once(models if len(runs) > 1 else ()):
                for run, lines in zip(runs, done):
                    work = partial(lines_of, run, batches[first + ranks.replica], lines)
                    lines = ranks.gather(work)
                    if lines and ranks.rank == 0:
                        files.append(run.path, lines)
                    bar.update(len(lines))
        if ranks.rank == 0:
            return [runfile.finish(run.path) for run in runs]


@contextmanager
def prompts_read_once(models):
    """Inside, prompts that a model of our own reads again, with no head masked, get the keys and
    values of the first time."""
    with ExitStack() as stack:
        for model in dict.fromkeys(models):
            if isinstance(model, Transformer):
                memory = remembering(model.prefill)
                stack.enter_context(patch.object(model, "prefill", memory))
        yield


def remembering(prefill):
    known = []  # (ids, their cache)

    def prefill_once(ids, cache, head_mask=None, mask="output"):
        if head_mask is not None:
            return prefill(ids, cache, head_mask, mask)
        for read, other in known:
            if torch.equal(read, ids) and torch.equal(other.lengths, cache.lengths):
                for new, old in zip(cache.kv, other.kv):
                    new[..., : cache.P, :] = old[..., : cache.P, :]
                return
        prefill(ids, cache)
        known.append((ids, cache))

    return prefill_once


def in_batches(encoded, size):
    """Batches of items, the longest prompts first."""
    longest_first = sorted(encoded, key=lambda e: -len(e.prompt))
    return [longest_first[start : start + size] for start in range(0, len(encoded), size)]


def question_of(item, encoded):
    """The part of a line that does not depend on the answer."""
    fields = {name: value for name, value in item.items() if name not in PROMPT_FIELDS}
    key = files.short_hash(json.dumps([encoded.prompt, encoded.without_context]).encode())
    fields |= {"prompt_sha256": key, "prompt_tokens": len(encoded.prompt)}
    return json.loads(json.dumps(fields))


def answer(bench, batch, header, settings, model, tokenizer):
    """The answer to each item of a batch, as fields of its line: a text with its ids, alphas and
    entropies; or the scores of the candidates, true ones first."""
    ids = [e.prompt for e in batch]
    settings = dict(settings)
    if settings["method"] == "cad":
        settings["ids_without_context"] = [e.without_context for e in batch]
    if not bench.task.choice:
        out = baselines.generate(
            model,
            ids,
            max_new_tokens=header["max_new_tokens"],
            eos_ids=tokenizer.eos_ids,
            **settings,
        )
        return [
            {
                "prediction": tokenizer.decode(g.ids[:-1] if g.stop == "eos" else g.ids),
                "ids": g.ids,
                "alphas": [round(alpha, 6) for alpha in g.alphas],
                "entropies": [round(entropy, 6) for entropy in g.entropies],
                "stop": g.stop,
            }
            for g in out
        ]
    settings.pop("mask_prompt", None)  # scoring masks every position
    answers = [e.answers for e in batch]
    sums, _ = scoring.loglikelihoods(
        model, ids, answers, renormalise=header["renormalise"], **settings
    )
    lines = []
    for e, scores in zip(batch, sums):
        n_true = bench.items[e.index]["n_true"]
        lines.append(
            {
                "scores_true": scores[:n_true],
                "scores_false": scores[n_true:],
                "merged": e.merged,
                "tokens": sum(map(len, e.answers)),
            }
        )
    return lines
