"""The common prefix of a batch is read once, and nothing else changes."""

import pytest
import torch

from decoders.baselines import CAD
from decoders.scoring import score
from decore import DeCoRe, Greedy, generate
from model import common_prefix
from tests.checkpoints import random_ids
from tests.methods import CASES, HEADS, method_of

PREFIX = random_ids(90, seed=1)
PROMPTS = [
    PREFIX + random_ids(9, seed=9),
    PREFIX + random_ids(31, seed=31),
    PREFIX[:70] + random_ids(2, seed=3),  # so the common prefix is 70 tokens
]
WITHOUT = [random_ids(70, seed=2) + p[-4:] for p in PROMPTS]
ANSWERS = [[random_ids(n, seed=10 * b + n) for n in (1, 5, 3)][: 1 + b] for b in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_a_batch_decodes_and_scores_as_its_prompts_one_by_one(model, amateur, case):
    def results(prompts, answers, without):
        method = CAD(without) if case == "cad" else method_of(case, amateur)
        out = generate(model, prompts, method, max_new_tokens=3)
        return out, score(model, prompts, answers, method)

    batch = results(PROMPTS, ANSWERS, WITHOUT)
    for *one, g, sums in zip(PROMPTS, ANSWERS, WITHOUT, *batch, strict=True):
        alone, expected = results(*one)
        assert g.ids == alone.ids
        assert g.entropies == pytest.approx(alone.entropies, abs=1e-5)
        assert sums == pytest.approx(expected, abs=1e-4)


def test_the_common_prefix_is_read_once_and_the_rest_of_each_prompt_after_it(llama, passes):
    """Then each new token is a pass. CAD's prompts with and without context are two sessions."""
    rest = len(PROMPTS[1]) - 1 - 70  # the shorter ones are padded
    generate(llama, PROMPTS, DeCoRe(HEADS), max_new_tokens=4)
    assert passes == [(1, 70), (3, rest)] + [(3, 1)] * 4
    passes.clear()
    generate(llama, PROMPTS, CAD(WITHOUT), max_new_tokens=1)
    assert passes == [(1, 70), (3, rest), (1, 70), (3, 3)] + [(3, 1)] * 2


def test_texts_that_have_ended_are_not_read_on(llama, passes, monkeypatch):
    monkeypatch.setattr("model.CHUNK", 60)
    prompts = [random_ids(n + 1, seed=n) for n in (90, 80, 30, 40)]
    generate(llama, prompts, Greedy(), max_new_tokens=1)
    assert passes == [(4, 16), (4, 16), (4, 16), (2, 30), (2, 12), (4, 1)]


@pytest.mark.parametrize("common, length", [(200, 200), (70, 70), (64, 64), (63, 0)])
def test_a_common_prefix_has_at_least_a_block_of_tokens(common, length):
    ids = torch.ones(2, 200, dtype=torch.long)
    ids[1, common:] = 2
    assert common_prefix(ids) == length
