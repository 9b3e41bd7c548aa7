"""Attention on tensors: `biased_attention` for a step, `causal_attention` for a prompt.

B batch   H query heads   G key heads   N queries per key head   C keys   T tokens   K head width
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PART = 1024  # keys in one partial sum of values on a GPU
# Without cuDNN's attention, which spends up to half a second on each new length of a prompt.
PREFILL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def biased_attention(q, k, v, bias, return_probabilities=False):
    """softmax(q k / √K + bias) v: q [B, G, N, K], k and v [B, G, C, K], bias [B, 1, N, C] → [B, G,
    N, K], and the softmax [B, G, N, C] in float32, or None without return_probabilities."""
    if q.device.type == "cpu" and not return_probabilities:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias), None
    # Each key head has few queries, so fused kernels would leave most of a GPU idle.
    scores = product32(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, k.shape[:2])
    probabilities = torch.add(bias, scores, alpha=q.shape[-1] ** -0.5).softmax(-1)
    y = weighted_sum(probabilities.to(v.dtype).flatten(0, 1), v.flatten(0, 1)).unflatten(
        0, v.shape[:2]
    )
    return y, probabilities if return_probabilities else None


def product32(a, b):
    """The product of two batches of matrices, in float32."""
    # From torch 2.8 on, bmm reads half precision and returns float32, but without a derivative.
    without_gradient = not (a.requires_grad or b.requires_grad)
    half = a.is_cuda and a.dtype != torch.float32
    if half and without_gradient and "dtype" in torch.ops.aten.bmm.overloads():
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def weighted_sum(probabilities, v):
    """[B·G, N, C] times [B·G, C, K] → [B·G, N, K]. N is small: sums are split to fill the GPU."""
    C = probabilities.shape[-1]
    parts = 1
    while parts < C and (C % (8 * parts) or C // parts > PART):
        parts += 1
    if parts == 1:
        return torch.bmm(probabilities, v)
    y = torch.bmm(
        probabilities.unflatten(-1, (parts, -1)).transpose(1, 2).flatten(0, 1),
        v.unflatten(1, (parts, -1)).flatten(0, 1),
    )
    return y.unflatten(0, (-1, parts)).sum(1, dtype=torch.float32).to(v.dtype)


def causal_attention(q, k, v, window):
    """Attention of the last T of C tokens to all C: q [B, H, T, K], k and v [B, G, C, K] → [B, H,
    T, K]. window: how many keys a token sees, itself included; None: all."""
    T = q.shape[2]
    C = k.shape[2]
    groups = q.shape[1] // k.shape[1]
    visible = None  # the keys that each token sees, [T, C]; None: those up to itself
    if window is not None and window < C:
        first = max(0, C - T - window + 1)  # no query sees an earlier key
        k = k[..., first:, :]
        v = v[..., first:, :]
        visible = visible_keys(T, C - first, window, q.device)
    # On a GPU only flash attention has groups; it takes neither a window's `visible` nor float32.
    if q.is_cuda and groups > 1 and (visible is not None or q.dtype == torch.float32):
        k = k.repeat_interleave(groups, 1)
        v = v.repeat_interleave(groups, 1)
        groups = 1
    if visible is None and C > T:
        visible = lower_right(T, C, q)
    with sdpa_kernel(PREFILL):
        return F.scaled_dot_product_attention(
            q, k, v, visible, is_causal=visible is None, enable_gqa=groups > 1
        )


def lower_right(T, C, q):
    """The keys that the last T of C tokens see: all up to each of them."""
    if not q.is_cuda:
        return visible_keys(T, C, C, q.device)
    from torch.nn.attention.bias import causal_lower_right  # slow to import

    return causal_lower_right(T, C)  # not stored by the kernels of a GPU


def visible_keys(T, C, window, device):
    """Which of C tokens each of the last T sees: [T, C]."""
    key = torch.arange(C, device=device)
    age = key[C - T :, None] - key
    return (age >= 0) & (age < window)
