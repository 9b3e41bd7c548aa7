"""A causal language model of transformers in the place of `model.Transformer`: other families, mixtures of experts,
quantized weights, layers spread over devices.

    B prompts   R rows   T new tokens   P prompt keys   V vocabulary   D model width   K head width   C keys
    L layers    H query heads (of the layer with most; a layer may have fewer, or no attention)

A batch of transformers holds R·B texts: row 0's, then row 1's. All rows share a pass, but each has its own copy
of the prompts' keys and values. Prompts are padded on the left. A hook before the output projection of each
attention masks heads. `find_attention` finds these projections in any family, and `check` tries the model when it
is loaded."""

import copy
import inspect
import os
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from runtime.checks import MASKS
from runtime.config import find_dtype
from runtime.errors import out_of_memory
from runtime.files import one_line
from runtime.hf_heads import find_attention, find_probabilities
from runtime.parallel import Shard
from runtime.weights import checkpoint_folder, weight_files
from tokenizer import special_ids

try:
    import transformers
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast
except ImportError:
    raise ImportError("--transformers needs that package: pip install transformers") from None

PROBE = 7                       # tokens that `find_attention` and `check` let the model read


class HFModel(nn.Module):
    """hf: a causal language model, loaded by transformers. ValueError if its heads cannot be masked."""

    can_record = False                  # the cache grows with every token

    def __init__(self, hf, name=None, folder=None):
        super().__init__()
        c, self.hf, self.shard, self.folder = hf.config.get_text_config(decoder=True), hf.eval(), Shard(), folder
        self.name = str(name or hf.name_or_path or c.model_type)
        ends = getattr(hf.generation_config, "eos_token_id", None)
        ends, padding = [] if ends is None else ends, getattr(c, "pad_token_id", None)
        self.bos_id, self.eos_ids = None, tuple(ends if isinstance(ends, list) else [ends])
        self.pad_ids = self.eos_ids if padding is None else (padding,)
        candidates = hf.get_decoder(), hf.base_model, getattr(hf, "model", None)
        self.decoder = next(m for m in candidates if m is not hf and isinstance(m, transformers.PreTrainedModel))
        self.arguments = inspect.signature(hf.forward).parameters
        self.head_mask, self.mask, self.masked, self.kept = None, None, set(), None
        length = getattr(c, "max_position_embeddings", None) or getattr(c, "max_seq_len", None)
        self.config = SimpleNamespace(
            model_type=c.model_type, n_layers=c.num_hidden_layers, d_model=c.hidden_size,
            vocab_size=c.vocab_size, max_positions=length or 2**31,
            tied_embeddings=hf.get_input_embeddings().weight is hf.get_output_embeddings().weight)
        hooks = []
        try:
            with self.eager():
                inputs = self.inputs(self.probe())
                self.attention = find_attention(self.decoder, self.config.n_layers, **inputs)
            self.config.n_heads = max(a.heads for a in self.attention.values())
            for layer, a in self.attention.items():
                hooks += [
                    a.output.register_forward_pre_hook(
                        lambda _, args, i=layer: self.mask_heads(i, "output", *args)),
                    a.module.register_forward_hook(lambda _, args, out, i=layer: self.keep(i, out))]
                if a.query:
                    hooks.append(a.query.register_forward_hook(
                        lambda _, args, q, i=layer: self.mask_heads(i, "query", q)[0]))
            self.has_exits = self.check()
        except Exception as error:      # of many kinds, from the code of each family
            for hook in hooks:
                hook.remove()
            if out_of_memory(error):
                raise
            raise ValueError(f"{self.name} ({c.model_type}): {one_line(error)}") from error

    dtype = property(lambda self: self.hf.dtype)

    @property
    def device(self):
        """The device of ids and results. Offloaded weights are on "meta" between passes."""
        return torch.device("cpu") if self.hf.device.type == "meta" else self.hf.device

    def __repr__(self):
        return f"HFModel({self.name}: {self.config.model_type}, {self.dtype} on {self.device})"

    @classmethod
    def load(cls, name, device="cpu", dtype=None, device_map=None):
        """As `Transformer.load`. device_map: that of transformers, in place of `device`."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("ranks of torchrun do not share a model of transformers: start one process, and use "
                             "--device-map auto for several devices")
        folder = checkpoint_folder(name)
        c = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if c.is_encoder_decoder or type(c) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{name} ({c.model_type}) is not a causal language model of transformers")
        weight_files(folder)                                        # refuses pickles
        if getattr(c, "quantization_config", None) and device_map is None:
            device_map = {"": device}                   # quantized weights cannot be moved afterwards
        if device_map is not None and find_spec("accelerate") is None:
            raise ImportError("quantized weights and --device-map need accelerate: pip install accelerate")
        hf, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=find_dtype(dtype) if dtype else "auto", device_map=device_map,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True)
        if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):    # now random
            raise ValueError(f"{folder}: missing {wrong[:4]}; download it again")
        name = folder.resolve().name if Path(name).exists() else name
        model = cls(hf if device_map else hf.to(device), name, folder)
        model.bos_id, model.eos_ids, model.pad_ids = special_ids(folder)
        return model

    @torch.no_grad()
    def forward(self, ids, cache=None, head_mask=None, mask="output", probabilities=None):
        """As `Transformer.forward`."""
        rows = cache.rows if cache else 1 if head_mask is None else len(head_mask)
        inputs = cache.inputs(ids) if cache else self.inputs(ids.repeat(rows, 1))
        with nullcontext() if probabilities is None else self.eager() as kept:
            out = self.run(inputs, head_mask, mask, output_attentions=kept is not None)
        if kept is not None:
            probabilities += [self.by_key(kept.get(i), cache, ids) for i in range(self.config.n_layers)]
        logits = self.clean(out.logits).unflatten(0, (rows, -1))
        return logits[0] if cache is None and head_mask is None else logits

    @torch.no_grad()
    def prefill(self, ids, cache, head_mask=None, mask="output", on_layer=None):
        """As `Transformer.prefill`."""
        if ids.shape[1] == 0:
            return
        more = dict(logits_to_keep=1) if "logits_to_keep" in self.arguments else {}
        more["output_hidden_states"] = on_layer is not None
        out = self.run(cache.prompts(ids), head_mask, mask, **more)
        for layer, x in enumerate(self.hidden_states(out) if on_layer else ()):
            on_layer(layer, x.gather(2, cache.places()[None, ..., None].expand_as(x)))
        cache.kv.reorder_cache(torch.arange(len(ids), device=ids.device).repeat(cache.rows))

    @torch.no_grad()
    def read_layers(self, ids, cache, layers):
        """As `Transformer.read_layers`."""
        states = self.hidden_states(self.run(cache.inputs(ids), output_hidden_states=True))
        return states[-1], [states[layer] for layer in layers]

    @torch.no_grad()
    def logits(self, x):
        """The logits for x [R, B, T, D] as output of the decoder: scaled and capped as in its family."""
        decoder, states = self.decoder, x.flatten(0, 1)
        before = vars(decoder).get("forward")                       # accelerate sets one
        decoder.forward = lambda *_, **__: Output(last_hidden_state=states)
        try:
            ids = torch.zeros(states.shape[:2], dtype=torch.long, device=x.device)
            out = self.hf(**self.inputs(ids), use_cache=False)
        finally:
            del decoder.forward
            if before:
                decoder.forward = before
        return self.clean(out.logits).unflatten(0, x.shape[:2])

    def new_cache(self, lengths, capacity, rows=1):
        return HFCache(self, lengths, rows)

    def run(self, inputs, head_mask=None, mask="output", **more):
        """A pass of transformers over R·B texts. The hooks mask heads within it, and at no other time."""
        if head_mask is not None:
            self.check_mask(head_mask, mask)
        self.head_mask, self.mask = head_mask, mask
        self.masked.clear()
        try:
            out = self.hf(**inputs, **more)
        finally:
            self.head_mask = None
        missing = self.attention.keys() - self.masked
        if head_mask is not None and missing:
            raise ValueError(f"{self.name}: layers {sorted(missing)} were not masked")
        return out

    def inputs(self, ids, positions=None, seen=None, **more):
        """The arguments of a pass. seen: whether a token is one, and not padding."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        more |= dict(input_ids=ids, position_ids=positions)
        more |= {} if seen is None else dict(attention_mask=seen.long())
        return {name: value for name, value in more.items() if name in self.arguments}

    def mask_heads(self, layer, mask, x, *args):
        """Hook: x [R·B, T, H·K] with zeros for the heads that each row masks."""
        if self.head_mask is not None and self.mask == mask:
            heads = self.attention[layer].heads
            rows = self.head_mask[:, layer, None, :heads, None].to(x)               # [R, 1, H, 1]
            x = (x.reshape(len(rows), -1, heads, x.shape[-1] // heads) * rows).view(x.shape)
            self.masked.add(layer)
        return x, *args

    def check_mask(self, head_mask, mask):
        L, H = self.config.n_layers, self.config.n_heads
        if mask not in MASKS or head_mask.shape[1:] != (L, H):
            raise ValueError(f"mask {mask!r} with a head mask for {head_mask.shape[1]} layers of {head_mask.shape[2]} "
                             f"heads: {self.name} has {L} of {H}, and the masks {', '.join(MASKS)}")
        if mask == "query" and not all(a.query for a in self.attention.values()):
            raise ValueError(f"{self.name} ({self.config.model_type}) has no query projection whose heads stay "
                             "apart: use --mask output")
        for layer in range(L):
            heads = self.attention[layer].heads if layer in self.attention else 0
            if heads < H and (head_mask[:, layer, heads:] == 0).any():
                raise ValueError(f"{self.name}: layer {layer} has {heads or 'no attention and no'} heads: "
                                 "mask others")

    def clean(self, logits):
        """Transformers pads the vocabulary of some heads."""
        return logits[..., :self.config.vocab_size].to(self.device).float()

    def hidden_states(self, out):
        """L + 1 of [1, B, T, D]: the embeddings, and the output of each layer, the last one normed."""
        if not self.has_exits:
            raise ValueError(f"{self.name} ({self.config.model_type}): the layers cannot be read, as dola and ad do")
        return [x[None].to(self.device) for x in out.hidden_states]

    @contextmanager
    def eager(self):
        """Attention that returns its probabilities, as fused kernels do not. Yields {layer: them}."""
        c = self.decoder.config
        before, self.kept = c._attn_implementation, {}
        try:
            c._attn_implementation = "eager"
            yield self.kept
        finally:
            c._attn_implementation, self.kept = before, None

    def keep(self, layer, out):
        """Hook: what the attention of a layer returns."""
        if self.kept is not None:
            self.kept[layer] = find_probabilities(out)

    def by_key(self, p, cache, ids):
        """Probabilities of transformers, [R·B, H, T, C] → [R, B, T, H, C], keys at their positions.

        Heads that a layer does not have attend to its last key."""
        shape = cache.rows, *ids.shape, self.config.n_heads, cache.P + cache.slots
        out = torch.zeros(shape, device=self.device)
        out[..., -1] = 1
        if p is not None:
            if p.shape[2:] != (ids.shape[1], out.shape[-1]):
                raise ValueError(f"{self.name} ({self.config.model_type}) does not say where its heads attend to")
            p = p.to(out).unflatten(0, (cache.rows, -1)).transpose(2, 3)
            places = cache.places()[:, None, None].expand(*p.shape[:-1], -1)
            prompt = p[..., :cache.P].gather(-1, places)
            out[..., :p.shape[3], :] = torch.cat([prompt, p[..., cache.P:]], -1)
        return out

    def probe(self):
        V = self.config.vocab_size
        return (torch.arange(PROBE, device=self.device)[None] + V // 2) % V

    @torch.no_grad()
    def check(self):
        """ValueError if two prompts through the cache, with a second row of masked heads, give other logits than
        each text alone. Returns whether hidden states can be read: the last one gives the logits."""
        ids, cache = self.probe(), self.new_cache([PROBE - 2, PROBE - 4], 2, rows=2)
        prompts = [ids[0, :-2], ids[0, 2:-2]]
        self.prefill(nn.utils.rnn.pad_sequence(prompts, batch_first=True), cache)
        head_mask = torch.ones(2, self.config.n_layers, self.config.n_heads, device=self.device)
        for layer, a in self.attention.items():
            head_mask[1, layer, :a.heads] = 0
        both = self(ids[:, -2:].expand(2, -1), cache, head_mask)[0]
        if not alike(both, torch.cat([self(ids)[:, -2:], self(ids[:, 2:])[:, -2:]]), self.dtype):
            raise ValueError("a padded batch with a cache gives other logits than its texts one by one")
        out = self.hf(**self.inputs(ids), output_hidden_states=True)
        states = out.hidden_states or ()
        return (len(states) == self.config.n_layers + 1 and all(x.shape == states[-1].shape for x in states)
                and alike(self.logits(states[-1][None])[0], self.clean(out.logits), self.dtype))


class Output(BaseModelOutputWithPast):
    """What a decoder returns; the fields that only some families have are None."""

    def __getattr__(self, name):
        return None


class HFCache:
    """A `DynamicCache` in the place of `model.Cache`. It keeps keys past a window, for the attention mask to hide."""

    def __init__(self, model, lengths, rows):
        self.model, self.rows, self.P, self.slots = model, rows, max(lengths), 0
        self.kv = DynamicCache(config=model.hf.config)
        self.kv.layers = [DynamicLayer() if type(x) is DynamicSlidingWindowLayer else x for x in self.kv.layers]
        self.lengths = torch.tensor(lengths, device=model.device)
        self.pad = (self.P - self.lengths)[:, None]                         # [B, 1]

    def prompts(self, ids):
        """Arguments of transformers for the prompts [B, P], padded on the right."""
        positions = torch.arange(self.P, device=ids.device) - self.pad
        return self.arguments(ids.gather(1, positions % self.P), positions.clamp(min=0), positions >= 0)

    def inputs(self, ids):
        """Arguments of transformers for the next tokens [B, T]."""
        positions = self.lengths[:, None] + self.slots + torch.arange(ids.shape[1], device=ids.device)
        self.slots += ids.shape[1]
        seen = torch.arange(self.P + self.slots, device=ids.device) >= self.pad
        return self.arguments(*(x.repeat(self.rows, 1) for x in (ids, positions, seen)))

    def arguments(self, *tensors):
        return self.model.inputs(*tensors, past_key_values=self.kv, use_cache=True)

    def places(self):
        """The keys of the prompts' tokens, if those are padded on the right, [B, P]."""
        return (torch.arange(self.P, device=self.pad.device) + self.pad) % max(1, self.P)

    def repeat(self, n):
        """A cache with each text n times."""
        new, B = copy.copy(self), len(self.lengths)
        new.kv = copy.deepcopy(self.kv)
        texts = torch.arange(self.rows * B, device=self.lengths.device)
        if self.P:
            new.kv.reorder_cache(texts.repeat_interleave(n))
        new.lengths, new.pad = self.lengths.repeat_interleave(n), self.pad.repeat_interleave(n, 0)
        return new


def alike(x, y, dtype):
    """Whether logits differ by no more than rounding, which may change the experts of a token."""
    return bool((x - y).abs().mean() < (1e-3 if dtype == torch.float32 else 0.1) * y.std())
