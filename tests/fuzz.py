"""Random and damaged input: configurations, weights, command lines, stored files, Python arguments.

    python -m tests.fuzz --cases 3600 --seed 1

A case ends in a correct result, or in an error that `cli.run` prints as one line. If transformers
accepts the same file, the correct result is its result. All else is a failure, printed with the
options that repeat it."""

import argparse
import contextlib
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

import cli
import decore
import evaluate
import program
from model import Transformer
from runtime.config import Config
from runtime.hf import HFModel
from tests import checkpoints

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
LENGTH = 60  # tokens of the text whose logits are compared


class World:
    """The valid files that cases change copies of."""

    def __init__(self, folder):
        self.folder = folder / "model"
        checkpoints.write_checkpoint(self.folder, vocab_size=259, shards=3)
        checkpoints.write_tokenizer(self.folder, TEMPLATE)
        self.heads = checkpoints.write_heads(folder / "heads.json")
        self.loaded = Transformer.load(self.folder)
        self.engines = [self.loaded, HFModel.load(self.folder)]
        self.ids = [5, 9, 7, 7, 30]
        self.model = ["--model", self.folder, "--heads", self.heads, "--device", "cpu"]
        self.task = ["--task", "miniature-open", "--limit", 2, "--max-new-tokens", 2]
        call(evaluate.main, *self.task, *self.model, "--out", folder / "runs")
        [self.run] = (folder / "runs").glob("*.jsonl")


def attempt(function, theirs=False):
    """The function's result; None if it raises an error that `cli.run` prints as one line.

    theirs: a function of transformers, which may raise any error."""
    try:
        return function()
    except Exception as error:
        # Python's own error names the argument.
        if theirs or "unexpected keyword argument" in str(error):
            return None
        message = cli.explain(error)
        if message is None:
            raise
        assert 5 < len(message) < 1500 and "\n" not in message, message
        return None


def call(main, *arguments):
    """Runs a program in this process → its standard output; None after an error in one line."""
    status = 0
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(mock.patch("sys.stdin", stack.enter_context(open(os.devnull))))
        argv = [main.__module__ + ".py", *map(str, arguments)]
        stack.enter_context(mock.patch("sys.argv", argv))
        stack.enter_context(contextlib.suppress(SystemExit))  # --help exits
        status = cli.run(main)
    last = err.getvalue().rstrip().rpartition("\n")[2]
    one_line = status == 2 and "error: " in last and "Traceback" not in err.getvalue()
    assert status == 0 or one_line, f"status {status}: {arguments}\n{err.getvalue()[-1500:]}"
    return None if status else out.getvalue()


def configuration(dice, world, folder):
    """Logits and greedy tokens are those of transformers."""
    drawn = checkpoints.draw_configuration(dice)
    c = checkpoints.change(dice, drawn, dice.choice([0, 0, 1, 2]))
    (folder / "config.json").write_text(json.dumps(c))
    config = attempt(lambda: Config.from_checkpoint(folder))
    reference = attempt(lambda: make_reference(folder, c["model_type"]), theirs=True)
    if config is None or reference is None or config.max_positions < LENGTH:
        return None
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(c))  # as it was, not as transformers writes it
    model = Transformer.load(folder)
    ids = torch.randint(0, config.vocab_size, (1, 40))
    n = LENGTH - 40
    tokens = decore.generate(model, ids[0], "greedy", max_new_tokens=n, eos_ids=()).ids
    text = torch.cat([ids, torch.tensor([tokens])], 1)
    with torch.inference_mode():
        logits = model(text)
        expected = reference(text).logits
    largest = max(1, expected.abs().max())
    assert (logits - expected).abs().max() <= 2e-5 * largest, f"logits: {c}"
    before = expected[0, -n - 1 : -1]  # the logits that choose the tokens
    behind = before.max(-1).values - before[range(n), tokens]
    assert (behind < 1e-4 * largest).all(), f"greedy tokens {tokens}: {c}"
    return True


def make_reference(folder, family):
    """A model of transformers, which has read a text: some configurations fail only then."""
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, checkpoints.CLASSES[family])
    reference = cls._from_config(config, attn_implementation="eager").eval()
    reference(torch.ones(1, LENGTH, dtype=torch.long))
    return reference


def other_engine(dice, world, folder):
    """A changed checkpoint through transformers: the tokens of our engine, if that reads it too."""
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    path = folder / dice.choice(["config.json", "config.json", "generation_config.json"])
    fields = dict(eos_token_id=257, max_new_tokens=5, do_sample=False)
    if path.exists():
        fields = json.loads(path.read_text())
    content = json.dumps(checkpoints.change(dice, fields, dice.choice([1, 2]))).encode()
    if dice.random() < 0.2:
        content = checkpoints.damage(dice, content)
    path.write_bytes(content)
    theirs = attempt(lambda: answer(HFModel, folder, world.ids))
    ours = attempt(lambda: answer(Transformer, folder, world.ids))
    assert not ours or not theirs or theirs == ours, f"{theirs} and {ours}: {content}"
    return theirs


def answer(engine, folder, ids):
    model = engine.load(folder, dtype="float32")
    heads = [(0, 1), (2, 3)]
    return decore.generate(model, ids, heads=heads, max_new_tokens=3, eos_ids=()).ids


def weights(dice, world, folder):
    """Weights load unchanged, or not at all."""
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    index = folder / "model.safetensors.index.json"
    shard = dice.choice(sorted(folder.glob("*.safetensors")))
    content = shard.read_bytes()
    names = checkpoints.ODD + ("config.json", "../x", "/etc/passwd", shard.name)
    end = 8 + int.from_bytes(content[:8], "little")
    changed = checkpoints.change(dice, json.loads(index.read_text()), dice.choice([1, 2]), names)
    kind = dice.randrange(5)
    if kind == 0:
        index.write_text(json.dumps(changed))
    elif kind == 1:
        index.write_bytes(checkpoints.damage(dice, index.read_bytes()))
    elif kind == 2:
        shard.rename(folder / "other.safetensors")
    elif kind == 3:
        shard.unlink()
    else:
        shard.write_bytes(checkpoints.damage(dice, content[:end]) + content[end:])
    ids = torch.tensor([world.ids])
    model = attempt(lambda: Transformer.load(folder))
    assert model is None or torch.equal(model(ids), world.loaded(ids)), "other weights"
    return model


def stored_files(dice, world, folder):
    """A changed run is continued, scored again and reported; changed head scores are used."""
    run = folder / world.run.name
    lines = world.run.read_text().splitlines()
    place = dice.randrange(len(lines))
    changed = checkpoints.change(dice, json.loads(lines[place]), dice.choice([1, 2]))
    lines[place] = json.dumps(changed)
    if dice.random() < 0.3:
        lines = dice.sample(lines, dice.randint(1, len(lines)))
    run.write_text("\n".join(lines) + "\n")
    heads = checkpoints.change(dice, json.loads(world.heads.read_text()), dice.choice([1, 2]))
    (folder / "heads.json").write_text(json.dumps(heads))
    kind = dice.randrange(4)
    if kind == 0:
        return call(evaluate.main, *world.task, *world.model, "--out", folder)
    if kind == 1:
        return call(evaluate.main, "rescore", "--rows", run)
    if kind == 2:
        return call(evaluate.main, "report", folder)
    model = [*world.model[:3], folder / "heads.json", "--num-heads", dice.choice([1, 3])]
    return call(program.main, *model, "--prompt", "Hi", "--max-new-tokens", 2)


VALUES = "x,0,1,-1,0.5,nan,inf,1e3,999,[,{},nowhere,.,output,cpu,float32,masked,decore-static,cad"
VALUES = [
    *VALUES.split(","),
    "dola-low",
    "chat",
    "Hi",
    "1,2",
    "",
    "é \u200d 😀",
    "\n\n",
    "\x00",
    "--",
]


def command_line(dice, world, folder):
    """Options that --help lists, with values of all kinds."""
    chosen = dice.choice([program, evaluate])
    options = sorted(set(re.findall(r"--[a-z-]+", call(chosen.main, "--help"))) - {"--help"})
    argv = world.model[: dice.choice([2, 4, 6])]
    argv += world.task if chosen is evaluate else ["--prompt", "Hi", "--max-new-tokens", 2]
    for option in dice.sample(options, dice.randrange(3)):
        value = dice.choice(VALUES)
        argv += dice.choice([[option], [option, value], [option, value], [f"{option}={value}"]])
    with contextlib.chdir(folder):
        out = call(chosen.main, *argv)
    words = {"NaN", "nan", "Infinity", "inf"} & set(re.split("[, \n]+", out or ""))
    assert words <= set(map(str, argv)), f"not finite: {argv}\n{out}"  # a prompt may be "nan"
    return out


def python_arguments(dice, world, folder):
    """Arguments of any kind give finite numbers or an error."""
    ids, odd = world.ids, checkpoints.ODD
    score = dice.random() < 0.3
    model = dice.choice(world.engines)
    others = [*odd, [ids, "x"], [1.5], [[[1]]], [10**9], [2**70], {1, 2}, [ids, []], [math.nan]]
    others += [np.array(["a"]), (i for i in ids), torch.ones(2, 2, 2), torch.tensor([ids, ids])]
    other = dice.choice(others)
    prompt = dice.choice([ids, tuple(ids), np.array(ids), torch.tensor(ids), other, other])
    answers = dice.choice([[1, 2], [[1], [2, 3]], other, []])
    arguments = dict(heads=[(0, 1), (2, 3)])
    if not score:
        arguments |= dict(max_new_tokens=3, eos_ids=())
    arguments["method"] = dice.choice(decore.METHODS)
    names = [*arguments, "alpha", "alpha_cap", "scale_alpha", "mask", "mask_prompt"]
    values = [*odd, [(0, 1)], ["0-1"], [(0, 9)], [(0, 1), (0, 1)], [5], (257,), "query", 1.5]
    values += [10**30, torch.tensor(2), np.float32(0.5), [1, 0, 1, 1, 0]]
    names += ["attention_mask", "unknown"]
    for name in dice.sample(names, dice.choice([0, 1, 1, 2])):
        arguments[name] = dice.choice(values)
    if score:
        result = attempt(lambda: decore.score(model, prompt, answers, **arguments))
    else:
        result = attempt(lambda: decore.generate(model, prompt, **arguments))
    outs = result if isinstance(result, list) else [result]
    for out in outs if result is not None else ():
        numbers = [out] if score else out.alphas + out.entropies
        assert np.isfinite(numbers).all(), f"{out}: {arguments}"
        assert score or len(numbers) == 2 * len(out.ids), f"{out}: {arguments}"
    return result


FUNCTIONS = configuration, other_engine, weights, stored_files, command_line, python_arguments
KINDS = {kind.__name__: kind for kind in FUNCTIONS}


def fuzz(cases, seed, seconds=math.inf):
    """Runs cases, the kinds in turn, for at most so many seconds.

    Returns a Counter of (kind, outcome), and the number of failures. A kind takes random numbers,
    the valid files and an empty folder; it returns None if the input is refused."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts = Counter()
    failures = 0
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number in cases:
            if time.monotonic() > end:
                break
            name = [*KINDS][number % len(KINDS)]
            torch.manual_seed(number)
            dice = random.Random(f"{seed}/{number}")
            try:
                result = KINDS[name](dice, world, Path(tempfile.mkdtemp(dir=folder)))
                counts[name, "refused" if result is None else "right"] += 1
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # panics of Rust libraries are not Exceptions
                failures += 1
                error = traceback.format_exc(limit=-3)
                print(f"--seed {seed} --only {number}: {name}: {error}", flush=True)
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
