"""Drafts from the text itself: several tokens in one pass, and the same tokens.

A model that copies its context repeats it. So the ids that followed the text's last ones at their
latest earlier place are a draft of its next tokens. One pass reads the last token and the draft. As
long as the method chooses the drafted tokens, the pass has their scores already; the tokens after
that are taken back."""

import warnings

import torch

# How many ids at the end of a text were found earlier → the part of `most` that is drafted.
PARTS = {3: 1, 2: 1 / 2, 1: 1 / 4}


def drafted(decoding, step, record, prompt, most, limit):
    """A step of one text, as `step`, that needs fewer passes.

    step: that of the decoding. record(decoding, tokens): a step for tokens of that shape. most:
    tokens of a draft. limit: tokens that the text can still take."""
    if not all(session.model.can_take_back for session in decoding.sessions):
        warnings.warn("nothing is drafted: the cache cannot take tokens back", stacklevel=3)
        return step
    return Drafted(decoding, step, record, prompt, most, limit).step


class Drafted:
    def __init__(self, decoding, step, record, prompt, most, limit):
        self.decoding = decoding
        self.one = step
        self.device = decoding.sessions[0].model.device
        # Recorded steps have one shape.
        self.fixed = all(session.model.can_record for session in decoding.sessions)
        shape = torch.zeros(1, 1 + most, dtype=torch.long, device=self.device)
        self.several = record(decoding, shape) if self.fixed and most < limit else decoding.step
        self.most = most
        self.left = limit  # tokens that the cache can still take
        self.text = Text(prompt[:-1])
        self.draft = []  # drafted tokens of the last pass that are not chosen yet

    def step(self, token):
        """As `Decoding.step`, [1, 1] → a `Step` of [1, 1, V]."""
        [[token_id]] = token.tolist()
        self.text.append(token_id)
        if self.draft[:1] == [token_id]:
            self.draft = self.draft[1:]
            self.place += 1
        else:
            self.read(token_id)
            self.place = 0
        self.left -= 1
        return self.result._make(x[:, self.place : self.place + 1] for x in self.result)

    def read(self, token_id):
        """Take back what is left of the last draft, and read a token with a new one."""
        if self.draft:
            for session in self.decoding.sessions:
                session.cache.take_back(len(self.draft))
        self.draft = self.text.draft(min(self.most, self.left - 1))
        if self.fixed and self.draft:
            fill = self.most - len(self.draft)
            self.draft = (self.draft + [0] * fill) * (self.left > self.most)
        tokens = torch.tensor([[token_id, *self.draft]], device=self.device)
        self.result = self.several(tokens) if self.draft else self.one(tokens)


class Text:
    """Ids, and where each few ids of them were last."""

    def __init__(self, ids):
        self.ids = []
        self.places = {}  # one to three ids → the latest place of an id after them
        for token_id in ids:
            self.append(token_id)

    def append(self, token_id):
        end = len(self.ids)
        for n in PARTS:
            if n <= end:
                self.places[(*self.ids[end - n :],)] = end
        self.ids.append(token_id)

    def draft(self, most):
        """Up to `most` ids that followed the last three, two or one at their latest earlier place;
        after fewer, a shorter draft. A text that repeats itself goes on so."""
        for n, part in PARTS.items():
            start = self.places.get((*self.ids[-n:],))
            if start is not None:
                period = len(self.ids) - start
                return [self.ids[start + i % period] for i in range(round(most * part))]
        return []
