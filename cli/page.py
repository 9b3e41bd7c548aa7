"""Decoded texts as an HTML page, page.html.

Tokens are shaded by base entropy. If the sources of answers are known, they are marked in the
prompt. Pointing at a token shows its numbers, marks its own sources and scrolls the prompt to the
strongest; pointing at a token of the prompt marks what was copied from it. `page.html#g1h` opens
the page as if you pointed at the title of the second answer, #g1t0 at its first token."""

import os
import shlex
import sys
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import torch
from jinja2 import Template

from runtime.errors import InputError
from runtime.files import draft, named
from tokenizer import join_parts

PAGE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
# (title=…, parts=[…], command=…) → the page as a text
render = Template(PAGE, autoescape=True, trim_blocks=True).render


def write_page(path, model, amateur, tokenizer, prompts, answers):
    """Write each prompt and its answers, if this is the first rank.

    answers: (label, setup, an object of --json for each prompt) of each setup."""
    parts = []
    for b, prompt in enumerate(prompts):
        title = f"[{b + 1}] {prompt.title}" if len(prompts) > 1 else ""
        texts = pieces(tokenizer, prompt.ids)
        outside = template_pieces(texts, contents_of(prompt.fields))
        prompt = dict(name=f"p{b}", title=title, pieces=texts, template=outside)
        parts.append(prompt)
        for i, (label, setup, lines) in enumerate(answers):
            favourites = None
            if setup.method.startswith("decore"):
                favourites = find_favourites(model, lines[b], setup.record(amateur))
            name = f"g{i * len(prompts) + b}"
            part = answer_part(tokenizer, name, lines[b], prompt, favourites)
            parts.append(part | dict(title=label, details=details(setup)))
    if model.shard.rank == 0:
        command = shlex.join(["python", "decore.py", *sys.argv[1:]])
        text = render(title=model.name, parts=parts, command=command)
        write(path, text)


def write(path, text):
    """Write to a device, or replace a file."""
    if is_device(path):
        with named(path):
            path.write_text(text, encoding="utf-8")
        return
    with draft(path) as new:
        new.write_text(text, encoding="utf-8")


def check_writable(path):
    """InputError if a page cannot be written to the path."""
    written = path if is_device(path) else path.parent
    if path.is_dir() or not os.access(written, os.W_OK):
        raise InputError(
            f"--html {path} cannot be written: give a file in a folder that you may write to"
        )


def is_device(path):
    """Whether something like /dev/stdout has this path: it cannot be replaced."""
    return path.exists() and not path.is_file()


def details(setup):
    """A method's settings and heads in words."""
    words = list(setup.words().values())
    if setup.heads:
        words.append("heads masked: " + ", ".join(setup.header()["heads"]))
    return "; ".join(words)


@torch.inference_mode()
def find_favourites(model, line, method):
    """The most likely token at each position of the masked model, or of the amateur, and of the
    model itself: [((token, probability), (token, probability))]."""
    prompt, ids = line["prompt_ids"], line["ids"]
    tokens = torch.tensor([[prompt[-1], *ids[:-1]]], device=model.device)
    step = method.start(model, [prompt], len(ids)).step(tokens)
    lists = []
    for log_p, token in (step.other[0].max(-1), step.base[0].max(-1)):
        lists.append(zip(token.tolist(), log_p.exp().tolist()))
    return list(zip(*lists))


def answer_part(tokenizer, name, line, prompt, favourites=None):
    """One decoded text for page.html.

    name: unique on the page. line: an object of --json. prompt: the part of its prompt. favourites:
    those of `find_favourites`."""
    ids, entropies = line["ids"], line["entropies"]
    written = pieces(tokenizer, ids[:-1] if line["stop"] == "eos" else ids)
    links = find_links(name, written, prompt, line["sources"]) if "sources" in line else {}
    strongest = dict(pair for pair, _ in sorted(links.items(), key=itemgetter(1)))
    tokens = []
    for t, (text, positions) in enumerate(written):
        word = text.lstrip(" ")  # blanks are not shaded
        tokens.append(
            dict(
                blank=text.removesuffix(word),
                text=word,
                note="\n".join(notes_on(tokenizer, line, positions, favourites)),
                entropy=max(entropies[p] for p in positions),
                source=strongest.get(f"{name}t{t}"),
                differs=favourites and any(favourites[p][0][0] != ids[p] for p in positions),
                left=favourites and any(favourites[p][1][0] != ids[p] for p in positions),
            )
        )
    footer = (
        f"{len(ids)} tokens, mean base entropy {fmean(entropies):.3f} nats, stop: {line['stop']}"
    )
    return dict(
        name=name,
        tokens=tokens,
        footer=footer,
        contrasted=favourites,
        links=links,
        source=strongest.get(f"{name}h"),
    )


def contents_of(fields):
    """What a person wrote of a prompt, a list of texts. fields: those of its object."""
    messages = fields.get("messages", [{"content": fields.get("prompt", "")}])
    return [join_parts(message)["content"] for message in messages] + [fields.get("begin", "")]


def template_pieces(texts, contents):
    """The numbers of those pieces of a prompt that its chat template has added, such as roles.

    texts: of `pieces`. Empty if the template has changed the contents."""
    text = "".join(piece for piece, _ in texts)
    inside = set()  # characters
    end = len(text)
    for content in reversed(contents):
        start = text.rfind(content.strip(), 0, end)
        if start < 0:
            return set()
        inside.update(range(start, start + len(content.strip())))
        end = start
    outside, start = set(), 0
    for i, (piece, _) in enumerate(texts):
        if inside.isdisjoint(range(start, start + len(piece))):
            outside.add(i)
        start += len(piece)
    return outside


def pieces(tokenizer, ids):
    """[(text, positions of its ids)].

    A character may span several tokens, and special tokens have no text."""
    out = []
    last = start = 0  # the last piece is that of ids[last:start]
    for end in range(1, len(ids) + 1):
        # Decoded with the last piece, since a text's first blank is not decoded.
        before = tokenizer.decode(ids[last:start])
        text = tokenizer.decode(ids[last:end])
        if len(text) > len(before) and (end == len(ids) or not text.endswith("\ufffd")):
            out.append((text[len(before) :], range(start, end)))
            last, start = start, end
    return out


def notes_on(tokenizer, line, positions, favourites):
    """Yields lines about tokens of a text."""
    for p in positions:
        yield f"base entropy {line['entropies'][p]:.3f} nats"
        if favourites or line["alphas"][p]:
            yield f"α {line['alphas'][p]:.3f}"
        if favourites:
            (token, probability), (greedy, of_greedy) = favourites[p]
            yield f"masked favourite {tokenizer.decode([token])!r} ({probability:.0%})"
            if greedy != line["ids"][p]:
                yield f"greedy would take {tokenizer.decode([greedy])!r} ({of_greedy:.0%})"
        for position, share in line["sources"][p] if "sources" in line else ():
            source = tokenizer.decode([line["prompt_ids"][position]])
            yield f"from {source!r} at {position} ({share:.0%} of the heads)"


def find_links(name, written, prompt, sources):
    """{(id pointed at, id marked): largest share of the heads}, ids of elements.

    A generated piece points at the pieces that it was copied from, and the reverse; the title
    points at all of them."""
    piece_of = {}  # position in the prompt → the id of its piece
    for i, (_, positions) in enumerate(prompt["pieces"]):
        piece_of |= dict.fromkeys(positions, f"{prompt['name']}s{i}")
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
