"""Stored runs as one table: a line per run and metric, with setup, seed, value and interval.

Columns that hold objects: `run`; `greedy`, the run that it is compared with; `versus`, the
Difference to it; `cell`, the paper's row for the run and metric. `task` is a categorical column in
the order of the tables. `headline` marks the metrics of the paper's figures."""

import sys
from dataclasses import asdict, replace
from itertools import groupby

import numpy as np
import pandas as pd

from paper import printed
from paper.report.paired import compare, scale_of
from paper.report.stored import METHODS
from paper.tasks import metrics

TYPES = {"num_heads": "Int64", "seed": "Int64", "task": pd.CategoricalDtype(list(printed.TASKS))}
OBJECTS = ["run", "greedy", "versus", "cell"]


def make_frame(runs):
    """The table of the runs, in the order of the tables.

    Of several runs of one setup, task and draw, the one with the most examples is taken."""
    runs = sorted(label_variants(runs), key=lambda run: (order(run), -len(run.lines)))
    chosen = []
    for _, (first, *others) in groupby(runs, order):
        chosen.append(first)
        for run in others:
            print(
                f"skipped: {run.path}: the same setup as {first.path}, which has as many examples "
                "or more",
                file=sys.stderr,
            )
    lines = [line for run in chosen for line in lines_of(run, greedy_of(run, chosen))]
    return pd.DataFrame(lines).astype(TYPES)


def as_csv(frame):
    versus = [one._asdict() if one else {} for one in frame["versus"]]
    versus = pd.DataFrame(versus, frame.index).drop(columns="value", errors="ignore")
    values = frame.drop(columns=[*OBJECTS, "setup", "title", "headline"])
    values = values.join(versus.add_prefix("versus_"))
    return values.rename(columns={"file": "run"}).to_csv(index=False)


def lines_of(run, greedy):
    """Yields a line of the table per metric that has values. Rates are in per cent."""
    versus = compare([run], greedy) if greedy else {}
    for metric, means in metrics.means(run.values, metrics.bootstrap(run.questions)).items():
        if np.isnan(means[0]):
            continue
        scale = scale_of(metric)
        low, high = metrics.interval(means)
        cell = printed.cell(run, metric)
        # A metric of whole runs, such as `macro`, has no values of single examples.
        scored = sum(values.get(metric) is not None for values in run.values) or len(run.lines)
        yield {
            "run": run,
            "greedy": greedy,
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
            "value": scale * means[0],
            "low": scale * low,
            "high": scale * high,
            "versus": versus.get(metric),
            "cell": cell,
            "paper": cell and float(cell["value"]),
            "paper_at": cell and cell["at"],
        }


def greedy_of(run, runs):
    """The greedy run of the same data and demonstrations, if possible with the same precision; None
    without one, and for greedy decoding itself."""

    def unlike(other):
        return sum(run.precision[name] != text for name, text in other.precision.items())

    same = [
        one
        for one in runs
        if one.setup.method == "greedy" != run.setup.method
        and (one.title, one.task) == (run.title, run.task)
        and all(one.inputs[name] == run.inputs[name] for name in ("data", "demos"))
    ]
    return min(same, key=unlike, default=None)


def label_variants(runs):
    """Yields the runs, labelled by heads that differ within a model (or its amateur), and by
    precision and inputs that differ within a model and task."""
    titles, tasks = [run.title for run in runs], [run.task for run in runs]
    amateurs = [run.setup.amateur for run in runs]
    heads = differing([run.heads for run in runs], [titles, amateurs])
    variants = differing([run.precision | run.inputs for run in runs], [titles, tasks])
    for run, of_heads, variant in zip(runs, heads, variants):
        yield replace(run, setup=replace(run.setup, heads=of_heads, variant=variant))


def differing(facts, places):
    """A text for each run: its facts that differ between runs of one place. None never differs."""
    facts = pd.DataFrame(facts, dtype=object)
    differs = facts.groupby(places).transform("nunique") > 1
    shown = facts.fillna("").where(differs, "").to_numpy()
    return [", ".join(filter(None, texts)) for texts in shown]


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
        setup.heads,
        setup.num_heads or 0,
        -1e9 if setup.alpha is None else setup.alpha,
        run.task,
        (run.header.get("seed") or 0, run.header.get("heads") or []) if setup.random_heads else (),
    )
