"""Where a model read what it wrote: the place in the prompt that its retrieval heads attend to at each new token."""

from collections import Counter

import torch

from model import Cache

AT_ONCE = 8             # tokens whose attention weights are in memory together


def find_sources(model, prompt, ids, heads):
    """For each new token the prompt positions that the heads attend to most, [(position, share of the heads), …],
    the largest share first.

    prompt, ids: what was read and what was written, lists of ints. heads: (layer, head) pairs, those that DeCoRe masks;
    here they are kept, and the text is read again. Each head points at one position of the prompt, even where it
    attends to the new tokens still more."""
    if not heads:
        raise ValueError("sources need heads that point at them: the model's retrieval heads")
    counts = [Counter(at[layer][head] for layer, head in heads) for at in attended(model, prompt, ids).tolist()]
    return [[(position, n / len(heads)) for position, n in count.most_common()] for count in counts]


@torch.inference_mode()
def attended(model, prompt, ids):
    """The position in the prompt that each head attends to most as it writes each of the ids, [T, L, H]."""
    cache = Cache(model, [len(prompt) - 1], len(ids))
    model.prefill(torch.tensor([prompt[:-1]], dtype=torch.long, device=model.device), cache)
    tokens, found = torch.tensor([[prompt[-1], *ids[:-1]]], device=model.device), []
    for some in tokens.split(AT_ONCE, 1):
        weights = []
        model(some, cache, weights=weights)
        # The prompt's last token was read as the first of the new ones, whose keys follow those of the padded prompt.
        top = torch.stack([layer[0, 0, :, :, :cache.P + 1].argmax(-1) for layer in weights])            # [L, T, H]
        found.append(model.shard.all_gather(top.clamp(max=len(prompt) - 1)).transpose(0, 1))
    return torch.cat(found).cpu()
