"""Reads stored runs and chooses those that tables and figures show.

A *setup* is a method with its N, α, way of masking, amateur and other options; draws of random heads share one setup.
*Conditions* are settings of the task that differ from the paper's: each combination has separate tables. Greedy
decoding from a checkpoint of ITI is the method `iti` of the model that ITI edited."""

import json
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation import judges
from evaluation.runs import read_run
from heads import find_heads, load_scores
from runtime.files import json_lines, short_hash, write
from tasks import find, metrics

METHODS = {"greedy": "greedy", "masked": "masked", "decore-static": "DeCoRe static", "decore-entropy": "DeCoRe entropy",
           "decore-static-lite": "DeCoRe static-lite", "decore-entropy-lite": "DeCoRe entropy-lite", "iti": "ITI",
           "cd": "CD", "cad": "CAD", "dola-low": "DoLa low", "dola-high": "DoLa high", "ad": "Activation Decoding"}
ITI = {"honest_llama3_8B_instruct": "Meta-Llama-3-8B-Instruct",     # checkpoint → the model it was made from
       "honest_llama3_70B_instruct": "Meta-Llama-3-70B-Instruct"}
NOT_FRACTIONS = ("rougeL", "bertscore_f1", "factkb", "entropy")     # the other metrics are reported in per cent
PAPER_ALPHA = 0.5                               # of DeCoRe static
KINDS = {"task": str, "model": str, "method": str, "n": int, "num_heads": int | None, "alpha": int | float | None,
         "heads": list | None, "mask": str | None, "amateur": str | None, "random_heads": str | None,
         "seed": int | None, "dtype": str | None, "demos": dict | None}


class Setup(NamedTuple):
    method: str                 # a key of METHODS
    num_heads: int | None
    alpha: float | None
    mask: str | None            # "output" or "query"
    amateur: str | None
    random_heads: str | None    # their sampler: "uniform" or "published"; None for retrieval heads
    options: str                # the other options that are not the paper's

    def __str__(self):
        parts = (METHODS[self.method], self.num_heads is not None and f"N = {self.num_heads}",
                 self.alpha is not None and f"α = {self.alpha:g}", self.mask == "query" and "query mask",
                 self.amateur and f"amateur {self.amateur}", self.options,
                 self.random_heads and "random heads" + " as published" * (self.random_heads == "published"))
        return ", ".join(part for part in parts if part)


class Run(NamedTuple):
    path: Path
    settings: dict
    model: str
    conditions: str             # "" if they are the paper's
    setup: Setup
    lines: list                 # one dict per example, as stored, in the data's order
    values: list                # one dict of metric values per example; `entropy`, see base_entropies
    means: dict                 # metric → mean, in per cent if it is a rate; only metrics that have values
    intervals: dict             # metric → (low, high), likewise

    @property
    def task(self):
        return self.settings["task"]

    @property
    def title(self):
        return self.model + f", {self.conditions}" * bool(self.conditions)


def describe(settings, iti=ITI):
    """(model, conditions, Setup) of a run's settings."""
    method, model, amateur = settings["method"], Path(settings["model"]).name, settings.get("amateur")
    if amateur and method in ("decore-static", "decore-entropy"):       # the name in older runs
        method += "-lite"
    if method == "greedy" and model in iti:
        model, method = iti[model], "iti"
    if method not in METHODS:
        raise ValueError(f"its method {method!r} is unknown")
    task = find(settings["task"])
    # The paper's runs of DoLa generated with a library that takes the penalty from Qwen2's generation_config.json.
    penalty = 1.05 if method.startswith("dola") and "qwen2" in model.lower() and not task.choice else 1.0
    conditions = {"layout": task.layout or ("mistral" if "mistral" in model.lower() else "chat"),
                  "max_new_tokens": task.max_new_tokens, "template_args": {"enable_thinking": False}}
    options = {"mask_prompt": False, "alpha_cap": None, "scale_alpha": False, "relative_top": None, "info_layer": 24,
               "renormalise": True, "dola_layers": "halves" if task.choice else "transformers",
               "repetition_penalty": penalty, "heads": None}
    heads = [*map(str, settings.get("heads") or [])]
    best = best_heads(amateur or settings["model"], len(heads))
    usual = settings.get("random_heads") or best in (None, {*heads})
    settings = settings | {"repetition_penalty": settings.get("repetition_penalty") or 1.0,
                           "template_args": settings.get("template_args") or None,
                           "heads": None if usual else "of another file"}
    return model, differences(settings, conditions), Setup(
        method, *(settings.get(name) for name in ("num_heads", "alpha", "mask")), amateur and Path(amateur).name,
        settings.get("random_heads"), differences(settings, options))


def differences(settings, paper):
    """The settings that are not the paper's, as a text such as "mask prompt True, alpha cap 0.5"."""
    return ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name, value in paper.items()
                     if settings.get(name) not in (None, value))


@cache
def best_heads(model, n):
    """The n best heads by the file of this model; None without a file."""
    scores = load_scores(file) if (file := find_heads(model)) else None
    return scores and {f"{layer}-{head}" for layer, head in sorted(scores, key=scores.get, reverse=True)[:n]}


# Files

def collect(folder, iti=ITI):
    """(runs, [(path, why it is skipped)]) of a folder and its sub-folders."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    runs, skipped = [], []
    for path in run_files(folder):
        try:
            runs.append(read(path, iti))
        except ValueError as error:
            skipped.append((path, str(error)))
    return runs, skipped


def run_files(folder):
    """The runs in a folder and its subfolders, without the files of judges' verdicts."""
    paths = sorted([*Path(folder).rglob("*.jsonl"), *Path(folder).rglob("*.jsonl.gz")])
    return [path for path in paths if ".judged." not in path.name]


def read(path, iti=ITI):
    """Reads a run file. ValueError if it cannot be reported."""
    settings, lines = read_lines(path)
    task = find(settings["task"])
    if settings.get("version") != task.version:
        raise ValueError(f"made with version {settings.get('version')} of {task.name}, which is now {task.version}")
    if not lines:
        raise ValueError("no examples yet")
    model, conditions, setup = describe(settings, iti)
    lines = judges.judge(lines, path, task)
    entropies = metrics.map_lines(lambda line: np.mean(line["entropies"]) if line.get("entropies") else None, lines)
    values = [row | {"entropy": mean} for row, mean in zip(values_of(path, task, lines), entropies, strict=True)]
    means = {name: scale(name) * mean for name, mean in metrics.summary(values).items() if mean is not None}
    intervals = metrics.interval(values)
    intervals = {name: tuple(scale(name) * end for end in intervals[name]) for name in means}
    return Run(path, settings, model, conditions, setup, lines, values, means, intervals)


def scale(metric):
    return 1 if metric in NOT_FRACTIONS else 100


def read_lines(path):
    """(settings, lines in the data's order) of a run file."""
    settings, lines = read_run(path)
    if settings is None:
        raise ValueError(f"{path}: its first line has no header, so it is not a run of evaluate.py")
    wrong = [name for name, kind in KINDS.items() if not isinstance(settings.get(name), kind)]
    if wrong:
        raise ValueError(f"{path}: its settings lack a valid {', '.join(wrong)}")
    return settings, sorted(lines, key=lambda line: line["index"])


def values_of(path, task, lines):
    """The metric values of each line, a dict each. Values that took long are stored in `.scores.json`."""
    store = path.with_suffix(".scores.json")
    content = [{name: value for name, value in line.items() if name != "place"} for line in lines]
    key = short_hash(json.dumps([task.version, content]).encode())
    for _, entry in json_lines(store) if store.exists() else ():
        if entry.get("key") == key:
            return entry["values"]
    start = time.perf_counter()
    values = metrics.compute(task, lines)
    if not metrics.problems(task) and time.perf_counter() - start > 5:          # seconds
        write(store, [{"key": key, "values": values}])
    return values


# Choosing runs

def group(runs):
    """({model and conditions: [runs in the order of the tables]}, [(path, why it is skipped)]).

    Of several runs of one setup, task and draw, the one with the most examples is taken."""
    chosen, skipped, groups = {}, [], {}
    for run in sorted(runs, key=lambda run: -len(run.lines)):
        first = chosen.setdefault(order(run), run)
        if first is not run:
            skipped.append((run.path, f"the same setup as {first.path}, which has as many examples or more"))
    for run in sorted(chosen.values(), key=order):
        groups.setdefault(run.title, []).append(run)
    return groups, skipped


def order(run):
    """Sort key: the order of METHODS, retrieval heads before random ones, then N, α, task and draw."""
    setup = run.setup
    return (run.title, list(METHODS).index(setup.method), setup.mask or "", setup.amateur or "", setup.options,
            setup.random_heads or "", setup.num_heads or 0, -1e9 if setup.alpha is None else setup.alpha, run.task,
            setup.random_heads and run.settings.get("seed") or 0)


def typical(runs):
    """The runs of one setup per method, way of masking and amateur, for tables and figures that show one of each.

    Retrieval heads; if possible the paper's options and its α; then the N that most runs have."""
    runs = [run for run in runs if not run.setup.random_heads]
    counts, counts_of_n, kinds = Counter(run.setup for run in runs), Counter(run.setup.num_heads for run in runs), {}
    for setup in counts:
        kinds.setdefault((setup.method, setup.mask, setup.amateur), []).append(setup)

    def preference(setup):
        n = setup.num_heads
        return not setup.options, setup.alpha == PAPER_ALPHA, counts_of_n[n], -(n or 0), counts[setup]

    chosen = {max(setups, key=preference) for setups in kinds.values()}
    return [run for run in runs if run.setup in chosen]


def greedy_run(runs, task):
    """The run of greedy decoding on a task, or None."""
    return next((run for run in runs if run.setup.method == "greedy" and run.task == task), None)


def base_entropies(run):
    """The base model's entropy along each text, mean over its tokens, in nats (of `masked`, the masked model's)."""
    return np.array([row["entropy"] for row in run.values if row["entropy"] is not None])
