"""Everything about one GPU in one run of less than ten minutes. No downloads: weights are random, made on the device.

    python -m benchmarks.gpu --out benchmarks/results/gpu.json
    python -m benchmarks.gpu --dry-run          # tiny shapes on a CPU, with a recorder that plays along
    python -m benchmarks.gpu --cpu              # two layers of the real shapes on a CPU: memory, and time by prompt

What a section finds is printed and written at once; what fails is a line among `failed`, and the next section follows.

    tests       `pytest -m gpu`, with a time limit of its own
    bandwidth   bytes per second of copying 4 GiB, read and written, and of a sum, read
    products    all matrices of a pass and nothing else, at 1, 2, 8 and 16 vectors: the ceiling of any step
    decode      tokens per second of greedy and DeCoRe, eager, as a CUDA graph, and compiled before it is recorded; what
                reading weights and cache alone amounts to of the bandwidth; peak memory against weights and cache.
                The prompt's keys and values are random
    kernels     of one eager step: how many, and which take the time
    prefill     tokens per second of reading one prompt, and the memory it takes beyond weights and cache
    attention   each case of prefill: the kernels that run it, and which fused backends would
    others      transformers: greedy, the loop of two passes, reading the prompt
    agreement   bfloat16's tokens against float32's, float32's logits and tokens against the CPU's
    lookup      milliseconds of passes of T tokens; tokens per second of texts that copy, that do not, that mislead
    group       an NCCL group of one rank whose collectives really run, recorded: the same tokens
    window      a model with a sliding window, prompt twice as long
    batches     examples per second of evaluate.py, by batch size
    share       one rank's half of a 70B model, under a process group that pretends
    long        a prompt of 128k tokens
"""

import gc
import json
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

import cli
from benchmarks import batches, lookup
from benchmarks.decode import contestants
from benchmarks.measure import cached, origin, read_weights, status, weights
from benchmarks.shapes import SHAPES, random_model, shallower, spread_heads, transformers_model
from decore import generate, open_decore
from model import Linear, Transformer, attend_causal
from runtime.fast import cuda_graph, record
from runtime.parallel import Shard

REAL = SimpleNamespace(device="cuda", dtype=torch.bfloat16, shape="8b", share="70b", small="0.5b", layers=None,
                       prompts=(512, 8192, 32_768), others=(512, 8192), batches=(1, 8, 32), new=64, window=4096,
                       passage=512, long=131_072, copied=4 * 2**30, items=64, sizes=(1, 16, 64), tests=150, seconds=540)
CPU = SimpleNamespace(**vars(REAL) | dict(device="cpu", layers=2, others=(512,), batches=(1,), new=16, copied=2**30,
                                          long=16_384, items=4, sizes=(1, 4), seconds=1800))
DRY = SimpleNamespace(**vars(REAL) | dict(device="cpu", dtype=torch.float32, shape="tiny", share="tiny", small="tiny",
                                          prompts=(16, 48), others=(16,), batches=(1, 3), new=6, window=16, passage=64,
                                          long=96, copied=2**22, items=2, sizes=(1, 2)))
METHODS = ("greedy", "decore-entropy")
FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


# ---------------------------------------------------------------------------------------------------- time and memory


def wait(run):
    if run.device == "cuda":
        torch.cuda.synchronize()


def timed(run, work):
    """(result, seconds) of work()."""
    wait(run)
    start = time.perf_counter()
    result = work()
    wait(run)
    return result, time.perf_counter() - start


def peak(run, work):
    """(result, seconds, most bytes held meanwhile: by tensors; on a CPU by the process, beyond `held_before`)."""
    if run.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")           # the peak of the resident set counts from now on
    result, seconds = timed(run, work)
    return result, seconds, (torch.cuda.max_memory_allocated() if run.device == "cuda"
                             else status("VmHWM") - run.held_before)


def held(run):
    return torch.cuda.memory_allocated() if run.device == "cuda" else status("VmRSS") - run.held_before


def start_from(run, model):
    """Count memory as if nothing but the model were there: libraries and what earlier measurements left are not."""
    if run.device == "cpu":
        run.held_before = status("VmRSS") - weights(model)


def bandwidth(run):
    """Bytes per second, the best of ten."""
    a = torch.ones(run.copied, dtype=torch.uint8, device=run.device)
    b, c = torch.empty_like(a), a.view(torch.float32)

    def best(work):
        return run.copied / min(timed(run, work)[1] for _ in range(10))
    return dict(copy=2 * best(lambda: b.copy_(a)), sum=best(c.sum))


def plays_along(work):
    """What `cuda_graph` does, on a CPU: work() again, into the tensors of the first time."""
    kept = tree_map(torch.clone, work())

    def replay():
        for old, new in zip(kept, work(), strict=True):
            old.copy_(new)
    return kept, replay


# ------------------------------------------------------------------------------------------------------------ sections


def run_tests(run):
    """`pytest -m gpu`; in a dry run only what it would collect."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    command += ["--collect-only", "tests/test_gpu.py"] if run.device == "cpu" else []
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=run.tests)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:]
    return dict(status=done.returncode, said=lines[-1], failed=[line for line in lines if line.startswith("FAILED")])


def products(run, model, n):
    """All large matrices of a pass with n vectors: the fraction of the bandwidth that these products alone reach."""
    layers = [m for m in model.modules() if isinstance(m, Linear) and (m is not model.embed or m is model.lm_head)]
    inputs = {m.weight.shape[1]: torch.randn(1, n, m.weight.shape[1], device=run.device, dtype=run.dtype)
              for m in layers}

    def work():
        return tuple([m(inputs[m.weight.shape[1]]) for m in layers][-1:])
    work()
    replay = run.recorder(work)[1]
    seconds = min(timed(run, replay)[1] for _ in range(10))
    return dict(vectors=n, ms=1000 * seconds, fraction_of_bandwidth=read_weights(model) / seconds / run.speed)


def pretend_to_read(model):
    """Give the cache random keys and values in place of a prompt's."""
    def prefill(ids, cache, *_, **__):
        for kv in cache.kv:
            kv[..., :cache.P, :].normal_()
    model.prefill = prefill


def measure_decode(run, model, method, P, B, how):
    """how: "eager", "graph", or "compiled", which is then recorded too."""
    prompts = torch.randint(model.config.vocab_size, (B, P)).tolist()
    settings = {} if method == "greedy" else dict(heads=spread_heads(model.config))
    last = torch.tensor([p[-1:] for p in prompts], device=run.device)

    def work():
        step, caches = open_decore(model, prompts, run.new, method, **settings)

        def prepare():
            if how == "eager":
                return step
            compiled = torch.compile(step, fullgraph=True, dynamic=False, **run.compiler) if how == "compiled" else step
            return record(compiled, caches, last, recorder=run.recorder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")                      # a graph that is not trusted is an error here
            made, preparing = timed(run, prepare)

        def decode():
            for cache in caches:
                cache.slots.zero_()
            return generate(model, last.tolist(), max_new_tokens=run.new, eos_ids=(), compile="no",
                            opener=lambda *_: (made, caches))
        decode()                                                                        # warms up
        return timed(run, decode)[1], preparing, cached(caches)

    (seconds, preparing, kept), _, most = peak(run, work)
    return dict(method=method, prompt=P, batch=B, how=how, tokens_per_second=B * run.new / seconds,
                ms=1000 * seconds / run.new, preparing_seconds=preparing,
                fraction_of_bandwidth=(read_weights(model) + kept) * run.new / seconds / run.speed,
                peak_over_weights_and_cache=most / (weights(model) + kept))


def profiled(run, work):
    """[(kernel, times it ran, microseconds)] of work(), the longest first; on a CPU operators."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (run.device == "cuda")
    with profile(activities=kinds) as found:
        work()
        wait(run)
    rows = [(e.key[:80], e.count, e.self_device_time_total if run.device == "cuda" else e.self_cpu_time_total)
            for e in found.key_averages() if run.device == "cpu" or str(e.device_type).endswith("CUDA")]
    return sorted(rows, key=lambda row: -row[2])


def kernels(run, model, method, P):
    prompts = torch.randint(model.config.vocab_size, (1, P)).tolist()
    step, _ = open_decore(model, prompts, 8, method, **({} if method == "greedy" else
                                                        dict(heads=spread_heads(model.config))))
    last = torch.tensor([prompts[0][-1:]], device=run.device)
    step(last)
    rows = profiled(run, lambda: step(last))
    n = sum(count for _, count, _ in rows)
    return dict(method=method, prompt=P, kernels=n, a_layer=n / model.config.n_layers,
                microseconds=sum(us for _, _, us in rows), longest=rows[:20])


def measure_prefill(run, model, P):
    ids = torch.randint(model.config.vocab_size, (1, P), device=run.device)
    cache = model.cache(torch.tensor([P]), 1)
    model.prefill(ids[:, :512], cache)          # warm up
    for kv in cache.kv:
        kv.zero_()                              # a CPU gives memory when it is written to
    before = held(run)
    _, seconds, most = peak(run, lambda: model.prefill(ids, cache))
    return dict(prompt=P, tokens_per_second=P / seconds, bytes_beyond_weights_and_cache=most - before)


def attention_cases(run, config):
    """Each case of `attend_causal`: what runs it, and whether each fused backend alone would."""
    H, G, K, T = config.n_heads, config.n_kv_heads, config.head_dim, run.window
    for dtype in (torch.bfloat16, torch.float32):
        for name, S, window in (("first chunk", T, None), ("later chunk", 2 * T, None), ("window", 2 * T, T // 2)):
            q, kv = (torch.randn(n, T if n == 1 else S, heads, K, device=run.device, dtype=dtype).transpose(1, 2)
                     for n, heads in ((1, H), (2, G)))
            k, v = kv.split(1)

            def work(q=q, k=k, v=v, window=window):
                return attend_causal(q, k, v, window)
            works = {}
            for backend in FUSED if run.device == "cuda" else FUSED[:1]:
                try:
                    with sdpa_kernel(backend), warnings.catch_warnings():
                        warnings.simplefilter("ignore")         # torch says why a backend does not take it
                        work()
                    works[backend.name] = True
                except RuntimeError:
                    works[backend.name] = False
            rows = profiled(run, work)
            yield dict(case=name, dtype=str(dtype), tokens=T, keys=S, works=works, runs=[row[0] for row in rows[:3]],
                       microseconds=sum(row[2] for row in rows))


def measure_others(run, model, P):
    prompt = torch.randint(model.config.vocab_size, [P]).tolist()
    names = ["transformers", "two-pass", "transformers-read"]
    others = contestants(model, prompt, run.new, names, spread_heads(model.config), transformers_model(model))
    for name, (prepare, n, _) in others.items():
        for _ in range(2):                      # the first one warms up
            work = prepare()
            _, seconds = timed(run, work)
        yield dict(method=name, prompt=P, batch=1, tokens_per_second=n / seconds, ms=1000 * seconds / n)


def agreement(run):
    """How often bfloat16 and float32 choose the same token; float32 here against a CPU: logits, and tokens."""
    config = SHAPES[run.small]
    exact = random_model(config, run.device)
    ids = torch.randint(config.vocab_size, (1, 512), device=run.device)
    on_device = exact(ids).argmax(-1)
    half = exact.to(torch.bfloat16)(ids).argmax(-1)
    tiny, prompt = random_model(SHAPES["tiny"]), torch.randint(512, (64,))
    for parameter in tiny.parameters():
        parameter.mul_(5)                       # heads of a model at 0.02 hardly move the logits
    heads = spread_heads(tiny.config)

    def answers():
        return [generate(tiny, prompt.tolist(), method, 32, (), **({} if method == "greedy" else dict(heads=heads))).ids
                for method in METHODS]
    logits, tokens = tiny(prompt[None]), answers()
    tiny.to(run.device)
    difference = tiny(prompt[None].to(run.device)).cpu() - logits
    return dict(bfloat16_agrees=(half == on_device).float().mean().item(), same_tokens_as_cpu=answers() == tokens,
                float32_differs_from_cpu=(difference.abs().max() / logits.abs().max()).item())


def measure_passes(run, model, P):
    """Milliseconds of an eager pass of DeCoRe with T new tokens."""
    prompt = torch.randint(model.config.vocab_size, [P]).tolist()
    step, (cache,) = open_decore(model, [prompt], 32, heads=spread_heads(model.config))
    for T in (1, 2, 4, 8, 16):
        tokens, took = torch.randint(model.config.vocab_size, (1, T), device=run.device), []
        for _ in range(4):
            cache.slots.zero_()
            took.append(timed(run, lambda tokens=tokens: step(tokens))[1])
        yield dict(T=T, prompt=P, ms=1000 * min(took[1:]))


def measure_lookup(run, model, rounds=2):
    heads = spread_heads(model.config)
    for kind, cases in lookup.forced(model.config.vocab_size, run.passage, run.new).items():
        for method, found in lookup.measure(model, cases, run.new, 7, rounds, heads).items():
            yield dict(text=kind, method=method, **found)


class Talking(Shard):
    """One rank that talks to itself: its collectives run."""

    def all_reduce(self, x):
        x = x.contiguous()
        self.call(dist.all_reduce, x)
        return x


def one_rank(run):
    """Tokens with collectives in the step, recorded, against those without."""
    dist.init_process_group("nccl" if run.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = random_model(SHAPES["tiny"], run.device)
        talking = Transformer(alone.config, Talking(0, 1), run.device).requires_grad_(False)
        talking.load_state_dict(alone.state_dict())
        prompt = list(range(3, 40))
        last, how = torch.tensor([prompt[-1:]], device=run.device), dict(heads=spread_heads(alone.config))
        wanted = generate(alone, prompt, max_new_tokens=16, eos_ids=(), **how).ids
        step, caches = open_decore(talking, [prompt], 16, **how)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step = record(step, caches, last, recorder=run.recorder)
        found = generate(talking, prompt, max_new_tokens=16, eos_ids=(), compile="no",
                         opener=lambda *_: (step, caches)).ids
        return dict(same_tokens=found == wanted, backend=dist.get_backend())
    finally:
        dist.destroy_process_group()


def share_of_two(run):
    """One rank's half, as it decodes but for the time on the wire."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        config = shallower(SHAPES[run.share], run.layers)
        model = Transformer(config, Shard(0, 2), run.device, run.dtype).requires_grad_(False)
        for parameter in model.parameters():
            parameter.fill_(0.01)               # a CPU gives memory when it is written to
        start_from(run, model)
        pretend_to_read(model)
        for method in METHODS:
            yield measure_decode(run, model, method, run.prompts[0], 1, "graph")
    finally:
        dist.destroy_process_group()


def with_window(run):
    """Mistral's shape: reading and decoding with a window."""
    config = shallower(SHAPES[run.shape], run.layers)
    model = random_model(replace(config, windows=(run.window,) * config.n_layers), run.device, run.dtype)
    start_from(run, model)
    yield dict(what="prefill", **measure_prefill(run, model, 2 * run.window))
    pretend_to_read(model)
    for method in METHODS:
        yield dict(what="decode", **measure_decode(run, model, method, 2 * run.window, 1, "graph"))


def measure_batches(run, model):
    for size in run.sizes:
        seconds, _, tokens = batches.measure(model, "decore-entropy", size, run.items, run.new)
        yield dict(batch=size, examples_per_second=run.items / seconds, tokens_per_second=tokens / seconds)


# ------------------------------------------------------------------------------------------------------------ the run


def whole_model(run, attempt):
    config = shallower(SHAPES[run.shape], run.layers)
    model = random_model(replace(config, max_positions=2**20), run.device, run.dtype)
    start_from(run, model)
    first, read = run.prompts[0], model.prefill

    def decode(name, P, B, how):
        for method in METHODS:
            attempt(f"{name} {method} {P} x {B} {how}", measure_decode, run, model, method, P, B, how)

    for n in (1, 2, 8, 16):
        attempt(f"products {n}", products, run, model, n)
    pretend_to_read(model)
    decode("decode", first, 1, "eager")
    for B in run.batches:
        for P in run.prompts:
            decode("decode", P, B, "graph")
    for method in METHODS:
        attempt(f"kernels {method}", kernels, run, model, method, first)
    model.prefill = read
    for P in run.prompts:
        attempt(f"prefill {P}", measure_prefill, run, model, P)
    attempt("attention", attention_cases, run, model.config)
    for P in run.others:
        attempt(f"others {P}", measure_others, run, model, P)
    attempt("lookup passes", measure_passes, run, model, first)
    attempt("lookup texts", measure_lookup, run, model)
    attempt("batches", measure_batches, run, model)
    attempt("long prefill", measure_prefill, run, model, run.long)
    pretend_to_read(model)
    decode("long", run.long, 1, "graph")
    decode("decode", first, 1, "compiled")


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.split("\n")[0])
    where = p.add_mutually_exclusive_group()
    where.add_argument("--dry-run", action="store_true")
    where.add_argument("--cpu", action="store_true")
    p.add_argument("--out", type=Path, help="also write the results there, after each section")
    p.add_argument("--only", nargs="+", metavar="SECTION", help="only these of the above")
    args = p.parse_args()
    run = DRY if args.dry_run else CPU if args.cpu else REAL
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --dry-run and --cpu run the script on a CPU")
    if args.dry_run:
        torch.set_num_threads(1)
    started = time.monotonic()
    run.held_before = None if run.device == "cuda" else status("VmRSS")
    run.recorder = cuda_graph if run.device == "cuda" else plays_along
    run.compiler = dict(mode="max-autotune-no-cudagraphs") if run.device == "cuda" else dict(backend="eager")
    out = dict(dry_run=args.dry_run, layers=run.layers, **origin(run.device), failed=[])

    def attempt(name, work, *arguments):
        """Keep what work(…) finds, one row or several; what fails, or comes too late, is named instead."""
        section = name.split()[0]
        if args.only and section not in args.only:
            return
        try:
            if time.monotonic() - started > run.seconds:
                raise TimeoutError("no time is left")
            found = work(*arguments)
            for row in [found] if isinstance(found, dict) else found:
                out.setdefault(section, []).append(row)
                print(name, json.dumps(row), flush=True)
        except Exception as error:              # whatever it is, the other sections are of use
            out["failed"].append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            print("failed", out["failed"][-1], flush=True)
        out["minutes"] = (time.monotonic() - started) / 60
        if run.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(out, indent=1) + "\n")

    attempt("tests", run_tests, run)
    attempt("bandwidth", bandwidth, run)
    run.speed = max(out["bandwidth"][0].values()) if "bandwidth" in out else float("nan")
    attempt("agreement", agreement, run)
    attempt("group", one_rank, run)
    whole_model(run, attempt)
    gc.collect()
    attempt("window", with_window, run)
    gc.collect()
    attempt("share", share_of_two, run)
    print(f"{out['minutes']:.1f} minutes; failed: {len(out['failed'])}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
