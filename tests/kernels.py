"""Counts the operations of a decoding step that would start a kernel on a GPU, on "meta", where nothing is computed.

    python -m tests.kernels          per layer of Llama-3-8B, for greedy decoding and for DeCoRe with its ten best heads

RMSNorm counts as one: on CUDA it is one kernel. Views and allocations count as none, copies as one each. What is done
once a step, not once a layer, is left out: rotary angles and `Decoding.see`."""

from collections import Counter
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decore import make_head_mask
from heads import load_heads
from model import Cache, Decoding, Transformer, key_rows
from runtime.config import Config

LLAMA = dict(model_type="llama", vocab_size=128_256, d_model=4096, d_ff=14_336, n_layers=32, n_heads=32, n_kv_heads=8,
             head_dim=128, norm_eps=1e-5, rope_theta=5e5, rope_scaling=None, qkv_bias=False, o_bias=False,
             qk_norm=False, tied_embeddings=False, windows=(None,) * 32, max_positions=8192, dtype=torch.bfloat16)
FREE = ("_unsafe_view", "empty", "new_empty", "empty_like", "detach")


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function._opname not in FREE:
            self.count[function._opname] += 1
        return function(*args, **kwargs or {})


def bare(x):
    """The same without values: on "meta"."""
    if isinstance(x, dict):
        return {key: bare(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [bare(y) for y in x]
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def per_layer(silent):
    """Kernels of each layer of Llama-3-8B in one step for one prompt. silent: for each row its heads."""
    model = Transformer(Config(**LLAMA), device="meta", dtype=torch.bfloat16).requires_grad_(False)
    masks = model.layer_masks(make_head_mask(silent, model))
    cache = Cache(torch.tensor([512]), 64, key_rows(masks), 8, 128, torch.bfloat16)
    vars(cache).update(bare(vars(cache)))
    counts, mode = [], Kernels()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: mode.count.clear())
        layer.register_forward_hook(lambda *_: counts.append(sum(mode.count.values())))
    see = Decoding.see

    def uncounted(*args):
        before = mode.count.copy()
        bias = see(*args)
        mode.count = before
        return bias

    with (patch("torch.nn.functional.rms_norm", lambda x, *_: torch.zeros_like(x)),
          patch.object(Decoding, "see", uncounted), torch.no_grad(), mode):
        model(torch.zeros(1, 1, dtype=torch.long, device="meta"), cache, masks)
    return counts


def best_heads():
    return load_heads("Meta-Llama-3-8B", 32, 32)[:10]


if __name__ == "__main__":
    for name, silent in (("greedy", [[]]), ("DeCoRe", [[], best_heads()])):
        counts = per_layer(silent)
        print(f"{name:7} {sum(counts) / len(counts):5.2f} kernels a layer on average, {max(counts)} at most: {counts}")
