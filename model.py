"""One transformer for Llama, Mistral and Qwen, with an explicit mask over its attention heads.

A head mask [R, L, H] of ones and zeros makes R *rows* of one forward pass that share every weight. The stream has one
row up to the first layer whose mask differs between rows. There `head_output * mask` broadcasts to R rows, and so does
everything above. New tokens of all rows attend to one buffer of keys: the prompt's, which all rows share, then each
row's own.

    B batch   R rows   T new tokens   P prompt tokens   S new tokens that fit   C = P + S·R keys   V vocabulary
    L layers   H query heads   G key/value heads   K head width   D model width
    Under tensor parallelism H and G count this rank's heads.
"""

import copy
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime.config import Config, rope_frequencies
from runtime.pack import pack
from runtime.parallel import Shard, check_split, rank_device
from runtime.weights import checkpoint_folder, load_weights, untie, weight_files

MASKS = ("output", "query")     # output: the paper's Eq. 4 and 5; query: what the published runs did
NEVER = 2**30                   # the place of a key that no query may see: padding
CHUNK = 2048                    # prompt tokens per prefill pass
ROOM = 64                       # keys by which a cache grows
PART = 1024                     # keys that one product sums over; of more, a GPU's processors share the work


class Attention(nn.Module):
    def __init__(self, layer, c, shard, **kw):
        super().__init__()
        self.layer, self.shard, self.width = layer, shard, c.head_dim
        self.heads, self.kv_heads = c.n_heads // shard.size, max(1, c.n_kv_heads // shard.size)
        self.qkv = Linear(c.d_model, (self.heads + 2 * self.kv_heads) * c.head_dim, c.qkv_bias, **kw)
        self.o = Linear(self.heads * c.head_dim, c.d_model, **kw)
        self.o_bias = nn.Parameter(torch.zeros(c.d_model, **kw)) if c.o_bias else None
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, **kw) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, **kw) if c.qk_norm else None

    def forward(self, x, tokens, head_mask, mask):
        """x [B, 1|R, T, D], tokens what is attended to (`Reading` or `Decoding`), head_mask [1|B, R, H] or None."""
        H, G = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (H + 2 * G, self.width))            # [B, R, T, H + 2G, K]
        if self.q_norm:
            q, k, v = qkv.split((H, G, G), -2)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], -2)
        rotate_(qkv[..., :H + G, :], *tokens.rope)
        q, kv = qkv.split((H, 2 * G), -2)
        if head_mask is not None and mask == "query":
            q = q * head_mask[:, :, None, :, None]              # a silenced head averages all the values it may see
        y = tokens.attend(self.layer, q, kv)                                # [B, R, T, H, K]
        if head_mask is not None and mask == "output":
            y = y * head_mask[:, :, None, :, None]              # Eq. 4 and 5: a silenced head adds exactly zero
        y = self.shard.all_reduce(self.o(y.flatten(-2)))
        return y if self.o_bias is None else y + self.o_bias


class MLP(nn.Module):
    def __init__(self, c, shard, **kw):
        super().__init__()
        self.shard = shard
        self.gate_up = Linear(c.d_model, 2 * c.d_ff // shard.size, **kw)
        self.down = Linear(c.d_ff // shard.size, c.d_model, **kw)

    def forward(self, x, stream):
        """→ stream + MLP(x)."""
        gate, up = self.gate_up(x).chunk(2, -1)
        y = F.silu(gate) * up
        if self.shard.size == 1:
            return self.down(y, stream)
        return stream + self.shard.all_reduce(self.down(y))


class Layer(nn.Module):
    def __init__(self, layer, c, shard, **kw):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(c.d_model, c.norm_eps, **kw), Attention(layer, c, shard, **kw)
        self.mlp_norm, self.mlp = RMSNorm(c.d_model, c.norm_eps, **kw), MLP(c, shard, **kw)

    def forward(self, x, tokens, head_mask, mask):
        x = x + self.attn(self.attn_norm(x), tokens, head_mask, mask)       # one row plus R rows: here the stream forks
        return self.mlp(self.mlp_norm(x), x)


class Transformer(nn.Module):
    """A decoder-only transformer with random weights; `Transformer.load` gives one with a checkpoint's."""

    def __init__(self, config, shard=None, device="cpu", dtype=torch.float32):
        super().__init__()
        shard = shard or Shard()
        check_split(config, shard.size)
        kw = dict(device=device, dtype=dtype)
        self.config, self.shard, self.name, self.folder = config, shard, config.model_type, None
        vocab = -(-config.vocab_size // shard.size)
        self.embed = Linear(config.d_model, vocab, **kw)
        self.layers = nn.ModuleList(Layer(i, config, shard, **kw) for i in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps, **kw)
        self.lm_head = self.embed if config.tied_embeddings else Linear(config.d_model, vocab, **kw)
        frequencies, self.rope_scale = rope_frequencies(config)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def __repr__(self):
        c, parameters = self.config, sum(p.numel() for p in [*self.parameters(), *self.buffers()])
        return (f"Transformer({self.name}: {c.model_type}, {c.n_layers} layers of {c.n_heads} heads, "
                f"{parameters:,} numbers, {self.dtype} on {self.device})")

    @property
    def device(self):
        return self.norm.weight.device

    @property
    def dtype(self):
        return self.norm.weight.dtype

    def forward(self, ids, cache=None, head_mask=None, mask="output", states=None, weights=None, logits=True):
        """Logits of every position, float32. ids [B, T] → [B, T, V]; with a cache or a head mask → [R, B, T, V].

        cache: the tokens follow what it holds, and join it. head_mask: [R, L, H] of 0 and 1, or what `layer_masks` made
        of it. mask: "output" or "query". states: a dict; the outputs [B, 1|R, T, D] of the layers that are its keys (0:
        the embeddings) are put into it. weights: a list, with a cache; each layer's attention weights [B, R, T, H, C]
        are appended, float32. logits: False leaves it at that and returns None."""
        if cache is None:
            tokens = Reading(self, torch.arange(ids.shape[-1], device=self.device))
        else:
            tokens = Decoding(self, cache, ids.shape[-1], weights)
        x = self.run_layers(ids, tokens, head_mask, mask, states)
        if not logits:
            return None
        z = self.head(self.norm(x)).transpose(0, 1)                         # [1|R, B, T, V]
        if cache is None and head_mask is None:
            return z[0]
        return z.expand(head_mask.shape[0], -1, -1, -1) if isinstance(head_mask, torch.Tensor) else z

    def prefill(self, ids, cache, head_mask=None, mask="output", states=None, start=0):
        """Write the prompts' keys and values into the cache. ids [B, P], padded on the right; states as in `forward`.

        start: tokens whose keys and values the cache holds already."""
        found = []
        for at in range(start, ids.shape[-1], CHUNK):
            chunk = ids[:, at:at + CHUNK]
            found.append(dict(states or {}))
            tokens = Reading(self, torch.arange(at, at + chunk.shape[-1], device=self.device), cache)
            self.run_layers(chunk, tokens, head_mask, mask, found[-1])
        for layer in states or ():
            states[layer] = torch.cat([part[layer] for part in found], 2) if found else None

    def run_layers(self, ids, tokens, head_mask, mask, states):
        """Embeddings and all layers → [B, 1|R, T, D]."""
        if mask not in MASKS:
            raise ValueError(f"mask {mask!r} is unknown; known: {', '.join(MASKS)}")
        masks = self.layer_masks(head_mask) if isinstance(head_mask, torch.Tensor | None) else head_mask
        x = self.embedding(ids)[:, None]
        keep(states, 0, x)
        for i, layer in enumerate(self.layers):
            x = layer(x, tokens, masks[i], mask)
            keep(states, i + 1, x)
        return x

    def layer_masks(self, head_mask):
        """[R, L, H], or [B, R, L, H] with one for each sequence → L masks [1|B, 1|R, H] of this rank's heads.

        One row below the first layer whose rows differ; None where a layer has no head to silence."""
        if head_mask is None:
            return [None] * self.config.n_layers
        head_mask = head_mask if head_mask.dim() == 4 else head_mask[None]
        L, H = head_mask.shape[2:]
        if (L, H) != (self.config.n_layers, self.config.n_heads):
            raise ValueError(f"the head mask is for {L} layers of {H} heads; "
                             f"{self.name} has {self.config.n_layers} of {self.config.n_heads}")
        masks, rows, mine = [], 1, head_mask[..., self.shard.part(H)].to(self.device, self.dtype)
        for layer in range(L):
            whole = head_mask[:, :, layer]
            rows = head_mask.shape[1] if (whole != whole[:, :1]).any() else rows
            masks.append(None if whole.all() else mine[:, :rows, layer])
        return masks

    def cache(self, lengths, capacity, head_mask=None):
        """An empty cache for prompts of `lengths` [B] tokens and `capacity` new ones after each.

        head_mask: the one of the passes that will follow; it says from which layer on rows have keys of their own."""
        masks = self.layer_masks(head_mask) if isinstance(head_mask, torch.Tensor | None) else head_mask
        attn = self.layers[0].attn
        return Cache(lengths.to(self.device), capacity, key_rows(masks), attn.kv_heads, attn.width, self.dtype)

    def embedding(self, ids):
        """[..., T] → [..., T, D]. Each rank looks up the ids it holds; the sum over ranks has them all."""
        local = ids - self.shard.part(self.config.vocab_size).start
        held = (local >= 0) & (local < self.embed.weight.shape[0])
        x = F.embedding(local.where(held, 0), self.embed.weight)
        return self.shard.all_reduce(x * held[..., None]) if self.shard.size > 1 else x

    def head(self, x):
        """Logits of hidden states [..., D] → [..., V], float32 from here on. The final norm is the caller's."""
        return self.shard.all_gather(self.lm_head(x).float())[..., :self.config.vocab_size]

    @classmethod
    def load(cls, name, device="cpu", dtype=None, shard=None):
        """A checkpoint's weights, from a folder or a hub id, straight from safetensors.

        device: "cpu", "cuda", "cuda:1", …; dtype: None keeps the checkpoint's, "bfloat16" or torch.bfloat16 …; shard:
        None joins the ranks that torchrun started. Under torchrun each rank reads only its slices. ValueError if
        config.json and the weights disagree."""
        folder, device = checkpoint_folder(name), rank_device(device)
        config = untie(Config.from_checkpoint(folder), weight_files(folder))
        if shard is None:
            shard = Shard.from_environment(device.type)
            mine = str(config), {p.name: p.stat().st_size for p in Path(folder).glob("*.safetensors")}
            if shard.broadcast(mine) != mine:
                raise ValueError(f"{folder}: rank {shard.rank} has another config.json or other weights than rank 0; "
                                 "give every machine the same checkpoint")
        model = cls(config, shard, device="meta", dtype=dtype or config.dtype)
        model.name, model.folder = Path(folder).resolve().name if Path(name).exists() else str(name), folder
        load_weights(model, folder, device)
        model.frequencies = rope_frequencies(config)[0].to(device)
        if device.type == "cpu":
            pack(model)
        return model.requires_grad_(False)


def key_rows(masks):
    """How many rows each layer's input has, and so its keys: one up to the layer where the stream forks."""
    rows = [1]
    for mask in masks[:-1]:
        rows.append(rows[-1] if mask is None else max(rows[-1], mask.shape[1]))
    return rows


def keep(states, layer, x):
    if states is not None and layer in states:
        states[layer] = x


class Linear(nn.Module):
    def __init__(self, n_in, n_out, bias=False, **kw):
        super().__init__()
        weight = torch.empty(n_out, n_in, **kw)                 # random numbers on "meta" cost seconds of imports
        self.weight = nn.Parameter(weight if weight.is_meta else weight.normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(n_out, **kw)) if bias else None

    def forward(self, x, stream=None):
        """x Wᵀ + bias; or x Wᵀ added to a stream of its shape, in one kernel."""
        if stream is None:
            return F.linear(x, self.weight, self.bias)
        return torch.addmm(stream.flatten(0, -2), x.flatten(0, -2), self.weight.T).view_as(stream)


class RMSNorm(nn.Module):
    def __init__(self, width, eps, **kw):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width, **kw)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)              # float32 inside


def rotate_(x, cos, sin):
    """Rotary position embedding, in place: elements i and i + K/2 are a pair. x [B, R, T, H, K]; cos, sin
    [1|B, 1, T, 1, K], the first half of sin negated."""
    turned = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(turned, sin)


def rope(model, positions):
    """cos and sin for tokens at `positions` [1|B, T] → two of [1|B, 1, T, 1, K]."""
    angles = positions[:, None, :, None, None] * model.frequencies
    return [(f(torch.cat([-angles, angles], -1)) * model.rope_scale).to(model.dtype) for f in (torch.cos, torch.sin)]


# ------------------------------------------------------------------------------------------------ what is attended to


class Cache:
    """Keys and values of one generation, one buffer per layer: kv[l] [2, B, G, C, K].

    The keys of the prompt come first, then slot 0 of every row, slot 1 of every row, and so on, so that what is in use
    is a beginning of the buffer. Layers below the fork have one row. Every key has an owner, the row that sees it (−1:
    all rows), and a place, its position in the text. Padding has the place NEVER; a slot not yet written has a place
    ahead of every query. `slots` [B] counts the new tokens of each sequence; it is a tensor, as all that changes.
    P and the slots are rounded up: prompts of about the same length have caches of one shape. `kept`: what else a step
    reads that depends on the prompts, by name."""

    def __init__(self, lengths, capacity, rows, kv_heads, width, dtype):
        self.lengths, self.capacity, self.rows = lengths, capacity, rows            # rows: of the keys of each layer
        self.P, self.room, device = rounded(int(lengths.max())), rounded(capacity, ROOM), lengths.device
        self.kv = [torch.zeros(2, len(lengths), kv_heads, self.P + self.room * n, width, dtype=dtype, device=device)
                   for n in rows]
        self.slots, self.span, self.kept = torch.zeros_like(lengths), self.room, {}
        prompt, new = torch.arange(self.P, device=device), torch.arange(self.room, device=device)
        self.prompt_places = prompt.where(prompt < lengths[:, None], NEVER)
        self.owner, self.place = {}, {}
        for n in set(rows):
            self.own(n, torch.arange(n, device=device).repeat(self.room), new.repeat_interleave(n))

    def own(self, n, owner, place):
        """Set owner and place of the S·n keys of new tokens; places count from each prompt's end."""
        self.owner[n] = torch.cat([torch.full_like(self.prompt_places[0], -1), owner])          # [C]
        self.place[n] = torch.cat([self.prompt_places, self.lengths[:, None] + place], 1)       # [B, C]

    def places(self, T):
        """The place of each of the next T tokens in its text, [B, T]."""
        return self.place[1].gather(1, self.P + self.slots[:, None] + torch.arange(T, device=self.slots.device))

    def pack(self, lengths):
        """Start anew with continuations of `lengths` tokens, side by side: each sees the prompt and itself."""
        assert set(self.rows) == {1} and sum(lengths) <= self.capacity
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place = torch.cat([torch.arange(n) for n in lengths])
        rest = self.room - sum(lengths)
        self.own(1, *(F.pad(x, (0, rest), value=NEVER).to(self.slots.device) for x in (owner, place)))
        self.slots.zero_()

    def take_back(self, counts):
        """Forget the last `counts` tokens of each sequence: a number, or one for each, [B]."""
        self.slots -= counts

    def reach(self, n):
        """On a CPU, attend to the first n slots, rounded up: the rest of the buffer must not be in use. On a GPU a step
        has fixed shapes, and attends to the whole buffer."""
        if self.slots.device.type == "cpu":
            self.span = min(self.room, rounded(n, ROOM))

    def sequence(self, b):
        """The b-th sequence alone, on the same memory, to prefill."""
        alone = copy.copy(self)
        alone.kv = [kv[:, b:b + 1] for kv in self.kv]
        return alone

    def tensors(self):
        """All that a step reads or writes."""
        return [*self.kv, self.lengths, self.slots, self.prompt_places, *self.owner.values(), *self.place.values(),
                *self.kept.values()]


def rounded(n, to=None):
    """n rounded up to a multiple of `to`; None: of ROOM, or of more where that adds a sixteenth at most."""
    to = to or max(ROOM, 2 ** (n.bit_length() - 5))
    return -(-n // to) * to


class Reading:
    """Tokens of a prompt at `positions` [T], read together: each sees those before it. They join the cache, if any."""

    def __init__(self, model, positions, cache=None):
        self.windows, self.cache, self.end = model.config.windows, cache, int(positions[-1]) + 1
        self.rope, self.start = rope(model, positions[None]), self.end - len(positions)

    def attend(self, layer, q, kv):
        """q [B, R, T, H, K], kv [B, 1|R, T, 2G, K] → [B, R, T, H, K], in memory linear in the prompt."""
        kv = kv.unflatten(3, (2, -1)).permute(3, 0, 1, 4, 2, 5)                     # [2, B, 1|R, G, T, K]
        if self.cache is not None:
            buffer = self.cache.kv[layer][:, :, None]
            buffer[..., self.start:self.end, :] = kv
            kv = buffer[..., :self.end, :]
        k, v = kv.expand(-1, -1, q.shape[1], -1, -1, -1).flatten(1, 2)              # [BR, G, S, K]
        y = attend_causal(q.flatten(0, 1).transpose(1, 2), k, v, self.windows[layer])
        return y.transpose(1, 2).unflatten(0, q.shape[:2])


class Decoding:
    """The next T tokens of every row of every sequence: where they go in the buffers, and what they see."""

    def __init__(self, model, cache, T, weights=None):
        self.cache, self.windows, self.weights, self.bias = cache, model.config.windows, weights, {}
        assert T <= cache.span, f"the cache has room for {cache.span} new tokens, {T} were given"
        self.rope = rope(model, cache.places(T))
        slots = cache.slots[:, None] + torch.arange(T, device=cache.slots.device)   # [B, T]
        self.batch = torch.arange(len(slots), device=slots.device)[:, None]
        cache.slots += T
        # row r of slot s is key P + s n + r: [B, T n]
        self.keys = {n: (cache.P + slots[..., None] * n + torch.arange(n, device=slots.device)).flatten(1)
                     for n in cache.place}

    def attend(self, layer, q, kv):
        """q [B, R, T, H, K], kv [B, 1|R, T, 2G, K] → [B, R, T, H, K].

        The queries of all rows and heads that share a key head are side by side, so that each key is read once."""
        n, G, window, buffer = kv.shape[1], kv.shape[3] // 2, self.windows[layer], self.cache.kv[layer]
        if n != self.cache.rows[layer]:
            raise ValueError(f"layer {layer} has {n} rows of keys and the cache room for {self.cache.rows[layer]}: "
                             "make the cache with the head mask of the passes that follow")
        new = kv.unflatten(3, (2, G)).transpose(1, 2).flatten(1, 2)                 # [B, T n, 2, G, K]
        buffer.permute(1, 3, 0, 2, 4)[self.batch, self.keys[n]] = new               # scatter_ is slow in 16 bits
        k, v = buffer[..., :self.cache.P + self.cache.span * n, :]                  # [B, G, C, K]
        q = q.unflatten(3, (G, -1)).permute(0, 3, 2, 1, 4, 5)                       # [B, G, T, R, H/G, K]
        sides = q.shape[2:5]
        if (n, sides, window) not in self.bias:
            self.bias[n, sides, window] = self.see(n, sides, window).to(q.dtype)
        y, weights = attend(q.flatten(2, 4), k, v, self.bias[n, sides, window], self.weights is not None)
        if weights is not None:
            self.weights.append(weights.unflatten(2, sides).permute(0, 3, 2, 1, 4, 5).flatten(3, 4))
        return y.unflatten(2, sides).permute(0, 3, 2, 1, 4, 5).flatten(3, 4)

    def see(self, n, sides, window):
        """0 where a query sees a key, -inf where not: [B, 1, T R H/G, C]. It sees keys that are everybody's or its
        row's, not ahead of it and not beyond the window."""
        C = self.cache.P + self.cache.span * n
        owner, place = self.cache.owner[n], self.cache.place[n]
        row, at = owner[self.keys[n]], place.gather(1, self.keys[n])                # a query has those of its own key
        age = at[..., None] - place[:, None, :C]                                    # [B, T n, C]
        seen = ((owner[:C] < 0) | (owner[:C] == row[..., None])) & (age >= 0) & (age < (window or NEVER))
        bias = torch.zeros_like(age, dtype=torch.float32).masked_fill(~seen, -math.inf).unflatten(1, (-1, n))
        return bias[:, None, :, :, None].expand(-1, -1, *sides, -1).flatten(2, 4)


def attend(q, k, v, bias, watched=False):
    """Two products and one softmax: q [B, G, N, K], k and v [B, G, C, K], bias [B, 1, N, C] → [B, G, N, K], and where
    watched the weights of the softmax in float32, [B, G, N, C]."""
    if q.device.type == "cpu" and not watched:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias), None        # the same in one operation
    if watched:
        q, k, bias = q.float(), k.float(), bias.float()
    B, G = q.shape[:2]
    bias = bias.expand(-1, G, -1, -1).flatten(0, 1) if B > 1 else bias[0]
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
    weights = scores.softmax(-1)                                                    # float32 inside
    y = weighted_sum(weights.to(v.dtype), v.flatten(0, 1)).unflatten(0, (B, G))
    return y, weights.unflatten(0, (B, G)) if watched else None


def weighted_sum(weights, v):
    """The product of [BG, N, C] and [BG, C, K]. A long C in parts, each a product of its own: N is small, and a product
    has no more work at once than its result has tiles."""
    C, parts = weights.shape[-1], 1
    while parts < C and (C % (8 * parts) or C // parts > PART):
        parts += 1
    if parts == 1:
        return torch.bmm(weights, v)
    y = torch.bmm(weights.unflatten(-1, (parts, -1)).transpose(1, 2).flatten(0, 1),
                  v.unflatten(1, (parts, -1)).flatten(0, 1))
    return y.unflatten(0, (-1, parts)).sum(1, dtype=torch.float32).to(v.dtype)


def attend_causal(q, k, v, window):
    """Attention of the last T of S tokens to all S: q [B, H, T, K], k and v [B, G, S, K] → [B, H, T, K]."""
    T, S = q.shape[2], k.shape[2]
    if window and window < S:
        first = max(0, S - T - window + 1)                      # no query of this chunk sees an earlier key
        k, v, S = k[..., first:, :], v[..., first:, :], S - first
        age = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)
        mask = (age >= 0) & (age < window)
    else:
        mask = later_chunk(T, S) if S > T else None
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):    # no fused kernel takes groups here
        k, v, grouped = *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def later_chunk(T, S):
    """The causal mask of the last T of S tokens: nothing in memory for a GPU's fused kernels, [T, S] elsewhere."""
    # It takes seconds to import, and short prompts do without.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(T, S)
