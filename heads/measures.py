"""What a run measures of each head, while the model answers from a needle in its prompt.

* copy, that of the paper. A head *copies* at a step if the position with its largest attention
  weight lies in the needle and contains the token that the step generates. The score is
  |copied ∩ needle tokens| / |needle tokens|.
* write (LOCOS, arXiv 2607.01002): what the head adds to the logit of the generated token y. Key j
  with probability p_j and value v_j adds φ_j = p_j · u_y · W_O v_j, if u_y is y's row of the
  language-model head. The score is Σ_needle φ − (needle's tokens / other tokens) · Σ_other φ,
  the mean over the steps that generate a token of the needle.
* mass: the head's attention to the needle, Σ_needle p, the mean over the same steps.
* effect: how much the head adds to the preference d for an answer that stands in the prompt,
  ∂d/∂m_h at m = 1, if m is the head mask of Eq. 4 from the prompt's last token on. d is
  log p(answer | prompt), less log p(memory | prompt) if the model remembers another answer. In a
  run with a needle the answer is the needle's tokens.

    S generated tokens   B batch   P prompt tokens   L layers   H query heads   C keys in the cache
    G key/value heads    K head width
"""

from collections import Counter
from typing import NamedTuple

import torch

from decore import make_head_mask, pad, prefilled
from runtime.errors import InputError


class Answer(NamedTuple):
    """A generated text, and numbers of each head at the step that generates each token,
    [S, L, H]."""

    ids: list
    positions: torch.Tensor  # position of the largest attention weight
    mass: torch.Tensor
    write: torch.Tensor  # zeros if the model does not show its values


def score_run(
    model, prompt_ids, needle, max_new_tokens=50, eos_ids=(), published=False, measure="copy"
):
    """Scores of all heads in one run [L, H], and the generated ids.

    needle: (start, end) of its tokens in the prompt. published: end the answer and count copies as
    the published runs did. measure: "copy", "write" or "mass"."""
    prompt_ids = [int(i) for i in prompt_ids]
    if not 0 <= needle[0] < needle[1] <= len(prompt_ids):
        raise InputError(
            f"needle {tuple(needle)} is not a range of tokens in a prompt of {len(prompt_ids)}; "
            "give (first token, last token + 1)"
        )
    [answer] = answer_batch(model, [prompt_ids], [needle], max_new_tokens, eos_ids, published)
    return head_scores(answer, prompt_ids, needle, published)[measure], answer.ids


@torch.inference_mode()
def answer_batch(
    model,
    prompts,
    needles,
    max_new_tokens,
    eos_ids=(),
    published=False,
    cache=None,
    heads=(),
    on_step=None,
):
    """Greedy answers to a batch of prompts: one `Answer` per prompt.

    An answer stops after an id of `eos_ids` or max_new_tokens tokens; unless published, also once
    it contains every token of the needle as often as the needle does. cache: that of the prompts,
    if they are read. heads: masked from the prompts' last tokens on. on_step() is called after each
    step."""
    cache = cache or prefilled(model, prompts, max_new_tokens)
    head_mask = make_head_mask([heads], model)
    token = torch.tensor([ids[-1:] for ids in prompts], device=model.device)  # [B, 1]
    start, end = torch.tensor(needles, device=model.device).T[..., None]  # [B, 1] each
    targets = [Counter(ids[start:end]) for ids, (start, end) in zip(prompts, needles)]
    answers = [[] for _ in prompts]
    running = set(range(len(prompts)))
    steps = []
    while running:
        logits, layers = model.read_attention(token, cache, head_mask)
        token = logits[0].argmax(-1)
        key = torch.arange(layers[0].shape[-1], device=model.device)
        # Keys of new tokens are numbered from P on, after those of the padded prompts.
        position = torch.where(key < cache.P, key, key - cache.P + cache.lengths[:, None])
        inside = (position >= start) & (position < end)  # [B, C]
        others = cache.lengths[:, None] + 1 + len(steps) - (end - start)
        share = torch.where(inside, 1, (start - end) / others.clamp(min=1))
        layers = [p[0, :, 0] for p in layers]  # [1, B, 1, H, C] → [B, H, C]
        positions = [position.gather(1, p.argmax(-1)) for p in layers]
        mass = [(p * inside[:, None]).sum(-1) for p in layers]
        values = cache.values(len(key))
        # Not in float32: copies of the values fragment the memory, by gigabytes in 50 steps.
        read = values and [
            (p * share[:, None]).unflatten(1, (v.shape[1], -1)).to(v) @ v
            for p, v in zip(layers, values)  # [B, G, H/G, K]
        ]
        steps.append((torch.stack(positions), torch.stack(mass), read, token))
        if on_step:
            on_step()
        for b, new in enumerate(token[:, 0].tolist()):
            if b in running:
                answers[b].append(new)
                complete = targets[b] <= Counter(answers[b]) and not published
                if complete or new in eos_ids or len(answers[b]) == max_new_tokens:
                    running.remove(b)
    positions, mass, read, tokens = zip(*steps)
    mass = torch.stack(mass)  # [S, L, B, H]
    write = written(model, read, torch.cat(tokens, 1)) if read[0] else torch.zeros_like(mass)
    # Heads of all ranks.
    numbers = [model.shard.all_gather(x).cpu() for x in (torch.stack(positions), mass, write)]
    return [Answer(ids, *(x[: len(ids), :, b] for x in numbers)) for b, ids in enumerate(answers)]


def written(model, read, tokens):
    """What each head adds to the logit of each token: [S, L, B, H].

    read: of each step, sums of values: L of [B, G, H/G, K]. tokens: [B, S]."""
    rows = model.unembedding(tokens)  # [B, S, D]
    steps = []
    for s, layers in enumerate(read):
        logits = []
        for o, values in zip(model.output_projections(), layers):
            values = values.flatten(1, 2).to(model.dtype)  # [B, H, K]
            alone = torch.eye(values.shape[1]).to(values)[..., None] * values[:, None]
            alone = alone.flatten(-2)  # [B, H, H·K]: row h has head h only
            added = o(alone) - o(torch.zeros_like(alone[:1, :1]))  # without a bias
            logits.append((added.to(rows) @ rows[:, s, :, None])[..., 0])
        steps.append(torch.stack(logits))
    return torch.stack(steps)


def head_scores(answer, prompt_ids, needle, published=False):
    """{measure: scores of every head in one run, float64 [L, H]}.

    The paper's rule for copies counts each distinct token of the needle once, so a score is at most
    1. The published runs added 1 / (tokens of the needle) at every copy, repeats included. A needle
    that was not located, (-1, -1), scores 0."""
    start, end = needle
    ids, tokens = torch.tensor(prompt_ids), torch.tensor(answer.ids)
    inside = (answer.positions >= start) & (answer.positions < end)
    copies = inside & (ids[answer.positions.where(inside, 0)] == tokens[:, None, None])  # [S, L, H]
    distinct = set(prompt_ids[start:end])
    if published:
        copy = copies.sum(0).double() / max(end - start, 1)
    else:
        copy = sum(copies[tokens == token].any(0).double() for token in distinct) / len(distinct)
    steps = torch.tensor([token in distinct for token in answer.ids])
    write, mass = (
        x[steps].double().sum(0) / max(1, int(steps.sum())) for x in (answer.write, answer.mass)
    )
    return {"copy": copy, "write": write, "mass": mass}


@torch.inference_mode(False)
@torch.enable_grad()
def effects(model, prompts, answers, memories=None, cache=None):
    """The effect of each head on each of B answers, float64 [B, L, H].

    answers, memories: of each prompt, the ids after it; [] if there are none. cache: that of the
    prompts, if they are read; it does not change. Zeros if the model's products have no gradient.
    The prompts are read without one; what the backward pass keeps grows with the answers."""
    texts = [(b, ids, 1) for b, ids in enumerate(answers) if ids]
    texts += [(b, ids, -1) for b, ids in enumerate(memories or []) if ids]
    c = model.config
    head_mask = torch.ones(len(prompts), c.n_layers, c.n_heads, device=model.device)
    none = torch.zeros_like(head_mask, dtype=torch.float64).cpu()
    if not texts:
        return none
    head_mask.requires_grad_()
    cache = cache or prefilled(model, prompts, max(len(ids) for _, ids, _ in texts))
    places = torch.tensor([b for b, _, _ in texts], device=model.device)
    tokens = pad([[*prompts[b][-1:], *ids] for b, ids, _ in texts], model.device)
    logits = model(tokens[:, :-1], cache.select(places), head_mask[places][None])[0]
    log_p = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    signs = pad([[sign] * len(ids) for _, ids, sign in texts], model.device)  # 0 after an answer
    d = (log_p * signs).sum()
    if not d.requires_grad:
        return none
    # Every rank computes d; backward, their sum is what is differentiated.
    [gradient] = torch.autograd.grad(d / model.shard.size, head_mask)
    return model.shard.all_reduce(gradient).double().cpu()
