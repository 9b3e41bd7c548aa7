"""Decoded texts as an HTML page, page.html.

Tokens are shaded by base entropy. If the sources of answers are known, they are marked in the
prompt. Pointing at a token shows its numbers and marks its own sources, and pointing at a token of
the prompt marks what was copied from it. `page.html#g1h` opens the page as if you pointed at the
title of the second answer, #g1t0 at its first token."""

from pathlib import Path
from statistics import fmean

import torch
from jinja2 import Environment, FileSystemLoader

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
)
render = TEMPLATES.get_template("page.html").render  # (title=…, parts=[…]) → the page as a text


def write_page(path, model, tokenizer, answers, decoder):
    """Write each prompt and its answers. answers: per method, (one line of --json per prompt, its
    settings).

    decoder: DeCoRe."""
    parts = []
    for b, lines in enumerate(zip(*(lines for lines, _ in answers), strict=True)):
        prompt = dict(name=f"p{b}", pieces=pieces(tokenizer, lines[0]["prompt_ids"]))
        parts.append(prompt)
        for i, (line, (batch, settings)) in enumerate(zip(lines, answers, strict=True)):
            is_decore = line["method"].startswith("decore")
            favourites = masked_favourites(model, line, settings, decoder) if is_decore else None
            parts.append(
                answer_part(
                    tokenizer, line["method"], f"g{i * len(batch) + b}", line, prompt, favourites
                )
            )
    if model.shard.rank == 0:
        Path(path).write_text(render(title=model.name, parts=parts), encoding="utf-8")


@torch.inference_mode()
def masked_favourites(model, line, settings, decoder):
    """The most likely token of the masked model, or of the amateur, at each position: [(token,
    probability)]."""
    prompt, ids = line["prompt_ids"], line["ids"]
    tokens = torch.tensor([[prompt[-1], *ids[:-1]]], device=model.device)
    log_p, token = decoder(model, [prompt], len(ids), **settings).step(tokens).other[0].max(-1)
    return list(zip(token.tolist(), log_p.exp().tolist(), strict=True))


def answer_part(tokenizer, title, name, line, prompt=None, favourites=None, verdict=None):
    """One decoded text for page.html.

    name: unique on the page. line: has ids, alphas, entropies and stop; to mark sources also
    prompt_ids and sources.
    prompt: the part of the prompt. favourites: those of `masked_favourites`. verdict: "right",
    "wrong" or None."""
    ids, entropies, sources = line["ids"], line["entropies"], line.get("sources")
    written, tokens = pieces(tokenizer, ids[:-1] if line["stop"] == "eos" else ids), []
    for text, positions in written:
        notes = [note for p in positions for note in notes_on(tokenizer, line, p, favourites)]
        tokens.append(
            dict(
                text=text,
                note="\n".join(notes),
                entropy=max(entropies[p] for p in positions),
                differs=favourites and any(favourites[p][0] != ids[p] for p in positions),
            )
        )
    mean = fmean(entropies or [0])
    footer = f"{len(ids)} tokens, mean base entropy {mean:.3f} nats, stop: {line['stop']}"
    return dict(
        name=name,
        title=title,
        verdict=verdict,
        tokens=tokens,
        footer=footer,
        contrasted=favourites,
        links=find_links(name, written, prompt, sources) if sources else {},
    )


def pieces(tokenizer, ids):
    """[(text, positions of its ids)].

    A character may span several tokens, and special tokens have no text."""
    out, last, start = [], 0, 0  # the last piece is that of ids[last:start]
    for end in range(1, len(ids) + 1):
        # Decoded with the last piece, since a text's first blank is not decoded.
        before, text = (tokenizer.decode(ids[last:at]) for at in (start, end))
        if len(text) > len(before) and (end == len(ids) or not text.endswith("\ufffd")):
            out.append((text[len(before) :], range(start, end)))
            last, start = start, end
    return out


def notes_on(tokenizer, line, p, favourites):
    """Yields lines about the p-th token of a text."""
    yield f"base entropy {line['entropies'][p]:.3f} nats"
    if favourites or line["alphas"][p]:
        yield f"α {line['alphas'][p]:.3f}"
    if favourites:
        token, probability = favourites[p]
        yield f"masked favourite {tokenizer.decode([token])!r} ({probability:.0%})"
    for position, share in line["sources"][p] if line.get("sources") else ():
        source = tokenizer.decode([line["prompt_ids"][position]])
        yield f"from {source!r} at {position} ({share:.0%} of the heads)"


def find_links(name, written, prompt, sources):
    """{(id pointed at, id marked): largest share of the heads}, ids of elements.

    A generated piece points at the pieces that it was copied from, and the reverse; the title
    points at all of them."""
    piece_of = {
        p: f"{prompt['name']}s{i}"
        for i, (_, positions) in enumerate(prompt["pieces"])
        for p in positions
    }
    links = {}
    for t, (_, positions) in enumerate(written):
        for position, share in (
            source for p in positions for source in sources[p] if source[0] in piece_of
        ):
            source, token = piece_of[position], f"{name}t{t}"
            for pair in ((token, source), (source, token), (f"{name}h", source)):
                links[pair] = max(share, links.get(pair, 0))
    return links
