"""The product of native.cpp: its build, its numbers, and how many vectors it multiplies."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import cli
from cli import native as program
from runtime import native


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """The operator: already built, or built for these tests only."""
    if not native.ready():
        if not (shutil.which("ninja") and shutil.which("c++")):
            pytest.skip("building native.cpp needs ninja and a C++ compiler (c++)")
        with pytest.MonkeyPatch.context() as patch:
            target = tmp_path_factory.mktemp("build") / "native_test.so"
            patch.setattr(native, "library", lambda: target)
            torch.ops.load_library(native.build())
    return torch.ops.decore.linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("N, K", [(2, 32), (17, 32), (80, 64), (100, 160)])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], ids=str)
def test_the_product_equals_that_of_float64_up_to_rounding(linear, dtype, close, N, K, bias):
    torch.manual_seed(0)
    weight, b = torch.randn(N, K).to(dtype), torch.randn(N).to(dtype) if bias else None
    assert native.fits(weight)
    for T in (0, *range(1, 36), 47, 48, 49):
        x = torch.randn(T, 1, K).to(dtype)
        y = linear(x, weight, b)
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert y.shape == (T, 1, N) and y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=close, atol=1e-4)


def test_threads_share_the_rows(linear):
    before, weight, x = torch.get_num_threads(), torch.randn(115, 96), torch.randn(3, 96)
    expected = linear(x, weight, None)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x, weight, None), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fits, weight, x", [
    (False, torch.randn(1, 32), torch.randn(1, 32)),
    (False, torch.randn(4, 24), torch.randn(1, 24)),            # incomplete lines
    (False, torch.randn(4, 32).half(), torch.randn(1, 32).half()),
    (True, torch.randn(4, 32), torch.randn(1, 48)),
    (True, torch.randn(64, 4).T, torch.randn(1, 64)),
    (True, torch.randn(4, 32), torch.randn(1, 32).bfloat16()),
    (True, torch.randn(4, 32, device="meta"), torch.randn(1, 32, device="meta")),
])
def test_operands_that_do_not_fit_are_an_error(linear, fits, weight, x):
    assert native.fits(weight) == fits
    with pytest.raises(RuntimeError):
        linear(x, weight, None)


def test_few_vectors_go_to_the_product_and_many_to_torch(monkeypatch):
    calls, weight = [], torch.randn(80, 64)

    def product(*args):
        calls.append("native")
        return F.linear(*args)

    monkeypatch.setattr(torch.ops, "decore", SimpleNamespace(linear=SimpleNamespace(default=product)))
    most = native.FEW[torch.float32]
    for n, expected in ((1, ["native"]), (most, ["native"]), (most + 1, [])):
        calls.clear()
        x = torch.randn(n, 64)
        assert torch.equal(native.Native(weight, None)(x), F.linear(x, weight)) and calls == expected


def test_another_processor_needs_another_library(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "PROCESSOR", tmp_path / "cpuinfo")
    names = set()
    for flags in ("fma avx2", "fma avx2 avx512f"):
        native.PROCESSOR.write_text(f"processor : 0\nflags : {flags}\nprocessor : 1\nflags : {flags}\n")
        names.add(native.library())
    assert len(names) == 2


def test_without_a_compiler_the_build_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "none-of-that-name")
    monkeypatch.setattr("sys.argv", ["native.py"])
    assert cli.run(program.main) == 2
    error = capsys.readouterr().err
    assert "no C++ compiler" in error and error.count("\n") == 1
