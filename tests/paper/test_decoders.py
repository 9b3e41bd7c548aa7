"""Each decoder against numpy on float64 logits of transformers without a cache; DoLa against
recorded runs."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from decore import decode
from model import Transformer
from paper import decoders
from paper.decoders import DECODERS, exit_layers, generate, score
from tests.checkpoints import CLASSES, random_ids, write_checkpoint
from tests.golden.make import DOLA_MODELS, DOLA_PROMPTS, FOLDER, NEW_TOKENS

PROMPTS = [random_ids(n, seed=n) for n in (3, 17, 1, 30)]
WITHOUT = [random_ids(n, seed=40 + n) + p[-1:] for n, p in zip((1, 4, 0, 8), PROMPTS, strict=True)]
ANSWERS = [random_ids(n, seed=80 + n) for n in (4, 1, 7)]
NEW = 6
ATOL = 3e-5  # float32 against float64; scores are of the order of 10
METHODS = ("cd", "cad", "dola-low", "dola-high", "ad")
CHANGES = {
    "cd": dict(alpha=1.25),
    "cad": dict(alpha=1.25),
    "ad": dict(alpha=1.25, info_layer=6),
}  # 6: the last layer


class Pair:
    """A model, and an oracle of transformers with its weights in float64."""

    def __init__(self, model):
        cls = getattr(transformers, CLASSES[model.config.model_type])
        self.model, self.outputs = model, {}
        self.oracle = cls.from_pretrained(
            model.folder, dtype=torch.float64, attn_implementation="eager"
        )

    def read(self, ids):
        """The oracle's logits of a text, [T, V], and those of each early exit."""
        if tuple(ids) not in self.outputs:
            with torch.inference_mode():
                out = self.oracle(torch.tensor([ids]), output_hidden_states=True)
                exits = [self.oracle.lm_head(x)[0].numpy() for x in out.hidden_states]
                self.outputs[tuple(ids)] = out.logits[0].numpy(), exits
        return self.outputs[tuple(ids)]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """deep(family, layers): a model of that many layers."""
    return cache(
        lambda family, layers: Transformer.load(
            write_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=layers)
        )
    )


@pytest.fixture(scope="module", params=["llama3", "mistral-window", "qwen2", "qwen3"])
def expert(request, deep):
    return Pair(deep(request.param, 6))


@pytest.fixture(scope="module")
def small(amateur):
    return Pair(amateur)


def settings(method, small, **without_context):
    """The settings that a method needs."""
    return {"cd": dict(amateur=small.model), "cad": without_context, "ad": dict(info_layer=3)}.get(
        method, {}
    )


# ---------------------------------------------------------------------------- the decoders in numpy


def log_softmax(z):
    z = z - z.max(0)
    return z - np.log(np.exp(z).sum(0))


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
    logits, exits = expert.read(text)
    z = logits[at]
    if method == "cd":
        return log_softmax(z) - alpha * log_softmax(small.read(text)[0][at])
    if method == "cad":
        return (1 + alpha) * z - alpha * expert.read(without)[0][at + len(without) - len(text)]
    if method == "ad":
        log_p = log_softmax(exits[info_layer][:positions])  # over positions, [P, V]
        return log_softmax(z) + alpha * (np.exp(log_p) * log_p).sum(0)
    tied = expert.model.config.tied_embeddings and not scoring
    layers = {"dola-low": [2] if tied else [0, 2], "dola-high": [3, 5]}[method]
    early = [log_softmax(exits[layer][at]) for layer in layers]
    return log_softmax(z) - max(early, key=lambda log_q: divergence(log_softmax(z), log_q))


def reference(method, prompt, without, expert, small, relative_top, **how):
    """Tokens, the scores of every step, and entropies. Each step reads the complete text."""
    new, all_scores, entropies = [], [], []
    for _ in range(NEW):
        text = prompt + new
        scores = next_scores(
            method, len(text) - 1, text, expert, small, without + new, len(prompt), **how
        )
        log_p = log_softmax(expert.read(text)[0][-1])
        if relative_top:
            scores = np.where(np.exp(log_p) >= relative_top * np.exp(log_p).max(), scores, -np.inf)
        all_scores.append(scores)
        entropies.append(-(np.exp(log_p) * log_p).sum())
        new = new + [int(scores.argmax())]
    return new, np.array(all_scores), entropies


@torch.inference_mode()
def generate_with_scores(model, prompts, method, new, **how):
    """→ Generations, and the scores of each step, [B, T, V]."""
    decoder = DECODERS[method](model, prompts, new, method, **how)
    steps = decode(decoder.step, torch.tensor([prompt[-1:] for prompt in prompts]), new)
    scores = torch.cat([step.scores for _, step in steps], 1).numpy()
    return generate(model, prompts, method, max_new_tokens=new, **how), scores


# --------------------------------------------------------------------------- generation and scoring


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_scores_equal_the_numpy_version(expert, small, method, changed, monkeypatch):
    changes = dict(relative_top=0.4) | CHANGES.get(method, {}) if changed else {}
    monkeypatch.setattr(
        "model.CHUNK", 1 if changed else 2048
    )  # longer prompts are prefilled in two passes
    how = settings(method, small, ids_without_context=WITHOUT) | changes
    out, scores = generate_with_scores(expert.model, PROMPTS, method, NEW, **how)
    changes = dict(relative_top=None if method in ("cd", "cad") else 0.1) | changes
    for b, (prompt, without) in enumerate(zip(PROMPTS, WITHOUT, strict=True)):
        ids, expected, entropies = reference(method, prompt, without, expert, small, **changes)
        assert out[b].ids == ids and out[b].stop == "length"
        np.testing.assert_allclose(scores[b], expected, atol=ATOL, rtol=0)
        np.testing.assert_allclose(out[b].entropies, entropies, atol=ATOL)
        assert (
            out[b].alphas == [1.0 if method.startswith("dola") else changes.get("alpha", 0.5)] * NEW
        )
        assert np.isinf(expected).any() == bool(changes["relative_top"])


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_scores_of_answers_equal_the_numpy_version(expert, small, method, renormalise):
    """Neither relative_top nor repetition_penalty changes them."""
    prompt, without, expected = PROMPTS[1], WITHOUT[1], []
    for answer in ANSWERS:
        text, total = prompt + answer, 0.0
        for i, token in enumerate(answer):
            scores = next_scores(
                method,
                len(prompt) + i - 1,
                text,
                expert,
                small,
                without + answer,
                len(text),
                scoring=True,
            )
            total += (log_softmax(scores) if renormalise and method != "ad" else scores)[token]
        expected.append(total)
    how = settings(method, small, prompt_ids_without_context=without) | dict(
        renormalise=renormalise, relative_top=0.9
    )
    how |= dict(repetition_penalty=1.5) if method.startswith("dola") else {}
    np.testing.assert_allclose(
        score(expert.model, prompt, ANSWERS, method, **how), expected, atol=2e-4
    )  # sums of 7
    assert score(expert.model, prompt, ANSWERS[0], method, **how) == pytest.approx(
        expected[0], abs=2e-4
    )


# --------------------------------------------------------------------------------------------- DoLa


@pytest.mark.parametrize("half", ["low", "high"])
@pytest.mark.parametrize("name", DOLA_MODELS)
def test_dola_equals_the_recorded_runs_of_transformers(name, half, deep):
    golden, model = np.load(FOLDER / "dola.npz"), deep(*DOLA_MODELS[name])
    out, scores = generate_with_scores(model, DOLA_PROMPTS, f"dola-{half}", NEW_TOKENS)
    atol = 1e-3 if name == "llama3-42" else 1e-4  # both float32; early exits grow with depth
    for b, g in enumerate(out):
        assert g.ids == golden[f"{name}/{half}/{b}/ids"].tolist()
        np.testing.assert_allclose(
            scores[b], golden[f"{name}/{half}/{b}/scores"], atol=atol, rtol=0
        )


@pytest.mark.parametrize(
    "layers, tied, half, rule, expected",
    [
        (32, False, "low", "capped", range(0, 16, 2)),
        (40, False, "low", "capped", range(0, 20, 2)),
        (80, False, "low", "capped", range(0, 20, 2)),
        (80, False, "high", "capped", range(60, 80, 2)),
        (80, False, "high", "halves", range(40, 80, 2)),
        (80, True, "low", "halves", range(0, 40, 2)),
        (3, True, "low", "halves", (0,)),
        (28, True, "low", "capped", range(2, 14, 2)),
        (80, True, "low", "capped", range(2, 20, 2)),
        (4, True, "low", "capped", (2,)),
        (2, True, "low", "capped", (1,)),
        (5, False, "high", "capped", (2, 4)),
        (1, True, "low", "capped", (0,)),
    ],
)
def test_exit_layers_are_those_of_the_published_runs(layers, tied, half, rule, expected):
    config = SimpleNamespace(n_layers=layers, tied_embeddings=tied)
    assert exit_layers(SimpleNamespace(config=config, name="m"), half, rule) == list(expected)


def test_a_tied_model_of_three_layers_has_no_low_exits(deep):
    with pytest.raises(ValueError, match="use dola-high"):
        generate(deep("qwen2", 3), PROMPTS, method="dola-low")


def test_repetition_penalty_is_that_of_transformers(deep):
    model, how = deep("qwen2", 8), dict(method="dola-low", max_new_tokens=6)
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    penalised = generate(model, PROMPTS, repetition_penalty=1.3, **how)
    for prompt, g in zip(PROMPTS, penalised, strict=True):
        text = list(prompt)
        for _ in range(6):
            [step] = decoders.DoLa(model, [text], 1).step(torch.tensor([text[-1:]])).scores
            text.append(int(penalty(torch.tensor([text]), step).argmax()))
        assert g.ids == text[len(prompt) :]
    assert [g.ids for g in penalised] != [g.ids for g in generate(model, PROMPTS, **how)]


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "method, how, message",
    [
        ("cd", {}, "cd needs an amateur"),
        ("cad", {}, "cad needs each prompt without its context"),
        ("cad", dict(ids_without_context=[[5], []]), "context-free prompt 2 of 2 is empty"),
        ("cad", dict(ids_without_context=[[5]]), "it got 1 for 2"),
        ("cad", dict(ids_without_context=[[5], [96]]), "contains the id 96"),
        (
            "cad",
            dict(ids_without_context=[[5], [5]]),
            "end in different tokens; end both in the same word",
        ),
        (
            "cad",
            dict(ids_without_context=[p[-1:] * 450 for p in PROMPTS[:2]]),
            "450 tokens, longer than its prompt, leaves no room for 64",
        ),
        ("ad", {}, "info_layer 24 is outside .*layers 1 to 3"),
        ("ad", dict(info_layer=0), "info_layer 0 is outside"),
        ("dola-low", dict(dola_layers="thirds"), "dola_layers 'thirds' is unknown"),
        ("dola-low", dict(relative_top=1.5), "relative_top 1.5 is not .* at least 0 and at most 1"),
        ("dola-low", dict(relative_top="x"), "relative_top 'x' is not a finite number"),
        ("dola-low", dict(repetition_penalty=0), "repetition_penalty 0 is not a positive number"),
        ("dola", {}, "method 'dola' is unknown; known: greedy"),
    ],
)
def test_each_mistake_has_its_message(llama, method, how, message):
    with pytest.raises(ValueError, match=message):
        generate(llama, PROMPTS[:2], method, **how)


@pytest.mark.parametrize(
    "prompt, answer, how, message",
    [
        ([], [5], {}, "the prompt is empty"),
        ([5], [], {}, "the answer is empty"),
        ([5], [[5], []], {}, "answer 2 of 2 is empty"),
        ([5], [400], {}, "the answer contains the id 400"),
        ([5] * 512, [5, 6], {}, "prompt with its longest answer has 513"),
        (
            [5],
            [5],
            dict(method="cad", prompt_ids_without_context=[]),
            "the context-free prompt is empty",
        ),
    ],
)
def test_a_bad_prompt_or_answer_has_its_message_in_scoring(llama, prompt, answer, how, message):
    with pytest.raises(ValueError, match=message):
        score(llama, prompt, answer, **dict(method="dola-low") | how)
