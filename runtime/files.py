"""Reads JSON and text, hashes, and shortens messages."""

import hashlib
import json
import subprocess
from pathlib import Path


def read_json(path, kind=dict):
    """The object, or the list, in a JSON file; ValueError or OSError with its path."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{path} must contain a JSON {'object' if kind is dict else 'list'}")
    return value


def read_text(path):
    """The text of a UTF-8 file; ValueError or OSError with its path."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def one_line(error, limit=300):
    """An error's message without line breaks, truncated to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "…"


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
