"""Speed of decoding with drafts from the text, beside the same without, on prompts of a task.

    python -m speed.drafts --model FOLDER --data DIR --task xsum --sample 32 --json
    python -m speed.drafts --model FOLDER --data DIR --task ifeval --sample 16 --beside

Each prompt is decoded alone, by all contestants in turns, in each round: DeCoRe and greedy decoding
without drafts and with them; with --beside also greedy decoding by its generate(), with
prompt_lookup_num_tokens. Times are wall and processor seconds; those of decoding begin when the
prompt is read; for transformers, which drafts while reading, with the first new tokens. Ratios are
quartiles over the rounds, of sums over the prompts. An answer whose tokens differ from those
without drafts is shown with the margin: by how much the token without drafts had the higher
score."""

import json
import sys
import time
from functools import partial

import numpy as np
import torch

from cli.entry import run_program
from cli.models import load_models, read_models
from cli.options import number, positive
from decore import DeCoRe, Greedy, generate
from heads import choose_heads
from paper import options
from paper.benchmark import load_benchmark
from paper.tasks import find_tasks
from speed.decode import by_generate, origin, quartiles

RATIOS = {
    "decore": ("decore", "decore-draft"),
    "greedy": ("greedy", "greedy-draft"),
    "decore_over_greedy": ("greedy", "decore-draft"),
    "transformers": ("transformers-draft", "greedy-draft"),
}


def parse(argv):
    p = options.make_parser()
    p.set_defaults(draft=16)
    add = p.add_argument_group("drafts").add_argument
    add("--rounds", type=positive, default=3)
    add("--first", type=number(int, 1), default=None, metavar="N", help="prompts of the sample")
    add("--new", type=positive, default=None, metavar="N", help="tokens of an answer at most")
    add("--beside", action="store_true", help="transformers too")
    add("--json", action="store_true")
    args = p.parse_args([*argv, "--method", "greedy", "--out", "unused"])
    args.sample_seed = options.sample_seed(args)
    return args


def clock():
    return time.perf_counter(), time.process_time()


def timed(answer, passes):
    """Seconds of answer(tick), which calls tick after each token → its ids, and wall and processor
    seconds, of decoding and in all. passes: gets the time at which each pass of ours begins."""
    passes.clear()
    ticks = []
    start = clock()
    ids = answer(lambda *_: ticks.append(clock()))
    end = clock()
    first, last = (passes or ticks)[0], ticks[-1]
    seconds = dict(decoding=last[0] - first[0], all=end[0] - start[0])
    cpu = dict(decoding_cpu=last[1] - first[1], all_cpu=end[1] - start[1])
    return ids, seconds | cpu


def contestants(model, hf, method, args, limit, eos_ids):
    """{name: function of (ids, tick) → new ids}."""

    def ours(method, draft):
        how = dict(max_new_tokens=limit, eos_ids=eos_ids, draft=draft)
        return lambda ids, tick: generate(model, ids, method, on_token=tick, **how).ids

    runs = {}
    for name, one in (("decore", method), ("greedy", Greedy())):
        runs[name] = ours(one, 0)
        runs[f"{name}-draft"] = ours(one, args.draft)
    if hf:
        how = dict(eos_token_id=[*eos_ids], repetition_penalty=1.0)
        theirs = by_generate(hf, limit - 1, prompt_lookup_num_tokens=args.draft, **how)
        runs["transformers-draft"] = lambda ids, tick: theirs([ids], tick)[0]
    return runs


def margin(model, ids, method, plain, other):
    """By how much plain's token had the higher score where the other answer leaves it."""
    at = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), None)
    if at is None:
        return None
    with torch.inference_mode():
        text = ids + plain[:at]
        decoding = method.start(model, [text], 1)
        [[scores]] = decoding.step(torch.tensor([text[-1:]])).scores
    return float(scores[plain[at]] - scores[other[at]])


def main():
    args = parse(sys.argv[1:])
    checkpoint, tokenizer, _ = read_models(args)
    [task] = find_tasks(args.task).values()
    bench = load_benchmark(task, args, checkpoint)
    hf = None
    if args.beside:
        from transformers import AutoModelForCausalLM

        hf = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype or "float32")
    model, _ = load_models(checkpoint, None, args)
    method = DeCoRe(choose_heads(model, None, 10, None, None, "copy")[0])
    limit = args.new or bench.max_new_tokens
    runs = contestants(model, hf, method, args, limit, tokenizer.eos_ids)
    prompts = [e.prompt for e in bench.encoded][: args.first]
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(clock()))
    totals = [{name: {} for name in runs} for _ in range(args.rounds)]
    counts = {name: [0, 0] for name in runs}  # tokens, passes
    margins = {"decore": [], "greedy": []}
    for ids in prompts:
        for number_of_round, of_round in enumerate(totals):
            answers = {}
            for name, run in runs.items():
                answers[name], seconds = timed(partial(run, ids), passes)
                for kind, x in seconds.items():
                    of_round[name][kind] = of_round[name].get(kind, 0) + x
                if number_of_round == 0:
                    counts[name][0] += len(answers[name])
                    counts[name][1] += len(passes)
        for name, one in (("decore", method), ("greedy", Greedy())):
            if answers[name] != answers[f"{name}-draft"]:
                found = margin(model, ids, one, answers[name], answers[f"{name}-draft"])
                margins[name].append(found)
        print(".", end="", file=sys.stderr, flush=True)
    row = dict(model=model.name, task=task.name, prompts=len(prompts), draft=args.draft)
    row |= dict(dtype=str(model.dtype).removeprefix("torch."), rounds=args.rounds, differ=margins)
    row["tokens_per_pass"] = {n: round(t / p, 2) for n, (t, p) in counts.items() if p}
    row["ratios"] = {
        name: {
            kind: quartiles(np.array([r[slow][kind] / r[fast][kind] for r in totals]))
            for kind in ("decoding", "decoding_cpu", "all", "all_cpu")
        }
        for name, (slow, fast) in RATIOS.items()
        if slow in runs
    }
    row["seconds"] = {name: [round(r[name]["decoding"], 2) for r in totals] for name in runs}
    row |= origin(model.device, "speed.drafts")
    print(json.dumps(row, indent=None if args.json else 1))


if __name__ == "__main__":
    sys.exit(run_program(main))
