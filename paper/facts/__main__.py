"""Prints questions about facts, with a passage that contradicts the facts or agrees with them.

    python -m paper.facts --half explore --passage implied --value false > conflict.jsonl

The rows are for `evaluate.py --task qa`. README.md describes them."""

import json
import sys

from cli.entry import run_program
from cli.options import parser
from paper.facts import HALVES, PASSAGES, VALUES, questions


def main():
    p = parser(__doc__)
    p.add_argument("--half", choices=HALVES, required=True)
    p.add_argument("--passage", choices=PASSAGES, required=True)
    p.add_argument("--value", choices=VALUES, required=True, help="false contradicts the fact")
    args = p.parse_args()
    for row in questions(args.half, args.passage, args.value):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(run_program(main))
