"""Random and damaged input: configurations, checkpoints, stored files, command lines, arguments.

    HF_HUB_OFFLINE=1 python -m tests.fuzz SEED CASES

A case ends in a correct result, or in an error that `run_program` prints as one line. If
transformers accepts the same file, the correct result is its result. Anything else stops the run,
and names the case."""

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

import decore
import evaluate
from cli import decode as program
from cli.entry import explain, run_program
from decoders.scoring import score
from heads import load_heads
from hf import HFModel
from miniature.data import make_split
from model import Transformer
from runtime.checkpoint import Checkpoint
from tests.checkpoints import (
    ODD,
    change,
    damage,
    draw_configuration,
    write_checkpoint,
    write_heads,
    write_lines,
    write_tokenizer,
)

LENGTH = 60  # tokens of the text whose logits are compared
HEADS = [(0, 1), (2, 3)]


class World:
    """The valid files that cases change copies of."""

    def __init__(self, folder):
        self.folder = folder / "model"
        write_checkpoint(self.folder, vocab_size=259, shards=3)
        write_tokenizer(self.folder, "{{ messages[0].content }}")
        generation = dict(eos_token_id=257, max_new_tokens=5, do_sample=False)
        (self.folder / "generation_config.json").write_text(json.dumps(generation))
        heads = write_heads(self.folder / "heads.json")
        self.engines = [Transformer.load(self.folder), HFModel.load(self.folder)]
        self.ids = [5, 9, 7, 7, 30]
        self.tokens = answer(Transformer, self.folder, self.ids)
        self.model = ["--model", self.folder, "--heads", heads, "--device", "cpu"]
        items = [item._asdict() for item in make_split("open", 2)]
        self.task = ["--task", "miniature", "--data", write_lines(folder / "open.jsonl", items)]
        self.task += ["--max-new-tokens", 2]
        call(evaluate.main, *self.task, *self.model, "--out", folder / "runs")
        [self.run] = (folder / "runs").glob("*.jsonl")


def answer(engine, folder, ids):
    model = engine.load(folder, dtype="float32")
    heads = load_heads(model, 2, folder / "heads.json")
    return decore.generate(model, ids, decore.DeCoRe(heads), max_new_tokens=3, eos_ids=()).ids


def attempt(function):
    """The function's result; None if it raises an error that `run_program` prints in a line."""
    try:
        return function()
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        assert len(message) > 5, repr(error)
        return None


def call(main, *arguments):
    """What a program prints; None if it ends in one line."""
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
        status = run_program(main)
    assert status == 0 or ": error: " in err.getvalue(), f"{argv}\n{err.getvalue()}"
    return None if status else out.getvalue()


def configuration(dice, world, folder):
    """Logits and greedy tokens are those of transformers."""
    c = draw_configuration(dice)
    c = change(dice, c, dice.choice([0, 0, 1, 2]))
    path = folder / "config.json"
    path.write_text(json.dumps(c))
    config = attempt(lambda: Checkpoint(folder).config)
    reference = None
    with contextlib.suppress(Exception):
        reference = make_reference(folder)
    if None in (config, reference) or config.max_positions < LENGTH:
        return None
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(folder)
    path.write_text(json.dumps(c))  # as it was, not as transformers writes it
    model = Transformer.load(folder)
    ids = torch.randint(0, config.vocab_size, (40,)).tolist()
    n = LENGTH - len(ids)
    tokens = decore.generate(model, ids, decore.Greedy(), max_new_tokens=n, eos_ids=()).ids
    text = torch.tensor([ids + tokens])
    with torch.inference_mode():
        expected = reference(text).logits
        largest = max(1, expected.abs().max())
        assert (model(text) - expected).abs().max() <= 2e-5 * largest, c
    before = expected[0, -n - 1 : -1]  # the logits that choose the tokens
    behind = before.amax(-1) - before[range(n), tokens]
    assert behind.max() < 1e-4 * largest, c
    return tokens


def make_reference(folder):
    """A model of transformers, which has read a text: some configurations fail only then."""
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = transformers.AutoModelForCausalLM
    reference = cls.from_config(config, attn_implementation="eager").eval()
    reference(torch.ones(1, LENGTH, dtype=torch.long))
    return reference


def checkpoint(dice, world, folder):
    """A file of a checkpoint changes: the engines agree, and other weights are never read."""
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    path = dice.choice([*sorted(folder.glob("*config.json")), *sorted(folder.glob("[mh]*"))])
    content = path.read_bytes()
    header = content
    if path.suffix == ".safetensors":
        header = content[: 8 + int.from_bytes(content[:8], "little")]
    if path.suffix == ".json" and dice.random() < 0.8:
        odd = *ODD, "config.json", "../x", "/etc/passwd"
        value = change(dice, json.loads(content), dice.choice([1, 2]), odd)
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(damage(dice, header) + content[len(header) :])
    ours, theirs = (
        attempt(lambda engine=engine: answer(engine, folder, world.ids))
        for engine in (Transformer, HFModel)
    )
    assert None in (ours, theirs) or ours == theirs, f"{path.name}: {ours} and {theirs}"
    assert path.name[0] != "m" or ours in (None, world.tokens), f"{path.name}: other weights"
    return ours or theirs


def stored_files(dice, world, folder):
    """A changed run is continued, scored again or reported."""
    run = folder / world.run.name
    lines = world.run.read_text().splitlines()
    line = lines.pop(dice.randrange(len(lines)))
    changed = change(dice, json.loads(line), dice.choice([1, 2]))
    lines.insert(dice.randint(0, len(lines)), json.dumps(changed))
    run.write_text("\n".join(lines) + "\n")
    commands = [
        [*world.task, *world.model, "--out", folder],
        ["rescore", "--rows", run],
        ["report", folder],
    ]
    return call(evaluate.main, *dice.choice(commands))


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
        argv += dice.choice([[option], [option, value], [f"{option}={value}"]])
    with contextlib.chdir(folder):
        return call(chosen.main, *argv)


def python_arguments(dice, world, folder):
    """Arguments of any kind give finite numbers or an error."""
    ids = world.ids
    values = [*ODD, HEADS, [(0, 9)], "query", 2**70, [10**9], [[ids, "x"]], {1, 2}]
    values += [[ids, []], [math.nan], iter(ids), np.array(["a"]), np.float32(0.5)]
    prompts = [ids, np.array(ids), torch.tensor([ids, ids]), torch.ones(2, 2, 2)]
    function = dice.choice([decore.generate, score])
    if function is decore.generate:
        arguments = dict(ids=dice.choice(prompts), max_new_tokens=3, eos_ids=())
    else:
        arguments = dict(prompt_ids=np.array(ids), answer_ids=[[1], [2, 3]])
    record = dice.choice([decore.Greedy, decore.Masked, decore.DeCoRe])
    settings = {} if record is decore.Greedy else dict(heads=HEADS)
    odd = {name: dice.choice(values) for name in dice.sample(SETTINGS, dice.choice([0, 0, 1, 2]))}
    for name in dice.sample(["method", *arguments], dice.choice([0, 1, 1, 2])):
        arguments[name] = dice.choice(values)

    def run():
        how = dict(method=record(**settings | odd)) | arguments
        return function(dice.choice(world.engines), **how)

    result = attempt(run)
    for out in result if isinstance(result, list) else [result]:
        if isinstance(out, decore.Generation):
            out = out.alphas + out.entropies
        assert out is None or np.isfinite(out).all(), f"{out}: {arguments}"
    return result


SETTINGS = ["heads", "alpha", "alpha_cap", "scale_alpha", "mask", "mask_prompt"]
KINDS = configuration, checkpoint, stored_files, command_line, python_arguments


def fuzz(cases, seed):
    """Runs cases, the kinds in turn. Returns the names of the kinds that gave results.

    A kind takes random numbers, the valid files and an empty folder; it returns None if the input
    is refused."""
    transformers.logging.disable_progress_bar()
    right = set()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number in cases:
            kind = KINDS[number % len(KINDS)]
            torch.default_generator.manual_seed(number)  # torch's own is slow, as in families
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
