"""Ranks without torchrun: threads, or processes forked from that of the tests.

A start of Python would import torch, which takes seconds."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.multiprocessing import start_processes

from runtime.parallel import Reduced, Shard


class Thread(Shard):
    """A rank that is a thread. values: a list that all ranks share."""

    def __init__(self, rank, values, barrier):
        super().__init__(rank, len(values))
        self.values = values
        self.barrier = barrier

    def exchange(self, value, join):
        self.values[self.rank] = value
        self.barrier.wait()
        joined = join(self.values)
        self.barrier.wait()  # nobody changes a value before all have joined them
        return joined

    def all_reduce(self, x):
        return Reduced.apply(x, self) if x.requires_grad else self.exchange(x, sum)

    def all_gather(self, x):
        if x.requires_grad:
            return super().all_gather(x)
        return self.exchange(x, lambda parts: torch.cat(parts, -1))

    def broadcast(self, value):
        return self.exchange(value, lambda values: values[0])


def on_threads(size, function):
    """[function(shard) of each rank]."""
    values, barrier = [None] * size, threading.Barrier(size)

    @torch.inference_mode()
    def run(rank):
        try:
            return function(Thread(rank, values, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    # The error of a rank that fails comes before those of ranks that wait for it.
    waiting = threading.BrokenBarrierError
    for future in sorted(futures, key=lambda future: isinstance(future.exception(), waiting)):
        future.result()
    return [future.result() for future in futures]


def on_processes(size, function):
    """Calls function() as each rank of torchrun's would."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = dict(WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    start_processes(run_rank, (function, common), size, start_method="fork")


@torch.inference_mode()
def run_rank(rank, function, common):
    for name, value in (common | dict(RANK=rank, LOCAL_RANK=rank)).items():
        os.environ[name] = str(value)
    function()
