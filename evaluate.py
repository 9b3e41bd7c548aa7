"""Run the paper's benchmarks: task × method × model → one JSON line per example, and their means.

    python evaluate.py --task nq-swap --method greedy,decore-entropy --model M --data FILE
                       --demos FILE --out DIR
    python evaluate.py --task nq-swap --data FILE --demos FILE --dry-run    print the prompts
    python evaluate.py fetch DIR                                            download the data
    python evaluate.py paper --model M --data DIR --out DIR [--plan]        the paper's rows
    python evaluate.py rescore --task nq-swap FILE.jsonl                    recompute the metrics
    python evaluate.py report DIR                                           runs beside the paper's

Lists with commas, `--task all` and `--task miniature` make a sweep. An interrupted run continues
when the command is started again. Under torchrun the ranks share the examples; with --tp K, K ranks
share one model.

In this file: a sweep from the command line to its runs (`evaluate`); the header of a run; the two
commands without a model. paper/decoding.py decodes one run, paper/runs.py writes its file."""

import argparse
import datetime
import itertools
import json
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

import cli
from paper import decoders, fetch, judges, numbers, plan, report, runs
from paper.decoding import Benchmark, items_to_ids, run
from paper.report import stored
from paper.tasks import MINIATURE, PAPER, data, find, metrics, prompts
from program.settings import default_num_heads, has_heads, method_settings
from runtime.files import commit
from runtime.parallel import Ranks
from runtime.weights import fingerprint

BATCH = 16  # prompts at once, by default
QWEN2_PENALTY = 1.05  # in the published runs of DoLa, from Qwen2's generation_config.json

# Option → whether a task uses it. cli.OPTIONS has the methods that use an option.
USED_BY_TASK = {
    **dict.fromkeys(
        ("max_new_tokens", "batch_size", "mask_prompt", "relative_top", "repetition_penalty"),
        lambda task: not task.choice,
    ),
    "no_renormalise": lambda task: task.choice,
    "layout": lambda task: task.layout is None,
    "demos": lambda task: task.shots,
}


class Job(NamedTuple):
    """A benchmark with a method: one run."""

    bench: Benchmark
    method: str  # with "-lite" if it contrasts with an amateur
    options: dict  # in place of those of the command line
    header: dict = {}  # more fields of the run's header


def main():
    commands = {"fetch": fetch.main, "paper": paper, "rescore": rescore, "report": report.main}
    first, *rest = sys.argv[1:] or [""]
    return commands[first](rest) if first in commands else evaluate(sys.argv[1:])


def evaluate(argv):
    """A sweep from the command line."""
    args = make_parser().parse_args(argv)
    tasks, methods = chosen_tasks(args.task), cli.full_names(args.method, args.amateur)
    reason = f"on {', '.join(task.name for task in tasks)}"
    unused = [name for name, used in USED_BY_TASK.items() if not any(map(used, tasks))]
    if args.demos and args.demos.is_dir() and "demos" in unused:
        unused.remove("demos")  # a folder for all tasks
    cli.refuse_unused(args, dict.fromkeys(unused, reason))
    benchmarks = [load_benchmark(task, args) for task in tasks]
    cli.check_options(args, methods)
    if set(methods) <= {"greedy", "masked", "ad"}:
        cli.refuse_unused(args, {"no_renormalise": f"on {', '.join(methods)}"})
    if args.dry_run:
        return dry_run(args, benchmarks)
    swept = {
        "num_heads": args.num_heads or [None],
        "alpha": args.alpha or [cli.DEFAULTS["alpha"]],
        "seed": (args.seed or [cli.SEED]) if args.random_heads else [None],
    }
    jobs = []
    for bench, method in itertools.product(benchmarks, methods):
        used = []
        for name, values in swept.items():
            used.append(values if method in cli.OPTIONS[name].methods else [None])
        for values in itertools.product(*used):
            jobs.append(Job(bench, method, dict(zip(swept, values, strict=True))))
    sweep(args, jobs)


def load_benchmark(task, args):
    return Benchmark(task, *data.load(task, args.data, args.demos, args.limit))


def paper(argv):
    """The paper's runs of a model, or the plan of them."""
    args = paper_parser().parse_args(argv)
    known = {*plan.ORDER, "all", *(row["table"] for row in numbers.table("paper"))}
    for name in set(args.table) - known:
        raise ValueError(f"--table {name} is unknown{cli.did_you_mean(name, known)}; see --help")
    tables = plan.ORDER if "all" in args.table else args.table
    tasks = [task.name for task in chosen_tasks(args.task)] if args.task else None
    planned = plan.planned_runs(args.like or args.model, tables, tasks, args.method)
    if args.plan:
        return show_plan(args, planned)
    cli.refuse_unused(
        args, dict.fromkeys(("json", "prefill_speed", "decode_speed"), "without --plan")
    )
    if args.out is None:
        raise ValueError("--out DIR is missing: the folder of the runs")
    if args.like:
        kept = [one for one in planned if one.checkpoint is None]
        if len(kept) < len(planned):
            print("the runs of ITI are left out: its checkpoints are not --model", file=sys.stderr)
        planned = kept
    defaults = vars(make_parser().parse_args(["--task", "all"]))
    for checkpoint in dict.fromkeys(one.checkpoint for one in planned):
        selected = [one for one in planned if one.checkpoint == checkpoint]
        own = vars(args) | dict(amateur=None, template_args=args.template_args)
        if any(one.amateur for one in selected):
            own["amateur"] = args.amateur or plan.AMATEUR
        if checkpoint:
            own["model"] = checkpoint
        elif args.dtype == "auto":
            own["dtype"] = "bfloat16"
        options = argparse.Namespace(**defaults | own)
        benchmarks = {}
        jobs = []
        for one in selected:
            task = find(one.task)
            if task not in benchmarks:
                benchmarks[task] = load_benchmark(task, options)
            jobs.append(paper_job(one, benchmarks[task], args))
        sweep(options, jobs, lenient=True)


def paper_job(planned, bench, args):
    """The run of a row of the paper, with the settings of the published runs."""
    name = (args.like or args.model).lower()
    options = dict(
        num_heads=planned.num_heads,
        alpha=planned.alpha,
        mask=planned.mask,
        random_heads=planned.random_heads,
        seed=planned.seed,
    )
    if planned.method.startswith("dola") and "qwen2" in name and not bench.task.choice:
        options["repetition_penalty"] = QWEN2_PENALTY
    header = {
        "paper": dict(table=", ".join(planned.tables), num_heads=planned.how, values=planned.values)
    }
    if args.like:
        header["like"] = args.like
    return Job(bench, planned.method, options, header)


def show_plan(args, planned):
    """Print the runs and what they cost, without loading a model."""
    tokenizer = config = None
    try:
        facts = cli.read_model(args.model, args)
        tokenizer, config = facts.tokenizer, facts.config
    except (OSError, ValueError) as error:
        print(f"prompt tokens are not counted: {error}", file=sys.stderr)
    items, tokens, problems = {}, {}, {}
    args.batch_size = BATCH
    for name in dict.fromkeys(one.task for one in planned):
        task = find(name)
        items[name] = min(task.n, args.limit or task.n)
        try:
            bench = load_benchmark(task, args)
        except (OSError, ValueError, ImportError) as error:
            problems[name] = str(error)
            continue
        items[name] = len(bench.items)
        if tokenizer:
            bench = in_layout(bench, args, config, tokenizer)
            tokens[name] = plan.prompt_tokens(items_to_ids(bench, tokenizer), BATCH)
    missing = {one.key: plan.missing_of(one, args, problems, has_heads) for one in planned}
    if args.json:
        return plan.print_json(planned, items, missing)
    size = plan.parameters(args.like or args.model, config)
    plan.print_plan(args, planned, items, tokens, missing, size)


def sweep(args, jobs, lenient=False):
    """Run the jobs, in order. Everything is checked before the first run.

    lenient: leave out runs that do not fit the model, in place of a ValueError."""
    for task in dict.fromkeys(job.bench.task for job in jobs):
        for problem in metrics.problems(task):
            print(f"{task.name}: {problem}", file=sys.stderr)
    ranks = Ranks(args.tp, args.device)
    facts, tokenizer, amateur_facts = cli.read_models(args)
    runs_fitting = fitting_runs(args, jobs, facts, amateur_facts, tokenizer, lenient)
    model, amateur = cli.load_weights(args, ranks.shard)
    for _, settings, _ in runs_fitting:
        if "amateur" in settings:
            settings["amateur"] = amateur
        decoders.check(model, settings["method"], settings)
    names = args.model, args.amateur
    fingerprints = ranks.share(lambda: [fingerprint(name) if name else None for name in names])
    for job, settings, fields in runs_fitting:
        header = make_header(args, job, fields, model, ranks, fingerprints)
        path = Path(args.out) / f"{run_name(header)}.jsonl"
        try:
            lines = run(job.bench, header, settings, path, model, tokenizer, ranks)
        except KeyboardInterrupt:
            print("\ninterrupted: the same command continues", file=sys.stderr)
            raise
        if ranks.rank == 0:
            task = job.bench.task
            lines = judges.judge(lines, path, task)
            print_means(lines, stored.values_of(path, task, lines), {"run": str(path)})


def make_parser():
    p = cli.parser(
        "Run benchmarks: a task × a method × a model.",
        epilog="More commands, each with a --help: evaluate.py fetch DIR downloads the data, "
        "paper runs the rows of the paper's tables, rescore FILE computes the metrics of stored "
        "runs again, report DIR makes tables of a folder's runs.",
    )
    cli.add_model_arguments(p)
    p.add_argument(
        "--task",
        required=True,
        metavar="T[,T…]",
        help=f"{', '.join(task.name for task in PAPER)}; all: these; "
        "miniature: the miniature's splits",
    )
    p.add_argument(
        "--method",
        default=["decore-entropy"],
        type=cli.comma_list(cli.method_name(decoders.METHODS)),
        metavar="M[,M…]",
        help=f"{', '.join(decoders.METHODS)} (default: decore-entropy)",
    )
    cli.add_method_arguments(p, decoders.METHODS, sweep=True)
    p.add_argument(
        "--no-renormalise",
        action="store_true",
        help="multiple choice: sum the contrasted scores without normalising them",
    )
    p.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="the data: a file, or a folder that contains it (default: "
        "downloaded, if it is on the Hugging Face hub)",
    )
    p.add_argument(
        "--demos",
        type=Path,
        metavar="FILE",
        help="demonstrations: JSON lines, or a folder (default: from "
        "the data's folder, else the task's own, else the first items of the data)",
    )
    p.add_argument(
        "--layout", choices=prompts.LAYOUTS, help="layout of the prompts (default: the model's)"
    )
    p.add_argument(
        "--limit", type=cli.positive, metavar="K", help="the first K items (default: all)"
    )
    p.add_argument("--max-new-tokens", type=cli.positive, metavar="N", help="(default: the task's)")
    p.add_argument(
        "--batch-size", type=cli.positive, metavar="B", help="prompts at once (default: 16)"
    )
    p.add_argument(
        "--tp",
        type=cli.positive,
        default=1,
        metavar="K",
        help="ranks that share one model (torchrun)",
    )
    p.add_argument(
        "--out", default="results", metavar="DIR", help="folder of the runs (default: results)"
    )
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="print the prompts as JSON lines, by default in the layout chat, and load no model",
    )
    return p


def paper_parser():
    p = cli.parser("Run what the paper's tables hold of a model; with --plan, say what it costs.")
    p.prog += " paper"
    cli.add_model_arguments(p)
    p.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of `fetch`")
    p.add_argument("--demos", type=Path, metavar="DIR", help="(default: the data's folder)")
    p.add_argument("--out", metavar="DIR", help="folder of the runs")
    p.add_argument(
        "--table",
        type=cli.comma_list(str),
        default=["main"],
        metavar="NAME[,NAME…]",
        help=f"{', '.join(plan.ORDER)}, all, or a table of paper/paper.csv (default: main)",
    )
    p.add_argument("--task", metavar="T[,T…]", help="only these tasks")
    p.add_argument(
        "--method", type=cli.comma_list(str), metavar="M[,M…]", help="only these methods"
    )
    p.add_argument("--like", metavar="MODEL", help="the runs of this model of the paper")
    p.add_argument("--amateur", metavar="M2", help=f"(default: {plan.AMATEUR})")
    p.add_argument("--limit", type=cli.positive, metavar="K", help="the first K items of each task")
    p.add_argument(
        "--tp", type=cli.positive, default=1, metavar="K", help="ranks that share one model"
    )
    p.add_argument("--plan", action="store_true", help="print the runs and their cost, run nothing")
    p.add_argument("--json", action="store_true", help="with --plan: a JSON line for each run")
    for name, what in (("prefill", "prompt"), ("decode", "new")):
        p.add_argument(
            f"--{name}-speed",
            type=cli.number(float, 1e-9),
            metavar="S",
            help=f"{what} tokens per second (default: computed from the model's size for one H100)",
        )
    return p


def chosen_tasks(text):
    groups = {"all": [task.name for task in PAPER], "miniature": [task.name for task in MINIATURE]}
    names = [name for part in text.split(",") for name in groups.get(part, [part])]
    return [find(name) for name in dict.fromkeys(names)]


def make_setup(args, job, model, amateur):
    """(settings of decoders.generate, fields of the header) of a job. ValueError if its options do
    not fit the model. model, amateur: what is known before the weights."""
    options = dict(job.options)
    if job.method in cli.OPTIONS["num_heads"].methods and options["num_heads"] is None:
        options["num_heads"] = default_num_heads(model)
    given = argparse.Namespace(**vars(args) | options)
    settings = method_settings(job.method, given, model, amateur)
    decoders.check(model, settings["method"], settings)
    heads = settings.get("heads", settings.get("amateur_heads"))
    fields = settings | {name: options[name] for name in ("num_heads", "alpha", "seed")}
    fields |= {
        "method": job.method,
        "heads": heads and [f"{layer}-{head}" for layer, head in heads],
        "random_heads": given.random_heads if "heads" in settings else None,
        "amateur": amateur.name if "amateur" in settings else None,
    }
    fields.pop("amateur_heads", None)
    return settings, fields


def in_layout(bench, args, config, tokenizer):
    """The benchmark with the layout of its prompts, and the arguments of the chat template."""
    native = "mistral" if config.model_type == "mistral" else "chat"
    native = native if tokenizer.has_chat_template else "plain"
    layout = bench.task.layout or getattr(args, "layout", None) or native
    template_args = None
    if layout != "plain":
        template_args = cli.benchmark_template_args(tokenizer, args.template_args)
    return bench._replace(layout=layout, template_args=template_args)


def fitting_runs(args, jobs, model, amateur, tokenizer, lenient):
    """[(job, settings, fields)] of the jobs that fit the model, its amateur and the prompts.

    Prints a line for each task and method that does not fit. ValueError if none fits."""
    about = {}  # task → (benchmark, lengths of its prompts, those that end in another token)
    fitting, problems = [], []
    for job in jobs:
        name = job.bench.task.name
        if name not in about:
            bench = in_layout(job.bench, args, model.config, tokenizer)
            about[name] = bench, *measure(items_to_ids(bench, tokenizer))
        bench, lengths, other_ends = about[name]
        try:
            settings, fields = make_setup(args, job, model, amateur)
        except ValueError as error:
            if not lenient:
                raise
            problems.append(f"{name} with {job.method} is left out: {error}")
            continue
        readers = [model, amateur] if "amateur" in settings else [model]
        context, reader = min((m.config.max_positions, m.name) for m in readers)
        problem = None
        if max(lengths) > context:
            longer = sum(length > context for length in lengths)
            problem = (
                f"{longer} of {len(lengths)} prompts are longer than the {context} positions of "
                f"{reader} (the longest: {max(lengths)} tokens)"
            )
        elif job.method == "cad" and not bench.task.without_context:
            problem = "its prompts have no context to leave out"
        elif job.method == "cad" and other_ends:
            problem = (
                f"without context {other_ends} of its prompts end in another token "
                f"(--layout {bench.layout})"
            )
        if problem:
            problems.append(f"{name} with {job.method} is left out: {problem}")
        else:
            fitting.append((job._replace(bench=bench), settings, fields))
    if not fitting:
        raise ValueError(problems[0])
    if args.template_args and all(job.bench.layout == "plain" for job, *_ in fitting):
        raise ValueError("--template-args has no effect: no prompt goes through a chat template")
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)
    return fitting


def measure(encoded):
    """(tokens of each prompt with its longest answer, prompts whose context-free form ends in
    another token)."""
    # The last token of an answer is not read.
    lengths = [len(e.prompt) + max(map(len, e.answers or [[0]])) - 1 for e in encoded]
    pairs = [(e.prompt, e.without_context) for e in encoded if e.without_context is not None]
    return lengths, sum(prompt[-1:] != without[-1:] for prompt, without in pairs)


# ------------------------------------------------------------------------------ the header of a run


def make_header(args, job, fields, model, ranks, fingerprints):
    """The first line of a run's file: what determines its lines, the software, the machine."""
    bench, task = job.bench, job.bench.task
    is_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_cuda else platform.machine()
    libraries = ("torch", "tokenizers", "numpy", *["transformers"] * args.transformers)
    return fields | {
        "model": model.name,
        "fingerprint": fingerprints[0],
        "tp": ranks.tp,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": f"{model.device.type} ({device})",
        "engine": "transformers" if args.transformers else "own",
        "versions": {name: version(name) for name in libraries}
        | {"python": platform.python_version()},
        "commit": commit(),
        "date": str(datetime.date.today()),
        "command": shlex.join(["evaluate.py", *sys.argv[1:]]),
        "task": task.name,
        "version": task.version,
        "layout": bench.layout,
        "template_args": bench.template_args,
        "n": len(bench.items),
        "limit": args.limit,
        "data": bench.data,
        "demos": bench.demo_record,
        "amateur_fingerprint": fingerprints[1] if fields["amateur"] else None,
        "batch_size": args.batch_size or BATCH,
        "max_new_tokens": None if task.choice else args.max_new_tokens or task.max_new_tokens,
        # Scoring masks every position.
        "mask_prompt": None if task.choice else fields.get("mask_prompt"),
        "renormalise": not args.no_renormalise if task.choice else None,
        "seed": cli.SEED if fields["seed"] is None else fields["seed"],
        "product": model.product,
        **job.header,
    }


def run_name(header):
    """The name of a run's file: task, model, method and some of its options."""
    options = {
        "num_heads": "n{num_heads}",
        "random_heads": "random-{random_heads}-seed{seed}",
        "alpha": "a{alpha:g}",
        "alpha_cap": "cap{alpha_cap:g}",
        "scale_alpha": "scaled",
        "mask": "query",
        "mask_prompt": "mask-prompt",
        "amateur": "{amateur}",
    }
    names = {name: (header[name] or "").split("/")[-1] for name in ("model", "amateur")}
    parts = [
        text.format(**header | names)
        for name, text in options.items()
        if header.get(name) not in (None, "output") and header[name] is not False
    ]
    return ".".join([header["task"], names["model"], header["method"], *parts])


# ------------------------------------------------------------------------- commands without a model


def dry_run(args, benchmarks):
    """Print the prompts of all items."""
    for bench in benchmarks:
        for item in bench.items:
            line = prompts.dry_run(bench.task, item, bench.demos, args.layout or "chat")
            print(json.dumps(line, ensure_ascii=False))


def rescore(argv):
    p = cli.parser("Compute the metrics of runs again, from their lines, without their model.")
    p.prog += " rescore"
    p.add_argument(
        "files", nargs="+", type=Path, metavar="FILE.jsonl|DIR", help="runs, or folders of runs"
    )
    p.add_argument("--task", metavar="T", help="(default: the one in the run's header)")
    p.add_argument(
        "--rows", action="store_true", help="first print one JSON line per item with its values"
    )
    judges.add_arguments(p)
    args = p.parse_args(argv)
    paths = [
        path
        for file in args.files
        for path in (stored.run_files(file) if file.is_dir() else [file])
    ]
    if not paths:
        raise ValueError(f"{args.files[0]} holds no runs")
    for path in paths:
        header, lines = runs.read_run(path)
        if args.task is None and header is None:
            raise ValueError(f"{path} has no header in its first line: give --task")
        if not lines:
            raise ValueError(f"{path} holds no lines of items")
        task = find(args.task or header.get("task"))
        lines = judges.judge(lines, path, task, judges.judges_of(args))
        values = metrics.compute(task, lines)
        for line, of_line in zip(lines, values, strict=True) if args.rows else ():
            print(json.dumps({"id": line.get("id")} | of_line, ensure_ascii=False))
        print_means(lines, values, {} if paths == args.files[:1] else {"run": str(path)})


def print_means(lines, values, about):
    """Print the means as one JSON line."""
    if "rejection" in values[0] and not any("truth" in of_line for of_line in values):
        print(
            "not judged, so only rejections are counted: evaluate.py rescore --judge adds truth, "
            "info and both",
            file=sys.stderr,
        )
    print(
        json.dumps(
            about | {"metrics": metrics.summary(values), "n": len(lines)}, ensure_ascii=False
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(cli.run(main))
