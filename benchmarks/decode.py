"""Speed of decoding: this project, transformers and llama.cpp in turns, compared with the memory's bandwidth.

    python -m benchmarks.decode --shape 0.5b --dtype float32 --prompt 512 --new 32 --json
    python -m benchmarks.decode --methods greedy decore-entropy cad dola-low dola-high ad cd decore-lite
    python -m benchmarks.decode --methods greedy decore-entropy --batch 16 --lookup 7
    python -m benchmarks.decode --methods greedy decore-entropy llama.cpp --llama FOLDER        # see llama.py

    greedy, masked, decore-static, decore-entropy, cad, dola-low, dola-high, ad, cd, decore-lite
                    this project; in cd and decore-lite the amateur has half the layers
    transformers    its generate()
    two-pass        DeCoRe written with transformers: two caches, two passes per token
    llama.cpp       llama-bench, in its own process

All contestants run once per round. The clock runs from the first new token to the last, without the prompt. Ratios are
medians over the rounds, because the load of a machine changes between rounds. `share_of_bandwidth` compares the bytes
of weights, keys and values that a token needs with the memory's bandwidth in the same round."""

import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

import baselines
import cli
import decore
from benchmarks import llama
from benchmarks.measure import bandwidth_meter, origin, quartiles, read_cache, read_weights
from benchmarks.shapes import SHAPES, random_model, spread_heads, transformers_model
from decore import contrast, entropy
from runtime.config import DTYPES
from runtime.pack import pack

METHODS = (*baselines.METHODS, "decore-lite")           # decore-lite: decore-entropy with an amateur
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


def this_project(model, prompts, new, method, settings, generate=baselines.generate):
    """cad's prompts without context are the last quarters of the prompts."""
    if method == "cad":
        settings = settings | dict(ids_without_context=[prompt[-(len(prompt) // 4):] for prompt in prompts])
    return clocked(lambda tick: generate(model, prompts, method=method, max_new_tokens=new + 1, eos_ids=(),
                                         on_token=tick, **settings)[0].ids)


def packed(model):
    if model.device.type == "cpu":
        pack(model)
    return model


def method_and_settings(name, model):
    c = model.config
    if name in ("cd", "decore-lite"):
        half = replace(c, n_layers=c.n_layers // 2, windows=c.windows[:c.n_layers // 2])
        settings = dict(amateur=packed(random_model(half, model.device, model.dtype)))
        return ("cd", settings) if name == "cd" else \
            ("decore-entropy", settings | dict(amateur_heads=spread_heads(half)))
    if name == "ad":
        return name, dict(info_layer=c.n_layers * 3 // 4)
    return name, dict(heads=spread_heads(c)) if name in decore.METHODS and name != "greedy" else {}


def quoting(model, prompt, new, method, k, settings):
    """Lookup of k tokens in a text that quotes its prompt: runs of 24 tokens of it, one other token between them.

    Every pass is computed. Then its scores are overwritten, so that random weights decode this text."""
    half = model.config.vocab_size // 2
    prompt = torch.randperm(half)[:len(prompt)].tolist()
    text = [token for i in range(new + 1)
            for token in (*prompt[31 * i % max(1, len(prompt) - 32):][:24], half + i % half)][:new + 1]
    target = torch.tensor(text + (k + 1) * [0], device=model.device)

    def opener(*args, **more):
        step, sessions = decore.open_decore(*args, **more)

        def overwritten(tokens=None):
            first = sessions[0].cache.slots.clone()
            result = step(tokens)
            at = first[:, None] + torch.arange(result.scores.shape[1], device=first.device)
            result.scores.scatter_(-1, target[at][..., None], 1e9)
            return result

        return overwritten, sessions

    return this_project(model, [prompt], new, method, settings | dict(opener=opener, lookup=k), decore.generate)


def transformers_greedy(twin, prompt, new):
    ids = torch.tensor([prompt], device=twin.device)

    def decode(tick):
        # A streamer receives the prompt first, as a batch.
        streamer = SimpleNamespace(put=lambda tokens: tick() if tokens.dim() == 1 else None, end=lambda: None)
        return twin.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new + 1,
                             streamer=streamer)[0, len(prompt):].tolist()

    return clocked(decode)


def two_pass(twin, prompt, new, heads):
    """DeCoRe written with transformers: two copies of the cache, and two passes for each token."""
    from transformers import DynamicCache

    ids, K, masking = torch.tensor([prompt], device=twin.device), twin.config.head_dim, False
    for layer, head in heads:
        o = twin.model.layers[layer].self_attn.o_proj
        mask = torch.ones(o.in_features, device=twin.device, dtype=twin.dtype)
        mask[head * K:(head + 1) * K] = 0
        o.register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask,) if masking else None)

    def decode(tick):
        nonlocal masking
        token, out, cache = ids[:, -1:], [], DynamicCache(config=twin.config)
        twin(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        caches = cache, copy.deepcopy(cache)
        for _ in range(new + 1):
            log_p = []
            for masking, cache in enumerate(caches):            # noqa: B007 (the hooks read `masking`)
                log_p.append(twin(token, past_key_values=cache).logits.float().log_softmax(-1))
            masking = False
            token = contrast(*log_p, entropy(log_p[0])).argmax(-1)
            out.append(int(token))
            tick()
        return out

    return clocked(decode)


def contestants(model, prompt, new, names, batch=1, lookup=0, no_graph=False, llama_bench=None):
    """{name: (contestant, number of texts, bytes read for a token)}. Packs a model on a CPU, as loading does.

    batch, lookup, no_graph: each method of this project also runs on that many prompts, with lookup of that many
    tokens, and without CUDA graphs. llama_bench: see `llama.timer`."""
    twin = transformers_model(model) if {"transformers", "two-pass"} & {*names} else None       # before packing
    out, weights, cache = {}, read_weights(packed(model)), read_cache(model, len(prompt) + new)
    peers = {"transformers": lambda: transformers_greedy(twin, prompt, new),
             "two-pass": lambda: two_pass(twin, prompt, new, spread_heads(model.config)),
             "llama.cpp": lambda: lambda: ([], None, llama_bench())}
    for name in names:
        if name in peers:
            out[name] = peers[name](), 1, weights + cache
            continue
        method, settings = method_and_settings(name, model)
        out[name] = this_project(model, [prompt], new, method, settings), 1, weights + cache
        if no_graph:
            eager = settings | dict(graph=False)
            out[f"{name}, no graph"] = this_project(model, [prompt], new, method, eager), 1, weights + cache
        if batch > 1:
            prompts = [prompt, *torch.randint(model.config.vocab_size, (batch - 1, len(prompt))).tolist()]
            out[f"{name}, batch {batch}"] = (this_project(model, prompts, new, method, settings), batch,
                                             weights / batch + cache)
        if lookup and method in decore.METHODS:
            out[f"{name}, lookup {lookup}"] = quoting(model, prompt, new, method, lookup, settings), 1, None
    return out


# ----------------------------------------------------------------------------------------------------------- the rounds


def measure(runs, rounds, bandwidth):
    """Runs a warm-up and the rounds → {name: [a contestant's result of each round]}, [bandwidth of each round]."""
    results, speeds, names = {name: [] for name in runs}, [], list(runs)
    for i in range(1 + rounds):
        speeds.append(bandwidth())
        for name in names[i % len(names):] + names[:i % len(names)]:        # each round starts with another contestant
            results[name].append(runs[name][0]())
    return {name: rows[1:] for name, rows in results.items()}, speeds[1:]


def summary(results, speeds, runs, prompt, new):
    """Tokens per second, their quartiles and share of the bandwidth, ratios, and how many leading tokens agree."""
    rates = {name: [new * runs[name][1] / row[2] for row in rows] for name, rows in results.items()}

    def ratio(a, b):
        return [round(q, 3) for q in quartiles([x / y for x, y in zip(rates[a], rates[b], strict=True)])]

    def agree(a, b):
        a, b = (results[name][-1][0] for name in (a, b))
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))

    def share(name):
        used = [rate * runs[name][2] / speed for rate, speed in zip(rates[name], speeds, strict=True)]
        return round(quartiles(used)[1], 3)

    ratios = {name: ratio(*pair) for name, pair in RATIOS.items() if set(pair) <= set(runs)}
    return dict(
        tokens_per_second={name: round(quartiles(rate)[1], 2) for name, rate in rates.items()},
        quartiles={name: [round(q, 2) for q in quartiles(rate)] for name, rate in rates.items()},
        prompt_tokens_per_second={name: round(prompt * runs[name][1] / quartiles([row[1] for row in rows])[1])
                                  for name, rows in results.items() if rows[0][1]},
        bandwidth_gb_per_second=[round(q / 1e9, 1) for q in quartiles(speeds)],
        share_of_bandwidth={name: share(name) for name in rates if runs[name][2]},
        **{name: q[1] for name, q in ratios.items()},
        ratio_quartiles=ratios,
        over_greedy={name: ratio(name, "greedy") for name in rates if "greedy" in rates},
        same_tokens={f"{a} and {b}": agree(a, b) for a, b in SAME_TOKENS if {a, b} <= set(runs)},
    )


def table(results):
    columns = {"tokens/s": "quartiles", "over greedy": "over_greedy"}
    lines = [f"{'':28}" + "".join(f"{title:>24}" for title in columns) + "   median (first to third quartile)"]
    for name in results["quartiles"]:
        cells = (results[key].get(name) for key in columns.values())
        lines.append(f"{name:28}" + "".join(f"{f'{q[1]} ({q[0]} to {q[2]})' if q else '':>24}" for q in cells))
    return "\n".join(lines)


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    p.add_argument("--dtype", default="float32", choices=list(DTYPES))
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    p.add_argument("--prompt", type=cli.positive, default=512, help="tokens of the prompt")
    p.add_argument("--new", type=cli.positive, default=32, help="tokens to decode after the first new one")
    p.add_argument("--rounds", type=cli.positive, default=5, help="timed rounds, after a warm-up")
    p.add_argument("--methods", nargs="+", default=["greedy", "decore-entropy", "transformers", "two-pass"],
                   choices=[*METHODS, *PEERS], help="contestants, in this order")
    p.add_argument("--batch", type=cli.positive, default=1, metavar="B", help="this project also with B prompts")
    p.add_argument("--lookup", type=cli.positive, default=0, metavar="K",
                   help="this project also with lookup of K tokens, in a text that quotes its prompt")
    p.add_argument("--llama", type=Path, metavar="FOLDER", help="output of benchmarks.llama, for llama.cpp")
    p.add_argument("--json", action="store_true", help="print one JSON line")
    args = p.parse_args()
    if ("llama.cpp" in args.methods) != (args.llama is not None):
        raise ValueError("--llama FOLDER and the method llama.cpp go together; python -m benchmarks.llama makes FOLDER")
    config, start = SHAPES[args.shape], origin(args.device)
    model = random_model(config, args.device, DTYPES[args.dtype])
    prompt = torch.randint(config.vocab_size, [args.prompt]).tolist()
    llama_bench = llama.timer(args.llama, args.shape, args.dtype, args.prompt, args.new) if args.llama else None
    runs = contestants(model, prompt, args.new, args.methods, args.batch, args.lookup, llama_bench=llama_bench)
    results = summary(*measure(runs, args.rounds, bandwidth_meter(args.device)), runs, args.prompt, args.new)
    results = dict(shape=args.shape, dtype=args.dtype, prompt=args.prompt, new=args.new) | results | start
    print(json.dumps(results) if args.json else table(results))


if __name__ == "__main__":
    sys.exit(cli.run(main))
