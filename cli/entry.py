"""Runs a program: its exit status, one line for a user's mistake, and silence of all ranks but the first."""

import os
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from runtime.errors import out_of_memory
from runtime.files import one_line


def run(main):
    """Call main and return the exit status: 0, 2 after a user's mistake (one line on stderr), 130 after Ctrl-C.

    Under torchrun rank 0 alone prints. Another rank prints its error after ten seconds: if rank 0 has failed too,
    torchrun has ended that rank by then."""
    program, rank, nowhere = (
        Path(sys.argv[0]).name,
        os.environ.get("RANK", "0"),
        open(os.devnull, "r+"),
    )
    # A stream that the shell has closed is None.
    sys.stdin, stdout, stderr = (
        stream or nowhere for stream in (sys.stdin, sys.stdout, sys.stderr)
    )
    out, err = (stdout, stderr) if rank == "0" else (nowhere, nowhere)
    warnings.showwarning = lambda message, *_: print(
        f"{program}: warning: {message}", file=sys.stderr
    )
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
            if "runtime.parallel" in sys.modules:  # else torch has not been loaded
                sys.modules["runtime.parallel"].leave()
            sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader, such as `head`, has ended
        sys.stdout = nowhere
        return 0
    except KeyboardInterrupt:
        print(file=stderr)
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        if isinstance(error, OSError) and error.strerror and not error.filename:
            sys.stdout = nowhere  # a full disk: Python's exit would fail in the same way
    if rank != "0":
        time.sleep(10)
        program += f": rank {rank}"
    print(f"{program}: error: {message}", file=stderr, flush=True)
    if "runtime.parallel" in sys.modules and sys.modules["runtime.parallel"].dist.is_initialized():
        os._exit(2)  # the threads of a broken group may abort a normal exit
    return 2


def explain(error):
    """One-line message for user errors and resource limits. None for a bug, whose traceback helps more."""
    if out_of_memory(error):
        return "out of memory: use fewer or shorter prompts, bfloat16, or more devices (torchrun)"
    if isinstance(error, OSError) and error.strerror:
        return one_line(
            f"{error.filename or 'writing'}: {error.strerror[0].lower()}{error.strerror[1:]}", 1000
        )
    return one_line(error, 1000) if isinstance(error, (ValueError, OSError, ImportError)) else None
