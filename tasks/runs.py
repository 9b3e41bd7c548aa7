"""The file of a run: its settings in the first line, then one JSON line per example.

Lines are appended batch by batch, each batch in one write, as soon as they are known; when all are there the file is
put into the order of the data. A run that was killed goes on where it stopped; one that is whole may grow (--limit).
What would change a number is refused by name. What may change a last digit at most (another device, batch size or
version of torch) is accepted and recorded: settings["continued"] lists it, and the rows since then carry its number."""

import json
from datetime import date

from runtime.jsonl import json_lines, write

NOT_COMPARED = ("commit", "command", "date", "n", "limit", "continued")
SURROUNDINGS = ("device", "batch_size", "tp", "versions")       # may change within a run
ROW = {"index": int, "prompt_sha256": str, "stop": str, "seconds": float, "tokens": int,
       "prompt_tokens": int, "continued": int}
NUMBERS = ("ids", "alphas", "entropies")
ANSWER = (*ROW, *NUMBERS, "prediction", "scores_true", "scores_false", "merged", "line")


# -------------------------------------------------------------------------------------------------------------- reading


def read_run(path):
    """(settings or None, rows) of a run, or of any file of JSON lines. Each row has the number of its `line`.

    A last line that has no newline and does not parse is what a kill left; it is dropped. Whatever else is no row of a
    run raises ValueError with its line."""
    settings, rows, seen = None, [], {}
    for number, parsed in json_lines(path):
        where = f"{path}, line {number}"
        if number == 1 and "settings" in parsed:
            settings = parsed["settings"]
            if not isinstance(settings, dict):
                raise ValueError(f"{where}: the settings should be a JSON object")
            continue
        check_row(parsed, where, whole=settings is not None)
        if "index" in parsed and seen.setdefault(parsed["index"], number) != number:
            raise ValueError(f"{where}: item {parsed['index']} again, which line {seen[parsed['index']]} holds; "
                             "remove one of them")
        rows.append(parsed | {"line": number})
    return settings, rows


def check_row(row, where, whole):
    """whole: a row of a run, which has an index."""
    if whole and "index" not in row:
        raise ValueError(f"{where}: no 'index'; every row of a run has one")
    for name, kind in ROW.items():
        value = row.get(name, kind())
        if not isinstance(value, int | float if kind is float else kind) or isinstance(value, bool):
            raise ValueError(f"{where}: {name!r} should be {'a text' if kind is str else 'a number'}, "
                             f"found {brief(value)}")
        if kind is not str and value < 0:
            raise ValueError(f"{where}: {name!r} is {value}, below zero")
    for name in NUMBERS:
        numbers = row.get(name, [])
        if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
            raise ValueError(f"{where}: {name!r} should be a list of numbers, found {brief(numbers)}")


def prompt_key(row):
    """What two rows have in common when the same prompt was put to both: all but today's date, where the chat template
    prints it."""
    return row.get("undated_sha256", row.get("prompt_sha256"))


def remarks(settings):
    """What a reader of the numbers should know about the run, one sentence each."""
    missing = [] if "fingerprint" in settings else ["does not say which weights made it"]
    return missing + [f"continued after {part['rows']} of {settings['n']} rows with another "
                      + ", ".join(f"{name} ({brief(part[name])})" for name in SURROUNDINGS if name in part)
                      for part in settings.get("continued", [])]


# -------------------------------------------------------------------------------------------------------------- writing


def began(path, settings):
    """The day on which a run began, which its prompts may print: as the file says where it holds rows."""
    stored, rows = read_run(path) if path.exists() else (None, [])
    day = (stored if stored and rows else settings).get("date")
    try:
        return str(date.fromisoformat(day))
    except (TypeError, ValueError):
        raise ValueError(f"{path}, line 1: the date {brief(day)} is none; it reads YYYY-MM-DD") from None


def continue_run(path, settings, asked, check=lambda rows: None):
    """(rows that the file holds by index, what new rows add to say that they were made otherwise).

    asked: index → the fields with which every item's row begins, all that does not depend on the answer. check: raises
    ValueError for rows that lack a part of the answer. ValueError where rows of these settings cannot join what is
    there."""
    stored, lines = read_run(path) if path.exists() else (None, [])
    if stored is None and path.exists() and not b'{"settings": '.startswith(path.read_bytes()[:13]):
        raise ValueError(f"{path}: its first line has no settings; this is no run of evaluate.py: choose another --out")
    if not lines:
        write_run(path, settings, [])
        return {}, {}
    now = json.loads(json.dumps(settings))
    check_settings(path, stored, now)
    check(lines)
    for row in lines:
        where = f"{path}, line {row['line']}"
        if row["index"] not in asked:
            raise ValueError(f"{where}: item {row['index']} is none of the run's {len(asked)}; remove the line")
        for name, value in asked[row["index"]].items():
            if row.get(name) != value:
                raise ValueError(f"{where}: {name} of item {row['index']} is {brief(row.get(name))} and would be "
                                 f"{brief(value)} now; choose another --out or remove the file")
        other = next((name for name in row if name not in asked[row["index"]] and name not in ANSWER), None)
        if other is not None:
            raise ValueError(f"{where}: no row of a run has a field {other!r}; restore or remove the line")
    rows = {row["index"]: {name: value for name, value in row.items() if name != "line"} for row in lines}
    if len(rows) < len(asked):
        last = dict(stored)
        for part in stored.get("continued", []):
            last |= part
        changed = {name: now.get(name) for name in SURROUNDINGS if now.get(name) != last.get(name)}
        stored |= {name: now.get(name) for name in ("n", "limit")}
        if changed:
            stored["continued"] = [*stored.get("continued", []), {"rows": len(rows)} | changed]
        write_run(path, stored, rows.values())
    times = len(stored.get("continued", []))
    return rows, {"continued": times} if times else {}


def check_settings(path, stored, now):
    """Refuse by name what makes other numbers."""
    if "fingerprint" not in stored:
        raise ValueError(f"{path} does not say which weights made it, as runs of earlier versions do not; `report` and "
                         "`rescore` read it, but to run again choose another --out or remove the file")
    there, here = flat(stored), flat(now)
    other = [name for name in dict.fromkeys([*there, *here]) if name.split(".")[0] not in NOT_COMPARED + SURROUNDINGS
             and there.get(name) != here.get(name)]
    if not isinstance(stored.get("n"), int) or stored["n"] > now["n"]:
        other.insert(0, "n")
    if other:
        changes = "; ".join(f"{name}: {brief(there.get(name))} there, {brief(here.get(name))} now"
                            for name in other[:4])
        raise ValueError(f"{path} was made with other settings ({changes}); choose another --out or remove the file")


def flat(settings):
    """Settings with "fingerprint.weights" for a name within an object."""
    return {name if inner is None else f"{name}.{inner}": found
            for name, value in settings.items()
            for inner, found in (value.items() if isinstance(value, dict) else [(None, value)])}


def brief(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def write_run(path, settings, rows):
    write(path, [{"settings": settings}, *rows])


def finish(path, rows):
    """Put the rows into the data's order."""
    write_run(path, read_run(path)[0], rows)
