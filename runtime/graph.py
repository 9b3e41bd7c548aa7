"""A decoding step recorded as a CUDA graph.

A step starts some twenty kernels a layer, which takes the host longer than the GPU needs to read
the weights. A graph starts them all at once. It lives as long as the call of `generate` that
recorded it: NCCL waits for graphs with its collectives before it can leave the other ranks."""

import gc
import warnings

import torch


def recorded(decoder, tokens):
    """`decoder.step` for tokens of this shape, as replays of a graph. Each overwrites its result.

    The step as it is if a model cannot record one; also, with a warning, if a rank cannot."""
    if not all(session.model.can_record for session in decoder.sessions):
        return decoder.step
    counts = [(s.cache.slots, s.cache.slots.clone()) for s in decoder.sessions]
    fixed = tokens.clone()
    graph = torch.cuda.CUDAGraph()
    problem = None
    try:
        with torch.cuda.device(tokens.device):
            decoder.step(fixed)  # the allocator and NCCL need one run before the recording
            gc.collect()  # freeing a graph during a recording would make it fail
            with torch.cuda.graph(graph):
                result = decoder.step(fixed)
    except (RuntimeError, ConnectionError) as error:  # ConnectionError: from a collective
        problem = str(error).partition("\n")[0]
    for slots, before in counts:
        slots.copy_(before)
    failed = torch.tensor(float(problem is not None), device=tokens.device)
    if decoder.sessions[0].model.shard.all_reduce(failed):  # a replay needs all ranks
        problem = problem or "another rank has none"
        warnings.warn(f"decoding goes on without CUDA graphs: {problem}", stacklevel=3)
        return decoder.step

    def step(tokens):
        fixed.copy_(tokens)
        graph.replay()
        return result

    return step
