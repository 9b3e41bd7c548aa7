"""One transformer for Llama, Mistral and Qwen, with an explicit mask over its attention heads.

A head mask [R, L, H] of ones and zeros makes R *rows* of one forward pass: R copies of the model
that differ only in which heads are masked. They share every weight, and the keys and values of the
prompt, which are stored once.

    B prompts   R rows   T new tokens   P prompt keys   S slots for new tokens   C keys of a step
    L layers    H query heads   G key/value heads   K head width   D model width   V vocabulary
    (H and G: those of this rank)

In constructors, c is the model's Config, and kw the device and dtype. In passes, `head_mask` says
which heads are masked, and `mask_on` what it multiplies, "output" or "query" (the setting `mask` of
methods); `attend` is the attention of each layer: a `PrefillAttention` or a `DecodeAttention`.
"""

import copy
import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from runtime.attention import biased_attention, causal_attention
from runtime.checkpoint import Checkpoint
from runtime.checks import check_head_mask, parse_heads
from runtime.config import LEAST_PREFIX, default_dtype, find_dtype, rope_frequencies
from runtime.pack import pack
from runtime.parallel import Shard, check_split, rank_device
from runtime.values import MASKS, check_name
from runtime.weights import load_weights, stored_dtype, untie

CHUNK = 2048  # tokens per prefill pass, summed over the batch; at least 16 of each prompt
ALIGNMENT = 64  # P and S·R are multiples of this


class Attention(nn.Module):
    def __init__(self, c, shard, **kw):
        super().__init__()
        self.shard = shard
        self.width = c.head_dim
        self.n_heads = c.n_heads // shard.size
        self.n_kv_heads = max(1, c.n_kv_heads // shard.size)
        qkv_heads = self.n_heads + 2 * self.n_kv_heads
        self.qkv = Linear(c.d_model, qkv_heads * c.head_dim, c.qkv_bias, **kw)
        self.o = Linear(self.n_heads * c.head_dim, c.d_model, **kw)
        # The bias is not in `o`, because it is added once, after the sum over ranks.
        self.o_bias = nn.Parameter(torch.zeros(c.d_model, **kw)) if c.o_bias else None
        self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps, **kw) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps, **kw) if c.qk_norm else None

    def forward(self, x, layer, attend, head_mask, mask_on):
        """x [R, B, T, D] → the same shape. head_mask: this layer's, [R, 1|B, 1, H, 1], or
        None."""
        H = self.n_heads
        G = self.n_kv_heads
        qkv = self.qkv(x).unflatten(-1, (-1, self.width))  # [R, B, T, H + 2·G, K]
        qk, v = qkv.split((H + G, G), -2)
        if self.q_norm:
            qk = torch.cat([self.q_norm(qk[..., :H, :]), self.k_norm(qk[..., H:, :])], -2)
        q, k = rotate(qk, *attend.rope).split((H, G), -2)  # [R, B, T, H, K], [R, B, T, G, K]
        if head_mask is not None and mask_on == "query":
            q = q * head_mask  # a query of zeros averages the values of all its keys
        y = attend(layer, q, k, v)
        if head_mask is not None and mask_on == "output":
            y = y * head_mask  # Eq. 4 and 5: a masked head adds exactly zero
        y = self.shard.all_reduce(self.o(y.flatten(-2)))
        return y if self.o_bias is None else y + self.o_bias


class MLP(nn.Module):
    def __init__(self, c, shard, **kw):
        super().__init__()
        self.shard = shard
        self.gate_up = Linear(c.d_model, 2 * c.d_ff // shard.size, **kw)
        self.down = Linear(c.d_ff // shard.size, c.d_model, **kw)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.shard.all_reduce(self.down(F.silu(gate) * up))


class Layer(nn.Module):
    def __init__(self, c, shard, **kw):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.d_model, c.norm_eps, **kw)
        self.attn = Attention(c, shard, **kw)
        self.mlp_norm = nn.RMSNorm(c.d_model, c.norm_eps, **kw)
        self.mlp = MLP(c, shard, **kw)

    def forward(self, x, layer, attend, head_mask, mask_on):
        x = x + self.attn(self.attn_norm(x), layer, attend, head_mask, mask_on)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder-only transformer with random weights; `Transformer.load` reads a checkpoint's.
    `hf.HFModel` has the same members, but for `run_layers` and `embedding`.

    Call the model itself for logits, `prefill` to store prompts in a cache, and `read_layers` for
    hidden states, which `logits` turns into logits. All three run their tokens by `run_layers`."""

    checkpoint = None  # a runtime.checkpoint.Checkpoint, if the weights are from its files
    bos_id = None
    eos_ids = ()  # that end a text
    pad_ids = ()
    product = None  # of a CPU's linear layers, such as "packed", set by `load`: see runtime/pack.py
    reads_one_text = False  # all rows of a pass read the same tokens
    has_exits = True  # `read_layers` works
    can_take_back = True  # its caches can forget their last tokens
    # (cache, tokens of each pass) → a context, in which prompts are read
    while_reading = staticmethod(lambda cache, passes: nullcontext())

    def __init__(self, config, shard=None, device="cpu", dtype=torch.float32):
        super().__init__()
        shard = shard or Shard()
        kw = dict(device=device, dtype=dtype)
        check_split(config, shard.size)
        self.config = config
        self.shard = shard
        self.name = config.model_type
        vocab = -(-config.vocab_size // shard.size)  # of one rank, rounded up
        self.embed = Linear(config.d_model, vocab, **kw)  # may be the head too
        self.layers = nn.ModuleList(Layer(config, shard, **kw) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps, **kw)
        self.lm_head = self.embed if config.tied_embeddings else Linear(config.d_model, vocab, **kw)
        self.frequencies = rope_frequencies(config).to(device)

    device = property(lambda self: self.norm.weight.device)
    dtype = property(lambda self: self.norm.weight.dtype)
    can_record = property(lambda self: self.device.type == "cuda")  # steps as CUDA graphs

    def _apply(self, *args, **kw):
        """Called by `.to`. The weights move and are converted; the rotary frequencies move, and
        stay float32."""
        super()._apply(*args, **kw)
        self.frequencies = rope_frequencies(self.config).to(self.device)
        return self

    def forward(self, ids, cache=None, head_mask=None, mask_on="output"):
        """Logits of every position, float32. ids [B, T] → [B, T, V]; with a cache or a head mask →
        [R, B, T, V].

        cache: the tokens continue its texts and are stored in it. head_mask: [R, L, H] of 0 and 1,
        or [R, B, L, H] for a mask per text; it may require a gradient.
        mask_on: what it multiplies, "output" (Eq. 4 and 5) or "query" (the published runs)."""
        x, _ = self.read_layers(ids, (), cache, head_mask, mask_on)
        logits = self.logits(x)
        return logits[0] if cache is None and head_mask is None else logits

    def read_attention(self, ids, cache, head_mask=None, mask_on="output"):
        """As `forward` → the logits, and a list of each layer's attention, [R, B, T, H, C]
        float32."""
        probabilities = []
        attend = DecodeAttention(self, cache, ids.shape[-1], probabilities)
        x, _ = self.run_layers(ids, attend, head_mask, mask_on)
        cache.slots += ids.shape[-1]
        return self.logits(x), probabilities

    def read_layers(self, ids, layers, cache=None, head_mask=None, mask_on="output"):
        """The last hidden states of ids [B, T], after the final norm, and a list of those of
        `layers`, in ascending order: [R, B, T, D] each. 0 is the embeddings, i the output of the
        i-th layer. ids [R, B, T]: with a cache, tokens of their own in each row. The other
        arguments are those of `forward`."""
        T = ids.shape[-1]
        if cache is None:
            attend = PrefillAttention(self, 0, T)
        else:
            attend = DecodeAttention(self, cache, T)
        states = self.run_layers(ids, attend, head_mask, mask_on, layers)
        if cache is not None:
            cache.slots += T
        return states

    def run_layers(self, ids, attend, head_mask=None, mask_on="output", layers=()):
        """As `read_layers`. attend: what the tokens attend to."""
        c = self.config
        rows = attend.rows
        layer_masks = [None] * c.n_layers
        check_name(mask_on, "mask_on", MASKS)
        if head_mask is not None:
            check_head_mask(head_mask, self)
            rows = len(head_mask)
            head_mask = head_mask[..., self.shard.part(c.n_heads)].to(self.device, self.dtype)
            head_mask = head_mask.reshape(rows, -1, *head_mask.shape[-2:])  # [R, 1|B, L, H]
            layer_masks = head_mask[..., None, :, None].unbind(2)  # L of [R, 1|B, 1, H, 1]
        x = self.embedding(ids).expand(rows, -1, -1, -1)
        states = []
        for i, layer in enumerate(self.layers):
            if i in layers:
                states.append(x)
            x = layer(x, i, attend, layer_masks[i], mask_on)
        x = self.norm(x)
        if c.n_layers in layers:
            states.append(x)
        return x, states

    def embedding(self, ids, weight=None):
        """[..., T] → [..., T, D]. weight: another matrix with a row per token.

        A rank has zeros for ids outside its part of the vocabulary; the sum is complete."""
        weight = self.embed.weight if weight is None else weight
        if self.shard.size == 1:
            return F.embedding(ids, weight)
        local = ids - self.shard.part(self.config.vocab_size).start
        inside = (local >= 0) & (local < weight.shape[0])
        return self.shard.all_reduce(
            F.embedding(local.where(inside, 0), weight) * inside[..., None]
        )

    def unembedding(self, ids):
        """Rows of the language-model head: [..., T] → [..., T, D] float32."""
        weight = self.lm_head.weight.to_dense()  # a packed one has no rows
        return self.embedding(ids, weight).float()

    def output_projections(self):
        """Each layer's output projection, of this rank's heads."""
        return [layer.attn.o for layer in self.layers]

    def logits(self, x):
        """The language-model head: last hidden states [R, B, T, D] → [R, B, T, V] float32."""
        return self.shard.all_gather(self.lm_head(x)).float()[..., : self.config.vocab_size]

    def new_cache(self, lengths, capacity, rows=1):
        """A `Cache` for prompts of these lengths, and `capacity` new tokens of each text in each
        row."""
        return Cache(self, lengths, capacity, rows)

    @torch.no_grad()
    def prefill(self, ids, cache, head_mask=None, mask_on="output"):
        """Store the keys and values of prompts [B, T], padded on the right, in the cache. Their
        common prefix is read once."""
        chunks = [*prefill_chunks(ids, cache.lengths.tolist())]
        with self.while_reading(cache, [chunk.numel() for _, chunk, _ in chunks]):
            for start, chunk, n in chunks:
                attend = PrefillAttention(self, start, chunk.shape[1], cache.select(slice(n)))
                self.run_layers(chunk, attend, head_mask, mask_on)

    @classmethod
    @torch.inference_mode(False)  # inference tensors have no gradients
    def load(cls, name, device="cpu", dtype=None, shard=None):
        """A model with the weights of a folder, a hub id or a `Checkpoint`. Each rank reads only
        its slices.

        device: "cpu", "cuda", "cuda:1", … dtype: "bfloat16", torch.bfloat16, …; None: float32 for
        fewer than a billion parameters on a CPU, else the checkpoint's. shard: None joins the ranks
        that torchrun started. InputError if config.json and the weights disagree."""
        device = rank_device(device)
        shard = shard or Shard.from_environment(device.type)
        checkpoint = Checkpoint.of(name, weights=True)
        files = checkpoint.tensors
        checkpoint.check_layers()
        config = untie(checkpoint.config, files)
        dtype = dtype or default_dtype(checkpoint, device) or config.dtype
        dtype = find_dtype(dtype) if dtype else stored_dtype(files)
        model = cls(config, shard, "meta", dtype)
        model.name = checkpoint.name
        model.checkpoint = checkpoint
        model.bos_id, model.eos_ids, model.pad_ids = checkpoint.special_ids
        load_weights(model, checkpoint, device)
        model.frequencies = rope_frequencies(config).to(device)
        if device.type == "cpu":
            model.product = pack(model, Linear, keep="embed")
        return model.requires_grad_(False)


class Linear(nn.Module):
    def __init__(self, n_in, n_out, bias=False, **kw):
        super().__init__()
        weight = torch.empty(n_out, n_in, **kw)
        # normal_() on "meta" triggers slow imports.
        self.weight = nn.Parameter(weight if weight.is_meta else weight.normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(n_out, **kw)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def prefill_chunks(ids, lengths):
    """Yield (start, tokens, n) of each pass that reads prompts ids [B, T] of these lengths, for the
    first n texts.

    Tokens are [1, t] in the common prefix. After it they are [n, t]: texts that have ended are left
    out, if no longer one follows them."""
    shared = common_prefix(ids)
    start = 0
    while start < ids.shape[1]:
        if start < shared:
            n = len(ids)
            tokens = ids[:1, start:shared]
        else:
            n = max(b for b, length in enumerate(lengths, 1) if length > start or b == 1)
            tokens = ids[:n, start:]
        tokens = tokens[:, : max(16, CHUNK // len(tokens))]
        yield start, tokens, n
        start += tokens.shape[1]


def common_prefix(ids):
    """How many first tokens the prompts [B, T] have in common; 0 if fewer than LEAST_PREFIX."""
    same = (ids == ids[:1]).all(0)
    length = int(same.cumprod(0).sum())
    return length if length >= LEAST_PREFIX else 0


def rope(model, positions):
    """cos and sin for `rotate` at positions [1|B, T]: two of [1|B, T, 1, K].

    Each angle is there twice, for both elements of a pair. The sine is negative for the first
    element."""
    angles = positions[..., None, None] * model.frequencies  # [1|B, T, 1, K/2]
    cos = torch.cat([angles.cos(), angles.cos()], -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    return cos.to(model.dtype), sin.to(model.dtype)


def rotate(x, cos, sin):
    """Rotary position embedding: elements i and i + K/2 of x [R, B, T, H, K] are a pair
    (a, b) → (a cos − b sin, b cos + a sin)."""
    swapped = x.roll(x.shape[-1] // 2, -1)  # (b, a)
    return torch.addcmul(x * cos, swapped, sin)


def make_head_mask(rows, model):
    """The heads to mask in each row, (layer, head) pairs or "layer-head" → [R, L, H] of 0 and 1."""
    head_mask = torch.ones(len(rows), model.config.n_layers, model.config.n_heads)
    for row, heads in zip(head_mask, rows):
        for layer, head in parse_heads(heads, model):
            row[layer, head] = 0
    return head_mask.to(model.device)


def prefilled(model, prompts, capacity, rows=1, head_mask=None, mask_on="output"):
    """A cache with the keys and values of prompts, read once for all rows, without the last tokens;
    with place for `capacity` tokens after each."""
    cache = model.new_cache([len(p) - 1 for p in prompts], capacity, rows)
    model.prefill(pad([p[:-1] for p in prompts], model.device), cache, head_mask, mask_on)
    return cache


def pad(sequences, device="cpu"):
    """Lists of ints → [B, T], padded on the right with 0."""
    tensors = [torch.tensor(s, dtype=torch.long) for s in sequences]
    return pad_sequence(tensors, batch_first=True).to(device)


# ------------------------------------------------------------------------------ cache and attention


class Cache:
    """Keys and values of every layer: the prompts', stored once, then those of each row's new
    tokens, slot by slot.

        kv[layer] [2, B, G, P + S·R, K]:
        prompt 0 … P−1 | slot 0: row 0, row 1 | slot 1: row 0, row 1 | …

    Rows alternate, so that the keys in use are one slice. For example, P = 64 and R = 2: slot 3 of
    row 1 is key 64 + 3·2 + 1 = 71, and in a text of 50 prompt tokens it has position 50 + 3 = 53.
    `slots` counts the slots in use. P and S·R are rounded up to multiples of ALIGNMENT."""

    def __init__(self, model, lengths, capacity, rows=1):
        attn = model.layers[0].attn
        self.rows = rows
        self.P = round_up(max(lengths), ALIGNMENT)
        self.alignment = ALIGNMENT // math.gcd(ALIGNMENT, rows)  # of slots
        self.S = round_up(capacity, self.alignment)
        shape = 2, len(lengths), attn.n_kv_heads, self.P + self.S * rows, attn.width
        self.kv = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in model.layers]
        self.lengths = torch.tensor(lengths, device=model.device)
        self.slots = torch.tensor(0, device=model.device)  # on the device, for CUDA graphs

    def take_back(self, n):
        """Forget the last n tokens of each text. No query sees their slots, which are written
        anew."""
        self.slots -= n

    def copy_prompts(self, other):
        """Take the keys and values of the same prompts from another cache. Returns whether that
        can be done."""
        for new, old in zip(self.kv, other.kv):
            new[..., : self.P, :] = old[..., : self.P, :]
        return True

    def values(self, n):
        """Each layer's values of the first n keys, [B, G, n, K]."""
        return [kv[1, ..., :n, :] for kv in self.kv]

    def select(self, texts):
        """A cache of some texts. texts: a slice, whose keys and values are views of these, or a
        tensor of indices, for copies."""
        new = copy.copy(self)
        new.kv = [kv[:, texts] for kv in self.kv]
        new.lengths = self.lengths[texts]
        new.slots = self.slots.clone()
        return new


def round_up(n, unit):
    return -(-n // unit) * unit


class PrefillAttention:
    """The attention of tokens start … start + T of every text: each sees itself and those before
    it.

    A cache, if any, stores their keys and values. A chunk with B = 1 is a common prefix, stored for
    every text."""

    rows = 1

    def __init__(self, model, start, T, cache=None):
        self.windows = model.config.windows
        self.cache = cache
        self.start = start
        self.end = start + T
        self.rope = rope(model, torch.arange(start, start + T, device=model.device)[None])

    def __call__(self, layer, q, k, v):
        """q [R, B, T, H, K], k and v [R, B, T, G, K] → [R, B, T, H, K], in memory linear in the
        prompt."""
        shape = q.shape
        q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))  # [R·B, H|G, T, K]
        if self.cache:
            kv = self.cache.kv[layer][..., : self.end, :]
            kv[..., self.start :, :] = torch.stack([k, v])
            k, v = kv[:, : len(q)]
        y = causal_attention(q, k, v, self.windows[layer])  # [R·B, H, T, K]
        return y.transpose(1, 2).reshape(shape)


class DecodeAttention:
    """The attention of the next T tokens of every text, in every row: each sees the prompt and its
    row's new tokens up to itself."""

    def __init__(self, model, cache, T, probabilities=None):
        R = cache.rows
        device = model.device
        self.rows = R
        self.cache = cache
        self.windows = model.config.windows
        self.probabilities = probabilities
        slots = cache.slots + torch.arange(T, device=device)  # [T]
        self.positions = cache.lengths[:, None] + slots  # [B, T]
        self.rope = rope(model, self.positions)
        keys = cache.P + slots[:, None] * R + torch.arange(R, device=device)  # [T, R]
        self.keys = keys.flatten()
        if model.can_record:
            used = cache.S  # all recorded steps have the same shapes
        else:
            used = round_up(int(cache.slots) + T, cache.alignment)
        self.C = cache.P + used * R
        self.biases = {window: self.bias(model, window) for window in set(self.windows)}

    def __call__(self, layer, q, k, v):
        """q [R, B, T, H, K], k and v [R, B, T, G, K] → [R, B, T, H, K].

        The queries of all rows that share a key head are side by side, so that each key is read
        once."""
        G = k.shape[3]
        buffer = self.cache.kv[layer]
        new = torch.stack([k, v])  # [2, R, B, T, G, K]
        new = new.permute(0, 2, 4, 3, 1, 5)  # [2, B, G, T, R, K]
        buffer.index_copy_(3, self.keys, new.flatten(3, 4))
        k, v = buffer[..., : self.C, :]  # [B, G, C, K]
        q = q.unflatten(3, (G, -1))  # [R, B, T, G, H/G, K]
        q = q.permute(1, 3, 0, 2, 4, 5)  # [B, G, R, T, H/G, K]
        sizes = q.shape[2:5]
        bias = self.biases[self.windows[layer]]
        is_read = self.probabilities is not None
        y, probabilities = biased_attention(q.flatten(2, 4), k, v, bias, is_read)
        if probabilities is not None:
            self.probabilities.append(by_row(probabilities, sizes))
        return by_row(y, sizes)

    def bias(self, model, window):
        """0 for the keys that a query sees, else −∞: [B, 1, R·T·H/G, C].

        No query sees padding, a later token, another row, or a key past the window."""
        P = self.cache.P
        R = self.cache.rows
        lengths = self.cache.lengths[:, None]  # [B, 1]
        key = torch.arange(self.C, device=model.device)
        in_prompt = key < P
        slot = (key - P) // R
        row = (key - P) % R
        position = torch.where(in_prompt, key, lengths + slot)  # [B, C]
        padding = in_prompt & (key >= lengths)  # [B, C]
        age = self.positions[..., None] - position[:, None]  # [B, T, C]
        seen = (age >= 0) & (age < (window or 2**30)) & ~padding[:, None]
        own_row = in_prompt | (row == torch.arange(R, device=model.device)[:, None])  # [R, C]
        visible = (seen[:, None] & own_row[:, None]).flatten(1, 2)  # [B, R·T, C]
        attn = model.layers[0].attn
        visible = visible.repeat_interleave(attn.n_heads // attn.n_kv_heads, 1)
        return visible[:, None].to(model.dtype).log()  # log 1 = 0, log 0 = −∞


def by_row(x, sizes):
    """[B, G, R·T·H/G, X] → [R, B, T, H, X]; sizes: (R, T, H/G)."""
    x = x.unflatten(2, sizes)  # [B, G, R, T, H/G, X]
    x = x.permute(2, 0, 3, 1, 4, 5)  # [R, B, T, G, H/G, X]
    return x.flatten(3, 4)
