"""What stored runs and head files give: tables beside the paper's values, figures, pages.

    stored.py        files → runs, runs → setups            published.py   what the paper prints
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
        from report import figures, heads, tables
    except ImportError as error:
        raise ImportError(f"reports need matplotlib, scipy and statsmodels ({error}); "
                          "pip install matplotlib scipy statsmodels") from None
    if argv[:1] == ["heads"]:
        return heads.main(argv[1:])
    from report import stored
    p = cli.parser("Tables of all runs of a folder with the paper's values. Two more commands, each with a --help: "
                   "`report page` shows one item of a run, `report heads` the retrieval scores of head files.")
    p.add_argument("folder", metavar="DIR")
    p.add_argument("--markdown", action="store_true", help="tables in Markdown")
    p.add_argument("--csv", action="store_true", help="one line per run and metric, every metric")
    p.add_argument("--plots", metavar="OUT", help="draw the paper's figures into this folder")
    p.add_argument("--iti", action="append", default=[], metavar="CHECKPOINT=MODEL", help="greedy runs of this "
                   "checkpoint are the method ITI of this model (known: " + ", ".join(stored.ITI) + ")")
    args = p.parse_args(argv)
    if any(pair.count("=") != 1 for pair in args.iti):
        raise ValueError("--iti takes CHECKPOINT=MODEL, two names")
    runs, left_out = stored.collect(args.folder, stored.ITI | dict(pair.split("=") for pair in args.iti))
    for path, why in left_out + stored.grouped(runs)[1]:
        print(f"left out: {path}: {why}", file=sys.stderr)
    if not runs:
        raise ValueError(f"{args.folder}: no runs to report")
    pictures = figures.draw_all(runs, args.plots) if args.plots else []
    if args.csv:
        return tables.write_csv(list(tables.csv_rows(runs)))
    tables.show(tables.all_tables(runs, args.markdown), args.markdown)
    for path, caption in pictures:
        print(f"![{caption}]({path.parent.name}/{path.name})\n" if args.markdown else f"{path}: {caption}")
