"""The paper's runs of a model: the rows of paper.csv, in order of value, and what they cost.

A run is a task, a method, N and α for which the paper prints a number. Its settings are those of
the published runs."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import cli
from model import BLOCK
from paper.numbers import TASKS, cells, headline, table
from paper.report.stored import ITI
from paper.tasks import find, metrics

BASE = "Meta-Llama-3-8B-Instruct"  # the model with most tables, and the amateur
AMATEUR = f"meta-llama/{BASE}"
OWNER_OF_ITI = "jujipotle"
SIBLINGS = {"truthfulqa-gen": "truthfulqa-mc"}  # task without inferred N → the most similar one
SEEDS = (cli.SEED, cli.SEED + 1, cli.SEED + 2)  # of random heads; the paper's are unknown
# The group of each table, by the beginning of its name; all others are main tables.
GROUPS = {
    "result_ablation_num_masked_retr_head": "n",
    "ablation_decore_static": "alpha",
    "result_ablation_num_masked_random_head": "random",
    "result_baseline_num_masked_random_head": "random",
    "result_baseline_num_masked_retr_head": "masked",
}
ORDER = ("main", "iti", "lite", "n", "alpha", "masked", "random")
METHODS = ("greedy", "decore-entropy", "decore-static", "cad", "cd", "dola-low", "dola-high", "ad")

# Of an H100, with the shares that decoding and prefilling commonly reach.
FLOPS = 989e12 * 0.4
BYTES = 3.35e12 * 0.6
GB = 1e9
# Gigabytes of what metrics download: parameters × bytes of each.
JUDGES = {"xsum": 0.75 * 4 + 0.125 * 4, "truthfulqa-gen": 2 * 6.74 * 2}


@dataclass
class Planned:
    task: str
    method: str  # as in evaluate.py; "greedy" for ITI
    num_heads: int | None
    alpha: float | None
    amateur: str | None = None
    random_heads: str | None = None
    seed: int | None = None
    checkpoint: str | None = None  # of ITI; None: the model itself
    how: str = ""  # where N comes from, if the table does not state it
    tables: list = field(default_factory=list)
    values: dict = field(default_factory=dict)  # the paper's, by metric

    @property
    def key(self):
        return (self.task, self.method, self.num_heads, self.alpha, self.seed, self.checkpoint)

    @property
    def mask(self):
        return "query" if self.num_heads else None


def planned_runs(model, groups, tasks=None, methods=None):
    """The paper's runs of a model, without repetitions, the most valuable ones first.

    groups: names of ORDER or tables of paper.csv. tasks, methods: None for all. ValueError if there
    are none."""
    name = Path(model).name
    runs = {}
    for row in sorted(table("paper"), key=rank):
        if row["model"].lower() != name.lower():
            continue
        if not {group_of(row), row["table"]} & set(groups):
            continue
        for run in runs_of(row):
            if (tasks and run.task not in tasks) or (methods and run.method not in methods):
                continue
            run = runs.setdefault(run.key, run)
            if row["table"] not in run.tables:
                run.tables.append(row["table"])
            run.values.setdefault(row["metric"], float(row["value"]))
    if not runs:
        known = list(dict.fromkeys(row["model"] for row in table("paper")))
        if name.lower() not in map(str.lower, known):
            raise ValueError(
                f"the paper has no numbers of {name}: choose one of its models with --like: "
                f"{', '.join(known)}"
            )
        raise ValueError(f"the paper has no numbers of {name} for these tables, tasks and methods")
    return list(runs.values())


def group_of(row):
    """The name of ORDER that a row of paper.csv belongs to."""
    if row["method"] == "iti":
        return "iti"
    if row["method"].endswith("-lite"):
        return "lite"
    for beginning, group in GROUPS.items():
        if row["table"].startswith(beginning):
            return group
    return "main"


def rank(row):
    """Sorts rows by value: the main comparison, then ablations."""
    method = row["method"]
    place = METHODS.index(method) if method in METHODS else len(METHODS)
    task = list(TASKS).index(row["task"])
    number = float(row["num_heads"] or row["alpha"] or 0)
    return ORDER.index(group_of(row)), place, task, number


def runs_of(row):
    """Yield the runs of a row of paper.csv: one, or one for each seed of random heads."""
    method = row["method"]
    alpha = float(row["alpha"]) if row["alpha"] else None
    if method in ("cd", "cad", "ad"):
        alpha = cli.DEFAULTS["alpha"]
    run = Planned(row["task"], method, None, alpha)
    if method == "iti":
        name = next(name for name, model in ITI.items() if model == row["model"])
        run.method, run.checkpoint = "greedy", f"{OWNER_OF_ITI}/{name}"
    if method == "cd" or method.endswith("-lite"):
        run.amateur = AMATEUR
    if method.endswith("-random"):
        run.method = {"decore-random": "decore-entropy", "masked-random": "masked"}[method]
        run.random_heads = "published"
    if run.method in cli.OPTIONS["num_heads"].methods:
        run.num_heads, run.how = number_of_heads(row)
    for seed in SEEDS if run.random_heads else [None]:
        yield Planned(**vars(run) | dict(seed=seed, tables=[], values={}))


def number_of_heads(row):
    """(N, where it comes from): that of the row, else the inferred one, else that of the closest
    table."""
    if row["num_heads"]:
        return int(row["num_heads"]), ""
    task, model, method = row["task"], row["model"], row["method"]
    other = SIBLINGS.get(task, task)
    models = [BASE] if method.endswith("-lite") else [model, BASE]
    places = [(task, model, method)]
    places += [(t, m, "decore-entropy") for m in models for t in dict.fromkeys((task, other))]
    for place in places:
        for found in cells("paper_n", *place):
            if found["num_heads"]:
                n = int(found["num_heads"].split()[0])
                return n, "inferred" if place == places[0] else "as " + " ".join(place)
    raise ValueError(f"{task}: no table has an N")


# ------------------------------------------------------------------------------------ what it costs


def prompt_tokens(encoded, batch_size):
    """(prompt tokens, those that are read if the common prefix of a batch is read once).

    encoded: the items of a task as ids. Batches are formed from the longest prompt on."""
    prompts = sorted((item.prompt for item in encoded), key=len, reverse=True)
    read = 0
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        shared = len(commonprefix(batch))
        read += sum(map(len, batch))
        if shared >= BLOCK:
            read -= shared * (len(batch) - 1)
    return sum(map(len, prompts)), read


def parameters(name, config=None):
    """Parameters of a model, by its configuration, else by its name (…-8B-…); None: unknown."""
    c = config
    if hasattr(c, "d_ff"):
        attention = c.d_model * c.head_dim * 2 * (c.n_heads + c.n_kv_heads)
        layer = attention + 3 * c.d_model * c.d_ff
        return c.n_layers * layer + c.vocab_size * c.d_model * (1 if c.tied_embeddings else 2)
    size = re.search(r"(\d+(?:\.\d+)?)b\b", Path(name).name.lower())
    return float(size[1]) * 1e9 if size else None


def speeds(n_parameters, batch_size):
    """(prompt tokens, new tokens) per second on one H100 in bfloat16: two operations a parameter
    and token; the weights are read once for the new tokens of a batch."""
    return FLOPS / (2 * n_parameters), BYTES / (2 * n_parameters) * batch_size


def passes(run):
    """How often a run reads its prompts."""
    masked = find(run.task).choice and run.method.startswith("decore")
    return 2 if masked or run.amateur or run.method == "cad" else 1


def missing_of(run, args, problems, has_heads):
    """What a run lacks, each with the command that gets it.

    problems: task → that of its data. has_heads: whether a model of this name has head scores."""
    missing = []
    if run.task in problems:
        command = f"python evaluate.py fetch {args.data} --task {run.task}"
        missing.append(f"{problems[run.task]}: {command}")
    missing += metrics.problems(find(run.task))
    if run.num_heads and run.random_heads is None:
        name = (args.amateur or run.amateur) if run.amateur else args.model
        if not has_heads(name):
            short = Path(name).name
            missing.append(
                f"no head scores of {short}: "
                f"python -m heads.detect --model {name} --out heads/{short}.json"
            )
    return missing


def print_json(runs, items, missing):
    """A JSON line for each run. items: task → number of items. missing: run's key → sentences."""
    for run in runs:
        line = dict(
            task=run.task,
            method=run.method,
            num_heads=run.num_heads,
            alpha=run.alpha,
            mask=run.mask,
            amateur=run.amateur,
            random_heads=run.random_heads,
            seed=run.seed,
            checkpoint=run.checkpoint,
            table=", ".join(run.tables),
            num_heads_from=run.how,
            paper=run.values,
            items=items[run.task],
            missing=missing[run.key],
        )
        print(json.dumps(line, ensure_ascii=False))


def print_plan(args, runs, items, tokens, missing, n_parameters):
    """The plan as tables. tokens: task → `prompt_tokens`, or None if they are not known."""
    print(f"{len(runs)} runs, in this order (* N inferred, ~ N of the closest table):\n")
    for i, run in enumerate(runs, 1):
        mark = {"": " ", "inferred": "*"}.get(run.how, "~")
        n = f"N {run.num_heads}{mark}" if run.num_heads else ""
        alpha = "" if run.alpha is None else f"α {run.alpha:g}"
        more = [run.amateur and "amateur", run.seed and f"random, seed {run.seed}", run.checkpoint]
        metric, _ = headline(run.task)
        value = run.values.get(metric, run.values.get(f"{metric}_published", ""))
        about = ", ".join(filter(None, more))
        print(
            f"{i:4}  {run.task:22} {run.method:20} {n:6} {alpha:7} {value:>6}  "
            f"{run.tables[0]}{', ' * bool(about)}{about}"
        )
    prefill, decode = args.prefill_speed, args.decode_speed
    if n_parameters:
        computed = speeds(n_parameters, args.batch_size)
        prefill, decode = prefill or computed[0], decode or computed[1]
    count = defaultdict(int)
    for run in runs:
        count[run.task] += passes(run)
    print(
        f"\n{'task':22} {'runs':>4} {'items':>7} {'prompt tokens':>14} {'read':>12} "
        f"{'new, at most':>13} {'hours':>7}"
    )
    total = 0
    for task in dict.fromkeys(run.task for run in runs):
        runs_here = sum(run.task == task for run in runs)
        new = 0 if find(task).choice else items[task] * find(task).max_new_tokens
        known = tokens.get(task)
        hours = None
        if known and prefill and decode:
            hours = (known[1] * count[task] / prefill + new * runs_here / decode) / 3600
            total += hours
        shown = [f"{n:,}" for n in known] if known else ["–", "–"]
        print(
            f"{task:22} {runs_here:4} {items[task]:7,} {shown[0]:>14} {shown[1]:>12} {new:13,} "
            f"{'–' if hours is None else f'{hours:.1f}':>7}"
        )
    print(
        f"\nTokens are those of one method. Read: the common prefix of a batch of "
        f"{args.batch_size} is read once."
    )
    if prefill and decode:
        source = "" if args.prefill_speed and args.decode_speed else ", computed for one H100"
        print(
            f"Hours: {total:.1f}, at {prefill:,.0f} prompt and {decode:,.0f} new tokens per second"
            f"{source} (--prefill-speed, --decode-speed)."
        )
    if n_parameters:
        print(f"Disk: {2 * n_parameters / GB:.0f} GB for the model in bfloat16", end="")
        judges = sum(size for task, size in JUDGES.items() if task in items)
        print(f", {judges:.0f} GB for metrics and judges." if judges else ".")
    lacks = list(dict.fromkeys(text for run in runs for text in missing[run.key]))
    print("Missing:" if lacks else "Nothing is missing.", *lacks, sep="\n  ")
