"""What each rank of a tensor-parallel model holds and reads for a token, counted on its tensors; speed follows.

    python -m benchmarks.plan [--shape 70b] [--prompt 8192] [--new 256] [--bandwidth 2.35e12] [--call 15e-6]

For each number of ranks, rank 0's share takes one step of DeCoRe on the "meta" device, in a fake process group. A token
takes bytes / bandwidth + all-reduces × the time of one. The last line counts operations, views left out, that start a
kernel on a GPU."""

import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import cli
from benchmarks.measure import read_weights, size, weights
from benchmarks.shapes import find_shape, spread_heads
from decore import make_head_mask
from model import Cache, Transformer
from runtime.parallel import Shard
from runtime.weights import weight_table

FREE = ("_unsafe_view", "empty", "new_empty", "empty_like", "detach")


class Kernels(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function._opname not in FREE:
            self.count[function._opname] += 1
        return function(*args, **kwargs or {})


def share(config, ranks, prompt, new, rows=2):
    """Bytes of rank 0: weights, those that all ranks have, cache of the prompt and of new tokens, read for a token.

    Also the all-reduces of a step, the bytes of the largest, and the kernels of a step divided by the layers."""
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    model, calls = Transformer(config, Shard(0, ranks), "meta", torch.bfloat16), []
    all_reduce, model.shard.all_reduce = model.shard.all_reduce, lambda x: calls.append(size([x])) or all_reduce(x)
    cache = Cache(model, [prompt], new, rows)
    mask = make_head_mask([[], spread_heads(config)][:rows], model).to("meta", torch.bfloat16)
    with Kernels() as kernels:
        model(torch.zeros(1, 1, dtype=torch.long, device="meta"), cache, mask if rows > 1 else None)
    if ranks > 1:
        dist.destroy_process_group()
    whole = [name for name, pieces in weight_table(config, model.shard).items() if not any(cut for *_, cut in pieces)]
    of_prompt = size(kv[..., :cache.P, :] for kv in cache.kv)
    return dict(weights=weights(model), replicated=size(map(model.get_parameter, whole)), prompt=of_prompt,
                new=size(cache.kv) - of_prompt, calls=len(calls) if ranks > 1 else 0, largest=max(calls),
                read=read_weights(model) + size(cache.kv), kernels=kernels.count.total() / config.n_layers)


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--shape", default="70b")
    p.add_argument("--prompt", type=cli.positive, default=8192)
    p.add_argument("--new", type=cli.positive, default=256)
    p.add_argument("--bandwidth", type=float, default=2.35e12, help="bytes per second: 70 %% of 3.35e12")
    p.add_argument("--call", type=float, default=15e-6, help="seconds of one small all-reduce")
    p.add_argument("--ranks", type=cli.positive, nargs="+", default=[1, 2, 4, 8, 16])
    args = p.parse_args()
    config = find_shape(args.shape)
    print("| ranks | weights | replicated | prompt cache | new tokens | all-reduces, largest | read per token "
          "| tokens/s |")
    print("| --- " * 8 + "|")
    for ranks in args.ranks:
        s = share(config, ranks, args.prompt, args.new)
        seconds = s["read"] / args.bandwidth + s["calls"] * args.call
        calls = f"{s['calls']} x {s['largest'] / 1024:.0f} KiB" if s["calls"] else "none"
        print(f"| {ranks} | {s['weights'] / 1e9:.2f} GB | {s['replicated'] / 1e6:.1f} MB | {s['prompt'] / 1e9:.2f} GB "
              f"| {s['new'] / 1e6:.0f} MB | {calls} | {s['read'] / 1e9:.1f} GB | {1 / seconds:.0f} |")
    greedy, decore = (share(config, 1, args.prompt, args.new, rows)["kernels"] for rows in (1, 2))
    print(f"\nkernels of a step, divided by the layers: {greedy:.1f} for greedy, {decore:.1f} for DeCoRe")


if __name__ == "__main__":
    sys.exit(cli.run(main))
