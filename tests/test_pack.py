"""The fastest product is chosen by timing. It gives the numbers of the plain one, or the plain one is used."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from decore import generate
from model import Linear, Transformer
from runtime import native, pack
from runtime.pack import Packed, fastest
from tests.checkpoints import FAMILIES, random_ids, write_checkpoint

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def every_matrix(monkeypatch):
    monkeypatch.setattr(pack, "SMALL", 0)
    monkeypatch.setattr(native, "ready", lambda: False)


@pytest.fixture
def always_packed(monkeypatch):
    monkeypatch.setattr(pack, "fastest", lambda weight: Packed)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str)
def test_a_packed_layer_gives_the_numbers_of_the_plain_one(dtype, close, bias):
    torch.manual_seed(0)
    weight, b = torch.randn(80, 48).to(dtype), torch.randn(80).to(dtype) if bias else None
    layer = Packed(weight, b)
    for shape in ((1,), (2,), (2, 1, 1), (1, 1, 9), (2, 3, 50)):
        x = torch.randn(*shape, 48).to(dtype)
        expected = F.linear(x, weight, b)
        assert layer(x).shape == expected.shape
        torch.testing.assert_close(layer(x), expected, rtol=close, atol=close * expected.abs().max().item())


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_chooses_the_same_tokens(family, tmp_path, monkeypatch, always_packed):
    folder = write_checkpoint(tmp_path, family)
    packed = Transformer.load(folder)
    monkeypatch.setattr(pack, "fastest", lambda weight: None)
    plain = Transformer.load(folder)
    # every layer but the embedding, also a head that is tied to it
    assert isinstance(packed.lm_head, Packed)
    assert [name for name, m in packed.named_modules() if isinstance(m, Linear)] == ["embed"]
    assert not any(isinstance(m, Packed) for m in plain.modules())
    prompts, how = [random_ids(n, seed=n) for n in (9, 1, 30)], dict(heads=[(1, 0), (2, 2)], max_new_tokens=12)
    assert [g.ids for g in generate(packed, prompts, **how)] == [g.ids for g in generate(plain, prompts, **how)]


def test_small_matrices_stay_plain(tmp_path, monkeypatch, always_packed):
    monkeypatch.setattr(pack, "SMALL", 96 * 32 * 4)
    assert not any(isinstance(m, Packed) for m in Transformer.load(write_checkpoint(tmp_path, "llama3")).modules())


def operators(product):
    return SimpleNamespace(_reorder_linear_weight=lambda w, _: w,
                           _linear_pointwise=lambda x, w, bias, *_: product(x, w, bias))


def slow(product):
    return lambda *args: (time.sleep(0.02), product(*args))[1]


def unsupported(*_):
    raise RuntimeError("could not create a primitive descriptor")


@pytest.mark.parametrize("plain, packed, kind", [
    (slow(F.linear), F.linear, Packed),
    (F.linear, slow(F.linear), None),
    (slow(F.linear), lambda *args: F.linear(*args) * 1.001, None),          # fast and wrong
    (slow(F.linear), unsupported, None),
], ids=["packed is faster", "plain is faster", "packed is wrong", "packed is not supported"])
def test_the_faster_product_is_chosen_if_it_is_right(monkeypatch, plain, packed, kind):
    linear = F.linear
    monkeypatch.setattr(torch.ops, "mkldnn", operators(lambda *a: packed(*a) if packed is not F.linear else linear(*a)))
    monkeypatch.setattr(pack.F, "linear", plain)
    weight = torch.randn(80, 48)
    assert fastest(weight) is kind


def test_without_the_operators_layers_stay_plain(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    model = Transformer.load(write_checkpoint(tmp_path, "llama3"))
    assert not any(isinstance(m, Packed) for m in model.modules())
