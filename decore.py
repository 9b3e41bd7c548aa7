"""DeCoRe: Decoding by Contrasting Retrieval Heads (Gema et al. 2024, arXiv 2410.18860).

A few attention heads, the retrieval heads, copy tokens out of the context. With those heads masked,
the model stops reading and starts making things up. DeCoRe decodes from

    p(x_t | x_<t)  ∝  exp[(1 + α) log p_base(x_t | x_<t) − α log p_masked(x_t | x_<t)]   (Eq. 7)
    α = H(x_t) = −Σ p_base log p_base     (DeCoRe entropy; a constant α is DeCoRe static)   (Eq. 8)

and so pushes the text towards what the context says. Base and masked model are two rows of one
pass: see model.py.

    R rows (0 base, 1 masked)   B prompts   T new tokens   A answers to score
    L layers   H heads   V vocabulary
"""

import math
import runpy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from runtime.checks import (
    check_answers,
    check_finite,
    check_generation,
    check_heads,
    check_method,
    is_batch,
    unpadded,
)
from runtime.graph import recorded

METHODS = ("greedy", "masked", "decore-static", "decore-entropy")
SCORED_AT_ONCE = 512  # answer tokens per pass in `score`


def contrast(base, other, alpha):
    """The exponent of Eq. 7. Log-probabilities [B, T, V], alpha [B, T] → [B, T, V], all float32."""
    alpha = alpha[..., None]
    return (1 + alpha) * base - alpha * other


def entropy(log_p):
    """Shannon entropy over the last axis, in nats (Eq. 8).

    log_p: float32 log-probabilities, [..., V] → [...]."""
    return -(log_p.exp() * log_p).sum(-1)


@torch.inference_mode()
def decore(model, prompts, heads, n):
    """DeCoRe entropy for B prompts, lists of ids. Yields, n times, each prompt's next token and its
    α, [B, 1] each.

    `generate` gives the same tokens; it adds other methods, end tokens, CUDA graphs and checks."""
    head_mask = make_head_mask(
        [[], heads], model
    )  # row 0: all heads; row 1: without the retrieval heads
    cache = model.new_cache([len(p) - 1 for p in prompts], n, rows=2)
    model.prefill(
        pad([p[:-1] for p in prompts], model.device), cache
    )  # unmasked, once for both rows
    token = pad([p[-1:] for p in prompts], model.device)  # masking starts here
    for _ in range(n):
        base, masked = model(token, cache, head_mask).log_softmax(-1)  # one pass: [B, 1, V] each
        alpha = entropy(base)  # Eq. 8
        token = contrast(base, masked, alpha).argmax(-1)  # Eq. 7
        yield token, alpha


# ---------------------------------------------------------- the same loop, with methods and options


class Step(NamedTuple):
    """Scores of the token that follows each of T tokens of B texts."""

    scores: torch.Tensor  # of the next token, [B, T, V] float32; decoding takes the argmax
    base: torch.Tensor  # log p_base, [B, T, V]; for `masked`, of the masked row
    other: torch.Tensor  # log p that is subtracted, [B, T, V]; base if there is none
    alpha: torch.Tensor  # α as applied, [B, T]
    entropy: torch.Tensor  # H of base in nats, neither scaled nor capped, [B, T]


class Session:
    """Prompts in a model's cache, and the R rows of one pass that continue them.

    capacity: tokens that each text can still take, the prompt's last one included. rows: for each
    row, the heads to mask. All prompt tokens but the last are prefilled, unmasked and once for all
    rows; mask_prompt masks the heads there too, and needs a single row. on_layer: as in
    `Transformer.prefill`."""

    def __init__(
        self, model, prompts, capacity, rows=((),), mask="output", mask_prompt=False, on_layer=None
    ):
        self.model, self.mask = model, mask
        head_mask = make_head_mask(rows, model)
        self.head_mask = head_mask if (head_mask == 0).any() else None
        self.cache = model.new_cache([len(p) - 1 for p in prompts], capacity, len(rows))
        ids = pad([p[:-1] for p in prompts], model.device)
        model.prefill(ids, self.cache, self.head_mask if mask_prompt else None, mask, on_layer)

    def logits(self, tokens):
        """Append tokens [B, T] to the texts → logits of the next token after each, [R, B, T, V]
        float32."""
        return self.model(tokens.to(self.model.device), self.cache, self.head_mask, self.mask)


class DeCoRe:
    """Decodes by one of METHODS. Like every decoder, it has `sessions` and `step`.

    capacity: as in `Session`. heads: (layer, head) pairs to mask. alpha: α of decore-static.
    alpha_cap: α = min(α, cap). scale_alpha: α = H / ln V. mask: "output" (Eq. 4 and 5) or "query"
    (the published runs).
    mask_prompt: mask at every position, not only from the last prompt token on. amateur: a smaller
    model of the same vocabulary, with amateur_heads masked, in place of the masked row (DeCoRe
    entropy-lite)."""

    def __init__(
        self,
        model,
        prompts,
        capacity,
        method="decore-entropy",
        heads=None,
        alpha=0.5,
        alpha_cap=None,
        scale_alpha=False,
        mask="output",
        mask_prompt=False,
        amateur=None,
        amateur_heads=None,
    ):
        check_method(method, METHODS, heads, amateur, amateur_heads)
        self.method, self.alpha, self.alpha_cap = method, alpha, alpha_cap
        self.unit = math.log(model.config.vocab_size) if scale_alpha else 1
        rows = {"greedy": [[]], "masked": [heads]}.get(method, [[], heads])
        if amateur:
            passes = [(model, [[]]), (amateur, [amateur_heads])]
        elif mask_prompt:
            passes = [(model, [row]) for row in rows]  # a cache each: the prompts' keys differ too
        else:
            passes = [(model, rows)]  # rows of one pass
        self.sessions = [
            Session(m, prompts, capacity, rows, mask, mask_prompt) for m, rows in passes
        ]

    def step(self, tokens):
        """Append tokens [B, T] to the texts → their `Step`.

        The first tokens are the prompts' last ones."""
        logits = torch.cat([session.logits(tokens).to(tokens.device) for session in self.sessions])
        log_p = logits.log_softmax(-1)  # [R, B, T, V]
        base, other = log_p[0], log_p[-1]  # the same if R is 1
        h = entropy(base)
        if self.method == "decore-entropy":
            alpha = h / self.unit  # Eq. 8
        else:
            alpha = torch.full_like(h, self.alpha if self.method == "decore-static" else 0)
        if self.alpha_cap is not None:
            alpha = alpha.clamp(max=self.alpha_cap)
        return Step(contrast(base, other, alpha), base, other, alpha, h)  # Eq. 7


def decode(step, token, n):
    """The loop: n greedy steps from the prompts' last tokens [B, 1] on.

    Yields the next token [B, 1] and its Step."""
    for _ in range(n):
        result = step(token)
        token = result.scores.argmax(-1)
        yield token, result


@dataclass
class Generation:
    ids: list = field(default_factory=list)  # new tokens, the end token included
    alphas: list = field(default_factory=list)  # α as applied at each of them
    entropies: list = field(
        default_factory=list
    )  # H of the base row in nats, neither scaled nor capped
    stop: str | None = None  # "eos", "length", or "stop" if `on_token` ended the text


@torch.inference_mode()
def generate(
    model,
    ids=None,
    method="decore-entropy",
    max_new_tokens=64,
    eos_ids=None,
    on_token=None,
    graph=None,
    decoder=DeCoRe,
    attention_mask=None,
    input_ids=None,
    **settings,
):
    """Decode after one prompt (a list of ints → one Generation) or several (a list of lists → a
    list), as one batch.

    eos_ids: ids that end a text; None: the checkpoint's own, (): none. on_token(b, token, entropy)
    is called for each token and ends text b by returning True. graph: record a step as a CUDA
    graph; None: if the model can. decoder: `DeCoRe` or one of paper/decoders.py. attention_mask: 0
    at padding. input_ids: ids, as tokenizers of transformers call them. settings: the decoder's
    arguments, such as heads and alpha."""
    ids = unpadded(ids, attention_mask, input_ids)
    prompts, eos_ids, limits = check_generation(model, ids, max_new_tokens, eos_ids, settings)
    decoder = decoder(model, prompts, max(limits), method, **settings)
    last, out = pad([p[-1:] for p in prompts], model.device), [Generation() for _ in prompts]
    graph = (
        all(session.model.can_record for session in decoder.sessions) if graph is None else graph
    )
    step = recorded(decoder, last) if graph else decoder.step
    for token, (scores, _, _, alpha, h) in decode(step, last, max(limits)):
        score = scores.gather(-1, token[..., None])[..., 0]
        numbers = torch.stack([token.float(), score, alpha, h], -1)[
            :, 0
        ].tolist()  # [B][4], on the host
        for b, g in enumerate(out):
            if g.stop:
                continue
            token_id, score, alpha, h = numbers[b]
            check_finite(score + h, model)
            g.ids.append(int(token_id))
            g.alphas.append(alpha)
            g.entropies.append(h)
            ended = on_token is not None and on_token(b, int(token_id), h) is True
            g.stop = (
                "eos"
                if token_id in eos_ids
                else "stop"
                if ended
                else "length"
                if len(g.ids) == limits[b]
                else None
            )
        if all(g.stop for g in out):
            break
    return out if is_batch(ids) else out[0]


@torch.inference_mode()
def score(
    model,
    prompt_ids,
    answer_ids,
    method="decore-entropy",
    renormalise=True,
    return_greedy=False,
    decoder=DeCoRe,
    allowed=None,
    attention_mask=None,
    **settings,
):
    """Log-probability of an answer after a prompt, in nats, summed over its tokens; of several
    answers, a list.

    The answers are a batch that shares one prefill. Heads are masked at every position, as in the
    published multiple-choice runs. renormalise: apply log-softmax to the contrasted scores, so that
    they are log-probabilities.
    return_greedy: return pairs of the sum and whether greedy decoding gives the answer. allowed:
    Step → bool [A, T, V], the tokens that greedy decoding may choose. attention_mask: of the
    prompt. settings: as in `generate`."""
    prompt_ids = unpadded(prompt_ids, attention_mask)
    prompt, answers = check_answers(model, prompt_ids, answer_ids, settings)
    settings |= dict(mask_prompt=True) if decoder is DeCoRe else {}
    decoder = decoder(model, [prompt], max(map(len, answers)), method, **settings)
    for session in decoder.sessions:
        session.cache = session.cache.repeat(len(answers))
    ids = pad(answers, model.device)  # [A, T]
    before = pad(
        [prompt[-1:] + answer[:-1] for answer in answers], model.device
    )  # the token before each
    values, greedy, size = [], [], max(1, SCORED_AT_ONCE // len(answers))
    for part, tokens in zip(ids.split(size, 1), before.split(size, 1), strict=True):
        result = decoder.step(tokens)
        scores = result.scores
        greedy.append(
            (scores.where(allowed(result), -math.inf) if allowed else scores).argmax(-1) == part
        )
        scores = scores.log_softmax(-1) if renormalise else scores
        values.append(scores.gather(-1, part[..., None])[..., 0])
    out = []
    for answer, row, same in zip(
        answers, torch.cat(values, 1).tolist(), torch.cat(greedy, 1).tolist(), strict=True
    ):
        total = math.fsum(row[: len(answer)])
        check_finite(total, model)
        out.append((total, all(same[: len(answer)])) if return_greedy else total)
    return out if is_batch(answer_ids) else out[0]


def make_head_mask(rows, model):
    """The heads to mask in each row, (layer, head) pairs or "layer-head" → [R, L, H] of 0 and 1."""
    head_mask = torch.ones(len(rows), model.config.n_layers, model.config.n_heads)
    for row, heads in enumerate(rows):
        for layer, head in check_heads(heads, model):
            head_mask[row, layer, head] = 0
    return head_mask.to(model.device)


def pad(sequences, device="cpu"):
    """Lists of ints → [B, T], padded on the right with 0."""
    longest = max(map(len, sequences))
    return torch.tensor(
        [s + [0] * (longest - len(s)) for s in sequences], dtype=torch.long, device=device
    )


if __name__ == "__main__":
    runpy.run_module("program", run_name="__main__")  # decodes from the command line
