"""Models of the command line: what is checked before their weights are read."""

import builtins
import io
import re
from argparse import Namespace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from cli import decode, models, reading
from tests.checkpoints import random_ids


@pytest.mark.parametrize("transformers", [False, True])
def test_the_facts_of_a_model_are_known_before_its_weights_are_downloaded(
    chat_model, transformers, monkeypatch
):
    downloads = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        downloads.append(allow_patterns)
        return chat_model

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    names = dict(model="owner/tiny", amateur="owner/tiny")
    options = dict(device="cpu", dtype="auto", device_map=None, eos=None, transformers=transformers)
    args = Namespace(**names, **options)
    checkpoint, tokenizer, amateur = models.read_models(args)
    assert downloads and "*.safetensors" not in sum(downloads, [])
    model, _ = models.load_models(checkpoint, amateur, args)
    assert "*.safetensors" in downloads[-1]
    assert checkpoint.name == amateur.name == model.name == "owner/tiny"
    assert tokenizer is checkpoint.tokenizer
    for fact in "n_layers", "n_heads", "vocab_size", "max_positions", "tied_embeddings":
        assert getattr(checkpoint.config, fact) == getattr(model.config, fact)


def test_each_json_file_is_opened_once_for_a_prompt(call, monkeypatch):
    opened = []
    for module in builtins, io:  # io: of pathlib

        def record(path, *args, read=module.open, **kw):
            opened.append(Path(str(path)).name)
            return read(path, *args, **kw)

        monkeypatch.setattr(module, "open", record)
    assert call(decode.main, "--prompt x --max-new-tokens 1")[0] == 0
    files = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    files.append("miniature.json")  # its head scores
    assert sorted(name for name in opened if name.endswith(".json")) == sorted(files)


@pytest.mark.parametrize("engine", ["own", "transformers"])
def test_a_bar_moves_with_each_layer_while_a_long_prompt_is_read(
    chat_model, engine, monkeypatch, capsys
):
    options = dict(device="cpu", dtype="auto", device_map=None, transformers=engine != "own")
    model = models.load_model(chat_model, Namespace(**options))
    ids = torch.tensor([random_ids(1000, vocab_size=259)])
    monkeypatch.setattr("model.CHUNK", 400)  # three passes of three layers

    mask = torch.ones(1, 3, 4).index_fill(1, torch.tensor(1), 0)

    def read():
        cache = model.new_cache([1000], 8)
        model.prefill(ids, cache, head_mask=mask)
        return model(ids[:, -1:], cache)

    bar, model.while_reading = model.while_reading, type(model).while_reading
    expected = read()
    model.while_reading = bar
    assert torch.equal(read(), expected)
    assert "reading" not in capsys.readouterr().err
    monkeypatch.setattr(reading, "DELAY", 0)
    monkeypatch.setattr(reading, "INTERVAL", 0)
    assert torch.equal(read(), expected)
    shown = re.findall(r"reading 1,000 tokens: +(\d+)%", capsys.readouterr().err)
    passes = (400, 400, 200) if engine == "own" else (1000,)
    read = accumulate([0, *(n / 30 for n in passes for _ in range(3))])  # %
    assert shown == [str(round(share)) for share in read]
    assert not any(layer._forward_hooks for layer in model.output_projections())
