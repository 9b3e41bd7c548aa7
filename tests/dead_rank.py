"""Kill a rank of evaluate.py at a random moment: the others have to end within a minute, with one line and status 2.

    python -m tests.dead_rank --times 20 --seed 1

Ranks are started by hand, since torchrun would end them all itself. One line per death, with --tp and without."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints import write_checkpoint, write_heads, write_tokenizer
from tests.test_parallel import free_port

ROOT = Path(__file__).parent.parent
LIMIT = 60                          # seconds
WORLDS = ((2, 1), (2, 2), (3, 1), (4, 2))                   # ranks, and how many of them share a model


def prepare(folder):
    """A tiny model and more questions than anybody waits for."""
    write_tokenizer(write_checkpoint(folder / "model", vocab_size=259, max_position_embeddings=2048))
    write_heads(folder / "heads.json")
    rows = [{"question": f"{'very ' * (i % 7)}long {i}", "answers": ["a"]} for i in range(2000)]
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "demos.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")


def start(folder, out, size, tp):
    command = [sys.executable, "evaluate.py", "--model", folder / "model", "--heads", folder / "heads.json", "--task",
               "nq-closed", "--data", folder / "qa.jsonl", "--demos", folder / "demos.jsonl", "--num-heads", "2",
               "--max-new-tokens", "20", "--batch-size", "4", "--tp", tp, "--device", "cpu", "--out", out]
    port, ranks = str(free_port()), []
    for rank in range(size):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(size),
                                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
                                      stderr=open(out / f"{rank}.err", "w")))
    return ranks


def one_death(folder, dice, size, tp):
    """(what happened, whether it is as it should be)."""
    out = Path(tempfile.mkdtemp(dir=folder))
    ranks, victim, wait = start(folder, out, size, tp), dice.randrange(size), dice.uniform(0, 3)
    try:
        while not any(path.read_bytes().count(b"\n") > 1 for path in out.glob("*.jsonl")):
            if any(rank.poll() is not None for rank in ranks):
                return f"a rank ended before the kill: {(out / '0.err').read_text()[-500:]}", False
            time.sleep(0.05)
        time.sleep(wait)
        ranks[victim].send_signal(signal.SIGKILL)
        died, ended, good = time.monotonic(), [], True
        for number, rank in enumerate(ranks):
            if number == victim:
                continue
            try:
                status = rank.wait(max(LIMIT - (time.monotonic() - died), 1))
            except subprocess.TimeoutExpired:
                status = "hangs"
            said = (out / f"{number}.err").read_text().replace("\r", "\n")
            bar = max(said.rfind("ex/s"), said.rfind("s/ex"))           # rank 0's progress; what follows it counts
            after = said[max(bar, 0):].splitlines()[bar >= 0:]
            good = good and status == 2 and len(after) == 1 and "lost the others" in after[0]
            ended.append(f"rank {number}: status {status} after {time.monotonic() - died:.1f} s, {str(after)[:120]}")
        return f"rank {victim} of {size} killed, --tp {tp}: " + "; ".join(ended), good
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--times", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    dice, failed = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for number in range(args.times):
            said, good = one_death(Path(folder), dice, *WORLDS[number % len(WORLDS)])
            failed += not good
            print("ok    " if good else "FAILED", said, flush=True)
    print(f"{args.times} deaths, {failed} failures (seed {args.seed})")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
