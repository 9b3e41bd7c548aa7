"""Find the retrieval heads of a model: the heads that copy when the model answers from its context.

    python -m heads.detect --model M --out heads/M.json

Needle in a haystack (Appendix C.1 of the paper): a sentence, the needle, is hidden in a long text,
and the model is asked about it. It answers greedily. A head's score is the mean over the runs whose
answer is right. measures.py says what a run measures; needles.py makes the prompts."""

import runpy
import sys
from collections import Counter
from itertools import product

if __name__ == "__main__":
    runpy.run_module("cli.detect", run_name="__main__")  # the command line, which exits

from tqdm import tqdm

from decore import Session
from heads import MEASURES, choose_heads, load_heads
from heads.measures import answer_batch, head_scores, score_run  # noqa: F401
from runtime import files

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
