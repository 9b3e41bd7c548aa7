"""One item of stored runs as a page: prompt, references and each run's answer, with a mark if it is right or wrong.

    python evaluate.py report page RUN.jsonl --item K [--against OTHER.jsonl …] [--html FILE]"""

import html
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import cli
from cli.page import MARK, answer_html, document
from report import stored
from tasks import find, metrics, prompts
from tasks.runs import prompt_key
from tasks.sources import load
from tokenizer import Tokenizer

VERDICTS = ("substring_match", "exact_match", "mc1", "micro")       # the first that a task has says right or wrong
load_tokenizer = cache(Tokenizer.load)


def main(argv):
    p = cli.parser("One item of a stored run as a page; with --against, of several runs below each other.")
    p.add_argument("run", metavar="RUN.jsonl")
    p.add_argument("--item", type=int, required=True, metavar="K", help="its index in the data, from 0")
    p.add_argument("--against", nargs="+", action="extend", default=[], metavar="OTHER.jsonl",
                   help="runs of the same task to show below")
    p.add_argument("--html", metavar="FILE", help="(default: in the run's folder, named by the item)")
    p.add_argument("--data", type=Path, metavar="FILE", help="the run's data, for the complete prompt: runs do not "
                   "store passages")
    p.add_argument("--demos", type=Path, metavar="FILE", help="the run's demonstrations, for the same purpose")
    p.add_argument("--model", metavar="M", help="folder of the tokenizer (default: the run's model)")
    args = p.parse_args(argv)
    items = [read_item(path, args.item) for path in [args.run, *args.against]]
    settings, line = items[0]
    parts = [prompt_part(settings, line, args.data, args.demos)]
    for number, (other, answer) in enumerate(items):
        if other["task"] != settings["task"]:
            raise ValueError(f"{args.run} is a run of {settings['task']}, --against has one of {other['task']}")
        model, _, setup = stored.describe(other)
        title = f"{model}: {setup}" + " (with another prompt)" * (prompt_key(answer) != prompt_key(line))
        parts.append(answer_part(title, other, answer, f"g{number}", args.model))
    path = Path(args.html or f"{str(args.run).split('.jsonl')[0]}.item{args.item}.html")
    path.write_text(document(f"{settings['task']}, item {args.item}", parts), encoding="utf-8")
    print(path)


def read_item(path, index):
    """(settings, line) of one item of a run."""
    settings, lines = stored.read_lines(path)
    for line in lines:
        if line["index"] == index:
            return settings, line
    raise ValueError(f"{path} has no item {index}; it has {len(lines)} items, counted from 0")


def prompt_part(settings, line, data, demos):
    """Prompt and references as HTML. The prompt is built from `data`; the miniature's data are generated."""
    task = find(settings["task"])
    if data or task.name.startswith("miniature-"):
        items, records, demonstrations, record = load(task, data, demos, line["index"] + 1, settings.get("seed", 1234))
        check_files("data", records, settings.get("data"))
        check_files("demos", [record], [settings.get("demos")])
        item = items[line["index"]]
        texts = [("prompt", prompts.plain_text(task, item, demonstrations))]
        if settings["layout"] != "plain":
            turns = prompts.messages(task, item, demonstrations, settings["layout"])
            texts = [(turn["role"], turn["content"]) for turn in turns]
    else:
        texts = [("question", line.get("question") or line.get("prompt") or "not stored"),
                 ("note", "the complete prompt needs --data")]
    texts += [(name, "; ".join(line[name])) for name in ("references", "memory") if line.get(name)]
    return "\n".join(f'<p class="prompt"><b>{name}</b> {html.escape(text)}</p>' for name, text in texts)


def check_files(option, records, stored_records):
    """Raises ValueError if these are not the run's files."""
    hashes, expected = ([record["sha256"] for record in each or () if record and "sha256" in record]
                        for each in (records, stored_records))
    if expected and hashes != expected:
        raise ValueError(f"--{option} is not the run's file, {stored_records}")


def answer_part(title, settings, line, name, model):
    """One run's answer as HTML; for multiple choice its candidates, best first.

    name: unique on the page. model: the tokenizer's, None for the run's."""
    task = find(settings["task"])
    values = metrics.score(task, [line])[0] if task.running else {}         # without: metrics that need a model
    right = next((values[verdict] == 1 for verdict in VERDICTS if values.get(verdict) is not None), None)
    if "scores_true" in line:
        return candidates_html(title, line, name, right)
    tokenizer = load_tokenizer(model or settings["model"])
    g = SimpleNamespace(**{key: line[key] for key in ("ids", "alphas", "entropies", "stop")})
    text = tokenizer.decode(g.ids[:-1] if g.stop == "eos" else g.ids)
    if text.strip() != line["prediction"].strip():
        raise ValueError(f"the tokenizer reads {text!r}, but the run has {line['prediction']!r}: give --model with the "
                         "run's own tokenizer")
    return answer_html(tokenizer, title, g, name, right=right)


def candidates_html(title, line, name, right):
    kinds = [("right", "true")] * len(line["scores_true"]) + [("wrong", "false")] * len(line["scores_false"])
    candidates = sorted(zip(line["scores_true"] + line["scores_false"], kinds, line["candidates"], strict=True),
                        key=lambda candidate: candidate[0], reverse=True)
    rows = "".join(f'<tr><td>{score:.2f}</td><td class="{style}">{kind}</td><td>{html.escape(text)}</td></tr>'
                   for score, (style, kind), text in candidates)
    return (f'<section class="answer" id="{name}"><h2>{html.escape(title)}{MARK[right]}</h2>\n<table>{rows}</table>\n'
            "<small>log-probability in nats</small></section>")
