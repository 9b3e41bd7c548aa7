"""The paper's tables: their columns, values and N, and its statistical tests.

paper.csv: `value` is the right value; if the paper misprints it, `printed` is the misprint and `note` the reason.
paper_n.csv: how each N of a main table was inferred. paper_heads.csv: retrieval scores by rank."""

import csv
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
EM = {"substring_match": "EM"}

# Group → task → (the paper's name, the metric of its figures, {metric: heading in the main tables})
GROUPS = {
    "Faithfulness": {
        "xsum": ("XSum", "factkb", {"rougeL": "ROUGE-L", "bertscore_f1": "BERTScore-F1", "factkb": "factKB"}),
        "memotrap": ("MemoTrap", "macro", {"macro": "macro", "micro": "micro"}),
        "ifeval": ("IFEval", "instruction_strict",
                   {"instruction_strict": "instruction", "prompt_strict": "prompt"}),
        "nq-open": ("NQ-Open", "substring_match", EM),
        "nq-swap": ("NQ-Swap", "substring_match", EM)},
    "Factuality": {
        "truthfulqa-mc": ("TruthfulQA", "mc2", {"mc1": "MC1", "mc2": "MC2", "mc3": "MC3"}),
        "truthfulqa-gen": ("TruthfulQA (Gen)", "truth", {
            "truth": "%Truth", "info": "%Info", "truth_and_info": "%T∩I", "rejection": "%Reject",
            "truth_not_rejected": "%T∩¬Reject", "info_not_rejected": "%I∩¬Reject",
            "truth_and_info_not_rejected": "%T∩I∩¬Reject"}),
        "triviaqa": ("TriviaQA", "substring_match", EM),
        "popqa": ("PopQA", "substring_match", EM),
        "nq-closed": ("NQ-Open closed book", "substring_match", EM)},
    "Multi-hop reasoning": {
        f"musique-{kind}-{book}": (f"MuSiQue {name} {book} book", "substring_match", EM)
        for kind, name in (("direct", "direct"), ("cot", "CoT")) for book in ("closed", "open")},
    "Miniature": {
        "miniature-conflict": ("conflict", "exact_match", {"exact_match": "", "memory_match": "from memory"}),
        "miniature-conflict-known": ("conflict, known names", "exact_match", {"exact_match": ""}),
        "miniature-open": ("open book", "exact_match", {"exact_match": ""}),
        "miniature-closed": ("closed book", "exact_match", {"exact_match": ""}),
        "miniature-irrelevant": ("irrelevant passage", "exact_match", {"exact_match": ""})},
}
TASKS = {task: about for tasks in GROUPS.values() for task, about in tasks.items()}
RETRIEVAL = 0.1                         # the paper counts heads above this score as retrieval heads
RANDOM = {"masked": "masked-random", "decore-entropy": "decore-random"}


@cache
def table(name):
    with open(FOLDER / f"{name}.csv", encoding="utf-8", newline="") as rows:
        return list(csv.DictReader(rows))


def columns(group):
    """[(task, metric, heading)] of a table."""
    return [(task, metric, f"{name} {label}".strip())
            for task, (name, _, labels) in GROUPS[group].items() for metric, label in labels.items()]


def headline(task):
    """(metric, its label) of a task in the paper's figures and correlations."""
    _, metric, labels = TASKS[task]
    return metric, labels[metric] or "%"


def method_of(setup):
    return RANDOM.get(setup.method, f"{setup.method}-random") if setup.random_heads else setup.method


@cache
def rows(name, task, model, method):
    key = task, model.lower(), method
    return [row for row in table(name) if (row["task"], row["model"].lower(), row["method"]) == key]


def inferred(task, model, method):
    """The values of N that the paper's main table may have been measured at, as texts."""
    return [n for row in rows("paper_n", task, model, method) for n in row["num_heads"].split()]


def cell(run, metric):
    """The paper's row for this run and metric, or None.

    `at` in the row says at which N it was measured, if that is not the run's N: the paper's tables over N have a cell
    for most N, its main tables do not state theirs."""
    setup = run.setup
    fits = [row for row in rows("paper", run.task, run.model, method_of(setup)) if row["metric"] == metric
            and row["num_heads"] in ("", str(setup.num_heads))
            and (row["alpha"] == "" or setup.alpha == float(row["alpha"]))]
    row = max(fits, key=lambda row: (row["num_heads"] != "", row["alpha"] != ""), default=None)
    if row is None or row["num_heads"] or setup.num_heads is None:
        return row and row | {"at": ""}
    main = inferred(run.task, run.model, setup.method) if metric != "entropy" else []
    return row | {"at": "" if str(setup.num_heads) in main else f"at N = {' or '.join(main) or '?'}"}


def text(row):
    """The paper's value with its ±, a mark if it is misprinted, and its N if that is not the run's."""
    if row is None:
        return "–"
    std = f" ± {float(row['std']):g}" if row["std"] else ""
    return f"{float(row['value']):g}{std}{'†' if row['printed'] or row['note'] else ''} {row['at']}".rstrip()


def points(column, model, task, method):
    """[(N or α, value)] of the paper's tables over "num_heads" or "alpha", by the metric of the figures."""
    return sorted((float(row[column]), float(row["value"])) for row in rows("paper", task, model, method)
                  if row[column] and row["metric"].removesuffix("_published") == headline(task)[0])


def tests(model, tasks):
    """[a note with the paper's own tests for the model and tasks, and doubts about implausible ones]; [] if none."""
    texts = [f"{TASKS[row['task']][0]}, {row['method']}, {row['what']} {row['value']}"
             + f" ({row['note']})" * ("implausible" in row["note"])
             for row in table("paper_tests") if row["model"].lower() == model.lower() and row["task"] in tasks]
    return [f"Paper: {'; '.join(texts)}."] if texts else []
