"""Writes the tables of the pages from the stored runs, below their markers.

python -m results.tables
python -m results.tables figure    # docs/explore.png as well"""

import re
import sys
from collections import defaultdict
from functools import cache, partial
from pathlib import Path

import numpy as np

from decoders.setup import STATIC
from paper.facts import WORDINGS, fill, load, name, order, questions
from paper.facts import fresh as fresh_facts
from paper.report import figures, results, stored
from paper.report.tables import p_text, signed, span, unsigned
from paper.runfile import read_run
from paper.tasks import answers
from runtime import statistics

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / page for page in ("README.md", "docs/results.md", "docs/results-more.md")]
ROLES = "default", "by copy", "by effect", "chosen", "CAD"
SHOWN = "default", "chosen", "CAD"
SETUPS = {  # model → what played each role
    "SmolLM2-135M-Instruct": "decore-entropy.n10 decore-entropy.n10.cap1 "
    "decore-entropy.n1.effect decore-entropy.n10.cap1 cad.a0.5",
    "Qwen2.5-Coder-0.5B-Instruct": "decore-entropy.n10 decore-static.n20.a2 "
    "decore-static.n3.effect.a2 decore-static.n3.effect.a2 cad.a1",
    "Qwen2.5-Coder-1.5B-Instruct": "decore-entropy.n10 decore-static.n40.a2 "
    "decore-static.n10.effect.a2 decore-static.n10.effect.a2 cad.a1",
    "gemma-3-270m": "decore-entropy.n9 decore-static.n20.a0.5 "
    "decore-entropy.n5.effect decore-entropy.n5.effect cad.a0.5",
    "first/Qwen2.5-Coder-0.5B-Instruct": "decore-entropy.n10 decore-entropy.n20 "
    "decore-entropy.n2.effect decore-entropy.n2.effect cad.a0.5",
    "first/Qwen2.5-Coder-1.5B-Instruct": "decore-entropy.n10 decore-entropy.n3 "
    "decore-static.n3.effect.a1 decore-static.n3.effect.a1 cad.a1",
}
SETUPS = {model: dict(zip(ROLES, names.split())) for model, names in SETUPS.items()}
MODELS = [*SETUPS][:4]
FALSE, TRUE, LISTED = "implied.false.known", "implied.true.known", "listed.false.known"
CLOSED = f"closed.{FALSE}"
COSTS = {  # kind → title, metric
    CLOSED: ("no passage", "memory"),
    "nq-open": ("NQ-Open", "answer_contained"),
    "memotrap": ("MemoTrap", "micro"),
    "nq-swap": ("NQ-Swap", "answer_contained"),
}
TESTS = (  # of plan.md
    ("chosen", "greedy"),
    ("default", "greedy"),
    ("chosen", "CAD"),
    ("by effect", "by copy"),
)
TRANSFERRED = {  # task → metrics
    **{kind: [COSTS[kind][1]] for kind in ("nq-swap", "nq-open", "memotrap")},
    "truthfulqa-mc": ["mc2"],
    "xsum": ["rougeL", "ended"],
}
MASKED = dict(method="masked") | dict.fromkeys(STATIC)
DRAWS = {  # → sampler, what differs from the chosen setup
    "DeCoRe, five draws": ("uniform", {}),
    "masked, five draws": ("uniform", MASKED),
    "masked, twenty draws of any others": ("others", MASKED),
}
STUDENT = {5: 2.776445, 20: 2.093024}  # number of draws → Student's t of 95 %, two-sided

# Of which/plan.md
COMPARED = {  # → the setup's name
    **{name: name for name in ("greedy", "default", "chosen")},
    "rule": r"decore-static\.n\d+\.a2",
    **{f"CAD, α = {alpha}": rf"cad\.a{alpha}" for alpha in (0.5, 1)},
    **{f"CAD, α = {alpha}, plausible": rf"cad\.a{alpha}\.top0\.1" for alpha in (0.5, 1)},
}
CONDITIONS = {  # → kind
    "conflict": "conflict.known",
    "agreement": "agreement.known",
    "irrelevant": "irrelevant.known",
    "listed": "listed.known",
    "documents": "documents.known",
    "no passage": "closed.conflict.known",
    "an earlier turn": "turn.conflict.known",
}
FRESH_TESTS = (
    ("rule", "default"),
    ("chosen", "greedy"),
    ("rule", "greedy"),
    ("CAD, α = 1", "greedy"),
    ("chosen", "CAD, α = 1"),
)


# Stored runs


@cache
def runs_of(path):
    """{(kind, setup): runs} of a packed file: one, or draws of random heads. kind: such as FALSE,
    CLOSED, memotrap."""
    runs = defaultdict(list)
    for place in stored.run_files(ROOT / "results" / f"{path}.jsonl.xz"):
        run = stored.read(place, texts="transfer" in path)  # XSum's `ended`
        header = run.header
        kind = header["task"]
        if kind == "qa":
            data = Path(header["data"][0]["file"]).stem
            rows = (header["known"] or {}).get("rows", "")
            kind = f"{'closed.' * bool(header['closed_book'])}{data.split('.', 1)[-1]}.{rows}"
            kind = "turn." * ("I have read it." in header["template"]) + kind
        runs[kind, run.setup.file_name].append(run)
    return runs


def run_of(model, role, kind, folder="memory/test"):
    """The run of a setup, or of what plays a role; None if there is none."""
    return runs_of(f"{folder}/{model}").get((kind, SETUPS[model].get(role, role)), [None])[0]


def first_settings(model):
    """A model as it was tested on other tasks and on lists: Qwen 0.5B had its first settings."""
    return f"first/{model}" if "0.5B" in model else model


def fresh_runs(model, condition):
    """{method of COMPARED: run}. CAD needs a passage."""
    packed = runs_of("which/turn" if condition == "an earlier turn" else f"which/{model}")
    methods = COMPARED | {role: re.escape(setup) for role, setup in SETUPS[model].items()}
    return {
        method: run
        for method in COMPARED
        for (kind, setup), runs in packed.items()
        if kind == CONDITIONS[condition] and re.fullmatch(methods[method], setup)
        for run in runs
        if run.header["model"] == model
    }


def sources(run):
    """What each answer gives: passage, memory, neither or blank."""
    return np.array([max(answers.SOURCES, key=values.get) for values in run.values])


def right(runs, metric="passage"):
    """The share of right answers in all answers of runs, in per cent."""
    return 100 * np.mean([values[metric] for run in runs for values in run.values])


def on_common_items(runs):
    """1 where an answer is the passage's, else 0: [runs, items that all have]."""
    keys = [key for key in runs[0].items if all(key in run.items for run in runs)]
    return np.array([[run.items[key][1]["passage"] for key in keys] for run in runs])


@cache
def seen():
    """The questions of NQ-Swap that were decoded and published before the plan."""
    paths = stored.run_files(ROOT / "results" / "seen")
    paths = [path for path in paths if path.name.startswith("nq-swap") and ".greedy." in path.name]
    return {line["question"] for path in paths for line in read_run(path)[1]}


def compare(pairs, metric="passage"):
    """(text, p, n) of the runs of [(run, other)] against the others, over all of their items:
    "+5.7 (+2.3 to +9.0), 21 : 4", in points, with a paired 95 % interval, items won and lost.
    NQ-Swap is without the questions that were published before."""
    ours, theirs, questions = [], [], []
    for run, other in pairs:
        left_out = seen() if run.task == "nq-swap" else ()
        for key in (key for key in run.items if key in other.items):
            if run.items[key][0] in left_out:
                continue
            questions.append(run.items[key][0])
            ours.append(run.items[key][1][metric])
            theirs.append(other.items[key][1][metric])
    mean, ends, p = statistics.paired(ours, theirs, questions)
    signs = np.sign(np.subtract(ours, theirs))
    scale = results.scale_of(metric)
    text = signed(scale * mean) + (f" ({span([scale * x for x in ends])})" if ends else "")
    return f"{text}, {(signs > 0).sum()} : {(signs < 0).sum()}", p, len(ours)


def compare_roles(models, one, two, kind=FALSE):
    return compare([[run_of(model, role, kind) for role in (one, two)] for model in models])


# Tables: rows of cells, of which the first has the headings

RIGHT = "right answers, %"
POINTS = "points, against greedy decoding"


def short(model):
    words = {"2.5-Coder": "", "-Instruct": "", "-135M": "", "gemma-3-270m": "Gemma"}
    first, _, model = model.rpartition("/")
    for old, new in words.items():
        model = model.replace(old, new)
    return model.replace("-", " ") + ", first" * bool(first)


def heading(model, n):
    return f"{short(model)} (n = {n})"


def by_model(labels, column, models=MODELS):
    """A table with a column for each model. column(model): its heading, a cell for each label."""
    return [list(row) for row in zip(["", *labels], *map(column, models), strict=True)]


def family(models, pairs, test, others=()):
    """Rows of tests, one for each pair of roles, with a cell for each model. Bold: p is below 0.05
    after Holm's correction over all of them and `others`. test(model, *pair): as of `compare`."""
    tests = [test(model, *pair) for pair in pairs for model in models]
    texts = []
    for (text, p, _), adjusted in zip(tests, statistics.holm([p for _, p, _ in tests] + [*others])):
        value, _, rest = text.partition(" ")
        texts.append(f"{f'**{value}**' if adjusted < 0.05 else value} {rest}, p {p_text(p)}")
    n = len(models)
    return [[" − ".join(pair), *texts[i * n : (i + 1) * n]] for i, pair in enumerate(pairs)]


def settings():
    """The setup that played each role, as reports name it."""

    def column(model):
        return [short(model), *(run_of(model, role, FALSE).label for role in SHOWN)]

    return by_model(SHOWN, column)


def moved():
    """Answers from memory that move, and what is lost where the passage is right."""

    def column(model):
        from_memory = sources(run_of(model, "greedy", FALSE)) == "memory"
        n = int(from_memory.sum())
        cells = [heading(model, n)]
        for role in SHOWN:
            now = sources(run_of(model, role, FALSE))[from_memory]
            share, neither = (now == "passage").mean(), np.isin(now, ("neither", "blank")).mean()
            shares = [100 * x for x in (share, *statistics.wilson(share, n), neither)]
            cells.append("{:.0f} ({:.0f} to {:.0f}) / {:.0f}".format(*shares))
        return cells + [compare_roles([model], role, "greedy", TRUE)[0] for role in SHOWN]

    moves = [f"to the passage / to neither: {role}" for role in SHOWN]
    return by_model([*moves, *(f"right passages: {role}" for role in SHOWN)], column)


def costs():
    """Differences to greedy decoding where no passage is needed, and on other tasks."""
    rows = [[POINTS, *map(short, MODELS), "together"]]
    for kind, (title, metric) in COSTS.items():
        for role in SHOWN:
            groups = []
            for model in MODELS:
                where = [kind] if kind == CLOSED else [kind, "transfer"]
                model = model if kind == CLOSED else first_settings(model)
                pair = [run_of(model, name, *where) for name in (role, "greedy")]
                groups.append([pair] * all(pair))
            groups.append(sum(groups, []))
            cells = [compare(group, metric) if group else ("", None, "") for group in groups]
            if role == "default":
                rows.append([f"**{title}**, n", *(str(n) for _, _, n in cells)])
            rows += [[role, *(text for text, _, _ in cells)]] * bool(groups[-1])
    return rows


def where():
    """Items that the chosen setting wins and loses, by wording, kind and certainty."""
    wordings = {name(fact): int(order(f"implied {name(fact)}"), 16) % 3 for fact in load("confirm")}
    labels = [*(f"cities, wording {i}" for i in (1, 2, 3)), "US cities", "other kinds"]
    quarters = [f"{q} quarter of certainty" for q in ("least", "second", "third", "most")]

    def column(model):
        run, greedy = (run_of(model, role, FALSE) for role in ("chosen", "greedy"))
        signs = np.array([a["passage"] - b["passage"] for a, b in zip(run.values, greedy.values)])
        groups = defaultdict(list)
        for i, line in enumerate(run.lines):
            kind = line["id"].split(":")[0]
            label = {"US city": "US cities", "city": f"cities, wording {wordings[line['id']] + 1}"}
            groups[label.get(kind, "other kinds")].append(i)
        certainties = [line["memory_log_p"] for line in run_of(model, "greedy", CLOSED).lines]
        groups |= zip(quarters, np.array_split(np.argsort(certainties, kind="stable"), 4))
        cells = [short(model)]
        for label in (*labels, *quarters):
            of = signs[groups[label]]
            cells.append(f"{(of > 0).sum()} : {(of < 0).sum()} of {len(of)}")
        return cells

    return by_model([*labels, *quarters], column)


def draws_of(model, sampler, change):
    """Whether an answer is the passage's: of the chosen heads [items], of as many random ones
    [draws, items]."""
    setup = run_of(model, "chosen", FALSE).with_settings(**change).setup
    drawn = stored.replace(setup, random_heads=sampler, measure=None)
    runs = runs_of(f"memory/test/{model}")
    ranked, *draws = on_common_items([*runs[FALSE, setup.file_name], *runs[FALSE, drawn.file_name]])
    return ranked, np.array(draws)


def random():
    """Ranked heads against draws of random ones. The interval is Student's, over both the draws
    and the items."""

    def column(model):
        cells = [short(model)]
        for sampler, change in DRAWS.values():
            ranked, draws = draws_of(model, sampler, change)
            gains = ranked - draws
            K, n = gains.shape
            spread = gains.mean(1).var(ddof=1) / K + gains.mean(0).var(ddof=1) / n
            shares = np.quantile(100 * draws.mean(1), [0, 0.5, 1])
            cells += [str(n), unsigned(100 * ranked.mean()), " / ".join(map(unsigned, shares))]
            half = unsigned(100 * STUDENT[K] * spread**0.5)
            cells.append(f"{signed(100 * gains.mean())} ± {half}")
        return cells

    labels = "chosen heads", "draws: least / median / largest", "difference"
    return by_model([x for title in DRAWS for x in (f"**{title}**, n", *labels)], column)


def cad():
    """The settings that the plan's rule chooses on explore: the passage's answers in conflict /
    right ones in agreement."""

    def column(model):
        runs = runs_of(f"memory/choose/{model}")
        grid = [x for kind, x in runs if kind == FALSE and x.startswith("cad.")]
        grid.sort(key=lambda x: runs[FALSE, x][0].setup.alpha)  # if two are best, the smaller α
        chosen, of_two = SETUPS[model]["chosen"], SETUPS[model]["CAD"]
        setups = "greedy", chosen, *grid
        values = [on_common_items([runs[kind, x][0] for x in setups]) for kind in (FALSE, TRUE)]
        shares = dict(zip(setups, zip(*(100 * of.mean(1) for of in values))))
        allowed = [x for x in grid if shares[x][1] >= shares["greedy"][1] - 2]
        best = max(allowed, key=lambda x: shares[x][0])
        cells = [heading(model, values[0].shape[1])]
        for setup in ("greedy", chosen, of_two, best):
            text = " / ".join(map(unsigned, shares[setup]))
            cells.append(text + f" ({setup.removeprefix('cad.')})" * (setup in grid))
        return [*cells, str(len(grid))]

    labels = "greedy", "chosen", "CAD, the better of two", "CAD, the best of all", "of how many"
    return by_model(labels, column)


def listed():
    """Answers where seven sentences of one form give values of seven subjects."""
    forms = {kind: of["listed"] for kind, of in WORDINGS.items()}
    others = others_in(questions("confirm", "listed", "false"), load("confirm"), forms, name)
    roles = "greedy", *SHOWN
    models = [first_settings(model) for model in MODELS]
    runs = {model: {role: run_of(model, role, LISTED) for role in roles} for model in models}
    return outcomes(runs, others)


def fresh_listed():
    """The same of fresh facts."""
    forms = {kind: [of["listed"]] for kind, of in fresh_facts.KINDS.items()}
    rows = fresh_facts.questions("listed")
    others = others_in(rows, fresh_facts.load(), forms, fresh_facts.name)
    return outcomes({model: fresh_runs(model, "listed") for model in MODELS}, others)


def others_in(rows, facts, forms, name):
    """{id of a row: spellings of what the other sentences of its passage say}. forms: of the
    sentences, by kind."""
    return {
        row["id"]: [
            text
            for fact in facts
            if fact["kind"] == row["kind"] and name(fact) != row["id"]
            for text in fact["truth"]
            if any(fill(x, fact, fact["truth"][0]) in row["context"] for x in forms[row["kind"]])
        ]
        for row in rows
    }


def outcomes(runs, others):
    """Shares of answers: right / another sentence's / memory / neither. runs: by model and
    method."""

    def cell(run):
        kinds = sources(run)
        for i in np.flatnonzero(kinds == "neither"):
            answer = answers.first_line(run.lines[i]["prediction"])
            if answers.source_of(answer, others[run.lines[i]["id"]], []) == "passage":
                kinds[i] = "another"
        shares = [(kinds == kind).mean() for kind in ("passage", "another", "memory")]
        return " / ".join(unsigned(100 * x) for x in (*shares, 1 - sum(shares)))

    def column(model):
        of = runs[model]
        return [heading(model, len(of["greedy"].lines)), *map(cell, of.values())]

    return by_model(runs[MODELS[0]], column, [*runs])


def planned():
    """The tests of plan.md in conflict, in one family with those of random heads and of other
    tasks."""
    others = []
    for model in SETUPS:
        for sampler, change in [*DRAWS.values()][:2]:
            others.append(statistics.paired(*draws_of(model, sampler, change))[2])
        for kind, metrics in TRANSFERRED.items():
            for one, two in (*((x, "greedy") for x in ROLES[1:3]), ("by effect", "default")):
                pair = [run_of(model, role, kind, "transfer") for role in (one, two)]
                others += [compare([pair], metric)[1] for metric in metrics if all(pair)]
    headings = [heading(m, len(run_of(m, "greedy", FALSE).lines)) for m in SETUPS]
    rows = family(SETUPS, TESTS, lambda model, *pair: compare_roles([model], *pair), others)
    for row, pair in zip(rows, TESTS):
        row.append(compare_roles(MODELS[1:], *pair)[0])
    return [["", *headings, "the Qwen models and Gemma together"], *rows]


def fresh_tests():
    """The tests of which/plan.md."""
    runs = {model: fresh_runs(model, "conflict") for model in MODELS}

    def test(model, *pair):
        return compare([[runs[model][method] for method in pair]])

    return [["", *map(short, MODELS)], *family(MODELS, FRESH_TESTS, test)]


def by_condition(title, cell, groups, methods=tuple(COMPARED)):
    """A row for each condition and group of models. cell(pairs, metric): of a method's runs, each
    with that of greedy decoding."""
    rows = [[title, *methods]]
    for condition in CONDITIONS:
        metric = "memory" if condition == "no passage" else "passage"
        for models in groups:
            runs = [fresh_runs(model, condition) for model in models]
            n = sum(len(of["greedy"].lines) for of in runs)
            names = [short(model) for model in models if len(models) == 1]
            row = [", ".join([condition, *names]) + f" (n = {n})"]
            for method in methods:
                pairs = [(of[method], of["greedy"]) for of in runs if method in of]
                row.append(cell(pairs, metric) if pairs else "")
            rows.append(row)
    return rows


def share(pairs, metric):
    return unsigned(right([run for run, _ in pairs], metric))


def difference(pairs, metric):
    return compare(pairs, metric)[0]


# Pages and figure


ONE_BY_ONE = [[model] for model in MODELS]
TABLES = {
    **{table.__name__: table for table in (settings, moved, costs, where)},
    **{table.__name__: table for table in (random, cad, listed, fresh_listed)},
    **{table.__name__: table for table in (planned, fresh_tests)},
    "which": partial(by_condition, RIGHT, share, [MODELS]),
    "fresh": partial(by_condition, RIGHT, share, ONE_BY_ONE),
    "fresh_differences": partial(by_condition, POINTS, difference, [MODELS], [*COMPARED][1:6]),
}


def filled(page):
    """A page with the tables below their markers."""
    parts = re.split(r"(<!-- \w+ -->\n)(?:\|.*\n)*", page)
    for i in range(1, len(parts), 2):
        head, *rows = TABLES[parts[i].split()[1]]()
        for row in [head, ["---"] * len(head), *rows]:
            parts[i] += f"| {' | '.join(row)} |\n"
    return "".join(parts)


LABELS = ["copy", "effect", "random heads", "CAD"]  # in the order of figures.COLOURS
MARKERS = {None: "o", 0.5: "^", 1.0: "s", 2.0: "D"}  # by α; None: the entropy


def look_of(setup):
    """How a run of explore is drawn: arguments of `scatter`."""
    if setup.method == "greedy":
        return dict(c="#000000", marker="*", s=60, label="greedy")
    label = "random heads" if setup.random_heads else setup.measure or "copy"
    if setup.method == "cad":
        label = "CAD"
    look = dict(c=figures.COLOURS[LABELS.index(label)], s=8 + 2 * (setup.num_heads or 10))
    if setup.method == "masked":
        return look | dict(marker="x")
    return look | dict(marker=MARKERS.get(setup.alpha, "P"), label=label)


def explored():
    """The runs of explore: a panel for each model."""
    panels = [(short(model), model, runs_of(f"memory/choose/{model}")) for model in MODELS]

    def draw(ax, model, runs):
        for kind, setup in runs:
            if kind != FALSE:
                continue
            x, y = right(runs[TRUE, setup]), right(runs[FALSE, setup])
            look = look_of(runs[FALSE, setup][0].setup)
            ax.scatter(x, y, alpha=0.7, linewidths=0.7, **look)
            if setup in [SETUPS[model]["chosen"], SETUPS[model]["CAD"]]:
                ax.scatter(x, y, s=160, c="none", edgecolors="#000000", linewidths=0.7)
        labels = "right answers where the passage is right, %", "the passage's, in conflict, %"
        ax.set(xlabel=labels[0], ylabel=labels[1])

    runs = [run for *_, of in panels for draws in of.values() for run in draws]
    note = (
        f"{len(runs)} runs; area: N; circle: α is the entropy, also capped or by gain; "
        "triangle, square, diamond: α = 0.5, 1, 2; plus: CAD's other α; cross: masked alone; "
        "in a ring: the chosen and CAD's"
    )
    size = dict(width=figures.WIDTH, heights=[2.4, 2.4], columns=2)
    return figures.figure_of(panels, draw, runs, note, **size)


def main():
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    if sys.argv[1:] == ["figure"]:
        explored().savefig(ROOT / "docs" / "explore.png")


if __name__ == "__main__":
    main()
