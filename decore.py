"""DeCoRe: Decoding by Contrasting Retrieval Heads (Gema et al. 2024, arXiv 2410.18860).

A few attention heads, the retrieval heads, copy tokens out of the context. With those heads masked, the model stops
reading and starts making things up. DeCoRe decodes from

    p(x_t | x_<t)  ∝  exp[(1 + α) log p_base(x_t | x_<t) − α log p_masked(x_t | x_<t)]                  (Eq. 7)
    α = H(x_t) = −Σ p_base log p_base        (DeCoRe entropy; a constant α is DeCoRe static)            (Eq. 8)

and so pushes the text towards what the context says. Base and masked model are two rows of one pass: see model.py.

    R rows (0 base, 1 masked)   B batch   T new tokens   V vocabulary   L layers   H heads
"""

import math
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from runtime.checks import check_answers, check_generation, check_heads, is_batch


def contrast(base, other, alpha):
    """The exponent of Eq. 7. Log-probabilities [B, T, V], alpha [B, T] → [B, T, V], all float32."""
    alpha = alpha[..., None]
    return (1 + alpha) * base - alpha * other


def entropy(log_p):
    """Shannon entropy over the last axis, in nats (Eq. 8). log_p: float32 log-probabilities, [..., V] → [...]."""
    return -(log_p.exp() * log_p).sum(-1)


def choose_alpha(method, h, alpha=0.5, scale=1.0, cap=None):
    """α of each position: from the entropy h [B, T] of the base row (Eq. 8), a constant, or 0 for no contrast."""
    if method == "decore-entropy":
        a = h / scale
    else:
        a = torch.full_like(h, alpha if method == "decore-static" else 0)
    return a if cap is None else a.clamp(max=cap)


class Step(NamedTuple):
    scores: torch.Tensor                # what is decoded from, [B, T, V] float32
    base: torch.Tensor                  # log p_base, [B, T, V]; of the row decoded for `masked`
    other: torch.Tensor                 # log p of what base is contrasted with, [B, T, V]; for greedy and masked, base
    alpha: torch.Tensor                 # α as applied, [B, T]
    entropy: torch.Tensor               # H of the base row in nats, neither scaled nor capped, [B, T]


def open_decore(model, prompts, capacity, method="decore-entropy", heads=None, alpha=0.5, alpha_cap=None,
                scale_alpha=False, mask="output", mask_prompt=False, amateur=None, amateur_heads=None):
    """Read the prompts once → `step`, and the caches it writes to.

    step(tokens [B, T]) appends tokens to the texts and returns the `Step` of what follows each of them.

    capacity: new tokens per text. method: one of METHODS. heads: what to mask, (layer, head) pairs. alpha: α of
    decore-static. alpha_cap: α = min(α, cap). scale_alpha: α = H / ln V. mask: "output" (Eq. 4 and 5) or "query" (the
    published runs). mask_prompt: mask at every position, not only from the last prompt token on. amateur: a smaller
    model of the same vocabulary, with amateur_heads masked, in place of the masked row (DeCoRe entropy-lite)."""
    check_method(method, heads, amateur, amateur_heads)
    silent = {"greedy": [[]], "masked": [heads]}.get(method, [[]] if amateur else [[], heads])      # heads, per row
    rows = Rows(model, prompts, capacity, silent, mask, mask_prompt)
    small = Rows(amateur, prompts, capacity, [amateur_heads], mask, mask_prompt) if amateur else None
    scale = math.log(model.config.vocab_size) if scale_alpha else 1

    def step(tokens):
        log_p = rows(tokens).log_softmax(-1)                                # [R, B, T, V]: one pass
        base, other = log_p[0], log_p[-1]
        if small:
            other = small(tokens)[0].log_softmax(-1).to(base.device)
        h = entropy(base)
        a = choose_alpha(method, h, alpha, scale, alpha_cap)                # Eq. 8
        return Step(contrast(base, other, a), base, other, a, h)            # Eq. 7

    return step, [r.cache for r in (rows, small) if r]


def decode(step, last, n):
    """The loop: n greedy steps → (token [B, 1], Step) of each. last [B, 1]: the prompts' last tokens, not yet read."""
    token = last
    for _ in range(n):
        found = step(token)
        token = found.scores.argmax(-1)
        yield token, found


# --------------------------------------------------------------------------------------------------- what it is made of


METHODS = ("greedy", "masked", "decore-static", "decore-entropy")
AHEAD = {"cuda": 8}                     # how many tokens a device decodes before the host looks at them
AT_ONCE = 512                           # tokens of given answers per pass


class Rows:
    """The rows of one pass over some prompts: called with tokens [B, T], it appends them and returns the logits of what
    follows each, [R, B, T, V].

    silent: for each row the heads to silence. The prompts are read once, unmasked, for all rows; with `mask_prompt`, or
    with `others` (the second row's prompts), rows have prompts of their own: these are simply more prompts of one row.
    The last token of a prompt waits: its step is the first that the mask touches. states: as in Transformer.prefill."""

    def __init__(self, model, prompts, capacity, silent=((),), mask="output", mask_prompt=False, others=None,
                 states=None):
        head_mask, self.apart = make_head_mask(silent, model), len(silent) if mask_prompt else 2 if others else 1
        if mask_prompt:
            head_mask = head_mask.repeat_interleave(len(prompts), 0)[:, None]           # [R·B, 1, L, H]
        prompts = [*prompts, *others] if others else prompts * self.apart
        self.model, self.mask, self.masks = model, mask, model.layer_masks(head_mask)
        self.cache = model.cache(torch.tensor([len(p) - 1 for p in prompts]), capacity, self.masks)
        if others:
            self.cache.kept["last"] = torch.tensor([p[-1:] for p in prompts], device=model.device)
        ids = pad([p[:-1] for p in prompts]).to(model.device)
        model.prefill(ids, self.cache, self.masks if mask_prompt else None, mask, states)

    def __call__(self, tokens, states=None, logits=True):
        tokens = tokens.to(self.model.device).repeat(self.apart, 1)
        if "last" in self.cache.kept:   # every row begins with the last token of its own prompt
            first = self.cache.places(tokens.shape[1]) == self.cache.lengths[:, None]
            tokens = torch.where(first, self.cache.kept["last"], tokens)
        z = self.model(tokens, self.cache, self.masks, self.mask, states, logits=logits)
        return z if self.apart == 1 or z is None else z[0].unflatten(0, (self.apart, -1))


@dataclass
class Generation:
    ids: list = field(default_factory=list)             # new tokens, the end token included
    alphas: list = field(default_factory=list)          # α as applied at each of them
    entropies: list = field(default_factory=list)       # H of the base row in nats, neither scaled nor capped
    stop: str | None = None                             # "eos", "length", or "stop" where `on_token` ended it


def fetch(steps, caches, ahead=1):
    """What `decode` yields, on the host: per step [B][1] of (token, its score, α, H), `ahead` steps at a time.

    A device runs ahead of the host, which waits for it only here."""
    waiting = []
    for cache in caches:
        cache.reach(1)
    for i, (token, found) in enumerate(steps):
        score = found.scores.gather(-1, token[..., None])[..., 0]
        waiting.append(torch.stack([token.float(), score, found.alpha, found.entropy], -1))             # [B, 1, 4]
        if len(waiting) == ahead:
            yield from torch.stack(waiting).tolist()
            waiting = []
        for cache in caches:
            cache.reach(i + 2)
    yield from torch.stack(waiting).tolist() if waiting else []


@torch.inference_mode()
def generate(model, ids, method="decore-entropy", max_new_tokens=64, eos_ids=None, on_token=None, lookup=0,
             compile=None, opener=open_decore, **settings):
    """Decode after one prompt (a list of ints → one Generation) or several (a list of lists → a list), as one batch.

    eos_ids: ids that end a text; None: the checkpoint's own, (): none. on_token(b, token, entropy) sees each token as
    it comes and ends the b-th text by returning True. lookup: check up to that many tokens copied from the text in each
    pass; compile: "graph" records the step as a CUDA graph, "kernels" has torch.compile fuse it before, "no" does
    neither, None is "graph" on a GPU. The tokens are the same, sooner (see runtime/fast.py).
    opener and settings: heads, alpha, alpha_cap, scale_alpha, mask, mask_prompt, amateur, amateur_heads, as in
    `open_decore`; an opener of baselines.py has its own."""
    prompts, eos_ids, room, longest = check_generation(model, ids, max_new_tokens, eos_ids, lookup, settings,
                                                       compile)
    step, caches = opener(model, prompts, room, method, **settings)
    out, last = [Generation() for _ in prompts], torch.tensor([p[-1:] for p in prompts], device=model.device)
    most = [min(max_new_tokens, max(1, longest - len(p))) for p in prompts]
    compile = compile or ("graph" if model.device.type == "cuda" else "no")
    if compile != "no":
        from runtime.fast import recorded
        step, caches = recorded(step, caches, last, lookup, model, (opener, method, settings), compile)
    if lookup:
        from runtime.fast import look_up
        rounds = look_up(step, caches, prompts, out, max_new_tokens, lookup)
    else:
        rounds = fetch(decode(step, last, room), caches, AHEAD.get(model.device.type, 1))
    collect(rounds, out, eos_ids, most, on_token)
    return out if is_batch(ids) else out[0]


def collect(rounds, out, eos_ids, most, on_token=None):
    """Append what `fetch` yields to the Generations `out`, until all have ended. most: new tokens of each text."""
    for found in rounds:
        for b, (g, new) in enumerate(zip(out, found, strict=True)):
            for token, score, alpha, h in new:
                if g.stop:
                    break
                if not (math.isfinite(score) and math.isfinite(h)):
                    raise ValueError(f"the model's logits are not finite at new token {len(g.ids) + 1} of text "
                                     f"{b + 1}; try float32 or bfloat16, or look for damaged weights")
                g.ids.append(int(token))
                g.alphas.append(alpha)
                g.entropies.append(h)
                told = on_token(b, int(token), h) if on_token else None
                g.stop = ("eos" if token in eos_ids else "stop" if told is True
                          else "length" if len(g.ids) >= most[b] else None)
        if all(g.stop for g in out):
            return


@torch.inference_mode()
def score(model, prompt_ids, answer_ids, method="decore-entropy", renormalise=True, return_greedy=False,
          opener=None, likely=None, **settings):
    """Log-probability of an answer after a prompt, in nats, summed over its tokens; of several answers, a list.

    The prompt is read once, and all answers in one sequence in which each sees the prompt and itself. Heads are masked
    at every position, as in the published multiple-choice runs. renormalise: log-softmax over the contrasted scores
    first, so that they are log-probabilities again. return_greedy: pairs instead, the sum and whether greedy decoding
    would give the answer; likely(step) is which tokens it may choose. settings as in `generate`."""
    prompt, answers = check_answers(model, prompt_ids, answer_ids, settings)
    opener = opener or partial(open_decore, mask_prompt=True)
    step, caches = opener(model, [prompt], sum(map(len, answers)), method, **settings)
    for cache in caches:
        cache.pack([len(answer) for answer in answers])
    tokens = torch.tensor([[t for answer in answers for t in (prompt[-1], *answer[:-1])]], device=model.device)
    target = torch.tensor([[t for answer in answers for t in answer]], device=model.device)
    found = []
    for at in range(0, target.shape[1], AT_ONCE):
        now, wanted = step(tokens[:, at:at + AT_ONCE]), target[:, at:at + AT_ONCE]
        scores = now.scores.log_softmax(-1) if renormalise else now.scores
        chosen = scores.gather(-1, wanted[..., None])[..., 0]
        best = now.scores.where(likely(now), -math.inf) if likely else now.scores
        found += zip(chosen[0].tolist(), (best.argmax(-1) == wanted)[0].tolist(), strict=True)
    out = []
    for answer in answers:
        values, best = zip(*found[:len(answer)], strict=True)
        del found[:len(answer)]
        if any(math.isnan(value) for value in values):
            raise ValueError(f"{model.name} gives logits that are not finite; try float32 or bfloat16")
        out.append((math.fsum(values), all(best)) if return_greedy else math.fsum(values))
    return out if is_batch(answer_ids) else out[0]


def make_head_mask(rows, model):
    """One list of heads to silence per row, (layer, head) pairs or "layer-head" → [R, L, H] of 0 and 1."""
    head_mask = torch.ones(len(rows), model.config.n_layers, model.config.n_heads)
    for row, heads in enumerate(rows):
        for layer, head in check_heads(heads, model):
            head_mask[row, layer, head] = 0
    return head_mask


def pad(rows):
    """Lists of ints → [B, T], filled up on the right with 0."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.long)


def check_method(method, heads, amateur, amateur_heads):
    """Raise ValueError for a method that is unknown or lacks what it needs."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; known: {', '.join(METHODS)}")
    if amateur is not None and not (method.startswith("decore") and heads is None and amateur_heads is not None):
        raise ValueError("an amateur needs a decore method and its own amateur_heads ([] for none), and excludes heads")
    if amateur is None and heads is None and method != "greedy":
        raise ValueError(f"{method} needs heads to mask")


def main():
    from cli.program import main
    from heads import choose_heads
    from heads.sources import find_sources
    main("Decode with DeCoRe: contrast a model with itself, its retrieval heads masked.", generate, METHODS,
         "decore-entropy", choose_heads, find_sources, open_decore)


if __name__ == "__main__":
    from cli import run
    sys.exit(run(main))
