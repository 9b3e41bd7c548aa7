"""The file of a run: its header in the first line, then one JSON line per item of the data.

The header says what determines the lines, and names the file. Lines are appended batch by batch,
and sorted into the order of the data after the last batch. A run that was killed continues where
it stopped, and a complete one may grow (--limit, --sample). Another `identity` is refused, by the
names of its fields. Another device, batch size, draft or version of torch changes a last digit at
most: it is accepted. header["continued"] names them, commit and date, each time with the items from
then on.

Runs may be packed: FILE.jsonl.xz holds them one after another, and a line with `header` begins a
run. A packed file is read like a folder: FILE.jsonl.xz/DATA/NAME.jsonl is a run."""

import datetime
import json
import lzma
import platform
import shlex
import sys
from collections import ChainMap
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from decoders.setup import METHODS, SETTINGS, Setup
from paper.tasks import data
from runtime.errors import InputError
from runtime.fields import field, located
from runtime.files import commit, json_lines, parse_lines, write

FIELDS = {  # of a header, by what they are for; any other field is a condition
    # Of the method: tables have a row for each
    "setting": ["method", "heads", *SETTINGS, "head_file", "decoder", "amateur_fingerprint"],
    # Of the task: tables have a title for each, which names what is not the paper's
    "condition": (
        "layout max_new_tokens min_new_tokens template_args eos closed_book known"
    ).split(),
    # Named where runs of one title differ, as by `stored.labels_of`
    "label": (
        "model like fingerprint task version dtype engine product data demos template system"
    ).split(),
    # Which items: runs are compared on those that they have in common
    "item": ["sample_seed", "skip"],
    # A complete run may continue with more items
    "growing": "n limit sample command".split(),
    # Changes a last digit at most: header["continued"] names it
    "surrounding": "device batch_size draft tp versions".split(),
    "note": "commit date time paper continued".split(),
}
ROLES = {name: role for role, names in FIELDS.items() for name in names}
NOTES = (*FIELDS["growing"], *FIELDS["surrounding"], *FIELDS["note"])  # they change no answer
# A run continues with another of these too. Heads are fields of their own, so their origin does not
# matter; the product changes a last digit, but turns near-ties, so reports name it.
CONTINUED = (*NOTES, "measure", "head_file", "product")
SURROUNDINGS = (*FIELDS["surrounding"], "product")
STOPS = ("eos", "length", "stop")  # of decore.Generation


def make_header(bench, setup, how, model, fingerprints, more):
    """The first line of a run's file: what determines its lines, the software, the machine.

    setup: fitted to the model. how: the parsed command line. fingerprints: of the model and its
    amateur. more: further fields."""
    now = datetime.datetime.now(datetime.UTC)
    device = platform.machine()
    if model.device.type == "cuda":
        import torch

        device = torch.cuda.get_device_name(model.device)
    file = METHODS[setup.method].file
    own = {"decoder": data.file_record(file)} if file else {}
    libraries = ("torch", "tokenizers", "numpy", *["transformers"] * how.transformers)
    return {
        **setup.header(),
        "head_file": setup.head_file and data.file_record(setup.head_file),
        "model": model.name,
        "fingerprint": fingerprints[0],
        "amateur_fingerprint": fingerprints[1] if setup.amateur else None,
        "tp": how.tp,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": f"{model.device.type} ({device})",
        "engine": "transformers" if how.transformers else "own",
        "versions": {name: version(name) for name in libraries}
        | {"python": platform.python_version()},
        "commit": commit(),
        "date": str(now.date()),
        "time": f"{now:%H:%M:%S} UTC",
        "command": shlex.join(["evaluate.py", *sys.argv[1:]]),
        "closed_book": bench.task.closed_book or None,
        **bench.header(),
        "eos": how.eos,
        "limit": how.limit,
        "sample": how.sample,
        "skip": how.skip,
        "batch_size": how.batch_size,
        "draft": how.draft,
        "max_new_tokens": bench.max_new_tokens,
        "min_new_tokens": bench.min_new_tokens,
        "product": model.product,
        **own,
        **more,
    }


def identity(header, ignored=CONTINUED):
    """The fields of a header without ignored ones and those without a value. Runs of one identity
    have the same answers. InputError for a damaged header."""
    header = header | Setup.from_header(header).header()
    return {
        name: value
        for name, value in header.items()
        if name not in ignored and value is not None and value != {}
    }


def run_name(header):
    """The name of a run's file: task, model, method and its settings, which rows."""
    parts = [header["task"], Path(header["model"]).name, Setup.from_header(header).file_name]
    parts += ["closed-book"] * bool(header.get("closed_book"))
    if choice := header.get("known"):
        parts.append(f"{choice['rows']}-{choice['sha256'][:6]}")
    return ".".join(parts)


class Line(dict):
    """A line of a run."""

    place = ""  # "FILE, line 3"


def read_run(path):
    """(header or None, `Line`s) of a run, or of any file of JSON lines.

    InputError for a line of a run without an index, and for two lines of one item."""
    header, lines, places = None, [], {}
    for number, line in packed_lines(path) if packed_file(path) else json_lines(path):
        if number == 1 and isinstance(line.get("header"), dict):
            header = line["header"]
            continue
        line = Line(line)
        line.place = place = f"{path}, line {number}"
        if header is not None or "index" in line:
            with located(place):
                first = places.setdefault(field(line, "index", "a whole number from 0"), place)
                if first != place:
                    raise InputError(f"the same item as {first}; remove one")
        lines.append(line)
    return header, lines


def packed_file(path):
    """The packed file that a path is or leads into; None for another path."""
    path = Path(path)
    packed = [x for x in (path, *path.parents) if x.suffix == ".xz" and x.is_file()]
    return packed[0] if packed else None


@lru_cache(maxsize=1)
def unpacked(packed):
    """{path: lines as bytes} of the runs in a packed file. InputError for a damaged one."""
    try:
        with lzma.open(packed) as file:
            content = file.read()
    except (lzma.LZMAError, EOFError) as error:
        raise InputError(f"{packed}: a damaged xz file ({error})") from None
    runs = {}
    for line in content.splitlines(keepends=True):
        if line.startswith(b'{"header":'):
            [(_, first)] = parse_lines([line], packed, complete=True)
            header = first["header"]
            data = [Path(x["file"].removesuffix(".gz")).stem for x in (header.get("data") or [])]
            lines = runs[Path(packed, *data[:1], f"{run_name(header)}.jsonl")] = []
        elif not runs:
            raise InputError(f"{packed}: its first line has no header, so it holds no runs")
        lines.append(line)
    return runs


def packed_paths(path):
    """The paths of the runs in a packed file, or in a folder within it."""
    return sorted(run for run in unpacked(packed_file(path)) if run.is_relative_to(path))


def packed_lines(path):
    """As `json_lines`, of a packed run. A file, or a folder within it, that holds one run will do.
    InputError for several or none."""
    paths = packed_paths(path)
    if len(paths) != 1:
        names = ", ".join(map(str, paths[:2]))
        raise InputError(
            f"{path} holds {len(paths)} runs; name one of them{names and f': {names}'}"
        )
    return parse_lines(unpacked(packed_file(path))[paths[0]], paths[0])


def open_run(path, header, items):
    """Start a run, or continue it. Returns its lines by index. A last line that was cut off is
    removed from the file. header, items: as in `continued`."""
    header, lines = continued(path, header, items)
    write(path, [{"header": header}, *lines])
    return {line["index"]: line for line in lines}


def continued(path, header, items):
    """(header, lines) of a run with which its file begins. Writes nothing.

    items: index → the fields that do not depend on the answer. InputError if there is a file that
    is not a run, or was made with another header or other items."""
    stored, lines = read_run(path) if path.exists() else ({}, [])
    if stored is None:
        raise InputError(
            f"{path}: its first line has no header, so it is not a run of evaluate.py; "
            "choose another --out"
        )
    if not lines:
        return header, lines
    with located(path):
        there, now = identity(stored), identity(header)
    if field(stored, "n", "a whole number from 0") > header["n"]:
        there["n"], now["n"] = stored["n"], header["n"]
    if texts := list(differences(there, now)):
        raise InputError(
            f"{path} was made with other settings ({'; '.join(texts[:4])}); "
            "choose another --out or remove the file"
        )
    for line in lines:
        item = items.get(line["index"])
        problem = None
        if item is None or line | item != line:
            problem = "is not that of the data"
        elif not is_answer(line, header["max_new_tokens"] is None):
            problem = "has no complete answer"
        if problem:
            raise InputError(
                f"{line.place}: item {line['index']} {problem}; "
                "choose another --out or remove the file"
            )
    grown = FIELDS["growing"] if header["n"] > stored["n"] else ()
    kept = stored | {name: header[name] for name in grown}
    missing = items.keys() - {line["index"] for line in lines}
    parts = stored.get("continued", [])
    latest = dict(ChainMap(*reversed(parts), stored))  # of the lines that were written last
    changes = {n: header[n] for n in SURROUNDINGS if header[n] != latest.get(n)}
    origin = {n: header[n] for n in ("commit", "date")}
    if missing and (changes or latest | origin != latest):
        part = {"items": [min(missing), max(missing)]} | origin | changes
        kept["continued"] = [*parts, part]
    return kept, lines


def is_answer(line, choice):
    """Whether a stored line has all fields of an answer. choice: of multiple choice."""
    names = ("scores_true", "scores_false") if choice else ("ids", "alphas", "entropies")
    lists = [line.get(name) for name in names]
    if not all(isinstance(values, list) for values in lists):
        return False
    ended = isinstance(line.get("prediction"), str) and line.get("stop") in STOPS
    return choice or ended and len(set(map(len, lists))) == 1


def differences(stored, new, prefix=""):
    """Yield a text for each field that differs, "fingerprint.weights: …" inside an object."""
    for name in stored | new:
        there, now = stored.get(name), new.get(name)
        if isinstance(there, dict) and isinstance(now, dict):
            yield from differences(there, now, f"{prefix}{name}.")
        elif there != now:
            yield f"{prefix}{name}: {brief(there)} there, {brief(now)} now"


def finish(path):
    """Sort the lines into the order of the data. Returns them."""
    header, lines = read_run(path)
    lines.sort(key=lambda line: line["index"])
    write(path, [{"header": header}, *lines])
    return lines


def beside(path, suffix):
    """The path of a file that belongs to a run, compressed, packed or not."""
    path = (packed_file(path) or path).with_name(path.name)
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return path.with_name(stem + suffix)


def remarks(header):
    """Sentences about a run that a reader of its numbers should know."""
    sentences = []
    for part in header.get("continued", []):
        changes = [f"{name} ({brief(part[name])})" for name in SURROUNDINGS if name in part]
        if changes:
            sentences.append(f"continued with another {', '.join(changes)}")
    return sentences


def brief(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
