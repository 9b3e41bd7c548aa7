"""Everything about one GPU in one run of less than ten minutes. No downloads: weights are random, made on the device.

    python -m benchmarks.gpu --out benchmarks/results/gpu.json
    python -m benchmarks.gpu --dry-run          # tiny shapes on a CPU

    tests       `pytest -m gpu tests/test_gpu.py`, at most 400 seconds
    products    all matrices of a pass and nothing else, for 1, 2, 8 and 16 vectors: no step can be faster
    decode      greedy and DeCoRe, with CUDA graphs and without
    peers       the same and transformers: its generate(), and DeCoRe as a loop of two passes
    prompts     reading prompts: tokens per second, and the memory it takes besides the cache
    batch       32 prompts at once
    lookup      a text that quotes its prompt, with lookup of 7 tokens
    loading     a checkpoint from disk to the device

Each section's results are printed and written when it ends. A section that fails is listed in `failed`, with the
reason. One GPU shows nothing about NCCL, which returns at once for one rank: `torchrun --nproc-per-node 2` needs two.
"""

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
from benchmarks.decode import contestants, measure, ours, summary
from benchmarks.measure import bandwidth, origin, read_cache, read_weights, synchronize, timed, weights
from benchmarks.shapes import SHAPES, random_model, spread_heads, transformers_model
from decore import generate
from model import Transformer

REAL = SimpleNamespace(device="cuda", dtype=torch.bfloat16, shape="8b", small="1.5b", prompts=(512, 8192, 32_768),
                       batch=32, new=64, floats=10**9, seconds=570)
DRY = SimpleNamespace(device="cpu", dtype=torch.float32, shape="tiny", small="tiny", prompts=(40, 80, 160), batch=3,
                      new=6, floats=10**5, seconds=570)
TESTS = 400             # seconds
ROUNDS = 3
ROOT = Path(__file__).parent.parent


def run_tests(run):
    """`pytest -m gpu`; a dry run only collects the tests."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests/test_gpu.py"]
    command += ["--collect-only", "-q"] if run.device == "cpu" else []
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TESTS)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{TESTS} s are over; the last lines: {lines_of(error.stdout)[-3:]}") from None
    lines = lines_of(done.stdout)
    yield dict(status=done.returncode, summary=lines[-1:], failed=[line for line in lines if "FAILED" in line])


def lines_of(output):
    return (output or b"").decode().strip().splitlines()


def products(run, model, read):
    """The fraction of the bandwidth at which n vectors pass through all matrices of the model."""
    layers = [m for m in model.modules() if type(m) is type(model.lm_head) and m is not model.embed] + [model.lm_head]
    for n in (1, 2, 8, 16):
        widths = {m.weight.shape[1] for m in layers}
        x = {width: torch.randn(1, n, width, device=run.device, dtype=run.dtype) for width in widths}

        def work(x=x):
            for m in layers:
                m(x[m.weight.shape[1]])

        work()
        if run.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            work = graph.replay
        seconds = min(timed(run.device, work) for _ in range(10))
        yield dict(vectors=n, ms=1000 * seconds, of_bandwidth=read_weights(model) / seconds / read())


def in_turns(run, runs, P, read):
    """One row per contestant, from rounds in turns."""
    results = summary(*measure(runs, ROUNDS, read), runs, P, run.new)
    for name in runs:
        yield dict(name=name, prompt=P, tokens_per_second=results["tokens_per_second"][name],
                   quartiles=results["quartiles"][name], over_greedy=results["over_greedy"].get(name),
                   of_bandwidth=results["share_of_bandwidth"].get(name))


def prompt_of(model, n):
    return torch.randint(model.config.vocab_size, [n]).tolist()


def decode(run, model, read):
    for P in run.prompts[:2]:
        prompt, heads = prompt_of(model, P), spread_heads(model.config)
        runs = contestants(model, prompt, run.new, ["greedy", "decore-entropy"], heads)
        for name, more in (("greedy", {}), ("decore-entropy", dict(heads=heads))):
            eager = ours(model, [prompt], run.new, name, graph=False, **more)
            runs[f"{name}, no graph"] = eager, *runs[name][1:]
        yield from in_turns(run, runs, P, read)


def peers(run, model, read):
    twin, names = transformers_model(model), ["greedy", "decore-entropy", "transformers", "two-pass"]
    for P in run.prompts[:2]:
        runs = contestants(model, prompt_of(model, P), run.new, names, spread_heads(model.config), twin)
        yield from in_turns(run, runs, P, read)


def prompts(run, model, read):
    for P in run.prompts:
        prompt, row = prompt_of(model, P), dict(prompt=P)
        before = torch.cuda.memory_allocated() if run.device == "cuda" else 0
        if run.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row["tokens_per_second"] = P / timed(run.device, lambda prompt=prompt: generate(model, prompt, "greedy", 1))
        if run.device == "cuda":
            row["gb_beyond_cache"] = (torch.cuda.max_memory_allocated() - before - read_cache(model, P)) / 1e9
        yield row


def options(run, model, read, **more):
    """greedy and DeCoRe, and both with `more`: batch or lookup."""
    P, names, heads = run.prompts[0], ["greedy", "decore-entropy"], spread_heads(model.config)
    yield from in_turns(run, contestants(model, prompt_of(model, P), run.new, names, heads, **more), P, read)


def loading(run):
    model = random_model(SHAPES[run.small], run.device, run.dtype)
    with tempfile.TemporaryDirectory() as folder:
        transformers_model(model).save_pretrained(folder)
        size = weights(model)
        del model
        seconds = timed(run.device, lambda: Transformer.load(folder, run.device))
    yield dict(gb=size / 1e9, seconds=seconds, gb_per_second=size / 1e9 / seconds)


def run_all(run, attempt):
    attempt("tests", run_tests, run)
    read = bandwidth(run.device, run.floats)
    model = random_model(replace(SHAPES[run.shape], max_positions=2**20), run.device, run.dtype)
    attempt("products", products, run, model, read)
    attempt("decode", decode, run, model, read)
    attempt("peers", peers, run, model, read)
    attempt("prompts", prompts, run, model, read)
    attempt("batch", options, run, model, read, batch=run.batch)
    attempt("lookup", options, run, model, read, lookup=7)
    del model
    attempt("loading", loading, run)


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.split("\n")[0])
    p.add_argument("--dry-run", action="store_true")
    p.add_argument("--out", type=Path, help="also write the results there, after each section")
    args = p.parse_args()
    run = DRY if args.dry_run else REAL
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --dry-run runs the script on a CPU")
    started, out = time.monotonic(), dict(dry_run=args.dry_run, **origin(run.device), failed=[])

    def attempt(name, section, *arguments, **more):
        try:
            if time.monotonic() - started > run.seconds:
                raise TimeoutError(f"{run.seconds} s are over")
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*CUDA graph")            # ours: decoding goes on without
                for row in section(*arguments, **more):
                    out.setdefault(name, []).append(row)
                    print(name, json.dumps(row), flush=True)
        except Exception as error:              # the other sections still count
            out["failed"].append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
            print("failed", out["failed"][-1], flush=True)
        out["minutes"] = round((time.monotonic() - started) / 60, 1)
        gc.collect()
        synchronize(run.device)
        if args.out:
            args.out.write_text(json.dumps(out, indent=1) + "\n")

    run_all(run, attempt)
    print(f"{out['minutes']} minutes; failed: {len(out['failed'])}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
