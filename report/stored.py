"""Reads stored runs.

A *setup* is a method with its N, α, way of masking, amateur and other options; draws of random heads share one setup.
*Conditions* are settings of the task that differ from the paper's: each combination has separate tables. Greedy
decoding from a checkpoint of ITI is the method `iti` of the model that ITI edited."""

import json
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from evaluation import judges
from evaluation.runs import read_run
from heads import find_heads, load_scores
from runtime.files import json_lines, short_hash, write
from tasks import find, metrics
from tasks.items import located, require

METHODS = {"greedy": "greedy", "masked": "masked", "decore-static": "DeCoRe static",
           "decore-entropy": "DeCoRe entropy", "decore-static-lite": "DeCoRe static-lite",
           "decore-entropy-lite": "DeCoRe entropy-lite", "iti": "ITI", "cd": "CD", "cad": "CAD",
           "dola-low": "DoLa low", "dola-high": "DoLa high", "ad": "Activation Decoding"}
ITI = {"honest_llama3_8B_instruct": "Meta-Llama-3-8B-Instruct",     # checkpoint → the model it was made from
       "honest_llama3_70B_instruct": "Meta-Llama-3-70B-Instruct"}
SLOW = 5                                        # seconds: metric values that take longer are stored


@dataclass(frozen=True)
class Setup:
    method: str                 # a key of METHODS
    num_heads: int | None
    alpha: float | None
    mask: str | None            # "output" or "query"
    amateur: str | None
    random_heads: str | None    # their sampler: "uniform" or "published"; None for retrieval heads
    options: str                # the other options that are not the paper's

    def text(self, *without):
        """The setup as a text, without some of its fields."""
        parts = {"method": METHODS[self.method], "num_heads": f"N = {self.num_heads}",
                 "alpha": f"α = {self.alpha or 0:g}", "mask": "query mask" * (self.mask == "query"),
                 "amateur": f"amateur {self.amateur}", "options": self.options,
                 "random_heads": "random heads" + " as published" * (self.random_heads == "published")}
        return ", ".join(part for name, part in parts.items()
                         if part and name not in without and getattr(self, name) is not None)

    __str__ = text


@dataclass(eq=False)
class Run:
    path: Path
    header: dict
    model: str
    conditions: str             # "" if they are the paper's
    setup: Setup
    lines: list                 # one dict per example, as stored
    values: list                # one dict of metric values per example; `entropy`, see base_entropies

    @property
    def task(self):
        return self.header["task"]

    @property
    def title(self):
        return self.model + f", {self.conditions}" * bool(self.conditions)


def describe(header, iti=ITI):
    """(model, conditions, Setup) of a run's header."""
    method, model, amateur = header["method"], Path(header["model"]).name, header.get("amateur")
    if method == "greedy" and model in iti:
        model, method = iti[model], "iti"
    if method not in METHODS:
        raise ValueError(f"its method {method!r} is unknown")
    task = find(header["task"])
    # The paper's runs of DoLa generated with a library that takes the penalty from Qwen2's generation_config.json.
    penalty = 1.05 if method.startswith("dola") and "qwen2" in model.lower() and not task.choice else 1.0
    conditions = {"layout": task.layout or ("mistral" if "mistral" in model.lower() else "chat"),
                  "max_new_tokens": task.max_new_tokens, "template_args": {"enable_thinking": False}}
    options = {"mask_prompt": False, "alpha_cap": None, "scale_alpha": False, "relative_top": None, "info_layer": 24,
               "renormalise": True, "dola_layers": "halves" if task.choice else "transformers",
               "repetition_penalty": penalty, "heads": None}
    heads, best = header.get("heads") or [], best_heads(amateur or header["model"])
    usual = header.get("random_heads") or best is None or {*heads} == {*best[:len(heads)]}
    settings = header | {"repetition_penalty": header.get("repetition_penalty") or 1.0,
                         "heads": None if usual else "of another file"}
    return model, differences(settings, conditions), Setup(
        method, *(header.get(name) for name in ("num_heads", "alpha", "mask")), amateur and Path(amateur).name,
        header.get("random_heads"), differences(settings, options))


def differences(settings, paper):
    """The settings that are not the paper's, as a text such as "mask prompt True, alpha cap 0.5"."""
    return ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name, value in paper.items()
                     if settings.get(name) not in (None, {}, value))


@cache
def best_heads(model):
    """All heads of this model, best first, as "layer-head"; None without a head file."""
    scores = load_scores(file) if (file := find_heads(model)) else None
    return scores and [f"{layer}-{head}" for layer, head in sorted(scores, key=scores.get, reverse=True)]


def collect(folder, iti=ITI):
    """(runs, [(path, why it is skipped)]) of a folder and its sub-folders."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    runs, skipped = [], []
    for path in run_files(folder):
        try:
            runs.append(read(path, iti))
        except ValueError as error:
            skipped.append((path, str(error).removeprefix(f"{path}: ")))
    return runs, skipped


def run_files(folder):
    """The runs in a folder and its subfolders, without the files of judges' verdicts."""
    paths = sorted([*Path(folder).rglob("*.jsonl"), *Path(folder).rglob("*.jsonl.gz")])
    return [path for path in paths if ".judged." not in path.name]


def read(path, iti=ITI):
    """Reads a run file. ValueError if it cannot be reported."""
    header, lines = read_lines(path)
    task = find(header["task"])
    if header["version"] != task.version:
        raise ValueError(f"made with version {header['version']} of {task.name}, which is now {task.version}")
    if not lines:
        raise ValueError("no examples yet")
    lines = judges.judge(lines, path, task)
    values = values_of(path, task, lines)
    entropies = metrics.map_lines(lambda line: np.mean(line["entropies"]) if line.get("entropies") else None, lines)
    values = [of_line | {"entropy": mean} for of_line, mean in zip(values, entropies, strict=True)]
    return Run(path, header, *describe(header, iti), lines, values)


def read_lines(path):
    """(header, lines) of a run file."""
    header, lines = read_run(path)
    if header is None:
        raise ValueError(f"{path}: its first line has no header, so it is not a run of evaluate.py")
    with located(f"{path}: header"):
        require(header, ("task", "version", "n", "model", "method"))
    return header, lines


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
    if not metrics.problems(task) and time.perf_counter() - start > SLOW:
        write(store, [{"key": key, "values": values}])
    return values


def base_entropies(run):
    """The base model's entropy along each text, mean over its tokens, in nats (of `masked`, the masked model's)."""
    return np.array([values["entropy"] for values in run.values if values["entropy"] is not None])
