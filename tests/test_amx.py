"""The product of amx.cpp, on processors with AMX; its build, on every processor."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import cli
from cli import amx as program
from runtime import amx

BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """The operator: already built, or built for these tests only."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    if not amx.ready():
        if not (shutil.which("ninja") and shutil.which("c++")):
            pytest.skip("there is no C++ compiler with ninja")
        with pytest.MonkeyPatch.context() as patch:
            target = tmp_path_factory.mktemp("build") / "amx_test.so"
            patch.setattr(amx, "library", lambda: target)
            amx.build()
            torch.ops.load_library(target)
    return torch.ops.decore.linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("N, K", [(16, 32), (17, 32), (80, 64), (100, 160)])
def test_the_product_equals_that_of_float32_up_to_rounding(linear, N, K, bias):
    torch.manual_seed(0)
    weight, b = torch.randn(N, K).to(BFLOAT16), torch.randn(N).to(BFLOAT16) if bias else None
    for T in (0, *range(1, 36), 47, 48, 49, 64, 70):
        x = torch.randn(T, K).to(BFLOAT16)
        y = linear(x, weight, b)
        assert y.shape == (T, N) and y.dtype == BFLOAT16
        torch.testing.assert_close(y.float(), F.linear(x.float(), weight.float(), None if b is None else b.float()),
                                   rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_rows(linear, threads):
    before, weight, x = torch.get_num_threads(), torch.randn(115, 96).to(BFLOAT16), torch.randn(3, 96).to(BFLOAT16)
    expected = linear(x, weight, None)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x, weight, None), expected)
    finally:
        torch.set_num_threads(before)


def test_few_vectors_go_to_the_product_and_many_to_torch(monkeypatch):
    calls, weight = [], torch.randn(80, 64).to(BFLOAT16)
    monkeypatch.setattr(torch.ops, "decore", SimpleNamespace(linear=lambda *a: calls.append("amx") or F.linear(*a)))
    for n, expected in ((1, ["amx"]), (amx.FEW, ["amx"]), (amx.FEW + 1, [])):
        calls.clear()
        x = torch.randn(n, 64).to(BFLOAT16)
        assert torch.equal(amx.Tiled(weight, None)(x), F.linear(x, weight)) and calls == expected


@pytest.mark.parametrize("supported, compiler, words", [(False, "c++", "has no AMX"),
                                                        (True, "none-of-that-name", "no C++ compiler")])
def test_a_build_that_is_not_possible_ends_in_one_line(monkeypatch, capsys, supported, compiler, words):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: supported)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr("sys.argv", ["amx.py"])
    assert cli.run(program.main) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
