"""Compares the effect of heads, a derivative, with masking each head alone, on questions:

    python -m paper.masking --questions FILE --limit 20 --model M --out FILE

Options are those of `python -m heads.detect --questions`. By masking, the effect of a head is d of
the model less d without the head; measures.py defines d. Both are measured with the answers' first
tokens and with all of their tokens. A question costs as many passes as the model has heads."""

import sys
from itertools import product

import numpy as np
import torch
from tqdm import tqdm

import cli
from decore import make_head_mask, pad
from heads.measures import effects
from paper import questions
from runtime import files
from runtime.errors import InputError

ROWS = 64  # of one pass
BEST = 1, 3, 5, 10
TOKENS = {"first": 1, "all": None}  # name → how many of an answer's tokens count


@torch.inference_mode()
def effects_of_masking(model, prompt, answer, memory):
    """{"first", "all": d of the model less d without each head, float64 [L, H]}."""
    c = model.config
    heads = [[], *([head] for head in product(range(c.n_layers), range(c.n_heads)))]
    n = len(heads)
    heads += [[]] * (-n % ROWS)
    cache = model.new_cache([len(prompt) - 1], max(len(answer), len(memory)), ROWS)
    model.prefill(pad([prompt[:-1]], model.device), cache)
    d = dict.fromkeys(TOKENS, 0)
    for text, sign in ((answer, 1), (memory, -1)):
        if not text:
            continue
        before = pad([[*prompt[-1:], *text[:-1]]], model.device)
        log_p = []
        for i in range(0, n, ROWS):
            head_mask = make_head_mask(heads[i : i + ROWS], model)
            logits = model(before, cache.select(slice(None)), head_mask)[:, 0]  # [R, T, V]
            log_p.append(logits.log_softmax(-1)[:, range(len(text)), text].double().cpu())
        for name, k in TOKENS.items():
            d[name] += sign * torch.cat(log_p)[:n, :k].sum(-1)
    return {name: (x[0] - x[1:]).view(c.n_layers, c.n_heads) for name, x in d.items()}


def compared(gradient, masking):
    """The correlation of two effects of all heads, that of their ranks, and how many of the best
    heads they share, for each of BEST."""
    ranks = [np.argsort(np.argsort(x)) for x in (gradient, masking)]
    shared = [len({*np.argsort(gradient)[-n:]} & {*np.argsort(masking)[-n:]}) for n in BEST]
    return np.corrcoef(gradient, masking)[0, 1], np.corrcoef(*ranks)[0, 1], shared


def table(content):
    """The lines of a Markdown table, from the content of the file."""
    best = ", ".join(map(str, BEST))
    rows = [["gradient", "masking", "correlation", "of ranks", f"of the {best} best"]]
    for a, b in product(TOKENS, TOKENS):
        pair = content["gradient"][a], content["masking"][b]
        r, of_ranks, shared = compared(*(np.array([*x.values()]) for x in pair))
        rows.append([a, b, f"{r:.3f}", f"{of_ranks:.3f}", ", ".join(map(str, shared))])
    return files.markdown_table(rows)


def main():
    args = questions.parse_args(cli.parser(__doc__, prog="python -m paper.masking"))
    cli.refuse_unused(args, {"batch_size": "on questions that are read one by one"})
    if args.out.exists():
        raise InputError(f"--out {args.out} exists; choose another")
    task = questions.chosen_task(args)
    checkpoint = cli.read_model(args.model, args)
    bench, texts = questions.read_texts(task, args, checkpoint)
    model = cli.load_model(checkpoint.checkpoint, args)
    cli.limit_threads(model)
    total = {way: dict.fromkeys(TOKENS, 0) for way in ("gradient", "masking")}
    for prompt, answer, memory in tqdm(texts, unit="question", disable=model.shard.rank):
        masking = effects_of_masking(model, prompt, answer, memory)
        for name, n in TOKENS.items():
            total["gradient"][name] += effects(model, [prompt], [answer[:n]], [memory[:n]])[0]
            total["masking"][name] += masking[name]
    if model.shard.rank:
        return
    content = {
        "model": model.name,
        "commit": files.commit(),
        "facts": questions.facts_of(bench, texts, model, args),
    }
    for way, by_tokens in total.items():
        content[way] = {n: questions.by_head(x / len(texts)) for n, x in by_tokens.items()}
    files.write(args.out, [content])
    print(*table(content), "", f"{len(texts)} questions; wrote {args.out}", sep="\n")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
