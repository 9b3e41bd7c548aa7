"""Decoding on a GPU: the host reads one step while the next one runs, and a step is recorded as a CUDA graph.

A step starts some twenty kernels a layer, which takes the host longer than the GPU needs to read the weights. A graph
starts them all at once. It reads and writes fixed memory. So later prompts of the same shapes reuse a graph, and their
state is copied into the memory that it was recorded with."""

import gc
import warnings
from weakref import WeakKeyDictionary

import torch

from runtime import parallel

MAX_STATES = 4                  # entries per model in GRAPHS; the least recently used is dropped first
# model → {key: (tensors, graphs, amateurs)}: what a step reads and writes besides the weights; graphs by the shape of
# tokens, None for one that failed. No entry refers to the model itself, so that it can be freed.
GRAPHS = WeakKeyDictionary()
parallel.before_leaving.append(GRAPHS.clear)


def on_host(steps):
    """Copies the results of `decode` to the host → for each step [B][1] of (token, score, α, H).

    On a GPU the host is one step behind, so one step too many is computed."""
    event = previous = None
    for token, result in steps:
        score = result.scores.gather(-1, token[..., None])[..., 0]
        new = torch.stack([token.float(), score, result.alpha, result.entropy], -1)                     # [B, 1, 4]
        if not new.is_cuda:
            yield new.tolist()
            continue
        pinned = torch.empty_like(new, device="cpu", pin_memory=True).copy_(new, non_blocking=True)
        if previous is not None:
            event.synchronize()
            yield previous.tolist()
        event, previous = torch.cuda.current_stream(new.device).record_event(), pinned
    if previous is not None:
        event.synchronize()
        yield previous.tolist()


class Graph:
    """A step recorded for tokens of one shape. Each call overwrites the result of the one before."""

    def __init__(self, step, tokens, restore):
        """restore: resets the counts of slots in use, which a step raises."""
        self.tokens, device = tokens.clone(), tokens.device
        with torch.cuda.device(device):
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step(self.tokens)                       # the allocator and NCCL need one run before the recording
                restore()
            torch.cuda.current_stream().wait_stream(stream)
            gc.collect()                                # freeing a graph during a recording would make it fail
            with torch.cuda.graph(graph, stream=stream):
                self.result = step(self.tokens)
        self.replay = graph.replay

    def __call__(self, tokens):
        self.tokens.copy_(tokens)
        self.replay()
        return self.result


def recorded(step, sessions, recipe):
    """`step` with calls after the first as replays of CUDA graphs, one for each shape of tokens.

    If a graph cannot be recorded, or its first replay differs from the eager step, a warning says so, and all ranks use
    the eager step. recipe: the opener, the method and its settings, checked."""
    model, caches = sessions[0].model, [session.cache for session in sessions]
    tensors = [x for session, cache in zip(sessions, caches, strict=True)
               for x in (*cache.kv, cache.lengths, cache.slots, session.head_mask, *session.extra) if x is not None]
    opener, method, settings = recipe
    # The amateur and CAD's prompts are represented by addresses of weights and shapes of tensors.
    values = [item for item in sorted(settings.items()) if item[0] not in ("amateur", "ids_without_context")]
    key = (opener, method, repr(values), *((cache.P, cache.S) for cache in caches),
           *((x.shape, x.dtype) for x in tensors),
           *(x.data_ptr() for session in sessions for x in (session.model.frequencies, *session.model.parameters())))
    states = GRAPHS.setdefault(model, {})
    # The amateurs are held, so that no other weights get the addresses in the key.
    states[key] = states.pop(key, None) or (tensors, {}, [s.model for s in sessions if s.model is not model])
    while len(states) > MAX_STATES:
        del states[next(iter(states))]
    recorded_tensors, graphs, _ = states[key]
    for new, old in zip(tensors, recorded_tensors, strict=True):
        if new is not old:
            old.copy_(new)
            new.set_(old)                               # from here on both are the same memory

    def run(tokens=None):
        if sessions[0].unread is not None:              # the first step reads the prompts' last tokens
            return step(tokens)
        if tokens.shape not in graphs:
            graphs[tokens.shape] = record(step, tokens, caches, model.shard)
        graph = graphs[tokens.shape]
        if graph is None:
            return step(tokens)
        for cache in caches:
            cache.used += tokens.shape[1]               # a replay runs none of the step's Python
        return graph(tokens)

    return run


def record(step, tokens, caches, shard):
    """Record a Graph of the step; None with a warning if it fails. The caches are left as before."""
    before = [(cache, cache.slots.clone(), cache.used) for cache in caches]

    def restore():
        for cache, slots, used in before:
            cache.slots.copy_(slots)
            cache.used = used

    eager = step(tokens).scores
    restore()
    graph = problem = None
    try:
        graph = Graph(step, tokens, restore)
    except (RuntimeError, ConnectionError) as error:        # ConnectionError: from a collective
        problem = str(error).partition("\n")[0]
    restore()
    if not on_any_rank(problem, shard, tokens.device):
        if not torch.allclose(graph(tokens).scores, eager, rtol=1e-3, atol=1e-2):
            problem = "a replay differs from the step"
        restore()
    if on_any_rank(problem, shard, tokens.device):
        warnings.warn(f"decoding goes on without CUDA graphs: {problem or 'another rank has none'}", stacklevel=2)
        return None
    return graph


def on_any_rank(problem, shard, device):
    """Whether any rank has a problem: a step with collectives must be replayed by all ranks or by none."""
    return bool(shard.all_reduce(torch.tensor(float(problem is not None), device=device)))
