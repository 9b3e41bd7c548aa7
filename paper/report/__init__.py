"""Tables, figures and pages from stored runs and head files.

stored.py        files → runs with their setups         figures.py     runs, head files → the paper's figures
frame.py         runs → one table of all their values   heads.py       head files → table of scores by rank
tables.py        that table → tables in Markdown        significance.py  statistical tests"""

import sys
from importlib import import_module

import cli


def main(argv):
    """`evaluate.py report …`: DIR, or `heads [MODEL|FILE …]`."""
    programs = {"heads": "paper.report.heads"}
    try:
        if argv and argv[0] in programs:
            return import_module(programs[argv[0]]).main(argv[1:])
        report(argv)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error}: pip install pandas scipy statsmodels, and matplotlib for --plots"
        ) from None


def report(argv):
    from paper.report import stored, tables
    from paper.report.frame import make_frame

    p = cli.parser(
        "Markdown tables of all runs of a folder with the paper's values. One more command: "
        "`report heads` prints the retrieval scores of head files."
    )
    p.prog += " report"
    p.add_argument("folder", metavar="DIR", help="folder of runs, searched with its subfolders")
    p.add_argument("--csv", action="store_true", help="one line per run and metric, every metric")
    p.add_argument("--plots", metavar="OUT", help="draw the paper's figures into this folder")
    p.add_argument(
        "--iti",
        action="append",
        default=[],
        metavar="CHECKPOINT=MODEL",
        help="greedy runs of this "
        "checkpoint are the method ITI of this model (built in: " + ", ".join(stored.ITI) + ")",
    )
    args = p.parse_args(argv)
    if any(pair.count("=") != 1 for pair in args.iti):
        raise ValueError("--iti takes CHECKPOINT=MODEL, two names")
    if args.plots:
        from paper.report import figures
    runs, skipped = stored.collect(
        args.folder, stored.ITI | dict(pair.split("=") for pair in args.iti)
    )
    frame, repeated = make_frame(runs)
    for path, reason in skipped + repeated:
        print(f"skipped: {path}: {reason}", file=sys.stderr)
    if frame.empty:
        raise ValueError(f"{args.folder}: no runs to report")
    pictures = figures.draw_all(frame, args.plots) if args.plots else []
    if args.csv:
        values = frame.drop(columns=["run", "setup", "title", "cell"]).rename(
            columns={"file": "run"}
        )
        return print(values.to_csv(index=False), end="")
    tables.print_tables(tables.all_tables(frame))
    for path, caption in pictures:
        print(f"![{caption}]({path.parent.name}/{path.name})\n")
