"""Prints texts while they are decoded, on a terminal with entropy as shade."""

import os
import sys
from itertools import groupby

from cli.page import STRONGEST
from tokenizer import cut

AMBER = (230, 229, 222, 221, 215, 214, 208)             # backgrounds of the 256-colour palette, by rising entropy


class Screen:
    """Prints the texts of a batch: the first one as it grows, the others at the end.

    `texts` holds them, each up to its stop string. Characters that may become a stop string are printed later."""

    def __init__(self, tokenizer, titles, stop=(), quiet=False):
        """titles: what to print before each text. stop: strings before which a text ends. quiet: print nothing."""
        self.eos_ids, self.titles, self.stop, self.quiet = tokenizer.eos_ids, [*titles], stop, quiet
        self.streams = [tokenizer.stream() for _ in titles]
        self.texts, self.colours = ["" for _ in titles], [[] for _ in titles]           # a colour per character
        self.printed = [0 for _ in titles]                                              # characters
        self.shaded = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def token(self, b, token, entropy):
        """Add a token to the b-th text. Returns whether a stop string ends the text (`on_token` of generate)."""
        ended = self.add(b, "" if token in self.eos_ids else self.streams[b].push(token), entropy)
        if b == 0:
            held_back = 0 if ended else max(map(len, self.stop), default=1) - 1
            self.print(0, len(self.texts[0]) - held_back)
        return ended

    def add(self, b, new, entropy):
        colour = None
        if self.shaded and entropy >= 0.02:
            colour = AMBER[min(int(entropy / STRONGEST * len(AMBER)), len(AMBER) - 1)]
        self.colours[b] += [colour] * len(new)
        text = self.texts[b] + new
        self.texts[b] = cut(text, self.stop)
        if self.texts[b] != text:
            self.streams[b] = None
        return self.streams[b] is None

    def print(self, b, end):
        """Print the b-th text up to character `end`."""
        if self.quiet:
            return
        print(self.titles[b], end="")
        self.titles[b] = ""
        for colour, places in groupby(range(self.printed[b], end), key=self.colours[b].__getitem__):
            part = "".join(self.texts[b][i] for i in places)
            shade = f"\x1b[30;48;5;{colour}m"
            print(part if colour is None else shade + part.replace("\n", f"\x1b[0m\n{shade}") + "\x1b[0m", end="")
        self.printed[b] = max(self.printed[b], end)
        sys.stdout.flush()

    def end(self):
        for b, stream in enumerate(self.streams):
            if stream:
                self.add(b, stream.end(), 0)
            self.print(b, len(self.texts[b]))
            if not self.quiet:
                print(end="\n\n" if len(self.streams) > 1 else "\n", flush=True)
