"""Builds the product of bfloat16 matrices for processors with AMX; models loaded afterwards on a CPU use it.

    python -m cli.amx

It needs Linux, a C++ compiler and ninja (pip install ninja), and takes half a minute. To undo it, remove the folder
runtime/build."""

import sys

import cli
from runtime import amx


def main():
    cli.parser("Build a faster product of bfloat16 matrices, for processors with AMX.").parse_args()
    print(f"wrote {amx.build()}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
