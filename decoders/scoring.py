"""Scores of given answers by all methods: log-probabilities, for multiple choice.

As in the published multiple-choice runs, DeCoRe masks heads at every position, the exits of DoLa
are every second layer of a half, and AD's entropy is over the answer's positions too.

A answers of a prompt   T tokens of an answer   V vocabulary
"""

import math
from dataclasses import fields, replace

import torch

from decoders.baselines import AD, activations, plausible
from decoders.sweep import SharedDecoding
from decore import pad
from runtime import checks

SCORED_AT_ONCE = 512  # answer tokens per pass


def score(model, prompt_ids, answer_ids, method, renormalise=True):
    """Log-probability of an answer after a prompt, in nats, summed over its tokens; of several
    answers, a list. Several prompts with a list of answers each → a list of lists.

    method, renormalise: as in `loglikelihoods`."""
    prompts, _ = checks.unpack(prompt_ids)
    answers, in_form_of_answers = checks.unpack_answers(answer_ids)
    [(sums, _)] = loglikelihoods(model, prompts, answers, [method], renormalise)
    return in_form_of_answers(sums)


@torch.inference_mode()
def loglikelihoods(model, prompts, answers, methods, renormalise=True, on_prompt=None):
    """For each method two lists of B lists: the score of each answer, and whether greedy decoding
    gives it. Rows that several methods have are read once.

    The B prompts are one batch. prompts: B lists of ids. answers: B lists of lists of ids. methods:
    as in `generate`, but relative_top affects only whether greedy decoding gives an answer, and
    repetition_penalty nothing. renormalise: apply log-softmax to the contrasted scores, so that
    they are log-probabilities; the scores of ad are never normalised again. on_prompt() is called
    after each prompt."""
    tops = [getattr(method, "relative_top", 0) for method in methods]
    methods = [for_scoring(method) for method in methods]
    prompts, answers = checks.parse_scoring(model, prompts, answers, methods)
    reads_last = any(isinstance(method, AD) for method in methods)  # tokens of answers
    capacity = max(map(len, sum(answers, []))) + reads_last
    decoding = SharedDecoding(methods, model, prompts, capacity, one_text=True)
    caches = [session.cache for session in decoding.sessions]
    results = [([], []) for _ in methods]
    for b, (prompt, candidates) in enumerate(zip(prompts, answers)):
        for session, cache in zip(decoding.sessions, caches):
            session.cache = cache.select(torch.full([len(candidates)], b))
        tokens = pad([prompt[-1:] + answer for answer in candidates], model.device)
        for k, method in enumerate(methods):
            if isinstance(method, AD):
                read_answers(decoding.others[k], b, tokens, candidates)
        # No more numbers at once than the two rows of one run have.
        size = max(1, SCORED_AT_ONCE // (len(candidates) * max(1, len(caches) // 2)))
        passes = zip(tokens[:, 1:].split(size, 1), tokens[:, :-1].split(size, 1))
        scored = read_passes(decoding, passes, renormalise, tops)
        for (sums, greedy), (values, chosen) in zip(results, scored):
            sums.append([math.fsum(x[: len(a)]) for x, a in zip(values, candidates)])
            greedy.append([all(x[: len(a)]) for x, a in zip(chosen, candidates)])
            checks.check_finite(model, *sums[b])
        if on_prompt:
            on_prompt()
    return results


def for_scoring(method):
    """A method with the settings that it has when it scores."""
    checks.check_record(method)
    changes = dict(mask_prompt=True, relative_top=0, repetition_penalty=1)
    changes["dola_layers"] = getattr(method, "dola_layers", None) or "halves"
    names = [field.name for field in fields(method)]
    return replace(method, **{name: v for name, v in changes.items() if name in names})


def read_passes(decoding, passes, renormalise, tops):
    """For each method two lists of A lists: the `token_scores` of A answers, up to the longest.

    passes: (tokens of the answers, the token before each), [A, t] both."""
    parts = [[] for _ in decoding.methods]
    for ids, before in passes:
        for k, step in enumerate(decoding.steps(before)):
            checks.check_not_nan(step.alpha.sum().item(), step.entropy.sum().item())
            normalise = renormalise and not isinstance(decoding.methods[k], AD)
            parts[k].append(token_scores(step, ids, normalise, tops[k]))
    return [[torch.cat(x, 1).tolist() for x in zip(*of_method)] for of_method in parts]


def token_scores(result, ids, renormalise, top):
    """The score of each token of ids [A, t], by the `Step` before it, and whether greedy decoding
    chooses it among those that are `plausible`: [A, t] each."""
    scores = result.scores  # [A, t, V]
    candidates = scores.where(plausible(result.base, top), -math.inf) if top else scores
    chosen = candidates.argmax(-1) == ids
    if renormalise:
        scores = scores.log_softmax(-1)
    return scores.gather(-1, ids[..., None])[..., 0], chosen


def read_answers(decoding, b, tokens, answers):
    """Set AD's spread to that over the positions of prompt b and of each of its A answers.

    decoding: an `ADDecoding`. tokens: the prompt's last one and the answer's, [A, 1 + T]."""
    [session] = decoding.sessions
    model = session.model
    cache = session.cache.select(slice(None))  # the same texts, whose slots stay unused
    _, [x] = model.read_layers(tokens, [decoding.method.info_layer], cache)  # [1, A, 1 + T, D]
    texts = [x[0, a, 1 : 1 + len(answer)] for a, answer in enumerate(answers)]
    decoding.set_spread([activations(model, text, decoding.activations[b]) for text in texts])
