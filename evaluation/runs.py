"""The file of a run: its settings in the first line, then one JSON line per example.

Rows are appended batch by batch. After the last batch the file is sorted into the order of the data. A run that was
killed continues where it stopped, and a complete one may grow (--limit). Settings that change numbers are refused by
name. Another device, batch size or version of torch changes a last digit at most. It is accepted, and
settings["continued"] names it."""

import json

from runtime.files import json_lines, write
from tasks.items import field, located

SURROUNDINGS = ("device", "batch_size", "tp", "versions")
NOT_COMPARED = (*SURROUNDINGS, "commit", "command", "date", "n", "limit", "continued")


def read_run(path):
    """(settings or None, rows) of a run, or of any file of JSON lines. Each row gets its place ("FILE, line 3") as
    `line`. ValueError for a row of a run without an index, and for two rows of one item."""
    settings, rows, places = None, [], {}
    for number, row in json_lines(path):
        row["line"] = f"{path}, line {number}"
        if number == 1 and isinstance(row.get("settings"), dict):
            settings = row["settings"]
            continue
        if settings is not None or "index" in row:
            with located(row["line"]):
                first = places.setdefault(field(row, "index", "a whole number from 0"), row["line"])
                if first != row["line"]:
                    raise ValueError(f"the same item as {first}; remove one")
        rows.append(row)
    return settings, rows


def prompt_key(row):
    """The hash of a row's prompt. Runs of earlier versions have a second one that leaves out the day."""
    return row.get("undated_sha256", row.get("prompt_sha256"))


def remarks(settings):
    """Sentences about a run that a reader of its numbers should know."""
    missing = [] if "fingerprint" in settings else ["does not say which weights made it"]
    return missing + ["continued with another "
                      + ", ".join(f"{name} ({brief(part[name])})" for name in SURROUNDINGS if name in part)
                      for part in settings.get("continued", [])]


def open_run(path, settings, items, check=lambda rows: None):
    """Start a run, or continue it. Returns its rows by index. A last row that was cut off is removed from the file.

    items: index → the fields that do not depend on the answer. check: raises ValueError for rows without an answer.
    Raises ValueError if the file is not a run, or was made with other settings or items."""
    stored, rows = read_run(path) if path.exists() else ({}, [])
    if stored is None:
        raise ValueError(f"{path}: its first line has no settings, so it is not a run of evaluate.py; "
                         "choose another --out")
    if settings.get("mask_prompt") is None and "mask_prompt" in stored:
        stored["mask_prompt"] = None        # older runs of multiple choice say false, but scoring masks every position
    if rows:
        check_settings(path, stored, settings)
        check(rows)
        for row in rows:
            item = items.get(row["index"])
            if item is None or any(row.get(name) != item[name] for name in item):
                raise ValueError(f"{row['line']}: item {row['index']} is not that of the data; "
                                 "choose another --out or remove the file")
        changes = {name: settings[name] for name in SURROUNDINGS if settings[name] != stored.get(name)}
        settings = stored | {"n": settings["n"], "limit": settings["limit"]}
        if changes and len(rows) < len(items):
            settings["continued"] = [*stored.get("continued", []), changes]
    save(path, settings, rows)
    return {row["index"]: row for row in rows}


def check_settings(path, stored, new):
    """Raise ValueError, by name, for settings that change numbers."""
    smaller = type(stored.get("n")) is not int or stored["n"] > new["n"]
    stored, new = flat(stored), flat(new)
    names = ["n"] * smaller + [name for name in dict.fromkeys([*stored, *new])
                               if name.split(".")[0] not in NOT_COMPARED and stored.get(name) != new.get(name)]
    if names:
        changes = "; ".join(f"{name}: {brief(stored.get(name))} there, {brief(new.get(name))} now"
                            for name in names[:4])
        raise ValueError(f"{path} was made with other settings ({changes}); choose another --out or remove the file")


def flat(settings):
    """Settings with "fingerprint.weights" as the name of a value inside an object."""
    return {f"{name}.{inner}" if inner else name: value
            for name, outer in settings.items()
            for inner, value in (outer.items() if isinstance(outer, dict) else [(None, outer)])}


def save(path, settings, rows):
    """Replace the file, and drop the rows' `line`."""
    for row in rows:
        del row["line"]
    write(path, [{"settings": settings}, *rows])


def finish(path):
    """Sort the rows into the order of the data. Returns them."""
    settings, rows = read_run(path)
    rows.sort(key=lambda row: row["index"])
    save(path, settings, rows)
    return rows


def brief(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
