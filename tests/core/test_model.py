"""The logits against transformers', the head mask against an independent oracle, the cache against
no cache."""

import math
import resource

import numpy as np
import pytest
import torch
import transformers

from decore import make_head_mask, pad
from model import Cache, Transformer
from tests.checkpoints import (
    BANDS,
    FAMILIES,
    assert_close,
    random_ids,
    random_weights,
    tiny,
    write_checkpoint,
)
from tests.golden.make import FOLDER, PROMPTS
from tests.methods import HEADS
from tests.tables import each, facts, rows

ATOL = 1e-5  # float32: sums in another order; logits are of the order of 2


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp(family), family)


# ------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_logits_match_the_recorded_ones_of_transformers(model, family, i):
    golden = torch.tensor(np.load(FOLDER / "logits.npz")[f"{family}/{i}"])
    assert_close(model(torch.tensor([PROMPTS[i]]))[0], golden)


# Families, and some of them with changes.
GRID = """
llama3 | num_key_value_heads=1
llama3 | BANDS
mistral-window | sliding_window=1
qwen2-window | layer_types=["sliding_attention","full_attention","sliding_attention"]
qwen3 | sliding_window=6 use_sliding_window=true max_window_layers=0
"""
GROUPS = {"BANDS": dict(rope_parameters=dict(BANDS, rope_theta=300.0))}


@pytest.mark.parametrize("name, changes", [*((name, "") for name in FAMILIES), *rows(GRID)])
def test_logits_match_transformers_also_in_the_files_that_it_writes(name, changes, tmp_path):
    folder = write_checkpoint(tmp_path / "old", name, **facts(changes, GROUPS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    theirs.save_pretrained(tmp_path / "new")
    ids = torch.tensor(random_ids(2, 40, seed=5))
    with torch.inference_mode():
        expected = theirs(ids).logits
    for folder in ("old", "new"):
        assert_close(Transformer.load(tmp_path / folder)(ids), expected)


# -------------------------------------------------------------------------------------------- cache


def read(model, prompts, capacity, rows=1):
    """A cache of the prompts."""
    cache = Cache(model, [len(p) for p in prompts], capacity, rows)
    model.prefill(pad(prompts), cache)
    return cache


def cached(model, ids, cut, head_mask=None, mask="output", steps=1):
    """Logits [R, B, T, V] of ids[cut:] after a prefill of ids[:cut], `steps` tokens per call."""
    cache = read(model, [ids[:cut]], len(ids) - cut, 1 if head_mask is None else len(head_mask))
    new = torch.tensor([ids[cut:]]).split(steps, 1)
    return torch.cat([model(part, cache, head_mask, mask) for part in new], 2)


@pytest.mark.parametrize("cut", [0, 1, 13, 39])
@pytest.mark.parametrize("steps", [1, 4])
def test_cached_logits_equal_the_full_forward(model, cut, steps):
    ids = PROMPTS[2]
    assert_close(cached(model, ids, cut, steps=steps)[0], model(torch.tensor([ids]))[:, cut:])


@pytest.mark.parametrize("mask", ["output", "query"])
def test_two_rows_equal_two_caches_of_one_row(model, mask):
    """Also after the first 64 slots, and several tokens at a time."""
    prompt, new = PROMPTS[1], random_ids(70, seed=3)
    both, *alone = (
        cached(model, prompt + new, len(prompt), make_head_mask(rows, model), mask, steps=7)
        for rows in ([[], HEADS], [[]], [HEADS])
    )
    assert_close(both, torch.cat(alone), 2 * ATOL)  # 70 tokens


def test_the_prompt_is_stored_once(llama):
    cache, config = read(llama, [random_ids(2048, seed=1)], 64, 2), llama.config
    per_token = 2 * config.n_kv_heads * config.head_dim * 4  # bytes of a layer's key and value
    assert [kv.nbytes for kv in cache.kv] == [(2048 + 64 * 2) * per_token] * 3


def test_prefill_needs_memory_linear_in_the_prompt(tmp_path):
    model = tiny(tmp_path, "mistral-window", max_position_embeddings=20_000)
    ids = torch.tensor([random_ids(8_192)])
    cache = Cache(model, [8_192], 1)
    model.prefill(ids[:, :2048], cache)  # warm up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model.prefill(ids, cache)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 8_192**2  # one byte per pair of tokens, for one head alone, would be more


# ---------------------------------------------------------------------------------------- head mask


def test_masking_a_head_equals_zeroing_its_columns_of_the_output_projection(family, tmp_path):
    config, ids = FAMILIES[family], PROMPTS[2]
    weights = random_weights(config)
    whole = tiny(tmp_path / "whole", family, weights=weights)
    for layer, head in HEADS:
        columns = weights[f"model.layers.{layer}.self_attn.o_proj.weight"]  # [D, H·K]
        columns.unflatten(1, (config["num_attention_heads"], -1))[:, head] = 0
    cut = tiny(tmp_path / "cut", family, weights=weights)
    mask = make_head_mask([[], HEADS], whole)
    assert_close(whole(torch.tensor([ids]), head_mask=mask)[1], cut(torch.tensor([ids])))
    prompt = read(whole, [ids[:25]], len(ids) - 25)  # unmasked
    assert_close(cached(whole, ids, 25, mask)[1], cut(torch.tensor([ids[25:]]), prompt)[0])


def test_a_mask_for_another_model_is_refused(llama):
    with pytest.raises(ValueError, match=r"\[2, 2, 4\]; llama3 has L = 3, H = 4"):
        llama(torch.tensor([[5]]), head_mask=torch.ones(2, 2, 4))
    with pytest.raises(ValueError, match="known: output, query"):
        llama(torch.tensor([[5]]), mask_on="keys")


# ------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_float32_if_small_or_have_the_dtype_of_the_checkpoint_or_the_chosen_one(
    tmp_path, dtype, monkeypatch
):
    name = str(dtype).removeprefix("torch.")
    folder = write_checkpoint(tmp_path, "qwen2", dtype=dtype, torch_dtype=name)
    wide = Transformer.load(folder)
    weight = random_weights(FAMILIES["qwen2"])["model.layers.0.mlp.up_proj.weight"]
    up = wide.layers[0].mlp.gate_up.weight[len(weight) :]
    assert up.dtype == torch.float32 and torch.equal(up, weight.to(dtype).float())
    monkeypatch.setattr("runtime.config.FLOAT32_UP_TO", 1)
    assert Transformer.load(folder).dtype == dtype
    for chosen in "bfloat16", torch.float32:
        assert str(Transformer.load(folder, dtype=chosen).dtype).endswith(str(chosen))


def test_rotary_frequencies_stay_float32_whatever_the_weights_are(tmp_path):
    model = tiny(tmp_path, "llama3.1")
    before = model.frequencies.clone()
    model = model.to(torch.bfloat16)
    logits = model(torch.tensor([[5, 6]]), Cache(model, [0], 2))  # computes in bfloat16
    assert logits.dtype == torch.float32 and torch.equal(model.frequencies, before)


def test_shards_hold_the_same_model_and_a_missing_one_is_named(tmp_path):
    one = tiny(tmp_path / "one", "qwen3")
    folder = write_checkpoint(tmp_path / "many", "qwen3", shards=3)
    many = Transformer.load(folder)
    assert all(map(torch.equal, one.parameters(), many.parameters()))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="00002-of-00003.safetensors is missing or damaged"):
        Transformer.load(folder)


STRICT = r"""
norm.weight | [] | missing \['model.norm.weight'\], unused \[\]
norm.bias | [0.0] * 32 | missing \[\], unused \['model.norm.bias'\]
norm.weight | [0.0] * 31 | model.norm.weight is F32 \[31\]; .* BF16 \[32\]
norm.weight | [0.0] * 31 + [math.nan] | model.norm.weight is not finite
norm.weight | [math.inf] + [0.0] * 31 | model.norm.weight is not finite
"""


@each("name, values, words", STRICT)
def test_weights_are_strict_both_ways(name, values, words, tmp_path):
    weights = random_weights(FAMILIES["llama3"])
    weights.pop(f"model.{name}", None)
    if values != "[]":
        weights[f"model.{name}"] = torch.tensor(eval(values, dict(math=math)))
    with pytest.raises(ValueError, match=words):
        tiny(tmp_path, weights=weights)
