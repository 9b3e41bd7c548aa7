"""A trained model: karpathy's stories260K, a Llama of 260 thousand parameters.

DECORE_WEIGHTS=FOLDER pytest -m weights tests/test_weights.py. The folder holds safetensors and the tokenizer of 512
tokens."""

import os
from pathlib import Path

import pytest
import torch

from decore import generate
from model import Transformer
from tokenizer import Tokenizer

FOLDER = os.environ.get("DECORE_WEIGHTS", "")
pytestmark = [pytest.mark.weights, pytest.mark.skipif(not FOLDER, reason="DECORE_WEIGHTS is not set")]

# The greedy text after BOS that the test of llama2.c expects.
STORY = ("Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
         "One day, she saw a big, red ball.")
HEADS = [(1, 0), (2, 3), (2, 5), (3, 1), (4, 7)]


@pytest.fixture(scope="module")
def model():
    return Transformer.load(Path(FOLDER))


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_logits_of_the_story_match_transformers(model, reference):
    ids = torch.tensor([Tokenizer.load(Path(FOLDER)).encode(STORY * 6)])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=0)   # logits of the order of 20


def test_a_hundred_greedy_tokens_equal_transformers_and_the_published_story(model, reference):
    settings = dict(max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([[1]]), attention_mask=torch.ones(1, 1), **settings)[0, 1:].tolist()
    ids = generate(model, [1], method="greedy", max_new_tokens=100, eos_ids=()).ids
    assert ids == expected and Tokenizer.load(Path(FOLDER)).decode(ids).startswith(STORY)


@pytest.mark.parametrize("mask", ["output", "query"])
def test_decore_equals_two_plain_passes(model, mask):
    out = generate(model, [1], method="decore-entropy", heads=HEADS, mask=mask, max_new_tokens=100, eos_ids=())
    keep = torch.ones(1, model.config.n_layers, model.config.n_heads)
    for layer, head in HEADS:
        keep[0, layer, head] = 0
    ids = torch.tensor([[1, *out.ids]])
    with torch.inference_mode():
        base = model(ids)[0, :-1].log_softmax(-1)                                  # [T, V]
        masked = model(ids, head_mask=keep, mask=mask)[0, 0, :-1].log_softmax(-1)
    alpha = -(base.exp() * base).sum(-1)                                            # Eq. 8
    scores = (1 + alpha[:, None]) * base - alpha[:, None] * masked                  # Eq. 7
    assert scores.argmax(-1).tolist() == out.ids
    torch.testing.assert_close(torch.tensor(out.alphas), alpha, atol=1e-4, rtol=0)
    assert out.ids != generate(model, [1], method="greedy", max_new_tokens=100, eos_ids=()).ids
