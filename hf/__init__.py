"""A causal language model of transformers in the place of `model.Transformer`: other families,
mixtures of experts, quantized weights, layers spread over devices.

    B prompts   R rows   T new tokens   P prompt keys   C keys   V vocabulary   D model width
    L layers    H query heads   K head width

H is that of the layer with most heads; a layer may have fewer, or no attention.

A batch of transformers holds R·B texts: row 0's, then row 1's. All rows share a pass, but each has
its own copy of the prompts' keys and values. Prompts are padded on the left. Hooks mask heads, at
projections that `find_attentions` finds in any family; `check` tries the model when it is
loaded."""

import copy
import inspect
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn

from runtime.checks import check_head_mask
from runtime.config import default_dtype, find_dtype, stretched
from runtime.errors import out_of_memory
from runtime.files import checkpoint_name, one_line
from runtime.pack import pack
from runtime.parallel import Shard
from runtime.special import end_ids, special_ids
from runtime.torchrun import rank_and_size
from runtime.weights import (
    WRAPPERS,
    check_layers,
    check_tensor_names,
    checkpoint_folder,
    weight_files,
)

try:
    import transformers
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast
except ImportError:
    raise ImportError("hf needs transformers: pip install transformers") from None

PROBE = 7  # tokens that the model reads when it is loaded


class HFModel(nn.Module):
    """hf: a causal language model, loaded by transformers; or one in torch.compile, which is then
    left out, or with adapters of PEFT. ValueError if its heads cannot be masked. packs: replace the
    linear layers by faster ones, as runtime/pack.py does."""

    can_record = False  # the cache grows with every token

    def __init__(self, hf, name=None, folder=None, packs=False):
        super().__init__()
        hf = unwrap(hf)
        c = hf.config.get_text_config(decoder=True)
        self.hf = hf.eval()
        self.shard = Shard()
        self.folder = folder
        self.name = str(name or checkpoint_name(hf.name_or_path or c.model_type))
        self.bos_id = None
        eos_ids = [getattr(x, "eos_token_id", None) for x in (hf.generation_config, c)]
        joined = sum([end_ids(ids, "eos_token_id") for ids in eos_ids], ())
        self.eos_ids = tuple(dict.fromkeys(joined))
        padding = getattr(c, "pad_token_id", None)
        self.pad_ids = self.eos_ids if padding is None else (padding,)
        self.arguments = inspect.signature(hf.forward).parameters
        with naming(f"{self.name} ({c.model_type})"):
            self.config = describe(c)
            head = hf.get_output_embeddings()
            self.config.tied_embeddings = hf.get_input_embeddings().weight is head.weight
            self.product = pack(hf, nn.Linear) if packs else None  # as in `Transformer`
            decoder = hf.get_decoder()  # some families do not say what it is
            self.decoder = decoder if decoder not in (hf, None) else hf.model
            ids = (torch.arange(PROBE, device=self.device)[None] + c.vocab_size // 2) % c.vocab_size
            run = partial(self.run_hf, dict(input_ids=ids), output_attentions=True)
            self.attention = find_attentions(self.decoder, self.config.n_layers, run)
            self.config.n_heads = max(a.heads for a in self.attention.values())
            self.has_exits = self.check(ids)

    dtype = property(lambda self: self.hf.dtype)

    @property
    def device(self):
        """The device of ids and results. Offloaded weights are on "meta" between passes."""
        return torch.device("cpu") if self.hf.device.type == "meta" else self.hf.device

    @classmethod
    def load(cls, name, device="cpu", dtype=None, device_map=None):
        """As `Transformer.load`. device_map: that of transformers, in place of `device`; weights
        then have the checkpoint's dtype by default."""
        if rank_and_size()[1] > 1:
            raise ValueError(
                "ranks of torchrun do not share a model of transformers: start one process, and "
                'use device_map="auto" for several devices'
            )
        folder = checkpoint_folder(name)
        check_layers(folder, weight_files(folder))
        c = read_config(folder)
        default = None if device_map else default_dtype(folder, device)
        dtype = find_dtype(dtype) if dtype else default or "auto"
        if getattr(c, "quantization_config", None):  # quantized weights cannot be moved afterwards
            device_map = device_map or {"": device}
        c._attn_implementation = None  # a kernel that may not run here
        with naming(folder):
            hf, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=c,
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                key_mapping={WRAPPERS: ""},
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        for tensor, stored, shape in sorted(info["mismatched_keys"]):
            raise ValueError(
                f"{folder}: {tensor} is {list(stored)}; config.json requires {list(shape)}"
            )
        check_tensor_names(folder, hf.state_dict(), info["missing_keys"], info["unexpected_keys"])
        if not device_map:
            hf = hf.to(device)
        model = cls(
            hf, checkpoint_name(name), folder, packs=not device_map and hf.device.type == "cpu"
        )
        model.bos_id, model.eos_ids, model.pad_ids = special_ids(folder)
        return model

    def forward(self, ids, cache=None, head_mask=None, mask="output", probabilities=None):
        """As `Transformer.forward`."""
        rows = 1 if head_mask is None else len(head_mask)
        texts = cache or HFCache(self, [0] * len(ids), rows)
        attentions = probabilities is not None
        out = self.run_hf(texts.inputs(ids), head_mask, mask, output_attentions=attentions)
        if attentions:
            probabilities += self.by_position(out.attentions, texts)
        logits = self.clean(out.logits).unflatten(0, (texts.rows, -1))
        return logits[0] if cache is None and head_mask is None else logits

    def prefill(self, ids, cache, head_mask=None, mask="output"):
        """As `Transformer.prefill`, but common prefixes are read with every prompt."""
        if ids.shape[1] == 0:
            return
        self.run_hf(cache.prompts(ids), head_mask, mask)
        cache.kv.reorder_cache(torch.arange(len(ids), device=ids.device).repeat(cache.rows))

    def read_layers(self, ids, layers, cache=None):
        """As `Transformer.read_layers`, of one row."""
        inputs = cache.inputs(ids) if cache else dict(input_ids=ids, use_cache=False)
        states = self.hidden_states(self.run_hf(inputs, output_hidden_states=True))
        return states[-1], [states[layer] for layer in layers]

    def logits(self, x):
        """The logits for x [R, B, T, D], the decoder's output: scaled, capped as in its family."""
        states = x.flatten(0, 1)
        ids = torch.zeros(states.shape[:2], dtype=torch.long, device=x.device)
        output = Output(last_hidden_state=states)
        with patch.object(self.decoder, "forward", return_value=output):
            out = self.run_hf(dict(input_ids=ids, use_cache=False))
        return self.clean(out.logits).unflatten(0, x.shape[:2])

    def unembedding(self, ids):
        """As `Transformer.unembedding`."""
        return self.hf.get_output_embeddings().weight.to_dense()[ids].float()

    def output_projections(self):
        """As `Transformer.output_projections`."""
        return [a.projections["output"] for a in self.attention.values()]

    def new_cache(self, lengths, capacity, rows=1):
        """As `Transformer.new_cache`; it grows with every token, whatever the capacity."""
        return HFCache(self, lengths, rows)

    @torch.no_grad()
    def run_hf(self, inputs, head_mask=None, mask="output", output_attentions=False, **options):
        """A pass of transformers over R·B texts. Its changes of the model are undone afterwards."""
        with ExitStack() as changes:
            if output_attentions:  # fused kernels do not return probabilities
                kind = "_attn_implementation_internal"
                changes.enter_context(patch.object(self.decoder.config, kind, "eager"))
                options["output_attentions"] = True
            if head_mask is not None:
                self.mask_heads(head_mask, mask, changes)
            return self.hf(**inputs, **options)

    def mask_heads(self, head_mask, mask, changes):
        """Add hooks that mask heads in the next pass.

        head_mask: [R, L, H] of 0 and 1. changes: the stack of contexts that the hooks live in."""
        check_head_mask(head_mask, self)

        def silence(layer, heads, module, args, *output):
            """Masks the input of an output projection, or the output of a query projection,
            [R·B, T, H·K]."""
            x, *others = output or args
            rows = head_mask[:, layer, None, :heads, None].to(x)  # [R, 1, H, 1]
            split = x.reshape(len(rows), -1, heads, x.shape[-1] // heads)  # [R, B·T, H, K]
            x = (split * rows).view(x.shape)
            return x if output else (x, *others)

        for layer in (head_mask == 0).any(-1).any(0).nonzero().flatten().tolist():
            a = self.attention.get(layer)
            heads = a.heads if a else 0
            if (head_mask[:, layer, heads:] == 0).any():
                raise ValueError(f"{self.name}: layer {layer} has {heads} heads; mask others")
            if mask not in a.projections:
                raise ValueError(
                    f"{self.name} ({self.config.model_type}) has no {mask} projection whose heads "
                    'stay apart: use mask="output"'
                )
            module = a.projections[mask]
            add = module.register_forward_hook
            if mask == "output":
                add = module.register_forward_pre_hook
            changes.enter_context(add(partial(silence, layer, heads)))

    def clean(self, logits):
        """Float32 logits [..., V]. Transformers pads the vocabulary of some heads."""
        return logits[..., : self.config.vocab_size].to(self.device).float()

    def hidden_states(self, out):
        """L + 1 of [1, B, T, D]: the embeddings and each layer's output; the last one is normed."""
        if not self.has_exits:
            raise ValueError(
                f"{self.name} ({self.config.model_type}): "
                "the layers cannot be read, as dola and ad do"
            )
        return [x[None].to(self.device) for x in out.hidden_states]

    def by_position(self, attentions, cache):
        """Yield the attention of each layer, [R, B, T, H, C], keys at their positions.

        attentions: those of transformers, [R·B, H, T, C]. Heads that a layer does not have attend
        to its last key."""
        attentions = [p for p in attentions if p is not None]
        present = dict(zip(self.attention, attentions, strict=True))
        keys_of_prompts = cache.prompt_keys()[:, None, None]  # [B, 1, 1, P]
        T, keys = attentions[0].shape[2:]
        for layer in range(self.config.n_layers):
            out = torch.zeros(
                cache.rows, len(keys_of_prompts), T, self.config.n_heads, keys, device=self.device
            )
            out[..., -1] = 1
            if layer in present:
                p = present[layer].to(out).unflatten(0, (cache.rows, -1))  # [R, B, H, T, C]
                p = p.transpose(2, 3)  # [R, B, T, H, C]
                prompt = p[..., : cache.P].gather(-1, keys_of_prompts.expand(*p.shape[:-1], -1))
                out[..., : p.shape[3], :] = torch.cat([prompt, p[..., cache.P :]], -1)
            yield out

    def check(self, ids):
        """Try two prompts through the cache, with a second row of masked heads. ValueError if the
        first row's logits differ from those of each text alone.

        Returns whether hidden states can be read: the last one gives the logits."""
        cache = self.new_cache([PROBE - 2, PROBE - 4], 2, rows=2)
        prompts = nn.utils.rnn.pad_sequence([ids[0, :-2], ids[0, 2:-2]], batch_first=True)
        self.prefill(prompts, cache)
        if cache.kv.get_seq_length() != cache.P:
            raise ValueError(
                f"the cache does not reach its attention in transformers {transformers.__version__}"
            )
        head_mask = torch.ones(2, self.config.n_layers, self.config.n_heads, device=self.device)
        for layer, a in self.attention.items():
            head_mask[1, layer, : a.heads] = 0
        both = self(ids[:, -2:].expand(2, -1), cache, head_mask)[0]
        first = self.run_hf(dict(input_ids=ids), output_hidden_states=True)
        second = self.run_hf(dict(input_ids=ids[:, 2:]))
        alone = self.clean(torch.cat([first.logits[:, -2:], second.logits[:, -2:]]))
        if not alike(both, alone, self.dtype):
            raise ValueError(
                "a padded batch with a cache gives other logits than its texts one by one"
            )
        states = first.hidden_states or ()
        shape = (*ids.shape, self.config.d_model)
        if [x.shape for x in states] != [shape] * (self.config.n_layers + 1):
            return False
        return alike(self.logits(states[-1][None])[0], self.clean(first.logits), self.dtype)


def unwrap(hf):
    """The model of transformers in a wrapper that does not change what it computes."""
    hf = getattr(hf, "_orig_mod", hf)  # of torch.compile
    adapter = getattr(hf, "active_peft_config", None)
    if adapter and not adapter.is_prompt_learning:  # prompts are in the wrapper, not in layers
        hf = hf.get_base_model()
    if not isinstance(hf, transformers.PreTrainedModel):
        raise ValueError(
            f"{type(hf).__name__} is not a model of transformers, and HFModel cannot unwrap it"
        )
    return hf


class Output(BaseModelOutputWithPast):
    """A decoder's output; the fields that only some families have are None."""

    def __getattr__(self, name):
        return None


class HFCache:
    """A `DynamicCache` in the place of `model.Cache`. Keys past a window stay in it; the attention
    mask hides them."""

    def __init__(self, model, lengths, rows):
        self.model = model
        self.rows = rows
        self.P = max(lengths)
        self.slots = 0
        self.kv = DynamicCache(config=model.hf.config)
        self.kv.layers = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer
            for layer in self.kv.layers
        ]
        self.lengths = torch.tensor(lengths, device=model.device)
        self.pad = (self.P - self.lengths)[:, None]  # [B, 1]

    def prompts(self, ids):
        """Arguments of transformers for the prompts [B, P], padded on the right."""
        positions = torch.arange(self.P, device=ids.device) - self.pad
        ids = ids.gather(1, positions % self.P)
        return self.arguments(ids, positions.clamp(min=0), positions >= 0, logits_to_keep=1)

    def inputs(self, ids):
        """Arguments of transformers for the next tokens [B, T], which are counted in `slots`."""
        first = self.lengths[:, None] + self.slots
        positions = first + torch.arange(ids.shape[1], device=ids.device)
        self.slots += ids.shape[1]
        seen = torch.arange(self.P + self.slots, device=ids.device) >= self.pad
        return self.arguments(*(x.repeat(self.rows, 1) for x in (ids, positions, seen)))

    def arguments(self, ids, positions, seen, **values):
        """seen: the keys that are tokens, and not padding."""
        values |= dict(
            input_ids=ids,
            position_ids=positions,
            attention_mask=seen.long(),
            cache=self.kv,
            past_key_values=self.kv,  # its name before transformers 5.24
            use_cache=True,
        )
        return {name: value for name, value in values.items() if name in self.model.arguments}

    def prompt_keys(self):
        """The keys of the prompts' tokens, if those are padded on the right, [B, P]."""
        return (torch.arange(self.P, device=self.pad.device) + self.pad) % max(1, self.P)

    def copy_prompts(self, other):
        """As `Cache.copy_prompts`; False if a layer keeps more than keys and values."""
        if any(type(layer) is not DynamicLayer for layer in other.kv.layers):
            return False
        for i, layer in enumerate(other.kv.layers):
            if layer.is_initialized:  # a layer may use the keys of another
                first = (x[: len(self.lengths), :, : self.P] for x in (layer.keys, layer.values))
                self.kv.update(*(x.repeat(self.rows, 1, 1, 1) for x in first), i)
        return True

    def values(self, n):
        """As `Cache.values`; None unless all layers have all heads, and stored values of their
        width, and the language-model head is in memory."""
        attention = self.model.attention
        if self.model.hf.get_output_embeddings().weight.is_meta:
            return None
        keys_of_prompts = self.prompt_keys()[:, None, :, None]  # [B, 1, P, 1]
        found = []
        for layer, stored in enumerate(self.kv.layers):
            v = getattr(stored, "values", None)  # [B, G, C, K]
            a = attention.get(layer)
            if v is None or a is None or a.heads != self.model.config.n_heads:
                return None
            if v.shape[-1] != a.width or a.heads % v.shape[1]:
                return None
            prompt = v.gather(2, keys_of_prompts.to(v.device).expand(-1, v.shape[1], -1, a.width))
            found.append(torch.cat([prompt, v[:, :, self.P : n]], 2))
        return found if len(found) == len(attention) else None

    def select(self, texts):
        """As `Cache.select`, but always copies."""
        every = torch.arange(self.rows * len(self.lengths), device=self.lengths.device)
        new = copy.copy(self)
        with patch.object(torch.Tensor, "__deepcopy__", lambda x, memo: x):  # selected below
            new.kv = copy.deepcopy(self.kv)
        if self.P:
            new.kv.reorder_cache(every.unflatten(0, (self.rows, -1))[:, texts].flatten())
        new.lengths = self.lengths[texts]
        new.pad = self.pad[texts]
        return new


def alike(x, y, dtype):
    """Whether logits differ by no more than rounding, which may change the experts of a token."""
    finite = x.isfinite() | y.isfinite()  # −∞ in both: the token cannot be
    x, y = x[finite], y[finite]
    return bool((x - y).abs().mean() < (1e-3 if dtype == torch.float32 else 0.1) * y.std())


# ------------------------------------------------------------------------------------ reading


def read_config(folder):
    """The configuration of a causal language model, as transformers reads it."""
    with naming(folder):
        c = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if c.is_encoder_decoder or type(c) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{folder} ({c.model_type}) is not a causal language model of transformers"
        )
    return c


def describe(c):
    """The facts of a configuration of transformers that `HFModel.config` holds."""
    c = c.get_text_config(decoder=True)
    length = getattr(c, "max_position_embeddings", None) or getattr(c, "max_seq_len", None)
    scaling = getattr(c, "rope_parameters", None)
    return SimpleNamespace(
        model_type=c.model_type,
        n_layers=c.num_hidden_layers,
        n_heads=c.num_attention_heads,
        d_model=c.hidden_size,
        vocab_size=c.vocab_size,
        max_positions=stretched(length or 2**31, scaling),
        tied_embeddings=c.tie_word_embeddings,
    )


@contextmanager
def naming(model):
    """Turn an error inside transformers, which may be of any kind, into a ValueError that names
    the model."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = one_line(error)
        if not isinstance(error, ValueError | ImportError):
            kind = type(error).__name__
            reason = f"transformers fails ({kind}: {reason}); are its files damaged?"
        raise ValueError(f"{model}: {reason}") from error


# ----------------------------------------------------------------------------------- structure


def find_attentions(decoder, n_layers, run):
    """{layer: its attention's number of `heads`, their `width`, and for each mask the module in
    `projections` whose hook masks them}. ValueError if heads are not found.

    Attention is the innermost module of a layer that returns its probabilities, [1, H, T, T], and
    the result of a child that reads the heads side by side, [1, T, H·K]: the output projection.
    A layer without attention is left out. run: a pass in which attention returns probabilities."""
    calls = record_calls(decoder, n_layers, run)
    found = {}
    for module, (layer, _, (result, *others)) in calls.items():  # innermost first
        p = next((x for x in others if torch.is_tensor(x) and x.dim() == 4), None)
        if layer in found or p is None or p.shape[2] != p.shape[3]:
            continue
        heads = p.shape[1]
        for child in module.children():
            _, x, (y, *_) = calls.get(child, (layer, None, (None,)))
            # Norms, which may come last, have only vectors.
            multiplies = any(w.dim() > 1 for w in (*child.parameters(), *child.buffers()))
            if torch.is_tensor(y) and torch.equal(y, result) and multiplies:
                if x.shape[-1] % heads == 0:
                    projections = {"output": child}
                    width = x.shape[-1] // heads
                    if separate_queries(module, calls, x.shape, width):
                        projections["query"] = module.q_proj
                    found[layer] = SimpleNamespace(
                        heads=heads, width=width, projections=projections
                    )
    outputs = {a.projections["output"] for a in found.values()}
    if not found or len(outputs) < len(found):  # layers may share one
        raise ValueError(
            "no layer has an attention of its own whose output projection reads heads side by side"
        )
    return found


def record_calls(decoder, n_layers, run):
    """{module: (its layer, its first argument, its results)} of a pass, innermost modules first."""
    calls = {}

    def record(layer, module, args, out):
        results = out if isinstance(out, tuple) else (out,)
        calls[module] = layer, args[0] if args else None, results

    stacks = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    with ExitStack() as hooks:
        for i, layer in enumerate(stacks[0] if stacks else ()):
            for module in list(layer.modules())[1:]:  # without the layer itself
                hooks.enter_context(module.register_forward_hook(partial(record, i)))
        run()
    return calls


def separate_queries(attention, calls, shape, width):
    """Whether a query projection has the heads side by side, and no norm mixes them or adds a bias
    to zeros."""
    projection = getattr(attention, "q_proj", None)
    if projection not in calls or calls[projection][2][0].shape != shape:
        return False
    for name, p in attention.named_parameters():
        if name.startswith("q") and "norm" in name:
            if p.numel() > width or name.endswith("bias"):
                return False
    return True
