"""Loads the items and the demonstrations of a task from a file, a folder or the data set's public home."""

import csv
import functools
import hashlib
import json
import logging
import pkgutil
import random
import re
import sys
from pathlib import Path

from runtime.files import json_lines, one_line, short_hash
from tasks.items import field, located


def read_rows(path):
    """Yields (line or row number, row as a dict) of a data file. ValueError or OSError with its path."""
    path = Path(path)
    kind = next((suffix for suffix in READERS if path.name.lower().endswith(suffix)), None)
    if kind is None:
        raise ValueError(f"{path}: unknown kind of file; known: {', '.join(READERS)}")
    try:
        yield from READERS[kind](path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a table in UTF-8 ({error}); fetch it again") from error


def read_table(path):
    csv.field_size_limit(2**31 - 1)
    # "utf-8-sig": a byte order mark would otherwise be part of the first column's name.
    with open(path, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if path.name.endswith(".tsv") else ",")
        for row in reader:
            if None in row:
                raise ValueError(f"{path}, line {reader.line_num}: more fields than the header")
            yield reader.line_num, row


def read_columns(path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{path}: parquet and arrow files need pyarrow: pip install pyarrow") from None
    try:
        rows = (pyarrow.parquet.read_table(path) if path.name.endswith(".parquet")
                else pyarrow.ipc.open_stream(path.read_bytes()).read_all())
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable {path.suffix[1:]} file ({one_line(error, 100)})") from error
    yield from enumerate(rows.to_pylist(), 1)


read_jsonl = functools.partial(json_lines, complete=True)
READERS = {".jsonl": read_jsonl, ".jsonl.gz": read_jsonl, ".csv": read_table, ".tsv": read_table,
           ".parquet": read_columns, ".arrow": read_columns}


def find_files(option, task, places, patterns):
    """Path → record of the first place that is a file, or of its files if it is a folder; {} without a place.

    Takes the files of the first pattern that matches any, in the task's own subfolder if it has some."""
    for place in map(Path, filter(None, places)):
        matches = (sorted(folder.glob(pattern)) for pattern in patterns for folder in (place / task.folder, place))
        if files := next(filter(None, matches), []) if place.is_dir() else [place]:
            return {path: file_record(path) for path in files}
    if places[0]:
        raise FileNotFoundError(f"{option} {places[0]}: no file for {task.name} in this folder ({', '.join(patterns)})")
    return {}


def file_record(path):
    """A file's name and the hash of its content, for a run's settings."""
    return {"file": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def from_hub(home, option="--data"):
    """(path, record) of a file at its public home; from the cache if it is there.

    option: the option for a local file, named in errors."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)       # it warns at every retry
    try:
        from huggingface_hub import hf_hub_download
        path = Path(hf_hub_download(home.repo, home.file, repo_type="dataset", revision=home.revision))
    except Exception as error:                      # the library raises many kinds; the remedy is the same
        raise OSError(f"cannot fetch {home} ({type(error).__name__}); give yours with {option} FILE") from error
    record = file_record(path)
    if home.sha256 not in (None, record["sha256"]):
        raise ValueError(f"{home} has changed and is not the file that the paper scores; give yours with {option} FILE")
    commit = path.parts[path.parts.index("snapshots") + 1] if "snapshots" in path.parts else home.revision
    return path, {"hub": home.repo, "revision": commit} | record


def read_with(read, numbered_rows, path, home):
    """Yields `read` of each row. ValueError names the file, the line, and the data that the task reads."""
    for number, row in numbered_rows:
        with located(f"{path}, line {number}", f"; this task reads {home}"):
            yield read(row)


def load(task, data=None, demos=None, limit=None, seed=1234):
    """(items, records of their files, demonstrations, record of the demonstrations) of a task.

    Demonstrations come from the first of these that exists: `demos`, a file or folder; the folder `data`; the prompt;
    the training split; the first items of the data with different questions. Their record says which ("source":
    "file", "fixed", "train" or "first items"), and whether they are the paper's. Items with the question of a first
    item are not scored, except in PopQA, whose first nine items are the published demonstrations."""
    items, records = load_items(task, data)
    demonstrations, record = find_demos(task, demos, data, seed)
    shots = task.shots + task.demos_are_items           # PopQA: an item that is one of them is shown the ninth instead
    if shots and record is None:
        first = {}
        for item in items:
            first.setdefault(item["question"], item)
        demonstrations = [demonstration(task, item | {"answer": item["references"][0]}) for item in first.values()]
        record = {"source": "first items"} | records[0]
    demonstrations = demonstrations[:shots]
    questions = {demo["question"] for demo in demonstrations}
    if task.demos_are_items:
        items = [item | {"demonstration": True} if item["question"] in questions else item for item in items]
    elif record and record["source"] == "first items":
        items = [item for item in items if item["question"] not in questions]
    if not items:
        raise ValueError(f"{task.name}: the data's first {shots} questions are its demonstrations, and nothing is left "
                         "to score: give more data, or --demos FILE")
    if demonstrations:
        record["paper"] = demos_hash(demonstrations) == task.demos_hash
        origin = f"{record['source']} {record.get('hub', record.get('file', ''))}".strip()
        verdict = "the paper's" if record["paper"] else "not the paper's (give those with --demos)"
        print(f"{task.name}: {len(demonstrations)} demonstrations ({origin}), {verdict}", file=sys.stderr)
    return [item | {"index": index} for index, item in enumerate(items[:limit])], records, demonstrations, record


def load_items(task, data=None):
    """(items in the data's order, each with an `id`; records of their files).

    Prints whether there are as many items as the paper scores."""
    if data is None and task.made_by:
        function, split = task.made_by
        rows = pkgutil.resolve_name(function)(split, task.n)
        record = {"made by": f"{function.split(':')[0]}, split {split}, n {task.n}"}
        return [task.read(row._asdict()) | {"id": index} for index, row in enumerate(rows)], [record]
    if data is None and isinstance(task.home, str):
        raise ValueError(f"{task.name} needs --data; its data are {task.home}")
    files, items = find_files("--data", task, [data], task.files) or dict([from_hub(task.home)]), []
    names = ", ".join(path.name for path in files)
    if len(files) > 1 and not task.splits:
        raise ValueError(f"--data {data}: several files fit {task.name}, name one: {names}")
    for path in files:
        split = {"split": re.sub(r"^\d+-", "", path.name.split(".")[0])} if task.splits else {}
        rows = ((number, split | row) for number, row in read_rows(path))
        for count, item in enumerate(read_with(task.read, rows, path, task.home)):
            if item.get("id") is None:
                item["id"] = f"{item['split']}-{count}" if split else count
            items.append(item)
    if not items:
        raise ValueError(f"{names}: holds no rows; {task.name} reads {task.home}")
    verdict = "as in the paper" if len(items) == task.n else f"the paper scores {task.n:,}"
    print(f"{task.name}: {len(items):,} items of {names}, {verdict}", file=sys.stderr)
    return items, list(files.values())


def find_demos(task, demos, data, seed):
    """(demonstrations, record); ([], None) if there are none, or if they must be items of the data."""
    if not task.shots:
        return [], None
    read, places = functools.partial(demonstration, task), [demos, data if data and Path(data).is_dir() else None]
    for path, record in find_files("--demos", task, places, [task.demo_file]).items():
        rows = ((number, row) for number, row in read_rows(path) if row.get("used_in_paper") is not False)
        if demonstrations := list(read_with(read, rows, path, "demonstrations")):
            return demonstrations, {"source": "file"} | record
        raise ValueError(f"{path}: holds no demonstrations")
    if task.fixed_demos:
        return list(map(read, task.fixed_demos)), {"source": "fixed"}
    if not task.training:
        return [], None
    path, record = from_hub(task.training, "--demos")
    rows, drawn = list(read_rows(path)), not task.first_of_training
    rows = random.Random(seed).sample(rows, task.shots) if drawn else rows[:task.shots]
    demonstrations = map(read, read_with(task.read_training, rows, path, task.training))
    return list(demonstrations), {"source": "train", "seed": seed if drawn else None} | record


def demonstration(task, row):
    """{"question", "user", "answer"} of a row with the task's fields."""
    template = task.demo or task.context + task.question
    fields = {name: field(row, name) for name in re.findall(r"{(\w+)}", template)}
    answer = field(row, task.demo_answer if task.demo_answer in row else "answer")
    return {"question": fields["question"], "user": template.format_map(fields), "answer": answer}


def demos_hash(demos):
    """A hash of the turns as the model reads them, to recognise the paper's demonstrations in any file."""
    return short_hash(json.dumps([[demo["user"], demo["answer"]] for demo in demos]).encode())
