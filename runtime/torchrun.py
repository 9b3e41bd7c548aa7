"""The environment of a process that torchrun started."""

import os

from runtime.errors import InputError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def rank_and_size():
    """This process's rank and the number of ranks; 0 and 1 without torchrun.

    torchrun sets all of NAMES. Some of them may be left over in a shell. InputError if all are set,
    but not to ranks."""
    if not all(os.environ.get(name) for name in NAMES):
        return 0, 1
    texts = {name: os.environ[name] for name in NAMES[:3]}
    rank, size, local = (int(text) if text.isdecimal() else -1 for text in texts.values())
    if not 0 <= rank < size or local < 0:
        raise InputError(f"{texts} are not those of torchrun: unset them, or start torchrun")
    return rank, size
