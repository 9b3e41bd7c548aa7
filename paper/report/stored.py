"""Reads stored runs.

A *setup* is a method with its N, α, way of masking, amateur and other options; draws of random
heads share one setup. *Conditions* are settings of the task that differ from the paper's: each
combination has separate tables. Greedy decoding from a checkpoint of ITI is the method `iti` of
the model that ITI edited."""

import json
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from heads import find_heads, load_scores
from paper import judges
from paper.runs import brief, read_run, remarks
from paper.tasks import find, metrics
from paper.tasks.items import field, located
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
ITI = {  # checkpoint → the model that it was made from
    "honest_llama3_8B_instruct": "Meta-Llama-3-8B-Instruct",
    "honest_llama3_70B_instruct": "Meta-Llama-3-70B-Instruct",
}
NONE = type(None)
TYPES = {  # types of a value → the fields of a header that have them
    (str,): ("task", "model", "method"),
    (int,): ("version", "n"),
    (str, NONE): ("dtype", "mask", "amateur", "random_heads", "like"),
    (int, NONE): ("num_heads", "seed"),
    (int, float, NONE): ("alpha",),
}


@dataclass(frozen=True)
class Setup:
    method: str  # a key of METHODS
    num_heads: int | None
    alpha: float | None
    mask: str | None  # "output" or "query"
    amateur: str  # "" without one
    random_heads: str | None  # their sampler: "uniform" or "published"; None for retrieval heads
    options: str  # the other options that are not the paper's
    variant: str = ""  # precision and inputs, if other runs of the model and task differ in them

    def __str__(self):
        parts = [METHODS[self.method]]
        if self.num_heads is not None:
            parts.append(f"N = {self.num_heads}")
        if self.alpha is not None:
            parts.append(f"α = {self.alpha:g}")
        if self.mask == "query":
            parts.append("query mask")
        if self.amateur:
            parts.append(f"amateur {self.amateur}")
        parts.append(self.options)
        if self.random_heads:
            published = " as published" if self.random_heads == "published" else ""
            parts.append("random heads" + published)
        parts.append(self.variant)
        return ", ".join(filter(None, parts))


@dataclass(eq=False)
class Run:
    header: dict
    model: str
    paper_model: str  # the model whose values in the paper are compared with the run's
    conditions: str  # "" if they are the paper's
    setup: Setup
    precision: dict  # {"dtype": text, "engine": text}
    inputs: dict  # {"data": text, "demos": text}
    remarks: list  # sentences
    path: Path = None
    lines: list = ()  # one dict per example, as stored
    values: list = ()  # one dict of metric values per example; `entropy`, see base_entropies

    @property
    def task(self):
        return self.header["task"]

    @property
    def title(self):
        return ", ".join(filter(None, [self.model, self.conditions]))

    @property
    def plain(self):
        """The setup as a text, without what distinguishes its variants."""
        return str(replace(self.setup, variant=""))


def describe(header, iti=ITI):
    """The run of a header, without its lines. ValueError if the header is damaged."""
    for types, names in TYPES.items():
        for name in names:
            value = header.get(name)
            too_large = type(value) is int and abs(value) >= 2**63
            if type(value) not in types or too_large:
                raise ValueError(f"field {name!r} of its header is {brief(value)}")
    with located("its header"):
        method = header["method"]
        own = Path(header["model"]).name
        like = header.get("like")
        paper_model = Path(like or own).name
        if method == "greedy" and paper_model in iti:
            method = "iti"
            paper_model = iti[paper_model]
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}")
        conditions, options = settings_of(header, find(header["task"]), paper_model)
        setup = Setup(
            method,
            header.get("num_heads"),
            header.get("alpha"),
            header.get("mask"),
            Path(header.get("amateur") or "").name,
            header.get("random_heads"),
            options,
        )
        return Run(
            header,
            f"{own} like {paper_model}" if like else paper_model,
            paper_model,
            conditions,
            setup,
            {"dtype": str(header.get("dtype")), "engine": f"{header.get('engine', 'own')} engine"},
            inputs_of(header),
            remarks(header),
        )


def settings_of(header, task, model):
    """(conditions, options) of a run that are not those of the paper's runs of the model."""
    name = model.lower()
    conditions = {
        "layout": task.layout or ("mistral" if "mistral" in name else "chat"),
        "max_new_tokens": task.max_new_tokens,
        "template_args": {"enable_thinking": False},
    }
    # The paper's runs of DoLa generated with a library that takes the penalty from Qwen2's
    # generation_config.json.
    qwen_dola = header["method"].startswith("dola") and "qwen2" in name and not task.choice
    options = {
        "mask_prompt": False,
        "alpha_cap": None,
        "scale_alpha": False,
        "relative_top": None,
        "info_layer": 24,
        "renormalise": True,
        "dola_layers": "halves" if task.choice else "capped",
        "repetition_penalty": 1.05 if qwen_dola else 1.0,
        "heads": None,
    }
    heads = header.get("heads") or []
    best = best_heads(header.get("amateur") or header["model"])
    usual = header.get("random_heads") or best is None or {*heads} == {*best[: len(heads)]}
    settings = header | {
        "repetition_penalty": header.get("repetition_penalty") or 1.0,
        "template_args": header.get("template_args") or None,
        "heads": None if usual else "of another file",
    }
    return differences(settings, conditions), differences(settings, options)


def differences(settings, paper):
    """The settings that are not the paper's, as a text such as "mask prompt True"."""
    return ", ".join(
        f"{name.replace('_', ' ')} {settings[name]}"
        for name, value in paper.items()
        if settings.get(name) not in (None, value)
    )


def inputs_of(header):
    """Texts that tell data and demonstrations apart."""
    demos = header.get("demos") or {"source": "none"}
    return {
        "data": names_of(header.get("data") or []),
        "demos": "the paper's demonstrations"
        if demos.get("paper")
        else f"demonstrations: {names_of([demos])}",
    }


def names_of(records):
    """Names of files with the beginnings of their hashes."""
    names = []
    for record in records:
        parts = [
            record.get("source"),
            record.get("file", record.get("made by")),
            str(record.get("sha256") or "")[:6],
            record.get("seed") and f"seed {record['seed']}",
        ]
        names.append(" ".join(filter(None, parts)))
    return ", ".join(names)


@cache
def best_heads(model):
    """All heads of this model, best first, as "layer-head"; None without a head file."""
    file = find_heads(model)
    if file is None:
        return None
    scores = load_scores(file)
    best_first = sorted(scores, key=scores.get, reverse=True)
    return [f"{layer}-{head}" for layer, head in best_first]


def collect(folder, iti=ITI):
    """(runs, [(path, why it is skipped)]) of a folder and its sub-folders."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    runs, skipped = [], []
    for path in run_files(folder):
        try:
            runs.append(read(path, iti))
        except (ValueError, OSError) as error:
            skipped.append((path, str(error).removeprefix(f"{path}: ")))
    return runs, skipped


def run_files(folder):
    """The runs in a folder and its subfolders, without the files of judges' verdicts."""
    paths = sorted([*Path(folder).rglob("*.jsonl"), *Path(folder).rglob("*.jsonl.gz")])
    return [path for path in paths if ".judged." not in path.name]


def read(path, iti=ITI):
    """Reads a run file. ValueError if it cannot be reported."""
    header, lines = read_run(path)
    if header is None:
        raise ValueError("its first line has no header, so it is not a run of evaluate.py")
    run = describe(header, iti)
    task = find(run.task)
    if header["version"] != task.version:
        raise ValueError(
            f"made with version {header['version']} of {task.name}, which is now {task.version}"
        )
    if not lines:
        raise ValueError("no examples yet")
    run.path = path
    run.lines = judges.judge(lines, path, task)
    entropies = metrics.map_lines(mean_entropy, run.lines)
    values = values_of(path, task, run.lines)
    for of_line, entropy in zip(values, entropies, strict=True):
        of_line["entropy"] = entropy
    run.values = values
    run.remarks += unlike_the_paper(run, task)
    return run


def unlike_the_paper(run, task):
    """Sentences on items, demonstrations and judges that are not those of the paper's runs."""
    n = run.header["n"]
    done = len(run.lines)
    if done < n:
        yield f"{run.path.name} is unfinished, {done:,} of {n:,}"
    if n != task.n:
        yield f"{task.name}, {n:,} items of {task.n:,}"
    if not (run.header.get("demos") or {"paper": True}).get("paper"):
        yield f"{task.name}, demonstrations other than the paper's"
    verdicts = judges.read_store(run.path.with_suffix(judges.STORE)).values()
    for model in dict.fromkeys(verdict["model"] for verdict in verdicts):
        yield f"judged by {model}; values of other judges, such as the paper's, differ"


def mean_entropy(line):
    if not line.get("entropies"):
        return None
    return float(np.mean(field(line, "entropies", "a list of numbers")))


def values_of(path, task, lines):
    """The metric values of each line, a dict each. Slow ones are stored in `.scores.json`."""
    store = path.with_suffix(".scores.json")
    content = []
    for line in lines:
        content.append({name: value for name, value in line.items() if name != "place"})
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
    """The base model's entropies along each text, means over its tokens, in nats [n].

    For `masked`: the masked model's."""
    entropies = [values["entropy"] for values in run.values]
    return np.array([entropy for entropy in entropies if entropy is not None])
