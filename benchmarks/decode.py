"""Speed of greedy decoding and DeCoRe, beside transformers, llama.cpp and the memory itself, interleaved in one run.

    python -m benchmarks.decode --shape 0.5b --dtype float32 --prompt 512 --new 32 --json
    python -m benchmarks.decode --methods greedy decore-entropy cad dola-low dola-high ad cd decore-lite
    python -m benchmarks.decode --methods greedy decore-entropy llama.cpp --llama FOLDER        # see peers/llama.py

    greedy, masked, decore-static, decore-entropy, cad, dola-low, dola-high, ad, cd, decore-lite
                    ours; cd and decore-lite have an amateur of half the layers
    transformers    its generate()
    two-pass        DeCoRe as one writes it with transformers: two caches, two passes a token
    llama.cpp       llama-bench, a process of its own
    batch           greedy, sixteen prompts at once
    lookup, decore-lookup       with proposals of up to seven tokens, where the text is mostly copied from the prompt
    read, transformers-read     the prompt itself, in tokens per second

But for the last two, decoding only: before the clock starts every contestant has read the prompt but for its last
token; then it decodes `--new` tokens. One round runs each contestant once, and reads 1.2 GB of memory. Ratios are
medians of the rounds' ratios, so that a change of the machine's load between rounds does not count. `share` is what
reading weights, keys and values once a token amounts to of the bandwidth measured in that round.
"""

import copy
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import baselines
import cli
import decore
from benchmarks import lookup
from benchmarks.measure import bandwidth, cached, origin, peak_memory, quartiles, read_weights
from benchmarks.peers import llama
from benchmarks.shapes import SHAPES, find_shape, random_model, shallower, spread_heads, transformers_model
from decore import contrast, entropy, generate
from runtime.config import DTYPES
from runtime.fast import record
from runtime.pack import amx, pack

CONTESTANTS = ("greedy", "decore-entropy", "transformers", "two-pass")
METHODS = (*baselines.METHODS, "decore-lite")           # decore-lite: decore-entropy with an amateur
OTHERS = ("llama.cpp", "batch", "lookup", "decore-lookup", "read", "transformers-read")
BATCH, AHEAD = 16, 7
RATIOS = {
    "decore_over_greedy": ("decore-entropy", "greedy"),
    "greedy_over_llama": ("greedy", "llama.cpp"),
    "greedy_over_transformers": ("greedy", "transformers"),
    "decore_over_two_pass": ("decore-entropy", "two-pass"),
    "read_over_transformers": ("read", "transformers-read"),
}
SAME_TOKENS = (("greedy", "transformers"), ("decore-entropy", "two-pass"))


# A contestant reads the prompt and → (prepare, tokens per run, bytes that are read for a token). prepare() does what is
# not timed and → run. run() → the new tokens, or the seconds if it has its own clock.


def ours(model, prompts, new, method, settings, text=None, ahead=0):
    """text: what is decoded whatever the scores, see lookup.py; ahead: tokens that lookup proposes."""
    step, caches = baselines.opener_of(method)(model, prompts, new + ahead, method, **settings)
    if model.device.type == "cuda":
        step = record(step, caches, torch.tensor([p[-1:] for p in prompts], device=model.device), (1, ahead + 1))
    step = step if text is None else lookup.force(step, caches[0], text)[0]
    given = prompts if ahead else [p[-1:] for p in prompts]             # what has been read need not be checked again

    def prepare():
        for cache in caches:
            cache.slots.zero_()
        return lambda: generate(model, given, max_new_tokens=new, eos_ids=(), lookup=ahead, compile="no",
                                opener=lambda *_: (step, caches))[0].ids

    return prepare, new * len(prompts), (read_weights(model) + cached(caches)) / len(prompts)


def settings_of(name, model, prompt, heads):
    """The method and what it needs. Amateurs have half the model's layers; a prompt's last quarter has no context."""
    if name in ("cd", "decore-lite"):
        amateur = random_model(shallower(model.config, model.config.n_layers // 2), model.device, model.dtype)
        if model.device.type == "cpu":
            pack(amateur)
        return ("cd", dict(amateur=amateur)) if name == "cd" else \
            ("decore-entropy", dict(amateur=amateur, amateur_heads=spread_heads(amateur.config)))
    if name == "cad":
        return name, dict(ids_without_context=[prompt[-(len(prompt) // 4):]])
    if name == "ad":
        return name, dict(info_layer=model.config.n_layers * 3 // 4)
    return name, dict(heads=heads) if name in decore.METHODS and name != "greedy" else {}


def reading(model, prompt):
    """Prefill of our own."""
    ids, lengths = torch.tensor([prompt], device=model.device), torch.tensor([len(prompt)])

    def prepare():
        cache = model.cache(lengths, 1)
        return lambda: model.prefill(ids, cache) or []

    return prepare, len(prompt), None


def transformers_reading(twin, prompt):
    ids = torch.tensor([prompt], device=twin.device)
    return lambda: (lambda: read_prompt(twin, ids, 0) and []), len(prompt), None


def transformers_greedy(twin, prompt, new, per_token):
    """generate() with its default cache."""
    ids = torch.tensor([prompt], device=twin.device)
    kept = read_prompt(twin, ids)

    def prepare():
        cache = copy.deepcopy(kept)
        return lambda: twin.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                                     max_new_tokens=new)[0, len(prompt):].tolist()

    return prepare, new, per_token


def two_pass(twin, prompt, new, heads, per_token):
    """DeCoRe as one writes it with transformers today: two copies of the cache, and two passes for each token."""
    ids = torch.tensor([prompt], device=twin.device)
    kept = read_prompt(twin, ids)
    masking = False
    K = twin.config.head_dim
    for layer in {layer for layer, _ in heads}:
        o = twin.model.layers[layer].self_attn.o_proj
        mask = torch.ones(o.in_features, device=twin.device, dtype=twin.dtype)
        for h in (h for at, h in heads if at == layer):
            mask[h * K:(h + 1) * K] = 0
        o.register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask,) if masking else None)

    def prepare():
        caches = copy.deepcopy(kept), copy.deepcopy(kept)

        def run():
            nonlocal masking
            token, out = ids[:, -1:], []
            for _ in range(new):
                log_p = []
                for masking, cache in enumerate(caches):        # noqa: B007 (the hooks read `masking`)
                    log_p.append(twin(token, past_key_values=cache).logits.float().log_softmax(-1))
                masking = False
                token = contrast(*log_p, entropy(log_p[0])).argmax(-1)
                out.append(int(token))
            return out

        return run

    return prepare, new, per_token


def read_prompt(twin, ids, waiting=1):
    """A cache that holds the prompt but for its last tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=twin.config)
    twin(ids[:, :ids.shape[1] - waiting], past_key_values=cache, logits_to_keep=1)
    return cache


def llama_cpp(folder, shape, dtype, prompt, new, per_token):
    """llama-bench times itself; its weights and keys and values count as ours do."""
    program, weights = llama.made(folder, shape, dtype)
    return lambda: lambda: llama.bench(program, weights, prompt, new, torch.get_num_threads())[0], new, per_token


def contestants(model, prompt, new, names, heads, twin=None, llama_folder=None, about=()):
    """Name → (prepare, tokens per run, bytes per token). Prompts are read here.

    twin: `transformers_model(model)`, of a model that is not packed. about: the names of shape and dtype."""
    out, per_token = {}, read_weights(model) + cached([model.cache(torch.tensor([len(prompt)]), new)])
    for name in names:
        if name == "transformers":
            out[name] = transformers_greedy(twin, prompt, new, per_token)
        elif name == "two-pass":
            out[name] = two_pass(twin, prompt, new, heads, per_token)
        elif name == "transformers-read":
            out[name] = transformers_reading(twin, prompt)
        elif name == "read":
            out[name] = reading(model, prompt)
        elif name == "llama.cpp":
            out[name] = llama_cpp(llama_folder, *about, len(prompt), new, per_token)
        elif name == "batch":
            others = torch.randint(model.config.vocab_size, (BATCH - 1, len(prompt))).tolist()
            out[name] = ours(model, [prompt, *others], new, "greedy", {})
        elif name in ("lookup", "decore-lookup"):
            method = "greedy" if name == "lookup" else "decore-entropy"
            (copied, text), = lookup.forced(model.config.vocab_size, len(prompt), new)["copying"]
            out[name] = ours(model, [copied], new, *settings_of(method, model, copied, heads), text, AHEAD)
        elif name in METHODS:
            out[name] = ours(model, [prompt], new, *settings_of(name, model, prompt, heads))
        else:
            known = dict.fromkeys(CONTESTANTS + METHODS + OTHERS)
            raise ValueError(f"method {name!r} is unknown; known: {', '.join(known)}")
    return out


def measure(contestants, rounds, read=lambda: 0.0, wait=lambda: None, realtime=False):
    """Run all in turn, one warm-up and `rounds` times → seconds {name: [rounds]}, tokens {name: ids}, and [rounds] of
    what `read` returns: the bytes per second of the memory."""
    seconds, tokens, speeds, names = {name: [] for name in contestants}, {}, [], list(contestants)
    for i in range(1 + rounds):
        with priority(realtime):
            speeds.append(read())
        for name in names[i % len(names):] + names[:i % len(names)]:            # nobody always follows the same one
            run = contestants[name][0]()
            wait()
            with priority(realtime):
                start = time.perf_counter()
                found = run()
                wait()
                took = time.perf_counter() - start
            tokens[name] = [] if isinstance(found, float) else found
            seconds[name].append(found if isinstance(found, float) else took)
    return {name: s[1:] for name, s in seconds.items()}, tokens, speeds[1:]


@contextmanager
def priority(realtime):
    """Go before all other programs, where asked; before that the machine is theirs for a while (Linux, root)."""
    if not realtime:
        yield
        return
    time.sleep(0.5)
    try:
        set_policy(os.SCHED_FIFO)
        yield
    finally:
        set_policy(os.SCHED_OTHER)


def set_policy(policy):
    """Schedule all threads of this process so."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):                      # a thread may end meanwhile
            os.sched_setscheduler(int(thread), policy, os.sched_param(int(policy == os.SCHED_FIFO)))


def summary(seconds, tokens, speeds, contestants, new):
    """Tokens per second with quartiles, their share of the bandwidth, ratios, and how many leading tokens agree."""
    rates = {name: [contestants[name][1] / s for s in all_of] for name, all_of in seconds.items()}

    def ratio(a, b):
        return [round(q, 3) for q in quartiles([x / y for x, y in zip(rates[a], rates[b], strict=True)])]

    def share(name):
        used = [rate * contestants[name][2] / speed for rate, speed in zip(rates[name], speeds, strict=True)]
        return round(quartiles(used)[1], 3)

    def agree(a, b):
        return next((i for i, (x, y) in enumerate(zip(tokens[a], tokens[b], strict=True)) if x != y), new)

    ratios = {name: ratio(*pair) for name, pair in RATIOS.items() if set(pair) <= set(seconds)}
    return dict(
        tokens_per_second={name: round(quartiles(r)[1], 2) for name, r in rates.items()},
        quartiles={name: [round(q, 2) for q in quartiles(r)] for name, r in rates.items()},
        bandwidth_gb_per_second=[round(q / 1e9, 1) for q in quartiles(speeds)],
        share_of_bandwidth={name: share(name) for name in rates if contestants[name][2]},
        **{name: q[1] for name, q in ratios.items()},
        ratio_quartiles=ratios,
        over_greedy={name: ratio(name, "greedy") for name in rates if "greedy" in rates and contestants[name][2]},
        same_tokens={f"{a} and {b}": agree(a, b) for a, b in SAME_TOKENS if {a, b} <= set(seconds)},
        seconds={name: [round(x, 4) for x in s] for name, s in seconds.items()},
    )


@torch.inference_mode()
def main():
    parser = cli.parser("Speed of greedy decoding and DeCoRe, beside transformers, llama.cpp and the memory itself.")
    parser.add_argument("--shape", default="0.5b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--prompt", type=cli.positive, default=512, help="tokens of the prompt")
    parser.add_argument("--new", type=cli.positive, default=32, help="tokens to decode")
    parser.add_argument("--rounds", type=cli.positive, default=5, help="timed rounds; one more warms up")
    parser.add_argument("--methods", nargs="+", default=list(CONTESTANTS), help="who runs, in this order")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="what benchmarks.peers.llama built")
    parser.add_argument("--realtime", action="store_true",
                        help="timed parts go before all other programs: for a machine that is in use (Linux, root)")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    if ("llama.cpp" in args.methods) != (args.llama is not None):
        raise ValueError("--llama FOLDER and the method llama.cpp go together; "
                         "python -m benchmarks.peers.llama FOLDER builds it")

    config, started = find_shape(args.shape), origin(args.device)       # the load is that of before the run
    model = random_model(config, args.device, DTYPES[args.dtype])
    twin = transformers_model(model) if {"transformers", "two-pass", "transformers-read"} & set(args.methods) else None
    if args.device == "cpu":
        pack(model)
    heads = spread_heads(config)
    prompt = torch.randint(config.vocab_size, [args.prompt]).tolist()
    wait = torch.cuda.synchronize if torch.device(args.device).type == "cuda" else lambda: None
    runs = contestants(model, prompt, args.new, args.methods, heads, twin, args.llama, (args.shape, args.dtype))
    found = measure(runs, args.rounds, bandwidth(args.device), wait, args.realtime)
    result = dict(shape=args.shape, dtype=args.dtype, amx=args.dtype == "bfloat16" and args.device == "cpu" and amx(),
                  prompt=args.prompt, new=args.new, heads=heads,
                  **summary(*found, runs, args.new), peak_memory_gib=peak_memory(args.device),
                  **origin(args.device) | dict(load=started["load"]))
    print(json.dumps(result) if args.json else table(result))


def table(result):
    low, middle, high = result["bandwidth_gb_per_second"]
    lines = [f"{'':18} {'tokens/s':>9} {'quartiles':>19} {'share':>6} {'over greedy':>12}"]
    for name, (first, speed, third) in result["quartiles"].items():
        share, over = result["share_of_bandwidth"].get(name), result["over_greedy"].get(name)
        lines.append(f"{name:18} {speed:9.2f} {first:9.2f} {third:9.2f} " + (f"{share:6.2f} " if share else " " * 7)
                     + (f"{over[1]:12.3f}" if over else ""))
    lines += [f"{name:26} {q[1]:8.3f} ({q[0]:.3f} to {q[2]:.3f})" for name, q in result["ratio_quartiles"].items()]
    return "\n".join([*lines, f"memory read at {middle} GB/s ({low} to {high})"])


if __name__ == "__main__":
    sys.exit(cli.run(main))
