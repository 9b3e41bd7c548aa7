"""DeCoRe (Gema et al. 2024) in `generate` of transformers, for its causal language models:

    model.generate(
        **inputs, custom_generate=FOLDER, trust_remote_code=True, heads=[(13, 18), (16, 1)]
    )

FOLDER is the one that contains `custom_generate/`. Only the logits change: they become the exponent
of Eq. 7, plus a constant that keeps their scale, on which logits processors depend. So processors,
sampling, streamers, stopping criteria and quantized weights work as without DeCoRe.

    B texts   T tokens   V vocabulary   L layers   H heads"""

import copy
import inspect
import math
import re
from functools import partial, wraps
from itertools import product
from pathlib import Path

import torch
import transformers

from heads.reader import (
    HEAD,
    MEASURES,
    best_heads,
    find_file,
    listed_heads,
    plain_name,
    usual_number,
)
from hf.attention import (
    device_of,
    find_head_places,
    find_projections,
    masked_heads,
    without_training,
)
from hf.positions import position_problem, warn_of_casts
from runtime.errors import ArgumentError
from runtime.values import KNOWN, NUMBERS, check_name, check_number

METHODS = {  # the options that have an effect
    "decore-entropy": ("alpha_rule", "alpha_cap", "scale_alpha"),
    "decore-static": ("alpha", "alpha_cap"),
    "masked": (),
}
PUBLISHED = {}  # model → measure → its heads, best first: integrations/hub.py fills it in
CACHES = ("cache", "past_key_values")  # its argument, the latter before transformers 5.24
PER_TOKEN = ("input_ids", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids")
ALLOWED = dict(
    num_beams=(1, None),
    assistant_model=(None,),
    assistant_early_exit=(None,),
    use_mtp=(False, None),
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
    alpha_rule="entropy",
    alpha_cap=None,
    scale_alpha=False,
    mask="output",
    **arguments,
):
    """As `model.generate(**arguments)`, with DeCoRe. Masking starts with the last prompt token.

    heads: (layer, head) pairs, "layer-head" texts, the text "18-6,23-2", the path of a head file,
    or the name of a model whose heads are known (by default this model's own name). num_heads: how
    many of a file's best heads are masked; by default 10, at most an eighth of all. measure:
    "copy", "write", "mass" or "effect", the scores of the file that count. method: decore-entropy
    (α = H, Eq. 8), decore-static (a constant α) or masked (the masked model alone). alpha: α of
    decore-static, 0.5. alpha_rule: "entropy", or "gain" (α = H of the masked model − H, may be
    negative). alpha_cap: α = min(α, cap). scale_alpha: α / ln V. mask: "output" zeroes the heads'
    outputs (Eq. 5), "query" their queries (the published runs).

    With return_dict_in_generate=True the result also has `alphas`, α as applied, and `entropies`,
    H of the base model (for masked, of the masked one) in nats: [B, new tokens] each, float32."""
    check_name(method, "method", METHODS)
    check_name(measure, "measure", MEASURES)
    check_name(mask, "mask", KNOWN["mask"])
    check_name(alpha_rule, "alpha_rule", KNOWN["alpha_rule"])
    options = dict(
        alpha=alpha,
        alpha_rule=None if alpha_rule == "entropy" else alpha_rule,
        alpha_cap=alpha_cap,
        scale_alpha=scale_alpha or None,
    )
    check_options(method, options)
    if arguments.get("use_cache") is None:  # whatever the configuration says
        arguments["use_cache"] = True
    config = parse_arguments(model, arguments)
    model = without_training(model)
    warn_of_casts(model, type(model).__name__)
    places = find_head_places(model)
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    n_heads = max(a.heads for a in places.values())
    head_mask = torch.ones(2, n_layers, n_heads, device=device_of(model))
    for layer, head in choose_heads(model, head_mask, heads, num_heads, measure):
        head_mask[1, layer, head] = 0
    exponent = partial(contrast, method=method, **options)
    masking = find_projections(places, head_mask, mask), head_mask, mask
    rows = TwoRows(model, masking, exponent, config)
    try:
        out = type(model).generate(with_passes_of(rows), **arguments)
    finally:
        if rows.texts:
            rows.cache.reorder_cache(torch.arange(rows.texts))  # the cache keeps the base rows
    if not rows.steps:
        raise ValueError(f"{type(model).__name__} has a loop of its own: cannot contrast its texts")
    if not isinstance(out, torch.Tensor):
        new = out.sequences.shape[1] - rows.prompt
        for name, values in zip(("alphas", "entropies"), zip(*rows.steps[:new])):
            out[name] = torch.cat(values, 1)
    return out


def contrast(base, masked, method, alpha, alpha_rule, alpha_cap, scale_alpha):
    """The logits of both models, [B, T, V] each → those that `generate` sees, and α and H, [B, T].

    The options are None where they are as by default."""
    log_p = base.log_softmax(-1)
    log_q = masked.log_softmax(-1)
    if method == "masked":
        h = entropy(log_q)
        return masked, torch.zeros_like(h), h
    h = entropy(log_p)
    if method == "decore-static":
        a = torch.full_like(h, 0.5 if alpha is None else alpha)
    else:
        a = entropy(log_q) - h if alpha_rule else h  # Eq. 8
        a = a / math.log(base.shape[-1]) if scale_alpha else a
    if alpha_cap is not None:
        a = a.clamp(max=alpha_cap)
    scores = base + a[..., None] * (log_p - log_q)  # Eq. 7, up to a constant
    return scores.where(base > -math.inf, base), a, h  # not −∞ − (−∞)


def entropy(log_p):
    """In nats, over the last axis."""
    return torch.special.entr(log_p.exp()).sum(-1)


def check_options(method, options):
    """ValueError for an option that is not None but has no effect, or is out of range."""
    for name, value in options.items():
        if value is None:
            continue
        if name not in METHODS[method]:
            raise ArgumentError(name, f"has no effect on {method}")
        if name in NUMBERS:
            check_number(value, name, *NUMBERS[name])


def parse_arguments(model, arguments):
    """The generation configuration that the arguments of `model.generate` make. ValueError if
    DeCoRe cannot follow one."""
    config, _ = model._prepare_generation_config(**{"generation_config": None} | arguments)
    for name, allowed in ALLOWED.items():
        value = arguments.get(name, getattr(config, name, None))
        if value not in allowed:
            raise ValueError(f"DeCoRe works only with {name}={allowed[0]}")
    mode = config.get_generation_mode()
    known = ("greedy_search", "sample", "assisted_generation")  # the last: drafts from the text
    if mode not in known or model.config.is_encoder_decoder:
        raise ValueError(
            f"DeCoRe needs a causal language model, and greedy search or sampling, not {mode.value}"
        )
    return config


class TwoRows:
    """Base and masked model as two rows of each pass that `model.generate` prepares: texts 0 … B−1,
    then the same texts with masked heads.

    The logits are `exponent` of both rows', for each text's last T tokens: T is 1, or more with
    drafts. The first pass reads all tokens before them, and then doubles the cache. Passes of
    others, such as a logits processor's, stay as they are. masking: the arguments of
    `masked_heads`. config: of the generation."""

    def __init__(self, model, masking, exponent, config):
        self.model = model
        self.plain_forward = model.forward
        self.plain_prepare = model.prepare_inputs_for_generation
        self.masking = masking
        self.exponent = exponent
        self.config = config
        self.cache = None
        self.texts = 0  # B, from the first pass on
        self.steps = []  # (α, H), a tensor [B, 1] each, of each new token
        self.prompt = 0  # tokens of the prompts
        self.length = None  # of the texts and their drafts, if the next pass is of `generate`

    def prepare(self, ids, *args, **arguments):
        self.length = ids.shape[-1]
        return self.plain_prepare(ids, *args, **arguments)

    def forward(self, *args, **inputs):
        if self.length is None:
            return self.plain_forward(*args, **inputs)
        length, self.length = self.length, None
        if inputs.get("input_ids") is None:
            raise ValueError("DeCoRe reads token ids; this model gets embeddings (prompt tuning?)")
        B = len(inputs["input_ids"])
        T = inputs.get("logits_to_keep", 1)
        last = {n: x[..., -T:] for n, x in inputs.items() if n in PER_TOKEN and x is not None}
        if not self.texts:
            self.prefill(inputs, last, T)
            self.texts = B
            self.prompt = length - T + 1
        elif not any(inputs.get(name) is self.cache for name in CACHES):
            raise ValueError(
                f"{type(self.model).__name__} has replaced its cache while decoding: "
                "its texts can no longer be contrasted"
            )
        step = inputs | last
        for name, x in step.items():
            if isinstance(x, torch.Tensor) and x.shape[-2:-1] == (B,):
                step[name] = torch.cat([x, x], -2)
        with masked_heads(*self.masking):
            out = self.plain_forward(**step)
        self.check_cache()
        out.logits, *values = self.exponent(*out.logits[:, -T:].float().split(B))  # [B, T, V] each
        del self.steps[length - T + 1 - self.prompt :]  # those of drafts that were taken back
        self.steps += zip(*(x.split(1, 1) for x in values))
        return out

    def prefill(self, inputs, last, T):
        """Read all tokens but the last T, unmasked, and double the cache."""
        given = [name for name in CACHES if inputs.get(name) is not None]
        if not given:  # this model's `generate` drops caches of scaled positions
            given = [n for n in CACHES if n in inspect.signature(self.plain_forward).parameters]
            inputs[given[0]] = transformers.DynamicCache(config=self.model.config)
        self.cache = inputs[given[0]]
        flags = ("is_compileable", "offloading", "nbits")
        if any(getattr(self.cache, name, False) for name in flags):
            kind = type(self.cache).__name__
            raise ValueError(f"DeCoRe needs a plain DynamicCache, not this {kind}")
        self.check_lengths(inputs)
        B, length = inputs["input_ids"].shape
        if length > T:
            names = [*last, "attention_mask"]
            before = {n: inputs[n][..., :-T] for n in names if inputs.get(n) is not None}
            self.plain_forward(**inputs | before)
            self.check_cache()
        self.cache.reorder_cache(torch.arange(B).repeat(2))

    def check_cache(self):
        if not self.cache.get_seq_length():
            raise ValueError(
                f"the cache does not reach the attention of {type(self.model).__name__} in "
                f"transformers {transformers.__version__}"
            )

    def check_lengths(self, inputs):
        """ValueError if positions are scaled by length, and not alike in all passes."""
        B, T = inputs["input_ids"].shape
        past = self.cache.get_seq_length()
        seen = inputs.get("attention_mask")
        if seen is None:
            seen = torch.ones(B, past + T)
        lengths = seen.sum(-1).int().tolist()
        new = self.config.max_new_tokens
        if new is None:
            new = max(self.config.max_length - past - T, 20)  # 20 is the default of `generate`
        first = [n - T if past else n - 1 for n in lengths]
        last = [n + new - 1 for n in lengths]
        config = self.model.config.get_text_config(decoder=True)
        problem = position_problem(config, first, last, type(self.model).__name__)
        if problem:
            raise ValueError(problem)


def with_passes_of(rows):
    """A shallow copy of the model of `rows`, whose `generate` has their passes. The model itself
    stays as it is, so that other threads can run it."""
    view = copy.copy(rows.model)
    view.forward = as_function(rows.forward, rows.plain_forward)
    view.prepare_inputs_for_generation = as_function(rows.prepare, rows.plain_prepare)
    return view


def as_function(method, original):
    """The method with the signature of the original, which `generate` looks at."""
    return wraps(original)(lambda *args, **more: method(*args, **more))


def choose_heads(model, head_mask, heads, num_heads, measure):
    """The `heads` of `generate` → (layer, head) pairs. head_mask: [R, L, H] of the model."""
    _, L, H = head_mask.shape
    name = heads if isinstance(heads, str | Path) else None
    listed = listed_heads(name) or heads
    if heads is None or listed is name:
        n = usual_number(L, H) if num_heads is None else num_heads
        listed = rank_heads(name or model.config.name_or_path, L, H, measure)[: max(n, 0)]
        if len(listed) != n or n == 0:
            raise ValueError(f"num_heads is {n}; the model has {L} layers of {H} heads")
    elif num_heads is not None or measure != "copy":
        raise ValueError("num_heads and measure have no effect without a head file: leave them out")
    listed = listed if hasattr(listed, "__iter__") else [listed]
    names = ["-".join(map(str, x)) if isinstance(x, list | tuple) else str(x) for x in listed]
    pairs = [tuple(map(int, x.split("-"))) for x in names if re.fullmatch(HEAD, x)]
    known = set(product(range(L), range(H)))
    if not known >= set(pairs) or not len(set(pairs)) == len(names) > 0:
        raise ValueError(
            f"heads {str(heads)[:60]}: give a head file, or pairs from 0-0 to {L - 1}-{H - 1}, "
            "each once"
        )
    return pairs


def rank_heads(name, n_layers, n_heads, measure):
    """All heads of a head file, or of the model of this name, best first."""
    published = PUBLISHED.get(plain_name(name))
    if published is None or Path(name).is_file():
        return best_heads(find_file(name), n_layers, n_heads, None, measure)
    heads = published.get(measure, "").split()
    if len(heads) != n_layers * n_heads:
        raise ValueError(
            f"{len(heads)} {measure} scores of {name} are published here; the model has "
            f"{n_layers} layers of {n_heads} heads"
        )
    return heads
