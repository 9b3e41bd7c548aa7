"""Kill evaluate.py and heads.detect at random moments. Afterwards their files must be those of an undisturbed run.

    python -m tests.kill --times 20 --seed 1

Files are compared without the seconds, and no other file may remain. The programs run in forked processes, which need
not import torch again."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import rouge_score.rouge_scorer  # noqa: F401 (imported once, before the forks)
import torch

import cli
import evaluate
from heads import detect
from tests.checkpoints import write_checkpoint, write_heads, write_tokenizer

DETECTION = cli.MINIATURE / "detection"


def programs(folder):
    """[(main, its arguments, the file that it writes)]"""
    write_tokenizer(write_checkpoint(folder / "model", vocab_size=259, max_position_embeddings=2048))
    write_heads(folder / "heads.json")
    rows = [{"question": f"{'very ' * (i % 7)}long {i}", "answers": ["a"]} for i in range(24)]
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "demos.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    out, common = folder / "out", "--device cpu --max-new-tokens 8"
    return [
        (evaluate.main, f"{common} --model {folder}/model --heads {folder}/heads.json --out {out} --task nq-closed "
         f"--data {folder}/qa.jsonl --demos {folder}/demos.jsonl --method decore-entropy --num-heads 2 --batch-size 3",
         out / "nq-closed.model.decore-entropy.n2.jsonl"),
        (detect.main, f"{common} --needles {DETECTION}/needles.jsonl --haystack {DETECTION}/haystack.jsonl --runs 24 "
         f"--lengths 60:120:2 --min-success 1 --out {out}/heads.json "
         "--template 'Context: {context}\\n{question}'", out / "heads.json")]


def attempt(main, arguments, seconds=600):
    """Run a program for at most so many seconds. Returns its exit status, -9 if it was killed."""
    def work():
        sys.argv = ["program", *shlex.split(arguments)]
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            os._exit(cli.run(main))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def content(path):
    return re.sub(rb'"seconds": [0-9.e-]+', b'"seconds": 0', path.read_bytes())


def kill(main, arguments, path, times, dice):
    """Kill a program `times` times. Returns (finished files, how many of them were wrong)."""
    start = time.monotonic()
    assert attempt(main, arguments) == 0
    duration, expected = time.monotonic() - start, content(path)
    path.unlink()
    killed = finished = wrong = 0
    while killed < times or not finished or any(path.parent.iterdir()):
        # One run in four may finish, so that most files are the work of several killed runs.
        finish = killed >= times or dice.random() < 0.25
        status = attempt(main, arguments, *[] if finish else [dice.uniform(0, duration)])
        if status == -signal.SIGKILL:
            killed += 1
            continue
        finished += 1
        wrong += status != 0 or content(path) != expected or [*path.parent.iterdir()] != [path]
        path.unlink(missing_ok=True)
    return finished, wrong


def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--times", type=cli.positive, default=20, help="kills of each program")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    torch.set_num_threads(1)                            # threads do not survive a fork
    dice, failed = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        for program in programs(Path(folder)):
            finished, wrong = kill(*program, args.times, dice)
            failed += wrong
            print(f"{program[0].__module__}: killed {args.times} times, {finished} files finished, {wrong} wrong")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
