"""What DeCoRe is compared with: the paper's other decoders, on the same model, cache and decoding loop.

    method       what is decoded from                        source
    cd           log p − α log p_amateur                     Contrastive Decoding, Li et al. 2023
    cad          (1 + α) z − α z_without_context             Context-Aware Decoding, Shi et al. 2024
    dola-low     log p − log p_early; an early exit of       DoLa, Chuang et al. 2024
    dola-high    the lower or the upper layers
    ad           log p − α E; E how evenly the prompt's      Activation Decoding, Chen et al. 2024
                 positions activate a token

    z logits, log p their log-softmax. `generate` and `score` here know DeCoRe's own methods too; masking random heads
    instead of retrieval heads is `heads.random_heads`. ITI needs nothing: its checkpoints are models like any other.

    R rows   B batch   T new tokens   P prompt tokens   V vocabulary   D model width   C early exits
"""

import math
import sys

import torch

import decore
from decore import Rows, Step, entropy
from runtime.checks import check_answers, check_prompts, is_batch


def open_cd(model, prompts, capacity, method="cd", amateur=None, alpha=0.5, relative_top="published"):
    """Contrastive Decoding: log p − α log p_amateur, the amateur being a smaller model of the same vocabulary."""
    rows, small = Rows(model, prompts, capacity), Rows(check_amateur(amateur), prompts, capacity)
    top = share_of(method, relative_top)

    def step(tokens):
        base = rows(tokens)[0].log_softmax(-1)
        other = small(tokens)[0].log_softmax(-1).to(base.device)
        return contrasted(base - alpha * other, base, other, alpha, top)

    return step, [rows.cache, small.cache]


def check_amateur(amateur):
    if amateur is None:
        raise ValueError("cd needs an amateur: a smaller model of the same vocabulary (--amateur)")
    return amateur


def open_cad(model, prompts, capacity, method="cad", ids_without_context=None, alpha=0.5, relative_top="published"):
    """Context-Aware Decoding: (1 + α) z − α z_without. Prompts with and without context are two rows of one pass."""
    without = ids_without_context
    if without is None:
        raise ValueError("cad needs each prompt without its context too (ids_without_context, --without-context)")
    if len(without) != len(prompts):
        raise ValueError(f"cad needs one context-free prompt for each prompt; found {len(without)} for {len(prompts)}")
    rows = Rows(model, prompts, capacity, others=check_prompts(model, without, "context-free prompt"))
    top = share_of(method, relative_top)

    def step(tokens):
        z, z_without = rows(tokens)
        base, other = z.log_softmax(-1), z_without.log_softmax(-1)
        return contrasted((1 + alpha) * z - alpha * z_without, base, other, alpha, top)

    return step, [rows.cache]


def open_dola(model, prompts, capacity, method="dola-low", dola_layers="transformers", relative_top="published",
              repetition_penalty=1.0):
    """DoLa: log p − log p_early, at each position the early exit of `exit_layers` whose distribution differs most.

    The exits go through the head without the final norm, as published. repetition_penalty: as in transformers, a token
    that the text holds already has a positive score divided by it, a negative one multiplied; one token at a time."""
    exits, last = exit_layers(model, method.removeprefix("dola-"), dola_layers), model.config.n_layers
    rows, top = Rows(model, prompts, capacity), share_of(method, relative_top)
    if repetition_penalty not in (None, 1):
        if not 0 < repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty {repetition_penalty} is not a positive number; 1 changes nothing")
        seen = torch.zeros(len(prompts), 1, model.config.vocab_size, dtype=torch.bool, device=model.device)
        for b, prompt in enumerate(prompts):
            seen[b, 0, prompt] = True
        rows.cache.kept["seen"] = seen

    def step(tokens):
        states = dict.fromkeys([last, *exits])
        rows(tokens, states, logits=False)
        base, other = most_divergent(model, torch.cat([model.norm(states[last]), *(states[x] for x in exits)], 1))
        scores = base - other
        if "seen" in rows.cache.kept:
            seen = rows.cache.kept["seen"].scatter_(-1, tokens[..., None], True)
            held = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
            scores = torch.where(seen, held, scores)
        return contrasted(scores, base, other, 1, top)

    return step, [rows.cache]


def exit_layers(model, half, dola_layers="transformers"):
    """Every second layer of the lower or upper half, 0 being the embeddings.

    dola_layers: "halves" is what the paper says and what the published scoring of given answers does, at any depth;
    "transformers" is what the published generation does: of more than 40 layers only the lowest or uppermost 20, and
    of tied embeddings the exits from layer 2 on."""
    L = model.config.n_layers
    if dola_layers not in ("transformers", "halves"):
        raise ValueError(f"dola_layers {dola_layers!r} is unknown; known: transformers, halves")
    if dola_layers == "halves":
        return list(range(L // 2, L, 2) if half == "high" else range(0, max(1, L // 2), 2))
    span = 20 if L > 40 else None
    if half == "high":
        return list(range(L - (span or L - L // 2), L, 2))
    # Tied embeddings: the exit at layer 0 gives the input token back, so the first one is layer 2.
    start = min(2, L - 1) if model.config.tied_embeddings else 0
    exits = [start] if start == L // 2 else list(range(start, span or L // 2, 2))
    if not exits:
        raise ValueError(f"dola-low finds no layer below the middle of {model.name}: {L} layers with tied embeddings "
                         "leave none from 2 on; use dola-high")
    return exits


def most_divergent(model, states):
    """Log p of the last layer and of the early exit farthest from it, at each position.

    states [B, 1 + C, T, D], the last layer's first: all go through the head together, 16 positions at a time → two of
    [B, T, V]. The distance is that of transformers: with M = (p + q) / 2 half the sum of Σ M log(M / p) and
    Σ M log(M / q)."""
    out = []
    for x in states.transpose(0, 1).flatten(1, 2).split(16, 1):
        log_p = model.head(x).log_softmax(-1)                                           # [1 + C, 16, V]
        p, early = log_p[0], log_p[1:]
        mean = (p.exp() + early.exp()) / 2
        distance = (mean * (mean.clamp(min=1e-38).log() - (p + early) / 2)).mean(-1)    # [C, 16]
        out.append(torch.stack([p, early[distance.argmax(0), torch.arange(len(p), device=p.device)]]))
    return torch.cat(out, 1).unflatten(1, (states.shape[0], states.shape[2]))


def open_ad(model, prompts, capacity, method="ad", info_layer=24, alpha=0.5, relative_top="published"):
    """Activation Decoding: log p − α E.

    E(v): entropy, over the prompt's positions, of the softmax over positions of token v's logit after layer info_layer.
    Small for tokens that few positions speak of."""
    rows, sums = read_activations(model, prompts, capacity, info_layer)
    states, last = {info_layer: None}, torch.tensor([p[-1:] for p in prompts], device=model.device)
    rows(last, states, logits=False)            # with the last prompt token the prompt is complete; then it waits again
    rows.cache.take_back(1)
    sums = add_positions(model, info_layer, sums, states[info_layer][:, 0])
    rows.cache.kept["spread"] = spread_of(sums)                                                         # [B, 1, V]
    top = share_of(method, relative_top)

    def step(tokens):
        base = rows(tokens)[0].log_softmax(-1)
        return contrasted(base - alpha * rows.cache.kept["spread"], base, base, alpha, top)

    return step, [rows.cache]


def score_ad(model, prompt, answers, info_layer=24, alpha=0.5):
    """Scores as published: E counts the positions of the whole answer too, and nothing is normalised again.

    → for each answer [T, V]."""
    rows, sums = read_activations(model, [prompt], 1 + max(map(len, answers)), info_layer)
    for answer in answers:
        rows.cache.pack([1 + len(answer)])
        states = {info_layer: None}
        logits = rows(torch.tensor([[prompt[-1], *answer]]), states)[0]                 # [1, T, V]
        spread = spread_of(add_positions(model, info_layer, sums, states[info_layer][:, 0]))
        yield (logits.log_softmax(-1) - alpha * spread)[0]


def check_layer(model, info_layer):
    if not 1 <= info_layer <= model.config.n_layers:
        raise ValueError(f"info_layer {info_layer} is outside {model.name} (layers 1 to {model.config.n_layers}); "
                         "choose another (--info-layer)")
    return info_layer


def read_activations(model, prompts, capacity, info_layer):
    """Prefill all but the last prompt token → the rows, and the running sums of `add_positions` over those tokens."""
    states = {check_layer(model, info_layer): None}
    rows = Rows(model, prompts, capacity, states=states)
    zeros = torch.zeros(len(prompts), model.config.vocab_size, device=model.device)
    sums, x = (zeros - 1e30, zeros, zeros), states[info_layer]
    if x is not None:
        counts = torch.arange(x.shape[2], device=model.device) < rows.cache.lengths[:, None]
        sums = add_positions(model, info_layer, sums, x[:, 0], counts)
    return rows, sums


def add_positions(model, layer, sums, x, counts=None):
    """Add positions to the running sums m = max z, Σ exp(z − m), Σ (z − m) exp(z − m) of every token's logit z: [B, V].

    x [B, T, D] is the output of the layer; counts [B, T] says which positions are text. A few positions at a time, so
    that there is never a [P, V]."""
    size = max(1, 64 // x.shape[0])
    for start in range(0, x.shape[1], size):
        part = slice(start, start + size)
        # Only the last layer's output passes the final norm, as in the hidden states of transformers.
        z = model.head(model.norm(x[:, part]) if layer == model.config.n_layers else x[:, part])
        if counts is not None:
            z = z.masked_fill(~counts[:, part, None], -math.inf)
        m, s, t = sums
        top = torch.maximum(m, z.amax(1))
        kept, w = (m - top).exp(), (z - top[:, None]).exp()
        sums = top, s * kept + w.sum(1), (t + s * (m - top)) * kept + torch.xlogy(w, w).sum(1)
    return sums


def spread_of(sums):
    """Entropy over positions in nats, from their running sums → [B, 1, V]."""
    _, s, t = sums
    return (s.log() - t / s)[:, None]


def share_of(method, relative_top):
    """The plausibility cut of a method: "published" is what the published runs had."""
    top = RELATIVE_TOP[method] if relative_top == "published" else relative_top or 0
    if not 0 <= top <= 1:
        raise ValueError(f"relative_top {top} is no share; give a number from 0 to 1")
    return top


def likely(base, top):
    """Which tokens have at least `top` times the likeliest one's probability. base: log p, [..., V]."""
    return base >= base.amax(-1, keepdim=True) + math.log(top)


def contrasted(scores, base, other, alpha, top):
    """A Step; tokens below `top` times the likeliest one's probability score −∞."""
    if top:
        scores = scores.where(likely(base, top), -math.inf)
    h = entropy(base)
    return Step(scores, base, other, torch.full_like(h, alpha), h)


# ------------------------------------------------------------------------------------------------------- entry points

OPEN = {"cd": open_cd, "cad": open_cad, "dola-low": open_dola, "dola-high": open_dola, "ad": open_ad}
RELATIVE_TOP = {"cd": 0, "cad": 0, "dola-low": 0.1, "dola-high": 0.1, "ad": 0.1}  # as in the published runs
METHODS = (*decore.METHODS, *OPEN)


def generate(model, ids, method="cd", **settings):
    """Decode as decore.generate does: one prompt → one Generation, several → a list. Knows DeCoRe's methods too.

    settings: those of decore.generate, and alpha (cd, cad, ad), amateur (cd), ids_without_context (cad, in the form of
    ids), info_layer (ad), dola_layers (dola: "transformers" or "halves"), repetition_penalty (dola; 1.05 in the
    published runs of Qwen2, whose generation configuration asks for it). relative_top: tokens below that share of the
    likeliest one's probability score −∞; None or 0: none does; "published": 0.1 for dola and ad, none for cd and cad.
    `alphas` are the weight of what is subtracted: α, and 1 for dola."""
    if settings.get("ids_without_context") is not None and not is_batch(ids):
        settings["ids_without_context"] = [settings["ids_without_context"]]
    return decore.generate(model, ids, method, opener=opener_of(method), **settings)


@torch.inference_mode()
def score(model, prompt_ids, answer_ids, method="cd", prompt_ids_without_context=None, **settings):
    """Score of an answer after a prompt, summed over its tokens, as decore.score; of several answers, a list.

    settings: as in `generate`, but relative_top matters to return_greedy alone and repetition_penalty to nothing;
    dola_layers is "halves" where not given. renormalise: log-softmax over the contrasted scores first. Without it cad
    sums raw scores, no log-probabilities; the scores of ad are never normalised again."""
    if method in decore.METHODS:
        return decore.score(model, prompt_ids, answer_ids, method, **settings)
    if prompt_ids_without_context is not None:
        settings["ids_without_context"] = [prompt_ids_without_context]
    settings = {name: value for name, value in settings.items() if name != "repetition_penalty"}
    top, settings["relative_top"] = share_of(method, settings.get("relative_top", "published")), None
    if top and settings.get("return_greedy"):
        settings["likely"] = lambda step: likely(step.base, top)
    if method.startswith("dola"):
        settings = {"dola_layers": "halves"} | settings
    if method != "ad":
        return decore.score(model, prompt_ids, answer_ids, method, opener=opener_of(method), **settings)
    prompt, answers = check_answers(model, prompt_ids, answer_ids, settings)
    how = {name: settings[name] for name in ("info_layer", "alpha") if name in settings}
    out = [math.fsum(scores[i, token].item() for i, token in enumerate(answer))
           for answer, scores in zip(answers, score_ad(model, prompt, answers, **how), strict=True)]
    return out if is_batch(answer_ids) else out[0]


def opener_of(method):
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; known: {', '.join(METHODS)}")
    return OPEN.get(method, decore.open_decore)


# --------------------------------------------------------------------------------------------------------- command line


def main():
    from cli.program import main
    from heads import choose_heads
    main("Decode with the methods that DeCoRe is compared with, or with DeCoRe.", generate, METHODS, "dola-low",
         choose_heads)


if __name__ == "__main__":
    from cli import run
    sys.exit(run(main))
