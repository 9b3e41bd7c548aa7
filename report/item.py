"""One item of stored runs as a page: question, references and each run's answer, with a mark if it is right or wrong.

    python evaluate.py report page RUN.jsonl --item K [--against OTHER.jsonl …] [--html FILE]"""

from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import cli
from program.page import answer_part, render
from report.stored import describe, read_lines
from tasks import find, metrics, prompts
from tasks.data import load
from tokenizer import Tokenizer

VERDICTS = ("substring_match", "exact_match", "mc1", "micro")       # the first that a task has says right or wrong


def main(argv):
    p = cli.parser("One item of a stored run as a page; with --against, of several runs below each other. Runs "
                   "store no passages: evaluate.py --task T --data FILE --dry-run prints complete prompts.")
    p.prog += " report page"
    p.add_argument("run", metavar="RUN.jsonl")
    p.add_argument("--item", type=int, required=True, metavar="K", help="its index in the data, from 0")
    p.add_argument("--against", nargs="+", action="extend", default=[], metavar="OTHER.jsonl",
                   help="runs of the same task to show below")
    p.add_argument("--html", metavar="FILE", help="(default: in the run's folder, named by the item)")
    p.add_argument("--model", metavar="M", help="folder of the tokenizer (default: the run's model)")
    args = p.parse_args(argv)
    items = [read_item(path, args.item) for path in [args.run, *args.against]]
    header, line = items[0]
    parts = [question_of(header, line)]
    parts += [{"label": name, "text": "; ".join(line[name])} for name in ("references", "memory") if line.get(name)]
    for number, (other, answer) in enumerate(items):
        if other["task"] != header["task"]:
            raise ValueError(f"{args.run} is a run of {header['task']}, --against has one of {other['task']}")
        model, _, setup = describe(other)
        same = answer.get("prompt_sha256") == line.get("prompt_sha256")
        title = f"{model}: {setup}" + ("" if same else " (with another prompt)")
        parts.append(answer_of(other, answer, title, f"g{number}", args.model))
    path = Path(args.html or f"{args.run.split('.jsonl')[0]}.item{args.item}.html")
    path.write_text(render(title=f"{header['task']}, item {args.item}", parts=parts), encoding="utf-8")
    print(path)


def read_item(path, index):
    """(header, line) of one item of a run."""
    header, lines = read_lines(path)
    for line in lines:
        if line["index"] == index:
            return header, line
    raise ValueError(f"{path} has no item {index}; it has {len(lines)} items, counted from 0")


def question_of(header, line):
    """The question. Runs store no passages: the miniature's prompts are made again."""
    task = find(header["task"])
    if task.made_by:
        items, _, demos, _ = load(task, limit=line["index"] + 1)
        return {"label": "prompt", "text": prompts.plain_text(task, items[-1], demos)}
    return {"label": "question", "text": line.get("question") or line.get("prompt") or "not stored"}


def answer_of(header, line, title, name, model):
    """One run's answer for page.html; for multiple choice its candidates, best first.

    name: unique on the page. model: the tokenizer's, None for the run's."""
    task = find(header["task"])
    light = [metric for metric in task.metrics if metric.__module__ == metrics.__name__]     # need no model
    values = metrics.compute(replace(task, metrics=light), [line])[0]
    value = next((values[metric] for metric in VERDICTS if values.get(metric) is not None), None)
    verdict = None if value is None else "right" if value == 1 else "wrong"
    if task.choice:
        true, false = line["scores_true"], line["scores_false"]
        is_true = [True] * len(true) + [False] * len(false)
        candidates = zip(true + false, is_true, line["candidates"], strict=True)
        candidates = sorted(candidates, key=itemgetter(0), reverse=True)
        return dict(name=name, title=title, verdict=verdict, candidates=candidates, footer="log-probability in nats")
    tokenizer = Tokenizer.load(model or header["model"])
    text = tokenizer.decode(line["ids"][:-1] if line["stop"] == "eos" else line["ids"])
    if text.strip() != line["prediction"].strip():
        raise ValueError(f"the tokenizer reads {text!r}, but the run has {line['prediction']!r}: give --model with the "
                         "run's own tokenizer")
    return answer_part(tokenizer, title, name, line, verdict=verdict)
