"""One item of stored runs as a page: prompt, references and each run's answer, with a mark if it is right or wrong.

    python evaluate.py report page RUN.jsonl --item K [--against OTHER.jsonl …] [--html FILE]"""

from operator import itemgetter
from pathlib import Path

import cli
from cli.page import answer_part, render
from report.stored import describe, read_lines
from tasks import find, metrics, prompts
from tasks.data import load
from tokenizer import Tokenizer

VERDICTS = ("substring_match", "exact_match", "mc1", "micro")       # the first that a task has says right or wrong


def main(argv):
    p = cli.parser("One item of a stored run as a page; with --against, of several runs below each other.")
    p.prog += " report page"
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
    header, line = items[0]
    texts = prompt_texts(header, line, args.data, args.demos)
    texts += [(name, "; ".join(line[name])) for name in ("references", "memory") if line.get(name)]
    parts = [{"label": label, "text": text} for label, text in texts]
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


def prompt_texts(header, line, data, demos):
    """[(label, text)] of the prompt, built from the run's data. Those of the miniature are generated."""
    task = find(header["task"])
    if not data and not task.made_by:
        question = line.get("question") or line.get("prompt") or "not stored"
        return [("question", question), ("note", "the complete prompt needs --data")]
    items, records, demonstrations, record = load(task, data, demos, line["index"] + 1, header.get("seed", 1234))
    for option, files, expected in (("data", records, header["data"]), ("demos", [record], [header["demos"]])):
        if hashes(files) != hashes(expected):
            raise ValueError(f"--{option} is not the run's file, {expected}")
    prompt = prompts.dry_run(task, items[line["index"]], demonstrations, header["layout"])
    if header["layout"] == "plain":
        return [("prompt", prompt["text"])]
    return [(turn["role"], turn["content"]) for turn in prompt["messages"]]


def hashes(records):
    return [record.get("sha256") for record in records if record]


def answer_of(header, line, title, name, model):
    """One run's answer for page.html; for multiple choice its candidates, best first.

    name: unique on the page. model: the tokenizer's, None for the run's."""
    task = find(header["task"])
    values = metrics.compute(task, [line])[0] if task.running else {}         # without: metrics that need a model
    value = next((values[metric] for metric in VERDICTS if values.get(metric) is not None), None)
    verdict = None if value is None else "right" if value == 1 else "wrong"
    if task.choice:
        n_true, scores = len(line["scores_true"]), line["scores_true"] + line["scores_false"]
        candidates = [(score, number < n_true, text) for number, (score, text)
                      in enumerate(zip(scores, line["candidates"], strict=True))]
        candidates.sort(key=itemgetter(0), reverse=True)
        return dict(name=name, title=title, verdict=verdict, candidates=candidates, footer="log-probability in nats")
    tokenizer = Tokenizer.load(model or header["model"])
    text = tokenizer.decode(line["ids"][:-1] if line["stop"] == "eos" else line["ids"])
    if text.strip() != line["prediction"].strip():
        raise ValueError(f"the tokenizer reads {text!r}, but the run has {line['prediction']!r}: give --model with the "
                         "run's own tokenizer")
    return answer_part(tokenizer, title, name, line, verdict=verdict)
