"""The words of the prompt that an answer was copied from, for people."""

from collections import Counter
from heapq import nlargest

from cli.page import pieces

SHOWN = 3  # words of the prompt that are printed for a new word
LINES = 8  # new words that are printed for an answer


def sources_below(line, tokenizer, width):
    """Text below an answer, without sources nothing: for each of its words, the words of the prompt
    that the heads attended to most. Of many words it shows those with the largest shares.

    line: an object of --json."""
    if "sources" not in line:
        return ""
    ids = line["ids"][:-1] if line["stop"] == "eos" else line["ids"]
    word_of = {}  # position in the prompt → its word
    for word, positions in words(tokenizer, line["prompt_ids"]):
        word_of |= dict.fromkeys(positions, word)
    rows = []  # (the largest share, a line)
    for word, positions in words(tokenizer, ids):
        shares = Counter()
        tokens = [line["sources"][p] for p in positions if line["sources"][p]]
        for sources in tokens:
            for position, share in sources:
                if position in word_of:
                    shares[word_of[position]] += share / len(tokens)
        best = shares.most_common(SHOWN)
        if best:
            sources = ", ".join(f"{source} {share:.0%}" for source, share in best)
            rows.append((best[0][1], f"\n{'':{width}}  {word} ← {sources}"))
    shown = nlargest(LINES, range(len(rows)), key=lambda i: rows[i][0])
    below = "".join(rows[i][1] for i in sorted(shown))
    hidden = len(rows) - len(shown)
    return below + (f"\n{'':{width}}  … and {hidden} more words" if hidden else "")


def words(tokenizer, ids):
    """[(word, positions of its ids)] of a text."""
    out = []
    for text, positions in pieces(tokenizer, ids):
        if not out or text[0].isspace() or out[-1][0][-1].isspace():
            out.append(["", []])
        out[-1][0] += text
        out[-1][1] += positions
    return [(word.strip(), positions) for word, positions in out if word.strip()]
