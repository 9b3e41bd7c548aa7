"""Tables of tests, written as they are read."""

import json

import pytest


def rows(text):
    """The cells of each line, which ` | ` separates; a line may go on after a backslash."""
    return [[cell.strip() for cell in line.split(" | ")] for line in text.strip("\n").splitlines()]


def cells(text):
    """Rows of JSON values. What follows `  # ` says why a row is there, and names its test."""
    params = []
    for line in text.strip("\n").splitlines():
        values, _, why = line.partition("  # ")
        params.append(pytest.param(*map(json.loads, values.split(" | ")), id=why or None))
    return params
