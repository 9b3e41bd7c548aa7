"""Attention on plain tensors: `attention` for the few queries of a decoding step, `causal_attention` for a prompt.

    B batch   H query heads   G key/value heads   N queries per key head   C keys   T of S tokens   K head width
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PART = 1024                     # keys in one partial sum of values on a GPU
# Without cuDNN's attention, which spends up to half a second on each new length of a prompt.
PREFILL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(q, k, v, bias, return_weights=False):
    """softmax(q k / √K + bias) v: q [B, G, N, K], k and v [B, G, C, K], bias [B, 1, N, C] → [B, G, N, K], and the
    softmax [B, G, N, C] in float32, or None without return_weights."""
    if q.device.type == "cpu" and not return_weights:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias), None
    # Each key head has few queries, so fused kernels would leave most of a GPU idle.
    scores = product32(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, k.shape[:2])
    weights = torch.add(bias, scores, alpha=q.shape[-1] ** -0.5).softmax(-1)
    y = weighted_sum(weights.to(v.dtype).flatten(0, 1), v.flatten(0, 1)).unflatten(0, v.shape[:2])
    return y, weights if return_weights else None


def product32(a, b):
    """The product of two batches of matrices, in float32."""
    # From torch 2.8 on, bmm reads half precision and returns float32.
    if a.is_cuda and a.dtype != torch.float32 and "dtype" in torch.ops.aten.bmm.overloads():
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def weighted_sum(weights, v):
    """[B·G, N, C] times [B·G, C, K] → [B·G, N, K]. N is small, so there are few tiles: split over C to fill the GPU."""
    C, parts = weights.shape[-1], 1
    while parts < C and (C % (8 * parts) or C // parts > PART):
        parts += 1
    if parts == 1:
        return torch.bmm(weights, v)
    y = torch.bmm(weights.unflatten(-1, (parts, -1)).transpose(1, 2).flatten(0, 1),
                  v.unflatten(1, (parts, -1)).flatten(0, 1))
    return y.unflatten(0, (-1, parts)).sum(1, dtype=torch.float32).to(v.dtype)


def causal_attention(q, k, v, window):
    """Attention of the last T of S tokens to all S: q [B, H, T, K], k and v [B, G, S, K] → [B, H, T, K]."""
    T, S, grouped, mask = q.shape[2], k.shape[2], q.shape[1] != k.shape[1], None
    if windowed := window is not None and window < S:
        first = max(0, S - T - window + 1)                      # no query of this chunk sees an earlier key
        k, v, S = k[..., first:, :], v[..., first:, :], S - first
    if windowed or S > T and not q.is_cuda:
        age = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)
        mask = (age >= 0) & (age < (window or S))
    elif S > T:
        from torch.nn.attention.bias import causal_lower_right  # imported only if needed: it takes a second

        mask = causal_lower_right(T, S)                         # a GPU's fused kernels do not store it
    if grouped and q.is_cuda and (windowed or q.dtype == torch.float32):    # only flash attention supports groups
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    with sdpa_kernel(PREFILL):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
