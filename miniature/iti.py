"""Edit the miniature by inference-time intervention (ITI; Li et al. 2023, arXiv 2306.03341), as a new checkpoint.

    python -m miniature.iti --out results/miniature-iti

On conflicts, we compare each head's output at the end of the passage's answer with that at the end of the memorised
answer. The heads that separate the two best are shifted along the difference of the means. The shift is the same for
every token, so it is stored as a bias of `o_proj`, as in the checkpoints of ITI's authors."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import cli
from miniature.data import make_split
from model import Transformer
from tokenizer import Tokenizer

HEADS, STRENGTH = 4, 5.0                # heads to shift, and how far, in standard deviations
ITEMS, SEED = 128, 2                    # the claims are tested on the items of seed 0


def main():
    parser = cli.parser(__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the new checkpoint")
    args = parser.parse_args()
    shifts, accuracies = directions()
    write(args.out, shifts)
    print(", ".join(f"{layer}-{head} separates {accuracies[layer, head]:.0%}" for layer, head in shifts))


def directions():
    """{(layer, head): shift [K]} of the best heads, and the accuracy of every head, [L, H]."""
    model, tokenizer = Transformer.load(cli.MINIATURE, dtype=torch.float32), Tokenizer.load(cli.MINIATURE)
    items = make_split("conflict", ITEMS, SEED)
    right, wrong = (torch.stack([head_outputs(model, tokenizer.encode(f"{item.prompt} {getattr(item, name)}"))
                                 for item in items]) for name in ("answer", "memory"))
    fit, held_out = slice(0, ITEMS // 2), slice(ITEMS // 2, None)                                  # of [items, L, H, K]
    direction = torch.nn.functional.normalize(right[fit].mean(0) - wrong[fit].mean(0), dim=-1)     # [L, H, K]
    right, wrong = (right * direction).sum(-1), (wrong * direction).sum(-1)                        # [items, L, H]
    middle = (right[fit].mean(0) + wrong[fit].mean(0)) / 2
    accuracy = ((right > middle)[held_out].float().mean(0) + (wrong <= middle)[held_out].float().mean(0)) / 2
    deviation = torch.cat([right[fit], wrong[fit]]).std(0)
    best = [divmod(i, model.config.n_heads) for i in accuracy.flatten().argsort(descending=True)[:HEADS].tolist()]
    return {head: STRENGTH * deviation[head] * direction[head] for head in best}, accuracy


@torch.inference_mode()
def head_outputs(model, ids):
    """Output of each head at the last token, before the output projection: [L, H, K]."""
    outputs = []
    hooks = [layer.attn.o.register_forward_pre_hook(lambda _, args: outputs.append(args[0])) for layer in model.layers]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([y.flatten()[-y.shape[-1]:] for y in outputs]).unflatten(-1, (model.config.n_heads, -1))


def write(folder, shifts):
    """Write the miniature with biases on q, k, v (zeros) and o. shifts: {(layer, head): [K]}."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in cli.MINIATURE.glob("*.json"):
        text = path.read_text(encoding="utf-8").replace('"attention_bias": false', '"attention_bias": true')
        (folder / path.name).write_text(text, encoding="utf-8")
    weights = load_file(cli.MINIATURE / "model.safetensors")
    for name in [name for name in weights if "self_attn" in name]:
        weights[name.replace("weight", "bias")] = weights[name].new_zeros(len(weights[name]))
    for (layer, head), shift in shifts.items():
        name = f"model.layers.{layer}.self_attn.o_proj"
        columns = weights[f"{name}.weight"].unflatten(1, (-1, len(shift)))[:, head]
        weights[f"{name}.bias"] += (columns.float() @ shift).to(columns.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    sys.exit(cli.run(main))
