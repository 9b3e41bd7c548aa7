"""The source of each generated token: the prompt position that the retrieval heads attend to."""

from collections import Counter

import torch

from decore import prefilled

TOKENS = 8  # per pass, whose attention weights are in memory together


@torch.inference_mode()
def find_sources(model, prompt, ids, heads, special=()):
    """The prompt positions that the heads attend to most, per generated token: [(position, share of
    the heads), …], the largest share first.

    prompt, ids: the prompt and the generated tokens, lists of ints. heads: (layer, head) pairs,
    those that DeCoRe masks; they are not masked in this pass. Each head counts for one position of
    the prompt, even if it attends more to the new tokens. special: ids of special tokens,
    those of `Tokenizer.hidden` or of `all_special_ids` of transformers' tokenizers. Heads that have
    nothing to read attend to these, often to the first: without this argument a picture of a chat
    has one dark column, and no other. They are left out of the shares."""
    cache = prefilled(model, [prompt], len(ids))
    tokens = torch.tensor([[prompt[-1], *ids[:-1]]], device=model.device)
    sources = []
    for part in tokens.split(TOKENS, 1):
        _, layers = model.read_attention(part, cache)  # L × [1, 1, T, H, C]
        # Keys of the padded prompt, and the first slot: the prompt's last token has key P.
        tops = [layer[0, 0, :, :, : cache.P + 1].argmax(-1) for layer in layers]
        top = model.shard.all_gather(torch.stack(tops).clamp(max=len(prompt) - 1))  # [L, T, H]
        for at in top.transpose(0, 1).tolist():
            tops = [at[layer][head] for layer, head in heads]
            counts = Counter(position for position in tops if prompt[position] not in special)
            total = counts.total()
            sources.append([(position, n / total) for position, n in counts.most_common()])
    return sources
