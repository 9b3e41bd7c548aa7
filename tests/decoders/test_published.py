"""Tokens and scores of the authors' published classes, on tiny checkpoints with random weights.

golden/published holds the checkpoints, prompts as token ids, and results in float32, each with the
settings of `generate` or `score` that repeat it. In
decoders.json `official_query`, `masked_baseline`, `cad`, `activation` and `greedy` are the
published decoders, whose masked heads are those of `mask="query"`; `dola` is that of transformers
4.51; `paper_output` and `strict_output` are the paper's equation, masked from the last prompt token
on and everywhere. scores.json: the published multiple-choice scores.

No output of the authors' `DeCoReEntropyGain` is stored. It is compared with its formula."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from decore import make_head_mask
from model import Transformer
from tests.methods import generate, score

FOLDER = Path(__file__).parents[1] / "golden" / "published"
DECODED = {
    name: json.loads((FOLDER / name / "decoders.json").read_text())
    for name in ("llama_small", "mistral_full")
}
SCORED = json.loads((FOLDER / "mistral_full" / "scores.json").read_text())
MODELS = {name: Transformer.load(FOLDER / name) for name in DECODED}
GENERATED = [(name, case) for name, golden in DECODED.items() for case in golden["cases"]]
SUMS = [(item, name) for item in SCORED["items"] for name in item["scores"]]


@pytest.mark.parametrize("name, case", GENERATED)
def test_tokens_alphas_and_entropies_are_the_published_ones(name, case):
    model, how = MODELS[name], case["settings"]
    prompt = DECODED[name]["prompts"][case["prompt"]]
    out = generate(model, prompt, max_new_tokens=len(case["tokens"]), **how)
    assert out.ids == case["tokens"]
    # The published entropy is scaled too.
    unit = math.log(model.config.vocab_size) if how.get("scale_alpha") else 1
    assert [h / unit for h in out.entropies] == pytest.approx(case["entropy"], abs=1e-4)
    if case["alpha"][0] is not None:
        assert out.alphas == pytest.approx(case["alpha"], abs=1e-4)


@pytest.mark.parametrize("item, name", SUMS)
def test_scores_of_answers_are_the_published_ones(item, name):
    how = dict(SCORED["settings"][name])
    if how["method"] == "cad":
        how["prompt_ids_without_context"] = item["prefix_nocontext_ids"]
    model = MODELS["mistral_full"]
    value = score(model, item["prefix_ids"], item["continue_ids"], **how)
    assert value == pytest.approx(item["scores"][name], rel=1e-5, abs=1e-4)


GAIN = dict(heads=[(0, 1), (2, 3)], alpha_rule="gain", max_new_tokens=12, eos_ids=())


@pytest.mark.parametrize("mask", ["output", "query"])
@pytest.mark.parametrize("cap", [None, 0.01])
@pytest.mark.parametrize("method", ["decore-entropy", "decore-entropy-lite"])
def test_the_gain_of_entropy_is_the_authors_second_rule(llama, amateur, method, mask, cap):
    """Their `DeCoReEntropyGain` in float64: α = H(masked) − H(base), then the cap, from passes over
    the whole text; of the amateur with its heads masked."""
    prompt, heads = [5, 9, 7, 7, 30, 12], GAIN["heads"]
    how = dict(heads=heads)
    other = llama
    if method.endswith("lite"):
        other, heads = amateur, [(0, 1), (1, 0)]
        how = dict(heads=None, amateur=amateur, amateur_heads=heads)
    out = generate(llama, prompt, "decore-entropy", mask=mask, alpha_cap=cap, **GAIN | how)
    head_mask = make_head_mask([heads], other)
    cache = other.new_cache([len(prompt) - 1], len(out.ids), rows=1)
    other.prefill(torch.tensor([prompt[:-1]]), cache)  # unmasked
    last = torch.tensor([[prompt[-1]]])
    for t, (token, alpha) in enumerate(zip(out.ids, out.alphas)):
        base = llama(torch.tensor([prompt + out.ids[:t]]))[0, -1].double().softmax(-1).numpy()
        masked = other(last, cache, head_mask, mask)[0, 0, -1].double().softmax(-1).numpy()
        gain = -(masked * np.log(masked)).sum() + (base * np.log(base)).sum()
        expected = gain if cap is None else min(gain, cap)
        assert alpha == pytest.approx(expected, abs=2e-5)
        assert token == ((1 + expected) * np.log(base) - expected * np.log(masked)).argmax()
        last = torch.tensor([[token]])
    if cap is None and other is llama:
        assert min(out.alphas) < 0 < max(out.alphas)
