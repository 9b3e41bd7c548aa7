"""The metric values of a run's lines, and their means as it prints them."""

import json
import time
from pathlib import Path

from paper.runfile import beside
from paper.tasks import answers, metrics, model_metrics
from runtime.files import json_hash, json_lines, write
from runtime.progress import say


def values_of(path, task, lines):
    """The metric values of each line, a dict each. Slow ones are stored in `.scores.json`, for the
    code that computed them."""
    store = beside(path, ".scores.json")
    for _, entry in json_lines(store) if store.exists() else ():
        if entry.get("key") == key_of(task, lines):
            return entry["values"]
    start = time.perf_counter()
    values = metrics.compute(task, lines)
    if not metrics.problems(task) and time.perf_counter() - start > 5:  # seconds
        write(store, [{"key": key_of(task, lines), "values": values}])
    return values


def key_of(task, lines):
    """A hash of what determines the values."""
    modules = answers, metrics, model_metrics
    code = [Path(module.__file__).read_text("utf-8") for module in modules]
    return json_hash([code, task.version, lines])


def print_means(values, about):
    """Print the means as one JSON line, with the number of values of those that not all lines
    have."""
    means = metrics.summary(values)
    fewer = {name: n for name, n in metrics.counts(values).items() if n < len(values)}
    about = about | {"metrics": means, "n": len(values)} | ({"n_of": fewer} if fewer else {})
    if "rejection" in means and "truth" not in means:
        say("not judged: evaluate.py rescore --judge adds truth, info and both")
    print(json.dumps(about, ensure_ascii=False), flush=True)
