"""The words of a text in any script."""

import unicodedata

# First words of the names of characters, of scripts that do not separate words.
UNSEPARATED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


def words_of(text):
    """The words of a text, in small letters; its characters where the script does not separate
    words."""
    out = ""
    for c in unicodedata.normalize("NFKC", text.casefold()):
        if unicodedata.category(c)[0] not in "LMN":  # letters, marks such as vowel signs, numbers
            c = " "
        out += f" {c} " if is_unseparated(c) else c
    return out.split()


def is_unseparated(character):
    """Whether a character is of a script that does not separate words."""
    return unicodedata.name(character, "").startswith(UNSEPARATED)


def is_latin(text):
    """Whether all letters and digits of a text are Latin."""
    letters = filter(str.isalnum, unicodedata.normalize("NFKC", text))
    return all(c.isascii() or unicodedata.name(c, "").startswith("LATIN") for c in letters)
