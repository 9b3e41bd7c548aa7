"""What config.json says of a model, read as transformers reads it; what cannot be computed is refused by name."""

import json
import shlex

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from model import Transformer
from runtime.config import Config, rope_frequencies
from runtime.files import read_json
from runtime.weights import weight_files
from tests.checkpoints import BANDS, CLASSES, FAMILIES, random_ids, random_weights, write_checkpoint


def configuration(folder, family, **changes):
    """A folder with nothing but that family's config.json; what is changed to `...` is left out."""
    config = {k: v for k, v in (FAMILIES[family] | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_theirs(folder, **more):
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return getattr(transformers, CLASSES[model_type]).from_pretrained(folder, **more).eval()


@pytest.mark.parametrize("change, words", [
    (dict(model_type="gpt2"), "model_type 'gpt2' is not supported; known: llama, mistral, qwen2, qwen3"),
    (dict(model_type="llava", text_config=dict(model_type="llama")), "the llama model inside it is"),
    (dict(model_type="qwen2_vl", text_config=dict(model_type="qwen2_vl_text")), "'qwen2_vl' is not supported; known"),
    (dict(rope_scaling=dict(rope_type="dynamic", factor=4.0)), "rope type 'dynamic' .*known: default, linear, llama3"),
    (dict(rope_scaling=dict(rope_type="longrope", factor=4.0)), "rope type 'longrope'"),
    (dict(rope_scaling=dict(rope_type=["linear"])), r"rope type \['linear'\]"),
    (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "rope_parameters .*differs from layer to"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "rope_scaling: no 'low_freq_factor'"),
    (dict(rope_scaling=dict(BANDS, low_freq_factor=4)), "low_freq_factor 4 must be less than high_freq_factor 4"),
    (dict(rope_scaling=dict(BANDS, factor="8")), 'rope_scaling: factor is "8" where a number from'),
    (dict(rope_scaling=dict(type="linear")), "rope_scaling: no 'factor'"),
    (dict(rope_scaling=dict(type="yarn", factor=4, truncate=None)), "truncate is null where true or false is needed"),
    (dict(rope_scaling=dict(type="yarn", factor=4, beta_fast=1, beta_slow=32)), "beta_slow 32 must be less than"),
    (dict(rope_scaling="linear"), 'rope_scaling is "linear" where an object is needed'),
    (dict(rope_theta=0), "rope_theta is 0 where a number from 1e-30 to 1e"),
    (dict(rope_theta="10000"), 'rope_theta is "10000" where a number'),
    (dict(rope_theta=float("inf")), "rope_theta is Infinity where a number"),
    (dict(rope_theta=None), "rope_theta is null"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    (dict(quantization_config=dict(quant_method="awq")), "quantization 'awq'"),
    (dict(quantization_config=["awq"]), r"quantization \['awq'\]"),
    (dict(mlp_bias=True), "mlp_bias True"),
    (dict(is_causal=False), "is_causal False is not supported; known: true"),
    (dict(attention_bias=1), "attention_bias is 1 where true or false is needed"),
    (dict(tie_word_embeddings="false"), 'tie_word_embeddings is "false" where true or false'),
    (dict(torch_dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn'"),
    (dict(rms_norm_eps=None), "rms_norm_eps is null where a number"),
    (dict(rms_norm_eps=0), "rms_norm_eps is 0 where"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps is NaN where"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (dict(num_hidden_layers=True), "num_hidden_layers is true where a whole number from 1 to"),
    (dict(num_hidden_layers=3.0), "num_hidden_layers is 3.0 where a whole number"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers is 1000000000 where"),
    (dict(max_position_embeddings=0), "max_position_embeddings is 0 where a whole number from 1 to"),
    (dict(vocab_size=-1), "vocab_size is -1 where"),
    (dict(num_attention_heads=6, num_key_value_heads=4), "4 key/value heads .* cannot serve 6 heads"),
    (dict(num_key_value_heads=8), "num_key_value_heads is 8 where a whole number from 1 to 4"),
    (dict(head_dim=7), "a head is 7 wide"),
    (dict(hidden_size=4), "a head is 1 wide"),
])
def test_what_the_model_cannot_compute_is_refused_by_name(change, words, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        Config.from_checkpoint(configuration(tmp_path, "llama3", **change))
    assert str(tmp_path / "config.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change, words", [
    (dict(model_type="mistral", attention_bias=True), "attention_bias of mistral True"),
    (dict(model_type="mistral", sliding_window=0), "sliding_window is 0 where a whole number from 1"),
    (dict(use_sliding_window=True, sliding_window=2.5), "sliding_window is 2.5 where"),
    (dict(use_sliding_window=True, layer_types=["full_attention"]), "for each of 3 layers"),
    (dict(use_sliding_window=True, layer_types=["full_attention"] * 2 + ["chunked"]), "must name full_attention or"),
    (dict(layer_types=["sliding_attention"] * 3), "must name full_attention for .*no window is in use"),
])
def test_windows_that_transformers_would_not_apply_are_refused(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        Config.from_checkpoint(configuration(tmp_path, "qwen2", **change))


def test_what_a_configuration_leaves_out_is_what_transformers_takes(tmp_path):
    silent = dict(head_dim=..., num_key_value_heads=..., rope_theta=..., hidden_act=..., tie_word_embeddings=...,
                  sliding_window=..., use_sliding_window=..., max_window_layers=..., num_attention_heads=32,
                  num_hidden_layers=30, hidden_size=64)
    for family in ("llama2", "mistral", "qwen2-window", "qwen3"):
        for more in ({}, dict(use_sliding_window=True)):
            folder = configuration(tmp_path, family, **(silent | more))
            ours, theirs = Config.from_checkpoint(folder), transformers.AutoConfig.from_pretrained(folder)
            head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
            assert (ours.n_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
            assert (ours.rope_theta, ours.tied_embeddings) == (theirs.rope_parameters["rope_theta"], False)
            kinds = {"llama": ["full"] * 30, "mistral": ["sliding"] * 30}.get(theirs.model_type)
            kinds = kinds or [kind.removesuffix("_attention") for kind in theirs.layer_types]
            assert ours.windows == tuple({"full": None, "sliding": 4096}[kind] for kind in kinds)


@pytest.mark.parametrize("family, stated, qkv, o", [
    ("llama3", True, True, True), ("llama3", False, False, False), ("qwen3", True, True, True),
    ("qwen2", False, True, False), ("qwen2", True, True, False), ("mistral", False, False, False),
])
def test_biases_are_where_transformers_has_them(family, stated, qkv, o, tmp_path):
    folder = write_checkpoint(tmp_path, family, attention_bias=stated)
    config = Config.from_checkpoint(folder)
    assert (config.qkv_bias, config.o_bias) == (qkv, o)
    theirs = load_theirs(folder).model.layers[0].self_attn
    assert [p.bias is not None for p in (theirs.q_proj, theirs.v_proj, theirs.o_proj)] == [qkv, qkv, o]


def test_both_generations_of_config_are_read_alike(tmp_path):
    old = Config.from_checkpoint(write_checkpoint(tmp_path / "old", "llama3.1", rope_theta=7e5, torch_dtype="bfloat16"))
    config = {k: v for k, v in FAMILIES["llama3.1"].items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    config |= dict(rope_parameters=dict(BANDS, rope_theta=7e5), dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    new = Config.from_checkpoint(tmp_path)
    assert new == old and (new.rope_theta, new.dtype) == (7e5, torch.bfloat16) and new.rope_scaling == BANDS


def test_qwens_window_needs_use_sliding_window(tmp_path):
    def windows(**change):
        return Config.from_checkpoint(write_checkpoint(tmp_path, "qwen2", **change)).windows
    assert windows(use_sliding_window=False) == (None, None, None)
    assert windows(use_sliding_window=True, max_window_layers=1) == (None, 8, 8)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(use_sliding_window=True, layer_types=kinds) == (8, None, None)


# --------------------------------------------------------------------------------------------------------------- rotary

YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=128)
ROPES = {
    "default": dict(), "theta": dict(rope_theta=500_000.0), "whole theta": dict(rope_theta=1_000_000),
    "small theta": dict(rope_theta=0.5), "linear": dict(rope_scaling=dict(type="linear", factor=4)),
    "bands": dict(rope_scaling=BANDS),
    "bands of Llama-3.1": dict(rope_theta=5e5, max_position_embeddings=131_072,
                               rope_scaling=BANDS | dict(original_max_position_embeddings=8192)),
    "bands without their context": dict(rope_scaling={k: v for k, v in BANDS.items() if not k.startswith("orig")}),
    "yarn": dict(rope_scaling=YARN), "yarn 1": dict(rope_scaling=YARN | {"factor": 1}),
    "yarn of Qwen2.5": dict(rope_theta=1e6, max_position_embeddings=32_768,
                            rope_scaling=YARN | dict(original_max_position_embeddings=32_768)),
    "yarn without its context": dict(rope_scaling=dict(type="yarn", factor=2.5)),
    "yarn with its context outside": dict(rope_scaling=YARN, original_max_position_embeddings=64),
    "yarn not rounded": dict(rope_scaling=YARN | dict(truncate=False, beta_fast=16, beta_slow=2)),
    "yarn with a factor": dict(rope_scaling=YARN | dict(attention_factor=0.7)),
    "yarn with an unknown factor": dict(rope_scaling=YARN | dict(attn_factor=0.7)),
    "yarn with mscale": dict(rope_scaling=YARN | dict(mscale=0.7, mscale_all_dim=1.3)),
    "yarn with half of mscale": dict(rope_scaling=YARN | dict(mscale=0.7)),
    "yarn after a short context": dict(rope_scaling=YARN | dict(original_max_position_embeddings=1)),
    "both generations": dict(rope_scaling=dict(type="linear", factor=2), rope_parameters=dict(rope_theta=77.0)),
    "a scaling that is none": dict(rope_scaling=dict(factor=2.0)),
}


@pytest.mark.parametrize("width", [2, 8, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_are_those_of_transformers_to_the_last_bit(name, width, tmp_path):
    for family, cls in (("llama2", llama.LlamaRotaryEmbedding), ("qwen3", qwen3.Qwen3RotaryEmbedding)):
        folder = configuration(tmp_path, family, head_dim=width, **ROPES[name])
        frequencies, scale = rope_frequencies(Config.from_checkpoint(folder))
        theirs = cls(transformers.AutoConfig.from_pretrained(folder))
        assert torch.equal(frequencies, theirs.inv_freq) and scale == theirs.attention_scaling
        assert frequencies.dtype == torch.float32


@pytest.mark.parametrize("family, name", [("llama2", "linear"), ("llama2", "bands"), ("mistral", "theta"),
                                          ("qwen2", "yarn"), ("qwen3", "yarn not rounded")])
def test_logits_match_transformers_at_position_4000(family, name, tmp_path):
    """One bit in the last place of the frequencies is worth up to 2e-4 here."""
    folder = write_checkpoint(tmp_path, family, **{"head_dim": 16, "max_position_embeddings": 8192} | ROPES[name])
    ids = torch.tensor([random_ids(4000, seed=1)])
    with torch.inference_mode():
        theirs = load_theirs(folder, attn_implementation="sdpa")(ids, logits_to_keep=100).logits
    torch.testing.assert_close(Transformer.load(folder)(ids)[:, -100:], theirs, atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_head_is_used_instead_of_the_tied_embedding_where_it_differs(same, tmp_path):
    weights = random_weights(FAMILIES["llama3.2"])
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone() if same else embedding.flip(0)
    folder = write_checkpoint(tmp_path, "llama3.2", weights=weights)
    ids = torch.tensor([random_ids(20)])
    model = Transformer.load(folder)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), load_theirs(folder)(ids).logits, atol=1e-5, rtol=0)
    assert model.config.tied_embeddings == same


def test_a_tied_matrix_may_be_stored_as_the_head(tmp_path):
    """Of a tensor with two names safetensors' `save_model` keeps that one."""
    weights = random_weights(FAMILIES["llama3.2"])
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    folder = write_checkpoint(tmp_path, "llama3.2", weights=weights)
    ids = torch.tensor([random_ids(20)])
    model = Transformer.load(folder)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), load_theirs(folder)(ids).logits, atol=1e-5, rtol=0)
    assert model.lm_head is model.embed and model.config.tied_embeddings


def two_shards(folder, change):
    write_checkpoint(folder, "llama3", shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))


@pytest.mark.parametrize("change, words", [
    (lambda c: c.pop("weight_map"), "index.json has no weight_map"),
    (lambda c: c.update(weight_map={}), "index.json has no weight_map"),
    (lambda c: c.update(weight_map=[1]), r"weight_map is \[1\] where an object is needed"),
    (lambda c: c["weight_map"].update(x=3), "index.json names 3, which is no safetensors file"),
    (lambda c: c["weight_map"].update(x="config.json"), "names 'config.json', which is no safetensors file"),
    (lambda c: c["weight_map"].update(x="../model.safetensors"), "points outside its folder"),
    (lambda c: c["weight_map"].update(x=c["weight_map"]["lm_head.weight"]), "disagree: not where it says x; not"),
    (lambda c: c["weight_map"].pop("lm_head.weight"), "not where it says nothing; not in it lm_head.weight; in two"),
    (lambda c: c["weight_map"].update({"lm_head.weight": c["weight_map"]["model.norm.weight"]}),
     "disagree: not where it says lm_head.weight"),
])
def test_an_index_that_does_not_fit_its_files_is_refused(change, words, tmp_path):
    two_shards(tmp_path, change)
    with pytest.raises(ValueError, match=words) as error:
        weight_files(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tensor_in_two_files_is_named(tmp_path):
    write_checkpoint(tmp_path, "llama3", shards=2)
    for file in tmp_path.glob("*.safetensors"):
        save_file(load_file(file) | {"model.norm.weight": torch.ones(32)}, file)
    with pytest.raises(ValueError, match="in two files model.norm.weight; fetch them again"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_folder_or_a_dead_link_in_the_place_of_a_file_is_named(name, tmp_path):
    write_checkpoint(tmp_path / "m", "llama3", shards=2 if "index" in name else 1)
    path = tmp_path / "m" / name
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"{name} is a broken link"):
        Transformer.load(tmp_path / "m")
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match=f"{name} is a folder; it must be a file"):
        Transformer.load(tmp_path / "m")


def test_the_advice_for_a_pickle_works_as_printed(tmp_path):
    weights = random_weights(FAMILIES["llama3.2"])
    write_checkpoint(tmp_path, "llama3.2", dtype=torch.bfloat16, torch_dtype="bfloat16", weights=weights)
    expected = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(expected, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin is a pickle, which can run code") as error:
        weight_files(tmp_path)
    python, option, program = shlex.split(str(error.value).partition(" && ")[2])
    assert (python, option) == ("python", "-c") and "\n" not in str(error.value)
    exec(program)                               # as python -c does, but for importing transformers once more
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected) and found.keys() == expected.keys()
    assert Transformer.load(tmp_path).config.rope_scaling["factor"] == 32.0


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path):
    write_checkpoint(tmp_path, "llama3", seed=1, shards=2)
    write_checkpoint(tmp_path, "llama3", seed=2)
    assert set(weight_files(tmp_path).values()) == {tmp_path / "model.safetensors"}
    theirs = load_theirs(tmp_path).model.norm.weight
    assert torch.equal(Transformer.load(tmp_path).norm.weight, theirs)


def test_an_entry_given_twice_must_be_the_same(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1, "b": 2, "a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1, "b": 2}
    (tmp_path / "a.json").write_text('{"x": {"a": 1, "b": 2, "a": 3}}')
    with pytest.raises(ValueError, match='a.json is not valid JSON: "a" appears twice, with different values'):
        read_json(tmp_path / "a.json")
