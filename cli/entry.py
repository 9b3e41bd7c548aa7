"""The way into every program: one line for a user's mistake, the exit status, and who prints under torchrun."""

import os
import sys
import time
import warnings
from pathlib import Path

from runtime.files import one_line


def run(main):
    """Calls main and returns the exit status: 0, 2 after a user's mistake (one line on stderr), 130 after Ctrl-C.

    Under torchrun rank 0 alone prints. The error of another rank is printed only if that rank lives long enough: if
    rank 0 fails too, torchrun ends it first."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:                  # closed by the process that started this one
            setattr(sys, name, open(os.devnull, "r+"))
    stdout, stderr, program = sys.stdout, sys.stderr, Path(sys.argv[0]).name
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        sys.stdout = sys.stderr = open(os.devnull, "w")
    warnings.showwarning = lambda message, *_: print(f"{program}: warning: {message}", file=sys.stderr)
    try:
        try:
            main()
            if "runtime.parallel" in sys.modules:       # else torch has not been loaded
                sys.modules["runtime.parallel"].leave()
        finally:
            sys.stdout.flush()
        return 0
    except BrokenPipeError:                             # the reader, such as `head`, has ended
        return 0
    except KeyboardInterrupt:
        print(file=stderr)
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        flush_or_discard(stdout)
    if rank != "0":
        time.sleep(10)
    print(f"{program}: " + f"rank {rank}: " * (rank != "0") + f"error: {message}", file=stderr, flush=True)
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        os._exit(2)                                     # the threads of a broken group may abort a normal exit
    return 2


def explain(error):
    """One-line message for user errors and resource limits. None for a bug, whose traceback helps more."""
    if out_of_memory(error):
        return "out of memory: use fewer or shorter prompts, bfloat16, or more devices (torchrun)"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'writing'}: {error.strerror[0].lower()}{error.strerror[1:]}"
    network = getattr(sys.modules.get("torch.distributed"), "DistError", ())
    return one_line(error, 1000) if isinstance(error, (ValueError, OSError, ImportError, network)) else None


def out_of_memory(error):
    """Whether the error says that a device, or the host, is out of memory."""
    messages = ("out of memory", "DefaultCPUAllocator")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in messages))


def flush_or_discard(stream):
    """Writes what is buffered. If that fails, it is discarded, so that the exit of Python does not fail again."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
