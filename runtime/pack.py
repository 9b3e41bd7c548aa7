"""The product that reads a CPU's weights fastest: torch's own, or oneDNN's on packed matrices.

Decoding is bound by reading weights, and the fastest product depends on the processor. So the
products are timed at load, with two vectors and a part of the model's largest matrix."""

import math
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

SMALL = 2**20  # bytes up to which the call costs more than reading the matrix
SAMPLE = 2**27  # bytes of the largest matrix to time: more than a processor's cache
SIX = 6  # vectors of a `Filled` product
PLAIN = 1.1  # factor of a plain product's time: it is slower for more vectors


class Packed(nn.Module):
    """A linear layer whose weight oneDNN has reordered."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, None))
        self.register_buffer("bias", bias)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Filled(Packed):
    """A packed layer that fills fewer than six vectors up with zeros.

    oneDNN often multiplies six vectors in less time than one or two."""

    def forward(self, x):
        n = x.shape[:-1].numel()
        if n >= SIX:
            return super().forward(x)
        return (
            super().forward(F.pad(x.reshape(n, -1), (0, 0, 0, SIX - n)))[:n].view(*x.shape[:-1], -1)
        )


@torch.no_grad()
def pack(model, linear, keep=None):
    """Replace the large layers of class `linear` of a model on a CPU by the fastest kind, which is
    returned: "plain", "packed" or "filled".

    A packed layer has no plain weight. keep: the name of a layer that stays plain, for looking up
    rows. If its weight is the head's too, that matrix is in memory twice."""
    sizes = {}  # of the matrices, which are freed one by one when their packed ones exist
    for name, layer in model.named_modules(remove_duplicate=False):
        if type(layer) is linear and layer.weight.nbytes > SMALL and name != keep:
            sizes[name] = layer.weight.nbytes
    largest = max(sizes, key=sizes.get, default=None)
    kind = largest and fastest(model.get_submodule(largest).weight)
    if kind is None:
        return "plain"
    for name in sizes:
        layer = model.get_submodule(name)
        model.set_submodule(name, kind(layer.weight.detach(), layer.bias))
    return kind.__name__.lower()


def fastest(weight):
    """The kind of layer that is fastest for two vectors and a matrix [N, K]; None: the plain
    one."""
    weight = weight.detach()[: max(1, SAMPLE // weight[0].nbytes)]
    return min(
        (None, Packed, Filled), key=lambda kind: seconds(kind, weight) * (1 if kind else PLAIN)
    )


def seconds(kind, weight):
    """The time of a kind's product; infinite if it is wrong, or torch lacks it here."""
    x, times = weight[:2].clone(), []
    expected = F.linear(x, weight)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 4 * torch.finfo(weight.dtype).eps
    try:
        product = partial(kind(weight, None) if kind else partial(F.linear, weight=weight), x)
        if (product() - expected).abs().max() > tolerance * expected.abs().max():
            return math.inf
    except (AttributeError, RuntimeError):
        return math.inf
    for _ in range(5):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return min(times)
