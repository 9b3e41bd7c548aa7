"""The processes that torchrun started: they share a model (`Shard`), or the examples of a benchmark (`Ranks`)."""

import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist


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
            raise ValueError(f"some of torchrun's variables are set and {', '.join(missing)} not: start with torchrun, "
                             "or unset RANK and WORLD_SIZE for one process")
        if int(os.environ["WORLD_SIZE"]) == 1:
            return cls()
        join("nccl" if device == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def part(self, n, copies=False):
        """This rank's slice of n things in equal parts; with `copies`, fewer things than ranks are repeated."""
        if copies and self.size % n == 0:
            start = self.rank * n // self.size
            return slice(start, start + 1)
        step = -(-n // self.size)
        return slice(min(self.rank * step, n), min((self.rank + 1) * step, n))

    def all_reduce(self, x):
        """The sum over all ranks, in place where x is contiguous."""
        if self.size > 1:
            x = x.contiguous()
            self.call(dist.all_reduce, x)
        return x

    def all_gather(self, x):
        """Concatenate along the last axis in the order of the ranks."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self.call(dist.all_gather, parts, x.contiguous())
        return torch.cat(parts, -1)

    def broadcast(self, value):
        """Rank 0's value, on every rank: any object that pickles."""
        box = [value]
        if self.size > 1:
            self.call(dist.broadcast_object_list, box, 0)
        return box[0]

    def call(self, collective, *args):
        try:
            collective(*args, group=self.group)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:                   # its text is of the network's library: files, lines, addresses
            raise ConnectionError(f"rank {self.rank} of {self.size} lost the others, one of them ended") from error


def rank_device(device):
    """The device as given, but for "cuda" under torchrun: there each rank has a GPU of its own.

    It becomes the current one: streams and graphs belong to the current device."""
    device = torch.device(device)
    if device.type != "cuda" or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        return device
    if device.index is not None:
        raise ValueError(f"{device} is one GPU and several ranks ask for it; with torchrun the device is cuda")
    local, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= n:
        raise ValueError(f"local rank {local} has no GPU, there are {n} here: use --nproc-per-node {n}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def check_split(config, size):
    """Raise ValueError when `size` ranks cannot share the model."""
    for what, n, ok in (("query heads", config.n_heads, config.n_heads % size == 0),
                        ("feed-forward width", config.d_ff, config.d_ff % size == 0),
                        ("key/value heads", config.n_kv_heads,
                         config.n_kv_heads % size == 0 or size % config.n_kv_heads == 0)):
        if not ok:
            raise ValueError(f"{size} ranks cannot share {n} {what}; use a number of ranks that divides them")


class Ranks:
    """The processes that torchrun started: `replicas` copies of the model, each over `tp` of them."""

    def __init__(self, tp=1, device="auto"):
        whole = Shard.from_environment("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self.rank, self.size = whole.rank, whole.size
        if self.size % tp:
            raise ValueError(f"--tp {tp} does not divide the {self.size} ranks; "
                             + ("start them with torchrun --nproc-per-node" if self.size == 1 else "choose another"))
        self.replicas, self.replica, self.tp = self.size // tp, self.rank // tp, tp
        self.model_group, self.talk = None, whole
        if self.size > 1:
            groups = [dist.new_group(range(first, first + tp)) for first in range(0, self.size, tp)]
            self.model_group = groups[self.replica]
            # A batch may take a replica hours, and who waits for it knows from `watch` that it is alive.
            self.talk = Shard(self.rank, self.size, dist.new_group(backend="gloo", timeout=timedelta(days=30)))

    def shard(self):
        return Shard(self.rank % self.tp, self.tp, self.model_group)

    def share(self, work):
        """What rank 0's `work()` gives, on every rank; its error too."""
        return self.exchange(work if self.rank == 0 else lambda: None)[0]

    def gather(self, work):
        """The lists of every replica's `work()`, joined, on every rank."""
        return [one for part in self.exchange(work)[::self.tp] for one in part]

    def exchange(self, work):
        """Every rank's result. An error on one rank is raised on all: nobody waits for somebody who is gone."""
        if self.size == 1:
            return [work()]
        try:
            mine = work()
        except ConnectionError:                         # the others have it too
            raise
        except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
            mine = error
        results = [None] * self.size
        self.talk.call(dist.all_gather_object, results, mine)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


# ------------------------------------------------------------------------------------------------- meeting and watching

MINUTE = timedelta(minutes=1)
GRACE = 15                          # seconds in which a rank may notice by itself that another is gone
watched = []                        # one connection to each rank that this one watches


def join(backend):
    """Meet the other ranks and watch them from then on, until `leave`."""
    if dist.is_initialized():
        return
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=MINUTE))
        watch(store, rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=10 * MINUTE)
    except (RuntimeError, OSError) as error:
        raise ConnectionError(f"the ranks did not meet at {place} within a minute: start them together, with torchrun "
                              f"({str(error).splitlines()[0][:200]})") from None


def watch(store, rank, size):
    """End this process, with one line and status 2, soon after another rank has died, whatever this one is doing.

    Every rank holds a connection to rank 0, which the system closes when a process ends. So a rank may be as slow as it
    likes, and one that dies is noticed also by ranks that decode or wait on a GPU."""
    if rank == 0:
        with socket.create_server(("", 0)) as server:
            server.settimeout(MINUTE.total_seconds())
            store.set("watch", str(server.getsockname()[1]))
            watched.extend(server.accept()[0] for _ in range(size - 1))
    else:
        watched.append(socket.create_connection((os.environ["MASTER_ADDR"], int(store.get("watch"))),
                                                MINUTE.total_seconds()))
    for other in watched:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)         # for a machine that loses power
        for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                other.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        other.settimeout(None)
        threading.Thread(target=end_after, args=(other, rank, size), daemon=True).start()


def end_after(other, rank, size):
    try:
        said = other.recv(1)
    except OSError:
        said = b""
    if said:                                            # it left in good order
        return
    time.sleep(GRACE)
    print(f"{os.path.basename(sys.argv[0])}: " + f"rank {rank}: " * bool(rank)
          + f"error: rank {rank} of {size} lost the others, one of them ended", file=sys.__stderr__, flush=True)
    os._exit(2)


def leave():
    """This rank is done; the others need not end because of it."""
    while watched:
        try:
            watched.pop().send(b".")
        except OSError:                                 # the other one has gone already
            pass
    if dist.is_initialized():
        dist.destroy_process_group()                    # else its threads may abort a process that ends before another
