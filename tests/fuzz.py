"""Random and damaged input: configurations, checkpoints, stored files, command lines, arguments.

    HF_HUB_OFFLINE=1 python -m tests.fuzz SEED CASES

A case ends in a correct result, or in an error that `cli.run` prints as one line. If transformers
accepts the same file, the correct result is its result. Anything else stops the run, and names the
case."""

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

LENGTH = 60  # tokens of the text whose logits are compared
HEADS = [(0, 1), (2, 3)]


class World:
    """The valid files that cases change copies of."""

    def __init__(self, folder):
        self.folder = folder / "model"
        checkpoints.write_checkpoint(self.folder, vocab_size=259, shards=3)
        checkpoints.write_tokenizer(self.folder, "{{ messages[0].content }}")
        generation = dict(eos_token_id=257, max_new_tokens=5, do_sample=False)
        (self.folder / "generation_config.json").write_text(json.dumps(generation))
        self.heads = checkpoints.write_heads(folder / "heads.json")
        self.engines = [Transformer.load(self.folder), HFModel.load(self.folder)]
        self.ids = [5, 9, 7, 7, 30]
        self.tokens = answer(self.engines[0], self.ids)
        self.model = ["--model", self.folder, "--heads", self.heads, "--device", "cpu"]
        self.task = ["--task", "miniature-open", "--limit", 2, "--max-new-tokens", 2]
        call(evaluate.main, *self.task, *self.model, "--out", folder / "runs")
        [self.run] = (folder / "runs").glob("*.jsonl")


def answer(model, ids):
    return decore.generate(model, ids, heads=HEADS, max_new_tokens=3, eos_ids=()).ids


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
    """What a program prints; None if it ends in one line and status 2."""
    out, err = io.StringIO(), io.StringIO()
    argv = [main.__module__ + ".py", *map(str, arguments)]
    status = 0
    with (
        open(os.devnull) as stdin,
        mock.patch.multiple("sys", argv=argv, stdin=stdin),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),  # --help exits
    ):
        status = cli.run(main)
    last = err.getvalue().rstrip().rpartition("\n")[2]
    one_line = status == 2 and "error: " in last and "Traceback" not in err.getvalue()
    assert status == 0 or one_line, f"status {status}: {argv}\n{err.getvalue()}"
    return None if status else out.getvalue()


def mutate(dice, path, odd=checkpoints.ODD):
    """Change entries of a JSON file, or its bytes."""
    content = path.read_bytes()
    if dice.random() < 0.8:
        value = checkpoints.change(dice, json.loads(content), dice.choice([1, 2]), odd)
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(checkpoints.damage(dice, content))


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
    ids = torch.randint(0, config.vocab_size, (40,)).tolist()
    n = LENGTH - len(ids)
    tokens = decore.generate(model, ids, "greedy", max_new_tokens=n, eos_ids=()).ids
    text = torch.tensor([ids + tokens])
    with torch.inference_mode():
        logits = model(text)
        expected = reference(text).logits
    largest = max(1, expected.abs().max())
    assert (logits - expected).abs().max() <= 2e-5 * largest, f"logits: {c}"
    before = expected[0, -n - 1 : -1]  # the logits that choose the tokens
    behind = before.max(-1).values - before[range(n), tokens]
    assert (behind < 1e-4 * largest).all(), f"greedy tokens {tokens}: {c}"
    return tokens


def make_reference(folder, family):
    """A model of transformers, which has read a text: some configurations fail only then."""
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, checkpoints.CLASSES[family])
    reference = cls._from_config(config, attn_implementation="eager").eval()
    reference(torch.ones(1, LENGTH, dtype=torch.long))
    return reference


def checkpoint(dice, world, folder):
    """A file of a checkpoint changes: the engines agree, and other weights are never read."""
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    path = dice.choice(sorted(folder.glob("*config.json")) + sorted(folder.glob("model*")))
    if path.suffix == ".json":
        mutate(dice, path, checkpoints.ODD + ("config.json", "../x", "/etc/passwd"))
    elif dice.random() < 0.3:
        path.rename(folder / "other.safetensors")
    else:
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        path.write_bytes(checkpoints.damage(dice, content[:end]) + content[end:])
    ours, theirs = (
        attempt(lambda engine=engine: answer(engine.load(folder, dtype="float32"), world.ids))
        for engine in (Transformer, HFModel)
    )
    assert None in (ours, theirs) or ours == theirs, f"{path.name}: {ours} and {theirs}"
    assert "config" in path.name or ours in (None, world.tokens), f"{path.name}: other weights"
    return ours or theirs


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
    heads = Path(shutil.copy(world.heads, folder))
    mutate(dice, heads)
    prompt = ["--num-heads", dice.choice([1, 3]), "--prompt", "Hi", "--max-new-tokens", 2]
    commands = [
        (evaluate, *world.task, *world.model, "--out", folder),
        (evaluate, "rescore", "--rows", run),
        (evaluate, "report", folder),
        (program, "--model", world.folder, "--heads", heads, *prompt),
    ]
    chosen, *arguments = dice.choice(commands)
    return call(chosen.main, *arguments)


VALUES = "x 0 1 -1 0.5 nan inf 1e3 999 [ {} nowhere . output cpu float32 masked decore-static cad"
VALUES = [*VALUES.split(), "dola-low", "chat", "1,2", "", "é \u200d 😀", "\n\n", "\x00", "--"]


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
    ids = world.ids
    values = [*checkpoints.ODD, HEADS, ["0-1"], [(0, 9)], [(0, 1), (0, 1)], [5], "query", 2**70]
    values += [[ids, "x"], [[[1]]], [10**9], {1, 2}, [ids, []], [math.nan], iter(ids)]
    values += [np.array(["a"]), np.float32(0.5), torch.ones(2, 2, 2), torch.tensor([ids, ids])]
    arguments = dict(ids=ids, max_new_tokens=3, eos_ids=())
    function = decore.generate
    if dice.random() < 0.3:
        arguments = dict(prompt_ids=np.array(ids), answer_ids=[[1], [2, 3]])
        function = decore.score
    arguments |= dict(method=dice.choice(decore.METHODS), heads=HEADS)
    others = ["alpha", "alpha_cap", "scale_alpha", "mask", "mask_prompt", "attention_mask", "other"]
    for name in dice.sample([*arguments, *others], dice.choice([0, 1, 1, 2])):
        arguments[name] = dice.choice(values)
    result = attempt(lambda: function(dice.choice(world.engines), **arguments))
    for out in result if isinstance(result, list) else [result]:
        if isinstance(out, decore.Generation):
            assert len(out.ids) == len(out.alphas) == len(out.entropies), f"{out}: {arguments}"
            out = out.alphas + out.entropies
        assert out is None or np.isfinite(out).all(), f"{out}: {arguments}"
    return result


KINDS = configuration, checkpoint, stored_files, command_line, python_arguments


def fuzz(cases, seed):
    """Runs cases, the kinds in turn. Returns the names of the kinds that gave results.

    A kind takes random numbers, the valid files and an empty folder; it returns None if the input
    is refused."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    right = set()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number in cases:
            kind = KINDS[number % len(KINDS)]
            torch.manual_seed(number)
            dice = random.Random(f"{seed}/{number}")
            try:
                result = kind(dice, world, Path(tempfile.mkdtemp(dir=folder)))
            except BaseException as error:  # panics of Rust libraries are not Exceptions
                error.add_note(f"{kind.__name__}: fuzz([{number}], {seed})")
                raise
            if result is not None:
                right.add(kind.__name__)
    return right


if __name__ == "__main__":
    seed, cases = map(int, sys.argv[1:])
    print(fuzz(range(cases), seed))
