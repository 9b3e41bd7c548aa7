"""Edit the miniature by inference-time intervention (ITI; Li et al. 2023, arXiv 2306.03341), as a
new checkpoint.

    python -m miniature.iti --out results/miniature-iti

On conflicts, we compare each head's output at the end of the passage's answer with that at the end
of the memorised answer. The heads that separate the two best are shifted along the difference of
the means. The shift is the same for every token, so it is stored as a bias of `o_proj`, as in the
checkpoints of ITI's authors."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import cli
from miniature.data import make_split
from model import Transformer
from tokenizer import Tokenizer

HEADS, STRENGTH = 4, 5.0  # heads to shift, and how far, in standard deviations
ITEMS, SEED = 128, 2  # the claims are tested on the items of seed 0


def make_shifts():
    """{(layer, head): shift [K]}."""
    items, fit = (
        make_split("conflict", ITEMS, SEED),
        ITEMS // 2,
    )  # the other half measures the accuracy
    right = head_outputs([f"{item.prompt} {item.answer}" for item in items])  # [items, L, H, K]
    wrong = head_outputs([f"{item.prompt} {item.memory}" for item in items])
    direction = F.normalize(right[:fit].mean(0) - wrong[:fit].mean(0), dim=-1)  # [L, H, K]
    right, wrong = (right * direction).sum(-1), (wrong * direction).sum(-1)  # [items, L, H]
    middle = (right[:fit].mean(0) + wrong[:fit].mean(0)) / 2
    accuracy = (right > middle)[fit:].float().mean(0) + (wrong <= middle)[fit:].float().mean(
        0
    )  # times two
    deviation = torch.cat([right[:fit], wrong[:fit]]).std(0)
    best = accuracy.flatten().argsort(descending=True)[:HEADS].tolist()
    heads = [divmod(i, accuracy.shape[1]) for i in best]
    return {head: STRENGTH * deviation[head] * direction[head] for head in heads}


@torch.inference_mode()
def head_outputs(texts):
    """Output of each of the miniature's heads at the last token, before the output projection:
    [texts, L, H, K]."""
    model, tokenizer = (
        Transformer.load(cli.MINIATURE, dtype=torch.float32),
        Tokenizer.load(cli.MINIATURE),
    )
    outputs, c = [], model.config
    for layer in model.layers:
        layer.attn.o.register_forward_pre_hook(
            lambda _, args: outputs.append(args[0].flatten(0, -2)[-1])
        )
    for text in texts:
        model(torch.tensor([tokenizer.encode(text)]))
    return torch.stack(outputs).view(len(texts), c.n_layers, c.n_heads, c.head_dim)


def write(folder, shifts):
    """Write the miniature with biases on q, k, v (zeros) and o. shifts: {(layer, head): [K]}."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in cli.MINIATURE.glob("*.json"):
        text = path.read_text(encoding="utf-8").replace(
            '"attention_bias": false', '"attention_bias": true'
        )
        (folder / path.name).write_text(text, encoding="utf-8")
    weights = load_file(cli.MINIATURE / "model.safetensors")
    for name in [name for name in weights if "self_attn" in name]:
        weights[name.replace("weight", "bias")] = weights[name].new_zeros(len(weights[name]))
    for (layer, head), shift in shifts.items():
        name = f"model.layers.{layer}.self_attn.o_proj"
        columns = weights[f"{name}.weight"].unflatten(1, (-1, len(shift)))[:, head]
        weights[f"{name}.bias"] += (columns.float() @ shift).to(columns.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main():
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the new checkpoint"
    )
    args, shifts = parser.parse_args(), make_shifts()
    write(args.out, shifts)
    print("shifted heads " + ", ".join(f"{layer}-{head}" for layer, head in shifts))


if __name__ == "__main__":
    sys.exit(cli.run(main))
