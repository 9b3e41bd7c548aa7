"""The command lines of evaluate.py: benchmarks, and the paper's rows; what runs need of them."""

from copy import copy
from pathlib import Path

from cli.options import (
    DECODER,
    add_method_arguments,
    add_model_arguments,
    check_options,
    comma_list,
    full_names,
    one_of,
    parse_with_decoders,
    parser,
    positive,
    refuse_unused,
)
from decoders.setup import METHODS, OPTIONS, method_names
from paper import plan, printed
from paper.tasks import TASKS, find_tasks, prompts
from runtime.errors import InputError

SAMPLE_SEED = 1234
NOT_PLANNED = (  # of a sweep alone
    "known unknown layout max_new_tokens min_new_tokens draft seed random_heads"
).split()


def sample_seed(args):
    """The seed of --sample; None without a sample. --seed is that of random heads, if there are
    any."""
    if not args.sample:
        return None
    seeds = [] if args.random_heads else args.seed or []
    if len(seeds) > 1:
        raise InputError("--seed takes several numbers with --random-heads only")
    return seeds[0] if seeds else SAMPLE_SEED


def for_planned(args, runs):
    """The options of the paper's runs of one checkpoint, which are in bfloat16 by default."""
    args = copy(args)
    if runs[0].checkpoint:
        args.model = runs[0].checkpoint
    elif args.dtype == "auto":
        args.dtype = "bfloat16"
    if not any(run.setup.amateur for run in runs):
        args.amateur = None
    return args


def parse(argv):
    """The options of a sweep. InputError for those without effect."""
    args = parse_with_decoders(make_parser, argv)
    tasks = find_tasks(args.task).values()
    methods = full_names(args.method, args.amateur)
    unused = set.intersection(*map(unused_by, tasks))
    if args.demos and args.demos.is_dir():
        unused.discard("demos")  # a folder for all tasks
    names = ", ".join(task.name for task in tasks)
    refuse_unused(args, dict.fromkeys(sorted(unused), f"on {names}"))
    if args.batch_size > 1:
        refuse_unused(args, {"draft": "on several prompts at once: add --batch-size 1"})
    check_options(args, methods, seeded=args.sample)
    args.sample_seed = sample_seed(args)
    return args


def unused_by(task):
    """The options of a sweep without effect on a task."""
    unused = {"max_new_tokens", "min_new_tokens", "draft", "eos"} if task.choice else set()
    unused |= {name for name, option in OPTIONS.items() if option.choice is (not task.choice)}
    if task.layout:
        unused.add("layout")
    if task.shots == 0:
        unused.add("demos")
    if not task.own:
        unused |= {"template", "system", "closed_book", "known", "unknown"}
    return unused


def make_parser():
    p = parser(
        "Run benchmarks: a task × a method × a model.",
        epilog="More commands, each with a --help: evaluate.py fetch DIR downloads the data, "
        "paper runs the rows of the paper's tables, rescore FILE computes the metrics of stored "
        "runs again, report DIR makes tables of a folder's runs.",
    )
    add_run_arguments(p, required="--task")
    add_method_arguments(p, method_names(METHODS), exclude=["without_context"])
    add = p.add_argument
    add("--decoder", **DECODER)
    add_prompt_arguments(p)
    add(
        "--closed-book",
        action="store_true",
        help="qa: leave the contexts out, to see which rows are answered with their `memory`",
    )
    add("--max-new-tokens", type=positive, metavar="N", help="(default: the task's)")
    add(
        "--min-new-tokens",
        type=positive,
        metavar="N",
        help="an answer ends after so many tokens at the earliest (default: it may be empty)",
    )
    add(
        "--draft",
        type=positive,
        metavar="K",
        help="draft up to K tokens from the text and check them in one pass, with --batch-size 1: "
        "the same answers in fewer passes (default: none)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the prompts as JSON lines, by default in the layout chat, and load no model",
    )
    return p


def parse_paper(argv):
    """The options of the paper's rows. InputError for those without effect."""
    args = paper_parser().parse_args(argv)
    if not args.plan:
        refuse_unused(args, {"json": "without --plan"})
    args.sample_seed = sample_seed(args)
    return args


def paper_parser():
    p = parser("Run what the paper's tables hold of a model; with --plan, list the runs.")
    p.prog += " paper"
    p.set_defaults(**dict.fromkeys(NOT_PLANNED))
    add_run_arguments(p, required="--data")
    tables = [*plan.ORDER, "all", *dict.fromkeys(row["table"] for row in printed.csv_rows("paper"))]
    add = p.add_argument
    add(
        "--table",
        type=comma_list(one_of(tables, "table")),
        default=["main"],
        metavar="NAME[,NAME…]",
        help=f"{', '.join(plan.ORDER)}, all, or a table of paper/paper.csv (default: main)",
    )
    add(
        "--method",
        type=comma_list(one_of(plan.PLANNED, "method")),
        default=plan.PLANNED,
        metavar="M[,M…]",
        help=f"only these methods: {', '.join(plan.PLANNED)}",
    )
    add("--like", metavar="MODEL", help="the runs of this model of the paper")
    add("--amateur", default=plan.AMATEUR, metavar="M2", help=f"(default: {plan.AMATEUR})")
    add("--plan", action="store_true", help="list the runs, and what is missing for them")
    add("--json", action="store_true", help="with --plan: a JSON line for each run")
    return p


def add_run_arguments(p, required):
    """Add the options of both command lines. required: "--task" or "--data"."""
    add_model_arguments(p)
    add = p.add_argument
    add(
        "--task",
        required=required == "--task",
        default="all",
        metavar="T[,T…]",
        help=f"{', '.join(TASKS)}; all: those of the paper",
    )
    add(
        "--data",
        required=required == "--data",
        type=Path,
        metavar="FILE",
        help="the data: a file, or a folder that contains it, as `fetch` makes it (default: "
        "downloaded, if it is on the Hugging Face hub)",
    )
    add_item_arguments(p)
    add(
        "--batch-size", type=positive, default=16, metavar="B", help="prompts at once (default: 16)"
    )
    add("--tp", type=positive, default=1, metavar="K", help="ranks that share one model (torchrun)")
    add("--out", default="runs", metavar="DIR", help="folder of the runs (default: runs)")


def add_item_arguments(p):
    """Options that choose items and demonstrations."""
    p.add_argument(
        "--demos",
        type=Path,
        metavar="FILE",
        help="demonstrations: JSON lines, or a folder (default: from "
        "the data's folder, else the task's own, else the first items of the data)",
    )
    items = p.add_mutually_exclusive_group()
    items.add_argument(
        "--limit", type=positive, metavar="K", help="the first K items (default: all)"
    )
    items.add_argument(
        "--sample",
        type=positive,
        metavar="K",
        help="K random items, each split in its share; a larger K continues the runs. Without "
        "--random-heads, --seed is the sample's (default, and with --random-heads: 1234)",
    )
    p.add_argument(
        "--skip",
        type=positive,
        metavar="K",
        help="leave out the first K items, of the sample if there is one: others than those of an "
        "earlier run",
    )


def add_prompt_arguments(p):
    """Options of prompts, and of own questions."""
    p.add_argument(
        "--layout", choices=prompts.LAYOUTS, help="layout of the prompts (default: the model's)"
    )
    p.add_argument(
        "--template",
        type=Path,
        metavar="FILE",
        help="qa: the prompt, a text with {question} and, on a line of its own, {context}",
    )
    p.add_argument("--system", metavar="TEXT", help="qa: the system turn; '' for none")
    rows = p.add_mutually_exclusive_group()
    rows.add_argument(
        "--known",
        type=Path,
        metavar="RUN.jsonl",
        help="qa: only the rows that this closed-book run answered with their `memory`",
    )
    rows.add_argument(
        "--unknown", type=Path, metavar="RUN.jsonl", help="qa: only the rows that it did not"
    )
