"""The paper's runs of a model: the rows of paper.csv, in order of value, and what they lack.

A run is a task and a setup for which the paper prints a number. Its settings are those of the
published runs."""

import json
from collections import Counter
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

from decoders.setup import METHODS, OPTIONS, Setup
from heads.reader import head_file, read_scores
from paper.benchmark import in_batches, load_benchmark
from paper.printed import NAMES, cells, csv_rows, headline
from paper.report.stored import ITI
from paper.tasks import TASKS, Task, find_task, metrics
from runtime.config import LEAST_PREFIX
from runtime.errors import InputError
from runtime.progress import say

BASE = "Meta-Llama-3-8B-Instruct"  # the model with most tables, and the amateur
AMATEUR = f"meta-llama/{BASE}"
SIBLINGS = {"truthfulqa-gen": "truthfulqa-mc"}  # task without inferred N → the most similar one
FIRST_SEED = OPTIONS["seed"].default
SEEDS = range(FIRST_SEED, FIRST_SEED + 3)  # of random heads; the paper's are unknown
ORDER = "main iti lite n alpha masked random".split()  # groups of rows
PLANNED = "greedy decore-entropy decore-static cad cd dola-low dola-high ad masked".split()
PLANNED.append("decore-entropy-lite")


@dataclass
class PlannedRun:
    """A run of the paper."""

    task: Task
    setup: Setup  # greedy for ITI
    checkpoint: str | None = None  # of ITI; None: the model itself
    num_heads_from: str = ""  # where N comes from, if the table does not state it
    tables: list = field(default_factory=list)  # their names
    values: dict = field(default_factory=dict)  # the paper's, by metric

    def header(self, like):
        """Its fields of the run's header. like: the model of the paper, or None."""
        about = dict(
            table=", ".join(self.tables), num_heads=self.num_heads_from, values=self.values
        )
        return {"paper": about} | ({"like": like} if like else {})


def planned_runs(model, groups, tasks=TASKS, methods=PLANNED):
    """The paper's runs of a model, without repetitions, the most valuable ones first.

    groups: names of ORDER or tables of paper.csv, or "all". tasks, methods: names. InputError if
    there are none."""
    name = Path(model).name
    runs = {}
    for row in sorted(csv_rows("paper"), key=rank):
        chosen = {"all", row["group"], row["table"]} & set(groups)
        if row["model"].lower() != name.lower() or not chosen:
            continue
        for run in runs_of(row):
            if run.task.name not in tasks or run.setup.method not in methods:
                continue
            run = runs.setdefault((run.task, run.setup, run.checkpoint), run)
            if row["table"] not in run.tables:
                run.tables.append(row["table"])
            run.values.setdefault(row["metric"], float(row["value"]))
    if not runs:
        models = ", ".join(dict.fromkeys(row["model"] for row in csv_rows("paper")))
        raise InputError(
            f"the paper has no numbers of {name} for these tables, tasks and methods; "
            f"--like runs those of {models}"
        )
    return list(runs.values())


def rank(row):
    """Sorts rows by value: the main comparison, then ablations."""
    method = row["method"]
    return (
        ORDER.index(row["group"]),
        [*PLANNED, method].index(method),
        [*NAMES].index(row["task"]),
        float(row["num_heads"] or row["alpha"] or 0),
    )


def runs_of(row):
    """Yield the runs of a row of paper.csv: one, or one for each seed of random heads."""
    task = find_task(row["task"])
    method = row["method"]
    checkpoint, origin = None, ""
    values = {"alpha": float(row["alpha"])} if row["alpha"] else {}
    if method == "iti":
        method = "greedy"
        name = next(name for name, model in ITI.items() if model == row["model"])
        checkpoint = f"jujipotle/{name}"
    if method.endswith("-random"):
        method = "masked" if method == "masked-random" else "decore-entropy"
        values["random_heads"] = "published"
    options = METHODS[method].options
    if "amateur" in options:
        values["amateur"] = AMATEUR
    if "num_heads" in options:
        values["num_heads"], origin = number_of_heads(row)
        values["mask"] = "query"
    if "repetition_penalty" in options and "qwen2" in row["model"].lower() and not task.choice:
        values["repetition_penalty"] = 1.05  # of Qwen2's generation_config.json
    for seed in SEEDS if "random_heads" in values else [None]:
        setup = Setup.of(method, task.choice, seed=seed, **values)
        yield PlannedRun(task, setup, checkpoint, origin)


def number_of_heads(row):
    """(N, where it comes from): that of the row, else the inferred one, else that of the closest
    table."""
    if row["num_heads"]:
        return int(row["num_heads"]), ""
    task, model, method = row["task"], row["model"], row["method"]
    models = [BASE] if method.endswith("-lite") else [model, BASE]
    keys = [(task, model, method)]
    for other in models:
        keys += [(name, other, "decore-entropy") for name in (task, SIBLINGS.get(task, task))]
    for key in keys:
        for cell in cells("paper_n", *key):
            if cell["num_heads"]:
                how = "inferred" if key == keys[0] else "as " + " ".join(key)
                return int(cell["num_heads"].split()[0]), how


# --------------------------------------------------------------------------------------- the list


def show(runs, how):
    """Print the runs and what they lack, with the commands that get it.

    how: the parsed command line, of `paper`."""
    from cli import models  # slow

    model = None
    try:
        model = models.read_model(how.model, how)
    except (OSError, ValueError) as error:
        say(f"prompt tokens are not counted: {error}")
    say_size(how, model)
    by_task = Counter(run.task for run in runs)
    items, tokens, missing, fetched = {}, {}, {}, {}
    for task in by_task:
        items[task] = min(task.n, how.limit or how.sample or task.n)
        missing[task] = metrics.problems(task)
        try:
            bench = load_benchmark(task, how, model)
        except (OSError, ValueError, ImportError) as error:
            fetched[task] = str(error)
            continue
        items[task] = len(bench.items)
        if bench.n_data != task.n:
            problem = f"{task.name} has {bench.n_data:,} items, the paper scores {task.n:,}"
            fetched[task] = problem
        if model:
            tokens[task] = prompt_tokens(bench.encoded, how.batch_size)
    if how.json:
        for task, problem in fetched.items():
            missing[task].insert(0, f"{problem}: {fetch_command(how, [task])}")
        for run in runs:
            lacks = missing[run.task] + missing_heads(run, how)
            print(json.dumps(json_of(run, items[run.task], lacks), ensure_ascii=False))
        return
    print(f"{len(runs)} runs, in this order (* N inferred, ~ N of the closest table):\n")
    for number, run in enumerate(runs, 1):
        print(f"{number:4}  {line_of(run)}")
    print_tasks(by_task, items, tokens, how.batch_size)
    lacks = [*fetched.values(), *([fetch_command(how, fetched)] if fetched else [])]
    lacks += [text for run in runs for text in missing[run.task] + missing_heads(run, how)]
    print("Missing:" if lacks else "Nothing is missing.", *dict.fromkeys(lacks), sep="\n  ")


def fetch_command(how, tasks):
    return f"python evaluate.py fetch {how.data} --task {','.join(task.name for task in tasks)}"


def say_size(how, model):
    """Print if N is that of a model of another size. model: `cli.models.Facts`, or None."""
    like = how.like and head_file(how.like)
    theirs = len(read_scores(like)) if like else 0
    ours = model.config.n_layers * model.config.n_heads if model else 0
    if theirs and ours and theirs != ours:
        say(f"N is the paper's for the {theirs:,} heads of {how.like}; {model.name} has {ours:,}")


def missing_heads(run, how):
    """[A sentence with the command that measures the scores of its heads], if they are missing."""
    masked = how.amateur if run.setup.amateur else how.model
    if not run.setup.num_heads or run.setup.random_heads or head_file(masked):
        return []
    short = Path(masked).name
    command = f"python -m heads.detect --model {masked} --out heads/scores/{short}.json"
    return [f"no head scores of {short}: {command}"]


def json_of(run, items, missing):
    """A run as an object of --json."""
    return {
        "task": run.task.name,
        **run.setup.header(),
        "checkpoint": run.checkpoint,
        "table": ", ".join(run.tables),
        "num_heads_from": run.num_heads_from,
        "paper": run.values,
        "items": items,
        "missing": missing,
    }


def line_of(run):
    """A run in a line: task, method, N, α, the paper's value, and what else it is."""
    setup = run.setup
    mark = {"": " ", "inferred": "*"}.get(run.num_heads_from, "~")
    n = f"N {setup.num_heads}{mark}" if setup.num_heads else ""
    alpha = "" if setup.alpha is None else f"α {setup.alpha:g}"
    metric = headline(run.task.name, [name.removesuffix("_published") for name in run.values])
    value = run.values.get(metric, run.values.get(f"{metric}_published", ""))
    about = [
        run.tables[0],
        setup.amateur and "amateur",
        setup.random_heads and f"random, seed {setup.seed}",
        run.checkpoint,
    ]
    row = f"{run.task.name:22} {setup.method:20} {n:6} {alpha:7} {value:>6}  "
    return row + ", ".join(filter(None, about))


def print_tasks(by_task, items, tokens, batch_size):
    """A table of the tasks: their runs, items and tokens.

    tokens: task → `prompt_tokens`, if known."""
    print(
        f"\n{'task':22} {'runs':>4} {'items':>7} {'prompt tokens':>14} {'read':>12} "
        f"{'new, at most':>13}"
    )
    for task, runs in by_task.items():
        new = 0 if task.choice else items[task] * task.max_new_tokens
        prompt = read = "–"
        if task in tokens:
            prompt, read = (f"{n:,}" for n in tokens[task])
        print(f"{task.name:22} {runs:4} {items[task]:7,} {prompt:>14} {read:>12} {new:13,}")
    print(
        f"\nTokens are those of one method. Read: the common prefix of a batch of {batch_size} is "
        "read once."
    )


def prompt_tokens(encoded, batch_size):
    """(prompt tokens, those that are read if the common prefix of a batch is read once).

    encoded: the items of a task as ids."""
    total = read = sum(len(item.prompt) for item in encoded)
    for batch in in_batches(encoded, batch_size):
        shared = len(commonprefix([item.prompt for item in batch]))
        if shared >= LEAST_PREFIX:
            read -= shared * (len(batch) - 1)
    return total, read
