"""Text to ids and back: the checkpoint's tokenizer.json, its chat template, and a stream of whole characters."""

import re
from pathlib import Path

import tokenizers

from runtime import template
from runtime.files import check_file, one_line, read_json, read_text
from runtime.weights import checkpoint_folder

BYTE = re.compile(r"<0x[0-9A-F]{2}>")       # how SentencePiece vocabularies spell a single byte
UNFINISHED = "\ufffd"                       # what the bytes of half a character decode to


class Tokenizer:
    """`len(tokenizer)` counts the ids it knows. A model's embedding may have more rows: those decode to nothing."""

    @classmethod
    def load(cls, name):
        """From a folder or a hub id. ValueError, FileNotFoundError or OSError where there is none to read."""
        return cls(checkpoint_folder(name, weights=False), name)

    def __init__(self, folder, name):
        self.name, self.today = name, None      # today: a date for templates that print it; None is the clock's
        self.core = read_tokenizer(folder / "tokenizer.json", name)
        self.hidden = {i for i, token in self.core.get_added_tokens_decoder().items() if token.special}
        config = read_optional(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:        # older files say it beside, and that goes first
            config |= read_optional(folder / "special_tokens_map.json")
        # "bos_token": "<s>", or in older files {"content": "<s>", …}. A template may use any of them.
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        self.special = {k: v for k, v in tokens.items() if v and isinstance(v, str)}
        self.unknown = {k: v for k, v in self.special.items() if self.core.token_to_id(v) is None}
        self.bos_id = self.core.token_to_id(self.special.get("bos_token", ""))
        self.eos_ids = read_eos_ids(folder, self.core, self.special.get("eos_token"))
        self.chat_template = read_chat_template(folder, config)
        self.has_chat_template = self.chat_template is not None

    def __len__(self):
        return self.core.get_vocab_size()

    def __repr__(self):
        chat = "a" if self.has_chat_template else "no"
        return f"Tokenizer({str(self.name)!r}: {len(self)} tokens, {chat} chat template, texts end at {self.eos_ids})"

    def vocabulary(self):
        """{token: id}; two models can be contrasted when theirs are equal."""
        return self.core.get_vocab()

    def encode(self, text, bos=True):
        """Plain text, with BOS where the checkpoint's tokenizer puts one, but never two; bos=False: never one.

        The answer of `score` continues a prompt, so it is encoded without."""
        ids = self.core.encode(whole(text), add_special_tokens=bos).ids
        return ids[1:] if bos and self.bos_id is not None and ids[:2] == [self.bos_id] * 2 else ids

    def encode_chat(self, messages, generation_prompt=True, template_args=None):
        """[{"role": …, "content": …}, …] through the chat template, which itself writes each special token, BOS too."""
        text = self.render(messages, generation_prompt, template_args)
        return self.core.encode(whole(text), add_special_tokens=False).ids

    def render(self, messages, generation_prompt=True, template_args=None):
        """The text that the chat template makes of the messages. ValueError where it refuses them, or there is none.

        template_args: more variables that the template reads, for example {"enable_thinking": False}."""
        if not self.has_chat_template:
            raise ValueError(f"{self.name} has no chat template, as base models have none: give it plain text (--raw)")
        variables = {"tools": None, "documents": None} | self.special | (template_args or {})
        for key in template_args or ():
            if key in ("messages", "add_generation_prompt") or not self.template_reads(key):
                raise ValueError(f"{self.name}: the chat template has no argument {key!r}")
        try:
            text = template.render(self.chat_template, variables | {
                "messages": messages, "add_generation_prompt": generation_prompt}, self.today)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: the chat template refuses these messages: {one_line(error)}") from None
        for key, token in self.unknown.items():
            if token in text and self.template_reads(key):
                raise ValueError(f"{self.name}: the chat template writes {key} {token!r}, a token that tokenizer.json "
                                 "does not have; tokenizer_config.json and tokenizer.json do not belong together")
        return text

    def template_reads(self, key):
        """Whether the chat template mentions that variable, for example `enable_thinking`."""
        return self.has_chat_template and re.search(rf"\b{re.escape(key)}\b", self.chat_template) is not None

    def decode(self, ids):
        """Special tokens and unknown ids are left out. Spaces stay as they are: no clean-up before punctuation."""
        # tokenizers 0.23 no longer skips special tokens that are "normalized", as those of the first Llama are.
        return self.core.decode([int(i) for i in ids if int(i) not in self.hidden], skip_special_tokens=True)

    def stream(self):
        return Stream(self)


class Stream:
    """Ids one by one → text as soon as it is certain. All that `push` and `end` return, joined, is `decode` of the ids.

    Only a window of the last tokens is decoded, so a push costs the same however long the text has become."""

    WINDOW = 16     # tokens

    def __init__(self, tokenizer):
        self.tokenizer, self.window, self.given = tokenizer, [], 0      # given: characters of the window's text

    def push(self, token):
        """The text that is now certain, perhaps none."""
        spelling = self.tokenizer.core.id_to_token(token)
        if spelling is None or token in self.tokenizer.hidden:
            return ""
        self.window.append(token)
        # Byte tokens in a row are decoded together, and one bad byte spoils them all: wait for the token after them.
        if BYTE.fullmatch(spelling):
            return ""
        text = self.tokenizer.decode(self.window)
        new = self.give(text.removesuffix(UNFINISHED))
        if len(self.window) > 2 * self.WINDOW:
            # A character that is cut in two here was given long ago, and `given` keeps its distance from the end.
            self.window = self.window[-self.WINDOW:]
            self.given += len(self.tokenizer.decode(self.window)) - len(text)
        return new

    def end(self):
        """The rest. A character that was never finished is U+FFFD."""
        return self.give(self.tokenizer.decode(self.window))

    def give(self, text):
        new = text[self.given:]
        self.given += len(new)
        return new


def whole(text):
    """The text, if it is one: tokenizers' own message names neither the kind nor the place."""
    if not isinstance(text, str):
        raise ValueError(f"a text is needed, not {one_line(repr(text), 60)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a character (a lone surrogate, {text[error.start]!a}) "
                         f"at its character {error.start}: repair or remove it") from None
    return text


def stop_at(tokenizer, strings, texts):
    """→ `on_token` for `generate` that ends a text as soon as it holds one of the strings. texts: their number."""
    streams, ends = [tokenizer.stream() for _ in range(texts)], [""] * texts
    longest = max(map(len, strings), default=0)

    def on_token(b, token, entropy):
        new = streams[b].push(token)
        ends[b] = ends[b][max(0, len(ends[b]) - longest + 1):] + new
        return any(string in ends[b] for string in strings)

    return on_token


def cut(text, strings):
    """The text before the first of the strings in it."""
    for string in strings:
        text = text.partition(string)[0]
    return text


def read_tokenizer(path, name):
    if not path.exists() and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"{name} has no tokenizer.json on the hub: run `hf download {name} --local-dir FOLDER` "
                                "and give FOLDER instead; the next message says what to do with what it has")
    folder = path.parent
    old = next((file for file in ("tokenizer.model", "vocab.json") if (folder / file).is_file()), None)
    if not path.exists() and old:
        if not (folder / "tokenizer_config.json").is_file():        # without it transformers guesses, BOS among others
            raise FileNotFoundError(f"{folder} has {old} and no tokenizer_config.json, which says how to use it; fetch "
                                    "that file too")
        raise FileNotFoundError(
            f"{path} is missing; make it of {old} once: pip install transformers sentencepiece protobuf && python -c "
            f'"from transformers import AutoTokenizer; f = {str(folder)!r}; '
            'AutoTokenizer.from_pretrained(f).save_pretrained(f)"')
    check_file(path)
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:      # the library raises nothing more precise
        raise ValueError(f"{path} is not a tokenizer that tokenizers {tokenizers.__version__} can read: "
                         f"{one_line(error)}") from None
    core.no_truncation()            # settings of somebody's training run, which some files still carry
    core.no_padding()
    return core


def read_optional(path):
    return read_json(path) if path.exists() or path.is_symlink() else {}


def read_eos_ids(folder, core, eos_token):
    """Every id that ends a text: those of generation_config.json, else the tokenizer's end token and config.json's."""
    def stated(name):
        ids = read_optional(folder / name).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{folder / name}: eos_token_id must be an id or a list of ids, not {one_line(ids, 80)}")
        return ids

    if ids := stated("generation_config.json"):
        return tuple(ids)
    own = core.token_to_id(eos_token) if eos_token else None
    ids = stated("config.json")
    if eos_token and own is None and not ids:
        raise ValueError(f"{folder}: tokenizer.json does not have {eos_token!r}, tokenizer_config.json's eos_token, "
                         "and no file states an eos_token_id: nothing would end a text")
    return tuple(dict.fromkeys(ids if own is None else [own, *ids]))


def read_chat_template(folder, config):
    """chat_template.jinja, else tokenizer_config.json's "chat_template": one text, or a list of named ones. Or None."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja")
    text = config.get("chat_template")
    if isinstance(text, list):
        text = {t.get("name"): t.get("template") for t in text if isinstance(t, dict)}.get("default", 0)
    if not isinstance(text, str | None):
        raise ValueError(f"{folder}/tokenizer_config.json: chat_template must be a text or a list of named texts, "
                         "one of them 'default'")
    return text
