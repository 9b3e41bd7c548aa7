"""What the runs of a sweep share on a batch of prompts: the keys and values of the prompts, and, if
the runs are DeCoRe's own, their passes. So a sweep over N and α costs little more than one run.

    K runs   B prompts   R rows, of all runs   T new tokens   A answers   V vocabulary
"""

from collections import defaultdict
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

import decore
from decore import DeCoRe, Session, Step
from model import Transformer


def side_by_side(runs, task, model):
    """The runs in groups: those of a `Sweep` or of `SharedRows`, and each other run alone."""
    groups = defaultdict(list)
    for run in runs:
        settings = run.settings
        shares = settings["method"] in decore.METHODS and "amateur" not in settings
        if not task.choice:
            shares &= isinstance(model, Transformer) and not settings.get("mask_prompt")
        groups[settings.get("mask", "output") if shares else run.path].append(run)
    return groups.values()


class Sweep:
    """Runs of DeCoRe side by side: their rows are rows of one pass, which reads the keys of a
    prompt once for all of them.

    prompts: B prompts, K times: for each run. runs: the arguments of each run's `DeCoRe`. They mask
    no prompts, and have one `mask`."""

    def __init__(self, model, prompts, capacity, method, runs):
        self.decoders = [DeCoRe(model, (), capacity, **run) for run in runs]
        self.counts = [len(decoder.rows) for decoder in self.decoders]
        rows = sum([decoder.rows for decoder in self.decoders], [])
        mask = runs[0].get("mask", "output")
        self.sessions = [Session(model, prompts[: len(prompts) // len(runs)], capacity, rows, mask)]
        self.run_of_row = torch.arange(len(runs)).repeat_interleave(torch.tensor(self.counts))
        self.run_of_row = self.run_of_row.to(model.device)

    def step(self, tokens):
        """As `DeCoRe.step`, for tokens [K·B, T]."""
        ids = tokens.unflatten(0, (len(self.counts), -1))  # [K, B, T]
        logits = self.sessions[0].logits(ids[self.run_of_row])  # [R, B, T, V]
        steps = [
            decoder.contrasted(z.log_softmax(-1))
            for decoder, z in zip(self.decoders, logits.split(self.counts))
        ]
        return Step(*map(torch.cat, zip(*steps)))


class SharedRows:
    """Runs of DeCoRe that score given answers: their rows read the same texts, so each row is read
    once, whichever runs have it.

    runs: as for `Sweep`. Heads are masked at every position."""

    def __init__(self, model, prompts, capacity, runs):
        self.decoders = [DeCoRe(model, (), capacity, **run) for run in runs]
        rows = dict.fromkeys(tuple(row) for decoder in self.decoders for row in decoder.rows)
        numbers = {row: i for i, row in enumerate(rows)}
        self.rows = [[numbers[tuple(row)] for row in decoder.rows] for decoder in self.decoders]
        mask = runs[0].get("mask", "output")
        self.sessions = [
            Session(model, prompts, capacity, [row], mask, mask_prompt=True) for row in rows
        ]

    def steps(self, tokens):
        """The `Step` of each run, for tokens [A, T]."""
        log_p = [session.logits(tokens)[0].log_softmax(-1) for session in self.sessions]
        for decoder, rows in zip(self.decoders, self.rows):
            yield decoder.contrasted(torch.stack([log_p[row] for row in rows]))


@contextmanager
def prompts_read_once(models):
    """Inside, a model that reads prompts again, with no head masked, copies their keys and
    values."""
    with ExitStack() as stack:
        for model in dict.fromkeys(models):
            memory = remembering(model.prefill)
            stack.enter_context(patch.object(model, "prefill", memory))
        yield


def remembering(prefill):
    known = []  # (ids, their cache)

    def prefill_once(ids, cache, head_mask=None, mask="output"):
        if head_mask is not None:
            return prefill(ids, cache, head_mask, mask)
        for read, other in known:
            if torch.equal(read, ids) and torch.equal(other.lengths, cache.lengths):
                if not cache.copy_prompts(other):
                    prefill(ids, cache)
                return
        prefill(ids, cache)
        known.append((ids, cache))

    return prefill_once
