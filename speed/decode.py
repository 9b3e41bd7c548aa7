"""Speed of decoding: this project, transformers and llama.cpp in turns, compared with the memory's bandwidth.

    python -m speed.decode --shape 0.5b --dtype float32 --prompt 512 --new 32 --json
    python -m speed.decode --methods greedy decore-entropy cad dola-low dola-high ad cd
    python -m speed.decode --methods greedy decore-entropy --batch 16
    python -m speed.decode --methods greedy decore-entropy llama.cpp --llama FOLDER

    transformers    its generate()
    two-pass        DeCoRe written with transformers: two caches, two passes per token
    llama.cpp       llama-bench, in its own process; see llama.py

All contestants run once per round. The clock runs from the first new token to the last, without the prompt. Ratios are
medians over the rounds, because the load of a machine changes between rounds. `share_of_bandwidth` compares the bytes
of weights, keys and values that a token needs with the memory's bandwidth in the same round."""

import copy
import json
import os
import platform
import pprint
import re
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import baselines
import cli
import decore
from runtime.config import DTYPES
from runtime.files import commit
from runtime.pack import pack
from speed.llama import llama_bench
from speed.shapes import SHAPES, random_model, spread_heads, transformers_model, weight_bytes_read

PEERS = ("transformers", "two-pass", "llama.cpp")
RATIOS = {
    "decore_over_greedy": ("decore-entropy", "greedy"),
    "greedy_over_llama": ("greedy", "llama.cpp"),
    "greedy_over_transformers": ("greedy", "transformers"),
    "decore_over_two_pass": ("decore-entropy", "two-pass"),
}
SAME_TOKENS = (("greedy", "transformers"), ("decore-entropy", "two-pass"))


# ---------------------------------------------------------------------------------------------------------- contestants
# Each is a function → (ids of one text, seconds to the first token, seconds from the first token to the last).


def clocked(decode):
    """decode(tick) → ids, with a tick per token, as a contestant."""
    def run():
        times = [time.perf_counter()]
        ids = decode(lambda *_: times.append(time.perf_counter()))
        return ids, times[1] - times[0], times[-1] - times[1]

    return run


def this_project(model, prompts, new, settings, generate=baselines.generate):
    """cad's prompts without context are the last quarters of the prompts."""
    if settings["method"] == "cad":
        settings = settings | dict(ids_without_context=[prompt[-(len(prompt) // 4):] for prompt in prompts])
    settings = dict(max_new_tokens=new + 1, eos_ids=()) | settings
    return clocked(lambda tick: generate(model, prompts, on_token=tick, **settings)[0].ids)


def method_settings(method, model):
    c, settings = model.config, dict(method=method)
    if method in decore.METHODS[1:]:
        settings["heads"] = spread_heads(c)
    elif method == "cd":                        # the amateur has half the layers
        half = replace(c, n_layers=c.n_layers // 2, windows=c.windows[:c.n_layers // 2])
        settings["amateur"] = packed(random_model(half, model.device, model.dtype))
    elif method == "ad":
        settings["info_layer"] = c.n_layers * 3 // 4
    return settings


def packed(model):
    """The model as loading leaves it: packed on a CPU."""
    if model.device.type == "cpu":
        pack(model)
    return model


def transformers_greedy(model, prompt, new):
    twin, ids = transformers_model(model), torch.tensor([prompt], device=model.device)

    def decode(tick):
        # A streamer receives the prompt first, as a batch.
        streamer = SimpleNamespace(put=lambda tokens: tick() if tokens.dim() == 1 else None, end=lambda: None)
        return twin.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new + 1,
                             streamer=streamer)[0, len(prompt):].tolist()

    return clocked(decode)


def two_pass(model, prompt, new):
    """DeCoRe written with transformers: two copies of the cache, and two passes for each token."""
    from transformers import DynamicCache

    twins = base, masked = transformers_model(model), transformers_model(model)
    ids, K = torch.tensor([prompt], device=model.device), model.config.head_dim
    for layer, head in spread_heads(model.config):
        o = masked.model.layers[layer].self_attn.o_proj
        mask = torch.ones(o.in_features, device=model.device, dtype=model.dtype)
        mask[head * K:(head + 1) * K] = 0
        o.register_forward_pre_hook(lambda _, args, mask=mask: args[0] * mask)

    def decode(tick):
        token, out, cache = ids[:, -1:], [], DynamicCache(config=base.config)
        base(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        caches = cache, copy.deepcopy(cache)
        for _ in range(new + 1):
            log_p = [twin(token, past_key_values=cache).logits.float().log_softmax(-1)
                     for twin, cache in zip(twins, caches, strict=True)]
            token = decore.contrast(*log_p, decore.entropy(log_p[0])).argmax(-1)
            out.append(int(token))
            tick()
        return out

    return clocked(decode)


def contestants(model, prompt, new, names, batch=1, no_graph=False, gguf=None):
    """{name: (contestant, number of texts, bytes read for a token)}. Packs a model on a CPU, as loading does.

    batch, no_graph: each method of this project also runs on that many prompts, and without CUDA graphs. gguf: path
    of llama.cpp's file of the model."""
    c, weights = model.config, weight_bytes_read(model)
    cache = 2 * c.n_layers * c.n_kv_heads * c.head_dim * (len(prompt) + new) * model.dtype.itemsize
    peers = dict(zip(PEERS, (transformers_greedy, two_pass, partial(llama_bench, gguf)), strict=True))
    out = {name: (peer(model, prompt, new), 1, weights + cache) for name, peer in peers.items() if name in names}
    packed(model)                                               # after the peers, which need plain weights
    prompts = [prompt, *torch.randint(c.vocab_size, (batch - 1, len(prompt))).tolist()]
    for name in [name for name in names if name not in PEERS]:
        settings = method_settings(name, model)
        out[name] = this_project(model, [prompt], new, settings), 1, weights + cache
        if no_graph:
            ungraphed = this_project(model, [prompt], new, settings | dict(graph=False))
            out[f"{name}, no graph"] = ungraphed, 1, weights + cache
        if batch > 1:
            out[f"{name}, batch {batch}"] = this_project(model, prompts, new, settings), batch, weights / batch + cache
    return out


# ----------------------------------------------------------------------------------------------------------- the rounds


def bandwidth_meter(device):
    """A function that reads a large tensor and returns the bytes per second."""
    large = torch.ones(10**9 if device.startswith("cuda") else 3 * 10**8, device=device)

    def measure():
        large[0].item()                         # waits for a GPU, which may still compute the step that nobody reads
        start = time.perf_counter()
        large.sum().item()
        return large.nbytes / (time.perf_counter() - start)

    return measure


def measure(runs, rounds, bandwidth):
    """Runs a warm-up and the rounds → {name: [a contestant's result of each round]}, [bandwidth of each round]."""
    results, speeds, names = {name: [] for name in runs}, [], list(runs)
    for i in range(1 + rounds):
        speeds.append(bandwidth())
        for name in names[i % len(names):] + names[:i % len(names)]:        # each round starts with another contestant
            results[name].append(runs[name][0]())
    return {name: rows[1:] for name, rows in results.items()}, speeds[1:]


def quartiles(values, digits=3):
    """[first quartile, median, third quartile]."""
    return np.quantile(values, [0.25, 0.5, 0.75]).round(digits).tolist()


def summary(results, speeds, runs, prompt, new):
    """Tokens per second, their quartiles and share of the bandwidth, ratios, and how many leading tokens agree."""
    rates, prefill, share = {}, {}, {}
    for name, (_, texts, read) in runs.items():
        _, first, rest = zip(*results[name], strict=True)
        rates[name] = new * texts / np.array(rest)
        if first[0]:
            prefill[name] = round(prompt * texts / np.median(first))
        if read:
            share[name] = quartiles(rates[name] * read / speeds)[1]
    spread = {name: quartiles(rate, 2) for name, rate in rates.items()}
    ratios = {name: quartiles(rates[a] / rates[b]) for name, (a, b) in RATIOS.items() if {a, b} <= set(runs)}
    same = {f"{a} and {b}": np.equal(results[a][-1][0], results[b][-1][0]).cumprod().sum().item()
            for a, b in SAME_TOKENS if {a, b} <= set(runs)}
    return dict(
        tokens_per_second={name: q[1] for name, q in spread.items()}, quartiles=spread,
        prompt_tokens_per_second=prefill, bandwidth_gb_per_second=quartiles(np.array(speeds) / 1e9, 1),
        share_of_bandwidth=share, **{name: q[1] for name, q in ratios.items()}, ratio_quartiles=ratios,
        over_greedy={name: quartiles(rates[name] / rates["greedy"]) for name in runs if "greedy" in runs},
        same_tokens=same)


def origin(device):
    """Command, commit, date, versions and machine of a result. Call it first: it has the load before the run."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    cpu = f"{[*names, platform.processor()][0]} ({torch.backends.cpu.get_cpu_capability()})"
    versions = {d.name: d.version for d in distributions() if d.name in ("torch", "transformers")}
    return dict(command="python " + shlex.join(["-m", "speed." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
                commit=commit(), date=time.strftime("%Y-%m-%d", time.gmtime()),
                versions=dict(python=platform.python_version(), **versions),
                device=torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu,
                cores=os.cpu_count(), threads=torch.get_num_threads(), load=round(os.getloadavg()[0], 2))


def parse(arguments=None):
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    p.add_argument("--dtype", default="float32", choices=list(DTYPES))
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    p.add_argument("--prompt", type=cli.positive, default=512, help="tokens of the prompt")
    p.add_argument("--new", type=cli.positive, default=32, help="tokens to decode after the first new one")
    p.add_argument("--rounds", type=cli.positive, default=5, help="timed rounds, after a warm-up")
    p.add_argument("--methods", nargs="+", default=["greedy", "decore-entropy", "transformers", "two-pass"],
                   choices=[*baselines.METHODS, *PEERS], help="contestants")
    p.add_argument("--batch", type=cli.positive, default=1, metavar="B", help="this project also with B prompts")
    p.add_argument("--no-graph", action="store_true", help="this project also without CUDA graphs")
    p.add_argument("--llama", type=Path, metavar="FOLDER", help="of llama.cpp, which is built there once")
    p.add_argument("--json", action="store_true", help="print one JSON line")
    args = p.parse_args(arguments)
    if ("llama.cpp" in args.methods) != (args.llama is not None):
        raise ValueError("the method llama.cpp and --llama FOLDER go together; give both")
    return args


@torch.inference_mode()
def compare(args):
    """The results of a command line, as a dict."""
    row, facts = dict(shape=args.shape, dtype=args.dtype, prompt=args.prompt, new=args.new), origin(args.device)
    model = random_model(SHAPES[args.shape], args.device, DTYPES[args.dtype])
    prompt = torch.randint(model.config.vocab_size, [args.prompt]).tolist()
    gguf = args.llama and args.llama / f"{args.shape}-{args.dtype}.gguf"
    runs = contestants(model, prompt, args.new, args.methods, args.batch, args.no_graph, gguf)
    results = measure(runs, args.rounds, bandwidth_meter(args.device))
    row |= dict(product=type(model.lm_head).__name__)      # Linear, Packed or Native: see runtime/pack.py
    return row | summary(*results, runs, args.prompt, args.new) | facts


def main():
    args = parse()
    row = compare(args)
    print(json.dumps(row) if args.json else pprint.pformat(row, width=120, sort_dicts=False))


if __name__ == "__main__":
    sys.exit(cli.run(main))
