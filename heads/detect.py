"""Find the retrieval heads of a model: the heads that copy when the model answers from its context.

    python -m heads.detect --model M --out heads/M.json

Needle in a haystack (Appendix C.1 of the paper): a sentence, the needle, is hidden in a long text,
and the model is asked about it. It answers greedily. A head's score is the mean over the runs whose
answer is right. measures.py says what a run measures; needles.py makes the prompts."""

import argparse
import json
import signal
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.metadata import version
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tqdm import tqdm

import cli
from decore import Session
from heads import MEASURES, choose_heads, load_heads
from heads.measures import answer_batch, head_scores, score_run  # noqa: F401
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
    purpose = p.add_mutually_exclusive_group()
    purpose.add_argument(
        "--masked",
        type=cli.comma_list(cli.positive),
        metavar="N[,N…]",
        help="measure no heads: count right answers without the N best of this model's head file, "
        "by each measure, and without random ones",
    )
    purpose.add_argument(
        "--min-success",
        type=cli.number(int, 0),
        default=10,
        help="right answers needed (default 10); 0 also goes on if the first 20 are wrong",
    )
    add("--batch-size", type=cli.positive, default=4, help="runs decoded together (default 4)")
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
