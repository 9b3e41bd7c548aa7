"""Random and damaged input of every kind: configurations, indices, head files, tokenizers, templates, command lines,
Python arguments, data and run files.

    python -m tests.fuzz --cases 3600 --seed 1

A case ends in a correct result, or in an error that `cli.run` prints as one line. If transformers accepts the same
file, the correct result is its result. All else is a failure, printed with the options that repeat it."""

import argparse
import contextlib
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
from unittest import mock

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
CHAT = "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}"
SETTINGS = dict(max_new_tokens=3, eos_ids=())


class World:
    """The valid files that cases change copies of."""

    def __init__(self, folder):
        self.folder = folder
        self.model = checkpoints.write_checkpoint(folder / "model", vocab_size=259, shards=3)
        checkpoints.write_tokenizer(self.model, CHAT)
        self.heads = checkpoints.write_heads(folder / "heads.json")
        self.loaded, self.ids = Transformer.load(self.model), [5, 9, 7, 7, 30]
        self.greedy = decore.generate(self.loaded, self.ids, method="greedy", **SETTINGS).ids
        self.data = checkpoints.write_lines(folder / "data.jsonl", [
            dict(question=f"who is {i}", sub_context="It is New. ", org_answer=["Old"], sub_answer=["New"])
            for i in range(5)])
        self.demos = checkpoints.write_lines(folder / "demos.jsonl", [{"question": "q", "answer": "a", "context": "c"}])
        self.evaluate = ["--model", str(self.model), "--task", "nq-swap", "--data", str(self.data), "--demos",
                         str(self.demos), "--method", "greedy", "--max-new-tokens", "2", "--out"]
        call(evaluate.main, *self.evaluate, folder / "out")
        [self.run] = (folder / "out").glob("*.jsonl")

    def new_folder(self):
        return Path(tempfile.mkdtemp(dir=self.folder))

    def copy(self, path):
        """A copy of a file or of the contents of a folder, in a new folder."""
        folder = self.new_folder()
        return Path(shutil.copytree(path, folder, dirs_exist_ok=True) if path.is_dir() else shutil.copy(path, folder))


def attempt(function):
    """The function's result; None if it raises an error that `cli.run` prints as one line. Other errors propagate."""
    try:
        return function()
    except Exception as error:
        message = cli.explain(error)
        if "unexpected keyword argument" in str(error):     # Python's own error, which names the argument
            return None
        if message is None:
            raise
        assert 5 < len(message) < 1500 and "\n" not in message, f"{len(message)} characters: {message}"
        return None


def expect(function):
    """The result of transformers; None for any error."""
    try:
        return function()
    except Exception:
        return None


def call(main, *arguments):
    """Runs a program in this process → its standard output, or None after an error, which must be one line."""
    status, argv = 0, [main.__module__ + ".py", *map(str, arguments)]
    with (contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err,
          mock.patch("sys.argv", argv), contextlib.suppress(SystemExit)):                       # --help exits
        status = cli.run(main)
    last = err.getvalue().rstrip().rpartition("\n")[2]
    one_line = status == 2 and "error: " in last and "Traceback" not in err.getvalue()
    assert status == 0 or one_line, f"status {status}: {arguments}\n{err.getvalue()[-1500:]}"
    return None if status else out.getvalue()


def spoil(dice, path, odd=checkpoints.ODD):
    """Changes entries of a file of JSON or of JSON lines, damages its bytes, or neither."""
    lines = path.suffix == ".jsonl"
    value = [json.loads(line) for line in path.read_text().splitlines()] if lines else json.loads(path.read_text())
    value = checkpoints.change(dice, value, dice.choice([0, 1, 1, 2]), odd)
    content = "".join(json.dumps(row) + "\n" for row in (value if isinstance(value, list) else [value])).encode()
    path.write_bytes(checkpoints.damage(dice, content) if dice.random() < 0.3 else content)
    return path


# ------------------------------------------------------------------------------------------------ configurations, files


def configuration(dice, world):
    """Frequencies, logits and greedy tokens are those of transformers."""
    c = checkpoints.draw_configuration(dice) if dice.random() < 0.7 else dict(
        dice.choice([*checkpoints.FAMILIES.values()]))
    c = checkpoints.change(dice, c, dice.choice([0, 0, 1, 2]))
    folder = world.new_folder()
    (folder / "config.json").write_text(json.dumps(c))
    config = attempt(lambda: Config.from_checkpoint(folder))
    reference = expect(lambda: getattr(transformers, checkpoints.CLASSES[c["model_type"]])._from_config(
        transformers.AutoConfig.from_pretrained(folder), attn_implementation="eager").eval())
    # Some configurations fail only when the model runs, or only for longer texts.
    if config is None or expect(lambda: reference(torch.ones(1, 60, dtype=torch.long))) is None:
        return None
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(c))      # as it was, not as transformers writes it
    frequencies, scale = rope_frequencies(config)
    rotary = reference.model.rotary_emb
    assert torch.equal(frequencies, rotary.inv_freq) and scale == rotary.attention_scaling, f"frequencies: {c}"
    loaded = Transformer.load(folder)
    if config.max_positions < 60:
        return None
    ids = torch.randint(0, config.vocab_size, (1, 40))
    tokens = decore.generate(loaded, ids[0].tolist(), "greedy", max_new_tokens=20, eos_ids=()).ids
    text = torch.cat([ids, torch.tensor([tokens])], 1)
    with torch.inference_mode():
        logits, expected = loaded(text), reference(text).logits
    difference, largest = (logits - expected).abs().max(), expected.abs().max()
    assert difference <= 2e-5 * max(1, largest), f"logits by {difference:.1e}: {c}"
    best = expected[0, 39:-1].max(-1).values - expected[0, range(39, 59), tokens]
    assert (best < 1e-4 * largest).all(), f"greedy tokens {tokens}: {c}"
    return True


def index(dice, world):
    """Weights load unchanged, or not at all."""
    folder = world.copy(world.model)
    path, shard = folder / "model.safetensors.index.json", dice.choice(sorted(folder.glob("*.safetensors")))
    content = shard.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    odd = checkpoints.ODD + ("config.json", "../x", "/etc/passwd", shard.name)
    dice.choice([*[lambda: spoil(dice, path, odd)] * 4,
                 lambda: shard.write_bytes(checkpoints.damage(dice, content[:end]) + content[end:]),
                 lambda: shard.unlink(), lambda: shard.rename(folder / "other.safetensors"),
                 lambda: (path.unlink(), path.symlink_to("nowhere")), lambda: (path.unlink(), path.mkdir())])()
    model = attempt(lambda: Transformer.load(folder))
    ids = torch.tensor([world.ids])
    assert model is None or torch.equal(model(ids), world.loaded(ids)), "other weights"
    return model


def head_file(dice, world):
    """Heads are sorted by their scores, in both formats."""
    path = world.copy(world.heads)
    if dice.random() < 0.3:                                 # the format of the paper's authors
        scores = json.loads(path.read_text())["scores"]
        path.write_text(json.dumps({name: [score, score / 2] for name, score in scores.items()}))
    heads = attempt(lambda: load_heads(checkpoints.stand_in(), name=spoil(dice, path)))
    if heads:
        scores = json.loads(path.read_bytes())
        scores = {name: np.mean(value) for name, value in scores.get("scores", scores).items()}
        assert [f"{i}-{j}" for i, j in heads] == sorted(scores, key=scores.get, reverse=True), "another order"
        assert sorted(heads) == [(i, j) for i in range(3) for j in range(4)], "not every head once"
    return heads


# ---------------------------------------------------------------------------------------------------- texts and prompts

PIECES = (
    "{{ bos_token }}", "{{ nothing }}", "{{ messages[0].content }}", "{{ messages[0]['content'] | upper }}", "text ",
    "{{ messages | tojson }}", "{{ 1 / 0 }}", "{% for m in messages %}{{ loop.index }}{{ m.role }}{% endfor %}", "{{",
    "{% if add_generation_prompt %}A:{% endif %}", "{{ messages[9].content }}", "{{ strftime_now('%Y') }}", "{% if %}",
    "{% generation %}{{ messages[0].role }}{% endgeneration %}", "{% break %}", "{{ messages.append(1) }}", "}}", "\n",
    "{{ ''.__class__ }}", "{{ tools }}{{ documents }}", "{{- ' a ' -}}", "{{ 'é😀' }}", "{{ messages[0] | trim }}", " ",
    "{{ undefined_function() }}", "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}")


def text(dice, world):
    """Ids, texts, streams and chats are those of transformers."""
    folder, make = world.new_folder(), dice.choice([*test_tokenizer.KINDS.values()])
    chat = dice.choice([*test_tokenizer.TEMPLATES.values(), *["".join(dice.choices(PIECES, k=dice.randint(1, 4)))] * 9])
    loaded, reference = test_tokenizer.save(folder, make(), chat_template=chat), test_tokenizer.oracle(folder, chat)
    for _ in range(3):
        text = "".join(dice.choices(test_tokenizer.PIECES, k=dice.randint(0, 12)))
        assert loaded.encode(text, bos=False) == reference(text, add_special_tokens=False)["input_ids"], repr(text)
        if not text.startswith("<s>"):                      # transformers would write BOS twice
            assert loaded.encode(text) == reference(text)["input_ids"], f"ids of {text!r} with BOS"
        ids, stream = dice.choices(range(len(loaded)), k=dice.randint(0, 60)), loaded.stream()
        assert loaded.decode(ids) == reference.decode(ids, skip_special_tokens=True), f"text of {ids}"
        assert "".join(map(stream.push, ids)) + stream.end() == loaded.decode(ids), f"stream of {ids}"
    messages = [{"role": role, "content": "".join(dice.choices(test_tokenizer.PIECES, k=dice.randrange(4)))}
                for role in ("user", "assistant", "user")[:dice.randint(1, 3)]]
    prompt = dice.random() < 0.5
    ids = attempt(lambda: loaded.encode_chat(messages, prompt))
    expected = expect(lambda: reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False))
    assert expected is None or ids in (None, expected), f"{ids} for {expected}: {messages}"
    return ids and expected


def tokenizer(dice, world):
    """Damaged files of a tokenizer give the ids of transformers, or none."""
    folder = world.copy(world.model)
    path = folder / dice.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
    if not path.exists():
        path.write_text('{"eos_token_id": [257, 2], "bos_token_id": 256}')
    text, loaded = dice.choice(TEXTS), attempt(lambda: Tokenizer.load(spoil(dice, path).parent))
    chat = loaded and attempt(lambda: loaded.encode_chat([{"role": "user", "content": text}]))
    ids = loaded and attempt(lambda: loaded.encode(text, bos=False))
    expected = expect(lambda: test_tokenizer.oracle(folder, None)(text, add_special_tokens=False)["input_ids"])
    assert ids is None or expected in (None, ids) and loaded.decode(ids) is not None, f"{ids} for {expected}: {text!r}"
    return chat and expected


# ------------------------------------------------------------------------------------------- programs, arguments, files

VALUES = ("", "x", "0", "1", "-1", "0.5", "nan", "inf", "1e3", "1,2", "999", "[", "{}", "nowhere", ".", "data.jsonl",
          "output", "query", "cpu", "float32", "masked", "decore-static", "decore-entropy", "cad", "dola-low", "chat")


def command_line(dice, world):
    """Options that --help lists, with values of all kinds."""
    program = dice.choice([decore, baselines, evaluate])
    options = sorted(set(re.findall(r"--[a-z-]+", call(program.main, "--help"))) - {"--help"})
    argv = ["--model", world.model, "--heads", world.heads, "--device", "cpu"][:dice.choice([2, 4, 6])]
    argv += [*world.evaluate[2:], "out"] if program is evaluate else ["--max-new-tokens", "2", "--prompt", "Hi"]
    for option in dice.sample(options, dice.randrange(4)):
        argv += [option] + [dice.choice(VALUES + TEXTS)] * (dice.random() < 0.7)
    with contextlib.chdir(world.copy(world.data).parent):
        out = call(program.main, *argv)
    words = {"NaN", "nan", "Infinity", "inf"} & set(re.split("[, \n]+", out or ""))
    assert words <= set(map(str, argv)), f"not finite: {argv}\n{out}"           # a prompt may be one of these words
    return out


def python_arguments(dice, world):
    """The same ids in every form give the same tokens; other arguments give finite numbers or an error."""
    ids, odd, score = world.ids, checkpoints.ODD, dice.random() < 0.3
    same = dice.choice([ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]])
    assert decore.generate(world.loaded, same, method="greedy", **SETTINGS).ids == world.greedy, f"{same!r}"
    other = dice.choice([
        *odd, "1,2", [ids, "x"], [1.5], [True], [[[1]]], [None], [-1], [10**9], [2**70], torch.tensor([1.5]),
        torch.ones(2, 2, 2), np.array(["a"]), {1, 2}, [ids, []], [math.nan], range(3), (i for i in ids)])
    prompt, answers = dice.choice([same, other]), dice.choice([[1, 2], [[1], [2, 3]], other, []])
    arguments = dict({} if score else SETTINGS, heads=[(0, 1), (2, 3)])
    arguments["method"] = dice.choice(["greedy", "masked", "decore-static", "decore-entropy"])
    for name in dice.sample([*arguments, "alpha", "alpha_cap", "scale_alpha", "mask", "mask_prompt", "unknown"],
                            dice.choice([0, 1, 1, 2])):
        arguments[name] = dice.choice([*odd, [(0, 1)], ["0-1"], [(0, 9)], [(0, 1), (0, 1)], [5], (257,), "query",
                                       1e9, 1.5, 10**30, torch.tensor(2), np.float32(0.5)])
    result = attempt(lambda: decore.score(world.loaded, prompt, answers, **arguments) if score else
                     decore.generate(world.loaded, prompt, **arguments))
    for out in result if isinstance(result, list) else [] if result is None else [result]:
        numbers = [out] if score else out.alphas + out.entropies
        assert np.isfinite(numbers).all() and (score or len(numbers) == 2 * len(out.ids)), f"{out}: {arguments}"
    return result


def data(dice, world):
    path = spoil(dice, world.copy(world.data))
    path = path.rename(path.with_suffix(dice.choice([".jsonl"] * 6 + [".jsonl.gz"] * 3 + [".csv", ".parquet", ".txt"])))
    if path.suffix == ".gz":
        content = gzip.compress(path.read_bytes())
        path.write_bytes(checkpoints.damage(dice, content) if dice.random() < 0.4 else content)
    task = dice.choice(["nq-swap"] * 5 + ["nq-closed", "memotrap", "xsum", "ifeval", "popqa"])
    return call(evaluate.main, *world.evaluate[:2], "--task", task, "--data", path, "--demos", world.demos,
                "--method", "greedy", "--max-new-tokens", "1", "--out", world.new_folder())


def run_file(dice, world):
    """A damaged run file is rescored or continued with the same examples, or refused and left unchanged."""
    def examples(path):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:] if line.strip()]
        return [(row["index"], row["prompt_sha256"]) for row in rows]

    path = spoil(dice, world.copy(world.run))
    content = path.read_bytes()
    if dice.random() < 0.5:
        return call(evaluate.main, "rescore", "--task", "nq-swap", path)
    out = call(evaluate.main, *world.evaluate, path.parent)
    assert out is not None or path.read_bytes() == content, "refused, but changed"
    assert out is None or examples(path) == examples(world.run), "continued, with other examples"
    assert out is None or [*path.parent.iterdir()] == [path], "another file in the folder"
    return out


KINDS = {kind.__name__: kind for kind in (configuration, index, head_file, text, tokenizer, command_line,
                                          python_arguments, data, run_file)}


def fuzz(cases, seed, seconds=math.inf):
    """Runs cases, the kinds in turn, for at most so many seconds → (Counter of (kind, outcome), number of failures).

    A kind returns None if the input is refused, here or by transformers."""
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
                result = KINDS[name](random.Random(f"{seed}/{number}"), world)
                counts[name, "refused" if result is None or result is False else "right"] += 1
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:                           # panics of Rust libraries are not Exceptions
                failures += 1
                print(f"--seed {seed} --only {number}: {name}: {traceback.format_exc(limit=-3)}", flush=True)
    return counts, failures


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--cases", type=int, default=1000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", type=int, metavar="N", help="repeat case N")
    args = p.parse_args()
    counts, failures = fuzz(range(args.cases) if args.only is None else [args.only], args.seed)
    for (name, result), n in sorted(counts.items()):
        print(f"{n:>6}  {name}: {result}")
    print(f"{counts.total()} cases, {failures} failures (seed {args.seed})")
    return failures > 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
