"""Train the miniature: a Llama of 1.75 million parameters that copies with a few heads and
remembers 320 facts.

    python -m miniature.train --out miniature/checkpoint
    python -m miniature.train --amateur --out miniature/miniature-amateur

The configurations are those of the bundled models. On one CPU thread the model takes about 25
minutes and the amateur 3. The output is a Llama checkpoint in float16."""

import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from tqdm import trange

from cli.entry import run_program
from cli.options import MINIATURE, parser
from decore import make_head_mask
from miniature import data
from model import Transformer
from runtime.checkpoint import Checkpoint
from runtime.weights import named_tensors

BOS, EOS = "<|begin|>", "<|end|>"
VOCAB = 640
# The amateur of contrastive decoding and of DeCoRe entropy-lite has a quarter of the parameters. It
# also trains for fewer steps: after 2,400 it knew as much as the miniature.
AMATEUR_STEPS = 1000
STEPS, WARMUP, DECAY = 2800, 60, 0.4  # decay: linear, over the last share of the steps
# First step: mixture of documents, largest numbers of facts and of filler sentences in a passage.
# Short passages come first: the model then copies after 120 steps; with long passages it did not
# copy after 650.
STAGES = {0: (data.COPYING, (1, 1)), 250: (data.COPYING, (3, 2)), 600: (data.EVERYTHING, data.MOST)}
# From step ALONE on, one head of the last layer does the copying. The others are reinitialised, and
# every step masks each head except that one with probability MASKED. Without this, three heads
# learn the same work.
ALONE, MASKED = 1200, 0.1
BATCH, LENGTH = 8, 256
MUON = {"lr": 0.015, "momentum": 0.95, "weight_decay": 0.05}  # matrices
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
TEXT_WEIGHT = 0.05  # of the loss outside answers, where it is 1


def make_tokenizer():
    """Train a byte-level BPE. Encoding adds the BOS; a document is BOS, text, EOS."""
    tokenizer = ByteLevelBPETokenizer()
    documents = islice(data.documents(data.EVERYTHING, "tokenizer"), 10_000)
    tokenizer.train_from_iterator(
        (f"{item.prompt} {item.answer}." for item in documents),
        VOCAB,
        min_frequency=0,
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def batches(tokenizer, documents):
    """Yield tokens and how much the loss of each counts, [BATCH, LENGTH + 1] both.

    The last document is truncated."""
    while True:
        batch = []
        for _ in range(BATCH):
            text, counts = [], []
            while len(text) < LENGTH + 1:
                item = next(documents)
                prompt = tokenizer.encode(item.prompt).ids
                answer = tokenizer.encode(f" {item.answer}.{EOS}", add_special_tokens=False).ids
                text += prompt + answer
                counts += [0.0] + [TEXT_WEIGHT] * (len(prompt) - 1) + [1.0] * len(answer)
            batch.append((text[: LENGTH + 1], counts[: LENGTH + 1]))
        tokens, counts = zip(*batch)
        yield torch.tensor(tokens), torch.tensor(counts)


def loss_of(logits, tokens, counts):
    """Weighted mean cross-entropy."""
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * counts[:, 1:].flatten()).sum() / counts[:, 1:].sum()


@torch.no_grad()
def initialise(parameters):
    """Draw matrices from a normal distribution and set norms to one.

    parameters: checkpoint name → tensor."""
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(parameters.items()):  # the order fixes which numbers a matrix gets
        if parameter.ndim == 2:
            parameter.normal_(0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)


@torch.no_grad()
def muon_step(matrix, gradient, velocity, scale, a=3.4445, b=-4.7750, c=2.0315):
    """Momentum SGD whose update has all singular values near one (Jordan et al. 2024), in float32.

    The update is U V^T of the momentum U S V^T, approximated by five Newton-Schulz iterations."""
    rows, columns = matrix.shape
    if rows > columns:
        matrix, gradient, velocity = matrix.T, gradient.T, velocity.T
    rate = scale * MUON["lr"]
    velocity.lerp_(gradient, 1 - MUON["momentum"])
    matrix.mul_(1 - rate * MUON["weight_decay"])
    x = gradient.lerp(velocity, MUON["momentum"])
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    matrix.sub_(x, alpha=rate * max(1, rows / columns) ** 0.5)


@torch.no_grad()
def choose_copier(model, tokens, counts, generator):
    """The head of the last layer whose masking raises the loss most.

    Reinitialises the layer's other heads."""
    c, attn = model.config, model.layers[-1].attn
    head_mask = make_head_mask([[(c.n_layers - 1, head)] for head in range(c.n_heads)], model)
    rows = model(tokens[:, :-1], None, head_mask)  # [H, B, T, V]
    copier = int(torch.stack([loss_of(logits, tokens, counts) for logits in rows]).argmax())
    for head in range(c.n_heads):
        if head != copier:
            part = slice(head * c.head_dim, (head + 1) * c.head_dim)
            for weight in (attn.qkv.weight[part], attn.o.weight[:, part]):  # queries and outputs
                weight.normal_(0, 0.02, generator=generator)
    return copier


def train(model, tokenizer, steps):
    """Train the model in place."""
    initialise(named_tensors(model))
    others = [
        p for name, p in model.named_parameters() if ".attn." not in name and ".mlp." not in name
    ]
    adamw = torch.optim.AdamW(others, **ADAMW)
    matrices = {name: part for name, part in named_tensors(model).items() if "_proj" in name}
    velocities = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}
    generator = torch.Generator().manual_seed(0)
    head_mask = torch.ones(1, model.config.n_layers, model.config.n_heads)
    for step in trange(steps, unit="step", mininterval=10):
        if step in STAGES:
            mixture, most = STAGES[step]
            stage = batches(tokenizer, data.documents(mixture, f"0/{step}", most))
        tokens, counts = next(stage)
        if step == ALONE:
            copier = choose_copier(model, tokens, counts, generator)
        if step >= ALONE:
            head_mask = (torch.rand(head_mask.shape, generator=generator) >= MASKED).float()
            head_mask[0, -1, copier] = 1
        loss = loss_of(model(tokens[:, :-1], None, head_mask)[0], tokens, counts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(
            1, (step + 1) / WARMUP, (steps - step) / (DECAY * steps)
        )  # warm-up, constant, decay to zero
        adamw.param_groups[0]["lr"] = ADAMW["lr"] * scale
        adamw.step()
        gradients = named_tensors(model, lambda parameter: parameter.grad)
        for name, matrix in matrices.items():  # the separate matrices of fused ones
            muon_step(matrix, gradients[name], velocities[name], scale)
        model.zero_grad()


def main():
    p = parser(__doc__)
    p.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the checkpoint"
    )
    p.add_argument("--amateur", action="store_true", help="the smaller model")
    args = p.parse_args()
    folder = args.out
    bundled, steps = MINIATURE, STEPS
    if args.amateur:
        bundled, steps = bundled / "miniature-amateur", AMATEUR_STEPS
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (folder / name).write_text((bundled / name).read_text())
    model = Transformer(Checkpoint(folder).config)
    train(model, tokenizer, steps)
    weights = {name: p.detach().half().contiguous() for name, p in named_tensors(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    sys.exit(run_program(main))
