"""The ids that a checkpoint's tokenizer and configuration mark as special."""

import os
import warnings
from contextlib import contextmanager

import tokenizers
from tokenizers import pre_tokenizers

from runtime.checks import as_ints
from runtime.errors import InputError, one_line
from runtime.files import read_text

MISTRAL = ("mistral", "mistral3", "ministral", "pixtral", "voxtral")  # model types
# Into which words Mistral's tokenizers with more than 100,000 tokens split a text.
MISTRAL_WORDS = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Their folders have the tokenizer's class of the model type, whatever tokenizer_config.json says.
OWN_CLASS = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp")
NAMED = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())


def read_special_ids(checkpoint):
    """(BOS id or None, end ids, ids of padding, which may be the end ids)."""
    if not (checkpoint.folder / "tokenizer.json").exists():
        return None, read_eos_ids(checkpoint), ()
    core, tokens = checkpoint.tokenizer, checkpoint.special_tokens
    bos_id, eos_id, pad_id = (
        core.token_to_id(tokens.get(f"{name}_token", "")) for name in ("bos", "eos", "pad")
    )
    eos_ids = read_eos_ids(checkpoint, eos_id)
    return bos_id, eos_ids, eos_ids if pad_id is None else (pad_id,)


def read_special_tokens(checkpoint):
    """{"bos_token": "<s>", …} of a checkpoint's settings. Templates may use any of these tokens."""
    tokens = {}
    for key, value in checkpoint.settings.items():
        if key.endswith("_token"):
            # Older files have {"content": "<s>", …} in place of "<s>".
            token = value.get("content") if isinstance(value, dict) else value
            if token and isinstance(token, str):
                tokens[key] = token
            elif key in NAMED and value not in (None, ""):
                raise InputError(
                    f"{checkpoint.folder}/tokenizer_config.json: {key} is {one_line(value, 80)}; "
                    "it must be a text"
                )
    return tokens


def tokens_of_class(checkpoint):
    """Names of special tokens that no file sets or rules out, so that in transformers they are
    those of the tokenizer's class, if it is not the general one."""
    settings = checkpoint.settings
    model_type = checkpoint.read("config.json").get("model_type")
    is_general = settings.get("tokenizer_class", model_type) in (None, *GENERAL_CLASSES)
    if is_general and model_type not in OWN_CLASS:
        return []
    return [name for name in NAMED if name not in settings]


def read_eos_ids(checkpoint, eos_id=None):
    """Ids that end a text: those of generation_config.json, the tokenizer's `eos_id`, and those of
    config.json."""

    def read(file):
        name = f"{checkpoint.folder / file}: eos_token_id"
        return end_ids(checkpoint.read(file).get("eos_token_id"), name)

    tokenizers_own = () if eos_id is None else (eos_id,)
    joined = read("generation_config.json") + tokenizers_own + read("config.json")
    return tuple(dict.fromkeys(joined))


def end_ids(value, name):
    """A configuration's `eos_token_id` (None, a number or several) → a tuple. -1 means none."""
    return tuple(i for i in as_ints([] if value is None else value, name, single=True) if i >= 0)


def read_tokenizer(checkpoint):
    """The tokenizer of tokenizer.json, with the tokens that only other files list."""
    path = checkpoint.folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; to make it from tokenizer.model or vocab.json, load the folder "
            "with transformers' AutoTokenizer and call save_pretrained"
        )
    text = read_text(path)
    try:
        with silent_stderr():
            core = tokenizers.Tokenizer.from_str(text)
            core.encode("a")  # fails if it adds a token that is not there
    except BaseException as error:  # a panic of the library is not an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InputError(
            f"tokenizers {tokenizers.__version__} cannot read {path}: {one_line(error)}"
        ) from None
    core.no_truncation()  # some files still contain the settings of a training run
    core.no_padding()
    add_tokens(core, checkpoint)
    core.encode_special_tokens = checkpoint.settings.get("split_special_tokens") is True
    check_spaces(core, checkpoint)
    correct_mistral(core, checkpoint)
    return core


def check_spaces(core, checkpoint):
    """InputError if "add_prefix_space" of tokenizer_config.json contradicts tokenizer.json."""
    adds_space = first_word(core, "a") != "a"
    if checkpoint.settings.get("add_prefix_space") not in (None, adds_space):
        raise InputError(
            f"{checkpoint.folder}/tokenizer_config.json: add_prefix_space is "
            f"{str(not adds_space).lower()}, but tokenizer.json puts {'a' if adds_space else 'no'} "
            "space before a text; correct one of them"
        )


def correct_mistral(core, checkpoint):
    """Split words by Mistral's pattern if "fix_mistral_regex" of tokenizer_config.json demands it.
    Otherwise warn of a wrong one, in the folders in which transformers does."""
    c = checkpoint.read("config.json")
    is_old = str(c.get("transformers_version") or "") < "5"
    is_large = core.pre_tokenizer is not None and core.get_vocab_size() > 100_000
    if not (is_old and is_large and c.get("model_type") in MISTRAL):
        return
    if checkpoint.settings.get("fix_mistral_regex"):
        words = pre_tokenizers.Split(tokenizers.Regex(MISTRAL_WORDS), "isolated")
        if isinstance(core.pre_tokenizer, pre_tokenizers.Sequence):
            core.pre_tokenizer[0] = words
        else:
            core.pre_tokenizer = pre_tokenizers.Sequence([words, core.pre_tokenizer])
    elif first_word(core, "aB") != "a":
        warnings.warn(
            f"{checkpoint.folder}: tokenizer.json splits words by a wrong pattern; to correct it, "
            'add "fix_mistral_regex": true to tokenizer_config.json',
            stacklevel=2,
        )


def first_word(core, text):
    """The first word into which a text is split, with a space that is put before it."""
    if core.normalizer:
        text = core.normalizer.normalize_str(text)
    return core.pre_tokenizer.pre_tokenize_str(text)[0][0] if core.pre_tokenizer else text


def add_tokens(core, checkpoint):
    """Add the tokens that tokenizer.json does not mark as added, as transformers does: those of
    "added_tokens_decoder" in tokenizer_config.json, in older folders of added_tokens.json, and
    the special tokens of the settings.

    InputError for a token without an id, or with another one than it is listed with."""
    settings = checkpoint.settings
    path = checkpoint.folder / "tokenizer_config.json"
    named = checkpoint.special_tokens.values()

    def added():
        return {token.content for token in core.get_added_tokens_decoder().values()}

    try:
        special = {*named, *extra_tokens(settings)}
        present = added()
        listed = settings.get("added_tokens_decoder")
        if listed is None:
            path = checkpoint.folder / "added_tokens.json"
            listed = {
                i: dict(content=text, special=text in special, normalized=text not in special)
                for text, i in checkpoint.read("added_tokens.json").items()
                if text not in present
            }
        tokens = {int(i): tokenizers.AddedToken(**token) for i, token in listed.items()}
        for token in tokens.values():
            token.special |= token.content in named and token.content not in present
        core.add_tokens([tokens[i] for i in sorted(tokens)])
        for i, token in tokens.items():
            found = core.token_to_id(token.content)
            if found != i:
                raise InputError(f"{token.content!r} is listed as {i}, but is {found}")
        for text in special - added():
            if core.token_to_id(text) is not None:
                core.add_special_tokens([text])
            elif text not in named:  # a template that writes a named one is refused
                files = "tokenizer_config.json", "special_tokens_map.json"
                lists = (file for file in files if text in extra_tokens(checkpoint.read(file)))
                path = checkpoint.folder / next(lists)
                raise InputError(f"{text!r} is special, but has no id")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: cannot read the added tokens: {one_line(error)}") from None


def extra_tokens(settings):
    """The special tokens that have no name, or one of the model's own."""
    texts = []
    for key in "extra_special_tokens", "additional_special_tokens":
        extra = settings.get(key) or []
        for token in extra.values() if isinstance(extra, dict) else extra + []:
            texts.append(token["content"] if isinstance(token, dict) else token)
    return texts


@contextmanager
def silent_stderr():
    """Discard what is written to file descriptor 2, where a panic of the library prints its
    trace."""
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
