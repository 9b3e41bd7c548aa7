"""Files of JSON lines: read, append, replace in one step, and lock."""

import codecs
import gzip
import json
import os
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from runtime.files import check_file, one_line, unique_keys


def json_lines(path, complete=False):
    """Yields (line number, object) for each line that is not blank.

    The file may be compressed (.gz). Raises ValueError, with the line, for a line that cannot be parsed. If it is the
    last one and has no newline, as a killed process leaves it, it is skipped instead, unless `complete`."""
    path = check_file(path)
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
            value = parse(line, f"{path}, line {number}")
        except ValueError:
            if number == len(lines) and not complete:
                return
            raise
        yield number, value


def parse(line, where):
    """Parse one line, as bytes. Raises ValueError, with `where`, for anything but a JSON object in UTF-8."""
    try:
        value = json.loads(line.decode(), object_pairs_hook=unique_keys, parse_constant=reject_constant)
        json.dumps(value, ensure_ascii=False).encode()                  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON in UTF-8 ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: should be a JSON object, not a {type(value).__name__}")
    return value


def reject_constant(name):
    raise ValueError(f"{name} is not a finite number")


@contextmanager
def locked(path):
    """Lock the file while the block runs, so that no other process writes to it. Its folder is made if necessary.

    Raises OSError if another process has the lock. A process that dies loses its lock."""
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
    """Write the rows to the end of the file in one call, and to the disk."""
    with open(path, mode, encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def write(path, rows):
    """Replace the file in one step: at every moment it is either the old one or the new one."""
    draft = path.with_name(path.name + ".draft")
    append(draft, rows, mode="w")
    os.replace(draft, path)
