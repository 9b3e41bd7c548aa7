"""A causal language model of transformers in the place of `model.Transformer`: other families, mixtures of experts,
quantized weights, layers spread over devices.

    B prompts   R rows   T new tokens   P prompt keys   V vocabulary   D model width   K head width   C keys
    L layers    H query heads (of the layer with most; a layer may have fewer, or no attention)

A batch of transformers holds R·B texts: row 0's, then row 1's. All rows share a pass, but each has its own copy
of the prompts' keys and values. Prompts are padded on the left. Hooks mask heads, at projections that
`find_attention` finds in any family; `check` tries the model when it is loaded."""

import copy
import inspect
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn

from runtime.config import find_dtype
from runtime.errors import out_of_memory
from runtime.files import one_line
from runtime.parallel import Shard
from runtime.weights import checkpoint_folder, weight_files

try:
    import transformers
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast
except ImportError:
    raise ImportError("--transformers needs that package: pip install transformers") from None

PROBE = 7  # tokens that the model reads when it is loaded


class HFModel(nn.Module):
    """hf: a causal language model, loaded by transformers. ValueError if its heads cannot be masked."""

    can_record = False  # the cache grows with every token

    def __init__(self, hf, name=None, folder=None):
        super().__init__()
        c, self.hf, self.shard, self.folder = (
            hf.config.get_text_config(decoder=True),
            hf.eval(),
            Shard(),
            folder,
        )
        self.name = str(name or hf.name_or_path or c.model_type)
        ends, padding = hf.generation_config.eos_token_id, getattr(c, "pad_token_id", None)
        self.bos_id, self.eos_ids = (
            None,
            tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        )
        self.pad_ids = self.eos_ids if padding is None else (padding,)
        candidates = hf.get_decoder(), hf.base_model, getattr(hf, "model", None)
        self.decoder = next(
            m for m in candidates if m is not hf and isinstance(m, transformers.PreTrainedModel)
        )
        self.arguments = inspect.signature(hf.forward).parameters
        length = getattr(c, "max_position_embeddings", None) or getattr(c, "max_seq_len", None)
        self.config = SimpleNamespace(
            model_type=c.model_type,
            n_layers=c.num_hidden_layers,
            d_model=c.hidden_size,
            vocab_size=c.vocab_size,
            max_positions=length or 2**31,
            tied_embeddings=hf.get_input_embeddings().weight is hf.get_output_embeddings().weight,
        )
        try:
            ids = (torch.arange(PROBE, device=self.device)[None] + c.vocab_size // 2) % c.vocab_size
            run = partial(self.run, dict(input_ids=ids), output_attentions=True)
            self.attention = find_attention(self.decoder, self.config.n_layers, run)
            self.config.n_heads = max(a.heads for a in self.attention.values())
            self.has_exits = self.check(ids)
        except Exception as error:  # of many kinds, from the code of each family
            if out_of_memory(error):
                raise
            raise ValueError(f"{self.name} ({c.model_type}): {one_line(error)}") from error

    dtype = property(lambda self: self.hf.dtype)

    @property
    def device(self):
        """The device of ids and results. Offloaded weights are on "meta" between passes."""
        return torch.device("cpu") if self.hf.device.type == "meta" else self.hf.device

    @classmethod
    def load(cls, name, device="cpu", dtype=None, device_map=None):
        """As `Transformer.load`. device_map: that of transformers, in place of `device`."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "ranks of torchrun do not share a model of transformers: start one process, and use "
                "--device-map auto for several devices"
            )
        folder = checkpoint_folder(name)
        c = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if c.is_encoder_decoder or type(c) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(
                f"{name} ({c.model_type}) is not a causal language model of transformers"
            )
        weight_files(folder)  # refuses pickles
        if getattr(c, "quantization_config", None):  # quantized weights cannot be moved afterwards
            device_map = device_map or {"": device}
        hf, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=find_dtype(dtype) if dtype else "auto",
            device_map=device_map,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        if wrong := sorted(
            map(str, [*info["missing_keys"], *info["mismatched_keys"]])
        ):  # now random
            raise ValueError(f"{folder}: missing {wrong[:4]}; download it again")
        name = folder.resolve().name if Path(name).exists() else name
        return cls(hf if device_map else hf.to(device), name, folder)

    def forward(self, ids, cache=None, head_mask=None, mask="output", probabilities=None):
        """As `Transformer.forward`."""
        texts = cache or HFCache(self, [0] * len(ids), 1 if head_mask is None else len(head_mask))
        out = self.run(
            texts.inputs(ids), head_mask, mask, output_attentions=probabilities is not None
        )
        if probabilities is not None:
            probabilities += self.by_position(out.attentions, texts)
        logits = self.clean(out.logits).unflatten(0, (texts.rows, -1))
        return logits[0] if cache is None and head_mask is None else logits

    def prefill(self, ids, cache, head_mask=None, mask="output", on_layer=None):
        """As `Transformer.prefill`."""
        if ids.shape[1] == 0:
            return
        out = self.run(
            cache.prompts(ids), head_mask, mask, output_hidden_states=on_layer is not None
        )
        for layer, x in enumerate(self.hidden_states(out) if on_layer else ()):
            on_layer(layer, x.gather(2, cache.places()[None, ..., None].expand_as(x)))
        cache.kv.reorder_cache(torch.arange(len(ids), device=ids.device).repeat(cache.rows))

    def read_layers(self, ids, cache, layers):
        """As `Transformer.read_layers`."""
        states = self.hidden_states(self.run(cache.inputs(ids), output_hidden_states=True))
        return states[-1], [states[layer] for layer in layers]

    def logits(self, x):
        """The logits for x [R, B, T, D] as output of the decoder: scaled and capped as in its family."""
        states = x.flatten(0, 1)
        ids = torch.zeros(states.shape[:2], dtype=torch.long, device=x.device)
        with patch.object(
            self.decoder, "forward", lambda *_, **__: Output(last_hidden_state=states)
        ):
            out = self.run(dict(input_ids=ids, use_cache=False))
        return self.clean(out.logits).unflatten(0, x.shape[:2])

    def new_cache(self, lengths, capacity, rows=1):
        return HFCache(self, lengths, rows)

    @torch.no_grad()
    def run(self, inputs, head_mask=None, mask="output", output_attentions=False, **more):
        """A pass of transformers over R·B texts. All that it changes in the model is undone afterwards."""
        with ExitStack() as changes:
            if output_attentions:  # fused kernels do not return probabilities
                config = self.decoder.config
                changes.enter_context(
                    patch.object(config, "_attn_implementation_internal", "eager")
                )
                more["output_attentions"] = True
            masked = {} if head_mask is None else self.mask_heads(head_mask, mask, changes)
            out = self.hf(**inputs, **more)
        if missing := [layer for layer, done in masked.items() if not done]:
            raise ValueError(f"{self.name}: layers {missing} were not masked")
        return out

    def mask_heads(self, head_mask, mask, changes):
        """Add hooks to the next pass that mask heads → {layer that has one: whether it was called}.

        head_mask: [R, L, H] of 0 and 1. changes: the stack of contexts that the hooks live in."""
        L, H, called = self.config.n_layers, self.config.n_heads, {}
        if head_mask.shape[1:] != (L, H):
            raise ValueError(
                f"the head mask is [R, L, H] = {list(head_mask.shape)}; {self.name} has L = {L}, H = {H}"
            )

        def silence(layer, heads, module, args, *output):
            """x [R·B, T, H·K], the input of the output projection or the result of the query projection."""
            x, *others = output or args
            rows = head_mask[:, layer, None, :heads, None].to(x)  # [R, 1, H, 1]
            x = (x.reshape(len(rows), -1, heads, x.shape[-1] // heads) * rows).view(x.shape)
            called[layer] = True
            return x if output else (x, *others)

        for layer in (head_mask == 0).any(-1).any(0).nonzero().flatten().tolist():
            a = self.attention.get(layer)
            if a is None or (head_mask[:, layer, a.heads :] == 0).any():
                raise ValueError(
                    f"{self.name}: layer {layer} has {a.heads if a else 'no attention and no'} heads: "
                    "mask others"
                )
            if mask not in a.projections:
                raise ValueError(
                    f"{self.name} ({self.config.model_type}) has no {mask} projection whose heads stay "
                    "apart: use --mask output"
                )
            module = a.projections[mask]
            add = (
                module.register_forward_pre_hook
                if mask == "output"
                else module.register_forward_hook
            )
            changes.enter_context(add(partial(silence, layer, a.heads)))
            called[layer] = False
        return called

    def clean(self, logits):
        """Transformers pads the vocabulary of some heads."""
        return logits[..., : self.config.vocab_size].to(self.device).float()

    def hidden_states(self, out):
        """L + 1 of [1, B, T, D]: the embeddings, and the output of each layer, the last one normed."""
        if not self.has_exits:
            raise ValueError(
                f"{self.name} ({self.config.model_type}): the layers cannot be read, as dola and ad do"
            )
        return [x[None].to(self.device) for x in out.hidden_states]

    def by_position(self, attentions, cache):
        """Probabilities of transformers, [R·B, H, T, C] → of each layer [R, B, T, H, C], keys at their positions.

        Heads that a layer does not have attend to its last key."""
        attentions, keys = [p for p in attentions or () if p is not None], cache.P + cache.slots
        if [(p.shape[1], p.shape[3]) for p in attentions] != [
            (a.heads, keys) for a in self.attention.values()
        ]:
            raise ValueError(
                f"{self.name} ({self.config.model_type}) does not say where its heads attend to"
            )
        present, places = (
            dict(zip(self.attention, attentions, strict=True)),
            cache.places()[:, None, None],
        )
        for layer in range(self.config.n_layers):
            shape = cache.rows, len(places), attentions[0].shape[2], self.config.n_heads, keys
            out = torch.zeros(shape, device=self.device)
            out[..., -1] = 1
            if layer in present:
                p = present[layer].to(out).unflatten(0, (cache.rows, -1)).transpose(2, 3)
                prompt = p[..., : cache.P].gather(-1, places.expand(*p.shape[:-1], -1))
                out[..., : p.shape[3], :] = torch.cat([prompt, p[..., cache.P :]], -1)
            yield out

    def check(self, ids):
        """ValueError if two prompts through the cache, with a second row of masked heads, give other logits than
        each text alone. Returns whether hidden states can be read: the last one gives the logits."""
        cache = self.new_cache([PROBE - 2, PROBE - 4], 2, rows=2)
        self.prefill(
            nn.utils.rnn.pad_sequence([ids[0, :-2], ids[0, 2:-2]], batch_first=True), cache
        )
        head_mask = torch.ones(2, self.config.n_layers, self.config.n_heads, device=self.device)
        for layer, a in self.attention.items():
            head_mask[1, layer, : a.heads] = 0
        both = self(ids[:, -2:].expand(2, -1), cache, head_mask)[0]
        first, second = (
            self.run(dict(input_ids=x), output_hidden_states=True) for x in (ids, ids[:, 2:])
        )
        alone = self.clean(torch.cat([first.logits[:, -2:], second.logits[:, -2:]]))
        if not alike(both, alone, self.dtype):
            raise ValueError(
                "a padded batch with a cache gives other logits than its texts one by one"
            )
        states = first.hidden_states or ()
        return (
            len(states) == self.config.n_layers + 1
            and all(x.shape == states[-1].shape for x in states)
            and alike(self.logits(states[-1][None])[0], self.clean(first.logits), self.dtype)
        )


class Output(BaseModelOutputWithPast):
    """What a decoder returns; the fields that only some families have are None."""

    def __getattr__(self, name):
        return None


class HFCache:
    """A `DynamicCache` in the place of `model.Cache`. It keeps keys past a window, for the attention mask to hide."""

    def __init__(self, model, lengths, rows):
        self.model, self.rows, self.P, self.slots = model, rows, max(lengths), 0
        self.kv = DynamicCache(config=model.hf.config)
        self.kv.layers = [
            DynamicLayer() if type(x) is DynamicSlidingWindowLayer else x for x in self.kv.layers
        ]
        self.lengths = torch.tensor(lengths, device=model.device)
        self.pad = (self.P - self.lengths)[:, None]  # [B, 1]

    def prompts(self, ids):
        """Arguments of transformers for the prompts [B, P], padded on the right."""
        positions = torch.arange(self.P, device=ids.device) - self.pad
        ids = ids.gather(1, positions % self.P)
        return self.arguments(ids, positions.clamp(min=0), positions >= 0, logits_to_keep=1)

    def inputs(self, ids):
        """Arguments of transformers for the next tokens [B, T]."""
        positions = (
            self.lengths[:, None] + self.slots + torch.arange(ids.shape[1], device=ids.device)
        )
        self.slots += ids.shape[1]
        seen = torch.arange(self.P + self.slots, device=ids.device) >= self.pad
        return self.arguments(*(x.repeat(self.rows, 1) for x in (ids, positions, seen)))

    def arguments(self, ids, positions, seen, **more):
        """seen: the keys that are tokens, and not padding."""
        more |= dict(
            input_ids=ids,
            position_ids=positions,
            attention_mask=seen.long(),
            past_key_values=self.kv,
            use_cache=True,
        )
        return {name: value for name, value in more.items() if name in self.model.arguments}

    def places(self):
        """The keys of the prompts' tokens, if those are padded on the right, [B, P]."""
        return (torch.arange(self.P, device=self.pad.device) + self.pad) % max(1, self.P)

    def repeat(self, n):
        """A cache with each text n times."""
        new, texts = (
            copy.copy(self),
            torch.arange(self.rows * len(self.lengths), device=self.lengths.device),
        )
        new.kv = copy.deepcopy(self.kv)
        if self.P:
            new.kv.reorder_cache(texts.repeat_interleave(n))
        new.lengths, new.pad = self.lengths.repeat_interleave(n), self.pad.repeat_interleave(n, 0)
        return new


def alike(x, y, dtype):
    """Whether logits differ by no more than rounding, which may change the experts of a token."""
    return bool((x - y).abs().mean() < (1e-3 if dtype == torch.float32 else 0.1) * y.std())


def find_attention(decoder, n_layers, run):
    """{layer: the number of `heads` of its attention, and for each mask the `projections` whose hook can mask them}.

    Attention is the innermost module of a layer that returns its probabilities, [1, H, T, T], and the result of a child
    that reads the heads side by side, [1, T, H·K]: the output projection. A layer without attention is left out;
    ValueError if heads are not found. run: a pass that lets attention return its probabilities."""
    calls, seen, found = {}, {}, {}  # module → layer, first argument, results; layer → …

    def record(layer, module, args, out):
        calls[module] = layer, args[0] if args else None, out if isinstance(out, tuple) else (out,)

    layers = next(
        (m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers), ()
    )
    with ExitStack() as hooks:
        for i, layer in enumerate(layers):
            for module in list(layer.modules())[1:]:  # without the layer itself
                hooks.enter_context(module.register_forward_hook(partial(record, i)))
        run()
    for module, (layer, _, (result, *others)) in calls.items():  # innermost first
        p = next((x for x in others if torch.is_tensor(x) and x.dim() == 4), None)
        if layer in found or p is None or p.shape[2] != p.shape[3]:
            continue
        seen[layer], H = type(module).__name__, p.shape[1]
        for child in (m for m in module.children() if m in calls):
            _, x, (y, *_) = calls[child]
            has_matrix = any(
                w.dim() > 1 for w in (*child.parameters(), *child.buffers())
            )  # norms have none
            if (
                has_matrix
                and torch.is_tensor(y)
                and torch.equal(y, result)
                and x.shape[-1] % H == 0
            ):
                query = (
                    {"query": module.q_proj}
                    if separate_queries(module, calls, x.shape, x.shape[-1] // H)
                    else {}
                )
                found[layer] = SimpleNamespace(heads=H, projections={"output": child} | query)
    if missing := seen.keys() - found.keys():
        raise ValueError(
            f"{seen[min(missing)]} has no output projection that reads its heads side by side"
        )
    if not found or len({a.projections["output"] for a in found.values()}) < len(
        found
    ):  # layers may share one
        raise ValueError("no layer has an attention of its own whose heads can be masked")
    return found


def separate_queries(attention, calls, shape, width):
    """Whether a query projection has the heads side by side, and no norm mixes them or adds a bias to zeros."""
    if (
        getattr(attention, "q_proj", None) not in calls
        or calls[attention.q_proj][2][0].shape != shape
    ):
        return False
    norms = [
        (name, p)
        for name, p in attention.named_parameters()
        if name.startswith("q") and "norm" in name
    ]
    return all(p.numel() <= width and not name.endswith("bias") for name, p in norms)
