"""Prompt lookup decodes the tokens, α and entropies of the plain loop, in fewer passes."""

import numpy as np
import pytest
import torch

from decore import METHODS, generate, open_decore
from model import MASKS, Transformer
from runtime.lookup import LONGEST_PAUSE, TRIAL, Text
from tests.checkpoints import FAMILIES, random_ids, write_checkpoint

HEADS = [(1, 0), (1, 3), (2, 2)]
PASSAGE = random_ids(12, seed=8)
PROMPTS = [PASSAGE + random_ids(5, seed=n) + PASSAGE[:3] for n in (1, 2)] + [[7], random_ids(9, seed=4)]
ATOL = 1e-5


def assert_same(results, expected):
    for a, b in zip(results, expected, strict=True):
        assert (a.ids, a.stop) == (b.ids, b.stop)
        np.testing.assert_allclose(a.alphas, b.alphas, atol=ATOL, rtol=0)
        np.testing.assert_allclose(a.entropies, b.entropies, atol=ATOL, rtol=0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_lookup_decodes_the_same_as_the_plain_loop(llama, method, mask, strict):
    how = dict(method=method, heads=HEADS, mask=mask, mask_prompt=strict, max_new_tokens=24)
    plain = generate(llama, PROMPTS, **how)
    for k in (1, 6):
        assert_same(generate(llama, PROMPTS, lookup=k, **how), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_lookup_decodes_the_same_in_every_family_and_with_an_amateur(family, amateur, tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, family))
    for how in (dict(heads=HEADS, max_new_tokens=20), dict(amateur=amateur, amateur_heads=[(0, 1)], max_new_tokens=20)):
        assert_same(generate(model, PROMPTS, lookup=5, **how), generate(model, PROMPTS, **how))


def test_lookup_stops_at_the_same_token_as_the_plain_loop_and_reports_each_once(llama):
    plain, calls = generate(llama, PROMPTS, heads=HEADS, max_new_tokens=24), {}
    for eos in {plain[0].ids[0], plain[1].ids[7], plain[2].ids[23]}:
        how = dict(heads=HEADS, max_new_tokens=24, eos_ids=[eos])
        out = generate(llama, PROMPTS, lookup=4, on_token=lambda b, *_: calls.update({b: calls.get(b, 0) + 1}), **how)
        assert_same(out, generate(llama, PROMPTS, **how))
        assert calls == {b: len(g.ids) for b, g in enumerate(out)}
        calls.clear()


def decode_answers(model, prompts, answers, k):
    """Decode these answers, whatever the model predicts → Generations, and the number of tokens in each pass."""
    widths = []

    def opener(*args, **settings):
        step, sessions = open_decore(*args, **settings)

        def scripted(tokens=None):
            first, out = sessions[0].cache.slots.tolist(), step(tokens)
            widths.append(out.scores.shape[1])
            scores = torch.full_like(out.scores, -1.0)
            for b, answer in enumerate(answers):
                for t in range(widths[-1]):
                    scores[b, t, (answer + [0] * 99)[first[b] + t]] = 1.0
            return out._replace(scores=scores)
        return scripted, sessions

    how = dict(max_new_tokens=len(answers[0]), eos_ids=(), heads=HEADS, opener=opener)
    return generate(model, prompts, lookup=k, **how), widths


def test_sequences_that_copy_at_different_speeds_need_few_passes_and_never_run_out_of_slots(llama):
    passage = random_ids(120, seed=9)
    prompts = [passage + passage[:2], random_ids(30, seed=3), passage + passage[:2]]
    broken = [token if i % 5 else 3 for i, token in enumerate(passage[2:102])]
    answers = [passage[2:102], random_ids(100, seed=4, vocab_size=20), broken]
    out, widths = decode_answers(llama, prompts, answers, k=9)
    assert [g.ids for g in out] == answers
    assert_same(out, decode_answers(llama, prompts, answers, k=0)[0])
    assert max(widths) == 10
    assert len(decode_answers(llama, prompts[:1], answers[:1], k=9)[1]) == 10          # ten tokens each


def test_with_nothing_to_copy_proposals_become_rare():
    text = Text([1, 2, 3] * 4)
    proposals = 0
    for _ in range(400):                        # the n-gram always occurred before, and never continues as before
        proposal = text.propose(7)
        proposals += bool(proposal)
        text.judge(len(proposal), 0)
        text.extend([3] if text.ids[-1] == 2 else [text.ids[-1] + 1 if text.ids[-1] < 3 else 1])
    assert proposals <= 4 + 400 / LONGEST_PAUSE


def test_after_a_miss_proposals_are_short_until_one_is_right():
    text = Text([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert len(text.propose(7)) == 7
    text.judge(7, 0)
    text.judge(0, 0)                            # the pause
    assert len(text.propose(7)) == TRIAL == 1
    text.judge(TRIAL, 1)
    assert len(text.propose(7)) == 7


def test_a_proposal_follows_the_longest_and_latest_match():
    assert Text([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]).propose(3) == [4, 9, 2]        # (1, 2, 3) before (2, 3)
    assert Text([2, 3, 4, 9, 2, 3, 5, 8, 2, 3]).propose(2) == [5, 8]
    assert Text([1, 2, 3, 4]).propose(4) == []
    assert Text([5, 6, 5, 6]).propose(5) == [5, 6, 5, 6, 5]                       # a loop goes on
