"""Needles in haystacks: which runs there are, and the prompt of each.

The needle is put at a sentence boundary of the text near the chosen depth. Its tokens are located by the characters
they cover, which works with any tokenizer and chat template. The published runs placed and located it by token ids
(`make_published_prompt`)."""

import json
import math
import random
import re
from bisect import bisect_right
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from runtime.files import read_text

NEAR = 5                        # largest distance of the needle from its depth, in % of the context
PUBLISHED = "{context}Based on the content of the book, Question: {question}\nAnswer:"
FULL_STOPS = (29889, 869)       # the published runs' ids of a full stop: Llama 2's, for every vocabulary
SPARED = 200                    # tokens of the length that they left for question and answer
COVERED = 0.9                   # share of the needle's token set by which they located it


class Needle(NamedTuple):
    needle: str
    question: str
    real_needle: str            # the part of the needle that answers the question; heads are scored on its tokens


class Book(NamedTuple):
    text: str
    bounds: list                # characters at which sentences start, 0 first
    counts: list                # tokens before each of them


class Sample(NamedTuple):
    book: int
    length: int                 # tokens of the prompt, at most
    depth: int                  # % of the haystack in front of the needle
    needle: int


class Prompt(NamedTuple):
    sample: Sample
    ids: list
    span: tuple                 # the needle's tokens: first, last + 1
    at: float                   # position of the needle, in % of the context


# A full stop and the like, closing quotes, white space, and what looks like a beginning; not after Mr. or an initial.
SENTENCE_END = re.compile(r"""(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])"""
                          r"""[.!?]["'”’)\]]*\s+(?=["'“‘(\[]*[A-Z0-9])|[。！？]\s*""")


def read_needles(path):
    """Needles of a JSON Lines file: needle, question and real_needle, which is a part of the needle (in any case)."""
    needles = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            needles.append(Needle(*(row[field].strip() for field in Needle._fields)))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f'{path}, line {number}: a needle is a JSON object with texts "needle", "question" and '
                             '"real_needle"') from None
        if not needles[-1].real_needle or needles[-1].real_needle.lower() not in needles[-1].needle.lower():
            raise ValueError(f"{path}, line {number}: real_needle must be a part of needle, word for word")
    if not needles:
        raise ValueError(f"{path} holds no needles")
    return needles


def read_haystack(path):
    """The texts of one file, of a folder, or of its subfolders (the authors' part1/p1.txt, …), in order of name."""
    folder = Path(path)
    files = sorted(folder.glob("*.txt")) or sorted(folder.glob("*/*.txt")) if folder.is_dir() else [folder]
    texts = [read_text(file).strip() for file in files]
    if not any(texts):
        raise ValueError(f"--haystack {path} holds no text; give a text file, or a folder with .txt files")
    return texts


def make_book(tokenizer, texts, first, length):
    """Enough text for `length` tokens: from text `first` on, then the following ones, repeated as often as needed."""
    joined = "".join(text + "\n\n" for text in texts[first:] + texts[:first])
    size = 16 * length                                          # characters: longer tokens are rare
    text = (joined * math.ceil(size / len(joined)))[:size]
    bounds = [0] + [match.end() for match in SENTENCE_END.finditer(text)]
    starts = [start for start, _ in tokenizer.core.encode(text, add_special_tokens=False).offsets]
    return Book(text, bounds, [bisect_right(starts, bound - 1) for bound in bounds])


def plan(n_needles, n_books, lengths, depths, runs=None, seed=0):
    """All needles × lengths × depths; or `runs` of them, needles in turn, each time at another length and depth."""
    grid = list(product(lengths, depths))
    if runs and runs > n_needles * len(grid):
        raise ValueError(f"--runs {runs}: {n_needles} needles at {len(grid)} places make {n_needles * len(grid)} runs")
    rng = random.Random(seed)
    places = [rng.sample(grid, len(grid)) if runs else grid for _ in range(n_needles)]
    chosen = [(i % n_needles, places[i % n_needles][i // n_needles]) for i in range(runs or n_needles * len(grid))]
    return sorted(Sample(needle % n_books, *place, needle) for needle, place in chosen)


def make_prompt(sample, needle, book, tokenizer, template, chat, seed):
    """The prompt of a run. template: holds {context} and {question}; chat: as in `read_message`."""
    head, tail = around(template, needle)
    room = sample.length - shortest(needle, tokenizer, template, chat)
    if room < 0:
        raise ValueError(f"--lengths: {sample.length} tokens cannot hold the needle “{needle.needle}”, its question "
                         f"and the template; they take {sample.length - room}")
    last = bisect_right(book.counts, room) - 1                  # the sentence before which the haystack ends
    while True:
        end = book.bounds[last]
        target = end * sample.depth / 100
        near = [b for b in book.bounds[:last + 1] if abs(b - target) <= end * NEAR / 100]
        nearest = min(book.bounds[:last + 1], key=lambda b: abs(b - target))
        at = random.Random(f"{seed} {sample}").choice(near or [nearest])
        rest = book.text[at:end].rstrip()
        message = head + book.text[:at] + needle.needle + (" " + rest if rest else "") + tail
        ids, offsets, shift = read_message(tokenizer, message, chat)
        if len(ids) <= sample.length or last == 0:
            break
        last -= 1                                               # joined texts may have more tokens than their parts
    start = shift + len(head) + at + needle.needle.lower().index(needle.real_needle.lower())
    inside = [i for i, (a, b) in enumerate(offsets) if a < start + len(needle.real_needle) and b > start]
    return Prompt(sample, ids, (inside[0], inside[-1] + 1), round(100 * at / max(end, 1), 2))


def around(template, needle):
    """The parts of the prompt before and after the context."""
    return [part.replace("{question}", needle.question) for part in template.split("{context}")]


def shortest(needle, tokenizer, template, chat):
    """Tokens of the prompt whose context is the needle alone."""
    head, tail = around(template, needle)
    return len(read_message(tokenizer, head + needle.needle + " " + tail, chat)[0])


def read_message(tokenizer, message, chat):
    """Ids of a prompt, the characters [start, end) of each, and the position of the message in the text.

    chat: arguments of the chat template; None: plain text."""
    if chat is None:
        encoding = tokenizer.core.encode(message)
        return encoding.ids, encoding.offsets, 0
    text = tokenizer.render([{"role": "user", "content": message}], template_args=chat)
    start = text.find(message.strip())
    if start < 0:
        raise ValueError("the chat template rewrites the message, so the needle cannot be located in it; use --raw")
    encoding = tokenizer.core.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets, start - (len(message) - len(message.lstrip()))


def make_published_prompt(sample, needle, text, tokenizer):
    """The prompt of a published run: the needle is put, by tokens, at the depth or else the full stop before it.

    A full stop is one of FULL_STOPS. In other vocabularies than Llama 2's these are other tokens, so that the needle
    comes before the whole text, or after it at depth 100. All texts are encoded and decoded with their special tokens,
    so a beginning of text is added each time. `span` is where the published runs located the needle."""
    def encode(text):
        return tokenizer.core.encode(text).ids

    def decode(ids):
        return tokenizer.core.decode(ids, skip_special_tokens=False)

    text = text * math.ceil(sample.length / max(len(text.split()), 1))
    inserted, context = encode(needle.needle), encode(decode(encode_haystack(tokenizer, text)[:sample.length]))
    if len(context) + len(inserted) > sample.length - SPARED:
        context = context[:sample.length - SPARED - len(inserted)]      # a negative end cuts from the right, as theirs
    at = len(context)
    if sample.depth < 100:
        at = int(at * (sample.depth / 100))
        while at and context[at - 1] not in FULL_STOPS:
            at -= 1
    haystack = decode(context[:at] + inserted + context[at:])
    ids = encode(PUBLISHED.replace("{context}", haystack).replace("{question}", needle.question))
    span = locate_published(ids, tokenizer.core.encode(needle.real_needle, add_special_tokens=False).ids)
    return Prompt(sample, ids, span, round(100 * at / max(len(context), 1), 2))


@lru_cache(maxsize=1)
def encode_haystack(tokenizer, text):
    """The ids of a long text, which are the same for all runs of a needle and take a second."""
    return tokenizer.core.encode(text).ids


def locate_published(prompt_ids, needle_ids):
    """The published runs' position of the needle: the first window of its length with > 90 % of its token set."""
    n, tokens = len(needle_ids), set(needle_ids)
    for i in range(len(prompt_ids)):
        if len(tokens & set(prompt_ids[i:i + n])) / len(tokens) > COVERED:
            return i, i + n
    return -1, -1
