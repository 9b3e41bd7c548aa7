"""Retrieval scores of head files: the paper's table, heads in common, and maps of all heads.

python evaluate.py report heads [MODEL|FILE …] [--plots OUT]"""

from collections import Counter
from itertools import combinations

from cli.options import number, parser, refuse_unused
from heads.reader import find_file, find_measures, read_scores
from paper import printed
from runtime.files import read_json

COMPARED = (5, 10, 20, 50)  # numbers of the best heads
RETRIEVAL = 0.1  # the paper counts heads above this score as retrieval heads


def main(argv):
    paper = {row["model"]: row for row in printed.csv_rows("paper_heads")}
    p = parser(
        "Retrieval scores by rank, with the paper's; of the models or files that are named, also "
        "how many of their best heads they have in common."
    )
    p.prog += " report heads"
    p.add_argument(
        "files",
        nargs="*",
        metavar="MODEL|FILE",
        help="models with a head file, or head files (default: the paper's models)",
    )
    add_plots(p, "draw a map of the heads of each model into this folder")
    args = parse(p, argv)
    from paper.report import tables

    files = {}
    for path in map(find_file, args.files or paper):
        files[path] = {measure: read_scores(path, measure) for measure in find_measures(path)}
    stems = Counter(path.stem for path in files)
    labels = {path: path.stem if stems[path.stem] == 1 else str(path) for path in files}
    _, *ranks = printed.csv_rows("paper_heads")[0]
    rows = []
    for path, scores in files.items():
        if "copy" not in scores:
            continue
        ranked = sorted(scores["copy"].values(), reverse=True)
        row = {
            "model": labels[path],
            "heads": f"{len(ranked):,}",
            "samples": str(read_json(path).get("samples", "unknown")),
            f"above {RETRIEVAL}": str(sum(score > RETRIEVAL for score in ranked)),
        }
        for rank in ranks:
            if int(rank) <= len(ranked):
                row[rank] = f"{ranked[int(rank) - 1]:.4f}"
        rows.append(row)
        if path.stem in paper:
            rows.append(paper[path.stem] | {"model": "the paper"})
    notes = ["Means over the samples of each head file."]
    if rows:
        tables.print_tables([("Retrieval scores by rank", rows, notes)])
    if args.files and (rows := common_rows(files, labels)):
        notes = ["Two random sets of N of H heads have N²/H in common on average."]
        tables.print_tables([("Heads in common among the best N", rows, notes)])
    if args.plots:
        from paper.report import figures

        if maps := figures.head_maps(files, args.width):
            print(figures.save(maps, args.plots, f"head-maps.{args.format}"))


def add_plots(p, what):
    p.add_argument("--plots", metavar="OUT", help=what)
    p.add_argument("--format", choices=("png", "pdf", "svg"), help="of the figures (default: png)")
    p.add_argument(
        "--width",
        type=number(float, 2, 20),
        metavar="INCHES",
        help="of the figures, such as 3.3, a column of two (default: 7)",
    )


def parse(p, argv):
    """The options. InputError for those of figures without --plots."""
    args = p.parse_args(argv)
    if not args.plots:
        refuse_unused(args, dict.fromkeys(("format", "width"), "without --plots"))
    args.format, args.width = args.format or "png", args.width or 7.0
    return args


def common_rows(files, labels):
    """Rows for the pairs of files of one measure, and of measures of one file, that rank the same
    heads. files: {path: {measure: scores}}."""
    rankings = {}
    for path, of_measures in files.items():
        for measure, scores in of_measures.items():
            rankings[path, measure] = sorted(scores, key=scores.get, reverse=True)
    rows = []
    for ((file, a), first), ((other, b), second) in combinations(rankings.items(), 2):
        if set(first) == set(second) and (file == other or a == b):
            common = {f"N = {n}": str(len({*first[:n]} & {*second[:n]})) for n in COMPARED}
            rows.append({"heads": f"{labels[file]} {a} and {labels[other]} {b}"} | common)
    return rows
