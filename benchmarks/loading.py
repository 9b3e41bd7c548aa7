"""What one rank's share of a checkpoint costs to load: the host's memory, and the bytes read.

    python -m benchmarks.loading [--ranks 1 2 4] [--folder F] [--json]

Writes a synthetic bfloat16 checkpoint of 2.2 GB in five files; then all ranks load at once, a process each.

    peak     of the resident set, pages of mapped files included, less what the process held before, in bytes
    asked    bytes that the rank takes out of the files, counted where the slices are read
    device   bytes that the kernel fetched for the process (/proc/self/io) after the files left the page cache. It reads
             ahead, so that this depends on the machine; ranks of one machine share what it fetched.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import cli
from benchmarks.measure import status, weights
from model import Transformer
from runtime import weights as checkpoint
from runtime.config import Config
from runtime.parallel import Shard
from runtime.weights import weight_table

SHAPE = dict(model_type="llama", vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
             num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096, rms_norm_eps=1e-5,
             tie_word_embeddings=False, hidden_act="silu", torch_dtype="bfloat16")
FILES = 5
MB = 1e6


def write_checkpoint(folder):
    """One file at a time, so that this needs little memory."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    table = weight_table(Config.from_checkpoint(folder), Shard())
    shapes = {name: shape for pieces in table.values() for name, shape, _ in pieces}
    files = [f"model-{i + 1:05d}-of-{FILES:05d}.safetensors" for i in range(FILES)]
    where = {name: files[i * FILES // len(shapes)] for i, name in enumerate(shapes)}
    for file in files:
        tensors = {n: torch.full(shapes[n], 0.01, dtype=torch.bfloat16) for n in shapes if where[n] == file}
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def forget(folder):
    """Drop the files from the page cache, so that reading them is seen."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))


class Counted:
    """A safetensors file, or a slice of one, that counts the bytes taken out of it."""

    asked = 0

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __enter__(self):
        return Counted(self.inner.__enter__())

    def __exit__(self, *error):
        return self.inner.__exit__(*error)

    def get_slice(self, name):
        return Counted(self.inner.get_slice(name))

    def __getitem__(self, index):
        values = self.inner[index]
        Counted.asked += values.numel() * values.element_size()
        return values


def load_share(folder, rank, size):
    """Load one rank's share here → memory and bytes, beside what they should be."""
    open_file = checkpoint.safe_open
    checkpoint.safe_open = lambda *args: Counted(open_file(*args))
    Path("/proc/self/clear_refs").write_text("5")               # the peak counts from now on
    before, fetched, start = status("VmRSS"), read_bytes(), time.perf_counter()
    model = Transformer.load(folder, shard=Shard(rank, size))
    seconds = time.perf_counter() - start
    whole = {p for p, pieces in weight_table(model.config, model.shard).items() if not any(cut for *_, cut in pieces)}
    return dict(rank=rank, ranks=size, share=weights(model), seconds=round(seconds, 2),
                replicated=sum(p.nbytes for name, p in model.named_parameters() if name in whole),
                peak=status("VmHWM") - before, asked=Counted.asked, device=read_bytes() - fetched)


def load_together(folder, size):
    """All shares at once, with the files on disk alone → one result per rank."""
    forget(folder)
    command = [sys.executable, "-m", "benchmarks.loading", "--folder", str(folder), "--share"]
    ranks = [subprocess.Popen([*command, str(rank), str(size)], stdout=subprocess.PIPE) for rank in range(size)]
    results = [json.loads(rank.communicate()[0]) for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    return results


def main():
    p = cli.parser(__doc__.split("\n")[0])
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    p.add_argument("--folder", type=Path, help="where the checkpoint is written, or was (default: a temporary folder)")
    p.add_argument("--json", action="store_true")
    p.add_argument("--share", type=int, nargs=2, metavar=("RANK", "RANKS"), help="load one share, in this process")
    args = p.parse_args()
    if args.share:
        print(json.dumps(load_share(args.folder, *args.share)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "config.json").exists():
            folder.mkdir(exist_ok=True)
            write_checkpoint(folder)
        whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for size in args.ranks:
            results = load_together(folder, size)
            for r in results:
                print(json.dumps(r) if args.json else
                      f"rank {r['rank']} of {size}, in MB: share {r['share'] / MB:.0f}, {r['replicated'] / MB:.1f} "
                      f"on every rank; peak {r['peak'] / MB:.0f}, asked {r['asked'] / MB:.0f}, "
                      f"device {r['device'] / MB:.0f}; {r['seconds']} s", flush=True)
            together = sum(r["device"] for r in results) / whole
            print(f"{size} ranks together fetched {together:.2f} × the checkpoint", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(cli.run(main))
