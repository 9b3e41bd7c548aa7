"""Prints texts while they are decoded, on a terminal with entropy as shade."""

import os
import sys

AMBER = (230, 229, 222, 221, 215, 214, 208)             # backgrounds of the 256-colour palette, by rising entropy
STRONGEST = 2.0                                         # nats of the strongest shade


class Screen:
    """Prints the texts of a batch: the first one as it grows, the others at the end. `texts` holds them without colour.

    Text that may turn out to be the beginning of a stop string is held back."""

    def __init__(self, tokenizer, before, stop=(), silent=False):
        """before: what to print before each text. stop: strings before which a text ends. silent: print nothing."""
        self.tokenizer, self.stop, self.silent = tokenizer, stop, silent
        self.streams = [tokenizer.stream() for _ in before]
        self.held = [[] for _ in before]                # (piece of text, entropy of its token)
        self.texts, self.unprinted = ["" for _ in before], list(before)
        self.shaded = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def token(self, b, token, entropy):
        """Adds a token to the b-th text. Returns whether the text now holds a stop string (`on_token` of generate)."""
        piece = "" if token in self.tokenizer.eos_ids else self.streams[b].push(token)
        self.held[b].append((piece, entropy))
        n, stopped = certain_length("".join(text for text, _ in self.held[b]), self.stop)
        self.release(b, n)
        if stopped:
            self.held[b], self.streams[b] = [], self.tokenizer.stream()
        if b == 0:
            self.print(b)
        return stopped

    def release(self, b, n):
        """The first n held characters become text."""
        rest = []
        for piece, entropy in self.held[b]:
            self.texts[b] += piece[:n]
            self.unprinted[b] += self.shade(piece[:n], entropy)
            rest += [(piece[n:], entropy)] if piece[n:] else []
            n = max(n - len(piece), 0)
        self.held[b] = rest

    def print(self, b):
        if not self.silent:
            print(self.unprinted[b], end="", flush=True)
        self.unprinted[b] = ""

    def shade(self, text, entropy):
        if not self.shaded or entropy < 0.02:
            return text
        colour = AMBER[min(int(entropy / STRONGEST * len(AMBER)), len(AMBER) - 1)]
        return "\n".join(f"\x1b[30;48;5;{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n"))

    def end(self):
        for b, stream in enumerate(self.streams):
            self.held[b].append((stream.end(), 0.0))
            self.release(b, sum(len(piece) for piece, _ in self.held[b]))
            self.unprinted[b] += "\n\n" if len(self.streams) > 1 else "\n"
            self.print(b)


def certain_length(text, stop):
    """(characters of the text that no stop string can take away, whether the text holds a stop string)."""
    ends = [text.index(string) for string in stop if string in text]
    if ends:
        return min(ends), True
    begun = [n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])]
    return len(text) - max(begun, default=0), False
