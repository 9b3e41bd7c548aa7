"""Write tiny checkpoints, and our engines' tokens for them, with which test_vllm.py compares vLLM.

    python -m tests.integrations.vllm_tokens FOLDER

runs in the project's own environment: vLLM brings versions of its own."""

import os
import sys
from pathlib import Path

import torch

from decoders.scoring import score
from decore import DeCoRe, Greedy, Masked, generate
from heads import load_heads
from heads.needles import HAYSTACK
from hf import HFModel
from model import Transformer
from tests.checkpoints import random_ids, write_checkpoint, write_json, write_tokenizer
from tests.families import random_model
from tests.tables import facts, rows
from tokenizer import Tokenizer

HEADS = [(0, 1), (1, 3), (2, 0), (2, 2)]
N = 16  # new tokens
SIZES = dict(hidden_size=64, head_dim=32, vocab_size=259)  # vLLM's CPU attention: 32 and more
FAMILIES = {
    "llama3": "LlamaForCausalLM",
    "mistral-window": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SAMPLING = dict(repetition_penalty=5.0, temperature=0.7, top_k=20)  # not of our engine
LENGTHS = (1, 2, 31, 32, 33, 64, 97, 120)
METHODS = """
greedy | method="greedy"
masked | method="masked"
entropy
static | method="decore-static" alpha=0.7
cap | alpha_cap=0.4
scale | scale_alpha=true
gain | alpha_rule="gain" alpha_cap=0.02
heads | heads=[[0,0],[1,2],[2,1]]
query | mask="query"
"""
METHODS = {name: facts(" ".join(settings)) for name, *settings in rows(METHODS)}
ENTROPY = DeCoRe(HEADS)


def record(method="decore-entropy", heads=HEADS, **settings):
    """The same for `generate`."""
    if method == "greedy":
        return Greedy()
    return (Masked if method == "masked" else DeCoRe)(heads, **settings)


def main(folder):
    torch.set_num_threads(1)
    prompts = [random_ids(n, seed=n, vocab_size=250) for n in LENGTHS]
    for family, name in FAMILIES.items():
        changes = SIZES | dict(architectures=[name])
        write_tokenizer(write_checkpoint(folder / family, family, **changes))
        write_json(folder / family / "generation_config.json", SAMPLING)
    random_model("qwen3_moe", **SIZES).save_pretrained(folder / "qwen3_moe")
    llama = Transformer.load(folder / "llama3")
    result = {"prompts": prompts}
    for name, settings in METHODS.items():
        result[name] = decode(llama, prompts, record(**settings))
    result["longer"] = [p + t for p, t in zip(prompts, result["entropy"])]
    result["continued"] = decode(llama, result["longer"])
    pairs = [(p[:-9], p[-9:]) for p in prompts if len(p) > 20]
    result["scores"] = [score(llama, p, a, ENTROPY) for p, a in pairs]
    for family in FAMILIES:
        result[family] = decode(Transformer.load(folder / family), prompts)
    result["qwen3_moe"] = decode(HFModel.load(folder / "qwen3_moe"), prompts)
    if os.environ.get("DECORE_WEIGHTS"):
        model = Transformer.load(os.environ["DECORE_WEIGHTS"], dtype="float32")
        text = Tokenizer.load(model.checkpoint).encode((HAYSTACK / "1-harbour.txt").read_text())
        prompts = [text[:n] for n in LENGTHS]
        tokens = decode(model, prompts, DeCoRe(load_heads(model, 10)))
        result["trained"] = prompts, tokens, decode(model, prompts, Greedy())
    write_json(folder / "tokens.json", result)


def decode(model, prompts, method=ENTROPY):
    out = generate(model, prompts, method, max_new_tokens=N, eos_ids=())
    return [answer.ids for answer in out]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
