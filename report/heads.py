"""Retrieval scores of head files: the paper's table, the sorted scores and maps of all heads.

    python evaluate.py report heads [MODEL|FILE …] [--plots OUT]"""

from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator

import cli
from heads import find_file, load_scores
from report import published, tables
from report.figures import CYCLE, MARKERS, add_foot, grid
from runtime.files import read_json

RANKS = (1, *range(10, 101, 10))
RETRIEVAL = 0.1                         # the paper counts heads above this score as retrieval heads


def main(argv):
    paper = {row["model"]: row for row in published.table("paper_heads")}
    p = cli.parser("Retrieval scores by rank, with the paper's.")
    p.add_argument("files", nargs="*", default=list(paper), metavar="MODEL|FILE",
                   help="models with a head file, or head files (default: the paper's models)")
    p.add_argument("--plots", metavar="OUT", help="draw sorted scores and maps of the heads into this folder")
    args = p.parse_args(argv)
    files, rows = {path: load_scores(path) for path in map(find_file, args.files)}, []
    for path, scores in files.items():
        ranked = sorted(scores.values(), reverse=True)
        rows.append({"model": path.stem, "heads": f"{len(ranked):,}",
                     "samples": str(read_json(path).get("samples", "unknown")),
                     f"above {RETRIEVAL}": str(sum(score > RETRIEVAL for score in ranked)),
                     **{f"rank {rank}": f"{ranked[rank - 1]:.4f}" if rank <= len(ranked) else "–" for rank in RANKS}})
        if path.stem in paper:
            rows.append(dict.fromkeys(rows[0], "") | {f"rank {rank}": paper[path.stem][str(rank)] for rank in RANKS}
                        | {"model": "the paper"})
    tables.print_tables([("Retrieval scores", rows, ["Means over the samples of each head file."])])
    if args.plots:
        Path(args.plots).mkdir(parents=True, exist_ok=True)
        for name, draw in (("head-curves", head_curves), ("head-maps", head_maps)):
            path = Path(args.plots, f"{name}.png")
            draw(files).savefig(path)
            print(path)


def head_curves(files):
    """Figure of the sorted retrieval scores of several models. files: {path: scores}"""
    figure, [ax] = grid(1, height=3.0)
    for i, (path, scores) in enumerate(files.items()):
        ax.semilogx(range(1, len(scores) + 1), sorted(scores.values(), reverse=True), ("-", "--")[i % 2],
                    color=CYCLE[i % len(CYCLE)], linewidth=1.4, marker=MARKERS[i % len(MARKERS)], markevery=0.2,
                    markersize=4, label=path.stem)
    ax.axhline(RETRIEVAL, color="#999999", linestyle=":", linewidth=1)
    ax.set(xlabel="rank of the head", ylabel="retrieval score")
    ax.legend()
    add_foot(figure, "retrieval scores of all heads, sorted")
    return figure


def head_maps(files):
    """Figure of the retrieval scores of several models by layer and head. files: {path: scores}"""
    figure, axes = grid(len(files), height=2.3)
    highest = max(1, *(max(scores.values()) for scores in files.values()))  # by the published rule a score may exceed 1
    for ax, (path, scores) in zip(axes, files.items(), strict=True):
        table = np.zeros(np.add(max(scores), 1))                            # [L, H]
        table[tuple(np.transpose([*scores]))] = [*scores.values()]
        image = ax.imshow(table, norm=PowerNorm(0.5, 0, highest), aspect="auto", origin="lower",
                          interpolation="nearest")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set(title=path.stem, xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes, location="right", shrink=0.5, aspect=30,
                    label="retrieval score (colour by its square root)")
    add_foot(figure, "retrieval score of every head, layer 0 at the bottom")
    return figure
