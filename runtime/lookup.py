"""Prompt lookup decoding: several tokens per pass, the same text.

Answers that are faithful to a passage copy from it. So we propose the tokens that followed the last occurrence of the
current n-gram, check them in one pass, and accept the longest prefix that the argmax chooses as well. This is
speculative decoding (Leviathan et al. 2023) with the text itself as the draft."""

import torch

SIZES = (3, 2)                  # lengths of the n-grams, the longer match first
LONGEST_PAUSE = 63              # steps without a proposal after many misses
TRIAL = 1                       # tokens proposed after a miss, until a proposal is right again


class Text:
    """A text that proposes its own next tokens."""

    def __init__(self, ids):
        self.ids, self.after = [], {}           # after: n-gram → the position after its last occurrence
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
        starts = [self.after[tuple(self.ids[-n:])] for n in SIZES if tuple(self.ids[-n:]) in self.after]
        if self.pause or not starts:
            return []
        period = len(self.ids) - starts[0]
        return [self.ids[starts[0] + i % period] for i in range(min(k, TRIAL) if self.misses else k)]

    def judge(self, proposed, accepted):
        """Pause after misses (1, 7, 31, then 63 steps), so that proposals are rare in texts that copy nothing."""
        if not proposed:
            self.pause = max(0, self.pause - 1)
        elif 4 * accepted >= proposed:
            self.misses = 0
        else:
            self.misses += 1
            self.pause = min(2**(2 * self.misses - 1) - 1, LONGEST_PAUSE)


def look_up(step, sessions, prompts, out, max_new_tokens, k):
    """Like `on_host`, with up to k + 1 tokens a step: for each step and text a list of new (token, score, α, H).

    sessions: those of `step`, with k slots more than tokens to decode. out: the texts' Generations; those with a `stop`
    have ended."""
    texts, device = [Text(prompt) for prompt in prompts], sessions[0].model.device
    unread = 0                          # last tokens of each text to read; the first step reads the prompts' by itself
    while True:
        proposals = [[] if g.stop else text.propose(min(k, max_new_tokens - len(g.ids) - 1))
                     for g, text in zip(out, texts, strict=True)]
        width = 1 + max(map(len, proposals))
        if device.type == "cuda" and width > 1:
            width = k + 1                                       # two shapes, so two graphs
        tokens = [text.ids[len(text.ids) - unread:] + p + [0] * (width - 1 - len(p))
                  for text, p in zip(texts, proposals, strict=True)]
        unread = 1
        scores, _, _, alpha, entropy = step(torch.tensor(tokens, dtype=torch.long, device=device))
        best, token = scores.max(-1)
        rows, new = torch.stack([token.float(), best, alpha, entropy], -1).tolist(), []                 # [B][T][4]
        for text, proposal, row in zip(texts, proposals, rows, strict=True):
            chosen = [int(token) for token, *_ in row]
            n = next((i for i, (a, b) in enumerate(zip(proposal, chosen, strict=False)) if a != b), len(proposal))
            text.judge(len(proposal), n)
            text.extend(chosen[:n + 1])
            new.append(row[:n + 1])
        yield new
        rejected = [width - (0 if g.stop else len(row)) for g, row in zip(out, new, strict=True)]
        for session in sessions:                                # CAD's cache has two entries for each text
            session.cache.take_back(rejected * (len(session.cache.lengths) // len(rejected)))
