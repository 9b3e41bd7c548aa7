"""Stored runs as one table: a line per run and metric, with setup, seed, value and interval.

Two columns hold objects: `run`, and `cell`, the paper's row for the run and metric. `task` is a
categorical column in the order of the tables. `headline` marks the metrics of the paper's
figures."""

import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import groupby

import pandas as pd

from paper import printed
from paper.report.stored import METHODS
from paper.tasks import metrics

NOT_RATES = ("rougeL", "bertscore_f1", "factkb", "entropy")  # the others are in per cent
TYPES = {"num_heads": "Int64", "seed": "Int64", "task": pd.CategoricalDtype(list(printed.TASKS))}


def make_frame(runs):
    """The table of the runs, in the order of the tables.

    Of several runs of one setup, task and draw, the one with the most examples is taken."""
    runs = sorted(label_variants(runs), key=lambda run: (order(run), -len(run.lines)))
    lines = []
    for _, (first, *others) in groupby(runs, order):
        lines += lines_of(first)
        for run in others:
            print(
                f"skipped: {run.path}: the same setup as {first.path}, which has as many examples "
                "or more",
                file=sys.stderr,
            )
    return pd.DataFrame(lines).astype(TYPES)


def as_csv(frame):
    values = frame.drop(columns=["run", "setup", "title", "headline", "cell"])
    return values.rename(columns={"file": "run"}).to_csv(index=False)


def lines_of(run):
    """Yields a line of the table per metric that has values. Rates are in per cent."""
    intervals = metrics.interval(run.values)
    for metric, mean in metrics.summary(run.values).items():
        if mean is None:
            continue
        scale = 1 if metric in NOT_RATES else 100
        low, high = intervals[metric]
        cell = printed.cell(run, metric)
        # A metric of whole runs, such as `macro`, has no values of single examples.
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
            "method": printed.method_of(run.setup),
            "seed": run.header.get("seed"),
            "n": len(run.lines),
            "scored": scored,
            "metric": metric,
            "headline": metric == printed.headline(run.task)[0],
            "value": scale * mean,
            "low": scale * low,
            "high": scale * high,
            "cell": cell,
            "paper": cell and float(cell["value"]),
            "paper_at": cell and cell["at"],
        }


def label_variants(runs):
    """Yields the runs, labelled by precision and inputs that differ within a model and task."""
    facts = pd.DataFrame([run.precision | run.inputs for run in runs])
    places = [[run.title for run in runs], [run.task for run in runs]]
    differs = facts.groupby(places).transform("nunique") > 1
    for run, texts in zip(runs, facts.where(differs, "").to_numpy()):
        yield replace(run, setup=replace(run.setup, variant=", ".join(filter(None, texts))))


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
    """The lines of one setup per method, way of masking, amateur and variant, task by task.

    Retrieval heads; if possible the paper's options and its α; then the N that most runs have. If
    several do, the N that the paper's tables are inferred to have, then the default one."""
    runs = [run for run in frame["run"].unique() if not run.setup.random_heads]
    of_n = Counter(run.setup.num_heads for run in runs)

    def preference(run):
        setup = run.setup
        return (
            not setup.options,
            setup.alpha == 0.5,  # the paper's
            of_n[setup.num_heads],
            str(setup.num_heads) in printed.inferred(run),
            setup.num_heads == run.default_num_heads,
            -(setup.num_heads or 0),
        )

    best = {}
    for run in sorted(runs, key=preference, reverse=True):
        setup = run.setup
        best.setdefault((setup.method, setup.mask, setup.amateur, setup.variant), str(setup))
    return frame[frame["setup"].isin(best.values())]
