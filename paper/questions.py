"""Measures heads by their effect on the answers to questions, as a program:

    python -m heads.detect --questions FILE --model M --out heads/scores/M.json
    python -m heads.detect --task nq-swap --data DIR --sample 20 --model M --out heads/scores/M.json

Of each question the first answer counts, and the first of `memory`; heads/measures.py defines the
effect. Other scores of the head file stay."""

import sys
import time
from itertools import product
from os.path import commonprefix
from pathlib import Path

from tqdm import tqdm

from cli import models
from cli.entry import run_program
from cli.options import add_model_arguments, comma_list, number, parser, positive, refuse_unused
from heads.reader import plain_name, read_head_file, usual_number
from paper import options
from paper.benchmark import load_benchmark
from paper.tasks import find_task, prompts, with_prompt
from paper.tasks.answers import first_sentence, same
from runtime import files
from runtime.checks import parse_prompts
from runtime.errors import InputError
from runtime.progress import say


def parse_args():
    p = parser(__doc__, prog="python -m heads.detect")
    add_model_arguments(p)
    origin = p.add_mutually_exclusive_group(required=True)
    origin.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="a table with the columns question, context and answers, and if there are any memory "
        "and begin: the data of the task qa (docs/own-data.md)",
    )
    origin.add_argument("--task", metavar="T", help="or the items of a task of evaluate.py")
    add = p.add_argument
    add("--data", type=Path, metavar="FILE", help="of --task, as for evaluate.py")
    add(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="head scores; of a file that exists, effect alone is replaced",
    )
    options.add_item_arguments(p)
    options.add_prompt_arguments(p)
    add("--seed", type=comma_list(number(int, 0)), help="of --sample (default: 1234)")
    add("--batch-size", type=positive, help="questions at once (default: 8)")
    p.set_defaults(max_new_tokens=None, min_new_tokens=None, random_heads=None)
    args = p.parse_args()
    if args.questions:
        refuse_unused(args, {"data": "with --questions"})
        args.task, args.data = "qa", args.questions
    if not args.sample:
        refuse_unused(args, {"seed": "without --sample"})
    args.sample_seed = options.sample_seed(args)
    return args


def chosen_task(args):
    """The task, with the prompt of the command line. InputError for options without effect on it,
    and if it has no answers to measure."""
    task = find_task(args.task)
    refuse_unused(args, dict.fromkeys(sorted(options.unused_by(task)), f"on {task.name}"))
    refuse_unused(args, {"eos": "on answers that are given"})
    if task.choice:
        raise InputError(f"{task.name} is multiple choice; give a task with questions to answer")
    return with_prompt(task, args.template, args.system)


def main():
    args = parse_args()
    task = chosen_task(args)
    checkpoint = models.read_model(args.model, args)
    content = stored_scores(args.out, checkpoint)
    bench = load_benchmark(task, args, checkpoint)
    texts = [ids_of(bench, item, checkpoint.tokenizer) for item in bench.items]
    read = [prompt + max(answers, key=len)[:-1] for prompt, *answers in texts]
    parse_prompts(checkpoint, read, "question with its longest answer")
    from heads.measures import effects  # imports torch

    model = models.load_model(checkpoint.checkpoint, args)
    models.limit_threads(model)
    start = time.perf_counter()
    totals = 0
    size = args.batch_size or 8
    for i in tqdm(range(0, len(texts), size), unit="batch", disable=model.shard.rank):
        totals += effects(model, *zip(*texts[i : i + size])).sum(0)
    if not totals.any():
        raise InputError(f"{model.name}: no head has an effect; its products have no gradient")
    kept = kept_without(model, checkpoint.tokenizer, bench, totals, size)
    if model.shard.rank:
        return
    seconds = time.perf_counter() - start
    content["effect"] = by_head(totals / len(texts))
    content["effect_facts"] = facts_of(bench, texts, model, args) | {"kept": kept}
    files.write(args.out, [content])
    print(f"effect on {len(texts)} answers in {seconds:.1f} s; wrote {args.out}")
    if kept:
        shares = ", ".join(f"{share:.0%} without {n}" for n, share in kept.items())
        print(f"answers without a passage that stay if the best heads are masked: {shares}")


def kept_without(model, tokenizer, bench, scores, size):
    """{number of best heads: share of the answers without a passage that stay as they are if these
    heads are masked}, or None if questions have no passage. Few: the heads break the text, so that
    their effect is none of reading.

    scores: [L, H]. An answer is the first sentence of at most twelve tokens."""
    from decoders.sweep import side_by_side  # imports torch
    from decore import Greedy, Masked

    questions = [e.without_context for e in bench.encoded]
    if not all(questions):
        return None
    L, H = scores.shape
    order = scores.flatten().argsort(descending=True).tolist()
    heads = [divmod(i, H) for i in order]
    numbers = [n for n in (1, 3, 10) if n <= usual_number(L, H)]
    methods = [Greedy(), *(Masked(heads[:n]) for n in numbers)]
    kept = dict.fromkeys(numbers, 0)
    for i in range(0, len(questions), size):
        batch = questions[i : i + size]
        out = side_by_side(model, batch, methods, max_new_tokens=12, tokenizer=tokenizer)
        plain, *masked = [[first_sentence(g.text) for g in texts] for texts in out]
        for n, texts in zip(numbers, masked):
            kept[n] += sum(map(same, texts, plain))
    return {str(n): round(count / len(questions), 3) for n, count in kept.items()}


def by_head(scores):
    """[L, H] → {"layer-head": score}."""
    heads = product(*map(range, scores.shape))
    return {f"{layer}-{head}": round(scores[layer, head].item(), 6) for layer, head in heads}


def facts_of(bench, texts, model, args):
    """Everything that determines the effect on questions."""
    return bench.header() | {
        "sample": args.sample,
        "memories": sum(bool(memory) for _, _, memory in texts),
        "ids": [item["id"] for item in bench.items],
        "questions": [key_of(item) for item in bench.items],
        "fingerprint": model.checkpoint.fingerprint,
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "engine": "transformers" if args.transformers else "own",
    }


def stored_scores(path, model):
    """The content of a head file, or that of a new one. model: `cli.models.Facts`. InputError
    for the file of another model."""
    L, H = model.config.n_layers, model.config.n_heads
    new = {"model": model.name, "n_layers": L, "n_heads": H}
    if not path.exists():
        return new
    content = read_head_file(path)
    same = plain_name(content.get("model", model.name)) == plain_name(model.name)
    layers, heads = content.get("n_layers", L), content.get("n_heads", H)
    if not same or (layers, heads) != (L, H):
        raise InputError(
            f"--out {path} holds the heads of {content.get('model')} ({layers} layers of {heads}), "
            f"not of {model.name} ({L} layers of {H}); choose another --out"
        )
    return new | content if "model" in content or not content else new | {"scores": content}


def ids_of(bench, item, tokenizer):
    """(prompt, first answer, first memorised answer) of an item, lists of ids; without a memory,
    the last is [].

    The answers' ids are those that follow the prompt's in the encoding of both. If the prompt's
    last token would merge with one of them, it is part of the answers."""
    if not item["references"]:
        raise InputError(f"{bench.task.name}: item {item['id']} has no answer to measure")

    def encode(begin):
        begun = item | ({"begin": begin} if begin else {})
        how = bench.demos, tokenizer, bench.layout, bench.template_args
        return prompts.item_to_ids(bench.task, begun, *how).prompt

    begin = item.get("begin", "")
    answers = item["references"][:1] + item.get("memory", [])[:1]
    prompt, *texts = map(encode, [begin, *(f"{begin} {text}".strip() for text in answers)])
    n = len(commonprefix([prompt, *texts]))
    answer, memory = [ids[n:] for ids in texts] + [[]] * (2 - len(texts))
    return prompt[:n], answer, memory


def key_of(item):
    """What items of one question have in common, whatever their passages."""
    return files.json_hash(item.get("question", item["id"]))


def say_overlap(bench, head_file):
    """Print how many items of a benchmark measured the effect of the heads in a file."""
    known = read_head_file(head_file).get("effect_facts", {}).get("questions", [])
    n = sum(key_of(item) in known for item in bench.items)
    if n:
        say(
            f"{bench.task.name}: warning: {n} of {len(bench.items)} questions measured the heads "
            f"of {head_file}, so their scores are not those of new ones (--skip leaves items out)"
        )


if __name__ == "__main__":
    sys.exit(run_program(main))
