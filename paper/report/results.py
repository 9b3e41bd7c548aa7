"""Runs → results: a metric of each setup on a task's items, and its difference to greedy decoding.

Draws of random heads are one result. Rates are in per cent. Whatever a report prints can be
computed again:

    tables = results.short_tables(results.select(stored.collect("results/seen")))
    rows = {row.label: row for row in tables["SmolLM2-135M-Instruct", "nq-swap"]}
    rows["CAD, α = 0.5"].versus.difference"""

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from decoders.setup import METHODS, SETTINGS
from paper import printed, runfile
from paper.report.stored import ORIGIN, TEXTS, field_text
from paper.tasks import metrics
from runtime import statistics
from runtime.progress import say

NOT_RATES = ("rougeL", "bertscore_f1", "factkb", "entropy", "tokens", "letters")  # not in per cent
# Values shown beside the metric of a short table
BESIDE = ("memory", "neither", "blank", "exact_match", "memory_match")


class Difference(NamedTuple):
    """A metric of runs minus that of other runs, on the items that all have."""

    value: float  # of the others, a mean over them
    difference: float
    interval: tuple | None  # 95 %, paired, over the questions
    won: float  # items with a higher value, a mean over the pairs of runs
    lost: float
    p: float | None  # None for texts and for rates over different items
    n: int  # items


@dataclass
class Result:
    label: str
    metric: str
    runs: list  # one, or the draws of random heads
    n: int  # items: those that are compared, if there is a difference
    values: list  # of each run on these items; empty in a row that compares two setups
    versus: Difference | None = None
    others: list = ()  # the runs that `versus` compares with: greedy decoding, or random heads
    beside: dict = field(default_factory=dict)  # metrics of BESIDE → their values
    shown: bool = False  # whether p is below 0.05 after Holm's correction within the table

    @property
    def run(self):
        return self.runs[0]

    @property
    def value(self):
        return float(np.mean(self.values))

    @property
    def beside_random(self):
        """Whether the row compares retrieval heads with random heads."""
        return not self.values


# Tables


def short_tables(runs):
    """{(title, task): results} of the main metric of each task, of runs of `select`.

    A row "retrieval − random heads" follows each setup with random heads of which a run with
    retrieval heads is known."""
    tables = {}
    for (task, title), same in groupby(runs, attrgetter("task", "title")):
        same = list(same)
        metric = printed.headline(task, known_metrics(same))
        rows = by_label(same)
        results = []
        for draws in rows.values():
            result = metric and result_of(draws, metric)
            if not result:
                for run in draws:
                    name = metric or "the task's metrics"
                    say(f"left out: {run.path}: no values of {name}")
                continue
            results.append(result)
            if draws[0].setup.random_heads:
                results += retrieval_minus_random(draws, rows, metric)
        if results:
            tables[title, task] = correct(results)
    return tables


def retrieval_minus_random(draws, rows, metric):
    """Yields a result for each row with retrieval heads that is otherwise equal to random draws."""
    random = draws[0].setup.words()["random_heads"]
    for label, runs in rows.items():
        setup = runs[0].setup
        if setup.num_heads and not setup.random_heads and alike(runs[0], draws[0]):
            if versus := compare(runs, draws, metric):
                label = f"{label}: retrieval − {random}"
                yield Result(label, metric, runs, versus.n, [], versus, draws)


def alike(run, other):
    """Whether two runs differ in their heads alone."""
    chosen = ("heads", "random_heads", "seed", *ORIGIN)
    one, two = run.identity, other.identity
    return all(one.get(name) == two.get(name) for name in (one | two).keys() - chosen)


def correct(results):
    """The results of one table, marked as shown by Holm's correction."""
    tested = [result for result in results if result.versus and result.versus.p is not None]
    corrected = statistics.holm([result.versus.p for result in tested])
    for result, p in zip(tested, corrected):
        result.shown = p < 0.05
    return results


def result_of(runs, metric):
    """The result of a run or of the draws of random heads; None if they have no value of it."""
    greedy = runs[0].greedy
    versus = greedy and compare(runs, [greedy], metric)
    sides = [run.values for run in runs]
    if versus:
        sides = common_items([*runs, greedy])[1][:-1]
    of_runs = [metrics.summary(values, [metric, *BESIDE]) for values in sides]
    means = {}
    for name in (metric, *BESIDE):
        values = [of_run[name] for of_run in of_runs]
        if None not in values:
            means[name] = [scale_of(name) * value for value in values]
    values = means.pop(metric, None)
    if values is None:
        return None
    n = versus.n if versus else min(metrics.counts(x, [metric])[metric] for x in sides)
    beside = {name: float(np.mean(shares)) for name, shares in means.items()}
    return Result(runs[0].label, metric, runs, n, values, versus, [greedy], beside)


def own_value(run, metric):
    """The run's value, of all its lines."""
    return scale_of(metric) * metrics.summary(run.values, [metric])[metric]


def own_interval(run, metric):
    """(low, high) of the run's value; None if it would have no width. If all items agree on a
    rate, it is Wilson's for as many items as there are questions."""
    means = statistics.averages([metrics.columns(run.values, metric)], run.questions)[:, 0]
    ends = statistics.interval(means)
    if ends is None and metric not in NOT_RATES and means[0] in (0, 1):
        ends = statistics.wilson(means[0], len(set(run.questions)))
    return ends and tuple(scale_of(metric) * end for end in ends)


def known_metrics(runs):
    return list(dict.fromkeys(name for run in runs for name in metrics.names(run.values)))


def scale_of(metric):
    return 1 if metric in NOT_RATES else 100


def lines(runs):
    """Yields a dict {column: value} for each run and metric, in the order of `select`."""
    for run in runs:
        for metric, n in metrics.counts(run.values).items():
            if n:
                yield line_of(run, metric, n)


def line_of(run, metric, n):
    low, high = own_interval(run, metric) or (None, None)
    line = {
        "run": run.path.name,
        "task": run.task,
        "model": run.model,
        "conditions": run.conditions,
        "row": run.label,
        "method": run.method,
        **{name: run.header.get(name) for name in SETTINGS},
        "n": n,
        "metric": metric,
        "value": own_value(run, metric),
        "low": low,
        "high": high,
    }
    versus = run.greedy and compare([run], [run.greedy], metric)
    versus = versus._asdict() if versus else {}
    versus |= zip(("low", "high"), versus.get("interval") or ())
    for name in ("difference", "low", "high", "won", "lost", "p", "n"):
        line[f"versus_{name}"] = versus.get(name)
    cell = printed.cell(run, metric)
    return line | {"paper": cell and float(cell["value"]), "paper_at": cell and cell["at"]}


# Comparisons on the same items


def common_items(runs):
    """(questions, values of each run) of the items that all runs have."""
    sides = [run.items for run in runs]
    common = [key for key in sides[0] if all(key in side for side in sides)]
    questions = [sides[0][key][0] for key in common]
    return questions, [[side[key][1] for key in common] for side in sides]


def compare(runs, others, metric):
    """The Difference of runs to others; None without common items with values."""
    questions, sides = common_items([*runs, *others])
    if not questions:
        return None
    columns = [metrics.columns(values, metric) for values in sides]
    means = statistics.averages(columns, questions)
    k = len(runs)
    other = means[:, k:].mean(1)
    differences = means[:, :k].mean(1) - other
    if np.isnan(differences[0]):
        return None
    scale = scale_of(metric)
    ends = statistics.interval(differences)
    # [runs and others, n] each; means over splits have several pairs.
    sums, weights = np.array([np.sum(pairs, 0) for pairs in columns]).swapaxes(0, 1)
    values = np.divide(sums, weights, where=weights > 0, out=np.full_like(sums, np.nan))
    signs = np.sign(values[:k, None] - values[None, k:])  # NaN without a value
    p = None  # of texts, of means over splits, of rates over items that differ from run to run
    if metric not in TEXTS and len(columns[0]) == 1 and (weights == weights[0]).all():
        p = statistics.p_value(sums[:k], sums[k:], questions)
    return Difference(
        scale * float(other[0]),
        scale * float(differences[0]),
        ends and tuple(scale * end for end in ends),
        float((signs > 0).sum(-1).mean()),
        float((signs < 0).sum(-1).mean()),
        p,
        int(weights.any(0).sum()),
    )


def greedy_of(run, greedy):
    """(the comparable greedy run with the most items of this run, or None; sentences that say why
    there is none). greedy: runs."""
    if run.method == "greedy":
        return None, []
    others = [other for other in greedy if (other.task, other.model) == (run.task, run.model)]
    common = {}
    for other in others:
        if other.title == run.title and compared_fields(other, run) == run.comparable:
            common[other] = len(other.items.keys() & run.items.keys())
    if any(common.values()):
        return max(common, key=common.get), []
    if not others:
        return None, ["no run of greedy decoding to compare with"]
    reasons = {}
    for other in others:
        reasons[other] = list(runfile.differences(compared_fields(other, run), run.comparable))
    nearest = min(others, key=lambda other: len(reasons[other]))
    reason = "; ".join(reasons[nearest]) or "they have no items in common"
    return None, [f"{run.path} is not compared with {nearest.path}: {reason}"]


def compared_fields(greedy, run):
    """The fields of a greedy run that those of the run must equal."""
    if run.method != "iti":
        return greedy.comparable
    fields = {n: value for n, value in greedy.comparable.items() if n != "fingerprint"}
    return fields | {"model": run.identity["model"]}


# Runs in the order of the tables


def select(runs):
    """The runs in the order of the tables, labelled. Of several runs of one identity the one with
    the most examples is taken."""
    chosen = {}
    for run in sorted(runs, key=lambda run: -len(run.lines)):
        first = chosen.setdefault(json.dumps(run.identity, sort_keys=True), run)
        if first is not run:
            names = run.header | first.header
            names = [name for name in names if run.header.get(name) != first.header.get(name)]
            say(
                f"skipped: {run.path}: the same setup as {first.path}, which has as many examples "
                f"or more; their headers differ in {', '.join(names) or 'nothing'}"
            )
    chosen = sorted(label_variants([*chosen.values()]), key=order)
    greedy = [run for run in chosen if run.method == "greedy"]
    for run in chosen:
        run.greedy, reasons = greedy_of(run, greedy)
        run.remarks = [*run.remarks, *reasons]  # not those of the file's other parts
    return chosen


def by_label(runs):
    """Label → its runs of one task and title: one, or the draws of random heads."""
    rows = defaultdict(list)
    for run in runs:
        rows[run.label].append(run)
    return rows


def label_variants(runs):
    """The runs, labelled by what differs: checkpoints of one name, heads within a model (or its
    amateur), precision and inputs within a model and task, anything else within a row."""

    def labels(*names):
        return lambda run: {name: run.labels[name] for name in names}

    names = dict.fromkeys(name for run in runs for name in run.identity)

    def identity(run):
        return {n: field_text(n, run.identity.get(n)) for n in names if n not in run.draw}

    inputs = labels("dtype", "engine", "product", "data", "demos", "items", "prompt")
    runs = with_differences(runs, "conditions", labels("checkpoint"), "title")
    runs = with_differences(runs, "heads", labels("heads"), "title", "setup.amateur")
    runs = with_differences(runs, "variant", inputs, "title", "task")
    return with_differences(runs, "variant", identity, "title", "task", "label")


def with_differences(runs, field, facts, *place):
    """The runs, with those of their facts that differ between runs of one place appended to a
    field.

    facts(run): {name: text}; None never differs. place: attributes that runs of one place share."""
    facts = [facts(run) for run in runs]
    places = [*map(attrgetter(*place), runs)]
    texts = defaultdict(set)
    for of_run, at in zip(facts, places):
        for name, text in of_run.items():
            texts[at, name].add(text)
    labelled = []
    for run, of_run, at in zip(runs, facts, places):
        shown = [getattr(run, field)]
        shown += [text for name, text in of_run.items() if len(texts[at, name] - {None}) > 1]
        labelled.append(replace(run, **{field: ", ".join(filter(None, shown))}))
    return labelled


def order(run):
    """Sort key: task, model, setup, draw."""
    draw = (run.identity.get("seed") or 0, run.identity.get("heads") or []) if run.draw else ()
    return list(printed.NAMES).index(run.task), run.title, order_of_row(run), draw


def order_of_row(run):
    """Sort key: the order of METHODS, options, N, α, retrieval heads before random ones."""
    setup = run.setup
    words = setup.words()
    for name in ("num_heads", "alpha", "random_heads", "measure"):
        words.pop(name, None)
    return (
        [*METHODS, setup.method].index(setup.method),
        setup.method,
        run.method == "iti",
        tuple(words.values()),
        run.variant,
        setup.num_heads or 0,
        -1e9 if setup.alpha is None else setup.alpha,
        setup.random_heads or "",
        setup.measure or "",
        run.heads,
    )
