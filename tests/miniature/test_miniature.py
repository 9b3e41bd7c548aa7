"""The world and test splits; parts of the training; the checkpoint, with tolerances that
a new training would pass."""

import json
from itertools import islice

import numpy as np
import torch

from cli.options import MINIATURE as FOLDER
from decore import Greedy, Masked, generate
from heads import load_heads
from miniature import data, train
from model import Transformer
from runtime.files import short_hash
from tests.tables import cells, each
from tokenizer import Tokenizer


def test_every_machine_makes_the_same_world_documents_and_items():
    """No document shows a conflict or a held-out name of the test splits: this was counted on these
    documents and items."""
    documents = [
        item
        for first, (mixture, most) in train.STAGES.items()
        for item in islice(data.documents(mixture, f"0/{first}", most), 3000)
    ]
    assert data.FACTS[0] == ("Norpilmar", "capital", "Piport") and len(data.FACTS) == 320
    items = [item for split in data.SPLITS for item in data.make_split(split, 20, 5)]
    assert short_hash(json.dumps(documents).encode()) == "a8b4445f1083e71e"
    assert short_hash(json.dumps(items).encode()) == "ae21f78a4543885f"


def test_a_short_training_lowers_the_loss_and_keeps_the_head_that_it_needs_most(
    call, tmp_path, monkeypatch
):
    short = dict(AMATEUR_STEPS=24, WARMUP=1, ALONE=12, BATCH=2, LENGTH=128)
    for name, value in short.items():
        monkeypatch.setattr(train, name, value)
    losses = []  # of each step; after 12 of them, without each of the 4 heads
    copiers = []

    def record(results, original):
        def run(*arguments):
            result = original(*arguments)
            results.append(float(torch.as_tensor(result).detach()))
            return result

        return run

    monkeypatch.setattr(train, "loss_of", record(losses, train.loss_of))
    monkeypatch.setattr(train, "choose_copier", record(copiers, train.choose_copier))
    status, _, err = call(train.main, f"--amateur --out {tmp_path}")
    assert status == 0, err
    assert losses[0] > losses[11] + 1 > losses[-1] + 1.2
    assert copiers == [np.argmax(losses[12:16])]
    assert Transformer.load(tmp_path).config.n_heads == 4


def accuracy(folder, split, n=96, heads=None):
    """Share of right answers: greedy ones, or with the best four heads of a file masked."""
    model, tokenizer = Transformer.load(folder, dtype=torch.float32), Tokenizer.load(folder)
    method = Masked(load_heads(model, 4, heads)) if heads else Greedy()
    items = data.make_split(split, n)
    prompts = [tokenizer.encode(item.prompt) for item in items]
    out = generate(model, prompts, method, max_new_tokens=12, eos_ids=tokenizer.eos_ids)
    return np.mean([tokenizer.decode(g.ids) == f" {item.answer}." for g, item in zip(out, items)])


# Folder, split, heads to mask, the least and the greatest accuracy.
ACCURACIES = """
"." | "closed" | null | 0.97 | 1
"." | "open" | null | 0.9 | 1
"miniature-amateur" | "closed" | null | 0.1 | 0.8
"miniature-amateur" | "open" | null | 0.6 | 1
"miniature-amateur" | "open" | "miniature-amateur" | 0 | 0.2
"""


@each("folder, split, heads, low, high", ACCURACIES, cells)
def test_the_models_know_facts_and_read_passages_with_their_retrieval_heads(
    folder, split, heads, low, high
):
    assert low <= accuracy(FOLDER / folder, split, heads=heads) <= high
    one, other = (Tokenizer.load(path).core.get_vocab() for path in (FOLDER, FOLDER / folder))
    assert one == other
