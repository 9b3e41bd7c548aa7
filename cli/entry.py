"""Runs a program: its streams and ranks, its exit status, and one line for a user's mistake."""

import os
import sys
import time
import traceback
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from decoders.setup import flag
from heads.reader import HeadFileError
from runtime.errors import ArgumentError, InputError, one_line, out_of_memory
from runtime.ranks import rank_and_size


def run_program(main):
    """Call main and return the exit status: 0, 2 after a user's mistake (one line on stderr),
    130 after Ctrl-C.

    DECORE_TRACEBACK=1 prints the traceback of a mistake too. Under torchrun rank 0 alone prints.
    Another rank prints its error after ten seconds: if rank 0 has failed too, torchrun has ended
    that rank by then."""
    program = Path(sys.argv[0]).name
    rank, size = 0, 1
    with open(os.devnull, "r+") as nowhere:
        # A stream that the shell has closed is None.
        sys.stdin = sys.stdin or nowhere
        stdout, stderr = printable(sys.stdout or nowhere), printable(sys.stderr or nowhere)
        warnings.showwarning = lambda message, *_: print(
            f"{program}: warning: {message}", file=sys.stderr
        )
        try:
            rank, size = rank_and_size()
            out, err = (stdout, stderr) if rank == 0 else (nowhere, nowhere)
            with redirect_stdout(out), redirect_stderr(err):
                main()
                if size > 1 and group():
                    group().destroy_process_group()
                sys.stdout.flush()
            return 0
        except BrokenPipeError:  # the reader, such as `head`, has ended
            sys.stdout = None
            return 0
        except KeyboardInterrupt:
            print(file=stderr)
            return 130
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            if os.environ.get("DECORE_TRACEBACK"):
                traceback.print_exc(file=stderr)
            if isinstance(error, OSError) and error.strerror and not error.filename:
                sys.stdout = None  # a full disk: Python's exit would fail in the same way
        if rank != 0:
            time.sleep(10)
            program += f": rank {rank}"
        print(f"{program}: error: {message}", file=stderr, flush=True)
    if size > 1 and group():
        os._exit(2)  # the threads of a broken group may abort a normal exit
    return 2


@contextmanager
def continuing(words="stopped; the same command continues"):
    """Says so on standard error after Ctrl-C in the block, or in a function that this decorates."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{words}", file=sys.stderr)
        raise


def group():
    """torch.distributed if this rank has joined the others; else None."""
    from torch import distributed  # programs without ranks start without torch

    return distributed if distributed.is_initialized() else None


def printable(stream):
    """The stream, with "?" for characters that its terminal lacks. Files and pipes get UTF-8."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    return stream


def explain(error):
    """One-line message for user errors and resource limits. None for a bug, which needs its
    traceback."""
    if out_of_memory(error):
        return "out of memory: use fewer or shorter prompts, bfloat16, or more devices (torchrun)"
    if isinstance(error, ModuleNotFoundError):
        return f"No module named {error.name!r}; pip install {error.name}"
    if isinstance(error, OSError) and error.strerror:
        return one_line(f"{error.filename or 'writing'}: {error.strerror.lower()}", 1000)
    if not isinstance(error, (ValueError, OSError, ImportError)):
        return None
    if isinstance(error, ArgumentError):
        return one_line(f"{flag(error.name)} {error.problem}", 1000)
    foreign = isinstance(error, ValueError) and not isinstance(error, InputError | HeadFileError)
    hint = " (DECORE_TRACEBACK=1 prints a traceback)" if foreign else ""
    return one_line(error, 1000) + hint
