"""The world and test splits; parts of the training; the checkpoint, with tolerances that
a new training would pass."""

import json
from itertools import islice

import numpy as np
import pytest
import torch

from cli import MINIATURE as FOLDER
from decore import generate
from heads import load_heads
from miniature import data, train
from model import Transformer
from runtime.files import short_hash
from tests.checkpoints import random_ids
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


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_a_step_of_muon_goes_down_the_gradient_equally_far_in_all_directions(shape):
    gradient = torch.randn(shape, generator=torch.manual_seed(0))
    matrix, velocity, momentum = torch.ones(shape), gradient.roll(1), train.MUON["momentum"]
    after = velocity.lerp(gradient, 1 - momentum)
    train.muon_step(matrix, gradient, velocity, scale=0.5)
    rate = 0.5 * train.MUON["lr"]
    step = (1 - rate * train.MUON["weight_decay"] - matrix) / (
        rate * max(1, shape[0] / shape[1]) ** 0.5
    )
    U, _, Vh = torch.linalg.svd(gradient.lerp(after, momentum), full_matrices=False)
    turned = U.T @ step @ Vh.T  # the identity, up to Newton and Schulz's error
    assert ((turned.diag() > 0.6) & (turned.diag() < 1.3)).all() and (
        turned - turned.diag().diag()
    ).abs().max() < 1e-4
    torch.testing.assert_close(velocity, after)


def test_the_copier_is_the_head_that_the_loss_needs_most_and_the_rest_of_its_layer_starts_again(
    llama,
):
    model, prompt = Transformer.load(llama.folder), random_ids(9)
    o, qkv = model.layers[-1].attn.o.weight.data, model.layers[-1].attn.qkv.weight.data
    o[:, :16] = o[:, 24:] = 0  # head 2 alone has an effect
    tokens = torch.tensor(
        [prompt + generate(model, prompt, method="greedy", max_new_tokens=30, eos_ids=()).ids]
    )
    before = o.clone(), qkv.clone()
    assert train.choose_copier(model, tokens, torch.ones_like(tokens), torch.Generator()) == 2
    changed = (before[0] != o).any(0), (before[1] != qkv).any(1)
    heads = [rows.unflatten(0, (-1, 8)).any(1).nonzero().flatten().tolist() for rows in changed]
    assert heads == [[0, 1, 3], [0, 1, 3]]


def accuracy(folder, split, n=96, heads=None):
    """Share of right answers: greedy ones, or with the best four heads of a file masked."""
    model, tokenizer = Transformer.load(folder, dtype=torch.float32), Tokenizer.load(folder)
    method = (
        dict(method="masked", heads=load_heads(model, 4, heads)) if heads else dict(method="greedy")
    )
    items = data.make_split(split, n)
    prompts = [tokenizer.encode(item.prompt) for item in items]
    out = generate(model, prompts, max_new_tokens=12, eos_ids=tokenizer.eos_ids, **method)
    return np.mean([tokenizer.decode(g.ids) == f" {item.answer}." for g, item in zip(out, items)])


@pytest.mark.parametrize(
    "folder, split, heads, low, high",
    [
        (FOLDER, "closed", None, 0.97, 1),
        (FOLDER, "closed", "miniature", 0.5, 1),
        (FOLDER, "open", None, 0.9, 1),
        (FOLDER, "open", "miniature", 0, 0.2),
        (FOLDER / "miniature-amateur", "closed", None, 0.1, 0.8),
        (FOLDER / "miniature-amateur", "open", None, 0.6, 1),
        (FOLDER / "miniature-amateur", "open", "miniature-amateur", 0, 0.2),
    ],
)
def test_the_models_know_facts_and_read_passages_with_their_retrieval_heads(
    folder, split, heads, low, high
):
    assert low <= accuracy(folder, split, heads=heads) <= high
    assert Tokenizer.load(folder).core.get_vocab() == Tokenizer.load(FOLDER).core.get_vocab()
