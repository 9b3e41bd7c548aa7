"""Make the worked example again: the miniature's runs, the report on them, and its pictures.

    python -m results.make                  3 to 16 minutes on two cores; interrupted, it goes on where it was
    python -m results.make --report         from the stored runs alone

Runs are made by evaluate.py in build/miniature and stored compressed in results/miniature. In docs/miniature.md all
that is below the marker is written anew; what stands above it is by hand."""

import gzip
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cli

ROOT = Path(__file__).resolve().parent.parent
BUILD, STORED, PAGE = ROOT / "build" / "miniature", ROOT / "results" / "miniature", ROOT / "docs" / "miniature.md"
ITI = "build/miniature-iti"                     # the miniature as ITI edits it, made here by miniature/iti.py
MARKER = "<!-- below: written by results/make.py -->"
AT_ONCE = 2                                     # processes, of one thread each

# Split → how many of its items. The conflicts are what the paper is about, so there are more of them.
SPLITS = {"conflict": 256, "conflict-known": 128, "open": 128, "closed": 128, "irrelevant": 128}
SWEEPS = (
    # Activation Decoding's information layer is the third of four.
    "--method greedy,cad,dola-low,dola-high,ad --info-layer 3",
    "--method cd,decore-entropy --amateur miniature/amateur --amateur-heads heads/miniature-amateur.json --num-heads 2",
    "--method masked,decore-entropy --num-heads 1,2,4,8",
    "--method masked,decore-entropy --num-heads 1,2,4,8 --mask query",
    "--method decore-static --num-heads 4 --alpha=-0.5,0.5,1,2,4",
    f"--method greedy --model {ITI}")
CONFLICT_ONLY = (
    "--method decore-static --num-heads 4 --alpha=-0.5,0.5,1,2,4 --mask query",
    "--method decore-static --num-heads 1,2,8 --alpha 0.5,1,2",
    "--method masked,decore-entropy --num-heads 1,2,4,8 --random-heads uniform --seed 0,1,2,3,4,5,6,7,8,9 --limit 128")
OPEN_ONLY = (
    "--method masked --num-heads 1,2,4,8 --random-heads uniform --seed 0,1,2,3,4,5,6,7,8,9",)


def main():
    p = cli.parser("Make the worked example again: the miniature's runs, the report on them, and its pictures.")
    p.add_argument("--report", action="store_true", help="from the stored runs alone")
    args, start = p.parse_args(), time.time()
    if not args.report:
        run(sys.executable, "-m", "miniature.iti", "--out", ITI)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(evaluate, commands()))
        pack()
    report()
    print(f"{time.time() - start:.0f} s")


def commands():
    for split, limit in SPLITS.items():
        more = {"conflict": CONFLICT_ONLY, "open": OPEN_ONLY}.get(split, ())
        for sweep in SWEEPS + more:
            limits = "" if "--limit" in sweep else f" --limit {limit}"
            yield f"--task miniature-{split} {sweep}{limits} --batch-size 64 --device cpu --out build/miniature/{split}"


def evaluate(command):
    print(f"python evaluate.py {command}", flush=True)
    run(sys.executable, "evaluate.py", *command.split(), env={"OMP_NUM_THREADS": "1"})


def run(*command, env=None):
    """Standard output of a command; its errors end this one."""

    done = subprocess.run(command, cwd=ROOT, env=os.environ | (env or {}), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def pack():
    """The runs compressed, the same bytes whenever they hold the same lines."""
    for path in sorted(BUILD.rglob("*.jsonl")):
        there = STORED / path.parent.name / f"{path.name}.gz"
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def report():
    text = PAGE.read_text(encoding="utf-8").split(MARKER)[0] if PAGE.exists() else "# The miniature, measured\n\n"
    PAGE.with_suffix("").mkdir(parents=True, exist_ok=True)
    made = run(sys.executable, "evaluate.py", "report", str(STORED), "--plots", str(PAGE.with_suffix("")), "--markdown",
               "--iti", f"{Path(ITI).name}=miniature")
    run(sys.executable, "decore.py", "--compare", "--html", str(PAGE.with_suffix("") / "example.html"))
    PAGE.write_text(f"{text}{MARKER}\n\n{made}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(cli.run(main))
