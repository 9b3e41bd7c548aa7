"""`python decore.py` starts here."""

import sys

import cli
from program import main

sys.exit(cli.run_program(main))
