"""Eq. 7 and 8 against ten lines of numpy in float64; every way of running the loop gives the same
tokens."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from decore import METHODS, decore, generate, loglikelihoods, make_head_mask, score
from model import MASKS, Cache, Transformer
from tests.checkpoints import FAMILIES, random_ids, write_checkpoint

HEADS = [(1, 0), (2, 3), (1, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (3, 17, 1, 30)]
NEW = 10


@pytest.fixture(scope="module", params=["llama3", "mistral-window", "qwen2-window", "qwen3"])
def model(request, tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("m"), request.param))


# ------------------------------------------------------------------ the method in numpy and float64


def log_softmax(z):
    z = z.astype(np.float64) - z.max()
    return z - np.log(np.exp(z).sum())


def entropy(log_p):
    return -(np.exp(log_p) * log_p).sum()


def contrast(base, masked, method, alpha=0.5, alpha_cap=None, scale_alpha=False):
    """Scores, α and entropy of Eq. 7 and 8 from two rows of logits."""
    base, masked = log_softmax(masked if method == "masked" else base), log_softmax(masked)
    h = entropy(base)
    a = {
        "decore-static": alpha,
        "decore-entropy": h / (np.log(len(base)) if scale_alpha else 1),
    }.get(method, 0)
    a = a if alpha_cap is None else min(a, alpha_cap)
    return (1 + a) * base - a * masked, a, h


def next_logits(model, prompt, new, heads, mask="output", mask_prompt=False):
    """Logits after prompt + new: one row, and everything is computed again at every step."""
    head_mask = make_head_mask([heads], model)
    if mask_prompt:
        return model(torch.tensor([prompt + new]), head_mask=head_mask, mask=mask)[0, 0, -1].numpy()
    cache = Cache(model, [len(prompt) - 1], len(new) + 1)
    model.prefill(torch.tensor([prompt[:-1]], dtype=torch.long), cache)
    return model(torch.tensor([[prompt[-1]] + new]), cache, head_mask, mask)[0, 0, -1].numpy()


def reference(
    model, prompt, method, mask="output", mask_prompt=False, other=None, other_heads=None, **how
):
    ids, alphas, entropies = [], [], []
    for _ in range(NEW):
        base = next_logits(model, prompt, ids, [], mask, mask_prompt)
        masked = next_logits(
            other or model, prompt, ids, HEADS if other is None else other_heads, mask, mask_prompt
        )
        scores, a, h = contrast(base, masked, method, **how)
        ids, alphas, entropies = ids + [int(scores.argmax())], alphas + [a], entropies + [h]
    return ids, alphas, entropies


def assert_equals(g, expected):
    ids, alphas, entropies = expected
    assert g.ids == ids and g.stop == "length"
    np.testing.assert_allclose(g.alphas, alphas, atol=1e-5)  # float32 against float64
    np.testing.assert_allclose(g.entropies, entropies, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mask_prompt", [False, True])
def test_tokens_alphas_and_entropies_equal_the_numpy_version(model, method, mask, mask_prompt):
    out = generate(
        model,
        PROMPTS,
        method=method,
        heads=HEADS,
        mask=mask,
        mask_prompt=mask_prompt,
        max_new_tokens=NEW,
    )
    for prompt, g in zip(PROMPTS, out, strict=True):
        assert_equals(g, reference(model, prompt, method, mask, mask_prompt))


@pytest.mark.parametrize(
    "method, how",
    [
        ("decore-static", dict(alpha=2.0)),
        ("decore-static", dict(alpha=-0.5)),
        ("decore-entropy", dict(alpha_cap=0.7)),
        ("decore-entropy", dict(scale_alpha=True)),
        ("decore-entropy", dict(alpha_cap=0.3, scale_alpha=True)),
    ],
)
def test_alpha_its_cap_and_its_scale(llama, method, how):
    g = generate(llama, PROMPTS[1], method=method, heads=HEADS, max_new_tokens=NEW, **how)
    assert_equals(g, reference(llama, PROMPTS[1], method, **how))  # the entropies are raw


@pytest.mark.parametrize("heads", [[], [(0, 1), (1, 0)]])
@pytest.mark.parametrize("mask_prompt", [False, True])
def test_entropy_lite_contrasts_with_the_amateur(llama, amateur, heads, mask_prompt):
    out = generate(
        llama,
        PROMPTS,
        amateur=amateur,
        amateur_heads=heads,
        mask_prompt=mask_prompt,
        max_new_tokens=NEW,
    )
    for prompt, g in zip(PROMPTS, out, strict=True):
        assert_equals(
            g, reference(llama, prompt, "decore-entropy", "output", mask_prompt, amateur, heads)
        )


# -------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]], ids=["four prompts", "one prompt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_loop_gives_the_tokens_and_alphas_of_generate(family, prompts, tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, family))
    tokens, alphas = (
        torch.cat(x, 1).tolist() for x in zip(*decore(model, prompts, HEADS, NEW), strict=True)
    )
    out = generate(model, prompts, heads=HEADS, max_new_tokens=NEW, eos_ids=())
    assert tokens == [g.ids for g in out] and alphas == [g.alphas for g in out]


def test_the_number_of_forward_passes_is_the_number_of_new_tokens(llama, monkeypatch):
    calls, forward = [], llama.forward
    monkeypatch.setattr(
        llama, "forward", lambda ids, *a: calls.append(ids.shape) or forward(ids, *a)
    )
    generate(llama, PROMPTS[1], heads=HEADS, max_new_tokens=NEW)
    assert calls == [(1, 1)] * NEW


# ----------------------------------------------------------------------------------------- stopping


def test_texts_end_with_an_end_id_of_the_checkpoint_or_the_call_and_the_rest_of_the_batch_goes_on(
    llama, tmp_path
):
    how = dict(heads=HEADS, max_new_tokens=NEW)
    free = generate(llama, PROMPTS, eos_ids=(), **how)
    end = free[1].ids[2]
    expected = [g.ids[: g.ids.index(end) + 1] if end in g.ids else g.ids for g in free]
    model = Transformer.load(write_checkpoint(tmp_path, "llama3", eos_token_id=[end]))
    assert [g.ids for g in generate(model, PROMPTS, **how)] == expected
    assert generate(model, PROMPTS, eos_ids=(), **how) == free
    for form in (end, [end, end], {end}, torch.tensor(end), torch.tensor([end]), np.array([end])):
        out = generate(llama, PROMPTS, eos_ids=form, **how)
        assert [g.ids for g in out] == expected
        assert [g.stop for g in out] == ["eos" if end in g.ids else "length" for g in out]
        assert all(len(g.alphas) == len(g.entropies) == len(g.ids) for g in out)


def test_text_ends_with_the_context_of_the_model(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3", max_position_embeddings=20))
    prompts = [random_ids(n) for n in (20, 18, 5)]
    out = generate(model, prompts, method="greedy", max_new_tokens=10**12)
    assert [len(g.ids) for g in out] == [
        1,
        2,
        15,
    ]  # and a cache of 10**12 slots does not fit in memory
    assert [g.stop for g in out] == ["length"] * 3
    with pytest.raises(ValueError, match="21 tokens; .* reads 20"):
        generate(model, random_ids(21), method="greedy")


def test_on_token_gets_every_token_in_order_and_may_end_a_text(llama):
    text, calls = generate(llama, PROMPTS[1], heads=HEADS, max_new_tokens=9, eos_ids=()), [[], []]

    def on_token(b, token, h):
        calls[b].append((token, h))
        return b == 0 and token == text.ids[2]

    out = generate(
        llama, [PROMPTS[1], [5]], heads=HEADS, max_new_tokens=9, eos_ids=(), on_token=on_token
    )
    assert calls == [list(zip(g.ids, g.entropies, strict=True)) for g in out]
    assert out[0].stop == "stop" and out[0].ids == text.ids[: text.ids.index(text.ids[2]) + 1]
    assert len(out[1].ids) == 9 and out[1].stop == "length"


# ------------------------------------------------------------------------------------------ scoring


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("renormalise", [True, False])
def test_scores_equal_the_numpy_version(model, method, renormalise):
    prompt, answers = PROMPTS[1], [random_ids(n, seed=40 + n) for n in (4, 1, 7)]
    sums = score(
        model, prompt, answers, method=method, heads=HEADS, alpha=0.8, renormalise=renormalise
    )
    for answer, value in zip(answers, sums, strict=True):
        expected = 0.0
        for i, token in enumerate(answer):
            base, masked = (
                next_logits(model, prompt, answer[:i], heads, mask_prompt=True)
                for heads in ([], HEADS)
            )
            scores = contrast(base, masked, method, alpha=0.8)[0]
            expected += (log_softmax(scores) if renormalise else scores)[token]
        assert value == pytest.approx(expected, abs=1e-4)  # float32, up to seven tokens


def test_many_answers_go_through_in_several_passes(llama, monkeypatch):
    answers = [
        random_ids(300, seed=n) for n in range(4)
    ]  # 1,200 tokens, at most 512 of them in a pass
    sizes, forward = [], llama.forward
    monkeypatch.setattr(
        llama, "forward", lambda ids, *a: sizes.append(ids.shape) or forward(ids, *a)
    )
    together = score(llama, [5], answers, method="greedy")
    assert sizes == [(4, 128), (4, 128), (4, 44)]
    for answer, value in zip(answers, together, strict=True):
        assert score(llama, [5], answer, method="greedy") == pytest.approx(value, abs=1e-2)


def test_the_last_token_of_an_answer_is_not_read(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3", max_position_embeddings=20))
    assert score(model, random_ids(15), random_ids(6), method="greedy") < 0  # 21 tokens
    with pytest.raises(ValueError, match="21 tokens; .* reads 20"):
        score(model, random_ids(15), random_ids(7))


@pytest.mark.parametrize("method", METHODS)
def test_scoring_says_whether_greedy_decoding_gives_the_answer(llama, method):
    text = generate(
        llama, PROMPTS[1], method, heads=HEADS, mask_prompt=True, max_new_tokens=5, eos_ids=()
    ).ids
    other = text[:4] + [text[4] ^ 1]
    answers = [text, other, text[:2]]
    sums, greedy = loglikelihoods(llama, [PROMPTS[1]], [answers], method, heads=HEADS)
    assert greedy == [[True, False, True]]
    assert sums == [score(llama, PROMPTS[1], answers, method, heads=HEADS)]


def test_a_graph_and_a_model_of_transformers_are_refused_in_one_line(llama):
    with pytest.raises(ValueError, match="graph=True needs models of our own engine on a GPU"):
        generate(llama, PROMPTS, "greedy", graph=True)
    foreign = torch.nn.Linear(1, 1)
    for function in partial(generate, foreign, PROMPTS), partial(score, foreign, [1], [2]):
        with pytest.raises(ValueError, match=r"Linear is not a model of ours.* HFModel\(model\)"):
            function(heads=HEADS)


def test_heads_may_be_an_iterator(llama):
    for how in dict(), dict(mask_prompt=True):
        assert generate(llama, PROMPTS, heads=iter(HEADS), **how) == generate(
            llama, PROMPTS, heads=HEADS, **how
        )


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "ids, words",
    [
        ([], "the prompt is empty"),
        ([[5], []], "prompt 2 of 2 is empty"),
        ([[5], 6], "prompt 2 of 2 is 6; give"),
        ([96], "contains the id 96; .* knows 0 to 95"),
        ([-1], "contains the id -1"),
        ([True], "is .True.; give"),
        ([1.0, 2], "is .1.0, 2.; give"),
        (np.array([1.5]), "whole numbers"),
        ([[[5]]], "whole numbers"),
        ("text", "is 'text'; give token ids"),
        (["a", "b"], "prompt 1 of 2 is 'a'"),
        (5, "is 5; give"),
        ({5: 6}, "is {5: 6}; give"),
        (None, "is None; give"),
    ],
    ids=str,
)
def test_ids_that_are_not_whole_numbers_of_the_vocabulary_are_refused(llama, ids, words):
    with pytest.raises(ValueError, match=words):
        generate(llama, ids, heads=HEADS)


@pytest.mark.parametrize(
    "setting, words",
    [
        (dict(heads=[(3, 0)]), r"head 3-0 is outside .* \(3 layers, 4 heads\)"),
        (dict(heads=[(0, 4)]), "head 0-4 is outside"),
        (dict(heads=[(1, 0), (1, 0)]), "head 1-0 is listed twice"),
        (dict(heads=["1-0", "1"]), "'1'. are not a list"),
        (dict(heads=[(1.5, 0)]), "are not a list"),
        (dict(heads=[(3, 0)], method="greedy"), "head 3-0 is outside"),
        (dict(heads=None), "decore-entropy needs heads"),
        (dict(heads=[3]), "are not a list"),
        (dict(heads="1-0"), "heads '1-0' are not a list"),
        (dict(heads=torch.tensor(2)), "are not a list"),
        (dict(method="beam"), "method 'beam' is unknown; known: greedy, masked"),
        (dict(mask="keys"), "mask 'keys' is unknown"),
        (dict(alpha=math.nan), "alpha nan is not a finite"),
        (dict(alpha="1"), "alpha '1' is not"),
        (dict(alpha=None), "alpha None is not a finite"),
        (dict(alpha=10**400), "alpha 10+ is not a finite"),
        (dict(alpha_cap=-1), "alpha_cap -1 is not .* at least 0"),
        (dict(max_new_tokens=0), "max_new_tokens 0 is not a whole number of at"),
        (dict(max_new_tokens=2.5), "max_new_tokens 2.5"),
        (dict(eos_ids="2"), "eos_ids is '2'"),
        (dict(eos_ids=[2.5]), "eos_ids is .2.5"),
        (dict(input_ids=[6]), "ids and input_ids are .* give one of them"),
    ],
    ids=str,
)
def test_each_setting_has_its_message(llama, setting, words):
    with pytest.raises(ValueError, match=words):
        generate(llama, [5], **dict(heads=HEADS) | setting)


def test_an_amateur_must_fit(llama, amateur, tmp_path):
    other = Transformer.load(write_checkpoint(tmp_path, "llama3", vocab_size=64))
    with pytest.raises(ValueError, match="one vocabulary"):
        generate(llama, [5], amateur=other, amateur_heads=[])
    with pytest.raises(ValueError, match="excludes heads"):
        generate(llama, [5], amateur=amateur, heads=HEADS, amateur_heads=[])
    with pytest.raises(ValueError, match="amateur_heads"):
        generate(llama, [5], amateur=amateur)


def test_an_amateur_that_reads_less_sets_the_limit(llama, tmp_path):
    short = Transformer.load(
        write_checkpoint(tmp_path, "llama3", seed=5, max_position_embeddings=12)
    )
    out = generate(llama, random_ids(8), amateur=short, amateur_heads=[], max_new_tokens=9)
    assert len(out.ids) == 4 and out.stop == "length"
    with pytest.raises(ValueError, match="13 tokens; .* reads 12"):
        generate(llama, random_ids(13), amateur=short, amateur_heads=[])
    with pytest.raises(ValueError, match="longest answer has 13 tokens; .* reads 12"):
        score(llama, random_ids(8), random_ids(6), amateur=short, amateur_heads=[])


FORMS = [
    tuple,
    np.array,
    torch.tensor,
    lambda ids: torch.tensor(ids, dtype=torch.int32),
    lambda ids: [np.int64(i) for i in ids],
    lambda ids: [torch.tensor(i) for i in ids],
]


@pytest.mark.parametrize("form", FORMS)
def test_ids_may_come_in_any_form_of_whole_numbers(llama, form):
    how, batch = dict(heads=HEADS, max_new_tokens=3), [[5, 6], [7, 8]]
    plain = generate(llama, PROMPTS[1], **how)
    assert generate(llama, form(PROMPTS[1]), **how) == plain
    assert generate(llama, (form(PROMPTS[1]),), **how) == [plain]
    assert generate(llama, [form(ids) for ids in batch], **how) == generate(llama, batch, **how)
    if form in (np.array, torch.tensor):
        assert generate(llama, form(batch), **how) == generate(llama, batch, **how)
    assert score(llama, form([5, 6]), form([7, 8]), heads=HEADS) == score(
        llama, [5, 6], [7, 8], heads=HEADS
    )
    assert generate(llama, [5], heads=["1-0", "2-3", "1-2"]) == generate(
        llama, [5], heads=[form(h) for h in HEADS]
    )


def test_an_answer_may_not_begin_with_the_id_that_begins_a_text(llama, monkeypatch):
    monkeypatch.setattr(llama, "bos_id", 5)
    with pytest.raises(ValueError, match="an answer begins with 5"):
        score(llama, [5, 6], [[7], [5, 8]], method="greedy")
    score(llama, [5], [5, 8], method="greedy")  # a complete text after the token alone


def test_logits_that_are_not_finite_are_an_error(tmp_path):
    broken = Transformer.load(write_checkpoint(tmp_path, "llama3"))
    broken.norm.weight.data[0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        generate(broken, [5], method="greedy")
    with pytest.raises(ValueError, match="not finite"):
        score(broken, [5], [6], method="greedy")
