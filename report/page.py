"""An item of stored runs as a page, token by token.

    python evaluate.py report page RUN.jsonl --item K [--against OTHER.jsonl …] [--html FILE]"""

import html
import sys
from pathlib import Path
from types import SimpleNamespace

import cli
from cli.page import answer_html, document, pieces
from report import stored
from tasks import find, prompts
from tasks.runs import prompt_key
from tasks.sources import load
from tokenizer import Tokenizer

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
    top = top_of(first, line, args.data, args.demos)
    path.write_text(document(title, [top, *parts]), encoding="utf-8")
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


def top_of(settings, line, data, demos):
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
            lines.append(("prompt", prompts.text(task, item, shown)))
        else:
            turns = prompts.messages(task, item, shown, settings["layout"])
            lines += [(turn["role"], turn["content"]) for turn in turns]
    else:
        lines.append(("question", line.get("question") or line.get("prompt") or "not stored"))
        lines.append(("note", "the whole prompt needs --data"))
    lines += [(name, "; ".join(map(str, line[name]))) for name in ("references", "memory") if line.get(name)]
    return "\n".join(f'<p class="prompt"><b>{name}</b> {html.escape(str(text))}</p>' for name, text in lines)


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
        return f'<h2>{html.escape(title)}</h2>\n<table>{cells}</table>\n<p class="note">log-probability in nats</p>'
    g = SimpleNamespace(ids=line["ids"], alphas=line["alphas"], entropies=line["entropies"], stop=line["stop"])
    told = tokenizer and "".join(text for text, _ in pieces(tokenizer, g.ids[:-1] if g.stop == "eos" else g.ids))
    if told is not None and told.strip() != line["prediction"].strip():
        raise ValueError(f"the tokenizer reads {told!r} where the run has {line['prediction']!r}: give --model with "
                         "the run's own")
    if told is None:
        return f'<h2>{html.escape(title)}</h2>\n<p>{html.escape(line["prediction"])}</p>'
    return answer_html(tokenizer, title, g, here)
