"""Run the miniature's experiments and write their results into docs/miniature.md.

    python -m miniature.make

After an interruption, the same command continues. The page's tables stand between comments and are
replaced; the text around them is written by hand and does not repeat their numbers."""

import io
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import cli
import evaluate
from miniature import claims
from paper import report

PAGE = cli.MINIATURE.parent / "docs" / "miniature.md"
RUNS = "results/miniature"
PICTURES = ("heads-miniature", "alpha-miniature", "entropy-miniature", "head-maps")
HEADS = (
    "Meta-Llama-3-8B-Instruct",
    "Mistral-7B-Instruct-v0.3",
    "Qwen2-7B-Instruct",
    "miniature",
    "miniature-amateur",
)
DRAWS = "--random-heads uniform --seed 0,1,2,3,4,5,6,7,8,9"
SWEEPS = (  # options of evaluate.py
    "--task miniature --method greedy,cad,dola-low,dola-high,ad --info-layer 3",
    "--task miniature --method masked,decore-entropy --num-heads 1,2,4,8",
    "--task miniature --method masked,decore-entropy --num-heads 4 --mask query",
    "--task miniature --method decore-static --num-heads 4 --alpha=-0.5,0.5,1,2,4",
    "--task miniature --method cd,decore-entropy --num-heads 2 --amateur miniature/amateur",
    "--task miniature-conflict --method decore-entropy --num-heads 4 --mask-prompt",
    f"--task miniature-conflict --method decore-entropy --num-heads 1,4 {DRAWS}",
    f"--task miniature-conflict --method masked --num-heads 4 {DRAWS}",
    f"--task miniature-open --method masked --num-heads 1,4 {DRAWS}",
)


def main():
    cli.parser(__doc__).parse_args()
    for sweep in SWEEPS:
        evaluate.evaluate(f"{sweep} --batch-size 64 --device cpu --out {RUNS}".split())
    plots = Path(RUNS, "plots")
    with redirect_stdout(io.StringIO()) as tables:
        report.main([RUNS, "--plots", str(plots)])
        report.main(["heads", *HEADS, "--plots", str(plots)])
    parts = tables.getvalue().split("### ")
    methods = next(part for part in parts if part.startswith("Miniature")).partition("\n")[2]
    page = replace_block(PAGE.read_text(encoding="utf-8"), "claims", claims.table(RUNS))
    PAGE.write_text(replace_block(page, "methods", methods), encoding="utf-8")
    for name in PICTURES:
        shutil.copy(plots / f"{name}.png", PAGE.with_suffix(""))


def replace_block(text, name, block):
    """Replace the text between <!-- name --> and <!-- end -->."""
    block = f"\n{block.strip()}\n\n"
    pattern = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)"
    return re.sub(pattern, lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
