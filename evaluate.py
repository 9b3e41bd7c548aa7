"""Run the paper's benchmarks: task × method × model → one JSON line per example, and their means.

    python evaluate.py --task nq-swap --method greedy,decore-entropy --model M --data FILE
                       --demos FILE --out DIR
    python evaluate.py --task nq-swap --data FILE --demos FILE --dry-run    print the prompts
    python evaluate.py fetch DIR                                            download the data
    python evaluate.py paper --model M --data DIR --out DIR [--plan]        the paper's rows
    python evaluate.py rescore --task nq-swap FILE.jsonl                    recompute the metrics
    python evaluate.py report DIR                                           runs beside the paper's

Lists with commas and `--task all` make a sweep. An interrupted run continues
when the command is started again. Under torchrun the ranks share the examples; with --tp K, K ranks
share one model.

In this file: sweeps from the command line to their runs (`evaluate`, `paper`). paper/plan.py finds
the paper's rows, paper/benchmark.py decodes one run, paper/runfile.py describes it and writes its
file."""

import argparse
import itertools
import json
import signal
import sys
from copy import copy
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import cli
from decoders import baselines
from paper import fetch, judges, plan, printed, report, rescore
from paper.benchmark import Run, load_benchmark, run_benchmark
from paper.report import stored
from paper.runfile import make_header, run_name
from paper.settings import method_settings
from paper.tasks import TASKS, Task, find_task, find_tasks, metrics, prompts
from runtime.parallel import Ranks
from runtime.weights import fingerprint

# Options without effect on multiple choice.
GENERATING = {"max_new_tokens", "eos", "mask_prompt", "relative_top", "repetition_penalty"}


class Job(NamedTuple):
    """A task with a method: one run."""

    task: Task
    method: str  # with "-lite" if it contrasts with an amateur
    args: argparse.Namespace  # the command line, with one value of each option
    header: dict = {}  # more fields of the run's header


def main():
    commands = {"fetch": fetch.main, "paper": paper, "rescore": rescore.main, "report": report.main}
    argv = sys.argv[1:]
    if argv and argv[0] in commands:
        commands[argv[0]](argv[1:])
    else:
        evaluate(argv)


def evaluate(argv):
    """A sweep from the command line."""
    args = make_parser().parse_args(argv)
    tasks = find_tasks(args.task).values()
    methods = cli.full_names(args.method, args.amateur)
    unused = set.intersection(*map(unused_by, tasks))
    reasons = dict.fromkeys(unused, f"on {', '.join(task.name for task in tasks)}")
    if args.demos and args.demos.is_dir():
        reasons.pop("demos", None)  # a folder for all tasks
    if set(methods) <= {"greedy", "masked", "ad"}:
        reasons.setdefault("no_renormalise", f"on {', '.join(methods)}")
    cli.refuse_unused(args, reasons)
    if args.sample and args.seed and not args.random_heads:
        if len(args.seed) > 1:
            raise ValueError("--seed takes several numbers with --random-heads only")
        [args.sample_seed], args.seed = args.seed, None
    cli.check_options(args, methods)
    if args.dry_run:
        for bench in [load_benchmark(task, args) for task in tasks]:
            for item in bench.items:
                line = prompts.dry_run(bench.task, item, bench.demos, args.layout or "chat")
                print(json.dumps(line, ensure_ascii=False))
        return
    jobs = []
    for task, method in itertools.product(tasks, methods):
        for _, options in cli.single_values(method, args):
            jobs.append(Job(task, method, options))
    sweep(args, jobs)


def paper(argv):
    """The paper's runs of a model, or the plan of them."""
    args = paper_parser().parse_args(argv)
    tasks = find_tasks(args.task)
    planned = plan.planned_runs(args.like or args.model, args.table, tasks, args.method)
    if args.plan:
        return plan.show(args, planned)
    of_plan = "json", "timed", "prefill_speed", "decode_speed"
    cli.refuse_unused(args, dict.fromkeys(of_plan, "without --plan"))
    for checkpoint in dict.fromkeys(one.checkpoint for one in planned):
        if checkpoint and args.like:
            print("the runs of ITI are left out: its checkpoints are not --model", file=sys.stderr)
            continue
        selected = [one for one in planned if one.checkpoint == checkpoint]
        options = copy(args)
        if checkpoint:
            options.model = checkpoint
        elif args.dtype == "auto":
            options.dtype = "bfloat16"
        if not any(one.amateur for one in selected):
            options.amateur = None
        sweep(options, [paper_job(one, options) for one in selected], lenient=True)


def paper_job(planned, args):
    """The run of a row of the paper, with the settings of the published runs."""
    task = find_task(planned.task)
    args = copy(args)
    for name in ("num_heads", "alpha", "seed", "mask", "random_heads"):
        setattr(args, name, getattr(planned, name))
    dola = planned.method.startswith("dola") and not task.choice
    if dola and "qwen2" in (args.like or args.model).lower():
        args.repetition_penalty = 1.05  # of Qwen2's generation_config.json
    about = dict(table=planned.table, num_heads=planned.num_heads_from, values=planned.paper)
    like = {"like": args.like} if args.like else {}
    return Job(task, planned.method, args, {"paper": about} | like)


def sweep(args, jobs, lenient=False):
    """Run the jobs, in order, neighbours of one task together. Everything is checked before the
    first run.

    lenient: leave out runs that do not fit the model, in place of a ValueError."""
    ranks = Ranks(args.tp, args.device)
    facts, tokenizer, amateur_facts = cli.read_models(args)
    fitting = fitting_runs(args, jobs, facts, amateur_facts, lenient)
    model, amateur = cli.load_weights(args, ranks.shard)
    for _, _, settings in fitting:
        if "amateur" in settings:
            settings["amateur"] = amateur
        baselines.check(model, settings["method"], settings)
    fingerprints = ranks.share(
        lambda: [name and fingerprint(name) for name in (args.model, args.amateur)]
    )
    for task, neighbours in itertools.groupby(fitting, lambda one: one[0].task):
        runs = {}
        for job, bench, settings in neighbours:
            header = make_header(job, bench, settings, model, fingerprints)
            path = Path(args.out) / f"{run_name(header)}.jsonl"
            runs[path] = Run(header, settings, path)
        try:
            lines = run_benchmark(bench, [*runs.values()], model, tokenizer, ranks)
        except KeyboardInterrupt:
            print("\nstopped; the same command continues", file=sys.stderr)
            raise
        for path, answers in zip(runs, lines or []):
            answers = judges.judge(answers, path, task)
            rescore.print_means(stored.values_of(path, task, answers), {"run": str(path)})


def add_run_arguments(p, required):
    """Add the options of `make_parser` and `paper_parser`. required: "--task" or "--data"."""
    cli.add_model_arguments(p)
    p.add_argument(
        "--task",
        required=required == "--task",
        default="all",
        metavar="T[,T…]",
        help=f"{', '.join(TASKS)}; all: those of the paper",
    )
    p.add_argument(
        "--data",
        required=required == "--data",
        type=Path,
        metavar="FILE",
        help="the data: a file, or a folder that contains it, as `fetch` makes it (default: "
        "downloaded, if it is on the Hugging Face hub)",
    )
    p.add_argument(
        "--demos",
        type=Path,
        metavar="FILE",
        help="demonstrations: JSON lines, or a folder (default: from "
        "the data's folder, else the task's own, else the first items of the data)",
    )
    items = p.add_mutually_exclusive_group()
    items.add_argument(
        "--limit", type=cli.positive, metavar="K", help="the first K items (default: all)"
    )
    items.add_argument(
        "--sample",
        type=cli.positive,
        metavar="K",
        help="K random items, each split in its share; a larger K continues the runs. Without "
        "--random-heads, --seed is the sample's (default, and with --random-heads: 1234)",
    )
    p.set_defaults(sample_seed=cli.SEED)
    p.add_argument(
        "--batch-size",
        type=cli.positive,
        default=16,
        metavar="B",
        help="prompts at once (default: 16)",
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


def make_parser():
    p = cli.parser(
        "Run benchmarks: a task × a method × a model.",
        epilog="More commands, each with a --help: evaluate.py fetch DIR downloads the data, "
        "paper runs the rows of the paper's tables, rescore FILE computes the metrics of stored "
        "runs again, report DIR makes tables of a folder's runs.",
    )
    add_run_arguments(p, required="--task")
    cli.add_method_arguments(p, baselines.METHODS, exclude=["without_context"])
    p.add_argument(
        "--no-renormalise",
        action="store_true",
        help="multiple choice: sum the contrasted scores without normalising them",
    )
    p.add_argument(
        "--layout", choices=prompts.LAYOUTS, help="layout of the prompts (default: the model's)"
    )
    p.add_argument("--max-new-tokens", type=cli.positive, metavar="N", help="(default: the task's)")
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="print the prompts as JSON lines, by default in the layout chat, and load no model",
    )
    return p


def paper_parser():
    p = cli.parser("Run what the paper's tables hold of a model; with --plan, say what it costs.")
    p.prog += " paper"
    add_run_arguments(p, required="--data")
    # What the options of a sweep say is in the rows of the tables.
    p.set_defaults(**dict.fromkeys([*cli.OPTIONS, "layout", "max_new_tokens", "no_renormalise"]))
    tables = [*plan.ORDER, "all", *dict.fromkeys(row["table"] for row in printed.table("paper"))]
    p.add_argument(
        "--table",
        type=cli.comma_list(cli.method_name(tables, "table")),
        default=["main"],
        metavar="NAME[,NAME…]",
        help=f"{', '.join(plan.ORDER)}, all, or a table of paper/paper.csv (default: main)",
    )
    p.add_argument(
        "--method",
        type=cli.comma_list(cli.method_name(plan.METHODS)),
        default=plan.METHODS,
        metavar="M[,M…]",
        help=f"only these methods: {', '.join(plan.METHODS)}",
    )
    p.add_argument("--like", metavar="MODEL", help="the runs of this model of the paper")
    p.add_argument(
        "--amateur", default=plan.AMATEUR, metavar="M2", help=f"(default: {plan.AMATEUR})"
    )
    p.add_argument("--plan", action="store_true", help="print the runs and their cost, run nothing")
    p.add_argument("--json", action="store_true", help="with --plan: a JSON line for each run")
    p.add_argument(
        "--timed",
        action="store_true",
        help="with --plan: load the model, and time for some seconds how fast it is here",
    )
    for name, what in (("prefill", "prompt"), ("decode", "new")):
        p.add_argument(
            f"--{name}-speed",
            type=cli.number(float, 1e-9),
            metavar="S",
            help=f"{what} tokens per second (default: computed from the model's size for one H100)",
        )
    return p


def unused_by(task):
    """The options of `make_parser` without effect on a task."""
    unused = set(GENERATING) if task.choice else {"no_renormalise"}
    if task.layout:
        unused.add("layout")
    if not task.shots:
        unused.add("demos")
    return unused


def fitting_runs(args, jobs, model, amateur, lenient):
    """[(job, benchmark, settings of baselines.generate)] of the jobs that fit the model, its
    amateur and the prompts.

    model, amateur: as `cli.Checkpoint`. Prints a line for each task and method that does not fit.
    ValueError if none fits."""
    benches = {}
    for task in dict.fromkeys(job.task for job in jobs):
        for problem in metrics.problems(task):
            print(f"{task.name}: {problem}", file=sys.stderr)
        benches[task] = load_benchmark(task, args, model)
    fitting, problems = [], []
    for job in jobs:
        bench = benches[job.task]
        try:
            settings = method_settings(job.method, job.args, model, amateur)
            baselines.check(model, settings["method"], settings)
            problem = prompt_problem(job.method, bench, [model, settings.get("amateur") or model])
        except ValueError as error:
            if not lenient:
                raise
            problem = error
        if problem:
            problems.append(f"{job.task.name} with {job.method} is left out: {problem}")
        else:
            fitting.append((job, bench, settings))
    if not fitting:
        raise ValueError(problems[0])
    if args.template_args and all(bench.layout == "plain" for _, bench, _ in fitting):
        raise ValueError("--template-args has no effect: no prompt goes through a chat template")
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)
    return fitting


def prompt_problem(method, bench, readers):
    """Why a method cannot read the prompts; None if it can."""
    # The last token of an answer is not read.
    longest = max(len(e.prompt) + max(map(len, e.answers or [[0]])) - 1 for e in bench.encoded)
    context, reader = min((model.config.max_positions, model.name) for model in readers)
    if longest > context:
        return f"its longest prompt has {longest} tokens, but {reader} only {context} positions"
    if method != "cad":
        return None
    if not bench.task.without_context:
        return "its prompts have no context to leave out"
    if n := sum(e.prompt[-1:] != e.without_context[-1:] for e in bench.encoded):
        return f"without context {n} of its prompts end in another token (--layout {bench.layout})"


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
