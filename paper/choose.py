"""Chooses a method and its setting on questions of your own, whose passages contradict what the
model knows, and tests the choice once on others:

    python evaluate.py choose --data conflict.csv --agreement agreement.csv --model M --out runs

It runs commands of evaluate.py and heads.detect, and prints each; any of them can be run alone. The
same command goes on after an interruption. docs/choosing.md explains the steps."""

import os
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from cli.entry import continuing
from cli.options import number, parser, positive
from paper.known import choose_rows
from paper.report import stored
from paper.tasks import data, find_task
from runtime.errors import InputError
from runtime.files import checkpoint_name
from runtime.statistics import paired

INTERRUPTED = 130  # status of a program after Ctrl-C
ROOT = Path(__file__).parents[1]
N_HEADS = "1,2,3,5,10"
# The settings that are compared; heads are ranked by effect.
GRID = (
    "--method greedy",
    f"--method decore-entropy --num-heads {N_HEADS}",
    f"--method decore-static --alpha 1,2 --num-heads {N_HEADS}",
    "--method cad --alpha 0.25,0.5,1,1.5,2",
)
GREEDY = ("--method", "greedy")
LEAST = 24  # known questions: a test of 12 shows a gain of 6 items without a loss, and no smaller
SHOWN = 0.05


@continuing()
def main(argv):
    args, options = parse(argv)
    passages = {"conflict": args.data, "agreement": args.agreement}
    passages = {name: file for name, file in passages.items() if file}
    limit = ["--max-new-tokens", args.max_new_tokens] if args.max_new_tokens else []
    heads = args.out / "heads.json"
    of_heads = ["--heads", str(heads), "--measure", "effect"]

    def evaluate(file, out, more):
        """Run a setting on the passages of a file, into a folder."""
        command = ["evaluate.py", "--task", "qa", *options, *limit, *more]
        run([*command, "--data", str(file), "--out", str(out)], args.dry_run)

    def evaluate_all(part, settings):
        for name, file in passages.items():
            for setting in settings:
                masked = of_heads if "--num-heads" in setting else []
                evaluate(file, args.out / part / name, [*rows[part], *setting, *masked])

    closed = args.out / "closed"
    model = Path(checkpoint_name(args.model)).name
    for run_file in closed.glob("*.jsonl"):
        if not run_file.name.startswith(f"qa.{model}."):
            raise InputError(f"{run_file} is of another model than {model}; choose another --out")
    evaluate(args.data, closed, [*GREEDY, "--closed-book"])
    path = next(closed.glob("*.jsonl"), None)
    task = find_task("qa")
    items, *_ = data.load_data(task, args.data, None)
    if path:
        items, _ = choose_rows(task, items, path, known=True)
    words = "known" if path else "(those that are known, once the first command has run)"
    parts = split(len(items), args.rank, args.choose)
    sizes = ", ".join(f"{n} to {part}" for part, (_, n) in parts.items())
    print(f"{len(items)} questions {words}: {sizes}")
    rows = {}  # the options of the items of each part
    for part, (first, n) in parts.items():
        rows[part] = ["--known", str(path or closed / "….jsonl")]
        rows[part] += ["--sample", str(n), "--seed", str(args.seed)]
        rows[part] += ["--skip", str(first)] * (first > 0)
    rank = ["-m", "heads.detect", "--questions", str(args.data), *options, *rows["rank"]]
    run([*rank, "--out", str(heads)], args.dry_run or heads.exists())
    evaluate_all("choose", [setting.split() for setting in GRID])
    if args.dry_run:
        return
    chosen = choose(args.out / "choose", passages, args.points)
    evaluate_all("test", [GREEDY, *chosen.values()])
    advise(args.out / "test", passages, chosen, of_heads)


def parse(argv):
    """(the options, those that all commands get)."""
    p = parser(__doc__, prog="evaluate.py choose")
    add = p.add_argument
    add("--data", required=True, type=Path, metavar="FILE", help="with `memory`")
    add("--agreement", type=Path, metavar="FILE", help="the same, passages are right")
    add("--model", required=True, metavar="M")
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help="(default: runs)")
    add("--seed", type=number(int, 0), default=1234, help="of the split")
    add("--rank", type=positive, metavar="N", help="questions that rank the heads")
    add("--choose", type=positive, metavar="N", help="questions that choose")
    add(
        "--points",
        type=number(float, 0),
        default=2,
        help="a setting may lose so many points in agreement (default: 2)",
    )
    add("--max-new-tokens", metavar="N", help="of the answers")
    add("--dry-run", action="store_true", help="print the commands and numbers only")
    p.epilog = "All other options go to each command, such as --transformers, --dtype, --system."
    args, options = p.parse_known_args(argv)
    return args, ["--model", args.model, *options]


def split(n, rank=None, choose=None):
    """{part: (its first question, how many)} of n known questions: a quarter, at most 50, ranks the
    heads, a quarter, at most 100, chooses, the others test."""
    if n < LEAST:
        raise InputError(
            f"{n} known questions are too few to show anything: give at least {LEAST}, better 300"
        )
    rank = rank or min(50, n // 4)
    choose = choose or min(100, n // 4)
    left = n - rank - choose
    if left < LEAST // 2:
        raise InputError(
            f"--rank {rank} and --choose {choose} leave {max(0, left)} of {n} known questions to "
            f"test: at least {LEAST // 2} are needed"
        )
    return {"rank": (0, rank), "choose": (rank, choose), "test": (rank + choose, left)}


def run(command, only_print=False):
    """Print a command, and run it. Ends the program if it fails."""
    print(f"$ {shlex.join(['python', *command])}", flush=True)
    if only_print:
        return
    if command[0] == "evaluate.py":
        command = [str(ROOT / command[0]), *command[1:]]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen([sys.executable, *command], env=os.environ | {"PYTHONPATH": paths})
    try:
        status = process.wait()
    except KeyboardInterrupt:
        status = process.wait()  # Ctrl-C ends it too
        if status != INTERRUPTED:  # else it has said that the command continues
            raise
    if status:
        raise SystemExit(status)


def shares(folder, passages):
    """{options of a setting: {passages: 1 or 0 for each item}}. 1: the passage's answer."""
    runs = defaultdict(dict)
    for name in passages:
        for part in stored.collect(folder / name):
            runs[options_of(part.header)][name] = [row["passage"] for row in part.values]
    return runs


def mean(values):
    return 100 * sum(values) / len(values)


def choose(folder, passages, points):
    """{"DeCoRe" and "CAD": the options of the best setting}. Prints what each setting did.

    The best follows most passages in conflict, of those that lose at most `points` of the right
    answers in agreement against greedy decoding; else the one that loses least."""
    runs = shares(folder, passages)
    greedy = runs[GREEDY]
    rows = []
    for setting, values in runs.items():
        lost = mean(greedy["agreement"]) - mean(values["agreement"]) if "agreement" in values else 0
        rows.append((mean(values["conflict"]), lost, setting))
    rows.sort(key=lambda row: -row[0])
    print("\nthe passage's answers, lost in agreement, setting")
    for share, lost, setting in rows:
        print(f"{share:5.1f} %  {lost:5.1f}  {' '.join(setting)}")
    print()
    chosen = {}
    for label, method in (("DeCoRe", "decore"), ("CAD", "cad")):
        candidates = [row for row in rows if row[2][1].startswith(method)]
        best = min(candidates, key=lambda row: (max(0, row[1] - points), -row[0]))
        chosen[label] = best[2]
    return chosen


def options_of(header):
    """The options of a stored run's setting."""
    options = ["--method", header["method"]]
    for name in ("alpha", "num_heads"):
        if header.get(name) is not None:
            options += ["--" + name.replace("_", "-"), str(header[name])]
    return tuple(options)


def advise(folder, passages, chosen, of_heads):
    """Print how the choices did on the test's items, and the options to paste."""
    runs = shares(folder, passages)
    greedy = runs[GREEDY]
    print(f"\non {len(greedy['conflict'])} other questions, against greedy decoding:")
    shown = {}
    for label, setting in chosen.items():
        for name in passages:
            values = runs[setting][name]
            difference, interval, p = paired(values, greedy[name])
            points, *ends = (f"{100 * x:+.1f}" for x in (difference, *(interval or ())))
            within = f" ({' to '.join(ends)})" if ends else ""
            shares_of = f"{label:6} {name:9} {mean(greedy[name]):5.1f} → {mean(values):5.1f} %"
            print(f"{shares_of}, {points} points{within}, p {p:.2g}")
            if name == "conflict" and difference > 0 and p < SHOWN / len(chosen):
                shown[label] = mean(values)
    if not shown:
        print("no gain is shown: use greedy decoding (--method greedy), or test on more questions")
        return
    best = max(shown, key=shown.get)
    print(f"use {best}: {shlex.join([*chosen[best], *(of_heads if best == 'DeCoRe' else [])])}")
