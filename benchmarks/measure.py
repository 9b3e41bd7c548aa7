"""What the benchmarks share: bytes in memory, the memory's bandwidth, quartiles, and the origin of a result."""

import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch

from runtime.files import commit


def size(tensors):
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)


def weights(model):
    """Bytes of a model's weights in memory."""
    other = {"frequencies"} | ({"lm_head.weight"} if one_matrix(model) else set())
    return size([*model.parameters(), *(x for name, x in model.named_buffers() if name not in other)])


def read_weights(model):
    """Bytes of weights that a pass reads: all but the embedding, of which it reads a row, unless it is the head too."""
    return weights(model) - (0 if one_matrix(model) else size(model.embed.parameters()))


def one_matrix(model):
    """Whether the head is the embedding's matrix: tied, and not packed besides."""
    return model.config.tied_embeddings and model.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()


def read_cache(model, tokens):
    """Bytes of the keys and values of so many tokens."""
    c = model.config
    return 2 * c.n_layers * c.n_kv_heads * c.head_dim * tokens * model.embed.weight.element_size()


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def timed(device, work):
    """Seconds that work() takes, with what it starts on a GPU."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def bandwidth(device="cpu", n=300_000_000):
    """A function that reads n float32 numbers and returns the bytes per second of that."""
    large = torch.ones(n, device=device)
    large.sum()
    return lambda: 4 * n / timed(device, large.sum)


def quartiles(values):
    """[first quartile, median, third quartile]; of one value that value three times."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3


def status(key):
    """A line of /proc/self/status in bytes: VmRSS is the memory of this process, VmHWM its peak."""
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))


def origin(device="cpu"):
    """Command, commit, machine and versions that make a result."""
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    if "transformers" in sys.modules:
        versions["transformers"] = sys.modules["transformers"].__version__
    return dict(command="python " + shlex.join(["-m", "benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
                commit=commit(), date=time.strftime("%Y-%m-%d", time.gmtime()), versions=versions,
                device=device_name(device), cores=os.cpu_count(), threads=torch.get_num_threads(),
                load=round(os.getloadavg()[0], 2))


def device_name(device):
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.processor()])[0]} ({torch.backends.cpu.get_cpu_capability()})"
