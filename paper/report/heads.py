"""Retrieval scores of head files: the paper's table, the sorted scores and maps of all heads.

python evaluate.py report heads [MODEL|FILE …] [--plots OUT]"""

from pathlib import Path

import cli
from heads import find_file, load_scores
from paper import numbers
from paper.numbers import RETRIEVAL
from runtime.files import read_json

RANKS = (1, *range(10, 101, 10))


def main(argv):
    paper = {row["model"]: row for row in numbers.table("paper_heads")}
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
        "--plots", metavar="OUT", help="draw sorted scores and maps of the heads into this folder"
    )
    args = p.parse_args(argv)
    from paper.report import tables

    files = {path: load_scores(path) for path in map(find_file, args.files)}
    rows = []
    for path, scores in files.items():
        ranked = sorted(scores.values(), reverse=True)
        row = {
            "model": path.stem,
            "heads": f"{len(ranked):,}",
            "samples": str(read_json(path).get("samples", "unknown")),
            f"above {RETRIEVAL}": str(sum(score > RETRIEVAL for score in ranked)),
        }
        for rank in RANKS:
            row[f"rank {rank}"] = f"{ranked[rank - 1]:.4f}" if rank <= len(ranked) else "–"
        rows.append(row)
        if path.stem in paper:
            values = {f"rank {rank}": paper[path.stem][str(rank)] for rank in RANKS}
            rows.append({"model": "the paper"} | values)
    note = "Means over the samples of each head file."
    tables.print_tables([("Retrieval scores", rows, [note])])
    if args.plots:
        from paper.report import figures

        Path(args.plots).mkdir(parents=True, exist_ok=True)
        for name, draw in (("head-curves", figures.head_curves), ("head-maps", figures.head_maps)):
            path = Path(args.plots, f"{name}.png")
            draw(files).savefig(path)
            print(path)
