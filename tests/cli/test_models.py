"""Models of the command line: what is checked before their weights are read."""

from argparse import Namespace

import pytest

import cli


@pytest.mark.parametrize("transformers", [False, True])
def test_the_facts_of_a_model_are_known_before_its_weights_are_downloaded(
    chat_model, transformers, monkeypatch
):
    downloads = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        downloads.append(allow_patterns)
        return chat_model

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    names = dict(model="owner/tiny", amateur="owner/tiny")
    options = dict(device="cpu", dtype="auto", device_map=None, eos=None, transformers=transformers)
    args = Namespace(**names, **options)
    checkpoint, tokenizer, amateur = cli.read_models(args)
    assert downloads and "*.safetensors" not in sum(downloads, [])
    model, _ = cli.load_weights(args)
    assert "*.safetensors" in downloads[-1]
    assert checkpoint.name == amateur.name == model.name == "owner/tiny"
    assert tokenizer is checkpoint.tokenizer
    for fact in "n_layers", "n_heads", "vocab_size", "max_positions", "tied_embeddings":
        assert getattr(checkpoint.config, fact) == getattr(model.config, fact)
