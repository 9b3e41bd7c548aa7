"""Kill evaluate.py and heads.detect at random moments: the finished file must be that of a run nobody interrupted.

    python -m tests.kill --times 50 --seed 1

Equal to the byte but for the seconds, with no lock and no draft beside it. The programs run in forked processes, which
need no new import of torch."""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"         # threads do not survive a fork

import rouge_score.rouge_scorer  # noqa: E402, F401    imported once, not by every process

import cli  # noqa: E402
import evaluate  # noqa: E402
from heads import detect  # noqa: E402
from tests.checkpoints import write_checkpoint, write_heads, write_tokenizer  # noqa: E402

MINIATURE = Path(__file__).parent.parent / "miniature"


def prepare(folder):
    """Write a tiny model, its heads and 2,000 questions."""
    write_tokenizer(write_checkpoint(folder / "model", vocab_size=259, max_position_embeddings=2048))
    write_heads(folder / "heads.json")
    rows = [{"question": f"{'very ' * (i % 7)}long {i}", "answers": ["a"]} for i in range(2000)]
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "demos.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")


def programs(folder):
    """Name → (main, its arguments, the file that it makes)."""
    prepare(folder)
    out = folder / "out"
    common = ["--model", folder / "model", "--heads", folder / "heads.json", "--device", "cpu", "--out", out]
    return {
        "evaluate": (evaluate.main, ["evaluate.py", *common, "--task", "nq-closed", "--data", folder / "qa.jsonl",
                                     "--demos", folder / "demos.jsonl", "--method", "decore-entropy", "--num-heads", 2,
                                     "--limit", 24, "--batch-size", 3, "--max-new-tokens", 8],
                     out / "nq-closed.model.decore-entropy.n2.jsonl"),
        "detect": (detect.main, ["heads/detect.py", "--model", MINIATURE, "--needles",
                                 MINIATURE / "detection" / "needles.jsonl", "--haystack",
                                 MINIATURE / "detection" / "haystack", "--template",
                                 "Context: {context}\\n{question}", "--runs", "24", "--lengths", "60:120:2",
                                 "--max-new-tokens", "8", "--min-success", "1", "--device", "cpu",
                                 "--out", out / "heads.json"], out / "heads.json")}


def attempt(main, argv, seconds):
    """Run it in a process of its own that is killed after so many seconds → its status, None when it was killed."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.argv = list(map(str, argv))
        os._exit(cli.run(main))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if status == -signal.SIGKILL else status


def content(path):
    return re.sub(rb'"seconds": [0-9.e-]+', b'"seconds": 0', path.read_bytes())


def kill(name, main, argv, path, times, dice):
    """Kill it so many times → (kills, finished files, how many were wrong)."""
    start = time.monotonic()
    assert attempt(main, argv, 600) == 0
    lasts, whole = time.monotonic() - start, content(path)
    killed = finished = wrong = 0
    path.unlink()
    while killed < times or list(path.parent.glob("*")):
        # A file that is there is completed once in four times, so that most are killed more than once.
        patience = 600 if killed >= times else dice.choice([dice.uniform(0, lasts)] * 3 + [600])
        status = attempt(main, argv, patience)
        killed += status is None
        if status is None:
            continue
        others = sorted(other.name for other in path.parent.iterdir() if other != path)
        good = status == 0 and content(path) == whole and not others
        if not good:
            print(f"{name}: status {status}, after {killed} kills; beside the file: {others}", flush=True)
        finished, wrong = finished + 1, wrong + (not good)
        path.unlink(missing_ok=True)
    return killed, finished, wrong


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--times", type=int, default=50, help="kills of each program")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    dice, failed = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, program in programs(Path(folder)).items():
            killed, finished, wrong = kill(name, *program, args.times, dice)
            failed += wrong
            print(f"{name}: killed {killed} times, {finished} files finished, {wrong} of them wrong", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
