"""Speed of decoding: our methods, transformers and llama.cpp in turns, next to the bandwidth of the memory.

    python -m benchmarks.decode --shape 0.5b --dtype float32 --prompt 512 --new 32 --json
    python -m benchmarks.decode --methods greedy decore-entropy cad dola-low dola-high ad cd decore-lite
    python -m benchmarks.decode --methods greedy decore-entropy --batch 16 --lookup 7
    python -m benchmarks.decode --methods greedy decore-entropy llama.cpp --llama FOLDER        # see llama.py

    greedy, masked, decore-static, decore-entropy, cad, dola-low, dola-high, ad, cd, decore-lite
                    ours; cd and decore-lite have an amateur of half the layers
    transformers    its generate()
    two-pass        DeCoRe as one writes it with transformers: two caches, two passes a token
    llama.cpp       llama-bench, a process of its own

A round runs each contestant once. The clock runs from the first new token to the last, so reading the prompt does not
count. Ratios are medians of the rounds' ratios, because the load of a machine changes between rounds. `share` is the
part of the bandwidth, measured in the same round, that reading weights, keys and values once a token amounts to.
"""

import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import baselines
import cli
import decore
from benchmarks import llama
from benchmarks.measure import bandwidth, origin, quartiles, read_cache, read_weights
from benchmarks.shapes import SHAPES, find_shape, random_model, spread_heads, transformers_model
from decore import contrast, entropy
from runtime.config import DTYPES, find_dtype
from runtime.pack import pack

METHODS = (*baselines.METHODS, "decore-lite")           # decore-lite: decore-entropy with an amateur
PEERS = ("transformers", "two-pass", "llama.cpp")
DEFAULT = ("greedy", "decore-entropy", "transformers", "two-pass")
RATIOS = {
    "decore_over_greedy": ("decore-entropy", "greedy"),
    "greedy_over_llama": ("greedy", "llama.cpp"),
    "greedy_over_transformers": ("greedy", "transformers"),
    "decore_over_two_pass": ("decore-entropy", "two-pass"),
}
SAME_TOKENS = (("greedy", "transformers"), ("decore-entropy", "two-pass"))


class Clock:
    """Notes when the tokens of the first text arrive: on_token of generate(), streamer of transformers."""

    def __init__(self):
        self.times = [time.perf_counter()]

    def __call__(self, b, token, entropy):
        if b == 0:
            self.times.append(time.perf_counter())

    def put(self, tokens):
        if tokens.dim() == 1:                           # the prompt comes first, as a batch
            self.times.append(time.perf_counter())

    def end(self):
        pass

    def seconds(self):
        """(to the first token, from there to the last)."""
        return self.times[1] - self.times[0], self.times[-1] - self.times[1]


# ---------------------------------------------------------------------------------------------------------- contestants
# Each is a function → (ids of one text, seconds to the first token, seconds from the first token to the last).


def ours(model, prompts, new, method, generate=baselines.generate, **settings):
    def run():
        clock = Clock()
        out = generate(model, prompts, method=method, max_new_tokens=new + 1, eos_ids=(), on_token=clock, **settings)
        return out[0].ids, *clock.seconds()

    return run


def settings_of(name, model, prompt, heads):
    """The method and its settings. Amateurs have half the layers; cad's prompt without context is the last quarter."""
    if name in ("cd", "decore-lite"):
        L = model.config.n_layers // 2
        half = replace(model.config, n_layers=L, windows=model.config.windows[:L])
        amateur = random_model(half, model.device, model.dtype, packed=True)
        return ("cd", dict(amateur=amateur)) if name == "cd" else \
            ("decore-entropy", dict(amateur=amateur, amateur_heads=spread_heads(half)))
    if name == "cad":
        return name, dict(ids_without_context=[prompt[-(len(prompt) // 4):]])
    if name == "ad":
        return name, dict(info_layer=model.config.n_layers * 3 // 4)
    return name, dict(heads=heads) if name in decore.METHODS and name != "greedy" else {}


def copying(model, prompt, new, method, k, settings):
    """Lookup of k tokens in a text that quotes its prompt: runs of 24 tokens of it, one other token between them.

    Every pass is computed, and then the scores are overruled, so that random weights decode this text."""
    half = model.config.vocab_size // 2
    prompt = torch.randperm(half)[:len(prompt)].tolist()
    text = [token for i in range(new + 1)
            for token in (*prompt[31 * i % (len(prompt) - 32):][:24], half + i % half)][:new + 1]
    target = torch.tensor(text + (k + 1) * [0], device=model.device)

    def opener(*args, **how):
        step, sessions = decore.open_decore(*args, **how)

        def overruled(tokens=None):
            first = sessions[0].cache.slots.clone()
            result = step(tokens)
            at = first[:, None] + torch.arange(result.scores.shape[1], device=first.device)
            result.scores.scatter_(-1, target[at][..., None], 1e9)
            return result

        return overruled, sessions

    return ours(model, [prompt], new, method, decore.generate, opener=opener, lookup=k, **settings)


def transformers_greedy(twin, prompt, new):
    ids = torch.tensor([prompt], device=twin.device)

    def run():
        clock = Clock()
        out = twin.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new + 1,
                            streamer=clock)
        return out[0, len(prompt):].tolist(), *clock.seconds()

    return run


def two_pass(twin, prompt, new, heads):
    """DeCoRe as one writes it with transformers today: two copies of the cache, and two passes for each token."""
    from transformers import DynamicCache

    ids, K, masking = torch.tensor([prompt], device=twin.device), twin.config.head_dim, False
    for layer in {layer for layer, _ in heads}:
        o = twin.model.layers[layer].self_attn.o_proj
        mask = torch.ones(o.in_features, device=twin.device, dtype=twin.dtype)
        for head in (head for at, head in heads if at == layer):
            mask[head * K:(head + 1) * K] = 0
        o.register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask,) if masking else None)

    def run():
        nonlocal masking
        clock, token, out, cache = Clock(), ids[:, -1:], [], DynamicCache(config=twin.config)
        twin(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        caches = cache, copy.deepcopy(cache)
        for _ in range(new + 1):
            log_p = []
            for masking, cache in enumerate(caches):            # noqa: B007 (the hooks read `masking`)
                log_p.append(twin(token, past_key_values=cache).logits.float().log_softmax(-1))
            masking = False
            token = contrast(*log_p, entropy(log_p[0])).argmax(-1)
            out.append(int(token))
            clock.put(token[0])
        return out, *clock.seconds()

    return run


def contestants(model, prompt, new, names, heads, twin=None, batch=1, lookup=0, peer=None):
    """{name: (run, number of texts, bytes that are read for a token)}.

    twin: `transformers_model(model)`. batch, lookup: our methods also run on so many prompts, and with lookup of so
    many tokens. peer: seconds of llama.cpp's decoding, as a function."""
    out, weights, cache = {}, read_weights(model), read_cache(model, len(prompt) + new)
    for name in names:
        if name == "transformers":
            out[name] = transformers_greedy(twin, prompt, new), 1, weights + cache
        elif name == "two-pass":
            out[name] = two_pass(twin, prompt, new, heads), 1, weights + cache
        elif name == "llama.cpp":
            out[name] = lambda: ([], None, peer()), 1, weights + cache
        elif name not in METHODS:
            raise ValueError(f"method {name!r} is unknown; known: {', '.join(METHODS + PEERS)}")
        else:
            method, settings = settings_of(name, model, prompt, heads)
            out[name] = ours(model, [prompt], new, method, **settings), 1, weights + cache
            if batch > 1:
                prompts = [prompt, *torch.randint(model.config.vocab_size, (batch - 1, len(prompt))).tolist()]
                more = dict(ids_without_context=batch * settings["ids_without_context"]) if name == "cad" else {}
                run = ours(model, prompts, new, method, **settings | more)
                out[f"{name}, batch {batch}"] = run, batch, weights / batch + cache
            if lookup and method in decore.METHODS:
                out[f"{name}, lookup {lookup}"] = copying(model, prompt, new, method, lookup, settings), 1, None
    return out


# ----------------------------------------------------------------------------------------------------------- the rounds


def measure(runs, rounds, read):
    """One warm-up and `rounds` rounds, each contestant in each → {name: [(ids, reading, decoding) of each round]}, and
    what `read` returns in each round: the memory's bytes per second."""
    results, speeds, names = {name: [] for name in runs}, [], list(runs)
    for i in range(1 + rounds):
        speeds.append(read())
        for name in names[i % len(names):] + names[:i % len(names)]:            # nobody always follows the same one
            results[name].append(runs[name][0]())
    return {name: rows[1:] for name, rows in results.items()}, speeds[1:]


def summary(results, speeds, runs, prompt, new):
    """Tokens per second with quartiles, their share of the bandwidth, ratios, and how many leading tokens agree."""
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


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--shape", default="0.5b", help=f"one of {', '.join(SHAPES)}")
    p.add_argument("--dtype", default="float32", choices=list(DTYPES))
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    p.add_argument("--prompt", type=cli.positive, default=512, help="tokens of the prompt")
    p.add_argument("--new", type=cli.positive, default=32, help="tokens to decode after the first new one")
    p.add_argument("--rounds", type=cli.positive, default=5, help="timed rounds; one more warms up")
    p.add_argument("--methods", nargs="+", default=list(DEFAULT), help="who runs, in this order")
    p.add_argument("--batch", type=cli.positive, default=1, metavar="B", help="our methods also with B prompts at once")
    p.add_argument("--lookup", type=cli.positive, metavar="K",
                   help="our methods also with lookup of K tokens, in a text that quotes its prompt")
    p.add_argument("--llama", type=Path, metavar="FOLDER", help="what benchmarks.llama made; for the method llama.cpp")
    p.add_argument("--json", action="store_true", help="print one JSON line")
    args = p.parse_args()
    if ("llama.cpp" in args.methods) != (args.llama is not None):
        raise ValueError("--llama FOLDER and the method llama.cpp go together; python -m benchmarks.llama makes FOLDER")
    if args.lookup and args.prompt <= 32:
        raise ValueError(f"--lookup needs a prompt to quote: give --prompt more than 32 tokens, not {args.prompt}")
    config, started = find_shape(args.shape), origin(args.device)               # the machine's load before the run
    model = random_model(config, args.device, find_dtype(args.dtype))
    twin = transformers_model(model) if {"transformers", "two-pass"} & set(args.methods) else None
    if model.device.type == "cpu":
        pack(model)
    heads, prompt = spread_heads(config), torch.randint(config.vocab_size, [args.prompt]).tolist()
    peer = llama.timer(args.llama, args.shape, args.dtype, args.prompt, args.new) if args.llama else None
    runs = contestants(model, prompt, args.new, args.methods, heads, twin, args.batch, args.lookup or 0, peer)
    results = summary(*measure(runs, args.rounds, bandwidth(args.device)), runs, args.prompt, args.new)
    results = dict(shape=args.shape, dtype=args.dtype, prompt=args.prompt, new=args.new, heads=heads) | results | \
        origin(args.device) | dict(load=started["load"])
    print(json.dumps(results) if args.json else table(results))


def table(results):
    lines = [f"{'':28} {'tokens/s':>9} {'quartiles':>19} {'share':>6} {'over greedy':>12} {'prompt tokens/s':>16}"]
    for name, (first, middle, third) in results["quartiles"].items():
        share, over = results["share_of_bandwidth"].get(name), results["over_greedy"].get(name)
        lines.append(f"{name:28} {middle:9.2f} {first:9.2f} {third:9.2f} " + f"{share or '':>6} "
                     f"{over[1] if over else '':>12} {results['prompt_tokens_per_second'].get(name, ''):>16}")
    lines += [f"{name:28} {q[1]:8.3f} ({q[0]:.3f} to {q[2]:.3f})" for name, q in results["ratio_quartiles"].items()]
    low, middle, high = results["bandwidth_gb_per_second"]
    return "\n".join([*lines, f"memory read at {middle} GB/s ({low} to {high})"])


if __name__ == "__main__":
    sys.exit(cli.run(main))
