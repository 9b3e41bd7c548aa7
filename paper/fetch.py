"""Downloads the data and the demonstrations of the paper's tasks into the layout that --data and
--demos read.

The first origin is the repository of the paper's authors, at its last commit. It holds the files
that the paper scored, and the demonstrations as lists in its source, which is read and never run.
The second origin of a data file is its data set on the Hugging Face hub, at a fixed commit; its
rows are checked."""

import ast
import hashlib
import re
import sys
from collections import defaultdict
from functools import partial
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote
from urllib.request import urlopen
from zipfile import ZipFile

from tqdm import tqdm

from cli.options import parser
from paper import judges
from paper.printed import csv_rows
from paper.tasks import PAPER, data, find_tasks, model_metrics
from runtime.errors import InputError, one_line
from runtime.files import content_of, draft

AUTHORS = "https://raw.githubusercontent.com/aryopg/DeCoRe/d1fa5a916a566025e9790214fb6cdcc545347f26"
PUNKT = (
    "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/tokenizers/punkt_tab.zip"
)
CHUNK = 1 << 20  # bytes


class File(NamedTuple):
    """A row of files.csv."""

    folder: str  # of the tasks that use it, as in `Task.folder`
    name: str  # in that folder
    source: str  # path in the authors' repository
    digest: str  # sha256; or, of 40 digits, git's id of the content, which the commit pins
    function: str = ""  # of a source file: the function that holds demonstrations


FILES = tuple(File(**row) for row in csv_rows("files"))  # data, then sources of demonstrations


def main(argv):
    p = parser("Download the data and demonstrations of the paper's tasks, and check them.")
    p.prog += " fetch"
    add = p.add_argument
    add("folder", type=Path, metavar="DIR", help="what --data and --demos then name")
    add("--task", default="all", metavar="T[,T…]", help="only for these (default: all)")
    add("--mirror", metavar="URL", help="read URL/HOST/PATH in place of every address")
    add(
        "--metrics", action="store_true", help="also what metrics need: models, judges, nltk's data"
    )
    args = p.parse_args(argv)
    tasks = find_tasks(args.task)
    mirror = args.mirror and args.mirror.rstrip("/")
    works = {}  # name → function that downloads it, unless it is there
    for file in FILES:
        if file.folder in {task.folder for task in tasks.values()}:
            works[f"{file.folder}/{file.name}"] = partial(fetch, args.folder, file, mirror)
    if args.metrics:
        works |= requirements(tasks, mirror)
    lacking = 0
    for name, work in tqdm(works.items(), unit="download"):
        try:
            work()
        except Exception as error:  # the libraries raise many kinds
            tqdm.write(f"{name}: {one_line(error)}", file=sys.stderr)
            lacking += 1
    if lacking:
        raise InputError(
            f"{lacking} of {len(works)} are missing, see above; the same command fetches only these"
        )
    print(f"{args.folder} holds the files of {len(tasks)} tasks")


def fetch(folder, file, mirror):
    """Download a file from the first origin that has it, unless it is there."""
    path = folder / file.folder / file.name
    if is_there(path, file):
        return
    try:
        content = download(f"{AUTHORS}/{quote(file.source)}", mirror)
        if file.digest not in digests(content):
            raise InputError(f"{AUTHORS}/{file.source} is not the file that the paper used")
        if file.function:
            demos = demos_in_code(content, file)
            content = content_of(demos)
    except (OSError, ValueError):
        tasks = [task for task in PAPER if task.folder == file.folder]
        if file.function or not tasks[0].origin:
            raise
        source = file_on_hub(tasks, mirror)
        path = path.with_name(source.name)
        content = source.read_bytes()
    with draft(path) as new:
        new.write_bytes(content)


def file_on_hub(tasks, mirror):
    """The path of the hub's file of some tasks. InputError unless it has the fields of each and as
    many rows as the paper scores."""
    path, _ = data.from_hub(tasks[0].origin, endpoint=mirror and f"{mirror}/huggingface.co")
    for task in tasks:
        rows = sum(1 for _ in data.read_with(task.read, path))
        if rows != task.n:
            raise InputError(f"{path} has {rows} rows, not {task.n}; delete it")
    return path


def is_there(path, file):
    """Whether a path holds the file of the paper; or, in any form, the paper's demonstrations."""
    if not path.exists():
        return False
    if not file.function:
        return file.digest in digests(path.read_bytes())
    names = file.folder, file.name
    task = next(task for task in PAPER if (task.folder, task.demo_file) == names)
    try:
        return data.demos_hash(data.read_demos(task, path)) == task.demos_hash
    except ValueError:
        return False


def demos_in_code(source, file):
    """The demonstrations that a function of a Python source appends to lists, without running it.

    `questions.append("…")` is the field "question" of the next one. In the branch of an `if` on
    "cot_" or "direct_", answers are "cot_answer" or "direct_answer"."""
    lists = defaultdict(list)

    def visit(nodes, prefix=""):
        for node in nodes:
            match node:
                case ast.If(test, body, other):
                    visit(body, *re.findall("'(cot_|direct_)'", ast.unparse(test)))
                    visit(other)
                case ast.Expr(
                    ast.Call(
                        ast.Attribute(ast.Name(name), "append"), [ast.Constant(str() as text)], []
                    )
                ):
                    lists[prefix + name.removesuffix("s")].append(text)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == file.function:
            visit(node.body)
    if not lists:
        raise InputError(f"no demonstrations in {file.function}")
    return [dict(zip(lists, values)) for values in zip(*lists.values(), strict=True)]


def download(url, mirror):
    """The content of an address."""
    address = f"{mirror}/{url.removeprefix('https://')}" if mirror else url
    try:
        with (
            urlopen(address, timeout=60) as response,
            tqdm.wrapattr(response, "read", response.length, desc=address, leave=False) as body,
        ):
            content = b"".join(iter(partial(body.read, CHUNK), b""))
            if response.length:
                raise OSError("the connection broke off")
            return content
    except (OSError, HTTPException) as error:
        raise OSError(f"{address}: {getattr(error, 'reason', error)}") from None


def digests(content):
    """The sha256 of a content, and git's id of it."""
    blob = b"blob %d\0" % len(content) + content
    return hashlib.sha256(content).hexdigest(), hashlib.sha1(blob).hexdigest()


def of_paper(record):
    """Whether the data of a run are the paper's, by the record of a file in the run's header."""
    return "hub" in record or any(
        record.get("sha256") == file.digest
        # git's id cannot be compared with a sha256.
        or (record["file"] == file.name and len(file.digest) == 40)
        for file in FILES
    )


def requirements(names, mirror):
    """Name → function that downloads it, of what the metrics of these tasks need."""
    from huggingface_hub import snapshot_download

    endpoint = mirror and f"{mirror}/huggingface.co"
    models = {}
    if "xsum" in names:
        models = dict.fromkeys((model_metrics.DEBERTA, model_metrics.FACTKB))
        models[model_metrics.ROBERTA] = ["*.json", "*.txt"]
    if "truthfulqa-gen" in names:
        models |= dict.fromkeys(judges.OPEN.split(","))
    works = {}
    for name, patterns in models.items():
        works[name] = partial(snapshot_download, name, allow_patterns=patterns, endpoint=endpoint)
    if "ifeval" in names:
        works["punkt_tab"] = partial(fetch_punkt, mirror)
    return works


def fetch_punkt(mirror):
    """Unpack nltk's punkt_tab where nltk looks for it, unless it is there."""
    import nltk

    path = Path(nltk.downloader.Downloader().default_download_dir(), "tokenizers", "punkt_tab")
    if not path.exists():
        with ZipFile(BytesIO(download(PUNKT, mirror))) as files, draft(path) as new:
            for member in files.infolist():
                member.filename = member.filename.removeprefix("punkt_tab/")
                if member.filename:
                    files.extract(member, new)
