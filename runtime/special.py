"""The ids that a checkpoint's tokenizer and configuration mark as special."""

import os
from contextlib import contextmanager

import tokenizers

from runtime.checks import as_ints
from runtime.files import one_line, read_json


def special_ids(folder):
    """(BOS id or None, end ids, ids of padding, which may be the end ids) of a checkpoint
    folder."""
    if not (folder / "tokenizer.json").exists():
        return None, read_eos_ids(folder), ()
    core = read_tokenizer(folder / "tokenizer.json")
    tokens = read_special_tokens(folder)
    bos_id, eos_id, pad_id = (
        core.token_to_id(tokens.get(f"{name}_token", "")) for name in ("bos", "eos", "pad")
    )
    eos_ids = read_eos_ids(folder, eos_id)
    return bos_id, eos_ids, eos_ids if pad_id is None else (pad_id,)


def read_special_tokens(folder):
    """{"bos_token": "<s>", …} of tokenizer_config.json. Templates may use any of these tokens."""
    tokens = {}
    for key, value in read_optional(folder / "tokenizer_config.json").items():
        if key.endswith("_token"):
            # Older files have {"content": "<s>", …} in place of "<s>".
            token = value.get("content") if isinstance(value, dict) else value
            if token and isinstance(token, str):
                tokens[key] = token
    return tokens


def read_eos_ids(folder, eos_id=None):
    """Ids that end a text: generation_config.json's, else the tokenizer's `eos_id` and
    config.json's."""

    def read(name):
        path = folder / name
        return end_ids(read_optional(path).get("eos_token_id"), f"{path}: eos_token_id")

    defaults = () if eos_id is None else (eos_id,)
    return read("generation_config.json") or tuple(dict.fromkeys(defaults + read("config.json")))


def end_ids(value, name):
    """A configuration's `eos_token_id` (None, a number or several) → a tuple. -1 means none."""
    return tuple(i for i in as_ints([] if value is None else value, name, single=True) if i >= 0)


def read_tokenizer(path):
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; to make it from tokenizer.model or vocab.json, load the folder "
            "with transformers' AutoTokenizer and call save_pretrained"
        )
    try:
        with silent_stderr():
            core = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # a panic of the library is not an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(
            f"tokenizers {tokenizers.__version__} cannot read {path}: {one_line(error)}"
        ) from None
    core.no_truncation()  # some files still contain the settings of a training run
    core.no_padding()
    return core


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


def read_optional(path):
    return read_json(path) if os.path.lexists(path) else {}  # a dangling link is an error
