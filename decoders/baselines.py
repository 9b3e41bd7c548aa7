"""The paper's other decoders, on the same model, cache and decoding loop.

method       scores                                      source
cd           log p − α log p_amateur                     Contrastive Decoding, Li et al. 2023
cad          (1 + α) z − α z_without_context             Context-Aware Decoding, Shi et al. 2024
dola-low     log p − log p_early, a lower layer's exit   DoLa, Chuang et al. 2024
dola-high    likewise, an upper layer's exit
ad           log p − α spread, the entropy of a token's  Activation Decoding, Chen et al. 2024
             activation over the prompt's positions

z: logits; log p: their log-softmax. `Lite` is DeCoRe with an amateur; `generate` takes DeCoRe's own
methods too. Random heads in place of retrieval heads: `heads.random_heads`. ITI needs no decoder:
its checkpoints are models like any other.

B prompts   T new tokens   P prompt tokens   V vocabulary   D model width   E early exits
"""

import math
from numbers import Integral

import torch

import decore
from decore import DeCoRe, Rule, Session, Step, entropy, pad
from runtime.checks import (
    check_heads,
    check_masking,
    check_name,
    check_number,
    check_prompts,
    check_settings,
    unpack,
)

INFO_LAYER = 24  # of the published runs
EXITS_AT_ONCE = 16  # positions whose early exits go through the head together
LOGITS_AT_ONCE = 64  # positions whose activations do


class Lite(Rule):
    """DeCoRe with a smaller model in place of the masked row (DeCoRe entropy-lite).

    amateur: a model of the same vocabulary. amateur_heads: its heads to mask, [] for none. mask,
    mask_prompt: as in `DeCoRe`. rule: the other arguments of `Rule`."""

    def __init__(
        self,
        model,
        prompts,
        capacity,
        method="decore-entropy",
        amateur=None,
        amateur_heads=None,
        mask="output",
        mask_prompt=False,
        **rule,
    ):
        check_amateur(method, amateur, amateur_heads)
        super().__init__(model, method, **rule)
        self.sessions = [
            Session(model, prompts, capacity),
            Session(amateur, prompts, capacity, [amateur_heads], mask, mask_prompt),
        ]

    def step(self, tokens):
        """As `DeCoRe.step`."""
        return self.contrasted(logits_of_both(self.sessions, tokens).log_softmax(-1))


def logits_of_both(sessions, tokens):
    """Logits of a model and its amateur, [2, B, T, V], on the model's device, of the ids that both
    have: each pads the vocabulary to a size of its own."""
    logits = [s.logits(tokens.to(s.model.device)).to(tokens.device) for s in sessions]
    V = min(z.shape[-1] for z in logits)
    return torch.cat([z[..., :V] for z in logits])


class Baseline:
    """Base class of the decoders below.

    Each defines `contrast`, which appends tokens [B, T] to the texts → scores, log p, and the log p
    that is subtracted, [B, T, V] each. alpha: weight of the subtracted term. relative_top: tokens
    below that fraction of the highest probability score −∞."""

    def __init__(self, sessions, method, alpha, relative_top):
        self.sessions = sessions
        self.alpha = alpha
        self.top = threshold(method, relative_top)

    def step(self, tokens):
        """As `DeCoRe.step`."""
        scores, base, other = self.contrast(tokens)
        scores = scores.where(plausible(base, self.top), -math.inf)
        h = entropy(base)
        return Step(scores, base, other, torch.full_like(h, self.alpha), h)


class CD(Baseline):
    """Contrastive Decoding: log p − α log p_amateur.

    amateur: a smaller model of the same vocabulary."""

    def __init__(
        self, model, prompts, capacity, method, amateur=None, alpha=0.5, relative_top=None
    ):
        check_amateur(method, amateur)
        sessions = [Session(m, prompts, capacity) for m in (model, amateur)]
        super().__init__(sessions, method, alpha, relative_top)

    def contrast(self, tokens):
        base, other = logits_of_both(self.sessions, tokens).log_softmax(-1)
        return base - self.alpha * other, base, other


class CAD(Baseline):
    """Context-Aware Decoding: (1 + α) z − α z_without.

    ids_without_context: each prompt without its context, in the form of the prompts."""

    def __init__(
        self,
        model,
        prompts,
        capacity,
        method,
        ids_without_context=None,
        alpha=0.5,
        relative_top=None,
    ):
        if ids_without_context is None:
            raise ValueError("cad needs each prompt without its context too: ids_without_context")
        without, _ = unpack(ids_without_context)
        without = check_prompts(model, without, "context-free prompt")
        if len(without) != len(prompts):
            raise ValueError(
                f"cad needs one context-free prompt for each prompt; "
                f"it got {len(without)} for {len(prompts)}"
            )
        for w, prompt in zip(without, prompts):
            if w[-1] != prompt[-1]:
                raise ValueError(
                    "a prompt and its context-free prompt end in different tokens; end both in "
                    "the same word"
                )
            if len(w) > len(prompt):
                longest = w + w[-1:] * (capacity - 1)  # the last new token is not read
                check_prompts(model, [longest], "context-free prompt with its longest answer")
        # Two sessions: within each, prompts have a long prefix in common, the demonstrations.
        sessions = [Session(model, p, capacity) for p in (prompts, without)]
        super().__init__(sessions, method, alpha, relative_top)

    def contrast(self, tokens):
        z, z_without = (session.logits(tokens)[0] for session in self.sessions)
        scores = (1 + self.alpha) * z - self.alpha * z_without
        return scores, z.log_softmax(-1), z_without.log_softmax(-1)


class DoLa(Baseline):
    """DoLa: log p − log p_early, at each position the early exit of `exit_layers` whose
    distribution differs most.

    The exits go through the head without the final norm, as published. repetition_penalty: as in
    transformers, a positive score of a token that the text already contains is divided by it, a
    negative one multiplied."""

    def __init__(
        self,
        model,
        prompts,
        capacity,
        method,
        dola_layers="capped",
        repetition_penalty=1,
        relative_top=None,
    ):
        self.exits = exit_layers(model, method.removeprefix("dola-"), dola_layers)
        super().__init__([Session(model, prompts, capacity)], method, 1, relative_top)
        self.model = model
        self.penalty = repetition_penalty
        self.in_text = torch.zeros(
            len(prompts), 1, model.config.vocab_size, dtype=torch.bool, device=model.device
        )
        for b, prompt in enumerate(prompts):
            self.in_text[b, 0, prompt] = True

    def contrast(self, tokens):
        last, early = self.model.read_layers(tokens, self.exits, self.sessions[0].cache)
        base, other = most_divergent(self.model, torch.cat([last, *early]))
        scores = base - other
        if self.penalty != 1:
            self.in_text.scatter_(-1, tokens[..., None], True)
            smaller = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
            scores = torch.where(self.in_text, smaller, scores)
        return scores, base, other


def exit_layers(model, half, dola_layers="capped"):
    """Every second layer of the lower or upper half, 0 being the embeddings.

    dola_layers: "halves" is what the paper says and what the published scoring does, at any depth.
    "capped" is what the published generation does: of more than 40 layers only the lowest or
    uppermost 20, and with tied embeddings none below layer 2."""
    L = model.config.n_layers
    check_name(dola_layers, "dola_layers", ("capped", "halves"))
    capped = dola_layers == "capped"
    end, start = (20, L - 20) if capped and L > 40 else (L // 2, L // 2)
    if half == "high":
        return list(range(start, L, 2))
    # With tied embeddings the exit at layer 0 gives the input token back.
    start = min(2, L - 1) if capped and model.config.tied_embeddings else 0
    if start > end:
        raise ValueError(
            f"dola-low: {model.name} has no layer from 2 to its middle, {end}; use dola-high"
        )
    return list(range(start, end, 2)) or [start]


def most_divergent(model, states):
    """Log p of the last layer and, at each position, of the early exit whose distribution differs
    most.

    states [1 + E, B, T, D], the last layer first → two of [B, T, V]. The difference is that of
    transformers: with M = (p + q) / 2, half the sum of Σ M log(M / p) and Σ M log(M / q), divided
    by V."""
    out = []
    for x in states.flatten(1, 2).split(EXITS_AT_ONCE, 1):  # [1 + E, 16, D]
        log_p = model.logits(x[:, None])[:, 0].log_softmax(-1)  # [1 + E, 16, V]
        last = log_p[0]
        early = log_p[1:]
        mean = (last.exp() + early.exp()) / 2
        both = (last + early).clamp(min=-1e30) / 2  # not 0 · −∞
        distance = (mean * (mean.clamp(min=1e-38).log() - both)).mean(-1)  # [E, 16]
        positions = torch.arange(len(last), device=last.device)
        out.append(torch.stack([last, early[distance.argmax(0), positions]]))
    return torch.cat(out, 1).unflatten(1, states.shape[1:3])


class AD(Baseline):
    """Activation Decoding: log p − α spread, the `activation_entropy` of the layer info_layer over
    the prompt."""

    def __init__(
        self, model, prompts, capacity, method, info_layer=INFO_LAYER, alpha=0.5, relative_top=None
    ):
        check_layer(model, info_layer)
        super().__init__([Session(model, prompts, capacity)], method, alpha, relative_top)
        self.layer = info_layer
        self.activations = []
        for prompt in prompts:  # read once more: sessions keep no hidden states
            _, [x] = model.read_layers(pad([prompt], model.device), [info_layer])
            self.activations.append(activations(model, x[0, 0]))
        self.set_spread(self.activations)

    def set_spread(self, texts):
        """texts: the `activations` of each."""
        self.spread = torch.stack([activation_entropy(*text) for text in texts])[:, None]

    def contrast(self, tokens):
        base = self.sessions[0].logits(tokens)[0].log_softmax(-1)
        return base - self.alpha * self.spread, base, base


def activations(model, x, before=None):
    """For each token, m = max z, s = Σ exp(z − m) and t = Σ (z − m) exp(z − m) over the positions
    of a text, at which z is the token's logit after a layer: [V] each.

    x [P, D]: outputs of the layer. before: the same of earlier positions. Only a few positions are
    read at a time, so [P, V] is never in memory."""
    zero = torch.zeros((), device=x.device)
    m, s, t = before or (zero - 1e30, zero, zero)
    for part in x.split(LOGITS_AT_ONCE):
        z = model.logits(part[None, None])[0, 0]
        top = torch.maximum(m, z.amax(0))
        decay = (m - top).exp()
        w = (z - top).exp()
        t = (t + s * (m - top)) * decay + torch.xlogy(w, w).sum(0)
        s = s * decay + w.sum(0)
        m = top
    return m, s, t


def activation_entropy(m, s, t):
    """Entropy of the softmax over positions of each token's `activations`, [V]: small for tokens
    that few positions activate."""
    return (s.log() - t / s).where(s != 0, 0)  # 0 where z is −∞ everywhere


def threshold(method, relative_top):
    """relative_top as a number; None: that of the published runs."""
    if relative_top is None:
        return 0 if method in ("cd", "cad") else 0.1
    return relative_top


def plausible(base, top):
    """Which tokens have at least `top` times the probability of the most likely one; 0: all that
    have any.

    base: log p, [..., V]. NaN counts as plausible, so that it is not lost."""
    return ~(base < base.amax(-1, keepdim=True) + (math.log(top) if top else -1e30))


DECODERS = {"cd": CD, "cad": CAD, "dola-low": DoLa, "dola-high": DoLa, "ad": AD}
METHODS = (*decore.METHODS, *DECODERS)


def find_decoder(method, settings):
    """The class that decodes by a method: with an amateur among the settings, DeCoRe is `Lite`."""
    check_name(method, "method", (*decore.METHODS, *DECODERS))
    if method.startswith("decore") and settings.get("amateur") is not None:
        return Lite
    return DECODERS.get(method, DeCoRe)


def check(model, settings):
    """ValueError if the arguments of `generate` do not fit a model, or its facts: `name`, `config`.

    The prompts without context of cad are not needed yet."""
    check_settings(model, settings)
    method = settings["method"]
    reads_layers = method == "ad" or method.startswith("dola")
    if reads_layers and not getattr(model, "has_exits", True):
        raise ValueError(f"{model.name}: the layers cannot be read, as {method} does")
    if method == "ad":
        check_layer(model, settings.get("info_layer", INFO_LAYER))
    elif reads_layers:
        exit_layers(model, method.removeprefix("dola-"), settings.get("dola_layers", "capped"))
    amateur, heads = settings.get("amateur"), settings.get("heads")
    if method == "cd":
        check_amateur(method, amateur)
    elif amateur is not None:
        heads = settings.get("amateur_heads")
        check_amateur(method, amateur, heads)
        check_heads(heads, amateur)
    elif heads is not None:
        check_heads(heads, model)
    elif method in decore.METHODS:
        check_masking(method, heads)


def check_amateur(method, amateur, amateur_heads=()):
    """ValueError without a smaller model, or without the heads of it that DeCoRe masks."""
    if amateur is None:
        raise ValueError(f"{method} needs an amateur: a smaller model of the same vocabulary")
    if amateur_heads is None:
        raise ValueError(f"{method} with an amateur needs amateur_heads to mask ([] for none)")


def check_layer(model, layer):
    check_number(layer, "info_layer", 1, kind=Integral)
    if layer > model.config.n_layers:
        raise ValueError(
            f"info_layer {layer} is outside {model.name} (layers 1 to {model.config.n_layers}); "
            "choose another"
        )


def generate(model, ids=None, method="cd", **settings):
    """Decode as decore.generate does: one prompt → one Generation, several → a list. DeCoRe's
    methods work too.

    settings: those of decore.generate, and alpha (cd, cad, ad), amateur (cd; with amateur_heads
    DeCoRe, see `Lite`), ids_without_context (cad, in the form of ids), info_layer (ad), dola_layers
    (dola: "capped" or "halves"), repetition_penalty (dola; 1.05 in the published runs of Qwen2,
    whose generation configuration asks for it). relative_top: tokens below that fraction of the
    highest probability score −∞; 0: none do; None: 0.1 for dola and ad, 0 for cd and cad, as in the
    published runs. `alphas` are the weight of the subtracted term: α, and 1 for dola."""
    decoder = find_decoder(method, settings)
    return decore.generate(model, ids, method, decoder=decoder, **settings)
