"""One field of what a file holds: config.json, an entry of a data file, a line of a stored run."""

import json

from runtime.errors import InputError, one_line

LARGEST = 10**12  # of the numbers in fields
COUNT = f"a whole number from 1 to {LARGEST}"
POSITIVE = f"a positive number up to {LARGEST}"


def list_of(*types):
    return lambda value: (
        isinstance(value, list) and value and all(type(element) in types for element in value)
    )


KINDS = {  # in words → whether a value is of that kind
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "a text or a number": lambda value: type(value) in (str, int, float),
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "a whole number from 0": lambda value: type(value) is int and value >= 0,
    COUNT: lambda value: type(value) is int and 0 < value <= LARGEST,
    POSITIVE: lambda value: type(value) in (int, float) and 0 < value <= LARGEST,
    "a list of texts": list_of(str),
    "a list of numbers": list_of(int, float, type(None)),
    "a list of objects": list_of(dict, type(None)),
}


def field(fields, name, kind="a text", null=..., hint=""):
    """fields[name]. InputError if it is not of that kind, one of KINDS or a list of all values.

    null: the value of a field that is null or absent; `...`: it is required. hint: ends the
    error."""
    value = fields.get(name)
    if value is None and null is not ...:
        return null
    if isinstance(kind, list):
        valid = value in kind
        expected = " or ".join(map(json.dumps, kind))
    else:
        valid = KINDS[kind](value)
        expected = kind
    if valid:
        return value
    if name in fields:
        found = one_line(json.dumps(value, default=repr), 80)
    else:
        found = f"missing (found: {one_line(', '.join(map(str, fields)) or 'nothing', 120)})"
    raise InputError(f"{name} is {found}; it must be {expected}{hint}")


class located:
    """Turns any error of a wrong entry in the block into an InputError that begins with the entry's
    place, in one line."""

    def __init__(self, place):
        self.place = place

    def __enter__(self):
        pass

    def __exit__(self, _, error, __):
        if isinstance(error, Exception):  # the libraries raise many kinds
            raise InputError(one_line(f"{self.place}: {error}", 1000)) from error
