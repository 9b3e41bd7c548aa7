"""Run the paper's benchmarks: task × method × model → one JSON line per example, and their means.

    python evaluate.py --task nq-swap --method greedy,decore-entropy --model M --data FILE
                       --demos FILE --out DIR
    python evaluate.py --task nq-swap --data FILE --demos FILE --dry-run    print the prompts
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

import torch

import cli
from paper import decoders, judges, report, runs
from paper.decoding import Benchmark, encode, run
from paper.report import stored
from paper.tasks import MINIATURE, PAPER, data, find, metrics, prompts
from program.settings import default_num_heads, method_settings
from runtime.files import commit
from runtime.parallel import Ranks
from runtime.weights import fingerprint

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


def main():
    commands = {"rescore": rescore, "report": report.main}
    first, *rest = sys.argv[1:] or [""]
    return commands[first](rest) if first in commands else evaluate(sys.argv[1:])


def evaluate(argv):
    """A sweep. Reads and checks everything before the first run."""
    args = make_parser().parse_args(argv)
    tasks, methods = chosen_tasks(args.task), cli.full_names(args.method, args.amateur)
    reason = f"on {', '.join(task.name for task in tasks)}"
    cli.refuse_unused(
        args, {name: reason for name, used in USED_BY_TASK.items() if not any(map(used, tasks))}
    )
    benchmarks = [
        Benchmark(task, *data.load(task, args.data, args.demos, args.limit)) for task in tasks
    ]
    cli.check_options(args, methods)
    if set(methods) <= {"greedy", "masked", "ad"}:
        cli.refuse_unused(args, {"no_renormalise": f"on {', '.join(methods)}"})
    if args.dry_run:
        return dry_run(args, benchmarks)
    for task in tasks:
        for problem in metrics.problems(task):
            print(f"{task.name}: {problem}", file=sys.stderr)
    ranks = Ranks(args.tp, args.device)
    model, tokenizer, amateur = cli.load_models(args, ranks.shard)
    setups = make_setups(args, methods, model, amateur)
    fingerprints = ranks.share(
        lambda: [fingerprint(name) if name else None for name in (args.model, args.amateur)]
    )
    for bench, settings, fields in fitting_runs(args, benchmarks, setups, model, tokenizer):
        header = make_header(args, bench, fields, model, ranks, fingerprints)
        path = Path(args.out) / f"{run_name(header)}.jsonl"
        try:
            lines = run(bench, header, settings, path, model, tokenizer, ranks)
        except KeyboardInterrupt:
            print("\ninterrupted: the same command continues", file=sys.stderr)
            raise
        if ranks.rank == 0:
            lines = judges.judge(lines, path, bench.task)
            print_means(lines, stored.values_of(path, bench.task, lines), {"run": str(path)})


def make_parser():
    p = cli.parser(
        "Run benchmarks: a task × a method × a model.",
        epilog="Two more commands, each with a --help: "
        "`python evaluate.py rescore FILE` computes the metrics of stored runs again, "
        "`python evaluate.py report DIR` makes tables of a folder's runs.",
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


def chosen_tasks(text):
    groups = {"all": [task.name for task in PAPER], "miniature": [task.name for task in MINIATURE]}
    names = [name for part in text.split(",") for name in groups.get(part, [part])]
    return [find(name) for name in dict.fromkeys(names)]


def make_setups(args, methods, model, amateur):
    """[(settings of decoders.generate, fields of the header)] for each combination of options.

    Decodes one token with each, so that an option that does not fit the model is refused early."""
    swept = {
        "num_heads": args.num_heads or [default_num_heads(model)],
        "alpha": args.alpha or [cli.DEFAULTS["alpha"]],
        "seed": (args.seed or [cli.SEED]) if args.random_heads else [None],
    }
    setups = []
    for method in methods:
        used = [
            values if method in cli.OPTIONS[name].methods else [None]
            for name, values in swept.items()
        ]
        for combination in itertools.product(*used):
            values = dict(zip(swept, combination, strict=True))
            settings = method_settings(
                method, argparse.Namespace(**vars(args) | values), model, amateur
            )
            without = {"ids_without_context": [0]} if method == "cad" else {}
            decoders.generate(model, [0], max_new_tokens=1, **settings, **without)
            heads = settings.get("heads", settings.get("amateur_heads"))
            fields = (
                settings
                | values
                | {
                    "method": method,
                    "heads": heads and [f"{layer}-{head}" for layer, head in heads],
                    "random_heads": args.random_heads if "heads" in settings else None,
                    "amateur": amateur.name if "amateur" in settings else None,
                }
            )
            fields.pop("amateur_heads", None)
            setups.append((settings, fields))
    return setups


def fitting_runs(args, benchmarks, setups, model, tokenizer):
    """[(benchmark, settings, fields)] of all runs: every benchmark with every setup that fits it.

    Prints a line for each pair that does not fit. ValueError if none fits."""
    template_args = cli.benchmark_template_args(tokenizer, args.template_args)
    native = "mistral" if model.config.model_type == "mistral" else "chat"
    native = native if tokenizer.has_chat_template else "plain"
    fitting, problems = [], []
    for bench in benchmarks:
        layout = bench.task.layout or args.layout or native
        bench = bench._replace(
            layout=layout, template_args=None if layout == "plain" else template_args
        )
        encoded = encode(bench, tokenizer)
        # The last token of an answer is not read.
        lengths = [len(e.prompt) + max(map(len, e.answers or [[0]])) - 1 for e in encoded]
        other_ends = sum(
            e.without_context is not None and e.without_context[-1:] != e.prompt[-1:]
            for e in encoded
        )
        for settings, fields in setups:
            context, name = min(
                (m.config.max_positions, m.name) for m in (model, settings.get("amateur") or model)
            )
            problem = None
            if max(lengths) > context:
                problem = (
                    f"{sum(length > context for length in lengths)} of {len(lengths)} "
                    "prompts are longer than "
                    f"the {context} positions of {name} (the longest: {max(lengths)} tokens)"
                )
            elif fields["method"] == "cad" and not bench.task.without_context:
                problem = "its prompts have no context to leave out"
            elif fields["method"] == "cad" and other_ends:
                problem = (
                    f"without context {other_ends} of its prompts end in another token "
                    f"(--layout {layout})"
                )
            if problem:
                problems.append(f"{bench.task.name} with {fields['method']} is left out: {problem}")
            else:
                fitting.append((bench, settings, fields))
    if not fitting:
        raise ValueError(problems[0])
    if args.template_args and all(bench.layout == "plain" for bench, *_ in fitting):
        raise ValueError("--template-args has no effect: no prompt goes through a chat template")
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)
    return fitting


# ------------------------------------------------------------------------------ the header of a run


def make_header(args, bench, fields, model, ranks, fingerprints):
    """The first line of a run's file: what determines its lines, the software, the machine."""
    task = bench.task
    device = (
        torch.cuda.get_device_name(model.device)
        if model.device.type == "cuda"
        else platform.machine()
    )
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
        "batch_size": args.batch_size or 16,
        "max_new_tokens": None if task.choice else args.max_new_tokens or task.max_new_tokens,
        "mask_prompt": None
        if task.choice
        else fields.get("mask_prompt"),  # scoring masks every position
        "renormalise": not args.no_renormalise if task.choice else None,
        "seed": cli.SEED if fields["seed"] is None else fields["seed"],
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
