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


def each(names, text, read=rows):
    """Runs a test with each row of a table. names: of its arguments, as for `parametrize`."""
    return pytest.mark.parametrize(names, read(text))


def facts(text, groups=None):
    """Fields of a configuration, as in `head_dim=8 rope_scaling=null`: values are JSON without
    spaces. A word alone is the name of a group of fields."""
    fields = {}
    for word in text.split():
        name, _, value = word.partition("=")
        fields |= {name: json.loads(value)} if value else groups[name]
    return fields
