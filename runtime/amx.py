"""Builds the product in amx.cpp with the C++ compiler at hand; models in bfloat16 on a CPU use it from then on.

    python -m runtime.amx

For Intel's Xeons with AMX (fourth generation and later), where torch's products read bfloat16 weights at about two
thirds of the memory's speed. It needs Linux, a C++ compiler and ninja (pip install ninja), and takes half a minute;
another version of torch needs another build. Removing the folder runtime/build undoes it."""

import shutil
import sys
import tempfile
from pathlib import Path

import torch

import cli
from runtime.pack import SOURCE, library

FLAGS = ["-O3", "-fopenmp", "-mamx-tile", "-mamx-bf16"]


def build():
    """→ the library, compiled in a folder of its own and then put in its place whole."""
    from torch.utils import cpp_extension
    target, compiler = library(), cpp_extension.get_cxx_compiler()
    if not shutil.which(compiler):
        raise ValueError(f"there is no C++ compiler ({compiler}) here; install g++, or name another one in CXX")
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


def main():
    cli.parser("Build a faster product of bfloat16 matrices, for processors with AMX.").parse_args()
    if not torch.cpu._is_amx_tile_supported():
        raise ValueError("this processor has no AMX; oneDNN's products are the fastest here")
    print(f"wrote {build()}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
