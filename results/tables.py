"""Writes the tables of docs/results.md and README.md from the stored runs, below their markers.

python -m results.tables
python -m results.tables figure    # docs/explore.png as well"""

import re
import sys
from collections import defaultdict
from functools import cache
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
PAGES = ROOT / "README.md", ROOT / "docs" / "results.md"
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


# Stored runs


@cache
def runs_of(path):
    """{(kind, setup): runs} of a packed file: one, or draws of random heads. kind: such as FALSE,
    closed.implied.false.known, memotrap."""
    found = defaultdict(list)
    for place in stored.run_files(ROOT / "results" / f"{path}.jsonl.xz"):
        run = stored.read(place, texts="transfer" in path)  # XSum's `ended`
        header = run.header
        data = Path(header["data"][0]["file"]).stem
        kind = header["task"]
        if kind == "qa":
            rows = (header["known"] or {}).get("rows", "")
            kind = f"{'closed.' * bool(header['closed_book'])}{data.split('.', 1)[-1]}.{rows}"
            kind = "turn." * ("I have read it." in header["template"]) + kind
        found[kind, run.setup.file_name].append(run)
    return found


def run_of(model, role, kind, folder="memory/test"):
    """The run of a setup, or of what plays a role; None if there is none."""
    return runs_of(f"{folder}/{model}").get((kind, SETUPS[model].get(role, role)), [None])[0]


def sources(run):
    """What each answer gives: passage, memory, neither or blank."""
    return np.array([max(answers.SOURCES, key=values.get) for values in run.values])


def short(model):
    words = {"2.5-Coder": "", "-Instruct": "", "-135M": "", "gemma-3-270m": "Gemma"}
    first, _, model = model.rpartition("/")
    for old, new in words.items():
        model = model.replace(old, new)
    return model.replace("-", " ") + ", first" * bool(first)


def heading(model, n):
    return f"{short(model)} (n = {n})"


@cache
def seen():
    """The questions of NQ-Swap that were decoded and published before the plan."""
    paths = stored.run_files(ROOT / "results" / "seen")
    paths = [path for path in paths if path.name.startswith("nq-swap") and ".greedy." in path.name]
    return {line["question"] for path in paths for line in read_run(path)[1]}


def compare(pairs, metric="passage"):
    """(text, p) of the runs of [(run, other)] against the others, over all of their items:
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


def by_model(labels, column, models=MODELS):
    """A table with a column for each model. column(model): its heading, and a cell for each label;
    None leaves the model out."""
    columns = filter(None, map(column, models))
    return [list(row) for row in zip(["", *labels], *columns, strict=True)]


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


COSTS = {  # kind → name, metric
    TRUE: ("right passage", "passage"),
    "closed.implied.false.known": ("no passage", "memory"),
    "nq-open": ("NQ-Open", "answer_contained"),
    "memotrap": ("MemoTrap", "micro"),
    "nq-swap": ("NQ-Swap", "answer_contained"),
}
TRANSFER = [f"{'first/' * ('0.5B' in model)}{model}" for model in MODELS]


def costs():
    """Differences to greedy decoding where a passage is right, missing, or of another task."""
    rows = [["", *map(short, MODELS), "together"]]
    for kind, (title, metric) in COSTS.items():
        for role in SHOWN:
            groups = []
            for model, other in zip(MODELS, TRANSFER):
                where = (model, kind) if "known" in kind else (other, kind, "transfer")
                pair = [run_of(where[0], name, *where[1:]) for name in (role, "greedy")]
                groups.append([pair] * all(pair))
            groups.append(sum(groups, []))
            cells = [compare(group, metric) if group else ("", None, "") for group in groups]
            if role == "default":
                rows.append([f"**{title}**, n", *(str(n) for _, _, n in cells)])
            rows += [[role, *(text for text, _, _ in cells)]] * bool(groups[-1])
    return rows


def listed():
    """Answers where seven sentences of one form give values of seven subjects."""
    forms = {kind: of["listed"] for kind, of in WORDINGS.items()}
    others = others_in(questions("confirm", "listed", "false"), load("confirm"), forms, name)
    roles = "greedy", *SHOWN

    def column(model):
        runs = [run_of(model, role, LISTED) for role in roles]
        return [heading(model, len(runs[0].lines)), *(outcomes(run, others) for run in runs)]

    return by_model(roles, column, TRANSFER)


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


def outcomes(run, others):
    """Shares of answers: right / another sentence's / memory / neither."""
    given = sources(run)
    for i in np.flatnonzero(given == "neither"):
        answer = answers.first_line(run.lines[i]["prediction"])
        if answers.source_of(answer, others[run.lines[i]["id"]], []) == "passage":
            given[i] = "another"
    shares = [(given == kind).mean() for kind in ("passage", "another", "memory")]
    return " / ".join(unsigned(100 * x) for x in (*shares, 1 - sum(shares)))


def where():
    """Items that the chosen setting wins and loses, by wording, kind and certainty."""
    wordings = {name(fact): int(order(f"implied {name(fact)}"), 16) % 3 for fact in load("confirm")}
    labels = [*(f"cities, wording {i}" for i in (1, 2, 3)), "US cities", "other kinds"]
    quarters = [f"{q} quarter of certainty" for q in ("least", "second", "third", "most")]

    def column(model):
        run, greedy = (run_of(model, role, FALSE) for role in ("chosen", "greedy"))
        closed = run_of(model, "greedy", f"closed.{FALSE}")
        signs = np.array([a["passage"] - b["passage"] for a, b in zip(run.values, greedy.values)])
        groups = defaultdict(list)
        for i, line in enumerate(run.lines):
            kind = line["id"].split(":")[0]
            label = {"US city": "US cities", "city": f"cities, wording {wordings[line['id']] + 1}"}
            groups[label.get(kind, "other kinds")].append(i)
        certainty = np.argsort([line["memory_log_p"] for line in closed.lines], kind="stable")
        groups |= zip(quarters, np.array_split(certainty, 4))
        cells = [short(model)]
        for label in (*labels, *quarters):
            of = signs[groups[label]]
            cells.append(f"{(of > 0).sum()} : {(of < 0).sum()} of {len(of)}")
        return cells

    return by_model([*labels, *quarters], column)


def against_random(model, **change):
    """(values of the chosen heads [n], of five draws of as many random ones [5, n])."""
    setup = run_of(model, "chosen", FALSE).with_settings(**change).setup
    drawn = stored.replace(setup, random_heads="uniform", measure=None)
    runs = runs_of(f"memory/test/{model}")
    values = [[of["passage"] for of in run.values] for run in runs[FALSE, drawn.file_name]]
    [ranked] = runs[FALSE, setup.file_name]
    return np.array([of["passage"] for of in ranked.values]), np.array(values)


MASKED = dict(method="masked") | dict.fromkeys(STATIC)
T4 = 2.776445  # Student's t of 95 %, two-sided, for five draws


def random():
    """Ranked heads against draws of random ones. The interval is Student's, over both the draws
    and the items."""

    def column(model):
        cells = [heading(model, len(run_of(model, "chosen", FALSE).lines))]
        for change in ({}, MASKED):
            ranked, draws = against_random(model, **change)
            gains = ranked - draws
            K, n = gains.shape
            spread = gains.mean(1).var(ddof=1) / K + gains.mean(0).var(ddof=1) / n
            shares = ", ".join(unsigned(100 * share) for share in draws.mean(1))
            cells += [unsigned(100 * ranked.mean()), shares]
            cells.append(f"{signed(100 * gains.mean())} ± {unsigned(100 * T4 * spread**0.5)}")
        return cells

    labels = "chosen heads", "random heads, five draws", "difference"
    return by_model([*labels, *(f"masked: {label}" for label in labels)], column)


def drawn():
    """The chosen heads, masked, and their rank among twenty draws from all heads but them."""

    def column(model):
        setup = run_of(model, "chosen", FALSE).with_settings(**MASKED).setup
        runs = runs_of(f"memory/test/{model}")
        others = stored.replace(setup, random_heads="others", measure=None)
        draws = runs.get((FALSE, others.file_name))
        if not draws:
            return []
        n, (ours, *theirs) = on_common_items([*runs[FALSE, setup.file_name], *draws])
        ends = " / ".join(map(unsigned, np.quantile(theirs, [0, 0.5, 1])))
        lower = f"{sum(x < ours for x in theirs)} of {len(theirs)}"
        return [heading(model, n), unsigned(ours), ends, lower]

    labels = "chosen heads", "draws: least / median / largest", "draws that leave less"
    return by_model(labels, column)


def on_common_items(runs):
    """(their number, the share of the passage's answers of each run, in per cent)."""
    common = set.intersection(*(set(run.items) for run in runs))
    values = [[run.items[key][1]["passage"] for key in common] for run in runs]
    return len(common), 100 * np.mean(values, 1)


TESTS = (  # of the plan
    ("chosen", "greedy"),
    ("default", "greedy"),
    ("chosen", "CAD"),
    ("by effect", "by copy"),
)
TRANSFERRED = {  # of the transfer
    **{kind: [COSTS[kind][1]] for kind in ("nq-swap", "nq-open", "memotrap")},
    **{"truthfulqa-mc": ["mc2"], "xsum": ["rougeL", "ended"]},
}


def planned():
    """The plan's tests of conflict. Bold: shown over all p of the plan, those of random heads and
    of other tasks among them."""
    others = []
    for model in SETUPS:
        for change in ({}, MASKED):
            others.append(statistics.paired(*against_random(model, **change))[2])
        for kind, metrics in TRANSFERRED.items():
            for one, two in (*((x, "greedy") for x in ROLES[1:3]), ("by effect", "default")):
                pair = [run_of(model, role, kind, "transfer") for role in (one, two)]
                others += [compare([pair], metric)[1] for metric in metrics if all(pair)]
    headings = [heading(m, len(run_of(m, "greedy", FALSE).lines)) for m in SETUPS]
    rows = family(SETUPS, TESTS, lambda model, *pair: compare_roles([model], *pair), others)
    together = [compare_roles(MODELS[1:], *pair)[0] for pair in TESTS]
    return [
        ["", *headings, "the Qwen models and Gemma together"],
        *([*row, text] for row, text in zip(rows, together)),
    ]


# Fresh kinds of facts


COMPARED = {  # of results/which/plan.md → the setup's name
    **{name: name for name in ("greedy", "default", "chosen")},
    "rule": r"decore-static\.n\d+\.a2",
    **{f"CAD, α = {alpha}": rf"cad\.a{alpha}" for alpha in (0.5, 1)},
    **{f"CAD, α = {alpha}, plausible": rf"cad\.a{alpha}\.top0\.1" for alpha in (0.5, 1)},
}
CONDITIONS = {  # → kind
    **{
        name: f"{name}.known"
        for name in ("conflict", "agreement", "irrelevant", "listed", "documents")
    },
    "no passage": "closed.conflict.known",
    "an earlier turn": "turn.conflict.known",
}
PLANNED = (
    ("rule", "default"),
    ("chosen", "greedy"),
    ("rule", "greedy"),
    ("CAD, α = 1", "greedy"),
    ("chosen", "CAD, α = 1"),
)


def fresh_runs(model, condition):
    """{method: run} of a condition; {} unless all of its methods have run."""
    runs = runs_of("which/turn" if condition == "an earlier turn" else f"which/{model}")
    methods = COMPARED | {role: re.escape(setup) for role, setup in SETUPS[model].items()}
    found = {
        method: run
        for method in COMPARED
        for (kind, setup), of in runs.items()
        if kind == CONDITIONS[condition] and re.fullmatch(methods[method], setup)
        for run in of
        if run.header["model"] == model and len(run.lines) == run.header["n"]
    }
    n = 4 if condition == "no passage" else len(COMPARED)
    return found if len(found) == n else {}


def cad():
    """The settings that the rule of the plan chooses on explore: the passage's answers in conflict
    / right ones in agreement."""

    def column(model):
        runs = runs_of(f"memory/choose/{model}")
        grid = [setup for kind, setup in runs if kind == FALSE and setup.startswith("cad.")]
        if len(grid) < 12:
            return None
        chosen, of_two = SETUPS[model]["chosen"], SETUPS[model]["CAD"]
        setups = "greedy", chosen, *grid
        found = [on_common_items([runs[kind, x][0] for x in setups]) for kind in (FALSE, TRUE)]
        shares = dict(zip(setups, zip(*(of for _, of in found))))
        allowed = [x for x in grid if shares[x][1] >= shares["greedy"][1] - 2]
        best = max(allowed, key=lambda x: shares[x][0])
        cells = [heading(model, found[0][0])]
        for setup in ("greedy", chosen, of_two, best):
            text = " / ".join(map(unsigned, shares[setup]))
            cells.append(text + f" ({setup.removeprefix('cad.')})" * (setup in grid))
        return cells

    return by_model(["greedy", "chosen", "CAD, of two", "CAD, of twelve"], column)


def metric_of(condition):
    return "memory" if condition == "no passage" else "passage"


def right(runs, condition):
    """The share of right answers in all answers of runs, in per cent."""
    metric = metric_of(condition)
    return 100 * np.mean([values[metric] for run in runs for values in run.values])


def fresh():
    """Conflict, agreement, irrelevant: the shares of right answers by method and model."""
    return fresh_shares([*CONDITIONS][:3])


def fresh_more():
    """The same of documents, no passage, an earlier turn."""
    return fresh_shares([*CONDITIONS][4:])


def fresh_shares(conditions):
    def column(model):
        of = {x: runs for x in conditions if (runs := fresh_runs(model, x))}
        if not of:
            return []
        cells = [heading(model, len([*of.values()][0]["greedy"].lines))]
        for method in COMPARED:
            found = ((runs.get(method), x) for x, runs in of.items())
            shares = (unsigned(right([run], x)) if run else "–" for run, x in found)
            cells.append(" / ".join(shares))
        return cells

    return by_model(COMPARED, column)


def fresh_differences():
    """Each method against greedy decoding, over the models of `which`."""
    rows = [["", *[*COMPARED][1:6]]]
    for condition in CONDITIONS:
        of = [runs for model in MODELS if (runs := fresh_runs(model, condition))]
        metric = metric_of(condition)
        row = [condition]
        for method in rows[0][1:]:
            pairs = [(runs[method], runs["greedy"]) for runs in of if method in runs]
            row.append(compare(pairs, metric)[0] if pairs else "")
        rows.append(row)
    return rows


def fresh_listed():
    """The outcomes of fresh facts, listed."""
    forms = {kind: [of["listed"]] for kind, of in fresh_facts.KINDS.items()}
    rows = fresh_facts.questions("listed")
    others = others_in(rows, fresh_facts.load(), forms, fresh_facts.name)

    def column(model):
        runs = fresh_runs(model, "listed")
        cells = [heading(model, len(runs["greedy"].lines))] if runs else []
        return cells + [outcomes(runs[method], others) for method in COMPARED if runs]

    return by_model(COMPARED, column)


def fresh_tests():
    runs = {model: found for model in MODELS if (found := fresh_runs(model, "conflict"))}
    rows = family([*runs], PLANNED, lambda model, *pair: compare([[runs[model][x] for x in pair]]))
    return [["", *map(short, runs)], *rows]


def which():
    """Right answers by condition and method, over the models of which all methods have run."""
    rows = [["right answers, %", *COMPARED]]
    for condition in CONDITIONS:
        of = {model: runs for model in MODELS if (runs := fresh_runs(model, condition))}
        if of:
            n = sum(len(runs["greedy"].lines) for runs in of.values())
            row = [f"{condition} (n = {n}: {', '.join(map(short, of))})"]
            for method in COMPARED:
                runs = [found[method] for found in of.values() if method in found]
                row.append(unsigned(right(runs, condition)) if runs else "")
            rows.append(row)
    return rows


# Pages and figure


TABLES = {
    table.__name__: table
    for table in (moved, costs, listed, where, random, drawn, planned, cad, fresh, fresh_more)
    + (fresh_listed, fresh_differences, fresh_tests, which)
}


def filled(page):
    """A page with the tables below their markers."""
    parts = re.split(r"(<!-- \w+ -->\n)(?:\|.*\n)*", page)
    for i in range(1, len(parts), 2):
        head, *rows = TABLES[parts[i].split()[1]]()
        lines = [head, ["---"] * len(head), *rows] if head[1:] and rows else []
        parts[i] += "".join(f"| {' | '.join(row)} |\n" for row in lines)
    return "".join(parts)


COLOURS = {"copy": 0, "effect": 1, "random heads": 2, "CAD": 3}
MARKERS = {None: "o", 0.5: "^", 1.0: "s", 2.0: "D"}  # by α; None: the entropy


def explored():
    """The runs of explore: a panel for each model."""
    panels = [(short(model), model, runs_of(f"memory/choose/{model}")) for model in MODELS]

    def draw(ax, model, runs):
        for kind, found in runs:
            if kind != FALSE:
                continue
            setup = runs[FALSE, found][0].setup
            x, y = (right(runs[kind, found], "") for kind in (TRUE, FALSE))
            ranking = "random heads" if setup.random_heads else setup.measure or "copy"
            label = "CAD" if setup.method == "cad" else ranking
            look = {"c": figures.COLOURS[COLOURS[label]], "label": label}
            look |= {"marker": MARKERS.get(setup.alpha, "P"), "s": 8 + 2 * (setup.num_heads or 10)}
            if setup.method == "masked":
                look |= {"marker": "x", "label": None}
            elif setup.method == "greedy":
                look = {"c": "#000000", "marker": "*", "s": 60, "label": "greedy"}
            ax.scatter(x, y, alpha=0.7, linewidths=0.7, **look)
            if found in [*SETUPS[model].values()][3:]:
                ax.scatter(x, y, s=160, c="none", edgecolors="#000000", linewidths=0.7)
        labels = "right answers where the passage is right, %", "the passage's, in conflict, %"
        ax.set(xlabel=labels[0], ylabel=labels[1])

    runs = [run for *_, of in panels for draws in of.values() for run in draws]
    note = (
        f"{len(runs)} runs; area: N; circle: α is the entropy, also capped or by gain; triangle, "
    )
    note += "square, diamond: α = 0.5, 1, 2; plus: CAD's other α; cross: masked alone; "
    note += "in a ring: the chosen and CAD's"
    size = dict(width=figures.WIDTH, heights=[2.4, 2.4], columns=2)
    return figures.figure_of(panels, draw, runs, note, **size)


def main():
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    if sys.argv[1:] == ["figure"]:
        explored().savefig(ROOT / "docs" / "explore.png")


if __name__ == "__main__":
    main()
