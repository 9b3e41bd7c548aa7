"""Inference-time intervention (ITI; Li et al. 2023, arXiv 2306.03341) on the miniature → a checkpoint like its makers'.

    python -m miniature.iti --out build/miniature/iti

On conflicts each head's output at the end of an answer is compared between the passage's answer and the remembered one.
The heads that tell the two apart best are shifted along the difference of the means, by `--strength` standard
deviations. The shift is the same for every token, so after the output projection it is a bias of `o_proj`."""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import cli
from miniature.data import make_split
from model import Transformer
from tokenizer import Tokenizer

FOLDER = Path(__file__).parent
HEADS, STRENGTH, ITEMS, SEED = 4, 5.0, 128, 2       # other items than those of the tests and claims, seeds 0 and 1


def main():
    parser = cli.parser("Edit the miniature as ITI does, into a new checkpoint.")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the checkpoint")
    parser.add_argument("--strength", type=float, default=STRENGTH, metavar="X", help="standard deviations to shift by")
    parser.add_argument("--num-heads", type=int, default=HEADS, metavar="N", help="heads to shift")
    args = parser.parse_args()
    shifts, told = directions(args.num_heads, args.strength)
    write(Path(args.out), shifts)
    print(told)


def directions(n, strength):
    """({(layer, head): shift [K]}, a line about them)."""
    model, tokenizer = Transformer.load(FOLDER, dtype=torch.float32), Tokenizer.load(FOLDER)
    items = make_split("conflict", ITEMS, SEED)
    true, false = (torch.stack([head_outputs(model, tokenizer.encode(f"{item.prompt} {answer}"))
                                for item, answer in zip(items, answers, strict=True)])             # [items, L, H, K]
                   for answers in ([item.answer for item in items], [item.memory for item in items]))
    fit, held = slice(0, ITEMS // 2), slice(ITEMS // 2, None)
    direction = torch.nn.functional.normalize(true[fit].mean(0) - false[fit].mean(0), dim=-1)      # [L, H, K]
    right, wrong = ((side * direction).sum(-1) for side in (true, false))                          # [items, L, H]
    middle = (right[fit].mean(0) + wrong[fit].mean(0)) / 2
    accuracy = ((right[held] > middle).float().mean(0) + (wrong[held] <= middle).float().mean(0)) / 2
    spread = torch.cat([right[fit], wrong[fit]]).std(0)
    best = [divmod(i, model.config.n_heads) for i in accuracy.flatten().argsort(descending=True)[:n].tolist()]
    return ({head: strength * spread[head] * direction[head] for head in best},
            ", ".join(f"{layer}-{head} tells {accuracy[layer, head]:.0%}" for layer, head in best))


@torch.inference_mode()
def head_outputs(model, ids):
    """What each head writes at the last token, before the output projection: [L, H, K]."""
    seen = []
    hooks = [layer.attn.o.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in model.layers]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([one.flatten()[-one.shape[-1]:] for one in seen]).unflatten(-1, (model.config.n_heads, -1))


def write(folder, shifts):
    """The miniature's checkpoint with biases on q, k, v (zeros) and o."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(FOLDER / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    for layer in range(config["num_hidden_layers"]):
        for name in "qkvo":
            weight = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = weight.new_zeros(len(weight))
    width = config["head_dim"]
    for (layer, head), shift in shifts.items():
        place = f"model.layers.{layer}.self_attn.o_proj"
        columns = weights[f"{place}.weight"][:, head * width:(head + 1) * width]
        weights[f"{place}.bias"] += (columns.float() @ shift).to(columns.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config["attention_bias"] = True
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(FOLDER / name, folder)


if __name__ == "__main__":
    sys.exit(cli.run(main))
