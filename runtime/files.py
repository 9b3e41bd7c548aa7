"""Small jobs with files: reading JSON and text, JSON lines, locks, hashes, and messages about them."""

import hashlib
import json
import subprocess
from pathlib import Path


def read_json(path):
    """The object in a JSON file; ValueError, FileNotFoundError or OSError with its path."""
    text = read_text(path)
    try:
        value = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where a JSON object is needed")
    return value


def once(pairs):
    """The entries of a JSON object, none of them twice with different values."""
    entries = dict(pairs)
    for key, value in pairs:
        if entries[key] is not value and entries[key] != value:
            raise ValueError(f"{one_line(json.dumps(key), 60)} appears twice, with different values")
    return entries


def read_text(path):
    try:
        return check_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: its byte {error.start} is {error.object[error.start]:#04x}") from None


def check_file(path):
    """The path, if a file is there to be read; else FileNotFoundError or OSError."""
    path = Path(path)
    if path.is_dir():
        raise OSError(f"{path} is a folder where a file should be")
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a link to {path.readlink()}, which is not there; fetch the file again")
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; check the name, and that its folder is complete")
    return path


def one_line(error, most=300):
    """An error's message without its line breaks, cut where it stops being news."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[:most] + "…"


def brief(names, most=4):
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return shown or "nothing"


def short_hash(content):
    return hashlib.sha256(content).hexdigest()[:16]


def commit():
    """The commit that is checked out; None without git."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return git.stdout.strip() or None
