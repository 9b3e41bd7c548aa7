"""Loads the items and the demonstrations of a task from a file, a folder or the data set's
repository on the hub."""

import csv
import hashlib
import json
import pkgutil
import re
import sys
from functools import partial
from itertools import islice, product
from pathlib import Path

from paper.tasks.items import field, located, require
from runtime.errors import hub_reason, offline_if_unreachable
from runtime.files import json_lines, short_hash


def read_entries(path):
    """Yields (line or row number, entry as a dict) of a data file.

    ValueError or OSError with its path."""
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        yield from json_lines(path, complete=True)
    elif name.endswith((".csv", ".tsv")):
        # "utf-8-sig": a byte order mark would otherwise be part of the first column's name.
        with located(path), open(path, encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, delimiter="\t" if name.endswith(".tsv") else ",")
            yield from ((reader.line_num, row) for row in reader)
    elif name.endswith((".parquet", ".arrow")):
        try:
            from pyarrow import ipc, parquet
        except ImportError:
            raise ImportError(f"{path}: this file needs pyarrow: pip install pyarrow") from None
        with located(path):
            if name.endswith(".parquet"):
                table = parquet.read_table(path)
            else:
                table = ipc.open_stream(path.read_bytes()).read_all()
            yield from enumerate(table.to_pylist(), 1)
    else:
        raise ValueError(
            f"{path}: unknown kind of file; known: .jsonl, .jsonl.gz, .csv, .tsv, .parquet, .arrow"
        )


def find_files(option, task, places, patterns, required):
    """Path → record of the first place that is a file, or of its files if it is a folder; {}
    without one.

    Takes the files of the first pattern that matches any, in the task's own subfolder if it has
    some. required: FileNotFoundError if the first place holds none."""
    for place in map(Path, filter(None, places)):
        if not place.exists():
            raise FileNotFoundError(f"{option} {place}: no such file or folder")
        files = [] if place.is_dir() else [place]
        for pattern, folder in product(patterns, (place / task.folder, place)):
            files = files or sorted(folder.glob(pattern))
        if files:
            return {path: file_record(path) for path in files}
    if places[0] and required:
        raise FileNotFoundError(
            f"{option} {places[0]}: no file for {task.name} in this folder ({', '.join(patterns)})"
        )
    return {}


def file_record(path):
    """A file's name and the hash of its content, for a run's header."""
    return {"file": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def from_hub(origin, option="--data", endpoint=None):
    """(path, record) of a file of a data set on the hub; from the cache if it is there.

    option: the option for a local file, named in errors. endpoint: the address of a mirror of the
    hub."""
    from huggingface_hub import hf_hub_download

    if endpoint is None:
        offline_if_unreachable()
    try:
        path = Path(
            hf_hub_download(
                origin.repo,
                origin.file,
                repo_type="dataset",
                revision=origin.revision,
                endpoint=endpoint,
            )
        )
    except Exception as error:  # the library raises many kinds; the remedy is the same
        raise OSError(
            f"{hub_reason(error)}: cannot fetch {origin}; give yours with {option} FILE"
        ) from error
    record = file_record(path)
    if origin.sha256 not in (None, record["sha256"]):
        raise ValueError(
            f"{origin} has changed and is not the file that the paper scores; "
            f"give yours with {option} FILE"
        )
    commit = path.parts[path.parts.index("snapshots") + 1]
    return path, {"hub": origin.repo, "revision": commit} | record


def read_with(read, entries, path, fields=()):
    """Yields `read` of each numbered entry.

    ValueError with file and line if it is wrong or lacks one of the fields."""
    for number, entry in entries:
        with located(f"{path}, line {number}"):
            require(entry, fields)
            yield read(entry)


def load(task, data=None, demos=None, limit=None):
    """(items, records of their files, demonstrations, record of the demonstrations) of a task.

    Demonstrations come from the first of these that exists: `demos`, a file or folder; the folder
    `data`; the prompt; the training split; the first items of the data with different questions.
    Their record says which ("source": "file", "fixed", "train" or "first items"), and whether they
    are the paper's. Items with the question of a first item are not scored, except in PopQA, whose
    first nine items are the published demonstrations."""
    items, records = load_items(task, data)
    demonstrations, record = find_demos(task, demos, data)
    # PopQA: an item that is one of the demonstrations is shown the ninth instead.
    shots = task.shots + task.demos_are_items
    if shots and record is None:
        if task.demo_answer == "cot_answer":
            raise ValueError(f"{task.name} needs --demos FILE: its items have no reasoning to show")
        first = {}
        for item in items:
            first.setdefault(item["question"], item)
        for item in first.values():
            answered = item | {"answer": item["references"][0]}
            demonstrations.append(demonstration(task, answered))
        record = {"source": "first items"} | records[0]
    demonstrations = demonstrations[:shots]
    questions = {demo["question"] for demo in demonstrations}
    if task.demos_are_items:
        for item in items:
            if item["question"] in questions:
                item["demonstration"] = True
    elif record and record["source"] == "first items":
        items = [item for item in items if item["question"] not in questions]
    if not items:
        raise ValueError(
            f"{task.name}: the data's first {shots} questions are its demonstrations, and nothing "
            "is left to score: give more data, or --demos FILE"
        )
    if demonstrations:
        record["paper"] = demos_hash(demonstrations) == task.demos_hash
        origin = f"{record['source']} {record.get('hub', record.get('file', ''))}".strip()
        verdict = "the paper's" if record["paper"] else "not the paper's (give those with --demos)"
        print(
            f"{task.name}: {len(demonstrations)} demonstrations ({origin}), {verdict}",
            file=sys.stderr,
        )
    items = [item | {"index": index} for index, item in enumerate(items[:limit])]
    return items, records, demonstrations, record


def load_items(task, data=None):
    """(items in the data's order, each with an `id`; records of their files).

    Prints whether there are as many items as the paper scores."""
    if data is None and task.made_by:
        function, split = task.made_by
        made = pkgutil.resolve_name(function)(split, task.n)
        record = {"made by": f"{function.split(':')[0]}, split {split}, n {task.n}"}
        items = [task.read(item._asdict()) | {"id": index} for index, item in enumerate(made)]
        return items, [record]
    if data is None and task.origin is None:
        raise ValueError(
            f"{task.name} needs --data FILE: python evaluate.py fetch DIR --task {task.name}"
        )
    files = find_files("--data", task, [data], task.files, required=task.origin is None)
    files = files or dict([from_hub(task.origin)])
    items = []
    names = ", ".join(path.name for path in files)
    if len(files) > 1 and not task.splits:
        raise ValueError(f"--data {data}: several files fit {task.name}, name one: {names}")
    for path in files:
        split = {"split": re.sub(r"^\d+-", "", path.name.split(".")[0])} if task.splits else {}
        entries = ((number, split | entry) for number, entry in read_entries(path))
        for count, item in enumerate(read_with(task.read, entries, path, task.fields)):
            if item.get("id") is None:
                item["id"] = f"{item['split']}-{count}" if split else count
            items.append(item)
    if not items:
        raise ValueError(f"{names}: holds no items of {task.name}")
    verdict = "as in the paper" if len(items) == task.n else f"the paper scores {task.n:,}"
    print(f"{task.name}: {len(items):,} items of {names}, {verdict}", file=sys.stderr)
    return items, list(files.values())


def find_demos(task, demos, data):
    """(demonstrations, record); ([], None) if there are none, or if they must be items of the
    data."""
    if not task.shots:
        return [], None
    read = partial(demonstration, task)
    places = [demos, data if data and Path(data).is_dir() else None]
    found_elsewhere = task.fixed_demos or task.training or task.demos_are_items
    files = find_files("--demos", task, places, [task.demo_file], required=not found_elsewhere)
    for path, record in files.items():
        entries = (pair for pair in read_entries(path) if pair[1].get("used_in_paper") is not False)
        demonstrations = list(read_with(read, entries, path))
        if not demonstrations:
            raise ValueError(f"{path}: holds no demonstrations")
        return demonstrations, {"source": "file"} | record
    if task.fixed_demos:
        return list(map(read, task.fixed_demos)), {"source": "fixed"}
    if not task.training:
        return [], None
    path, record = from_hub(task.training, "--demos")
    first = islice(read_entries(path), task.shots)
    return list(map(read, read_with(task.read_training, first, path))), {"source": "train"} | record


def demonstration(task, entry):
    """{"question", "user", "answer"} of an entry with the task's fields."""
    template = task.demo or task.context + task.question
    answer = task.demo_answer if task.demo_answer in entry else "answer"
    names = re.findall(r"{(\w+)}", template)
    require(entry, [*names, answer])
    fields = {name: field(entry, name) for name in names}
    return {
        "question": fields["question"],
        "user": template.format_map(fields),
        "answer": field(entry, answer),
    }


def demos_hash(demos):
    """A hash of the turns as the model reads them, to recognise the paper's demonstrations in any
    file."""
    return short_hash(json.dumps([[demo["user"], demo["answer"]] for demo in demos]).encode())
