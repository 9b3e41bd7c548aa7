"""Texts as a page to look at, token by token: live ones, and any item of a stored run.

    python decore.py --prompt "…" --compare --html FILE
    python evaluate.py report page RUN.jsonl --item K [--against OTHER.jsonl …] [--html FILE]

Tokens are shaded amber by base entropy, the entropy of the base model's next token. Pointing at one shows its numbers
and, where they are known, what the masked model liked best and the passage tokens that it was copied from; pointing at
a passage token shows what came of it. One file, no script, no server."""

import html
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import cli
from report import stored
from tasks import find, prompts
from tasks.runs import prompt_key
from tasks.sources import load
from tokenizer import Tokenizer

STRONGEST = 2.0                         # nats of the strongest shade
STYLE = """
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.7 Georgia, serif;
  color: #222; background: #fff }
h1 { font-size: 1rem; margin: 2rem 0 .3rem } p { white-space: pre-wrap; margin: .3rem 0; overflow-wrap: anywhere }
.prompt { color: #666 } .note { font-size: .8rem; color: #666 } table { border-spacing: 1rem .2rem }
.t, .s { position: relative; border-radius: 2px; cursor: default }
.t:focus, .s:focus { outline: 1px solid #b36b00 }
.t:hover::after, .t:focus::after { content: attr(data-note); position: absolute; left: 0; top: 1.6em;
  z-index: 1; white-space: pre;
  background: #222; color: #fff; font: 12px/1.5 monospace; padding: .3rem .5rem; border-radius: 3px }
.differs { border-bottom: 2px dotted #0072B2 }
"""
LIT = "background: #0072B2 !important; color: #fff"
ABOUT = (f"The darker the amber, the higher the base entropy (of masked, the masked model's); the strongest shade is "
         f"{STRONGEST:g} nats. Point at a token for its numbers.")
DOTTED = " Dotted line: the masked model liked another token best."
BLUE = " Blue: where the retrieval heads looked when they wrote the token, and what was written from there."


class Page:
    """`decore.generate`, which also writes all that it has decoded to a file, after every method.

    generate, opener: those of decore.py."""

    def __init__(self, path, setup, generate, opener):
        self.decode, self.opener = generate, opener
        self.path = Path(os.devnull if setup.model.shard.rank else path)
        self.tokenizer, self.name, self.parts = setup.tokenizer, setup.model.name, []
        self.path.write_text("", encoding="utf-8")              # a bad place is known before decoding

    def generate(self, model, prompts, method, **options):
        out = self.decode(model, prompts, method, **options)
        for prompt, g in zip(prompts, out, strict=True):
            contrasted = method.startswith("decore")
            liked = favourites(self.opener, model, prompt, g.ids, method, options) if contrasted else None
            title = method if options.get("amateur") is None else f"{method}-lite"
            self.parts.append(section(self.tokenizer, title, g, f"g{len(self.parts)}", liked, prompt))
        self.path.write_text(document(self.name, self.parts), encoding="utf-8")
        return out


@torch.inference_mode()
def favourites(opener, model, prompt, ids, method, options):
    """What the masked model, or the amateur, would have written at each place of a text → [(token, probability)]."""
    not_contrast = ("max_new_tokens", "eos_ids", "on_token", "lookup", "compile")
    contrast = {name: value for name, value in options.items() if name not in not_contrast}
    step, _ = opener(model, [prompt], len(ids), method, **contrast)
    log_p, token = step(torch.tensor([[prompt[-1], *ids[:-1]]], device=model.device)).other[0].max(-1)
    return list(zip(token.tolist(), log_p.exp().tolist(), strict=True))


# HTML

def document(name, parts, top=""):
    name, body = html.escape(name), "\n".join(parts)
    about = ABOUT + DOTTED * ("masked favourite" in body) + BLUE * (':has(' in body)
    return (f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>DeCoRe: {name}</title>\n'
            f'<style>{STYLE}</style>\n{top}{body}\n<p class="note">{name}. {about}</p>\n</html>\n')


def section(tokenizer, title, g, here, liked=None, prompt=None, sources=None):
    """One text.

    g: its ids, alphas, entropies and stop. here: a name for it within the page. liked: per token the masked model's
    favourite and its probability. prompt: ids of the prompt, shown in front. sources: per token [(position in the
    prompt, share of the heads that looked there)]."""
    sources = sources or getattr(g, "sources", None)
    ids = g.ids[:-1] if g.stop == "eos" else g.ids
    written = pieces(tokenizer, ids)
    before = "" if prompt is None else html.escape(tokenizer.decode(prompt))
    links = ""
    if sources and prompt is not None:
        read = pieces(tokenizer, prompt)
        before = "".join(f'<span class="s" id="{here}s{i}" tabindex="0">{html.escape(text)}</span>'
                         for i, (text, _) in enumerate(read))
        links = light(here, written, read, sources)
    spans = [span(text, positions, tokenizer, g, f"{here}t{i}", liked, sources and prompt and (prompt, sources))
             for i, (text, positions) in enumerate(written)]
    entropy = sum(g.entropies) / max(len(g.entropies), 1)
    text = f'<span class="prompt">{before}</span>{"".join(spans)}'
    return (f'<h1>{html.escape(title)}</h1>\n{links}<p id="{here}">{text}</p>\n'
            f'<p class="note">{len(g.ids)} tokens, mean base entropy {entropy:.3f} nats, stop: {g.stop}</p>')


def pieces(tokenizer, ids):
    """[(text, positions)]: the bytes of one letter may come in several tokens, and special tokens have no text."""
    stream, found, waiting = tokenizer.stream(), [], []
    for i, token in enumerate(ids):
        waiting.append(i)
        piece = stream.push(token)
        if piece:
            found.append((piece, waiting))
            waiting = []
    rest = stream.end()
    return found + [(rest, waiting or [len(ids) - 1])] * bool(rest)


def light(here, written, read, sources):
    """Style rules: pointing at a written piece lights up the pieces it was copied from, and the reverse."""
    place = {position: i for i, (_, positions) in enumerate(read) for position in positions}
    came = {}                           # piece of the prompt → pieces written from it
    rules = []
    for t, (_, positions) in enumerate(written):
        origins = sorted({place[where] for p in positions for where, _ in sources[p] if where in place})
        rules += [rule(here, f"t{t}", [f"s{s}" for s in origins])] * bool(origins)
        for s in origins:
            came.setdefault(s, []).append(f"t{t}")
    rules += [rule(here, f"s{s}", written_here) for s, written_here in sorted(came.items())]
    return "<style>" + "\n".join(rules) + "</style>\n"


def rule(here, pointed, lit):
    return (f"#{here}:has(#{here}{pointed}:is(:hover, :focus)) :is(" + ", ".join(f"#{here}{one}" for one in lit)
            + f") {{ {LIT} }}")


def span(text, positions, tokenizer, g, name, liked=None, origin=None):
    """The text of one token, or of the few that share it, with shade and note."""
    notes, differs = [], False
    for i in positions:
        note = f"base entropy {g.entropies[i]:.3f} nats" + f"\nα {g.alphas[i]:.3f}" * bool(liked or g.alphas[i])
        if liked:
            token, p = liked[i]
            differs |= token != g.ids[i]
            note += f"\nmasked favourite {tokenizer.decode([token])!r} ({p:.0%})"
        if origin:
            prompt, sources = origin
            note += "".join(f"\nfrom {tokenizer.decode([prompt[where]])!r} at {where} ({share:.0%} of the heads)"
                            for where, share in sources[i])
        notes.append(note)
    shade = min(max(g.entropies[i] for i in positions) / STRONGEST, 1)
    note = html.escape("\n".join(notes)).replace("\n", "&#10;")
    return (f'<span class="t{" differs" * differs}" id="{name}" tabindex="0" '
            f'style="background: rgba(255, 176, 0, {shade:.2f})" data-note="{note}">{html.escape(text)}</span>')


# An item of stored runs

def main(argv):
    p = cli.parser("One item of a stored run as a page; with --against, of several runs under each other.")
    p.add_argument("run", metavar="RUN.jsonl")
    p.add_argument("--item", type=int, required=True, metavar="K", help="its index in the data, from 0")
    p.add_argument("--against", nargs="+", action="extend", default=[], metavar="OTHER.jsonl",
                   help="runs of the same task to show below")
    p.add_argument("--html", metavar="FILE", help="default: beside the run, named by the item")
    p.add_argument("--data", metavar="FILE", help="the run's data, for the whole prompt: runs do not store passages")
    p.add_argument("--demos", metavar="FILE", help="its demonstrations, likewise")
    p.add_argument("--model", metavar="M", help="where the tokenizer is, if not where the run had it")
    args = p.parse_args(argv)
    found = [item_of(path, args.item) for path in [args.run, *args.against]]
    (first, line), others = found[0], {settings["task"] for settings, _ in found} - {found[0][0]["task"]}
    if others:
        raise ValueError(f"{args.run} is a run of {first['task']}, --against has one of {', '.join(others)}")
    tokenizers = {}
    parts = []
    for number, (settings, other) in enumerate(found):
        name = args.model or settings["model"]
        if name not in tokenizers:
            tokenizers[name] = tokenizer_of(name)
        parts.append(stored_section(tokenizers[name], settings, other, f"g{number}", line))
    path = Path(args.html or f"{str(args.run).split('.jsonl')[0]}.item{args.item}.html")
    title = f"{first['task']}, item {args.item}"
    path.write_text(document(title, parts, top_of(title, first, line, args.data, args.demos)), encoding="utf-8")
    print(path)


def item_of(path, index):
    """(settings, line) of one item of a run."""
    try:
        settings, lines = stored.read_lines(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    line = next((line for line in lines if line["index"] == index), None)
    if line is None:
        indices = [line["index"] for line in lines]
        raise ValueError(f"{path} has no item {index}" + (f"; it has {len(lines)}, {min(indices)} to {max(indices)}"
                                                          if lines else ", it is empty"))
    return settings, line


def tokenizer_of(name):
    """None, said on standard error, where the run's tokenizer is not at hand: then texts have no tokens to shade."""
    try:
        return Tokenizer.load(name)
    except (ValueError, OSError) as error:
        print(f"no shades: {error}; give --model with a folder that has the tokenizer", file=sys.stderr)
        return None


def top_of(title, settings, line, data, demos):
    """Prompt and references as HTML. The prompt is rebuilt from the data where they are given, or made by a script."""
    task, lines = find(settings["task"]), []
    if data is not None or task.name.startswith("miniature-"):
        items, records, shown, record = load(task, data and Path(data), demos and Path(demos), line["index"] + 1,
                                             settings.get("seed", 1234))
        for name, ours, theirs in (("data", records, settings.get("data")),
                                   ("demos", [record], [settings.get("demos")])):
            if checksums(theirs) not in ([], checksums(ours)):
                raise ValueError(f"--{name}: another file than the run's, {theirs}")
        item = items[line["index"]]
        if settings["layout"] == "plain":
            lines.append(("prompt", prompts.plain_text(task, item, shown)))
        else:
            turns = prompts.messages(task, item, shown, settings["layout"])
            lines += [(turn["role"], turn["content"]) for turn in turns]
    else:
        lines.append(("question", line.get("question") or line.get("prompt") or "not stored"))
        lines.append(("note", "the whole prompt needs --data"))
    lines += [(name, "; ".join(map(str, line[name]))) for name in ("references", "memory") if line.get(name)]
    told = "\n".join(f'<p class="prompt"><b>{name}</b> {html.escape(str(text))}</p>' for name, text in lines)
    return f"<h1>{html.escape(title)}</h1>\n{told}\n"


def checksums(records):
    return [record["sha256"] for record in records or () if record and "sha256" in record]


def stored_section(tokenizer, settings, line, here, first):
    """One run's text of the item; of multiple choice, its candidates by score."""
    model, setup = stored.setup_of(settings)
    title = f"{model}: {setup}"
    if prompt_key(line) != prompt_key(first):
        title += " (with another prompt)"
    if "scores_true" in line:
        scores = line["scores_true"] + line["scores_false"]
        rows = sorted(zip(scores, line["candidates"], range(len(scores)), strict=True), reverse=True)
        cells = "".join(f"<tr><td>{score:.2f}</td><td>{'true' if i < len(line['scores_true']) else 'false'}</td>"
                        f"<td>{html.escape(text)}</td></tr>" for score, text, i in rows)
        return f'<h1>{html.escape(title)}</h1>\n<table>{cells}</table>\n<p class="note">log-probability in nats</p>'
    g = SimpleNamespace(ids=line["ids"], alphas=line["alphas"], entropies=line["entropies"], stop=line["stop"])
    told = tokenizer and "".join(text for text, _ in pieces(tokenizer, g.ids[:-1] if g.stop == "eos" else g.ids))
    if told is not None and told.strip() != line["prediction"].strip():
        raise ValueError(f"the tokenizer reads {told!r} where the run has {line['prediction']!r}: give --model with "
                         "the run's own")
    if told is None:
        return f'<h1>{html.escape(title)}</h1>\n<p>{html.escape(line["prediction"])}</p>'
    return section(tokenizer, title, g, here)
