"""Fixtures of the model's and the method's tests."""

import pytest

from model import Transformer
from tests.checkpoints import write_checkpoint


@pytest.fixture(scope="session", params=["llama3", "mistral-window", "qwen2-window", "qwen3"])
def model(request, tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("m"), request.param))


@pytest.fixture
def passes(monkeypatch):
    """The (B, T) of every pass."""
    shapes = []
    embedding = Transformer.embedding

    def record(self, ids):
        shapes.append(tuple(ids.shape))
        return embedding(self, ids)

    monkeypatch.setattr(Transformer, "embedding", record)
    return shapes
