"""Answers in a terminal, and the words of the prompt that they were copied from."""

from collections import Counter
from heapq import nlargest

from runtime.page import pieces, texts_of

SHOWN = 3  # words of the prompt that are printed for a new word
LINES = 8  # new words that are printed for an answer


class Texts:
    """Decodes the tokens of a batch's answers. Prints the texts in the order of the prompts: each
    as it grows, once those before it are complete.

    stop: strings that end a text. beginnings: what is printed before each text; end: after it.
    holds_ends: a text is complete when `complete` says so, not at its end token. quiet: nothing is
    printed."""

    def __init__(self, tokenizer, stop, beginnings, end, holds_ends, quiet):
        self.streams = [tokenizer.stream(stop) for _ in beginnings]
        self.eos_ids = tokenizer.eos_ids
        self.end = end
        self.holds_ends = holds_ends
        self.waiting = list(beginnings)  # to be printed, of each text
        self.completed = set()
        self.current = len(beginnings) if quiet else 0  # the text that is printed as it grows

    def push(self, b, token, entropy):
        """The argument `on_token` of `generate`."""
        stream = self.streams[b]
        is_end = token in self.eos_ids
        if not is_end:
            self.waiting[b] += stream.push(token)
        if (is_end or stream.ended) and not self.holds_ends:
            self.complete(b)
        self.print()
        return stream.ended

    def text(self, b):
        """A whole text."""
        self.waiting[b] += self.streams[b].end()
        return self.streams[b].text

    def complete(self, b, below=""):
        """End a text, with more text below it."""
        if b not in self.completed:
            self.text(b)
            self.waiting[b] += below + self.end
            self.completed.add(b)
            self.print()

    def interrupt(self):
        """Print what the texts are by now."""
        if any(stream.ids for stream in self.streams):
            for b in range(len(self.streams)):
                self.complete(b)

    def print(self):
        while self.current < len(self.waiting):
            print(self.waiting[self.current], end="", flush=True)
            self.waiting[self.current] = ""
            if self.current not in self.completed:
                break
            self.current += 1


def sources_below(line, tokenizer, width):
    """Text below an answer, if it has sources: for each of its words, the words of the prompt that
    the heads attended to most. Of many words it shows those with the largest shares.

    line: an object of --json."""
    if "sources" not in line:
        return ""
    ids = line["ids"][:-1] if line["stop"] == "eos" else line["ids"]
    prompt = words_with_positions(tokenizer, line["prompt_ids"])
    word_of = {position: word for word, positions in prompt for position in positions}
    rows = []  # (the largest share, a line)
    silent = 0  # words whose tokens have no sources
    for word, positions in words_with_positions(tokenizer, ids):
        shares = Counter()
        tokens = [line["sources"][p] for p in positions if line["sources"][p]]
        for sources in tokens:
            for position, share in sources:
                if position in word_of:
                    shares[word_of[position]] += share / len(tokens)
        best = shares.most_common(SHOWN)
        if best:
            sources = [f"{source} {share:.0%}" for source, share in best]
            if len(shares) > len(best):
                sources.append(f"{len(shares) - len(best)} more")
            rows.append((best[0][1], f"\n{'':{width}}  {word} ← {', '.join(sources)}"))
        else:
            silent += 1
    shown = nlargest(LINES, range(len(rows)), key=lambda i: rows[i][0])
    below = "".join(rows[i][1] for i in sorted(shown))
    if len(rows) > len(shown):
        below += f"\n{'':{width}}  … and {len(rows) - len(shown)} more words"
    if silent:
        why = "the heads attended to special tokens or blanks"
        below += f"\n{'':{width}}  {silent} of {silent + len(rows)} words have no source: {why}"
    return below


def words_with_positions(tokenizer, ids):
    """[(word, positions of its ids)] of a text."""
    out = []
    for text, positions in pieces(texts_of(tokenizer, ids)):
        if not out or text[0].isspace() or out[-1][0][-1].isspace():
            out.append(["", []])
        out[-1][0] += text
        out[-1][1] += positions
    return [(word.strip(), positions) for word, positions in out if word.strip()]
