"""Tables, figures and pages from stored runs and head files.

    stored.py   files → runs with their setups         published.py   the paper's tables
    frame.py    runs → one table of all their values   figures.py     runs, head files → the paper's figures
    tables.py   that table → tables in Markdown        item.py        one item of a run as a page"""

import sys
from pathlib import Path

import cli


def main(argv):
    """`evaluate.py report …`: DIR, `page RUN.jsonl --item K` or `heads [MODEL|FILE …]`."""
    try:
        if argv[:1] == ["page"]:
            from report import item
            item.main(argv[1:])
        elif argv[:1] == ["heads"]:
            report_heads(argv[1:])
        else:
            report_runs(argv)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install pandas scipy, and matplotlib for --plots") from None


def report_runs(argv):
    from report import stored, tables
    from report.frame import make_frame
    p = cli.parser("Markdown tables of all runs of a folder with the paper's values. Two more commands, each with a "
                   "--help: `report page` shows one item of a run, `report heads` the retrieval scores of head files.")
    p.prog += " report"
    p.add_argument("folder", metavar="DIR", help="folder of runs, searched with its subfolders")
    p.add_argument("--csv", action="store_true", help="one line per run and metric, every metric")
    p.add_argument("--plots", metavar="OUT", help="draw the paper's figures into this folder")
    p.add_argument("--iti", action="append", default=[], metavar="CHECKPOINT=MODEL", help="greedy runs of this "
                   "checkpoint are the method ITI of this model (built in: " + ", ".join(stored.ITI) + ")")
    args = p.parse_args(argv)
    if any(pair.count("=") != 1 for pair in args.iti):
        raise ValueError("--iti takes CHECKPOINT=MODEL, two names")
    if args.plots:
        from report import figures
    runs, skipped = stored.collect(args.folder, stored.ITI | dict(pair.split("=") for pair in args.iti))
    frame, repeated = make_frame(runs) if runs else (None, [])
    for path, reason in skipped + repeated:
        print(f"skipped: {path}: {reason}", file=sys.stderr)
    if not runs:
        raise ValueError(f"{args.folder}: no runs to report")
    pictures = figures.draw_all(frame, Path(args.plots)) if args.plots else []
    if args.csv:
        values = frame.drop(columns=["run", "setup", "title", "headline", "cell"]).rename(columns={"file": "run"})
        return print(values.to_csv(index=False), end="")
    tables.print_tables(tables.all_tables(frame))
    for path in pictures:
        print(f"![{path.stem}]({path.parent.name}/{path.name})\n")


def report_heads(argv):
    from heads import find_file, load_scores
    from report import published, tables
    p = cli.parser("Retrieval scores by rank, with the paper's.")
    p.prog += " report heads"
    p.add_argument("files", nargs="*", default=[row["model"] for row in published.table("paper_heads")],
                   metavar="MODEL|FILE", help="models with a head file, or head files (default: the paper's models)")
    p.add_argument("--plots", metavar="OUT", help="draw a map of the heads into this folder")
    args = p.parse_args(argv)
    files = {path: load_scores(path) for path in map(find_file, args.files)}
    tables.print_tables([("Retrieval scores", *tables.heads_table(files))])
    if args.plots:
        from report import figures
        path = Path(args.plots, "head-maps.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figures.head_maps(files).savefig(path)
        print(path)
