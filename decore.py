"""DeCoRe: Decoding by Contrasting Retrieval Heads (Gema et al. 2024, arXiv 2410.18860).

A few attention heads, the retrieval heads, copy tokens out of the context. With those heads masked, the model stops
reading and starts making things up. DeCoRe decodes from

    p(x_t | x_<t)  ∝  exp[(1 + α) log p_base(x_t | x_<t) − α log p_masked(x_t | x_<t)]                  (Eq. 7)
    α = H(x_t) = −Σ p_base log p_base        (DeCoRe entropy; a constant α is DeCoRe static)            (Eq. 8)

and so pushes the text towards what the context says. Base and masked model are two rows of one pass: see model.py.

    R rows (0 base, 1 masked)   B prompts   T new tokens   A answers to score   V vocabulary   L layers   H heads
"""

import math
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from model import Cache
from runtime.checks import check_answers, check_generation, check_heads, check_method, is_batch
from runtime.graph import on_host, recorded
from runtime.lookup import look_up
from tokenizer import special_ids

METHODS = ("greedy", "masked", "decore-static", "decore-entropy")
SCORED_AT_ONCE = 512                    # answer tokens per pass in `score`


def contrast(base, other, alpha):
    """The exponent of Eq. 7. Log-probabilities [B, T, V], alpha [B, T] → [B, T, V], all float32."""
    alpha = alpha[..., None]
    return (1 + alpha) * base - alpha * other


def entropy(log_p):
    """Shannon entropy over the last axis, in nats (Eq. 8). log_p: float32 log-probabilities, [..., V] → [...]."""
    return -(log_p.exp() * log_p).sum(-1)


class Step(NamedTuple):
    """Scores of the token that follows each of T tokens of B texts."""
    scores: torch.Tensor                # of the next token, [B, T, V] float32; decoding takes the argmax
    base: torch.Tensor                  # log p_base, [B, T, V]; for `masked`, of the masked row
    other: torch.Tensor                 # log p that is subtracted, [B, T, V]; base if there is none
    alpha: torch.Tensor                 # α as applied, [B, T]
    entropy: torch.Tensor               # H of base in nats, neither scaled nor capped, [B, T]


class Session:
    """Prompts in a model's cache, and the R rows of one pass that continue them.

    masked: for each row, the heads to mask. The prompts are prefilled unmasked, once for all rows; mask_prompt masks
    them too, and needs a single row. The last token of a prompt is not prefilled: the first step reads it, so masking
    starts with it. on_layer: as in `Transformer.prefill`."""

    def __init__(self, model, prompts, capacity, masked=((),), mask="output", mask_prompt=False, on_layer=None):
        self.model, self.mask = model, mask
        self.head_mask = make_head_mask(masked, model).to(model.device, model.dtype) if any(masked) else None
        self.cache = Cache(model, [len(p) - 1 for p in prompts], capacity, len(masked))
        self.unread = torch.tensor([p[-1:] for p in prompts], device=model.device)
        self.extra = []                 # a method's tensors that depend on the prompts, for CUDA graphs
        ids = pad([p[:-1] for p in prompts]).to(model.device)
        model.prefill(ids, self.cache, self.head_mask if mask_prompt else None, mask, on_layer)

    def logits(self, tokens=None):
        """Append tokens [B, T] to the texts → logits of the next token after each, [R, B, T, V] float32.

        The first call also reads the prompts' last tokens, [R, B, 1 + T, V], and needs no tokens."""
        return self.model(self.ids_to_read(tokens), self.cache, self.head_mask, self.mask)

    def ids_to_read(self, tokens):
        ids = [x.to(self.model.device) for x in (self.unread, tokens) if x is not None]
        self.unread = None
        return torch.cat(ids, 1)

    def repeat(self, n):
        """Continue each prompt in n ways. To be called before the first step."""
        self.unread, self.cache = self.unread.repeat_interleave(n, 0), self.cache.repeat(n)


def open_decore(model, prompts, capacity, method="decore-entropy", heads=None, alpha=0.5, alpha_cap=None,
                scale_alpha=False, mask="output", mask_prompt=False, amateur=None, amateur_heads=None):
    """Prefill the prompts. Returns `step` and the sessions that it advances.

    step(tokens [B, T]) appends tokens to the texts and returns a `Step`. The first step reads the prompts' last tokens
    before them, so decoding begins with step().

    capacity: new tokens per text. method: one of METHODS. heads: (layer, head) pairs to mask. alpha: α of
    decore-static. alpha_cap: α = min(α, cap). scale_alpha: α = H / ln V. mask: "output" (Eq. 4 and 5) or "query" (the
    published runs). mask_prompt: mask at every position, not only from the last prompt token on. amateur: a smaller
    model of the same vocabulary, with amateur_heads masked, in place of the masked row (DeCoRe entropy-lite)."""
    check_method(method, METHODS, heads, amateur, amateur_heads)

    def open_session(*masked, of=model):                                    # a row for each list of heads
        return Session(of, prompts, capacity, masked, mask, mask_prompt)

    if method == "greedy":
        sessions = [open_session([])]
    elif method == "masked":
        sessions = [open_session(heads)]
    elif amateur:
        sessions = [open_session([]), open_session(amateur_heads, of=amateur)]
    elif mask_prompt:                                                       # two caches: the prompts' keys differ too
        sessions = [open_session([]), open_session(heads)]
    else:
        sessions = [open_session([], heads)]                                # two rows of one pass

    def step(tokens=None):
        logits = torch.cat([session.logits(tokens).to(model.device) for session in sessions])
        log_p = logits.log_softmax(-1)                                                  # [R, B, T, V]
        base, other = log_p[0], log_p[-1]                                               # the same if R is 1
        h = entropy(base)
        if method == "decore-entropy":
            a = h / math.log(model.config.vocab_size) if scale_alpha else h             # Eq. 8
        else:
            a = torch.full_like(h, alpha if method == "decore-static" else 0)
        a = a if alpha_cap is None else a.clamp(max=alpha_cap)
        return Step(contrast(base, other, a), base, other, a, h)                        # Eq. 7

    return step, sessions


def decode(step, n):
    """The loop: n greedy steps → (token [B, 1], Step) of each."""
    token = None                                        # the first step reads the prompts' last tokens
    for _ in range(n):
        result = step(token)
        token = result.scores.argmax(-1)
        yield token, result


@dataclass
class Generation:
    ids: list = field(default_factory=list)             # new tokens, the end token included
    alphas: list = field(default_factory=list)          # α as applied at each of them
    entropies: list = field(default_factory=list)       # H of the base row in nats, neither scaled nor capped
    stop: str | None = None                             # "eos", "length", or "stop" if `on_token` ended the text


@torch.inference_mode()
def generate(model, ids, method="decore-entropy", max_new_tokens=64, eos_ids=None, on_token=None, lookup=0, graph=None,
             opener=open_decore, **settings):
    """Decode after one prompt (a list of ints → one Generation) or several (a list of lists → a list), as one batch.

    eos_ids: ids that end a text; None: the checkpoint's own, (): none. on_token(b, token, entropy) is called for each
    token and ends text b by returning True. lookup: number of tokens to copy from the text and check in each pass.
    graph: record a step as a CUDA graph; None: on a GPU. Both affect speed, not tokens. opener: `open_decore` or one of
    baselines.py. settings: its arguments, such as heads and alpha."""
    eos_ids = special_ids(model.folder)[1] if eos_ids is None else eos_ids
    prompts, eos_ids, limits, settings = check_generation(model, ids, max_new_tokens, eos_ids, lookup, settings)
    step, sessions = opener(model, prompts, max(limits) + lookup, method, **settings)
    if graph or graph is None and model.device.type == "cuda":
        step = recorded(step, sessions, (opener, method, settings))
    out = [Generation() for _ in prompts]
    if lookup:
        steps = look_up(step, sessions, prompts, out, max_new_tokens, lookup)
    else:
        steps = on_host(decode(step, max(limits)))
    for new in steps:                                   # new[b]: the new tokens of text b; several only with lookup
        for b, g in enumerate(out):
            for token, score, alpha, h in new[b]:
                if g.stop:
                    break
                if not (math.isfinite(score) and math.isfinite(h)):
                    raise ValueError(f"the model's logits are not finite at new token {len(g.ids) + 1} of text "
                                     f"{b + 1}; try float32 or bfloat16, or look for damaged weights")
                g.ids.append(int(token))
                g.alphas.append(alpha)
                g.entropies.append(h)
                ended = on_token is not None and on_token(b, int(token), h) is True
                g.stop = ("eos" if token in eos_ids else "stop" if ended
                          else "length" if len(g.ids) == limits[b] else None)
        if all(g.stop for g in out):
            break
    return out if is_batch(ids) else out[0]


@torch.inference_mode()
def score(model, prompt_ids, answer_ids, method="decore-entropy", renormalise=True, return_greedy=False,
          opener=open_decore, allowed=None, **settings):
    """Log-probability of an answer after a prompt, in nats, summed over its tokens; of several answers, a list.

    The answers are a batch that shares one prefill. Heads are masked at every position, as in the published
    multiple-choice runs. renormalise: apply log-softmax to the contrasted scores, so that they are log-probabilities.
    return_greedy: return pairs of the sum and whether greedy decoding gives the answer. allowed: Step → bool [A, T, V],
    the tokens that greedy decoding may choose. settings: as in `generate`."""
    bos = special_ids(model.folder)[0]
    prompt, answers, settings = check_answers(model, prompt_ids, answer_ids, bos, settings)
    if opener is open_decore:
        settings = settings | dict(mask_prompt=True)
    step, sessions = opener(model, [prompt], max(map(len, answers)), method, **settings)
    for session in sessions:
        session.repeat(len(answers))
    ids = pad(answers).to(model.device)                                                                 # [A, T]
    values, greedy, size = [], [], max(1, SCORED_AT_ONCE // len(answers))
    for start in range(0, ids.shape[1], size):
        part = ids[:, start:start + size]
        # The scores of a token come from reading the one before it; the first step reads the prompt's last by itself.
        result = step(ids[:, max(0, start - 1):start - 1 + part.shape[1]])
        scores = result.scores
        greedy.append((scores.where(allowed(result), -math.inf) if allowed else scores).argmax(-1) == part)
        scores = scores.log_softmax(-1) if renormalise else scores
        values.append(scores.gather(-1, part[..., None])[..., 0])
    out = []
    for answer, row, same in zip(answers, torch.cat(values, 1).tolist(), torch.cat(greedy, 1).tolist(), strict=True):
        total = math.fsum(row[:len(answer)])
        if math.isnan(total):
            raise ValueError(f"{model.name} gives logits that are not finite; try float32 or bfloat16")
        out.append((total, all(same[:len(answer)])) if return_greedy else total)
    return out if is_batch(answer_ids) else out[0]


def make_head_mask(rows, model):
    """One list of heads to mask per row, (layer, head) pairs or "layer-head" → [R, L, H] of 0 and 1."""
    head_mask = torch.ones(len(rows), model.config.n_layers, model.config.n_heads)
    for row, heads in enumerate(rows):
        for layer, head in check_heads(heads, model):
            head_mask[row, layer, head] = 0
    return head_mask


def pad(rows):
    """Lists of ints → [B, T], padded on the right with 0."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.long)


def main():
    from cli.program import main
    from heads import choose_heads
    from heads.sources import find_sources
    main("Decode with DeCoRe: contrast a model with itself, its retrieval heads masked.", generate, METHODS,
         "decore-entropy", ("greedy", "masked"), choose_heads, find_sources, open_decore)


if __name__ == "__main__":
    from cli import run

    sys.exit(run(main))
