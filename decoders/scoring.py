"""Scores of given answers by all methods: log-probabilities, for multiple choice.

As in the published multiple-choice runs, DeCoRe masks heads at every position, the exits of DoLa
are every second layer of a half, and AD's entropy is over the answer's positions too.

A answers of a prompt   T tokens of an answer   V vocabulary
"""

import math

import torch

from decoders.baselines import AD, DoLa, activations, find_decoder, plausible, threshold
from decoders.sweep import SharedRows
from decore import DeCoRe, pad
from runtime import checks

SCORED_AT_ONCE = 512  # answer tokens per pass


def score(
    model,
    prompt_ids,
    answer_ids,
    method="decore-entropy",
    prompt_ids_without_context=None,
    attention_mask=None,
    **settings,
):
    """Log-probability of an answer after a prompt, in nats, summed over its tokens; of several
    answers, a list. Several prompts with a list of answers each → a list of lists.

    prompt_ids_without_context: for cad, in the form of prompt_ids. attention_mask: of the prompts.
    settings: those of `loglikelihoods`."""
    prompts, _ = checks.unpack(prompt_ids, attention_mask)
    answers, in_form_of_answers = checks.unpack_answers(answer_ids)
    if prompt_ids_without_context is not None:
        settings["ids_without_context"] = prompt_ids_without_context
    sums, _ = loglikelihoods(model, prompts, answers, method, **settings)
    return in_form_of_answers(sums)


@torch.inference_mode()
def loglikelihoods(model, prompts, answers, method="decore-entropy", renormalise=True, **settings):
    """Two lists of B lists: the score of each answer, and whether greedy decoding gives it.

    The B prompts are one batch. prompts: B lists of ids. answers: B lists of lists of ids.
    renormalise: apply log-softmax to the contrasted scores, so that they are log-probabilities; the
    scores of ad are never normalised again. settings: as in `baselines.generate`, but relative_top
    affects only whether greedy decoding gives an answer, and repetition_penalty nothing. Heads are
    masked at every position, unless mask_prompt is False."""
    decoder = find_decoder(method, settings)
    prompts, answers, settings = checks.check_scoring(
        model, prompts, answers, method, decoder, settings
    )
    top = 0
    names = checks.argument_names(decoder)
    if "relative_top" in names:
        top = threshold(method, settings.get("relative_top"))
        settings["relative_top"] = 0
    if "mask_prompt" in names:
        settings = dict(mask_prompt=True) | settings
    if decoder is DoLa:
        settings = dict(dola_layers="halves") | settings | dict(repetition_penalty=1)
    capacity = max(map(len, sum(answers, []))) + (decoder is AD)  # it reads the last token too
    decoding = decoder(model, prompts, capacity, method, **settings)
    normalise = renormalise and decoder is not AD
    [result] = score_answers(decoding, prompts, answers, normalise, top)
    return result


@torch.inference_mode()
def loglikelihoods_of_runs(model, prompts, answers, runs):
    """The scores of `loglikelihoods` for each of several runs of DeCoRe with one `mask` and one
    `renormalise`; base and masked rows are read once for all. runs: the arguments of each, its
    method included."""
    checked = []
    renormalise = all(settings.get("renormalise", True) for settings in runs)
    for settings in runs:
        method = settings["method"]
        others = {name: v for name, v in settings.items() if name not in ("method", "renormalise")}
        prompts, answers, others = checks.check_scoring(
            model, prompts, answers, method, DeCoRe, others
        )
        checked.append(dict(method=method) | others)
    capacity = max(map(len, sum(answers, [])))
    decoding = SharedRows(model, prompts, capacity, checked)
    return [sums for sums, _ in score_answers(decoding, prompts, answers, renormalise)]


def score_answers(decoding, prompts, answers, renormalise, top=0):
    """The two lists of `loglikelihoods` for each run: the decoder's, or those of `SharedRows`."""
    steps = getattr(decoding, "steps", lambda tokens: [decoding.step(tokens)])
    caches = [session.cache for session in decoding.sessions]
    results = []
    for b, prompt in enumerate(prompts):
        for session, cache in zip(decoding.sessions, caches):
            session.cache = cache.select(torch.full([len(answers[b])], b))
        if isinstance(decoding, AD):
            read_answers(decoding, decoding.activations[b], prompt[-1:], answers[b])
        # No more numbers at once than the two rows of one run have.
        size = SCORED_AT_ONCE // (len(answers[b]) * max(1, len(caches) // 2))
        device = decoding.sessions[0].model.device
        passes = []
        for ids, tokens in passes_of(prompt[-1:], answers[b], max(1, size), device):
            passes.append([token_scores(x, ids, renormalise, top) for x in steps(tokens)])
        for run, parts in enumerate(zip(*passes)):
            values, chosen = (torch.cat(x, 1).tolist() for x in zip(*parts))
            if b == 0:
                results.append(([], []))
            sums, greedy = results[run]
            sums.append([math.fsum(x[: len(a)]) for x, a in zip(values, answers[b])])
            greedy.append([all(x[: len(a)]) for x, a in zip(chosen, answers[b])])
            checks.check_finite(sum(sums[b]), decoding.sessions[0].model)
    return results


def passes_of(last, answers, size, device):
    """Pairs (tokens of A answers, the tokens before each), [A, t] both, with t at most `size`.

    last: the prompt's last token, a list of one."""
    ids = pad(answers, device)  # [A, T]
    before = pad([last + answer[:-1] for answer in answers], device)
    return zip(ids.split(size, 1), before.split(size, 1))


def token_scores(result, ids, renormalise, top):
    """The score of each token of ids [A, t], by the `Step` before it, and whether greedy decoding
    chooses it among those that are `plausible`: [A, t] each."""
    scores = result.scores  # [A, t, V]
    candidates = scores.where(plausible(result.base, top), -math.inf) if top else scores
    chosen = candidates.argmax(-1) == ids
    if renormalise:
        scores = scores.log_softmax(-1)
    return scores.gather(-1, ids[..., None])[..., 0], chosen


def read_answers(decoding, prompt, last, answers):
    """Set AD's spread to that over the positions of the prompt and of each of A answers.

    prompt: its `activations`. last: its last token, a list of one."""
    [session] = decoding.sessions
    model = session.model
    tokens = pad([last + answer for answer in answers], model.device)
    cache = session.cache.select(slice(None))  # the same texts, whose slots stay unused
    _, [x] = model.read_layers(tokens, [decoding.layer], cache)  # [1, A, 1 + T, D]
    texts = [x[0, a, 1 : 1 + len(answer)] for a, answer in enumerate(answers)]
    decoding.set_spread([activations(model, text, prompt) for text in texts])
