"""Retrieval scores of head files: the paper's table, and maps of all heads.

python evaluate.py report heads [MODEL|FILE …] [--plots OUT]"""

from pathlib import Path

import cli
from heads import find_file, load_scores
from paper import printed
from runtime.files import read_json

RETRIEVAL = 0.1  # the paper counts heads above this score as retrieval heads


def main(argv):
    paper = {row["model"]: row for row in printed.table("paper_heads")}
    p = cli.parser("Retrieval scores by rank, with the paper's.")
    p.prog += " report heads"
    p.add_argument(
        "files",
        nargs="*",
        default=list(paper),
        metavar="MODEL|FILE",
        help="models with a head file, or head files (default: the paper's models)",
    )
    p.add_argument(
        "--plots", metavar="OUT", help="draw a map of the heads of each model into this folder"
    )
    args = p.parse_args(argv)
    from paper.report import tables

    files = {path: load_scores(path) for path in map(find_file, args.files)}
    _, *ranks = printed.table("paper_heads")[0]
    rows = []
    for path, scores in files.items():
        ranked = sorted(scores.values(), reverse=True)
        row = {
            "model": path.stem,
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
    tables.print_tables([("Retrieval scores by rank", rows, notes)])
    if args.plots:
        from paper.report import figures

        path = Path(args.plots, "head-maps.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figures.head_maps(files).savefig(path)
        print(path)
