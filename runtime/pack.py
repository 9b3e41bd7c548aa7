"""The product that reads a CPU's weights: torch's own, oneDNN's on packed matrices, or torch's in
float32 on blocks of half-precision matrices.

Decoding is bound by reading weights, and which product reads them fastest depends on the processor.
A rule chooses it, by processor, dtype and size of the matrix: the same command on the same kind of
processor gives the same bits. docs/speed.md has the measurements that the rule follows."""

import platform
import re
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

UNPACKED_UP_TO = 2**20  # bytes: the call costs more than reading the matrix
SIX = 6  # vectors of a `Filled` product
BLOCK = 2**19  # numbers of a weight that `Blocked` has in float32 at once: they stay in a cache
# Instructions for products in half precision, by their names in /proc/cpuinfo.
HALVES = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}
MANY = 8  # vectors: from here on a `Blocked` product is faster than torch's own


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


class Blocked(nn.Module):
    """A linear layer in half precision, for a CPU without instructions for it.

    torch multiplies one vector fast, but many five to eight times slower than in float32. So blocks
    of rows are converted to float32, multiplied, and the result is rounded."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x):
        return Product.apply(x, self) if x.requires_grad else self.product(x)

    def product(self, x):
        n = x.shape[:-1].numel()
        if n < MANY:
            return F.linear(x, self.weight, self.bias)
        y = x.new_empty(n, len(self.weight))
        vectors = x.reshape(n, -1).float()
        rows = max(1, BLOCK // x.shape[-1])
        for start in range(0, len(self.weight), rows):
            part = slice(start, start + rows)
            bias = None if self.bias is None else self.bias[part].float()
            y[:, part] = F.linear(vectors, self.weight[part].float(), bias)
        return y.view(*x.shape[:-1], -1)


# (maker, instructions) of a processor → the kind of layer for each dtype; None and others: plain.
KERNELS = {
    ("AMD", "AVX2"): {torch.float32: Packed},
    ("AMD", "AVX512"): {torch.float32: Filled, torch.bfloat16: Filled},
    ("Intel", "AVX512"): {torch.bfloat16: Packed},
}


def processor():
    """(maker, vector instructions) of the CPU, such as ("AMD", "AVX512")."""
    maker = re.search("AMD|Intel", cpuinfo())
    return maker and maker[0], torch.backends.cpu.get_cpu_capability()


@cache
def cpuinfo():
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else platform.processor()


def emulates(dtype):
    """Whether the CPU has vector instructions, but none for products in this half precision."""
    maker, instructions = processor()
    if maker is None or instructions not in ("AVX2", "AVX512") or dtype not in HALVES:
        return False
    return instructions == "AVX2" or HALVES[dtype].isdisjoint(cpuinfo().split())


def kind_of_layer(dtype):
    """The class that replaces linear layers of this dtype; None: they stay plain."""
    if emulates(dtype):
        return Blocked
    kinds = KERNELS.get(processor(), {}) if torch.backends.mkldnn.is_available() else {}
    return kinds.get(dtype)


@torch.no_grad()
def pack(model, linear, keep=None):
    """Replace the layers of class `linear` of a model on a CPU by those of `kind_of_layer`, small
    ones only by `Blocked`. Returns the name of their kind: "plain", "packed", "filled" or
    "blocked".

    A packed layer has no plain weight. keep: the name of a layer that stays plain, for looking up
    rows. If its weight is the head's too and packed, that matrix is in memory twice."""
    name_of_kind = "plain"
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name != keep]
    for name in names:  # not modules: a plain matrix is freed when its packed one exists
        layer = model.get_submodule(name)
        if type(layer) is not linear:
            continue
        kind = kind_of_layer(layer.weight.dtype)
        if kind is Blocked or kind and layer.weight.nbytes > UNPACKED_UP_TO:
            name_of_kind = kind.__name__.lower()
            model.set_submodule(name, kind(layer.weight.detach(), layer.bias))
    return name_of_kind
