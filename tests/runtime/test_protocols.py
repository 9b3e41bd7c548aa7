"""Models have the members of runtime/protocols.py; what methods start has passes and a step."""

from inspect import isfunction, signature

import torch

from decoders.baselines import AD, CD, DoLa
from decoders.sweep import SideBySide
from decore import DeCoRe, Greedy
from runtime.protocols import Model


def test_both_engines_have_the_members_of_the_protocol(llama, engine):
    """Functions have its parameters first."""
    model = engine.load(llama.checkpoint.folder)
    for name in Model.__annotations__:
        assert hasattr(model, name), name
    for name, function in vars(Model).items():
        if isfunction(function) and not name.startswith("_"):
            _, *expected = signature(function).parameters
            parameters = list(signature(getattr(model, name)).parameters)
            assert parameters[: len(expected)] == expected, name


def test_methods_start_decodings_whose_sessions_have_a_model_and_a_cache(llama, engine):
    model = engine.load(llama.checkpoint.folder)
    methods = [Greedy(), DeCoRe([(0, 1)]), CD(model), DoLa(), AD(1)]
    for method in *methods, SideBySide(tuple(methods)):
        prompts = [[5, 6]] * len(getattr(method, "methods", [method]))
        with torch.inference_mode():
            decoding = method.start(model, prompts, 2)
            step = decoding.step(torch.full((len(prompts), 1), 6))
        assert all(session.model is model and session.cache for session in decoding.sessions)
        assert step.scores.shape == (len(prompts), 1, model.config.vocab_size)
