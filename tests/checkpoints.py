"""Tiny random checkpoints in the layout of real ones, one for every kind of model that is read.

The weights come from numpy's frozen RandomState stream: a seed means the same numbers on every
machine and version."""

import copy
import json
import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model import Transformer
from tests.tables import facts, rows

TINY = facts("""
hidden_size=32 intermediate_size=48 num_hidden_layers=3 num_attention_heads=4
num_key_value_heads=2 vocab_size=96 max_position_embeddings=512 rms_norm_eps=1e-5
rope_theta=10000.0 hidden_act="silu" tie_word_embeddings=false torch_dtype="float32"
bos_token_id=1 eos_token_id=null
""")
BANDS = facts("""
rope_type="llama3" factor=8.0 low_freq_factor=1.0 high_freq_factor=4.0
original_max_position_embeddings=16
""")
GROUPS = {"SCALED": dict(rope_scaling=BANDS), "MORE": dict(rope_scaling=BANDS | dict(factor=32.0))}
FAMILIES = """
llama2 | model_type="llama" num_key_value_heads=4
llama3 | model_type="llama" rope_theta=500000.0
llama3.1 | model_type="llama" SCALED
llama3.2 | model_type="llama" MORE tie_word_embeddings=true head_dim=8
llama3-iti | model_type="llama" attention_bias=true
mistral | model_type="mistral" sliding_window=null num_attention_heads=8 head_dim=12
mistral-window | model_type="mistral" sliding_window=8
qwen2 | model_type="qwen2" tie_word_embeddings=true sliding_window=8 use_sliding_window=false \
    max_window_layers=3 rms_norm_eps=1e-6
qwen2-window | model_type="qwen2" sliding_window=8 use_sliding_window=true max_window_layers=1
qwen3 | model_type="qwen3" head_dim=16 rope_theta=1000000.0
"""  # ITI edits the bias of o
FAMILIES = {name: TINY | facts(words, GROUPS) for name, words in rows(FAMILIES)}


# Weights of a layer, their shapes: H and G are heads times their width.
BLOCK = """
self_attn.q_proj.weight | H D | std=0.3
self_attn.k_proj.weight | G D | std=0.3
self_attn.v_proj.weight | G D
self_attn.o_proj.weight | D H
mlp.gate_proj.weight | F D
mlp.up_proj.weight | F D
mlp.down_proj.weight | D F
input_layernorm.weight | D | mean=1.0
post_attention_layernorm.weight | D | mean=1.0
"""


def random_weights(c, seed=0):
    """{name in the checkpoint: float32 tensor}, so large that heads attend unevenly."""
    random = np.random.RandomState(seed)

    def draw(*shape, mean=0.0, std=0.2):
        return torch.from_numpy((mean + std * random.standard_normal(shape)).astype(np.float32))

    D, F, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    K = c.get("head_dim") or D // c["num_attention_heads"]
    H, G = c["num_attention_heads"] * K, c["num_key_value_heads"] * K
    sizes = dict(D=D, F=F, H=H, G=G)
    biased = "qkv" if c["model_type"] == "qwen2" else "qkvo" if c.get("attention_bias") else ""
    weights = {
        "model.embed_tokens.weight": draw(V, D, std=0.1),
        "model.norm.weight": draw(D, mean=1.0),
    }
    if not c["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(V, D, std=0.1)
    for layer in range(c["num_hidden_layers"]):
        block = {}
        for name, shape, *how in rows(BLOCK):
            block[name] = draw(*(sizes[n] for n in shape.split()), **facts(" ".join(how)))
        for p in biased:
            block[f"self_attn.{p}_proj.bias"] = draw(len(block[f"self_attn.{p}_proj.weight"]))
        for p in "qk" if c["model_type"] == "qwen3" else "":
            block[f"self_attn.{p}_norm.weight"] = draw(K, mean=1.0)
        weights |= {f"model.layers.{layer}.{name}": w for name, w in block.items()}
    return weights


def write_checkpoint(
    folder, family="llama3", seed=0, dtype=torch.float32, shards=1, weights=None, **changes
):
    """Write config.json and safetensors, with an index if there are several shards → the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(FAMILIES[family], **changes)
    write_json(folder / "config.json", config)
    weights = weights or random_weights(config, seed)
    weights = {name: w.to(dtype).contiguous() for name, w in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {name: names[i % shards] for i, name in enumerate(weights)}
    for file in names:
        save_file({n: w for n, w in weights.items() if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def assert_close(tensor, expected, atol=1e-5, rtol=0):
    """By default what another order of summation changes in float32."""
    torch.testing.assert_close(tensor, expected, atol=atol, rtol=rtol)


def assert_similar(found, expected, least, atol):
    """The least correlation of two tensors, and how far their norms may be apart."""
    found, expected = found.flatten(), expected.flatten()
    assert torch.corrcoef(torch.stack([found, expected]))[0, 1] > least
    assert abs(found.norm() / expected.norm() - 1) < atol


def ids_of(generations):
    return [g.ids for g in generations]


def tiny(folder, family="llama3", **changes):
    """Our engine with a checkpoint that is written first."""
    return Transformer.load(write_checkpoint(folder, family, **changes))


def random_ids(*shape, seed=0, vocab_size=96):
    return np.random.RandomState(seed).randint(3, vocab_size, shape).tolist()


def write_tokenizer(folder, chat_template=None):
    """A byte-level tokenizer of 256 bytes and three special tokens: any text, one id per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|turn|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    if chat_template:
        config["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", config)
    return folder


def write_heads(path, seed=0):
    """Head scores for 3 layers of 4 heads; the best heads differ from seed to seed."""
    scores = np.random.RandomState(seed).permutation(12) / 12
    return write_lines(path, [{f"{i // 4}-{i % 4}": x for i, x in enumerate(scores)}])


def stand_in(n_layers=3, n_heads=4, name="tiny"):
    """What `load_heads` reads of a model."""
    return SimpleNamespace(
        name=name, checkpoint=None, config=SimpleNamespace(n_layers=n_layers, n_heads=n_heads)
    )


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


# -------------------------------------------------------------------- random configurations, damage

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
