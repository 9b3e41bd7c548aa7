"""Random and damaged input of every kind: configurations, indices, head files, tokenizers, templates, command lines,
Python arguments, data and run files.

    python -m tests.fuzz --cases 3600 --seed 1

A case ends in a correct result, or in an error that `cli.run` prints as one line. If transformers accepts the same
file, the correct result is its result. All else is a failure, printed with the options that repeat it."""

import argparse
import contextlib
import copy
import gzip
import io
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import transformers

import baselines
import cli
import decore
import evaluate
from heads import load_heads
from model import Transformer
from runtime.config import Config, rope_frequencies
from tests import checkpoints, test_tokenizer
from tokenizer import Tokenizer

TEXTS = ("", "Hi", " ", "é \u200d 😀", "<|end|>", "\n\n", "x" * 300, "{{ 1 }}", "\x00")
CHAT = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|turn|>"
SETTINGS = dict(max_new_tokens=3, eos_ids=())


class World:
    """The valid files that cases change copies of."""

    def __init__(self, folder):
        self.folder = folder
        self.model = checkpoints.write_checkpoint(folder / "model", vocab_size=259, shards=3)
        checkpoints.write_tokenizer(self.model, CHAT)
        self.heads = checkpoints.write_heads(folder / "heads.json")
        self.loaded, self.ids = Transformer.load(self.model), [5, 9, 7, 7, 30]
        with torch.inference_mode():
            self.logits = self.loaded(torch.tensor([self.ids]))
        self.greedy = decore.generate(self.loaded, self.ids, method="greedy", **SETTINGS).ids
        self.data = checkpoints.write_lines(folder / "data.jsonl", [
            dict(question=f"who is {i}", sub_context="It is New. ", org_answer=["Old"], sub_answer=["New"])
            for i in range(5)])
        self.demos = checkpoints.write_lines(folder / "demos.jsonl", [{"question": "q", "answer": "a", "context": "c"}])
        self.evaluate = ["--model", str(self.model), "--task", "nq-swap", "--data", str(self.data), "--demos",
                         str(self.demos), "--method", "greedy", "--max-new-tokens", "2", "--out"]
        assert call(evaluate.main, *self.evaluate, folder / "out")[0] == 0
        [self.run] = (folder / "out").glob("*.jsonl")

    def new_folder(self):
        return Path(tempfile.mkdtemp(dir=self.folder))

    def copy_model(self):
        return Path(shutil.copytree(self.model, self.new_folder(), dirs_exist_ok=True))


def attempt(function):
    """The function's result; None if it raises an error that `cli.run` prints as one line. Other errors propagate."""
    try:
        return function()
    except Exception as error:
        message = cli.explain(error)
        if "unexpected keyword argument" in str(error):
            return None                                     # Python's own error, which names the argument
        if message is None:
            raise
        assert 5 < len(message) < 1500 and "\n" not in message, f"{len(message)} characters: {message}"
        return None


def call(main, *arguments):
    """Runs a program in this process → (status, standard output), after a check that an error is one line."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [main.__module__ + ".py", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.run(main)
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = argv
    text = err.getvalue().rstrip()
    one_line = status == 2 and "error: " in text.splitlines()[-1] and "Traceback" not in text
    assert status == 0 or one_line, f"status {status}: {arguments}\n{text[-1500:]}"
    return status, out.getvalue()


# ------------------------------------------------------------------------------------------------ configurations, files


def configuration(dice, world):
    """Frequencies, logits and greedy tokens are those of transformers."""
    c = checkpoints.draw_configuration(dice) if dice.random() < 0.7 else copy.deepcopy(
        dice.choice([*checkpoints.FAMILIES.values()]))
    c = checkpoints.change(dice, c, dice.choice([0, 0, 1, 2]))
    folder = world.new_folder()
    (folder / "config.json").write_text(json.dumps(c))
    config = attempt(lambda: Config.from_checkpoint(folder))
    try:
        reference = getattr(transformers, checkpoints.CLASSES[c["model_type"]])._from_config(
            transformers.AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
        reference(torch.tensor([[1, 2]]))                      # some configurations fail only here
    except Exception:
        return "refused" if config is None else "refused by transformers only"
    if config is None:
        return "refused here only"
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(c))      # as it was, not as transformers writes it
    frequencies, scale = rope_frequencies(config)
    rotary = reference.model.rotary_emb
    assert torch.equal(frequencies, rotary.inv_freq) and scale == rotary.attention_scaling, f"frequencies: {c}"
    loaded = Transformer.load(folder)
    if config.max_positions < 60:
        return "too short to compare"
    ids = torch.randint(0, config.vocab_size, (1, 40))
    tokens = attempt(lambda: decore.generate(loaded, ids[0].tolist(), "greedy", max_new_tokens=20, eos_ids=())).ids
    text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], 1)
    with torch.inference_mode():
        logits, expected = loaded(text), reference(text).logits
    difference, largest = (logits - expected).abs().max(), expected.abs().max()
    assert difference <= 2e-5 * max(1, largest), f"logits by {difference:.1e}: {c}"
    best = expected[0, 39:-1].max(-1).values - expected[0, range(39, 39 + len(tokens)), tokens]
    assert (best < 1e-4 * largest).all(), f"greedy tokens {tokens}: {c}"
    return "right"


def index(dice, world):
    folder = world.copy_model()
    path, shards = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    how = dice.randrange(7)
    if how < 3:
        odd = checkpoints.ODD + ("config.json", "../x", "/etc/passwd", shards[0].name)
        path.write_text(json.dumps(checkpoints.change(dice, json.loads(path.read_text()), odd=odd)))
    elif how == 3:
        path.write_bytes(checkpoints.damage(dice, path.read_bytes()))
    elif how == 4:
        shard = dice.choice(shards)
        content = shard.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        shard.write_bytes(checkpoints.damage(dice, content[:end]) + content[end:])
    elif how == 5:
        dice.choice([lambda: shards[0].unlink(), lambda: shards[0].rename(folder / "other.safetensors"),
                     lambda: (path.unlink(), path.symlink_to("nowhere")), lambda: (path.unlink(), path.mkdir()),
                     lambda: shutil.copy(shards[1], shards[0])])()
    model = attempt(lambda: Transformer.load(folder))
    if model is None:
        return "refused"
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([world.ids])), world.logits), "other weights"
    return "right"


def head_file(dice, world):
    table = json.loads(world.heads.read_text())
    if dice.random() < 0.3:                                 # the format of the paper's authors
        table = {name: [score, score / 2] for name, score in table["scores"].items()}
    content = json.dumps(checkpoints.change(dice, table, dice.choice([0, 1, 1, 2]))).encode()
    path = world.new_folder() / "heads.json"
    path.write_bytes(checkpoints.damage(dice, content) if dice.random() < 0.3 else content)
    heads = attempt(lambda: load_heads(path, 3, 4))
    if heads is None:
        return "refused"
    scores = json.loads(path.read_bytes())
    scores = {name: np.mean(value) for name, value in scores.get("scores", scores).items()}
    assert [f"{i}-{j}" for i, j in heads] == sorted(scores, key=scores.get, reverse=True), "another order"
    assert sorted(heads) == [(i, j) for i in range(3) for j in range(4)], "not every head once"
    return "right"


# ---------------------------------------------------------------------------------------------------- texts and prompts

PIECES = (
    "{{ bos_token }}", "{{ nothing }}", "{{ messages[0].content }}", "{{ messages[0]['content'] | upper }}", "text ",
    "{{ messages | tojson }}", "{{ 1 / 0 }}", "{% for m in messages %}{{ loop.index }}{{ m.role }}{% endfor %}", "{{",
    "{% if add_generation_prompt %}A:{% endif %}", "{{ messages[9].content }}", "{{ strftime_now('%Y') }}", "{% if %}",
    "{% generation %}{{ messages[0].role }}{% endgeneration %}", "{% break %}", "{{ messages.append(1) }}", "}}", "\n",
    "{{ ''.__class__ }}", "{{ tools }}{{ documents }}", "{{- ' a ' -}}", "{{ 'é😀' }}", "{{ messages[0] | trim }}", " ",
    "{{ undefined_function() }}", "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}")


def messages(dice, pieces=TEXTS):
    return [{"role": role, "content": "".join(dice.choice(pieces) for _ in range(dice.randrange(4)))}
            for role in ("user", "assistant", "user")[:dice.randint(1, 3)]]


def compare_chat(loaded, reference, chat, prompt):
    """Whether transformers accepts the chat, with the same ids."""
    ids = attempt(lambda: loaded.encode_chat(chat, prompt))
    try:
        expected = reference.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    except Exception:
        return "refused by transformers only" if ids else "refused"
    assert ids in (None, expected), f"{ids} for {expected}: {chat}"
    return "refused here only" if ids is None else "right"


def oracle(folder, template, bos="<s>", eos="</s>"):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", bos_token=bos, eos_token=eos, chat_template=template)


def template(dice, world):
    text, folder = "".join(dice.choice(PIECES) for _ in range(dice.randrange(1, 5))), world.copy_model()
    (folder / "chat_template.jinja").write_text(text)
    loaded = Tokenizer.load(folder)
    return compare_chat(loaded, oracle(folder, text, "<|begin|>", "<|end|>"), messages(dice), dice.random() < 0.5)


def text(dice, world):
    """Encoding, decoding, streaming and chats of undamaged tokenizers."""
    folder, chat = world.new_folder(), dice.choice(list(test_tokenizer.TEMPLATES.values()))
    loaded = test_tokenizer.save(folder, dice.choice(list(test_tokenizer.KINDS.values()))(), chat_template=chat)
    reference = oracle(folder, chat)
    pieces = [*test_tokenizer.TEXTS, *test_tokenizer.SPECIAL, *test_tokenizer.WORDS.split(), " ", "\n", "0", "<0x41>"]
    for _ in range(5):
        text = "".join(dice.choice(pieces) for _ in range(dice.randint(0, 12)))
        assert loaded.encode(text, bos=False) == reference(text, add_special_tokens=False)["input_ids"], repr(text)
        if not text.startswith("<s>"):                      # transformers would write BOS twice
            assert loaded.encode(text) == reference(text)["input_ids"], f"ids of {text!r} with BOS"
        ids = [dice.randrange(len(loaded)) for _ in range(dice.randint(0, 60))]
        assert loaded.decode(ids) == reference.decode(ids, skip_special_tokens=True), f"text of {ids}"
        stream = loaded.stream()
        assert "".join(map(stream.push, ids)) + stream.end() == loaded.decode(ids), f"stream of {ids}"
    return compare_chat(loaded, reference, messages(dice, pieces), dice.random() < 0.5)


def tokenizer(dice, world):
    folder = world.copy_model()
    path = folder / dice.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
    content = path.read_text() if path.exists() else '{"eos_token_id": [257, 2], "bos_token_id": 256}'
    path.write_text(json.dumps(checkpoints.change(dice, json.loads(content))))
    if dice.random() < 0.2:
        path.write_bytes(checkpoints.damage(dice, path.read_bytes()))
    text, loaded = dice.choice(TEXTS), attempt(lambda: Tokenizer.load(folder))
    if loaded is None or attempt(lambda: loaded.encode_chat([{"role": "user", "content": text}])) is None:
        return "refused"
    ids = attempt(lambda: loaded.encode(text, bos=False))
    try:
        expected = oracle(folder, None)(text, add_special_tokens=False)["input_ids"]
    except Exception:
        return "refused by transformers only"
    assert ids is None or ids == expected and isinstance(loaded.decode(ids), str), f"{ids} for {expected}: {text!r}"
    return "right"


# ------------------------------------------------------------------------------------------- programs, arguments, files

VALUES = ("", "x", "0", "1", "-1", "0.5", "nan", "inf", "1e3", "1,2", "999", "[", "{}", "nowhere", ".", "data.jsonl",
          "output", "query", "cpu", "float32", "masked", "decore-static", "decore-entropy", "cad", "dola-low", "chat")


def command_line(dice, world):
    """Options that --help lists, with values of all kinds."""
    program = dice.choice([decore, baselines, evaluate])
    options = sorted(set(re.findall(r"--[a-z-]+", call(program.main, "--help")[1])) - {"--help"})
    argv = ["--model", world.model, "--heads", world.heads, "--device", "cpu"][:dice.choice([2, 4, 6])]
    argv += [*world.evaluate[2:], "out"] if program is evaluate else ["--max-new-tokens", "2", "--prompt", "Hi"]
    for option in dice.sample(options, dice.randrange(4)):
        argv += [option] + [dice.choice(VALUES + TEXTS)] * (dice.random() < 0.7)
    folder = world.new_folder()
    shutil.copy(world.data, folder)
    with contextlib.chdir(folder):
        status, out = call(program.main, *argv)
    assert not {"NaN", "nan", "Infinity", "inf"} & set(out.replace(",", " ").split()), f"not finite: {argv}\n{out}"
    return "refused" if status else "right"


def python_arguments(dice, world):
    """The same ids in every form give the same tokens; other arguments give finite numbers or an error."""
    ids, odd = list(world.ids), checkpoints.ODD
    same = dice.choice([ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]])
    other = dice.choice([
        *odd, "1,2", [ids, "x"], [1.5], [True], [[[1]]], [None], [-1], [10**9], [2**70], torch.tensor([1.5]),
        torch.ones(2, 2, 2), np.array(["a"]), {1, 2}, [ids, []], [math.nan], range(3), (i for i in ids)])
    prompt = same if dice.random() < 0.5 else other
    arguments = dict(SETTINGS, method=dice.choice(["greedy", "masked", "decore-static", "decore-entropy"]))
    if arguments["method"] != "greedy":
        arguments["heads"] = [(0, 1), (2, 3)]
    names = dice.sample(["heads", "alpha", "alpha_cap", "scale_alpha", "mask", "mask_prompt", "max_new_tokens",
                         "eos_ids", "lookup", "method", "unknown"], dice.choice([0, 1, 1, 2]))
    usual = prompt is same and arguments["method"] == "greedy" and not names
    for name in names:
        arguments[name] = dice.choice([*odd, [(0, 1)], ["0-1"], [(0, 9)], [(0, 1), (0, 1)], [5], (257,), "query",
                                       1e9, 1.5, 10**30, torch.tensor(2), np.float32(0.5)])
    if dice.random() < 0.3:
        arguments = {k: v for k, v in arguments.items() if k not in ("max_new_tokens", "eos_ids", "lookup")}
        answers = dice.choice([[1, 2], [[1], [2, 3]], other, []])
        scores = attempt(lambda: decore.score(world.loaded, prompt, answers, **arguments))
        assert scores is None or np.isfinite(scores).all(), f"{scores}: {prompt!r}, {arguments}"
        return "refused" if scores is None else "right"
    results = attempt(lambda: decore.generate(world.loaded, prompt, **arguments))
    if results is None:
        assert not usual, f"refused: {prompt!r}, {arguments}"
        return "refused"
    for out in results if isinstance(results, list) else [results]:
        finite = np.isfinite(out.alphas + out.entropies).all() and all(0 <= i < 259 for i in out.ids)
        assert finite and len(out.ids) == len(out.alphas) == len(out.entropies), f"{out}: {prompt!r}, {arguments}"
    assert not usual or results.ids == world.greedy, f"{results} for {world.greedy}"
    return "right"


def data(dice, world):
    rows = [json.loads(line) for line in world.data.read_text().splitlines()]
    rows = checkpoints.change(dice, rows, dice.choice([0, 1, 1, 2]))
    path = world.new_folder() / dice.choice(["d.jsonl"] * 6 + ["d.jsonl.gz"] * 3 + ["d.csv", "d.parquet", "d.txt"])
    content = "".join(json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else [rows])).encode()
    content = gzip.compress(content) if path.suffix == ".gz" else content
    path.write_bytes(checkpoints.damage(dice, content) if dice.random() < 0.4 else content)
    task = dice.choice(["nq-swap"] * 5 + ["nq-closed", "memotrap", "xsum", "ifeval", "popqa"])
    status, _ = call(evaluate.main, *world.evaluate[:2], "--task", task, "--data", path, "--demos", world.demos,
                     "--method", "greedy", "--max-new-tokens", "1", "--out", world.new_folder())
    return "refused" if status else "right"


def run_file(dice, world):
    """A damaged run file is rescored or continued with the same examples, or refused and left unchanged."""
    def examples(path):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:] if line.strip()]
        return [(row["index"], row["prompt_sha256"]) for row in rows]

    folder, lines = world.new_folder(), [json.loads(line) for line in world.run.read_text().splitlines()]
    path = folder / world.run.name
    if dice.random() < 0.6:
        checkpoints.write_lines(path, [*checkpoints.change(dice, lines)])
    else:
        path.write_bytes(checkpoints.damage(dice, world.run.read_bytes()))
    content = path.read_bytes()
    if dice.random() < 0.5:
        return "refused" if call(evaluate.main, "rescore", "--task", "nq-swap", path)[0] else "right"
    status, _ = call(evaluate.main, *world.evaluate, folder)
    if status:
        assert path.read_bytes() == content, "refused, but changed"
        return "refused"
    assert examples(path) == examples(world.run), "continued, with other examples"
    assert [file.name for file in folder.iterdir()] == [path.name], "another file in the folder"
    return "right"


KINDS = {kind.__name__: kind for kind in (configuration, index, head_file, template, text, tokenizer, command_line,
                                          python_arguments, data, run_file)}


def fuzz(cases, seed, seconds=math.inf):
    """Runs cases, the kinds in turn, for at most so many seconds → (Counter of (kind, outcome), number of failures)."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts, failures, end = Counter(), 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number in cases:
            if time.monotonic() > end:
                break
            name = [*KINDS][number % len(KINDS)]
            torch.manual_seed(number)
            try:
                outcome = KINDS[name](random.Random(f"{seed}/{number}"), world)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:                           # panics of Rust libraries are not Exceptions
                outcome, failures = "FAILED", failures + 1
                print(f"--seed {seed} --only {number}: {name}: {traceback.format_exc(limit=-3)}", flush=True)
            counts[name, outcome] += 1
    return counts, failures


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--cases", type=int, default=1000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", type=int, metavar="N", help="repeat case N")
    args = p.parse_args()
    counts, failures = fuzz(range(args.cases) if args.only is None else [args.only], args.seed)
    for (name, outcome), n in sorted(counts.items()):
        print(f"{n:>6}  {name}: {outcome}")
    print(f"{counts.total()} cases, {failures} failures (seed {args.seed})")
    return failures > 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
