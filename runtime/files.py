"""Files of text and JSON: reading, appending, replacing in one step, locking; Markdown."""

import codecs
import errno
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import InputError, one_line


def read_text(path):
    """The text of a UTF-8 file without its byte order mark; InputError or OSError with its path.

    path: may be the file descriptor of standard input."""
    is_stdin = isinstance(path, int)
    try:
        with open(path, encoding="utf-8-sig", closefd=not is_stdin) as file:
            return file.read()
    except UnicodeDecodeError as error:
        name = "standard input" if is_stdin else path
        raise InputError(f"{name} is not UTF-8: {error}") from None


def read_json(path, kinds=dict, **options):
    """The object in a JSON file, or a value of other kinds; InputError or OSError with its path.

    options: of `json.loads`."""
    text = read_text(path)
    try:
        value = json.loads(text, **options)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, kinds):
        raise InputError(f"{path} must contain a JSON object")
    check_unicode(json.dumps(value, ensure_ascii=False), path)
    return value


def check_unicode(text, name):
    """InputError for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(f"{name}: {half!r} is half of a surrogate pair, not a character") from None


def checkpoint_name(name):
    """The name of a model by its folder or hub id. A link to a folder has its own name, a snapshot
    in the hub's cache that of its hub id. A hub id is without its revision."""
    path = Path(os.path.abspath(Path(name).expanduser()))
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return path.name if path.exists() else str(name).partition("@")[0]


def json_lines(path, complete=False):
    """`parse_lines` of a file, which may be gzip (.gz)."""
    read = gzip.open if Path(path).suffix == ".gz" else open
    try:
        with read(path, "rb") as file:
            lines = file.read().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: a damaged gzip file ({error})") from None
    yield from parse_lines(lines, path, complete)


# Without one of these in its text, what `json_bytes` refuses is not in a line of JSON.
SUSPECT = rb"\u", b"NaN", b"Infinity"
LARGE = re.compile(rb"[eE]\+?\d{3,}[\s,\]}]"), re.compile(rb"\d{200}")  # may be read as ∞


def parse_lines(lines, path, complete=False):
    """Yields (line number, object) for each line, as bytes, that is not blank.

    InputError, with its number, for a line that cannot be parsed. Unless `complete`, the last line
    is then skipped instead, since a killed process may have cut it."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode(), object_pairs_hook=object_of)
            if any(x in line for x in SUSPECT) or any(x.search(line) for x in LARGE):
                json_bytes(value)
            if not isinstance(value, dict):
                raise InputError(f"a {type(value).__name__} instead of an object")
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not complete:
                return
            raise InputError(
                f"{path}, line {number}: not JSON in UTF-8 ({one_line(error)})"
            ) from None
        yield number, value


def object_of(pairs):
    """A JSON object, as the `object_pairs_hook` of json. InputError for a name that is there twice,
    since one of its values would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"an object has two fields {twice!r}")
    return value


def json_bytes(value):
    """A value in JSON and UTF-8, as a line of a file holds it. −∞, the score of an impossible
    answer, is -Infinity.

    InputError for what `json_lines` would refuse, or give back as something else: NaN, ∞, dates,
    bytes, halves of surrogate pairs."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise InputError(f"a line of JSON cannot hold it: {error}") from None
    if "NaN" in text or "Infinity" in text:  # perhaps in a string
        json.loads(text, parse_constant=minus_infinity)
    return text.encode()


def minus_infinity(name):
    """The value of a constant in JSON. InputError for another one."""
    if name != "-Infinity":
        raise InputError(f"{name} is not a number in JSON; write null if there is none")
    return -math.inf


def append(path, objects):
    """Append objects to a file of JSON lines in one call, and sync it to the disk."""
    append_bytes(path, content_of(objects))


def content_of(objects):
    """The content of a file of JSON lines."""
    return b"".join(json_bytes(x) + b"\n" for x in objects)


def append_bytes(path, content):
    with named(path), open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def named(path):
    """Yields the path, which it adds to the error of a full or broken disk."""
    try:
        yield path
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and not error.filename:
            error.filename = str(path)
        raise


def write(path, objects):
    """Replace a file of JSON lines in one step: a reader gets the old file or the new one. A file
    with this content stays, so that it may be in a folder that is read-only."""
    content = content_of(objects)
    if Path(path).is_file() and Path(path).read_bytes() == content:
        return
    with draft(path) as new:
        append_bytes(new, content)


@contextmanager
def draft(path):
    """Yields a path for a new file or folder, which then replaces `path`, or a link's target, in
    one step. After an error, `path` is as before. A draft that a killed process left is removed."""
    path = Path(path).resolve()
    new = path.with_name(path.name + ".draft")
    remove(new)
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        with named(path):
            yield new
        os.replace(new, path)
    finally:
        remove(new)


def remove(path):
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path):
    """Lock a file, and create its folder. OSError if another process has locked it. In a read-only
    folder nobody writes."""
    from filelock import FileLock, Timeout  # slow, and few programs write

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if not os.access(Path(path).parent, os.W_OK):
        yield
        return
    try:
        with FileLock(f"{path}.lock", timeout=0) as lock:
            try:
                yield
            finally:
                os.unlink(lock.lock_file)
    except Timeout:
        raise OSError(
            f"{path} is being written by another process; wait for it, or write to another file"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        Path(f"{path}.lock").unlink(missing_ok=True)
        raise OSError(f"{path}: its file system has no locks; write to another one") from None


def short_hash(content):
    """16 hexadecimal digits of the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def json_hash(value):
    """`short_hash` of a value as JSON."""
    return short_hash(json.dumps(value).encode())


def commit():
    """The commit that is checked out; None without git."""
    command = ["git", "rev-parse", "HEAD"]
    with suppress(FileNotFoundError):
        git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        return git.stdout.strip() or None


def markdown_table(rows):
    """The lines of a table of texts, whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    head, *others = rows
    rows = [head, ["-" * width for width in widths], *others]
    return [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
