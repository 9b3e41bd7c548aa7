"""Loads the items and the demonstrations of a task from a file, a folder or the data set's
repository on the hub."""

import csv
import hashlib
import json
import random
import re
from collections import defaultdict
from functools import partial
from itertools import islice, product
from pathlib import Path

from paper.tasks.prompts import last_turn
from runtime.errors import InputError, hub_reason, offline_if_unreachable
from runtime.fields import field, list_of, located
from runtime.files import json_bytes, json_hash, json_lines, object_of, read_json
from runtime.progress import say


def read_entries(path):
    """Yields (line or row number, entry as a dict) of a data file.

    InputError or OSError with its path."""
    name = path.name.lower()
    kind = "jsonl" if name.endswith(".jsonl.gz") else name.rpartition(".")[2]
    if kind == "jsonl":
        yield from json_lines(path, complete=True)
    elif kind == "json":
        rows = read_json(path, object, object_pairs_hook=object_of)
        if not list_of(dict)(rows):
            raise InputError(f"{path} must contain a JSON list of objects")
        for number, row in enumerate(rows, 1):
            with located(f"{path}, line {number}"):
                json_bytes(row)  # refuses NaN, as in JSON lines
            yield number, row
    elif kind in ("csv", "tsv"):
        yield from read_table(path)
    elif kind in ("parquet", "arrow"):
        from pyarrow import ipc, parquet  # optional

        with located(path):
            if kind == "parquet":
                table = parquet.read_table(path)
            else:
                table = ipc.open_stream(path.read_bytes()).read_all()
            check_unique(table.column_names)
            yield from enumerate(table.to_pylist(), 1)
    else:
        raise InputError(
            f"{path}: unknown kind of file; known: .csv, .tsv (a spreadsheet is saved as one), "
            ".json, .jsonl, .jsonl.gz, .parquet, .arrow"
        )


def read_table(path):
    """Yields (line number, row) of a table in text, without empty rows.

    Cells are separated by commas, semicolons or tabs, the most frequent of these in the first line:
    spreadsheets write semicolons where the comma is the decimal sign."""
    csv.field_size_limit(2**31 - 1)  # by default, 131,072 characters
    # "utf-8-sig": a byte order mark would otherwise be part of the first column's name.
    with located(path), open(path, encoding="utf-8-sig", newline="") as lines:
        try:
            delimiter = max(",;\t", key=lines.readline().count)
            lines.seek(0)
            reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
            check_unique(reader.fieldnames or [])
            for row in reader:
                if None in row or None in row.values():
                    raise InputError(
                        f"line {reader.line_num} has not as many cells as the first line; "
                        f"a cell that contains {delimiter!r} must be in double quotes"
                    )
                if any(row.values()):
                    yield reader.line_num, row
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 ({error}); save the table as “CSV UTF-8”") from None


def check_unique(columns):
    """InputError for two columns of one name, one of which would be lost. Those without a name are
    not read."""
    for name in filter(None, columns):
        if columns.count(name) > 1:
            raise InputError(f"two columns are called {name!r}; rename one")


def find_files(path, task, patterns):
    """The path if it is a file; of a folder, the files of the first pattern that matches any, in
    the task's own subfolder if it has some."""
    if path is None:
        return []
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = [] if path.is_dir() else [path]
    for pattern, folder in product(patterns, (path / task.folder, path)):
        files = files or sorted(folder.glob(pattern))
    return files


def file_record(path):
    """A file's name and the hash of its content, for a run's header."""
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def from_hub(origin, endpoint=None):
    """(path, record) of a file of a data set on the hub; from the cache if it is there.

    endpoint: the address of a mirror of the hub."""
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
        record = file_record(path)
        if origin.sha256 not in (None, record["sha256"]):
            raise InputError("it is not the file that the paper scores")
    except Exception as error:  # the library raises many kinds; the remedy is the same
        raise OSError(
            f"{hub_reason(error)}: cannot fetch {origin.file} of {origin.repo}; "
            "give yours with --data FILE (or --demos FILE)"
        ) from error
    commit = path.parts[path.parts.index("snapshots") + 1]
    return path, {"hub": origin.repo, "revision": commit} | record


def read_with(read, path):
    """Yields read(entry) for each entry of a data file.

    InputError with file and line if an entry is wrong."""
    for number, entry in read_entries(path):
        with located(f"{path}, line {number}"):
            yield read(entry)


def load_data(task, data=None, demos=None):
    """(items, records of their files, demonstrations, record of the demonstrations) of a task.

    Demonstrations come from the first of these that exists: `demos`, a file or folder; the folder
    `data`; the prompt; the training split; the first items of the data with different questions.
    Their record says which ("source": "file", "fixed", "train" or "first items"), and whether they
    are the paper's. Items with the question of a first item are not scored, except in PopQA, whose
    first nine items are the published demonstrations. Own questions have demonstrations only from
    `demos`."""
    items, records = load_items(task, data)
    demonstrations, record = [], None
    if task.shots or task.own and demos:
        demonstrations, record = find_demos(task, demos, data, items, records)
        questions = {demo["question"] for demo in demonstrations}
        if task.demos_are_items:
            for item in items:
                if item["question"] in questions:
                    item["demonstration"] = True
        elif record["source"] == "first items":
            items = [item for item in items if item["question"] not in questions]
        record["paper"] = demos_hash(demonstrations) == task.demos_hash
        origin = f"{record['source']} {record.get('file', '')}".strip()
        verdict = ", the paper's" if record["paper"] else ""
        if task.n and not record["paper"]:
            verdict = ", not the paper's (give those with --demos)"
        say(f"{task.name}: {len(demonstrations)} demonstrations ({origin}){verdict}")
    if not items:
        raise InputError(
            f"{task.name}: the data hold no items besides {len(demonstrations)} demonstrations: "
            "give more, or --demos FILE"
        )
    return items, records, demonstrations, record


def draw_items(items, limit=None, sample_seed=None, skip=0):
    """At most `limit` items after the first `skip`, each with its `index`: in the data's order, or
    in that of `shuffle` if there is a seed."""
    if sample_seed is not None:
        items = shuffle(items, sample_seed)
    items = items[skip:][:limit]
    return [item | {"index": index} for index, item in enumerate(items)]


def shuffle(items, seed):
    """The items in random order. Every prefix holds each split in its share of all items."""
    splits = defaultdict(list)
    for item in random.Random(seed).sample(items, len(items)):
        splits[item.get("split")].append(item)
    ranked = []
    for split in splits.values():
        ranked += [((i + 0.5) / len(split), item) for i, item in enumerate(split)]
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def load_items(task, data):
    """(items in the data's order, each with an `id`; records of their files).

    Prints whether there are as many items as the paper scores."""
    files = {path: file_record(path) for path in find_files(data, task, task.files)}
    if not files:
        if data or task.origin is None:
            names = ", ".join(task.files) + f", there or in {task.folder}/" * bool(task.folder)
            raise InputError(
                f"{data or '--data'}: no file for {task.name} ({names}); "
                + ("evaluate.py fetch downloads it" if task.n else "name one with --data")
            )
        files = dict([from_hub(task.origin)])
    names = ", ".join(path.name for path in files)
    if len(files) > 1 and not task.splits:
        raise InputError(f"--data {data}: several files fit {task.name}, name one: {names}")
    items = []
    for path in files:
        split = re.sub(r"^\d+-", "", path.name.split(".")[0])
        for count, item in enumerate(read_with(partial(item_with_id, task), path)):
            if task.splits:
                item |= {"id": f"{split}-{count}", "split": split}
            items.append({"id": count} | item)
    verdict = f", the paper scores {task.n:,}" * bool(task.n)
    if len(items) == task.n:
        verdict = ", as in the paper"
    say(f"{task.name}: {len(items):,} items of {names}{verdict}")
    if task.own:
        check_ids(items)
        name_lists(items)
    return items, list(files.values())


def check_ids(items):
    """InputError for one id of two questions: runs are matched by ids."""
    rows = {}
    for row, item in enumerate(items, 1):
        first, question = rows.setdefault(item["id"], (row, item["question"]))
        if question != item["question"]:
            raise InputError(
                f"rows {first} and {row} are different questions with one id, {item['id']!r}: "
                "give each question its own, or leave out the ids"
            )


def name_lists(items):
    """Print the first cell that looks like a list of answers but is one answer, if a tenth of the
    rows have one."""
    for name, column in ("references", "answers"), ("memory", "memory"):
        cells = {}
        for row, item in enumerate(items, 1):
            texts = item.get(name, [])
            if len(texts) == 1 and re.search("[;|]", texts[0]):
                cells[row] = texts[0]
        if 10 * len(cells) > len(items):
            row, text = next(iter(cells.items()))
            parts = json.dumps(re.split(r"\s*[;|]\s*", text), ensure_ascii=False)
            say(
                f"{len(cells)} of {len(items)} rows have one answer with ; or | in {column}, such "
                f"as row {row}, {text!r}; several answers are a JSON list: {parts}"
            )


def item_with_id(task, entry):
    """The item of an entry, with its `id` if it has one. InputError for what a run cannot store."""
    item = task.read(entry)
    for name in ("id", "question_id", "key"):
        if name in entry:
            item = {"id": field(entry, name, "a text or a number", null=None)} | item
            break
    json_bytes(item)
    return item


def find_demos(task, demos, data, items, records):
    """(demonstrations, record) from the first origin that `load_data` names."""
    folder = data if data and Path(data).is_dir() else None
    patterns = [task.demo_file]
    files = find_files(demos, task, patterns) or find_files(folder, task, patterns)
    if files:
        return read_demos(task, files[0]), {"source": "file"} | file_record(files[0])
    read = partial(demonstration, task)
    if task.fixed_demos:
        return list(map(read, task.fixed_demos)), {"source": "fixed"}
    if task.training:
        origin, read_training = task.training
        path, record = from_hub(origin)
        rows = islice(read_with(read_training, path), task.shots)
        return list(map(read, rows)), {"source": "train"} | record
    if (demos and not task.demos_are_items) or task.demo_answer == "cot_answer":
        raise InputError(
            f"{task.name} needs {task.demo_file}: give it, or its folder, with --demos"
        )
    first = {}
    for item in items:
        first.setdefault(item["question"], item | {task.demo_answer: item["references"][0]})
    shown = islice(first.values(), task.shots)
    return list(map(read, shown)), {"source": "first items"} | records[0]


def read_demos(task, path):
    """The demonstrations in a file."""

    def read(entry):
        return demonstration(task, entry) if entry.get("used_in_paper") is not False else None

    demos = list(islice(filter(None, read_with(read, path)), task.shots))
    if not demos:
        raise InputError(f"{path} holds no demonstrations")
    return demos


def demonstration(task, entry):
    """The fields that the task's template names, with the turns "user" and "answer"."""
    if task.own:
        item = task.read(entry)
        return item | {"user": last_turn(task, item), "answer": item["references"][0]}
    template = task.demo or task.template
    fields = {name: field(entry, name) for name in re.findall(r"{(\w+)}", template)}
    answer = field(entry, task.demo_answer)
    return fields | {"user": template.format_map(fields), "answer": answer}


def demos_hash(demos):
    """A hash of the turns as the model reads them, to recognise the paper's demonstrations in any
    file."""
    return json_hash([[demo["user"], demo["answer"]] for demo in demos])
