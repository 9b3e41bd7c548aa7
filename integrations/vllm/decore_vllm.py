"""DeCoRe (Gema et al. 2024) inside vLLM, as a plugin. One setting switches it on:

    vllm serve MODEL --additional-config '{"decore": {"heads": "heads/MODEL.json"}}'

Base and masked model are two rows of one pass. A pass over T tokens, of which M are masked, reads
T + M tokens: the masked ones a second time, at the end. Every attention layer has a twin under
another name. vLLM allocates the twin's cache and makes its metadata as for any other layer. The
twin's cache holds the keys and values of the masked model; those of tokens before the first masked
one are copies of the base model's. The model returns [T, 2·D], the hidden states of both, and
`compute_logits` turns them into the logits of Eq. 7.

T tokens of this pass   M masked tokens   n tokens whose logits are computed
L layers   H heads of this rank   K head width   D model width   V vocabulary"""

import copy
import json
import logging
import math
import re
from functools import partial, partialmethod
from importlib.metadata import requires
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Literal
from unittest.mock import patch

import numpy as np
import torch
from packaging.requirements import Requirement
from pydantic import (
    BaseModel,
    BeforeValidator,
    NonNegativeFloat,
    PositiveInt,
    StrictInt,
    ValidationError,
)

TESTED = Requirement(requires("decore-vllm")[0]).specifier  # versions of vLLM
UNUSED = {  # options that have no effect, by method
    "decore-entropy": {"alpha"},
    "decore-static": {"scale_alpha"},
    "masked": {"alpha", "alpha_cap", "scale_alpha"},
}
NEVER = 1 << 30
REFUSED = (  # settings and properties that would give other tokens, or none
    "parallel_config.pipeline_parallel_size",
    "parallel_config.data_parallel_size",
    "parallel_config.decode_context_parallel_size",
    "parallel_config.prefill_context_parallel_size",
    "parallel_config.use_ubatching",
    "parallel_config.enable_batch_sharded_sampling",
    "cache_config.kv_sharing_fast_prefill",
    "kv_transfer_config",
    "lora_config",
    "model_config.enable_prompt_embeds",
    "model_config.has_inner_state",
    "model_config.is_diffusion",
    "model_config.is_encoder_decoder",
    "model_config.pooler_config",
    "model_config.supports_multimodal_inputs",
    "model_config.use_mla",
)
# Fused with their neighbours, attention and the cache's update would bypass the twins.
FUSIONS = ("fuse_attn_quant", "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")

# ---------------------------------------------------------------------------------------- the model


def contrasting(cls):
    """A model's class → its subclass that reads masked tokens twice."""

    class Contrasting(cls):
        def __call__(self, *, input_ids, positions, **others):
            from vllm.forward_context import get_forward_context

            context = get_forward_context()
            context.is_padding = None  # it only saves work
            T = positions.shape[-1]
            # A CUDA graph has a fixed shape: it reads every token twice.
            if self.marked and context.cudagraph_runtime_mode.name == "NONE":
                self.rows = self.masked[:T].nonzero()[:, 0]
            else:
                self.rows = torch.arange(T, device=positions.device)
            self.marked = False
            hidden = super().__call__(
                input_ids=torch.cat([input_ids, input_ids[self.rows]]),
                positions=torch.cat([positions, positions[..., self.rows]], -1),
                **others,
            )
            self.width = hidden.shape[-1]
            return torch.cat(self.split(hidden), -1) if len(self.rows) else hidden

        def split(self, x):
            """[T + M, …] → [T, …] of the base and of the masked model."""
            if x is None or not len(self.rows):
                return x, x
            base, masked = x.split([len(x) - len(self.rows), len(self.rows)])
            return base, base.index_copy(0, self.rows, masked)

        def mark(self, starts, positions, offsets):
            """Set which tokens the next pass masks.

            starts: the position of each request's first masked token. positions [T or more].
            offsets: a request's tokens are those from offsets[i] to offsets[i + 1]."""
            lengths = offsets[: len(starts) + 1].diff()
            starts = torch.tensor(starts, device=offsets.device).repeat_interleave(lengths)  # [T]
            T = len(starts)
            self.masked[:T] = positions[:T] >= starts
            self.masked[T:] = False  # padding
            self.marked = True

        def compute_logits(self, hidden):
            halves = hidden.split(self.width, -1)
            logits = super().compute_logits(torch.cat(halves))  # the head's weights are read once
            if logits is None or len(halves) == 1:  # another rank gathers them; nothing is masked
                return logits
            return contrast(self.settings, *logits.float().chunk(2))

        def get_model_state_cls(self):
            """Model Runner V2 uses this class: prepare_inputs runs before every pass."""
            from vllm.v1.worker.gpu.model_states.default import DefaultModelState

            starts = {}

            class State(DefaultModelState):
                def add_request(self, i, request):
                    prompt = request.prompt_token_ids
                    starts[i] = first_masked(request.sampling_params, len(prompt))
                    super().add_request(i, request)

                def prepare_inputs(self, batch, requests):
                    batch_starts = [starts[i] for i in batch.idx_mapping_np]
                    self.model.mark(batch_starts, batch.positions, batch.query_start_loc)
                    return super().prepare_inputs(batch, requests)

            return State

    return Contrasting


def contrast(settings, base, masked):
    """Logits of both models, float32 [n, V] → those of Eq. 7, up to a constant per row.

    If both models agree these are the base model's, to the last bit."""
    if settings.method == "masked":
        return masked
    log_p = base.log_softmax(-1)
    alpha = torch.special.entr(log_p.exp()).sum(-1, keepdim=True)  # Eq. 8
    if settings.scale_alpha:
        alpha /= math.log(base.shape[-1])
    if settings.method == "decore-static":
        alpha.fill_(settings.alpha)
    if settings.alpha_cap is not None:
        alpha.clamp_(max=settings.alpha_cap)
    scores = base + alpha * (log_p - masked.log_softmax(-1))  # Eq. 7
    return scores.where(base > -math.inf, base)  # not −∞ − (−∞)


def switch(params):
    return (params.extra_args or {}).get("decore", True)


def first_masked(params, prompt_length):
    """The position of a request's first masked token.

    It is the prompt's last token, or the first if the prompt is scored (prompt_logprobs)."""
    if not switch(params):
        return NEVER
    scored = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    return 0 if scored else prompt_length - 1


def add_twins(model, config):
    """Make a model contrasting that was just constructed. ValueError if that cannot be."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models.utils import extract_layer_index

    compilation = config.compilation_config
    layers = compilation.static_forward_context
    c = config.model_config.hf_text_config
    H = c.num_attention_heads // config.parallel_config.tensor_parallel_size
    caching = [layer for layer in layers.values() if hasattr(layer, "get_kv_cache_spec")]
    shapes = [(extract_layer_index(layer.layer_name), layer.num_heads) for layer in caching]
    usual = [(number, H) for number in range(c.num_hidden_layers)]
    if shapes != usual or hasattr(model, "get_model_state_cls"):
        raise ValueError(f"DeCoRe cannot mask heads of {type(model).__name__}")

    N = config.scheduler_config.max_num_batched_tokens
    model.__class__ = contrasting(type(model))
    model.settings = Settings(**config.additional_config["decore"])
    model.masked = torch.ones(N, dtype=torch.bool)
    model.marked = False
    rank = get_tensor_model_parallel_rank()
    for number, layer in enumerate(caching):
        heads = [h % H for n, h in model.settings.heads if (n, h // H) == (number, rank)]
        twin = pair(layer, model, heads)
        layers[twin.layer_name] = twin
    if compilation.compile_ranges_endpoints:
        compilation.compile_ranges_endpoints.append(2 * N)


def pair(attention, model, heads):
    """Let an attention layer work for both models. Returns its twin.

    All of this happens inside vLLM's custom operators, so torch.compile sees its usual graph."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    impl = attention.impl
    forward = impl.forward
    update = impl.do_kv_cache_update
    twin = copy.copy(attention)
    twin.layer_name += ".masked"
    if twin.kv_sharing_target_layer_name:
        twin.kv_sharing_target_layer_name += ".masked"

    def silence(x):
        """Zero the heads of masked tokens in x [T, H, K]."""
        for h in heads:
            x[:, h].masked_fill_(model.masked[: len(x), None], 0)

    def forward_both(layer, q, k, v, cache, metadata, output, **kw):
        """q, output [T + M, H, K]; k, v likewise."""
        (q, q2), (k, k2), (v, v2) = map(model.split, (q, k, v))
        T = len(q)
        forward(layer, q, k, v, cache, metadata, output=output[:T], **kw)
        if not len(model.rows):
            return output
        metadata, _, cache, _ = get_attention_context(twin.layer_name)
        masked = torch.zeros_like(output[:T])
        if model.settings.mask == "query":
            silence(q2)
        # The twin attends from all T tokens: so its metadata is that of an ordinary layer.
        forward(layer, q2, k2, v2, cache, metadata, output=masked, **kw)
        if model.settings.mask == "output":
            silence(masked)
        output[T:] = masked[model.rows]
        return output

    def update_both(layer, k, v, cache, slots):
        (k, k2), (v, v2) = map(model.split, (k, v))
        update(layer, k, v, cache, slots)
        _, _, cache, slots = get_attention_context(twin.layer_name)
        update(layer, k2, v2, cache, slots)

    impl.forward = forward_both
    impl.do_kv_cache_update = update_both
    return twin


# ---------------------------------------------------------------------------------------- settings

KEY = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)")  # a head, layer-head


def as_pair(head):
    is_text = isinstance(head, str) and KEY.fullmatch(head)
    return tuple(map(int, head.split("-"))) if is_text else head


Head = Annotated[tuple[StrictInt, StrictInt], BeforeValidator(as_pair)]


class Settings(BaseModel, extra="forbid", allow_inf_nan=False):
    """The settings of custom_generate."""

    heads: str | list[Head] | None = None
    num_heads: PositiveInt | None = None
    measure: Literal["copy", "write", "mass"] = "copy"
    method: Literal[tuple(UNUSED)] = "decore-entropy"
    alpha: float = 0.5
    alpha_cap: NonNegativeFloat | None = None
    scale_alpha: bool = False
    mask: Literal["output", "query"] = "output"


def read_settings(value):
    """`Settings` of a JSON value. Raises ValueError, in one line."""
    try:
        return Settings.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[-1]
        name = ".".join(map(str, fault["loc"]))
        raise ValueError(f"decore {name}: {fault['msg']}") from None


def choose_heads(settings, model_config):
    """(layer, head) pairs of the settings; by default from the head file of the model's name."""
    L = model_config.hf_text_config.num_hidden_layers
    H = model_config.hf_text_config.num_attention_heads
    known = {(layer, head) for layer in range(L) for head in range(H)}
    heads = settings.heads
    n = settings.num_heads
    if not isinstance(heads, list):
        path = find_file(heads or model_config.model)
        scores = read_scores(path, settings.measure)
        n = n or min(10, max(1, L * H // 8))
        if scores.keys() != known or n > len(known):
            raise ValueError(
                f"decore: {path} has {len(scores)} heads, num_heads is {n}; the model has {L} "
                f"layers of {H}"
            )
        heads = sorted(scores, key=scores.get, reverse=True)[:n]  # equal ones as in the file
    elif n or settings.measure != "copy":
        raise ValueError(
            "decore: num_heads and measure have no effect without a head file: leave them out"
        )
    if not heads or sorted(known & set(heads)) != sorted(heads):
        raise ValueError(
            f"decore: heads {str(heads)[:60]}: give a head file, or pairs from 0-0 to "
            f"{L - 1}-{H - 1}, each once"
        )
    return heads


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
            f"decore: heads={name!r} is not a head file, nor a model of heads/ on Python's path: "
            "give the path of a file, or pairs"
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


# ------------------------------------------------------------------------------------------ plugin


def register():
    """Called by vLLM in each of its processes. Without the setting nothing changes."""
    from vllm import __version__

    replace("vllm.engine.arg_utils:EngineArgs", create_engine_config)
    if __version__ in TESTED:
        replace("vllm.v1.engine.input_processor:InputProcessor", process_inputs)
        replace("vllm.v1.engine.input_processor:InputProcessor", resolve_watermarking)
        replace("vllm.v1.engine.core:EngineCore", _initialize_kv_caches)
        replace("vllm.model_executor.model_loader.base_loader:BaseModelLoader", create_model)
        replace("vllm.v1.worker.gpu_model_runner:GPUModelRunner", _model_forward)


def replace(path, method):
    """Replace the method of this name of a class of vLLM. It gets the original too."""
    cls = resolve_name(path)
    name = method.__name__
    setattr(cls, name, partialmethod(method, getattr(cls, name)))


def is_on(config):
    return "decore" in (config.additional_config or {})


def create_engine_config(args, original, *more, **kw):
    """Check settings and engine before anything is loaded, and choose the heads."""
    from vllm import __version__

    config = original(args, *more, **kw)
    if not is_on(config):
        return config
    if __version__ not in TESTED:
        raise ValueError(f"decore-vllm works with vLLM {TESTED}, not {__version__}")
    wrong = [path for path in REFUSED if is_used(attrgetter(path)(config))]
    if config.speculative_config and config.speculative_config.method != "ngram":
        wrong.append("speculative_config other than ngram")
    if config.load_config.load_format in ("tensorizer", "ipc_cache", "modelexpress"):
        wrong.append("load_format")
    if wrong:
        raise ValueError(f"decore does not work with {', '.join(wrong)}: see docs/serving.md")
    settings = read_settings(config.additional_config["decore"])
    if unused := settings.model_fields_set & UNUSED[settings.method]:
        raise ValueError(f"decore: {', '.join(unused)} has no effect on {settings.method}")
    settings.heads = choose_heads(settings, config.model_config)
    config.additional_config = config.additional_config | {"decore": settings.model_dump()}
    for fusion in FUSIONS:
        setattr(config.compilation_config.pass_config, fusion, False)
    logging.getLogger("vllm.decore").info("DeCoRe: %s", settings)
    return config


def is_used(value):
    """Whether a value of REFUSED differs from its default: none, off, a size of 1."""
    return value > 1 if type(value) is int else bool(value)


def process_inputs(self, original, *args, **kw):
    if kw.get("resumable") and is_on(self.vllm_config):
        refuse("streamed inputs")  # each one makes the prompt longer
    return original(self, *args, **kw)


def resolve_watermarking(self, original, params):
    """vLLM calls this with the parameters of each request and of each beam search."""
    from vllm.sampling_params import BeamSearchParams

    if is_on(self.vllm_config):
        if isinstance(params, BeamSearchParams):
            refuse("beam search")  # each step sends the beams again, as prompts
        if switch(params) not in (True, False):
            refuse(f"decore={switch(params)!r} of a request (give false, 0, or leave it out)")
    return original(self, params)


def refuse(what):
    """Raise vLLM's error for a request, which a server answers with status 400."""
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(f"decore does not work with {what}: see docs/serving.md")


def _initialize_kv_caches(self, original, config):
    from vllm.v1.core import kv_cache_utils

    keys = kv_cache_utils.generate_block_hash_extra_keys
    if is_on(config):
        kv_cache_utils.generate_block_hash_extra_keys = partial(salt, keys)
    return original(self, config)


def salt(original, request, begin, end, *args):
    """Keys of a block's hash. Blocks with masked tokens fit requests masked from the same one."""
    keys, *rest = original(request, begin, end, *args)
    first = first_masked(request.sampling_params, request.num_prompt_tokens)
    if end > first:
        keys = (*(keys or ()), ("decore", first))
    return keys, *rest


def create_model(self, original, vllm_config, **kw):
    if not is_on(vllm_config):
        return original(self, vllm_config, **kw)
    scheduler = vllm_config.scheduler_config
    N = scheduler.max_num_batched_tokens
    with patch.object(scheduler, "max_num_batched_tokens", 2 * N):  # sizes of layers' buffers
        model = original(self, vllm_config, **kw)
    add_twins(model, vllm_config)
    return model


def _model_forward(self, original, *args, **kw):
    """Model Runner V1 runs this before every pass."""
    model = self.get_model()
    if hasattr(model, "mark"):
        requests = [self.requests[name] for name in self.input_batch.req_ids]
        starts = [first_masked(r.sampling_params, r.num_prompt_tokens) for r in requests]
        model.mark(starts, self.positions, self.query_start_loc.gpu)
    return original(self, *args, **kw)
