"""What `generate` returns: the tokens of a text, and their numbers."""

from dataclasses import dataclass, field

from runtime.page import page, texts_of


@dataclass(repr=False)
class Generation:
    """A decoded text. All lists but `prompt` have an entry for each new token."""

    ids: list = field(default_factory=list)  # the end token included
    alphas: list = field(default_factory=list)  # α as applied
    entropies: list = field(default_factory=list)  # H of the base row in nats, as in `Step`
    stop: str | None = None  # "eos", "length", or "stop" if a text or `on_token` ended it
    # With generate(…, tokenizer=…):
    text: str | None = None  # without the end token, and up to the first stop text
    # Texts of the tokens; those of unfinished characters: "".
    tokens: list = field(default_factory=list)
    prompt: list = field(default_factory=list)  # texts of the prompt's tokens
    best: list | None = None  # with best=k: see `best_tokens`
    sources: list | None = None  # of `find_sources`, if you store them here: the page shows them

    def __repr__(self):
        return f"Generation(ids={self.ids}, stop={self.stop!r}, text={self.text!r})"

    def append(self, token_id, alpha, entropy, best):
        """Add a token. best: its entry of `best`, if that is a list."""
        self.ids.append(token_id)
        self.alphas.append(alpha)
        self.entropies.append(entropy)
        if self.best is not None:
            self.best.append(best)

    def rows(self):
        """A dict for each token: `pandas.DataFrame(out.rows())`, `json.dumps(out.rows())`."""
        columns = dict(id=self.ids, token=self.tokens, alpha=self.alphas, entropy=self.entropies)
        if self.best:
            for row in self.best[0]:
                columns[row] = [entry[row] for entry in self.best]
        columns = {name: column for name, column in columns.items() if column}
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def read(self, tokenizer, prompt, stream):
        """Fill in the texts. prompt: ids. stream: it has received the new tokens."""
        stream.end()
        self.text = stream.text
        self.tokens = texts_of(tokenizer, self.ids)
        self.prompt = texts_of(tokenizer, prompt)
        for entry in self.best or ():
            for row, tokens in entry.items():
                entry[row] = [(id, tokenizer.decode([id]), p) for id, p in tokens]

    def _repr_html_(self):
        return page({"": self})._repr_html_() if self.tokens else None


def best_tokens(step, k):
    """The k most likely tokens of the base row and of the row that is subtracted, after each of B
    texts: [{"base": [(id, probability), …], "other": […]}]. With a tokenizer `generate` makes
    (id, text, probability) of them. step: a `Step` of one token."""
    rows = {}
    for name, log_p in (("base", step.base), ("other", step.other)):
        top = log_p[:, -1].exp().topk(k)
        pairs = zip(top.indices.tolist(), top.values.tolist())
        rows[name] = [list(zip(ids, values)) for ids, values in pairs]
    return [dict(zip(rows, both)) for both in zip(*rows.values())]
