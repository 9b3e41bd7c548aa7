"""A causal language model of transformers in the place of `model.Transformer`: other families,
mixtures of experts, quantized weights, layers spread over devices.

    B prompts   R rows   T new tokens   P prompt keys   C keys   V vocabulary   D model width
    L layers    H query heads   K head width

H is that of the layer with most heads; a layer may have fewer, or no attention.

A batch of transformers holds R·B texts: row 0's, then row 1's. All rows share a pass, but each has
its own copy of the prompts' keys and values. Prompts are padded on the left. Hooks mask heads, at
projections that `find_head_places` finds in any family; `check` tries the model when it is
loaded."""

import copy
import inspect
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf.attention import (
    PROBE,
    device_of,
    eager,
    find_decoder,
    find_head_places,
    find_projections,
    masked_heads,
    probe_ids,
    without_training,
)
from hf.cache import HFCache
from hf.config import describe, naming, read_config
from hf.positions import forget_lengths, position_problem, warn_of_casts
from runtime.checkpoint import Checkpoint
from runtime.checks import check_head_mask
from runtime.config import default_dtype, find_dtype
from runtime.errors import InputError
from runtime.files import checkpoint_name
from runtime.pack import pack
from runtime.parallel import Shard
from runtime.ranks import rank_and_size
from runtime.special import end_ids
from runtime.weights import WRAPPERS, check_tensor_names


class HFModel(nn.Module):
    """Has the members of `model.Transformer`.

    hf: a causal language model, loaded by transformers; or one in torch.compile, which is then
    left out, or with adapters of PEFT. InputError if its heads cannot be masked. packs: replace the
    linear layers by faster ones, as runtime/pack.py does."""

    can_record = False  # the cache grows with every token
    reads_one_text = True  # all rows of a pass read the same tokens
    while_reading = staticmethod(lambda cache, passes: nullcontext())

    def __init__(self, hf, name=None, checkpoint=None, packs=False):
        super().__init__()
        hf = without_training(unwrap(hf))
        c = hf.config.get_text_config(decoder=True)
        self.hf = hf
        self.shard = Shard()
        self.checkpoint = checkpoint
        self.name = str(name or checkpoint_name(hf.name_or_path or c.model_type))
        self.bos_id = None
        eos_ids = [getattr(x, "eos_token_id", None) for x in (hf.generation_config, c)]
        joined = sum([end_ids(ids, "eos_token_id") for ids in eos_ids], ())
        self.eos_ids = tuple(dict.fromkeys(joined))
        padding = getattr(c, "pad_token_id", None)
        self.pad_ids = self.eos_ids if padding is None else (padding,)
        self.arguments = (*inspect.signature(hf.forward).parameters,)
        with naming(f"{self.name} ({c.model_type})"):
            warn_of_casts(hf, self.name)
            self.config = describe(c)
            head = hf.get_output_embeddings()
            self.config.tied_embeddings = hf.get_input_embeddings().weight is head.weight
            self.product = pack(hf, nn.Linear) if packs else None  # as in `Transformer`
            self.decoder = find_decoder(hf)
            self.head_places = find_head_places(hf)
            self.config.n_heads = max(a.heads for a in self.head_places.values())
            with without_new_hooks(hf):
                self.has_exits = self.check(probe_ids(hf)[:1])

    dtype = property(lambda self: self.hf.dtype)
    device = property(lambda self: device_of(self.hf))

    @classmethod
    @torch.inference_mode(False)  # inference tensors have no gradients
    def load(cls, name, device="cpu", dtype=None, device_map=None):
        """As `Transformer.load`. device_map: that of transformers, in place of `device`; weights
        then have the checkpoint's dtype by default."""
        if rank_and_size()[1] > 1:
            raise InputError(
                "ranks of torchrun do not share a model of transformers: start one process, and "
                'use device_map="auto" for several devices'
            )
        checkpoint = Checkpoint.of(name, weights=True)
        folder = checkpoint.folder
        checkpoint.check_layers()
        c = read_config(folder)
        dtype = dtype or (None if device_map else default_dtype(checkpoint, device))
        dtype = find_dtype(dtype) if dtype else "auto"
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
            raise InputError(
                f"{folder}: {tensor} is {list(stored)}; config.json requires {list(shape)}"
            )
        check_tensor_names(folder, hf.state_dict(), info["missing_keys"], info["unexpected_keys"])
        if not device_map:
            hf = hf.to(device)
        model = cls(
            hf, checkpoint.name, checkpoint, packs=not device_map and hf.device.type == "cpu"
        )
        model.bos_id, model.eos_ids, model.pad_ids = checkpoint.special_ids
        return model

    def forward(self, ids, cache=None, head_mask=None, mask_on="output"):
        """As `Transformer.forward`."""
        rows = 1 if head_mask is None else len(head_mask)
        texts = cache or HFCache(self, [0] * len(ids), rows)
        out = self.run_hf(texts.inputs(ids), head_mask, mask_on)
        logits = self.clean(out.logits).unflatten(0, (texts.rows, -1))
        return logits[0] if cache is None and head_mask is None else logits

    def read_attention(self, ids, cache, head_mask=None, mask_on="output"):
        """As `Transformer.read_attention`."""
        with eager(self.decoder):
            out = self.run_hf(cache.inputs(ids), head_mask, mask_on, output_attentions=True)
        logits = self.clean(out.logits).unflatten(0, (cache.rows, -1))
        return logits, [*self.by_position(out.attentions, cache)]

    def prefill(self, ids, cache, head_mask=None, mask_on="output"):
        """As `Transformer.prefill`, but common prefixes are read with every prompt."""
        if ids.shape[1] == 0:
            return
        with self.while_reading(cache, [ids.numel()]):
            self.run_hf(cache.prompts(ids), head_mask, mask_on)
        cache.kv.reorder_cache(torch.arange(len(ids), device=ids.device).repeat(cache.rows))

    def read_layers(self, ids, layers, cache=None):
        """As `Transformer.read_layers`, of one row."""
        inputs = cache.inputs(ids) if cache else dict(input_ids=ids, use_cache=False)
        out = self.run_hf(inputs, output_hidden_states=True)
        states = [x[None].to(self.device) for x in out.hidden_states]  # L + 1, the last one normed
        return states[-1], [states[layer] for layer in layers]

    def logits(self, x):
        """The logits for x [R, B, T, D], the decoder's output: scaled, capped as in its family."""
        states = x.flatten(0, 1)
        ids = torch.zeros(states.shape[:2], dtype=torch.long, device=x.device)
        path = next(name for name, module in self.hf.named_modules() if module is self.decoder)
        head = returning(Output(last_hidden_state=states), path, self.hf)
        with torch.no_grad():
            out = head(input_ids=ids, use_cache=False)
        return self.clean(out.logits).unflatten(0, x.shape[:2])

    def unembedding(self, ids):
        """As `Transformer.unembedding`."""
        return self.hf.get_output_embeddings().weight.to_dense()[ids].float()

    def output_projections(self):
        """As `Transformer.output_projections`."""
        return [a.projections["output"] for a in self.head_places.values()]

    def new_cache(self, lengths, capacity, rows=1):
        """As `Transformer.new_cache`; it grows with every token, whatever the capacity. InputError
        if positions are scaled by length, and differently for some of these tokens."""
        c = self.hf.config.get_text_config(decoder=True)
        problem = position_problem(c, lengths, [n + capacity for n in lengths], self.name)
        if problem:
            raise InputError(problem)
        return HFCache(self, lengths, rows)

    def run_hf(self, inputs, head_mask=None, mask_on="output", **options):
        """A pass of transformers over R·B texts, with a gradient if the head mask requires one. Its
        changes of the model are undone afterwards."""
        has_gradient = head_mask is not None and head_mask.requires_grad
        forget_lengths(self.hf)
        with ExitStack() as changes:
            changes.enter_context(torch.set_grad_enabled(has_gradient))
            if head_mask is not None:
                check_head_mask(head_mask, self)
                with naming(self.name):
                    projections = find_projections(self.head_places, head_mask, mask_on)
                changes.enter_context(masked_heads(projections, head_mask, mask_on))
            return self.hf(**inputs, **options)

    def clean(self, logits):
        """Float32 logits [..., V]. Transformers pads the vocabulary of some heads."""
        return logits[..., : self.config.vocab_size].to(self.device).float()

    def by_position(self, attentions, cache):
        """Yield the attention of each layer, [R, B, T, H, C], keys at their positions.

        attentions: those of transformers, [R·B, H, T, C]. Heads that a layer does not have attend
        to its last key."""
        attentions = [p for p in attentions if p is not None]
        present = dict(zip(self.head_places, attentions, strict=True))
        T, keys = attentions[0].shape[2:]
        for layer in range(self.config.n_layers):
            out = torch.zeros(
                cache.rows, len(cache.lengths), T, self.config.n_heads, keys, device=self.device
            )
            out[..., -1] = 1
            if layer in present:
                p = cache.padded_right(present[layer]).unflatten(0, (cache.rows, -1))
                out[..., : p.shape[2], :] = p.transpose(2, 3)  # [R, B, H, T, C] → [R, B, T, H, C]
            yield out

    def check(self, ids):
        """Try two prompts through the cache, with a second row of masked heads. InputError if the
        first row's logits differ from those of each text alone.

        Returns whether hidden states can be read: the last one gives the logits."""
        cache = self.new_cache([PROBE - 2, PROBE - 4], 2, rows=2)
        self.can_take_back = cache.can_take_back()
        prompts = nn.utils.rnn.pad_sequence([ids[0, :-2], ids[0, 2:-2]], batch_first=True)
        self.prefill(prompts, cache)
        if cache.kv.get_seq_length() != cache.P:
            raise InputError(
                f"the cache does not reach its attention in transformers {transformers.__version__}"
            )
        head_mask = torch.ones(2, self.config.n_layers, self.config.n_heads, device=self.device)
        for layer, a in self.head_places.items():
            head_mask[1, layer, : a.heads] = 0
        both = self(ids[:, -2:].expand(2, -1), cache, head_mask)[0]
        first = self.run_hf(dict(input_ids=ids), output_hidden_states=True)
        second = self.run_hf(dict(input_ids=ids[:, 2:]))
        alone = self.clean(torch.cat([first.logits[:, -2:], second.logits[:, -2:]]))
        if not alike(both, alone, self.dtype):
            raise InputError(
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
        raise InputError(
            f"{type(hf).__name__} is not a model of transformers, and HFModel cannot unwrap it"
        )
    return hf


@contextmanager
def without_new_hooks(hf):
    """Removes the hooks that transformers leaves where it gave hidden states: a model with them
    cannot be pickled."""
    hooks = {module: {*module._forward_hooks} for module in hf.modules()}
    yield
    for module, before in hooks.items():
        for number in module._forward_hooks.keys() - before:
            del module._forward_hooks[number]
        if not before and "_output_capturing_hooks_installed" in vars(module):
            module._output_capturing_hooks_installed = False


def returning(output, path, module):
    """A shallow copy of the module whose submodule at `path` returns `output`, whatever it gets."""
    new = copy.copy(module)
    new.__dict__.pop("forward", None)  # that of accelerate calls the module itself
    child, _, rest = path.partition(".")
    if child:
        part = returning(output, rest, module.get_submodule(child))
        new._modules = module._modules | {child: part}
    else:
        new.forward = lambda *_, **__: output
    return new


class Output(BaseModelOutputWithPast):
    """A decoder's output; the fields that only some families have are None."""

    def __getattr__(self, name):
        return None


def alike(x, y, dtype):
    """Whether logits differ by no more than rounding, which may change the experts of a token."""
    finite = x.isfinite() | y.isfinite()  # −∞ in both: the token cannot be
    x, y = x[finite], y[finite]
    return bool((x - y).abs().mean() < (1e-3 if dtype == torch.float32 else 0.1) * y.std())
