"""Run the miniature's experiments and write their results into docs/miniature.md.

    python -m miniature.make

After an interruption, the same command continues. The page's tables stand between comments and are
replaced; the text around them is written by hand and does not repeat their numbers."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cli
from miniature import claims

PAGE = cli.MINIATURE.parent / "docs" / "miniature.md"
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
    "--task miniature --method greedy --model {iti}",
    "--task miniature-conflict --method decore-entropy --num-heads 4 --mask-prompt",
    f"--task miniature-conflict --method decore-entropy --num-heads 1,4 {DRAWS}",
    f"--task miniature-conflict --method masked --num-heads 4 {DRAWS}",
    f"--task miniature-open --method masked --num-heads 1,4 {DRAWS}",
)


def main():
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/miniature"),
        metavar="DIR",
        help="folder of the runs (default: results/miniature)",
    )
    out = parser.parse_args().out
    iti, plots = out / "miniature-iti", out / "plots"
    if (
        not iti.exists()
    ):  # made again it could differ in the last bit, and its runs would not continue
        run("-m", "miniature.iti", "--out", iti)
    more = "--batch-size", 64, "--device", "cpu", "--out", out
    with ThreadPoolExecutor(2) as pool:  # two programs at once, of one thread each
        list(
            pool.map(
                lambda sweep: run("evaluate.py", *sweep.format(iti=iti).split(), *more), SWEEPS
            )
        )
    report = run("evaluate.py", "report", out, "--plots", plots)
    run("evaluate.py", "report", "heads", *HEADS, "--plots", plots)
    table = claims.table(out)
    print(table)
    methods = next(part for part in report.split("### ") if part.startswith("Miniature")).partition(
        "\n"
    )[2]
    page = replace_block(PAGE.read_text(encoding="utf-8"), "claims", table)
    PAGE.write_text(replace_block(page, "methods", methods), encoding="utf-8")
    for name in PICTURES:
        shutil.copy(plots / f"{name}.png", PAGE.with_suffix(""))


def run(*command):
    """Run a Python program on one thread → its standard output.

    ValueError with its message if it fails."""
    print("python", *command, file=sys.stderr, flush=True)
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cli.MINIATURE.parent,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if process.returncode:
        raise ValueError(f"{' '.join(map(str, command))}: {process.stderr.strip()[-2000:]}")
    return process.stdout


def replace_block(text, name, block):
    """Replace the text between <!-- name --> and <!-- end -->."""
    before, after = re.split(
        rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", text, maxsplit=1, flags=re.DOTALL
    )
    return f"{before}\n{block.strip()}\n\n{after}"


if __name__ == "__main__":
    sys.exit(cli.run(main))
