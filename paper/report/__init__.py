"""Compares stored runs with greedy decoding and with the paper, in tables and figures.

stored.py    files → runs with their setups       tables.py   results → tables, a verdict
results.py   runs → results                       heads.py    scores of head files
figures.py   results → figures

Intervals and tests are in runtime/statistics.py."""

import csv
import os
import sys

from cli.options import parser
from paper.report import heads, stored
from runtime.errors import InputError


def main(argv):
    """`evaluate.py report …`: DIR, or `heads [MODEL|FILE …]`."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's, which may not be installed here
    try:
        if argv[:1] == ["heads"]:
            heads.main(argv[1:])
        else:
            report(argv)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install matplotlib") from None


def report(argv):
    p = parser(
        "A table of the runs of each task and model, with the differences to greedy decoding, and "
        "a verdict. One more command: `report heads` prints the retrieval scores of head files."
    )
    p.prog += " report"
    p.add_argument(
        "folder", metavar="DIR", help="folder of runs, searched with its subfolders, or packed runs"
    )
    p.add_argument(
        "--all",
        action="store_true",
        help="add the paper's tables with every metric, and tables of texts",
    )
    p.add_argument("--commands", action="store_true", help="add the command of each run")
    heads.add_plots(p, "draw the differences into this folder")
    form = p.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="instead: the tables in LaTeX")
    form.add_argument(
        "--csv", action="store_true", help="instead: one line per run and metric, every metric"
    )
    args = heads.parse(p, argv)
    from paper.report import results, tables

    if args.plots:
        from paper.report import figures  # before the runs are read, which may take minutes
    runs = stored.collect(args.folder, texts=args.all or args.csv)
    if not runs:
        raise InputError(f"{args.folder}: no runs to report")
    runs = results.select(runs)
    short = results.short_tables(runs)
    show = tables.print_latex if args.latex else tables.print_tables
    if args.csv:
        lines = [*results.lines(runs)]
        writer = csv.DictWriter(sys.stdout, [*lines[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    else:
        show(map(tables.short_table, short.values()))
        show(tables.all_tables(runs) if args.all else ())
    pictures = []
    if args.plots:  # errors leave the tables
        pictures = figures.draw_all([*short.values()], args.plots, args.format, args.width)
    if args.csv or args.latex:
        return
    for path, caption in pictures:
        print(f"![{caption}]({path.parent.name}/{path.name})\n")
    if args.commands:
        tables.print_commands(runs)
    tables.print_notes(short)
