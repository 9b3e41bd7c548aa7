"""The miniature's world and test splits; its training; the checkpoint, with tolerances that a new training would pass;
ITI; the claims."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
from decore import generate
from heads import load_heads
from miniature import claims, data, iti, make, train
from model import Transformer
from runtime.config import Config
from runtime.files import short_hash
from tokenizer import Tokenizer

FOLDER = Path(data.__file__).parent
FACT = re.compile(rf"({'|'.join(data.RELATIONS)}) of (\w+) is (\w+)")


@pytest.fixture(scope="module")
def world():
    return data.make_world()


@pytest.fixture(scope="module")
def stream(world):
    """The first documents of each stage of training."""
    return [document for first, mixture, most in train.STAGES
            for document in itertools.islice(data.documents(world, mixture, f"0/{first}", most), 3000)]


def contradictions(world, items):
    """What passages say against the world's facts: {(relation, country, value)}."""
    known = {(fact.relation, fact.country): fact.value for fact in world.facts}
    stated = {triple for item in items for triple in FACT.findall(item.prompt)}
    return {triple for triple in stated if known.get(triple[:2], triple[2]) != triple[2]}


def test_every_machine_makes_the_same_world_documents_and_items(world, stream):
    assert world.facts[0] == ("Norpilmar", "capital", "Piport") and len(world.facts) == 320
    assert world.facts[-1] == ("Moltthendmar", "founder", "Denric") and len(world.names) == 64 + 320
    items = [item for split in data.SPLITS for item in data.make_split(split, 20, 5)]
    assert short_hash(json.dumps(stream).encode()) == "bfc9a62319475069"
    assert short_hash(json.dumps(items).encode()) == "ae21f78a4543885f"


def test_no_conflict_of_a_test_split_occurs_in_training(world, stream):
    trained = contradictions(world, [item for _, _, item in stream])
    assert len(trained) > 50       # the pattern finds them
    assert {(country, relation) for relation, country, _ in trained} <= {fact[:2] for fact in world.conflicts}
    for split in ("conflict", "conflict-known"):
        tested = contradictions(world, data.make_split(split, 1024))
        assert len(tested) > 900 and not {triple[:2] for triple in trained} & {triple[:2] for triple in tested}


def test_training_never_shows_a_held_out_name(stream):
    words = {word for _, _, item in stream for word in re.findall(r"\w+", item.prompt + " " + item.answer)}
    held_out = {word for word in words if word[0].isupper() and data.held_out(word)}
    assert held_out <= {word for text in (*data.FILLERS, *data.OPENERS, "Context Answer The") for word in text.split()}


# ------------------------------------------------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def tokenizer(world):
    return train.make_tokenizer(world, 300)


def test_training_takes_the_same_steps_as_ever(world, tokenizer, tmp_path, monkeypatch):
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16)
    train.save_config(tmp_path, tokenizer, train.CONFIG | shape)
    model = Transformer(Config.from_checkpoint(tmp_path))
    for name, value in (("WARMUP", 1), ("ROWS", 2), ("ALONE", 10), ("MASKED", 0.5)):
        monkeypatch.setattr(train, name, value)
    train.train(model, world, tokenizer, steps=20)
    tokens, weights = next(train.batches(tokenizer, data.documents(world, data.COPYING, "test")))
    # By torch 2.13 in float32. A change of the optimiser, of the schedule or of the masks makes 0.001 or more.
    assert train.loss_of(model(tokens[:, :-1]), tokens, weights)[0].item() == pytest.approx(5.66545, abs=5e-4)


# ---------------------------------------------------------------------------------------------------------- checkpoint


@pytest.fixture(scope="module")
def miniature():
    return Transformer.load(FOLDER, dtype=torch.float32), Tokenizer.load(FOLDER)


def accuracy(miniature, split, n=96, **method):
    model, tokenizer = miniature
    items = data.make_split(split, n)
    out = generate(model, [tokenizer.encode(item.prompt) for item in items], max_new_tokens=12,
                   eos_ids=tokenizer.eos_ids, **method)
    return sum(tokenizer.decode(g.ids) == f" {item.answer}." for g, item in zip(out, items, strict=True)) / n


def test_the_miniature_knows_its_facts_and_reads_passages_with_its_retrieval_heads(miniature):
    masked = dict(method="masked", heads=load_heads("miniature", 4, 8)[:4])
    assert accuracy(miniature, "closed", method="greedy") > 0.97 and accuracy(miniature, "closed", **masked) > 0.5
    assert accuracy(miniature, "open", method="greedy") > 0.9 and accuracy(miniature, "open", **masked) < 0.2


def test_decore_answers_from_a_contradicting_passage_more_often_than_greedy(miniature):
    contrasted = accuracy(miniature, "conflict", method="decore-entropy", heads=load_heads("miniature", 4, 8)[:4])
    assert contrasted > accuracy(miniature, "conflict", method="greedy") + 0.03


def test_the_amateur_shares_the_vocabulary_and_knows_less(miniature):
    amateur = Transformer.load(FOLDER / "amateur", dtype=torch.float32), Tokenizer.load(FOLDER / "amateur")
    assert amateur[1].core.get_vocab() == miniature[1].core.get_vocab()
    assert 0.1 < accuracy(amateur, "closed", method="greedy") < 0.8
    assert accuracy(amateur, "open", method="greedy") > 0.6
    assert accuracy(amateur, "open", method="masked", heads=load_heads("miniature-amateur", 4, 4)[:4]) < 0.2


def test_iti_stores_the_shift_of_heads_as_a_bias_of_o(tmp_path):
    shifts = {(1, 0): torch.linspace(-1, 1, 24), (3, 5): torch.linspace(0, 2, 24)}
    iti.write(tmp_path, shifts)
    edited, plain = (Transformer.load(folder, dtype=torch.float32) for folder in (tmp_path, FOLDER))
    ids = torch.tensor([[0, 5, 80, 300, 7, 11]])
    assert not torch.allclose(edited(ids), plain(ids), atol=0.1)
    for (layer, head), shift in shifts.items():
        def shifted(_, inputs, head=head, shift=shift):
            y = inputs[0].clone()
            y[..., head * 24:(head + 1) * 24] += shift
            return (y,)
        plain.layers[layer].attn.o.register_forward_pre_hook(shifted)
    assert torch.allclose(edited(ids), plain(ids), atol=0.02)           # the biases are stored as float16


def test_iti_shifts_the_heads_that_separate_passage_from_memory(monkeypatch):
    monkeypatch.setattr(iti, "ITEMS", 16)
    shifts, accuracies = iti.directions(2, 3.0)
    assert len(shifts) == 2 and (3, 1) in shifts           # the last layer's retrieval head
    assert accuracies.shape == (4, 8) and accuracies[3, 1] > 0.6


# -------------------------------------------------------------------------------------------------------------- claims


def fake_runs(others=(), query=None, **rates):
    """Runs in which each split has these rates of right answers by greedy, and by the masked model or DeCoRe."""
    def right(split, method="greedy", n=None, mask="output", mask_prompt=False):
        greedy, contrasted = rates[split]
        return items < (greedy if method == "greedy" else query if mask == "query" else contrasted)

    items = np.arange(400) / 400
    return SimpleNamespace(numbers=[4], right=lambda *args, **settings: right(*args, **settings).astype(float),
                           random=lambda *_: np.stack([(items < rate).astype(float) for rate in others]))


@pytest.mark.parametrize("claim, holding, failing", [
    (claims.reading, dict(open=(0.95, 0.1), others=[0.9, 0.8]), [
        dict(open=(0.95, 0.5), others=[0.9, 0.8]), dict(open=(0.95, 0.1), others=[0.4, 0.5])]),
    (claims.recall, dict(open=(0.9, 0.1), closed=(1, 0.9)), [dict(open=(0.9, 0.1), closed=(1, 0.2))]),
    (claims.faithful, dict(conflict=(0.4, 0.6), others=[0.4, 0.3]), [
        dict(conflict=(0.6, 0.6), others=[0.4, 0.3]), dict(conflict=(0.4, 0.6), others=[0.6, 0.6])]),
    (claims.cost, dict(open=(0.9, 0.9), closed=(0.9, 0.9), irrelevant=(0.9, 0.9)), [
        dict(open=(0.9, 0.9), closed=(0.9, 0.9), irrelevant=(0.9, 0.8))]),
    (claims.masks, dict(conflict=(0.4, 0.6), query=0.6), [dict(conflict=(0.4, 0.6), query=0.5)])])
def test_claims_hold_or_fail_by_the_runs(claim, holding, failing):
    assert claim(fake_runs(**holding))[0]
    assert not any(claim(fake_runs(**rates))[0] for rates in failing)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with small runs of evaluate.py."""
    folder = tmp_path_factory.mktemp("runs")
    for options in ("--method greedy,decore-entropy --num-heads 4",
                    "--method decore-entropy --num-heads 4 --random-heads uniform --seed 0,1,2"):
        evaluate.evaluate(["--task", "miniature-conflict", *options.split(), "--limit", "32", "--device", "cpu",
                           "--out", str(folder)])
    return claims.Runs(folder)


def test_runs_are_chosen_by_their_settings(runs, miniature):
    heads = load_heads("miniature", 4, 8)[:4]
    assert runs.numbers == [4]
    assert runs.right("conflict").mean() == accuracy(miniature, "conflict", n=32, method="greedy")
    assert runs.right("conflict", "decore-entropy", 4).mean() == accuracy(
        miniature, "conflict", n=32, method="decore-entropy", heads=heads)
    others = runs.random("conflict", "decore-entropy", 4)
    assert others.shape == (3, 32) and others.mean() < runs.right("conflict", "decore-entropy", 4).mean()
    with pytest.raises(ValueError, match="no run with the settings .*miniature-open.*: run python -m miniature.make"):
        runs.right("open")


def test_retrieval_heads_attend_to_the_answer_that_is_copied(runs):
    assert claims.sources(runs)[0]
    text = "Context: The ruler of Aa is Bo. The capital of Aa is Dasholm.\nAnswer: The capital of Aa is"
    places = claims.answer_tokens([(i, i + 1) for i in range(len(text))], text, "Dasholm")
    assert "".join(text[i] for i in sorted(places)) == "Dasholm"


def test_the_page_s_tables_are_replaced_and_its_text_is_not():
    page = make.replace_block("a\n<!-- b -->\n\nold\n\n<!-- end -->\nc\n<!-- d -->\n<!-- end -->\n", "b", "new")
    assert page == "a\n<!-- b -->\n\nnew\n\n<!-- end -->\nc\n<!-- d -->\n<!-- end -->\n"


def test_the_readme_quotes_the_page_s_numbers():
    root = FOLDER.parent
    rows = [line for line in (root / "README.md").read_text().splitlines() if re.match(r"\| (greedy|DeCoRe)", line)]
    quotes = re.findall(r"(\d+\.\d) \((\d+\.\d)–(\d+\.\d)\)", "\n".join(rows))
    page = (root / "docs" / "miniature.md").read_text()
    assert all(f"{mean} [{low}, {high}]" in page for mean, low, high in quotes)
