"""The processes that torchrun started: they share a model (`Shard`), or the examples of a benchmark (`Ranks`)."""

import gc
import itertools
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.files import one_line

TO_MEET = timedelta(minutes=1)
COLLECTIVE = timedelta(minutes=10)      # the longest that a rank waits for the others inside a pass
BATCH = timedelta(days=30)              # the longest that a replica waits for the batches of the others

before_leaving = []                     # functions that drop CUDA graphs; NCCL waits for graphs with its collectives
turns = itertools.count()
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)        # its name before torch 2.13


class Shard:
    """One rank's place among the `size` ranks that share a model. With one rank every method returns its input."""

    def __init__(self, rank=0, size=1, group=None):
        self.rank, self.size, self.group = rank, size, group

    @classmethod
    def from_environment(cls, device="cpu"):
        """All ranks that torchrun started; one rank without it."""
        if not {"RANK", "WORLD_SIZE"} & set(os.environ):
            return cls()
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set, but other variables of torchrun are: start with torchrun, "
                             "or unset RANK and WORLD_SIZE for one process")
        if int(os.environ["WORLD_SIZE"]) == 1:
            return cls()
        join("nccl" if device == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def part(self, n, copies=False):
        """This rank's slice of n equal parts. copies: if there are fewer parts than ranks, several ranks share one."""
        if copies and self.size % n == 0:
            start = self.rank * n // self.size
            return slice(start, start + 1)
        step = -(-n // self.size)
        return slice(min(self.rank * step, n), min((self.rank + 1) * step, n))

    def all_reduce(self, x):
        """The sum over all ranks, in place if x is contiguous."""
        if self.size > 1:
            x = x.contiguous()
            self.call(dist.all_reduce, x)
        return x

    def all_gather(self, x):
        """Concatenate along the last axis in the order of the ranks, in the dtype of x."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self.call(all_gather_single, parts, x.contiguous())
        return parts.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

    def broadcast(self, value):
        """The first rank's value, on every rank: any object that pickles."""
        box = [value]
        if self.size > 1:
            self.call(dist.broadcast_object_list, box, group_src=0)
        return box[0]

    def check_same(self, value, name):
        """Raise ValueError if a rank's value is not the first one's."""
        if dist.is_initialized() and self.broadcast(value) != value:
            raise ValueError(f"{name}: rank {self.rank} has another one than rank 0; give every machine the same")

    def call(self, collective, *args, **kw):
        try:
            collective(*args, group=self.group, **kw)
        except RuntimeError as error:
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if capturing or isinstance(error, torch.OutOfMemoryError):      # neither has to do with the other ranks
                raise
            raise ConnectionError(f"rank {self.rank} of {self.size}: {collective.__name__} failed; another rank may "
                                  f"have ended ({one_line(error)})") from error


def rank_device(device):
    """The torch.device of this rank, made the current one. With torchrun "cuda" is a GPU for each rank."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device.index is not None:
            raise ValueError(f"{device} is one GPU for several ranks; with torchrun the device is cuda")
        local, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if n > 1 and local >= n:
            raise ValueError(f"local rank {local} needs a GPU and there are {n}: use --nproc-per-node {n}")
        device = torch.device("cuda", local if n > 1 else 0)    # a scheduler may show each process its own GPU only
    if device.index is not None:
        torch.cuda.set_device(device)                           # streams and graphs belong to the current device
    return device


def check_split(config, size):
    """Raise ValueError if `size` ranks cannot share the model."""
    kv = config.n_kv_heads
    for name, n, divides in (("query heads", config.n_heads, config.n_heads % size == 0),
                             ("feed-forward width", config.d_ff, config.d_ff % size == 0),
                             ("key/value heads", kv, kv % size == 0 or size % kv == 0)):
        if not divides:
            raise ValueError(f"{size} ranks cannot share {n} {name}; use a number of ranks that divides them")


def first_on_node(work):
    """work() on the first rank of each machine; when all those are done, on the other ranks, which find its files."""
    if not dist.is_initialized():
        return work()
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    result = work() if first else None
    store, barrier = dist.distributed_c10d._get_default_store(), f"first_on_node {next(turns)}"
    store.add(barrier, 1)
    while store.add(barrier, 0) < dist.get_world_size():        # polled: a download may take longer than any timeout
        time.sleep(0.2)
    return result if first else work()


class Ranks:
    """The processes that torchrun started: `replicas` copies of the model, each over `tp` of them."""

    def __init__(self, tp=1, device="auto"):
        everyone = Shard.from_environment("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self.rank, self.size, self.tp = everyone.rank, everyone.size, tp
        if self.size % tp:
            raise ValueError(f"--tp {tp} does not divide the {self.size} ranks; start torchrun with --nproc-per-node")
        self.replicas, self.replica = self.size // tp, self.rank // tp
        self.model_group, self.everyone = None, everyone
        if self.size > 1:
            groups = [dist.new_group(range(at, at + tp), COLLECTIVE) for at in range(0, self.size, tp)]
            self.model_group = groups[self.replica]
            self.everyone = Shard(self.rank, self.size, dist.new_group(backend="gloo", timeout=BATCH))

    def shard(self):
        return Shard(self.rank % self.tp, self.tp, self.model_group)

    def share(self, work):
        """Rank 0's work(), on every rank."""
        return self.everyone.broadcast(work() if self.rank == 0 else None)

    def gather(self, work):
        """The lists of every replica's work(), joined, on every rank.

        An error is raised at once: other ranks of the replica may wait for this one, and torchrun ends them."""
        lists = [work()] * self.size
        if self.size > 1:
            self.everyone.call(dist.all_gather_object, lists, lists[0])
        return [row for rows in lists[::self.tp] for row in rows]


def join(backend):
    """Meet the other ranks."""
    if dist.is_initialized():
        return
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=TO_MEET))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE)
    except (RuntimeError, OSError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(f"the ranks did not meet at {place}: start them together, with torchrun "
                              f"({one_line(error)})") from None
    store.set_timeout(COLLECTIVE)


def leave():
    """Drop all CUDA graphs, then leave the other ranks."""
    if dist.is_initialized():
        for drop in before_leaving:
            drop()
        gc.collect()
        dist.destroy_process_group()
