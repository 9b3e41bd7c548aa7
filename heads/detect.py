"""Find the retrieval heads of a model: the heads that copy when the model answers from its context.

    python -m heads.detect --model M --out heads/scores/M.json
    python -m heads.detect --questions FILE --model M --out heads/scores/M.json

Needle in a haystack (Appendix C.1 of the paper): a sentence, the needle, is hidden in a long text,
and the model is asked about it. It answers greedily. A head's score is the mean over the runs whose
answer is right. measures.py says what a run measures; needles.py makes the prompts."""

import sys
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from itertools import product
from runpy import run_module

from heads import MEASURES
from heads.words import is_latin, words_of
from runtime import files
from runtime.errors import InputError
from runtime.progress import Bar

SUCCESS = 0.5  # an answer is right if its recall is larger
EARLY = 20  # after so many runs, print how many answers are right
LONG = 0.25  # hours that are announced after the first runs
REMEDY = "choose another --out, or delete it"


def score_run(*run, **settings):
    """Scores of all heads in one run: `heads.measures.score_run`, which other software has here."""
    from heads.measures import score_run

    return score_run(*run, **settings)


def run_all(model, prompts, facts, path, run, min_success):
    """One record per run. run: a batch of prompts, and the bar that it may move → their records.

    Appends each batch to the file `path`, and skips the runs that the file already has. InputError
    if none of the first answers is right, unless min_success is 0."""
    rank, size = model.shard.rank, facts["batch_size"]
    records = model.shard.broadcast(None if rank else stored_runs(path, facts, prompts))
    lengths = [len(ids) for ids, _ in prompts]
    start = time.monotonic()
    first = len(records)
    with Bar(total=len(prompts), initial=first, unit="run", disable=rank > 0) as bar:
        for i in range(first, len(prompts), size):
            if i - size < EARLY <= i:
                if min_success and not any(record["right"] for record in records):
                    raise InputError(f"{right_answers(records)}; --min-success 0 goes on")
                bar.write(f"so far, {right_answers(records)}", file=sys.stderr)
            batch = run(prompts[i : i + size], bar)
            if rank == 0:
                files.append(path, batch)
            records += batch
            bar.add(len(batch))
            if i == first:
                seconds = (time.monotonic() - start) / sum(lengths[first : len(records)])
                hours = seconds * sum(lengths[len(records) :]) / 3600
                if hours >= LONG:
                    text = f"about {hours:.1f} hours are left; --runs N makes fewer runs"
                    bar.write(text, file=sys.stderr)
    return records


def stored_runs(path, facts, prompts):
    """The records in a file of runs: the facts as the header, then a line per run.

    Starts a missing file, and removes a line that was cut off. InputError for other facts, and for
    a line that is not the run of its prompt."""
    if not path.exists():
        path.touch()
    stored = stored_facts(path)
    if stored is None:
        stored = facts
    other = sorted(name for name in stored | facts if stored.get(name) != facts.get(name))
    if other:
        raise InputError(f"{path} holds runs with another {', '.join(other)}; {REMEDY}")
    records = [line for _, line in files.json_lines(path)][1:]
    for i, record in enumerate(records):
        if i == len(prompts) or not is_run(record, prompts[i][1], facts):
            raise InputError(f"{path}: line {i + 2} is not run {i + 1} of {len(prompts)}; {REMEDY}")
    files.write(path, [{"header": facts}, *records])
    return records


def stored_facts(path):
    """The facts in the header of a file of runs; None if the file is empty."""
    first = {}
    with suppress(ValueError):  # not JSON Lines
        _, first = next(files.json_lines(path), (1, None))
    if first is None:
        return None
    if not isinstance(first.get("header"), dict):
        raise InputError(f"{path}: line 1 is not the header of runs; {REMEDY}")
    return first["header"]


def is_run(record, run, facts):
    """Whether a stored record is complete, and that of a run of `make_prompts`. Records of earlier
    versions have no effect."""
    masked = facts.get("masked", {})  # of ablation.py
    fields = [field for field in MEASURES.values() if field != "effect" or field in record]
    return (
        record.keys() >= {"answer", "right"}
        and (masked or all(isinstance(record.get(field), dict) for field in fields))
        and run.items() <= record.items()
        and record.get("masked", {}).keys() == masked.keys()
    )


def run_batch(model, tokenizer, prompts, needles, facts, on_step=None):
    """One record per run: that of `answer_runs`, and the scores that are not 0. on_step: as in
    `answer_batch`."""
    from decore import prefilled
    from heads.measures import effects, head_scores

    in_prompts = [ids[slice(*run["span"])] for ids, run in prompts]  # the needles' tokens
    capacity = max(facts["max_new_tokens"], *map(len, in_prompts))
    ids = [ids for ids, _ in prompts]
    cache = prefilled(model, ids, capacity)
    of_effect = effects(model, ids, in_prompts, cache=cache)
    answered = answer_runs(model, tokenizer, prompts, needles, facts, cache=cache, on_step=on_step)
    records = []
    for prompt, (record, answer), effect in zip(ids, answered, of_effect):
        measured = head_scores(answer, prompt, record["span"], facts["published"])
        for measure, scores in (measured | {"effect": effect}).items():
            record[MEASURES[measure]] = {
                f"{layer}-{head}": round(scores[layer, head].item(), 6)
                for layer, head in scores.nonzero().tolist()
            }
        records.append(record)
    return records


def answer_runs(model, tokenizer, prompts, needles, facts, **settings):
    """(record, `Answer`) of each run. record: that of `make_prompts`, the answer, and whether it is
    right. settings: arguments of `answer_batch`."""
    from heads.measures import answer_batch  # imports torch, which the help of the program spares

    published = facts["published"]
    stops = tokenizer.eos_ids
    if published:  # their script stops at a newline of Llama 2, and at id 144 of any vocabulary
        stops = [144, tokenizer.core.token_to_id("<0x0A>")]
    ids, runs = zip(*prompts)
    spans = [run["span"] for run in runs]
    answers = answer_batch(model, ids, spans, facts["max_new_tokens"], stops, published, **settings)
    answered = []
    for run, answer in zip(runs, answers):
        text = tokenizer.decode(answer.ids).strip()
        recall = recall_of(needles[run["needle"]].real_needle, text, published)
        result = dict(answer=text, recall=round(recall, 4), right=recall > SUCCESS)
        answered.append((run | result, answer))
    return answered


def recall_of(needle, answer, published=False):
    """The share of the needle's words that the answer contains, each as often as in both: ROUGE-1
    recall. It reads a–z and 0–9 only, so unless published, needles of other letters are compared by
    `words_of`."""
    if published or is_latin(needle):
        return rouge().score(needle, answer)["rouge1"].recall
    expected = Counter(words_of(needle))
    return (expected & Counter(words_of(answer))).total() / max(expected.total(), 1)


@cache
def rouge():
    from rouge_score.rouge_scorer import RougeScorer  # slow

    return RougeScorer(["rouge1"], use_stemmer=True)


def right_answers(records):
    """How many answers are right; if none is, the first one and what to try."""
    right = sum(record["right"] for record in records)
    advice = (
        f"; the first one is {records[0]['answer'][:60]!r}: "
        "try --raw, a shorter --lengths, another --template, or an instruct model"
    )
    return f"{right} of {len(records)} answers are right" + advice * (not right)


def mean_scores(model, records, facts, min_success):
    """The content of the head file: mean scores over the runs with a right answer, and the facts.

    InputError if fewer than `min_success` answers are right, or no head has a score."""
    c = model.config
    right = [record for record in records if record["right"]]
    totals = {key: Counter() for key in MEASURES.values() if all(key in r for r in right)}
    for record in right:
        for key, total in totals.items():
            total.update(record[key])  # adds negative numbers too
    if len(right) < min_success or not totals["scores"]:
        raise InputError(
            f"{right_answers(records)} (--min-success {min_success}); "
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


if __name__ == "__main__":
    has_questions = {arg.split("=")[0] for arg in sys.argv} & {"--questions", "--task"}
    run_module("paper.questions" if has_questions else "cli.detect", run_name="__main__")
