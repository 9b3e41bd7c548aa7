"""The cache of `hf.model.HFModel`.

B prompts   R rows   P prompt keys   T new tokens   C keys   G key/value heads   K head width"""

import copy

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class HFCache:
    """A `DynamicCache` in the place of `model.Cache`. Keys past a window stay in it; the attention
    mask hides them."""

    def __init__(self, model, lengths, rows):
        self.model = model
        self.rows = rows
        self.P = max(lengths)
        self.slots = 0
        self.kv = DynamicCache(config=model.hf.config)
        self.kv.layers = [without_window(layer) for layer in self.kv.layers]
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
        # A text that has ended goes on beside the others, also beyond learned positions.
        positions = positions.clamp(max=self.model.config.max_positions - 1)
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

    def padded_right(self, x):
        """Numbers of the keys, x [R·B, H, T, C], with the prompts padded on the right."""
        keys = (torch.arange(self.P, device=self.pad.device) + self.pad) % max(1, self.P)  # [B, P]
        keys = keys.to(x.device).repeat(self.rows, 1)[:, None, None].expand(*x.shape[:-1], -1)
        return torch.cat([x[..., : self.P].gather(-1, keys), x[..., self.P :]], -1)

    def take_back(self, n):
        """As `Cache.take_back`."""
        self.slots -= n
        self.kv.crop(-n)

    def can_take_back(self):
        """Whether no layer keeps more than keys and values."""
        return all(type(layer) is DynamicLayer for layer in self.kv.layers)

    def copy_prompts(self, other):
        """As `Cache.copy_prompts`; False if a layer keeps more than keys and values."""
        if not other.can_take_back():
            return False
        if self.P:  # else no layer has keys
            self.kv = with_same_tensors(other.kv)
            self.kv.crop(-other.slots)
            self.kv.reorder_cache(torch.arange(len(self.lengths)).repeat(self.rows))
        return True

    def values(self, n):
        """As `Cache.values`; None unless all layers have all heads, and stored values of their
        width, and the language-model head is in memory."""
        attention = self.model.head_places
        if self.model.hf.get_output_embeddings().weight.is_meta:
            return None
        found = []
        for layer, stored in enumerate(self.kv.layers):
            v = getattr(stored, "values", None)  # [B, G, C, K]
            a = attention.get(layer)
            if v is None or a is None or a.heads != self.model.config.n_heads:
                return None
            if v.shape[-1] != a.width or a.heads % v.shape[1]:
                return None
            found.append(self.padded_right(v[:, :, :n].mT).mT.contiguous())
        return found if len(found) == len(attention) else None

    def select(self, texts):
        """As `Cache.select`, but always copies."""
        every = torch.arange(self.rows * len(self.lengths), device=self.lengths.device)
        new = copy.copy(self)
        new.kv = with_same_tensors(self.kv)  # selected below
        if self.P:
            new.kv.reorder_cache(every.unflatten(0, (self.rows, -1))[:, texts].flatten())
        new.lengths = self.lengths[texts]
        new.pad = self.pad[texts]
        return new


def without_window(layer):
    """The layer of a new cache; one of its kind that keeps all keys, if it has a window."""
    if type(layer) is DynamicSlidingWindowLayer:
        return DynamicLayer()
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    return layer


def with_same_tensors(kv):
    """A copy of a cache of transformers, but for its tensors."""
    return copy.deepcopy(kv, {id(x): x for x in tensors_in(kv)})


def tensors_in(kv):
    """Yields all tensors of a cache of transformers."""
    for layer in kv.layers:
        for value in vars(layer).values():
            for x in value.values() if isinstance(value, dict) else [value]:
                if torch.is_tensor(x):
                    yield x
