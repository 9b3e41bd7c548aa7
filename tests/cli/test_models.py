"""Models of the command line: what is checked before their weights are read."""

from argparse import Namespace

import pytest

import cli
from runtime import weights
from tests.checkpoints import write_checkpoint, write_tokenizer


def options(model, transformers=False, **more):
    common = dict(amateur=None, device="cpu", dtype="auto", device_map=None)
    return Namespace(**common | dict(model=str(model), transformers=transformers) | more)


@pytest.mark.parametrize("transformers", [False, True])
def test_the_facts_of_a_model_are_known_before_its_weights_are_downloaded(
    chat_model, transformers, monkeypatch
):
    downloads = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        downloads.append(allow_patterns)
        return chat_model

    monkeypatch.setattr(weights, "snapshot_download", snapshot_download)
    args = options("owner/tiny", transformers)
    checkpoint, tokenizer, amateur = cli.read_models(args)
    assert downloads and "*.safetensors" not in sum(downloads, [])
    model, _ = cli.load_weights(args)
    assert "*.safetensors" in downloads[-1]
    assert checkpoint.name == model.name == "owner/tiny" and amateur is None
    assert checkpoint.folder == model.folder and tokenizer is checkpoint.tokenizer
    for fact in "n_layers", "n_heads", "vocab_size", "max_positions", "tied_embeddings":
        assert getattr(checkpoint.config, fact) == getattr(model.config, fact)


@pytest.mark.parametrize(
    "family, more, words",
    [
        ("gpt2", {}, "model_type is"),
        ("llama", dict(device="cuda:7"), "--device cuda:7 is not on this machine"),
        ("llama", dict(device_map="auto"), "--device-map needs --transformers"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_without_its_weights(
    family, more, words, tmp_path
):
    write_tokenizer(write_checkpoint(tmp_path, vocab_size=259, model_type=family))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=words):
        cli.read_models(options(tmp_path, **more))


def test_an_amateur_of_another_vocabulary_is_refused_without_its_weights(chat_model, tmp_path):
    write_tokenizer(write_checkpoint(tmp_path, vocab_size=259))
    (tmp_path / "model.safetensors").unlink()
    assert cli.read_models(options(chat_model, amateur=tmp_path))[2].config.n_layers == 3
    tokenizer = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokenizer.replace("<|turn|>", "<|other|>"))
    with pytest.raises(ValueError, match="have different vocabularies; contrasting needs one"):
        cli.read_models(options(chat_model, amateur=tmp_path))
