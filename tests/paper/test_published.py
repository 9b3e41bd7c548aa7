"""Tokens and scores of the authors' published classes, on tiny checkpoints with random weights.

golden/published holds the checkpoints, prompts as token ids, and results in float32. In
decoders.json `official_query`, `masked_baseline`, `cad`, `activation` and `greedy` are the
published decoders, whose masked heads are those of `mask="query"`; `dola` is that of transformers
4.51; `paper_output` and `strict_output` are the paper's equation, masked from the last prompt token
on and everywhere. scores.json: the published multiple-choice scores."""

import json
import math
from pathlib import Path

import pytest

from model import Transformer
from paper import baselines
from paper.scoring import score

FOLDER = Path(__file__).parents[1] / "golden" / "published"
DECODED = {
    name: json.loads((FOLDER / name / "decoders.json").read_text())
    for name in ("llama_small", "mistral_full")
}
SCORED = json.loads((FOLDER / "mistral_full" / "scores.json").read_text())
MODELS = {name: Transformer.load(FOLDER / name) for name in DECODED}
GENERATED = [(name, case) for name, golden in DECODED.items() for case in golden["cases"]]
SUMS = [(item, name) for item in SCORED["items"] for name in item["scores"]]


def settings(name, golden):
    """From the name of a result, such as decore.official_query.static0.5.post_softmax=True."""
    method, *rest = name.partition(".post_softmax")[0].split(".", 2)
    if method == "decore":
        static = rest[1].startswith("static")
        return dict(
            method="decore-static" if static else "decore-entropy",
            heads=golden["heads"],
            mask="query" if rest[0] == "official_query" else "output",
            alpha=float(rest[1].removeprefix("static")) if static else 0.5,
            alpha_cap=0.5 if rest[1] == "entropy_cap0.5" else None,
            scale_alpha=rest[1] == "entropy_scaled",
        )
    if method == "masked_baseline":
        return dict(method="masked", heads=golden["heads"], mask="query")
    if method == "activation":
        return dict(method="ad", info_layer=golden["info_layer"], alpha=0.5)
    return dict(method=f"dola-{rest[0]}" if method == "dola" else method)


@pytest.mark.parametrize("name, case", GENERATED)
def test_tokens_alphas_and_entropies_are_the_published_ones(name, case):
    model, prompt = MODELS[name], DECODED[name]["prompts"][case["prompt"]]
    how = settings(case["id"], DECODED[name]) | dict(max_new_tokens=len(case["tokens"]))
    if "strict_output" in case["id"]:
        how["mask_prompt"] = True
    if how["method"] == "cad":
        how["ids_without_context"] = prompt["ids_nocontext"]
    out = baselines.generate(model, prompt["ids"], **how)
    assert out.ids == case["tokens"]
    # The published entropy is scaled too.
    unit = math.log(model.config.vocab_size) if how.get("scale_alpha") else 1
    assert [h / unit for h in out.entropies] == pytest.approx(case["entropy"], abs=1e-4)
    if case["alpha"][0] is not None:
        assert out.alphas == pytest.approx(case["alpha"], abs=1e-4)


@pytest.mark.parametrize("item, name", SUMS)
def test_scores_of_answers_are_the_published_ones(item, name):
    how = settings(name, SCORED) | dict(renormalise="post_softmax=False" not in name)
    if how["method"] == "cad":
        how["prompt_ids_without_context"] = item["prefix_nocontext_ids"]
    model = MODELS["mistral_full"]
    value = score(model, item["prefix_ids"], item["continue_ids"], **how)
    assert value == pytest.approx(item["scores"][name], rel=1e-5, abs=1e-4)
