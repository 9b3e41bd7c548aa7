"""Files of JSON lines: read, append, replace in one step, and lock."""

import codecs
import gzip
import json
import os
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from runtime.files import one_line


def json_lines(path, complete=False):
    """Yields (line number, object) for each line that is not blank. The file may be compressed (.gz).

    ValueError, with the line, for a line that cannot be parsed. A last line that cannot be parsed is skipped instead,
    as a killed process leaves one, unless `complete`."""
    path = Path(path)
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: a damaged gzip file ({error})") from None
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()     # fails for NaN and lone surrogates
            if not isinstance(value, dict):
                raise ValueError(f"a {type(value).__name__} instead of an object")
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not complete:
                return
            raise ValueError(f"{path}, line {number}: not JSON in UTF-8 ({one_line(error)})") from None
        yield number, value


@contextmanager
def locked(path):
    """Locks the file while the block runs. OSError if another process has locked it. Creates its folder.

    The lock of a process that dies is released."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OSError(f"{path} is being written by another process; wait for it, or write to another place (--out)"
                      ) from None
    try:
        yield
    finally:
        with suppress(OSError):                                         # Windows does not remove open files
            os.unlink(lock.lock_file)
        lock.release()


def append(path, rows, mode="a"):
    """Writes the rows to the end of the file in one call, and to the disk."""
    with open(path, mode, encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def write(path, rows):
    """Replaces the file in one step: a reader gets the old file or the new one."""
    draft = path.with_name(path.name + ".draft")
    append(draft, rows, mode="w")
    os.replace(draft, path)
