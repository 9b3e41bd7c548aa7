"""DeCoRe: Decoding by Contrasting Retrieval Heads (Gema et al. 2024, arXiv 2410.18860).

A few attention heads, the retrieval heads, copy tokens out of the context. With those heads masked,
the model stops reading and starts making things up. DeCoRe decodes from

    p(x_t | x_<t)  ∝  exp[(1 + α) log p_base(x_t | x_<t) − α log p_masked(x_t | x_<t)]   (Eq. 7)
    α = H(x_t) = −Σ p_base log p_base     (DeCoRe entropy; a constant α is DeCoRe static)   (Eq. 8)

and so pushes the text towards what the context says. Base and masked model are two rows of one
pass: see model.py.

    R rows (0 base, 1 masked)   B prompts   T new tokens
    L layers   H heads   V vocabulary
"""

import math
import runpy
from dataclasses import dataclass, field
from typing import NamedTuple

if __name__ == "__main__":
    runpy.run_module("cli.decode", run_name="__main__")  # the command line, which exits

import torch
from torch.nn.utils.rnn import pad_sequence

from runtime import checks
from runtime.graph import recorded


def contrast(base, other, alpha):
    """The exponent of Eq. 7. Log-probabilities [B, T, V], alpha [B, T] → [B, T, V], all float32."""
    alpha = alpha[..., None]
    scores = (1 + alpha) * base - alpha * other
    return scores.where(base > -math.inf, base)  # not −∞ − (−∞)


def entropy(log_p):
    """Shannon entropy over the last axis, in nats (Eq. 8).

    log_p: float32 log-probabilities, [..., V] → [...]."""
    return -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)  # not 0 · −∞


@torch.inference_mode()
def decore(model, prompts, heads, n):
    """DeCoRe entropy for B prompts, lists of ids. Yields, n times, each prompt's next token and its
    α, [B, 1] each.

    `generate` gives the same tokens; it adds other methods, end tokens, CUDA graphs and checks."""
    head_mask = make_head_mask([[], heads], model)  # row 1 is without the retrieval heads
    cache = model.new_cache([len(p) - 1 for p in prompts], n, rows=2)
    beginnings = pad([p[:-1] for p in prompts], model.device)
    model.prefill(beginnings, cache)  # unmasked, once for both rows
    token = pad([p[-1:] for p in prompts], model.device)  # masking starts here
    for _ in range(n):
        base, masked = model(token, cache, head_mask).log_softmax(-1)  # one pass: [B, 1, V] each
        alpha = entropy(base)  # Eq. 8
        token = contrast(base, masked, alpha).argmax(-1)  # Eq. 7
        yield token, alpha


# ---------------------------------------------------------- the same loop, with methods and options

METHODS = ("greedy", "masked", "decore-static", "decore-entropy")
ALPHA_RULES = ("entropy", "gain")
UNMASKED = ()  # the heads of a row that masks none


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
    rows; mask_prompt masks the heads there too, and needs a single row."""

    def __init__(
        self, model, prompts, capacity, rows=(UNMASKED,), mask="output", mask_prompt=False
    ):
        self.model = model
        self.mask = mask
        head_mask = make_head_mask(rows, model)
        self.head_mask = head_mask if (head_mask == 0).any() else None
        self.cache = model.new_cache([len(p) - 1 for p in prompts], capacity, len(rows))
        ids = pad([p[:-1] for p in prompts], model.device)
        model.prefill(ids, self.cache, self.head_mask if mask_prompt else None, mask)

    def logits(self, tokens):
        """Append tokens [B, T], or [R, B, T], to the texts → logits of the next token after each,
        [R, B, T, V] float32."""
        return self.model(tokens, self.cache, self.head_mask, self.mask)


class Rule:
    """Eq. 7 and 8: scores of the next token from the log-probabilities of the rows of `rows_of`.

    A rule of your own is a subclass with another `alpha`; as a decoder, it is one of `DeCoRe`.
    alpha: α of decore-static. alpha_cap: α = min(α, cap). scale_alpha: α = H / ln V. alpha_rule: of
    decore-entropy, "entropy" or "gain", α = H of the last row − H (see docs/differences.md)."""

    def __init__(
        self,
        model,
        method="decore-entropy",
        alpha=0.5,
        alpha_cap=None,
        scale_alpha=False,
        alpha_rule="entropy",
    ):
        checks.check_name(alpha_rule, "alpha_rule", ALPHA_RULES)
        self.method = method
        self.gains = alpha_rule == "gain"
        self.constant = alpha if method == "decore-static" else 0
        self.cap = alpha_cap
        self.unit = math.log(model.config.vocab_size) if scale_alpha else 1

    def alpha(self, h, base, other):
        """α of each token before the cap, [B, T].

        h: H of base, [B, T]. base, other: log p of the first and the last row, [B, T, V]."""
        if self.method == "decore-entropy":
            return (entropy(other) - h if self.gains else h) / self.unit  # Eq. 8
        return torch.full_like(h, self.constant)

    def contrasted(self, log_p):
        """The `Step` of the rows' log-probabilities, [R, B, T, V]."""
        base, other = log_p[0], log_p[-1]  # the same if R is 1
        h = entropy(base)
        alpha = self.alpha(h, base, other)
        if self.cap is not None:
            alpha = alpha.clamp(max=self.cap)
        return Step(contrast(base, other, alpha), base, other, alpha, h)  # Eq. 7


def rows_of(method, heads):
    """The rows that a method reads: for each, the heads to mask."""
    checks.check_masking(method, heads)
    return {"greedy": [UNMASKED], "masked": [heads]}.get(method, [UNMASKED, heads])


class DeCoRe(Rule):
    """Decodes by one of METHODS. Like every decoder, it has `sessions` and `step`.

    capacity: as in `Session`. heads: (layer, head) pairs to mask. mask: "output" (Eq. 4 and 5) or
    "query" (the published runs). mask_prompt: mask at every position, not only from the last prompt
    token on. rule: the other arguments of `Rule`."""

    def __init__(
        self,
        model,
        prompts,
        capacity,
        method="decore-entropy",
        heads=None,
        mask="output",
        mask_prompt=False,
        **rule,
    ):
        super().__init__(model, method, **rule)
        rows = rows_of(method, heads)
        # If prompts are masked, their keys differ from row to row.
        passes = [[row] for row in rows] if mask_prompt else [rows]
        self.sessions = [
            Session(model, prompts, capacity, rows, mask, mask_prompt) for rows in passes
        ]

    def step(self, tokens):
        """Append tokens [B, T] to the texts → their `Step`.

        The first tokens are the prompts' last ones."""
        logits = torch.cat([session.logits(tokens) for session in self.sessions])
        return self.contrasted(logits.log_softmax(-1))


@dataclass
class Generation:
    ids: list = field(default_factory=list)  # new tokens, the end token included
    alphas: list = field(default_factory=list)  # α as applied at each of them
    entropies: list = field(default_factory=list)  # H of the base row in nats, as in `Step`
    stop: str | None = None  # "eos", "length", or "stop" if `on_token` ended the text


@torch.inference_mode()
def generate(
    model,
    ids=None,
    method="decore-entropy",
    max_new_tokens=64,
    eos_ids=None,
    on_token=None,
    graph=True,
    decoder=DeCoRe,
    attention_mask=None,
    input_ids=None,
    min_new_tokens=0,
    **settings,
):
    """Decode after one prompt (a list of ints → one Generation) or several (a list of lists → a
    list), as one batch.

    eos_ids: ids that end a text; None: the checkpoint's own, (): none. on_token(b, token, entropy)
    is called for each token and ends text b by returning True. graph: record a step as a CUDA
    graph, if the models can. decoder: `DeCoRe`, one of decoders/baselines.py, or a class of your
    own. attention_mask: 0 at padding. input_ids: ids, as tokenizers of transformers call them.
    min_new_tokens: in so many first tokens, ids that end a text score −∞. settings: the decoder's
    arguments, such as heads and alpha."""
    if decoder is DeCoRe:
        checks.check_name(method, "method", METHODS, checks.ELSEWHERE)
    prompts, in_form_of_ids = checks.unpack(ids, attention_mask, input_ids)
    prompts, settings, end_ids, limits = checks.check_generation(
        model, prompts, method, decoder, settings, max_new_tokens, eos_ids, min_new_tokens
    )
    decoding = decoder(model, prompts, max(limits), method, **settings)
    token = pad([p[-1:] for p in prompts], model.device)
    graph = graph and all(session.model.can_record for session in decoding.sessions)
    step = recorded(decoding, token) if graph else decoding.step
    out = [Generation() for _ in prompts]
    for i in range(max(limits)):
        result = step(token)
        scores = result.scores
        if i < min_new_tokens:
            scores = without_ids(scores, end_ids)
        highest, token = scores.max(-1)  # greedy
        numbers = torch.stack([highest, result.alpha, result.entropy], -1)  # [B, 1, 3]
        on_host = zip(token[:, 0].tolist(), numbers[:, 0].tolist())
        for b, (token_id, (score, alpha, h)) in enumerate(on_host):
            g = out[b]
            if g.stop:
                continue
            checks.check_finite(score + h, model)
            g.ids.append(token_id)
            g.alphas.append(alpha)
            g.entropies.append(h)
            ended = on_token and on_token(b, token_id, h) is True
            if token_id in end_ids:
                g.stop = "eos"
            elif ended:
                g.stop = "stop"
            elif len(g.ids) == limits[b]:
                g.stop = "length"
        if all(g.stop for g in out):
            break
    return in_form_of_ids(out)


def without_ids(scores, ids):
    """Scores [B, T, V] with −∞ at those of the ids that are below V."""
    known = torch.tensor([i for i in ids if i < scores.shape[-1]], dtype=torch.long)
    return scores.index_fill(-1, known.to(scores.device), -math.inf)


def make_head_mask(rows, model):
    """The heads to mask in each row, (layer, head) pairs or "layer-head" → [R, L, H] of 0 and 1."""
    head_mask = torch.ones(len(rows), model.config.n_layers, model.config.n_heads)
    for row, heads in zip(head_mask, rows):
        for layer, head in checks.check_heads(heads, model):
            row[layer, head] = 0
    return head_mask.to(model.device)


def pad(sequences, device="cpu"):
    """Lists of ints → [B, T], padded on the right with 0."""
    tensors = [torch.tensor(s, dtype=torch.long) for s in sequences]
    return pad_sequence(tensors, batch_first=True).to(device)
