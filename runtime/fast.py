"""The same tokens sooner: prompt lookup, and a decoding step recorded as a CUDA graph."""

import math
import warnings
from contextlib import contextmanager
from functools import cache

import torch

from runtime.parallel import Shard

# -------------------------------------------------------------------------------------------------------- prompt lookup
# Answers that are faithful to a passage copy from it. So propose what followed the last few tokens when they were last
# seen, in the prompt or in the text so far; check the proposal in one pass, which reads the weights once for all of it;
# and keep its longest beginning that Eq. 7's argmax chooses as well. This is prompt lookup decoding: speculative
# decoding (Leviathan et al. 2023) whose draft is the text itself. Tokens, α and entropies are those of one at a time.

SIZES = (3, 2)                  # tokens that must have been seen before, the longer match first
LONGEST_WAIT = 63               # tokens without a proposal after many misses
TRIAL = 1                       # tokens proposed after a miss, until that is right


class Text:
    """One text, where each of its n-grams was last seen, and whether proposing pays."""

    def __init__(self, ids):
        self.ids, self.after = [], {}
        self.misses = self.wait = 0
        self.extend(ids)

    def extend(self, ids):
        for token in ids:
            for n in SIZES:
                if len(self.ids) >= n:
                    self.after[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)

    def propose(self, k):
        """At most k tokens: what followed the last n-gram when it was last seen. A text in a loop stays in it."""
        places = [self.after[tuple(self.ids[-n:])] for n in SIZES if tuple(self.ids[-n:]) in self.after]
        if self.wait or not places:
            return []
        period = len(self.ids) - places[0]
        return [self.ids[places[0] + i % period] for i in range(min(k, TRIAL) if self.misses else k)]

    def judge(self, proposed, accepted):
        """Back off after misses (1, 7, 31, then 63 tokens), so that proposals become rare where nothing is copied."""
        if not proposed:
            self.wait = max(0, self.wait - 1)
        elif 4 * accepted >= proposed:
            self.misses = 0
        else:
            self.misses += 1
            self.wait = min(2**(2 * self.misses - 1) - 1, LONGEST_WAIT)


def look_up(step, caches, prompts, out, most, k):
    """As `decore.fetch`, up to k + 1 tokens a pass: yields for each text its new (token, score, α, H), on the host.

    caches: those that `step` writes to, with k slots to spare. out: the texts' Generations, whose `stop` the caller
    sets. most: new tokens of a text. Proposals are filled up to a width that is recorded, see `record`."""
    texts, used, device = [Text(prompt) for prompt in prompts], 0, caches[0].slots.device
    while True:
        proposals = [[] if g.stop else text.propose(min(k, most - len(g.ids) - 1))
                     for g, text in zip(out, texts, strict=True)]
        width = 1 + max(map(len, proposals))
        width = min((w for w in getattr(step, "widths", ()) if w >= width), default=width)
        tokens = [text.ids[-1:] + p + [0] * (width - 1 - len(p)) for text, p in zip(texts, proposals, strict=True)]
        for one in caches:
            one.reach(used + width)
        scores, _, _, alpha, entropy = step(torch.tensor(tokens, device=device))
        best, token = scores.max(-1)
        found, new = torch.stack([token.float(), best, alpha, entropy], -1).tolist(), []                # [B][T][4]
        for text, proposal, here in zip(texts, proposals, found, strict=True):
            n = agreeing(proposal, [int(one[0]) for one in here])
            text.judge(len(proposal), n)
            text.extend(int(one[0]) for one in here[:n + 1])
            new.append(here[:n + 1])
        yield new
        kept = [0 if g.stop else len(tokens) for g, tokens in zip(out, new, strict=True)]       # an ended text stays
        for one in caches:
            one.take_back(width - torch.tensor(kept, device=one.slots.device).repeat(len(one.slots) // len(kept)))
        used += max(kept)


def agreeing(proposal, chosen):
    """How many of the proposed tokens are those chosen, up to the first that is not."""
    return next((i for i, (a, b) in enumerate(zip(proposal, chosen, strict=False)) if a != b), len(proposal))


# --------------------------------------------------------------------------------------------------------- CUDA graphs
# Some twenty kernels a layer are started for every token; on a GPU that takes the host longer than the GPU needs to
# read the weights. A graph starts them all at once, with fixed shapes at fixed places: hence caches that are attended
# to whole, and results that the next call writes over. Its places are also why a graph serves later prompts: whatever a
# step reads that depends on the prompts is in its caches, so the next prompts' caches are copied over those.

SHARE = 16                      # the caches of the graphs that are kept have one part in so many of a GPU's memory


@cache
def memory_of_graphs(device):
    """The memory that graphs share, and a stream to record them on where the current one is the default one."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


def cuda_graph(run):
    """Record run() → (its result, a function that computes that result again in place).

    It is recorded on the current stream, where it runs once before: the allocator and NCCL ask for that. The default
    stream cannot be recorded."""
    current, (pool, own) = torch.cuda.current_stream(), memory_of_graphs(torch.cuda.current_device())
    stream = own if current == torch.cuda.default_stream() else current
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = run()
    current.wait_stream(stream)
    return result, graph.replay


def recorded(step, caches, last, lookup, model, about, how="graph", recorder=cuda_graph):
    """`step` recorded, and the caches that it writes to: a graph made for other prompts, if one of this kind is kept.

    lookup: passes of lookup + 1 tokens are recorded too. about: what `step` was made of, beside the prompts. how:
    "kernels" has torch.compile fuse the step before it is recorded."""
    kept, tensors = vars(model).setdefault("graphs", {}), tensors_of(caches)
    key = (how, lookup, *map(comparable, (model, *about)), *((x.shape, x.dtype) for x in tensors))
    if key in kept:
        kept[key] = graph, memory = kept.pop(key)                       # the last to be used is the last to go
        for old, new in zip(tensors_of(memory), tensors, strict=True):
            old.copy_(new)
        return graph, memory
    step = fuse(step, caches, last) if how == "kernels" else step
    graph = record(step, caches, last, (1, lookup + 1), recorder, model.shard)
    kept[key] = graph, caches
    while sum(x.nbytes for _, memory in kept.values() for x in tensors_of(memory)) > room_to_keep(model.device):
        del kept[next(iter(kept))]
    return graph, caches


def tensors_of(caches):
    return [x for one in caches for x in one.tensors()]


def comparable(x):
    """Something to tell settings apart by. What belongs to the prompts is left out: it is in the caches."""
    if isinstance(x, torch.nn.Module):
        return x, *(weight.data_ptr() for weight in x.parameters())     # weights that have moved need another graph
    if isinstance(x, dict):
        return tuple((name, comparable(x[name])) for name in sorted(x) if name != "ids_without_context")
    return x if callable(x) else repr(x.tolist() if hasattr(x, "tolist") else x)


def room_to_keep(device):
    """Bytes."""
    return torch.cuda.mem_get_info(device)[1] // SHARE if device.type == "cuda" else math.inf


def record(step, caches, last, widths=(1,), recorder=cuda_graph, shard=None):
    """`step`, recorded for passes of each width in tokens, its `widths`. Passes of another shape run as they did.

    caches: all that `step` writes to. last [B, 1]: the next tokens, with which a record is tried: where recording
    fails, or a replay does not give what the eager step gives, a warning and `step` itself. shard: the ranks that
    share the step; where it fails on one, none uses it. The tensors of a Step are those of the next one too: use them
    before."""
    replays, shard = {}, shard or Shard()
    for width in sorted(set(widths)):
        tokens = last.repeat(1, width)
        wanted = trial(step, caches, tokens)
        with taken_back(caches):
            made, problem = attempt(recorder, lambda tokens=tokens: step(tokens))
        problem = anywhere(problem, shard, last.device)
        if not problem:
            result, replay = made
            found, problem = attempt(trial, lambda _, result=result, replay=replay: replay() or result, caches, tokens)
            differs = not problem and not alike(found, wanted)
            problem = anywhere("a replay differs" if differs else problem, shard, last.device)
        if problem:
            warnings.warn(f"the step is not recorded as a CUDA graph ({problem}); decoding goes on without",
                          stacklevel=2)
            return step
        replays[tokens.shape] = tokens, result, replay

    def again(new):
        if new.shape not in replays:
            return step(new)
        tokens, result, replay = replays[new.shape]
        tokens.copy_(new)
        replay()
        return result

    again.widths = sorted(set(widths))
    return again


def attempt(do, *args):
    """→ what do(*args) returns and None, or None and why it failed."""
    try:
        return do(*args), None
    except RuntimeError as error:
        return None, str(error).partition("\n")[0] or type(error).__name__


def anywhere(problem, shard, device):
    """The problem of this rank, or that another one has one: a step with collectives is replayed by all or none."""
    ranks = shard.all_reduce(torch.tensor(float(problem is not None), device=device))
    return problem or ("another rank cannot use its own" if ranks else None)


def fuse(step, caches, last):
    """`step` compiled, or `step` and a warning, as in `record`."""
    try:
        compiled = torch.compile(step, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
        # Compiled kernels round otherwise, which sixteen bits show.
        problem = None if alike(*(trial(one, caches, last) for one in (compiled, step)), exact=False) else "it differs"
    except Exception as error:                                          # a compiler has many
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if problem:
        warnings.warn(f"torch.compile does not give the step ({problem}); decoding goes on without", stacklevel=2)
    return step if problem else compiled


@contextmanager
def taken_back(caches):
    """What happens inside does not move the caches on."""
    before = [one.slots.clone() for one in caches]
    try:
        yield
    finally:
        for one, slots in zip(caches, before, strict=True):
            one.slots.copy_(slots)


def trial(step, caches, tokens):
    """The scores of a step that is taken back, and where it left the caches."""
    with taken_back(caches):
        return step(tokens).scores.clone(), [one.slots.clone() for one in caches]


def alike(found, wanted, exact=True):
    """Whether two trials moved the caches as far, and gave the same scores. Not exact: the finite ones differ by a
    twentieth of their spread at most."""
    (a, moved), (b, expected) = found, wanted
    if not all(map(torch.equal, moved, expected)):
        return False
    if exact:
        return torch.allclose(a, b, rtol=1e-3, atol=1e-2)
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite], b[finite]
    return len(a) > 0 and bool((a - b).norm() <= 0.05 * (b - b.mean()).norm())
