"""Find the retrieval heads of a model: the heads that copy when the model answers from its context.

    python -m heads.detect --model M --out heads/M.json

Needle in a haystack (Appendix C.1 of the paper): a sentence, the needle, is hidden in a long text,
and the model is asked about it. It answers greedily. Three measures of each head in a run:

* copy, that of the paper. A head *copies* at a step if the position with its largest attention
  weight lies in the needle and contains the token that the step generates. The score is
  |copied ∩ needle tokens| / |needle tokens|.
* write (LOCOS, arXiv 2607.01002): what the head adds to the logit of the generated token y. Key j
  with probability p_j and value v_j adds φ_j = p_j · u_y · W_O v_j, if u_y is y's row of the
  language-model head. The score is Σ_needle φ − (needle's tokens / other tokens) · Σ_other φ,
  the mean over the steps that generate a token of the needle.
* mass: the head's attention to the needle, Σ_needle p, the mean over the same steps.

A head's score is the mean over the runs whose answer is right.

    S generated tokens   B batch   P prompt tokens   L layers   H query heads   C keys in the cache
    G key/value heads    K head width

needles.py makes the prompts."""

import argparse
import json
import signal
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from tqdm import tqdm

import cli
from decore import Session, make_head_mask
from heads import MEASURES, choose_heads, load_heads
from heads.needles import PUBLISHED, make_prompts, read_haystack, read_needles, spread
from runtime import files
from runtime.weights import fingerprint

HAYSTACK = Path(__file__).parent / "haystack"
TEMPLATE = (
    "{context}\n\nBased on the content of the text, answer the question.\n"
    "Question: {question}\nAnswer:"
)
SUCCESS = 0.5  # an answer is right if its ROUGE-1 recall is larger
EARLY = 20  # after so many runs, print how many answers are right

# What a stored run has, besides the record of its prompt.
RESULT = {"answer": str, "right": bool} | dict.fromkeys(MEASURES.values(), dict)


class Answer(NamedTuple):
    """A generated text, and numbers of each head at the step that generates each token,
    [S, L, H]."""

    ids: list
    positions: torch.Tensor  # position of the largest attention weight
    mass: torch.Tensor
    write: torch.Tensor  # zeros if the model does not show its values


def score_run(
    model, prompt_ids, needle, max_new_tokens=50, eos_ids=(), published=False, measure="copy"
):
    """Scores of all heads in one run [L, H], and the generated ids.

    needle: (start, end) of its tokens in the prompt. published: end the answer and count copies as
    the published runs did. measure: "copy", "write" or "mass"."""
    prompt_ids = [int(i) for i in prompt_ids]
    if not 0 <= needle[0] < needle[1] <= len(prompt_ids):
        raise ValueError(
            f"needle {tuple(needle)} is not a range of tokens in a prompt of {len(prompt_ids)}; "
            "give (first token, last token + 1)"
        )
    [answer] = answer_batch(model, [prompt_ids], [needle], max_new_tokens, eos_ids, published)
    return head_scores(answer, prompt_ids, needle, published)[measure], answer.ids


@torch.inference_mode()
def answer_batch(
    model, prompts, needles, max_new_tokens, eos_ids=(), published=False, cache=None, heads=()
):
    """Greedy answers to a batch of prompts: one `Answer` per prompt.

    An answer stops after an id of `eos_ids` or max_new_tokens tokens; unless published, also once
    it contains every token of the needle as often as the needle does. cache: that of the prompts,
    if they are read. heads: masked from the prompts' last tokens on."""
    cache = cache or Session(model, prompts, max_new_tokens).cache
    head_mask = make_head_mask([heads], model)
    token = torch.tensor([ids[-1:] for ids in prompts], device=model.device)  # [B, 1]
    start, end = torch.tensor(needles, device=model.device).T[..., None]  # [B, 1] each
    targets = [Counter(ids[start:end]) for ids, (start, end) in zip(prompts, needles)]
    answers = [[] for _ in prompts]
    running = set(range(len(prompts)))
    steps = []
    while running:
        layers = []  # L × [1, B, 1, H, C]
        token = model(token, cache, head_mask, probabilities=layers)[0].argmax(-1)
        key = torch.arange(layers[0].shape[-1], device=model.device)
        # Keys of new tokens are numbered from P on, after those of the padded prompts.
        position = torch.where(key < cache.P, key, key - cache.P + cache.lengths[:, None])
        inside = (position >= start) & (position < end)  # [B, C]
        others = cache.lengths[:, None] + 1 + len(steps) - (end - start)
        share = torch.where(inside, 1, (start - end) / others.clamp(min=1))
        layers = [p[0, :, 0] for p in layers]  # [B, H, C]
        positions = [position.gather(1, p.argmax(-1)) for p in layers]
        mass = [(p * inside[:, None]).sum(-1) for p in layers]
        values = cache.values(len(key))
        # Not in float32: copies of the values fragment the memory, by gigabytes in 50 steps.
        read = values and [
            (p * share[:, None]).unflatten(1, (v.shape[1], -1)).to(v) @ v
            for p, v in zip(layers, values)  # [B, G, H/G, K]
        ]
        steps.append((torch.stack(positions), torch.stack(mass), read, token))
        for b, new in enumerate(token[:, 0].tolist()):
            if b in running:
                answers[b].append(new)
                complete = targets[b] <= Counter(answers[b]) and not published
                if complete or new in eos_ids or len(answers[b]) == max_new_tokens:
                    running.remove(b)
    positions, mass, read, tokens = zip(*steps)
    mass = torch.stack(mass)  # [S, L, B, H]
    write = written(model, read, torch.cat(tokens, 1)) if read[0] else torch.zeros_like(mass)
    # Heads of all ranks.
    numbers = [model.shard.all_gather(x).cpu() for x in (torch.stack(positions), mass, write)]
    return [Answer(ids, *(x[: len(ids), :, b] for x in numbers)) for b, ids in enumerate(answers)]


def written(model, read, tokens):
    """What each head adds to the logit of each token: [S, L, B, H].

    read: of each step, sums of values: L of [B, G, H/G, K]. tokens: [B, S]."""
    rows = model.unembedding(tokens)  # [B, S, D]
    steps = []
    for s, layers in enumerate(read):
        logits = []
        for o, values in zip(model.output_projections(), layers):
            values = values.flatten(1, 2).to(model.dtype)  # [B, H, K]
            alone = torch.eye(values.shape[1]).to(values)[..., None] * values[:, None]
            alone = alone.flatten(-2)  # [B, H, H·K]: row h has head h only
            added = o(alone) - o(torch.zeros_like(alone[:1, :1]))  # without a bias
            logits.append((added.to(rows) @ rows[:, s, :, None])[..., 0])
        steps.append(torch.stack(logits))
    return torch.stack(steps)


def head_scores(answer, prompt_ids, needle, published=False):
    """{measure: scores of every head in one run, float64 [L, H]}.

    The paper's rule for copies counts each distinct token of the needle once, so a score is at most
    1. The published runs added 1 / (tokens of the needle) at every copy, repeats included. A needle
    that was not located, (-1, -1), scores 0."""
    start, end = needle
    ids, tokens = torch.tensor(prompt_ids), torch.tensor(answer.ids)
    inside = (answer.positions >= start) & (answer.positions < end)
    copies = inside & (ids[answer.positions.where(inside, 0)] == tokens[:, None, None])  # [S, L, H]
    distinct = set(prompt_ids[start:end])
    if published:
        copy = copies.sum(0).double() / max(end - start, 1)
    else:
        copy = sum(copies[tokens == token].any(0).double() for token in distinct) / len(distinct)
    steps = torch.tensor([token in distinct for token in answer.ids])
    write, mass = (
        x[steps].double().sum(0) / max(1, int(steps.sum())) for x in (answer.write, answer.mass)
    )
    return {"copy": copy, "write": write, "mass": mass}


def run_all(model, tokenizer, prompts, needles, facts, path, min_success):
    """One record per run.

    Appends each batch to the file `path`, and skips the runs that the file already has. ValueError
    if none of the first answers is right, unless min_success is 0."""
    rank, size = model.shard.rank, facts["batch_size"]
    records = model.shard.broadcast(None if rank else stored_runs(path, facts, prompts))
    for i in tqdm(range(len(records), len(prompts), size), unit="batch", disable=rank > 0):
        if i - size < EARLY <= i:
            if min_success and not any(record["right"] for record in records):
                raise ValueError(f"{summary(records)}; --min-success 0 goes on")
            tqdm.write(f"so far, {summary(records)}", file=sys.stderr)
        batch = run_batch(model, tokenizer, prompts[i : i + size], needles, facts)
        if rank == 0:
            files.append(path, batch)
        records += batch
    return records


def stored_runs(path, facts, prompts):
    """The records in the file of a detection: its facts as the header, then a line per run.

    Starts a missing file, and removes a line that was cut off. ValueError for a detection with
    other facts, and for a line that is not the run of its prompt."""
    path.touch()
    remedy = "delete it, or choose another --out"
    header, *records = [line for _, line in files.json_lines(path)] or [{"header": facts}]
    stored = header.get("header")
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: line 1 is not the header of a detection; {remedy}")
    other = sorted(name for name in stored | facts if stored.get(name) != facts.get(name))
    if other:
        raise ValueError(f"{path} is a detection with another {', '.join(other)}; {remedy}")
    for i, record in enumerate(records):
        if i == len(prompts) or not is_run(record, prompts[i][1]):
            raise ValueError(f"{path}: line {i + 2} is not run {i + 1} of {len(prompts)}; {remedy}")
    files.write(path, [header, *records])
    return records


def is_run(record, run):
    """Whether a stored record is complete, and that of a run of `make_prompts`."""
    kinds = {field: type(record.get(field)) for field in RESULT}
    return (
        kinds == RESULT
        and run.items() <= record.items()
        and all(type(x) is float for key in MEASURES.values() for x in record[key].values())
    )


def run_batch(model, tokenizer, prompts, needles, facts, **settings):
    """One record per run: that of `make_prompts`, the answer, whether it is right, and the scores
    that are not 0. settings: arguments of `answer_batch`."""
    from rouge_score.rouge_scorer import RougeScorer  # not needed for `score_run`

    rouge = RougeScorer(["rouge1"], use_stemmer=True)
    published = facts["published"]
    records = []
    stops = [144, tokenizer.core.token_to_id("<0x0A>")] if published else tokenizer.eos_ids
    ids, runs = zip(*prompts)
    spans = [run["span"] for run in runs]
    answers = answer_batch(model, ids, spans, facts["max_new_tokens"], stops, published, **settings)
    for prompt, run, answer in zip(ids, runs, answers):
        text = tokenizer.decode(answer.ids).strip()
        recall = rouge.score(needles[run["needle"]].real_needle, text)["rouge1"].recall
        result = dict(answer=text, recall=round(recall, 4), right=recall > SUCCESS)
        for measure, scores in head_scores(answer, prompt, run["span"], published).items():
            result[MEASURES[measure]] = {
                f"{layer}-{head}": round(scores[layer, head].item(), 6)
                for layer, head in scores.nonzero().tolist()
            }
        records.append(run | result)
    return records


def count_masked(model, tokenizer, prompts, needles, facts, sizes):
    """{name: right answers} without heads: none, and for each of `sizes` the best ones of each
    measure and three draws of random ones."""
    masked = {"none": []}
    for n in sizes:
        for measure in MEASURES:
            masked[f"{measure} {n}"] = load_heads(model, n, measure=measure)
        for seed in range(3):
            masked[f"random {n}, seed {seed}"] = choose_heads(model, None, n, "uniform", seed)
    right = Counter()
    size = facts["batch_size"]
    for i in tqdm(range(0, len(prompts), size), unit="batch", disable=model.shard.rank > 0):
        batch = prompts[i : i + size]
        cache = Session(model, [ids for ids, _ in batch], facts["max_new_tokens"]).cache
        for name, heads in masked.items():
            settings = dict(cache=cache.select(slice(None)), heads=heads)
            records = run_batch(model, tokenizer, batch, needles, facts, **settings)
            right[name] += sum(record["right"] for record in records)
    return dict(right)


def summary(records):
    """How many answers are right; if none is, the first one and what to try."""
    right = sum(record["right"] for record in records)
    advice = (
        f"; the first one is {records[0]['answer'][:60]!r}: "
        "try --raw, a shorter --lengths, another --template, or an instruct model"
    )
    return f"{right} of {len(records)} answers are right" + advice * (not right)


def mean_scores(model, records, facts, min_success):
    """The content of the head file: mean scores over the runs with a right answer, and the facts.

    ValueError if fewer than `min_success` answers are right, or no head has a score."""
    c = model.config
    right = [record for record in records if record["right"]]
    totals = {key: Counter() for key in MEASURES.values()}
    for record in right:
        for key, total in totals.items():
            total.update(record[key])  # adds negative numbers too
    if len(right) < min_success or not totals["scores"]:
        raise ValueError(
            f"{summary(records)} (--min-success {min_success}); "
            f"{len(totals['scores'])} heads copied in right ones"
        )
    heads = [f"{layer}-{head}" for layer, head in product(range(c.n_layers), range(c.n_heads))]
    return {
        "model": model.name,
        "n_layers": c.n_layers,
        "n_heads": c.n_heads,
        "samples": len(right),
        "success_rate": round(len(right) / len(records), 4),
        "facts": facts,
    } | {
        key: {head: round(total[head] / len(right), 6) for head in heads}
        for key, total in totals.items()
        if total
    }


# The command line


def lengths(text):
    """argparse type: A:B:N → N lengths from A to B tokens."""
    first, last, n = map(int, text.split(":") if ":" in text else (text, text, 1))
    if not (0 <= first <= last > 0 < n):
        raise ValueError
    return spread(first, last, n)


def template(text):
    """argparse type: a text with {context}, once, and {question}."""
    if text.count("{context}") != 1 or "{question}" not in text:
        raise argparse.ArgumentTypeError("must contain {context}, once, and {question}")
    return text.replace("\\n", "\n")


def parse_args():
    p = cli.parser("Find the retrieval heads of a model, needle-in-a-haystack.")
    add = p.add_argument
    cli.add_model_arguments(p)
    add(
        "--out",
        required=True,
        metavar="FILE",
        type=Path,
        help="head scores; FILE.runs.jsonl holds the runs",
    )
    add(
        "--lengths",
        type=lengths,
        metavar="A:B:N",
        help="N prompt lengths, A to B tokens (default: 5 up to 5000 or "
        "the model's context; with --published 1000 and 3579)",
    )
    add("--depths", type=cli.positive, default=10, help="needle depths, 0 to 100 %% (default 10)")
    add(
        "--needles",
        type=Path,
        default=HAYSTACK / "needles.jsonl",
        metavar="FILE",
        help="JSON Lines: needle, question, real_needle, the part that answers "
        "(default: heads/haystack/needles.jsonl)",
    )
    add(
        "--haystack",
        type=Path,
        default=HAYSTACK,
        metavar="DIR|FILE",
        help=".txt files, or JSON Lines of text; needle i is hidden in the i-th, in turn "
        "(default: heads/haystack)",
    )
    add(
        "--runs",
        type=cli.positive,
        metavar="N",
        help="draw N runs, needles in turn (default: every combination)",
    )
    add("--seed", type=int, help="of the needles' positions and of --runs (default 0)")
    add("--raw", action="store_true", help="plain text, no chat template")
    add(
        "--template",
        type=template,
        metavar="TEXT",
        help="contains {context} and {question}; \\n is a new line "
        "(default: the text, then the question)",
    )
    add("--max-new-tokens", type=cli.positive, default=50, help="of an answer (default 50)")
    add(
        "--masked",
        type=cli.comma_list(cli.positive),
        metavar="N[,N…]",
        help="measure no heads: count right answers without the N best of this model's head file, "
        "by each measure, and without random ones",
    )
    add("--batch-size", type=cli.positive, default=4, help="runs decoded together (default 4)")
    add(
        "--min-success",
        type=cli.number(int, 0),
        default=10,
        help="right answers needed (default 10); 0 also goes on if the first 20 are wrong",
    )
    add(
        "--published",
        action="store_true",
        help="as the published runs: needle inserted and located by token ids, "
        "their prompt, repeated tokens counted, answers end only at a new line's token or id 144",
    )
    return p.parse_args()


def make_facts(args, model, needles, texts):
    """Everything that determines the scores, as a dict for the head file. None for what is known
    with the weights only.

    model: a cli.Checkpoint. ValueError for options that do not fit."""
    published = args.published
    chat = bool(model.tokenizer.chat_template and not args.raw and not published)
    if published:
        unused = ["template", "raw", "eos"] + ["seed"] * (not args.runs)
        cli.refuse_unused(args, dict.fromkeys(unused, "with --published"))
    template_args = None
    if chat:
        template_args = cli.benchmark_template_args(model.tokenizer, args.template_args) or {}
    else:
        cli.refuse_unused(args, {"template_args": "on plain text"})
    libraries = "torch", "tokenizers", "rouge-score", *["transformers"] * args.transformers
    longest = model.config.max_positions - args.max_new_tokens
    last = min(5000, longest)
    # In a short context the needle takes most of a prompt.
    first = max(last // 5, min(400, 3 * last // 4))
    prompt_lengths = args.lengths or ([1000, 3579] if published else spread(first, last, 5))
    if prompt_lengths[-1] > longest:
        raise ValueError(
            f"--lengths: {prompt_lengths[-1]} tokens do not fit the context of {model.name} with "
            f"{args.max_new_tokens} new ones; use lengths up to {longest}"
        )
    return {
        "model": model.name,
        "fingerprint": None,
        "lengths": prompt_lengths,
        "depths": args.depths,
        "runs": args.runs,
        "seed": args.seed or 0,
        "needles": files.short_hash(json.dumps(needles).encode()),
        "haystack": files.short_hash(json.dumps(texts).encode()),
        "template": PUBLISHED if published else args.template or TEMPLATE,
        "chat": chat,
        "template_args": template_args,
        "eos": args.eos,
        "published": published,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "device": None,
        "dtype": None,
        "ranks": None,
        "engine": "transformers" if args.transformers else "own",
        "versions": {name: version(name) for name in libraries},
    }


def main():
    args = parse_args()
    runs = Path(f"{args.out}.runs.jsonl")
    if args.out.exists() and not runs.exists():
        raise ValueError(
            f"--out {args.out} exists, and its runs ({runs}) do not; "
            "delete it, or choose another --out"
        )
    needles = read_needles(args.needles)
    texts = read_haystack(args.haystack)
    checkpoint = cli.read_model(args.model, args)
    tokenizer = checkpoint.tokenizer
    facts = make_facts(args, checkpoint, needles, texts)
    prompts = make_prompts(facts, needles, texts, tokenizer)
    model = cli.load_model(args.model, args)
    cli.limit_threads(model)
    facts |= {
        "fingerprint": fingerprint(args.model),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "ranks": model.shard.size,
    }
    if args.masked:
        right = count_masked(model, tokenizer, prompts, needles, facts, args.masked)
        if model.shard.rank == 0:
            files.write(
                args.out, [dict(model=model.name, runs=len(prompts), facts=facts, right=right)]
            )
        return
    with files.locked(runs) if model.shard.rank == 0 else nullcontext():
        try:
            records = run_all(model, tokenizer, prompts, needles, facts, runs, args.min_success)
        except KeyboardInterrupt:
            print("\ninterrupted: the same command continues", file=sys.stderr)
            raise
        if model.shard.rank:
            return
        files.write(args.out, [mean_scores(model, records, facts, args.min_success)])
    if not any(record["write"] for record in records):
        print(f"write is left out: {model.name} does not show its heads' values", file=sys.stderr)
    print(f"{summary(records)}; wrote {args.out}")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
