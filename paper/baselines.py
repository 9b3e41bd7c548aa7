"""The paper's other decoders, on the same model, cache and decoding loop.

method       scores                                      source
cd           log p − α log p_amateur                     Contrastive Decoding, Li et al. 2023
cad          (1 + α) z − α z_without_context             Context-Aware Decoding, Shi et al. 2024
dola-low     log p − log p_early, a lower layer's exit   DoLa, Chuang et al. 2024
dola-high    likewise, an upper layer's exit
ad           log p − α spread, the entropy of a token's  Activation Decoding, Chen et al. 2024
             activation over the prompt's positions

z: logits; log p: their log-softmax. `generate` and `score` take DeCoRe's own methods too. Random
heads in place of retrieval heads: `heads.random_heads`. ITI needs no decoder: its checkpoints are
models like any other.

B prompts   T new tokens   P prompt tokens   V vocabulary   D model width   E early exits
"""

import math

import torch

import decore
from decore import Session, Step, entropy, pad
from runtime.checks import (
    as_batch,
    as_given,
    check_masking,
    check_method,
    check_number,
    check_prompts,
    check_scoring,
    check_settings,
    unpadded,
)

NO_AMATEUR = "cd needs an amateur: a smaller model of the same vocabulary"
INFO_LAYER = 24  # of the published runs
EXITS_AT_ONCE = 16  # positions whose early exits go through the head together


class Baseline:
    """Base class of the decoders below.

    Each defines `contrast`, which appends tokens [B, T] to the texts → scores, log p, and the log p
    that is subtracted, [B, T, V] each. relative_top: tokens below that fraction of the highest
    probability score −∞. alpha: weight of the subtracted term. `more` stands for these two."""

    scoring = {}

    def __init__(self, sessions, method, relative_top=None, alpha=0.5):
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

    def __init__(self, model, prompts, capacity, method, amateur=None, **more):
        if amateur is None:
            raise ValueError(NO_AMATEUR)
        sessions = [Session(m, prompts, capacity) for m in (model, amateur)]
        super().__init__(sessions, method, **more)

    def contrast(self, tokens):
        logits = (session.logits(tokens)[0].to(tokens.device) for session in self.sessions)
        base, other = (z.log_softmax(-1) for z in logits)
        return base - self.alpha * other, base, other


class CAD(Baseline):
    """Context-Aware Decoding: (1 + α) z − α z_without.

    The prompts without context are the batch's second half."""

    def __init__(self, model, prompts, capacity, method, ids_without_context=None, **more):
        if ids_without_context is None:
            raise ValueError("cad needs each prompt without its context too: ids_without_context")
        without = check_prompts(model, ids_without_context, "context-free prompt")
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
                check_prompts(model, longest, "context-free prompt with its longest answer")
        sessions = [Session(model, [*prompts, *without], capacity, groups=2)]
        super().__init__(sessions, method, **more)

    def contrast(self, tokens):
        z, z_without = self.sessions[0].logits(tokens.repeat(2, 1))[0].chunk(2)
        scores = (1 + self.alpha) * z - self.alpha * z_without
        return scores, z.log_softmax(-1), z_without.log_softmax(-1)


class DoLa(Baseline):
    """DoLa: log p − log p_early, at each position the early exit of `exit_layers` whose
    distribution differs most.

    The exits go through the head without the final norm, as published. repetition_penalty: as in
    transformers, a positive score of a token that the text already contains is divided by it, a
    negative one multiplied."""

    scoring = {"dola_layers": "halves"}

    def __init__(
        self, model, prompts, capacity, method, dola_layers="capped", repetition_penalty=1, **more
    ):
        check_number(repetition_penalty, "repetition_penalty", 0.01)
        self.exits = exit_layers(model, method.removeprefix("dola-"), dola_layers)
        super().__init__([Session(model, prompts, capacity)], method, alpha=1, **more)
        self.model = model
        self.penalty = repetition_penalty
        self.in_text = torch.zeros(
            len(prompts), 1, model.config.vocab_size, dtype=torch.bool, device=model.device
        )
        for b, prompt in enumerate(prompts):
            self.in_text[b, 0, prompt] = True

    def contrast(self, tokens):
        last, early = self.model.read_layers(tokens, self.sessions[0].cache, self.exits)
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
    if dola_layers not in ("capped", "halves"):
        raise ValueError(f"dola_layers {dola_layers!r} is unknown; known: capped, halves")
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

    def __init__(self, model, prompts, capacity, method, info_layer=INFO_LAYER, **more):
        session, states, in_prompt = prefill_layer(model, prompts, capacity, info_layer)
        last = pad([p[-1:] for p in prompts], model.device)
        _, [x] = model.read_layers(last, session.cache.select(slice(None)), [info_layer])
        self.spread = activation_entropy(model, torch.cat([states, x[0]], 1), in_prompt)
        super().__init__([session], method, **more)

    def contrast(self, tokens):
        base = self.sessions[0].logits(tokens)[0].log_softmax(-1)
        return base - self.alpha * self.spread, base, base


def score_ad(model, prompts, answers, top=0, info_layer=INFO_LAYER, alpha=0.5):
    """`loglikelihoods` of AD as published: its entropy is over the answer's positions too."""
    prompts, answers, _ = check_scoring(model, prompts, answers, dict(alpha=alpha))
    capacity = 1 + max(map(len, sum(answers, [])))
    session, states, _ = prefill_layer(model, prompts, capacity, info_layer)
    sums = []
    greedy = []
    for b, prompt in enumerate(prompts):
        sums.append([])
        greedy.append([])
        for answer in answers[b]:
            tokens = pad([prompt[-1:] + answer], model.device)
            cache = session.cache.select(torch.tensor([b]))
            last, [x] = model.read_layers(tokens, cache, [info_layer])
            read = states[b : b + 1, : len(prompt) - 1]
            spread = activation_entropy(model, torch.cat([read, x[0]], 1))  # [1, 1, V]
            base = model.logits(last)[0].log_softmax(-1)  # [1, 1 + T, V]
            scores = (base - alpha * spread)[0, :-1]
            sums[b].append(math.fsum(scores[torch.arange(len(answer)), answer].tolist()))
            scores = scores.where(plausible(base[0, :-1], top), -math.inf)
            greedy[b].append(scores.argmax(-1).tolist() == answer)
    return sums, greedy


def prefill_layer(model, prompts, capacity, layer):
    """Prefill all but the last prompt tokens → a `Session`, the outputs of a layer at these
    positions [B, P − 1, D], and which of the P positions belong to a prompt: [B, P], the last
    column being the last tokens."""
    check_layer(model, layer)
    lengths = torch.tensor([len(p) for p in prompts])
    states = [
        torch.zeros(len(prompts), 0, model.config.d_model, dtype=model.dtype, device=model.device)
    ]

    def on_layer(i, x):
        if i == layer:
            states.append(x[0])

    session = Session(model, prompts, capacity, on_layer=on_layer)
    in_prompt = torch.arange(lengths.max()) < lengths[:, None] - 1
    in_prompt[:, -1] = True
    return session, torch.cat(states, 1), in_prompt.to(model.device)


def activation_entropy(model, x, in_prompt=None):
    """Entropy, over positions, of the softmax over positions of each token's logit z after a layer,
    [B, 1, V].

    It is small for tokens that few positions activate. x [B, P, D]: outputs of the layer. in_prompt
    [B, P]: the positions that count; None: all. Running m = max z, s = Σ exp(z − m) and t = Σ (z −
    m) exp(z − m) need only a few positions at a time, so [P, V] is never in memory."""
    size = max(1, 64 // len(x))
    m = torch.tensor(-1e30, device=x.device)
    s = t = torch.zeros((), device=x.device)
    for start in range(0, x.shape[1], size):
        z = model.logits(x[None, :, start : start + size])[0]
        if in_prompt is not None:
            z = z.masked_fill(~in_prompt[:, start : start + size, None], -math.inf)
        top = torch.maximum(m, z.amax(1))
        decay = (m - top).exp()
        w = (z - top[:, None]).exp()
        t = (t + s * (m - top)) * decay + torch.xlogy(w, w).sum(1)
        s = s * decay + w.sum(1)
        m = top
    return (s.log() - t / s).where(s != 0, 0)[:, None]  # 0 where z is −∞ everywhere


def threshold(method, relative_top):
    """relative_top as a number; None: that of the published runs."""
    if relative_top is None:
        return 0 if method in ("cd", "cad") else 0.1
    check_number(relative_top, "relative_top", 0, 1)
    return relative_top


def plausible(base, top):
    """Which tokens have at least `top` times the probability of the most likely one; 0: all that
    have any.

    base: log p, [..., V]. NaN counts as plausible, so that it is not lost."""
    return ~(base < base.amax(-1, keepdim=True) + (math.log(top) if top else -1e30))


DECODERS = {"cd": CD, "cad": CAD, "dola-low": DoLa, "dola-high": DoLa, "ad": AD}
METHODS = (*decore.METHODS, *DECODERS)


def check(model, method, settings):
    """ValueError if the settings of `generate` do not fit a model, or its facts: `name`, `config`.

    The prompts without context of cad are not needed yet."""
    settings = check_settings(model, settings)
    reads_layers = method == "ad" or method.startswith("dola")
    if reads_layers and not getattr(model, "has_exits", True):
        raise ValueError(f"{model.name}: the layers cannot be read, as {method} does")
    if method == "ad":
        check_layer(model, settings.get("info_layer", INFO_LAYER))
    elif reads_layers:
        exit_layers(model, method.removeprefix("dola-"), settings.get("dola_layers", "capped"))
    elif method == "cd" and settings.get("amateur") is None:
        raise ValueError(NO_AMATEUR)
    elif method in decore.METHODS:
        names = ("heads", "amateur", "amateur_heads")
        check_masking(method, *(settings.get(name) for name in names))


def check_layer(model, layer):
    if not 1 <= layer <= model.config.n_layers:
        raise ValueError(
            f"info_layer {layer} is outside {model.name} (layers 1 to {model.config.n_layers}); "
            "choose another"
        )


def generate(model, ids=None, method="cd", **settings):
    """Decode as decore.generate does: one prompt → one Generation, several → a list. DeCoRe's
    methods work too.

    settings: those of decore.generate, and alpha (cd, cad, ad), amateur (cd), ids_without_context
    (cad, in the form of ids), info_layer (ad), dola_layers (dola: "capped" or "halves"),
    repetition_penalty (dola; 1.05 in the published runs of Qwen2, whose generation configuration
    asks for it). relative_top: tokens below that fraction of the highest probability score −∞; 0:
    none do; None: 0.1 for dola and ad, 0 for cd and cad, as in the published runs. `alphas` are the
    weight of the subtracted term: α, and 1 for dola."""
    check_method(method, METHODS)
    decoder = DECODERS.get(method, decore.DeCoRe)
    return decore.generate(model, ids, method, decoder=decoder, **settings)


def score(
    model,
    prompt_ids,
    answer_ids,
    method="cd",
    prompt_ids_without_context=None,
    attention_mask=None,
    **settings,
):
    """Score of an answer after a prompt, summed over its tokens, in the forms of decore.score.

    prompt_ids_without_context: for cad, in the form of prompt_ids. settings: as in `generate`; but
    relative_top and repetition_penalty have no effect, and dola_layers is "halves" by default.
    renormalise: apply log-softmax to the contrasted scores. Without it cad sums raw scores, which
    are not log-probabilities. The scores of ad are never normalised again."""
    prompts, answers = as_batch(unpadded(prompt_ids, attention_mask), answer_ids)
    if prompt_ids_without_context is not None:
        settings["ids_without_context"] = prompt_ids_without_context
    sums, _ = loglikelihoods(model, prompts, answers, method, **settings)
    return as_given(sums, answer_ids)


@torch.inference_mode()
def loglikelihoods(model, prompts, answers, method="cd", renormalise=True, **settings):
    """As decore.loglikelihoods; cad has ids_without_context too, in the form of prompts.

    relative_top affects only whether greedy decoding gives an answer."""
    check_method(method, METHODS)
    if method in decore.METHODS:
        return decore.loglikelihoods(model, prompts, answers, method, renormalise, **settings)
    top = threshold(method, settings.pop("relative_top", None))
    if method == "ad":
        return score_ad(model, prompts, answers, top, **settings)
    settings.pop("repetition_penalty", None)

    return decore.loglikelihoods(
        model,
        prompts,
        answers,
        method,
        renormalise,
        DECODERS[method],
        lambda step: plausible(step.base, top),
        relative_top=0,
        **settings,
    )
