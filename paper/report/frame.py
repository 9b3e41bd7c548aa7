"""Stored runs as one table: a line per run and metric, with setup, seed, value and interval.

Two columns hold objects: `run`, and `cell`, the paper's row for the run and metric."""

from collections import Counter, defaultdict
from dataclasses import asdict, replace

import pandas as pd

from paper import numbers
from paper.report.stored import METHODS, best_heads
from paper.tasks import metrics

PAPER_ALPHA = 0.5  # of DeCoRe static
PAPER_DTYPE = "bfloat16"
NOT_RATES = ("rougeL", "bertscore_f1", "factkb", "entropy")  # the others are in per cent


def make_frame(runs):
    """(the table of the runs, in the order of the tables; [(path, why it is skipped)]).

    Of several runs of one setup, task and draw, the one with the most examples is taken."""
    if not runs:
        return pd.DataFrame(), []
    chosen, skipped = {}, []
    for run in sorted(label_variants(runs), key=lambda run: -len(run.lines)):
        first = chosen.setdefault(order(run), run)
        if first is not run:
            reason = f"the same setup as {first.path}, which has as many examples or more"
            skipped.append((run.path, reason))
    lines = []
    for key in sorted(chosen):
        lines += lines_of(chosen[key])
    types = {"num_heads": "Int64", "seed": "Int64", "alpha": float, "paper": float}
    return pd.DataFrame(lines).astype(types), skipped


def as_csv(frame):
    values = frame.drop(columns=["run", "setup", "title", "cell"])
    return values.rename(columns={"file": "run"}).to_csv(index=False)


def lines_of(run):
    """Yields a line of the table per metric that has values. Rates are in per cent."""
    header = run.header
    intervals = metrics.interval(run.values)
    for metric, mean in metrics.summary(run.values).items():
        if mean is None:
            continue
        scale = 1 if metric in NOT_RATES else 100
        low, high = intervals[metric]
        # A metric of whole runs, such as `macro`, has no values of single examples.
        cell = numbers.cell(run, metric)
        scored = sum(values.get(metric) is not None for values in run.values) or len(run.lines)
        yield {
            "run": run,
            "setup": str(run.setup),
            "title": run.title,
            "file": run.path.name,
            "task": run.task,
            "model": run.model,
            "conditions": run.conditions,
            **asdict(run.setup),
            "method": numbers.method_of(run.setup),
            "seed": header.get("seed"),
            "n": len(run.lines),
            "scored": scored,
            "metric": metric,
            "value": scale * mean,
            "low": scale * low,
            "high": scale * high,
            "cell": cell,
            "paper": cell and float(cell["value"]),
            "paper_at": cell and cell["at"],
        }


def label_variants(runs):
    """The runs, labelled by precision and inputs if runs of their model and task differ in them."""
    texts = defaultdict(set)
    for run in runs:
        for name, text in (run.precision | run.inputs).items():
            texts[run.title, run.task, name].add(text)
    labelled = []
    for run in runs:
        label = []
        for name, text in (run.precision | run.inputs).items():
            if text and len(texts[run.title, run.task, name]) > 1:
                label.append(text)
        labelled.append(replace(run, setup=replace(run.setup, variant=", ".join(label))))
    return labelled


def order(run):
    """Sort key: the order of METHODS, retrieval heads before random ones, N, α, task and draw."""
    setup = run.setup
    return (
        run.title,
        list(METHODS).index(setup.method),
        setup.mask or "",
        setup.amateur,
        setup.options,
        setup.variant,
        setup.random_heads or "",
        setup.num_heads or 0,
        -1e9 if setup.alpha is None else setup.alpha,
        run.task,
        (run.header.get("seed") or 0) if setup.random_heads else 0,
    )


def typical(frame):
    """The lines of one setup per method, way of masking, amateur and variant.

    Retrieval heads; if possible the paper's options and its α; then the N that most runs have. If
    several do, the N that the paper's tables are inferred to have, then the default one."""
    runs = [run for run in frame["run"].unique() if not run.setup.random_heads]
    of_n = Counter(run.setup.num_heads for run in runs)
    inferred = {run.setup for run in runs if str(run.setup.num_heads) in numbers.inferred(run)}

    def preference(run):
        setup = run.setup
        return (
            not setup.options,
            setup.alpha == PAPER_ALPHA,
            of_n[setup.num_heads],
            setup in inferred,
            setup.num_heads == default_num_heads(run.header),
            -(setup.num_heads or 0),
        )

    best = {}
    for run in sorted(reversed(runs), key=preference):  # the best comes last and stays
        setup = run.setup
        best[setup.method, setup.mask, setup.amateur, setup.variant] = str(setup)
    return frame[frame["setup"].isin(best.values())]


def default_num_heads(header):
    """As in evaluate.py: 10, at most an eighth of the heads, if they are known."""
    heads = best_heads(header.get("amateur") or header["model"])
    return min(10, max(1, len(heads) // 8)) if heads else 10


def by_task(frame):
    """[(task, its lines)] in the order of the tables."""
    tasks = {*frame["task"]}
    return [(task, frame[frame["task"] == task]) for task in numbers.TASKS if task in tasks]


def headline_values(frame, task):
    """The lines of a task's metric in the paper's figures."""
    return frame[(frame["task"] == task) & (frame["metric"] == numbers.headline(task)[0])]
