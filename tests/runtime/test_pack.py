"""A CPU's linear layers: a rule chooses their product, and each gives the same tokens."""

import pytest
import torch
from torch import nn

from decore import DeCoRe, generate
from hf import HFModel
from model import Linear, Transformer
from runtime import pack
from runtime.pack import Filled, Packed
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
    kinds = {pack.processor(): {torch.float32: kind}}
    monkeypatch.setattr(pack, "KERNELS", kinds)
    plain = engine.load(folder)
    assert plain.product == "plain"  # all of its matrices are small
    monkeypatch.setattr(pack, "UNPACKED_UP_TO", 0)
    packed = engine.load(folder)
    assert packed.product == kind.__name__.lower()
    assert packed.config.tied_embeddings == plain.config.tied_embeddings == (family == "qwen2")
    model = packed.hf if engine is HFModel else packed
    assert isinstance(model.lm_head, Packed)  # also a head that is tied to the embedding
    assert not [name for name, m in model.named_modules() if type(m) in (Linear, torch.nn.Linear)][
        1:
    ]
    prompts = [random_ids(n, seed=n) for n in (9, 1, 30)]
    method = DeCoRe([(1, 0), (2, 2)])
    ids, expected = ([g.ids for g in generate(m, prompts, method, 12)] for m in (packed, plain))
    assert ids == expected


@pytest.mark.parametrize(
    "maker, instructions, dtype, kind",
    [
        ("AMD", "AVX2", torch.float32, "packed"),
        ("AMD", "AVX2", torch.bfloat16, "plain"),
        ("AMD", "AVX512", torch.float32, "filled"),
        ("Intel", "AVX512", torch.float32, "plain"),
        (None, "DEFAULT", torch.float32, "plain"),
    ],
)
@needs_onednn
def test_the_product_follows_from_processor_and_dtype(
    monkeypatch, maker, instructions, dtype, kind
):
    monkeypatch.setattr(pack, "processor", lambda: (maker, instructions))
    layers = nn.ModuleDict({"small": Linear(8, 8), "large": Linear(512, 1025)}).to(dtype)
    assert pack.pack(layers, Linear) == kind
    kinds = {"packed": Packed, "filled": Filled, "plain": Linear}
    assert [type(layer) for layer in layers.values()] == [Linear, kinds[kind]]


def test_the_processor_of_this_machine_is_known():
    maker, instructions = pack.processor()
    assert maker in ("AMD", "Intel", None) and instructions in ("DEFAULT", "AVX2", "AVX512")
