"""When two answers to one's own questions are the same: docs/own-data.md has the rules, with a
table of cases.

Texts are compared in one normal form, `plain`, by `name_words`: never by parts of words."""

import math
import re
import unicodedata
from functools import lru_cache

from heads.words import UNSEPARATED

SOURCES = ("passage", "memory", "neither", "blank")  # of answers to questions with `memory`
NOWHERE = (math.inf, 0)
SIGNS = str.maketrans("ʻʼ’‘⁄∶−‐", "''''/:--")  # that NFKC keeps apart
LETTER = r"[^\W\d_]"

# Numbers
MINUS = re.compile(r"(?<![\w)])[-–][$€£¥]?(?=\.?\d)")
GROUPS = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?:([ '’])\d{3})(?:\1\d{3})*(?!\w)")
NUMBER = re.compile(r"\d+(?:[.,:/]\d+)+")
COMMAS = re.compile(r"[1-9]\d{0,2}(,\d{2,3})*,\d{3}(\.\d+)?")
POINTS = re.compile(r"[1-9]\d{0,2}((\.\d{3})+,\d+|(\.\d{3}){2,})")

# "A" before a word is an article at the beginning, and may be one in a title; else it is a letter.
ARTICLE = r"(?<!\w)(?<!\w['-])(?:(?i:an|the)(?![\w'-])|a(?= \w)"
ARTICLE += r"|(?<!\w )A(?= (?!(?:is|was|and|or)\b)[\da-z])"
ARTICLES = re.compile(ARTICLE + ")")
ARTICLES_OF_TITLES = re.compile(ARTICLE + rf"|A(?= {LETTER}))")

INITIALS = re.compile(rf"(?<!\w){LETTER}(?:\.{LETTER}(?!\w))+")
HYPHEN = re.compile(rf"(?<={LETTER})-(?={LETTER})")
# Signs that belong to a word: 3.5, 10:30, 1/2, −5, C++, F#, and A− as a grade.
KEPT = re.compile(
    r"(?<=\d)[.:/](?=\d)|−|(?<=\w)\++(?!\w)|(?<=\b[A-Z])#(?!\w)"
    r"|(?:(?<=\b[A-Z])|(?<=\b[A-Z][A-Z]))-(?!\w)"
)

# The end of a sentence
STOP = re.compile(r"(?<=[^\s.!?])[.!?]['’”»\")\]*]*(?=\s|$)|[。।؟]")
OPENING = r"\s*[“«\"'(\[*]*"
ABBREVIATION = re.compile(
    rf"(?<!\w)(?:\d{{1,2}}|{LETTER}|(?:{LETTER}+\.)+{LETTER}+|[b-df-hj-np-tv-xz]+"
    "|prof|gen|col|capt|rev|hon|gov|sen|rep|pres|mme|mlle|sra|dra|adm|maj|bros|etc|approx|inc|co"
    "|corp|ave)$",
    re.IGNORECASE,
)
ENUMERATOR = re.compile(rf"[\W_]*(?:\d{{1,2}}|{LETTER})")  # 1. The Hague
BEGINNING = re.compile(  # of another sentence, also after an abbreviation
    OPENING + r"(?:A|An|The|He|She|It|This|That|These|Those|They|We|You|I|There|His|Her|Its|Their"
    r"|But|And|Or|If|As|In|On|At|For|From|So|However|When|While|After|Before|Because)\b|\s*$"
)
CLAUSE = re.compile(r"(?<=[,;:])\s+|\s+(?=but\b)")
DENIAL = re.compile(r"\b(not|no longer|never|formerly|\w+n['’]t)\b", re.IGNORECASE)


@lru_cache(4096)
def plain(text):
    """The normal form of characters: NFKC, without format characters such as soft hyphens, with the
    digits 0 to 9 alone. Superscripts and fractions are words of their own: 10⁵ is not 105."""
    if text.isascii():
        return text
    spaced = ""
    for c in text.replace("´", "'"):
        apart = unicodedata.decomposition(c).startswith(("<super>", "<fraction>"))
        spaced += " " * apart + c
    text = unicodedata.normalize("NFKC", spaced).translate(SIGNS)
    kept = (c for c in text if unicodedata.category(c) != "Cf")
    return "".join(str(unicodedata.decimal(c, c)) for c in kept)


def first_line(text):
    """The first line that is not empty, as a plain text."""
    return plain(text).strip().split("\n")[0]


@lru_cache(4096)
def name_words(text, titles=False):
    """The words of a text, without English articles (all words, if nothing else is there).

    titles: whether "A" in front of a word with a capital is an article."""
    text = " ".join(plain(text).replace("&", " and ").split())
    text = MINUS.sub(" −", text)
    text = GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)
    text = NUMBER.sub(number, text)
    articles = ARTICLES_OF_TITLES if titles else ARTICLES
    return tuple(split(articles.sub(" ", text)) or split(text))


def number(match):
    """1,000 → 1000; 1.234,5 → 1234.5; 3,14 → 3.14; 3.5.1990 → 3 5 1990."""
    text = match[0]
    if COMMAS.fullmatch(text):
        return text.replace(",", "")
    if POINTS.fullmatch(text):
        return text.replace(".", "").replace(",", ".")
    parts = re.split("[.,:/]", text)
    return " ".join(parts) if len(parts) > 2 else text.replace(",", ".")


def split(text):
    """The words of a text: letters, marks, numbers and the signs that belong to them. In scripts
    that do not separate words, or attach particles to them, each character is one."""
    text = HYPHEN.sub("", INITIALS.sub(lambda match: match[0].replace(".", ""), text))
    signs = {place for match in KEPT.finditer(text) for place in range(*match.span())}
    out = ""
    for place, c in enumerate(text):
        if not c.isascii() and unicodedata.name(c, "").startswith((*UNSEPARATED, "HANGUL")):
            out += f" {c} "
        else:
            out += c if place in signs or unicodedata.category(c)[0] in "LMN" else " "
    return out.split()


def spelling(words):
    """Words as one text, in which blanks count between digits alone: St. John's is St Johns."""
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(words)).casefold()


@lru_cache(4096)
def currencies(text):
    return {c for c in plain(text) if unicodedata.category(c) == "Sc"}


def other_currency(answer, reference):
    """Whether the answer has currencies, but not the reference's: 5 € is not $5, but may be 5."""
    return bool(currencies(answer) and currencies(reference) - currencies(answer))


@lru_cache(2**16)  # runs of one task share questions, and often answers
def same(answer, reference):
    """Whether two texts are the same answer, regardless of case."""
    if other_currency(answer, reference):
        return False
    for titles in (False, True):
        words = name_words(answer, titles)
        if words and spelling(words) == spelling(name_words(reference, titles)):
            return True
    return plain(answer).strip() == plain(reference).strip()


def places(words, name):
    """The numbers of the words at which a name begins.

    Case matters only for names of one or two letters with a capital, such as "In" and "US"."""
    if not name:
        return
    target, written = spelling(name), "".join(name)
    case_matters = len(written) <= 2 and written != written.lower() and target != "no"
    for start, first in enumerate(words):
        if target.startswith(first.casefold()):
            stop = start + 1
            while stop < len(words) and len(spelling(words[start:stop])) < len(target):
                stop += 1
            found = words[start:stop]
            if spelling(found) == target and not (case_matters and "".join(found) != written):
                yield start


def contains(answer, reference):
    """Whether a text contains another one, in complete words."""
    if other_currency(answer, reference):
        return False
    for titles in (False, True):
        if [*places(name_words(answer, titles), name_words(reference, titles))]:
            return True
    return any(same(clause, reference) for clause in CLAUSE.split(plain(answer)))


def source_of(answer, references, memory):
    """Which of SOURCES an answer is. If it gives names of both, the first one counts."""
    if not plain(answer).strip():
        return "blank"
    passage, memorised = first_name(answer, references), first_name(answer, memory)
    if min(passage, memorised) == NOWHERE:
        return "neither"
    return "passage" if passage <= memorised else "memory"


def first_name(answer, names):
    """(number of words in front of it, −its length) of the first name that the answer's first
    sentence gives; NOWHERE without one. A clause with a denial gives none: "not in Rome".

    A name may end after the sentence does."""
    names = [name for name in names if not other_currency(answer, name)]
    found = [(0, -len(answer)) for name in names if same(answer, name)]
    answer = plain(answer)
    end = sentence_end(answer)
    parts = [*CLAUSE.split(answer[:end]), answer[end:]]
    for titles in (False, True):
        words, open_to = [], set()
        for part in parts:
            more = name_words(part, titles)
            if part is not parts[-1] and not DENIAL.search(part):
                open_to.update(range(len(words), len(words) + len(more)))
                found += [(len(words), -len(answer)) for name in names if same(part, name)]
            words += more
        for name in (name_words(name, titles) for name in names):
            starts = (start for start in places(words, name) if start in open_to)
            found += [(start, -len(spelling(name))) for start in starts]
    return min(found, default=NOWHERE)


def first_sentence(text):
    """The first line of a text up to the end of its first sentence."""
    line = first_line(text)
    return line[: sentence_end(line)]


def sentence_end(text):
    """Where the first sentence of a plain text ends.

    A full stop after an abbreviation, an initial or a number of two digits ends it only in front of
    a word such as "He"; any other one, unless a digit follows. "1." and "A." may begin it."""
    for stop in STOP.finditer(text):
        before, after = text[: stop.start()], text[stop.end() :]
        if ENUMERATOR.fullmatch(before):
            continue
        if stop[0][0] != "." or BEGINNING.match(after):
            return stop.end()
        if not ABBREVIATION.search(before) and not re.match(rf"{OPENING}\d", after):
            return stop.end()
    return len(text)
