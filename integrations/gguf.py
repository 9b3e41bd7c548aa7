"""Turn a GGUF file, as llama.cpp, Ollama and LM Studio use it, into a checkpoint folder.

    python -m integrations.gguf FILE.gguf OUT

transformers dequantizes the weights and builds the tokenizer. Added here is what it leaves out and
llama.cpp does: scaled rotary frequencies, how text is split into words, BOS, and the end ids."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import normalizers
from tokenizers import pre_tokenizers as splits

from cli.entry import run_program
from cli.options import parser
from runtime.checkpoint import gguf_name
from runtime.config import DTYPES, rope_frequencies
from runtime.errors import InputError, one_line, out_of_memory
from runtime.files import draft

SAME_MATRIX = 0.9  # mean cosine of two roundings; of matrices that were trained apart, about 0
CONTROL, UNUSED = 3, 5  # in tokenizer.ggml.token_type
# llama.cpp also ends a text at these tokens, if they are control tokens.
ENDS = ("</s>", "<eos>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
ENDS += ("<|endoftext|>", "<|end_of_text|>")
# The rules that tokenizer.ggml.pre names. For a name that transformers does not know, it splits as
# GPT-2, which is right for PLAIN.
PLAIN = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "tekken")  # add BOS; words of the vocabulary stay


def convert(file, out, dtype="bfloat16"):
    """Write the checkpoint of a GGUF file to the folder `out`, which must be new or empty.

    InputError or ImportError, if the file cannot be converted."""
    import accelerate  # noqa: F401  transformers needs it for GGUF

    file, out = Path(file), Path(out).resolve()
    check_output(out)
    metadata, tensors = read_file(file)
    with draft(out) as folder:
        folder.mkdir()  # an error now, not after the conversion
        try:
            check_metadata(metadata, tensors)
            write_model(file, folder, getattr(torch, dtype), metadata, tensors)
            write_tokenizer(file, folder, metadata)
        except Exception as error:  # transformers raises many kinds
            if out_of_memory(error) or isinstance(error, OSError | ImportError):
                raise
            raise InputError(f"{file} cannot be converted: {one_line(error)}") from None


def check_output(out):
    """InputError unless a new folder can take this place."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists; choose a new or an empty folder")
    if out == Path.cwd() or out.is_mount():
        raise InputError(
            f"{out} is the current folder, or one where a disk is mounted, and cannot be replaced; "
            "choose a new folder in it"
        )


class Metadata(dict):
    """The metadata of a GGUF file."""

    def __missing__(self, key):
        raise InputError(f"it has no {key}; use a file that llama.cpp reads")


def read_file(file):
    """The metadata and the tensors of a GGUF file. InputError if it is damaged."""
    import gguf

    if re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name):
        raise InputError(
            f"{file} is one of several parts; join them with llama.cpp: "
            "llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    if file.exists() and not file.is_file():
        raise InputError(f"{file} is not a file")
    try:
        reader = gguf.GGUFReader(file)
        metadata = Metadata({name: field.contents() for name, field in reader.fields.items()})
    except OSError:
        raise
    except Exception as error:  # numpy's, of many kinds
        raise InputError(
            f"{file} is cut off, or not a GGUF file ({one_line(error)}); download it again"
        ) from None
    return metadata, reader.tensors


def check_metadata(metadata, tensors):
    """InputError for a missing entry that the conversion needs later, and for layers without
    tensors, which transformers would fill with random numbers first."""
    claimed = metadata[f"{metadata['general.architecture']}.block_count"]
    layers = {tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")}
    if claimed > len(layers):
        raise InputError(f"it claims {claimed} layers and has {len(layers)}; download it again")
    needed = {"gpt2": "merges", "llama": "scores"}.get(metadata["tokenizer.ggml.model"])
    for name in filter(None, ("tokens", "token_type", needed)):
        metadata[f"tokenizer.ggml.{name}"]


def warn(message):
    print(f"warning: {message}", file=sys.stderr)


def write_model(file, folder, dtype, metadata, tensors):
    """Write the weights, config.json and generation_config.json."""
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),  # or they stay packed, and unsaveable
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
    )
    for name, stored, shape in sorted(info["mismatched_keys"]):
        raise InputError(
            f"{name} is {list(stored)}, but transformers reads {list(shape)} from the metadata, of "
            "the head width for example; use the original checkpoint"
        )
    if info["missing_keys"]:
        raise InputError(f"it has no {sorted(info['missing_keys'])[:4]}")
    tensors = {tensor.name: tensor for tensor in tensors}
    factors = tensors.pop("rope_freqs.weight", None)
    values = sum(int(tensor.n_elements) for tensor in tensors.values())
    if values != sum(weight.numel() for weight in model.parameters()):
        warn(f"{file} has tensors that transformers does not read")
    c = model.config
    c.tie_word_embeddings = tie_embeddings(model, tensors)
    model.tie_weights()
    scale_rope(c, metadata, factors)
    c._name_or_path = ""
    # heads/ finds the scores of the model by these, whatever OUT is called.
    c.gguf_names = [metadata.get("general.name", "").replace(" ", "-"), gguf_name(file)]
    ends = end_ids(metadata)
    if not ends:
        warn(f"{file} names no end token; answers end only at the limit of new tokens")
    model.generation_config = GenerationConfig(
        bos_token_id=c.bos_token_id, pad_token_id=c.pad_token_id, eos_token_id=ends or None
    )
    model.save_pretrained(folder)


def tie_embeddings(model, tensors):
    """Whether the embedding is the output matrix too: stored once, or twice in two roundings. Of
    these the one with more bits is then in both places."""
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if torch.equal(first, last):
        return True
    cosine = torch.nn.functional.cosine_similarity(first.float(), last.float()).mean().item()
    if cosine < SAME_MATRIX:
        return False
    names = "token_embd.weight", "output.weight"
    bits = [8 * int(tensors[name].n_bytes) / int(tensors[name].n_elements) for name in names]
    with torch.no_grad():
        first.copy_(last) if bits[1] > bits[0] else last.copy_(first)
    kinds = " and ".join(f"{name} ({tensors[name].tensor_type.name})" for name in names)
    warn(
        f"{kinds} are one matrix in two roundings (mean cosine of rows {cosine:.4f}); "
        f"stored once, as {names[bits[1] > bits[0]]}, which has more bits"
    )
    return True


def scale_rope(c, metadata, factors):
    """Add the scaling of the rotary frequencies to a configuration.

    factors: the tensor by which Llama 3.1 divides them, or None. InputError for other scalings."""
    name = f"{metadata['general.architecture']}.rope.scaling."
    kind = metadata.get(f"{name}type", "none")
    # Gemma 3 scales those of its global layers.
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    if factors is not None:
        factors = torch.tensor(factors.data)
        scaling = dict(
            rope_type="llama3",
            factor=round(factors.max().item(), 3),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        shape = dict(rope_theta=rope["rope_theta"], head_dim=c.head_dim)
        plain = rope_frequencies(SimpleNamespace(rope_scaling=None, **shape))
        scaled = rope_frequencies(SimpleNamespace(rope_scaling=scaling, **shape))
        if not torch.allclose(plain / scaled, factors, rtol=1e-3):
            raise InputError("rope_freqs.weight are not the factors of Llama 3.1")
        rope.update(scaling)
    elif kind == "linear":
        rope.update(rope_type=kind, factor=metadata[f"{name}factor"])
    elif kind != "none":
        raise InputError(f"{name}type is {kind!r}; use the original checkpoint")


def end_ids(metadata):
    """The ids that end a text: those that the metadata names, and those in ENDS."""
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"])
    ids += [i for i, (token, kind) in enumerate(tokens) if kind == CONTROL and token in ENDS]
    return list(dict.fromkeys(i for i in ids if i is not None))


def write_tokenizer(file, folder, metadata):
    """Write tokenizer.json, tokenizer_config.json and, if the file has one, the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    core = tokenizer.backend_tokenizer
    pre = metadata.get("tokenizer.ggml.pre")
    if metadata["tokenizer.ggml.model"] == "gpt2":
        if pre in DIGITS:
            core.pre_tokenizer = splits.Sequence(
                [splits.Digits(individual_digits=True), splits.ByteLevel(add_prefix_space=False)]
            )
        elif isinstance(core.pre_tokenizer, splits.ByteLevel) and pre not in PLAIN:
            warn(
                f"{file}: the pre-tokenizer {pre!r} is unknown, so some texts may get other ids "
                "than in training; copy tokenizer.json from the original checkpoint if you can"
            )
        if pre in LLAMA3:
            core.model.ignore_merges = True
            tokenizer.add_bos_token = metadata.get("tokenizer.ggml.add_bos_token", True)
        if pre == "qwen2":
            core.normalizer = normalizers.NFC()  # published, but not in llama.cpp
    elif isinstance(core.pre_tokenizer, splits.Metaspace):
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        spaces = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
        core.normalizer = normalizers.Sequence(spaces)
        core.pre_tokenizer = None
    tokenizer.save_pretrained(folder)
    content = json.loads(core.to_str())
    for token, kind in zip(
        metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ):
        if kind == UNUSED:  # fills the embedding, under a made-up name
            content["model"]["vocab"].pop(token, None)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    # Other classes of transformers replace parts of tokenizer.json by their own.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer.special_tokens_map
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def main():
    p = parser(__doc__)
    p.add_argument("file", metavar="FILE.gguf")
    p.add_argument("out", metavar="OUT", help="the folder to write, new or empty")
    p.add_argument("--dtype", choices=[*DTYPES], default="bfloat16", help="default: bfloat16")
    args = p.parse_args()
    convert(args.file, args.out, args.dtype)


if __name__ == "__main__":
    sys.exit(run_program(main))
