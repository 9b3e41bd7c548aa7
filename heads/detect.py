"""Find the retrieval heads of a model: the heads that copy when the model answers from its context.

    python -m heads.detect --model M --out heads/M.json

    python -m heads.detect --model miniature --needles miniature/detection/needles.jsonl --runs 300 --lengths 60:240:5
        --haystack miniature/detection/haystack --template 'Context: {context}\\n{question}' --max-new-tokens 12
        --out heads/miniature.json

Needle in a haystack (Appendix C.1 of the paper): a sentence, the needle, is hidden in a long text, and the model is
asked about it. It answers greedily. A head *copies* at a step if the position with its largest attention weight lies in
the needle and holds the token that the step generates. Its retrieval score in a run is |copied ∩ needle tokens| /
|needle tokens|. Its score is the mean over the runs whose answer is right.

    S generated tokens   B batch   P prompt tokens   L layers   H query heads
"""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import cli
from heads.needles import PUBLISHED, make_book, make_prompt, make_published_prompt, plan, read_haystack, read_needles
from heads.needles import shortest as shortest_prompt
from model import Cache
from runtime import jsonl
from runtime.files import short_hash
from runtime.weights import fingerprint

HAYSTACK = Path(__file__).parent / "haystack"
TEMPLATE = "{context}\n\nBased on the content of the text, answer the question.\nQuestion: {question}\nAnswer:"
SUCCESS = 0.5                   # an answer is right if its ROUGE-1 recall is larger
STOPS = ("<0x0A>", 144)         # ends of a published run's answer: a new line as a token of its own, or this id


# -------------------------------------------------------------------------------------------------------------- one run


def score_run(model, prompt_ids, needle, max_new_tokens=50, eos_ids=(), published=False):
    """One run on ids → head scores [L, H] and the generated ids.

    needle: (start, end) of its tokens in the prompt. The answer ends with an id of `eos_ids`, or when it holds every
    token of the needle as often as the needle does. By the published rule it does not end with the needle."""
    prompt_ids = [int(i) for i in prompt_ids]
    if not (0 <= needle[0] < needle[1] <= len(prompt_ids) or published and tuple(needle) == (-1, -1)):
        raise ValueError(f"needle {tuple(needle)} is not a span of tokens in a prompt of {len(prompt_ids)}; "
                         "give (first token, last token + 1)")
    (ids, attended), = answer(model, [prompt_ids], [needle], max_new_tokens, eos_ids, published)
    return head_scores(attended, ids, prompt_ids, needle, published), ids


def head_scores(attended, generated, prompt_ids, needle, published=False):
    """Retrieval score of every head in one run, float64 [L, H].

    attended [S, L, H]: the position of each head's largest weight at the step that chose generated[s]. The paper's rule
    counts each distinct token of the needle once, so a score is at most 1. The published runs added 1 / (tokens of the
    needle) at every copy, repeats included. A needle that was not located, (-1, -1), scores 0."""
    start, end = needle
    ids, tokens = torch.tensor(prompt_ids), torch.tensor(generated)
    inside = (attended >= start) & (attended < end)
    copies = inside & (ids[attended.where(inside, 0)] == tokens[:, None, None])     # [S, L, H]
    if published:
        return copies.sum(0).double() / (end - start if end > start else 1)
    distinct = set(prompt_ids[start:end])
    return sum(copies[tokens == token].any(0).double() for token in distinct) / len(distinct)


@torch.inference_mode()
def answer(model, prompts, needles, max_new_tokens, eos_ids=(), published=False):
    """Greedy answers to a batch of prompts: for each its ids and the most attended positions [S, L, H]."""
    lengths = torch.tensor([len(ids) - 1 for ids in prompts])
    cache = Cache(model, lengths.tolist(), max_new_tokens)
    ids = pad_sequence([torch.tensor(ids[:-1], dtype=torch.long) for ids in prompts], batch_first=True)
    model.prefill(ids.to(model.device), cache)
    targets = [Counter(ids[start:end]) for ids, (start, end) in zip(prompts, needles, strict=True)]
    token = torch.tensor([ids[-1:] for ids in prompts], device=model.device)        # [B, 1]
    answers, ended, attended = [[] for _ in prompts], [False] * len(prompts), []
    while not all(ended):
        weights = []                                                                # L × [B, 1, 1, H, C]
        token = model(token, cache, weights=weights)[0].argmax(-1)
        attended.append(torch.stack([layer[:, 0, 0].argmax(-1) for layer in weights]))
        for b, new in enumerate(token[:, 0].tolist()):
            if not ended[b]:
                answers[b].append(new)
                complete = targets[b] <= Counter(answers[b]) and not published
                ended[b] = complete or new in eos_ids or len(answers[b]) == max_new_tokens
    keys = model.shard.all_gather(torch.stack(attended)).cpu()                      # [S, L, B, H], all ranks' heads
    positions = torch.where(keys < cache.P, keys, keys - cache.P + lengths[:, None])
    return [(ids, positions[:len(ids), :, b]) for b, ids in enumerate(answers)]


# ------------------------------------------------------------------------------------------------------------- all runs


def run_all(model, tokenizer, prompts, needles, settings, part):
    """One record per run. Every finished batch is a line of the file `part`; batches in it are not run again."""
    records = model.shard.broadcast(read_part(part, settings) if model.shard.rank == 0 else None)
    size = settings["batch_size"]
    bar = tqdm(total=len(prompts), initial=len(records), unit="run", disable=model.shard.rank > 0)
    for i in range(len(records), len(prompts), size):
        batch = run_batch(model, tokenizer, prompts[i:i + size], needles, settings)
        if model.shard.rank == 0:
            jsonl.append(part, [{"runs": batch}])
        records += batch
        bar.update(len(batch))
    bar.close()
    return records


def run_batch(model, tokenizer, prompts, needles, settings):
    """One record per run: where the needle was, the answer, and the scores above zero."""
    published = settings["published"]
    stops = [STOPS[1], tokenizer.core.token_to_id(STOPS[0])] if published else tokenizer.eos_ids
    answers = answer(model, [prompt.ids for prompt in prompts], [prompt.span for prompt in prompts],
                     settings["max_new_tokens"], stops, published)
    records = []
    for prompt, (ids, attended) in zip(prompts, answers, strict=True):
        scores, text = head_scores(attended, ids, prompt.ids, prompt.span, published), tokenizer.decode(ids).strip()
        recall = rouge_recall(needles[prompt.sample.needle].real_needle, text)
        records.append({
            "needle": prompt.sample.needle, "length": prompt.sample.length, "depth": prompt.sample.depth,
            "at": prompt.at, "tokens": len(prompt.ids), "span": list(prompt.span), "answer": text,
            "recall": round(recall, 4), "right": recall > SUCCESS,
            "scores": {f"{i}-{j}": round(scores[i, j].item(), 6) for i, j in scores.nonzero().tolist()}})
    return records


def rouge_recall(reference, text):
    """ROUGE-1 recall with stemming: the share of the reference's words that occur in the text."""
    from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rouge1"], use_stemmer=True).score(reference, text)["rouge1"].recall


def read_part(path, settings):
    """The records of an interrupted detection. Afterwards the file holds them and nothing else."""
    before, *batches = [line for _, line in jsonl.json_lines(path)] if path.exists() else [settings]
    other = sorted(key for key in before | settings if before.get(key) != settings.get(key))
    if other:
        raise ValueError(f"{path} is an unfinished detection with another {', '.join(other)}; finish it with its own "
                         "settings, delete it, or choose another --out")
    jsonl.write(path, [settings, *batches])
    return [record for batch in batches for record in batch["runs"]]


def summarise(model, records, settings):
    """The head file: means over the runs with a right answer, and everything needed to judge and repeat them."""
    c, right = model.config, [record["scores"] for record in records if record["right"]]
    heads = [f"{layer}-{head}" for layer in range(c.n_layers) for head in range(c.n_heads)]
    return {
        "model": model.name, "n_layers": c.n_layers, "n_heads": c.n_heads, "samples": len(right),
        "success_rate": round(len(right) / len(records), 4), "settings": settings,
        "scores": {head: round(sum(scores.get(head, 0) for scores in right) / max(len(right), 1), 6) for head in heads},
        "runs": records}


def check_result(result, min_success, part):
    """Raise ValueError if the runs cannot rank the heads."""
    samples, runs, settings = result["samples"], result["runs"], result["settings"]
    if samples < min_success:
        other = "" if settings["published"] else "--raw, " if settings["chat"] else "another --template, "
        raise ValueError(
            f"{samples} of {len(runs)} runs gave a right answer (ROUGE-1 recall > {SUCCESS}), fewer than --min-success "
            f"{min_success}; the first: {runs[0]['answer'][:60]!r}, all are in {part}: try shorter --lengths, {other}"
            "simpler --needles, or a model that was trained to follow instructions")
    if not any(result["scores"].values()):
        raise ValueError(f"every head scores 0 in all {samples} runs with a right answer, so the heads cannot be "
                         f"ranked; all runs are in {part}: try longer --lengths or other --needles")


def write_result(path, result):
    """JSON with a line per entry and per run, in one step."""
    runs = ",\n  ".join(json.dumps(record, ensure_ascii=False) for record in result["runs"])
    rest = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
                       for key, value in result.items() if key != "runs")
    new = Path(f"{path}.new")
    new.write_text(f'{{\n {rest},\n "runs": [\n  {runs}\n ]\n}}\n', encoding="utf-8")
    new.replace(path)


def write_authors_format(path, result):
    """One line, "layer-head" → its score in each run with a right answer: the form that the paper's code reads."""
    right = [record["scores"] for record in result["runs"] if record["right"]]
    table = {head: [scores.get(head, 0.0) for scores in right] for head in result["scores"]}
    Path(path).write_text(json.dumps(table), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------- command line


def spread(first, last, n):
    """n whole numbers from first to last, evenly."""
    return sorted({round(first + (last - first) * i / max(n - 1, 1)) for i in range(n)})


def lengths(text):
    """argparse type: A:B:N → N lengths from A to B tokens."""
    first, last, n = (int(part) for part in (text if ":" in text else f"{text}:{text}:1").split(":"))
    if not (0 <= first <= last and last > 0 and n > 0):
        raise ValueError
    return spread(first, last, n)


def parse_args():
    p = cli.parser("Find the retrieval heads of a model, needle-in-a-haystack.")
    add = p.add_argument
    cli.add_model_arguments(p)
    add("--out", required=True, metavar="FILE", type=Path, help="head scores, JSON; FILE.part until it is finished")
    add("--lengths", type=lengths, metavar="A:B:N", help="N prompt lengths, A to B tokens (default: 5 up to 5000, or "
        "up to the model's context; with --published 1000 and 3579)")
    add("--depths", type=cli.positive, default=10, metavar="N", help="N needle depths, 0 to 100 %% (default 10)")
    add("--needles", default=HAYSTACK / "needles.jsonl", metavar="FILE",
        help="JSON Lines: needle, question, real_needle, the part that answers (default: heads/haystack/needles.jsonl)")
    add("--haystack", default=HAYSTACK, metavar="DIR|FILE",
        help="text; needle i is hidden in the i-th .txt file, in turn (default: heads/haystack)")
    add("--runs", type=cli.positive, metavar="N", help="draw N runs, needles in turn (default: every combination)")
    add("--seed", type=int, metavar="S", help="of the needles' places and of --runs (default 0)")
    add("--raw", action="store_true", default=None, help="plain text, no chat template")
    add("--template", metavar="TEXT", help="holds {context} and {question}; \\n is a new line (default: the text, then "
        "the question)")
    add("--max-new-tokens", type=cli.positive, default=50, metavar="N", help="of an answer (default 50)")
    add("--batch-size", type=cli.positive, default=4, metavar="N", help="runs decoded together (default 4)")
    add("--min-success", type=cli.positive, default=10, metavar="N",
        help="right answers needed for a result (default 10)")
    add("--published", action="store_true", help="as the published runs: needle placed and located by token ids, their "
        "prompt, repeated tokens counted, answers end only at a new line's token or id 144")
    add("--authors-format", metavar="FILE", help="also write the scores in the form that the paper's code reads")
    return p.parse_args()


def prepare(args):
    """The model, the tokenizer, the needles, the prompts of all runs in order, and the settings."""
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
    else:
        books = [make_book(tokenizer, texts, i, args.lengths[-1]) for i in range(min(len(texts), len(needles)))]
        prompts = [make_prompt(s, needles[s.needle], books[s.book], tokenizer, template, chat, seed) for s in samples]
        prompts = list({tuple(prompt.ids): prompt for prompt in prompts}.values())      # no run twice
    if len(prompts) < args.min_success:
        raise ValueError(f"{len(prompts)} runs cannot give --min-success {args.min_success} right answers; give "
                         "more lengths or depths, or a smaller --min-success")
    settings = {
        "model": model.name, "fingerprint": fingerprint(args.model), "lengths": args.lengths, "depths": args.depths,
        "runs": len(prompts), "seed": seed, "needles": short_hash(json.dumps(needles).encode()),
        "haystack": short_hash(json.dumps(texts).encode()), "template": template, "chat": chat is not None,
        "template_args": chat, "published": args.published, "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size, "device": model.device.type, "dtype": str(model.dtype).removeprefix("torch."),
        "ranks": model.shard.size,
        "versions": {name: version(name) for name in ("torch", "tokenizers", "rouge-score")}}
    return model, tokenizer, needles, prompts, settings


def main():
    args = parse_args()
    if not find_spec("rouge_score"):
        raise ValueError("rouge-score is not installed: pip install rouge-score")
    for path in filter(None, (args.out, args.authors_format)):
        if Path(path).is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer, needles, prompts, settings = prepare(args)
    part = Path(f"{args.out}.part")
    with jsonl.locked(part) if model.shard.rank == 0 else nullcontext():
        records = run_all(model, tokenizer, prompts, needles, settings, part)
        if model.shard.rank:
            return
        result = summarise(model, records, settings)
        check_result(result, args.min_success, part)
        write_result(args.out, result)
        if args.authors_format:
            write_authors_format(args.authors_format, result)
        part.unlink()
    best = sorted(result["scores"].items(), key=lambda item: -item[1])[:5]
    print(f"{result['samples']} of {len(records)} runs gave a right answer; best heads "
          + ", ".join(f"{head} {score:.3f}" for head, score in best) + f"; wrote {args.out}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
