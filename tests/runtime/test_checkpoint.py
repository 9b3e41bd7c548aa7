"""Configurations and weights are read as transformers reads them, or refused by field."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from hf import HFModel
from hf.config import describe, read_config
from model import Transformer
from runtime.checkpoint import Checkpoint
from runtime.config import rope_frequencies
from tests.checkpoints import (
    BANDS,
    FAMILIES,
    assert_close,
    random_ids,
    random_weights,
    tiny,
    write_checkpoint,
    write_json,
)
from tests.tables import each, facts, rows


def configuration(folder, family, **changes):
    """Writes only the family's config.json. Fields that are `...` are left out."""
    config = {k: v for k, v in (FAMILIES[family] | changes).items() if v is not ...}
    write_json(folder / "config.json", config)
    return folder


def logits(model):
    return model(torch.tensor([random_ids(20)]))


def load_theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# Fields of config.json, and what is said of them.
REFUSED = """
{"model_type": "gpt2"} | model_type is "gpt2"; it must be "llama" or
{"rope_scaling": {"type": "yarn"}} | rope_type is "yarn"; it must be
{"rope_scaling": {"rope_type": "linear"}} | rope_scaling: factor is missing
{"rope_parameters": {"full_attention": {"rope_theta": 1e6}}} | rope_parameters has parameters of \
its own for full_attention; HFModel, or
{"partial_rotary_factor": 0.5} | partial_rotary_factor is 0.5; it must be 1
{"mlp_bias": true} | mlp_bias is true; it must be false (HFModel, or --transformers
{"is_causal": false} | is_causal is false; it must be true
{"hidden_act": "gelu"} | hidden_act is "gelu"; it must be "silu" or "swish"
{"quantization_config": {"bits": 4}} | quantization_config is {"bits": 4};
{"per_layer_config": {"1": {}}} | per_layer_config is {"1": {}}; it must be
{"rms_norm_eps": NaN} | rms_norm_eps is NaN; it must be a positive number
{"num_hidden_layers": true} | num_hidden_layers is true; it must be a whole
{"max_position_embeddings": 0} | max_position_embeddings is 0; it must be a whole
{"hidden_size": 10000000000000} | hidden_size is 10000000000000; it must be a whole
{"num_key_value_heads": 3} | 4 heads of width 8 with 3 key/value heads
{"head_dim": 5} | 4 heads of width 5 with
{"torch_dtype": "int8"} | dtype is "int8"; it must be "float32" or
{"model_type": "qwen2", "layer_types": \
["sliding_attention", "sliding_attention", "sliding_attention"]} | with sliding_window None it \
must be 3 times full_attention
{"vocab_size": "absent"} | vocab_size is missing (found:
null | config.json is missing; convert a .gguf file (python -m integrations.gguf
{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, \
"low_freq_factor": 4.0, "high_freq_factor": 4.0}} | rope_scaling: low_freq_factor 4.0 must be \
below high_freq_factor 4.0
"""


@each("changes, words", REFUSED)
def test_an_unsupported_or_malformed_field_is_named_in_one_line(changes, words, tmp_path):
    changes = json.loads(changes)
    if changes is not None:
        changes = {name: ... if x == "absent" else x for name, x in changes.items()}
        configuration(tmp_path, "llama3", **changes)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        _ = Checkpoint(tmp_path).config
    message = str(error.value)
    assert message.startswith(str(tmp_path)) and words in message and "\n" not in message


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2-window", "qwen3"])
@pytest.mark.parametrize("sliding", [..., True])
def test_absent_fields_have_the_values_of_transformers(family, sliding, tmp_path):
    absent = ["head_dim", "num_key_value_heads", "rope_theta", "hidden_act", "tie_word_embeddings"]
    absent += ["sliding_window", "max_window_layers"]
    sizes = dict(num_attention_heads=32, num_hidden_layers=30, hidden_size=64)
    changes = dict.fromkeys(absent, ...) | sizes
    folder = configuration(
        tmp_path, family, use_sliding_window=sliding, attention_bias=True, **changes
    )
    config = Checkpoint(folder).config
    theirs = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs).model
    attention = model.layers[0].self_attn
    assert config.n_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == attention.head_dim
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert not config.tied_embeddings
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.o_bias == (attention.o_proj.bias is not None)
    kinds = {"llama3": ["full_attention"] * 30, "mistral": ["sliding_attention"] * 30}.get(family)
    windows = {"full_attention": None, "sliding_attention": 4096}
    assert config.windows == tuple(windows[kind] for kind in kinds or theirs.layer_types)


# ------------------------------------------------------------------------------------- rotary

LLAMA31 = BANDS | dict(original_max_position_embeddings=8192)
GROUPS = {"LLAMA31": dict(rope_scaling=LLAMA31), "BANDS": dict(rope_scaling=BANDS)}
ROPES = """
rope_scaling={"type":"linear","factor":4}
rope_theta=500000.0 max_position_embeddings=131072 LLAMA31
BANDS original_max_position_embeddings=64
rope_scaling={"type":"linear","factor":2} rope_parameters={"rope_theta":77.0}
rope_scaling={"factor":2.0}
"""  # bands with their context inside and outside, both generations, a scaling without type


@pytest.mark.parametrize("fields", ROPES.split("\n")[1:-1])
def test_rotary_frequencies_are_those_of_transformers_to_the_last_bit(fields, tmp_path):
    rotary = (("llama2", llama.LlamaRotaryEmbedding), ("qwen3", qwen3.Qwen3RotaryEmbedding))
    for (family, cls), width in itertools.product(rotary, (2, 8, 128)):
        folder = configuration(tmp_path, family, head_dim=width, **facts(fields, GROUPS))
        frequencies = rope_frequencies(Checkpoint(folder).config)
        reference = cls(transformers.AutoConfig.from_pretrained(folder))
        assert torch.equal(frequencies, reference.inv_freq) and reference.attention_scaling == 1
        assert frequencies.dtype == torch.float32


CONTEXTS = """
null | 512
{"type": "linear", "factor": 4.0} | 2048
{"type": "dynamic", "factor": 2.0} | 1024
{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512} | 2048
{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | 512
"""


@pytest.mark.parametrize("scaling, context", [*rows(CONTEXTS), [json.dumps(BANDS), 512]])
def test_the_context_is_what_rotary_scaling_makes_of_it(scaling, context, tmp_path):
    scaling = json.loads(scaling)
    folder = configuration(tmp_path, "llama3", rope_scaling=scaling)
    assert describe(read_config(folder)).max_positions == int(context)
    if scaling in (None, BANDS) or scaling["type"] == "linear":
        assert Checkpoint(folder).config.max_positions == int(context)


# -------------------------------------------------------------------------------------- files


def test_without_a_dtype_in_the_configuration_that_of_the_weights_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.config.FLOAT32_UP_TO", 0)  # the weights count as large
    folder = write_checkpoint(tmp_path, torch_dtype=None, dtype=torch.bfloat16)
    assert Transformer.load(folder).dtype == HFModel.load(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("stored", ["embedding", "head", "both", "both, different"])
def test_a_stored_head_replaces_the_tied_embedding_if_it_differs(stored, tmp_path):
    weights = random_weights(FAMILIES["llama3.2"])
    embedding = weights["model.embed_tokens.weight"]
    if stored == "both, different":
        weights["lm_head.weight"] = embedding.flip(0)
    elif stored != "embedding":
        weights["lm_head.weight"] = embedding.clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as old files have
    if stored == "head":  # `save_model` of safetensors stores only one of the two names
        del weights["model.embed_tokens.weight"]
    folder = write_checkpoint(tmp_path, "llama3.2", weights=weights)
    model = Transformer.load(folder)
    with torch.inference_mode():
        assert_close(logits(model), logits(load_theirs(folder)).logits)
    assert model.config.tied_embeddings == ("different" not in stored)


@pytest.mark.parametrize("family, beside", [("llama3", "v_head.bias"), ("qwen2", "score.weight")])
def test_other_heads_are_left_out_and_the_prefix_may_be_absent(family, beside, tmp_path):
    """As `save_pretrained` of a value model, and of the model without its head, writes them."""
    weights = random_weights(FAMILIES[family])
    expected = logits(tiny(tmp_path / "1", family, weights=weights))
    more = {beside: torch.ones(1)}
    bare = {name.removeprefix("model."): x for name, x in weights.items()}
    for folder, tensors in (("2", weights), ("3", bare)):
        folder = write_checkpoint(tmp_path / folder, family, weights=tensors | more)
        for load in Transformer.load, HFModel.load:
            with pytest.warns(UserWarning, match=f"'{beside}'. are not part of the model"):
                model = load(folder)
            assert_close(logits(model), expected)
    for name in "lm_head.bias", "norm.bias", "layers.0.self_attn.o_proj.bias":
        with pytest.raises(ValueError, match=rf"unused \['{name}'\]; do config.json"):
            tiny(folder, family, weights=bare | {name: torch.ones(96)})
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(FileNotFoundError, match="take model.safetensors or model-"):
        Transformer.load(folder)


@pytest.mark.parametrize("family", ["llama3", "llama3.2"])
@pytest.mark.parametrize(
    "prefix", ["_orig_mod", "base_model.model", "transformer", "module.module"]
)
def test_the_names_of_known_wrappers_are_left_out(prefix, family, tmp_path):
    """torch.compile, PEFT, DataParallel and modules of one's own put them before every name."""
    weights = random_weights(FAMILIES[family])
    expected = logits(tiny(tmp_path / "1", family, weights=weights))
    weights = {f"{prefix}.{name}": x for name, x in weights.items()}
    folder = write_checkpoint(tmp_path / "2", family, weights=weights)
    for load in Transformer.load, HFModel.load:
        assert_close(logits(load(folder)), expected)


def test_tensors_under_other_names_are_named(engine, tmp_path):
    weights = {f"mine.{name}": x for name, x in random_weights(FAMILIES["llama3"]).items()}
    folder = write_checkpoint(tmp_path, weights=weights)
    with pytest.raises(
        ValueError, match=r"missing \['lm_head.*unused \['mine.lm_head.*together\?$"
    ):
        engine.load(folder)


@pytest.mark.parametrize("n", [4, 10**6, 10**12])
def test_more_layers_than_the_files_hold_are_refused_before_they_are_built(n, engine, tmp_path):
    folder = write_checkpoint(tmp_path, weights=random_weights(FAMILIES["llama3"]))
    configuration(folder, "llama3", num_hidden_layers=n)
    with pytest.raises(
        ValueError, match=f"config.json has {n} layers, the safetensors files have 3;"
    ):
        engine.load(folder)


def test_quantization_that_only_another_file_than_config_json_describes_is_named(engine, tmp_path):
    folder = write_checkpoint(tmp_path)
    path = folder / "hf_quant_config.json"
    for algorithm in None, "FP8":
        write_json(path, {"quantization": {"quant_algo": algorithm}})
        if algorithm:
            with pytest.raises(ValueError, match="hf_quant_config.json says that .* are FP8, "):
                engine.load(folder)
        else:
            engine.load(folder)


def write_index(folder, weight_map):
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def test_of_an_index_only_the_names_of_files_in_its_folder_are_used(tmp_path):
    folder = write_checkpoint(tmp_path, "llama3", shards=2)
    files = Checkpoint(folder).tensors
    write_index(folder, {path.name: path.name for path in files.values()})
    assert Checkpoint(folder).tensors == files and len(files) == 30
    for weight_map in (None, {}, {"x": 3}, {"x": "config.json"}, {"x": "../model.safetensors"}):
        write_index(folder, weight_map)
        with pytest.raises(ValueError, match="weight_map must map tensors to safetensors files"):
            _ = Checkpoint(folder).tensors


def test_a_tensor_in_two_files_is_refused_whatever_the_index_says(engine, tmp_path):
    folder = write_checkpoint(tmp_path, "llama3", shards=2)
    tensor, path = min(Checkpoint(folder).tensors.items())
    [other] = {*Checkpoint(folder).tensors.values()} - {path}
    save_file(load_file(other) | {tensor: load_file(path)[tensor] + 1}, other)
    with pytest.raises(ValueError, match=f"{tensor} is in two files, .* and .*; download"):
        engine.load(folder)


def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(tmp_path):
    folder = write_checkpoint(tmp_path, "llama3", shards=2)
    write_checkpoint(folder, "llama3", seed=2)
    assert torch.equal(Transformer.load(folder).norm.weight, load_theirs(folder).model.norm.weight)


def test_weights_without_permission_are_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    folder = write_checkpoint(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError):
        _ = Checkpoint(folder).tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_fingerprints_are_those_of_stored_runs_and_do_not_depend_on_the_files(shards, tmp_path):
    hashes = {
        96: {"weights": "eaf221d0b0b7517d", "config.json": "fd4f00275fef4d33"},
        20_000: {"weights": "4d461de8a3044fde", "config.json": "3a5dc2479e215000"},
    }  # of a large matrix only blocks are hashed
    for size, expected in hashes.items():
        kind = dict(family="llama3.2", seed=3, shards=shards, vocab_size=size)
        folder = write_checkpoint(tmp_path / str(size), **kind)
        assert Checkpoint(folder).fingerprint == expected
