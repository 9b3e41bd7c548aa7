"""Each decoder against numpy on float64 logits of transformers without a cache."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from decoders.baselines import AD, CAD, CD, DoLa, exit_layers, most_divergent
from decoders.scoring import score
from decore import DeCoRe, generate
from tests.checkpoints import FAMILIES, random_ids, random_weights, tiny
from tests.core.test_decore import log_softmax
from tests.methods import PROMPTS
from tests.tables import each, facts, rows

WITHOUT = [random_ids(n, seed=40 + n) + p[-1:] for n, p in zip((1, 4, 0, 8), PROMPTS)]
ANSWERS = [random_ids(n, seed=80 + n) for n in (4, 1, 7)]
NEW = 6
ATOL = 3e-5  # float32 against float64; scores are of the order of 10
CHANGES = """
cd | alpha=1.25
cad | alpha=1.25
dola-low | repetition_penalty=1.3
dola-high | repetition_penalty=0.8
ad | alpha=1.25 info_layer=6
"""  # the last layer
CHANGES = {name: facts(changes) for name, changes in rows(CHANGES)}


def with_oracle(model):
    """A model, and how transformers reads with its weights in float64."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        model.checkpoint.folder, dtype=torch.float64, attn_implementation="eager"
    ).requires_grad_(False)

    @cache
    def read(*ids):
        """The oracle's logits of a text, [T, V], and exits(layer, at), those of an early exit."""
        out = oracle(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].numpy(), lambda layer, at: oracle.lm_head(
            out.hidden_states[layer][0, at]
        ).numpy()

    return SimpleNamespace(model=model, read=read, oracle=oracle)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """deep(family, layers): a model of that many layers."""

    @cache
    def load(family, layers):
        return tiny(tmp_path_factory.mktemp(family), family, num_hidden_layers=layers)

    return load


@pytest.fixture(scope="module", params=["llama3", "mistral-window", "qwen2", "qwen3"])
def expert(request, deep):
    return with_oracle(deep(request.param, 6))


@pytest.fixture(scope="module")
def small(amateur):
    return with_oracle(amateur)


def method_of(name, small, without):
    """The record of a name. without: prompts without context, in the form of ids."""
    if name.startswith("dola"):
        return DoLa(name.removeprefix("dola-"))
    return {"cd": CD(small.model), "cad": CAD(without), "ad": AD(info_layer=3)}[name]


# ---------------------------------------------------------------------------- the decoders in numpy


def divergence(log_p, log_q):
    """Half of both Kullback-Leibler divergences of the average from its parts, averaged over the
    vocabulary."""
    m = (np.exp(log_p) + np.exp(log_q)) / 2
    return (m * (np.log(m) - log_p) + m * (np.log(m) - log_q)).mean() / 2


def next_scores(
    method, at, text, expert, small, without, positions, alpha=0.5, info_layer=3, scoring=False
):
    """Scores of what follows text[at], unfiltered. positions: how many AD's entropy is over.
    scoring: the exits of DoLa are those of scoring, not of generation."""
    logits, exits = expert.read(*text)
    z = logits[at]
    if method == "cd":
        return log_softmax(z) - alpha * log_softmax(small.read(*text)[0][at])
    if method == "cad":
        return (1 + alpha) * z - alpha * expert.read(*without)[0][at + len(without) - len(text)]
    if method == "ad":
        log_p = log_softmax(exits(info_layer, slice(positions)))  # over positions, [P, V]
        return log_softmax(z) + alpha * (np.exp(log_p) * log_p).sum(0)
    L, tied = expert.model.config.n_layers, expert.model.config.tied_embeddings and not scoring
    half = {"dola-low": (2 if tied else 0, L // 2), "dola-high": (L // 2, L)}[method]
    early = [log_softmax(exits(layer, at)) for layer in range(*half, 2)]
    return log_softmax(z) - max(early, key=lambda log_q: divergence(log_softmax(z), log_q))


def generate_with_scores(model, prompts, method, new):
    """→ Generations, and the scores of each step, [B, T, V]."""
    steps = []

    class Kept(type(method)):
        def step_of(self, *args):
            steps.append(super().step_of(*args))
            return steps[-1]

    out = generate(model, prompts, Kept(**vars(method)), max_new_tokens=new)
    return out, torch.cat([step.scores for step in steps], 1).numpy()


# --------------------------------------------------------------------------- generation and scoring


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_tokens_and_scores_equal_the_numpy_version(expert, small, name, changed, monkeypatch):
    changes = dict(relative_top=0.4) | CHANGES[name] if changed else {}
    if changed:
        monkeypatch.setattr("model.CHUNK", 1)  # longer prompts are prefilled in two passes
    method = replace(method_of(name, small, WITHOUT), **changes)
    out, scores = generate_with_scores(expert.model, PROMPTS, method, NEW)
    changes = dict(relative_top=0 if name in ("cd", "cad") else 0.1) | changes
    top = changes.pop("relative_top")
    penalty = changes.pop("repetition_penalty", 1)
    penalise = transformers.RepetitionPenaltyLogitsProcessor(float(penalty))
    alpha = 1.0 if name.startswith("dola") else changes.get("alpha", 0.5)
    for b, (prompt, without, g) in enumerate(zip(PROMPTS, WITHOUT, out, strict=True)):
        assert g.alphas == [alpha] * NEW and g.stop == "length"
        assert np.isinf(scores[b]).any() == (top > 0)
        text, pair = prompt + g.ids, (expert, small, without + g.ids)  # read once
        for i, token in enumerate(g.ids):
            at = len(prompt) + i - 1
            expected = next_scores(name, at, text, *pair, len(prompt), **changes)
            before = torch.tensor([text[: at + 1]])
            expected = penalise(before, torch.tensor(expected[None]))[0].numpy()
            log_p = log_softmax(expert.read(*text)[0][at])
            plausible = np.exp(log_p) >= top * np.exp(log_p).max()
            expected = np.where(plausible, expected, -np.inf)
            np.testing.assert_allclose(scores[b, i], expected, atol=ATOL, rtol=0)
            assert token == expected.argmax()
            assert g.entropies[i] == pytest.approx(-(np.exp(log_p) * log_p).sum(), abs=ATOL)


def test_dola_chooses_the_same_exits_without_tokens_whose_logits_are_minus_infinity(deep):
    model = deep("llama3", 6)
    states = torch.randn(4, 1, 20, 32, generator=torch.Generator().manual_seed(1))
    early = []
    for change in lambda z: z[..., :90], lambda z: z.masked_fill(torch.arange(96) >= 90, -np.inf):
        hook = model.lm_head.register_forward_hook(lambda _, args, z, change=change: change(z))
        early.append(most_divergent(model, states)[1][..., :90])
        hook.remove()
    torch.testing.assert_close(*early)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_scores_of_answers_equal_the_numpy_version(expert, small, name, renormalise):
    """Neither relative_top nor repetition_penalty changes them."""
    prompt, without, expected = PROMPTS[1], WITHOUT[1], []
    for answer in ANSWERS:
        text, total = prompt + answer, 0.0
        pair = text, expert, small, without + answer, len(text)
        for i, token in enumerate(answer):
            scores = next_scores(name, len(prompt) + i - 1, *pair, scoring=True)
            total += (log_softmax(scores) if renormalise and name != "ad" else scores)[token]
        expected.append(total)
    changes = dict(relative_top=0.9)
    if name.startswith("dola"):
        changes |= dict(repetition_penalty=1.5)
    method = replace(method_of(name, small, without), **changes)
    sums = score(expert.model, prompt, ANSWERS, method, renormalise=renormalise)
    assert sums == pytest.approx(expected, abs=2e-4)  # sums of 7


# --------------------------------------------------------------------------------------------- DoLa


EXITS = """
80 |  | high | halves | 40 42 44 46 48 50 52 54 56 58 60 62 64 66 68 70 72 74 76 78
80 | tied | low | halves | 0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30 32 34 36 38
80 | tied | low | capped | 2 4 6 8 10 12 14 16 18
80 |  | high | capped | 60 62 64 66 68 70 72 74 76 78
5 |  | high | capped | 2 4
1 | tied | low | capped | 0
"""


@each("layers, tied, half, rule, expected", EXITS)
def test_exit_layers_are_those_of_the_published_runs(layers, tied, half, rule, expected):
    config = SimpleNamespace(n_layers=int(layers), tied_embeddings=bool(tied))
    assert [*map(str, exit_layers(SimpleNamespace(config=config), half, rule))] == expected.split()


@pytest.mark.parametrize("make", [CD, lambda amateur: DeCoRe([(0, 1)], amateur=amateur)])
def test_rows_that_pad_a_vocabulary_take_no_part(tmp_path, make):
    def load(seed, padding):
        weights = random_weights(FAMILIES["llama3"] | dict(vocab_size=200), seed)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = torch.cat([weights[name], torch.full([padding, 32], 9.0)])
        folder = tmp_path / f"{seed}-{padding}"
        size = dict(vocab_size=200 + padding)
        return tiny(folder, weights=weights, **size)

    results = []
    for of_model, of_amateur in ((0, 0), (2, 0), (0, 2)):
        model, method = load(0, of_model), make(load(1, of_amateur))
        out = generate(model, PROMPTS[1], method, max_new_tokens=NEW)
        scores = score(model, PROMPTS[1], ANSWERS, method)
        results.append([*out.ids, *out.entropies, *scores])
    assert results[1] == pytest.approx(results[0]) == results[2]
