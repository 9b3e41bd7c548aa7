"""The ranks that torchrun started share a model (`Shard`), or a benchmark's examples (`Ranks`)."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.errors import InputError, one_line
from runtime.ranks import rank_and_size

COLLECTIVE = timedelta(minutes=10)  # the longest wait for the other ranks inside a pass
PATIENT = timedelta(days=30)  # the longest wait for a download or other replicas' batches


def call(collective, *args, **kw):
    """Call a function of torch.distributed. ConnectionError, in one line, if it fails."""
    try:
        collective(*args, **kw)
    except RuntimeError as error:
        raise ConnectionError(
            f"{collective.__name__} failed ({one_line(error)}); another rank may have ended; "
            "start all of them with torchrun"
        ) from error


class Shard:
    """One of `size` ranks that share a model. With one rank every method returns its input."""

    def __init__(self, rank=0, size=1, group=None):
        self.rank = rank
        self.size = size
        self.group = group

    @classmethod
    def from_environment(cls, device="cpu"):
        """All ranks that torchrun started; one rank without it."""
        if rank_and_size()[1] < 2:
            return cls()
        if not dist.is_initialized():
            backend = "nccl" if device == "cuda" else "gloo"
            call(dist.init_process_group, backend, timeout=COLLECTIVE)
        return cls(dist.get_rank(), dist.get_world_size())

    def part(self, n, copies=False):
        """This rank's slice of n items. copies: if there are fewer items than ranks, several ranks
        have the same one."""
        if copies and self.size % n == 0:
            start = self.rank * n // self.size
            return slice(start, start + 1)
        step = -(-n // self.size)
        return slice(min(self.rank * step, n), min((self.rank + 1) * step, n))

    def all_reduce(self, x):
        """The sum over all ranks, in place if x is contiguous and has no gradient."""
        if self.size == 1:
            return x
        if x.requires_grad:
            return Reduced.apply(x, self)
        x = x.contiguous()
        call(dist.all_reduce, x, group=self.group)
        return x

    def all_gather(self, x):
        """Concatenates along the last axis in the order of the ranks, in the dtype of x."""
        if self.size == 1:
            return x
        if x.requires_grad:
            parts = [torch.zeros_like(x)] * self.size
            parts[self.rank] = x
            return self.all_reduce(torch.cat(parts, -1))
        parts = list(x.new_empty(self.size, *x.shape))
        call(dist.all_gather, parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def broadcast(self, value):
        """The first rank's value, on every rank: any object that pickles."""
        values = [value]
        if self.size > 1:
            call(dist.broadcast_object_list, values, group_src=0, group=self.group)
        return values[0]


class Reduced(torch.autograd.Function):
    """`Shard.all_reduce` with a gradient: on each rank that of the sum of what all of them
    compute."""

    @staticmethod
    def forward(ctx, x, shard):
        ctx.shard = shard
        return shard.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.shard.all_reduce(gradient.clone()), None


class Ranks:
    """All processes: `replicas` copies of the model, each over `tp` of them, in step by batch.

    tp: None for one copy. world: all ranks. shard: those that share this rank's copy."""

    def __init__(self, tp=1, device="auto"):
        world = Shard.from_environment(
            "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        )
        tp = tp or world.size
        if world.size % tp:
            raise InputError(
                f"tp {tp} does not divide the {world.size} ranks; "
                "start torchrun with another --nproc-per-node"
            )
        self.tp = tp
        self.rank = world.rank
        self.replicas = world.size // tp
        self.replica = world.rank // tp
        self.world = world
        self.shard = Shard()
        if world.size > 1:
            groups = [
                dist.new_group(range(first, first + tp), COLLECTIVE)
                for first in range(0, world.size, tp)
            ]
            self.shard = Shard(world.rank % tp, tp, groups[self.replica])
            patient = dist.new_group(backend="gloo", timeout=PATIENT)
            self.world = Shard(world.rank, world.size, patient)

    def share(self, work):
        """Rank 0's work(), on every rank."""
        return self.world.broadcast(work() if self.rank == 0 else None)

    def gather(self, work):
        """The lists of every replica's work(), joined, on every rank."""
        lists = [work()] * self.world.size
        if self.world.size > 1:
            call(dist.all_gather_object, lists, lists[0], group=self.world.group)
        return sum(lists[:: self.tp], [])


def rank_device(device):
    """The torch.device of this rank, made the current one: with torchrun each has its own GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    n = torch.cuda.device_count()
    index = device.index
    if index is None and rank_and_size()[1] > 1:
        index = int(os.environ["LOCAL_RANK"]) if n > 1 else 0  # a process may see only its own GPU
    if (index or 0) >= n:
        raise InputError(
            f"GPU {index or 0} is not on this machine: torch finds {n}; choose another device, "
            "or with torchrun a smaller --nproc-per-node"
        )
    if index is not None:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # streams and graphs belong to the current device
    return device


def check_split(config, size):
    """InputError if `size` ranks cannot share the model."""
    parts = {"query heads": config.n_heads, "feed-forward width": config.d_ff}
    if size % config.n_kv_heads:  # else several ranks share a key/value head
        parts["key/value heads"] = config.n_kv_heads
    for name, n in parts.items():
        if n % size:
            raise InputError(
                f"{size} ranks cannot share {n} {name}; use a number of ranks that divides them"
            )
