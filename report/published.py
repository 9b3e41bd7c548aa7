"""The paper's tables: their columns, values and N, and its statistical tests.

columns.csv: the columns of its main tables; the marked metric of each task is that of its figures. paper.csv: `value`
is the right value; if the paper misprints it, `printed` is the misprint and `note` the reason. paper_n.csv: how each N
of a main table was inferred. paper_heads.csv: retrieval scores by rank."""

from functools import cache
from operator import itemgetter
from pathlib import Path

import pandas as pd

RANDOM = {"masked": "masked-random", "decore-entropy": "decore-random"}     # names in paper.csv


@cache
def table(name):
    path = Path(__file__).with_name(f"{name}.csv")
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


COLUMNS = table("columns")
GROUPS = {row["group"]: [one["task"] for one in COLUMNS if one["group"] == row["group"]] for row in COLUMNS}
NAMES = {row["task"]: row["name"] for row in COLUMNS}                       # in the order of the tables
HEADLINES = {row["task"]: (row["metric"], row["heading"] or "%") for row in COLUMNS if row["figure"]}


def method_of(setup):
    return RANDOM.get(setup.method, f"{setup.method}-random") if setup.random_heads else setup.method


@cache
def cells(name, task, model, method):
    key = task, model.lower(), method
    return [cell for cell in table(name) if (cell["task"], cell["model"].lower(), cell["method"]) == key]


def inferred(task, model, method):
    """The values of N that the paper's main table may have been measured at, as texts."""
    return [n for cell in cells("paper_n", task, model, method) for n in cell["num_heads"].split()]


def cell(run, metric):
    """The paper's cell for this run and metric, a line of paper.csv, or None.

    Its `at` says at which N it was measured, if that is not the run's N: the paper's tables over N have a cell
    for most N, its main tables do not state theirs."""
    setup, n = run.setup, str(run.setup.num_heads)
    fits = [line for line in cells("paper", run.task, run.model, method_of(setup)) if line["metric"] == metric
            and line["num_heads"] in ("", n) and (line["alpha"] == "" or float(line["alpha"]) == setup.alpha)]
    line = max(fits, key=itemgetter("num_heads"), default=None)
    if line is None or line["num_heads"] or setup.num_heads is None:
        return line and line | {"at": ""}
    main = inferred(run.task, run.model, setup.method) if metric != "entropy" else []
    return line | {"at": "" if n in main else f"at N = {' or '.join(main) or '?'}"}


def text(cell):
    """The paper's value with its ±, a mark if it is misprinted, and its N if that is not the run's."""
    if cell is None:
        return "–"
    std = f" ± {float(cell['std']):g}" if cell["std"] else ""
    return f"{float(cell['value']):g}{std}{'†' if cell['printed'] or cell['note'] else ''} {cell['at']}".rstrip()
