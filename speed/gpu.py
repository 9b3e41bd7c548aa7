"""Tests and speed of one GPU in ten to fifteen minutes. Weights are random, so nothing is
downloaded.

    python -m speed.gpu --out speed/results/gpu.json
    python -m speed.gpu --dry-run           # a tiny shape on a CPU

Each section is a program of its own. The results are printed and written after each section;
`failed` lists the sections that failed, whose messages are on standard error. One GPU shows nothing
about NCCL, which returns at once for one rank: `torchrun --nproc-per-node 2` needs two."""

import json
import subprocess
import sys
from pathlib import Path

import torch

import cli

DECODE = (
    "-m speed.decode --json --device cuda --shape 8b --dtype bfloat16 --new 64 --rounds 3 "
    "--methods greedy decore-entropy"
)
# Section → its seconds at most, and its command.
SECTIONS = {
    "tests": (400, "-m pytest -v -m gpu tests/core/test_gpu.py"),
    "short": (120, f"{DECODE} transformers two-pass hf custom-generate --prompt 512"),
    "without graphs": (120, f"{DECODE} --prompt 512 --no-graph"),
    "medium": (120, f"{DECODE} transformers two-pass --prompt 8192"),
    "long": (120, f"{DECODE} --prompt 32768"),
    "batch": (120, f"{DECODE} --prompt 512 --batch 32"),
}
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
    p = cli.parser(__doc__)
    p.add_argument("--dry-run", action="store_true", help="a tiny shape on a CPU")
    p.add_argument("--out", type=Path, help="also write the results there, after each section")
    args = p.parse_args()
    if not (args.dry_run or torch.cuda.is_available()):
        raise ValueError("this machine has no CUDA device; --dry-run runs the script on a CPU")
    if args.out:
        args.out.touch()  # an error now, not after the tests
    out = dict(dry_run=args.dry_run, failed=[])
    for name, (seconds, command) in SECTIONS.items():
        command = [sys.executable, STRICT, *(dry(command) if args.dry_run else command).split()]
        try:
            last = subprocess.run(
                command,
                cwd=Path(__file__).parent.parent,
                stdout=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=True,
            ).stdout.splitlines()[-1]
            out[name] = last if name == "tests" else json.loads(last)
        except subprocess.SubprocessError as error:  # the other sections still count
            print(error.stdout, file=sys.stderr)
            out["failed"].append(f"{name}: {error}")
        print(name, json.dumps(out.get(name, out["failed"][-1:])), flush=True)
        if args.out:
            args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
