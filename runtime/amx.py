"""A product of bfloat16 matrices for Intel's Xeons with AMX (fourth generation and later), built on request.

On these processors torch's products read bfloat16 weights at about two thirds of the memory's speed, amx.cpp at full
speed. `python -m cli.amx` compiles it for the installed torch."""

import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime.files import short_hash

FEW = 48                        # vectors up to which amx.cpp is faster than torch
SOURCE = Path(__file__).with_name("amx.cpp")
FLAGS = ["-O3", "-fopenmp", "-mamx-tile", "-mamx-bf16"]


class Tiled(nn.Module):
    """A linear layer with a plain bfloat16 weight: amx.cpp multiplies few vectors, torch many."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x):
        few = x.numel() <= FEW * x.shape[-1]
        return (torch.ops.decore.linear if few else F.linear)(x, self.weight, self.bias)


def fits(weight):
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 32 == 0 and len(weight) >= 16


@cache
def ready():
    """Whether amx.cpp is built and this processor can run it."""
    path = library()
    try:
        if path.exists():
            torch.ops.load_library(path)
        return path.exists() and torch.ops.decore.ready()
    except OSError as error:
        warnings.warn(f"{path} is not used ({error}); build it again: python -m cli.amx", stacklevel=2)
        return False


def library():
    """The path of the library for this version of amx.cpp and torch, whether or not it is built."""
    return SOURCE.parent / "build" / f"amx_{short_hash(SOURCE.read_bytes() + torch.__version__.encode())}.so"


def build():
    """Compile amx.cpp → the path of the library. ValueError without an AMX processor or a C++ compiler."""
    from torch.utils import cpp_extension

    target, compiler = library(), cpp_extension.get_cxx_compiler()
    if not torch.cpu._is_amx_tile_supported():
        raise ValueError("this processor has no AMX; without it oneDNN's products are the fastest")
    if not shutil.which(compiler):
        raise ValueError(f"there is no C++ compiler ({compiler}); install g++, or name another one in CXX")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            cpp_extension.load(target.stem, [str(SOURCE)], extra_cflags=FLAGS, extra_ldflags=["-fopenmp"],
                               build_directory=folder, is_python_module=False)
        except (RuntimeError, OSError) as error:
            lines = str(error).splitlines()
            raise ValueError(f"{SOURCE.name} cannot be built: "
                             f"{next((line for line in lines if ' error: ' in line), lines[0])}") from None
        (Path(folder) / target.name).replace(target)
    return target
