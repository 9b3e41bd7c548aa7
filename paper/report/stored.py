"""Reads stored runs.

A stored run is a flat record. Runs of one `identity` have the same answers, so one of them is
taken. Runs share a *table* if their titles agree: models, and the conditions of the task that are
not the paper's. They share a *row*, as draws of random heads, if their labels agree. Two runs are
*comparable* if their identities differ in settings and items alone. runfile.FIELDS says which field
is which. Greedy decoding from a checkpoint of ITI is the method `iti` of the model that ITI
edited."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from decoders.setup import Setup, is_ours
from heads.words import is_unseparated
from paper import fetch, judges, scores
from paper.runfile import (
    NOTES,
    ROLES,
    beside,
    identity,
    packed_file,
    packed_paths,
    read_run,
    remarks,
)
from paper.tasks import answers, find_task, metrics
from runtime.errors import InputError
from runtime.fields import field, located
from runtime.files import json_hash, short_hash
from runtime.progress import say

ORIGIN = ("measure", "head_file")  # of heads
TEXTS = ("entropy", "tokens", "ended", "empty", "letters")  # see `text_values`
ITI = {  # checkpoint → the model that it was made from
    "honest_llama3_8B_instruct": "Meta-Llama-3-8B-Instruct",
    "honest_llama3_70B_instruct": "Meta-Llama-3-70B-Instruct",
}


@dataclass(eq=False)
class StoredRun:
    header: dict
    identity: dict  # the fields of the header that can change an answer
    setup: Setup  # without its heads; of random heads also without measure and seed
    method: str  # that of the setup, or "iti"
    model: str
    paper_model: str  # the model whose values in the paper are compared with the run's
    conditions: str  # "" if they are the paper's
    labels: dict  # what is named where runs of one title differ: {fact: text}
    remarks: list  # sentences
    path: Path = None
    lines: list = ()  # one dict per example, as stored
    values: list = ()  # one dict of metric values per example; see `collect`
    heads: str = ""  # in its label, if other runs of the model have others
    variant: str = ""  # precision, inputs, …, likewise, if other runs of the model and task differ
    greedy: "StoredRun" = None  # with which it is compared; see `results.select`

    @property
    def task(self):
        return self.header["task"]

    @property
    def title(self):
        return ", ".join(filter(None, [self.model, self.conditions]))

    @cached_property
    def label(self):
        parts = [self.method, *self.setup.words().values(), self.heads, self.variant]
        return ", ".join(filter(None, parts))

    def with_settings(self, **settings):
        return replace(self, setup=replace(self.setup, **settings))

    @cached_property
    def comparable(self):
        """What two runs have in common that are compared: the identity less settings and items."""
        fields = {}
        for name, value in self.identity.items():
            if ROLES.get(name) not in ("setting", "item"):
                fields[name] = value
        if self.method == "iti":  # its checkpoint is compared with the one that ITI edited
            fields.pop("fingerprint", None)
        return fields

    @property
    def draw(self):
        """The fields of the identity in which draws of random heads differ."""
        return ("seed", "heads") if self.setup.random_heads else ()

    @cached_property
    def items(self):
        """(id, hash of the prompt) → (question, metric values)."""
        keys = [(line.get("id", line["index"]), line.get("prompt_sha256")) for line in self.lines]
        return dict(zip(keys, zip(self.questions, self.values)))

    @property
    def questions(self):
        """A text for each line: those of one question are not independent."""
        return [str(line.get("question", line["index"])) for line in self.lines]


def describe(header):
    """The run of a header, without its lines. Raises various errors if the header is damaged."""
    if not is_ours(header["method"]) and not header.get("decoder"):
        raise InputError(f"unknown method {header['method']!r}")
    setup = replace(Setup.from_header(header), heads=None)
    if setup.amateur:
        setup = replace(setup, amateur=Path(setup.amateur).name)
    if setup.random_heads:
        setup = replace(setup, measure=None, seed=None)
    model = Path(header["model"]).name
    like = header.get("like")
    paper_model = Path(like or model).name
    is_iti = setup.method == "greedy" and paper_model in ITI
    if is_iti:
        paper_model = ITI[paper_model]
    fields = identity_of(header, model, setup)
    return StoredRun(
        header,
        fields,
        setup,
        "iti" if is_iti else setup.method,
        f"{model} like {paper_model}" if like else paper_model,
        paper_model,
        conditions_of(fields, find_task(header["task"]), paper_model),
        labels_of(header, setup, is_iti),
        remarks(header),
    )


def identity_of(header, model, setup):
    """The fields of a header in which runs differ for a report: without the folders of models and
    the file of the paper's demonstrations, but with the product, whose last digits turn near-ties,
    and the origin of heads, which tables name."""
    fields = identity(header, NOTES) | {"model": model, "amateur": setup.amateur}
    fields["engine"] = header.get("engine", "own")
    if (header.get("demos") or {}).get("paper"):
        fields["demos"] = {"paper": True}
    ignored = ORIGIN if setup.random_heads else ()
    return {n: value for n, value in fields.items() if value is not None and n not in ignored}


def labels_of(header, setup, is_iti):
    """{fact: text}: the checkpoint, its heads, its precision, and the inputs of a run. None: it has
    none, or is not told from others by it."""
    labels = dict.fromkeys(["checkpoint", "heads"])
    if header.get("fingerprint") and not is_iti:  # ITI's stands beside the one that ITI edited
        labels["checkpoint"] = f"checkpoint {hash_of(header['fingerprint'])}"
    if setup.num_heads and not setup.random_heads:
        file = header.get("head_file")
        labels["heads"] = f"heads of {file_names([file])}" if file else "heads as listed"
    labels["dtype"] = str(header.get("dtype"))
    labels["engine"] = f"{header.get('engine', 'own')} engine"
    labels["product"] = f"{header.get('product', 'unknown')} products"
    labels["data"] = file_names(header.get("data") or [])
    demos = header.get("demos") or {"source": "none"}
    labels["demos"] = f"demonstrations: {file_names([demos])}"
    if demos.get("paper"):
        labels["demos"] = "the paper's demonstrations"
    labels["items"] = "all or the first items"
    if header.get("sample_seed") is not None:
        labels["items"] = f"sample of seed {header['sample_seed']}"
    if header.get("skip"):
        labels["items"] += f" without the first {header['skip']}"
    labels["prompt"] = None
    if header.get("template"):
        labels["prompt"] = f"prompt {hash_of([header['template'], header['system']])}"
    return labels


def hash_of(value):
    return json_hash(value)[:6]


def conditions_of(fields, task, model):
    """The settings of the task that are not those of the paper's runs of the model.

    fields: a run's identity."""
    paper = {
        "layout": task.layout or ("mistral" if "mistral" in model.lower() else "chat"),
        "max_new_tokens": task.max_new_tokens,
        "template_args": {"enable_thinking": False},
    }
    conditions = []
    for name in dict.fromkeys([*paper, *fields]):
        is_condition = ROLES.get(name, "condition") == "condition"
        if is_condition and fields.get(name) not in (None, paper.get(name)):
            text = fields[name]["rows"] if name == "known" else field_text(name, fields[name])
            conditions.append(text)
    return ", ".join(conditions)


def field_text(name, value):
    """A field of a header as a text, such as "layout plain"."""
    name = name.replace("_", " ")
    if value is None:
        return f"no {name}"
    if value is True:
        return name
    if isinstance(value, dict) and "sha256" in value:
        return f"{name} {file_names([value])}"
    text = str(value)
    return f"{name} {text}" if len(text) < 40 else f"{name} {short_hash(text.encode())[:6]}"


def file_names(records):
    """Names of files with the beginnings of their hashes."""
    names = []
    for record in records:
        parts = [record.get(name) for name in ("source", "file")]
        parts.append(record.get("sha256", "")[:6])
        names.append(" ".join(filter(None, parts)))
    return ", ".join(names)


def collect(folder, texts=False):
    """The runs of a folder and its subfolders. Prints which files are skipped, and why.

    texts: whether their values have those of `text_values`."""
    runs = []
    for path in run_files(folder):
        try:
            with located(path):
                runs += by_memory(read(path, texts))
        except (ValueError, OSError) as error:
            say(f"skipped: {error}")
    return runs


def run_files(folder):
    """The runs in a folder and its subfolders, or in a packed file, without the files of judges'
    verdicts."""
    paths = []
    for path in [folder] if packed_file(folder) else sorted(Path(folder).rglob("*.jsonl*")):
        if packed_file(path):
            paths += packed_paths(path)
        elif path.suffix in (".jsonl", ".gz") and ".judged." not in path.name:
            paths.append(path)
    return paths


def read(path, texts=False):
    """Reads a run file, as `collect`. InputError if it cannot be reported."""
    header, lines = read_run(path)
    if header is None:
        raise InputError("its first line has no header, so it is not a run of evaluate.py")
    run = describe(header)
    task = find_task(run.task)
    if header["version"] != task.version:
        raise InputError(
            f"made with version {header['version']} of {task.name}, which is now {task.version}"
        )
    if not lines:
        raise InputError("no examples yet")
    metrics.map_lines(check_id, lines)
    run.path = path
    run.lines = judges.judge(lines, path, task)
    run.values = scores.values_of(path, task, lines)
    if texts:
        for values, of_text in zip(run.values, metrics.map_lines(text_values, lines)):
            values |= of_text
    run.remarks += unlike_the_paper(run, task)
    return run


def check_id(line):
    """InputError for a list, which earlier versions stored."""
    field(line, "id", "a text or a number", null=None)


def unlike_the_paper(run, task):
    """Sentences on items, demonstrations and judges that are not those of the paper's runs."""
    n = run.header["n"]
    done = len(run.lines)
    if done < n:
        yield f"{run.path.name} is unfinished, {done:,} of {n:,}"
    data = run.header.get("data") or []
    if own := [record["file"] for record in data if not fetch.of_paper(record)]:
        yield f"{task.name}, {n:,} items of {', '.join(own)}"
    elif task.n and n != task.n:
        yield f"{task.name}, {n:,} items of {task.n:,}"
    if task.splits and (missing := metrics.SPLITS - {line.get("split") for line in run.lines}):
        yield f"{task.name}, without the splits {', '.join(sorted(missing))}"
    demos = run.header.get("demos")
    if task.n and demos and not demos.get("paper"):
        yield f"{task.name}, demonstrations other than the paper's"
    verdicts = judges.read_store(beside(run.path, judges.STORE)).values()
    for model in dict.fromkeys(verdict["model"] for verdict in verdicts):
        yield f"judged by {model}; values of other judges, such as the paper's, differ"


def text_values(line):
    """Values that describe a generated text: the base model's mean entropy over its tokens (of
    `masked`, the masked model's), its length, whether it ends by itself, whether its first token
    ends it, and how long its words are, in a script that separates words."""
    if not line.get("entropies"):
        return {}
    entropies = field(line, "entropies", "a list of numbers")
    prediction = field(line, "prediction")
    words = prediction.split()
    if not prediction.isascii() and sum(map(is_unseparated, prediction)) > len(prediction) / 2:
        words = []
    return {
        "entropy": float(np.mean(entropies)),
        "tokens": len(entropies),
        "ended": float(line.get("stop") != "length"),
        "empty": float(line.get("stop") == "eos" and len(entropies) == 1),
        "letters": sum(map(len, words)) / len(words) if words else None,
    }


def by_memory(run):
    """Yields the run's parts, one for each kind of `memory` that its lines have, so that each value
    is a mean over all lines of its part. The kind is a condition of the tables. Tasks of the paper
    stay complete."""
    if find_task(run.task).n or not any(line.get("memory") for line in run.lines):
        yield run
        return
    parts = defaultdict(list)
    for line, values in zip(run.lines, run.values):
        parts[kind_of_memory(run, line)].append((line, values))
    for kind, pairs in parts.items():
        lines, values = zip(*pairs)
        conditions = ", ".join(filter(None, [run.conditions, kind]))
        fields = run.identity | ({"memory": kind} if kind else {})
        yield replace(run, conditions=conditions, identity=fields, lines=lines, values=values)


def kind_of_memory(run, line):
    """Whether a line has `memory` and, if it is of an open-book run, its passage agrees with it."""
    if not line.get("memory"):
        return "without memory"
    if run.header.get("closed_book") or not find_task(run.task).own:
        return ""
    agrees = any(answers.same(x, y) for x in line["memory"] for y in line["references"])
    return f"passages {'that agree with' if agrees else 'against'} memory"
