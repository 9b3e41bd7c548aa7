"""DeCoRe (Gema et al. 2024) inside vLLM, as a plugin. One setting switches it on:

    vllm serve MODEL --additional-config '{"decore": {"heads": "heads/scores/MODEL.json"}}'

Base and masked model are two rows of one pass. A pass over T tokens, of which M are masked, reads
T + M tokens: the masked ones a second time, at the end. Every attention layer has a twin under
another name. vLLM allocates the twin's cache and makes its metadata as for any other layer. The
twin's cache holds the keys and values of the masked model; those of tokens before the first masked
one are copies of the base model's. The model returns the hidden states of both and, beside them,
the numbers of each token's request, [T, 2·D + …]; `compute_logits` turns a row of them into the
logits of Eq. 7.

T tokens of this pass   M masked tokens   n tokens whose logits are computed
L layers   H heads of this rank   K head width   D model width   V vocabulary"""

import copy
import json
import logging
import math
import re
from contextlib import suppress
from functools import lru_cache, partial, partialmethod
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Literal
from unittest.mock import patch

import torch
from decore_heads import HEAD, best_heads, find_file, listed_heads, usual_number
from packaging.specifiers import SpecifierSet
from pydantic import (
    BaseModel,
    BeforeValidator,
    NonNegativeFloat,
    PositiveInt,
    StrictInt,
    ValidationError,
)

ADMITTED = SpecifierSet(">=0.32,<0.34")  # versions of vLLM
RAN = "0.32"  # the tests ran with it; of the others the names below were read
UNUSED = {  # settings that have no effect, by method
    "decore-entropy": {"alpha"},
    "decore-static": {"alpha_rule", "scale_alpha"},
    "masked": {"alpha", "alpha_rule", "alpha_cap", "scale_alpha"},
}
OFF = ("decore", False)  # of a request
PER_REQUEST = {"heads", "method", "alpha", "alpha_rule", "alpha_cap", "scale_alpha"}
NEVER = 1 << 30

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
                self.rows = self.head_set[:T].nonzero()[:, 0]
            else:
                self.rows = torch.arange(T, device=positions.device)
            self.marked = False
            hidden = super().__call__(
                input_ids=torch.cat([input_ids, input_ids[self.rows]]),
                positions=torch.cat([positions, positions[..., self.rows]], -1),
                **others,
            )
            self.width = hidden.shape[-1]
            if not len(self.rows):
                return hidden
            # vLLM picks the rows whose logits it wants: so each carries its request's numbers.
            numbers = self.numbers[:T].view(hidden.dtype)
            return torch.cat([*self.split(hidden), numbers], -1)

        def split(self, x):
            """[T + M, …] → [T, …] of the base and of the masked model."""
            if x is None or not len(self.rows):
                return x, x
            base, masked = x.split([len(x) - len(self.rows), len(self.rows)])
            return base, base.index_copy(0, self.rows, masked)

        def mark(self, requests, positions, offsets):
            """Set how the next pass treats its tokens.

            requests: each one's `masking`. positions [T or more]. offsets: a request's tokens are
            those from offsets[i] to offsets[i + 1]."""
            sets = {}
            for settings, _ in requests:
                sets.setdefault(settings.heads, len(sets) + 1)
            if sets != self.sets:
                self.sets = sets
                for heads, number in sets.items():
                    self.silent[number] = self.silent_heads(heads)
            rows = [(first, sets[s.heads], *s.numbers()) for s, first in requests]
            rows = torch.tensor(rows, dtype=torch.float32, device=offsets.device)
            rows = rows.repeat_interleave(offsets[: len(rows) + 1].diff(), 0)  # a token's each
            T = len(rows)
            self.head_set[:T] = rows[:, 1] * (positions[:T] >= rows[:, 0])
            self.head_set[T:] = 0  # padding
            self.numbers[:T] = rows[:, 2:]
            self.kinds = {s.method for s, _ in requests} | {s.alpha_rule for s, _ in requests}
            self.marked = True

        def compute_logits(self, hidden):
            base, masked, numbers = hidden.tensor_split([self.width, 2 * self.width], -1)
            if not masked.numel():
                return super().compute_logits(hidden)
            logits = super().compute_logits(torch.cat([base, masked]))  # reads the weights once
            if logits is None:  # another rank gathers them
                return None
            numbers = numbers.contiguous().view(torch.float32)
            return contrast(numbers, self.kinds, *logits.float().chunk(2))

        def get_model_state_cls(self):
            """Model Runner V2 uses this class: prepare_inputs runs before every pass."""
            from vllm.v1.worker.gpu.model_states.default import DefaultModelState

            maskings = {}

            class State(DefaultModelState):
                def add_request(self, i, request):
                    length = len(request.prompt_token_ids)
                    maskings[i] = masking(self.model.settings, request.sampling_params, length)
                    super().add_request(i, request)

                def prepare_inputs(self, batch, requests):
                    batch_maskings = [maskings[i] for i in batch.idx_mapping_np]
                    self.model.mark(batch_maskings, batch.positions, batch.query_start_loc)
                    return super().prepare_inputs(batch, requests)

            return State

    return Contrasting


def contrast(numbers, kinds, base, masked):
    """Logits of both models, float32 [n, V] → those of Eq. 7, up to a constant per row.

    numbers: those of each row's settings, [n, 6]. kinds: methods and rules for α that the rows
    have. If both models agree the logits are the base model's, to the last bit."""
    only_masked, constant, of_base, of_masked, scale, cap = numbers.T[..., None]
    log_p = base.log_softmax(-1)
    log_p_masked = masked.log_softmax(-1)
    alpha = constant + of_base * entropy(log_p)  # Eq. 8
    if "gain" in kinds:
        alpha += of_masked * entropy(log_p_masked)
    alpha = torch.where(scale == 1, alpha / math.log(base.shape[-1]), alpha)
    scores = base + alpha.minimum(cap) * (log_p - log_p_masked)  # Eq. 7
    scores = scores.where(base > -math.inf, base)  # not −∞ − (−∞)
    return masked.where(only_masked == 1, scores) if "masked" in kinds else scores


def entropy(log_p):
    return torch.special.entr(log_p.exp()).sum(-1, keepdim=True)


def masking(engine, params, prompt_length):
    """A request's settings, and the position of its first masked token.

    It is the prompt's last token, or the first if the prompt is scored (prompt_logprobs)."""
    settings = request_settings(engine, params)
    if settings is None:
        return engine, NEVER
    scored = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    return settings, 0 if scored else prompt_length - 1


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
    bypassed = any(getattr(layer, "kv_cache_update_bypass", False) for layer in caching)
    if shapes != usual or bypassed or hasattr(model, "get_model_state_cls"):
        raise ValueError(f"DeCoRe cannot mask heads of {type(model).__name__}")

    N = config.scheduler_config.max_num_batched_tokens
    rank = get_tensor_model_parallel_rank()

    def silent_heads(heads):
        """[L, H] bool: which of this rank's heads are masked."""
        silent = torch.zeros(len(caching), H, dtype=torch.bool)
        for layer, head in heads:
            if head // H == rank:
                silent[layer, head % H] = True
        return silent

    model.__class__ = contrasting(type(model))
    model.settings = Settings(**config.additional_config["decore"])
    model.silent_heads = silent_heads
    model.sets = {model.settings.heads: 1}  # heads to mask → their number; 0 masks none
    silent = torch.zeros(config.scheduler_config.max_num_seqs + 1, len(caching), H).bool()
    silent[1] = silent_heads(model.settings.heads)
    numbers = torch.tensor(model.settings.numbers(), dtype=torch.float32)
    tensors = dict(
        silent=silent,
        head_set=torch.ones(N, dtype=torch.int64),  # of each token of the pass
        numbers=numbers.repeat(N, 1),  # likewise
    )
    for name, tensor in tensors.items():  # other tensors do not survive vLLM's sleep of level 2
        model.register_buffer(name, tensor, persistent=False)
    model.kinds = {model.settings.method, model.settings.alpha_rule}
    model.marked = False
    for number, layer in enumerate(caching):
        twin = pair(layer, model, number)
        layers[twin.layer_name] = twin
    if compilation.compile_ranges_endpoints:
        compilation.compile_ranges_endpoints.append(2 * N)


def pair(attention, model, number):
    """Let the attention layer of this number work for both models. Returns its twin.

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
        """Zero the masked heads of each token in x [T, H, K]."""
        x.masked_fill_(model.silent[model.head_set[: len(x)], number, :, None], 0)

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


def as_pair(head):
    is_text = isinstance(head, str) and re.fullmatch(HEAD, head)
    return tuple(map(int, head.split("-"))) if is_text else head


def as_list(heads):
    return isinstance(heads, str) and listed_heads(heads) or heads


Head = Annotated[tuple[StrictInt, StrictInt], BeforeValidator(as_pair)]


class Settings(BaseModel, extra="forbid", allow_inf_nan=False, frozen=True):
    """The settings of custom_generate."""

    heads: Annotated[str | tuple[Head, ...] | None, BeforeValidator(as_list)] = None
    num_heads: PositiveInt | None = None
    measure: Literal["copy", "write", "mass", "effect"] = "copy"
    method: Literal[tuple(UNUSED)] = "decore-entropy"
    alpha: float = 0.5
    alpha_rule: Literal["entropy", "gain"] = "entropy"
    alpha_cap: NonNegativeFloat | None = None
    scale_alpha: bool = False
    mask: Literal["output", "query"] = "output"

    def numbers(self):
        """The settings as `contrast` takes them."""
        if self.method == "decore-static":
            terms = self.alpha, 0, 0
        elif self.alpha_rule == "gain":
            terms = 0, -1, 1
        else:
            terms = 0, 1, 0
        cap = math.inf if self.alpha_cap is None else self.alpha_cap
        return float(self.method == "masked"), *terms, self.scale_alpha, cap


def read_settings(value, names):
    """`Settings` of a JSON value whose fields are `names`. Raises ValueError, in one line."""
    try:
        settings = Settings.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[-1]
        name = ".".join(map(str, fault["loc"]))
        raise ValueError(f"decore {name}: {fault['msg']}") from None
    if unused := UNUSED[settings.method] & set(names):
        raise ValueError(f"decore: {', '.join(sorted(unused))} has no effect on {settings.method}")
    return settings


def request_settings(engine, params):
    """The settings of a request: the engine's, with changes from its `extra_args`. None without
    DeCoRe. Raises ValueError, in one line."""
    given = {k: v for k, v in (params.extra_args or {}).items() if k.startswith("decore")}
    return changed(engine, json.dumps(given, default=repr)) if given else engine


@lru_cache(1000)
def changed(engine, text):
    """Settings with the changes of a request, a text in JSON."""
    given = json.loads(text)
    on = given.pop("decore", True)
    changes = {name.removeprefix("decore_"): value for name, value in given.items()}
    if on not in (True, False):
        raise ValueError(f"decore={on!r} of a request: give false, 0, or leave it out")
    if unknown := changes.keys() - PER_REQUEST:
        raise ValueError(
            f"decore: a request cannot set {', '.join(sorted(unknown))}, only "
            f"{', '.join(sorted(PER_REQUEST))}, each after decore_"
        )
    if not on:
        if changes:
            raise ValueError(f"decore: {', '.join(changes)} has no effect on decore=false")
        return None
    heads = changes.get("heads", [])
    if not isinstance(heads, list) and not re.fullmatch(f"{HEAD}(,{HEAD})*", str(heads)):
        raise ValueError("decore: heads of a request must be pairs, such as 16-1,15-30")
    return read_settings(engine.model_dump() | changes, changes)


def choose_heads(settings, model_config):
    """(layer, head) pairs of the settings; by default from the head file of the model's name."""
    c = model_config.hf_text_config
    L, H = c.num_hidden_layers, c.num_attention_heads
    if not isinstance(settings.heads, tuple):
        path = find_file(settings.heads or model_config.model)
        n = settings.num_heads or usual_number(L, H)
        return tuple(best_heads(path, L, H, n, settings.measure))
    if settings.num_heads or settings.measure != "copy":
        raise ValueError(
            "decore: num_heads and measure have no effect without a head file: leave them out"
        )
    check_heads(settings.heads, model_config)
    return settings.heads


def check_heads(heads, model_config):
    """ValueError if heads are not different heads of the model."""
    c = model_config.hf_text_config
    L, H = c.num_hidden_layers, c.num_attention_heads
    known = all(0 <= layer < L and 0 <= head < H for layer, head in heads)
    if not heads or not known or len(set(heads)) < len(heads):
        raise ValueError(
            f"decore: heads {str(heads)[:60]}: give a head file, or pairs from 0-0 to "
            f"{L - 1}-{H - 1}, each once"
        )


# ------------------------------------------------------------------------------------------ plugin


def register():
    """Called by vLLM in each of its processes. Without the setting nothing changes."""
    from vllm import __version__

    replace("vllm.engine.arg_utils:EngineArgs", create_engine_config)
    if __version__ in ADMITTED:
        with suppress(ImportError, AttributeError):  # create_engine_config says what moved
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


REFUSED = (  # settings and properties that would give other tokens, or none
    "parallel_config.pipeline_parallel_size",
    "parallel_config.data_parallel_size",
    "parallel_config.decode_context_parallel_size",
    "parallel_config.prefill_context_parallel_size",
    "parallel_config.use_ubatching",
    "parallel_config.enable_batch_sharded_sampling",
    "cache_config.kv_sharing_fast_prefill",
    "kv_events_config",  # names blocks without our part of their keys
    "kv_transfer_config",
    "lora_config",
    "aux_output_config.enable_return_routed_experts",
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
# Names of vLLM that this plugin replaces, calls or reads, by file; those of REFUSED come on top.
NAMES = {
    "config/compilation": "compile_ranges_endpoints pass_config static_forward_context "
    + " ".join(FUSIONS),
    "config/load": "load_format",
    "config/model": "hf_text_config model",
    "config/parallel": "tensor_parallel_size",
    "config/scheduler": "max_num_batched_tokens max_num_seqs",
    "config/speculative": "method",
    "config/vllm": "additional_config load_config speculative_config",
    "distributed/parallel_state": "get_tensor_model_parallel_rank",
    "engine/arg_utils": "EngineArgs create_engine_config",
    "exceptions": "VLLMValidationError",
    "forward_context": "get_forward_context cudagraph_runtime_mode is_padding",
    "model_executor/layers/attention/attention": "Attention get_attention_context "
    "get_kv_cache_spec impl kv_sharing_target_layer_name layer_name num_heads",
    "model_executor/model_loader/base_loader": "BaseModelLoader create_model vllm_config",
    "model_executor/models/utils": "extract_layer_index",
    "sampling_params": "BeamSearchParams extra_args prompt_logprobs prompt_logprob_token_ids",
    "v1/attention/backend": "do_kv_cache_update",
    "v1/core/kv_cache_utils": "generate_block_hash_extra_keys",
    "v1/core/sched/output": "NewRequestData prompt_token_ids sampling_params",
    "v1/engine/core": "EngineCore _initialize_kv_caches",
    "v1/engine/input_processor": "InputProcessor process_inputs resolve_watermarking resumable",
    "v1/request": "num_prompt_tokens sampling_params",
    "v1/worker/gpu/input_batch": "idx_mapping_np positions query_start_loc",
    "v1/worker/gpu/model_states/__init__": "model.get_model_state_cls",
    "v1/worker/gpu/model_states/default": "DefaultModelState add_request prepare_inputs model",
    "v1/worker/gpu_input_batch": "CachedRequestState num_prompt_tokens sampling_params req_ids",
    "v1/worker/gpu_model_runner": "GPUModelRunner _model_forward get_model input_batch positions "
    "query_start_loc requests",
}


def moved(package):
    """Those of NAMES and REFUSED that vLLM's sources do not define, as "file: name".

    package: the folder vllm, also in a wheel (zipfile.Path)."""
    wanted = {file: names.split() for file, names in NAMES.items()}
    for path in REFUSED:
        owner, _, name = path.rpartition(".")
        wanted.setdefault(f"config/{owner.removesuffix('_config') or 'vllm'}", []).append(name)
    missing = []
    for file, names in wanted.items():
        source = package / f"{file}.py"
        text = source.read_text() if source.is_file() else ""
        for name in names:
            if not re.search(rf"^\s*(class |def |return |self\.)?{name}\b *[(:=]", text, re.M):
                missing.append(f"{file}: {name}")
    return missing


def is_on(config):
    return "decore" in (config.additional_config or {})


def create_engine_config(args, original, *more, **kw):
    """Check settings and engine before anything is loaded, and choose the heads."""
    import vllm

    config = original(args, *more, **kw)
    if not is_on(config):
        return config
    if vllm.__version__ not in ADMITTED:
        raise ValueError(f"decore-vllm works with vLLM {ADMITTED}, not {vllm.__version__}")
    if names := moved(Path(vllm.__file__).parent):
        raise ValueError(
            f"decore-vllm needs names that vLLM {vllm.__version__} does not have: use vLLM {RAN} "
            f"({', '.join(names)})"
        )
    wrong = [path for path in REFUSED if is_used(attrgetter(path)(config))]
    if config.speculative_config and config.speculative_config.method != "ngram":
        wrong.append("speculative_config other than ngram")
    if config.load_config.load_format in ("tensorizer", "ipc_cache", "modelexpress"):
        wrong.append("load_format")
    if wrong:
        raise ValueError(f"decore does not work with {', '.join(wrong)}: see docs/serving.md")
    value = config.additional_config["decore"]
    settings = read_settings(value, value)
    settings = settings.model_copy(update={"heads": choose_heads(settings, config.model_config)})
    config.additional_config = config.additional_config | {"decore": settings.model_dump()}
    for fusion in FUSIONS:
        setattr(config.compilation_config.pass_config, fusion, False)
    log = logging.getLogger("vllm.decore")
    log.info("DeCoRe: %s", settings)
    if not vllm.__version__.startswith(f"{RAN}."):
        log.warning("decore-vllm was tested with vLLM %s, not %s", RAN, vllm.__version__)
    return config


def is_used(value):
    """Whether a value of REFUSED differs from its default: none, off, a size of 1."""
    return value > 1 if type(value) is int else bool(value)


def process_inputs(self, original, *args, **kw):
    if kw.get("resumable") and is_on(self.vllm_config):
        # Each input makes the prompt longer.
        refuse("decore does not work with streamed inputs: see docs/serving.md")
    return original(self, *args, **kw)


def resolve_watermarking(self, original, params):
    """vLLM calls this with the parameters of each request and of each beam search."""
    from vllm.sampling_params import BeamSearchParams

    if not is_on(self.vllm_config):
        given = getattr(params, "extra_args", None) or {}
        wanted = [k for k, v in given.items() if k.startswith("decore") and (k, v) != OFF]
        if wanted:
            refuse(f"decore: the engine was started without it: {wanted[0]} has no effect")
    if is_on(self.vllm_config):
        if isinstance(params, BeamSearchParams):
            # Each step sends the beams again, as prompts.
            refuse("decore does not work with beam search: see docs/serving.md")
        try:
            engine = Settings(**self.vllm_config.additional_config["decore"])
            settings = request_settings(engine, params)
            if settings not in (None, engine):
                check_heads(settings.heads, self.vllm_config.model_config)
        except ValueError as error:
            refuse(str(error))
    return original(self, params)


def refuse(why):
    """Raise vLLM's error for a request, which a server answers with status 400."""
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(why)


def _initialize_kv_caches(self, original, config):
    from vllm.v1.core import kv_cache_utils

    keys = kv_cache_utils.generate_block_hash_extra_keys
    if is_on(config):
        engine = Settings(**config.additional_config["decore"])
        kv_cache_utils.generate_block_hash_extra_keys = partial(salt, keys, engine)
    return original(self, config)


def salt(original, engine, request, begin, end, *args):
    """Keys of a block's hash. Blocks with masked tokens fit requests that mask the same heads from
    the same token on."""
    keys, *rest = original(request, begin, end, *args)
    settings, first = masking(engine, request.sampling_params, request.num_prompt_tokens)
    if end > first:
        keys = (*(keys or ()), ("decore", first, settings.heads))
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
        maskings = [
            masking(model.settings, r.sampling_params, r.num_prompt_tokens) for r in requests
        ]
        model.mark(maskings, self.positions, self.query_start_loc.gpu)
    return original(self, *args, **kw)
