"""The product of amx.cpp computes what torch's does, is used where it can be, and gives way where it does not hold."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.measure import read_weights, weights
from benchmarks.shapes import SHAPES, random_model
from model import Linear
from runtime import amx as builder
from runtime import pack as room
from runtime.pack import FEW, Packed, Tiled, pack, packed

BFLOAT16, LIBRARY = torch.bfloat16, room.library


@pytest.fixture(autouse=True)
def every_matrix(monkeypatch):
    monkeypatch.setattr(room, "SMALL", 0)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The operator: the one that this checkout has, or one that is built for these tests alone."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    with pytest.MonkeyPatch.context() as patch:
        if not room.amx():
            if not (shutil.which("ninja") and shutil.which("c++")):
                pytest.skip("there is no C++ compiler with ninja")
            target = tmp_path_factory.mktemp("build") / "amx_test.so"
            for module in (room, builder):
                patch.setattr(module, "library", lambda: target)
            builder.build()
            room.amx.cache_clear()
        assert room.amx()
        yield torch.ops.decore.linear
    room.amx.cache_clear()


def plain(n_in=64, n_out=80, bias=True, dtype=BFLOAT16):
    layer = Linear(n_in, n_out, bias, dtype=dtype).requires_grad_(False)
    layer.weight.normal_()
    if bias:
        layer.bias.normal_()
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("N, K", [(16, 32), (17, 32), (80, 64), (100, 160)])
def test_the_product_is_that_of_float32_but_for_rounding(built, N, K, bias):
    torch.manual_seed(0)
    layer = plain(K, N, bias)
    for T in (*range(1, 36), 47, 48, 49, 64, 70):
        x = torch.randn(T, K).to(BFLOAT16)
        expected = F.linear(x.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float())
        y = built(x, layer.weight, layer.bias)
        assert y.shape == (T, N) and y.dtype == BFLOAT16
        torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_rows(built, threads):
    before, layer, x = torch.get_num_threads(), plain(96, 16 * 7 + 3), torch.randn(3, 96).to(BFLOAT16)
    expected = built(x, layer.weight, layer.bias)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(built(x, layer.weight, layer.bias), expected)
    finally:
        torch.set_num_threads(before)


def test_vectors_may_lie_anyhow(built):
    layer, x = plain(), torch.randn(2, 64, 3).to(BFLOAT16).mT
    assert torch.equal(built(x, layer.weight, layer.bias), built(x.contiguous(), layer.weight, layer.bias))
    assert built(x[:, None], layer.weight, layer.bias).shape == (2, 1, 3, 80)
    assert built(x[:0], layer.weight, layer.bias).shape == (0, 3, 80)


@pytest.mark.parametrize("x, weight", [
    (torch.ones(1, 64), torch.ones(80, 64, dtype=BFLOAT16)), (torch.ones(1, 64, dtype=BFLOAT16), torch.ones(80, 64)),
    (torch.ones(1, 32, dtype=BFLOAT16), torch.ones(80, 64, dtype=BFLOAT16)),
    (torch.ones(1, 48, dtype=BFLOAT16), torch.ones(80, 48, dtype=BFLOAT16)),
    (torch.ones(1, 64, dtype=BFLOAT16), torch.ones(8, 64, dtype=BFLOAT16)),
    (torch.ones(1, 64, dtype=BFLOAT16), torch.ones(64, 80, dtype=BFLOAT16).T),
], ids=["float32 x", "float32 weight", "widths", "half a tile of columns", "half a tile of rows", "transposed"])
def test_what_it_cannot_multiply_is_refused(built, x, weight):
    with pytest.raises(RuntimeError, match="by W|plain bfloat16 is needed"):
        built(x, weight, None)


def test_a_model_in_bfloat16_uses_it_and_takes_no_more_memory(built):
    model = random_model(SHAPES["tiny"], dtype=BFLOAT16)
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).float()
    pack(model)
    assert {type(m) for m in model.modules() if hasattr(m, "bias")} == {Linear, Tiled}          # Linear: the embedding
    assert model.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert weights(model) == weights(twin) == read_weights(model)
    for n in (1, 9, FEW, FEW + 1, 100):
        ids = torch.arange(n)[None]
        off = [(m(ids) - exact(ids)).abs().max().item() for m in (model, twin)]
        assert off[0] <= 1.5 * off[1], (n, off)


def test_what_does_not_fit_is_packed(built):
    assert isinstance(packed(plain()), Tiled)
    assert isinstance(packed(plain(dtype=torch.float32)), Packed)
    assert isinstance(packed(plain(n_in=48)), Packed)
    assert packed(plain(n_out=8)) is None


def test_many_vectors_are_left_to_torch(built, monkeypatch):
    layer, seen = packed(plain()), []
    monkeypatch.setattr(torch.ops, "decore", SimpleNamespace(linear=lambda x, *_: seen.append(len(x)) or built(x, *_)))
    for n in (1, FEW, FEW + 1):
        layer(torch.ones(n, 64, dtype=BFLOAT16))
    assert seen == [1, FEW]


def wrong(change):
    return lambda x, w, bias: change(F.linear(x, w, bias), x)


@pytest.mark.parametrize("change", [lambda y, x: y * 1.1, lambda y, x: y.roll(1, -1), lambda y, x: y * (len(x) != 1),
                                    lambda y, x: y * (len(x) < 17), lambda y, x: y * (len(x) < 33)],
                         ids=["scaled", "rolled", "one", "a second tile", "a third tile"])
def test_a_product_that_lies_is_found_out(monkeypatch, change):
    monkeypatch.setattr(room, "amx", lambda: True)
    monkeypatch.setattr(torch.ops, "decore", SimpleNamespace(linear=wrong(lambda y, x: y)), raising=False)
    assert isinstance(packed(plain()), Tiled)
    torch.ops.decore.linear = wrong(change)
    with pytest.warns(UserWarning, match="amx.cpp's product differs from the plain one"):
        assert packed(plain()) is None


def test_a_broken_library_is_one_warning(monkeypatch, tmp_path):
    target = tmp_path / "amx.so"
    monkeypatch.setattr(room, "library", lambda: target)
    room.amx.cache_clear()
    assert room.amx() is False                                  # not built: nothing to say
    target.write_bytes(b"not a library")
    room.amx.cache_clear()
    with pytest.warns(UserWarning, match="build it again: python -m runtime.amx"):
        assert room.amx() is False
    room.amx.cache_clear()


def test_another_source_or_torch_is_another_library(monkeypatch, tmp_path):
    names = {LIBRARY().name}
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    names.add(LIBRARY().name)
    monkeypatch.setattr(room, "SOURCE", tmp_path / "amx.cpp")
    room.SOURCE.write_text("// another")
    names.add(LIBRARY().name)
    assert len(names) == 3


def test_what_the_build_lacks_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "library", lambda: tmp_path / "amx.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="there is no C\\+\\+ compiler \\(no-such-compiler\\) here; install g\\+\\+"):
        builder.build()
    monkeypatch.setenv("CXX", sys.executable)                   # does not know how to compile
    with pytest.raises(ValueError, match="^amx.cpp cannot be built: .*") as found:
        builder.build()
    assert "\n" not in str(found.value) and list(tmp_path.iterdir()) == []


def test_another_processor_is_told_so():
    code = ("import sys, torch; import cli; from runtime import amx; torch.cpu._is_amx_tile_supported = lambda: False; "
            "sys.argv = ['amx.py']; sys.exit(cli.run(amx.main))")
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "amx.py: error: this processor has no AMX; oneDNN's products are the fastest here\n"
