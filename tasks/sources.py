"""Loads the items and the demonstrations of a task from a file, a folder or the data set's public home."""

import csv
import functools
import json
import logging
import pkgutil
import random
import re
import sys
from pathlib import Path

from runtime.files import one_line, sha256, short_hash
from runtime.jsonl import json_lines
from tasks import prompts

# ---------------------------------------------------------------------------------------------------------------- files


def read_rows(path):
    """Yields (line or row number, row as a dict) of a data file. ValueError or OSError with its path."""
    path = Path(path)
    kind = next((suffix for suffix in READERS if path.name.lower().endswith(suffix)), None)
    if kind is None:
        raise ValueError(f"{path}: unknown kind of file; known: {', '.join(READERS)}")
    number = 0
    try:
        for number, row in READERS[kind](path):
            yield number, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}, after line {number}: not a table in UTF-8 ({error}); fetch it again") from error


def read_table(path):
    csv.field_size_limit(2**31 - 1)
    # "utf-8-sig": a byte order mark would otherwise be part of the first column's name.
    with open(path, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if path.name.endswith(".tsv") else ",")
        for row in reader:
            if None in row:
                raise ValueError(f"{path}, line {reader.line_num}: more fields than the "
                                 f"{len(reader.fieldnames)} of the header")
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


def matching_files(folder, task, patterns):
    """The files of the first pattern that matches any, sorted; the task's own subfolder is searched first."""
    for pattern in patterns:
        for place in (Path(folder) / task.folder, Path(folder)):
            if files := sorted(place.glob(pattern)):
                return files
    return []


def file_record(path):
    """A file's name and the hash of its content, for a run's settings."""
    return {"file": Path(path).name, "sha256": sha256(Path(path).read_bytes())}


def from_hub(home, option="--data"):
    """(path, commit) of a file at its public home; from the cache if it is there.

    option: the option that names a file of one's own, for the message."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)       # it warns at every retry
    try:
        from huggingface_hub import hf_hub_download
        path = Path(hf_hub_download(home.repo, home.file, repo_type="dataset", revision=home.revision))
    except Exception as error:                      # the library raises many kinds; the remedy is the same
        raise OSError(f"cannot fetch {describe(home)} ({type(error).__name__}); "
                      f"give yours with {option} FILE") from error
    if home.sha256 not in (None, file_record(path)["sha256"]):
        raise ValueError(f"{describe(home)} has changed and is not the file that the paper scores; give yours "
                         f"with {option} FILE")
    commit = path.parts[path.parts.index("snapshots") + 1] if "snapshots" in path.parts else home.revision
    return path, commit


def describe(home):
    return home if isinstance(home, str) else f"{home.file} of the hub data set {home.repo}"


# ---------------------------------------------------------------------------------------------------------------- items


def load(task, data=None, demos=None, limit=None, seed=1234):
    """(items, records of their files, demonstrations, record of the demonstrations) of a task.

    Demonstrations come from the first of these that exists: `demos`, a file or folder; the folder `data`; the prompt
    (`fixed_demos`); the training split; the first items of the data, which then are not scored. Their record says which
    ("source": "file", "fixed", "train" or "first items"), and whether they are the paper's."""
    rows, record = find_demos(task, demos, data, seed)
    use_first = bool(task.shots) and record is None
    items, records = load_items(task, data, None if use_first else limit)
    if use_first:
        rows, items = split_first_items(task, items, limit)
        record = {"source": "first items"} | records[0]
    chosen = [demonstration(task, place, row) for place, row in rows][:task.shots + task.demos_are_items]
    if chosen:
        record["paper"] = demos_hash(chosen) == task.demos_hash
        print_origin(task, chosen, record)
    return prompts.mark_demonstrations(task, items, chosen), records, chosen, record


def load_items(task, data=None, limit=None):
    """(items, records of their files). Prints whether a complete file has as many items as the paper scores."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: at least 1")
    if data is None and task.made_by:
        function, split = task.made_by
        rows = pkgutil.resolve_name(function)(split, task.n)[:limit]
        items = [task.read(row._asdict()) | {"index": index, "id": index} for index, row in enumerate(rows)]
        return items, [{"made by": f"{function.split(':')[0]}, split {split}, n {task.n}"}]
    files, records = find_data(task, data)
    items = read_items(task, files, limit)
    if task.n and limit is None:
        verdict = "as in the paper" if len(items) == task.n else f"the paper scores {task.n:,}"
        print(f"{task.name}: {len(items):,} items of {', '.join(record['file'] for record in records)}, {verdict}",
              file=sys.stderr)
    return items, records


def find_data(task, data=None):
    """(paths, records) of a task's data: a file, a folder that holds it, or its public home."""
    if data is None:
        if isinstance(task.home, str):
            raise ValueError(f"{task.name} needs --data; its data are {task.home}")
        path, commit = from_hub(task.home)
        return [path], [{"hub": task.home.repo, "revision": commit} | file_record(path)]
    if not Path(data).is_dir():
        files = [Path(data)]
    elif not (files := matching_files(data, task, task.files)):
        raise FileNotFoundError(f"--data {data}: no file for {task.name} in this folder ({', '.join(task.files)})")
    elif len(files) > 1 and not task.splits:
        raise ValueError(f"--data {data}: several files fit {task.name}, name one: "
                         + ", ".join(path.name for path in files))
    return files, [file_record(path) for path in files]


def read_items(task, files, limit=None):
    """The task's items in the data's order, each with its `index` and `id`."""
    items = []
    for path in files:
        split = {"split": re.sub(r"^\d+-", "", path.name.split(".")[0])} if task.splits else {}
        for count, (number, row) in enumerate(read_rows(path)):
            if limit is not None and len(items) == limit:
                return items
            item = read_row(task.read, f"{path}, line {number}", split | row, task.home)
            if item.get("id") is None:
                item["id"] = f"{item['split']}-{count}" if split else count
            items.append(item | {"index": len(items)})
    if not items:
        raise ValueError(f"{', '.join(map(str, files))}: holds no rows; {task.name} reads {describe(task.home)}")
    return items


def read_row(read, place, row, home):
    try:
        return read(row)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: {error}; this task reads {describe(home)}") from error


# ------------------------------------------------------------------------------------------------------- demonstrations


def find_demos(task, demos, data, seed):
    """([(place, row)], record) of the demonstrations; ([], None) if they must be items of the data."""
    if not task.shots:
        if demos is not None and Path(demos).is_file():
            raise ValueError(f"--demos {demos}: {task.name} takes no demonstrations")
        return [], None
    if path := find_demo_file(task, demos, data):
        rows = [(f"{path}, line {number}", row) for number, row in read_rows(path)
                if row.get("used_in_paper") is not False]
        if not rows:
            raise ValueError(f"{path}: holds no demonstrations")
        return rows, {"source": "file"} | file_record(path)
    if task.fixed_demos:
        return [(task.name, row) for row in task.fixed_demos], {"source": "fixed"}
    if task.training:
        path, commit = from_hub(task.training, "--demos")
        rows = list(read_rows(path))
        rows = rows[:task.shots] if task.first_of_training else random.Random(seed).sample(rows, task.shots)
        places = [f"{path}, line {number}" for number, _ in rows]
        return ([(place, read_row(task.read_training, place, row, task.training))
                 for place, (_, row) in zip(places, rows, strict=True)],
                {"source": "train", "hub": task.training.repo, "revision": commit,
                 "seed": None if task.first_of_training else seed} | file_record(path))
    return [], None


def find_demo_file(task, demos, data):
    if demos is not None and not Path(demos).is_dir():
        return Path(demos)
    for folder in (demos, data):
        if folder is not None and Path(folder).is_dir() and (files := matching_files(folder, task, [task.demo_file])):
            return files[0]
    if demos is not None:
        raise FileNotFoundError(f"--demos {demos}: no demonstrations for {task.name} in this folder "
                                f"({task.folder}/{task.demo_file})")
    return None


def split_first_items(task, items, limit=None):
    """([(place, row)] of the demonstrations, items left to score): the first items with different questions.

    An item with the question of a demonstration is not scored. PopQA is the exception: its first nine items are the
    published demonstrations. They are scored, and an item that is a demonstration is shown the ninth instead."""
    first = {}
    for item in items:
        first.setdefault(item["question"], item)
        if len(first) == task.shots + task.demos_are_items:
            break
    rows = [(f"{task.name}, item {item['id']}", item | {"answer": item["references"][0]}) for item in first.values()]
    if not task.demos_are_items:
        items = [item for item in items if item["question"] not in first]
    if not items:
        raise ValueError(f"{task.name}: the data's first {len(first)} questions are its demonstrations, and nothing is "
                         "left to score: give more data, or --demos FILE")
    return rows, [item | {"index": index} for index, item in enumerate(items[:limit])]


def demonstration(task, place, row):
    """{"question", "user", "answer"} of a row; ValueError with its place if a field is missing."""
    if task.demo_answer not in row and "answer" in row:
        row = row | {task.demo_answer: row["answer"]}
    names = [*re.findall(r"{(\w+)}", task.demo), task.demo_answer]
    for name in names:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{place}: field {name!r} is missing or not text; a demonstration of {task.name} has "
                             f"{', '.join(names)}")
    return {"question": row["question"], "user": task.demo.format_map(row), "answer": row[task.demo_answer]}


def demos_hash(demos):
    """A hash of the turns as the model reads them, to recognise the paper's demonstrations in any file."""
    return short_hash(json.dumps([[demo["user"], demo["answer"]] for demo in demos]).encode())


def print_origin(task, demos, record):
    """Prints how many demonstrations there are, where they come from and whether they are the paper's."""
    origin = {"file": f"from {record.get('file')}", "fixed": "part of the prompt",
              "train": f"from the training split of {record.get('hub')}",
              "first items": f"the first items of {record.get('file')}"
                             + ", whose questions are not scored" * (not task.demos_are_items)}[record["source"]]
    verdict = "the paper's" if record["paper"] else "not the paper's (give those with --demos)"
    few = f" (the paper shows {task.shots})" if len(demos) < task.shots else ""
    print(f"{task.name}: {len(demos)} demonstrations{few}, {origin}; {verdict}", file=sys.stderr)
