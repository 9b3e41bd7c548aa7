"""DeCoRe (Gema et al. 2024) inside vLLM, as a plugin. After pip install, a setting switches it on:

    vllm serve MODEL --additional-config '{"decore": {"heads": "heads/MODEL.json"}}'

As in `model.py`, base and masked model are two rows of one pass. A pass over T tokens, of which M
are masked, reads T + M: the masked ones a second time, at the end. Every attention layer has a
twin under another name, for which vLLM allocates a cache and makes metadata as for any layer. The
twin's cache holds the keys and values of the masked model, which are the base model's before the
first masked token. The model returns [T, 2·D], both models' states side by side, of which
`compute_logits` makes the logits of Eq. 7. Schedulers, samplers and servers do not notice.

T tokens of this pass   M of them masked   H, K heads of this rank, their width   V vocabulary"""

import copy
import importlib.util
import logging
import math
from functools import wraps
from importlib.metadata import requires
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal
from unittest.mock import patch

import torch
from packaging.requirements import Requirement
from pydantic import (
    BaseModel,
    BeforeValidator,
    FiniteFloat,
    Json,
    NonNegativeFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

METHODS = {
    "decore-entropy": {"alpha_cap", "scale_alpha"},
    "decore-static": {"alpha", "alpha_cap"},
    "masked": set(),
}
OPTIONS = {"alpha", "alpha_cap", "scale_alpha"}
NEVER = 1 << 30
TESTED = Requirement(requires("decore-vllm")[0]).specifier  # versions of vLLM

logger = logging.getLogger("vllm.decore")

# ---------------------------------------------------------------------------------------- the model


def contrasting(cls):
    """A model's class → its subclass with a masked row for every masked token."""

    class Contrasting(cls):
        def __call__(
            self,
            input_ids=None,
            positions=None,
            intermediate_tensors=None,
            inputs_embeds=None,
            **more,
        ):
            from vllm.config import CUDAGraphMode
            from vllm.forward_context import get_forward_context

            if inputs_embeds is not None or any(torch.is_tensor(x) for x in more.values()):
                raise ValueError(f"DeCoRe does not know the model's inputs {', '.join(more)}")
            context = get_forward_context()
            T = positions.shape[-1]
            # CUDA graphs have fixed shapes: there, all tokens are read twice.
            if self.marked and context.cudagraph_runtime_mode == CUDAGraphMode.NONE:
                self.rows = self.masked[:T].nonzero()[:, 0]
            else:
                self.rows = torch.arange(T, device=positions.device)
            self.marked = False
            context.is_padding = self.read_twice("is_padding", context.is_padding)
            hidden = super().__call__(
                input_ids=self.read_twice("input_ids", input_ids),
                positions=self.read_twice("positions", positions),
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=None,
                **more,
            )
            self.width = hidden.shape[-1]
            return torch.cat(self.split(hidden), -1) if len(self.rows) else hidden

        def read_twice(self, name, x):
            """[…, T] → [..., T + M], at an address that stays, as CUDA graphs need it."""
            if x is None:
                return None
            out = torch.cat([x, x[..., self.rows]], -1)
            if name not in self.inputs:
                self.inputs[name] = x.new_empty(*x.shape[:-1], 2 * len(self.masked))
            return self.inputs[name][..., : out.shape[-1]].copy_(out)

        def split(self, x):
            """[T + M, …] → base and masked model, [T, …] each: the same for unmasked tokens."""
            if not len(self.rows):
                return x, x
            base, masked = x.split([len(x) - len(self.rows), len(self.rows)])
            return base, base.index_copy(0, self.rows, masked)

        def mark(self, positions, starts, ends):
            """Say which tokens the next pass masks.

            positions [T]. starts, ends [requests]: the position of a request's first masked token,
            and the end of its tokens in this pass."""
            T = len(positions)
            tokens = torch.arange(T, device=ends.device, dtype=ends.dtype)
            request = torch.searchsorted(ends, tokens, right=True)
            self.masked[:T] = positions >= starts[request]
            self.masked[T:] = False
            self.marked = True

        def compute_logits(self, hidden, *args, **kw):
            halves = hidden.split(self.width, -1)
            logits = super().compute_logits(torch.cat(halves), *args, **kw)  # reads the head once
            if logits is None or len(halves) == 1:  # gathered on another rank; nothing masked
                return logits
            return contrast(self.settings, *logits.float().chunk(2))

        def get_model_state_cls(self):
            """Model Runner V2 makes this class its own, and calls prepare_inputs before a pass."""
            from vllm.v1.worker.gpu.model_states.default import DefaultModelState

            class State(DefaultModelState):
                def add_request(self, i, request):
                    if not hasattr(self, "starts"):
                        self.starts = torch.zeros(
                            self.max_num_reqs, dtype=torch.int64, device=self.device
                        )
                    self.starts[i] = first_masked(
                        request.sampling_params, len(request.prompt_token_ids)
                    )
                    super().add_request(i, request)

                def prepare_inputs(self, batch, requests):
                    n = batch.num_reqs
                    self.model.mark(
                        batch.positions[: batch.num_tokens],
                        self.starts[batch.idx_mapping[:n]],
                        batch.query_start_loc[1 : n + 1],
                    )
                    return super().prepare_inputs(batch, requests)

            return State

    Contrasting.__name__ = cls.__name__
    return Contrasting


def contrast(settings, base, masked):
    """Logits of both models, float32 [n, V] → those of Eq. 7, up to a constant per row.

    Where both models agree they are the base model's, to the last bit."""
    if settings.method == "masked":
        return masked
    log_p = base.log_softmax(-1)
    alpha = torch.special.entr(log_p.exp()).sum(-1, keepdim=True)  # Eq. 8
    if settings.scale_alpha:
        alpha /= math.log(base.shape[-1])
    if settings.method == "decore-static":
        alpha = torch.full_like(alpha, settings.alpha)
    if settings.alpha_cap is not None:
        alpha = alpha.clamp(max=settings.alpha_cap)
    return base + alpha * (log_p - masked.log_softmax(-1))  # Eq. 7


def first_masked(params, prompt_length):
    """The position of a request's first masked token: the last of the prompt.

    Scored prompts (prompt_logprobs) are masked from the first token on."""
    if not (params.extra_args or {}).get("decore", True):
        return NEVER
    scored = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    return 0 if scored else prompt_length - 1


def add_twins(model, vllm_config):
    """Swap the class of a model that was just constructed, and give its attention layers twins."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    compilation = vllm_config.compilation_config
    layers = compilation.static_forward_context
    H_model = vllm_config.model_config.hf_text_config.num_attention_heads
    settings = Settings(**vllm_config.additional_config["decore"])
    attentions = {}
    for name, layer in layers.items():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        number = extract_layer_index(name)
        H = getattr(layer, "num_heads", 0)
        plain = isinstance(layer, Attention) and layer.attn_type == "decoder"
        if (
            not plain
            or layer.attn_backend.forward_includes_kv_cache_update
            or H * get_tensor_model_parallel_world_size() != H_model
            or number in attentions
        ):
            raise ValueError(f"DeCoRe cannot mask heads of {name}, {type(layer).__name__}")
        attentions[number] = layer
    if (
        hasattr(model, "get_model_state_cls")
        or not attentions.keys() >= dict(settings.heads).keys()
    ):
        raise ValueError(f"DeCoRe does not work with {type(model).__name__}")

    N = vllm_config.scheduler_config.max_num_batched_tokens
    model.__class__ = contrasting(type(model))
    model.settings = settings
    model.inputs = {}
    model.masked = torch.ones(N, dtype=torch.bool, device=vllm_config.device_config.device)
    model.marked = False
    for number, layer in attentions.items():
        first = get_tensor_model_parallel_rank() * layer.num_heads
        heads = [h - first for n, h in settings.heads if n == number]
        twin = pair(layer, model, [h for h in heads if 0 <= h < layer.num_heads])
        layers[twin.layer_name] = twin
    if compilation.compile_ranges_endpoints:
        compilation.compile_ranges_endpoints = [*compilation.compile_ranges_endpoints, 2 * N]


def pair(attention, model, heads):
    """Let an attention layer serve base and masked model → its twin, with the masked one's cache.

    All of this happens inside custom operators of vLLM, so torch.compile sees the usual graph."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    impl = attention.impl
    forward = impl.forward
    update = impl.do_kv_cache_update
    twin = copy.copy(attention)
    twin.layer_name += ".masked"
    if twin.kv_sharing_target_layer_name:
        twin.kv_sharing_target_layer_name += ".masked"

    def silence(x):
        """Zero the heads [T, H, K] of masked tokens."""
        for h in heads:
            x[:, h].masked_fill_(model.masked[: len(x), None], 0)

    def forward_both(layer, q, k, v, cache, metadata, output, **kw):
        """q, output [T + M, H, K]. The twin attends from all T tokens, with metadata for T."""
        (q, q2), (k, k2), (v, v2) = [(x, x) if x is None else model.split(x) for x in (q, k, v)]
        forward(layer, q, k, v, cache, metadata, output=output[: len(q)], **kw)
        if not len(model.rows):
            return output
        metadata, _, cache, _ = get_attention_context(twin.layer_name)
        output2 = torch.zeros_like(output[: len(q)])
        if model.settings.mask == "query":
            silence(q2)
        forward(layer, q2, k2, v2, cache, metadata, output=output2, **kw)
        if model.settings.mask == "output":
            silence(output2)
        output[len(q) :] = output2[model.rows]
        return output

    def update_both(layer, k, v, cache, slots):
        (k, k2), (v, v2) = model.split(k), model.split(v)
        update(layer, k, v, cache, slots)
        _, _, cache, slots = get_attention_context(twin.layer_name)
        update(layer, k2, v2, cache, slots)

    impl.forward = forward_both
    impl.do_kv_cache_update = update_both
    return twin


# ------------------------------------------------------------------------------- settings, refusals

Head = Annotated[
    tuple[int, int], BeforeValidator(lambda x: x.split("-") if isinstance(x, str) else x)
]
Scores = Annotated[list[FiniteFloat], BeforeValidator(lambda x: x if isinstance(x, list) else [x])]


class Settings(BaseModel, extra="forbid", allow_inf_nan=False):
    """The settings, named and checked as those of custom_generate."""

    heads: str | list[Head] | None = None
    num_heads: PositiveInt | None = None
    method: Literal[tuple(METHODS)] = "decore-entropy"
    alpha: FiniteFloat = 0.5
    alpha_cap: NonNegativeFloat | None = None
    scale_alpha: bool = False
    mask: Literal["output", "query"] = "output"

    @model_validator(mode="after")
    def check(self):
        unused = self.model_fields_set & OPTIONS - METHODS[self.method]
        if unused:
            raise ValueError(f"{', '.join(unused)} has no effect on {self.method}")
        return self


def validate(schema, value, source):
    """The value as a pydantic type; its fault as a ValueError of one line."""
    try:
        return TypeAdapter(schema).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[-1]
        where = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{source}: {where} {fault['msg']}, not {fault['input']!r}") from None


def configure(config):
    """Check settings and engine before anything is loaded, and store the heads that were chosen."""
    import vllm

    if not tested():
        raise ValueError(f"DeCoRe works with vllm{TESTED}, not {vllm.__version__}")
    check_engine(config)
    settings = validate(Settings, config.additional_config["decore"], "decore")
    name = config.model_config.model
    c = config.model_config.hf_text_config
    heads = choose_heads(settings, name, c.num_hidden_layers, c.num_attention_heads)
    config.additional_config["decore"] = settings.model_dump(
        exclude_unset=True, exclude={"num_heads"}
    ) | {"heads": heads}
    # Fused with their neighbours, writing the cache and attention would pass by the twins.
    for fusion in ("fuse_attn_quant", "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"):
        setattr(config.compilation_config.pass_config, fusion, False)
    logger.info("DeCoRe: %s, %d heads of %s", settings.method, len(heads), name)


def tested():
    import vllm

    return TESTED.contains(vllm.__version__, prereleases=True)


def check_engine(config):
    """ValueError for settings of vLLM that would give other tokens, or none."""
    parallel = config.parallel_config
    model = config.model_config
    speculation = config.speculative_config
    contexts = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    formats = "tensorizer", "ipc_cache", "modelexpress"
    refused = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": max(contexts) > 1,
        "microbatches": parallel.use_ubatching,
        "batch-sharded sampling": parallel.enable_batch_sharded_sampling,
        "speculation other than ngram": speculation and speculation.method != "ngram",
        "LoRA": config.lora_config,
        "KV transfer": config.kv_transfer_config,
        "prompt embeddings": model.enable_prompt_embeds,
        "pooling": model.runner_type != "generate",
        "encoder-decoders": model.is_encoder_decoder,
        "multi-head latent attention": model.use_mla,
        "Mamba": model.has_inner_state,
        "diffusion": model.is_diffusion,
        "fast prefill": config.cache_config.kv_sharing_fast_prefill,
        "multimodal inputs (set limit_mm_per_prompt to 0)": model.supports_multimodal_inputs,
        "load_format": config.load_config.load_format in formats,
    }
    if wrong := [name for name, value in refused.items() if value]:
        raise ValueError(f"DeCoRe does not work with {', '.join(wrong)}")


def choose_heads(settings, name, L, H):
    """The heads of the settings as (layer, head) pairs; without any, those of the model's name."""
    known = {(layer, head) for layer in range(L) for head in range(H)}
    heads = settings.heads
    if heads is None or isinstance(heads, str):
        path = find_file(heads or name)
        scores = read_scores(path)
        n = settings.num_heads or min(10, max(1, L * H // 8))
        if scores.keys() != known or n > len(known):
            raise ValueError(
                f"decore: {path} has {len(scores)} heads, num_heads is {n}; "
                f"the model has {L} layers of {H}"
            )
        return sorted(scores, key=scores.get, reverse=True)[:n]  # equal ones as in the file
    if settings.num_heads:
        raise ValueError("decore: num_heads has no effect without a head file: leave it out")
    if not heads or not known >= set(heads) or len(set(heads)) < len(heads):
        raise ValueError(
            f"decore: heads {str(heads)[:60]}: give a head file, or pairs from 0-0 to "
            f"{L - 1}-{H - 1}, each once"
        )
    return heads


def find_file(name):
    """The head file `name`, or that of the model of this name in the project's folder `heads/`."""
    if Path(name).is_file():
        return Path(name)
    project = importlib.util.find_spec("heads")
    for folder in project.submodule_search_locations if project else ():
        for path in Path(folder).glob("*.json"):
            if plain_name(path.stem) == plain_name(name):
                return path
    raise ValueError(
        f"decore: heads={name!r} is not a head file, nor a model of heads/ on Python's path: give "
        "the file's path, or pairs"
    )


def plain_name(model):
    """A model's name without owner, case, "Meta-" and "-hf", in which names of one model differ."""
    return Path(model).name.lower().removeprefix("meta-").removesuffix("-hf")


def read_scores(path):
    """{(layer, head): score, the mean if there are several} of a head file, in its order."""
    content = validate(Json[dict], path.read_text(encoding="utf-8"), path)
    scores = validate(dict[Head, Scores], content.get("scores", content), path)
    if len({len(several) for several in scores.values()}) > 1:
        raise ValueError(f"{path}: heads have lists of different lengths; make the file again")
    return {head: fmean(several) for head, several in scores.items()}


# ------------------------------------------------------------------------------------------ plugin


def register():
    """Called by vLLM in each of its processes. Without the setting nothing changes."""
    from vllm.engine.arg_utils import EngineArgs

    around(EngineArgs, "create_engine_config", configured)
    if not tested():
        return
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    around(InputProcessor, "_validate_params", validated)
    around(EngineCore, "__init__", salted)
    around(BaseModelLoader, "create_model", contrasted)


def around(owner, name, make):
    """Replace a function of vLLM by make(function), once per process."""
    original = getattr(owner, name)
    if not hasattr(original, "decore"):
        replacement = wraps(original)(make(original))
        replacement.decore = True
        setattr(owner, name, replacement)


def is_on(vllm_config):
    return "decore" in (vllm_config.additional_config or {})


def configured(original):
    def create_engine_config(*args, **kw):
        config = original(*args, **kw)
        if is_on(config):
            configure(config)
        return config

    return create_engine_config


def validated(original):
    """ValueError for a request whose `decore` is not a truth value, or asks for it in vain."""

    def validate_params(self, params, *args):
        value = (getattr(params, "extra_args", None) or {}).get("decore", False)
        if value not in (False, is_on(self.vllm_config)):
            raise ValueError(f"decore={value!r} of a request: give false (0), or leave it out")
        return original(self, params, *args)

    return validate_params


def salted(original):
    """Cached blocks with masked tokens are found by requests that are masked from there on too."""

    def extra_keys(function):
        def generate(request, begin, end, *args):
            keys, *rest = function(request, begin, end, *args)
            first = first_masked(request.sampling_params, request.num_prompt_tokens)
            return ((*(keys or ()), ("decore", first)) if end > first else keys, *rest)

        return generate

    def init(self, vllm_config, *args, **kw):
        from vllm.v1.core import kv_cache_utils

        if is_on(vllm_config):
            around(kv_cache_utils, "generate_block_hash_extra_keys", extra_keys)
        original(self, vllm_config, *args, **kw)

    return init


def contrasted(original):
    """A model's constructor, and Model Runner V1's call of the model."""

    def model_forward(function):
        def forward(self, *args, **kw):
            model = self.get_model()
            if hasattr(model, "mark"):
                n = self.input_batch.num_reqs
                ends = self.query_start_loc
                requests = [self.requests[name] for name in self.input_batch.req_ids[:n]]
                starts = [first_masked(r.sampling_params, r.num_prompt_tokens) for r in requests]
                model.mark(
                    self.positions[: int(ends.np[n])],
                    torch.tensor(starts, device=self.device),
                    ends.gpu[1 : n + 1],
                )
            return function(self, *args, **kw)

        return forward

    def create_model(self, vllm_config, *args, **kw):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        if not is_on(vllm_config):
            return original(self, vllm_config, *args, **kw)
        around(GPUModelRunner, "_model_forward", model_forward)
        scheduler = vllm_config.scheduler_config
        N = scheduler.max_num_batched_tokens
        with patch.object(scheduler, "max_num_batched_tokens", 2 * N):  # sizes of layers' buffers
            model = original(self, vllm_config, *args, **kw)
        add_twins(model, vllm_config)
        return model

    return create_model
