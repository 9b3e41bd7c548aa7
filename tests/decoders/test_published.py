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


def method_of(settings, without):
    """The record of stored settings. without: CAD's prompts without context.

    decore-entropy has an alpha there, which has no effect."""
    settings = dict(settings)
    method = settings.pop("method")
    settings.pop("renormalise", None)
    if method == "decore-entropy":
        del settings["alpha"]
    if method == "cad":
        return CAD(without)
    if method.startswith("dola"):
        return DoLa(method.removeprefix("dola-"))
    return {"greedy": Greedy, "masked": Masked, "ad": AD}.get(method, DeCoRe)(**settings)


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("i", range(21))
def test_tokens_alphas_and_entropies_are_the_published_ones(name, i):
    model, golden = MODELS[name], DECODED[name]
    cases = golden["cases"][i::21]  # one setting, both prompts
    settings = cases[0]["settings"]
    without = [case["settings"].get("ids_without_context") for case in cases]
    method = method_of(settings, without)
    out = generate(model, golden["prompts"], method, 32)
    # The published entropy is scaled too.
    unit = math.log(model.config.vocab_size) if settings.get("scale_alpha") else 1
    for g, case in zip(out, cases, strict=True):
        assert g.ids == case["tokens"]
        assert [h / unit for h in g.entropies] == pytest.approx(case["entropy"], abs=1e-4)
        if case["alpha"][0] is not None:
            assert g.alphas == pytest.approx(case["alpha"], abs=1e-4)


@pytest.mark.parametrize("name", SCORED["settings"])
def test_scores_of_answers_are_the_published_ones(name):
    items = [item for item in SCORED["items"] if name in item["scores"]]
    without = [item.get("prefix_nocontext_ids") for item in items]
    settings = SCORED["settings"][name]
    method = method_of(settings, without)
    texts = [x["prefix_ids"] for x in items], [[x["continue_ids"]] for x in items]
    sums = score(MODELS["mistral_full"], *texts, method, renormalise=settings["renormalise"])
    published = [[x["scores"][name]] for x in items]
    assert sums == [pytest.approx(value, rel=1e-5, abs=1e-4) for value in published]
