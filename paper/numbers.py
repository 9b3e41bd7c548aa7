"""The paper's tables: their columns, values and N, and its statistical tests.

paper.csv: `value` is the right value; if the paper misprints it, `printed` is the misprint and `note` the reason.
paper_n.csv: how each N of a main table was inferred. paper_heads.csv: retrieval scores by rank."""

from functools import cache
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).parent
EM = {"substring_match": "EM"}

# Group → task → (the paper's name, the metric of its figures, {metric: heading in the main tables})
GROUPS = {
    "Faithfulness": {
        "xsum": (
            "XSum",
            "factkb",
            {"rougeL": "ROUGE-L", "bertscore_f1": "BERTScore-F1", "factkb": "factKB"},
        ),
        "memotrap": ("MemoTrap", "macro", {"macro": "macro", "micro": "micro"}),
        "ifeval": (
            "IFEval",
            "instruction_strict",
            {"instruction_strict": "instruction", "prompt_strict": "prompt"},
        ),
        "nq-open": ("NQ-Open", "substring_match", EM),
        "nq-swap": ("NQ-Swap", "substring_match", EM),
    },
    "Factuality": {
        "truthfulqa-mc": ("TruthfulQA", "mc2", {"mc1": "MC1", "mc2": "MC2", "mc3": "MC3"}),
        "truthfulqa-gen": (
            "TruthfulQA (Gen)",
            "truth",
            {
                "truth": "%Truth",
                "info": "%Info",
                "truth_and_info": "%T∩I",
                "rejection": "%Reject",
                "truth_not_rejected": "%T∩¬Reject",
                "info_not_rejected": "%I∩¬Reject",
                "truth_and_info_not_rejected": "%T∩I∩¬Reject",
            },
        ),
        "triviaqa": ("TriviaQA", "substring_match", EM),
        "popqa": ("PopQA", "substring_match", EM),
        "nq-closed": ("NQ-Open closed book", "substring_match", EM),
    },
    "Multi-hop reasoning": {
        f"musique-{kind}-{book}": (f"MuSiQue {name} {book} book", "substring_match", EM)
        for kind, name in (("direct", "direct"), ("cot", "CoT"))
        for book in ("closed", "open")
    },
    "Miniature": {
        "miniature-conflict": (
            "conflict",
            "exact_match",
            {"exact_match": "", "memory_match": "from memory"},
        ),
        "miniature-conflict-known": ("conflict, known names", "exact_match", {"exact_match": ""}),
        "miniature-open": ("open book", "exact_match", {"exact_match": ""}),
        "miniature-closed": ("closed book", "exact_match", {"exact_match": ""}),
        "miniature-irrelevant": ("irrelevant passage", "exact_match", {"exact_match": ""}),
    },
}
TASKS = {task: about for tasks in GROUPS.values() for task, about in tasks.items()}
RETRIEVAL = 0.1  # the paper counts heads above this score as retrieval heads
RANDOM = {"masked": "masked-random", "decore-entropy": "decore-random"}


@cache
def table(name):
    return pd.read_csv(FOLDER / f"{name}.csv", dtype=str, keep_default_na=False).to_dict("records")


def columns(group):
    """[(task, metric, heading)] of a table."""
    return [
        (task, metric, f"{name} {label}".strip())
        for task, (name, _, labels) in GROUPS[group].items()
        for metric, label in labels.items()
    ]


def headline(task):
    """(metric, its label) of a task in the paper's figures and correlations."""
    _, metric, labels = TASKS[task]
    return metric, labels[metric] or "%"


def method_of(setup):
    return (
        RANDOM.get(setup.method, f"{setup.method}-random") if setup.random_heads else setup.method
    )


@cache
def cells(name, task, model, method):
    key = task, model.lower(), method
    return [
        cell for cell in table(name) if (cell["task"], cell["model"].lower(), cell["method"]) == key
    ]


def inferred(task, model, method):
    """The values of N that the paper's main table may have been measured at, as texts."""
    return [n for cell in cells("paper_n", task, model, method) for n in cell["num_heads"].split()]


def cell(run, metric):
    """The paper's cell for this run and metric, a line of paper.csv, or None.

    Its `at` says at which N it was measured, if that is not the run's N: the paper's tables over N have a cell
    for most N, its main tables do not state theirs."""
    setup = run.setup
    fits = [
        line
        for line in cells("paper", run.task, run.model, method_of(setup))
        if line["metric"] == metric
        and line["num_heads"] in ("", str(setup.num_heads))
        and (line["alpha"] == "" or setup.alpha == float(line["alpha"]))
    ]
    line = max(fits, key=lambda line: (line["num_heads"] != "", line["alpha"] != ""), default=None)
    if line is None or line["num_heads"] or setup.num_heads is None:
        return line and line | {"at": ""}
    main = inferred(run.task, run.model, setup.method) if metric != "entropy" else []
    return line | {
        "at": "" if str(setup.num_heads) in main else f"at N = {' or '.join(main) or '?'}"
    }


def text(cell):
    """The paper's value with its ±, a mark if it is misprinted, and its N if that is not the run's."""
    if cell is None:
        return "–"
    std = f" ± {float(cell['std']):g}" if cell["std"] else ""
    return f"{float(cell['value']):g}{std}{'†' if cell['printed'] or cell['note'] else ''} {cell['at']}".rstrip()


def points(column, model, task, method):
    """[(N or α, value)] of the paper's tables over "num_heads" or "alpha", by the metric of the figures."""
    return sorted(
        (float(line[column]), float(line["value"]))
        for line in cells("paper", task, model, method)
        if line[column] and line["metric"].removesuffix("_published") == headline(task)[0]
    )


def tests(model, tasks):
    """[a note with the paper's own tests for the model and tasks, and doubts about implausible ones]; [] if none."""
    texts = [
        f"{TASKS[line['task']][0]}, {line['method']}, {line['what']} {line['value']}"
        + f" ({line['note']})" * ("implausible" in line["note"])
        for line in table("paper_tests")
        if line["model"].lower() == model.lower() and line["task"] in tasks
    ]
    return [f"Paper: {'; '.join(texts)}."] if texts else []
