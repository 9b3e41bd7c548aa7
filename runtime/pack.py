"""Products that read the weights of a CPU's large matrices fast: after loading, oneDNN reorders every matrix once.

In bfloat16 on processors with AMX a product of our own takes the plain matrix, if it has been built (`amx.py`)."""

import hashlib
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SMALL = 2**20                   # bytes up to which the call costs more than reading the matrix does
FEW = 48                        # vectors up to which amx.cpp is faster than torch with a plain matrix
SOURCE = Path(__file__).with_name("amx.cpp")


class Packed(nn.Module):
    """A linear layer of a packed weight; what inductor calls when it freezes a model."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, None))
        self.register_buffer("bias", bias)

    def forward(self, x, stream=None):
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y if stream is None else stream + y


class Tiled(nn.Module):
    """A linear layer of a plain bfloat16 weight: few vectors by amx.cpp, many by torch."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x, stream=None):
        few = x.numel() <= FEW * x.shape[-1]
        y = (torch.ops.decore.linear if few else F.linear)(x, self.weight, self.bias)
        return y if stream is None else stream + y


def library():
    """Where the build of amx.cpp for this torch is, if there is one."""
    mark = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    return SOURCE.parent / "build" / f"amx_{mark}.so"


@cache
def amx():
    """Whether amx.cpp is built and this processor can run it."""
    path = library()
    try:
        if path.exists():
            torch.ops.load_library(path)
        return path.exists() and torch.ops.decore.ready()
    except OSError as error:
        warnings.warn(f"{path} is not used ({error}); build it again: python -m runtime.amx", stacklevel=2)
        return False


@torch.no_grad()
def pack(model):
    """Replace the large linear layers of a model on a CPU by faster ones, one after the other.

    Where they are packed the plain weights go, but for a tied head: it is packed beside the embedding, whose rows are
    looked up, so that matrix is in memory twice. Layers stay plain where torch has no such operator, where oneDNN lacks
    the dtype on this processor, or where results differ."""
    plain = type(model.embed)
    for parent in [m for m in model.modules() if not isinstance(m, plain)]:
        for name in list(parent._modules):
            if isinstance(parent._modules[name], plain) and (parent, name) != (model, "embed"):
                parent._modules[name] = packed(parent._modules[name]) or parent._modules[name]


def packed(layer):
    """The same layer with a faster product, or None where there is none or it is of no use."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if weight.nbytes <= SMALL:
        return None
    tiles = weight.dtype == torch.bfloat16 and weight.shape[1] % 32 == 0 and amx()
    try:
        new = (Tiled if tiles else Packed)(weight, bias)
        same = all(agree(new, weight, bias, n) for n in ((1, 2, 17, 33) if tiles else (1, 2)))    # kernels of their own
    except (AttributeError, RuntimeError):                              # no such operator, or not for this dtype
        return None
    if not same:
        warnings.warn(f"{'amx.cpp' if tiles else 'oneDNN'}'s product differs from the plain one, which is used",
                      stacklevel=2)
        return None
    return new


def agree(new, weight, bias, n):
    """Whether both products are the same but for rounding: the first n rows as vectors, times the first 64 rows."""
    expected = F.linear(weight[:n], weight[:64], None if bias is None else bias[:64]).float()
    off = (new(weight[:n])[:, :64].float() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return off <= (1e-5 if weight.dtype == torch.float32 else 4 * torch.finfo(weight.dtype).eps)
