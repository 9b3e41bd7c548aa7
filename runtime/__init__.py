"""What models and programs stand on. Programs import it first, so that Ctrl-C is always one line."""

import sys
from pathlib import Path


def report(kind, error, trace):
    """sys.excepthook. `cli.run` catches Ctrl-C only after the import of torch, which takes seconds."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# "-m" while Python looks for a module of ours. A program of somebody else keeps its own way.
if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).resolve().is_relative_to(Path(__file__).parent.parent):
    sys.excepthook = report
