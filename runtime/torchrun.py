"""The environment of a process that torchrun started. Read without importing torch."""

import os

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def rank_and_size():
    """This process's rank and the number of ranks; 0 and 1 without torchrun.

    torchrun sets all of NAMES. Some of them may be left over in a shell."""
    if not all(os.environ.get(name) for name in NAMES):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
