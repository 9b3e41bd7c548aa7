"""DeCoRe (Gema et al. 2024) in `generate` of transformers, for its causal language models:

    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True, heads=[(13, 18), (16, 1)])

FOLDER is the one that contains `custom_generate/`. Only the logits change: they become the exponent of Eq. 7.
So sampling, streamers, stopping criteria, logits processors and quantized weights work as without DeCoRe."""

import json
import math
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

METHODS = {
    "decore-entropy": ("alpha_cap", "scale_alpha"),
    "decore-static": ("alpha", "alpha_cap"),
    "masked": (),
}
ATTENTION = ("self_attn", "self_attention", "attention", "attn")  # names of a layer's attention
OUTPUT = ("o_proj", "out_proj", "dense", "c_proj")  # names of its output projection
PER_TOKEN = ("input_ids", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids")
ALLOWED = dict(
    use_cache=(True, None),
    cache_implementation=(None, "dynamic"),
    prefill_chunk_size=(None,),
    guidance_scale=(None, 1),
    inputs_embeds=(None,),
    synced_gpus=(False, None),
    output_attentions=(False, None),
    output_hidden_states=(False, None),
)


def generate(
    model,
    *,
    heads=None,
    num_heads=None,
    method="decore-entropy",
    alpha=None,
    alpha_cap=None,
    scale_alpha=False,
    mask="output",
    **arguments,
):
    """As `model.generate(**arguments)`, with DeCoRe. Masking starts with the last prompt token.

    heads: (layer, head) pairs, "layer-head" texts, or the path of a head file, of which the best num_heads (10) are
    masked. method: decore-entropy (α = H, Eq. 8), decore-static (α = alpha, 0.5) or masked (the masked model alone).
    alpha_cap: α = min(α, cap). scale_alpha: α = H / ln V. mask: "output" zeroes the heads' outputs (Eq. 5), "query"
    their queries (the published runs)."""
    if method not in METHODS or mask not in ("output", "query"):
        raise ValueError(
            f"method {method!r}, mask {mask!r}: known are {', '.join(METHODS)}; output, query"
        )
    for name, value in dict(
        alpha=alpha, alpha_cap=alpha_cap, scale_alpha=scale_alpha or None
    ).items():
        valid = (
            isinstance(value, int | float)
            and abs(value) < math.inf
            and (name == "alpha" or value >= 0)
        )
        if value is not None and not (valid and name in METHODS[method]):
            raise ValueError(
                f"{name}={value!r} has no effect on {method}, or is not a finite number in its range"
            )
    config, _ = model._prepare_generation_config(**{"generation_config": None} | arguments)
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in ("greedy_search", "sample") or model.config.is_encoder_decoder:
        raise ValueError(
            "DeCoRe needs a causal language model, and greedy search or sampling without an assistant"
        )
    for name, allowed in ALLOWED.items():
        value = arguments.get(name, getattr(config, name, None))
        if value not in allowed:
            raise ValueError(f"DeCoRe works only with {name}={allowed[0]}")

    def exponent(base, masked):
        """Log-probabilities of both models, [B, 1, V] each → the logits that `generate` sees."""
        h = -(base.exp() * base).sum(-1, keepdim=True)  # Eq. 8
        a = h / math.log(base.shape[-1]) if scale_alpha else h
        a = torch.full_like(h, 0.5 if alpha is None else alpha) if method == "decore-static" else a
        a = a if alpha_cap is None else a.clamp(max=alpha_cap)
        return masked if method == "masked" else (1 + a) * base - a * masked  # Eq. 7

    with contrasted(model, choose_heads(model, heads, num_heads), mask, exponent):
        return type(model).generate(model, **arguments)


@contextmanager
def contrasted(model, heads, mask, exponent):
    """Within this context the model's logits are `exponent` of base and masked model, for the last token of each text.

    heads: {layer: heads to mask}. The first pass reads all tokens but the last and doubles the cache: from then on each
    of B texts is two rows of a batch, base and masked. On leaving, the cache keeps the base rows."""
    forward, cache, texts, masking, called = model.forward, None, 0, False, set()

    def silence(layer, H, K, module, args, *output):
        """Hook: heads side by side, [2·B, 1, H·K] → the same with zeros for those that the masked rows lose."""
        (x,) = output or args
        if masking:
            if x.shape[-1] != H * K or layer in called:
                raise ValueError(
                    f"layer {layer} does not have {H} heads of {K} features side by side: cannot mask"
                )
            called.add(layer)
            x = x.clone(memory_format=torch.contiguous_format)
            x.view(texts, 2, H, K)[:, 1, heads[layer]] = 0
        return x

    @wraps(forward)  # generate looks at the signature
    def contrasting(*args, **inputs):
        nonlocal cache, texts, masking
        if args or texts and inputs.get("past_key_values") is not cache:
            return forward(*args, **inputs)  # somebody else's call, such as a logits processor's
        B, T = inputs["input_ids"].shape
        last = {
            name: x[..., -1:] for name, x in inputs.items() if name in PER_TOKEN and x is not None
        }
        if not texts:
            cache = inputs.get("past_key_values")
            if any(
                getattr(cache, name, False) for name in ("is_compileable", "offloading", "nbits")
            ):
                raise ValueError(
                    f"DeCoRe needs a plain DynamicCache, not this {type(cache).__name__}"
                )
            if T > 1:
                names = [name for name in (*last, "attention_mask") if inputs.get(name) is not None]
                cache = forward(
                    **inputs | {name: inputs[name][..., :-1] for name in names}
                ).past_key_values
            cache.reorder_cache(torch.arange(B).repeat_interleave(2))
            texts = B
        twice = {
            name: x.repeat_interleave(2, -2)
            for name, x in (inputs | last).items()
            if isinstance(x, torch.Tensor) and x.shape[-2:-1] == (B,)
        }
        called.clear()
        masking = True
        out = forward(**inputs | last | twice | dict(past_key_values=cache))
        masking, cache = False, out.past_key_values
        if called != heads.keys():
            raise ValueError(
                f"layer {min(heads.keys() - called)} does not call its projection: cannot mask"
            )
        out.logits = exponent(
            *out.logits[:, -1:].float().log_softmax(-1).unflatten(0, (B, 2)).unbind(1)
        )
        return out

    with ExitStack() as stack:  # undoes all of this on leaving
        for layer in heads:
            module, *shape = find_projection(model, layer, mask)
            add = (
                module.register_forward_pre_hook
                if mask == "output"
                else module.register_forward_hook
            )
            stack.enter_context(add(partial(silence, layer, *shape)))
        stack.enter_context(patch.object(model, "forward", contrasting))
        stack.callback(lambda: texts and cache.reorder_cache(torch.arange(0, 2 * texts, 2)))
        yield


def find_projection(model, layer, mask):
    """The module whose input ("output") or output ("query") is a layer's heads side by side → (module, H, K)."""
    c, modules = model.config.get_text_config(), (model.get_decoder() or model.base_model).modules()
    layers = [
        m for m in modules if isinstance(m, torch.nn.ModuleList) and len(m) == c.num_hidden_layers
    ]
    named = layers[0][layer].named_modules() if layers else ()
    found = [
        (m, getattr(m, output))
        for name, m in named
        for output in OUTPUT
        if name.rpartition(".")[2] in ATTENTION and hasattr(m, output)
    ]
    attention, module = found[0] if found else (None, None)
    width = getattr(attention, "head_dim", None) or c.hidden_size // c.num_attention_heads
    K = getattr(attention, "v_head_dim", None) or width
    if found and mask == "query":  # a norm over all heads, or with a bias, mixes them again
        norms = [
            (name, p)
            for name, p in attention.named_parameters()
            if name.startswith("q") and "norm" in name
        ]
        mixed = any(p.numel() > K or name.endswith("bias") for name, p in norms)
        module = None if mixed else getattr(attention, "q_proj", None)
    if module is None:
        raise ValueError(
            f'mask="{mask}" does not work with layer {layer} of {c.model_type}: no such projection'
        )
    return module, c.num_attention_heads, K


def choose_heads(model, heads, num_heads):
    """Pairs, texts or the best heads of a file → {layer: [head, …]}."""
    c = model.config.get_text_config()
    L, H, chosen = c.num_hidden_layers, c.num_attention_heads, {}
    known = {f"{layer}-{head}" for layer in range(L) for head in range(H)}
    if isinstance(heads, str | Path):
        content, n = json.loads(Path(heads).read_text()), 10 if num_heads is None else num_heads
        scores = {head: np.mean(score) for head, score in content.get("scores", content).items()}
        if scores.keys() != known or not 1 <= n <= L * H:
            raise ValueError(
                f"{heads} has {len(scores)} heads, num_heads is {n}; the model has {L} layers of {H}"
            )
        heads = sorted(scores, key=scores.get, reverse=True)[
            :n
        ]  # equal ones in the order of the file
    elif num_heads is not None:
        raise ValueError("num_heads has no effect without a head file: leave it out")
    names = ["-".join(map(str, x)) if isinstance(x, list | tuple) else str(x) for x in heads or ()]
    if not names or not known >= set(names) or len(set(names)) < len(names):
        raise ValueError(
            f"heads {str(heads)[:60]}: give a head file, or pairs from 0-0 to {L - 1}-{H - 1}, each once"
        )
    for layer, head in (map(int, name.split("-")) for name in names):
        chosen.setdefault(layer, []).append(head)
    return chosen
