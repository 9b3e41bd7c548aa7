"""What attention asks of a GPU's kernels, recorded on a CPU that claims to be one."""

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
