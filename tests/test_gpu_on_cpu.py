"""Behaviour on a GPU, checked on a CPU: the kernels that are called, and steps recorded as CUDA graphs."""

import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

import baselines
import decore
from decore import METHODS, generate, open_decore
from model import MASKS, Cache, Transformer
from runtime import attention, graph, parallel
from tests.checkpoints import random_ids, write_checkpoint

HEADS = [(1, 0), (1, 3), (2, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (9, 1, 20)]
LATER = [random_ids(n, seed=40 + n) for n in (12, 3, 5)]

# ----------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("T, S, dtype, window, grouped, mask", [
    (5, 5, torch.bfloat16, None, True, type(None)),
    (3, 5, torch.bfloat16, None, True, CausalBias),             # not stored in memory
    (3, 5, torch.bfloat16, 2, False, torch.Tensor),             # only flash attention takes groups, and no window
    (3, 5, torch.float32, None, False, CausalBias),
])
def test_prompts_go_to_fused_kernels_of_torch_and_never_to_cudnn(monkeypatch, T, S, dtype, window, grouped, mask):
    """cuDNN spends up to half a second on each new length."""
    def fused(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        assert (k.shape[1], enable_gqa) == ((2, True) if grouped else (4, False))
        assert isinstance(attn_mask, mask) and is_causal == (attn_mask is None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        return q
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    torch.backends.cuda.enable_cudnn_sdp(True)
    q, k, v = (torch.zeros(1, heads, n, 8, dtype=dtype) for heads, n in ((4, T), (2, S), (2, S)))
    assert attention.causal_attention(q, k, v, window) is q
    assert torch.backends.cuda.cudnn_sdp_enabled()              # afterwards it is as before


def test_a_gpu_attends_to_the_complete_buffer_so_that_steps_have_one_shape(llama, monkeypatch):
    cache, widths = Cache(llama, [9], 200, 2), []
    monkeypatch.setattr(Transformer, "device", type("Device", (), dict(type="cuda", __str__=lambda _: "cpu"))())
    monkeypatch.setattr("model.attention", lambda q, k, v, *_: widths.append(k.shape[2]) or (q, None))
    monkeypatch.setattr("model.torch.arange", lambda *a, device=None: torch.ops.aten.arange(*a))
    for token in random_ids(3):
        llama(torch.tensor([[token]]), cache)
    assert set(widths) == {64 + 256 * 2}


@pytest.mark.parametrize("C, parts", [(64, 1), (1024, 1), (7, 7), (1088, 2), (4160, 5), (8256, 12), (1984, 2)])
def test_a_long_sum_is_split(C, parts, monkeypatch):
    weights, v, sizes, bmm = torch.rand(4, 3, C).softmax(-1), torch.randn(4, C, 8), [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: sizes.append(a.shape) or bmm(a, b))
    total = attention.weighted_sum(weights, v)
    assert sizes == [(4 * parts, 3, C // parts)]
    torch.testing.assert_close(total, torch.einsum("bnc,bck->bnk", weights, v), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_plain_products_equal_fused_attention(dtype, close):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8).to(dtype) for n in (4, 70, 70))
    bias = torch.zeros(2, 1, 4, 70, dtype=dtype).masked_fill(torch.rand(2, 1, 4, 70) < 0.3, -torch.inf)
    fused, none = attention.attention(q, k, v, bias)
    plain, weights = attention.attention(q, k, v, bias, return_weights=True)
    torch.testing.assert_close(plain, fused, atol=close, rtol=0)
    assert none is None and weights.dtype == torch.float32                         # float32 from the scores on
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4))


# -------------------------------------------------------------------------------------------------------------- graphs


class Recorder:
    """Replaces Graph: a replay computes the same step again, into the tensors of the first result."""

    made = 0

    def __init__(self, step, tokens, restore):
        Recorder.made += 1
        self.step, self.tokens = step, tokens.clone()
        self.result = type(step(self.tokens))(*(x.clone() for x in step(self.tokens)))
        restore()

    def __call__(self, tokens):
        self.tokens.copy_(tokens)
        for old, new in zip(self.result, self.step(self.tokens), strict=True):
            old.copy_(new)
        return self.result


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    """Replaces Graph by the recorder, and drops the graphs of other tests."""
    graph.GRAPHS.clear()
    Recorder.made = 0
    monkeypatch.setattr(graph, "Graph", Recorder)


@pytest.fixture
def model(tmp_path):
    return Transformer.load(write_checkpoint(tmp_path, "mistral-window"))


CASES = {"greedy": {}, "masked": dict(heads=HEADS), "decore-static": dict(heads=HEADS),
         "decore-entropy": dict(heads=HEADS), "decore-entropy, query": dict(heads=HEADS, mask="query"),
         "decore-entropy, masked prompt": dict(heads=HEADS, mask_prompt=True),
         "decore-entropy, lookup": dict(heads=HEADS, lookup=4, max_new_tokens=30),
         "decore-entropy, amateur": dict(amateur_heads=[(0, 1)]), "cd, amateur": {}, "cad": {}, "dola-low": {},
         "dola-high": dict(repetition_penalty=1.3), "ad": dict(info_layer=2)}


@pytest.mark.parametrize("case", CASES)
def test_later_prompts_of_the_same_shape_reuse_a_graph(model, amateur, case):
    how = dict(max_new_tokens=9, method=case.split(",")[0]) | CASES[case]
    how |= dict(amateur=amateur) if "amateur" in case else {}
    for prompts in (PROMPTS, LATER, PROMPTS):
        how |= dict(ids_without_context=[p[-2:] for p in prompts]) if case == "cad" else {}
        assert baselines.generate(model, prompts, graph=True, **how) == baselines.generate(model, prompts, **how)
    assert Recorder.made == 1 or "lookup" in how                # lookup has several numbers of tokens
    [(tensors, *_)] = graph.GRAPHS[model].values()              # memory of another prompt's head mask may be freed
    assert "heads" not in how or any(x.shape[1:] == (3, 4) for x in tensors)


def test_other_settings_shapes_or_weights_need_another_graph(model):
    def graphs(method="decore-static", n=4, prompts=LATER, heads=HEADS, **how):
        plain = generate(model, prompts, method, n, heads=heads, **how)
        assert generate(model, prompts, method, n, graph=True, heads=iter(heads), **how) == plain       # by value
        return Recorder.made
    assert [graphs() for _ in range(2)] == [1, 1]
    assert graphs(heads=[f"{layer}-{head}" for layer, head in HEADS]) == 1          # the same heads
    assert graphs(alpha=0.6) == 2
    assert graphs(heads=HEADS[:2]) == 3
    assert graphs("decore-entropy") == 4
    assert graphs(prompts=[random_ids(80)] * 3) == 5
    # Buffers of one size but other parts: 128 + 64 keys of the prompt and of new tokens, and 64 + 128.
    assert [graphs("greedy", n, [random_ids(length)], eos_ids=()) for length, n in ((101, 64), (51, 128))] == [6, 7]
    assert graphs("decore-entropy") == 7
    weight = model.norm.weight
    weight.data = weight.data.clone() * 2               # the old memory has the old numbers
    assert graphs("decore-entropy") == 8


def test_a_model_has_at_most_four_states_and_drops_the_least_recently_used(model):
    def alphas(alpha):
        generate(model, LATER, "decore-static", 4, heads=HEADS, alpha=alpha, graph=True)
        return [float(re.search(r"'alpha', ([\d.]+)", str(key))[1]) for key in graph.GRAPHS[model]]
    assert [alphas(a) for a in (1.0, 2.0, 3.0, 4.0)][-1] == [1.0, 2.0, 3.0, 4.0]
    assert alphas(1.0) == [2.0, 3.0, 4.0, 1.0]
    assert alphas(5.0) == [3.0, 4.0, 1.0, 5.0]


def test_graphs_are_freed_with_their_model_and_when_a_rank_leaves(tmp_path):
    """NCCL waits for every graph with its collectives, so `leave` drops them before it leaves the group."""
    model = Transformer.load(write_checkpoint(tmp_path, "llama3"))
    for drop in (*parallel.before_leaving, lambda: None):
        generate(model, PROMPTS, heads=HEADS, max_new_tokens=1, graph=True)        # no replay: a recorder has the model
        assert len(graph.GRAPHS) == 1
        drop()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(graph.GRAPHS) == 0


class NothingFromTheHost(TorchFunctionMode):
    """Raises if a tensor is made from numbers of the host: a copy to the device, which a graph cannot record."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_reads_nothing_back_to_the_host(model, method, mask):
    """On "meta" a tensor has no values: reading one is an error, and so is an operation with a tensor on the CPU."""
    step, [session] = open_decore(model, PROMPTS, 5, method, HEADS, alpha_cap=2.0, mask=mask)
    step()
    model.to("meta")
    for cache, name in ((session.cache, "lengths"), (session.cache, "slots"), (session, "head_mask")):
        setattr(cache, name, None if getattr(cache, name) is None else getattr(cache, name).to("meta"))
    session.cache.kv = [kv.to("meta") for kv in session.cache.kv]
    token = torch.zeros(len(PROMPTS), 1, dtype=torch.long, device="meta")
    with NothingFromTheHost(), torch.inference_mode():
        for _ in range(2):
            out = step(token)
    assert out.scores.shape == (len(PROMPTS), 1, model.config.vocab_size) and out.scores.device.type == "meta"


def test_the_host_is_one_step_behind(monkeypatch):
    order = []
    event = SimpleNamespace(synchronize=lambda: order.append("sync"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: empty(x))

    def steps():
        for n in range(3):
            order.append(f"step {n}")
            scores = torch.eye(4)[n][None, None]
            yield scores.argmax(-1), decore.Step(scores, scores, scores, torch.zeros(1, 1), torch.zeros(1, 1))

    for row in graph.on_host(steps()):
        order.append(f"read {int(row[0][0][0])}")
    assert order == ["step 0", "step 1", "sync", "read 0", "step 2", "sync", "read 1", "sync", "read 2"]
