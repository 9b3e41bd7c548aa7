"""Memory and traffic of each rank of a tensor-parallel model, counted on its tensors, and the speed that follows.

    python -m benchmarks.plan [--shape 70b] [--prompt 8192] [--new 256] [--bandwidth 2.35e12] [--call 15e-6]

For each number of ranks, rank 0 takes one step of DeCoRe on the "meta" device, in a fake process group. A token takes
bytes / bandwidth + all-reduces × the time of one."""

import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import cli
from benchmarks.measure import read_weights, size, weights
from benchmarks.shapes import SHAPES, spread_heads
from decore import make_head_mask
from model import Cache, Transformer
from runtime.parallel import Shard

RANKS = (1, 2, 4, 8, 16)


def plan(config, ranks, prompt, new):
    """Bytes of rank 0: the weights, the cache of the prompt and of the new tokens, and the bytes read for a token.

    Also the number of all-reduces in a step, and the bytes of the largest."""
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    model, calls = Transformer(config, Shard(0, ranks), "meta", torch.bfloat16), []
    all_reduce, model.shard.all_reduce = model.shard.all_reduce, lambda x: calls.append(x.nbytes) or all_reduce(x)
    cache = Cache(model, [prompt], new, rows=2)
    mask = make_head_mask([[], spread_heads(config)], model).to("meta", torch.bfloat16)
    model(torch.zeros(1, 1, dtype=torch.long, device="meta"), cache, mask)
    if ranks > 1:
        dist.destroy_process_group()
    prompt_cache = size(kv[..., :cache.P, :] for kv in cache.kv)
    return dict(weights=weights(model), prompt=prompt_cache, new=size(cache.kv) - prompt_cache,
                read=read_weights(model) + size(cache.kv), calls=len(calls) if ranks > 1 else 0, largest=max(calls))


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("--shape", default="70b", choices=list(SHAPES))
    p.add_argument("--prompt", type=cli.positive, default=8192, help="tokens of the prompt")
    p.add_argument("--new", type=cli.positive, default=256, help="new tokens")
    p.add_argument("--bandwidth", type=float, default=2.35e12, help="bytes per second: 70 %% of 3.35e12")
    p.add_argument("--call", type=float, default=15e-6, help="seconds of one small all-reduce")
    args = p.parse_args()
    print("| ranks | weights | prompt cache | new tokens | all-reduces, largest | read per token | tokens/s |")
    print("| --- " * 7 + "|")
    for ranks in RANKS:
        r = plan(SHAPES[args.shape], ranks, args.prompt, args.new)
        seconds = r["read"] / args.bandwidth + r["calls"] * args.call
        calls = f"{r['calls']} x {r['largest'] / 1024:.0f} KiB" if ranks > 1 else "none"
        print(f"| {ranks} | {r['weights'] / 1e9:.2f} GB | {r['prompt'] / 1e9:.2f} GB | {r['new'] / 1e6:.0f} MB "
              f"| {calls} | {r['read'] / 1e9:.1f} GB | {1 / seconds:.0f} |")


if __name__ == "__main__":
    sys.exit(cli.run(main))
