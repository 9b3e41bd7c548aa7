"""Text to ids and back: tokenizer.json, chat templates, and streaming of whole characters."""

import json
import re
from contextlib import suppress
from datetime import datetime
from functools import cache, cached_property

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.checkpoint import Checkpoint
from runtime.errors import InputError, one_line
from runtime.files import check_unicode, read_text
from runtime.special import tokens_of_class

BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of one byte in SentencePiece vocabularies
LONGEST = 10_000_000  # characters to encode, which takes 1.4 GB
MARK = "\ue000"  # ends the content of a message that is continued; no text has this character
REASONING = "reasoning_content", "thinking", "reasoning"  # the first that is there counts
UNFINISHED = "\ufffd"  # decoded from the first bytes of a character


class Tokenizer:
    """A checkpoint's tokenizer. Ids that only the model's embedding has decode to nothing."""

    @classmethod
    def load(cls, name, eos_ids=None):
        """Of a folder, a hub id or a `Checkpoint`. InputError or OSError if a file is missing or
        damaged.

        eos_ids: ids that end a text; None: the checkpoint's own."""
        return cls(Checkpoint.of(name), eos_ids)

    def __init__(self, checkpoint, eos_ids=None):
        self.name = checkpoint.path
        self.core = checkpoint.tokenizer
        added = self.core.get_added_tokens_decoder().items()
        self.hidden = {i for i, token in added if token.special}
        self.special = checkpoint.special_tokens
        self.of_class = tokens_of_class(checkpoint)
        self.bos_id, own_eos_ids, _ = checkpoint.special_ids
        self.eos_ids = own_eos_ids if eos_ids is None else tuple(eos_ids)
        self.chat_template = read_chat_template(checkpoint)
        self.words = {*re.findall(r"\w+", self.chat_template)}
        self.complete_chats = set()  # shapes of chats of which the template omits no message

    def encode(self, text, bos=True):
        """Plain text → ids, with one BOS if the tokenizer adds it.

        bos=False: without (for answers)."""
        if len(text) > LONGEST:  # without memory, the library aborts the process
            raise InputError(f"a text of {len(text)} characters: at most {LONGEST} are encoded")
        check_unicode(text, "the text")
        ids = self.core.encode(text, add_special_tokens=bos).ids
        return ids[1:] if bos and ids[:2] == [self.bos_id] * 2 else ids

    def encode_chat(self, messages, **options):
        """[{"role": …, "content": …}, …] → ids. The template writes all special tokens, BOS too.

        options: the other arguments of `render`."""
        return self.encode(self.render(messages, **options), bos=False)

    def render(
        self,
        messages,
        generation_prompt=True,
        template_args=None,
        today=None,
        continue_final_message=False,
    ):
        """Messages → the text of a chat. InputError if the template rejects or omits a message.

        If the template has no system turn, the system message precedes the first user message.
        continue_final_message: leave the last turn open, in place of a generation prompt.
        template_args: more variables of the template, for example {"enable_thinking": False}.
        today: the date in templates; None: the clock's."""
        if not self.chat_template:
            raise InputError(
                f"{self.name} has no chat template, like most base models: use plain text (--raw)"
            )
        for key in template_args or ():
            if not self.template_reads(key):
                raise InputError(f"{self.name}: the chat template has no argument {key!r}")
        messages = [name_reasoning(join_parts(message)) for message in messages]
        roles = [message.get("role") for message in messages[:2]]
        if roles == ["system", "user"] and not self.has_system_turn:
            messages = join_system(messages)
        if continue_final_message:
            text = self.fill_open(messages, template_args, today)
        else:
            text = self.fill(messages, generation_prompt, template_args, today)
        for key, token in self.special.items():
            written = token in text and (self.template_reads(key) or token in self.chat_template)
            if written and self.core.token_to_id(token) is None:
                raise InputError(
                    f"{self.name}: the chat template writes {key} {token!r}, which is not in "
                    "tokenizer.json; download the checkpoint again"
                )
        # What decides whether a template writes all messages: everything but their texts.
        shapes = [message | {"content": bool(message.get("content"))} for message in messages]
        shape = repr((shapes, template_args))
        contents = [str(message.get("content") or "").strip() for message in messages]
        # A template may leave out a short text, where it writes a long one.
        if shape not in self.complete_chats or not all(content in text for content in contents):
            self.check_complete(messages, template_args)
            self.complete_chats.add(shape)
        return text

    def check_complete(self, messages, template_args):
        """InputError if the chat template omits a message, or writes a token that no file sets."""
        for i, message in enumerate(messages):
            if message.get("content") and self.omits(messages, i, template_args):
                raise InputError(
                    f"{self.name}: the chat template omits message {i + 1}, whose role is "
                    f"{message.get('role')!r}; leave the message out, or change its role"
                )
        for key in filter(self.template_reads, self.of_class):
            if self.fill(messages, template_args={key: "x"}) != self.fill(messages):
                raise InputError(
                    f"{self.name}: the chat template writes {key}, but tokenizer_config.json leaves"
                    " it to the tokenizer's class; add it there (null: an empty text)"
                )

    def fill(self, messages, generation_prompt=True, template_args=None, today=None, as_parts=None):
        """The text of the chat template, which writes the messages as they are.

        as_parts: give it each content as a list of parts; None: if it reads no others."""
        if self.reads_parts if as_parts is None else as_parts:
            messages = [in_parts(message) for message in messages]
        variables = dict(
            messages=messages,
            add_generation_prompt=generation_prompt,
            tools=None,
            documents=None,
            strftime_now=lambda form: (today or datetime.now()).strftime(form),
            **self.special,
        )
        try:
            return compile_template(self.chat_template).render(variables | (template_args or {}))
        except Exception as error:  # a template can raise anything
            raise InputError(
                f"{self.name}: the chat template rejects these messages: {one_line(error)}"
            ) from None

    def fill_open(self, messages, template_args, today):
        """The text of the chat template up to the end of the last message's content."""
        *before, last = messages
        content = last["content"]
        marked = last | {"content": content + MARK + " "}  # templates may trim the blank
        text = self.fill([*before, marked], False, template_args, today)
        text, _, after = text.rpartition(MARK)
        trims = content != content.rstrip() and not after.startswith(" ")
        if trims or not content.strip() or not text.endswith(content) or MARK in text:
            raise InputError(
                f"{self.name}: the chat template does not keep the beginning of the answer, "
                f"{content!r:.80}; give a text without blanks at its ends"
            )
        return text

    def omits(self, messages, i, template_args=None, as_parts=None):
        """Whether the chat template writes the same for another text of message i."""
        other = "x" * (len(str(messages[i]["content"])) + 1)
        others = [*messages[:i], messages[i] | {"content": other}, *messages[i + 1 :]]
        texts = [
            self.fill(chat, template_args=template_args, as_parts=as_parts)
            for chat in (messages, others)
        ]
        return texts[0] == texts[1]

    @cached_property
    def reads_parts(self):
        """Whether the chat template reads only contents that are lists of parts, as Idefics3's."""
        for as_parts in False, True:
            with suppress(ValueError):
                if not self.omits([dict(role="user", content="text")], 0, as_parts=as_parts):
                    return as_parts
        return False

    @cached_property
    def has_system_turn(self):
        """Whether the chat template writes a system message. Gemma's, for example, rejects it."""
        # Long, as some templates write only a long one.
        chat = [dict(role=role, content=f"the {role}'s text " * 99) for role in ("system", "user")]
        with suppress(ValueError):
            return not self.omits(chat, 0)
        with suppress(ValueError):
            self.fill(chat[1:])
            return False
        return True  # it rejects both, for another reason

    def template_reads(self, key):
        """Whether the chat template mentions a variable, for example `enable_thinking`."""
        return key in self.words

    def decode(self, ids):
        """Ids → text, without special tokens and unknown ids. All spaces stay."""
        # tokenizers 0.23 does not skip special tokens that are "normalized" (first Llama).
        return self.core.decode([int(i) for i in ids if int(i) not in self.hidden])

    def stream(self, stop=()):
        return Stream(self, stop)


class Stream:
    """Decodes ids one at a time. The joined results of `push` and `end` equal `decode` of all ids.

    stop: strings, or special tokens, which have no text. `text` ends before the first of them, and
    `ended` says whether there was one."""

    def __init__(self, tokenizer, stop=()):
        self.tokenizer = tokenizer
        special = {tokenizer.core.id_to_token(i): i for i in tokenizer.hidden}
        self.stop_ids = {special[string] for string in stop if string in special}
        self.stop = [string for string in stop if string not in special]
        for string in self.stop:
            for token in special:
                if token in string:
                    raise InputError(f"stop text {string!r} can only be the special token {token}")
        # The longest start of a stop string.
        self.held_back = max(map(len, self.stop), default=1) - 1
        self.ids = []
        self.text = ""
        self.ended = False

    def push(self, token):
        """Returns the new text that can no longer change, perhaps none."""
        self.ids.append(token)
        self.ended = token in self.stop_ids
        spelling = self.tokenizer.core.id_to_token(token)
        # One bad byte changes the text of a complete run of byte tokens: decode after the run.
        if spelling is None or token in self.tokenizer.hidden or BYTE.fullmatch(spelling):
            return ""
        return self.grow(self.tokenizer.decode(self.ids).removesuffix(UNFINISHED), self.held_back)

    def stops(self, token):
        """Push a token → whether the text has ended."""
        self.push(token)
        return self.ended

    def end(self):
        """Returns the rest. An unfinished character becomes U+FFFD."""
        return self.grow(self.tokenizer.decode(self.ids))

    def grow(self, text, held_back=0):
        """held_back: characters at the end that may become a stop string."""
        before = len(self.text)
        places = [text.index(string) for string in self.stop if string in text]
        self.ended |= bool(places)
        self.text = text[: min(places, default=max(before, len(text) - held_back))]
        return self.text[before:]


def join_parts(message):
    """The message, with a list of text parts [{"type": "text", "text": …}, …] joined to one text.
    InputError for other parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        fields = part if isinstance(part, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            raise InputError(
                f"a message has the part {one_line(repr(part), 60)}; only texts are read: "
                '{"type": "text", "text": …}'
            )
    return message | {"content": "".join(part["text"] for part in parts)}


def name_reasoning(message):
    """The message with its reasoning under the names that templates read, as in transformers."""
    for name in REASONING:
        if message.get(name) is not None:
            return {"thinking": message[name]} | message | {"reasoning_content": message[name]}
    return message


def in_parts(message):
    """The message, with its text as a list of one part."""
    return message | {"content": [{"type": "text", "text": message.get("content") or ""}]}


def join_system(messages):
    """The messages, with the system's text and an empty line in front of the first user's text."""
    system, user, *rest = messages
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *rest]


@cache
def compile_template(text):
    """A chat template in Jinja's sandbox, with the white space, functions and tags of
    transformers."""

    def raise_exception(message):
        raise InputError(message)

    # Jinja's own escapes HTML.
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    jinja.filters["tojson"] = tojson
    jinja.globals["raise_exception"] = raise_exception
    return jinja.from_string(text)


class GenerationTag(Extension):
    """{% generation %}, which marks the assistant's text for training: a scope, like {% with %}."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def read_chat_template(checkpoint):
    """The default chat template, or "": additional_chat_templates/default.jinja, else
    chat_template.jinja, else "chat_template" of tokenizer_config.json (a text or named texts)."""
    for file in "additional_chat_templates/default.jinja", "chat_template.jinja":
        path = checkpoint.folder / file
        if path.exists():
            return read_text(path)
    text = checkpoint.read("tokenizer_config.json").get("chat_template")
    for named in text if isinstance(text, list) else ():
        if isinstance(named, dict) and named.get("name") == "default":
            text = named.get("template")
    if isinstance(text, dict):
        text = text.get("default", text)
    text = text or ""
    if not isinstance(text, str):
        raise InputError(
            f"{checkpoint.folder}/tokenizer_config.json: chat_template must be a text, "
            "or named texts with a 'default'"
        )
    return text
