"""The product that reads a CPU's weights: torch's own, or oneDNN's on packed matrices.

Decoding is bound by reading weights, and which product reads them fastest depends on the processor.
A rule chooses it, by processor, dtype and size of the matrix: the same command on the same kind of
processor gives the same bits. docs/speed.md has the measurements that the rule follows."""

import platform
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

UNPACKED_UP_TO = 2**20  # bytes: the call costs more than reading the matrix
SIX = 6  # vectors of a `Filled` product


class Packed(nn.Module):
    """A linear layer whose weight oneDNN has reordered."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, None))
        self.register_buffer("bias", bias)

    def forward(self, x):
        return Product.apply(x, self) if x.requires_grad else self.product(x)

    def product(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Product(torch.autograd.Function):
    """A packed layer with the gradient of its input.

    oneDNN's product has none. The backward pass reads a plain copy of the weight, one layer's at a
    time; it takes about as long to make as five to eight products."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.weight.to_dense(), None


class Filled(Packed):
    """A packed layer that fills fewer than six vectors up with zeros.

    With AVX-512, oneDNN often multiplies six vectors in less time than one or two."""

    def product(self, x):
        n = x.shape[:-1].numel()
        if n >= SIX:
            return super().product(x)
        return (
            super().product(F.pad(x.reshape(n, -1), (0, 0, 0, SIX - n)))[:n].view(*x.shape[:-1], -1)
        )


# (maker, instructions) of a processor → the kind of layer for each dtype; None and others: plain.
KERNELS = {
    ("AMD", "AVX2"): {torch.float32: Packed},
    ("AMD", "AVX512"): {torch.float32: Filled, torch.bfloat16: Filled},
    ("Intel", "AVX512"): {torch.bfloat16: Packed},
}


def processor():
    """(maker, vector instructions) of the CPU, such as ("AMD", "AVX512")."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    maker = re.search("AMD|Intel", text)
    return maker and maker[0], torch.backends.cpu.get_cpu_capability()


@torch.no_grad()
def pack(model, linear, keep=None):
    """Replace the large layers of class `linear` of a model on a CPU by those of `KERNELS`. Returns
    the name of their kind: "plain", "packed" or "filled".

    A packed layer has no plain weight. keep: the name of a layer that stays plain, for looking up
    rows. If its weight is the head's too, that matrix is in memory twice."""
    kinds = KERNELS.get(processor(), {}) if torch.backends.mkldnn.is_available() else {}
    kind = None
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name != keep]
    for name in names:  # not modules: a plain matrix is freed when its packed one exists
        layer = model.get_submodule(name)
        if (
            type(layer) is linear
            and layer.weight.nbytes > UNPACKED_UP_TO
            and layer.weight.dtype in kinds
        ):
            kind = kinds[layer.weight.dtype]
            model.set_submodule(name, kind(layer.weight.detach(), layer.bias))
    return kind.__name__.lower() if kind else "plain"
