"""ITI on the miniature: the shift of heads is stored as a bias of o, in a checkpoint like ITI's own."""

import torch

from miniature import iti
from miniature.data import make_split
from model import Transformer
from tokenizer import Tokenizer

SHIFT = {(1, 0): torch.linspace(-1, 1, 24), (3, 5): torch.linspace(0, 2, 24)}


def test_the_bias_of_o_is_the_shift_of_the_heads(tmp_path):
    iti.write(tmp_path, SHIFT)
    edited, plain = (Transformer.load(folder, dtype=torch.float32) for folder in (tmp_path, iti.FOLDER))
    ids = torch.tensor([[0, 5, 80, 300, 7, 11]])
    assert not torch.allclose(edited(ids), plain(ids), atol=0.1)
    for (layer, head), shift in SHIFT.items():
        def shifted(_, inputs, head=head, shift=shift):
            y = inputs[0].clone()
            y[..., head * 24:(head + 1) * 24] += shift
            return (y,)
        plain.layers[layer].attn.o.register_forward_pre_hook(shifted)
    assert torch.allclose(edited(ids), plain(ids), atol=0.02)           # the biases are stored as float16


def test_heads_are_shifted_towards_what_passages_say(monkeypatch):
    monkeypatch.setattr(iti, "ITEMS", 16)
    shifts, accuracies = iti.directions(2, 3.0)
    assert len(shifts) == 2 and (3, 1) in shifts           # the last layer's retrieval head
    assert accuracies.shape == (4, 8) and accuracies[3, 1] > 0.6
    model, tokenizer = Transformer.load(iti.FOLDER, dtype=torch.float32), Tokenizer.load(iti.FOLDER)
    differences = [iti.head_outputs(model, tokenizer.encode(f"{item.prompt} {item.answer}"))
                   - iti.head_outputs(model, tokenizer.encode(f"{item.prompt} {item.memory}"))
                   for item in make_split("conflict", 8, iti.SEED)]
    assert torch.stack(differences).mean(0)[3, 1] @ shifts[3, 1] > 0
    double, _ = iti.directions(2, 6.0)
    assert all(torch.allclose(double[head], 2 * shift) for head, shift in shifts.items())
