"""Both engines have the same members; what methods start has passes and a step."""

from inspect import isfunction, signature

import torch

from decoders.baselines import AD, CD, DoLa
from decoders.sweep import SideBySide
from decore import DeCoRe, Greedy
from model import Transformer


def test_both_engines_have_the_same_members(llama, engine):
    """Functions have the same first parameters: that engine's masks are for fewer of them."""
    model = engine.load(llama.checkpoint.folder)
    public = {name for name in vars(Transformer) if not name.startswith("_")}
    assert len(public) > 15
    for name in {*public, "config", "name", "shard"} - {"run_layers", "embedding"}:
        member = getattr(model, name)
        if isfunction(vars(Transformer).get(name)) and name != "while_reading":
            ours = list(signature(getattr(Transformer, name)).parameters)[1:]
            theirs = list(signature(member).parameters)
            assert theirs == ours[: len(theirs)] and len(theirs) >= min(3, len(ours)), name


def test_methods_start_decodings_whose_sessions_have_a_model_and_a_cache(llama, engine):
    model = engine.load(llama.checkpoint.folder)
    methods = [Greedy(), DeCoRe([(0, 1)]), CD(model), DoLa(), AD(1)]
    for method in *methods, SideBySide(tuple(methods)):
        texts = len(getattr(method, "methods", [method]))
        with torch.inference_mode():
            decoding = method.start(model, [[5, 6]], 2)
            step = decoding.step(torch.full((texts, 1), 6))
        assert all(session.model is model and session.cache for session in decoding.sessions)
        assert step.scores.shape == (texts, 1, model.config.vocab_size)
