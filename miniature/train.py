"""Train the miniature: a Llama of 1.75 million parameters that copies with a few heads and remembers 320 facts.

    python -m miniature.train --out miniature/checkpoint
    python -m miniature.train --amateur --out miniature/amateur

One CPU thread, about 25 minutes and 5. Writes the layout of any Llama checkpoint."""

import itertools
import json
import sys
import time
from bisect import bisect_right
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

import cli
from decore import make_head_mask
from miniature import data
from model import Transformer
from runtime.config import Config
from runtime.weights import named_tensors

BOS, EOS = "<|begin|>", "<|end|>"
VOCAB = 640
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 192,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 24, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    "torch_dtype": "float16",
}
# The amateur of contrastive decoding and of DeCoRe entropy-lite: a quarter of the parameters and less training, since
# with 2,400 steps it knew as much as the miniature.
AMATEUR_STEPS = 1000
AMATEUR = CONFIG | {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, WARMUP, DECAY = 2800, 60, 0.4                          # decay: linear, over the last share of the steps
# From which step on: the mixture of documents, and the most facts and filler sentences of a passage. Copying from short
# passages comes first: with long ones it had not begun after 650 steps, with these it begins at 120.
STAGES = ((0, data.COPYING, (1, 1)), (250, data.COPYING, (3, 2)), (600, data.EVERYTHING, (5, 4)))
# From this step on one head copies alone: the last layer's other heads start anew, and in every step each head but that
# one is silent with probability SILENT. Left to itself, training gives three heads the same work.
ALONE, SILENT = 1200, 0.1
ROWS, LENGTH = 8, 256
MUON = {"lr": 0.015, "momentum": 0.95, "weight_decay": 0.05}  # matrices
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
TEXT_WEIGHT = 0.05                                            # of the loss outside answers, where it is 1


def make_tokenizer(world, n_documents=10_000):
    """A byte-level BPE; a document is BOS, text, EOS, and encoding adds the BOS."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    documents = itertools.islice(data.documents(world, data.EVERYTHING, "tokenizer"), n_documents)
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[BOS, EOS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((f"{item.prompt} {item.answer}." for _, _, item in documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def batches(tokenizer, documents):
    """Endless (tokens, weights), [ROWS, LENGTH + 1] each. A row holds whole documents but for its last."""
    while True:
        batch = []
        while len(batch) < ROWS:
            row, weights = [], []
            while len(row) < LENGTH + 1:
                _, _, item = next(documents)
                prompt = tokenizer.encode(item.prompt).ids
                answer = tokenizer.encode(f" {item.answer}.{EOS}", add_special_tokens=False).ids
                row += prompt + answer
                weights += [0.0] + [TEXT_WEIGHT] * (len(prompt) - 1) + [1.0] * len(answer)
            batch.append((row[: LENGTH + 1], weights[: LENGTH + 1]))
        tokens, weights = zip(*batch, strict=True)
        yield torch.tensor(tokens), torch.tensor(weights)


def loss_of(logits, tokens, weights):
    """Weighted mean cross-entropy, and the share of answer tokens that the model would choose."""
    target, weights = tokens[:, 1:], weights[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    right = (logits.argmax(-1) == target)[weights == 1].float().mean()
    return (losses * weights.flatten()).sum() / weights.sum(), right


@torch.no_grad()
def initialise(parameters, seed):
    """Normal matrices and norms of one. parameters: checkpoint name → tensor; the order of names fixes the draws."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(parameters.items()):
        if parameter.ndim == 2:
            parameter.normal_(0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)


class Muon:
    """Momentum whose update is a matrix with all singular values near one (Jordan et al. 2024), in float32."""

    def __init__(self, matrices, lr, momentum, weight_decay):
        self.matrices, self.lr, self.momentum, self.weight_decay = matrices, lr, momentum, weight_decay
        self.velocity = [torch.zeros_like(m) for m in matrices]

    @torch.no_grad()
    def step(self, gradients, scale):
        for matrix, gradient, velocity in zip(self.matrices, gradients, self.velocity, strict=True):
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(velocity, self.momentum))
            rows, columns = matrix.shape
            matrix.mul_(1 - scale * self.lr * self.weight_decay)
            matrix.sub_(update, alpha=scale * self.lr * max(1, rows / columns) ** 0.5)


def orthogonal(x, steps=5):
    """Newton-Schulz iteration towards U V^T of x = U S V^T; the coefficients are Jordan's."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def schedule(step, steps):
    """The learning rates' factor: up over WARMUP steps, level, then linearly to zero."""
    return min(1, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))


@torch.no_grad()
def needed_head(model, tokens, weights):
    """The head of the last layer whose silence raises the loss most."""
    last = model.config.n_layers - 1
    head_mask = make_head_mask([[(last, head)] for head in range(model.config.n_heads)], model)
    rows = model(tokens[:, :-1], None, head_mask)                                   # [H, B, T, V]
    return int(torch.stack([loss_of(logits, tokens, weights)[0] for logits in rows]).argmax())


@torch.no_grad()
def renew_others(model, kept, generator):
    """Queries and outputs of the last layer's other heads as at the start."""
    attn, K = model.layers[-1].attn, model.config.head_dim
    for head in range(model.config.n_heads):
        if head != kept:
            for weight in (attn.qkv.weight[head * K:(head + 1) * K], attn.o.weight[:, head * K:(head + 1) * K]):
                weight.normal_(0, 0.02, generator=generator)


def silence_others(model, kept, generator):
    """[1, L, H] of 0 and 1, at random; the last layer's head `kept` is never silent."""
    head_mask = (torch.rand(1, model.config.n_layers, model.config.n_heads, generator=generator) >= SILENT).float()
    head_mask[0, -1, kept] = 1
    return head_mask


def train(model, world, tokenizer, steps=STEPS, seed=0, report=print):
    """Train the model in place; `report` takes a line now and then, `save` has the weights in between."""
    initialise(named_tensors(model), seed)
    others = [p for name, p in model.named_parameters() if ".attn." not in name and ".mlp." not in name]
    muon, adamw = Muon(matrices_of(model), **MUON), torch.optim.AdamW(others, **ADAMW)
    stages = [batches(tokenizer, data.documents(world, mixture, f"{seed}/{first}", most))
              for first, mixture, most in STAGES]
    starts, clock, rights = [first for first, _, _ in STAGES], time.perf_counter(), []
    generator, head_mask = torch.Generator().manual_seed(seed), None
    for step in range(steps):
        tokens, weights = next(stages[bisect_right(starts, step) - 1])
        if step == ALONE:
            kept = needed_head(model, tokens, weights)
            renew_others(model, kept, generator)
        if step >= ALONE:
            head_mask = silence_others(model, kept, generator)
        logits = model(tokens[:, :-1], None, head_mask)
        loss, right = loss_of(logits[0] if head_mask is not None else logits, tokens, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = schedule(step, steps)
        adamw.param_groups[0]["lr"] = ADAMW["lr"] * scale
        adamw.step()
        muon.step(matrices_of(model, lambda parameter: parameter.grad), scale)
        model.zero_grad()
        rights.append(right.item())
        if step % 50 == 49:
            report(f"step {step + 1:5d}  loss {loss.item():.3f}  answer tokens right {sum(rights) / len(rights):.3f}  "
                   f"{time.perf_counter() - clock:5.0f} s")
            rights = []


def matrices_of(model, of=lambda parameter: parameter):
    """q, k, v, o, gate, up and down of every layer, each by itself."""
    return [part for name, part in sorted(named_tensors(model, of).items()) if "_proj" in name]


def save_config(folder, tokenizer, config=CONFIG):
    """Everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
                                  "model_max_length": LENGTH, "clean_up_tokenization_spaces": False},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def save_weights(folder, model):
    weights = {name: p.detach().half().contiguous() for name, p in named_tensors(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main():
    parser = cli.parser(__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint", help="folder to write")
    parser.add_argument("--amateur", action="store_true", help="the smaller model")
    parser.add_argument("--steps", type=cli.positive, help=f"(default: {STEPS}, of the amateur {AMATEUR_STEPS})")
    parser.add_argument("--seed", type=cli.number(int), default=0, help="of the weights and the order of the texts")
    parser.add_argument("--threads", type=cli.positive, default=1, help="of the processor")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    world = data.make_world()
    tokenizer = make_tokenizer(world)
    save_config(args.out, tokenizer, AMATEUR if args.amateur else CONFIG)
    model = Transformer(Config.from_checkpoint(args.out))

    def report(line):
        save_weights(args.out, model)
        print(line, file=sys.stderr, flush=True)

    train(model, world, tokenizer, args.steps or (AMATEUR_STEPS if args.amateur else STEPS), args.seed, report)
    save_weights(args.out, model)


if __name__ == "__main__":
    sys.exit(cli.run(main))
