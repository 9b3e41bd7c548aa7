"""Reads stored runs.

A *setup* is a method with its N, α, way of masking, amateur and other options; draws of random heads share one setup.
*Conditions* are settings of the task that differ from the paper's: each combination has separate tables. Greedy
decoding from a checkpoint of ITI is the method `iti` of the model that ITI edited."""

import json
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from heads import find_heads, load_scores
from paper import judges
from paper.runs import read_run
from paper.tasks import find, metrics
from runtime.files import json_lines, short_hash, write

METHODS = {
    "greedy": "greedy",
    "masked": "masked",
    "decore-static": "DeCoRe static",
    "decore-entropy": "DeCoRe entropy",
    "decore-static-lite": "DeCoRe static-lite",
    "decore-entropy-lite": "DeCoRe entropy-lite",
    "iti": "ITI",
    "cd": "CD",
    "cad": "CAD",
    "dola-low": "DoLa low",
    "dola-high": "DoLa high",
    "ad": "Activation Decoding",
}
ITI = {
    "honest_llama3_8B_instruct": "Meta-Llama-3-8B-Instruct",  # checkpoint → the model it was made from
    "honest_llama3_70B_instruct": "Meta-Llama-3-70B-Instruct",
}


@dataclass(frozen=True)
class Setup:
    method: str  # a key of METHODS
    num_heads: int | None
    alpha: float | None
    mask: str | None  # "output" or "query"
    amateur: str | None
    random_heads: str | None  # their sampler: "uniform" or "published"; None for retrieval heads
    options: str  # the other options that are not the paper's
    variant: str = ""  # dtype, demonstrations and data, if other runs of the model differ in them

    def __str__(self):
        parts = (
            METHODS[self.method],
            self.num_heads is not None and f"N = {self.num_heads}",
            self.alpha is not None and f"α = {self.alpha:g}",
            self.mask == "query" and "query mask",
            self.amateur and f"amateur {self.amateur}",
            self.options,
            self.random_heads
            and "random heads" + " as published" * (self.random_heads == "published"),
            self.variant,
        )
        return ", ".join(part for part in parts if part)


@dataclass(eq=False)
class Run:
    path: Path
    header: dict
    model: str
    conditions: str  # "" if they are the paper's
    setup: Setup
    lines: list  # one dict per example, as stored
    values: list  # one dict of metric values per example; `entropy`, see base_entropies

    @property
    def task(self):
        return self.header["task"]

    @property
    def title(self):
        return self.model + f", {self.conditions}" * bool(self.conditions)

    @property
    def plain(self):
        """The setup as a text, without what distinguishes its variants."""
        return str(replace(self.setup, variant=""))


def describe(header, iti=ITI):
    """(model, conditions, Setup) of a run's header."""
    method, model, amateur = header["method"], Path(header["model"]).name, header.get("amateur")
    if method == "greedy" and model in iti:
        model, method = iti[model], "iti"
    if method not in METHODS:
        raise ValueError(f"its method {method!r} is unknown")
    task = find(header["task"])
    # The paper's runs of DoLa generated with a library that takes the penalty from Qwen2's generation_config.json.
    penalty = (
        1.05 if method.startswith("dola") and "qwen2" in model.lower() and not task.choice else 1.0
    )
    conditions = {
        "layout": task.layout or ("mistral" if "mistral" in model.lower() else "chat"),
        "max_new_tokens": task.max_new_tokens,
        "template_args": {"enable_thinking": False},
    }
    options = {
        "mask_prompt": False,
        "alpha_cap": None,
        "scale_alpha": False,
        "relative_top": None,
        "info_layer": 24,
        "renormalise": True,
        "dola_layers": "halves" if task.choice else "transformers",
        "repetition_penalty": penalty,
        "heads": None,
    }
    heads = header.get("heads") or []
    best = best_heads(amateur or header["model"])
    usual = header.get("random_heads") or best is None or {*heads} == {*best[: len(heads)]}
    settings = header | {
        "repetition_penalty": header.get("repetition_penalty") or 1.0,
        "template_args": header.get("template_args") or None,
        "heads": None if usual else "of another file",
    }
    return (
        model,
        differences(settings, conditions),
        Setup(
            method,
            *(header.get(name) for name in ("num_heads", "alpha", "mask")),
            amateur and Path(amateur).name,
            header.get("random_heads"),
            differences(settings, options),
        ),
    )


def differences(settings, paper):
    """The settings that are not the paper's, as a text such as "mask prompt True, alpha cap 0.5"."""
    return ", ".join(
        f"{name.replace('_', ' ')} {settings[name]}"
        for name, value in paper.items()
        if settings.get(name) not in (None, value)
    )


@cache
def best_heads(model):
    """All heads of this model, best first, as "layer-head"; None without a head file."""
    scores = load_scores(file) if (file := find_heads(model)) else None
    return scores and [
        f"{layer}-{head}" for layer, head in sorted(scores, key=scores.get, reverse=True)
    ]


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
        except KeyError as error:
            skipped.append((path, f"its header lacks {error}"))
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
        raise ValueError(
            f"made with version {header['version']} of {task.name}, which is now {task.version}"
        )
    if not lines:
        raise ValueError("no examples yet")
    lines = judges.judge(lines, path, task)
    entropies = metrics.map_lines(
        lambda line: np.mean(line["entropies"]) if line.get("entropies") else None, lines
    )
    values = [
        line | {"entropy": mean}
        for line, mean in zip(values_of(path, task, lines), entropies, strict=True)
    ]
    return Run(path, header, *describe(header, iti), lines, values)


def read_lines(path):
    """(header, lines) of a run file."""
    header, lines = read_run(path)
    if header is None:
        raise ValueError(f"{path}: its first line has no header, so it is not a run of evaluate.py")
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
    if not metrics.problems(task) and time.perf_counter() - start > 5:  # seconds
        write(store, [{"key": key, "values": values}])
    return values


def base_entropies(run):
    """The base model's entropy along each text, mean over its tokens, in nats (of `masked`, the masked model's)."""
    return np.array([values["entropy"] for values in run.values if values["entropy"] is not None])
