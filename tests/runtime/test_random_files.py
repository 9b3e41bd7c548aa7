"""Random configurations and damaged checkpoints give the result of transformers or one line."""

import contextlib
import copy
import json
import math
import random
import shutil
from itertools import islice

import pytest
import torch
import transformers

import cli
import decore
from heads import load_heads
from model import Transformer
from runtime.config import Config
from runtime.hf import HFModel
from tests.checkpoints import TINY, write_checkpoint, write_heads, write_tokenizer

LENGTH = 60  # tokens of the text whose logits are compared
ODD = (None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e300, math.nan, math.inf)
ODD += ("", "4", "x", [], {}, [1], {"a": 1}, "\ud800")


def draw_configuration(dice):
    """A random configuration that transformers accepts."""
    groups = dice.choice([1, 2, 4])
    heads = groups * dice.choice([1, 2, 3])
    layers = dice.randint(1, 4)
    c = TINY | dict(
        model_type=dice.choice(["llama", "mistral", "qwen2", "qwen3"]),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        hidden_size=heads * dice.choice([2, 6, 8]),
        num_hidden_layers=layers,
        vocab_size=dice.randint(20, 150),
        rms_norm_eps=10 ** dice.uniform(-8, -1),
        tie_word_embeddings=dice.random() < 0.4,
        max_window_layers=dice.randint(0, 5),
        sliding_window=dice.choice([None, 1, 2, 5, 40, 4096]),
    )
    low = dice.uniform(0.1, 4)
    bands = dict(low_freq_factor=low, high_freq_factor=low + dice.uniform(0.1, 8))
    kinds = [dict(rope_type="default"), dict(type="linear"), dict(rope_type="llama3", **bands)]
    scaling = dict(factor=dice.choice([1, 2, 4.0, 7.3, 0.5])) | dice.choice(kinds)
    if dice.random() < 0.5:
        scaling["original_max_position_embeddings"] = dice.choice([1, 16, 128, 4096])
    c["rope_theta"] = dice.uniform(2, 1e7)
    if dice.random() < 0.5:
        c["rope_scaling"] = scaling
    else:
        c["rope_parameters"] = scaling | dict(rope_theta=c.pop("rope_theta"))
    if dice.random() < 0.6 or c["model_type"] == "qwen3":
        c["head_dim"] = 2 * dice.randint(1, 12)
    if c["model_type"] != "mistral":
        c |= dict(attention_bias=dice.random() < 0.4, use_sliding_window=dice.random() < 0.7)
        windows = c["sliding_window"] and c["use_sliding_window"]
        if c["model_type"].startswith("qwen") and windows and dice.random() < 0.5:
            c["layer_types"] = dice.choices(["full_attention", "sliding_attention"], k=layers)
    return c


def places_in(value):
    """Yields (parent, key) of every entry of a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(entries):
        yield value, key
        if isinstance(child, dict | list):
            yield from places_in(child)


def change(dice, value, times, odd=ODD):
    """Removes or replaces an entry of a JSON value, so many times."""
    for _ in range(times):
        places = list(islice(places_in(value), 3000)) if isinstance(value, dict | list) else []
        if not places:
            return copy.deepcopy(dice.choice(odd))
        parent, key = dice.choice(places)
        if dice.random() < 0.3:
            del parent[key]
        else:
            parent[key] = copy.deepcopy(dice.choice(odd))
    return value


def damage(dice, content):
    """Changes bytes as disks, editors and transfers do."""
    if not content:
        return b"\x00"
    at = dice.randrange(len(content))
    return dice.choice(
        [
            content[:at],
            content[:at] + bytes([dice.randrange(256)]) + content[at + 1 :],
            content[:at] + content[at + 1 :],
            b"\xef\xbb\xbf" + content,
            content + content,
            content.replace(b'"', b"'"),
            b"",
        ]
    )


def attempt(function):
    """The function's result; None if it raises an error that `cli.run_program` prints in a line."""
    try:
        return function()
    except Exception as error:
        message = cli.explain(error)
        if message is None:
            raise
        assert len(message) > 5, repr(error)
        return None


def make_reference(folder):
    """A model of transformers, which has read a text: some configurations fail only then."""
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = transformers.AutoModelForCausalLM
    reference = cls.from_config(config, attn_implementation="eager").eval()
    reference(torch.ones(1, LENGTH, dtype=torch.long))
    return reference


@pytest.mark.parametrize("seed", range(36))
def test_a_random_configuration_gives_the_logits_and_greedy_tokens_of_transformers(seed, tmp_path):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    times = dice.choice([0, 0, 1, 2])
    c = change(dice, draw_configuration(dice), times)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(c))
    config = attempt(lambda: Config.from_checkpoint(tmp_path))
    reference = None
    with contextlib.suppress(Exception):
        reference = make_reference(tmp_path)
    if None in (config, reference) or config.max_positions < LENGTH:
        assert times
        return
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(tmp_path)
    path.write_text(json.dumps(c))  # as it was, not as transformers writes it
    model = Transformer.load(tmp_path)
    ids = torch.randint(0, config.vocab_size, (40,)).tolist()
    n = LENGTH - len(ids)
    tokens = decore.generate(model, ids, "greedy", max_new_tokens=n, eos_ids=()).ids
    text = torch.tensor([ids + tokens])
    with torch.inference_mode():
        expected = reference(text).logits
        largest = max(1, expected.abs().max())
        assert (model(text) - expected).abs().max() <= 2e-5 * largest, c
    before = expected[0, -n - 1 : -1]  # the logits that choose the tokens
    behind = before.amax(-1) - before[range(n), tokens]
    assert behind.max() < 1e-4 * largest, c


def answer(engine, folder):
    model = engine.load(folder, dtype="float32")
    heads = load_heads(model, 2, folder / "heads.json")
    return decore.generate(model, [5, 9, 7, 7, 30], heads=heads, max_new_tokens=3, eos_ids=()).ids


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint, and its answer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("whole"), vocab_size=259, shards=3)
    write_tokenizer(folder, "{{ messages[0].content }}")
    generation = dict(eos_token_id=257, max_new_tokens=5, do_sample=False)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_heads(folder / "heads.json")
    return folder, answer(Transformer, folder)


@pytest.mark.parametrize("seed", range(36))
def test_the_engines_agree_on_a_damaged_checkpoint_and_never_read_other_weights(
    seed, whole, tmp_path
):
    dice = random.Random(seed)
    folder = shutil.copytree(whole[0], tmp_path / "copy")
    path = dice.choice([*sorted(folder.glob("*config.json")), *sorted(folder.glob("[mh]*"))])
    content = path.read_bytes()
    header = content
    if path.suffix == ".safetensors":
        header = content[: 8 + int.from_bytes(content[:8], "little")]
    if path.suffix == ".json" and dice.random() < 0.8:
        odd = *ODD, "config.json", "../x", "/etc/passwd"
        value = change(dice, json.loads(content), dice.choice([1, 2]), odd)
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(damage(dice, header) + content[len(header) :])
    ours, theirs = (
        attempt(lambda engine=engine: answer(engine, folder)) for engine in (Transformer, HFModel)
    )
    assert None in (ours, theirs) or ours == theirs, path.name
    assert path.name[0] != "m" or ours in (None, whole[1]), path.name
