"""Finds the attention of a model of transformers, and the projections that read and write its heads, in any family.

    T tokens   H query heads   K head width"""

from types import SimpleNamespace

import torch
from torch import nn


@torch.no_grad()
def find_attention(decoder, n_layers, **inputs):
    """{layer: its attention `module`, `output` projection, `query` projection or None, and number of `heads`}.

    Attention is the innermost module in a layer that returns its probabilities, [1, H, T, T], and the result of a child
    that reads the heads side by side, [1, T, H·K]: the output projection. inputs: those of a pass that lets attention
    return its probabilities. A layer without attention is left out; ValueError if heads are not found."""
    results, seen, found = {}, {}, {}                       # module → its first argument and result; layer → …

    def look(layer, module, args, out):
        result, p = out[0] if isinstance(out, tuple) else out, find_probabilities(out)
        results[module] = args[0] if args else None, result
        if layer in found or p is None or p.shape[2] != p.shape[3]:
            return
        seen[layer] = type(module).__name__
        for child in module.children():
            x, y = results.get(child, (None, None))
            has_matrix = any(w.dim() > 1 for w in (*child.parameters(), *child.buffers()))          # norms have none
            if has_matrix and torch.is_tensor(y) and torch.equal(y, result) and x.shape[-1] % p.shape[1] == 0:
                found[layer] = SimpleNamespace(module=module, output=child, heads=p.shape[1],
                                               query=find_query(module, results, x.shape, p.shape[1]))

    layers = next((m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers), ())
    hooks = [m.register_forward_hook(lambda m, args, out, i=i: look(i, m, args, out))
             for i, layer in enumerate(layers) for m in layer.modules() if m is not layer]
    try:
        decoder(**inputs, output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    if missing := seen.keys() - found.keys():
        raise ValueError(f"{seen[min(missing)]} has no output projection that reads its heads side by side")
    if not found or len({id(a.output) for a in found.values()}) < len(found):       # layers may share an attention
        raise ValueError("no layer has an attention of its own whose heads can be masked")
    return found


def find_probabilities(out):
    """The first tensor of four dimensions that a module returns after its result, such as [R·B, H, T, C]."""
    return next((x for x in out[1:] if torch.is_tensor(x) and x.dim() == 4), None) if isinstance(out, tuple) else None


def find_query(attention, results, shape, heads):
    """The query projection; None if its result has another shape, or if a norm mixes the heads or moves zero."""
    query = getattr(attention, "q_proj", None)
    norms = [(name, p) for name, p in attention.named_parameters() if name.startswith("q") and "norm" in name]
    apart = all(p.numel() <= shape[-1] // heads and not name.endswith("bias") for name, p in norms)
    return query if query in results and results[query][1].shape == shape and apart else None
