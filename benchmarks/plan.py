"""Memory and traffic of each rank of a tensor-parallel model, counted on its tensors, and the speed that follows.

    python -m benchmarks.plan [--shape 70b] [--prompt 8192] [--new 256] [--bandwidth 2.35e12] [--call 15e-6]

For each number of ranks, rank 0 takes one step of DeCoRe on the "meta" device, without the others. A token takes
bytes / bandwidth + all-reduces × the time of one."""

import sys

import torch
import torch.distributed as dist

import cli
from benchmarks.shapes import SHAPES, size, spread_heads, weight_bytes, weight_bytes_read
from decore import make_head_mask
from model import Cache, Transformer
from runtime.parallel import Shard


def plan(config, ranks, prompt, new):
    """Bytes of rank 0: the weights, the cache of the prompt and of the new tokens, and the bytes read for a token.

    Also the bytes of each all-reduce in a step."""
    model, calls = Transformer(config, Shard(0, ranks), "meta", torch.bfloat16), []
    model.shard.call = lambda collective, x, *_, **__: calls.append((collective, x.nbytes))
    cache = Cache(model, [prompt], new, rows=2)
    mask = make_head_mask([[], spread_heads(config)], model).to("meta", torch.bfloat16)
    model(torch.zeros(1, 1, dtype=torch.long, device="meta"), cache, mask)
    prompt_cache = size(kv[..., :cache.P, :] for kv in cache.kv)
    return dict(weights=weight_bytes(model), prompt=prompt_cache, new=size(cache.kv) - prompt_cache,
                read=weight_bytes_read(model) + size(cache.kv),
                all_reduces=[n for collective, n in calls if collective is dist.all_reduce])


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
    for ranks in (1, 2, 4, 8, 16):
        r = plan(SHAPES[args.shape], ranks, args.prompt, args.new)
        calls = r["all_reduces"]
        seconds = r["read"] / args.bandwidth + len(calls) * args.call
        print(f"| {ranks} | {r['weights'] / 1e9:.2f} GB | {r['prompt'] / 1e9:.2f} GB | {r['new'] / 1e6:.0f} MB "
              f"| {f'{len(calls)} x {max(calls) / 1024:.0f} KiB' if calls else 'none'} | {r['read'] / 1e9:.1f} GB "
              f"| {1 / seconds:.0f} |")


if __name__ == "__main__":
    sys.exit(cli.run(main))
