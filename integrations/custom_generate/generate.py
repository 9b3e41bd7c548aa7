"""DeCoRe (Gema et al. 2024) in `generate` of transformers, for its causal language models:

    model.generate(
        **inputs, custom_generate=FOLDER, trust_remote_code=True, heads=[(13, 18), (16, 1)]
    )

FOLDER is the one that contains `custom_generate/`. Only the logits change: they become the exponent
of Eq. 7, plus a constant that keeps their scale, on which logits processors depend. So processors,
sampling, streamers, stopping criteria and quantized weights work as without DeCoRe."""

import json
import math
import re
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import transformers

METHODS = {
    "decore-entropy": ("alpha_cap", "scale_alpha"),
    "decore-static": ("alpha", "alpha_cap"),
    "masked": (),
}
MEASURES = ("copy", "write", "mass")
KEY = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)")  # a head, layer-head
ATTENTION = ("self_attn", "self_attention", "attention", "attn")  # names of a layer's attention
OUTPUT = ("o_proj", "out_proj", "dense", "c_proj")  # names of its output projection
PER_TOKEN = ("input_ids", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids")
ALLOWED = dict(
    use_cache=(True,),
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
    measure="copy",
    method="decore-entropy",
    alpha=None,
    alpha_cap=None,
    scale_alpha=False,
    mask="output",
    **arguments,
):
    """As `model.generate(**arguments)`, with DeCoRe. Masking starts with the last prompt token.

    heads: (layer, head) pairs, "layer-head" texts, the path of a head file, or the name of a model
    in the project's `heads/` (by default this model's own name), if that is on Python's path.
    num_heads: how many of a file's best heads are masked; by default 10, at most an eighth of all.
    measure: "copy", "write" or "mass", the scores of the file that count. method: decore-entropy (α
    = H, Eq. 8), decore-static (α = alpha, 0.5) or masked (the masked model alone). alpha_cap: α =
    min(α, cap). scale_alpha: α = H / ln V. mask: "output" zeroes the heads' outputs (Eq. 5),
    "query" their queries (the published runs).

    With return_dict_in_generate=True the result also has `alphas`, α as applied, and `entropies`,
    H of the base model (for masked, of the masked one) in nats: [B, new tokens] each, float32."""
    known = dict(method=(*METHODS,), mask=("output", "query"), measure=MEASURES)
    for name, value in dict(method=method, mask=mask, measure=measure).items():
        if value not in known[name]:
            raise ValueError(f"{name} {value!r} is unknown; known: {', '.join(known[name])}")
    options = dict(alpha=alpha, alpha_cap=alpha_cap, scale_alpha=scale_alpha or None)
    for name, value in options.items():
        low = -1e9 if name == "alpha" else 0
        fits = isinstance(value, int | float) and low <= value < math.inf
        fits = fits and isinstance(value, bool) == (name == "scale_alpha")
        if value is not None and not (name in METHODS[method] and fits):
            raise ValueError(
                f"{name}={value!r} has no effect on {method}, or is not a finite number in its "
                "range"
            )
    if alpha is None:
        alpha = 0.5 if method == "decore-static" else 0
    if arguments.get("use_cache") is None:  # whatever the configuration says
        arguments["use_cache"] = True
    config, _ = model._prepare_generation_config(**{"generation_config": None} | arguments)
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in ("greedy_search", "sample") or model.config.is_encoder_decoder:
        raise ValueError(
            "DeCoRe needs a causal language model, and greedy search or sampling without an "
            "assistant"
        )
    for name, allowed in ALLOWED.items():
        value = arguments.get(name, getattr(config, name, None))
        if value not in allowed:
            raise ValueError(f"DeCoRe works only with {name}={allowed[0]}")

    alphas, entropies = [], []  # a tensor [B, 1] per new token

    def exponent(base, masked):
        """The logits of both models, [B, 1, V] each → those that `generate` sees."""
        log_p = base.log_softmax(-1)
        log_q = masked.log_softmax(-1)
        p = (log_q if method == "masked" else log_p).exp()
        h = torch.special.entr(p).sum(-1, keepdim=True)
        if method == "decore-entropy":
            a = h / math.log(p.shape[-1]) if scale_alpha else h  # Eq. 8
        else:
            a = torch.full_like(h, alpha)
        if alpha_cap is not None:
            a = a.clamp(max=alpha_cap)
        alphas.append(a[..., 0])
        entropies.append(h[..., 0])
        if method == "masked":
            return masked
        scores = base + a * (log_p - log_q)  # Eq. 7, up to a constant
        return scores.where(base > -math.inf, base)  # not −∞ − (−∞)

    chosen = choose_heads(model, heads, num_heads, measure)
    with contrasted(model, chosen, mask, exponent):
        out = type(model).generate(model, **arguments)
    if not isinstance(out, torch.Tensor):
        out.alphas = torch.cat(alphas, 1)
        out.entropies = torch.cat(entropies, 1)
    return out


@contextmanager
def contrasted(model, heads, mask, exponent):
    """Within this context the model's logits are `exponent` of those of base and masked model.

    They are those of each text's last token. heads: {layer: heads to mask}. The first pass reads
    all tokens but the last and doubles the cache: from then on each of B texts is two rows of a
    batch, base and masked. On leaving, the cache keeps the base rows."""
    forward = model.forward
    cache = None
    texts = 0
    masking = False
    called = set()  # layers whose heads were masked in this pass

    def silence(layer, H, K, module, args, *output):
        """Hook: heads side by side, [2·B, 1, H·K] → the same, with zeros in the masked rows."""
        (x,) = output or args
        if masking:
            if x.shape[-1] != H * K or layer in called:
                raise ValueError(
                    f"layer {layer} does not have {H} heads of {K} features side by side: "
                    "cannot mask"
                )
            called.add(layer)
            x = x.clone(memory_format=torch.contiguous_format)
            x.view(texts, 2, H, K)[:, 1, heads[layer]] = 0
        return x

    def check_cache():
        if cache is None or not cache.get_seq_length():
            raise ValueError(
                f"the cache does not reach the attention of {type(model).__name__} in "
                f"transformers {transformers.__version__}"
            )

    def prefill(inputs, last):
        """Read all tokens but the last, unmasked, and double the cache."""
        if any(getattr(cache, name, False) for name in ("is_compileable", "offloading", "nbits")):
            raise ValueError(f"DeCoRe needs a plain DynamicCache, not this {type(cache).__name__}")
        B, T = inputs["input_ids"].shape
        if T > 1:
            names = [*last, "attention_mask"]
            before = {n: inputs[n][..., :-1] for n in names if inputs.get(n) is not None}
            forward(**inputs | before)
            check_cache()
        cache.reorder_cache(torch.arange(B).repeat_interleave(2))

    @wraps(forward)  # generate looks at the signature
    def contrasting(*args, **inputs):
        nonlocal cache, texts, masking
        if args or texts and not any(x is cache for x in inputs.values()):
            return forward(*args, **inputs)  # somebody else's call, such as a logits processor's
        if inputs.get("input_ids") is None:
            raise ValueError("DeCoRe reads token ids; this model gets embeddings (prompt tuning?)")
        B = len(inputs["input_ids"])
        last = {n: x[..., -1:] for n, x in inputs.items() if n in PER_TOKEN and x is not None}
        if not texts:
            cache = inputs.get("cache", inputs.get("past_key_values"))  # before transformers 5.24
            prefill(inputs, last)
            texts = B
        step = inputs | last
        for name, x in step.items():
            if isinstance(x, torch.Tensor) and x.shape[-2:-1] == (B,):
                step[name] = x.repeat_interleave(2, -2)
        called.clear()
        masking = True
        out = forward(**step)
        masking = False
        check_cache()
        if called != heads.keys():
            layer = min(heads.keys() - called)
            raise ValueError(f"layer {layer} does not call its projection: cannot mask")
        logits = out.logits[:, -1:].float()  # [2·B, 1, V]
        out.logits = exponent(logits[0::2], logits[1::2])
        return out

    with ExitStack() as stack:  # undoes all of this on leaving
        for layer in heads:
            module, *shape = find_projection(model, layer, mask)
            add = module.register_forward_hook
            if mask == "output":
                add = module.register_forward_pre_hook
            stack.enter_context(add(partial(silence, layer, *shape)))
        stack.enter_context(patch.object(model, "forward", contrasting))
        stack.callback(lambda: texts and cache.reorder_cache(torch.arange(0, 2 * texts, 2)))
        yield


def find_projection(model, layer, mask):
    """The module that reads or writes a layer's H heads of width K side by side → (module, H, K).

    It reads them for mask "output", and writes them for "query"."""
    c = model.config.get_text_config()
    attention, module = attention_of_layer(model.get_decoder() or model, layer, c.num_hidden_layers)
    width = getattr(attention, "head_dim", None) or c.hidden_size // c.num_attention_heads
    K = getattr(attention, "v_head_dim", None) or width
    if module is not None and mask == "query":
        module = getattr(attention, "q_proj", None)
        for name, weight in attention.named_parameters():
            # A norm over all heads, or with a bias, mixes them again.
            if name.startswith("q") and "norm" in name:
                if weight.numel() > K or name.endswith("bias"):
                    module = None
    if module is None:
        raise ValueError(
            f'mask="{mask}" does not work with layer {layer} of {c.model_type}: no such projection'
        )
    return module, c.num_attention_heads, K


def attention_of_layer(decoder, layer, n_layers):
    """(attention, its output projection) of a layer; (None, None) if they have other names."""
    lists = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList)]
    stacks = [m for m in lists if len(m) == n_layers]
    for name, module in stacks[0][layer].named_modules() if stacks else ():
        if name.rpartition(".")[2] in ATTENTION:
            for output in OUTPUT:
                if hasattr(module, output):
                    return module, getattr(module, output)
    return None, None


def choose_heads(model, heads, num_heads, measure):
    """The `heads` of `generate` → {layer: [head, …]}."""
    c = model.config.get_text_config()
    L, H = c.num_hidden_layers, c.num_attention_heads
    known = {(layer, head) for layer in range(L) for head in range(H)}
    if heads is None or isinstance(heads, str | Path):
        path = find_file(heads or model.config.name_or_path)
        scores = read_scores(path, measure)
        n = min(10, max(1, L * H // 8)) if num_heads is None else num_heads
        if scores.keys() != known or n not in range(1, L * H + 1):
            raise ValueError(
                f"{path} has {len(scores)} heads, num_heads is {n}; the model has {L} layers of {H}"
            )
        pairs = sorted(scores, key=scores.get, reverse=True)[:n]  # equal ones as in the file
    elif num_heads is not None or measure != "copy":
        raise ValueError("num_heads and measure have no effect without a head file: leave them out")
    else:
        listed = heads if hasattr(heads, "__iter__") else [heads]
        names = ["-".join(map(str, x)) if isinstance(x, list | tuple) else str(x) for x in listed]
        pairs = [tuple(map(int, x.split("-"))) if KEY.fullmatch(x) else x for x in names]
    if not pairs or not known >= set(pairs) or len(set(pairs)) < len(pairs):
        raise ValueError(
            f"heads {str(heads)[:60]}: give a head file, or pairs from 0-0 to {L - 1}-{H - 1}, "
            "each once"
        )
    chosen = {}
    for layer, head in pairs:
        chosen.setdefault(layer, []).append(head)
    return chosen


def find_file(name):
    """The head file `name`, or that of the model of this name in the project's folder `heads/`."""
    path = Path(name)
    if not path.is_file():
        try:
            from heads import head_file  # the project's, if it is on Python's path

            path = head_file(name)
        except ImportError:
            path = None
    if path is None:
        raise ValueError(
            f"heads={name!r} is not a head file, nor a model of heads/ on Python's path: "
            "give pairs, or a file that heads.detect made"
        )
    return path


def read_scores(path, measure):
    """{(layer, head): score, the mean if there are several} of a head file, in its order."""
    scores = {}
    lengths = set()
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(content, dict):
            raise ValueError("it must contain a JSON object")
        field = "scores" if measure == "copy" else measure
        entries = content.get(field, content if measure == "copy" else None)
        if not isinstance(entries, dict) or not entries:
            raise ValueError(
                f'"{field}" must be an object with one entry "layer-head": score per head '
                "(python -m heads.detect measures it)"
            )
        for head, value in entries.items():
            values = value if isinstance(value, list) else [value]
            finite = all(type(v) in (int, float) and abs(v) < 1e9 for v in values)
            if not KEY.fullmatch(head) or not values or not finite:
                raise ValueError(
                    f'{head!r} must be a head, "layer-head" counted from 0, and its score a finite '
                    "number, or a list of one per sample"
                )
            lengths.add(len(values))
            scores[tuple(map(int, head.split("-")))] = float(np.mean(values))
        if len(lengths) > 1:
            raise ValueError(f"heads have {sorted(lengths)} samples, not one number of them")
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not a head file: {error}") from None
    return scores
