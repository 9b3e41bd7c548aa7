"""The errors of this project, in one line; errors of memory and of downloads."""

import re


class InputError(ValueError):
    """A mistake in what a person gives: an argument, an option, a file. Its message says what to
    do, so a program prints no traceback."""


class ArgumentError(InputError):
    """An argument's name, and what is wrong with it. A program has an option in place of the name.

    problem: to be read after the name."""

    def __init__(self, name, problem):
        super().__init__(name, problem)  # so that it can be pickled
        self.name = name
        self.problem = problem

    def __str__(self):
        return f"{self.name} {self.problem}"


def one_line(error, limit=300):
    """An error's message without line breaks, truncated to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "…"


def out_of_memory(error):
    """Whether a device, or the host, is out of memory."""
    if isinstance(error, MemoryError):
        return True
    texts = "out of memory", "DefaultCPUAllocator"  # in the messages of torch's RuntimeErrors
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def offline_if_unreachable():
    """Work offline in this process, as with HF_HUB_OFFLINE, if the hub cannot be reached.

    Libraries then read their cache, or fail at once. Otherwise each retries for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        constants.HF_HUB_OFFLINE or get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # those of requests or of httpx, by the library's version
        constants.HF_HUB_OFFLINE = True


def hub_reason(error):
    """Why a download failed, in a few words."""
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE or isinstance(error, errors.IncompleteSnapshotError):
        return f"no connection to {constants.ENDPOINT.split('//')[-1]}, or HF_HUB_OFFLINE is set"
    reason = re.split(r"\n| \(Request", str(error))[0]
    return one_line(reason.removeprefix("Got: "), 60)
