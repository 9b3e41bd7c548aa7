"""A matrix product in C++ that reads weights at the memory's speed, built on request.

With one or two vectors, torch's products read more slowly, depending on processor and dtype. `python -m cli.native`
compiles native.cpp for this processor and the installed torch."""

import platform
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime.files import short_hash

# Vectors up to which native.cpp was faster than torch where we measured.
FEW = {torch.float32: 48, torch.bfloat16: 48 if torch.cpu._is_amx_tile_supported() else 20}
SOURCE = Path(__file__).with_name("native.cpp")
PROCESSOR = Path("/proc/cpuinfo")
FLAGS = ["-O3", "-march=native", "-fopenmp"]


class Native(nn.Module):
    """A linear layer with a plain weight: native.cpp multiplies few vectors, torch many."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x):
        few = x.numel() <= FEW[x.dtype] * x.shape[-1]
        return (torch.ops.decore.linear.default if few else F.linear)(x, self.weight, self.bias)


def fits(weight):
    """Whether native.cpp can multiply by this weight."""
    return weight.dtype in (torch.float32, torch.bfloat16) and len(weight) > 1 and weight[0].nbytes % 64 == 0


@cache
def ready():
    """Whether native.cpp is built for this processor."""
    path = library()
    try:
        if path.exists():
            torch.ops.load_library(path)
        return path.exists()
    except OSError as error:
        warnings.warn(f"{path} is not used ({error}); build it again: python -m cli.native", stacklevel=2)
        return False


def library():
    """The path of the library for this native.cpp, torch and processor, whether or not it is built."""
    info = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    features = {line for line in info if line.startswith(("flags", "Features"))}
    key = f"{torch.__version__} {platform.machine()} {sorted(features)}".encode()
    return SOURCE.parent / "build" / f"native_{short_hash(SOURCE.read_bytes() + key)}.so"


def build():
    """Compile native.cpp → the path of the library. ValueError without a C++ compiler."""
    from torch.utils import cpp_extension

    target, compiler = library(), cpp_extension.get_cxx_compiler()
    # The threads of a second OpenMP would compete with those of torch.
    openmp = [str(path) for path in Path(torch.__file__).parent.glob("lib/libgomp*")] or ["-fopenmp"]
    if not shutil.which(compiler):
        raise ValueError(f"there is no C++ compiler ({compiler}); install g++, or name another one in CXX")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            cpp_extension.load(target.stem, [str(SOURCE)], extra_cflags=FLAGS, extra_ldflags=openmp,
                               build_directory=folder, is_python_module=False)
        except (RuntimeError, OSError) as error:
            lines = str(error).splitlines()
            raise ValueError(f"{SOURCE.name} cannot be built: "
                             f"{next((line for line in lines if ' error: ' in line), lines[0])}") from None
        (Path(folder) / target.name).replace(target)
    return target
