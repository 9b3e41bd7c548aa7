"""Recorded steps decode the same tokens. On a CPU a recorder replaces CUDA graphs."""

import copy
import gc
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode

import baselines
import decore
from decore import METHODS, Session, generate, open_decore
from model import MASKS, Transformer
from runtime import graph, parallel
from tests.checkpoints import random_ids, write_checkpoint

HEADS = [(1, 0), (1, 3), (2, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (9, 1, 20)]
LATER = [random_ids(n, seed=40 + n) for n in (12, 3, 5)]


class Recorder:
    """Replaces Graph: a replay computes the same step again, into the tensors of the first result."""

    made = 0

    def __init__(self, step, tokens, restore):
        Recorder.made += 1
        self.step, self.tokens = step, tokens.clone()
        self.result = type(step(self.tokens))(*(x.clone() for x in step(self.tokens)))
        restore()

    def __call__(self, tokens):
        self.tokens.copy_(tokens)
        for old, new in zip(self.result, self.step(self.tokens), strict=True):
            old.copy_(new)
        return self.result


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    """Replaces Graph by the recorder, and drops the graphs of other tests."""
    graph.GRAPHS.clear()
    Recorder.made = 0
    monkeypatch.setattr(graph, "Graph", Recorder)


@pytest.fixture(params=["llama3", "mistral-window"])
def model(request, tmp_path):
    return Transformer.load(write_checkpoint(tmp_path / "m", request.param))


CASES = [("greedy", {}), *((m, dict(heads=HEADS)) for m in METHODS[1:]),
         ("decore-entropy", dict(heads=HEADS, mask="query")), ("decore-entropy", dict(heads=HEADS, mask_prompt=True)),
         ("dola-low", {}), ("dola-high", dict(repetition_penalty=1.3)), ("ad", dict(info_layer=2)), ("cad", {}),
         ("cd", {}), ("lite", {})]


@pytest.mark.parametrize("method, how", CASES)
def test_later_prompts_of_the_same_shape_reuse_a_graph(model, tmp_path, method, how):
    if method in ("cd", "lite"):
        how = dict(amateur=Transformer.load(write_checkpoint(tmp_path / "a", "llama3", seed=5, num_hidden_layers=1)))
        how, method = (how, "cd") if method == "cd" else (how | dict(amateur_heads=[(0, 1)]), "decore-entropy")
    for prompts in (PROMPTS, LATER, PROMPTS, [p[::-1] for p in LATER]):
        more = dict(ids_without_context=[p[-2:] for p in prompts]) if method == "cad" else {}
        plain, recorded = (baselines.generate(model, prompts, method, max_new_tokens=9, graph=on, **how, **more)
                           for on in (False, True))
        assert recorded == plain
    assert Recorder.made == 1


def test_lookup_replays_graphs_too(model):
    for prompts in (PROMPTS, LATER):
        plain, recorded = (generate(model, prompts, heads=HEADS, max_new_tokens=30, lookup=4, graph=on)
                           for on in (False, True))
        assert [g.ids for g in recorded] == [g.ids for g in plain]


def test_other_settings_shapes_or_weights_need_another_graph(model):
    def graphs(method="decore-static", n=4, prompts=LATER, **how):
        how = {"heads": HEADS} | how
        assert generate(model, prompts, method, n, graph=True, **how) == generate(model, prompts, method, n, **how)
        return Recorder.made
    assert [graphs() for _ in range(2)] == [1, 1]
    assert graphs(heads=[f"{layer}-{head}" for layer, head in HEADS]) == 1          # the same heads
    assert graphs(alpha=0.6) == 2
    assert graphs(heads=HEADS[:2]) == 3
    assert graphs("decore-entropy") == 4
    assert graphs(prompts=[random_ids(80)] * 3) == 5
    weight = model.norm.weight
    weight.data = weight.data.clone() * 2               # the old memory has the old numbers
    assert graphs("decore-entropy") == 6


def test_heads_from_a_generator_have_a_key_by_their_values(model):
    """A key made of the generator's address would find the graph of another call."""
    for heads in (HEADS, HEADS[:1], [(0, 0)], HEADS[1:], [(0, 1), (0, 2)], HEADS):
        recorded = generate(model, LATER, "masked", 6, heads=(head for head in heads), graph=True)
        assert recorded == generate(model, LATER, "masked", 6, heads=heads)


def test_a_model_has_at_most_four_states_and_drops_the_least_recently_used(model):
    def alphas(alpha):
        generate(model, LATER, "decore-static", 4, heads=HEADS, alpha=alpha, graph=True)
        return [dict(key[0][2])["alpha"] for key in graph.GRAPHS[model]]
    assert [alphas(a) for a in (1.0, 2.0, 3.0, 4.0)][-1] == [1.0, 2.0, 3.0, 4.0]
    assert alphas(1.0) == [2.0, 3.0, 4.0, 1.0]
    assert alphas(5.0) == [3.0, 4.0, 1.0, 5.0]


class Wrong(Recorder):
    def __call__(self, tokens):
        result = super().__call__(tokens)
        result.scores[0, 0, 5] += 0.1                   # one score of one token
        return result


def failing(*_):
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize("recorder, why", [(Wrong, "a replay differs"), (failing, "operation not permitted")])
@pytest.mark.parametrize("lookup", [0, 4])
def test_a_graph_that_fails_or_differs_is_not_used(model, monkeypatch, recorder, why, lookup):
    monkeypatch.setattr(graph, "Graph", recorder)
    plain = generate(model, PROMPTS, heads=HEADS, max_new_tokens=20, lookup=lookup)
    with pytest.warns(UserWarning, match=f"decoding goes on without CUDA graphs: {why}"):
        assert generate(model, PROMPTS, heads=HEADS, max_new_tokens=20, lookup=lookup, graph=True) == plain


def test_graphs_are_freed_with_their_model_and_when_a_rank_leaves(tmp_path):
    """NCCL waits for every graph with its collectives, so `leave` drops them before it leaves the group."""
    class Without(Recorder):                            # a CUDA graph does not refer to the step
        def __init__(self, *args):
            super().__init__(*args)
            del self.step
    graph.Graph = Without
    model = Transformer.load(write_checkpoint(tmp_path, "llama3"))
    generate(model, PROMPTS, heads=HEADS, max_new_tokens=1, graph=True)
    assert len(graph.GRAPHS) == 1
    for drop in parallel.before_leaving:
        drop()
    assert len(graph.GRAPHS) == 0
    generate(model, PROMPTS, heads=HEADS, max_new_tokens=1, graph=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(graph.GRAPHS) == 0


# -------------------------------------------------------------------------------------------------- what a graph needs


class NothingFromTheHost(TorchFunctionMode):
    """Raises if a tensor is made from numbers of the host: a copy to the device, which a graph cannot record."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_never_looks_at_the_host(model, monkeypatch, method, mask):
    """On "meta" a tensor has no values: reading one is an error, and so is an operation with a tensor on the CPU."""
    meta = copy.deepcopy(model).to("meta")

    class OnMeta(Session):
        def __init__(self, _, *args, **how):
            super().__init__(model, *args, **how)
            self.model, self.unread = meta, None
            cache = self.cache
            cache.kv, cache.lengths, cache.slots = [x.to("meta") for x in cache.kv], *(
                x.to("meta") for x in (cache.lengths, cache.slots))
            self.head_mask = None if self.head_mask is None else self.head_mask.to("meta")

    monkeypatch.setattr(decore, "Session", OnMeta)
    step, _ = open_decore(meta, PROMPTS, 5, method, HEADS, alpha_cap=2.0, mask=mask)
    token = torch.zeros(len(PROMPTS), 1, dtype=torch.long, device="meta")
    with NothingFromTheHost(), torch.inference_mode():
        for _ in range(2):
            out = step(token)
    assert out.scores.shape == (len(PROMPTS), 1, model.config.vocab_size) and out.scores.device.type == "meta"


def test_on_a_gpu_the_host_is_one_step_behind(monkeypatch):
    order = []

    class Event:
        def synchronize(self):
            order.append("sync")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: type("Stream", (), dict(record_event=Event)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: empty(x))

    def steps():
        for n in range(3):
            order.append(f"step {n}")
            scores = torch.eye(4)[n][None, None]
            yield scores.argmax(-1), decore.Step(scores, scores, scores, torch.zeros(1, 1), torch.zeros(1, 1))

    for row in graph.on_host(steps()):
        order.append(f"read {int(row[0][0][0])}")
    assert order == ["step 0", "step 1", "sync", "read 0", "step 2", "sync", "read 1", "sync", "read 2"]
