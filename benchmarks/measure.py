"""What the benchmarks share: bytes in memory, its bandwidth, quartiles, and where a number comes from."""

import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from runtime.pack import Packed


def size(tensors):
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def weights(model):
    """Bytes of a model in memory."""
    other = {"frequencies"} | ({"lm_head.weight"} if one_matrix(model) else set())
    return size([*model.parameters(), *(x for name, x in model.named_buffers() if name not in other)])


def read_weights(model):
    """Bytes of weights that a pass reads: all, but of an embedding that is not the head only a row."""
    return weights(model) - (0 if one_matrix(model) else size(model.embed.parameters()))


def one_matrix(model):
    """Whether the head is the embedding: tied, and not packed beside it."""
    return model.config.tied_embeddings and not isinstance(model.lm_head, Packed)


def cached(caches):
    """Bytes of keys and values."""
    return size(kv for cache in caches for kv in cache.kv)


def bandwidth(device="cpu", n=300_000_000):
    """A function that reads n float32 once and returns the bytes per second of that."""
    large = torch.ones(n, device=device)
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    large.sum()

    def read():
        wait()
        start = time.perf_counter()
        large.sum()
        wait()
        return 4 * n / (time.perf_counter() - start)
    return read


def quartiles(values):
    """[first quartile, median, third quartile]; of one value that value three times."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3


def status(key):
    """A line of /proc/self/status in bytes: VmRSS what this process holds, VmHWM its peak."""
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))


def peak_memory(device):
    """GiB, resident on a CPU, allocated on a GPU."""
    if torch.device(device).type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**30, 3)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)


def origin(device="cpu"):
    """Where a number comes from: command, commit, machine, versions."""
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    if "transformers" in sys.modules:
        versions["transformers"] = sys.modules["transformers"].__version__
    return dict(command="python " + shlex.join(["-m", "benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
                commit=commit(), date=time.strftime("%Y-%m-%d", time.gmtime()), versions=versions,
                device=device_name(device), cores=os.cpu_count(), threads=torch.get_num_threads(),
                load=round(os.getloadavg()[0], 2))


def commit():
    """The commit that is checked out; None without git."""
    try:
        git = ["git", "log", "-1", "--format=%h"]
        return subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def device_name(device):
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] \
        if cpuinfo.exists() else []
    return f"{(names or [platform.processor()])[0]} ({torch.backends.cpu.get_cpu_capability()})"
