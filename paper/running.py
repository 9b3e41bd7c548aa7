"""The runs of a benchmark: each batch of items is decoded with each of them, into its file
(runfile.py).

Runs of DeCoRe are decoded side by side, see decoders/sweep.py."""

import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import decore
from decoders import scoring
from decoders.baselines import CAD
from decoders.setup import Setup
from decoders.sweep import PromptsReadOnce, side_by_side
from decore import Greedy, Masked
from model import Transformer
from paper import runfile
from paper.benchmark import Benchmark, in_batches
from paper.tasks import answers
from runtime import files
from runtime.checks import amateur_of
from runtime.progress import Bar


class Run(NamedTuple):
    bench: Benchmark
    setup: Setup
    header: dict  # the first line of its file
    method: decore.Method
    path: Path


def run_benchmark(runs, model, tokenizer, ranks):
    """Answer the items of one benchmark that the runs' files lack. Returns the lines of each run in
    the data's order; None on other ranks than 0.

    ranks: `parallel.Ranks`, whose replicas of the model answer a batch each at a time. Rank 0 alone
    opens the runs' files."""
    bench = runs[0].bench
    with ExitStack() as stack:
        if ranks.rank == 0:
            for run in runs:
                stack.enter_context(files.locked(run.path))
        done = ranks.share(lambda: {run.path: stored_items(run) for run in runs})
        name = runs[0].path.stem if len(runs) == 1 else f"{bench.task.name}, {len(runs)} runs"
        counts = dict(total=len(bench.encoded) * len(runs), initial=sum(map(len, done.values())))
        bar = stack.enter_context(Bar(desc=name, unit="ex", **counts))
        answer_missing(runs, done, model, tokenizer, ranks, bar)
        if ranks.rank == 0:
            return [runfile.finish(run.path) for run in runs]


def stored_items(run):
    """The indices of the items whose lines are in the file of a run."""
    return set(runfile.open_run(run.path, run.header, run.bench.questions))


def answer_missing(runs, done, model, tokenizer, ranks, bar):
    """Append the lines that are missing, batch by batch.

    done: run's path → indices of its items that have a line."""
    known = set.intersection(*done.values())
    batches = missing_batches(runs[0].bench.encoded, runs[0].header["batch_size"], known, ranks)
    models = {model, *(amateur_of(run.method, model) for run in runs)}
    for first in range(0, len(batches), ranks.replicas):
        batch = batches[first + ranks.replica]
        readers = {m: PromptsReadOnce(m) if len(runs) > 1 else m for m in models}
        for group in in_groups(runs, model):
            lacking = [run for run in group if any(e.index not in done[run.path] for e in batch)]
            how = model, readers, tokenizer, bar.update
            answered = ranks.gather(partial(missing_lines, lacking, batch, done, *how))
            for run in group:
                lines = [line for path, line in answered if path == run.path]
                if lines and ranks.rank == 0:
                    files.append(run.path, lines)
            bar.add(len(answered))  # those of other replicas too


def missing_lines(runs, batch, done, model, readers, tokenizer, on_part):
    """[(run's path, line)] of the items of a batch that are not done. The arguments are those of
    `answer_missing` and `answers_of`."""
    if not runs:
        return []
    start = time.perf_counter()
    lists = answers_of(batch, runs, model, readers, tokenizer, on_part)
    seconds = (time.perf_counter() - start) / (len(batch) * len(runs))
    questions = runs[0].bench.questions
    return [
        (run.path, questions[e.index] | line | {"seconds": round(seconds, 6)})
        for run, answers in zip(runs, lists)
        for e, line in zip(batch, answers)
        if e.index not in done[run.path]
    ]


def in_groups(runs, model):
    """The runs in groups that decode side by side: those of DeCoRe's own methods, whose rows share
    passes, and each other run alone. With transformers or masked prompts different texts
    share no pass, and drafts are of one text."""
    groups = defaultdict(list)
    for run in runs:
        method = run.method
        shares = isinstance(method, Greedy | Masked) and not amateur_of(method, None)
        if not run.bench.task.choice:
            shares &= not run.header["draft"]
            shares &= isinstance(model, Transformer) and not getattr(method, "mask_prompt", False)
        groups[None if shares else run.path].append(run)
    return groups.values()


def missing_batches(encoded, size, known, ranks):
    """The batches with items whose indices are not known, a multiple of the replicas."""
    batches = in_batches(encoded, size)
    counts = [sum(e.index in known for e in batch) for batch in batches]
    cut = sum(0 < n < len(batch) for n, batch in zip(counts, batches))
    if cut > ranks.replicas:  # the run was not interrupted, but is to have more items
        batches = in_batches([e for e in encoded if e.index not in known], size)
    batches = [batch for batch in batches if not known.issuperset(e.index for e in batch)]
    return batches + [[]] * (-len(batches) % ranks.replicas)


def answers_of(batch, runs, model, readers, tokenizer, on_part):
    """For each run its answers to the items of a batch, as fields of their lines.

    readers: model → what reads for it. on_part(x) is called when x answers more are complete, such
    as 1 / 128 of one."""
    methods = [method_for(run, batch, readers) for run in runs]
    if runs[0].bench.task.choice:
        return scores_of(batch, runs, methods, readers[model], on_part)
    draft = runs[0].header["draft"] or 0
    return texts_of(batch, runs[0].bench, methods, readers[model], tokenizer, on_part, draft)


def scores_of(batch, runs, methods, reader, on_part):
    """Multiple choice: the scores of the candidates, true ones first."""
    bench = runs[0].bench
    texts = [e.prompt for e in batch], [e.answers for e in batch]
    results = scoring.loglikelihoods(
        reader,
        *texts,
        methods,
        renormalise=all(run.setup.renormalise is not False for run in runs),
        on_prompt=lambda: on_part(len(runs)),
    )
    return [
        [fields_of_choice(bench, e, values) for e, values in zip(batch, sums)]
        for sums, _ in results
    ]


def texts_of(batch, bench, methods, reader, tokenizer, on_part, draft):
    """Generated texts, each with its ids, alphas and entropies."""
    limit = bench.max_new_tokens
    tokens = Counter()  # of each text

    def on_token(b, token, entropy):
        # An end token completes what is left of the answer.
        n = limit - tokens[b] if token in tokenizer.eos_ids else 1
        tokens[b] += n
        on_part(n / limit)

    of_methods = side_by_side(
        reader,
        [e.prompt for e in batch],
        methods,
        max_new_tokens=limit,
        min_new_tokens=bench.min_new_tokens or 0,
        eos_ids=tokenizer.eos_ids,
        on_token=on_token,
        draft=draft,
    )
    certainties = memory_log_ps(batch, bench.items, of_methods, reader, tokenizer)
    return [
        [fields_of_text(g, tokenizer) | certainty for g, certainty in zip(*of_method)]
        for of_method in zip(of_methods, certainties)
    ]


def memory_log_ps(batch, items, of_methods, reader, tokenizer):
    """For each method and item of closed-book runs the log-probability that the model gives to
    `memory`, as a field of its line; nothing for other items. The most probable wording counts: of
    those in the data and, if the method's answer gives the memorised one, of its text up to there.

    of_methods: for each method the `Generation` of each item."""
    fields = [[{} for _ in batch] for _ in of_methods]
    having = [b for b, e in enumerate(batch) if e.answers]
    if having:
        wordings = []
        for b in having:
            listed, memory = batch[b].answers, items[batch[b].index]["memory"]
            own = [ids_that_give(memory, texts[b].ids, tokenizer) for texts in of_methods]
            wordings.append([*listed, *(ids or listed[0] for ids in own)])
        prompts = [batch[b].prompt for b in having]
        [(sums, _)] = scoring.loglikelihoods(reader, prompts, wordings, [Greedy()])
        for b, log_ps in zip(having, sums):
            listed = log_ps[: len(batch[b].answers)]
            for of_method, own in zip(fields, log_ps[len(listed) :]):
                of_method[b] = {"memory_log_p": round(max(*listed, own), 6)}
    return fields


def ids_that_give(memory, ids, tokenizer):
    """The ids of an answer up to the end of the memorised one; [] if it gives another or none."""
    stop = len(ids)
    while stop and gives(memory, tokenizer.decode(ids[:stop])):
        stop -= 1
    return ids[: stop + 1] if stop < len(ids) else []


def gives(memory, text):
    return answers.source_of(answers.first_line(text), [], memory) == "memory"


def method_for(run, batch, readers):
    """The method of a run, with the reader of its amateur; CAD with the batch's prompts without
    context."""
    changes = {}
    if amateur := amateur_of(run.method, None):
        changes["amateur"] = readers[amateur]
    if isinstance(run.method, CAD):
        changes["without_context"] = [e.without_context for e in batch]
    return replace(run.method, **changes)


def fields_of_text(g, tokenizer):
    """The fields of a line: a `Generation`."""
    return {
        "prediction": tokenizer.decode(g.ids[:-1] if g.stop == "eos" else g.ids),
        "ids": g.ids,
        "alphas": [round(alpha, 6) for alpha in g.alphas],
        "entropies": [round(entropy, 6) for entropy in g.entropies],
        "stop": g.stop,
    }


def fields_of_choice(bench, encoded, values):
    """The fields of a line: the scores of an item's candidates, true ones first."""
    n_true = bench.items[encoded.index]["n_true"]
    return {
        "scores_true": values[:n_true],
        "scores_false": values[n_true:],
        "merged": encoded.merged,
        "tokens": sum(map(len, encoded.answers)),
    }
