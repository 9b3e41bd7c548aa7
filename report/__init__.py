"""What is made of stored runs: `python evaluate.py report DIR`, and `report page RUN.jsonl --item K`.

    stored.py        files → runs, runs → setups            published.py   what the paper prints
    tables.py        runs → tables                          figures.py     runs and head files → the paper's figures
    significance.py  the tests behind both                  page.py        a text as a page, token by token
"""

import sys


def main(argv):
    import cli
    from report import page, stored, tables
    if argv[:1] == ["page"]:
        return page.main(argv[1:])
    p = cli.parser("All runs of a folder in tables, beside the paper's values. One item of a run as a page: "
                   "report page --help.")
    p.add_argument("folder", metavar="DIR")
    p.add_argument("--markdown", action="store_true", help="tables in Markdown")
    p.add_argument("--csv", action="store_true", help="one line per run and metric, every metric")
    p.add_argument("--plots", metavar="OUT", help="draw the paper's figures into this folder (pip install "
                   "'decore[report]')")
    p.add_argument("--heads", action="append", default=[], metavar="FILE", help="with --plots: a head file of your own "
                   "to draw beside the known ones")
    p.add_argument("--iti", action="append", default=[], metavar="CHECKPOINT=MODEL", help="greedy runs of this "
                   "checkpoint are the method ITI of this model (known: " + ", ".join(stored.ITI) + ")")
    args = p.parse_args(argv)
    if args.heads and not args.plots:
        raise ValueError("--heads is for the pictures: give --plots too")
    unclear = [pair for pair in args.iti if len(pair.split("=")) != 2]
    if unclear:
        raise ValueError(f"--iti {unclear[0]}: give it as CHECKPOINT=MODEL, two names")
    if args.plots:
        from report import figures  # before the runs are read, because it may say what to install
    runs, left_out = stored.collect(args.folder, stored.ITI | dict(pair.split("=") for pair in args.iti))
    for path, why in left_out + stored.grouped(runs)[1]:
        print(f"left out: {path}: {why}", file=sys.stderr)
    if not runs:
        raise ValueError(f"{args.folder}: no runs here" + (", only files that were left out" if left_out else ""))
    pictures = figures.draw_all(runs, args.plots, args.heads) if args.plots else []
    if args.csv:
        return tables.write_csv(list(tables.csv_rows(runs)))
    try:
        tables.show(tables.all_tables(runs, args.markdown), args.markdown)
    except ImportError as error:
        print(f"left out: the tests on entropies ({error}): pip install 'decore[report]'", file=sys.stderr)
    for path, caption in pictures:
        print(f"![{caption}]({path.parent.name}/{path.name})\n" if args.markdown else f"{path}: {caption}")
