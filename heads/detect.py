"""Find the retrieval heads of a model: which heads copy, when the model answers from its context?

    python -m heads.detect --model M --out heads/M.json

    python -m heads.detect --model miniature --needles miniature/detection/needles.jsonl --runs 300 --lengths 60:240:5
        --haystack miniature/detection/haystack --template 'Context: {context}\\n{question}' --max-new-tokens 12
        --out heads/miniature.json

Needle in a haystack (Appendix C.1 of the paper): a sentence, the needle, stands somewhere in a long text and the model
is asked about it. While it answers, greedily, a head *copies* when the position it attends to most lies in the needle
and holds the token generated at that step. Its retrieval score in a run is |copied ∩ needle tokens| / |needle tokens|;
its score is the mean over the runs whose answer is right.

Prompts over one text read their common beginning once, answers are decoded in batches, and attention weights exist for
one query per head at a time. The default grid with 50 tokens per answer computes 254,450 tokens, 1,950 decoding steps
among them; run by run it would be 456,170 and 7,500 (counted on a model of one layer).

    S generated tokens   B batch   P prompt tokens   L layers   H query heads (this rank's, until they are gathered)
"""

import hashlib
import json
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby, takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

import cli
from heads.needles import PUBLISHED, make_book, make_prompt, make_published_prompt, plan, read_haystack, read_needles
from heads.needles import shortest as shortest_prompt
from runtime import jsonl
from runtime.fast import recorded
from runtime.weights import checkpoint_folder, fingerprint

HAYSTACK = Path(__file__).parent / "haystack"
TEMPLATE = "{context}\n\nBased on the content of the text, answer the question.\nQuestion: {question}\nAnswer:"
SUCCESS = 0.5                   # ROUGE-1 recall above which an answer is right
RECORDED = "cuda"               # the device whose steps are recorded, see runtime/fast.py
STOPS = ("<0x0A>", 144)         # what ended a published run's answer: a new line as a token of its own, or this id


# -------------------------------------------------------------------------------------------------------------- one run


def head_scores(attended, generated, prompt_ids, needle, published=False):
    """Retrieval score of every head in one run, float64 [L, H].

    attended [S, L, H]: the position of each head's largest weight at the step that chose generated[s]; needle: its
    first token and the one after its last. The paper's rule counts each distinct token of the needle once, so that 1 is
    the most; the published runs added 1 / (tokens of the needle) at every step, repeats included. A needle that was not
    located, (-1, -1), scores 0."""
    start, end = needle
    ids, tokens = torch.tensor(prompt_ids), torch.tensor(generated)
    inside = (attended >= start) & (attended < end)
    copies = inside & (ids[attended.where(inside, 0)] == tokens[:, None, None])     # [S, L, H]
    if published:
        return copies.sum(0).double() / (end - start if end > start else 1)
    wanted = set(prompt_ids[start:end])
    return sum(copies[tokens == token].any(0).double() for token in wanted) / len(wanted)


def score_run(model, prompt_ids, needle, max_new_tokens=50, eos_ids=(), published=False):
    """One run on given ids → head scores [L, H] and the generated ids.

    needle: (start, end) of its tokens in the prompt. The answer ends with an id of `eos_ids`, or once it holds every
    token of the needle, as often as the needle does; by the published rule it goes on then."""
    prompt_ids = [int(i) for i in prompt_ids]
    located = 0 <= needle[0] < needle[1] <= len(prompt_ids)
    if not located and not (published and tuple(needle) == (-1, -1)):
        raise ValueError(f"needle {tuple(needle)} is no span of tokens in a prompt of {len(prompt_ids)}; "
                         "give (first token, last token + 1)")
    ids, attended = answer(model, [prompt_ids], [needle], max_new_tokens, eos_ids, published)[0]
    return head_scores(attended, ids, prompt_ids, needle, published), ids


class Looked(NamedTuple):
    scores: torch.Tensor                # logits, [B, 1, V]
    top: torch.Tensor                   # the key that each head attends to most, [L, B, H]


@torch.inference_mode()
def answer(model, prompts, needles, max_new_tokens, eos_ids=(), published=False, trunk=None):
    """Greedy answers to a batch of prompts: for each its ids and the most-attended positions [S, L, H].

    No weights are kept: a step has one query per prompt, and of its weights only the position of the largest stays."""
    cache = open_prompts(model, prompts, max_new_tokens, trunk)
    wanted = [Counter(ids[start:end]) for ids, (start, end) in zip(prompts, needles, strict=True)]
    tokens = torch.tensor([ids[-1:] for ids in prompts], device=model.device)       # [B, 1]
    answers, ended, top = [[] for _ in prompts], [False] * len(prompts), []

    def step(tokens):
        weights = []
        scores = model(tokens, cache, weights=weights)[0]
        return Looked(scores, torch.stack([layer[:, 0, 0].argmax(-1) for layer in weights]))

    if model.device.type == RECORDED:
        step, (cache,) = recorded(step, [cache], tokens, 0, model, (answer,))
    while not all(ended):
        found = step(tokens)
        tokens = found.scores.argmax(-1)
        top.append(found.top.clone())                           # a recorded step writes over it
        for b, token in enumerate(tokens[:, 0].tolist()):
            if not ended[b]:
                answers[b].append(token)
                complete = wanted[b] <= Counter(answers[b]) and not published
                ended[b] = complete or token in eos_ids or len(answers[b]) == max_new_tokens
    top = model.shard.all_gather(torch.stack(top)).cpu()                            # [S, L, B, H]
    cached = torch.tensor([[len(ids) - 1] for ids in prompts])                      # [B, 1]
    new = top - cache.P                                         # the keys of new tokens follow the padded prompts
    top = torch.where(new < 0, top, new + cached)
    return [(ids, top[:len(ids), :, b]) for b, ids in enumerate(answers)]


def open_prompts(model, prompts, capacity, trunk=None):
    """A cache of the prompts without their last tokens, with room for `capacity` more.

    trunk: (ids, cache) of a text that prompts begin with; what they have in common is copied, not computed."""
    cache = model.cache(torch.tensor([len(ids) - 1 for ids in prompts]), capacity)
    for b, ids in enumerate(prompts):
        alone, shared = cache.sequence(b), 0
        if trunk:
            shared = common(trunk[0], ids[:-1])
            for kept, new in zip(trunk[1].kv, alone.kv, strict=True):
                new[..., :shared, :] = kept[..., :shared, :]
        model.prefill(torch.tensor([ids[:-1]], dtype=torch.long, device=model.device), alone, start=shared)
    return cache


@torch.inference_mode()
def open_trunk(model, ids):
    """The beginning that prompts share, read once: (ids, cache)."""
    cache = model.cache(torch.tensor([len(ids)]), 0)
    model.prefill(torch.tensor([ids], dtype=torch.long, device=model.device), cache)
    return ids, cache


def trunk_of(prompts):
    """The longest beginning that two prompts over one text share: the text before the deepest needle but one."""
    deepest = max(prompts, key=lambda prompt: prompt.span).ids
    return deepest[:max((common(deepest, p.ids[:-1]) for p in prompts if p.ids is not deepest), default=0)]


def common(a, b):
    """How many ids two lists have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# ------------------------------------------------------------------------------------------------------------- all runs


def run_batch(model, tokenizer, prompts, needles, settings, trunk):
    """One record per run: where the needle was, what the model answered, and the scores above zero."""
    max_new_tokens, published = settings["max_new_tokens"], settings["published"]
    stops = [STOPS[1], tokenizer.core.token_to_id(STOPS[0])] if published else tokenizer.eos_ids
    answers = answer(model, [prompt.ids for prompt in prompts], [prompt.span for prompt in prompts], max_new_tokens,
                     stops, published, trunk)
    steps = max(len(ids) for ids, _ in answers)
    records = []
    for prompt, (ids, attended) in zip(prompts, answers, strict=True):
        scores, text = head_scores(attended, ids, prompt.ids, prompt.span, published), tokenizer.decode(ids).strip()
        recall = rouge_recall(needles[prompt.sample.needle].real_needle, text)
        records.append({
            "needle": prompt.sample.needle, "length": prompt.sample.length, "depth": prompt.sample.depth,
            "at": prompt.at, "tokens": len(prompt.ids), "shared": common(trunk[0], prompt.ids[:-1]), "steps": steps,
            "span": list(prompt.span), "answer": text, "recall": round(recall, 4), "right": recall > SUCCESS,
            "scores": {f"{i}-{j}": round(scores[i, j].item(), 6) for i, j in scores.nonzero().tolist()}})
    return records


def rouge_recall(reference, text):
    """ROUGE-1 recall with stemming: the share of the reference's words that the text has."""
    from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rouge1"], use_stemmer=True).score(reference, text)["rouge1"].recall


def run_all(model, tokenizer, prompts, needles, settings, part):
    """All records, the tokens that were read once for many, and seconds.

    Every finished batch is a line of the file `part`. Batches that it holds are not run again; the others see the same
    neighbours and the same trunk as if nothing had been interrupted, so the numbers are the same to the last bit."""
    done = model.shard.broadcast(read_part(part, settings) if model.shard.rank == 0 else None)
    batches, shared, size = [], 0, settings["batch_size"]
    bar = tqdm(total=len(prompts), initial=sum(map(len, done)), unit="run", disable=model.shard.rank > 0)
    for _, group in groupby(prompts, key=lambda prompt: prompt.sample.book):
        group = list(group)
        beginning, trunk = trunk_of(group), None
        shared += len(beginning)
        for i in range(0, len(group), size):
            samples = tuple((p.sample.needle, p.sample.length, p.sample.depth) for p in group[i:i + size])
            if samples in done:
                batches.append(done[samples])
                continue
            start = time.perf_counter()
            trunk = trunk or open_trunk(model, beginning)
            records = run_batch(model, tokenizer, group[i:i + size], needles, settings, trunk)
            batches.append({"seconds": time.perf_counter() - start, "runs": records})
            if model.shard.rank == 0:
                jsonl.append(part, [batches[-1]])
            bar.update(len(records))
    bar.close()
    records = [record for batch in batches for record in batch["runs"]]
    return records, shared, sum(batch["seconds"] for batch in batches)


PART = {"needle": int, "length": int, "depth": int, "tokens": int, "shared": int, "steps": int, "right": bool,
        "answer": str, "scores": dict}


def read_part(path, settings):
    """The batches that an interrupted detection has finished, by the samples of their runs; the file then ends in a
    whole line. A last line that was cut off is dropped; any other that is damaged is a ValueError."""
    (_, before), *lines = list(jsonl.json_lines(path) if path.exists() else []) or [(1, settings)]
    done = {}
    for number, batch in lines:
        try:
            good = isinstance(batch["seconds"], float) and all(
                type(run[name]) is kind for run in batch["runs"] for name, kind in PART.items())
            done[tuple((run["needle"], run["length"], run["depth"]) for run in batch["runs"])] = batch
        except (TypeError, LookupError):
            good = False
        if not good:
            raise ValueError(f"{path}, line {number}: no batch of an unfinished detection; delete the line, or choose "
                             "another --out")
    other = sorted(key for key in before | settings if before.get(key) != settings.get(key))
    if other:
        raise ValueError(f"{path} is an unfinished detection with another {', '.join(other)}; finish it with its own "
                         "settings, delete it, or choose another --out")
    jsonl.write(path, [settings, *done.values()])
    return done


def summarise(model, records, settings, shared, seconds):
    """The head file: means over the runs with a right answer, and everything needed to judge and repeat them."""
    c, right = model.config, [record["scores"] for record in records if record["right"]]
    heads = [f"{layer}-{head}" for layer in range(c.n_layers) for head in range(c.n_heads)]
    return {
        "model": model.name, "config_hash": settings["config_hash"], "n_layers": c.n_layers, "n_heads": c.n_heads,
        "samples": len(right), "success_rate": round(len(right) / len(records), 4), "settings": settings,
        "forward_tokens": shared + sum(r["tokens"] - 1 - r["shared"] + r["steps"] for r in records),
        "forward_tokens_unshared": sum(r["tokens"] - 1 + r["steps"] for r in records),
        "seconds": round(seconds, 1),
        "scores": {head: round(sum(scores.get(head, 0) for scores in right) / max(len(right), 1), 6) for head in heads},
        "runs": records}


def write_result(path, result):
    """JSON with a line per entry and per run. The file is whole or not there."""
    runs = ",\n  ".join(json.dumps(record, ensure_ascii=False) for record in result["runs"])
    rest = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
                       for key, value in result.items() if key != "runs")
    new = Path(f"{path}.new")
    new.write_text(f'{{\n {rest},\n "runs": [\n  {runs}\n ]\n}}\n', encoding="utf-8")
    new.replace(path)


def write_authors_format(path, result):
    """One line, "layer-head" → its score in each run with a right answer: what the paper's code reads."""
    right = [record["scores"] for record in result["runs"] if record["right"]]
    table = {head: [scores.get(head, 0.0) for scores in right] for head in result["scores"]}
    Path(path).write_text(json.dumps(table), encoding="utf-8")


def plot(path, result):
    """Heat map of layers × heads, and the scores in descending order: retrieval heads are few."""
    from matplotlib.figure import Figure
    scores = torch.tensor(list(result["scores"].values())).view(result["n_layers"], result["n_heads"])
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"Retrieval heads of {result['model']}, {result['samples']} runs")
    heat, curve = figure.subplots(1, 2)
    top = max(1, scores.max().item())                       # by the published rule a score may exceed 1
    image = heat.imshow(scores.numpy(), vmin=0, vmax=top, cmap="magma", aspect="auto", origin="lower")
    figure.colorbar(image, label="retrieval score")
    heat.set(xlabel="head", ylabel="layer")
    heat.locator_params(integer=True)
    curve.plot(range(1, scores.numel() + 1), scores.flatten().sort(descending=True).values.numpy(), marker=".")
    curve.axhline(0.1, color="grey", linewidth=0.8, linestyle="--")
    curve.set(xlabel="heads, best first", ylabel="retrieval score", ylim=(-0.02 * top, 1.02 * top),
              title=f"{int((scores > 0.1).sum())} of {scores.numel()} heads above 0.1")
    figure.savefig(path, dpi=150)


# --------------------------------------------------------------------------------------------------------- command line


def spread(first, last, n):
    """n whole numbers from first to last, evenly."""
    return sorted({round(first + (last - first) * i / max(n - 1, 1)) for i in range(n)})


def lengths(text):
    first, last, n = (int(part) for part in (text if ":" in text else f"{text}:{text}:1").split(":"))
    if not (0 < first <= last and n > 0):
        raise ValueError
    return spread(first, last, n)


def parse_args():
    p = cli.parser("Find the retrieval heads of a model, needle-in-a-haystack.")
    add = p.add_argument
    cli.add_model_arguments(p)
    add("--out", required=True, metavar="FILE", type=Path, help="head scores, JSON; FILE.part until it is finished")
    add("--lengths", type=lengths, metavar="A:B:N", help="N prompt lengths, A to B tokens (default: 5 up to 5000, or "
        "up to what the model's context holds; with --published 1000 and 3579)")
    add("--depths", type=cli.positive, default=10, metavar="N", help="N needle depths, 0 to 100 %% (default 10)")
    add("--needles", default=HAYSTACK / "needles.jsonl", metavar="FILE",
        help="JSON Lines: needle, question, real_needle, the part that answers (default: heads/haystack/needles.jsonl)")
    add("--haystack", default=HAYSTACK, metavar="DIR|FILE",
        help="text; needle i goes with the i-th .txt file, in turn (default: heads/haystack)")
    add("--runs", type=cli.positive, metavar="N", help="draw N runs, needles in turn (default: every combination)")
    add("--seed", type=int, metavar="S", help="of the needles' places and of --runs (default 0)")
    add("--raw", action="store_true", default=None, help="plain text, no chat template")
    add("--template", metavar="TEXT", help="holds {context} and {question}; \\n is a new line (default: the text, then "
        "the question)")
    add("--max-new-tokens", type=cli.positive, default=50, metavar="N", help="of an answer (default 50)")
    add("--batch-size", type=cli.positive, default=4, metavar="N", help="runs decoded together (default 4)")
    add("--min-success", type=cli.positive, default=10, metavar="N",
        help="right answers needed for a result (default 10)")
    add("--published", action="store_true", help="as the published runs: needle placed and found by token ids, their "
        "prompt, repeated tokens counted, an end at a new line's token or id 144 alone")
    add("--authors-format", metavar="FILE", help="also write the scores in the form that the paper's code reads")
    add("--plot", metavar="FILE.png", help="heat map and sorted scores (needs matplotlib)")
    return p.parse_args()


def prepare(args):
    """The prompts of all runs, in the order in which they run, with the model, the tokenizer and the needles."""
    for name in ("template", "raw") + ("seed",) * (not args.runs):
        if args.published and getattr(args, name) is not None:
            raise ValueError(f"--{name} has no effect with --published, whose prompts are fixed; drop one of them")
    seed, template = args.seed or 0, PUBLISHED if args.published else (args.template or TEMPLATE).replace("\\n", "\n")
    if template.count("{context}") != 1 or "{question}" not in template:
        raise ValueError("--template must hold {context}, once, and {question}")
    needles, texts = read_needles(args.needles), read_haystack(args.haystack)
    model, tokenizer = cli.load_model(args.model, args)
    cli.limit_threads(model)
    chat = None
    if tokenizer.has_chat_template and not args.raw and not args.published:
        chat = cli.benchmark_template_args(tokenizer, args.template_args) or {}
    elif args.template_args:
        raise ValueError("--template-args has no effect: no prompt goes through a chat template")
    room = model.config.max_positions - args.max_new_tokens
    if args.lengths is None and args.published:
        args.lengths = [1000, 3579]
    elif args.lengths is None:
        last, bare = min(5000, room), [shortest_prompt(needle, tokenizer, template, chat) for needle in needles]
        args.lengths = spread(max(last // 5, *bare), last, 5)
    if args.lengths[-1] > room:
        raise ValueError(f"--lengths: {args.lengths[-1]} tokens and {args.max_new_tokens} new ones exceed the context "
                         f"of {model.name}, {model.config.max_positions}; use lengths up to {room}")
    samples = plan(len(needles), len(texts), args.lengths, spread(0, 100, args.depths), args.runs, seed)
    if args.published:
        prompts = [make_published_prompt(s, needles[s.needle], texts[s.book], tokenizer) for s in samples]
        if all(prompt.span == (-1, -1) for prompt in prompts):
            raise ValueError(f"the published rule locates no needle in any of {len(prompts)} prompts, so that every "
                             "head would score 0: use longer --lengths or other --needles, or drop --published")
    else:
        books = [make_book(tokenizer, texts, i, args.lengths[-1]) for i in range(min(len(texts), len(needles)))]
        prompts = [make_prompt(s, needles[s.needle], books[s.book], tokenizer, template, chat, seed) for s in samples]
        prompts = list({tuple(prompt.ids): prompt for prompt in prompts}.values())      # no run twice
    if len(prompts) < args.min_success:
        raise ValueError(f"{len(prompts)} runs cannot give --min-success {args.min_success} right answers; ask for "
                         "more lengths or depths, or for less success")
    config = checkpoint_folder(args.model, weights=False) / "config.json"
    settings = {
        "model": model.name, "config_hash": digest(config.read_bytes()), "fingerprint": fingerprint(args.model),
        "lengths": args.lengths, "depths": args.depths,
        "runs": len(prompts), "seed": seed, "needles": digest(json.dumps(needles).encode()),
        "haystack": digest(json.dumps(texts).encode()), "template": template,
        "chat": chat is not None, "template_args": chat,
        "published": args.published, "max_new_tokens": args.max_new_tokens, "batch_size": args.batch_size,
        "device": model.device.type, "dtype": str(model.dtype).removeprefix("torch."), "ranks": model.shard.size,
        "versions": {name: version(name) for name in ("torch", "tokenizers", "rouge-score")}}
    return model, tokenizer, needles, prompts, settings


def main():
    args = parse_args()
    for module in ["rouge_score"] + ["matplotlib"] * bool(args.plot):
        if not find_spec(module):
            raise ValueError(f"{module} is not installed: pip install {module.replace('_', '-')}")
    check_outputs(args)
    model, tokenizer, needles, prompts, settings = prepare(args)
    part = Path(f"{args.out}.part")
    with jsonl.locked(part) if model.shard.rank == 0 else nullcontext():
        records, shared, seconds = run_all(model, tokenizer, prompts, needles, settings, part)
        if model.shard.rank:
            return
        result = summarise(model, records, settings, shared, seconds)
        check_result(result, args, part)
        write_result(args.out, result)
        if args.authors_format:
            write_authors_format(args.authors_format, result)
        if args.plot:
            plot(args.plot, result)
        part.unlink()
    best = sorted(result["scores"].items(), key=lambda item: -item[1])[:5]
    print(f"{result['samples']} of {len(records)} runs gave a right answer; best heads "
          + ", ".join(f"{head} {score:.3f}" for head, score in best) + f"; wrote {args.out}")


def check_result(result, args, part):
    """Raise ValueError where there is nothing to rank heads by."""
    if result["samples"] < args.min_success:
        found, how = result["runs"], result["settings"]
        other = "" if how["published"] else "--raw, " if how["chat"] else "another --template, "
        raise ValueError(
            f"{result['samples']} of {len(found)} runs gave a right answer (ROUGE-1 recall > {SUCCESS}), fewer than "
            f"--min-success {args.min_success}; the first: {found[0]['answer'][:60]!r}, all are in {part}: try shorter "
            f"--lengths, {other}simpler --needles, or a model that was trained to follow instructions")
    if not any(result["scores"].values()):
        raise ValueError(f"every head scores 0 in all {result['samples']} runs with a right answer: none attends to "
                         f"the needle's token that is generated, so there is nothing to rank; all runs are in {part}")


def check_outputs(args):
    """Raise ValueError now rather than after the work where a file cannot be written."""
    for path in filter(None, (args.out, args.authors_format, args.plot)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
            raise ValueError(f"{path} cannot be written: give the name of a file in a folder that can be written to")
    if args.plot:
        from matplotlib.figure import Figure
        kinds = Figure().canvas.get_supported_filetypes()
        if Path(args.plot).suffix[1:].lower() not in kinds:
            raise ValueError(f"--plot {args.plot}: no kind of picture; its name should end in .{', .'.join(kinds)}")


def digest(content):
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(cli.run(main))
