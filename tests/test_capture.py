"""A recorded step decodes the same, and nothing in it looks at the host. On a CPU a recorder plays along."""

import copy

import pytest
import torch
from torch.overrides import TorchFunctionMode

import baselines
from decore import METHODS, Generation, Rows, collect, decode, fetch, generate, open_decore
from model import MASKS, Transformer
from runtime import fast
from runtime.fast import look_up, record, recorded
from tests.checkpoints import random_ids, write_checkpoint
from tests.kernels import bare

HEADS = [(1, 0), (1, 3), (2, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (9, 1, 20)]


@pytest.fixture(scope="module", params=["llama3", "mistral-window", "qwen3"])
def model(request, tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("m"), request.param))


LAST = torch.tensor([p[-1:] for p in PROMPTS])


def clones(step):
    return type(step)(*(x.clone() for x in step))


def dry_run(run):
    """As a CUDA graph: recorded once, then the same shapes computed into the same tensors."""
    result = clones(run())

    def replay():
        for kept, new in zip(result, run(), strict=True):
            assert kept.shape == new.shape
            kept.copy_(new)
    return result, replay


def texts(rounds, n):
    out = [Generation() for _ in PROMPTS]
    collect(rounds(out), out, (), [n] * len(out))
    return [g.ids for g in out]


@pytest.mark.parametrize("method", METHODS)
def test_a_recorded_step_decodes_the_same(model, method):
    plain = generate(model, PROMPTS, method, heads=HEADS, max_new_tokens=12)
    step, caches = open_decore(model, PROMPTS, 12, method, HEADS)
    recorded = record(step, caches, LAST, recorder=dry_run)
    assert recorded is not step
    assert texts(lambda _: fetch(decode(recorded, LAST, 12), caches), 12) == [g.ids for g in plain]
    assert caches[0].slots.tolist() == [12] * 3


def test_a_recorded_step_leaves_longer_passes_to_the_plain_one(model):
    plain = generate(model, PROMPTS, heads=HEADS, max_new_tokens=20)
    step, caches = open_decore(model, PROMPTS, 24, heads=HEADS)
    recorded = record(step, caches, LAST, recorder=dry_run)
    assert texts(lambda out: look_up(recorded, caches, PROMPTS, out, 20, 4), 20) == [g.ids for g in plain]


def test_a_recorded_step_writes_where_it_was_recorded(model):
    step, caches = open_decore(model, PROMPTS, 4, heads=HEADS)
    recorded = record(step, caches, LAST, recorder=dry_run)
    places = {id(t) for t in recorded(torch.tensor([[3], [4], [5]]))}
    assert places == {id(t) for t in recorded(torch.tensor([[6], [7], [8]]))}


def lying(run):
    """A recorder that moves the caches on, and gives the scores of another model."""
    result = clones(run())
    wrong = result.scores.flip(-1)

    def replay():
        run()
        result.scores.copy_(wrong)
    return result, replay


def nearly(run):
    """A recorder whose replay has one score of one token wrong, by a little."""
    result, replay = dry_run(run)

    def wrong():
        replay()
        result.scores[0, 0, 5] += 0.1
    return result, wrong


def forgetful(run):
    """A recorder whose replay gives the right scores and does not move the caches on."""
    return clones(run()), lambda: None


def short_sighted(run):
    """A recorder that lies about passes of several tokens alone."""
    return (dry_run if run().scores.shape[1] == 1 else lying)(run)


def failing(run):
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def breaking(run):
    """A recorder whose replay fails."""
    return clones(run()), lambda: failing(run)


@pytest.mark.parametrize("recorder, why", [(lying, "differs"), (nearly, "differs"), (forgetful, "differs"),
                                           (failing, "not permitted"), (breaking, "not permitted")])
def test_a_record_that_does_not_show_itself_is_not_used(model, recorder, why):
    plain = generate(model, PROMPTS, heads=HEADS, max_new_tokens=6)
    step, caches = open_decore(model, PROMPTS, 6, heads=HEADS)
    with pytest.warns(UserWarning, match=f"not recorded as a CUDA graph .*{why}.*; decoding goes on without"):
        assert record(step, caches, LAST, recorder=recorder) is step
    assert texts(lambda _: fetch(decode(step, LAST, 6), caches), 6) == [g.ids for g in plain]


class NothingFromTheHost(TorchFunctionMode):
    """An error where numbers of the host become a tensor: a copy to the device, which a graph cannot record."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_never_looks_at_the_host(model, monkeypatch, method, mask):
    """On "meta" a tensor has no values: looking at one is an error, and so is meeting one that was left on the host."""
    class ReadOnTheHost(Rows):
        def __init__(self, _, *prompts_and_more):
            super().__init__(model, *prompts_and_more)
            vars(self.cache).update(bare(vars(self.cache)))
            self.model, self.masks = copy.deepcopy(model).to("meta"), bare(self.masks)

    monkeypatch.setattr("decore.Rows", ReadOnTheHost)
    step, _ = open_decore(model, PROMPTS, 5, method, HEADS, alpha_cap=2.0, mask=mask)
    token = torch.zeros(len(PROMPTS), 1, dtype=torch.long, device="meta")
    with NothingFromTheHost():
        for _ in range(2):
            out = step(token)
    assert out.scores.shape == (len(PROMPTS), 1, model.config.vocab_size) and out.scores.device.type == "meta"


def test_a_record_of_lookup_is_tried_too(model):
    step, caches = open_decore(model, PROMPTS, 12, heads=HEADS)
    with pytest.warns(UserWarning, match="differs"):
        assert record(step, caches, LAST, (1, 4), short_sighted) is step
    assert caches[0].slots.tolist() == [0] * 3


def test_recorded_lookup_has_passes_of_two_widths(model):
    plain = generate(model, PROMPTS, heads=HEADS, max_new_tokens=40)
    step, caches = open_decore(model, PROMPTS, 44, heads=HEADS)
    widths = set()
    made = record(step, caches, LAST, (1, 5), dry_run)

    def seen(tokens):
        widths.add(tokens.shape[1])
        return made(tokens)
    seen.widths = made.widths
    assert texts(lambda out: look_up(seen, caches, PROMPTS, out, 40, 4), 40) == [g.ids for g in plain]
    assert widths == {1, 5}


# ------------------------------------------------------------------------------------------- graphs for later prompts

LATER = [random_ids(n, seed=40 + n) for n in (12, 3, 5)]
CASES = [("greedy", {}), *((m, dict(heads=HEADS)) for m in METHODS[1:]),
         ("decore-entropy", dict(heads=HEADS, mask="query")), ("decore-entropy", dict(heads=HEADS, mask_prompt=True)),
         ("dola-low", {}), ("dola-high", dict(repetition_penalty=1.3)), ("ad", dict(info_layer=2)), ("cad", {}),
         ("cd", {}), ("lite", {})]


class Counted:
    """A recorder that plays along and counts."""

    def __init__(self, recorder=dry_run):
        self.recorder, self.times = recorder, 0

    def __call__(self, run):
        self.times += 1
        return self.recorder(run)


def recording(method, recorder, lookup=0):
    """The method's opener, whose step is recorded, as `generate` does on a GPU."""
    def opened(model, prompts, room, method, **settings):
        opener, last = baselines.opener_of(method), torch.tensor([p[-1:] for p in prompts])
        return recorded(*opener(model, prompts, room, method, **settings), last, lookup, model,
                        (opener, method, settings), recorder=recorder)
    return opened


@pytest.mark.parametrize("method, how", CASES)
def test_later_prompts_of_that_shape_are_decoded_by_the_same_graph(model, tmp_path, method, how):
    if method in ("cd", "lite"):
        how = dict(amateur=Transformer.load(write_checkpoint(tmp_path, "llama3", seed=5, num_hidden_layers=1)))
        how, method = (how, "cd") if method == "cd" else (how | dict(amateur_heads=[(0, 1)]), "decore-entropy")
    recorder = Counted()
    for prompts in (PROMPTS, LATER, PROMPTS, [p[::-1] for p in LATER]):
        more = dict(ids_without_context=[p[-2:] for p in prompts]) if method == "cad" else {}
        plain = baselines.generate(model, prompts, method, max_new_tokens=9, **how, **more)
        again = generate(model, prompts, method, 9, opener=recording(method, recorder), **how, **more)
        assert again == plain
    assert recorder.times == 1 and len(model.graphs) >= 1


def test_what_another_step_is_made_of_needs_a_graph_of_its_own(model):
    model.graphs = {}
    recorder = Counted()

    def decode_by(method="decore-static", n=4, prompts=LATER, **how):
        generate(model, prompts, method, n, opener=recording(method, recorder), **{"heads": HEADS} | how)
        return recorder.times
    assert [decode_by() for _ in range(2)] == [1, 1]
    assert decode_by(alpha=0.6) == 2
    assert decode_by(heads=HEADS[:2]) == 3
    assert decode_by("decore-entropy") == 4
    assert decode_by(prompts=LATER[:2]) == 5
    assert decode_by(prompts=[random_ids(80)] * 3) == 6
    assert decode_by() == 6
    weight = model.norm.weight
    weight.data = weight.data.clone() * 2                       # the old place holds the old numbers
    assert decode_by() == 7


def test_graphs_that_take_too_much_memory_are_dropped_the_one_used_longest_ago_first(model, monkeypatch):
    model.graphs, recorder = {}, Counted()

    def used(alpha):
        out = generate(model, LATER, "decore-static", 4, heads=HEADS, alpha=alpha,
                       opener=recording("decore-static", recorder))
        assert out == generate(model, LATER, "decore-static", 4, heads=HEADS, alpha=alpha)
        return [dict(key[5])["alpha"] for key in model.graphs]
    assert [used(1.0), used(2.0), used(1.0)] == [["1.0"], ["1.0", "2.0"], ["2.0", "1.0"]]
    one = sum(x.nbytes for x in fast.tensors_of(next(iter(model.graphs.values()))[1]))
    monkeypatch.setattr(fast, "room_to_keep", lambda _: 2 * one)
    assert used(3.0) == ["1.0", "3.0"] and recorder.times == 3
    monkeypatch.setattr(fast, "room_to_keep", lambda _: one - 1)
    assert used(3.0) == ["1.0", "3.0"] and used(4.0) == []


def test_what_is_not_copied_would_be_seen(model, monkeypatch):
    """That later prompts are decoded right rests on `Cache.tensors`."""
    model.graphs = {}
    plain = baselines.generate(model, LATER, "ad", info_layer=2, max_new_tokens=9)
    generate(model, PROMPTS, "ad", 9, opener=recording("ad", dry_run), info_layer=2)
    monkeypatch.setattr("model.Cache.tensors", lambda cache: [*cache.kv, cache.lengths, cache.slots])
    model.graphs = {(*key[:6], *((x.shape, x.dtype) for x in fast.tensors_of(memory))): (graph, memory)
                    for key, (graph, memory) in model.graphs.items()}
    assert generate(model, LATER, "ad", 9, opener=recording("ad", dry_run), info_layer=2) != plain


@pytest.mark.parametrize("compiled, why", [
    (lambda step: lambda tokens: (lambda out: out._replace(scores=out.scores.flip(-1)))(step(tokens)), "differs"),
    (lambda step: 1 / 0, "ZeroDivisionError"), (lambda step: lambda tokens: 1 / 0, "ZeroDivisionError")])
def test_a_compiled_step_that_does_not_show_itself_is_not_used(model, monkeypatch, compiled, why):
    step, caches = open_decore(model, PROMPTS, 6, heads=HEADS)
    monkeypatch.setattr(torch, "compile", lambda step, **_: compiled(step))
    with pytest.warns(UserWarning, match=f"torch.compile does not give the step .*{why}"):
        assert fast.fuse(step, caches, LAST) is step
    assert caches[0].slots.tolist() == [0] * 3


def test_a_compiled_step_is_recorded(model, monkeypatch):
    plain = generate(model, PROMPTS, heads=HEADS, max_new_tokens=6)
    asked = []

    def compile(step, **how):
        asked.append(how)
        return lambda tokens: step(tokens)
    monkeypatch.setattr(torch, "compile", compile)
    step, caches = open_decore(model, PROMPTS, 6, heads=HEADS)
    made, caches = recorded(step, caches, LAST, 0, model, (), "kernels", dry_run)
    assert texts(lambda _: fetch(decode(made, LAST, 6), caches), 6) == [g.ids for g in plain]
    assert asked == [dict(fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")]


@pytest.mark.parametrize("how", ["graph", "kernels"])
def test_compiling_needs_a_gpu(model, monkeypatch, tmp_path, capsys, how):
    import sys

    import cli
    from decore import main
    from tests.checkpoints import write_tokenizer
    with pytest.raises(ValueError, match=f"compile '{how}' records a CUDA graph and the model is on cpu"):
        generate(model, PROMPTS, "greedy", compile=how)
    with pytest.raises(ValueError, match="compile True is unknown; known: no, graph, kernels"):
        generate(model, PROMPTS, "greedy", compile=True)
    write_tokenizer(write_checkpoint(tmp_path, "llama3", vocab_size=259))
    monkeypatch.setattr(sys, "argv", ["decore.py", "--model", str(tmp_path), "--device", "cpu", "--method", "greedy",
                                      "--prompt", "x", "--compile", how])
    assert cli.run(main) == 2
    assert f"compile {how!r} records a CUDA graph and the model is on cpu" in capsys.readouterr().err
