"""Decoded texts as an HTML page, page.html.

Tokens are shaded by base entropy. If the sources of answers are known, they are marked in the
prompt. Pointing at a token shows its numbers, marks its own sources and scrolls the prompt to the
strongest; pointing at a token of the prompt marks what was copied from it. `page.html#g1h` opens
the page as if you pointed at the title of the second answer, #g1t0 at its first token."""

import html
from functools import cache
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from jinja2 import Template

STYLE = "width: 100%; height: 36rem; border: 0; resize: vertical"
FRAME = f'<iframe srcdoc="{{}}" style="{STYLE}"></iframe>'


@cache
def template():
    """page.html. Its `render` makes (title=…, parts=[…], command=…) a text."""
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return Template(text, autoescape=True, trim_blocks=True)


class Page(str):
    """A whole HTML page; a notebook shows it in a frame, so that its styles stay in it."""

    def _repr_html_(self):
        return FRAME.format(html.escape(self))


def page(answers, title=""):
    """A page of one prompt and its answers, {label: `Generation` of generate(…, tokenizer=…)}."""
    parts = [prompt_part(next(iter(answers.values())).prompt)]
    for i, (label, answer) in enumerate(answers.items()):
        parts.append(answer_part(f"g{i}", answer, parts[0]) | dict(title=label))
    return Page(template().render(title=title, parts=parts))


def prompt_part(texts, name="p0", title="", template=()):
    """A prompt for page.html. texts: of its tokens. template: the numbers of those pieces that come
    from a chat template."""
    return dict(name=name, title=title, pieces=pieces(texts), template=template)


def answer_part(name, answer, prompt):
    """A decoded text for page.html.

    name: unique on the page. answer: a `Generation`. prompt: the part of its prompt."""
    written = pieces(answer.tokens)
    links = find_links(name, written, prompt, answer.sources) if answer.sources else {}
    strongest = dict(pair for pair, _ in sorted(links.items(), key=itemgetter(1)))
    favourites = []  # (id, text, probability) of the base row's most likely token and the other's
    if answer.best and any(answer.alphas):  # something is contrasted
        favourites = [(entry["base"][0], entry["other"][0]) for entry in answer.best]
    tokens = []

    def differs(positions, row):
        return any(favourites[p][row][0] != answer.ids[p] for p in positions if favourites)

    for t, (text, positions) in enumerate(written):
        word = text.lstrip(" ")  # blanks are not shaded
        tokens.append(
            dict(
                blank=text.removesuffix(word),
                text=word,
                note="\n".join(notes_on(answer, positions, favourites)),
                entropy=max(answer.entropies[p] for p in positions),
                source=strongest.get(f"{name}t{t}"),
                differs=differs(positions, 1),
                left=differs(positions, 0),
            )
        )
    n = len(answer.ids)
    mean = fmean(answer.entropies)
    return dict(
        name=name,
        tokens=tokens,
        footer=f"{n} tokens, mean base entropy {mean:.3f} nats, stop: {answer.stop}",
        contrasted=favourites,
        links=links,
        source=strongest.get(f"{name}h"),
    )


def pieces(texts):
    """The texts of tokens → [(text, positions)] without empty ones, which belong to the next."""
    out, positions = [], []
    for position, text in enumerate(texts):
        positions.append(position)
        if text:
            out.append((text, positions))
            positions = []
    return out


def texts_of(tokenizer, ids):
    """The text of each token; together they are the text of all.

    A character that spans several tokens is the text of its last one, and special tokens have no
    text."""
    texts = [""] * len(ids)
    last = start = 0  # the last token with a text is the last of ids[last:start]
    for end in range(1, len(ids) + 1):
        # Decoded with the last one, since a text's first blank is not decoded.
        before = tokenizer.decode(ids[last:start])
        text = tokenizer.decode(ids[last:end])
        if len(text) > len(before) and (end == len(ids) or not text.endswith("\ufffd")):
            texts[end - 1] = text[len(before) :]
            last, start = start, end
    return texts


def notes_on(answer, positions, favourites):
    """Yields lines about tokens of a text."""
    for p in positions:
        yield f"base entropy {answer.entropies[p]:.3f} nats"
        if favourites or answer.alphas[p]:
            yield f"α {answer.alphas[p]:.3f}"
        if favourites:
            (greedy, greedy_text, of_greedy), (_, text, probability) = favourites[p]
            yield f"masked favourite {text!r} ({probability:.0%})"
            if greedy != answer.ids[p]:
                yield f"greedy would take {greedy_text!r} ({of_greedy:.0%})"
        for position, share in answer.sources[p] if answer.sources else ():
            source = answer.prompt[position]
            yield f"from {source!r} at {position} ({share:.0%} of the heads)"


def find_links(name, written, prompt, sources):
    """{(id pointed at, id marked): largest share of the heads}, ids of elements.

    A generated piece points at the pieces that it was copied from, and the reverse; the title
    points at all of them."""
    piece_of = {  # position in the prompt → the id of its piece
        position: f"{prompt['name']}s{i}"
        for i, (_, positions) in enumerate(prompt["pieces"])
        for position in positions
    }
    links = {}
    for t, (_, positions) in enumerate(written):
        token = f"{name}t{t}"
        for p in positions:
            for position, share in sources[p]:
                if position not in piece_of:
                    continue
                source = piece_of[position]
                for pair in (token, source), (source, token), (f"{name}h", source):
                    links[pair] = max(share, links.get(pair, 0))
    return links
