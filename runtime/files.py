"""Reads JSON and text, hashes, and shortens messages."""

import hashlib
import json
import subprocess
from pathlib import Path


def read_json(path, kind=dict):
    """The object, or the list, in a JSON file; ValueError or OSError with its path."""
    text = read_text(path)
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{path} must contain a JSON {'object' if kind is dict else 'list'}, not a "
                         f"{type(value).__name__}")
    return value


def unique_keys(pairs):
    """The entries of a JSON object as a dict. ValueError if a key has two different values."""
    entries = dict(pairs)
    for key, value in pairs:
        if entries[key] is not value and entries[key] != value:
            raise ValueError(f"{one_line(json.dumps(key), 60)} appears twice, with different values")
    return entries


def read_text(path):
    """The text of a UTF-8 file; ValueError or OSError with its path."""
    try:
        return check_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None


def check_file(path):
    """The path of an existing file; else FileNotFoundError or OSError."""
    path = Path(path)
    if path.is_dir():
        raise OSError(f"{path} is a folder; it must be a file")
    if not path.exists():
        kind = "a broken link" if path.is_symlink() else "missing"
        raise FileNotFoundError(f"{path} is {kind}; check the name, and that the folder is complete")
    return path


def check_text(text, name="the text"):
    """The text itself, if it is a str that can be encoded; else ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a str, not {one_line(repr(text), 60)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {text[error.start]!r} at character {error.start + 1}") from None
    return text


def one_line(error, limit=300):
    """An error's message without line breaks, truncated to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "…"


def brief(names, limit=4):
    """The first names of a list, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest or "nothing"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def short_hash(content):
    return sha256(content)[:16]


def commit():
    """The commit that is checked out; None without git."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return git.stdout.strip() or None
