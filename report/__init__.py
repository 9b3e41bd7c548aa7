"""Tables, figures and pages from stored runs and head files.

    stored.py        files → runs with their setups         published.py   the paper's tables
    tables.py        runs → tables, CSV                     figures.py     runs → the paper's figures
    significance.py  statistical tests                      heads.py       head files → table and figures
    page.py          one item of a run as a page"""

import sys

import cli


def main(argv):
    """`evaluate.py report …`: DIR, `page RUN.jsonl --item K` or `heads [MODEL|FILE …]`."""
    if argv[:1] == ["page"]:
        from report import page
        return page.main(argv[1:])
    try:
        from report import figures, heads, stored, tables
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install matplotlib scipy statsmodels") from None
    if argv[:1] == ["heads"]:
        return heads.main(argv[1:])
    p = cli.parser("Markdown tables of all runs of a folder with the paper's values. Two more commands, each with a "
                   "--help: `report page` shows one item of a run, `report heads` the retrieval scores of head files.")
    p.add_argument("folder", metavar="DIR")
    p.add_argument("--csv", action="store_true", help="one line per run and metric, every metric")
    p.add_argument("--plots", metavar="OUT", help="draw the paper's figures into this folder")
    p.add_argument("--iti", action="append", default=[], metavar="CHECKPOINT=MODEL", help="greedy runs of this "
                   "checkpoint are the method ITI of this model (built in: " + ", ".join(stored.ITI) + ")")
    args = p.parse_args(argv)
    if any(pair.count("=") != 1 for pair in args.iti):
        raise ValueError("--iti takes CHECKPOINT=MODEL, two names")
    runs, skipped = stored.collect(args.folder, stored.ITI | dict(pair.split("=") for pair in args.iti))
    for path, reason in skipped + stored.group(runs)[1]:
        print(f"skipped: {path}: {reason}", file=sys.stderr)
    if not runs:
        raise ValueError(f"{args.folder}: no runs to report")
    pictures = figures.draw_all(runs, args.plots) if args.plots else []
    if args.csv:
        return tables.write_csv(runs)
    tables.print_tables(tables.all_tables(runs))
    for path, caption in pictures:
        print(f"![{caption}]({path.parent.name}/{path.name})\n")
