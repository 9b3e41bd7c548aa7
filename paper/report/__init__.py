"""Compares stored runs with the paper, and draws its tables and figures.

stored.py   files → runs with their setups       figures.py   runs → figures
frame.py    runs → one table of all values       heads.py     scores of head files
tables.py   that table → tables in Markdown      paired.py    differences on the same items"""

import cli
from paper.report import heads, stored


def main(argv):
    """`evaluate.py report …`: DIR, or `heads [MODEL|FILE …]`."""
    try:
        if argv[:1] == ["heads"]:
            heads.main(argv[1:])
        else:
            report(argv)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install pandas matplotlib") from None


def report(argv):
    p = cli.parser(
        "Markdown tables of all runs of a folder with the paper's values. One more command: "
        "`report heads` prints the retrieval scores of head files."
    )
    p.prog += " report"
    p.add_argument("folder", metavar="DIR", help="folder of runs, searched with its subfolders")
    p.add_argument("--csv", action="store_true", help="one line per run and metric, every metric")
    p.add_argument("--commands", action="store_true", help="add the command of each run")
    p.add_argument("--plots", metavar="OUT", help="draw the paper's figures into this folder")
    args = p.parse_args(argv)
    from paper.report import frame, tables

    if args.plots:
        from paper.report import figures  # before the runs are read, which may take minutes
    runs = stored.collect(args.folder)
    if not runs:
        raise ValueError(f"{args.folder}: no runs to report")
    values = frame.make_frame(runs)
    pictures = figures.draw_all(values, args.plots) if args.plots else []
    if args.csv:
        print(frame.as_csv(values), end="")
        return
    tables.print_tables(tables.all_tables(values))
    for path, caption in pictures:
        print(f"![{caption}]({path.parent.name}/{path.name})\n")
    if args.commands:
        tables.print_commands(runs)
