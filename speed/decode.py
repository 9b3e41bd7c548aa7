"""Speed of decoding: this project and transformers in turns, compared with the memory's bandwidth.

    python -m speed.decode --shape 0.5b --dtype bfloat16 --prompt 512 --new 32 --json
    torchrun --nproc-per-node 2 -m speed.decode --model FOLDER --methods greedy decore-entropy

    greedy, decore-entropy, …   methods of this project
    transformers                greedy decoding by its generate()
    two-pass                    DeCoRe written with transformers: two caches, two passes per token
    hf-greedy, hf               this project's methods on a model of transformers (--transformers)
    custom-generate             DeCoRe by generate() with custom_generate/

All contestants run once per round. The clock runs from the first new token to the last, without the
prompt. Ratios are medians over the rounds, because the load of a machine changes between rounds.
`share_of_bandwidth` compares the bytes of weights, keys and values that a token needs with the
memory's bandwidth in the same round."""

import copy
import json
import os
import re
import resource
import shlex
import sys
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import cli
import decore
from model import Linear, Transformer
from runtime.config import DTYPES
from runtime.files import commit
from runtime.pack import pack
from speed.shapes import (
    SHAPES,
    random_model,
    spread_heads,
    transformers_model,
    weight_bytes,
    with_shared_weights,
)

# -------------------------------------------------------------------------------------- contestants
# Each is a function decode(tick) → ids of the new tokens, [B, T]. It calls tick for each token.


def this_project(model, prompts, new, heads, method, graph=True):
    settings = dict(method=method, heads=heads, max_new_tokens=new + 1, eos_ids=(), graph=graph)

    def decode(tick):
        return [g.ids for g in decore.generate(model, prompts, on_token=tick, **settings)]

    return decode


def on_hf_model(twin, prompts, new, heads, method):
    """Packed, as `HFModel.load` does. twin: its modules are this contestant's own."""
    from runtime.hf import HFModel

    if twin.device.type == "cpu":
        pack(twin, torch.nn.Linear)
    return this_project(HFModel(twin, "transformers"), prompts, new, heads, method)


def by_generate(twin, prompts, new, heads, custom):
    """generate() of transformers: greedy, or with custom_generate/."""
    ids = torch.tensor(prompts, device=twin.device)
    root = str(Path(__file__).parents[1] / "integrations")
    options = dict(custom_generate=root, trust_remote_code=True, heads=heads) if custom else {}

    def decode(tick):
        # A streamer receives the prompts first, [B, P], then the tokens of each step, [B].
        streamer = SimpleNamespace(
            put=lambda tokens: tick() if tokens.dim() == 1 else None, end=lambda: None
        )
        return twin.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new + 1,
            streamer=streamer,
            **options,
        )[:, ids.shape[1] :].tolist()

    return decode


def two_pass(base, prompts, new, heads):
    """DeCoRe written with transformers: two copies of the cache, and two passes for each token.

    prompts of different lengths are padded on the left."""
    from transformers import DynamicCache

    masked, longest = with_shared_weights(base), max(map(len, prompts))
    padding = [[0] * (longest - len(p)) for p in prompts]
    rows = [zeros + p for zeros, p in zip(padding, prompts, strict=True)]
    ids = torch.tensor(rows, device=base.device)
    real = [[0] * len(zeros) + [1] * (longest - len(zeros) + new) for zeros in padding]
    real = torch.tensor(real, device=base.device)  # [B, P + new]
    places = (real.cumsum(-1) - 1).clamp(min=0)
    for layer, head in heads:
        attention = masked.model.layers[layer].self_attn
        mask = torch.ones(attention.o_proj.in_features, device=base.device, dtype=base.dtype)
        mask[head * attention.head_dim : (head + 1) * attention.head_dim] = 0
        attention.o_proj.register_forward_pre_hook(lambda _, args, mask=mask: args[0] * mask)

    def run(model, tokens, cache, start, end):
        options = dict(attention_mask=real[:, :end], position_ids=places[:, start:end])
        out = model(tokens, past_key_values=cache, logits_to_keep=1, **options)
        return out.logits.float().log_softmax(-1)

    def decode(tick):
        token, out, cache = ids[:, -1:], [], DynamicCache(config=base.config)
        if longest > 1:
            run(base, ids[:, :-1], cache, 0, longest - 1)
        caches = cache, copy.deepcopy(cache)
        for end in range(longest, longest + new + 1):
            log_p = [
                run(model, token, cache, end - 1, end)
                for model, cache in zip((base, masked), caches, strict=True)
            ]
            token = decore.contrast(*log_p, decore.entropy(log_p[0])).argmax(-1)
            out.append(token)
            tick()
        return torch.cat(out, -1).tolist()

    return decode


# Functions of (model of transformers, prompts, new, heads).
PEERS = {
    "transformers": partial(by_generate, custom=False),
    "two-pass": two_pass,
    "hf-greedy": partial(on_hf_model, method="greedy"),
    "hf": partial(on_hf_model, method="decore-entropy"),
    "custom-generate": partial(by_generate, custom=True),
}


def contestants(model, prompts, new, names, graph=True):
    """{name: contestant}. Packs a model on a CPU, as loading does."""
    heads, peers = spread_heads(model.config), [name for name in names if name in PEERS]
    twin = transformers_model(model) if peers else None  # before packing: it needs plain weights
    runs = {name: PEERS[name](with_shared_weights(twin), prompts, new, heads) for name in peers}
    if model.device.type == "cpu":
        pack(model, Linear, keep="embed")
    return runs | {
        name: this_project(model, prompts, new, heads, name, graph)
        for name in names
        if name not in PEERS
    }


def bytes_per_token(model, length, batch):
    """Bytes that decoding reads for a token of one text: its keys and values, and its share of the
    weights."""
    c = model.config
    # A pass reads one row of the embedding, but all of it if it is the head too.
    weights = weight_bytes(model) - (
        0 if model.lm_head is model.embed else model.embed.weight.nbytes
    )
    cache = (
        2 * c.n_layers * model.layers[0].attn.kv_heads * c.head_dim * length * model.dtype.itemsize
    )
    return weights / batch + cache


# --------------------------------------------------------------------------------------- the rounds


def bandwidth_meter(device):
    """A function that reads a large tensor and returns the bytes per second."""
    large = torch.ones(10**9 if device.type == "cuda" else 3 * 10**8, device=device)

    def measure():
        large[0].item()  # waits for a GPU, which may still compute the step that nobody reads
        start = time.perf_counter()
        large.sum().item()
        return large.nbytes / (time.perf_counter() - start)

    return measure


def clock(decode):
    """(ids of the first text, seconds to the first token, seconds from the first token to the
    last) of a contestant."""
    times = [time.perf_counter()]
    [ids, *_] = decode(lambda *_: times.append(time.perf_counter()))
    return ids, times[1] - times[0], times[-1] - times[1]


def measure(runs, rounds, bandwidth):
    """Runs a warm-up and the rounds → {name: [a contestant's `clock` in each round]}, [bandwidth
    in each round]."""
    results, speeds, names = {name: [] for name in runs}, [], list(runs)
    for i in range(1 + rounds):
        speeds.append(bandwidth())
        for name in (
            names[i % len(names) :] + names[: i % len(names)]
        ):  # each round starts with another contestant
            results[name].append(clock(runs[name]))
    return {name: values[1:] for name, values in results.items()}, speeds[1:]


# A contestant → those that must decode its tokens. Their speed is given relative to it.
SAME_TOKENS = {
    "transformers": ("greedy", "hf-greedy"),
    "two-pass": ("decore-entropy", "hf", "custom-generate"),
}
RATIOS = {"greedy": decore.METHODS[1:]} | SAME_TOKENS


def quartiles(values, digits=3):
    """[first quartile, median, third quartile]."""
    return np.quantile(values, [0.25, 0.5, 0.75]).round(digits).tolist()


def summary(results, speeds, read, prompt, new):
    """Rates, shares and ratios of all contestants, and how many leading tokens agree.

    read: bytes per token of a text. prompt, new: the number of tokens of all texts."""
    rates, prefill = {}, {}
    for name, rounds in results.items():
        _, first, rest = zip(*rounds, strict=True)
        rates[name] = new / np.array(rest)
        prefill[name] = round(prompt / np.median(first))
    spread = {name: quartiles(rate, 2) for name, rate in rates.items()}
    pairs = [(a, b) for b in RATIOS for a in RATIOS[b] if a in rates and b in rates]
    ratios = {
        f"{a}_over_{b}".replace("decore-entropy", "decore").replace("-", "_"): quartiles(
            rates[a] / rates[b]
        )
        for a, b in pairs
    }
    return dict(
        tokens_per_second={name: median for name, (_, median, _) in spread.items()},
        quartiles=spread,
        prompt_tokens_per_second=prefill,
        bandwidth_gb_per_second=quartiles(np.array(speeds) / 1e9, 1),
        share_of_bandwidth={
            name: quartiles(rate * read / speeds)[1] for name, rate in rates.items()
        },
        **{name: median for name, (_, median, _) in ratios.items()},
        ratio_quartiles=ratios,
        same_tokens={
            f"{a} and {b}": np.equal(results[a][-1][0], results[b][-1][0]).cumprod().sum().item()
            for a, b in pairs
            if b in SAME_TOKENS
        },
    )


def table(row):
    """A result for people."""
    lines = [f"{'':32}tokens/s  quartiles       of the bandwidth"]
    for name, (low, median, high) in row["quartiles"].items():
        share = row["share_of_bandwidth"][name]
        lines.append(f"{name:32}{median:8.2f}  {f'{low:.2f} to {high:.2f}':16}{share:.2f}")
    for name, (low, median, high) in row["ratio_quartiles"].items():
        lines.append(f"{name.replace('_', ' '):32}{median:8.2f}  {low:.2f} to {high:.2f}")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------- the program


def origin(device, program="speed.decode"):
    """Command, commit, date, versions and machine of a result.

    Call it first: it has the load before the run."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.findall(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "") + [
        "CPU"
    ]
    return dict(
        command=shlex.join(["python", "-m", program, *sys.argv[1:]]),
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        versions={name: version(name) for name in ("torch", "transformers") if find_spec(name)},
        device=(
            torch.cuda.get_device_name()
            if device == "cuda" and torch.cuda.is_available()
            else f"{cpu[0]} ({torch.backends.cpu.get_cpu_capability()})"
        ),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2),
    )


def parse():
    p = cli.parser(__doc__)
    model = p.add_mutually_exclusive_group()
    model.add_argument(
        "--shape", default="0.5b", choices=list(SHAPES), help="random weights (default: 0.5b)"
    )
    model.add_argument(
        "--model", metavar="M", help="a checkpoint, as a folder or hub id, in place of a shape"
    )
    p.add_argument(
        "--dtype", choices=list(DTYPES), help="(default: float32; of a checkpoint, its own)"
    )
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    p.add_argument(
        "--prompt",
        type=cli.number(int, 2, 2**31 - 1),
        default=512,
        help="its tokens (default: 512)",
    )
    p.add_argument("--new", type=cli.positive, default=32, help="further new tokens (default: 32)")
    p.add_argument(
        "--batch", type=cli.positive, default=1, metavar="B", help="prompts at once (default: 1)"
    )
    p.add_argument("--rounds", type=cli.positive, default=5, help="after a warm-up (default: 5)")
    known, default = (
        [*decore.METHODS, *PEERS],
        ["greedy", "decore-entropy", "transformers", "two-pass"],
    )
    p.add_argument(
        "--methods",
        nargs="+",
        default=default,
        choices=known,
        metavar="NAME",
        help=f"{', '.join(known)} (default: {' '.join(default)})",
    )
    p.add_argument("--no-graph", action="store_true", help="this project without CUDA graphs")
    p.add_argument("--json", action="store_true", help="print one JSON line")
    args = p.parse_args()
    peers = ", ".join(name for name in args.methods if name in PEERS)
    if peers and not find_spec("transformers"):
        raise ImportError(
            f"{peers}: pip install transformers, or choose --methods greedy decore-entropy"
        )
    if peers and "RANK" in os.environ:
        raise ValueError(f"{peers}: not with torchrun; choose --methods greedy decore-entropy")
    if args.no_graph and args.device == "cpu":
        raise ValueError(
            "--no-graph has no effect without a GPU, since CUDA graphs need one; leave it out"
        )
    return args


@torch.inference_mode()
def main():
    args = parse()
    facts, start = origin(args.device), time.perf_counter()
    if args.model:
        model = Transformer.load(args.model, args.device, args.dtype)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        row = dict(
            model=model.name,
            load_seconds=round(time.perf_counter() - start, 1),
            peak_gb=round(peak / 1e9, 2),
        )
    else:
        model = random_model(SHAPES[args.shape], args.device, DTYPES[args.dtype or "float32"])
        row = dict(shape=args.shape)
    torch.manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, [args.batch, args.prompt]).tolist()
    read = bytes_per_token(model, args.prompt + args.new, args.batch)
    runs = contestants(model, prompts, args.new, args.methods, not args.no_graph)
    results, speeds = measure(runs, args.rounds, bandwidth_meter(model.device))
    row |= dict(
        dtype=str(model.dtype).removeprefix("torch."),
        prompt=args.prompt,
        new=args.new,
        batch=args.batch,
        ranks=model.shard.size,
        product=type(model.lm_head).__name__,
    )  # see runtime/pack.py
    row |= summary(results, speeds, read, args.batch * args.prompt, args.batch * args.new) | facts
    print(json.dumps(row) if args.json else table(row))


if __name__ == "__main__":
    sys.exit(cli.run(main))
