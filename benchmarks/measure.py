"""Bytes in memory, the memory's bandwidth, quartiles, and the origin of a result."""

import os
import platform
import re
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from runtime.files import commit


def size(tensors):
    """Bytes."""
    return sum(x.nbytes for x in tensors)


def weights(model):
    """Bytes of a model's weights. Packed layers have buffers instead of parameters."""
    return size([*model.parameters(), *model.buffers()])


def read_weights(model):
    """Bytes of weights that a pass reads: all except the embedding, of which a pass reads a row, unless it is tied."""
    return weights(model) - (0 if model.lm_head is model.embed else model.embed.weight.nbytes)


def read_cache(model, tokens):
    """Bytes of the keys and values of so many tokens."""
    c = model.config
    return 2 * c.n_layers * c.n_kv_heads * c.head_dim * tokens * model.embed.weight.element_size()


def timed(device, work):
    """Seconds that work() takes, including the GPU work it starts."""
    def wait():
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def bandwidth_meter(device="cpu", n=300_000_000):
    """A function that reads n float32 numbers and returns the bytes per second."""
    large = torch.ones(n, device=device)
    large.sum()
    return lambda: large.nbytes / timed(device, large.sum)


def quartiles(values):
    """[first quartile, median, third quartile]."""
    return np.quantile(values, [0.25, 0.5, 0.75]).tolist()


def origin(device="cpu"):
    """Command, commit, date, versions and machine of a result. Call it first: it has the load before the run."""
    versions = {d.name: d.version for d in metadata.distributions() if d.name in ("torch", "transformers")}
    return dict(command="python " + shlex.join(["-m", "benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
                commit=commit(), date=time.strftime("%Y-%m-%d", time.gmtime()),
                versions=dict(python=platform.python_version(), **versions), device=device_name(device),
                cores=os.cpu_count(), threads=torch.get_num_threads(), load=round(os.getloadavg()[0], 2))


def device_name(device):
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{name[1] if name else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"
