"""Prompt lookup decoding: several tokens per pass, the same text.

Answers that are faithful to a passage copy from it. So propose the tokens that followed the last occurrence of the
current n-gram, check them in one pass, and accept the longest prefix that the argmax chooses as well. This is
speculative decoding (Leviathan et al. 2023) with the text itself as the draft."""

import torch

SIZES = (3, 2)                  # lengths of the n-grams, the longer match first
LONGEST_PAUSE = 63              # tokens without a proposal after many misses
TRIAL = 1                       # tokens proposed after a miss, until a proposal is right again


class Text:
    """One text, the last occurrence of each of its n-grams, and whether proposals have paid."""

    def __init__(self, ids):
        self.ids, self.after = [], {}
        self.misses = self.pause = 0
        self.extend(ids)

    def extend(self, ids):
        for token in ids:
            for n in SIZES:
                if len(self.ids) >= n:
                    self.after[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)

    def propose(self, k):
        """At most k tokens: those after the last occurrence of the current n-gram, repeated if it overlaps the end."""
        places = [self.after[tuple(self.ids[-n:])] for n in SIZES if tuple(self.ids[-n:]) in self.after]
        if self.pause or not places:
            return []
        period = len(self.ids) - places[0]
        return [self.ids[places[0] + i % period] for i in range(min(k, TRIAL) if self.misses else k)]

    def judge(self, proposed, accepted):
        """Pause after misses (1, 7, 31, then 63 tokens), so that proposals are rare in texts that copy nothing."""
        if not proposed:
            self.pause = max(0, self.pause - 1)
        elif 4 * accepted >= proposed:
            self.misses = 0
        else:
            self.misses += 1
            self.pause = min(2**(2 * self.misses - 1) - 1, LONGEST_PAUSE)


def look_up(step, sessions, prompts, out, most, k):
    """As `on_host`, up to k + 1 tokens a step: for each step and text a list of new (token, score, α, H).

    sessions: those of `step`, with k slots more than tokens to decode. out: the texts' Generations; those with a `stop`
    have ended. most: new tokens of a text."""
    texts, device, last = [Text(prompt) for prompt in prompts], sessions[0].model.device, 0
    while True:
        proposals = [[] if g.stop else text.propose(min(k, most - len(g.ids) - 1))
                     for g, text in zip(out, texts, strict=True)]
        width = 1 + max(map(len, proposals))
        if device.type == "cuda" and width > 1:
            width = k + 1                                       # two shapes, so two graphs
        tokens = [text.ids[len(text.ids) - last:] + p + [0] * (width - 1 - len(p))
                  for text, p in zip(texts, proposals, strict=True)]
        last = 1                                                # the first step reads the prompts' last tokens itself
        scores, _, _, alpha, entropy = step(torch.tensor(tokens, dtype=torch.long, device=device))
        best, token = scores.max(-1)
        rows, new = torch.stack([token.float(), best, alpha, entropy], -1).tolist(), []                 # [B][T][4]
        for text, proposal, row in zip(texts, proposals, rows, strict=True):
            chosen = [int(one[0]) for one in row]
            n = next((i for i, (a, b) in enumerate(zip(proposal, chosen, strict=False)) if a != b), len(proposal))
            text.judge(len(proposal), n)
            text.extend(chosen[:n + 1])
            new.append(row[:n + 1])
        yield new
        rejected = [width - (0 if g.stop else len(row)) for g, row in zip(out, new, strict=True)]
        for session in sessions:
            session.cache.take_back(rejected * (len(session.cache.lengths) // len(rejected)))
