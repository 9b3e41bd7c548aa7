"""A CPU's linear layers: a rule chooses their product, and each gives the same tokens."""

import pytest
import torch
from torch import nn

from decore import DeCoRe, generate
from hf import HFModel
from model import Linear
from runtime import pack
from runtime.pack import Blocked, Filled, Packed
from tests.checkpoints import ids_of, random_ids, write_checkpoint
from tests.tables import each

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("kind", [Packed, Filled, Blocked])
@pytest.mark.parametrize("family", ["llama3", "llama3-iti", "qwen2"])
def test_a_packed_model_chooses_the_same_tokens(family, engine, kind, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, family)
    plain = engine.load(folder, dtype="float32")
    monkeypatch.setattr(pack, "kind_of_layer", lambda dtype: kind)
    monkeypatch.setattr(pack, "UNPACKED_UP_TO", 0)
    monkeypatch.setattr(pack, "MANY", 2)
    monkeypatch.setattr(pack, "BLOCK", 320)  # several blocks, the last one smaller
    packed = engine.load(folder)
    assert packed.product == kind.__name__.lower()
    assert packed.config.tied_embeddings == plain.config.tied_embeddings == (family == "qwen2")
    model = packed.hf if engine is HFModel else packed
    assert isinstance(model.lm_head, kind)  # also a head that is tied to the embedding
    assert not [name for name, m in model.named_modules() if type(m) in (Linear, torch.nn.Linear)][
        1:
    ]
    prompts = [random_ids(n, seed=n) for n in (9, 1, 30)]
    method = DeCoRe([(1, 0), (2, 2)])
    ids, expected = (ids_of(generate(m, prompts, method, 12)) for m in (packed, plain))
    assert ids == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_blocked_product_of_many_vectors_is_that_of_float32_rounded_once(dtype, bias):
    plain = Linear(96, 1025, bias, dtype=dtype)
    x = torch.randn(2, 20, 96).to(dtype)
    exact = plain.float()(x.float())
    plain.to(dtype)
    product = Blocked(plain.weight.detach(), plain.bias)(x)
    assert product.dtype == dtype
    assert (product.float() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps / 2


# Maker, instructions, flags, dtype → the product of a small layer and of a large one.
PRODUCTS = """
AMD | AVX2 |  | float32 | Linear | Packed
AMD | AVX2 |  | bfloat16 | Blocked | Blocked
Intel | AVX2 | avx512_bf16 | bfloat16 | Blocked | Blocked
Intel | AVX512 | avx512f | bfloat16 | Blocked | Blocked
Intel | AVX512 | avx512_bf16 | bfloat16 | Linear | Packed
Intel | AVX512 | avx512_bf16 | float16 | Blocked | Blocked
Intel | AVX512 | avx512_fp16 | float16 | Linear | Linear
Intel | AVX512 |  | float32 | Linear | Linear
AMD | AVX512 | avx512_bf16 | float32 | Linear | Filled
other | DEFAULT |  | bfloat16 | Linear | Linear
"""


@each("maker, instructions, flags, dtype, small, large", PRODUCTS)
@needs_onednn
def test_the_product_follows_from_processor_and_dtype(
    monkeypatch, maker, instructions, flags, dtype, small, large
):
    maker = None if maker == "other" else maker
    monkeypatch.setattr(pack, "processor", lambda: (maker, instructions))
    monkeypatch.setattr(pack, "cpuinfo", lambda: flags)
    monkeypatch.setattr(Packed, "__init__", lambda self, *a: nn.Module.__init__(self))
    layers = nn.ModuleList([Linear(8, 8), Linear(512, 1025)]).to(getattr(torch, dtype))
    assert pack.pack(layers, Linear) == ("plain" if large == "Linear" else large.lower())
    assert [type(layer).__name__ for layer in layers] == [small, large]


def test_the_processor_of_this_machine_is_known():
    maker, instructions = pack.processor()
    assert maker in ("AMD", "Intel", None) and instructions in ("DEFAULT", "AVX2", "AVX512")
