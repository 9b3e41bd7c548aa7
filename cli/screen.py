"""Prints texts while they are decoded."""


class Screen:
    """Prints the texts of a batch: the first one as it grows, the others at the end.

    `texts` holds them, each up to its stop string. Characters that may become a stop string are printed later."""

    def __init__(self, tokenizer, titles, stop=(), quiet=False):
        """titles: what to print before each text. stop: strings before which a text ends. quiet: print nothing."""
        self.eos_ids, self.titles, self.stop, self.quiet = tokenizer.eos_ids, titles, stop, quiet
        self.streams = [tokenizer.stream() for _ in titles]                     # None after a stop string
        self.texts, self.printed = ["" for _ in titles], [0 for _ in titles]    # printed: characters

    def token(self, b, token, entropy):
        """Add a token to the b-th text. Returns whether a stop string ends the text (`on_token` of generate)."""
        if token not in self.eos_ids:
            self.add(b, self.streams[b].push(token))
        if b == 0:
            self.print(0, max(map(len, self.stop), default=1) - 1)
        return self.streams[b] is None

    def add(self, b, new):
        self.texts[b] += new
        for string in self.stop:
            if string in self.texts[b]:
                self.texts[b] = self.texts[b].partition(string)[0]
                self.streams[b] = None

    def print(self, b, held_back=0, end=""):
        """Print the rest of the b-th text, except the last `held_back` characters."""
        text = self.titles[b] + self.texts[b]
        until = max(len(text) - held_back, self.printed[b])
        if not self.quiet:
            print(text[self.printed[b]:until], end=end, flush=True)
        self.printed[b] = until

    def end(self):
        for b, stream in enumerate(self.streams):
            if stream:
                self.add(b, stream.end())
            self.print(b, end="\n\n" if len(self.streams) > 1 else "\n")
