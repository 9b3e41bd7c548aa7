"""Random and real configurations, tokenizers and chat templates, each compared with transformers. On demand:

    python -m tests.against_transformers --cases 300 --seed 0

A configuration counts as one comparison for its rotary frequencies, one for the logits of each prompt and one for its
greedy tokens; a tokenizer as one for each text and each way to encode or decode it. What transformers accepts and this
project refuses is listed with the reason. Exit status 1 where anything differs; `--seed S --only N` repeats case N."""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import transformers

from decore import generate
from model import Transformer
from runtime.config import Config, rope_frequencies
from tests import test_tokenizer as texts
from tests.checkpoints import CLASSES

BANDS = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
REAL = {        # what distinguishes real configurations, at a size that runs here
    "Llama-2-7b": dict(model_type="llama", num_key_value_heads=4, rope_scaling=None, pretraining_tp=1),
    "CodeLlama-34b": dict(model_type="llama", num_key_value_heads=1, rope_theta=1_000_000),
    "Meta-Llama-3-8B": dict(model_type="llama", rope_theta=500_000.0, attention_bias=False, mlp_bias=False),
    "Llama-3.1-8B": dict(model_type="llama", rope_theta=500_000.0, max_position_embeddings=131_072,
                         rope_scaling=BANDS | dict(original_max_position_embeddings=8192)),
    "Llama-3.2-1B": dict(model_type="llama", rope_theta=500_000.0, head_dim=8, tie_word_embeddings=True,
                         max_position_embeddings=131_072,
                         rope_scaling=BANDS | dict(factor=32.0, original_max_position_embeddings=8192)),
    "honest_llama": dict(model_type="llama", attention_bias=True),
    "vicuna-7b-v1.5-16k": dict(model_type="llama", rope_scaling=dict(factor=4.0, type="linear")),
    "deepseek-coder-6.7b": dict(model_type="llama", rope_theta=100_000, rms_norm_eps=1e-6,
                                rope_scaling=dict(factor=4.0, type="linear"), max_position_embeddings=16_384),
    "Yarn-Llama-2-7b-64k": dict(model_type="llama", max_position_embeddings=65_536, rope_scaling=dict(
        factor=16.0, type="yarn", original_max_position_embeddings=4096, finetuned=True)),
    "TinyLlama-1.1B": dict(model_type="llama", num_attention_heads=8, num_key_value_heads=1),
    "SmolLM2-360M": dict(model_type="llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=24,
                         tie_word_embeddings=True, rope_theta=100_000, rope_interleaved=False),
    "Mistral-7B-v0.1": dict(model_type="mistral", sliding_window=7),
    "Mistral-7B-v0.3": dict(model_type="mistral", sliding_window=None, rope_theta=1_000_000.0),
    "Mistral-Nemo-12B": dict(model_type="mistral", sliding_window=None, head_dim=6, rope_theta=1_000_000.0),
    "Qwen2-7B": dict(model_type="qwen2", sliding_window=7, use_sliding_window=False, max_window_layers=2,
                     rms_norm_eps=1e-6, rope_theta=1_000_000.0),
    "Qwen2.5-0.5B": dict(model_type="qwen2", tie_word_embeddings=True, num_attention_heads=14, hidden_size=56,
                         sliding_window=7, use_sliding_window=False, max_window_layers=21, rope_theta=1_000_000.0),
    "Qwen2.5-7B in yarn": dict(model_type="qwen2", rope_theta=1_000_000.0, rms_norm_eps=1e-6, rope_scaling=dict(
        factor=4.0, original_max_position_embeddings=32_768, type="yarn"), max_position_embeddings=32_768),
    "Qwen3-0.6B": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True, rope_theta=1_000_000,
                       sliding_window=None, use_sliding_window=False, max_window_layers=28, attention_bias=False),
    "DeepSeek-R1-0528-Qwen3-8B": dict(model_type="qwen3", head_dim=16, rope_theta=1_000_000, rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768, attn_factor=0.8782488562869419),
        max_position_embeddings=131_072),
}
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=96, max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu", torch_dtype="float32",
             bos_token_id=1, eos_token_id=2)


def draw_scaling(draw):
    original = draw.choice([{}, dict(original_max_position_embeddings=draw.choice([1, 16, 128, 4096]))])
    factor = dict(factor=draw.choice([1, 2, 4.0, 7.3, 0.5]))
    low = draw.uniform(0.1, 4)
    return draw.choice([
        None, {}, dict(rope_type="default"), dict(type="linear") | factor,
        dict(rope_type="llama3", low_freq_factor=low, high_freq_factor=low + draw.uniform(0.1, 8)) | factor | original,
        dict(type="yarn") | factor | original | draw.choice([
            {}, dict(attention_factor=1.2), dict(mscale=0.7, mscale_all_dim=1.1), dict(truncate=False),
            dict(beta_fast=draw.uniform(8, 64), beta_slow=draw.uniform(0.5, 4))])])


def draw_configuration(draw):
    groups, layers = draw.choice([1, 2, 4]), draw.randint(1, 4)
    heads = groups * draw.choice([1, 2, 3])
    c = SIZES | dict(model_type=draw.choice(list(CLASSES)), num_attention_heads=heads, num_key_value_heads=groups,
                     hidden_size=heads * draw.choice([2, 6, 8]), intermediate_size=draw.randint(1, 70),
                     num_hidden_layers=layers, vocab_size=draw.randint(20, 150),
                     rms_norm_eps=10 ** draw.uniform(-8, -1), tie_word_embeddings=draw.random() < 0.4)
    theta, scaling = draw.choice([10_000.0, 500_000, 1e6, 77.5, draw.uniform(2, 1e7)]), draw_scaling(draw)
    if draw.random() < 0.5:
        c |= dict(rope_theta=theta, rope_scaling=scaling)
    else:
        c |= dict(rope_parameters=dict(scaling or {}, rope_theta=theta))
    if draw.random() < 0.6 or c["model_type"] == "qwen3":
        c |= dict(head_dim=2 * draw.randint(1, 12))
    if c["model_type"] != "mistral":
        c |= dict(attention_bias=draw.random() < 0.4, use_sliding_window=draw.random() < 0.7)
    c |= dict(sliding_window=draw.choice([None, 1, 2, 5, 40, 4096]), max_window_layers=draw.randint(0, 5))
    if c["model_type"].startswith("qwen") and c["sliding_window"] and c["use_sliding_window"] and draw.random() < 0.5:
        c |= dict(layer_types=[draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)])
    return c


def compare_model(c, seed, count):
    """→ what differs, one line each."""
    with tempfile.TemporaryDirectory() as name:
        folder, bad = Path(name), []
        (folder / "config.json").write_text(json.dumps(c))
        cls = getattr(transformers, CLASSES[c["model_type"]])
        try:
            reference = cls._from_config(transformers.AutoConfig.from_pretrained(folder), attn_implementation="eager")
        except Exception as error:
            count["refused by transformers"] += 1
            return [] if type(error).__name__.startswith("Strict") else [f"transformers: {error}"]
        try:
            config = Config.from_checkpoint(folder)
        except ValueError as error:
            count["refused here alone"] += 1
            print(f"refused: {error}")
            return []
        torch.manual_seed(seed)
        for parameter in reference.eval().parameters():
            parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
        reference.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(c))             # as it was, not as transformers writes it
        frequencies, scale = rope_frequencies(config)
        theirs = reference.model.rotary_emb
        count["rotary frequencies"] += 1
        if not torch.equal(frequencies, theirs.inv_freq) or scale != theirs.attention_scaling:
            bad.append("rotary frequencies")
        model = Transformer.load(folder)
        for length in (1, 9, 60):
            ids = torch.randint(3, c["vocab_size"], (1, length))
            with torch.inference_mode():
                expected, found = reference(ids).logits, model(ids)
            count["logits of a prompt"] += 1
            if not torch.allclose(found, expected, atol=2e-5 * max(1, expected.abs().max()), rtol=0):
                bad.append(f"logits of {length} tokens by {(found - expected).abs().max():.1e}")
        # Without its cache: that applies windows which the model itself does not (Llama's), and none of one token.
        settings = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False)
        with torch.inference_mode():
            expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, 60:].tolist()
        count["20 greedy tokens"] += 1
        if generate(model, ids[0].tolist(), method="greedy", max_new_tokens=20, eos_ids=()).ids != expected:
            bad.append("greedy tokens")
        return bad


def compare_tokenizers(draw, count, each):
    """Random texts and ids through the tokenizers of tests/test_tokenizer.py, and its templates → what differs."""
    pieces = texts.TEXTS + texts.SPECIAL + texts.WORDS.split() + [" ", "\n", "  ", "\u200d", "é", "0", "<0x41>"]
    for kind, make in texts.KINDS.items():
        for name, template in texts.TEMPLATES.items():
            with tempfile.TemporaryDirectory() as folder:
                ours = texts.save(Path(folder), make(), chat_template=template)
                theirs = transformers.PreTrainedTokenizerFast(
                    tokenizer_file=f"{folder}/tokenizer.json", bos_token="<s>", eos_token="</s>",
                    chat_template=template)

                def check(what, found, expected, where=(kind, name)):
                    count[what] += 1
                    if found != expected:
                        yield f"{what} of {where}: {found!r} for {expected!r}"

                for _ in range(each):
                    text = "".join(draw.choice(pieces) for _ in range(draw.randint(0, 12)))
                    ids = [draw.randrange(len(ours)) for _ in range(draw.randint(0, 30))]
                    yield from check("text without BOS", ours.encode(text, bos=False),
                                     theirs(text, add_special_tokens=False)["input_ids"])
                    if not text.startswith("<s>"):                      # there transformers writes BOS twice
                        yield from check("text", ours.encode(text), theirs(text)["input_ids"])
                    yield from check("decoding", ours.decode(ids), theirs.decode(ids, skip_special_tokens=True))
                    stream = ours.stream()
                    yield from check("streaming", "".join(map(stream.push, ids)) + stream.end(), ours.decode(ids))
                    messages = [{"role": role, "content": "".join(draw.choice(pieces) for _ in range(4))}
                                for role in ("user", "assistant", "user")[:draw.choice([1, 3])]]
                    prompt = draw.random() < 0.5
                    yield from check("chat", ours.encode_chat(messages, prompt), theirs.apply_chat_template(
                        messages, add_generation_prompt=prompt, return_dict=False))


def main():
    parser = argparse.ArgumentParser(description="Compare everything that can be compared with transformers.")
    parser.add_argument("--cases", type=int, default=300, help="random configurations (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=50, help="texts per tokenizer and template (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="N", help="repeat one random configuration")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    count, bad = Counter(), []
    cases = {} if args.only is not None else {name: SIZES | c for name, c in REAL.items()}
    for n in range(args.cases) if args.only is None else [args.only]:
        cases[f"--seed {args.seed} --only {n}"] = draw_configuration(random.Random(f"{args.seed}/{n}"))
    for n, (name, c) in enumerate(cases.items()):
        count["configurations"] += 1
        bad += [f"{name}: {line}: {json.dumps(c)}" for line in compare_model(c, n, count)]
    if args.only is None:
        bad += compare_tokenizers(random.Random(args.seed), count, args.texts)
    for what, n in count.items():
        print(f"{n:>7} {what}")
    print(*bad, sep="\n")
    total = sum(n for what, n in count.items() if "refused" not in what and what != "configurations")
    print(f"{total} comparisons, {len(bad)} differences")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
