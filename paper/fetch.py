"""Downloads the data and the demonstrations of the paper's tasks into the layout that --data and
--demos read.

The first origin is the repository of the paper's authors, at its last commit. It holds the files
that the paper scored, and the demonstrations as lists in its source, which is read and never run.
The second origin of a data file is its data set on the Hugging Face hub."""

import ast
import hashlib
import json
import os
import sys
import urllib.request
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tqdm import tqdm

import cli
from paper import judges
from paper.numbers import table
from paper.tasks import PAPER, data, find, model_metrics
from runtime.files import one_line

COMMIT = "d1fa5a916a566025e9790214fb6cdcc545347f26"
AUTHORS = f"https://raw.githubusercontent.com/aryopg/DeCoRe/{COMMIT}"
PUNKT = (
    "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/tokenizers/punkt_tab.zip"
)
AT_ONCE = 4  # downloads
CHUNK = 1 << 20  # bytes


class File(NamedTuple):
    """A row of files.csv."""

    folder: str  # of the tasks that use it, as in `Task.folder`
    name: str  # in that folder
    source: str  # path in the authors' repository
    digest: str  # sha256; or, of 40 digits, git's id of the content, which the commit pins
    function: str = ""  # of a source file: the function that holds demonstrations


FILES = tuple(File(**row) for row in table("files"))  # data, then sources of demonstrations


def main(argv):
    p = cli.parser("Download the data and demonstrations of the paper's tasks, and check them.")
    p.prog += " fetch"
    p.add_argument("folder", type=Path, metavar="DIR", help="what --data and --demos then name")
    p.add_argument("--task", metavar="T[,T…]", help="only for these tasks (default: all)")
    p.add_argument("--mirror", metavar="URL", help="read URL/HOST/PATH in place of every address")
    p.add_argument(
        "--metrics", action="store_true", help="also what metrics need: models, judges, nltk's data"
    )
    args = p.parse_args(argv)
    tasks = [find(name) for name in args.task.split(",")] if args.task else PAPER
    folders = {task.folder for task in tasks}
    files = [file for file in FILES if file.folder in folders]
    lacking = []
    with tqdm(unit="B", unit_scale=True) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
        work = partial(fetch, args.folder, mirror=args.mirror, progress=bar.update)
        for count, (file, problem) in enumerate(zip(files, pool.map(work, files), strict=True), 1):
            bar.set_description(f"{count} of {len(files)} files")
            if problem:
                bar.write(problem, file=sys.stderr)
                lacking.append(f"{file.folder}/{file.name}")
    for name, work in requirements(tasks, args.mirror) if args.metrics else ():
        try:
            work()
        except Exception as error:  # the libraries raise many kinds
            print(f"{name}: {one_line(error)}", file=sys.stderr)
            lacking.append(name)
    if lacking:
        raise ValueError(f"missing: {', '.join(lacking)}; the same command fetches only these")
    print(f"{args.folder} holds {len(files)} files of {len(tasks)} tasks")


def fetch(folder, file, mirror=None, progress=lambda n: None):
    """Download a file, unless it is there. Returns why it cannot be had, or None."""
    path = folder / file.folder / file.name
    try:
        if not is_there(path, file):
            name, content = read(file, mirror, progress)
            save(path.with_name(name), content)
    except (OSError, ValueError) as error:
        return f"{path}: {one_line(error)}"
    return None


def is_there(path, file):
    """Whether a path holds the file of the paper; or, in any form, the paper's demonstrations."""
    if not path.exists():
        return False
    if not file.function:
        return digest(path.read_bytes(), file.digest) == file.digest
    names = file.folder, file.name
    task = next(task for task in PAPER if (task.folder, task.demo_file) == names)
    try:
        demos = data.read_demos(task, path)
    except ValueError:
        return False
    return data.demos_hash(demos) == task.demos_hash


def read(file, mirror, progress):
    """(name, content) of a file, from the first origin that has it."""
    origins = [task.origin for task in PAPER if task.folder == file.folder and not file.function]
    try:
        content = download(f"{AUTHORS}/{quote(file.source)}", mirror, progress)
        if digest(content, file.digest) != file.digest:
            raise ValueError(f"{AUTHORS}/{file.source} is not the file that the paper used")
    except (OSError, ValueError) as problem:
        if not any(origins):
            raise
        try:
            path, _ = data.from_hub(origins[0], endpoint=hub_address(mirror))
        except (OSError, ValueError) as error:
            raise OSError(f"{problem}; {error}") from None
        return path.name, path.read_bytes()
    if file.function:
        demos = read_demos(content, file.function)
        lines = [json.dumps(demo, ensure_ascii=False) + "\n" for demo in demos]
        content = "".join(lines).encode()
    return file.name, content


def read_demos(source, function):
    """The demonstrations that a function of a Python source appends to lists, without running it.

    `questions.append("…")` is the field "question" of the next one. In the branch of an `if` on
    "cot_" or "direct_", answers are "cot_answer" or "direct_answer"."""
    lists = defaultdict(list)

    def visit(nodes, prefix=""):
        for node in nodes:
            if isinstance(node, ast.If):
                constants = [n.value for n in ast.walk(node.test) if isinstance(n, ast.Constant)]
                kinds = [text for text in constants if text in ("cot_", "direct_")]
                visit(node.body, *kinds)
                visit(node.orelse)
            match node:
                case ast.Expr(
                    ast.Call(
                        ast.Attribute(ast.Name(name), "append"), [ast.Constant(str() as text)], []
                    )
                ):
                    lists[prefix + name.removesuffix("s")].append(text)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            visit(node.body)
    if not lists:
        raise ValueError(f"no demonstrations in {function}")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def download(url, mirror, progress):
    """The content of an address."""
    parts = urlsplit(url)
    address = f"{mirror.rstrip('/')}/{parts.netloc}{parts.path}" if mirror else url
    content = bytearray()
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            for chunk in iter(partial(response.read, CHUNK), b""):
                content += chunk
                progress(len(chunk))
    except (OSError, HTTPException) as error:
        raise OSError(f"{address}: {getattr(error, 'reason', error)}") from None
    if response.length:
        raise OSError(f"{address}: the connection broke off")
    return bytes(content)


def digest(content, like):
    """The sha256 of a content; or git's id of it, if `like` has 40 digits."""
    if len(like) == 64:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def save(path, content):
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def hub_address(mirror):
    """The hub's address in a mirror; None without one."""
    return f"{mirror.rstrip('/')}/huggingface.co" if mirror else None


def requirements(tasks, mirror):
    """Yield (name, function that downloads it) of what the tasks' metrics need."""
    from huggingface_hub import snapshot_download

    endpoint = hub_address(mirror)
    names = {task.name for task in tasks}
    models = {}
    if "xsum" in names:
        models = dict.fromkeys((model_metrics.DEBERTA, model_metrics.FACTKB))
        models[model_metrics.ROBERTA] = ["*.json", "*.txt"]
    if "truthfulqa-gen" in names:
        models |= dict.fromkeys(judges.OPEN.split(","))
    for name, patterns in models.items():
        yield name, partial(snapshot_download, name, allow_patterns=patterns, endpoint=endpoint)
    if "ifeval" in names:
        yield "punkt_tab", partial(fetch_punkt, mirror)


def fetch_punkt(mirror):
    """Unpack nltk's punkt_tab where nltk looks for it."""
    import nltk

    folder = Path(nltk.downloader.Downloader().default_download_dir()) / "tokenizers"
    if (folder / "punkt_tab").exists():
        return
    archive = BytesIO(download(PUNKT, mirror, lambda n: None))
    draft = folder / "punkt_tab.part"
    with zipfile.ZipFile(archive) as files:
        files.extractall(draft)
    os.replace(draft / "punkt_tab", folder / "punkt_tab")
    draft.rmdir()
