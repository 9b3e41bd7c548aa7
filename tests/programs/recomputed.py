"""The tables of results on a page, computed again from the stored lines by numpy alone.

A table is checked if its columns say "(n = …)". Facts of a column stand in its heading, or in the
heading of the first column, separated by commas:

    NQ-Swap, SmolLM2 (n = 400)      task, model; the task's main metric
    NQ-Open, exact match, …         another of METRICS, or several, "passage / memory / neither"
    conflict, stated, …             of task qa: a condition, a kind of passage (default: implied),
                                    a half of the facts (default: confirm)
    XSum, after 500, …              a run with --skip 500
    conflict, first round, …        a run in a folder `first`, with the choices of that round

The first cell of a row is a setup ("decore-entropy, N = 10, effect heads"), the comparison with its
random heads ("SETUP: retrieval − random heads"), or of two setups ("SETUP − SETUP"). "SETUP" may be
a name that a table of choices, which begins with "| choice |", gives to a setup of each model.
"masked SETUP" masks its heads.

Cells: 23.5 (the value), 3.1 / 21.9 (of several metrics), 12 of 400 (items),
+5.0 (+1.2 to +8.9), p 0.013 (the difference, its interval and p; these two may be missing), and at
the end of any of them: ", 40 : 20" (items won and lost). Bold differences are below 0.05 after
Holm's correction. Its family are all p of the column, or of the table if the paragraph above it
says "all p of this table"."""

import json
import lzma
import math
import re
import string
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from paper.tasks import answers

RESULTS = Path(__file__).parents[2] / "results"
TASKS = {  # name → task, main metric
    "NQ-Swap": ("nq-swap", "answer contained"),
    "NQ-Open": ("nq-open", "answer contained"),
    "MemoTrap": ("memotrap", "micro"),
    "TruthfulQA": ("truthfulqa-mc", "MC2"),
    "XSum": ("xsum", "ROUGE-L"),
    "IFEval": ("ifeval", "prompts"),
}
CONDITIONS = {  # of task qa → whether the passage is false, there, and the fact known
    "conflict": (True, True, True),
    "agreement": (False, True, True),
    "closed book": (True, False, True),
    "unknown": (True, True, False),
}
KINDS = ("implied", "stated", "listed")  # of passages
HALVES = ("explore", "confirm")
FIRST = ", first round"
ALSO = {  # other names of metrics
    "passage's answer": "passage",
    "memorised answer": "memory",
    "empty": "blank",
}
PARTS = {  # of a setup's name → fields of the header
    "greedy": {"method": "greedy"},
    "greedy decoding": {"method": "greedy"},
    "masked": {"method": "masked"},
    "decore-static": {"method": "decore-static", "alpha": 0.5},
    "decore-entropy": {"method": "decore-entropy"},
    "cad": {"method": "cad", "alpha": 0.5},
    "context-aware decoding": {"method": "cad", "alpha": 0.5},
    "random heads": {"random_heads": "uniform", "measure": None},
    "gain rule": {"alpha_rule": "gain"},
}
DEFAULTS = {"mask": "output", "mask_prompt": False, "alpha_rule": "entropy", "measure": "copy"}
FIELDS = ("method", "num_heads", "alpha", "alpha_cap", "alpha_rule", "measure", "random_heads")


# Tables of a page


def tables(page):
    """[(paragraph above, rows of cells)] of a page."""
    blocks = [list(lines) for _, lines in groupby(page.splitlines(), lambda line: line[:1] == "|")]
    return [
        (" ".join(above).replace("  ", " "), [cells(line) for line in lines if line[:4] != "|---"])
        for above, lines in zip([[]] + blocks, blocks)
        if lines[0].startswith("|")
    ]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def checked(page):
    """[(paragraph above, heads, rows)] of the tables of results."""
    return [(above, heads, rows) for above, (heads, *rows) in tables(page) if "(n = " in str(heads)]


def choices(page):
    """{(name, (model, whether of the first round)): setup} of the tables of choices."""
    found = {}
    for _, (heads, *rows) in tables(page):
        if heads[0] == "choice":
            for name, *setups in rows:
                for model, setup in zip(heads[1:], setups):
                    chooser = model_of(model.removesuffix(FIRST)), model.endswith(FIRST)
                    found[bare_name(name), chooser] = setup
    return found


def column_of(corner, head):
    """The facts of a column: task, model, metrics, n, …"""
    facts = {"half": "confirm", "kind": "implied", "skip": None, "first": False}
    text, n = re.fullmatch(r"(.*?),? ?\(n = ([\d,]+)\)", head).groups()
    parts = [part for cell in (corner, text) for part in cell.split(", ")]
    for part in parts:
        if part in TASKS:
            facts["task"], metric = TASKS[part]
            facts.setdefault("metrics", [metric])
        elif part in CONDITIONS:
            facts |= {"task": "qa", "condition": part}
            facts.setdefault("metrics", ["passage"])
        elif part in KINDS:
            facts["kind"] = part
        elif part in HALVES:
            facts["half"] = part
        elif all(ALSO.get(name, name) in METRICS for name in part.split(" / ")):
            facts["metrics"] = [ALSO.get(name, name) for name in part.split(" / ")]
        elif part == FIRST[2:]:
            facts["first"] = True
        elif after := re.fullmatch(r"after (\d+)", part):
            facts["skip"] = int(after[1])
        elif model := model_of(part):
            facts["model"] = model
        else:
            assert part in ("", "setup", "test", "per cent", "%"), f"{head}: {part!r} is not known"
    return facts | {"chooser": (facts["model"], facts["first"]), "n": int(n.replace(",", ""))}


def model_of(words):
    """The stored model whose name has all words; None without one."""
    words = re.sub(r"\W*$", "", words).lower().split()
    found = [name for name in models() if all(word in name.lower() for word in words)]
    return found[0] if words and len(found) == 1 else None


def bare_name(text):
    """Without its number, backquotes and what stands in brackets."""
    return re.sub(r"^\d+\. |`| \(.*\)", "", text).strip()


def setup_of(name, chooser, chosen):
    """The fields of a setup."""
    name = bare_name(name)
    if (name, chooser) in chosen:
        return setup_of(chosen[name, chooser], chooser, chosen)
    first, *parts = name.split(", ")
    if (first, chooser) in chosen:
        setup = setup_of(first, chooser, chosen)
    elif (masked := first.removeprefix("masked ")) != first:
        setup = setup_of(masked, chooser, chosen)
        setup |= {"method": "masked", "alpha": None, "alpha_cap": None, "alpha_rule": "entropy"}
    else:
        first = first.lower().replace("decore ", "decore-")
        setup = dict.fromkeys(FIELDS) | DEFAULTS | PARTS[first]
    for part in parts:
        if number := re.fullmatch(r"(N|α|cap) =? ?([\d.]+)", part):
            field = {"N": "num_heads", "α": "alpha", "cap": "alpha_cap"}[number[1]]
            setup[field] = float(number[2])
        elif measure := re.fullmatch(r"(write|mass|effect) heads", part):
            setup["measure"] = measure[1]
        else:
            setup |= PARTS[part.removesuffix(" uniform")]
    return setup


# Stored runs


@cache
def texts():
    """{(packed file, number of the run): its lines} of the stored runs."""
    found = {}
    for path in sorted(RESULTS.rglob("*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                if line.startswith('{"header"'):
                    lines = found[path, len(found)] = []
                lines.append(line)
    return found


@cache
def headers():
    """{(packed file, number of the run): header} of the stored runs."""
    return {run: json.loads(lines[0])["header"] for run, lines in texts().items()}


@cache
def models():
    return sorted({header["model"] for header in headers().values()})


@cache
def lines_of(run):
    return {line["index"]: line for line in map(json.loads, texts()[run][1:])}


def of_column(facts):
    """The stored runs of a column."""
    return [
        (path, number)
        for (path, number), header in headers().items()
        if ("first" in path.parts) == facts["first"] and in_column(header, facts)
    ]


def in_column(header, facts):
    if (header["task"], header["model"]) != (facts["task"], facts["model"]):
        return False
    if facts["task"] != "qa":
        return header.get("skip") == facts["skip"]
    half, kind, truth = header["data"][0]["file"].split(".")[:3]
    half = half.rstrip("-0123456789")  # of some rows of a half, such as confirm440
    known = (header.get("known") or {}).get("rows")
    false, passage, is_known = CONDITIONS[facts["condition"]]
    return (half, kind, truth, not header.get("closed_book"), known) == (
        *(facts["half"], facts["kind"], "false" if false else "true"),
        *(passage, "known" if is_known else "unknown"),
    )


def runs_of(setup, facts):
    """The runs of a setup: one, or the draws of random heads."""
    found = [run for run in of_column(facts) if setup_in(headers()[run], setup)]
    assert len(found) == 1 or found and setup["random_heads"], f"{setup}: {found} of {facts}"
    return found


def setup_in(header, setup):
    has_heads = header["method"] not in ("greedy", "cad")
    for name, value in setup.items():
        stored = header.get(name)
        if stored is None or name in DEFAULTS and not has_heads:
            stored = DEFAULTS.get(name)
        if stored != (DEFAULTS.get(name) if value is None else value):
            if not (name == "measure" and setup["random_heads"]):
                return False
    return True


# Metrics: the value of a line


def plain(text):
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def contained(line):
    answer = plain(line["prediction"].split("\n")[0])
    return float(any(plain(x) in answer for x in line["references"] if plain(x)))


def exact(line):
    answer = plain(line["prediction"].split("\n")[0])
    return float(answer in [plain(x) for x in line["references"] if plain(x)])


def micro(line):
    return float(line["scores_true"][0] > line["scores_false"][0])


def mc2(line):
    true, false = (np.exp(np.array(line[f"scores_{x}"])).sum() for x in ("true", "false"))
    return true / (true + false)


def rouge(line):
    from rouge_score.rouge_scorer import RougeScorer

    texts = [x.replace(" . ", ".\n") for x in (line["references"][0], line["prediction"])]
    return RougeScorer(["rougeLsum"]).score(*texts)["rougeLsum"].fmeasure


def source(line):
    answer = answers.first_line(line["prediction"])
    return answers.source_of(answer, line["references"], line.get("memory") or [])


def letters(line):
    words = line["prediction"].split()
    return sum(map(len, words)) / len(words) / 100 if words else math.nan


METRICS = {
    "answer contained": contained,
    "exact match": exact,
    "micro": micro,
    "MC2": mc2,
    "ROUGE-L": rouge,
    "prompts": None,  # of IFEval: its checkers are a library
    "texts that end": lambda line: float(line["stop"] != "length"),
    "letters a word": letters,
} | {
    name: lambda line, name=name: float(source(line) == name)
    for name in ("passage", "memory", "neither", "blank")
}
WHOLE = [name for name in METRICS if name not in ("MC2", "ROUGE-L", "letters a word")]


@cache
def values_of(run, metric):
    """{(id, hash of the prompt): value} of a run."""
    return {key_of(line): METRICS[metric](line) for line in lines_of(run).values()}


def key_of(line):
    return line.get("id", line["index"]), line["prompt_sha256"]


def values(runs, others, metric):
    """(values of the runs, values of the others, questions) on their common items."""
    sides = [values_of(run, metric) for run in [*runs, *others]]
    common = [key for key in sides[0] if all(key in side for side in sides)]
    questions = {key_of(x): x.get("question", x["index"]) for x in lines_of(runs[0]).values()}
    array = np.array([[side[key] for key in common] for side in sides])
    return array[: len(runs)], array[len(runs) :], [questions[key] for key in common]


# Statistics


def by_question(differences, questions):
    """Sums and counts of each question."""
    _, numbers = np.unique([str(question) for question in questions], return_inverse=True)
    return np.bincount(numbers, differences), np.bincount(numbers).astype(float)


def resampled(differences, questions):
    """The means of 4,000 samples of the questions."""
    sums, counts = by_question(differences, questions)
    drawn = np.random.default_rng(1).integers(len(sums), size=(4000, len(sums)))
    return sums[drawn].sum(1) / counts[drawn].sum(1)


def p_of_signs(runs, others, questions, whole):
    """(p, its uncertainty) by flipping the signs of the questions' differences: exact if values are
    0 and 1, as the distribution of a sum of whole numbers; else of 100,000 draws."""
    differences = len(others) * runs.sum(0) - len(runs) * others.sum(0)
    sums, _ = by_question(differences, questions)
    total = abs(sums.sum())
    if whole:
        chances = np.ones(1)  # of the sums from −size to size
        for step in np.abs(sums).round().astype(int):
            moved = np.zeros(len(chances) + 2 * step)
            moved[: len(chances)] += chances / 2
            moved[2 * step :] += chances / 2
            chances = moved
        reach = np.abs(np.arange(len(chances)) - len(chances) // 2)
        return min(1, chances[reach >= round(total)].sum()), 0
    generator = np.random.default_rng(2)
    signs = generator.integers(2, size=(100_000, len(sums)), dtype=np.int8) * 2.0 - 1
    p = (1 + (np.abs(signs @ sums) > total - 1e-9).sum()) / 100_001
    return p, 6 * math.sqrt(p * (1 - p) / 100_000)  # the page's p has as many draws


def mcnemar(won, lost):
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1, 2 * tail / 2 ** (won + lost))


def holm(p_values):
    """Whether each p is below 0.05 after Holm's correction."""
    shown = [False] * len(p_values)
    for rank, number in enumerate(np.argsort(p_values)):
        if p_values[number] * (len(p_values) - rank) >= 0.05:
            break
        shown[number] = True
    return shown
