"""Tests and speed of one GPU in less than ten minutes. Weights are random, so nothing is downloaded.

    python -m benchmarks.gpu --out benchmarks/results/gpu.json
    python -m benchmarks.gpu --dry-run          # tiny shapes on a CPU

    tests       `pytest -m gpu tests/test_gpu.py`, at most 400 seconds
    products    all matrices of a pass alone, for 1, 2, 8 and 16 vectors: the limit of a step's speed
    decode      greedy and DeCoRe, with CUDA graphs and without
    peers       greedy and DeCoRe, with transformers' generate() and DeCoRe as a loop of two passes
    prompts     greedy and DeCoRe after prompts of 512, 8,192 and 32,768 tokens, and the speed of reading them
    batch       32 prompts at once
    lookup      a text that quotes its prompt, with lookup of 7 tokens
    loading     a checkpoint from files to the device

The results are printed and written after each section. `failed` lists the sections that failed, with the reason. One
GPU shows nothing about NCCL, which returns at once for one rank: `torchrun --nproc-per-node 2` needs two."""

import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

import cli
from benchmarks.decode import contestants, measure, summary
from benchmarks.measure import bandwidth_meter, origin, read_weights, timed, weights
from benchmarks.shapes import SHAPES, random_model, transformers_model
from model import Transformer

GPU = SimpleNamespace(device="cuda", dtype=torch.bfloat16, shape="8b", small="1.5b", prompts=(512, 8192, 32_768),
                      batch=32, new=64, floats=10**9)
CPU = SimpleNamespace(device="cpu", dtype=torch.float32, shape="tiny", small="tiny", prompts=(40, 80, 160), batch=3,
                      new=6, floats=10**5)
SECONDS, TEST_SECONDS = 570, 400
ROOT = Path(__file__).parent.parent


def run_tests(run):
    """`pytest -m gpu`; on a CPU it only collects the tests."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests/test_gpu.py"]
    command += ["--collect-only"] if run.device == "cpu" else []
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=TEST_SECONDS)
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = f"stopped after {TEST_SECONDS} s", error.stdout or b""
    lines = output.decode().splitlines()        # the last one is the summary, or the test that was running
    yield dict(status=status, failed=[line for line in lines if "FAILED" in line or "ERROR" in line], last=lines[-1:])
    if status != 0:
        raise RuntimeError(f"pytest: {status}")


def products(run, model, bandwidth):
    """The fraction of the bandwidth at which n vectors pass through all matrices of the model."""
    layers = [m for m in model.modules() if type(m) is type(model.lm_head)]
    layers = [m for m in layers if m is model.lm_head or m is not model.embed]
    for n in (1, 2, 8, 16):
        x = {m: torch.randn(1, n, m.weight.shape[1], device=run.device, dtype=run.dtype) for m in layers}

        def work(x=x):
            for m in layers:
                m(x[m])

        work()
        if run.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            work = graph.replay
        seconds = min(timed(run.device, work) for _ in range(10))
        yield dict(vectors=n, ms=1000 * seconds, share_of_bandwidth=read_weights(model) / seconds / bandwidth())


def decoding(run, model, bandwidth, lengths, *peers, **more):
    """Three rounds of greedy, DeCoRe and peers in turns, for prompts of these lengths. more: as in `contestants`."""
    for P in lengths:
        prompt = torch.randint(model.config.vocab_size, [P]).tolist()
        runs = contestants(model, prompt, run.new, ["greedy", "decore-entropy", *peers], **more)
        results = summary(*measure(runs, 3, bandwidth), runs, P, run.new)
        columns = ("tokens_per_second", "quartiles", "over_greedy", "share_of_bandwidth", "prompt_tokens_per_second")
        for name in runs:
            yield dict(name=name, prompt=P, **{column: results[column].get(name) for column in columns})


def loading(run):
    model = random_model(SHAPES[run.small], run.device, run.dtype)
    gb = weights(model) / 1e9
    with tempfile.TemporaryDirectory() as folder:
        transformers_model(model).save_pretrained(folder)
        del model
        seconds = timed(run.device, lambda: Transformer.load(folder, run.device))
    yield dict(gb=gb, seconds=seconds, gb_per_second=gb / seconds)


def all_sections(run):
    """Yields (name, generator of rows) of each section."""
    yield "tests", run_tests(run)
    bandwidth, two = bandwidth_meter(run.device, run.floats), run.prompts[:2]
    model = random_model(replace(SHAPES[run.shape], max_positions=2**20), run.device, run.dtype)
    yield "products", products(run, model, bandwidth)
    yield "decode", decoding(run, model, bandwidth, two, no_graph=True)
    yield "peers", decoding(run, model, bandwidth, two, "transformers", "two-pass")
    yield "prompts", decoding(run, model, bandwidth, run.prompts)
    yield "batch", decoding(run, model, bandwidth, two[:1], batch=run.batch)
    yield "lookup", decoding(run, model, bandwidth, two[:1], lookup=7)
    yield "loading", loading(run)


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    p.add_argument("--out", type=Path, help="also write the results there, after each section")
    args = p.parse_args()
    run = CPU if args.dry_run else GPU
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device; --dry-run runs the script on a CPU")
    start, out = time.monotonic(), dict(dry_run=args.dry_run, **origin(run.device), failed=[])
    warnings.filterwarnings("error", message=".*CUDA graph")            # a warning that decoding does without graphs
    for name, rows in all_sections(run):
        try:
            if time.monotonic() - start > SECONDS:
                raise TimeoutError(f"{SECONDS} s are over")
            for row in rows:
                out.setdefault(name, []).append(row)
                print(name, json.dumps(row), flush=True)
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
