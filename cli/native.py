"""Builds a matrix product in C++ that makes decoding on a CPU faster; models loaded afterwards use it.

    python -m cli.native

It needs Linux, a C++ compiler and ninja (pip install ninja), and took 10 to 20 seconds on two cores. To undo it,
remove the folder runtime/build."""

import sys

import cli
from runtime import native


def main():
    cli.parser("Build a matrix product in C++ that makes decoding on a CPU faster.").parse_args()
    print(f"wrote {native.build()}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
