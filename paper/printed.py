"""The paper's tables: their metrics, values and N.

paper.csv: `value` is the right value; if the paper misprints it, `printed` is the misprint and
`note` the reason; `group` is for plan.py. paper_columns.csv: the metrics of the main tables.
paper_n.csv: how each N of a main table was inferred.
paper_heads.csv: retrieval scores by rank. paper_tests.csv: statistical tests, which
docs/differences.md discusses."""

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
# The main metric, if it is not the first of the table: that of the paper's figures. A macro average
# of MemoTrap rests on the few items of its smallest split. IFEval's prompts are right or wrong.
HEADLINES = {
    "xsum": "factkb",
    "truthfulqa-mc": "mc2",
    "memotrap": "micro",
    "ifeval": "prompt_strict",
}


@cache
def csv_rows(name):
    with open(FOLDER / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


NAMES = {}  # task → the paper's name
METRICS = defaultdict(list)  # task → the paper's metrics
GROUPS = defaultdict(dict)  # group of tables → its tasks, as keys
for row in csv_rows("paper_columns"):
    NAMES[row["task"]] = row["name"]
    METRICS[row["task"]].append(row["metric"])
    GROUPS[row["group"]][row["task"]] = None


def headline(task, known):
    """The main metric of a task, or the first one of the paper's that is known; None without."""
    names = HEADLINES.get(task), *METRICS[task]
    return next((name for name in names if name in known), None)


def method_of(run):
    """The method's name in paper.csv. There, "decore-random" is DeCoRe entropy's random heads."""
    if run.setup.random_heads:
        return f"{run.setup.method.removesuffix('-entropy')}-random"
    return run.method


@cache
def cells(name, task, model, method):
    key = task, model.lower(), method
    return [
        row for row in csv_rows(name) if (row["task"], row["model"].lower(), row["method"]) == key
    ]


def cell(run, metric):
    """The paper's cell for this run and metric, a row of paper.csv, or None.

    Its `at` says at which N it was measured, if that is not the run's N: the paper's tables over N
    have a cell for most N, its main tables do not state theirs."""
    n, alpha = run.setup.num_heads, run.setup.alpha
    fits = [
        row
        for row in cells("paper", run.task, run.paper_model, method_of(run))
        if row["metric"] == metric
        and row["num_heads"] in ("", str(n))
        and (row["alpha"] == "" or alpha == float(row["alpha"]))
    ]
    if not fits:
        return None
    row = max(fits, key=lambda row: (row["num_heads"], row["alpha"]))  # "" is less than any number
    # The values of N that the paper's table may have for the method of this run.
    main = cells("paper_n", run.task, run.paper_model, run.setup.method)
    main = [] if metric == "entropy" else " ".join(x["num_heads"] for x in main).split()
    known = row["num_heads"] or n is None or str(n) in main
    return row | {"at": "" if known else f"at N = {' or '.join(main) or '?'}"}


def text(cell):
    """The paper's value, its ±, a mark if it is misprinted, and its N if that is not the run's."""
    if cell is None:
        return "–"
    text = f"{float(cell['value']):g}"
    if cell["std"]:
        text += f" ± {float(cell['std']):g}"
    if cell["printed"] or cell["note"]:
        text += "†"
    return f"{text} {cell['at']}".rstrip()
