"""The way into every program: one line for a user's mistake, the exit status, and who prints under torchrun."""

import os
import sys
import time
import warnings
from pathlib import Path

from runtime.files import one_line


def run(main):
    """Call main and return the exit status: 0, 2 after a user's mistake (one line on stderr), 130 after Ctrl-C.

    Under torchrun rank 0 alone prints. Another rank prints its error after ten seconds: if rank 0 has failed too,
    torchrun has ended that rank by then."""
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
        program += f": rank {rank}"
    print(f"{program}: error: {message}", file=stderr, flush=True)
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
    return one_line(error, 1000) if isinstance(error, (ValueError, OSError, ImportError)) else None


def out_of_memory(error):
    """Whether the error says that a device, or the host, is out of memory."""
    texts = ("out of memory", "DefaultCPUAllocator")
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError") or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts))


def flush_or_discard(stream):
    """Write what is buffered. If that fails, discard it: Python's exit would fail in the same way."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
