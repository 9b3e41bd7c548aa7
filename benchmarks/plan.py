"""What each rank of a tensor-parallel model holds and reads for a token, from the tensors themselves; speed from that.

    python -m benchmarks.plan [--shape 70b] [--prompt 8192] [--new 256] [--bandwidth 2.35e12] [--call 15e-6]

Every size builds rank 0's share on the "meta" device under a process group that pretends, and takes one step of DeCoRe.
The bytes are those of the tensors that exist then. A token takes bytes / bandwidth + all-reduces x the time of a call.
"""


import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import cli
from benchmarks.measure import cached, read_weights, size, weights
from benchmarks.shapes import find_shape, spread_heads
from decore import make_head_mask
from model import Transformer
from runtime.parallel import Shard
from runtime.weights import weight_table


class Bare(Transformer):
    """Weights without values, masks and caches with: a CPU gives memory only when it is written to."""

    device = torch.device("cpu")


def bare(x):
    """The same without values."""
    if isinstance(x, dict):
        return {key: bare(value) for key, value in x.items()}
    if isinstance(x, list):
        return [bare(value) for value in x]
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def share(config, ranks, prompt, new):
    """Bytes of rank 0: weights, those that all ranks have, prompt cache, suffix, read for a token; and all-reduces."""
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    model = Bare(config, Shard(0, ranks), "meta", torch.bfloat16)
    calls = []
    all_reduce, model.shard.all_reduce = model.shard.all_reduce, lambda x: calls.append(size([x])) or all_reduce(x)
    masks = model.layer_masks(make_head_mask([[], spread_heads(config)], model))
    cache = model.cache(torch.tensor([prompt]), new, masks)
    kept, of_prompt = cached([cache]), size(kv[..., :prompt, :] for kv in cache.kv)
    vars(cache).update(bare(vars(cache)))
    model(torch.zeros(1, 1, dtype=torch.long, device="meta"), cache, bare(masks))
    if ranks > 1:
        dist.destroy_process_group()
    whole = [name for name, pieces in weight_table(config, model.shard).items() if not any(cut for *_, cut in pieces)]
    return dict(weights=weights(model), replicated=size(map(model.get_parameter, whole)), prompt=of_prompt,
                suffix=kept - of_prompt, calls=len(calls) if ranks > 1 else 0, largest=max(calls),
                read=read_weights(model) + kept)


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.split("\n")[0])
    p.add_argument("--shape", default="70b")
    p.add_argument("--prompt", type=int, default=8192)
    p.add_argument("--new", type=int, default=256)
    p.add_argument("--bandwidth", type=float, default=2.35e12, help="bytes per second: 70 %% of 3.35e12")
    p.add_argument("--call", type=float, default=15e-6, help="seconds of one small all-reduce")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args = p.parse_args()
    print("| ranks | weights | replicated | prompt cache | suffix | all-reduces, largest | read a token | tokens/s |")
    print("| --- " * 8 + "|")
    for ranks in args.ranks:
        s = share(find_shape(args.shape), ranks, args.prompt, args.new)
        seconds = s["read"] / args.bandwidth + s["calls"] * args.call
        calls = f"{s['calls']} x {s['largest'] / 1024:.0f} KiB" if s["calls"] else "none"
        print(f"| {ranks} | {s['weights'] / 1e9:.2f} GB | {s['replicated'] / 1e6:.1f} MB | {s['prompt'] / 1e9:.2f} GB "
              f"| {s['suffix'] / 1e6:.0f} MB | {calls} | {s['read'] / 1e9:.1f} GB | {1 / seconds:.0f} |")


if __name__ == "__main__":
    sys.exit(cli.run(main))
