"""The runs of a needle-in-a-haystack test, and the prompt of each.

The needle is inserted at a sentence boundary of the text near the chosen depth. Its tokens are
located by the characters they cover, which works with any tokenizer and chat template. The
published runs inserted and located it by token ids (`make_published_prompt`)."""

import math
import random
import re
import warnings
from bisect import bisect_left, bisect_right
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from runtime.errors import InputError
from runtime.files import json_lines, read_text

HAYSTACK = Path(__file__).parent / "haystack"
TEMPLATE = (
    "{context}\n\nBased on the content of the text, answer the question.\n"
    "Question: {question}\nAnswer:"
)
NEAR = 5  # largest distance of the needle from its depth, in % of the context
PUBLISHED = "{context}Based on the content of the book, Question: {question}\nAnswer:"
FULL_STOPS = (29889, 869)  # the published runs' ids of a full stop: Llama 2's, for every vocabulary
SPARED = 200  # tokens of the length that they left for question and answer
COVERED = 0.9  # share of the needle's token set by which they located it


class Needle(NamedTuple):
    needle: str
    question: str
    real_needle: str  # the part that answers the question; heads are scored on its tokens

    def place(self):
        """The real needle's characters in the needle, (start, end); None if they are not there.
        Case does not count, but offsets are those of the text as it is: "İ".lower() is longer."""
        match = re.search(re.escape(self.real_needle), self.needle, re.IGNORECASE)
        return match and match.span()


class Sample(NamedTuple):
    book: int
    length: int  # tokens of the prompt, at most
    depth: int  # % of the haystack before the needle
    needle: int


# A full stop and the like, closing quotes, white space, and what looks like a beginning; not after
# Mr. or an initial.
SENTENCE_END = re.compile(
    r"""(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])"""
    r"""[.!?]["'”’)\]]*\s+(?=["'“‘(\[]*[A-Z0-9])|[。！？]\s*"""
)
# Where a prompt may end; the next one counts if the prompts of one are too short.
ENDS = SENTENCE_END, re.compile(r"[.!?…。！？؟۔।॥։።។။]\W*|\n\s*"), re.compile(r"\s+")
MISSING = 16  # tokens that any prompt may be shorter than its length, a long one by a tenth


def read_needles(path):
    """The needles of a JSON Lines file."""
    needles = []
    for number, row in json_lines(path, complete=True):
        needle = Needle(*(str(row.get(field, "")).strip() for field in Needle._fields))
        if not needle.real_needle or not needle.place():
            raise InputError(
                f'{path}, line {number}: needs "needle", "question" and "real_needle", '
                "a part of needle"
            )
        needles.append(needle)
    if not needles:
        raise InputError(f"{path} holds no needles")
    return needles


def read_haystack(path):
    """The texts of a folder with its subfolders (the authors' part1/p1.txt, …), in order of name,
    or of one file.

    A JSON Lines file has one "text" per line."""
    if path.suffix == ".jsonl":
        texts = [str(row.get("text", "")).strip() for _, row in json_lines(path, complete=True)]
    else:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        texts = [read_text(file).strip() for file in files]
    if not any(texts):
        raise InputError(
            f"haystack {path} holds no text; give a text file, or a folder with .txt files"
        )
    return texts


def make_prompts(facts, needles, texts, tokenizer):
    """The prompts of all runs, in order: [(ids, record), …].

    record: the number of the needle, the planned length and depth, the actual depth "at", the
    number of "tokens", and the "span" of the needle, [first token, last + 1]. By default no prompt
    occurs twice."""
    lengths, published = facts["lengths"], facts["published"]
    samples = plan_runs(
        len(needles), len(texts), lengths, facts["depths"], facts["runs"], facts["seed"]
    )
    if not published:
        used = range(min(len(texts), len(needles)))
        texts = [make_book(tokenizer, texts, i, lengths[-1]) for i in used]
    make = make_published_prompt if published else partial(make_prompt, facts=facts)
    prompts = {}
    for sample in samples:
        ids, span, at = make(sample, needles[sample.needle], texts[sample.book], tokenizer)
        record = {
            "needle": sample.needle,
            "length": sample.length,
            "depth": sample.depth,
            "at": at,
            "tokens": len(ids),
            "span": list(span),
        }
        prompts[sample if published else tuple(ids)] = ids, record
    if len(prompts) < len(samples):
        warnings.warn(
            f"{len(prompts)} runs instead of {len(samples)}: the others would repeat a prompt",
            stacklevel=2,
        )
    return list(prompts.values())


def plan_runs(n_needles, n_books, lengths, n_depths, runs=None, seed=0):
    """All needles × lengths × depths; or `runs` of them, needles in turn, each time at another
    length and depth."""
    rng = random.Random(seed)
    grid = list(product(lengths, spread(0, 100, n_depths)))
    places = [rng.sample(grid, len(grid)) if runs else grid for _ in range(n_needles)]
    samples = []
    for turn in zip(*places):
        samples += [Sample(i % n_books, *place, i) for i, place in enumerate(turn)]
    if runs and runs > len(samples):
        raise InputError(
            f"runs {runs}: {n_needles} needles at {len(grid)} places make {len(samples)} runs"
        )
    return sorted(samples[:runs])


def spread(first, last, n):
    """n whole numbers, evenly spaced from first to last."""
    return sorted({round(first + (last - first) * i / max(n - 1, 1)) for i in range(n)})


def make_book(tokenizer, texts, first, length):
    """Enough text for `length` tokens: from text `first` on, then the following ones, repeated as
    often as needed.

    Returns the text, and for each of ENDS the characters at which its pieces start, 0 first, and
    the number of tokens before each."""
    joined = "".join(text + "\n\n" for text in texts[first:] + texts[:first])
    size = 16 * length  # characters: longer tokens are rare
    text = (joined * math.ceil(size / len(joined)))[:size]
    starts = [start for start, _ in tokenizer.core.encode(text, add_special_tokens=False).offsets]
    pieces = []
    for end in ENDS:
        bounds = [0] + [match.end() for match in end.finditer(text)]
        pieces.append((bounds, [bisect_left(starts, bound) for bound in bounds]))
    return text, pieces


def make_prompt(sample, needle, book, tokenizer, facts):
    """The prompt of a run: the longest one of at most `sample.length` tokens that ends the haystack
    with a sentence, or with less if it would be much shorter.

    facts: "template" contains {context} and {question}; "template_args" are the arguments of the
    chat template, None without one; "seed". Returns the ids, the needle's tokens (first, last + 1),
    its depth in %. InputError if no prompt has about `sample.length` tokens."""
    text, pieces = book
    template, template_args = facts["template"], facts["template_args"]
    head, tail = template.replace("{question}", needle.question).split("{context}")
    shortest, *_ = encode_message(tokenizer, f"{head}{needle.needle} {tail}", template_args)
    room = sample.length - len(shortest)
    for bounds, counts in pieces:
        # The joined text may have more tokens than its parts, so the first attempt may be too long.
        for last in range(max(1, bisect_right(counts, room)) - 1, -1, -1):
            end = bounds[last]
            # A random boundary near the depth; if none is near, the nearest.
            distances = {x: abs(x - end * sample.depth / 100) for x in bounds[: last + 1]}
            near = [bound for bound, distance in distances.items() if distance <= end * NEAR / 100]
            rng = random.Random(f"{facts['seed']} {sample}")
            at = rng.choice(near or [min(distances, key=distances.get)])
            context = f"{text[:at]}{needle.needle} {text[at:end]}".rstrip()
            ids, offsets, shift = encode_message(tokenizer, head + context + tail, template_args)
            if len(ids) <= sample.length:
                break
        missing = sample.length - len(ids)
        if 0 <= missing <= max(MISSING, sample.length // 10):
            break
    else:
        raise InputError(
            f"lengths: the prompt of {sample.length} tokens with the needle “{needle.needle}” has "
            f"{len(ids)}; give other lengths, or a haystack with spaces between words"
        )
    first, last = (shift + len(head) + at + place for place in needle.place())
    inside = [i for i, (a, b) in enumerate(offsets) if a < last and b > first]
    return ids, (inside[0], inside[-1] + 1), round(100 * at / max(end, 1), 2)


def encode_message(tokenizer, message, template_args):
    """Ids of a prompt, the characters [start, end) of each, and the position of the message in the
    rendered text."""
    plain = template_args is None
    text = message
    if not plain:
        messages = [{"role": "user", "content": message}]
        text = tokenizer.render(messages, template_args=template_args)
    start = text.find(message.strip())
    if start < 0:
        raise InputError(
            "the chat template rewrites the message, so the needle cannot be located in it; use "
            "plain text"
        )
    encoding = tokenizer.core.encode(text, add_special_tokens=plain)
    return encoding.ids, encoding.offsets, start - (len(message) - len(message.lstrip()))


def make_published_prompt(sample, needle, text, tokenizer):
    """The prompt of a published run: the needle is inserted, by tokens, after the last full stop
    before the depth.

    In other vocabularies than Llama 2's the FULL_STOPS are other tokens, so that the needle comes
    before the text, or after it at depth 100. Each encoding adds a beginning-of-text token. Returns
    like `make_prompt`; the needle is located by the first window of its length with more than 90 %
    of its token set, by (-1, -1) without one."""
    decode = partial(tokenizer.core.decode, skip_special_tokens=False)
    text = text * math.ceil(sample.length / max(len(text.split()), 1))
    context = encode(tokenizer, decode(encode(tokenizer, text)[: sample.length]))
    inserted = encode(tokenizer, needle.needle)
    room = sample.length - SPARED - len(inserted)  # may be negative, as in their code
    context = context[:room]
    at = len(context)
    if sample.depth < 100:
        at = int(at * (sample.depth / 100))
        while at and context[at - 1] not in FULL_STOPS:
            at -= 1
    haystack = decode(context[:at] + inserted + context[at:])
    ids = encode(
        tokenizer, PUBLISHED.replace("{context}", haystack).replace("{question}", needle.question)
    )
    needle_ids = tokenizer.core.encode(needle.real_needle, add_special_tokens=False).ids
    n, tokens = len(needle_ids), set(needle_ids)
    span = -1, -1
    for i in range(len(ids)):
        if len(tokens & set(ids[i : i + n])) / len(tokens) > COVERED:
            span = i, i + n
            break
    return ids, span, round(100 * at / max(len(context), 1), 2)


@lru_cache(maxsize=4)
def encode(tokenizer, text):
    """The ids of a text.

    The long ones take a second, and all runs of one book and length share them."""
    return tokenizer.core.encode(text).ids
