"""Scores of DeCoRe against the numpy version of the method; how answers are batched. test_baselines
compares the other decoders."""

import pytest

from decoders.baselines import DoLa
from decoders.scoring import loglikelihoods, score
from decoders.setup import Setup
from decore import DeCoRe, Greedy, Masked, generate
from tests.checkpoints import random_ids, tiny
from tests.core.test_decore import contrast, log_softmax, logits_of_steps
from tests.methods import HEADS, PROMPTS

METHODS = [Greedy(), Masked(HEADS), DeCoRe(HEADS, alpha=0.8), DeCoRe(HEADS)]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("changes", [{}, dict(renormalise=False)], ids=str)
def test_scores_equal_the_numpy_version(model, method, changes):
    """Heads are masked at every position."""
    prompt, answers = PROMPTS[1], [random_ids(n, seed=40 + n) for n in (4, 1, 7)]
    sums = score(model, prompt, answers, method, **changes)
    for answer, value in zip(answers, sums, strict=True):
        expected = 0.0
        base, masked = (
            logits_of_steps(model, prompt, answer, heads, mask_prompt=True) for heads in ([], HEADS)
        )
        for i, token in enumerate(answer):
            scores = contrast(base[i], masked[i], method)[0]
            expected += (scores if "renormalise" in changes else log_softmax(scores))[token]
        assert value == pytest.approx(expected, abs=1e-4)  # float32, up to seven tokens


def test_many_answers_go_through_in_several_passes(llama, passes, monkeypatch):
    monkeypatch.setattr(llama, "bos_id", 5)  # complete texts, after the id that begins them
    answers = [[5, *random_ids(299, seed=n)] for n in range(4)]  # 1,200 tokens, 512 in a pass
    together = score(llama, [5], answers, Greedy())
    assert passes == [(4, 128), (4, 128), (4, 44)]
    for answer, value in zip(answers, together, strict=True):
        assert score(llama, [5], answer, Greedy()) == pytest.approx(value, abs=1e-2)


DECODED_AS_SCORED = """
Greedy()
Masked(HEADS, mask_prompt=True)
DeCoRe(HEADS, mask_prompt=True, alpha=0.5)
DeCoRe(HEADS, mask_prompt=True)
DoLa("high", dola_layers="halves", relative_top=0.9)  # few tokens are candidates
"""


@pytest.mark.parametrize("record", DECODED_AS_SCORED.strip().splitlines())
def test_scoring_says_whether_greedy_decoding_gives_the_answer(llama, record):
    method = eval(record)
    text = generate(llama, PROMPTS[1], method, max_new_tokens=5).ids
    answers = [text, text[:4] + [text[4] ^ 1], text[:2]]
    [(sums, greedy)] = loglikelihoods(llama, [PROMPTS[1]], [answers], [method])
    assert greedy == [[True, False, True]]
    assert sums == [score(llama, PROMPTS[1], answers, method)]


def test_dola_is_checked_with_the_layers_that_it_scores_with(tmp_path):
    """To generate, three layers with tied embeddings have no exit."""
    model = tiny(tmp_path, tie_word_embeddings=True)
    halves = score(model, [5, 6], [7, 8], DoLa("low", dola_layers="halves"))
    for method in DoLa("low"), Setup.of("dola-low", choice=True).record():
        assert score(model, [5, 6], [7, 8], method) == halves
    Setup.of("dola-low", choice=True).record().check(model)
