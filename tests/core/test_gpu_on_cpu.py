"""Behaviour on a GPU, checked on a CPU: the kernels that are called, and steps recorded as CUDA
graphs."""

import gc
from contextlib import contextmanager, nullcontext
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from decoders.sweep import side_by_side
from decore import DeCoRe, Greedy, Masked, generate  # noqa: F401 (of a table)
from heads.measures import effects
from model import Transformer
from runtime import attention
from tests.checkpoints import assert_close, random_ids, tiny
from tests.methods import CASES, DRAFTING, HEADS, PROMPTS, method_of
from tests.tables import cells, each

# ---------------------------------------------------------------------------------------- attention


# Queries, dtype, window → K/V heads, mask. A bias is not stored in memory. Flash attention takes no
# window, and the other kernels take no groups.
KERNELS = """
5 | "bfloat16" | null | 2 | "NoneType"
3 | "bfloat16" | null | 2 | "CausalBias"
3 | "bfloat16" | 2 | 4 | "Tensor"
3 | "float32" | null | 4 | "CausalBias"
"""


@each("T, dtype, window, groups, mask", KERNELS, cells)
def test_prompts_go_to_fused_kernels_of_torch_and_never_to_cudnn(
    monkeypatch, T, dtype, window, groups, mask
):
    """cuDNN spends up to half a second on each new length."""

    def fused(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        assert (k.shape[1], enable_gqa) == (groups, groups == 2)
        assert type(attn_mask).__name__ == mask and is_causal == (attn_mask is None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        return q

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    torch.backends.cuda.enable_cudnn_sdp(True)
    q, k, v = (torch.zeros(1, heads, n, 8) for heads, n in ((4, T), (2, 5), (2, 5)))
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    assert attention.causal_attention(q, k, v, window) is q
    assert torch.backends.cuda.cudnn_sdp_enabled()  # afterwards it is as before


@pytest.mark.parametrize("C", [7, 70, 1088, 8256])  # the last two are summed in parts
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_plain_products_equal_fused_attention(dtype, close, C):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8).to(dtype) for n in (4, C, C))
    bias = torch.where(torch.rand(2, 1, 4, C) < 0.3, -torch.inf, 0.0).to(dtype)
    fused, none = attention.biased_attention(q, k, v, bias)
    plain, probabilities = attention.biased_attention(q, k, v, bias, return_probabilities=True)
    assert_close(plain, fused, close)
    assert none is None and probabilities.dtype == torch.float32  # from the scores on
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 3, 4))


@pytest.mark.skipif("dtype" not in torch.ops.aten.bmm.overloads(), reason="torch before 2.8")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [20, 8000])  # values are summed in parts
def test_all_operations_of_the_effect_have_a_derivative_and_products_without_one_are_mixed(
    model, monkeypatch, dtype, n
):
    """On "meta" a tensor has no values: reading one is an error."""
    cache = model.to(dtype).new_cache([n - 1], 3)
    model.to("meta")
    vars(cache).update(tree_map_only(torch.Tensor, lambda x: x.to("meta"), vars(cache)))
    bmm, mixed = torch.bmm, []

    def product(*args, out_dtype=None):
        mixed.append(out_dtype)
        return bmm(*args, **({"out_dtype": out_dtype} if out_dtype else {}))

    monkeypatch.setattr(torch, "bmm", product)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x)
    monkeypatch.setattr(Transformer, "can_record", True)
    found = effects(model, [random_ids(n)], [[5, 6, 7]], [[8]], cache)
    assert found.shape == (1, model.config.n_layers, model.config.n_heads)
    # Only the first layer's scores do not depend on the head mask.
    assert mixed.count(torch.float32) == 1 and len(mixed) == 2 * model.config.n_layers


# ------------------------------------------------------------------------------------------- graphs


class RecordedOnCPU(TorchDispatchMode):
    """Replaces torch.cuda's graph and its recording.

    A replay runs the same operations on the same memory."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.operations.append((function, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self):
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            for x, y in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(x, torch.ScriptObject):  # of a collective
                    dist.Work.unbox(y).wait()
                elif isinstance(x, torch.Tensor) and x.data_ptr() != y.data_ptr():
                    x.copy_(y)  # neither in place nor a view


class Full(RecordedOnCPU):
    def __exit__(self, *error):
        super().__exit__(*error)
        raise RuntimeError("no memory for a graph\nlong trace")


@contextmanager
def graphs_on_cpu(kind=RecordedOnCPU):
    with (
        patch("torch.cuda.CUDAGraph", kind),
        patch("torch.cuda.graph", lambda graph: graph),
        patch("torch.cuda.device", lambda device: nullcontext()),
        patch.object(Transformer, "can_record", True),
    ):
        yield


@pytest.fixture
def model(tmp_path):
    return tiny(tmp_path, "mistral-window")


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_step_decodes_the_same_tokens(model, amateur, case):
    method = method_of(case, amateur)
    expected = generate(model, PROMPTS, method, max_new_tokens=5)
    with graphs_on_cpu():
        assert generate(model, PROMPTS, method, max_new_tokens=5, graph=True) == expected
    if case in DRAFTING and case != "cad":
        expected = generate(model, PROMPTS[2] * 2, method, max_new_tokens=16)
        with graphs_on_cpu():  # two: of one token, and of a draft
            out = generate(model, PROMPTS[2] * 2, method, max_new_tokens=16, draft=3)
        assert out.ids == expected.ids
        assert out.alphas == pytest.approx(expected.alphas, abs=1e-4)


def test_a_recorded_step_of_methods_side_by_side_decodes_the_same_tokens(model, amateur):
    methods = [method_of(case, amateur) for case in DRAFTING]
    expected = side_by_side(model, PROMPTS, methods, max_new_tokens=5)
    with graphs_on_cpu():
        assert side_by_side(model, PROMPTS, methods, max_new_tokens=5) == expected


def test_effects_are_measured_without_a_graph(model):
    answers = [random_ids(3, seed=4), [5], random_ids(4, seed=6)]
    expected = effects(model, PROMPTS[1:], answers)
    with graphs_on_cpu(kind=None):  # recording one is an error
        found = effects(model, PROMPTS[1:], answers)
    assert_close(found, expected, 1e-6, 1e-5)


@pytest.mark.parametrize("stopped", [False, True])
def test_no_graph_outlives_the_call_that_recorded_it(model, stopped):
    """NCCL waits for every graph with its collectives before a rank can leave."""
    graphs = WeakSet()

    class Watched(RecordedOnCPU):
        def __init__(self):
            super().__init__()
            graphs.add(self)

    def on_token(b, token, entropy):
        assert len(graphs) == 1
        if stopped:
            raise KeyboardInterrupt

    with graphs_on_cpu(Watched), pytest.raises(KeyboardInterrupt) if stopped else nullcontext():
        generate(model, PROMPTS[0], DeCoRe(HEADS), max_new_tokens=3, graph=True, on_token=on_token)
    gc.collect()  # the error's traceback is a cycle
    assert not graphs


class NothingFromTheHost(TorchFunctionMode):
    """Raises if a tensor is made from numbers of the host: a copy to the device, which a graph
    cannot record."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return function(*args, **kwargs or {})


RECORDS = """
Greedy()
Masked(HEADS)
Masked(HEADS, "query")
DeCoRe(HEADS, alpha_cap=2.0)
DeCoRe(HEADS, "query", alpha_cap=2.0)
"""


@pytest.mark.parametrize("record", RECORDS.split("\n")[1:-1])
def test_a_step_reads_nothing_back_to_the_host(model, record, monkeypatch):
    """On "meta" a tensor has no values: reading one is an error, and so is an operation with a
    tensor on the CPU."""
    decoding = eval(record).start(model, PROMPTS, 5)
    model.to("meta")
    for part in decoding.sessions[0], decoding.sessions[0].cache:
        vars(part).update(tree_map_only(torch.Tensor, lambda x: x.to("meta"), vars(part)))
    token = torch.zeros(len(PROMPTS), 1, dtype=torch.long, device="meta")
    monkeypatch.setattr(Transformer, "can_record", True)  # else the slots in use are read
    with NothingFromTheHost(), torch.inference_mode():
        for _ in range(2):
            decoding.step(token)
