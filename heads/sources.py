"""The source of each generated token: the position in the prompt that the retrieval heads attend to."""

from collections import Counter

import torch

from model import Cache

AT_ONCE = 8             # tokens whose attention weights are in memory together


def find_sources(model, prompt, ids, heads):
    """For each new token the prompt positions that the heads attend to most, [(position, share of the heads), …],
    the largest share first.

    prompt, ids: the prompt and the generated tokens, lists of ints. heads: (layer, head) pairs, those that DeCoRe
    masks; they are not masked in this pass. Each head counts for one position of the prompt, even if it attends more to
    the new tokens."""
    if not heads:
        raise ValueError("sources need heads that point at them: the model's retrieval heads")
    counts = [Counter(at[layer][head] for layer, head in heads) for at in attended(model, prompt, ids).tolist()]
    return [[(position, n / len(heads)) for position, n in count.most_common()] for count in counts]


@torch.inference_mode()
def attended(model, prompt, ids):
    """The position in the prompt that each head attends to most as it generates each of the ids, [T, L, H]."""
    cache = Cache(model, [len(prompt) - 1], len(ids))
    model.prefill(torch.tensor([prompt[:-1]], dtype=torch.long, device=model.device), cache)
    tokens, positions = torch.tensor([[prompt[-1], *ids[:-1]]], device=model.device), []
    for part in tokens.split(AT_ONCE, 1):
        weights = []
        model(part, cache, weights=weights)
        # The prompt's last token has the first slot, whose key is number P, after those of the padded prompt.
        top = torch.stack([layer[0, 0, :, :, :cache.P + 1].argmax(-1) for layer in weights])            # [L, T, H]
        positions.append(model.shard.all_gather(top.clamp(max=len(prompt) - 1)).transpose(0, 1))
    return torch.cat(positions).cpu()
