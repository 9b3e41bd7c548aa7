"""Data files and demonstrations: from a path, a folder or the data set's public home to items, with file and line in
every complaint."""

import codecs
import csv
import gzip
import hashlib
import json
import logging
import random
import re
import sys
import zlib
from pathlib import Path

from runtime.jsonl import parse
from tasks import prompts

FORMATS = (".jsonl", ".jsonl.gz", ".csv", ".tsv", ".parquet", ".arrow")


def rows_of(path):
    """Yields (line or row number, row) of a data file; a row is a dict by field name."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    kind = next((suffix for suffix in reversed(FORMATS) if path.name.lower().endswith(suffix)), None)
    if kind is None:
        raise ValueError(f"{path}: unknown kind of file; known: {', '.join(FORMATS)}")
    place = "line 1"
    try:
        for number, row in READERS[kind](path):
            place = f"after {'row' if kind in ('.parquet', '.arrow') else 'line'} {number}"
            yield number, row
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}, {place}: the gzip file ends early or is damaged; fetch it again") from error
    except gzip.BadGzipFile as error:
        raise ValueError(f"{path}: not a gzip file; fetch it again or drop the .gz of its name") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, {place}: not UTF-8 text ({error.reason})") from error
    except csv.Error as error:
        raise ValueError(f"{path}, {place}: not a table ({error})") from error


def json_lines(path):
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                yield number, parse(line, f"{path}, line {number}")
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None


def table(path):
    csv.field_size_limit(2**31 - 1)
    # A byte order mark would otherwise be part of the first column's name.
    with open(path, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if path.name.endswith(".tsv") else ",")
        for row in reader:
            if None in row:
                raise ValueError(f"{path}, line {reader.line_num}: more fields than the "
                                 f"{len(reader.fieldnames)} of the header")
            yield reader.line_num, row


def columns(path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: parquet and arrow files need pyarrow; pip install pyarrow") from None
    try:
        if path.name.endswith(".parquet"):
            rows = pyarrow.parquet.read_table(path)
        else:
            with pyarrow.memory_map(str(path)) as source:
                try:
                    rows = pyarrow.ipc.open_stream(source).read_all()
                except pyarrow.ArrowInvalid:
                    rows = pyarrow.ipc.open_file(source).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable {path.suffix[1:]} file ({str(error).splitlines()[0]})") from error
    yield from enumerate(rows.to_pylist(), 1)


READERS = {".jsonl": json_lines, ".jsonl.gz": json_lines, ".csv": table, ".tsv": table,
           ".parquet": columns, ".arrow": columns}


def inside(folder, patterns):
    """The files of a folder that match the first pattern that has any, sorted."""
    return next((files for files in (sorted(Path(folder).glob(pattern)) for pattern in patterns) if files), [])


def from_hub(home, option="--data", use=""):
    """(path, commit) of a data set's file at its public home; from the cache where it is there already.

    use: what the file is for, and `option` what takes one in its place."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)       # it warns at every retry
    try:
        from huggingface_hub import hf_hub_download
        path = Path(hf_hub_download(home.repo, home.file, repo_type="dataset", revision=home.revision))
    except Exception as error:                      # a client library's errors are many; the remedy is one
        raise OSError(f"cannot fetch {home.file} of the hub data set {home.repo} ({type(error).__name__})"
                      + (f", {use}" if use else "") + f"; give yours with {option} FILE") from error
    if home.sha256 not in (None, fingerprint(path)["sha256"]):
        raise ValueError(f"{home.file} of the hub data set {home.repo} is not the file that the paper scores, it has "
                         f"changed there; give yours with {option} FILE")
    commit = path.parts[path.parts.index("snapshots") + 1] if "snapshots" in path.parts else home.revision
    return path, commit


def fingerprint(path):
    """What a result says about a file: its name and the hash of its content."""
    return {"file": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def files_of(task, data=None):
    """(paths, records for the run's settings) of a task's data: a file, a folder that holds it, or its public home."""
    if data is not None and Path(data).is_dir():
        files = inside(data, task.files)
        if not files:
            raise FileNotFoundError(f"{data}: no file for {task.name} in this folder "
                                    f"(looked for {', '.join(task.files)})")
        if len(files) > 1 and not task.splits:
            raise ValueError(f"{data}: several files fit {task.name}, name one: "
                             + ", ".join(path.name for path in files))
        return files, [fingerprint(path) for path in files]
    if data is not None:
        path = Path(data)
        if not path.is_file():
            raise FileNotFoundError(f"--data {path}: no such file or folder")
        return [path], [fingerprint(path)]
    if isinstance(task.home, str):
        raise ValueError(f"{task.name} needs --data; its data are {task.home}")
    path, commit = from_hub(task.home)
    return [path], [{"hub": task.home.repo, "revision": commit} | fingerprint(path)]


def read_items(task, files, limit=None):
    """The task's items in the data's order, each with its `index` and `id`."""
    items = []
    for path in files:
        split = {"split": re.sub(r"^\d+-", "", path.name.split(".")[0])} if task.splits else {}
        for count, (number, row) in enumerate(rows_of(path)):
            if limit is not None and len(items) == limit:
                return items
            item = read_row(task.read, f"{path}, line {number}", split | row, describe(task.home))
            if item.get("id") is None:
                item["id"] = f"{item['split']}-{count}" if split else count
            items.append(item | {"index": len(items)})
    if not items:
        raise ValueError(f"{', '.join(map(str, files))}: holds no rows; what is read is {describe(task.home)}")
    return items


def read_row(read, place, row, expected):
    try:
        return read(row)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: {error}; what is read is {expected}") from error


def describe(home):
    return home if isinstance(home, str) else f"{home.file} of the hub data set {home.repo}"


def load(task, data=None, demos=None, limit=None, seed=1234):
    """(items, records, demonstrations, their record) of a task. Items that are demonstrations are marked so.

    The demonstrations are those of `demos`, a file or folder; else of the data's folder; else the prompt's own; else
    from the training split; else the first items of the data, which are then not scored. Their record says which,
    "source": "file", "fixed", "train" or "first items", and whether they are the paper's, "paper": true or false."""
    rows, record = find_demos(task, demos, data, seed)
    first = task.shots and record is None
    items, records = load_items(task, data, None if first else limit)
    if first:
        rows, items = first_items(task, items, limit)
        record = {"source": "first items"} | records[0]
    shown = [demonstration(task, where, row) for where, row in rows][:task.shots + task.demos_are_items]
    if shown:
        record["paper"] = digest(shown) == task.demos_hash
        report(task, shown, record)
    return prompts.mark(task, items, shown), records, shown, record


def load_items(task, data=None, limit=None):
    """(items, records). Says on standard error whether a whole file has as many items as the paper scores."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: at least 1")
    if data is None and task.name.startswith("miniature-"):
        return miniature(task, limit)
    files, records = files_of(task, data)
    items = read_items(task, files, limit)
    if task.n and limit is None:
        files = ", ".join(record["file"] for record in records)
        verdict = "as in the paper" if len(items) == task.n else f"where the paper scores {task.n:,}"
        print(f"{task.name}: {len(items):,} items of {files}, {verdict}", file=sys.stderr)
    return items, records


def miniature(task, limit):
    from miniature.data import make_split
    split = task.name.removeprefix("miniature-")
    items = [task.read(row._asdict()) | {"index": index, "id": index}
             for index, row in enumerate(make_split(split, task.n)[:limit])]
    return items, [{"made by": f"miniature.data, split {split}, n {task.n}"}]


def find_demos(task, demos, data, seed):
    """(rows with their places, record) of the demonstrations; [] and None where there are none but the data's items."""
    if not task.shots:
        if demos is not None and Path(demos).is_file():
            raise ValueError(f"--demos {demos}: {task.name} takes no demonstrations")
        return [], None
    path = demo_file(task, demos, data)
    if path is not None:
        rows = [(f"{path}, line {number}", row) for number, row in rows_of(path)
                if row.get("used_in_paper") is not False]
        if not rows:
            raise ValueError(f"{path}: holds no demonstrations")
        return rows, {"source": "file"} | fingerprint(path)
    if task.fixed_demos:
        return [(task.name, row) for row in task.fixed_demos], {"source": "fixed"}
    if task.training:
        source, commit = from_hub(task.training, "--demos", "from which demonstrations are drawn")
        rows = list(rows_of(source))
        rows = rows[:task.shots] if task.first_of_training else random.Random(seed).sample(rows, task.shots)
        found = [(place, read_row(task.read_training, place, row, describe(task.training)))
                 for place, row in ((f"{source}, line {number}", row) for number, row in rows)]
        return found, {"source": "train", "hub": task.training.repo, "revision": commit,
                       "seed": None if task.first_of_training else seed} | fingerprint(source)
    return [], None


def first_items(task, items, limit=None):
    """(rows of demonstrations, the items left to score). The rows are the first items that ask different questions.

    Nothing that asks one of these questions is scored. PopQA's first nine are the published ones, of which the ninth
    takes the place of an item's own; they stay in, marked."""
    asked = {}
    for item in items:
        asked.setdefault(item["question"], item)
        if len(asked) == task.shots + task.demos_are_items:
            break
    rows = [(f"{task.name}, item {item['id']}", item | {"answer": item["references"][0]}) for item in asked.values()]
    if not task.demos_are_items:
        items = [item for item in items if item["question"] not in asked]
    if not items:
        raise ValueError(f"{task.name}: the data's first {len(asked)} questions are its demonstrations, and nothing is "
                         f"left to score: give more data, or --demos FILE")
    return rows, [item | {"index": index} for index, item in enumerate(items[:limit])]


def report(task, shown, record):
    """One line on standard error: how many demonstrations, where they are from, whether they are the paper's."""
    origin = {"file": f"from {record.get('file')}", "fixed": "of the prompt itself",
              "train": f"from the training split of {record.get('hub')}",
              "first items": f"the first items of {record.get('file')}"
                             + ", whose questions are not scored" * (not task.demos_are_items)}[record["source"]]
    whose = "the paper's" if record["paper"] else "not the paper's (give those with --demos)"
    few = f", where the paper shows {task.shots}" if len(shown) < task.shots else ""
    print(f"{task.name}: {len(shown)} demonstrations{few}, {origin}; {whose}", file=sys.stderr)


def digest(shown):
    """What tells whether demonstrations are the paper's: a hash of their turns as the model reads them."""
    return hashlib.sha256(json.dumps([[demo["user"], demo["answer"]] for demo in shown]).encode()).hexdigest()[:16]


def demo_file(task, demos, data):
    if demos is not None and not Path(demos).is_dir():
        return Path(demos)
    for folder in (demos, data):
        if folder is not None and Path(folder).is_dir():
            files = inside(folder, task.demo_files)
            if files:
                return files[0]
    if demos is not None:
        raise FileNotFoundError(f"{demos}: no demonstrations for {task.name} in this folder "
                                f"(looked for {', '.join(task.demo_files)})")
    return None


def demo_fields(task):
    return [*re.findall(r"{(\w+)}", task.demo), task.demo_answer]


def demonstration(task, where, row):
    if task.demo_answer not in row and "answer" in row:
        row = row | {task.demo_answer: row["answer"]}
    for name in demo_fields(task):
        if not isinstance(row.get(name), str):
            raise ValueError(f"{where}: field {name!r} is missing or no text; a demonstration of {task.name} has "
                             f"{', '.join(demo_fields(task))}")
    return {"question": row["question"], "user": task.demo.format_map(row), "answer": row[task.demo_answer]}
