"""Prints texts while they are decoded, on a terminal with entropy as shade."""

import os
import sys
from itertools import groupby

AMBER = (230, 229, 222, 221, 215, 214, 208)             # backgrounds of the 256-colour palette, by rising entropy
STRONGEST = 2.0                                         # nats of the strongest shade


class Screen:
    """Prints the texts of a batch: the first one as it grows, the others at the end.

    `texts` holds them, each up to its stop string. Characters that may become a stop string are printed later."""

    def __init__(self, tokenizer, before, stop=(), quiet=False):
        """before: what to print before each text. stop: strings before which a text ends. quiet: print nothing."""
        self.eos_ids, self.before, self.stop, self.quiet = tokenizer.eos_ids, before, stop, quiet
        self.streams = [tokenizer.stream() for _ in before]
        self.texts, self.printed = ["" for _ in before], [None for _ in before]         # printed: characters
        self.colours = [[] for _ in before]                                             # of each character
        self.shaded = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def token(self, b, token, entropy):
        """Add a token to the b-th text. Returns whether the text now holds a stop string (`on_token` of generate)."""
        text = self.texts[b] + ("" if token in self.eos_ids else self.streams[b].push(token))
        ends = [text.index(string) for string in self.stop if string in text]
        self.extend(b, text[:min(ends, default=len(text))], entropy)
        if ends:
            self.streams[b] = None
        if b == 0:
            self.print(b, 0 if ends else max(map(len, self.stop), default=1) - 1)
        return bool(ends)

    def extend(self, b, text, entropy=0.0):
        colour = None
        if self.shaded and entropy >= 0.02:
            colour = AMBER[min(int(entropy / STRONGEST * len(AMBER)), len(AMBER) - 1)]
        self.colours[b] += [colour] * (len(text) - len(self.texts[b]))
        self.texts[b] = text

    def print(self, b, held_back=0):
        """Print what is new of the b-th text, without the last characters."""
        if self.quiet:
            return
        if self.printed[b] is None:
            print(self.before[b], end="")
            self.printed[b] = 0
        end = max(len(self.texts[b]) - held_back, self.printed[b])
        for colour, places in groupby(range(self.printed[b], end), key=lambda i: self.colours[b][i]):
            part = "".join(self.texts[b][i] for i in places)
            shade = f"\x1b[30;48;5;{colour}m"
            print(part if colour is None else shade + part.replace("\n", f"\x1b[0m\n{shade}") + "\x1b[0m", end="")
        self.printed[b] = end
        sys.stdout.flush()

    def end(self):
        for b, stream in enumerate(self.streams):
            self.extend(b, self.texts[b] + (stream.end() if stream else ""))
            self.print(b)
            if not self.quiet:
                print(end="\n\n" if len(self.streams) > 1 else "\n", flush=True)
