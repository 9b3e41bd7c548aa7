"""Tokens and scores of the authors' published classes, on tiny checkpoints with random weights.

golden/published holds the checkpoints, prompts as token ids, and results in float32, each with the
settings of `generate` or `score` that repeat it. In
decoders.json `official_query`, `masked_baseline`, `cad`, `activation` and `greedy` are the
published decoders, whose masked heads are those of `mask="query"`; `dola` is that of transformers
4.51; `paper_output` and `strict_output` are the paper's equation, masked from the last prompt token
on and everywhere. scores.json: the published multiple-choice scores.

No output of the authors' `DeCoReEntropyGain` is stored: test_decore compares it with its formula,
α = H(masked) − H(base), then the cap."""

import math
from pathlib import Path

import pytest

from decoders.baselines import AD, CAD, DoLa
from decoders.scoring import score
from decore import DeCoRe, Greedy, Masked, generate
from model import Transformer
from runtime.files import read_json

FOLDER = Path(__file__).parents[1] / "golden" / "published"
DECODED = {
    name: read_json(FOLDER / name / "decoders.json") for name in ("llama_small", "mistral_full")
}
SCORED = read_json(FOLDER / "mistral_full" / "scores.json")
MODELS = {name: Transformer.load(FOLDER / name) for name in DECODED}
GENERATED = [(name, case) for name, golden in DECODED.items() for case in golden["cases"]]
SUMS = [(item, name) for item in SCORED["items"] for name in item["scores"]]


def method_of(settings, without=None):
    """The record of stored settings, and whether scores are normalised again.

    decore-entropy has an alpha there, which has no effect."""
    settings = dict(settings)
    method = settings.pop("method")
    renormalise = settings.pop("renormalise", True)
    if method == "decore-entropy":
        del settings["alpha"]
    if method == "cad":
        return CAD(settings.get("ids_without_context", without)), renormalise
    if method == "ad":
        return AD(**settings), renormalise
    if method.startswith("dola"):
        return DoLa(method.removeprefix("dola-")), renormalise
    return {"greedy": Greedy, "masked": Masked}.get(method, DeCoRe)(**settings), renormalise


@pytest.mark.parametrize("name, case", GENERATED)
def test_tokens_alphas_and_entropies_are_the_published_ones(name, case):
    model = MODELS[name]
    method, _ = method_of(case["settings"])
    prompt = DECODED[name]["prompts"][case["prompt"]]
    out = generate(model, prompt, method, max_new_tokens=len(case["tokens"]))
    assert out.ids == case["tokens"]
    # The published entropy is scaled too.
    unit = math.log(model.config.vocab_size) if getattr(method, "scale_alpha", False) else 1
    assert [h / unit for h in out.entropies] == pytest.approx(case["entropy"], abs=1e-4)
    if case["alpha"][0] is not None:
        assert out.alphas == pytest.approx(case["alpha"], abs=1e-4)


@pytest.mark.parametrize("item, name", SUMS)
def test_scores_of_answers_are_the_published_ones(item, name):
    method, renormalise = method_of(SCORED["settings"][name], item.get("prefix_nocontext_ids"))
    texts = item["prefix_ids"], item["continue_ids"]
    value = score(MODELS["mistral_full"], *texts, method, renormalise=renormalise)
    assert value == pytest.approx(item["scores"][name], rel=1e-5, abs=1e-4)
