"""The logits against transformers', the head mask against an independent oracle, the cache against no cache."""

import resource

import numpy as np
import pytest
import torch
import transformers

import model as model_file
from decore import generate, make_head_mask, pad
from model import Cache, Transformer
from tests.checkpoints import BANDS, CLASSES, FAMILIES, TINY, random_ids, random_weights, write_checkpoint
from tests.golden.make import FOLDER, PROMPTS

GOLDEN = np.load(FOLDER / "logits.npz")
HEADS = [(1, 0), (1, 3), (2, 2)]
ATOL = 1e-5                                     # float32: sums in another order; logits are of the order of 2


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp(family), family))


def two_rows(model):
    return make_head_mask([[], HEADS], model)


def assert_close(tensor, expected, atol=ATOL):
    torch.testing.assert_close(tensor, expected, atol=atol, rtol=0)


# -------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_logits_match_the_recorded_ones_of_transformers(model, family, i):
    logits = model(torch.tensor([PROMPTS[i]]))[0]
    np.testing.assert_allclose(logits.numpy(), GOLDEN[f"{family}/{i}"], atol=ATOL, rtol=0)


GRID = {
    "llama-one-kv-head": dict(model_type="llama", num_key_value_heads=1),
    "llama-wide-heads": dict(model_type="llama", head_dim=20),
    "llama-bands": dict(model_type="llama", rope_parameters=dict(BANDS, rope_theta=300.0)),
    "llama-eps": dict(model_type="llama", rms_norm_eps=1e-2),
    "mistral-window-1": dict(model_type="mistral", sliding_window=1),
    "mistral-window-5": dict(model_type="mistral", sliding_window=5),
    "mistral-full": dict(model_type="mistral", sliding_window=None, head_dim=12),
    "qwen2-window-ignored": dict(model_type="qwen2", sliding_window=4, use_sliding_window=False),
    "qwen2-window-from-2": dict(model_type="qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=2),
    "qwen2-layer-types": dict(model_type="qwen2", sliding_window=4, use_sliding_window=True,
                              layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "qwen3-window": dict(model_type="qwen3", head_dim=8, sliding_window=6, use_sliding_window=True,
                         max_window_layers=0),
}


@pytest.mark.parametrize("name", GRID)
def test_logits_match_transformers_live_on_what_transformers_5_writes(name, tmp_path):
    changes = GRID[name]
    config = {k: v for k, v in dict(TINY, **changes).items() if k not in ("torch_dtype", "model_type")}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(changes["model_type"], **config)
    reference = getattr(transformers, CLASSES[changes["model_type"]])._from_config(config, attn_implementation="eager")
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(tmp_path)
    ids = torch.tensor(random_ids(2, 23, seed=5))
    with torch.inference_mode():
        expected = reference(ids).logits
    assert_close(Transformer.load(tmp_path)(ids), expected)


@pytest.mark.parametrize("prompt", PROMPTS[1:])
def test_greedy_tokens_equal_transformers_over_64_steps(family, tmp_path, prompt):
    folder, cls = write_checkpoint(tmp_path, family), CLASSES[FAMILIES[family]["model_type"]]
    reference = getattr(transformers, cls).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    settings = dict(max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        text = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
    expected = text[0, len(prompt):].tolist()
    assert generate(Transformer.load(folder), prompt, method="greedy", max_new_tokens=64, eos_ids=()).ids == expected


# --------------------------------------------------------------------------------------------------------------- cache


def read(model, prompts, capacity, rows=1):
    """A cache of the prompts."""
    cache = Cache(model, [len(p) for p in prompts], capacity, rows)
    model.prefill(pad(prompts), cache)
    return cache


def cached(model, ids, cut, head_mask=None, mask="output", steps=1, prompt_mask=None):
    """Logits [R, B, T, V] of ids[cut:] after a prefill of ids[:cut], `steps` tokens per call."""
    cache = Cache(model, [cut], len(ids) - cut, 1 if head_mask is None else len(head_mask))
    model.prefill(torch.tensor([ids[:cut]], dtype=torch.long), cache, prompt_mask, mask)
    return torch.cat([model(torch.tensor([ids[i:i + steps]]), cache, head_mask, mask)
                      for i in range(cut, len(ids), steps)], 2)


@pytest.mark.parametrize("cut", [0, 1, 13, 39])
@pytest.mark.parametrize("steps", [1, 4])
def test_cached_logits_equal_the_full_forward(model, cut, steps):
    ids = PROMPTS[2]
    assert_close(cached(model, ids, cut, steps=steps)[0], model(torch.tensor([ids]))[:, cut:])


def test_a_batch_is_prefilled_in_passes_of_a_bounded_number_of_tokens(model, monkeypatch):
    prompts, sizes, embedding = [random_ids(50, seed=n) for n in range(4)], [], model.embedding
    one_pass = read(model, prompts, 1)
    monkeypatch.setattr(model_file, "CHUNK", 64)
    monkeypatch.setattr(model, "embedding", lambda ids: sizes.append(ids.shape) or embedding(ids))
    for kv, expected in zip(read(model, prompts, 1).kv, one_pass.kv, strict=True):
        assert_close(kv, expected)
    assert sizes == [(4, 16)] * 3 + [(4, 2)]


@pytest.mark.parametrize("mask", ["output", "query"])
def test_two_rows_equal_two_caches_of_one_row(model, mask):
    """Also after the first 64 slots, and several tokens at a time."""
    prompt, new = PROMPTS[1], random_ids(70, seed=3)
    both = cached(model, prompt + new, len(prompt), two_rows(model), mask, steps=7)
    for row, heads in enumerate([[], HEADS]):
        alone = cached(model, prompt + new, len(prompt), make_head_mask([heads], model), mask, steps=7)
        assert_close(both[row], alone[0], 2 * ATOL)             # 70 tokens


@pytest.mark.parametrize("mask", ["output", "query"])
def test_a_masked_prompt_in_the_cache_equals_the_masked_full_forward(model, mask):
    full = model(torch.tensor([PROMPTS[2]]), head_mask=two_rows(model), mask=mask)
    for row, heads in enumerate([[], HEADS]):
        head_mask = make_head_mask([heads], model)
        assert_close(cached(model, PROMPTS[2], 20, head_mask, mask, prompt_mask=head_mask)[0], full[row][:, 20:])


def test_ragged_batches_equal_single_prompts(model):
    prompts, new = [random_ids(n, seed=n) for n in (1, 9, 26)], random_ids(3, 4, seed=9)
    batch = model(torch.tensor(new), read(model, prompts, 4, 2), two_rows(model))
    for b, p in enumerate(prompts):
        assert_close(batch[:, b], cached(model, p + new[b], len(p), two_rows(model), steps=4)[:, 0])


def test_a_repeated_cache_continues_the_prompt_in_several_ways(model):
    prompt, answers = PROMPTS[1], random_ids(3, 5, seed=4)
    together = model(torch.tensor(answers), read(model, [prompt], 5).repeat(3))[0]
    for logits, answer in zip(together, answers, strict=True):
        assert_close(logits, cached(model, prompt + answer, len(prompt), steps=5)[0, 0])


def test_the_prompt_is_stored_once(llama):
    cache, config = read(llama, [random_ids(2048, seed=1)], 64, 2), llama.config
    per_token = 2 * config.n_kv_heads * config.head_dim * 4                         # bytes of a layer's key and value
    assert [kv.nbytes for kv in cache.kv] == [(2048 + 64 * 2) * per_token] * 3


def test_prefill_needs_memory_linear_in_the_prompt(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "mistral-window", max_position_embeddings=20_000))
    ids = torch.tensor([random_ids(8_192)])
    cache = Cache(model, [8_192], 1)
    model.prefill(ids[:, :2048], cache)         # warm up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model.prefill(ids, cache)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 8_192**2                    # one byte per pair of tokens, for one head alone, would be more


# ----------------------------------------------------------------------------------------------------------- head mask


def test_masking_a_head_equals_zeroing_its_columns_of_the_output_projection(family, tmp_path):
    config, ids = FAMILIES[family], PROMPTS[2]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    weights = random_weights(config)
    whole = Transformer.load(write_checkpoint(tmp_path / "whole", family, weights=weights))
    for layer, head in HEADS:
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"][:, head * width:(head + 1) * width] = 0
    cut = Transformer.load(write_checkpoint(tmp_path / "cut", family, weights=weights))
    assert_close(whole(torch.tensor([ids]), head_mask=two_rows(whole))[1], cut(torch.tensor([ids])))
    later = cut(torch.tensor([ids[25:]]), read(whole, [ids[:25]], len(ids) - 25))       # `whole` reads the prompt
    assert_close(cached(whole, ids, 25, two_rows(whole))[1], later[0])


def test_a_mask_for_another_model_is_refused(llama):
    with pytest.raises(ValueError, match=r"2 layers of 4 heads; llama3 has 3 of 4"):
        llama(torch.tensor([[5]]), head_mask=torch.ones(2, 2, 4))
    with pytest.raises(ValueError, match="known: output, query"):
        llama(torch.tensor([[5]]), mask="keys")


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_have_the_dtype_of_the_checkpoint_or_the_chosen_one(tmp_path, dtype):
    folder = write_checkpoint(tmp_path, "qwen2", dtype=dtype, torch_dtype=str(dtype).removeprefix("torch."))
    assert repr(Transformer.load(folder)).endswith(f"qwen2, 3 layers of 4 heads, {dtype} on cpu)")
    assert Transformer.load(folder, dtype="bfloat16").dtype == torch.bfloat16
    wide = Transformer.load(folder, dtype=torch.float32)
    weight = random_weights(FAMILIES["qwen2"])["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(wide.layers[0].mlp.gate_up.weight[len(weight):], weight.to(dtype).float())


def test_rotary_frequencies_stay_float32_whatever_the_weights_are(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3.1"))
    before = model.frequencies.clone()
    for dtype in (torch.bfloat16, torch.float32):
        model = model.to(dtype)
        assert model.dtype == dtype and model.frequencies.dtype == torch.float32
        assert torch.equal(model.frequencies, before)


def test_shards_hold_the_same_model_and_old_rotary_buffers_are_ignored(tmp_path):
    weights = random_weights(FAMILIES["qwen3"])
    one = Transformer.load(write_checkpoint(tmp_path / "one", "qwen3", weights=weights))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    many = Transformer.load(write_checkpoint(tmp_path / "many", "qwen3", weights=weights, shards=3))
    assert all(map(torch.equal, one.parameters(), many.parameters()))


@pytest.mark.parametrize("change, words", [
    (lambda w: w.pop("model.norm.weight"), r"missing \['model.norm.weight'\], unused \[\]"),
    (lambda w: w.update({"model.norm.bias": torch.ones(32)}), r"missing \[\], unused \['model.norm.bias'\]"),
    (lambda w: w.update({"model.norm.weight": torch.ones(31)}), r"model.norm.weight is F32 \[31\]; .* BF16 \[32\]"),
    (lambda w: w["lm_head.weight"].view(-1)[7:8].fill_(float("nan")), "lm_head.weight is not finite"),
    (lambda w: w["lm_head.weight"].view(-1)[7:8].fill_(float("inf")), "lm_head.weight is not finite"),
])
def test_weights_are_strict_both_ways(change, words, tmp_path):
    weights = random_weights(FAMILIES["llama3"])
    change(weights)
    with pytest.raises(ValueError, match=words):
        Transformer.load(write_checkpoint(tmp_path, "llama3", weights=weights))


def test_a_pickle_is_refused_with_the_reason_and_a_missing_shard_is_named(tmp_path):
    write_checkpoint(tmp_path / "pickle", "llama3")
    (tmp_path / "pickle" / "model.safetensors").rename(tmp_path / "pickle" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="Pickles .* can run code"):
        Transformer.load(tmp_path / "pickle")
    (write_checkpoint(tmp_path / "shards", "llama3", shards=2) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="00002-of-00002.safetensors is missing or damaged"):
        Transformer.load(tmp_path / "shards")
