"""Tests and speed of one GPU in at most ten minutes. Weights are random, so nothing is downloaded.

    python -m speed.gpu --out speed/results/gpu.json
    python -m speed.gpu --dry-run           # a tiny shape on a CPU

Each section is a program of its own. Its result, or the end of its output if it failed, is printed
and written as soon as it is known. One GPU shows nothing about NCCL, which returns at once for one
rank: `torchrun --nproc-per-node 2` needs two."""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile

import torch

from cli.entry import run_program
from cli.options import parser
from runtime.errors import InputError

DECODE = (
    "-m speed.decode --json --device cuda --shape 8b --dtype bfloat16 --new 64 --rounds 3 "
    "--methods greedy decore-entropy"
)
# Section → its seconds, and its command. A section may also use the seconds that earlier ones left.
SECTIONS = {
    "tests": (200, "-m pytest -v -m gpu tests/core/test_gpu.py"),
    "short": (110, f"{DECODE} transformers two-pass hf custom-generate --prompt 512"),
    "without graphs": (60, f"{DECODE} --prompt 512 --no-graph"),
    "medium": (80, f"{DECODE} transformers two-pass --prompt 8192"),
    "long": (70, f"{DECODE} --prompt 32768"),
    "batch": (70, f"{DECODE} --prompt 512 --batch 32"),
}
ROOT = Path(__file__).parent.parent
STRICT = "-Werror:decoding goes on without CUDA graphs"  # a section must record its steps


def dry(command):
    """The command for a CPU: tests are only collected."""
    if "pytest" in command:
        return f"{command} --collect-only"
    return (
        command.replace("--no-graph", "")
        + " --device cpu --shape tiny --dtype float32 --new 6 --prompt 40"
    )


def main():
    p = parser(__doc__)
    p.add_argument("--dry-run", action="store_true", help="a tiny shape on a CPU")
    p.add_argument("--out", type=Path, help="also write the results there, after each section")
    args = p.parse_args()
    if not (args.dry_run or torch.cuda.is_available()):
        raise InputError("this machine has no CUDA device; --dry-run runs the script on a CPU")
    out = dict(dry_run=args.dry_run, failed={})
    write(out, args.out)  # an error now, not after the tests
    end = time.monotonic()
    for name, (seconds, command) in SECTIONS.items():
        end += seconds
        command = dry(command) if args.dry_run else command
        try:
            out[name] = run(name, command, end - time.monotonic())
        except ValueError as error:  # the other sections still count
            out["failed"][name] = str(error)
        print(name, json.dumps(out.get(name) or out["failed"][name]), flush=True)
        write(out, args.out)


def run(name, command, seconds):
    """What a section measures. ValueError, with the end of its output, if it fails."""
    command = [sys.executable, STRICT, *command.split()]
    # Unlike a pipe, a file keeps the output of a process that is killed.
    with TemporaryFile("w+", errors="replace") as file:
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"stopped after {seconds:.0f} seconds"
        file.seek(0)
        lines = file.read().splitlines()
    results = lines if name == "tests" else [line for line in lines if line.startswith("{")]
    try:
        result = results[-1] if name == "tests" else json.loads(results[-1])
    except (IndexError, ValueError):
        problem = problem or "no result"
    if problem:
        raise ValueError("\n".join([problem, *lines[-40:]]))
    return result


def write(out, path):
    if path:
        path.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_program(main))
