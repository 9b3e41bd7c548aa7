"""Files of JSON lines: reading, appending, replacing in one step, and a lock so that one process writes at a time."""

import codecs
import glob
import gzip
import json
import math
import os
import zlib
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:             # Windows
    fcntl = None


def json_lines(path, complete=False):
    """Yields (line number, object); blank lines are skipped.

    A last line that was cut off is skipped too; complete=True: it is an error."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: " + ("a folder, where a file is needed" if path.is_dir() else "no such file"))
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: a damaged gzip file ({error})") from None
    texts = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                parsed = parse(text, f"{path}, line {number}")
            except (json.JSONDecodeError, UnicodeDecodeError):
                if number == len(texts) and not complete:
                    return
                raise ValueError(f"{path}, line {number}: not JSON; remove the line") from None
            yield number, parsed


def parse(text, where):
    """The JSON object in a line (bytes). JSONDecodeError or UnicodeDecodeError where it is none; ValueError for what
    Python's reader lets pass: a key twice, numbers that are not finite, half of a surrogate pair."""
    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
        return dict(pairs)

    def finite(number):
        if not math.isfinite(float(number)):
            raise ValueError(f"{number} is not a finite number")
        return float(number)

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        if b"\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: half of a surrogate pair (\\ud…) is no text") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: should be a JSON object, found {type(found).__name__}")
    return found


@contextmanager
def locked(path):
    """Nobody else writes the file meanwhile; the lock of a process that died is free. OSError where it is taken."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    lock = Path(f"{path}.lock")
    while True:
        with open(lock, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(f"{path} is being written by another process; wait for it, or write to another "
                              "place (--out)") from None
            if not (lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))):
                continue                        # its last owner has just removed it
            for draft in path.parent.glob(f"{glob.escape(path.name)}.*.draft"):
                draft.unlink()                  # of a process that was killed
            try:
                yield
            finally:
                lock.unlink()
            return


def append(path, lines, mode="a"):
    with open(path, mode, encoding="utf-8") as file:
        file.write("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))
        file.flush()
        os.fsync(file.fileno())


def write(path, lines):
    """The whole file in one step: there is no moment without it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    append(draft, lines, mode="w")
    os.replace(draft, path)
