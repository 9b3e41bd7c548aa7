"""Attention: plain products against fused kernels, and the calls that a GPU would get, recorded on a CPU."""

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from model import Cache, Transformer
from runtime import attention
from tests.checkpoints import random_ids, write_checkpoint


@pytest.fixture
def calls(monkeypatch):
    """Calls of fused attention: (shape of k, mask, enable_gqa, whether cuDNN may be chosen)."""
    calls = []

    def record(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        calls.append((tuple(k.shape), attn_mask, enable_gqa, torch.backends.cuda.cudnn_sdp_enabled()))
        return q
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", record)
    return calls


def tensors(T, S, dtype, H=4, G=2):
    return [torch.zeros(1, heads, n, 8, dtype=dtype) for heads, n in ((H, T), (G, S), (G, S))]


def test_prompts_never_go_to_cudnn_which_plans_for_every_length(calls):
    torch.backends.cuda.enable_cudnn_sdp(True)
    for T, S, window in ((5, 5, None), (3, 5, None), (3, 5, 2)):
        attention.causal_attention(*tensors(T, S, torch.bfloat16), window)
    assert [cudnn for *_, cudnn in calls] == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled()              # elsewhere it is as before


@pytest.mark.parametrize("T", [5, 3])
def test_flash_attention_gets_grouped_keys_without_copies(calls, T):
    attention.causal_attention(*tensors(T, 5, torch.bfloat16), None)
    (shape, mask, grouped, _), = calls
    assert shape == (1, 2, 5, 8) and grouped
    assert mask is None if T == 5 else isinstance(mask, CausalBias)         # no mask in memory


@pytest.mark.parametrize("dtype, window", [(torch.float32, None), (torch.bfloat16, 2)])
def test_kernels_that_take_no_groups_get_repeated_keys(calls, dtype, window):
    attention.causal_attention(*tensors(3, 5, dtype), window)
    (shape, _, grouped, _), = calls
    assert shape[1] == 4 and not grouped


def test_decoding_scores_are_float32_without_float32_copies_of_the_keys(monkeypatch):
    q, k, bmm, calls = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 9, 8).bfloat16(), torch.bmm, []

    def record(a, b, out_dtype=None):
        calls.append((a.dtype, b.dtype, out_dtype))
        return bmm(a.float(), b.float())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "bmm", record)
    assert attention.product32(q, k.mT).dtype == torch.float32
    assert calls == [(torch.bfloat16, torch.bfloat16, torch.float32)]


def test_a_gpu_attends_to_the_whole_buffer_so_that_steps_have_one_shape(tmp_path, monkeypatch):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3"))
    cache, widths = Cache(model, [9], 200, 2), []
    monkeypatch.setattr(Transformer, "device", type("Device", (), dict(type="cuda", __str__=lambda _: "cpu"))())
    monkeypatch.setattr("model.attention", lambda q, k, v, *_: widths.append(k.shape[2]) or (q, None))
    monkeypatch.setattr("model.torch.arange", lambda *a, device=None: torch.ops.aten.arange(*a))
    for token in random_ids(3):
        model(torch.tensor([[token]]), cache)
    assert set(widths) == {64 + 256 * 2}


@pytest.mark.parametrize("C, parts", [(64, 1), (1024, 1), (7, 7), (1088, 2), (4160, 5), (8256, 12), (1984, 2)])
def test_a_long_sum_is_split(C, parts, monkeypatch):
    weights, v, sizes, bmm = torch.rand(4, 3, C).softmax(-1), torch.randn(4, C, 8), [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: sizes.append(a.shape) or bmm(a, b))
    total = attention.weighted_sum(weights, v)
    assert sizes == [(4 * parts, 3, C // parts)]
    torch.testing.assert_close(total, torch.einsum("bnc,bck->bnk", weights, v), atol=1e-6, rtol=1e-5)
    half = attention.weighted_sum(weights.bfloat16(), v.bfloat16())
    assert half.dtype == torch.bfloat16 and (half.float() - total).abs().max() < 0.02 * total.abs().max()


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
