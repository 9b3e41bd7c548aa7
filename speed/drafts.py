"""Speed of decoding with drafts from the text, beside the same without, on prompts of a task.

    python -m speed.drafts --model FOLDER --data DIR --task xsum --sample 32
    python -m speed.drafts --model FOLDER --data DIR --task ifeval --sample 16 --beside

Each prompt is decoded alone, by all contestants in turns, in each round: DeCoRe and greedy decoding
without drafts and with them; with --beside also greedy decoding by its generate(), with
prompt_lookup_num_tokens. Times of decoding begin when the prompt is read; for transformers, which
drafts while reading, with the first new tokens. Ratios are of seconds per token, quartiles over the
rounds of sums over the prompts. An answer whose tokens differ from those without drafts is shown
with the margin: by how much the token without drafts had the higher score."""

import json
import sys
import time
from os.path import commonprefix

import numpy as np
import torch

from cli.entry import run_program
from cli.models import load_models, read_models
from cli.options import positive
from decoders.setup import Setup
from paper import options
from paper.benchmark import load_benchmark
from paper.tasks import find_tasks
from speed.decode import by_generate, clock, origin, quartiles, this_project

TIMED = {"decore": "decore-entropy", "greedy": "greedy"}
RATIOS = {
    "decore": ("decore", "decore-draft"),
    "greedy": ("greedy", "greedy-draft"),
    "decore_over_greedy": ("greedy", "decore-draft"),
    "transformers": ("transformers-draft", "greedy-draft"),
}


def parse():
    p = options.make_parser()
    p.set_defaults(draft=16)
    p.add_argument("--rounds", type=positive, default=3, help="(default: 3)")
    p.add_argument("--beside", action="store_true", help="transformers too")
    args = p.parse_args()
    args.sample_seed = options.sample_seed(args)
    return args


def contestants(model, heads, eos_ids, args, new):
    """{name: contestant}, as those of speed.decode."""
    runs = {}
    for name, method in TIMED.items():
        for suffix, draft in ("", 0), ("-draft", args.draft):
            how = dict(eos_ids=eos_ids, draft=draft)
            runs[name + suffix] = this_project(model, new, heads, method, **how)
    if args.beside:
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=model.dtype)
        how = dict(eos_token_id=[*eos_ids], repetition_penalty=1.0)
        how["prompt_lookup_num_tokens"] = args.draft
        runs["transformers-draft"] = by_generate(theirs, new, **how)
    return runs


@torch.inference_mode()
def margin(model, ids, method, plain, other):
    """By how much plain's token had the higher score where the other answer leaves it."""
    at = len(commonprefix([plain, other]))
    text = ids + plain[:at]
    [[scores]] = method.start(model, [text], 1).step(torch.tensor([text[-1:]])).scores
    return float(scores[plain[at]] - scores[other[at]])


def main():
    args = parse()
    facts, tokenizer, _ = read_models(args)
    [task] = find_tasks(args.task).values()
    bench = load_benchmark(task, args, facts)
    model, _ = load_models(facts, None, args)
    heads = Setup.of("decore-entropy").with_heads(model).heads
    runs = contestants(model, heads, tokenizer.eos_ids, args, bench.max_new_tokens - 1)
    passes = []  # the time at which each pass of ours begins
    model.register_forward_pre_hook(lambda *_: passes.append(time.perf_counter()))
    seconds = {name: [] for name in runs}  # of decoding, and in all
    counts = {name: np.zeros(2) for name in runs}  # tokens, passes
    margins = {name: [] for name in TIMED}
    for ids in (e.prompt for e in bench.encoded):
        answers = {}
        for _ in range(args.rounds):
            for name, run in runs.items():
                passes.clear()
                [answers[name]], times = clock(run, [ids])
                start, *ticks, end = times
                seconds[name].append((ticks[-1] - (passes or ticks)[0], end - start))
                counts[name] += len(answers[name]), len(passes)
        for name, method in TIMED.items():
            pair = answers[name], answers[f"{name}-draft"]
            if pair[0] != pair[1]:
                record = Setup.of(method, heads=heads).record()
                margins[name].append(margin(model, ids, record, *pair))
        print(".", end="", file=sys.stderr, flush=True)
    shape = len(bench.encoded), args.rounds, 2
    totals = {name: np.reshape(times, shape).sum(0) for name, times in seconds.items()}
    row = dict(model=model.name, task=task.name, prompts=shape[0], draft=args.draft)
    row |= dict(dtype=str(model.dtype).removeprefix("torch."), rounds=args.rounds, differ=margins)
    row["tokens_per_pass"] = {n: round(t / p, 2) for n, (t, p) in counts.items() if p}
    a_token = {name: total / counts[name][0] for name, total in totals.items()}
    row["ratios"] = {}
    for name, (slow, fast) in RATIOS.items():
        if slow in runs:
            decoding, both = (a_token[slow] / a_token[fast]).T  # [rounds] each
            row["ratios"][name] = {"decoding": quartiles(decoding), "all": quartiles(both)}
    row["seconds"] = {name: total[:, 0].round(2).tolist() for name, total in totals.items()}
    print(json.dumps(row | origin(model.device, "speed.drafts")))


if __name__ == "__main__":
    sys.exit(run_program(main))
