"""Reads stored runs and groups them by setup.

A *setup* is a method with its N, α, way of masking, amateur and other options; draws of random heads share one setup.
*Conditions* are settings of the task that differ from the paper's: each combination has separate tables. Greedy
decoding from a checkpoint of ITI is the method `iti` of the model that ITI edited."""

import itertools
import json
import time
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from heads import find_heads, load_scores
from runtime.files import short_hash
from runtime.jsonl import json_lines, write
from tasks import find, judges, metrics
from tasks.runs import read_run

METHODS = {"greedy": "greedy", "masked": "masked", "decore-static": "DeCoRe static", "decore-entropy": "DeCoRe entropy",
           "decore-static-lite": "DeCoRe static-lite", "decore-entropy-lite": "DeCoRe entropy-lite", "iti": "ITI",
           "cd": "CD", "cad": "CAD", "dola-low": "DoLa low", "dola-high": "DoLa high", "ad": "Activation Decoding"}
ITI = {"honest_llama3_8B_instruct": "Meta-Llama-3-8B-Instruct",     # checkpoint → the model it was made from
       "honest_llama3_70B_instruct": "Meta-Llama-3-70B-Instruct"}
NOT_FRACTIONS = ("rougeL", "bertscore_f1", "factkb", "entropy")     # the other metrics are reported in per cent
PAPER_ALPHA = 0.5                               # of DeCoRe static


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
    values: list                # one dict of metric values per example
    means: dict                 # metric → mean, in per cent if it is a rate; None without any value
    intervals: dict             # metric → (low, high), likewise

    @property
    def task(self):
        return self.settings["task"]

    @property
    def title(self):
        return self.model + f", {self.conditions}" * bool(self.conditions)


def setup_of(settings, iti=ITI):
    """(model, Setup) of a run's settings."""
    method, model = settings["method"], Path(settings["model"]).name
    amateur = Path(settings["amateur"]).name if settings.get("amateur") else None
    if amateur and method in ("decore-static", "decore-entropy"):       # the name in older runs
        method += "-lite"
    if method == "greedy" and model in iti:
        model, method = iti[model], "iti"
    if method not in METHODS:
        raise ValueError(f"its method {method!r} is unknown")
    return model, Setup(method, settings.get("num_heads"), settings.get("alpha"), settings.get("mask"), amateur,
                        settings.get("random_heads"), options_of(settings, model, method))


def options_of(settings, model, method):
    """The options of a method that are not the paper's, as a text."""
    choice = find(settings["task"]).choice
    # The paper's runs of DoLa generated with a library that takes the penalty from Qwen2's generation_config.json.
    penalty = 1.05 if method.startswith("dola") and "qwen2" in model.lower() and not choice else 1.0
    paper = {"mask_prompt": False, "alpha_cap": None, "scale_alpha": False, "relative_top": None, "info_layer": 24,
             "renormalise": True, "dola_layers": "halves" if choice else "transformers", "repetition_penalty": penalty}
    values = settings | {"repetition_penalty": settings.get("repetition_penalty") or 1.0}
    options = [f"{name.replace('_', ' ')} {values[name]}" for name, value in paper.items()
               if values.get(name) not in (None, value)]
    if settings.get("heads") and not settings.get("random_heads"):
        file = find_heads(settings.get("amateur") or settings["model"])
        if file and {*settings["heads"]} != best_heads(file, len(settings["heads"])):
            options.append("heads of another file")
    return ", ".join(options)


@cache
def best_heads(file, n):
    scores = load_scores(file)
    return {f"{layer}-{head}" for layer, head in sorted(scores, key=scores.get, reverse=True)[:n]}


def conditions_of(settings, model):
    """The layout, number of tokens and template arguments that are not the paper's, as a text."""
    task, usual_layout = find(settings["task"]), "mistral" if "mistral" in model.lower() else "chat"
    layout, tokens, template = (settings.get(name) for name in ("layout", "max_new_tokens", "template_args"))
    texts = {f"layout {layout}": layout not in (None, task.layout or usual_layout),
             f"at most {tokens} tokens": tokens not in (None, task.max_new_tokens),
             f"template arguments {json.dumps(template)}": template not in (None, {}, {"enable_thinking": False})}
    return ", ".join(text for text, applies in texts.items() if applies)


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
    def scaled(metric, value):
        return value if value is None or metric in NOT_FRACTIONS else 100 * value

    settings, lines = read_lines(path)
    task = find(settings["task"])
    if settings.get("version") != task.version:
        raise ValueError(f"made with version {settings.get('version')} of {task.name}, which is now {task.version}")
    if not lines:
        raise ValueError("no examples yet")
    model, setup = setup_of(settings, iti)
    lines = judges.judge(lines, path, task, SimpleNamespace(judge=False, judge_url=None))
    values = values_of(path, task, lines)
    means = {name: scaled(name, mean) for name, mean in metrics.summary(values).items()}
    intervals = {name: tuple(scaled(name, end) for end in ends) for name, ends in metrics.interval(values).items()}
    return Run(path, settings, model, conditions_of(settings, model), setup, lines, values, means, intervals)


def read_lines(path):
    """(settings, lines in the data's order) of a run file."""
    settings, lines = read_run(path)
    if settings is None:
        raise ValueError(f"{path}: its first line has no settings, so it is not a run of evaluate.py")
    return settings, sorted(lines, key=lambda line: line["index"])


def values_of(path, task, lines):
    """The metric values of each line, a dict each. Values that took long are stored in `.scores.json`."""
    store = path.with_suffix(".scores.json")
    content = [{name: value for name, value in line.items() if name != "line"} for line in lines]
    key = short_hash(json.dumps([task.version, content]).encode())
    for _, entry in json_lines(store) if store.exists() else ():
        if entry.get("key") == key:
            return entry["values"]
    start = time.perf_counter()
    values = metrics.score(task, lines)
    if not metrics.problems(task) and time.perf_counter() - start > 5:          # seconds
        write(store, [{"key": key, "values": values}])
    return values


def group(runs):
    """({model and conditions: {setup: {task: [runs, one per random draw]}}}, [(path, why it is skipped)]).

    Of several runs of one setup, task and draw, the one with the most examples is taken."""
    chosen, skipped = {}, []
    for run in sorted(runs, key=lambda run: -len(run.lines)):
        key = run.title, order(run.setup), run.task, run.settings.get("seed") if run.setup.random_heads else 0
        if chosen.setdefault(key, run) is not run:
            skipped.append((run.path, f"the same setup as {chosen[key].path}, which has as many examples or more"))
    groups = {}
    for _, run in sorted(chosen.items(), key=lambda pair: pair[0]):
        groups.setdefault(run.title, {}).setdefault(run.setup, {}).setdefault(run.task, []).append(run)
    return groups, skipped


def order(setup):
    """Sort key: the order of METHODS, retrieval heads before random ones, then N and α."""
    return (list(METHODS).index(setup.method), setup.mask or "", setup.amateur or "", setup.options,
            setup.random_heads or "", setup.num_heads or 0, -1e9 if setup.alpha is None else setup.alpha)


def greedy_run(setups, task):
    """The run of greedy decoding on a task, or None."""
    runs = (by_task[task][0] for setup, by_task in setups.items() if setup.method == "greedy" and task in by_task)
    return next(runs, None)


def greedy_mean(setups, task, metric):
    run = greedy_run(setups, task)
    return run and run.means.get(metric)


def typical(setups):
    """One setup per method, way of masking and amateur, for tables and figures that show one of each.

    Retrieval heads; if possible the paper's options and its α; then the N that most runs have."""
    kinds, runs = {}, Counter()
    for setup, by_task in setups.items():
        if not setup.random_heads:
            kinds.setdefault((setup.method, setup.mask, setup.amateur), []).append(setup)
            runs[setup.num_heads] += len(by_task)

    def preference(setup):
        n = setup.num_heads
        return not setup.options, setup.alpha == PAPER_ALPHA, runs[n], -(n or 0), len(setups[setup])

    return [max(kind, key=preference) for kind in kinds.values()]


def of_typical(setups, tasks, measure):
    """{task: {setup: measure(run)}} of the typical setups, without empty results."""
    panels = {}
    for task, setup in itertools.product(tasks, typical(setups)):
        if task in setups[setup] and len(result := measure(setups[setup][task][0])):
            panels.setdefault(task, {})[setup] = result
    return panels


def base_entropies(run):
    """The base model's entropy along each text, mean over its tokens, in nats (of `masked`, the masked model's)."""
    return np.array([np.mean(line["entropies"]) for line in run.lines if line.get("entropies")])
