"""The benchmarks run in tiny shapes, and both sides of a comparison decode the same tokens."""

import json

import pytest
import torch

from benchmarks import decode, gpu, plan
from benchmarks.measure import read_weights, weights
from benchmarks.shapes import SHAPES, random_model, spread_heads
from runtime.pack import Packed

pytest.importorskip("transformers")


@pytest.fixture
def run_decode(call, monkeypatch):
    monkeypatch.setattr(decode, "bandwidth_meter", lambda device: lambda: 1e9)
    options = ("--shape", "tiny", "--prompt", "40", "--new", "4", "--rounds", "1", "--json")
    return lambda *more: json.loads(call(decode.main, *options, *more)[1])


def test_decode_prints_one_json_line_and_both_sides_choose_the_same_tokens(run_decode):
    result = run_decode()
    assert set(result["tokens_per_second"]) == {"greedy", "decore-entropy", "transformers", "two-pass"}
    assert all(result[name] > 0 for name in ("decore_over_greedy", "greedy_over_transformers", "decore_over_two_pass"))
    assert result["same_tokens"] == {"greedy and transformers": 5, "decore-entropy and two-pass": 5}


def test_decode_times_every_method_in_batches_and_with_lookup(run_decode):
    result = run_decode("--batch", "2", "--lookup", "3", "--methods", *decode.METHODS)
    batches = {f"{name}, batch 2" for name in decode.METHODS}
    lookups = {f"{name}, lookup 3" for name in decode.METHODS if name.split("-")[0] in ("greedy", "masked", "decore")}
    assert set(result["over_greedy"]) == {*decode.METHODS} | batches | lookups


def test_the_two_pass_loop_masks_the_heads_that_decore_masks():
    model = random_model(SHAPES["tiny"])
    for p in model.parameters():
        p.data *= 5                             # with weights of 0.02 a head hardly moves the logits
    names = ["greedy", "transformers", "decore-entropy", "two-pass"]
    with torch.inference_mode():
        runs = decode.contestants(model, list(range(12)), 16, names)
        greedy, generated, decore, two_pass = (run()[0] for run, *_ in runs.values())
    assert greedy == generated and decore == two_pass and decore != greedy


def test_a_packed_head_is_in_memory_in_addition_to_a_tied_embedding():
    model = random_model(SHAPES["tiny"])
    tied, matrix = weights(model), model.lm_head.weight
    assert read_weights(model) == tied
    model.lm_head = Packed(matrix, None)
    assert weights(model) == tied + matrix.nbytes and read_weights(model) == tied


@pytest.mark.parametrize("k", [0, 7])
def test_lookup_decodes_the_text_that_quotes_the_prompt(k):
    model = random_model(SHAPES["tiny"])
    heads = spread_heads(model.config)
    ids, *_ = decode.quoting(model, list(range(64)), 30, "decore-entropy", k, dict(heads=heads))()
    quoted = [i for i in ids if i < model.config.vocab_size // 2]
    assert len(ids) == 31 and len(quoted) == 30 and ids[24] not in quoted


def test_the_run_on_a_gpu_works_in_tiny_shapes_on_a_cpu_and_goes_on_after_a_failure(call, monkeypatch, tmp_path):
    def failing(run):
        yield dict(row=1)
        raise OSError("no pytest")

    monkeypatch.setattr(gpu, "run_tests", failing)
    call(gpu.main, "--dry-run", "--out", str(tmp_path / "out.json"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["failed"] == ["tests: OSError: no pytest"]
    rows = dict(tests=1, products=4, decode=8, peers=8, prompts=6, batch=4, lookup=4, loading=1)
    assert {name: len(result[name]) for name in rows} == rows


def test_a_plan_counts_the_memory_of_a_rank_and_its_all_reduces():
    one, four = (plan.plan(SHAPES["8b"], ranks, 1024, 64) for ranks in (1, 4))
    assert one["weights"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert one["prompt"] == 4 * four["prompt"] == 32 * 2 * 8 * 128 * 2 * 1024           # layers, k and v, heads, width
    assert (one["calls"], four["calls"]) == (0, 65) and four["largest"] == 2 * 4096 * 2   # two rows
