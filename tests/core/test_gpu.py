"""Tests on a CUDA device: the logits and tokens of the CPU, which other tests compare.

`pytest -m gpu`."""

import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from decore import DeCoRe, Greedy, generate
from heads import measures
from heads.measures import effects
from hf import HFModel
from model import Cache, Transformer
from tests.checkpoints import (
    FAMILIES,
    assert_close,
    assert_similar,
    ids_of,
    random_ids,
    write_checkpoint,
)
from tests.methods import CASES, HEADS, PROMPTS, method_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("m") / request.param, request.param)


@pytest.fixture(autouse=True)
def a_graph_that_is_not_used_is_an_error():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graph")
        yield


@pytest.mark.parametrize("graph", [True, False])
def test_logits_and_tokens_on_cuda_are_those_of_the_cpu(folder, graph):
    cpu, cuda = Transformer.load(folder), Transformer.load(folder, device="cuda")
    ids = torch.tensor(random_ids(2, 40))
    assert_close(cuda(ids.cuda()).cpu(), cpu(ids), 1e-4)  # other kernels
    for method in Greedy(), DeCoRe(HEADS), DeCoRe(HEADS, mask="query", alpha=0.5):
        expected = generate(cpu, PROMPTS, method, max_new_tokens=20)
        results = generate(cuda, PROMPTS, method, max_new_tokens=20, graph=graph)
        assert ids_of(results) == ids_of(expected), method


def test_a_recorded_step_decodes_the_same_tokens(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path / "m", "llama3"), device="cuda")
    amateur = Transformer.load(
        write_checkpoint(tmp_path / "a", "llama3", seed=5, num_hidden_layers=1), device="cuda"
    )
    for case in CASES:
        how = dict(method=method_of(case, amateur), max_new_tokens=20)
        plain, graph = (generate(model, PROMPTS, graph=graph, **how) for graph in (False, True))
        assert ids_of(graph) == ids_of(plain), case


def test_detection_scores_the_heads_as_the_cpu_does(folder):
    prompts, needles = [random_ids(n, seed=n) for n in (30, 41)], [(3, 9), (20, 30)]
    cpu, cuda = (
        measures.answer_batch(Transformer.load(folder, device=device), prompts, needles, 12)
        for device in ("cpu", "cuda")
    )
    for (ids, *scores), (expected_ids, *expected) in zip(cuda, cpu, strict=True):
        assert ids == expected_ids
        assert_close(scores, expected, 1e-4, 1e-4)


@pytest.mark.parametrize("engine", [Transformer, HFModel])
@pytest.mark.parametrize("dtype, least", [("float32", 1 - 1e-6), ("bfloat16", 0.98)])
def test_the_effects_of_heads_on_cuda_are_those_of_the_cpu(folder, engine, dtype, least):
    memories = [random_ids(2, seed=7), [], [5]]
    texts = PROMPTS[1:], [random_ids(n) for n in (3, 1, 4)], memories
    expected, found = (
        effects(kind.load(folder, device=device, dtype=of), *texts)
        for kind, device, of in ((Transformer, "cpu", "float32"), (engine, "cuda", dtype))
    )
    assert_similar(found, expected, least, 1e-3 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_prompts_are_read_by_fused_kernels_in_memory_linear_in_them(folder, dtype):
    model, n = Transformer.load(folder, device="cuda", dtype=dtype), 16_384
    ids = torch.tensor([random_ids(n)], device="cuda")
    with sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    ):  # RuntimeError if neither fits
        model.prefill(ids[:, :4096], Cache(model, [n], 1))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.prefill(ids, Cache(model, [n], 1))
    assert (
        torch.cuda.max_memory_allocated() - before < n * n
    )  # a byte per pair of tokens would be more
