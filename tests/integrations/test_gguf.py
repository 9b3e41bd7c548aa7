"""Files of gguf's own writer become checkpoints with the same values and ids, for both engines."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import pre_tokenizers as splits
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cli import decode as program
from heads import find_heads
from hf import HFModel
from integrations import gguf as conversion
from model import Transformer
from tests.checkpoints import BANDS, FAMILIES, assert_close, random_ids, random_weights
from tests.tables import each, rows
from tokenizer import Tokenizer

BYTES = sorted(splits.ByteLevel.alphabet())
CONTROL = ["<|begin|>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>"]
AB, AB12, ABC, BEGIN, IM_END, EOT_ID, END = range(256, 263)
BYTE_LEVEL = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": [*BYTES, "ab", "12", "abc", *CONTROL, "[PAD263]"],
    "token_type": [1] * 259 + [3] * 4 + [5],
    "merges": ["1 2", "a b"],
    "bos_token_id": BEGIN,
    "eos_token_id": IM_END,
}
SENTENCE_PIECE = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "▁▁"],
    "scores": [0.0] * 258 + [-4.0, -3.0, -1.0, -2.0],
    "token_type": [2, 3] + [6] * 256 + [1] * 4,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


# Entries of a file's metadata, and the fields of config.json that they are.
ENTRIES = """
context_length | max_position_embeddings
embedding_length | hidden_size
block_count | num_hidden_layers
feed_forward_length | intermediate_size
attention.head_count | num_attention_heads
attention.head_count_kv | num_key_value_heads
attention.layer_norm_rms_epsilon | rms_norm_eps
rope.freq_base | rope_theta
"""


def write_file(
    path, arch="llama", tokenizer=BYTE_LEVEL, head=None, tensors=(), width=16, **metadata
):
    """Write a GGUF file as llama.cpp does → {name in the checkpoint: its dequantized values}.

    head: how the embedding is quantized where it is stored again, as the output matrix.
    tensors: more of them. width: of a head. metadata: more entries, or None to leave one out."""
    c = FAMILIES["llama3" if arch == "llama" else arch] | dict(hidden_size=64, intermediate_size=64)
    c |= dict(vocab_size=len(tokenizer["tokens"]), tie_word_embeddings=True, head_dim=width)
    weights = random_weights(c) | dict(tensors)
    if head is not None:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    entries = {f"{arch}.{entry}": c[field] for entry, field in rows(ENTRIES)}
    entries |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    entries |= metadata
    writer = gguf.GGUFWriter(path, arch)
    for key, value in entries.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    [number] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    names = gguf.get_tensor_name_map(number, c["num_hidden_layers"])
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    values = {}
    for name, w in weights.items():
        stem, suffix = name.rsplit(".", 1)
        kind = Kind.F32 if w.ndim == 1 else head if stem == "lm_head" else Kind.Q4_0
        data = gguf.quantize(w.numpy(), kind)
        values[name] = torch.from_numpy(gguf.dequantize(data, kind))
        n = heads.get(stem.split(".")[-1])
        if arch == "llama" and n:  # the two of a rotary pair lie side by side
            data = data.reshape(n, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(f"{names.get_name(stem) or stem}.{suffix}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def convert(tmp_path, done):
    """convert(*arguments, **those of write_file) → (the values, OUT, standard error)."""

    def run(*arguments, **more):
        values = write_file(tmp_path / "a.gguf", **more)
        out = tmp_path / "new" / "out"
        return values, out, done(conversion.main, tmp_path / "a.gguf", out, *arguments)[1]

    return run


@pytest.fixture
def refuse(tmp_path, refused):
    """refuse(**arguments of write_file) → the line of the error; nothing is written."""

    def run(**more):
        write_file(tmp_path / "a.gguf", **more)
        err = refused(conversion.main, tmp_path / "a.gguf", tmp_path / "new" / "out")
        assert [*(tmp_path / "new").iterdir()] == []
        return err.splitlines()[-1]

    return run


def rope(**parameters):
    """The rotary frequencies of transformers."""
    c = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    return LlamaRotaryEmbedding(c).inv_freq


LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
LLAMA31 = BANDS | dict(original_max_position_embeddings=8192)
FACTORS = rope(rope_theta=5e5, rope_type="default") / rope(rope_theta=5e5, **LLAMA31)

OTHER = {"lm_head.weight": torch.randn(264, 64, generator=torch.Generator().manual_seed(1)) / 9}


# How the file differs, dtype → whether the embedding is the head, rotary scaling.
FILES = """
dict(tensors={"rope_freqs.weight": FACTORS}) | bfloat16 | True | LLAMA31
dict(arch="qwen2", head=Kind.Q8_0) | float32 | True | None
dict(arch="qwen2", head=Kind.Q8_0, tensors=OTHER) | float32 | False | None
dict(head=Kind.Q4_0, **LINEAR) | float16 | True | dict(rope_type="linear", factor=4)
"""


@each("options, dtype, tied, scaling", FILES)
def test_both_engines_read_the_values_of_the_file(options, dtype, tied, scaling, convert):
    options, tied, scaling = map(eval, (options, tied, scaling))
    values, out, err = convert(*["--dtype", dtype] * (dtype != "bfloat16"), **options)
    values.pop("rope_freqs.weight", None)
    last = values.pop("lm_head.weight", None) if tied else None
    more_bits = tied and options.get("head") == Kind.Q8_0
    if more_bits:
        values["model.embed_tokens.weight"] = last
    assert ("stored once, as output.weight, which has more bits" in err) == more_bits
    assert ("warning" in err) == more_bits
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == values.keys()
    kind = getattr(torch, dtype)
    assert all(torch.equal(stored[name], w.to(kind)) for name, w in values.items())
    ours, theirs = Transformer.load(out), HFModel.load(out)
    ids = torch.tensor([random_ids(40)])
    assert_close(ours(ids), theirs(ids), 5e-5)  # summation order
    assert (ours.config.dtype, ours.config.rope_scaling) == (dtype, scaling)
    assert ours.config.tied_embeddings == theirs.config.tied_embeddings == tied


def spell(text):
    """The ids of the bytes of a text."""
    [(characters, _)] = splits.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    return [BYTES.index(c) for c in characters]


RULES = """
"smollm" | ab12 | [AB, *spell("12")]
"gpt-2" | ab12 e\u0301 | [AB, AB12, *spell(" e\u0301")]
"qwen2" | abc12 e\u0301 | [AB, *spell("c12 é")]
"llama-bpe" | abc12 | [BEGIN, ABC, AB12]
"surprise" | ab12 | [AB, AB12]
None | ab12 | [AB, AB12]
"""


@each("pre, text, ids", RULES)
def test_words_are_split_by_the_rule_of_the_file(pre, text, ids, convert):
    pre, ids = eval(pre), eval(ids)
    _, out, err = convert(**{"tokenizer.ggml.pre": pre})
    assert Tokenizer.load(out).encode(text) == ids
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == ids
    warning = f"warning: {out.parents[1]}/a.gguf: the pre-tokenizer {pre!r}"
    assert (warning in err) == (pre in ("surprise", None))


@pytest.mark.parametrize("prefix, pieces", [(None, ["▁▁", "▁a"]), (False, ["▁", "▁a"])])
def test_a_space_is_put_before_sentence_pieces_as_in_llama_cpp(prefix, pieces, convert):
    add = {"tokenizer.ggml.add_space_prefix": prefix}
    _, out, _ = convert(tokenizer=SENTENCE_PIECE, **add)
    ids = [1, *map(SENTENCE_PIECE["tokens"].index, pieces)]
    assert Tokenizer.load(out).encode("  a") == ids
    assert AutoTokenizer.from_pretrained(out)("  a").input_ids == ids


def test_ends_the_template_and_names_of_padding(convert):
    chat = {"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"}
    _, out, *_ = convert(**chat, **{"tokenizer.ggml.eot_token_id": ABC})
    tokenizer = Tokenizer.load(out)
    assert tokenizer.encode_chat([{"content": "ab"}]) == [AB, IM_END]
    assert tokenizer.eos_ids == (IM_END, ABC, EOT_ID, END)
    assert GenerationConfig.from_pretrained(out).eos_token_id == [IM_END, ABC, EOT_ID, END]
    assert tokenizer.decode([263]) == ""  # fills the embedding


# Entries of a file's metadata, and what is said of them.
REFUSED = """
{"llama.rope.scaling.type": "yarn"} | llama.rope.scaling.type is 'yarn'; use the original
{"general.architecture": "surprise"} | surprise
{"llama.block_count": 4} | it claims 4 layers and has 3; download it again
{"tokenizer.ggml.model": null} | it has no tokenizer.ggml.model; use a file that llama.cpp reads
{"tokenizer.ggml.tokens": null} | it has no tokenizer.ggml.tokens; use a file that llama.cpp reads
{"tokenizer.ggml.token_type": null} | it has no tokenizer.ggml.token_type; use a file that
{"tokenizer.ggml.merges": null} | it has no tokenizer.ggml.merges; use a file that llama.cpp reads
{"width": 32, "llama.attention.key_length": 32, "llama.attention.value_length": 32} | \
k_proj.weight is [64, 64], but transformers reads [32
{"arch": "qwen2", "width": 32, "qwen2.attention.key_length": 32, \
"qwen2.attention.value_length": 32} | k_proj.bias is [64], but transformers reads [32
"""


@each("options, words", REFUSED)
def test_files_that_would_give_another_model_are_refused(options, words, refuse):
    line = refuse(**json.loads(options))
    assert line.startswith("gguf.py: error: ") and words in line


def test_other_rotary_factors_than_llama_3_1_s_are_refused(refuse):
    assert "not the factors of Llama 3.1" in refuse(tensors={"rope_freqs.weight": FACTORS + 1})


def test_tensors_that_are_not_read_are_a_warning(convert):
    *_, err = convert(tensors={"surprise.weight": torch.ones(32)})
    assert "a.gguf has tensors that transformers does not read" in err


@pytest.mark.parametrize("name", ["Qwen2.5 3B Instruct", None])
def test_the_heads_of_the_model_are_found_whatever_the_folder_is_called(name, tmp_path):
    """By the name in the metadata, else by that of the file."""
    file = "x" if name else "qwen2.5-3b-instruct-Q4_K_M"
    write_file(tmp_path / f"{file}.gguf", **{"general.name": name})
    conversion.convert(tmp_path / f"{file}.gguf", tmp_path / "out")
    for engine in Transformer, HFModel:
        path, _ = find_heads(engine.load(tmp_path / "out"))
        assert path.stem == "Qwen2.5-3B-Instruct"


def test_layers_without_tensors_are_refused_before_the_model_is_made(refuse, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert "claims 100000 layers and has 3; download" in refuse(**{"llama.block_count": 100_000})


# FILE and OUT, and what is said of them.
IN_USE = """
a.gguf | . | exists; choose a new or an empty folder
a.gguf | a.gguf | exists; choose a new or an empty folder
a.gguf | disk | disk is the current folder, or one where a disk is mounted
a-00001-of-00002.gguf | out | is one of several parts
b0.gguf | out | b0.gguf is cut off, or not a GGUF file
b1.gguf | out | b1.gguf is cut off, or not a GGUF file
b20.gguf | out | b20.gguf is cut off, or not a GGUF file
b500.gguf | out | b500.gguf is cut off, or not a GGUF file
b990.gguf | out | b990.gguf is cut off, or not a GGUF file
/dev/null | out | /dev/null is not a file
mine | out | mine is not a file
c.gguf | out | c.gguf: no such file
"""


def test_damaged_files_parts_of_files_and_folders_in_use_are_refused(
    refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    write_file(tmp_path / "a.gguf")
    content = (tmp_path / "a.gguf").read_bytes()
    for share in 0, 1, 20, 500, 990:  # thousandths
        (tmp_path / f"b{share}.gguf").write_bytes(content[: len(content) * share // 1000])
    (tmp_path / "mine").mkdir()
    files = {*tmp_path.iterdir()}
    for file, out, words in rows(IN_USE):
        err = refused(conversion.main, tmp_path / file, tmp_path / out)
        assert words in err and err.count("\n") == 1
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(conversion, "read_file", None)  # refused first
    for out in ".", tmp_path / "mine":
        assert "mine is the current folder" in refused(conversion.main, tmp_path / "a.gguf", out)
    assert {*tmp_path.iterdir()} == files


def test_an_empty_folder_behind_a_link_is_filled(done, tmp_path):
    write_file(tmp_path / "a.gguf")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    done(conversion.main, tmp_path / "a.gguf", tmp_path / "link")
    assert (tmp_path / "there" / "tokenizer.json").exists() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("engine", [[], ["--transformers"]])
def test_programs_say_how_to_convert_a_file(engine, refused, tmp_path):
    file = tmp_path / "My Model-Q4_K_M.gguf"
    file.touch()
    err = refused(program.main, "--model", file, "--prompt", "x", *engine)
    command = f"python -m integrations.gguf '{file}' 'My Model'"
    message = f"error: {file} is not a checkpoint folder; make one: {command}\n"
    assert err.partition(": ")[2] == message
