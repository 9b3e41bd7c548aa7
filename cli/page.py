"""Decoded texts as an HTML page: one file, without scripts.

Tokens are shaded by base entropy. Pointing at a token shows its numbers and highlights its sources in the passage, if
they are known; pointing at a passage token highlights what was copied from it. `page.html#g1h` opens the page as if
you pointed at the title of the second answer, #g1t0 at its first token."""

import html
from pathlib import Path

import torch

from decore import open_decore

STRONGEST = 2.0                         # nats of the strongest shade
STYLE = """
body { max-width: 44rem; margin: 2.5rem auto; padding: 0 1.2rem; font: 17px/1.7 Georgia, serif; color: #1d1d1f;
  background: #fff }
h1 { font: 600 1.1rem/1.4 system-ui, sans-serif; margin: 0 0 1rem }
h2 { font: 600 .85rem/1.4 system-ui, sans-serif; margin: 0 0 .2rem; color: #0072B2 }
small, .note { font: .78rem/1.6 system-ui, sans-serif; color: #6e6e73 }
p { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
.prompt, .answer { padding: .9rem 1.1rem; margin: 0 0 .8rem; border-radius: 8px }
.prompt { background: #f5f5f7 } .answer { border: 1px solid #d2d2d7 }
.t, .s { position: relative; padding: .1em 0; border-radius: 3px; cursor: default }
.t { background: rgb(255 176 0 / var(--shade)) } .differs { border-bottom: 2px dotted #0072B2 }
.t:hover::after, .t:focus::after, .t:target::after { content: attr(data-note); position: absolute; left: 0; top: 1.8em;
  z-index: 1; white-space: pre; background: #1d1d1f; color: #fff; font: 12px/1.5 ui-monospace, monospace;
  padding: .4rem .6rem; border-radius: 6px }
.t:is(:hover, :focus, :target), .s:is(:hover, :focus) { outline: 1px solid #0072B2 } h2:focus { outline: none }
.right { color: #007a5a } .wrong { color: #b3401a } td { padding: 0 1rem .2rem 0; vertical-align: top }
.scale { display: inline-block; width: 5em; height: .8em; border-radius: 3px;
  background: linear-gradient(90deg, rgb(255 176 0 / 0), rgb(255 176 0)) }
"""
POINTED = ":is(:hover, :focus, :target)"
BLUE = "background: rgb(86 180 233"                     # followed by the opacity, the share of the heads
MARK = {None: "", True: ' <span class="right">✓ right</span>', False: ' <span class="wrong">✗ wrong</span>'}
ABOUT_SHADES = ('<span class="scale"></span> base entropy (of masked: the masked model\'s), '
                f"0 to {STRONGEST:g} nats or more. Point at a token for its numbers.")
ABOUT_LINES = " Dotted line: the masked model prefers another token."
ABOUT_SOURCES = (" Blue: what the retrieval heads attended to when the token was generated, darker for more heads. "
                 "Point at a title for all sources of its answer.")


def write_page(path, model, tokenizer, prompts, answers):
    """Write the prompts and the answers to each. answers: [(method, generations, settings, sources per prompt)]."""
    parts = []
    for b, prompt in enumerate(prompts):
        parts.append(prompt_html(tokenizer, prompt, f"p{b}"))
        for i, (method, out, settings, sources) in enumerate(answers):
            favourites = masked_favourites(model, prompt, out[b].ids, settings) if method.startswith("decore") else None
            parts.append(answer_html(tokenizer, method, out[b], f"g{i * len(prompts) + b}", favourites,
                                     (prompt, f"p{b}"), sources[b]))
    if model.shard.rank == 0:
        Path(path).write_text(document(model.name, parts), encoding="utf-8")


@torch.inference_mode()
def masked_favourites(model, prompt, ids, settings):
    """The most likely token of the masked model, or of the amateur, at each position: [(token, probability)]."""
    step, _ = open_decore(model, [prompt], len(ids), **settings)
    log_p, token = step(torch.tensor([ids[:-1]], dtype=torch.long)).other[0].max(-1)
    return list(zip(token.tolist(), log_p.exp().tolist(), strict=True))


def document(title, parts):
    """A complete page with these parts, which are HTML."""
    title, body = html.escape(title), "\n".join(parts)
    about = ABOUT_SHADES + ABOUT_LINES * ("masked favourite" in body) + ABOUT_SOURCES * (BLUE in body)
    return (f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>DeCoRe: {title}</title>\n'
            f'<style>{STYLE}</style>\n<h1>DeCoRe: {title}</h1>\n{body}\n<p class="note">{about}</p>\n</html>\n')


def prompt_html(tokenizer, prompt, name):
    """A prompt, each of its tokens with an id: name + "s" + number."""
    spans = "".join(f'<span class="s" id="{name}s{i}" tabindex="0">{html.escape(text)}</span>'
                    for i, (text, _) in enumerate(pieces(tokenizer, prompt)))
    return f'<p class="prompt" id="{name}">{spans}</p>'


def answer_html(tokenizer, title, g, name, favourites=None, prompt=None, sources=None, right=None):
    """One decoded text as HTML.

    g: has ids, alphas, entropies and stop. name: unique on the page. favourites: per token the masked model's (token,
    probability). prompt: (ids, name). sources: per token [(position in the prompt, share of the heads that attend to
    it)]. right: whether the answer is right; None if unknown."""
    written = pieces(tokenizer, g.ids[:-1] if g.stop == "eos" else g.ids)
    links = links_html(name, written, prompt[1], pieces(tokenizer, prompt[0]), sources) if sources else ""
    spans = ""
    for i, (text, positions) in enumerate(written):
        shade = min(max(g.entropies[p] for p in positions) / STRONGEST, 1)
        differs = favourites and any(favourites[p][0] != g.ids[p] for p in positions)
        lines = [html.escape(line) for p in positions for line in note(tokenizer, g, p, favourites, prompt, sources)]
        spans += (f'<span class="t{" differs" if differs else ""}" id="{name}t{i}" tabindex="0" '
                  f'style="--shade: {shade:.2f}" data-note="{"&#10;".join(lines)}">{html.escape(text)}</span>')
    entropy = sum(g.entropies) / max(len(g.entropies), 1)
    return (f'{links}<section class="answer" id="{name}">'
            f'<h2 id="{name}h" tabindex="0">{html.escape(title)}{MARK[right]}</h2>\n<p>{spans}</p>\n'
            f'<small>{len(g.ids)} tokens, mean base entropy {entropy:.3f} nats, stop: {g.stop}</small></section>')


def pieces(tokenizer, ids):
    """[(text, positions of its ids)]. A character may span several tokens, and special tokens have no text."""
    stream, out, unfinished = tokenizer.stream(), [], []
    for i, token in enumerate(ids):
        unfinished.append(i)
        text = stream.push(token)
        if text:
            out.append((text, unfinished))
            unfinished = []
    rest = stream.end()
    return out + [(rest, unfinished or [len(ids) - 1])] * bool(rest)


def note(tokenizer, g, i, favourites, prompt, sources):
    """Yields lines about the i-th token of a text."""
    yield f"base entropy {g.entropies[i]:.3f} nats"
    if favourites or g.alphas[i]:
        yield f"α {g.alphas[i]:.3f}"
    if favourites:
        token, p = favourites[i]
        yield f"masked favourite {tokenizer.decode([token])!r} ({p:.0%})"
    for position, share in sources[i] if sources else ():
        yield f"from {tokenizer.decode([prompt[0][position]])!r} at {position} ({share:.0%} of the heads)"


def links_html(name, written, prompt_name, read, sources):
    """Style rules. Pointing at a generated piece highlights the pieces it was copied from, and the reverse; pointing
    at the title of the answer highlights all of them."""
    piece_of = {position: i for i, (_, positions) in enumerate(read) for position in positions}
    shares = {}                                         # (pointed at, highlighted) → the largest share of the heads
    for t, (_, positions) in enumerate(written):
        for position, share in (source for p in positions for source in sources[p] if source[0] in piece_of):
            source, token = f"{prompt_name}s{piece_of[position]}", f"{name}t{t}"
            for pair in ((token, source), (source, token), (f"{name}h", source)):
                shares[pair] = max(share, shares.get(pair, 0))
    rules = (f":root:has(#{pointed}{POINTED}) #{other} {{ {BLUE} / {share:.2f}) }}"
             for (pointed, other), share in shares.items())
    return "<style>" + "\n".join(rules) + "</style>\n"
