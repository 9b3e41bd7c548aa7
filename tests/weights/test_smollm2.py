"""A really trained model, SmolLM2-135M-Instruct, against transformers in float64.

DECORE_WEIGHTS=FOLDER pytest -m weights, with the folder that integrations/gguf.py makes of
SmolLM2-135M-Instruct.Q4_1.gguf. .ci/run does it."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cli import decode as program
from decoders.baselines import AD
from decoders.scoring import score
from decore import DeCoRe, Greedy, Masked, generate
from heads import load_heads, random_heads
from heads.detect import answer_runs, mean_scores, run_batch
from heads.measures import effects, prefilled
from heads.needles import HAYSTACK, make_prompts, read_haystack, read_needles
from hf import HFModel
from model import Transformer
from runtime.files import read_json
from tests.checkpoints import write_json
from tests.core.test_decore import contrast, log_softmax
from tests.decoders import test_baselines as baselines
from tests.decoders.test_baselines import next_scores, with_oracle
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("DECORE_WEIGHTS", ""))
pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(not os.environ.get("DECORE_WEIGHTS"), reason="DECORE_WEIGHTS is no folder"),
]
LISTED = "18-6,18-7,23-2,17-3,20-6,23-7,17-4,22-7,21-8,24-4"
HEADS = [tuple(map(int, head.split("-"))) for head in LISTED.split(",")]
NEW = 8
QUESTION = "What does the drawer hold?"
PASSAGE = "The drawer of the mayor holds a silver compass, two tickets and a map of Norway."
TEXTS = [
    "def f(x):\n    return x ** 2 + 10_000\n",
    "Привет, мир! Сколько будет 12 + 30?",
    "日本の首都は東京です。中国的首都是北京。",
    "مرحبا بالعالم، नमस्ते दुनिया, γειά σου Κόσμε 🙂",
]


def test_readme_shows_what_the_model_writes(call):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.partition("SmolLM2-135M-Instruct --me")[2]
    command, _, answers = block.partition("```text\n")
    begin, prompt = re.findall('--(?:begin|prompt) "(.*?)"', command)
    options = f"--model {FOLDER} --method greedy,decore-entropy --begin"
    status, out, _ = call(program.main, options, begin, "--prompt", prompt)
    shown = [line.split(maxsplit=1) for line in answers.partition("\n```")[0].splitlines()]
    assert status == 0
    assert [line.split(maxsplit=1) for line in out.splitlines() if line] == shown


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """(prompts with a passage, the same without it), of different lengths."""

    def encode(*passages):
        message = {"role": "user", "content": "\n".join([*passages, QUESTION])}
        return [
            tokenizer.encode_chat([message]),
            tokenizer.encode("\n".join([*passages, TEXTS[0]])),
        ]

    return encode(PASSAGE), encode()


@pytest.fixture(scope="module")
def expert():
    return with_oracle(Transformer.load(FOLDER, dtype="float32"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An amateur: the first ten layers."""
    folder = tmp_path_factory.mktemp("small")
    c = read_json(FOLDER / "config.json") | dict(num_hidden_layers=10)
    write_json(folder / "config.json", c)
    weights = load_file(FOLDER / "model.safetensors")
    first = {n: w for n, w in weights.items() if "layers" not in n or int(n.split(".")[2]) < 10}
    save_file(first, folder / "model.safetensors")
    return with_oracle(Transformer.load(folder, dtype="float32"))


@pytest.fixture(scope="module")
def hf():
    return HFModel.load(FOLDER, dtype="float32")


MASKING = {"masked": Masked(HEADS), "static": DeCoRe(HEADS, alpha=0.5), "entropy": DeCoRe(HEADS)}
OTHERS = ("greedy", "cd", "cad", "dola-low", "dola-high", "ad")


def method_of(name, small, without):
    of_all = MASKING | {"greedy": Greedy(), "ad": AD()}
    return of_all.get(name) or baselines.method_of(name, small, without)


def masked_logits(oracle, ids, start, heads=HEADS):
    """Logits without these heads in the tokens from `start` on, float64 [T, V]."""

    def zero(head, _, args):
        args[0].unflatten(-1, (9, 64))[:, start:, head] = 0

    hooks = []
    for layer, head in heads:
        projection = oracle.model.layers[layer].self_attn.o_proj
        hooks.append(projection.register_forward_pre_hook(partial(zero, head)))
    logits = oracle(torch.tensor([ids])).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits


def test_logits_are_those_of_transformers_in_every_script_and_at_2000_tokens(expert, hf, tokenizer):
    book = tokenizer.encode((HAYSTACK / "1-harbour.txt").read_text())[:2000]
    for ids in [*map(tokenizer.encode, TEXTS), book]:
        ids = torch.tensor([ids])
        with torch.inference_mode():
            expected = hf.hf(ids, logits_to_keep=100).logits
        # Logits of up to 44 in float32.
        torch.testing.assert_close(expert.model(ids)[:, -100:], expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", [*MASKING, *OTHERS])
def test_tokens_of_a_padded_batch_are_those_of_the_equations_in_float64(
    name, expert, small, prompts
):
    method = method_of(name, small, prompts[1])
    out = generate(expert.model, prompts[0], method, max_new_tokens=NEW, eos_ids=())
    for prompt, without, g in zip(*prompts, out, strict=True):
        text, first = prompt + g.ids, len(prompt) - 1
        logits, _ = expert.read(*text)
        if name in MASKING:
            masked = masked_logits(expert.oracle, text, first)
        for i, token in enumerate(g.ids):
            log_p = log_softmax(logits[first + i])
            if name in MASKING:
                scores, *numbers = contrast(logits[first + i], masked[first + i], method)
                assert (g.alphas[i], g.entropies[i]) == pytest.approx(numbers, abs=1e-3)
            elif name == "greedy":
                scores = log_p
            else:
                pair = text, expert, small, without + g.ids
                scores = next_scores(name, first + i, *pair, len(prompt), info_layer=24)
                top = 0 if name in ("cd", "cad") else 0.1
                scores = np.where(np.exp(log_p) >= top * np.exp(log_p).max(), scores, -np.inf)
            assert token == scores.argmax()


@pytest.mark.parametrize("method", MASKING.values(), ids=MASKING)
def test_scores_of_answers_are_those_of_the_equations_in_float64(
    method, expert, prompts, tokenizer
):
    prompt = prompts[0][0]
    answers = [tokenizer.encode(text, bos=False) for text in (" a silver compass", " gold", "銀")]
    expected = []
    for answer in answers:
        text = prompt + answer
        logits, masked = expert.read(*text)[0], masked_logits(expert.oracle, text, 0)
        rows = zip(logits[len(prompt) - 1 :], masked[len(prompt) - 1 :], answer)
        expected.append(
            sum(log_softmax(contrast(base, other, method)[0])[token] for base, other, token in rows)
        )
    sums = score(expert.model, prompt, answers, method)
    assert sums == pytest.approx(expected, abs=3e-3)  # nats


def test_the_effect_ranks_heads_as_masking_each_of_them_alone_does(expert, prompts, tokenizer):
    prompt, answer = prompts[0][0], tokenizer.encode(" a silver compass", bos=False)
    effect = effects(expert.model, [prompt], [answer]).flatten().numpy()
    some = effect.argsort()[::20]
    sums, first = [], len(prompt) - 1
    for heads in [], *([divmod(i, 9)] for i in some.tolist()):
        logits = masked_logits(expert.oracle, prompt + answer, first, heads)[first:]
        sums.append(sum(log_softmax(z)[token] for z, token in zip(logits, answer)))
    lost = sums[0] - np.array(sums[1:])
    assert np.corrcoef(lost, effect[some])[0, 1] > 0.9


def test_every_engine_writes_the_same_answers(expert, hf, prompts, tokenizer, tmp_path):
    """Ours, ours on three ranks (it has nine heads), HFModel, and custom_generate."""
    how = dict(heads=HEADS, max_new_tokens=24)
    ours = [g.ids for g in generate(expert.model, prompts[0], DeCoRe(HEADS), 24)]
    assert "silver compass" in tokenizer.decode(ours[0])
    assert [g.ids for g in generate(hf, prompts[0], DeCoRe(HEADS), 24)] == ours
    for prompt, ids in zip(prompts[0], ours):
        inputs = torch.tensor([prompt])
        out = hf.hf.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            custom_generate=str(ROOT / "integrations"),
            trust_remote_code=True,
            do_sample=False,
            **how,
        )
        assert out[0, len(prompt) :].tolist() == ids
    (tmp_path / "prompt.txt").write_text(f"{PASSAGE}\n{QUESTION}")
    command = "-m torch.distributed.run --standalone --nproc-per-node 3 decore.py"
    command += f" --model {FOLDER} --dtype float32 --device cpu --json --max-new-tokens 24"
    command += f" --heads {LISTED} --prompt-file {tmp_path / 'prompt.txt'}"
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["ids"] == ours[0], done.stderr


def test_ids_chats_and_streams_are_those_of_transformers(expert, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXTS[3]}]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(chat) == expected
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text).input_ids
        stream = tokenizer.stream()
        pieces = [*map(stream.push, ids), stream.end()]
        assert "".join(pieces) == tokenizer.decode(ids) == theirs.decode(ids) == text


@pytest.fixture(scope="module")
def detect(tokenizer):
    """detect(heads): the records of eight runs of a detection without these heads."""
    model = Transformer.load(FOLDER, dtype="bfloat16")
    facts = read_json(ROOT / "heads/scores" / f"{model.name}.json")["facts"]
    facts |= dict(lengths=[300], runs=8)
    needles, texts = read_needles(HAYSTACK / "needles.jsonl"), read_haystack(HAYSTACK)
    prompts = make_prompts(facts, needles, texts, tokenizer)
    read = prefilled(model, [ids for ids, _ in prompts], facts["max_new_tokens"])
    of_runs = model, tokenizer, prompts, needles, facts

    def run(heads):
        how = dict(cache=read.select(slice(None)), heads=heads)
        return [record for record, _ in answer_runs(*of_runs, **how)]

    return SimpleNamespace(model=model, facts=facts, run=run, records=run_batch(*of_runs))


def test_a_detection_of_eight_runs_finds_the_heads_of_the_head_file(detect, tmp_path):
    found = mean_scores(detect.model, detect.records, detect.facts, min_success=4)
    write_json(tmp_path / "found.json", found)
    best = load_heads(detect.model, 10, tmp_path / "found.json")
    assert len({*best} & {*load_heads(detect.model, 10)}) >= 8


def test_masking_the_best_heads_loses_needles_that_masking_random_ones_does_not(detect):
    ranked = load_heads(detect.model)
    without = map(detect.run, (ranked[:10], random_heads(ranked, 10)))
    right, best, others = (
        {i for i, record in enumerate(records) if record["right"]}
        for records in (detect.records, *without)
    )
    assert len(right - others) <= 1 and len(right - best) >= len(right) - 1 >= 4
