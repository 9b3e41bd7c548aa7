"""Eq. 7 and 8 against ten lines of numpy in float64; every way of running the loop gives the same tokens."""

import math

import numpy as np
import pytest
import torch

from decore import AHEAD, entropy, generate, make_head_mask, score
from model import Cache, Transformer
from tests.checkpoints import FAMILIES, random_ids, write_checkpoint

HEADS = [(1, 0), (2, 3), (1, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (3, 17, 1, 30)]
NEW = 10


@pytest.fixture(scope="module", params=["llama3", "mistral-window", "qwen2-window", "qwen3"])
def model(request, tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("m"), request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama3"))


@pytest.fixture(scope="module")
def amateur(tmp_path_factory):
    small = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16)
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("small"), "llama3", seed=5, **small))


# -------------------------------------------------------------------------------------- the method in numpy and float64


def log_softmax(z):
    z = z.astype(np.float64) - z.max()
    return z - np.log(np.exp(z).sum())


def contrast(base, masked, method, alpha=0.5, cap=None, scale=False):
    """Scores and α of Eq. 7 and 8 from two rows of logits."""
    base, masked = log_softmax(base), log_softmax(masked)
    a = -(np.exp(base) * base).sum() / (np.log(len(base)) if scale else 1) if method == "decore-entropy" else alpha
    a = a if cap is None else min(a, cap)
    return (1 + a) * base - a * masked, a


def next_logits(model, prompt, new, heads, mask, strict):
    """Logits after prompt + new by the plainest means: one row, everything computed again at every step."""
    head_mask = make_head_mask([heads], model)
    if strict:
        return model(torch.tensor([prompt + new]), head_mask=head_mask, mask=mask)[0, 0, -1].numpy()
    cache = Cache(torch.tensor([len(prompt) - 1]), len(new) + 1)
    model.prefill(torch.tensor([prompt[:-1]], dtype=torch.long), cache)
    return model(torch.tensor([[prompt[-1]] + new]), cache, head_mask, mask)[0, 0, -1].numpy()


def reference(model, prompt, method, mask="output", strict=False, other=None, other_heads=None, **how):
    ids, alphas, entropies = [], [], []
    for _ in range(NEW):
        base = next_logits(model, prompt, ids, [], mask, strict)
        masked = next_logits(other or model, prompt, ids, HEADS if other is None else other_heads, mask, strict)
        scores, a = contrast(base, masked, method, **how)
        ids, alphas = ids + [int(scores.argmax())], alphas + [a]
        entropies.append(-(np.exp(log_softmax(base)) * log_softmax(base)).sum())
    return ids, alphas, entropies


@pytest.mark.parametrize("method", ["decore-static", "decore-entropy"])
@pytest.mark.parametrize("mask", ["output", "query"])
@pytest.mark.parametrize("strict", [False, True])
def test_tokens_alphas_and_entropies_equal_the_numpy_version(model, method, mask, strict):
    out = generate(model, PROMPTS, method=method, heads=HEADS, mask=mask, mask_prompt=strict, max_new_tokens=NEW)
    for prompt, g in zip(PROMPTS, out, strict=True):
        ids, alphas, entropies = reference(model, prompt, method, mask, strict)
        assert g.ids == ids
        np.testing.assert_allclose(g.alphas, alphas, atol=1e-5)         # float32 against float64
        np.testing.assert_allclose(g.entropies, entropies, atol=1e-5)
        assert g.stop == "length"


@pytest.mark.parametrize("how", [dict(alpha=2.0), dict(alpha=-0.5), dict(cap=0.7), dict(scale=True),
                                 dict(cap=0.3, scale=True)])
def test_alpha_its_cap_and_its_scale(llama, how):
    method = "decore-static" if "alpha" in how else "decore-entropy"
    names = dict(alpha="alpha", cap="alpha_cap", scale="scale_alpha")
    g = generate(llama, PROMPTS[1], method=method, heads=HEADS, max_new_tokens=NEW,
                 **{names[k]: v for k, v in how.items()})
    ids, alphas, entropies = reference(llama, PROMPTS[1], method, **how)
    assert g.ids == ids
    np.testing.assert_allclose(g.alphas, alphas, atol=1e-5)
    np.testing.assert_allclose(g.entropies, entropies, atol=1e-5)       # raw, whatever α became


@pytest.mark.parametrize("heads", [[], [(0, 1), (1, 0)]])
@pytest.mark.parametrize("strict", [False, True])
def test_entropy_lite_contrasts_with_the_amateur_and_its_own_heads(llama, amateur, heads, strict):
    out = generate(llama, PROMPTS, amateur=amateur, amateur_heads=heads, mask_prompt=strict, max_new_tokens=NEW)
    for prompt, g in zip(PROMPTS, out, strict=True):
        ids, alphas, _ = reference(llama, prompt, "decore-entropy", strict=strict, other=amateur, other_heads=heads)
        assert g.ids == ids
        np.testing.assert_allclose(g.alphas, alphas, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_masked_decodes_from_the_masked_row_alone(model, strict):
    g = generate(model, PROMPTS[1], method="masked", heads=HEADS, mask_prompt=strict, max_new_tokens=NEW)
    ids = []
    for h in g.entropies:
        logits = next_logits(model, PROMPTS[1], ids, HEADS, "output", strict)
        np.testing.assert_allclose(h, -(np.exp(log_softmax(logits)) * log_softmax(logits)).sum(), atol=1e-5)
        ids.append(int(logits.argmax()))
    assert g.ids == ids
    assert g.alphas == [0.0] * NEW


def test_entropy_is_in_nats():
    uniform = torch.full((3, 8), 1 / 8).log()
    torch.testing.assert_close(entropy(uniform), torch.full((3,), math.log(8)))
    certain = torch.tensor([0.0, -200.0, -200.0])
    assert entropy(certain) == 0


# ---------------------------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("how", [dict(heads=[]), dict(heads=HEADS, method="decore-static", alpha=0.0),
                                 dict(heads=HEADS, alpha_cap=0.0)])
def test_without_a_contrast_decore_is_greedy(model, how):
    greedy = generate(model, PROMPTS, method="greedy", max_new_tokens=NEW)
    assert [g.ids for g in generate(model, PROMPTS, max_new_tokens=NEW, **how)] == [g.ids for g in greedy]


@pytest.mark.parametrize("method", ["greedy", "masked", "decore-static", "decore-entropy"])
@pytest.mark.parametrize("strict", [False, True])
def test_every_batch_gives_the_tokens_of_single_prompts(model, method, strict):
    how = dict(method=method, heads=HEADS, mask_prompt=strict, max_new_tokens=NEW)
    alone = [generate(model, p, **how).ids for p in PROMPTS]
    for batch in ([0, 1, 2, 3], [3, 2], [2], [1, 1, 0]):
        assert [g.ids for g in generate(model, [PROMPTS[i] for i in batch], **how)] == [alone[i] for i in batch]


def test_masking_from_the_last_prompt_token_on_differs_from_masking_the_prompt_too(llama):
    how = dict(heads=HEADS, method="masked", max_new_tokens=1)
    later, everywhere = (generate(llama, PROMPTS[3], mask_prompt=strict, **how) for strict in (False, True))
    assert abs(later.entropies[0] - everywhere.entropies[0]) > 1e-3
    one = random_ids(1)                         # a prompt of one token is its last token: no difference
    a, b = (generate(llama, one, heads=HEADS, mask_prompt=strict, max_new_tokens=NEW).ids for strict in (False, True))
    assert a == b


def test_the_number_of_forward_passes_is_the_number_of_new_tokens(llama, monkeypatch):
    calls, forward = [], Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda self, ids, *a: calls.append(ids.shape) or forward(self, ids, *a))
    generate(llama, PROMPTS[1], heads=HEADS, max_new_tokens=NEW)
    assert calls == [(1, 1)] * NEW


# ------------------------------------------------------------------------------------------------------------- stopping


def test_decoding_stops_at_any_end_token_which_is_part_of_the_ids(llama):
    free = generate(llama, PROMPTS[1], heads=HEADS, max_new_tokens=NEW)
    assert free.stop == "length" and len(free.ids) == NEW
    g = generate(llama, PROMPTS[1], heads=HEADS, max_new_tokens=NEW, eos_ids=[95, free.ids[4]])
    end = free.ids.index(free.ids[4]) + 1
    assert (g.ids, g.stop) == (free.ids[:end], "eos")
    assert len(g.alphas) == len(g.entropies) == len(g.ids)


def test_an_ended_text_waits_for_the_rest_of_its_batch(llama):
    free = generate(llama, PROMPTS, heads=HEADS, max_new_tokens=NEW)
    eos = [free[1].ids[2]]
    out = generate(llama, PROMPTS, heads=HEADS, max_new_tokens=NEW, eos_ids=eos)
    for g, f in zip(out, free, strict=True):
        end = f.ids.index(eos[0]) + 1 if eos[0] in f.ids else NEW
        assert g.ids == f.ids[:end]
        assert g.stop == ("eos" if eos[0] in f.ids else "length")


def test_text_ends_with_the_context_of_the_model(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3", max_position_embeddings=20))
    out = generate(model, [random_ids(18), random_ids(5)], method="greedy", max_new_tokens=10)
    assert [len(g.ids) for g in out] == [2, 10]
    assert [g.stop for g in out] == ["length", "length"]
    with pytest.raises(ValueError, match="21 tokens; .* reads 20"):
        generate(model, random_ids(21), method="greedy")


@pytest.mark.parametrize("new", [3, 8, 20])
def test_a_device_that_runs_ahead_of_the_stop_test_gives_the_same(llama, monkeypatch, new):
    """As a GPU does: it decodes on past an end token, and nothing of that is seen."""
    plain = generate(llama, PROMPTS, heads=HEADS, max_new_tokens=new)
    eos = {g.ids[n % new] for n, g in enumerate(plain, 1)}
    seen, passes, forward = [], [], llama.forward
    monkeypatch.setattr(llama, "forward", lambda *a, **k: (passes.append(1), forward(*a, **k))[1])

    def decode_ahead(ahead):
        monkeypatch.setitem(AHEAD, "cpu", ahead)
        seen.clear(), passes.clear()
        out = generate(llama, PROMPTS, heads=HEADS, max_new_tokens=new, eos_ids=eos, on_token=lambda *x: seen.append(x))
        return out, sorted(seen), len(passes)

    for ahead in (2, 8, 64):
        assert decode_ahead(ahead)[:2] == decode_ahead(1)[:2]
        assert decode_ahead(ahead)[2] == min(new, math.ceil(decode_ahead(1)[2] / ahead) * ahead)


def test_tokens_are_seen_as_they_come(llama):
    seen = [[], []]
    out = generate(llama, PROMPTS[:2], heads=HEADS, max_new_tokens=5, on_token=lambda b, t, h: seen[b].append((t, h)))
    assert seen == [list(zip(g.ids, g.entropies, strict=True)) for g in out]


# -------------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("method", ["greedy", "masked", "decore-static", "decore-entropy"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_scores_equal_the_numpy_version(model, method, renormalise):
    prompt, answers = PROMPTS[1], [random_ids(n, seed=40 + n) for n in (4, 1, 7)]
    got = score(model, prompt, answers, method=method, heads=HEADS, alpha=0.8, renormalise=renormalise)
    for answer, value in zip(answers, got, strict=True):
        expected = 0.0
        for i, token in enumerate(answer):
            base = next_logits(model, prompt, answer[:i], [], "output", True)
            masked = next_logits(model, prompt, answer[:i], HEADS, "output", True)
            if method in ("greedy", "masked"):
                scores = log_softmax(base if method == "greedy" else masked)
            else:
                scores, _ = contrast(base, masked, method, alpha=0.8)
                scores = log_softmax(scores) if renormalise else scores
            expected += scores[token]
        assert value == pytest.approx(expected, abs=1e-4)       # float32, up to seven tokens


def test_one_answer_gives_a_number_and_the_same_one(llama):
    answers = [random_ids(n, seed=n) for n in (2, 5)]
    together = score(llama, PROMPTS[1], answers, heads=HEADS)
    for answer, value in zip(answers, together, strict=True):   # 1e-5 a token, as for logits; the longer sum is -28
        assert score(llama, PROMPTS[1], answer, heads=HEADS) == pytest.approx(value, abs=1e-5 * len(answer))


def test_many_answers_are_scored_in_groups(llama):
    answers = [random_ids(300, seed=n) for n in range(4)]       # 1,200 tokens: more than go through at a time
    alone = score(llama, [5], answers[3], heads=HEADS)
    assert score(llama, [5], answers, heads=HEADS)[3] == pytest.approx(alone, abs=1e-2)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("ids, how, words", [
    ([], {}, "the prompt is empty"),
    ([[5], []], {}, "prompt 2 of 2 is empty"),
    ([96], {}, "holds the id 96; .* knows 0 to 95"),
    ([-1], {}, "holds the id -1"),
    ([5], dict(heads=[(3, 0)]), r"head 3-0 is outside .* \(3 layers, 4 heads\)"),
    ([5], dict(heads=[(0, 4)]), "head 0-4 is outside"),
    ([5], dict(heads=None), "decore-entropy needs heads"),
    ([5], dict(method="beam"), "method 'beam' is unknown; known: greedy, masked"),
    ([5], dict(mask="keys"), "mask 'keys' is unknown"),
])
def test_mistakes_are_named(llama, ids, how, words):
    with pytest.raises(ValueError, match=words):
        generate(llama, ids, **dict(dict(heads=HEADS), **how))


def test_an_amateur_must_fit(llama, amateur, tmp_path):
    other = Transformer.load(write_checkpoint(tmp_path, "llama3", vocab_size=64))
    with pytest.raises(ValueError, match="one vocabulary"):
        generate(llama, [5], amateur=other, amateur_heads=[])
    with pytest.raises(ValueError, match="excludes heads"):
        generate(llama, [5], amateur=amateur, heads=HEADS, amateur_heads=[])
    with pytest.raises(ValueError, match="its own amateur_heads"):
        generate(llama, [5], amateur=amateur)


def test_an_amateur_that_reads_less_sets_the_limit(llama, tmp_path):
    short = Transformer.load(write_checkpoint(tmp_path, "llama3", seed=5, max_position_embeddings=12))
    lite = dict(amateur=short, amateur_heads=[], max_new_tokens=9)
    out = generate(llama, list(range(3, 11)), **lite)
    assert len(out.ids) == 4 and out.stop == "length"
    with pytest.raises(ValueError, match="13 tokens; .* reads 12"):
        generate(llama, list(range(3, 16)), **lite)


def test_ids_beyond_the_tokenizer_but_inside_the_embedding_are_valid(llama):
    assert len(generate(llama, [FAMILIES["llama3"]["vocab_size"] - 1], method="greedy", max_new_tokens=2).ids) == 2
