"""Stored runs: files → `Run`, runs → setups.

A *setup* is a method with its N, α, way of masking and amateur; random draws of one setup are folded together. Greedy
decoding from a checkpoint of ITI is the method `iti` of the model that ITI edited."""

import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from report import significance
from runtime.jsonl import json_lines, write
from tasks import TASKS, judges, metrics
from tasks.runs import prompt_key, read_run

METHODS = {"greedy": "greedy", "masked": "masked", "decore-static": "DeCoRe static", "decore-entropy": "DeCoRe entropy",
           "decore-static-lite": "DeCoRe static-lite", "decore-entropy-lite": "DeCoRe entropy-lite", "iti": "ITI",
           "cd": "CD", "cad": "CAD", "dola-low": "DoLa low", "dola-high": "DoLa high", "ad": "Activation Decoding"}
ITI = {"honest_llama3_8B_instruct": "Meta-Llama-3-8B-Instruct",     # checkpoint → the model it was made from
       "honest_llama3_70B_instruct": "Meta-Llama-3-70B-Instruct"}
USUAL = {"mask_prompt": (None, False), "alpha_cap": (None,), "scale_alpha": (None, False), "relative_top": (None,),
         "dola_layers": (None, "transformers"), "renormalise": (None, True),
         "repetition_penalty": (None, 1.0)}
TIMES_100 = ("rougeL", "bertscore_f1", "factkb", "entropy")         # the others are fractions, shown in per cent
NO_BEST = ("rejection", "memory_match")         # neither much nor little of these is better
PAPER_ALPHA = 0.5                               # of DeCoRe static
LONG = 5                                        # seconds


class Setup(NamedTuple):
    method: str                 # a key of METHODS
    n: int | None               # heads masked
    alpha: float | None
    mask: str | None            # "output" or "query"
    amateur: str | None
    random: str | None          # the sampler of random heads
    variant: str                # what else is not as usual

    def __str__(self):
        parts = (METHODS[self.method], self.n is not None and f"N = {self.n}",
                 self.alpha is not None and f"α = {self.alpha:g}", self.mask == "query" and "query mask",
                 self.amateur and f"amateur {self.amateur}", self.variant,
                 self.random and "random heads" + " as published" * (self.random == "published"))
        return ", ".join(part for part in parts if part)


class Run(NamedTuple):
    path: Path
    settings: dict
    model: str
    setup: Setup
    lines: list                 # one dict per example, as stored, in the data's order
    values: list                # one dict of metric values per example
    means: dict                 # metric → mean
    intervals: dict             # metric → (low, high)

    @property
    def task(self):
        return self.settings["task"]


def last_part(name):
    return str(name).rstrip("/").split("/")[-1]


def setup_of(settings, iti=ITI):
    """(model, Setup) of a run's settings."""
    model, method = last_part(settings["model"]), settings["method"]
    amateur = last_part(settings["amateur"]) if settings.get("amateur") else None
    if amateur and method in ("decore-static", "decore-entropy"):       # as runs were stored that had no other name
        method += "-lite"
    if method == "greedy" and model in iti:
        model, method = iti[model], "iti"
    odd = {name: settings.get(name) for name, values in USUAL.items() if settings.get(name) not in values}
    return model, Setup(method, settings.get("num_heads"), settings.get("alpha"), settings.get("mask"), amateur,
                        settings.get("random_heads"),
                        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in odd.items()))


def values_of(path, task, lines):
    """The metric values of each row. Kept beside the run where they took long: some need a model."""
    store = path.with_suffix(".scores.json")
    digest = hashlib.sha256(json.dumps([task.version, lines]).encode()).hexdigest()
    for _, kept in json_lines(store) if store.exists() else ():
        if isinstance(kept, dict) and kept.get("lines_sha256") == digest:
            return kept["values"]
    left_out, start = [], time.perf_counter()
    values = metrics.score(task, lines, left_out=left_out)
    if not left_out and time.perf_counter() - start > LONG:
        write(store, [{"lines_sha256": digest, "values": values}])
    return values


def read(path, iti=ITI):
    """One run file → Run. ValueError says why it is none."""
    settings, lines = read_lines(path)
    task = TASKS.get(settings["task"])
    if task is None:
        raise ValueError(f"its task {settings['task']!r} is not known here")
    if settings.get("version") != task.version:
        raise ValueError(f"made with version {settings.get('version')} of {task.name}, which is now {task.version}")
    if not lines:
        raise ValueError("no examples yet")
    model, setup = setup_of(settings, iti)
    if setup.method not in METHODS:
        raise ValueError(f"its method {setup.method!r} is not known here")
    metrics.check_rows(task, lines, path)
    lines = [{name: value for name, value in line.items() if name != "line"} for line in lines]
    lines = judges.judge(lines, path, task, SimpleNamespace(judge=False, judge_url=None))
    values = values_of(path, task, lines)
    return Run(path, settings, model, setup, lines, values, metrics.summary(values), metrics.interval(values))


def read_lines(path):
    """(settings, lines in the data's order) of a run; ValueError where the file is none of evaluate.py's."""
    settings, lines = read_run(path)
    if not isinstance(settings, dict) or not {"task", "model", "method", "n"} <= settings.keys():
        raise ValueError("no settings in its first line: no run of evaluate.py")
    if not all(isinstance(line.get("index"), int) for line in lines):
        raise ValueError("rows without index: no run of evaluate.py")
    return settings, sorted(lines, key=lambda line: line["index"])


def collect(folder, iti=ITI):
    """(runs, [(path, why it was left out)]) of a folder, sub-folders included."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    runs, left_out = [], []
    for path in sorted([*Path(folder).rglob("*.jsonl"), *Path(folder).rglob("*.jsonl.gz")]):
        if path.stem.endswith(".judged"):
            continue
        try:
            runs.append(read(path, iti))
        except ValueError as error:
            left_out.append((path, str(error)))
    return runs, left_out


def order(setup):
    return (list(METHODS).index(setup.method), setup.mask or "", setup.amateur or "", setup.variant, setup.random or "",
            setup.n or 0, -1e9 if setup.alpha is None else setup.alpha)


def grouped(runs):
    """({model: {setup: {task: [runs, one per random draw]}}}, [(path, why it was left out)]).

    One run per cell and draw: the one with the most examples."""
    chosen, left_out = {}, []
    for run in sorted(runs, key=lambda run: -len(run.lines)):
        key = run.model, run.setup, run.task, run.settings.get("seed") if run.setup.random else None
        if key in chosen:
            left_out.append((run.path, f"the same setup as {chosen[key].path}, which has as many examples or more"))
        else:
            chosen[key] = run
    found = {}
    for key in sorted(chosen, key=lambda key: (key[0], order(key[1]), key[2], key[3] or 0)):
        model, setup, task, _ = key
        found.setdefault(model, {}).setdefault(setup, {}).setdefault(task, []).append(chosen[key])
    return found, left_out


def greedy_run(setups, task):
    return next((by_task[task][0] for setup, by_task in setups.items() if setup.method == "greedy" and task in by_task),
                None)


def typical(setups):
    """One setup per method and way of masking, for where only one can be shown: retrieval heads, the paper's α where
    it is among them, the N (else the α) that most of the runs have, the smaller one of two."""
    chosen = []
    for kind in dict.fromkeys((setup.method, setup.mask) for setup in setups):
        plain = [setup for setup in setups if (setup.method, setup.mask) == kind
                 and not setup.random and not setup.variant]
        plain = [setup for setup in plain if setup.alpha == PAPER_ALPHA] or plain
        if plain:
            chosen.append(max(plain, key=lambda setup: (n_runs(setups, setup.n), -(setup.n or 0), len(setups[setup]))))
    return chosen


def n_runs(setups, n):
    """How many runs have this N, random heads aside."""
    return sum(len(by_task) for setup, by_task in setups.items() if setup.n == n and not setup.random)


# One run in numbers

def scale(metric):
    return 1 if metric in TIMES_100 else 100


def mean_of(run, metric):
    """In per cent where it is a rate; None without the metric."""
    mean = run.means.get(metric)
    return None if mean is None else mean * scale(metric)


def base_entropies(run):
    """Mean over its tokens of the base model's entropy along each text, in nats; of `masked`, the masked model's."""
    return np.array([np.mean(line["entropies"]) for line in run.lines if line.get("entropies")])


def n_scored(run, metric):
    """Items that have a value of the metric: some demonstrate, some have nothing to remember."""
    return sum(row.get(metric) is not None for row in run.values) or len(run.lines)


def won_and_lost(run, greedy, metric):
    """How often the run is better and worse than greedy on the same prompt, and McNemar's exact p. None for a metric
    that examples do not have by themselves, or without common examples."""
    ours, theirs = ({(line["index"], prompt_key(line)): row[metric]
                     for line, row in zip(one.lines, one.values, strict=True) if row.get(metric) is not None}
                    for one in (run, greedy))
    common = ours.keys() & theirs.keys()
    if not common or metric in NO_BEST:
        return None
    won, lost = sum(ours[key] > theirs[key] for key in common), sum(ours[key] < theirs[key] for key in common)
    return won, lost, significance.mcnemar(won, lost)
