"""The logits against transformers', the head mask against an independent oracle, the cache against no cache."""

import json
import resource

import numpy as np
import pytest
import torch
import transformers

import model as model_file
from decore import make_head_mask
from model import Cache, Transformer, round_up
from tests.checkpoints import BANDS, CLASSES, FAMILIES, TINY, random_ids, random_weights, write_checkpoint
from tests.golden.make import PROMPTS
from tests.golden.make import __file__ as golden_file

GOLDEN = np.load(golden_file.replace("make.py", "logits.npz"))
HEADS = [(1, 0), (1, 3), (2, 2)]
ATOL = 1e-5                                     # float32: sums in another order; logits are of the order of 2


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama3"))


def two_rows(model, heads=HEADS):
    return make_head_mask([[], heads], model)


def oracle(folder, model_type):
    cls = getattr(transformers, CLASSES[model_type])
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


# -------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_logits_match_the_recorded_ones_of_transformers(model, family, i):
    logits = model(torch.tensor([PROMPTS[i]]))[0]
    np.testing.assert_allclose(logits.numpy(), GOLDEN[f"{family}/{i}"], atol=ATOL, rtol=0)


GRID = {
    "llama": dict(model_type="llama"),
    "llama-one-kv-head": dict(model_type="llama", num_key_value_heads=1),
    "llama-wide-heads": dict(model_type="llama", head_dim=20),
    "llama-tied": dict(model_type="llama", tie_word_embeddings=True),
    "llama-bands": dict(model_type="llama", rope_parameters=dict(BANDS, rope_theta=300.0)),
    "llama-eps": dict(model_type="llama", rms_norm_eps=1e-2),
    "mistral-window-1": dict(model_type="mistral", sliding_window=1),
    "mistral-window-5": dict(model_type="mistral", sliding_window=5),
    "mistral-full": dict(model_type="mistral", sliding_window=None, head_dim=12),
    "qwen2-window-ignored": dict(model_type="qwen2", sliding_window=4, use_sliding_window=False),
    "qwen2-window-from-2": dict(model_type="qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=2),
    "qwen2-layer-types": dict(model_type="qwen2", sliding_window=4, use_sliding_window=True,
                              layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "qwen3": dict(model_type="qwen3", head_dim=16),
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
    reference.eval()
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(tmp_path)
    ids = torch.tensor(random_ids(2, 23, seed=5))
    with torch.inference_mode():
        expected = reference(ids).logits
    torch.testing.assert_close(Transformer.load(tmp_path)(ids), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("prompt", PROMPTS[1:])
def test_greedy_tokens_equal_transformers_over_64_steps(family, tmp_path, prompt):
    from decore import generate
    folder = write_checkpoint(tmp_path, family)
    reference = oracle(folder, FAMILIES[family]["model_type"])
    settings = dict(max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        text = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
    expected = text[0, len(prompt):].tolist()
    assert generate(Transformer.load(folder), prompt, method="greedy", max_new_tokens=64, eos_ids=()).ids == expected


# --------------------------------------------------------------------------------------------------------------- cache


def read(model, prompts, capacity, rows=1):
    """A cache of the prompts."""
    cache, longest = Cache(model, [len(p) for p in prompts], capacity, rows), max(map(len, prompts))
    model.prefill(torch.tensor([p + [0] * (longest - len(p)) for p in prompts], dtype=torch.long), cache)
    return cache


def cached(model, ids, cut, head_mask=None, mask="output", strict=True, steps=1):
    """Logits of ids[cut:] after a prefill of ids[:cut], `steps` tokens per call; strict: each row reads the prompt."""
    def logits(masks, masked_prompt):
        cache = Cache(model, [cut], len(ids) - cut, 1 if masks is None else len(masks))
        model.prefill(torch.tensor([ids[:cut]], dtype=torch.long), cache, masks if masked_prompt else None, mask)
        return torch.cat([model(torch.tensor([ids[i:i + steps]]), cache, masks, mask)
                          for i in range(cut, len(ids), steps)], 2)

    if head_mask is None or not strict:
        return logits(head_mask, False)
    return torch.cat([logits(row[None], True) for row in head_mask])


@pytest.mark.parametrize("cut", [0, 1, 13, 39])
@pytest.mark.parametrize("steps", [1, 4])
def test_cached_logits_equal_the_full_forward(model, cut, steps):
    ids = PROMPTS[2]
    torch.testing.assert_close(cached(model, ids, cut, steps=steps)[0], model(torch.tensor([ids]))[:, cut:],
                               atol=ATOL, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_a_prompt_in_many_chunks_equals_one_chunk(model, chunk, monkeypatch):
    whole = cached(model, PROMPTS[2], 38)
    monkeypatch.setattr(model_file, "CHUNK", chunk)
    torch.testing.assert_close(cached(model, PROMPTS[2], 38), whole, atol=ATOL, rtol=0)


@pytest.mark.parametrize("mask", ["output", "query"])
def test_two_rows_equal_two_separate_passes(model, mask):
    both = cached(model, PROMPTS[2], 30, two_rows(model), mask, strict=False)
    for row, heads in enumerate([[], HEADS]):
        alone = cached(model, PROMPTS[2], 30, make_head_mask([heads], model), mask, strict=False)
        torch.testing.assert_close(both[row], alone[0], atol=ATOL, rtol=0)


@pytest.mark.parametrize("mask", ["output", "query"])
def test_strictly_masked_cache_equals_the_masked_full_forward(model, mask):
    full = model(torch.tensor([PROMPTS[2]]), head_mask=two_rows(model), mask=mask)
    torch.testing.assert_close(cached(model, PROMPTS[2], 20, two_rows(model), mask), full[:, :, 20:], atol=ATOL, rtol=0)


def test_ragged_batches_equal_single_prompts(model):
    prompts, new = [random_ids(n, seed=n) for n in (1, 9, 26)], random_ids(3, 4, seed=9)
    cache = read(model, prompts, 4, 2)
    batch = model(torch.tensor(new), cache, two_rows(model))
    for b, p in enumerate(prompts):
        alone = cached(model, p + new[b], len(p), two_rows(model), strict=False, steps=4)
        torch.testing.assert_close(batch[:, b], alone[:, 0], atol=ATOL, rtol=0)


def test_each_row_reads_only_its_own_new_tokens(llama):
    """Each row of a cache of two rows equals a cache of that row alone."""
    prompt, new = PROMPTS[1], random_ids(70, seed=3)            # past the first 64 slots
    both = cached(llama, prompt + new, len(prompt), two_rows(llama), strict=False)
    for row, heads in enumerate([[], HEADS]):
        alone = cached(llama, prompt + new, len(prompt), make_head_mask([heads], llama), strict=False)
        torch.testing.assert_close(both[row], alone[0], atol=2 * ATOL, rtol=0)     # 70 tokens


def test_a_repeated_cache_continues_the_prompt_in_several_ways(model):
    prompt, answers = PROMPTS[1], random_ids(3, 5, seed=4)
    cache = read(model, [prompt], 5).repeat(3)
    together = model(torch.tensor(answers), cache)[0]
    for logits, answer in zip(together, answers, strict=True):
        alone = cached(model, prompt + answer, len(prompt), steps=5)[0, 0]
        torch.testing.assert_close(logits, alone, atol=ATOL, rtol=0)


def test_each_text_may_take_back_its_own_number_of_tokens(model):
    prompts = [random_ids(n, seed=n) for n in (6, 11)]
    cache = read(model, prompts, 400, 2)
    first, then = random_ids(2, 4, seed=3), random_ids(2, 2, seed=4)
    model(torch.tensor(first), cache, two_rows(model))
    cache.take_back([1, 3])
    assert cache.slots.tolist() == [3, 1]
    after = model(torch.tensor(then), cache, two_rows(model))
    for b, accepted in enumerate((3, 1)):
        text = prompts[b] + first[b][:accepted] + then[b]
        expected = cached(model, text, len(prompts[b]), two_rows(model), strict=False)
        torch.testing.assert_close(after[:, b], expected[:, 0, -2:], atol=ATOL, rtol=0)


def test_the_prompt_is_stored_once_and_new_tokens_per_row(llama):
    cache, config = read(llama, [random_ids(2048, seed=1)], 64, 2), llama.config
    per_token = 2 * config.n_kv_heads * config.head_dim * 4                         # bytes of a layer's key and value
    assert [kv.numel() * kv.element_size() for kv in cache.kv] == [(2048 + 64 * 2) * per_token] * 3


def test_prompts_of_similar_length_have_caches_of_one_shape(llama):
    def keys(length, new):
        return Cache(llama, [3, length], new, 2).kv[-1].shape[3]
    assert keys(65, 1) == keys(128, 64) == 128 + 2 * 64
    assert keys(4097, 0) == keys(4352, 0) == 4352
    assert all(n <= round_up(n) <= n * 17 / 16 for n in range(1024, 20_000, 37))


def test_no_buffer_grows_from_token_to_token(llama):
    cache = read(llama, [random_ids(10)], 64, 2)
    places = set()
    for token in range(64):
        llama(torch.tensor([[token % 30 + 3]]), cache, two_rows(llama))
        places.add(tuple(kv.data_ptr() for kv in cache.kv))
    assert len(places) == 1
    with pytest.raises(IndexError, match="out of bounds"):
        llama(torch.tensor([[3]]), cache, two_rows(llama))


def test_prefill_needs_memory_linear_in_the_prompt(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "mistral-window", max_position_embeddings=20_000))
    ids = torch.tensor([random_ids(16_384)])
    cache = Cache(model, [16_384], 1)
    model.prefill(ids[:, :2048], cache)         # warm up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model.prefill(ids, cache)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 16_384**2                    # one byte per pair of tokens, for one head alone, would be more


# ------------------------------------------------------------------------------------------------------------ head mask


@pytest.mark.parametrize("strict", [True, False])
def test_masking_a_head_equals_zeroing_its_columns_of_the_output_projection(family, tmp_path, strict):
    config = FAMILIES[family]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    weights = random_weights(config)
    whole = Transformer.load(write_checkpoint(tmp_path / "whole", family, weights=weights))
    for layer, head in HEADS:
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"][:, head * width:(head + 1) * width] = 0
    cut = Transformer.load(write_checkpoint(tmp_path / "cut", family, weights=weights))
    ids = PROMPTS[2]
    masked = cached(whole, ids, 25, two_rows(whole), strict=strict)[1]
    if strict:
        expected = cut(torch.tensor([ids]))[:, 25:]
    else:                                       # the whole model reads the prompt, the cut one the rest
        expected = cut(torch.tensor([ids[25:]]), read(whole, [ids[:25]], len(ids) - 25))[0]
    torch.testing.assert_close(masked, expected, atol=ATOL, rtol=0)


def test_a_zeroed_query_averages_the_visible_values(model, family):
    layer, head, ids = 0, 1, PROMPTS[2]
    c, outputs = model.config, {}
    attention = model.layers[layer].attn
    values = slice(-attention.kv_heads * c.head_dim, None)
    hooks = [attention.qkv.register_forward_hook(lambda m, i, y: outputs.update(v=y[..., values])),
             attention.o.register_forward_hook(lambda m, i, y: outputs.update(o=i[0]))]
    model(torch.tensor([ids]), head_mask=make_head_mask([[(layer, head)]], model), mask="query")
    for hook in hooks:
        hook.remove()
    group = head // (c.n_heads // c.n_kv_heads)
    values = outputs["v"][0, 0].unflatten(-1, (c.n_kv_heads, c.head_dim))[:, group]                    # [T, K]
    output = outputs["o"][0, 0].unflatten(-1, (c.n_heads, c.head_dim))[:, head]
    window = c.windows[layer] or len(ids)
    expected = torch.stack([values[max(0, t - window + 1):t + 1].mean(0) for t in range(len(ids))])
    torch.testing.assert_close(output, expected, atol=ATOL, rtol=0)


def test_output_and_query_masks_differ(llama):
    logits = [llama(torch.tensor([PROMPTS[1]]), head_mask=two_rows(llama), mask=mask) for mask in ("output", "query")]
    assert (logits[0][0] - logits[1][0]).abs().max() == 0
    assert (logits[0][1] - logits[1][1]).abs().max() > 0.01


def test_a_mask_of_ones_changes_nothing(llama):
    ids = torch.tensor([PROMPTS[1]])
    assert torch.equal(llama(ids, head_mask=two_rows(llama, [])), llama(ids).expand(2, 1, -1, -1))


def test_a_mask_for_another_model_is_refused(llama):
    with pytest.raises(ValueError, match=r"2 layers of 4 heads; llama\d+ has 3 of 4"):
        llama(torch.tensor([[5]]), head_mask=torch.ones(2, 2, 4))
    with pytest.raises(ValueError, match="known: output, query"):
        llama(torch.tensor([[5]]), mask="keys")


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_have_the_dtype_of_the_checkpoint_or_the_chosen_one(tmp_path, dtype):
    folder = write_checkpoint(tmp_path, "qwen2", dtype=dtype, torch_dtype=str(dtype).removeprefix("torch."))
    assert Transformer.load(folder).dtype == dtype
    assert Transformer.load(folder, dtype="bfloat16").dtype == torch.bfloat16
    wide = Transformer.load(folder, dtype=torch.float32)
    weight = random_weights(FAMILIES["qwen2"])["model.layers.0.mlp.up_proj.weight"]
    assert wide.dtype == torch.float32
    assert torch.equal(wide.layers[0].mlp.gate_up.weight[len(weight):], weight.to(dtype).float())


def test_a_model_says_what_it_is(llama):
    assert repr(llama).startswith(f"Transformer({llama.name}: llama, 3 layers of 4 heads, ")
    assert repr(llama).endswith("torch.float32 on cpu)")


def test_shards_hold_the_same_model(tmp_path):
    ids = torch.tensor([PROMPTS[0]])
    one, many = (Transformer.load(write_checkpoint(tmp_path / str(n), "qwen3", shards=n))(ids) for n in (1, 3))
    assert torch.equal(one, many)


def break_weights(folder, change):
    weights = random_weights(FAMILIES["llama3"])
    change(weights)
    return write_checkpoint(folder, "llama3", weights=weights)


@pytest.mark.parametrize("change, words", [
    (lambda w: w.pop("model.norm.weight"), r"missing \['model.norm.weight'\], unused \[\]"),
    (lambda w: w.update({"model.norm.bias": torch.ones(32)}), r"missing \[\], unused \['model.norm.bias'\]"),
    (lambda w: w.update({"model.norm.weight": torch.ones(31)}), r"model.norm.weight is F32 \[31\]; .* BF16 \[32\]"),
    (lambda w: w["lm_head.weight"].view(-1)[7:8].fill_(float("nan")), "lm_head.weight is not finite"),
    (lambda w: w["lm_head.weight"].view(-1)[7:8].fill_(float("inf")), "lm_head.weight is not finite"),
])
def test_weights_are_strict_both_ways(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        Transformer.load(break_weights(tmp_path, change))


def test_old_rotary_buffers_and_a_stored_tied_head_are_ignored(tmp_path):
    weights = random_weights(FAMILIES["llama3.2"])
    expected = Transformer.load(write_checkpoint(tmp_path, "llama3.2", weights=weights))(torch.tensor([PROMPTS[0]]))
    weights |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    logits = Transformer.load(write_checkpoint(tmp_path, "llama3.2", weights=weights))(torch.tensor([PROMPTS[0]]))
    assert torch.equal(logits, expected)


def test_a_pickle_is_refused_with_the_reason(tmp_path):
    write_checkpoint(tmp_path, "llama3")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="Pickles .* can run code"):
        Transformer.load(tmp_path)


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/model.safetensors"])
def test_an_index_that_points_outside_its_folder_is_refused(tmp_path, target):
    write_checkpoint(tmp_path, "llama3", shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": target}}))
    with pytest.raises(ValueError, match="of its own folder"):
        Transformer.load(tmp_path)


def test_a_missing_or_damaged_shard_is_named(tmp_path):
    write_checkpoint(tmp_path, "llama3", shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match="00002-of-00002.safetensors is missing or damaged"):
        Transformer.load(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match="00002-of-00002.safetensors is missing or damaged"):
        Transformer.load(tmp_path)


def test_rotary_frequencies_stay_float32_whatever_the_weights_are(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3.1"))
    before = model.frequencies.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = model.to(dtype)
        assert model.dtype == dtype and model.frequencies.dtype == torch.float32
        assert torch.equal(model.frequencies, before)


def test_a_batch_of_prompts_is_prefilled_in_passes_of_a_bounded_number_of_tokens(llama, monkeypatch):
    monkeypatch.setattr(model_file, "CHUNK", 64)
    sizes, embedding = [], llama.embedding
    monkeypatch.setattr(llama, "embedding", lambda ids: sizes.append(ids.shape) or embedding(ids))
    read(llama, [random_ids(50, seed=n) for n in range(4)], 1)
    assert sizes == [(4, 16)] * 3 + [(4, 2)]
