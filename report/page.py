"""One item of stored runs as a page: prompt, references and each run's answer, with a mark if it is right or wrong.

    python evaluate.py report page RUN.jsonl --item K [--against OTHER.jsonl …] [--html FILE]"""

import html
import sys
from pathlib import Path
from types import SimpleNamespace

import cli
from cli.page import MARK, answer_html, document, pieces
from report import stored
from tasks import find, metrics, prompts
from tasks.runs import prompt_key
from tasks.sources import load
from tokenizer import Tokenizer

VERDICTS = ("substring_match", "exact_match", "mc1", "micro")       # the first that a task has says right or wrong


def main(argv):
    p = cli.parser("One item of a stored run as a page; with --against, of several runs below each other.")
    p.add_argument("run", metavar="RUN.jsonl")
    p.add_argument("--item", type=int, required=True, metavar="K", help="its index in the data, from 0")
    p.add_argument("--against", nargs="+", action="extend", default=[], metavar="OTHER.jsonl",
                   help="runs of the same task to show below")
    p.add_argument("--html", metavar="FILE", help="default: in the run's folder, named by the item")
    p.add_argument("--data", metavar="FILE", help="the run's data, for the whole prompt: runs do not store passages")
    p.add_argument("--demos", metavar="FILE", help="the run's demonstrations, likewise")
    p.add_argument("--model", metavar="M", help="folder of the tokenizer, if it is not the run's model")
    args = p.parse_args(argv)
    items = [item_of(path, args.item) for path in [args.run, *args.against]]
    settings, line = items[0]
    others = {other["task"] for other, _ in items} - {settings["task"]}
    if others:
        raise ValueError(f"{args.run} is a run of {settings['task']}, --against has one of {', '.join(others)}")
    parts, tokenizers = [prompt_part(settings, line, args.data, args.demos)], {}
    for number, item in enumerate(items):
        name = args.model or item[0]["model"]
        if name not in tokenizers:
            tokenizers[name] = load_tokenizer(name)
        parts.append(answer_part(tokenizers[name], *item, f"g{number}", line))
    path = Path(args.html or f"{str(args.run).split('.jsonl')[0]}.item{args.item}.html")
    path.write_text(document(f"{settings['task']}, item {args.item}", parts), encoding="utf-8")
    print(path)


def item_of(path, index):
    """(settings, line) of one item of a run."""
    try:
        settings, lines = stored.read_lines(path)
        metrics.check_rows(find(settings["task"]), lines, path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for line in lines:
        if line["index"] == index:
            return settings, line
    raise ValueError(f"{path} has no item {index}, but {len(lines)} others"
                     + f", {lines[0]['index']} to {lines[-1]['index']}" * bool(lines))


def load_tokenizer(name):
    """None, with a warning, if the tokenizer cannot be loaded: the texts then have no tokens to shade."""
    try:
        return Tokenizer.load(name)
    except (ValueError, OSError) as error:
        print(f"no shades: {error}; give --model with a folder that has the tokenizer", file=sys.stderr)
        return None


def prompt_part(settings, line, data, demos):
    """Prompt and references as HTML. The prompt is made again from the data if they are given or generated."""
    task, texts = find(settings["task"]), []
    if data is not None or task.name.startswith("miniature-"):
        items, records, shown, record = load(task, data and Path(data), demos and Path(demos), line["index"] + 1,
                                             settings.get("seed", 1234))
        for name, ours, theirs in (("data", records, settings.get("data")),
                                   ("demos", [record], [settings.get("demos")])):
            if checksums(theirs) not in ([], checksums(ours)):
                raise ValueError(f"--{name} is another file than the run's, {theirs}")
        item = items[line["index"]]
        if settings["layout"] == "plain":
            texts.append(("prompt", prompts.plain_text(task, item, shown)))
        else:
            turns = prompts.messages(task, item, shown, settings["layout"])
            texts += [(turn["role"], turn["content"]) for turn in turns]
    else:
        texts.append(("question", line.get("question") or line.get("prompt") or "not stored"))
        texts.append(("note", "the whole prompt needs --data"))
    texts += [(name, "; ".join(map(str, line[name]))) for name in ("references", "memory") if line.get(name)]
    return "\n".join(f'<p class="prompt"><b>{name}</b> {html.escape(str(text))}</p>' for name, text in texts)


def checksums(records):
    return [record["sha256"] for record in records or () if record and "sha256" in record]


def is_right(settings, line):
    """Whether the answer is right; None for a task whose answers have a score instead."""
    task = find(settings["task"])
    values = metrics.score(task, [line])[0] if task.running in (*VERDICTS, "mc2") else {}
    return next((values[name] == 1 for name in VERDICTS if values.get(name) is not None), None)


def answer_part(tokenizer, settings, line, name, first):
    """One run's answer as HTML; for multiple choice its candidates, best first.

    name: unique on the page. first: the line of the first run, whose prompt the page shows."""
    model, setup = stored.setup_of(settings)
    title = f"{model}: {setup}" + " (with another prompt)" * (prompt_key(line) != prompt_key(first))
    right = is_right(settings, line)
    if "scores_true" not in line and tokenizer:
        g = SimpleNamespace(**{key: line[key] for key in ("ids", "alphas", "entropies", "stop")})
        text = "".join(text for text, _ in pieces(tokenizer, g.ids[:-1] if g.stop == "eos" else g.ids))
        if text.strip() != line["prediction"].strip():
            raise ValueError(f"the tokenizer reads {text!r}, but the run has {line['prediction']!r}: give --model with "
                             "the run's own tokenizer")
        return answer_html(tokenizer, title, g, name, right=right)
    if "scores_true" in line:
        kinds = [("right", "true")] * len(line["scores_true"]) + [("wrong", "false")] * len(line["scores_false"])
        rows = sorted(zip(line["scores_true"] + line["scores_false"], kinds, line["candidates"], strict=True),
                      key=lambda row: row[0], reverse=True)
        body = "<table>" + "".join(
            f'<tr><td>{score:.2f}</td><td class="{style}">{kind}</td><td>{html.escape(text)}</td></tr>'
            for score, (style, kind), text in rows) + "</table>\n<small>log-probability in nats</small>"
    else:
        body = f"<p>{html.escape(line['prediction'])}</p>"
    return f'<section class="answer" id="{name}"><h2>{html.escape(title)}{MARK[right]}</h2>\n{body}</section>'
