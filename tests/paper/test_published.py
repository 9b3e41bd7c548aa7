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
from paper import decoders

FOLDER = Path(__file__).parents[1] / "golden" / "published"
DECODED = {
    name: json.loads((FOLDER / name / "decoders.json").read_text())
    for name in ("llama_small", "mistral_full")
}
SCORED = json.loads((FOLDER / "mistral_full" / "scores.json").read_text())
MODELS = {name: Transformer.load(FOLDER / name) for name in DECODED}
GENERATED = [
    pytest.param(name, case, id=f"{name}-{case['prompt']}-{case['id']}")
    for name, golden in DECODED.items()
    for case in golden["cases"]
]
SUMS = [
    pytest.param(item, name, id=f"{i}-{item['id']}-{name}")
    for i, item in enumerate(SCORED["items"])
    for name in item["scores"]
]


def how_to_generate(golden, prompt, params):
    heads, kind = golden["heads"], params["kind"]
    if kind == "decore":
        return dict(
            method="decore-static" if "static" in params else "decore-entropy",
            alpha=params.get("static", 0.5),
            heads=heads,
            mask=params["mask"],
            mask_prompt=params["strict"],
            alpha_cap=params.get("cap"),
            scale_alpha=params.get("scale", False),
        )
    if kind == "masked":
        return dict(method="masked", heads=heads, mask=params["mask"])
    if kind == "cad":
        return dict(
            method="cad", ids_without_context=prompt["ids_nocontext"], alpha=params["static"]
        )
    if kind == "act":
        return dict(
            method="ad",
            info_layer=params["info"],
            alpha=params["alpha"],
            relative_top=params["top"],
        )
    return dict(method=f"dola-{params['which']}" if kind == "dola" else kind)


@pytest.mark.parametrize("name, case", GENERATED)
def test_tokens_alphas_and_entropies_are_the_published_ones(name, case):
    model, params = MODELS[name], case["params"]
    prompt = DECODED[name]["prompts"][case["prompt"]]
    how = how_to_generate(DECODED[name], prompt, params)
    out = decoders.generate(
        model, prompt["ids"], **how, max_new_tokens=len(case["tokens"]), eos_ids=()
    )
    assert out.ids == case["tokens"]
    unit = (
        math.log(model.config.vocab_size) if params.get("scale") else 1
    )  # the published entropy is scaled too
    assert [h / unit for h in out.entropies] == pytest.approx(case["entropy"], abs=1e-4)
    if case["alpha"][0] is not None:
        assert out.alphas == pytest.approx(case["alpha"], abs=1e-4)


def how_to_score(item, name):
    """From the name of a score, such as decore.official_query.static0.5.post_softmax=True."""
    how, (method, *rest) = dict(renormalise="post_softmax=False" not in name), name.split(".", 2)
    if method == "decore":
        setting = rest[1].split(".post_softmax")[0]
        return how | dict(
            method="decore-static" if "static" in setting else "decore-entropy",
            heads=SCORED["heads"],
            mask="query" if rest[0] == "official_query" else "output",
            alpha=float(setting.removeprefix("static")) if "static" in setting else 0.5,
            alpha_cap=0.5 if setting == "entropy_cap0.5" else None,
            scale_alpha=setting == "entropy_scaled",
        )
    if method == "masked_baseline":
        return how | dict(method="masked", heads=SCORED["heads"], mask="query")
    if method == "cad":
        return how | dict(
            method="cad", prompt_ids_without_context=item["prefix_nocontext_ids"], alpha=0.5
        )
    if method == "activation":
        return how | dict(method="ad", info_layer=SCORED["info_layer"], alpha=0.5)
    return how | dict(method=f"dola-{rest[0]}" if method == "dola" else method)


@pytest.mark.parametrize("item, name", SUMS)
def test_scores_of_answers_are_the_published_ones(item, name):
    model, prompt, answer = MODELS["mistral_full"], item["prefix_ids"], item["continue_ids"]
    value = decoders.score(model, prompt, answer, **how_to_score(item, name))
    assert value == pytest.approx(item["scores"][name], rel=1e-5, abs=1e-4)
