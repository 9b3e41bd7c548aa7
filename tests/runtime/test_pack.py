"""Loading times the matrix products and chooses the fastest of those that equal torch's."""

import time

import pytest
import torch

from decore import generate
from hf import HFModel
from model import Linear, Transformer
from runtime import pack
from runtime.pack import Filled, Packed, fastest
from tests.checkpoints import random_ids, write_checkpoint

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("kind", [Packed, Filled])
@pytest.mark.parametrize("engine", [Transformer, HFModel])
@pytest.mark.parametrize("family", ["llama3", "llama3-iti", "qwen2"])
def test_a_packed_model_chooses_the_same_tokens(family, engine, kind, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, family)
    monkeypatch.setattr(pack, "fastest", lambda weight: kind)
    plain = engine.load(folder)
    assert plain.product == "plain"  # all of its matrices are small
    monkeypatch.setattr(pack, "SMALL", 0)
    packed = engine.load(folder)
    assert packed.product == kind.__name__.lower()
    assert packed.config.tied_embeddings == plain.config.tied_embeddings == (family == "qwen2")
    model = packed.hf if engine is HFModel else packed
    assert isinstance(model.lm_head, Packed)  # also a head that is tied to the embedding
    assert not [name for name, m in model.named_modules() if type(m) in (Linear, torch.nn.Linear)][
        1:
    ]
    prompts = [random_ids(n, seed=n) for n in (9, 1, 30)]
    how = dict(heads=[(1, 0), (2, 2)], max_new_tokens=12)
    ids, expected = ([g.ids for g in generate(m, prompts, **how)] for m in (packed, plain))
    assert ids == expected


@pytest.mark.parametrize(
    "plain_seconds, packed_seconds, factor, error, is_chosen",
    [
        (0.02, 0, 1, None, True),
        (0, 0.02, 1, None, False),
        (0.02, 0, 1.001, None, False),  # wrong
        (0.02, 0, 1, RuntimeError, False),  # unsupported dtype
        (0.02, 0, 1, AttributeError, False),  # another torch
    ],
)
@pytest.mark.parametrize("name, other", [("Packed", "Filled"), ("Filled", "Packed")])
def test_the_faster_product_is_chosen_if_it_is_right(
    monkeypatch, plain_seconds, packed_seconds, factor, error, is_chosen, name, other
):
    def plain(x, weight):
        time.sleep(plain_seconds)
        return x @ weight.T

    def packed(weight, bias):
        def product(x):
            time.sleep(packed_seconds)
            return factor * (x @ weight.T)

        if error:
            raise error
        return product

    monkeypatch.setattr(pack.F, "linear", plain)
    monkeypatch.setattr(pack, name, packed)
    monkeypatch.setattr(pack, other, lambda weight, bias: lambda x: torch.zeros(2, 80))  # wrong
    assert fastest(torch.randn(80, 48)) is (packed if is_chosen else None)
