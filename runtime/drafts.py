"""Drafts from the text itself: several tokens in one pass, and the same tokens.

A model that copies its context repeats it. So the ids that followed the text's last ones at their
latest earlier place are a draft of its next tokens. One pass reads the last token and the draft. As
long as the method chooses the drafted tokens, the pass has their scores already; the tokens after
that are taken back."""

import math
import warnings

import torch

from runtime.graph import recorded

# How many ids at the end of a text were found earlier → the part of `most` that is drafted:
# docs/speed.md has the measurements.
PARTS = {4: 1, 3: 1 / 2, 2: 1 / 2, 1: 1 / 8}


def step_of(decoding, prompts, limit, draft, graph):
    """The step of a decoding, recorded as a CUDA graph if the models can.

    draft: of one prompt, up to so many tokens of a pass are drafted. limit: tokens that each text
    can still take."""
    models = [session.model for session in decoding.sessions]
    shape = torch.zeros(len(prompts), 1, dtype=torch.long, device=models[0].device)
    step = recorded(decoding, shape) if graph else decoding.step
    if not draft or len(prompts) > 1:
        return step
    if not all(model.can_take_back for model in models):
        warnings.warn("nothing is drafted: a cache cannot take tokens back", stacklevel=3)
        return step
    several = decoding.step
    fixed = graph and all(model.can_record for model in models)
    if fixed:
        several = recorded(decoding, shape.expand(1, min(1 + draft, limit)))
    text = Text(prompts[0][:-1], parts_for(models))
    return Drafted(decoding, step, several, fixed, text, draft, limit).step


def parts_for(models):
    """The `PARTS` of a text. On an Intel with AVX-512, plain products in float32 take twice as long
    for four vectors as for two: more than a draft after one id saves. Others were not measured."""
    dear = any(m.product == "plain" and m.dtype == torch.float32 for m in models)
    return {n: part for n, part in PARTS.items() if n > 1 or not dear}


class Drafted:
    """A step of one text that needs fewer passes.

    one, several: steps of one token, and of one and its draft; fixed: always of `most`."""

    def __init__(self, decoding, one, several, fixed, text, most, limit):
        self.decoding = decoding
        self.one = one
        self.several = several
        self.fixed = fixed
        self.most = min(most, limit - 1)
        self.left = limit  # tokens that the cache can still take
        self.text = text
        self.draft = []  # tokens of the last pass that are not chosen yet

    def step(self, token):
        """As `Decoding.step`, [1, 1] → a `Step` of [1, 1, V]."""
        [[token_id]] = token.tolist()
        self.text.append(token_id)
        if self.draft[:1] == [token_id]:
            self.draft = self.draft[1:]
            self.place += 1
        else:
            self.read(token)
            self.place = 0
        self.left -= 1
        return self.result._make(x[:, self.place : self.place + 1] for x in self.result)

    def read(self, token):
        """Take back what is left of the last draft, and read a token with a new one."""
        if self.draft:
            for session in self.decoding.sessions:
                session.cache.take_back(len(self.draft))
        self.draft = self.text.draft(min(self.most, self.left - 1))
        if self.fixed and self.draft:
            self.draft = (self.draft + [0] * self.most)[: self.most] * (self.left > self.most)
        step = self.several if self.draft else self.one
        self.result = step(torch.cat([token, token.new_tensor([self.draft]).long()], 1))


class Text:
    """Ids, and where each few ids of them were last. parts: see `PARTS`."""

    def __init__(self, ids, parts):
        self.ids = []
        self.parts = parts
        self.places = {}  # a few ids → the latest place of an id after them
        for token_id in ids:
            self.append(token_id)

    def append(self, token_id):
        end = len(self.ids)
        for n in self.parts:
            if n <= end:
                self.places[(*self.ids[end - n :],)] = end
        self.ids.append(token_id)

    def draft(self, most):
        """Up to `most` ids that followed the last ones at their latest earlier place; after fewer,
        a shorter draft. A text that repeats itself goes on so."""
        for n, part in self.parts.items():
            start = self.places.get((*self.ids[-n:],))
            if start is not None:
                period = len(self.ids) - start
                return [self.ids[start + i % period] for i in range(math.ceil(most * part))]
        return []
