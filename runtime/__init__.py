"""What models and programs stand on. A program imports this package first, so that Ctrl-C is one line at any time."""

import sys
from pathlib import Path


def report(kind, error, trace):
    """sys.excepthook. `cli.run` catches Ctrl-C only once torch has been imported, which takes seconds."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# "-m" while Python looks for a module of ours. A program of somebody else keeps its own way.
if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).resolve().is_relative_to(Path(__file__).parent.parent):
    sys.excepthook = report
