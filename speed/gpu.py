"""Tests and speed of one GPU in less than ten minutes. Weights are random, so nothing is downloaded.

    python -m speed.gpu --out speed/results/gpu.json
    python -m speed.gpu --dry-run          # a tiny shape on a CPU

Runs `pytest -m gpu tests/test_gpu.py`, at most 400 seconds, and speed.decode with the options of each section.
The results are printed and written after each section. `failed` lists the sections that failed, with the reason. One
GPU shows nothing about NCCL, which returns at once for one rank: `torchrun --nproc-per-node 2` needs two."""

import gc
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

import cli
from speed import decode

SECTIONS = {
    "short": "--prompt 512 --no-graph --methods greedy decore-entropy transformers two-pass",
    "medium": "--prompt 8192 --no-graph --methods greedy decore-entropy transformers two-pass",
    "long": "--prompt 32768",
    "batch": "--prompt 512 --batch 32",
}
GPU = "--device cuda --shape 8b --dtype bfloat16 --new 64 --rounds 3 --methods greedy decore-entropy"
TINY = "--device cpu --shape tiny --dtype float32 --new 6 --prompt 40"
SECONDS, TEST_SECONDS = 570, 400


def run_tests(dry_run):
    """The last line of `pytest -m gpu`; a dry run only collects the tests."""
    command = ["timeout", str(TEST_SECONDS), sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests/test_gpu.py"]
    done = subprocess.run(command + ["--collect-only"] * dry_run, cwd=Path(__file__).parent.parent,
                          stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()            # the last one is the summary, or the test that was running
    if done.returncode:
        failed = [line for line in lines if "FAILED" in line or "ERROR" in line]
        raise RuntimeError(f"pytest: status {done.returncode}, {failed}, {lines[-1:]}")
    return lines[-1]


def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--dry-run", action="store_true", help="a tiny shape on a CPU")
    p.add_argument("--out", type=Path, help="also write the results there, after each section")
    args = p.parse_args()
    if not (args.dry_run or torch.cuda.is_available()):
        raise ValueError("this machine has no CUDA device; --dry-run runs the script on a CPU")
    start, out = time.monotonic(), dict(dry_run=args.dry_run, failed=[])
    warnings.filterwarnings("error", message=".*CUDA graph")            # a warning that decoding does without graphs
    for name in ("tests", *SECTIONS):
        try:
            if time.monotonic() - start > SECONDS:
                raise TimeoutError(f"{SECONDS} s are over")
            if name == "tests":
                out[name] = run_tests(args.dry_run)
            else:
                options = f"{GPU} {SECTIONS[name]} {TINY if args.dry_run else ''}".split()
                out[name] = decode.compare(decode.parse(options))
            print(name, json.dumps(out[name]), flush=True)
        except Exception as error:              # the other sections still count
            out["failed"].append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
            print("failed", out["failed"][-1], flush=True)
        gc.collect()
        out["minutes"] = round((time.monotonic() - start) / 60, 1)
        if args.out:
            args.out.write_text(json.dumps(out, indent=1) + "\n")
    print(f"{out['minutes']} minutes; failed: {len(out['failed'])}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
