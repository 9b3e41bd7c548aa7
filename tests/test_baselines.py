"""Each decoder against plain float64 loops over what transformers computes without a cache; DoLa as recorded."""

import json
import math
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import baselines
import decore
from baselines import exit_layers, generate, score
from decore import decode
from model import Transformer
from tests.checkpoints import CLASSES, FAMILIES, random_ids, write_checkpoint
from tests.golden.make_dola import MODELS, NEW_TOKENS
from tests.golden.make_dola import PROMPTS as DOLA_PROMPTS

PROMPTS = [random_ids(n, seed=n) for n in (3, 17, 1, 30)]
WITHOUT = [random_ids(n, seed=40 + n) for n in (2, 5, 1, 9)]
ANSWERS = [random_ids(n, seed=80 + n) for n in (4, 1, 7)]
NEW = 6
ATOL = 3e-5                                     # float32 against float64; scores are of the order of 10
METHODS = ("cd", "cad", "dola-low", "dola-high", "ad")
SMALL = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, seed=5)


class Oracle:
    """What transformers computes for a text, in float64: logits [T, V], and the logits of each early exit."""

    def __init__(self, folder, family):
        cls = getattr(transformers, CLASSES[FAMILIES[family]["model_type"]])
        self.model = cls.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        self.outputs = {}

    def read(self, ids):
        if tuple(ids) not in self.outputs:
            with torch.inference_mode():
                out = self.model(torch.tensor([ids]), output_hidden_states=True)
                exits = [self.model.lm_head(x)[0].numpy() for x in out.hidden_states]
                self.outputs[tuple(ids)] = out.logits[0].numpy(), exits
        return self.outputs[tuple(ids)]


class Pair:
    def __init__(self, folder, family, **changes):
        write_checkpoint(folder, family, **changes)
        self.model, self.oracle, self.family = Transformer.load(folder), Oracle(folder, family), family


@pytest.fixture(scope="module", params=["llama3", "mistral-window", "qwen2", "qwen3"])
def expert(request, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("llama"), "llama3", num_hidden_layers=6)


@pytest.fixture(scope="module")
def amateur(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("small"), "llama3", **SMALL)


# --------------------------------------------------------------------------------------------- the decoders in numpy


def log_softmax(z):
    z = z - z.max()
    return z - math.log(np.exp(z).sum())


def divergence(log_p, log_q):
    """Half of both Kullback-Leibler divergences of the average from its parts, averaged over the vocabulary."""
    total = 0.0
    for a, b in zip(log_p, log_q, strict=True):
        m = (math.exp(a) + math.exp(b)) / 2
        total += 0.5 * (m * (math.log(m) - a) + m * (math.log(m) - b))
    return total / len(log_p)


def activation_entropies(exit_logits):
    """For each token: entropy of the softmax over positions. [P, V] → [V]"""
    out = []
    for column in exit_logits.T:
        log_p = log_softmax(column)
        out.append(-sum(math.exp(x) * x for x in log_p))
    return np.array(out)


def next_scores(method, at, text, expert, amateur=None, without=None, positions=None, alpha=0.5, info_layer=3,
                scoring=False):
    """Scores of what follows text[at], unfiltered. positions: how many AD's entropy is over. scoring: the exits of DoLa
    are those of scoring, not of generation."""
    logits, exits = expert.oracle.read(text)
    z = logits[at]
    if method == "cd":
        return log_softmax(z) - alpha * log_softmax(amateur.oracle.read(text)[0][at])
    if method == "cad":
        return (1 + alpha) * z - alpha * expert.oracle.read(without)[0][at + len(without) - len(text)]
    if method == "ad":
        return log_softmax(z) - alpha * activation_entropies(exits[info_layer][:positions])
    tied = FAMILIES[expert.family]["tie_word_embeddings"] and not scoring
    layers = {"dola-low": [2] if tied else [0, 2], "dola-high": [3, 5]}[method]
    log_p = log_softmax(z)
    early = [log_softmax(exits[layer][at]) for layer in layers]
    return log_p - max(early, key=lambda log_q: divergence(log_p, log_q))


def cut(scores, log_p, relative_top):
    plausible = np.exp(log_p) >= relative_top * np.exp(log_p).max()
    return np.where(plausible, scores, -np.inf)


def reference(method, prompt, without, expert, amateur, relative_top=None, **how):
    """Tokens, and the scores of every step. Each step reads the whole text."""
    new, all_scores = [], []
    for _ in range(NEW):
        text = prompt + new
        scores = next_scores(method, len(text) - 1, text, expert, amateur, without + new, len(prompt), **how)
        if relative_top:
            scores = cut(scores, log_softmax(expert.oracle.read(text)[0][-1]), relative_top)
        all_scores.append(scores)
        new = new + [int(scores.argmax())]
    return new, np.array(all_scores)


def arguments(method, amateur):
    return {"cd": dict(amateur=amateur.model), "ad": dict(info_layer=3)}.get(method, {})


def generate_with_scores(monkeypatch, model, prompts, **how):
    """→ Generations, and the scores of each step, [B, T, V]."""
    all_scores = []

    def recording(*args):
        for token, result in decode(*args):
            all_scores.append(result.scores)
            yield token, result

    monkeypatch.setattr(decore, "decode", recording)
    out = generate(model, prompts, max_new_tokens=NEW, **how)
    monkeypatch.undo()
    return out, torch.cat(all_scores, 1).numpy()


# ---------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_scores_equal_the_plain_version(expert, amateur, method, monkeypatch):
    more = arguments(method, amateur) | (dict(ids_without_context=WITHOUT) if method == "cad" else {})
    out, scores = generate_with_scores(monkeypatch, expert.model, PROMPTS, method=method, **more)
    top = None if method in ("cd", "cad") else 0.1
    for b, (prompt, without) in enumerate(zip(PROMPTS, WITHOUT, strict=True)):
        ids, expected = reference(method, prompt, without, expert, amateur, relative_top=top)
        assert out[b].ids == ids
        np.testing.assert_allclose(scores[b], expected, atol=ATOL, rtol=0)
        assert out[b].alphas == [1.0 if method.startswith("dola") else 0.5] * NEW
        assert out[b].stop == "length"
        log_p = [log_softmax(expert.oracle.read(prompt + ids[:i])[0][-1]) for i in range(NEW)]
        np.testing.assert_allclose(out[b].entropies, [-(np.exp(x) * x).sum() for x in log_p], atol=ATOL)


@pytest.mark.parametrize("method", METHODS)
def test_alpha_cut_and_layer_are_arguments(llama, amateur, method, monkeypatch):
    more = arguments(method, amateur) | (dict(ids_without_context=WITHOUT[1]) if method == "cad" else {})
    how = {} if method.startswith("dola") else dict(alpha=1.25)
    how |= dict(info_layer=6) if method == "ad" else {}         # the last layer, whose output passes the final norm
    more |= how
    out, scores = generate_with_scores(monkeypatch, llama.model, PROMPTS[1], method=method, relative_top=0.4, **more)
    ids, expected = reference(method, PROMPTS[1], WITHOUT[1], llama, amateur, relative_top=0.4, **how)
    assert out.ids == ids
    np.testing.assert_allclose(scores[0], expected, atol=ATOL, rtol=0)
    assert np.isinf(expected).any()


@pytest.mark.parametrize("method", ["cad", "ad"])
def test_a_prompt_in_many_chunks_gives_the_same_tokens(llama, method, monkeypatch):
    how = dict(ids_without_context=WITHOUT) if method == "cad" else dict(info_layer=3)
    how |= dict(method=method, max_new_tokens=NEW)
    whole = generate(llama.model, PROMPTS, **how)
    monkeypatch.setattr("model.CHUNK", 4)
    assert [g.ids for g in generate(llama.model, PROMPTS, **how)] == [g.ids for g in whole]


@pytest.mark.parametrize("method", decore.METHODS)
def test_the_methods_of_decore_are_the_same_here(llama, method):
    how = {} if method == "greedy" else dict(heads=[(1, 0), (4, 2)])
    assert generate(llama.model, PROMPTS, method=method, **how) == decore.generate(llama.model, PROMPTS, method, **how)
    assert score(llama.model, PROMPTS[0], ANSWERS, method=method, **how) \
        == decore.score(llama.model, PROMPTS[0], ANSWERS, method, **how)


# ------------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_scores_of_answers_equal_the_plain_version(expert, amateur, method, renormalise):
    prompt, without = PROMPTS[1], WITHOUT[1]
    more = arguments(method, amateur) | (dict(prompt_ids_without_context=without) if method == "cad" else {})
    expected = []
    for answer in ANSWERS:
        text, total = prompt + answer, 0.0
        for i, token in enumerate(answer):
            scores = next_scores(method, len(prompt) + i - 1, text, expert, amateur, without + answer, len(text),
                                 scoring=True)
            total += (log_softmax(scores) if renormalise and method != "ad" else scores)[token]
        expected.append(total)
    out = score(expert.model, prompt, ANSWERS, method=method, renormalise=renormalise, **more)
    np.testing.assert_allclose(out, expected, atol=2e-4)          # sums of up to seven scores
    one = score(expert.model, prompt, ANSWERS[0], method=method, renormalise=renormalise, **more)
    assert one == pytest.approx(out[0], abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_relative_top_and_repetition_penalty_do_not_change_scores(llama, amateur, method):
    more = arguments(method, amateur) | (dict(prompt_ids_without_context=WITHOUT[1]) if method == "cad" else {})
    plain = score(llama.model, PROMPTS[1], ANSWERS, method=method, **more)
    more |= dict(repetition_penalty=1.5) if method.startswith("dola") else {}
    assert score(llama.model, PROMPTS[1], ANSWERS, method=method, relative_top=0.9, **more) == plain


# ---------------------------------------------------------------------------------------------------------------- DoLa


@cache
def dola_model(name):
    family, layers = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        return Transformer.load(write_checkpoint(folder, family, num_hidden_layers=layers))


@pytest.mark.parametrize("half", ["low", "high"])
@pytest.mark.parametrize("name", MODELS)
def test_dola_equals_the_recorded_runs_of_transformers(name, half, monkeypatch):
    golden = np.load(Path(__file__).parent / "golden" / "dola.npz")
    monkeypatch.setattr("tests.test_baselines.NEW", NEW_TOKENS)
    out, scores = generate_with_scores(monkeypatch, dola_model(name), DOLA_PROMPTS, method=f"dola-{half}")
    atol = 1e-3 if name == "llama3-42" else 1e-4                # both float32; early exits grow with depth
    for b, g in enumerate(out):
        assert g.ids == golden[f"{name}/{half}/{b}/ids"].tolist()
        np.testing.assert_allclose(scores[b], golden[f"{name}/{half}/{b}/scores"], atol=atol, rtol=0)


def test_the_recorded_runs_name_their_versions():
    origin = json.loads((Path(__file__).parent / "golden" / "dola.json").read_text())
    assert origin["transformers"] == "4.55.4" and origin["prompts"] == DOLA_PROMPTS


@pytest.mark.parametrize("layers, tied, half, rule, expected", [
    (32, False, "low", "transformers", range(0, 16, 2)),
    (32, False, "high", "transformers", range(16, 32, 2)),
    (40, False, "low", "transformers", range(0, 20, 2)),
    (80, False, "low", "transformers", range(0, 20, 2)),
    (80, False, "high", "transformers", range(60, 80, 2)),
    (80, False, "low", "halves", range(0, 40, 2)),
    (80, False, "high", "halves", range(40, 80, 2)),
    (80, True, "low", "halves", range(0, 40, 2)),
    (28, True, "high", "halves", range(14, 28, 2)),
    (3, True, "low", "halves", (0,)),
    (28, True, "low", "transformers", range(2, 14, 2)),
    (80, True, "low", "transformers", range(2, 20, 2)),
    (5, False, "high", "transformers", (2, 4)),
    (4, True, "low", "transformers", (2,)),
    (2, True, "low", "transformers", (1,)),
    (1, True, "low", "transformers", (0,)),
])
def test_exit_layers_are_those_of_the_published_runs(layers, tied, half, rule, expected, llama):
    config = type("Config", (), dict(n_layers=layers, tied_embeddings=tied))
    model = type("Model", (), dict(config=config, name="m"))
    assert exit_layers(model, half, rule) == list(expected)


def test_a_tied_model_of_three_layers_has_no_low_exits(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "qwen2"))
    with pytest.raises(ValueError, match="use dola-high"):
        generate(model, PROMPTS, method="dola-low")
    assert score(model, PROMPTS[1], ANSWERS[0], method="dola-low") < 0
    assert len(generate(model, PROMPTS, method="dola-high", max_new_tokens=2)) == len(PROMPTS)


def test_dola_halves_differ_from_the_upper_twenty_layers_in_a_deep_model():
    how = dict(method="dola-high", renormalise=False)
    halves, twenty = (score(dola_model("llama3-42"), PROMPTS[1], ANSWERS, dola_layers=rule, **how)
                      for rule in ("halves", "transformers"))
    assert not np.allclose(halves, twenty, atol=0.01)
    assert score(dola_model("llama3-42"), PROMPTS[1], ANSWERS, **how) == halves     # as the published scoring does


def test_repetition_penalty_is_that_of_transformers():
    model, how = dola_model("qwen2-8"), dict(method="dola-low", max_new_tokens=6)
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    penalised = generate(model, PROMPTS, repetition_penalty=1.3, **how)
    for prompt, g in zip(PROMPTS, penalised, strict=True):
        text = list(prompt)
        for _ in range(6):
            step, _ = baselines.open_dola(model, [text], 1)
            text.append(int(penalty(torch.tensor([text]), step().scores[:, -1]).argmax()))
        assert g.ids == text[len(prompt):]
    assert [g.ids for g in penalised] != [g.ids for g in generate(model, PROMPTS, **how)]
    with pytest.raises(ValueError, match="repetition_penalty 0 is not a positive number"):
        generate(model, PROMPTS, repetition_penalty=0, **how)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("how, message", [
    (dict(method="cd"), "cd needs an amateur"),
    (dict(method="cad"), "cad needs each prompt without its context"),
    (dict(method="cad", ids_without_context=[[5], []]), "context-free prompt 2 of 2 is empty"),
    (dict(method="cad", ids_without_context=[[5]]), "it got 1 for 2"),
    (dict(method="cad", ids_without_context=[[5], [96]]), "contains the id 96"),
    (dict(method="ad"), "info_layer 24 is outside .*layers 1 to 6"),
    (dict(method="ad", info_layer=0), "info_layer 0 is outside"),
    (dict(method="ad", info_layer=7), "info_layer 7 is outside"),
    (dict(method="dola-low", dola_layers="thirds"), "dola_layers 'thirds' is unknown"),
    (dict(method="dola-low", relative_top=1.5), "relative_top 1.5"),
    (dict(method="dola"), "method 'dola' is unknown; known: greedy"),
])
def test_each_mistake_has_its_message(llama, how, message):
    with pytest.raises(ValueError, match=message) as error:
        generate(llama.model, PROMPTS[:2], **how)
    assert "\n" not in str(error.value)


def test_a_single_prompt_with_an_empty_context_free_one_is_refused(llama):
    with pytest.raises(ValueError, match="the context-free prompt is empty"):
        generate(llama.model, PROMPTS[0], method="cad", ids_without_context=[])
    with pytest.raises(ValueError, match="the context-free prompt is empty"):
        score(llama.model, PROMPTS[0], ANSWERS, method="cad", prompt_ids_without_context=[])


@pytest.mark.parametrize("prompt, answer, message", [
    ([], [5], "the prompt is empty"), ([5], [], "the answer is empty"), ([5], [[5], []], "answer 2 of 2 is empty"),
    ([5], [400], "the answer contains the id 400"), ([5] * 512, [5, 6], "prompt with its longest answer has 513"),
])
def test_a_bad_prompt_or_answer_has_its_message_in_scoring(llama, prompt, answer, message):
    with pytest.raises(ValueError, match=message):
        score(llama.model, prompt, answer, method="dola-low")
