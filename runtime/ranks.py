"""Which rank of torchrun this process is."""

import os

from runtime.errors import InputError

# What torchrun sets in the environment of each process.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def rank_and_size():
    """This process's rank and the number of ranks; 0 and 1 without torchrun.

    Some of TORCHRUN may be left over in a shell. InputError if all are set, but not to ranks."""
    if not all(os.environ.get(name) for name in TORCHRUN):
        return 0, 1
    texts = {name: os.environ[name] for name in TORCHRUN[:3]}
    rank, size, local = (int(text) if text.isdecimal() else -1 for text in texts.values())
    if not 0 <= rank < size or local < 0:
        raise InputError(f"{texts} are not those of torchrun: unset them, or start torchrun")
    return rank, size
