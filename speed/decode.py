"""Speed of decoding: this project and transformers in turns.

    python -m speed.decode --shape 0.5b --dtype bfloat16 --prompt 512 --new 32 --json
    torchrun --nproc-per-node 2 -m speed.decode --model FOLDER --methods greedy decore-entropy

    greedy, decore-entropy, …   methods of this project; cad reads the last 40 tokens again
    transformers                greedy decoding by its generate()
    two-pass                    DeCoRe written with transformers: two caches, two passes per token
    hf-greedy, hf               this project's methods on a model of transformers (--transformers)
    custom-generate             DeCoRe by generate() with custom_generate/

All contestants run once per round. The clock runs from the first new token to the last, without the
prompt; `seconds` (--json) are of the whole answer, with the prompt. Ratios are medians over the
rounds, because the load of a machine changes between rounds."""

import copy
import json
import os
import re
import resource
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import decore
from cli.entry import run_program
from cli.options import number, parser, positive
from decoders.setup import Setup
from model import Linear, Transformer
from runtime.config import DTYPES, find_dtype
from runtime.errors import InputError
from runtime.files import commit
from runtime.pack import pack
from speed.shapes import SHAPES, random_model, spread_heads, transformers_model, with_shared_weights

# -------------------------------------------------------------------------------------- contestants
# Each is a function answer(prompts, tick) → ids of the new tokens, [B, T]. It calls tick for each
# token.


QUESTION = 40  # tokens that CAD reads again, without the passage


def this_project(model, new, heads, method, eos_ids=(), **options):
    """generate() of this project. options: more of its arguments."""

    def answer(prompts, tick):
        record = Setup.of(method, heads=heads).record()
        if method == "cad":
            record = replace(record, without_context=[p[-QUESTION:] for p in prompts])
        out = decore.generate(model, prompts, record, new + 1, eos_ids, tick, **options)
        return [g.ids for g in out]

    return answer


def on_hf_model(hf_model, new, heads, method):
    """Packed, as `HFModel.load` does. hf_model: its modules are this contestant's own."""
    from hf import HFModel

    if hf_model.device.type == "cpu":
        pack(hf_model, torch.nn.Linear)
    return this_project(HFModel(hf_model, "transformers"), new, heads, method)


def by_generate(hf_model, new, heads=(), custom=False, **options):
    """generate() of transformers: greedy, with more options, or with custom_generate/."""
    if custom:
        root = str(Path(__file__).parents[1] / "integrations")
        options = dict(custom_generate=root, trust_remote_code=True, heads=heads)

    def answer(prompts, tick):
        ids = torch.tensor(prompts, device=hf_model.device)
        puts = iter([lambda: None])  # a streamer receives the prompts first
        streamer = SimpleNamespace(put=lambda _: next(puts, tick)(), end=lambda: None)
        return hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new + 1,
            streamer=streamer,
            **options,
        )[:, ids.shape[1] :].tolist()

    return answer


def two_pass(base, new, heads):
    """DeCoRe written with transformers: two copies of the cache, and two passes for each token.

    Prompts of different lengths are padded on the left."""
    from transformers import DynamicCache

    masked = with_shared_weights(base)
    for layer, head in heads:
        attention = masked.model.layers[layer].self_attn
        mask = torch.ones(attention.o_proj.in_features, device=base.device, dtype=base.dtype)
        mask[head * attention.head_dim : (head + 1) * attention.head_dim] = 0
        attention.o_proj.register_forward_pre_hook(lambda _, args, mask=mask: args[0] * mask)

    def answer(prompts, tick):
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids = pad([torch.tensor(prompt, device=base.device) for prompt in prompts])  # [B, P]
        real = pad([torch.ones(len(p) + new, dtype=int, device=base.device) for p in prompts])
        positions = (real.cumsum(-1) - 1).clamp(min=0)  # [B, P + new]

        def log_p(model, tokens, cache):
            start = cache.get_seq_length()
            end = start + tokens.shape[1]
            out = model(tokens, real[:, :end], positions[:, start:end], cache, logits_to_keep=1)
            return out.logits.float().log_softmax(-1)

        token, out, cache = ids[:, -1:], [], DynamicCache(config=base.config)
        log_p(base, ids[:, :-1], cache)
        masked_cache = copy.deepcopy(cache)
        for _ in range(new + 1):
            base_log_p = log_p(base, token, cache)
            masked_log_p = log_p(masked, token, masked_cache)
            alpha = decore.entropy(base_log_p)
            token = decore.contrast(base_log_p, masked_log_p, alpha).argmax(-1)
            out.append(token)
            tick()
        return torch.cat(out, -1).tolist()

    return answer


# Functions of (model of transformers, new, heads).
PEERS = {
    "transformers": by_generate,
    "two-pass": two_pass,
    "hf-greedy": partial(on_hf_model, method="greedy"),
    "hf": partial(on_hf_model, method="decore-entropy"),
    "custom-generate": partial(by_generate, custom=True),
}


def contestants(model, new, names, shape, graph=True):
    """{name: contestant}. Packs a model on a CPU, as loading does. shape: its config.json."""
    heads = spread_heads(model.config)
    if set(names) & set(PEERS):
        hf_model = transformers_model(model, shape)  # before packing: it needs plain weights
    if model.device.type == "cpu":
        pack(model, Linear, keep="embed")
    runs = {}
    for name in names:
        if name in PEERS:
            runs[name] = PEERS[name](with_shared_weights(hf_model), new, heads)
        else:
            runs[name] = this_project(model, new, heads, name, graph=graph)
    return runs


# --------------------------------------------------------------------------------------- the rounds


def clock(run, prompts):
    """(ids, times: the start, each token, the end) of a contestant."""
    times = [time.perf_counter()]
    ids = run(prompts, lambda *_: times.append(time.perf_counter()))
    return ids, [*times, time.perf_counter()]


def take_turns(runs, prompts, rounds):
    """Runs all contestants on the prompts in turns → {name: its `clock` in each round}."""
    results = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            results[name].append(clock(run, prompts))
    return results


OURS = ("greedy", "masked", "decore-static", "decore-entropy", "cad")
# A contestant → those that must decode its tokens. Their speed is given relative to it.
SAME_TOKENS = {
    "transformers": ("greedy", "hf-greedy"),
    "two-pass": ("decore-entropy", "hf", "custom-generate"),
}
RATIOS = {"greedy": OURS[1:]} | SAME_TOKENS


def quartiles(values, digits=3):
    """[first quartile, median, third quartile]."""
    return np.quantile(values, [0.25, 0.5, 0.75]).round(digits).tolist()


def summary(results, prompt, new):
    """Quartiles of all rates and ratios, and how many leading tokens of the first text agree.

    prompt, new: the number of tokens of all texts."""
    rates, prefill, seconds, texts = {}, {}, {}, {}
    for name, rounds in results.items():
        texts[name] = rounds[-1][0][0]
        ticks = np.array([times for _, times in rounds])
        prefill[name] = round(prompt / np.median(ticks[:, 1] - ticks[:, 0]))
        rates[name] = new / (ticks[:, -2] - ticks[:, 1])
        seconds[name] = quartiles(ticks[:, -1] - ticks[:, 0])
    ratios, same = {}, {}
    for b, others in RATIOS.items():
        for a in others:
            if a in rates and b in rates:
                name = f"{a}_over_{b}".replace("decore-entropy", "decore").replace("-", "_")
                ratios[name] = quartiles(rates[a] / rates[b])
                if b in SAME_TOKENS:
                    same[f"{a} and {b}"] = len(commonprefix([texts[a], texts[b]]))
    return dict(
        tokens_per_second={name: quartiles(rate, 2) for name, rate in rates.items()},
        prompt_tokens_per_second=prefill,
        seconds=seconds,
        ratios=ratios,
        same_tokens=same,
    )


def table(row):
    """A result for people."""
    lines = [f"{'':32}tokens/s  quartiles"]
    for name, (low, median, high) in (row["tokens_per_second"] | row["ratios"]).items():
        lines.append(f"{name.replace('_', ' '):32}{median:8.2f}  {low:.2f} to {high:.2f}")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------- the program


def origin(device, program):
    """Command, commit, date, versions and machine of a result."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{cpu[1] if cpu else 'CPU'} ({torch.backends.cpu.get_cpu_capability()})"
    return dict(
        command=shlex.join(["python", "-m", program, *sys.argv[1:]]),
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        versions={name: version(name) for name in ("torch", "transformers") if find_spec(name)},
        device=name,
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
    )


def parse():
    p = parser(__doc__)
    model = p.add_mutually_exclusive_group()
    model.add_argument(
        "--shape", default="0.5b", choices=SHAPES, help="random weights (default: 0.5b)"
    )
    model.add_argument(
        "--model", metavar="M", help="a checkpoint, as a folder or hub id, in place of a shape"
    )
    add = p.add_argument
    add("--dtype", choices=DTYPES, help="(default: float32; of a checkpoint, its own)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--prompt", type=number(int, 2, 2**31 - 1), default=512, help="its tokens (default: 512)")
    add("--new", type=positive, default=32, help="further new tokens (default: 32)")
    add("--batch", type=positive, default=1, metavar="B", help="prompts at once (default: 1)")
    add("--rounds", type=positive, default=5, help="after a warm-up (default: 5)")
    known = [*OURS, *PEERS]
    default = ["greedy", "decore-entropy", "transformers", "two-pass"]
    add(
        "--methods",
        nargs="+",
        default=default,
        choices=known,
        metavar="NAME",
        help=f"{', '.join(known)} (default: {' '.join(default)})",
    )
    add("--no-graph", dest="graph", action="store_false", help="this project without CUDA graphs")
    add("--json", action="store_true", help="print one JSON line")
    args = p.parse_args()
    peers = ", ".join(name for name in args.methods if name in PEERS)
    if peers and "RANK" in os.environ:
        raise InputError(f"{peers}: not with torchrun; choose --methods greedy decore-entropy")
    if not args.graph and args.device == "cpu":
        raise InputError(
            "--no-graph has no effect without a GPU, since CUDA graphs need one; leave it out"
        )
    return args


@torch.inference_mode()
def main():
    args = parse()
    if args.model:
        start = time.perf_counter()
        model = Transformer.load(args.model, args.device, args.dtype)
        shape = model.checkpoint.read("config.json")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        row = dict(
            model=model.name,
            load_seconds=round(time.perf_counter() - start, 1),
            peak_gb=round(peak / 1e9, 2),
        )
    else:
        shape = SHAPES[args.shape]
        model = random_model(shape, args.device, find_dtype(args.dtype or "float32"))
        row = dict(shape=args.shape)
    torch.manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, [args.batch, args.prompt]).tolist()
    runs = contestants(model, args.new, args.methods, shape, args.graph)
    take_turns(runs, prompts, 1)  # warm-up
    results = take_turns(runs, prompts, args.rounds)
    row |= dict(
        dtype=str(model.dtype).removeprefix("torch."),
        prompt=args.prompt,
        new=args.new,
        batch=args.batch,
        ranks=model.shard.size,
        product=type(model.lm_head).__name__,
    )  # see runtime/pack.py
    row |= summary(results, args.batch * args.prompt, args.batch * args.new)
    row |= origin(model.device, "speed.decode")
    print(json.dumps(row) if args.json else table(row))


if __name__ == "__main__":
    sys.exit(run_program(main))
