"""`generate` and `score` with a method's name and settings as keywords, in place of a record."""

import inspect
from dataclasses import fields

import decore
from decoders import scoring
from decoders.setup import RECORDS, has

METHODS = ("greedy", "masked", "decore-static", "decore-entropy")
DECODERS = ("cd", "cad", "dola-low", "dola-high", "ad")
NAMES = (*METHODS, *DECODERS)
WITHOUT = ("ids_without_context", "prompt_ids_without_context")


def record(method="decore-entropy", **settings):
    """The record of a name. Settings that another name of the record has are left out."""
    if not isinstance(method, str) or method not in RECORDS:
        return method
    lite = f"{method}-lite"
    if settings.get("amateur") is not None and lite in RECORDS:
        method = lite
        settings["heads"] = settings.pop("amateur_heads", None)
    of_class, given = RECORDS[method]
    for name in WITHOUT:
        if name in settings:
            settings["without_context"] = settings.pop(name)
    if method.startswith("decore-static"):
        settings = dict(alpha=0.5) | settings
    known = [field.name for field in fields(of_class)]
    kept = {
        name: value
        for name, value in settings.items()
        if value is not None and not (name in given and name in known)
    }
    kept = kept if method != "greedy" else {}
    if method == "masked":
        kept = {name: value for name, value in kept.items() if has(method, name)}
    if "amateur" in known and settings.get("amateur") is not None:
        kept["amateur"] = settings["amateur"]
    return of_class(**kept, **{name: v for name, v in given.items() if name in known and v})


def split(function, settings):
    """(the settings that are arguments of a function, the others)."""
    names = inspect.signature(function).parameters
    return (
        {name: value for name, value in settings.items() if name in names},
        {name: value for name, value in settings.items() if name not in names},
    )


def generate(model, ids=None, method="decore-entropy", max_new_tokens=64, eos_ids=None, **more):
    how, settings = split(decore.generate, more)
    how |= dict(max_new_tokens=max_new_tokens, eos_ids=eos_ids)
    return decore.generate(model, ids, record(method, **settings), **how)


def score(model, prompt_ids, answer_ids, method="decore-entropy", **more):
    how, settings = split(scoring.score, more)
    return scoring.score(model, prompt_ids, answer_ids, record(method, **settings), **how)


def loglikelihoods(model, prompts, answers, method="decore-entropy", **more):
    how, settings = split(scoring.loglikelihoods, more)
    methods = [record(method, **settings)]
    [result] = scoring.loglikelihoods(model, prompts, answers, methods, **how)
    return result
