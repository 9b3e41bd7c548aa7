"""What the runs of a sweep share on a batch of prompts: the keys and values of the prompts, and, if
the runs are DeCoRe's own, their passes. So a sweep over N and α costs little more than one run.

    K runs   B prompts   R rows, of all runs   T new tokens   A answers   V vocabulary
"""

from collections import defaultdict

import torch

import decore
from decore import Rule, Session, Step, rows_of
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


def rows_and_rule(model, method, heads=None, mask="output", mask_prompt=False, **rule):
    """The rows of a run of DeCoRe and its `Rule`, from the arguments of `DeCoRe`."""
    return rows_of(method, heads), Rule(model, method, **rule)


class Sweep:
    """Runs of DeCoRe side by side: their rows are rows of one pass, which reads the keys of a
    prompt once for all of them.

    prompts: B prompts, K times: for each run. runs: the arguments of each run's `DeCoRe`. They mask
    no prompts, and have one `mask`."""

    def __init__(self, model, prompts, capacity, method, runs):
        rows_of_runs, self.rules = zip(*[rows_and_rule(model, **run) for run in runs])
        self.counts = [len(rows) for rows in rows_of_runs]
        rows = sum(rows_of_runs, [])
        mask = runs[0].get("mask", "output")
        self.sessions = [Session(model, prompts[: len(prompts) // len(runs)], capacity, rows, mask)]
        self.run_of_row = torch.arange(len(runs)).repeat_interleave(torch.tensor(self.counts))
        self.run_of_row = self.run_of_row.to(model.device)

    def step(self, tokens):
        """As `DeCoRe.step`, for tokens [K·B, T]."""
        ids = tokens.unflatten(0, (len(self.counts), -1))  # [K, B, T]
        logits = self.sessions[0].logits(ids[self.run_of_row])  # [R, B, T, V]
        steps = [
            rule.contrasted(z.log_softmax(-1))
            for rule, z in zip(self.rules, logits.split(self.counts))
        ]
        return Step(*map(torch.cat, zip(*steps)))


class SharedRows:
    """Runs of DeCoRe that score given answers: their rows read the same texts, so each row is read
    once, whichever runs have it.

    runs: as for `Sweep`. Heads are masked at every position."""

    def __init__(self, model, prompts, capacity, runs):
        rows_of_runs, self.rules = zip(*[rows_and_rule(model, **run) for run in runs])
        rows = dict.fromkeys(tuple(row) for of_run in rows_of_runs for row in of_run)
        numbers = {row: i for i, row in enumerate(rows)}
        self.rows = [[numbers[tuple(row)] for row in of_run] for of_run in rows_of_runs]
        mask = runs[0].get("mask", "output")
        self.sessions = [
            Session(model, prompts, capacity, [row], mask, mask_prompt=True) for row in rows
        ]

    def steps(self, tokens):
        """The `Step` of each run, for tokens [A, T]."""
        log_p = [session.logits(tokens)[0].log_softmax(-1) for session in self.sessions]
        for rule, rows in zip(self.rules, self.rows):
            yield rule.contrasted(torch.stack([log_p[row] for row in rows]))


class PromptsReadOnce:
    """A model that copies the keys and values of prompts that it has read, with no head masked."""

    def __init__(self, model):
        self.model = model
        self.known = []  # (ids, their cache)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args, **options):
        return self.model(*args, **options)

    def prefill(self, ids, cache, head_mask=None, mask="output"):
        if head_mask is not None:
            self.model.prefill(ids, cache, head_mask, mask)
            return
        for read, other in self.known:
            if torch.equal(read, ids) and torch.equal(other.lengths, cache.lengths):
                if not cache.copy_prompts(other):
                    self.model.prefill(ids, cache)
                return
        self.model.prefill(ids, cache)
        self.known.append((ids, cache))
