"""Stored runs as one table: a line per run and metric, with setup, seed, value, interval and the paper's value.

Two columns hold objects: `run`, and `cell`, the paper's row. `headline`: the metric is that of the paper's figures."""

from collections import Counter
from dataclasses import asdict

import pandas as pd

from report import published
from report.stored import METHODS, best_heads
from tasks import metrics

PAPER_ALPHA = 0.5                               # of DeCoRe static
NOT_FRACTIONS = ("rougeL", "bertscore_f1", "factkb", "entropy")     # the other metrics are reported in per cent


def make_frame(runs):
    """(the table of the runs, in the order of the tables; [(path, why it is skipped)]).

    Of several runs of one setup, task and draw, the one with the most examples is taken."""
    chosen, skipped = {}, []
    for run in sorted(runs, key=lambda run: -len(run.lines)):
        first = chosen.setdefault(order(run), run)
        if first is not run:
            skipped.append((run.path, f"the same setup as {first.path}, which has as many examples or more; "
                            "to see it, report its folder alone"))
    frame = pd.DataFrame([line for key in sorted(chosen) for line in lines_of(chosen[key])])
    return frame.astype({"task": pd.CategoricalDtype([*published.NAMES]), "num_heads": "Int64", "seed": "Int64",
                         "alpha": float, "paper": float}), skipped


def order(run):
    """Sort key: the order of METHODS, retrieval heads before random ones, then N, α, task and draw."""
    setup = run.setup
    values = (setup.mask, setup.amateur, setup.options, setup.random_heads, setup.num_heads, setup.alpha, run.task,
              run.header.get("seed") if setup.random_heads else None)
    return run.title, [*METHODS].index(setup.method), *((value is not None, value) for value in values)


def lines_of(run):
    """Yields a line of the table per metric that has values. Rates are in per cent."""
    intervals = metrics.interval(run.values)
    for metric, mean in metrics.summary(run.values).items():
        if mean is not None:
            scale = 1 if metric in NOT_FRACTIONS else 100
            low, high = intervals[metric]
            # A metric of whole runs, such as `macro`, has no values of single examples.
            scored = sum(values.get(metric) is not None for values in run.values) or len(run.lines)
            cell = published.cell(run, metric)
            yield {"run": run, "setup": str(run.setup), "title": run.title, "file": run.path.name,
                   "task": run.task, "model": run.model, "conditions": run.conditions, **asdict(run.setup),
                   "method": published.method_of(run.setup), "seed": run.header.get("seed"),
                   "n": len(run.lines), "scored": scored, "metric": metric, "value": scale * mean,
                   "low": scale * low, "high": scale * high, "cell": cell,
                   "paper": cell and float(cell["value"]), "paper_at": cell and cell["at"],
                   "headline": metric == published.HEADLINES[run.task][0]}


def typical(frame):
    """The lines of one setup per method, way of masking and amateur.

    Retrieval heads; if possible the paper's options and its α; then the N that most runs have. If several do, the N
    that the paper's tables are inferred to have, then the default one."""
    runs = [run for run in frame["run"].unique() if not run.setup.random_heads]
    of_n = Counter(run.setup.num_heads for run in runs)
    inferred = Counter(run.setup for run in runs
                       if str(run.setup.num_heads) in published.inferred(run.task, run.model, run.setup.method))

    def preference(run):
        setup, n = run.setup, run.setup.num_heads
        heads = best_heads(run.header.get("amateur") or run.header["model"])
        default = min(10, max(1, len(heads) // 8)) if heads else 10         # as in evaluate.py
        return not setup.options, setup.alpha == PAPER_ALPHA, of_n[n], inferred[setup], n == default, -(n or 0)

    # The best comes last and stays.
    best = {(run.setup.method, run.setup.mask, run.setup.amateur): str(run.setup)
            for run in sorted(reversed(runs), key=preference)}
    return frame[frame["setup"].isin(best.values())]
