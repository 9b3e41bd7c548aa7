"""The common prefix of a batch is read once, and nothing else changes."""

import pytest
import torch

import decore
from model import Cache, Transformer, common_prefix
from paper import decoders
from tests.checkpoints import random_ids, write_checkpoint

HEADS = [(1, 0), (2, 3), (1, 2)]
PREFIX = random_ids(150, seed=1)
PROMPTS = [
    PREFIX + random_ids(9, seed=9),
    PREFIX + random_ids(31, seed=31),
    PREFIX[:70] + random_ids(2, seed=3),  # so the common prefix is 70 tokens
]
WITHOUT = [random_ids(70, seed=2) + p[-4:] for p in PROMPTS]
ANSWERS = [[random_ids(n, seed=10 * b + n) for n in (1, 5, 3)][: 1 + b] for b in range(3)]

SETTINGS = {
    "greedy": {},
    "masked": dict(heads=HEADS),
    "decore-static": dict(heads=HEADS, mask="query"),
    "decore-entropy": dict(heads=HEADS),
    "decore-entropy, masked prompt": dict(heads=HEADS, mask_prompt=True),
    "cd": {},
    "cad": {},
    "dola-low": {},
    "dola-high": dict(repetition_penalty=1.2),
    "ad": dict(info_layer=2),
}


@pytest.fixture(scope="module", params=["llama3", "mistral-window", "qwen2-window", "qwen3"])
def model(request, tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("m"), request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Transformer.load(write_checkpoint(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def passes(monkeypatch):
    """The [B, T] of every pass."""
    shapes = []
    embedding = Transformer.embedding

    def record(self, ids):
        shapes.append(tuple(ids.shape))
        return embedding(self, ids)

    monkeypatch.setattr(Transformer, "embedding", record)
    return shapes


@pytest.mark.parametrize("case", SETTINGS)
def test_a_batch_decodes_and_scores_as_its_prompts_one_by_one(model, case):
    how = dict(method=case.split(",")[0]) | SETTINGS[case]
    if case == "cd":
        how["amateur"] = model
    together, scored = {}, {}
    if case == "cad":
        together = dict(ids_without_context=WITHOUT)
        scored = dict(prompt_ids_without_context=WITHOUT)
    texts = decoders.generate(model, PROMPTS, max_new_tokens=8, eos_ids=(), **how, **together)
    sums = decoders.score(model, PROMPTS, ANSWERS, **how, **scored)
    for b, prompt in enumerate(PROMPTS):
        if case == "cad":
            together = dict(ids_without_context=WITHOUT[b])
            scored = dict(prompt_ids_without_context=WITHOUT[b])
        alone = decoders.generate(model, prompt, max_new_tokens=8, eos_ids=(), **how, **together)
        assert texts[b].ids == alone.ids
        assert texts[b].entropies == pytest.approx(alone.entropies, abs=1e-5)
        expected = decoders.score(model, prompt, ANSWERS[b], **how, **scored)
        assert sums[b] == pytest.approx(expected, abs=1e-4)


def test_the_common_prefix_is_read_once_and_the_rest_of_each_prompt_after_it(llama, passes):
    decore.generate(llama, PROMPTS, "greedy", max_new_tokens=1)
    assert passes == [(1, 70), (3, len(PROMPTS[1]) - 1 - 70), (3, 1)]


def test_prompts_with_and_without_context_each_have_their_common_prefix(llama, passes):
    decoders.generate(llama, PROMPTS, "cad", ids_without_context=WITHOUT, max_new_tokens=1)
    longest = len(PROMPTS[1]) - 1  # the shorter ones are padded
    assert passes == [(1, 70), (3, longest - 70)] * 2 + [(6, 1)]


def test_a_long_common_prefix_is_read_in_passes_of_a_bounded_number_of_tokens(
    llama, passes, monkeypatch
):
    monkeypatch.setattr("model.CHUNK", 48)
    cache = Cache(llama, [159] * 2, 1)
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][:-1] + [5]])
    llama.prefill(ids, cache)
    assert passes == [(1, 48), (1, 48), (1, 48), (1, 14), (2, 1)]


def test_texts_that_have_ended_are_not_read_on(llama, passes, monkeypatch):
    monkeypatch.setattr("model.CHUNK", 60)
    prompts = [random_ids(n + 1, seed=n) for n in (90, 80, 30, 40)]
    decore.generate(llama, prompts, "greedy", max_new_tokens=1)
    assert passes == [(4, 16), (4, 16), (4, 16), (2, 30), (2, 12), (4, 1)]
    how = dict(method="ad", info_layer=2, max_new_tokens=5, eos_ids=())
    texts = decoders.generate(llama, prompts, **how)
    assert [g.ids for g in texts] == [decoders.generate(llama, p, **how).ids for p in prompts]


@pytest.mark.parametrize(
    "ids, length",
    [
        ([[1] * 200], 0),  # one prompt has nothing to share
        ([[1] * 200] * 2, 200),
        ([[1] * 63 + [2], [1] * 64], 0),
        ([[1] * 70 + [2], [1] * 71], 70),
    ],
)
def test_a_common_prefix_has_at_least_a_block_of_tokens(ids, length):
    assert common_prefix(torch.tensor(ids)) == length


def test_lists_of_answers_are_as_many_as_prompts(llama):
    with pytest.raises(ValueError, match="3 prompts need as many lists of answers, not 2"):
        decore.score(llama, PROMPTS, ANSWERS[:2], heads=HEADS)


def test_scoring_masks_every_position_unless_mask_prompt_is_false(llama):
    class Subclass(decore.DeCoRe):
        pass

    how = dict(method="masked", heads=HEADS)
    default = decore.score(llama, PROMPTS[0], [7, 8, 9], **how)
    assert decore.score(llama, PROMPTS[0], [7, 8, 9], decoder=Subclass, **how) == default
    assert decore.score(llama, PROMPTS[0], [7, 8, 9], mask_prompt=True, **how) == default
    unmasked = decore.score(llama, PROMPTS[0], [7, 8, 9], mask_prompt=False, **how)
    assert abs(unmasked - default) > 1e-3
