"""Where a causal language model of transformers has its attention heads, and hooks that mask them.

Other threads may run the same model at the same time: all changes here affect only the passes of
the thread that makes them. For that, importing this file replaces one property of transformers'
configurations, `_attn_implementation`. Needs torch and transformers alone: integrations/hub.py
publishes a copy of this file.

    R rows   B texts   T tokens   H query heads   K head width   L layers   C keys"""

import copy
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

TEXTS, PROBE = 4, 7  # so many texts of so many tokens show the structure of a model


class HeadPlaces(NamedTuple):
    """Where the heads of a layer are side by side, each as wide as the others."""

    heads: int  # how many
    width: int
    projections: dict  # mask → the module that reads ("output") or writes ("query") the heads


def probe_ids(model):
    """Different texts, [TEXTS, PROBE]."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    first = torch.arange(TEXTS)[:, None] * (vocab_size // 5) + vocab_size // 2
    return ((first + torch.arange(PROBE)) % vocab_size).to(device_of(model))


def device_of(model):
    """The device of ids and results. Offloaded weights are on "meta" between passes."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def find_decoder(model):
    """The module that gives the last hidden states; some families do not say what it is."""
    decoder = model.get_decoder()
    return model.model if decoder in (model, None) else decoder


def without_training(model):
    """The model; in training mode, a copy that shares its tensors and is in evaluation mode."""
    if not model.training:
        return model
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


@torch.no_grad()
def find_head_places(model):
    """{layer: its `HeadPlaces`} of a model. A layer without attention is left out.

    Two passes show the structure: over one text several times, and over that text and others.
    ValueError if heads are not found, or if the texts of a batch change each other."""
    ids = probe_ids(model)
    calls = record_calls(model, ids[:1].expand_as(ids))
    found = {}
    for module, (layer, inputs, (result, *others)) in calls.items():  # innermost first
        # An attention returns its probabilities too.
        p = next((x for x in others if torch.is_tensor(x) and x.dim() == 4), None)
        if layer in found or p is None or p.shape[2] != p.shape[3]:
            continue
        heads = p.shape[1]
        for child in module.children():
            x = output_of_heads(child, calls, inputs, result, heads)
            if x is not None:
                width = x.shape[-1] // heads
                projections = {"output": child}
                if separate_queries(module, calls, x.shape, width):
                    projections["query"] = module.q_proj
                found[layer] = HeadPlaces(heads, width, projections)
    if not found:
        raise ValueError(
            "no layer has an attention of its own whose output projection reads heads side by side"
        )
    check_texts_stay_apart(model, calls, record_calls(model, ids))
    return found


def record_calls(model, ids):
    """{module: (its layer, its tensor arguments, its results)} of a pass over ids, innermost
    modules first. Of a module that is called twice, None in place of tensors."""
    decoder = find_decoder(model)
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    calls = {}

    def record(layer, module, args, kwargs, out):
        inputs = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x)] or [None]
        results = out if isinstance(out, tuple) else (out,)
        calls[module] = layer, *(([None], [None]) if module in calls else (inputs, results))

    with ExitStack() as changes:
        for i, layer in enumerate(stacks[0] if stacks else ()):
            for module in list(layer.modules())[1:]:  # without the layer itself
                hook = in_this_thread(partial(record, i))
                changes.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        changes.enter_context(eager(decoder))
        model(input_ids=ids)
    return calls


def in_this_thread(hook):
    """The hook, without effect on passes of other threads."""
    thread = get_ident()
    return lambda *args: hook(*args) if get_ident() == thread else None


EAGER = {}  # thread → the configuration whose attention is eager there


def with_eager(chosen):
    """The property, which is "eager" for the configuration in EAGER. A closure, because a notebook
    may load this module again: globals would then be those of the later property."""
    return chosen.getter(
        lambda c: "eager" if EAGER and EAGER.get(get_ident()) is c else chosen.fget(c)
    )


PreTrainedConfig._attn_implementation = with_eager(PreTrainedConfig._attn_implementation)


@contextmanager
def eager(decoder):
    """Inside, attention returns its probabilities; fused kernels do not."""
    EAGER[get_ident()] = decoder.config
    try:
        yield
    finally:
        del EAGER[get_ident()]


def output_of_heads(child, calls, inputs, result, heads):
    """The heads side by side, [B, T, H·K], if this child of an attention is its output projection:
    it reads them, and the attention's result is the child's, or that plus an input of the
    attention. None otherwise."""
    _, [x, *_], [y, *_] = calls.get(child, (None, [None], [None]))
    # Norms, which may come last, have only vectors.
    multiplies = any(w.dim() > 1 for w in (*child.parameters(), *child.buffers()))
    if not (multiplies and torch.is_tensor(y) and y.shape == result.shape):
        return None
    residuals = [r for r in inputs if r.shape == y.shape and r.device == y.device]
    is_last = torch.equal(y, result) or any(torch.equal(y + r, result) for r in residuals)
    return x if is_last and x.shape[-1] % heads == 0 else None


def separate_queries(attention, calls, shape, width):
    """Whether a query projection has the heads side by side, no norm mixes them or adds a bias to
    zeros, and no projection besides gives scores (Inkling's, of relative positions)."""
    projection = getattr(attention, "q_proj", None)
    if projection not in calls or calls[projection][2][0].shape != shape:
        return False
    for name, p in attention.named_parameters():
        if name.startswith("r_proj"):
            return False
        if name.startswith("q") and "norm" in name:
            if p.numel() > width or name.endswith("bias"):
                return False
    return True


def check_texts_stay_apart(model, calls, calls_beside_others):
    """ValueError if a module gives the first text other results beside other texts.

    Kernels that round all activations of a batch by one scale do. Experts may round their sums
    differently, far below the limit; those kernels differ by 6e-4 and more."""
    for module, (_, [x, *_], [y, *_]) in calls.items():
        _, [x_beside, *_], [y_beside, *_] = calls_beside_others[module]
        if not hasattr(module, "weight") or not torch.is_tensor(x) or not torch.is_tensor(y):
            continue
        x, x_beside = first_text(x), first_text(x_beside)
        y, y_beside = first_text(y).float(), first_text(y_beside).float()
        if torch.equal(x, x_beside) and (y - y_beside).abs().mean() > 1e-4 * y.std():
            name = next(name for name, m in model.named_modules() if m is module)
            raise ValueError(
                f"{name} ({type(module).__name__}) computes a text differently beside others: "
                "its kernel rounds the activations of a batch together, as LLM.int8 does; "
                "load the weights in 4 bits, or not quantized"
            )


def first_text(x):
    """The part of a tensor [TEXTS, …], or [TEXTS·PROBE, …], that is of the first text."""
    return x[: len(x) // TEXTS]


def find_projections(places, head_mask, mask_on):
    """{layer: (the module whose hook masks heads, number of heads)} of the layers in which
    head_mask [R, L, H] or [R, B, L, H] masks heads; of all layers if it requires a gradient.
    ValueError for heads that cannot be masked."""
    projections = {}
    masked = (head_mask != 1).flatten(0, -3).any(0)  # [L, H]
    layers = masked.any(-1).nonzero().flatten().tolist()
    for layer in places if head_mask.requires_grad else layers:
        a = places.get(layer, HeadPlaces(0, 0, {}))
        if masked[layer, a.heads :].any():
            raise ValueError(f"layer {layer} has {a.heads} heads; mask others")
        if mask_on not in a.projections:
            raise ValueError(
                f"layer {layer} has no {mask_on} projection whose heads stay apart: "
                'use mask="output"'
            )
        projections[layer] = a.projections[mask_on], a.heads
    return projections


@contextmanager
def masked_heads(projections, head_mask, mask_on):
    """Inside, a pass over R·B texts, row 0's, then row 1's, multiplies its heads by head_mask
    [R, L, H] or [R, B, L, H]. projections: as `find_projections` returns."""
    called = set()

    def silence(layer, heads, module, args, *output):
        """Masks the input of an output projection, or the output of a query projection,
        [R·B, T, H·K]."""
        called.add(layer)
        x, *others = output or args
        factors = head_mask[..., layer, None, :heads, None].to(x)  # [R, 1, H, 1], [R, B, 1, H, 1]
        # [R, B·T, H, K] or [R, B, T, H, K]
        split = x.reshape(*factors.shape[:-3], -1, heads, x.shape[-1] // heads)
        x = (split * factors).view(x.shape)
        return x if output else (x, *others)

    with ExitStack() as hooks:
        for layer, (module, heads) in projections.items():
            add = module.register_forward_hook
            if mask_on == "output":
                add = module.register_forward_pre_hook
            hooks.enter_context(add(in_this_thread(partial(silence, layer, heads))))
        yield
    for layer in projections.keys() - called:
        raise ValueError(f"layer {layer} does not call its projection: its heads are not masked")
