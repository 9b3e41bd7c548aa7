"""Models, methods and what their `start` gives have the members of runtime/protocols.py."""

from inspect import isfunction, signature

import torch

from decoders.baselines import AD, CD, DoLa
from decoders.sweep import SideBySide
from decore import DeCoRe, Greedy
from runtime.protocols import Decoding, Method, Model


def check(thing, protocol):
    """Each member is there; functions have the parameters of the protocol first."""
    for name in protocol.__annotations__:
        assert hasattr(thing, name), name
    for name, function in vars(protocol).items():
        if isfunction(function) and not name.startswith("_"):
            _, *expected = signature(function).parameters
            parameters = list(signature(getattr(thing, name)).parameters)
            assert parameters[: len(expected)] == expected, name


def test_both_engines_methods_and_decodings_have_the_members_of_their_protocols(llama, engine):
    model = engine.load(llama.checkpoint.folder)
    check(model, Model)
    methods = [Greedy(), DeCoRe([(0, 1)]), CD(model), DoLa(), AD(1)]
    for method in methods:
        check(method, Method)
        with torch.inference_mode():
            check(method.start(model, [[5, 6]], 2), Decoding)
    together = SideBySide(tuple(methods))
    check(together.start(model, [[5, 6]] * len(methods), 2), Decoding)
