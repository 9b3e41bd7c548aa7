"""Random and damaged input: configurations, weights, command lines, Python arguments.

    python -m tests.fuzz --cases 3600 --seed 1

A case ends in a correct result, or in an error that `cli.run` prints as one line. If transformers accepts the same
file, the correct result is its result. All else is a failure, printed with the options that repeat it."""

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


class World:
    """The valid files that cases change copies of."""

    def __init__(self, folder):
        self.model = checkpoints.write_checkpoint(folder / "model", vocab_size=259, shards=3)
        checkpoints.write_tokenizer(
            self.model, "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
        )
        self.heads = checkpoints.write_heads(folder / "heads.json")
        self.loaded, self.ids = Transformer.load(self.model), [5, 9, 7, 7, 30]
        self.engines = [self.loaded, HFModel.load(self.model)]


def attempt(function, theirs=False):
    """The function's result; None if it raises an error that `cli.run` prints as one line, or any of transformers."""
    try:
        return function()
    except Exception as error:
        if theirs or "unexpected keyword argument" in str(
            error
        ):  # Python's own error, which names the argument
            return None
        message = cli.explain(error)
        if message is None:
            raise
        assert 5 < len(message) < 1500 and "\n" not in message, (
            f"{len(message)} characters: {message}"
        )


def call(main, *arguments):
    """Runs a program in this process → its standard output, or None after an error, which must be one line."""
    status, argv = 0, [main.__module__ + ".py", *map(str, arguments)]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        open(os.devnull) as stdin,
        mock.patch("sys.argv", argv),
        mock.patch("sys.stdin", stdin),
        contextlib.suppress(SystemExit),
    ):  # --help exits
        status = cli.run(main)
    last = err.getvalue().rstrip().rpartition("\n")[2]
    one_line = status == 2 and "error: " in last and "Traceback" not in err.getvalue()
    assert status == 0 or one_line, f"status {status}: {arguments}\n{err.getvalue()[-1500:]}"
    return None if status else out.getvalue()


def configuration(dice, world, folder):
    """Logits and greedy tokens are those of transformers."""
    c = checkpoints.change(dice, checkpoints.draw_configuration(dice), dice.choice([0, 0, 1, 2]))
    (folder / "config.json").write_text(json.dumps(c))
    config = attempt(lambda: Config.from_checkpoint(folder))
    reference = attempt(
        lambda: (
            getattr(transformers, checkpoints.CLASSES[c["model_type"]])
            ._from_config(
                transformers.AutoConfig.from_pretrained(folder), attn_implementation="eager"
            )
            .eval()
        ),
        theirs=True,
    )
    # Some configurations fail only when the model runs, or only for longer texts.
    if (
        config is None
        or attempt(lambda: reference(torch.ones(1, 60, dtype=torch.long)), theirs=True) is None
    ):
        return None
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.15).add_(parameter.dim() == 1)
    reference.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(c))  # as it was, not as transformers writes it
    model = Transformer.load(folder)
    if config.max_positions < 60:
        return None
    ids = torch.randint(0, config.vocab_size, (1, 40))
    tokens = decore.generate(model, ids[0], "greedy", max_new_tokens=20, eos_ids=()).ids
    text = torch.cat([ids, torch.tensor([tokens])], 1)
    with torch.inference_mode():
        logits, expected = model(text), reference(text).logits
    largest = max(1, expected.abs().max())
    assert (logits - expected).abs().max() <= 2e-5 * largest, f"logits: {c}"
    best = expected[0, 39:-1].max(-1).values - expected[0, range(39, 59), tokens]
    assert (best < 1e-4 * largest).all(), f"greedy tokens {tokens}: {c}"
    return True


def weights(dice, world, folder):
    """Weights load unchanged, or not at all."""
    shutil.copytree(world.model, folder, dirs_exist_ok=True)
    index, shard = (
        folder / "model.safetensors.index.json",
        dice.choice(sorted(folder.glob("*.safetensors"))),
    )
    content, names = (
        shard.read_bytes(),
        checkpoints.ODD + ("config.json", "../x", "/etc/passwd", shard.name),
    )
    end = 8 + int.from_bytes(content[:8], "little")
    changed = json.dumps(
        checkpoints.change(dice, json.loads(index.read_text()), dice.choice([0, 1, 2]), names)
    )
    dice.choice(
        [
            lambda: index.write_text(changed),
            lambda: shard.rename(folder / "other.safetensors"),
            lambda: index.write_bytes(checkpoints.damage(dice, changed.encode())),
            shard.unlink,
            lambda: shard.write_bytes(checkpoints.damage(dice, content[:end]) + content[end:]),
        ]
    )()
    model, ids = attempt(lambda: Transformer.load(folder)), torch.tensor([world.ids])
    assert model is None or torch.equal(model(ids), world.loaded(ids)), "other weights"
    return model


VALUES = (
    "",
    "x",
    "0",
    "1",
    "-1",
    "0.5",
    "nan",
    "inf",
    "1e3",
    "1,2",
    "999",
    "[",
    "{}",
    "nowhere",
    ".",
    "output",
    "cpu",
    "float32",
    "masked",
    "decore-static",
    "cad",
    "dola-low",
    "chat",
    "Hi",
    "é \u200d 😀",
    "\n\n",
    "\x00",
    "--",
)


def command_line(dice, world, folder):
    """Options that --help lists, with values of all kinds."""
    chosen = dice.choice([program, evaluate])
    options = sorted(set(re.findall(r"--[a-z-]+", call(chosen.main, "--help"))) - {"--help"})
    argv = ["--model", world.model, "--heads", world.heads, "--device", "cpu"][
        : dice.choice([2, 4, 6])
    ]
    argv += ["--max-new-tokens", "2"]
    argv += (
        ["--task", "miniature-open", "--limit", "1"] if chosen is evaluate else ["--prompt", "Hi"]
    )
    for option in dice.sample(options, dice.randrange(3)):
        value = dice.choice(VALUES)
        argv += dice.choice([[option], [option, value], [option, value], [f"{option}={value}"]])
    with contextlib.chdir(folder):
        out = call(chosen.main, *argv)
    words = {"NaN", "nan", "Infinity", "inf"} & set(re.split("[, \n]+", out or ""))
    assert words <= set(map(str, argv)), (
        f"not finite: {argv}\n{out}"
    )  # a prompt may be one of these words
    return out


def python_arguments(dice, world, folder):
    """Arguments of any kind give finite numbers or an error."""
    ids, odd, score, model = (
        world.ids,
        checkpoints.ODD,
        dice.random() < 0.3,
        dice.choice(world.engines),
    )
    other = dice.choice(
        [
            *odd,
            [ids, "x"],
            [1.5],
            [[[1]]],
            [10**9],
            [2**70],
            torch.ones(2, 2, 2),
            np.array(["a"]),
            {1, 2},
            [ids, []],
            [math.nan],
            (i for i in ids),
            torch.tensor([ids, ids]),
        ]
    )
    prompt = dice.choice([ids, tuple(ids), np.array(ids), torch.tensor(ids), other, other])
    answers = dice.choice([[1, 2], [[1], [2, 3]], other, []])
    arguments = dict({} if score else dict(max_new_tokens=3, eos_ids=()), heads=[(0, 1), (2, 3)])
    arguments["method"] = dice.choice(["greedy", "masked", "decore-static", "decore-entropy"])
    names = [
        *arguments,
        "alpha",
        "alpha_cap",
        "scale_alpha",
        "mask",
        "mask_prompt",
        "attention_mask",
        "unknown",
    ]
    for name in dice.sample(names, dice.choice([0, 1, 1, 2])):
        arguments[name] = dice.choice(
            [
                *odd,
                [(0, 1)],
                ["0-1"],
                [(0, 9)],
                [(0, 1), (0, 1)],
                [5],
                (257,),
                "query",
                1.5,
                10**30,
                torch.tensor(2),
                np.float32(0.5),
                [1, 0, 1, 1, 0],
            ]
        )
    result = attempt(
        lambda: (
            decore.score(model, prompt, answers, **arguments)
            if score
            else decore.generate(model, prompt, **arguments)
        )
    )
    for out in result if isinstance(result, list) else [] if result is None else [result]:
        numbers = [out] if score else out.alphas + out.entropies
        assert np.isfinite(numbers).all() and (score or len(numbers) == 2 * len(out.ids)), (
            f"{out}: {arguments}"
        )
    return result


KINDS = {kind.__name__: kind for kind in (configuration, weights, command_line, python_arguments)}


def fuzz(cases, seed, seconds=math.inf):
    """Runs cases, the kinds in turn, for at most so many seconds → (Counter of (kind, outcome), number of failures).

    A kind takes random numbers, the valid files and an empty folder. It returns None if the input is refused."""
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
                result = KINDS[name](
                    random.Random(f"{seed}/{number}"), world, Path(tempfile.mkdtemp(dir=folder))
                )
                counts[name, "refused" if result is None else "right"] += 1
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # panics of Rust libraries are not Exceptions
                failures += 1
                print(
                    f"--seed {seed} --only {number}: {name}: {traceback.format_exc(limit=-3)}",
                    flush=True,
                )
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
