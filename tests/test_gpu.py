"""On a CUDA device: the recorded logits of transformers in float32, and the CPU's tokens. `pytest -m gpu`."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import baselines
from decore import METHODS, generate
from heads import detect
from model import MASKS, Transformer
from tests.checkpoints import FAMILIES, random_ids, write_checkpoint
from tests.golden.make import PROMPTS
from tests.golden.make import __file__ as golden_file

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

HEADS = [(1, 0), (1, 3), (2, 2)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("m") / request.param, request.param)


def test_logits_on_cuda_match_the_recorded_ones_of_transformers(folder):
    golden = np.load(golden_file.replace("make.py", "logits.npz"))
    model = Transformer.load(folder, device="cuda")
    for i, prompt in enumerate(PROMPTS):
        logits = model(torch.tensor([prompt], device="cuda"))[0].cpu().numpy()
        np.testing.assert_allclose(logits, golden[f"{folder.name}/{i}"], atol=1e-4, rtol=0)     # other kernels


@pytest.fixture(autouse=True)
def a_graph_that_is_not_trusted_is_an_error():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(CUDA graph|torch.compile)")
        yield


@pytest.mark.parametrize("how", [dict(), dict(compile="no"), dict(lookup=5), dict(compile="no", lookup=5)], ids=str)
def test_tokens_on_cuda_are_those_of_the_cpu(folder, how):
    prompts = [random_ids(n, seed=n) for n in (9, 1, 20)]
    models = Transformer.load(folder), Transformer.load(folder, device="cuda")
    for settings in [dict(method=method, heads=HEADS, mask=mask) for method in METHODS for mask in MASKS]:
        cpu, cuda = (generate(m, prompts, max_new_tokens=20, **settings, **extra) for m, extra in zip(models, ({}, how),
                                                                                                    strict=True))
        assert [g.ids for g in cuda] == [g.ids for g in cpu], settings


def test_a_long_prompt_is_read_in_memory_linear_in_it(folder):
    model = Transformer.load(folder, device="cuda", dtype=torch.bfloat16)
    n = 16_384
    cache = model.cache(torch.tensor([n]), 1)
    ids = torch.tensor([random_ids(n)], device="cuda")
    model.prefill(ids[:, :4096], cache)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.prefill(ids, cache)
    assert torch.cuda.max_memory_allocated() - before < n * n       # a byte per pair of tokens would be more


def test_later_prompts_are_decoded_by_the_graph_of_the_first(folder, tmp_path):
    model = Transformer.load(folder, device="cuda")
    amateur = Transformer.load(write_checkpoint(tmp_path, folder.name, seed=5, num_hidden_layers=1), device="cuda")
    batches = [[random_ids(n, seed=n + i) for n in (9, 2, 20)] for i in range(3)]
    cases = [("greedy", {}), ("decore-entropy", dict(heads=HEADS)), ("decore-static", dict(heads=HEADS, mask="query")),
             ("decore-entropy", dict(heads=HEADS, mask_prompt=True)), ("cd", dict(amateur=amateur)), ("cad", {}),
             ("decore-entropy", dict(amateur=amateur, amateur_heads=[(0, 1)])), ("dola-high", {}),
             ("dola-low", dict(dola_layers="halves")), ("dola-high", dict(repetition_penalty=1.3)),
             ("ad", dict(info_layer=2))]
    for number, (method, settings) in enumerate(cases):
        for prompts in batches:
            how = settings | (dict(ids_without_context=[p[-2:] for p in prompts]) if method == "cad" else {})
            plain, graph = (baselines.generate(model, prompts, method, max_new_tokens=20, compile=compile, **how)
                            for compile in ("no", "graph"))
            assert [g.ids for g in graph] == [g.ids for g in plain], method
        assert len(model.graphs) == number + 1


def test_a_step_that_torch_compiled_decodes_the_same(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3"), device="cuda")
    prompt = random_ids(30)
    plain, fused = (generate(model, prompt, heads=HEADS, compile=how, max_new_tokens=20) for how in ("no", "kernels"))
    assert fused.ids == plain.ids


def test_detection_finds_the_heads_that_the_cpu_finds(folder):
    prompts, needles = [random_ids(n, seed=n) for n in (30, 41)], [(3, 9), (20, 30)]
    cpu, cuda = (detect.answer(Transformer.load(folder, device=device), prompts, needles, 12)
                 for device in ("cpu", "cuda"))
    for (ids, top), (wanted, expected) in zip(cuda, cpu, strict=True):
        assert ids == wanted and torch.equal(top, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_prompts_are_read_by_fused_kernels(folder, dtype):
    model = Transformer.load(folder, device="cuda", dtype=dtype)
    ids = torch.tensor([random_ids(5000)], device="cuda")                   # a first chunk and later ones
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        model.prefill(ids, model.cache(torch.tensor([5000]), 1))            # RuntimeError where none of them fits
