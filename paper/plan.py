"""The paper's runs of a model: the rows of paper.csv, in order of value, and what they cost.

A run is a task, a method, N and α for which the paper prints a number. Its settings are those of
the published runs."""

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from pathlib import Path

import cli
from decoders import baselines
from heads import head_file
from model import LEAST_PREFIX, Transformer
from paper.benchmark import in_batches, load_benchmark
from paper.printed import TASKS, cells, headline, table
from paper.report.stored import ITI
from paper.tasks import find_task, metrics

BASE = "Meta-Llama-3-8B-Instruct"  # the model with most tables, and the amateur
AMATEUR = f"meta-llama/{BASE}"
SIBLINGS = {"truthfulqa-gen": "truthfulqa-mc"}  # task without inferred N → the most similar one
SEEDS = range(cli.SEED, cli.SEED + 3)  # of random heads; the paper's are unknown
ORDER = ("main", "iti", "lite", "n", "alpha", "masked", "random")  # groups of rows
METHODS = ("greedy", "decore-entropy", "decore-static", "cad", "cd", "dola-low", "dola-high", "ad")
METHODS += ("masked", "decore-entropy-lite")

# An H100 reaches these shares of its peak when it prefills and decodes.
FLOPS = 989e12 * 0.4
BYTES = 3.35e12 * 0.6
# Gigabytes that metrics download: models of 0.75 and 0.125 billion parameters in float32; two of
# 6.74 billion in bfloat16.
JUDGES = {"xsum": 3.5, "truthfulqa-gen": 26.96}
TIMED = 256  # prompt tokens


@dataclass
class Planned:
    """A run. The fields are those of the plan's JSON lines."""

    task: str
    method: str  # as in evaluate.py; "greedy" for ITI
    num_heads: int | None = None
    alpha: float | None = None
    mask: str | None = None
    amateur: str | None = None
    random_heads: str | None = None
    seed: int | None = None
    checkpoint: str | None = None  # of ITI; None: the model itself
    table: str = ""  # the tables' names, with commas
    num_heads_from: str = ""  # where N comes from, if the table does not state it
    paper: dict = field(default_factory=dict)  # the paper's values, by metric
    items: int = 0
    missing: list = ()  # sentences


def planned_runs(model, groups, tasks=None, methods=None):
    """The paper's runs of a model, without repetitions, the most valuable ones first.

    groups: names of ORDER or tables of paper.csv, or "all". tasks, methods: None for all.
    ValueError if there are none."""
    name = Path(model).name
    runs = {}
    for row in sorted(table("paper"), key=rank):
        chosen = {"all", row["group"], row["table"]} & set(groups)
        if row["model"].lower() != name.lower() or not chosen:
            continue
        for run in runs_of(row):
            if (tasks and run.task not in tasks) or (methods and run.method not in methods):
                continue
            key = run.task, run.method, run.num_heads, run.alpha, run.seed, run.checkpoint
            run = runs.setdefault(key, run)
            if row["table"] not in run.table.split(", "):
                run.table += ", " * bool(run.table) + row["table"]
            run.paper.setdefault(row["metric"], float(row["value"]))
    if not runs:
        models = ", ".join(dict.fromkeys(row["model"] for row in table("paper")))
        raise ValueError(
            f"the paper has no numbers of {name} for these tables, tasks and methods; "
            f"--like runs those of {models}"
        )
    return list(runs.values())


def rank(row):
    """Sorts rows by value: the main comparison, then ablations."""
    method = row["method"]
    return (
        ORDER.index(row["group"]),
        (*METHODS, method).index(method),
        list(TASKS).index(row["task"]),
        float(row["num_heads"] or row["alpha"] or 0),
    )


def runs_of(row):
    """Yield the runs of a row of paper.csv: one, or one for each seed of random heads."""
    method = row["method"]
    run = Planned(row["task"], method, alpha=float(row["alpha"]) if row["alpha"] else None)
    if method in ("cd", "cad", "ad"):
        run.alpha = cli.DEFAULTS["alpha"]
    if method == "iti":
        name = next(name for name, model in ITI.items() if model == row["model"])
        run.method, run.checkpoint = "greedy", f"jujipotle/{name}"
    if method == "cd" or method.endswith("-lite"):
        run.amateur = AMATEUR
    if method.endswith("-random"):
        run.method = "masked" if method == "masked-random" else "decore-entropy"
        run.random_heads = "published"
    if run.method in cli.OPTIONS["num_heads"].methods:
        run.num_heads, run.num_heads_from = number_of_heads(row)
        run.mask = "query"
    for seed in SEEDS if run.random_heads else [None]:
        yield replace(run, seed=seed, paper={})


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


# ------------------------------------------------------------------------------------ what it costs


def prompt_tokens(encoded, batch_size):
    """(prompt tokens, those that are read if the common prefix of a batch is read once).

    encoded: the items of a task as ids."""
    total = read = sum(len(item.prompt) for item in encoded)
    for batch in in_batches(encoded, batch_size):
        shared = len(commonprefix([item.prompt for item in batch]))
        if shared >= LEAST_PREFIX:
            read -= shared * (len(batch) - 1)
    return total, read


def parameters(config, name):
    """Parameters: those in the matrices of our own engine's model, else by the name (…-8B-…), else
    None."""
    if hasattr(config, "d_ff"):
        weights = Transformer(config, device="meta").parameters()
        return sum(x.numel() for x in weights if x.dim() == 2)
    size = re.search(r"(\d+(?:\.\d+)?)b\b", Path(name).name.lower())
    return size and float(size[1]) * 1e9


def time_model(args):
    """(prompt tokens, new tokens) per second of greedy decoding here: nine steps of a batch of
    prompts of TIMED tokens that differ in the last one."""
    model, _ = cli.load_weights(argparse.Namespace(**vars(args) | {"amateur": None}))
    prompts = [[5] * (TIMED - 1) + [i] for i in range(args.batch_size)]
    times = []

    def on_token(*_):
        times.append(time.perf_counter())

    for _ in range(2):  # the first time warms up
        times[:] = [time.perf_counter()]
        settings = dict(max_new_tokens=9, eos_ids=(), on_token=on_token)
        baselines.generate(model, prompts, "greedy", **settings)
    return TIMED / (times[1] - times[0]), 8 * len(prompts) / (times[-1] - times[1])


def show(args, runs):
    """Print the runs, what they cost, and what they lack, with the commands that get it.

    No model is loaded, unless --timed asks for this machine's speed."""
    if args.timed:
        cli.refuse_unused(args, dict.fromkeys(("prefill_speed", "decode_speed"), "with --timed"))
        args.prefill_speed, args.decode_speed = time_model(args)
    model = None
    try:
        model = cli.read_model(args.model, args)
    except (OSError, ValueError) as error:
        print(f"prompt tokens are not counted: {error}", file=sys.stderr)
    by_task = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    tokens = {}
    for name, of_task in by_task.items():
        task = find_task(name)
        items = min(task.n, args.limit or args.sample or task.n)
        missing = metrics.problems(task)
        problem = None
        try:
            bench = load_benchmark(task, args, model)
        except (OSError, ValueError, ImportError) as error:
            problem = error
        else:
            items = len(bench.items)
            if bench.n_data != task.n:
                problem = f"{name} has {bench.n_data:,} items, the paper scores {task.n:,}"
            if model:
                tokens[name] = prompt_tokens(bench.encoded, args.batch_size)
        if problem:
            missing.insert(0, f"{problem}: python evaluate.py fetch {args.data} --task {name}")
        for run in of_task:
            run.items = items
            run.missing = list(missing)
            masked = args.amateur if run.amateur else args.model
            if run.num_heads and not run.random_heads and not head_file(masked):
                short = Path(masked).name
                run.missing.append(
                    f"no head scores of {short}: "
                    f"python -m heads.detect --model {masked} --out heads/{short}.json"
                )
    if args.json:
        for run in runs:
            print(json.dumps(vars(run), ensure_ascii=False))
    else:
        size = parameters(model and model.config, args.like or args.model)
        print_plan(args, runs, by_task, tokens, size)


def print_plan(args, runs, by_task, tokens, n_parameters):
    """The plan as tables. by_task: task → runs. tokens: task → `prompt_tokens`, if known."""
    print(f"{len(runs)} runs, in this order (* N inferred, ~ N of the closest table):\n")
    for i, run in enumerate(runs, 1):
        mark = {"": " ", "inferred": "*"}.get(run.num_heads_from, "~")
        n = f"N {run.num_heads}{mark}" if run.num_heads else ""
        alpha = "" if run.alpha is None else f"α {run.alpha:g}"
        metric, _ = headline(run.task)
        value = run.paper.get(metric, run.paper.get(f"{metric}_published", ""))
        about = [
            run.table.split(", ")[0],
            run.amateur and "amateur",
            run.seed and f"random, seed {run.seed}",
            run.checkpoint,
        ]
        print(
            f"{i:4}  {run.task:22} {run.method:20} {n:6} {alpha:7} {value:>6}  "
            + ", ".join(filter(None, about))
        )
    prefill, decode = args.prefill_speed, args.decode_speed
    if n_parameters:
        # Two operations a parameter and token; a batch reads the weights once for a new token.
        prefill = prefill or FLOPS / (2 * n_parameters)
        decode = decode or BYTES / (2 * n_parameters) * args.batch_size
    print(
        f"\n{'task':22} {'runs':>4} {'items':>7} {'prompt tokens':>14} {'read':>12} "
        f"{'new, at most':>13} {'hours':>7}"
    )
    total = 0
    for name, of_task in by_task.items():
        task, items = find_task(name), of_task[0].items
        new = 0 if task.choice else items * task.max_new_tokens
        prompt = read = hours = "–"
        if name in tokens:
            prompt, read = (f"{n:,}" for n in tokens[name])
            if prefill and decode:
                passes = len(of_task)
                for run in of_task:
                    masked = task.choice and run.method.startswith("decore")
                    passes += bool(masked or run.amateur or run.method == "cad")
                seconds = tokens[name][1] * passes / prefill + new * len(of_task) / decode
                total += seconds / 3600
                hours = hours_text(seconds / 3600)
        print(f"{name:22} {len(of_task):4} {items:7,} {prompt:>14} {read:>12} {new:13,} {hours:>7}")
    print(
        f"\nTokens are those of one method. Read: the common prefix of a batch of "
        f"{args.batch_size} is read once."
    )
    if total:
        least = "at least " * (len(tokens) < len(by_task))
        print(
            f"Hours: {least}{hours_text(total)}, at {prefill:,.0f} prompt and {decode:,.0f} new "
            "tokens per second (--prefill-speed, --decode-speed; --timed: this machine's; by "
            "default computed for one H100)."
        )
    if n_parameters:
        judges = sum(size for task, size in JUDGES.items() if task in by_task)
        more = f", {judges:.0f} GB for metrics and judges" if judges else ""
        print(f"Disk: {2 * n_parameters / 1e9:.1f} GB for the model in bfloat16{more}.")
    lacks = list(dict.fromkeys(text for run in runs for text in run.missing))
    print("Missing:" if lacks else "Nothing is missing.", *lacks, sep="\n  ")


def hours_text(hours):
    return f"{hours:.1f}" if hours >= 0.05 else "< 0.1"
