"""Eq. 7 and 8 against ten lines of numpy in float64; every way of running the loop gives the same
tokens."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor

from decoders.baselines import AD, CAD, DoLa  # noqa: F401 (of the tables)
from decoders.scoring import score
from decoders.sweep import side_by_side
from decore import DeCoRe, Greedy, Masked, decore, generate, make_head_mask
from hf import HFModel
from model import Cache, Transformer
from runtime.drafts import PARTS, Text
from tests.checkpoints import ids_of, random_ids, tiny, write_checkpoint
from tests.families import random_model
from tests.methods import CASES, DRAFTING, HEADS, MASKING, PROMPTS, method_of
from tests.tables import each

NEW = 8


# ------------------------------------------------------------------ the method in numpy and float64


def log_softmax(z):
    """Over the first axis."""
    z = z.astype(np.float64) - z.max(0)
    return z - np.log(np.exp(z).sum(0))


def contrast(base, masked, method):
    """Scores, α and entropy of Eq. 7 and 8 from two rows of logits."""
    alone = type(method) is Masked
    base, masked = log_softmax(masked if alone else base), log_softmax(masked)
    h, h_masked = (-(np.exp(log_p) * log_p).sum() for log_p in (base, masked))
    alpha = 0
    if isinstance(method, DeCoRe):
        alpha = h_masked - h if method.alpha_rule == "gain" else h
        alpha /= np.log(len(base)) if method.scale_alpha else 1
        alpha = alpha if method.alpha is None else method.alpha
        alpha = min(alpha, math.inf if method.alpha_cap is None else method.alpha_cap)
    return (1 + alpha) * base - alpha * masked, alpha, h


def logits_of_steps(model, prompt, new, heads, mask="output", mask_prompt=False):
    """Logits after prompt + new[:i] for each i: one row, the text in one pass."""
    head_mask = make_head_mask([heads], model)
    if mask_prompt:
        logits = model(torch.tensor([prompt + new]), head_mask=head_mask, mask_on=mask)
        return logits[0, 0, len(prompt) - 1 :].numpy()
    cache = Cache(model, [len(prompt) - 1], len(new) + 1)
    model.prefill(torch.tensor([prompt[:-1]], dtype=torch.long), cache)
    return model(torch.tensor([[prompt[-1]] + new]), cache, head_mask, mask)[0, 0].numpy()


MORE = """
DeCoRe(HEADS, alpha=-0.5)
DeCoRe(HEADS, alpha_cap=0.7)
DeCoRe(HEADS, alpha_cap=0.97, scale_alpha=True)
DeCoRe([(1, 1)], amateur=amateur)
DeCoRe([(0, 1), (1, 0)], mask_prompt=True, amateur=amateur)
DeCoRe(HEADS, alpha_rule="gain")
DeCoRe(HEADS, "query", alpha_rule="gain")
DeCoRe(HEADS, alpha_rule="gain", alpha_cap=0.01)
DeCoRe([(0, 1), (1, 0)], alpha_rule="gain", scale_alpha=True, amateur=amateur)
"""


@pytest.mark.parametrize("method", [*MASKING, *MORE.split("\n")[1:-1]], ids=str)
def test_tokens_alphas_and_entropies_equal_the_numpy_version(model, amateur, method):
    if isinstance(method, str):
        method = eval(method)
    other = getattr(method, "amateur", None) or model
    heads = getattr(method, "heads", ())
    how = getattr(method, "mask", "output"), getattr(method, "mask_prompt", False)
    out = generate(model, PROMPTS, method, max_new_tokens=NEW)
    for prompt, g in zip(PROMPTS, out, strict=True):
        assert g.stop == "length" and len(g.ids) == NEW
        base = logits_of_steps(model, prompt, g.ids, [])
        masked = logits_of_steps(other, prompt, g.ids, heads, *how)
        for i, token in enumerate(g.ids):
            scores, a, h = contrast(base[i], masked[i], method)
            assert token == scores.argmax()
            assert (g.alphas[i], g.entropies[i]) == pytest.approx((a, h), abs=1e-5)  # float32
    if getattr(method, "alpha_rule", None) == "gain" and other is model:
        assert min(alpha for g in out for alpha in g.alphas) < 0


# -------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]], ids=["four prompts", "one prompt"])
def test_the_plain_loop_gives_the_tokens_and_alphas_of_generate(model, prompts):
    steps = zip(*decore(model, prompts, HEADS, NEW))
    tokens, alphas = (torch.cat(x, 1).tolist() for x in steps)
    out = generate(model, prompts, DeCoRe(HEADS), max_new_tokens=NEW)
    assert tokens == ids_of(out) and alphas == [g.alphas for g in out]


FORMS = [
    tuple,
    np.array,
    torch.tensor,
    lambda ids: torch.tensor(ids, dtype=torch.int32),
    lambda ids: [torch.tensor(i) for i in ids],
]


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_heads_may_come_in_any_form_of_whole_numbers(llama, form):
    method = DeCoRe(HEADS)
    plain, batch = (generate(llama, ids, method, 3) for ids in ([5, 6], [[5, 6], [7, 8]]))
    assert generate(llama, form([5, 6]), method, 3) == plain
    assert generate(llama, (form([5, 6]), form([7, 8])), method, 3) == batch
    if form in (np.array, torch.tensor):
        assert generate(llama, form([[5, 6], [7, 8]]), method, 3) == batch
    sums = score(llama, form([5, 6]), form([7, 8]), method)
    assert sums == score(llama, [5, 6], [7, 8], method)
    for heads in ["1-0", "1-3", "2-2"], [form(h) for h in HEADS], iter(HEADS):
        assert generate(llama, [5, 6], DeCoRe(heads), 3) == plain


# ----------------------------------------------------------------------------------------- stopping


def test_texts_end_with_an_end_id_of_the_checkpoint_or_the_call_and_the_rest_of_the_batch_goes_on(
    llama, tmp_path
):
    how = dict(method=DeCoRe(HEADS), max_new_tokens=NEW)
    free = generate(llama, PROMPTS, **how)
    end = free[1].ids[2]
    expected = [g.ids[: g.ids.index(end) + 1] if end in g.ids else g.ids for g in free]
    model = tiny(tmp_path, eos_token_id=[end])
    assert ids_of(generate(model, PROMPTS, **how)) == expected
    assert generate(model, PROMPTS, eos_ids=(), **how) == free
    for form in (end, [end, end], {end}, torch.tensor(end)):
        out = generate(llama, PROMPTS, eos_ids=form, **how)
        assert ids_of(out) == expected
        assert [g.stop for g in out] == ["eos" if end in g.ids else "length" for g in out]


def test_the_default_dtype_of_torch_has_no_effect(llama, amateur):
    def run():
        model = Transformer.load(llama.checkpoint.folder, dtype="float32")
        methods = [method_of(case, amateur) for case in CASES]
        how = dict(max_new_tokens=4, eos_ids=())
        texts = [generate(model, PROMPTS, method, **how) for method in methods]
        alone = [method for method in methods if not isinstance(method, CAD)]
        return texts, [score(model, PROMPTS[1], [3, 4], method) for method in alone]

    expected = run()
    torch.set_default_dtype(torch.float16)
    try:
        assert run() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_min_new_tokens_is_refused_where_every_id_ends_a_text(llama):
    how = dict(max_new_tokens=2, eos_ids=range(llama.config.vocab_size))
    assert generate(llama, PROMPTS[0], Greedy(), **how).stop == "eos"
    with pytest.raises(ValueError, match="min_new_tokens 1 is impossible: every id of"):
        generate(llama, PROMPTS[0], Greedy(), min_new_tokens=1, **how)


def test_ids_that_may_not_end_a_text_keep_their_probability_in_the_step(llama):
    steps = []

    class Kept(Greedy):
        def combine(self, logits):
            steps.append(super().combine(logits))
            return steps[-1]

    generate(llama, PROMPTS[0], Kept(), max_new_tokens=2, eos_ids=[3], min_new_tokens=2)
    assert all(step.base.isfinite().all() for step in steps) and len(steps) == 2


@pytest.mark.parametrize("case", [case for case in CASES if "," not in case])
def test_min_new_tokens_gives_the_tokens_that_the_processor_of_transformers_gives(
    llama, amateur, engine, case
):
    method = method_of(case, amateur)
    model = engine.load(llama.checkpoint.folder)
    how = dict(method=method, max_new_tokens=NEW)
    free = generate(model, PROMPTS, eos_ids=(), **how)
    ends = sorted({g.ids[i] for g in free for i in (0, 2, 5)})  # those that would come early
    decoding = method.start(model, PROMPTS, NEW)
    process = [MinNewTokensLengthLogitsProcessor(len(p), 4, ends, device="cpu") for p in PROMPTS]
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(NEW):
        with torch.inference_mode():
            scores = decoding.step(torch.tensor([ids[-1:] for ids in texts])).scores  # [B, 1, V]
        for b, ids in enumerate(texts):
            ids.append(process[b](torch.tensor([ids]), scores[b]).argmax().item())
    expected = []
    for prompt, ids in zip(PROMPTS, texts):
        new = ids[len(prompt) :]
        stop = next((i for i, token in enumerate(new, 1) if token in ends), NEW)
        expected.append(new[:stop])
    out = generate(model, PROMPTS, eos_ids=ends, min_new_tokens=4, **how)
    assert ids_of(out) == expected and min(map(len, expected)) > 4
    early = generate(model, PROMPTS, eos_ids=ends, **how)
    assert [len(g.ids) for g in early] == [1] * len(PROMPTS)


@pytest.mark.parametrize("case", DRAFTING)
def test_drafts_change_nothing_but_the_number_of_passes(
    llama, amateur, steps, monkeypatch, engine, case
):
    model = engine.load(llama.checkpoint.folder)
    prompt = random_ids(9, seed=1)
    method = CAD(prompt[3:]) if case == "cad" else method_of(case, amateur)
    how = dict(ids=prompt, method=method, max_new_tokens=16)
    free = generate(model, eos_ids=(), **how).ids
    for ends, least in ((), 0), (free[7:8], 0), (free[2:3], 5):
        steps.clear()
        how["on_token"] = None
        plain = generate(model, eos_ids=ends, min_new_tokens=least, **how)
        assert len(steps) == len(plain.ids)

        def draft(self, most):  # every fourth id is wrong
            at = len(self.ids) - len(prompt)
            ids = [(x + (i % 4 == 3)) % 96 for i, x in enumerate(plain.ids)]  # noqa: B023
            return ids[at : at + most]

        monkeypatch.setattr(Text, "draft", draft)
        for most, per_pass in (1, 2), (6, 4):
            steps.clear()
            tokens = []
            how |= dict(on_token=lambda _, token, h, tokens=tokens: tokens.append(token))
            g = generate(model, eos_ids=ends, min_new_tokens=least, draft=most, **how)
            assert (g.ids, g.stop, tokens) == (plain.ids, plain.stop, plain.ids)
            assert g.alphas == pytest.approx(plain.alphas, abs=1e-4)
            assert g.entropies == pytest.approx(plain.entropies, abs=1e-4)
            assert len(steps) <= len(g.ids) / per_pass + 4


def test_a_cache_that_keeps_more_than_keys_decodes_without_drafts_and_says_so():
    model = HFModel(random_model("qwen3_next"))
    how = dict(ids=[5, 6] * 4, method=Greedy(), max_new_tokens=6, eos_ids=())
    with pytest.warns(UserWarning, match="^nothing is drafted: a cache cannot take tokens back$"):
        ids = generate(model, draft=4, **how).ids
    assert ids == generate(model, **how).ids


def test_a_draft_is_what_followed_the_last_ids_at_their_latest_earlier_place():
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, 4, 30).tolist()
        text = Text(ids, PARTS)
        for n in (4, 3, 2, 1):
            starts = [i for i in range(n, 30) if ids[i - n : i] == ids[-n:]]
            if starts:
                break
        after = ids[starts[-1] :]
        assert text.draft(8) == (after * 8)[: math.ceil(8 * PARTS[n])]
    assert Text([5, 6], PARTS).draft(8) == []


@pytest.mark.parametrize("product, width", [("plain", 1), ("packed", 2), (None, 2)])
def test_where_wide_passes_are_dear_nothing_is_drafted_after_one_id(
    llama, steps, monkeypatch, product, width
):
    monkeypatch.setattr(llama, "product", product)
    generate(llama, [5, 6, 7, 5], Greedy(), max_new_tokens=9, draft=8)
    assert steps[0] == width


def test_texts_end_with_the_context_of_the_model_or_the_amateur(llama, tmp_path):
    short = tiny(tmp_path, max_position_embeddings=20)
    prompts = [random_ids(n) for n in (20, 18, 5)]
    for out in (
        generate(short, prompts, Greedy(), max_new_tokens=10**12),  # too many for a cache
        generate(llama, prompts, DeCoRe([(0, 0)], amateur=short)),
    ):
        assert [len(g.ids) for g in out] == [1, 2, 15]
        assert [g.stop for g in out] == ["length"] * 3
    answer = random_ids(6)  # whose last token is not read
    assert score(short, random_ids(15), answer, Greedy()) < 0
    assert math.isfinite(score(short, random_ids(15)[-1:], answer, CAD(random_ids(15))))


def test_on_token_gets_every_token_in_order_and_may_end_a_text(llama):
    how = dict(method=DeCoRe(HEADS), max_new_tokens=9)
    text, calls = generate(llama, PROMPTS[1], **how), [[], []]

    def on_token(b, token, h):
        calls[b].append((token, h))
        return b == 0 and token == text.ids[2]

    out = generate(llama, [PROMPTS[1], [5]], on_token=on_token, **how)
    assert calls == [list(zip(g.ids, g.entropies)) for g in out]
    assert out[0].stop == "stop" and out[0].ids == text.ids[: text.ids.index(text.ids[2]) + 1]


def test_a_rule_of_ones_own_gives_alpha(llama):
    class Twice(DeCoRe):
        def rule(self, h, base, other):
            return 2 * h

    how = dict(max_new_tokens=6, eos_ids=())
    out = generate(llama, PROMPTS[1], Twice(HEADS), **how)
    assert out.alphas == [2 * h for h in out.entropies]
    assert max(generate(llama, PROMPTS[1], Twice(HEADS, alpha_cap=0.25), **how).alphas) == 0.25


# ---------------------------------------------------------------------------------------- bad input


def test_logits_that_are_not_finite_are_an_error(tmp_path):
    broken = tiny(tmp_path)
    broken.norm.weight.data[0] = math.nan
    for function, *answer in (generate,), (score, [6]):
        with pytest.raises(ValueError, match="not finite"):
            function(broken, [5], *answer, method=Greedy())


def lite(vocab_size=96):
    config = SimpleNamespace(vocab_size=vocab_size, max_positions=12, n_layers=1, n_heads=1)
    amateur = SimpleNamespace(name="short", pad_ids=(), config=config)
    return DeCoRe([(0, 0)], amateur=amateur)


class Nan(DeCoRe):
    def rule(self, h, base, other):
        return h * math.nan


TWO = [[5, 6], [7]]
# Arguments of `generate`, or with answer_ids of `score`, and what is said of them.
MISTAKES = r"""
ids=[[5], []] | prompt 2 of 2 is empty
ids=[[5], 6] | prompt 2 of 2 is 6; give
ids=[96] | contains the id 96; .* knows 0 to 95
ids=[True] | is .True.; give
ids=[True, 5] | is .True, 5.; give
eos_ids={True, 5} | eos_ids is {True, 5}
ids="text" | is 'text'; give token ids
ids=[5] * 513 | 513 tokens; .* reads 512
ids=torch.tensor([[5, 2]]) | begins or ends in padding; give lists of ids
method="beam" | the method is 'beam'; give a record, such as
method=Greedy | the method is <class .*; give a record, such as
method=Masked([(3, 0)]) | head 3-0 is outside .* \(3 layers, 4 heads\)
method=DeCoRe([(1, 0), (1, 0)]) | head 1-0 is listed twice
method=Masked([]) | heads are none; give one or more to mask
method=DeCoRe([]), answer_ids=[6] | heads are none; .* Greedy
method=Nan(HEADS) | α is nan: the method's rule gives it
method=Nan(HEADS), answer_ids=[6] | α is nan: the method's
max_new_tokens=0 | max_new_tokens 0 is not a whole number of at
best=97 | best 97 is not a whole number of .* at most 96
eos_ids="2" | eos_ids is '2'
min_new_tokens=3, max_new_tokens=2 | min_new_tokens 3 is not .* at least 0 and at most 2
method=lite(64) | one vocabulary
method=DoLa(), draft=4 | draft is for methods that are rows of passes; DoLa is
draft=-1 | draft -1 is not a whole number
method=lite(), ids=[5] * 13 | 13 tokens; short reads 12
method=lite(), answer_ids=[6] * 13 | longest answer has 13 tokens; short reads 12
model=torch.nn.Linear(1, 1) | Linear is not a model of ours.* HFModel\(model\)
method=CAD(), ids=TWO | cad needs each prompt without its context
method=CAD([[6], []]), ids=TWO | context-free prompt 2 of 2 is empty
method=CAD([[6]]), ids=TWO | it got 1 for 2
method=CAD([[6], [6]]), ids=TWO | end in different tokens
method=CAD([[6], [7] * 450]), ids=TWO | context-free .* has 513 tokens
method=AD() | info_layer 24 is outside .*layers 1 to 3
answer_ids=[] | the answer is empty
ids=[5] * 500, answer_ids=[5] * 14 | prompt with its longest answer has 513
answer_ids=[[6], [7, 8]] | an answer begins with 7
ids=[[5], [6]], answer_ids=[[[5]]] | 2 prompts need as many lists of answers, not 1
"""


@each("arguments, words", MISTAKES)
def test_each_mistake_has_its_message(llama, monkeypatch, arguments, words):
    monkeypatch.setattr(llama, "bos_id", 7)
    monkeypatch.setattr(llama, "pad_ids", (2,))
    how = dict(model=llama, ids=[5], method=DeCoRe(HEADS)) | eval(f"dict({arguments})")
    function = generate
    if "answer_ids" in how:
        function = score
        how["prompt_ids"] = how.pop("ids")
    with pytest.raises(ValueError, match=words) as error:
        function(**how)
    assert "\n" not in str(error.value)


def test_a_method_with_a_start_of_its_own_shares_no_passes_and_no_other_is_greedy(llama):
    class Starts(DeCoRe):
        def start(self, model, prompts, capacity):
            return Greedy().start(model, prompts, capacity)

    assert not isinstance(DeCoRe(HEADS), Greedy)
    own, _ = side_by_side(llama, PROMPTS, [Starts(HEADS), DeCoRe(HEADS)], max_new_tokens=NEW)
    assert ids_of(own) == ids_of(generate(llama, PROMPTS, Greedy(), NEW))
    with pytest.raises(ValueError, match="Starts is not"):
        generate(llama, PROMPTS[0], Starts(HEADS), draft=4)


class Own(DeCoRe):
    alpha = 2


SETTINGS = """
DeCoRe(None) | heads None are not a list
DeCoRe(["1-0", "1"]) | '1'. are not a list
DeCoRe(["00-3"]) | '00-3'. are not a list
DeCoRe([(1.5, 0)]) | are not a list
Masked(HEADS, mask="keys") | mask 'keys' is unknown
DeCoRe((), alpha_rule="gian") | alpha_rule 'gian' is unknown; known: entropy, gain
DeCoRe(HEADS, alpha=math.nan) | alpha nan is not a finite
DeCoRe(HEADS, alpha_cap=-1) | alpha_cap -1 is not .* at least 0
AD(1.5) | info_layer 1.5 is not a whole number
AD(info_layer=True) | info_layer True is not a whole number
DoLa("middle") | half 'middle' is unknown
DoLa(dola_layers="thirds") | dola_layers 'thirds' is unknown
DoLa(relative_top=1.5) | relative_top 1.5 is not .* at most 1
DoLa(repetition_penalty=0) | repetition_penalty 0 is not
DeCoRe((), alhpa=1) | DeCoRe has no setting 'alhpa'; it has heads, mask, .*alpha_cap
Greedy(heads=()) | Greedy has no setting 'heads'; it has none
Own(HEADS) | Own.alpha would have no effect: write @dataclass
DeCoRe((), alpha=1, scale_alpha=True) | scale_alpha .* no effect on a constant alpha
DeCoRe((), alpha=1, alpha_rule="gain") | alpha_rule has no effect on a constant alpha
"""


@each("call, words", SETTINGS)
def test_a_record_refuses_unknown_settings_and_values(call, words):
    with pytest.raises(ValueError, match=words):
        eval(call)


def test_methods_side_by_side_decode_as_each_alone(llama, amateur):
    methods = [method_of(case, amateur) for case in CASES]
    for model in llama, HFModel.load(llama.checkpoint.folder):
        together = side_by_side(model, PROMPTS, methods, NEW)
        for method, out in zip(methods, together, strict=True):
            alone = generate(model, PROMPTS, method, max_new_tokens=NEW)
            assert ids_of(out) == ids_of(alone), method
            for g, one in zip(out, alone):
                assert g.alphas == pytest.approx(one.alphas, abs=1e-5)
        [first] = side_by_side(model, PROMPTS[0], methods[:1], max_new_tokens=NEW)  # of one prompt
        assert first.ids == together[0][0].ids


def test_a_method_whose_amateur_reads_less_ends_its_own_texts_only(llama, tmp_path, engine):
    short = engine.load(write_checkpoint(tmp_path, "llama3", max_position_embeddings=20))
    methods = [Greedy(), DeCoRe([(0, 1)], amateur=short)]
    prompts = [random_ids(n) for n in (18, 5)]
    how = dict(max_new_tokens=30, eos_ids=())
    long, cut = side_by_side(llama, prompts, methods, **how)
    assert [len(g.ids) for g in long] == [30, 30] and [len(g.ids) for g in cut] == [2, 15]
    assert ids_of(cut) == ids_of(generate(llama, prompts, methods[1], **how))


def test_an_amateur_with_less_padding_decodes_beside_others(tmp_path):
    size = dict(num_hidden_layers=2, vocab_size=298, seed=5)
    model = tiny(tmp_path / "m", vocab_size=300)
    amateur = tiny(tmp_path / "a", **size)
    methods = [DeCoRe([(0, 1)], amateur=amateur, scale_alpha=True), DeCoRe(HEADS)]
    how = dict(max_new_tokens=NEW, eos_ids=[299], min_new_tokens=2)
    for method, out in zip(methods, side_by_side(model, PROMPTS, methods, **how), strict=True):
        alone = generate(model, PROMPTS, method, **how)
        assert ids_of(out) == ids_of(alone)
        assert out[0].alphas == pytest.approx(alone[0].alphas, abs=1e-5)
