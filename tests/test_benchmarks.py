"""The benchmarks run in tiny shapes, and both sides of a comparison decode the same tokens."""

import json

import numpy as np
import pytest
import torch

from baselines import METHODS
from benchmarks import decode, gpu, plan
from benchmarks.llama import write_gguf
from benchmarks.shapes import SHAPES, random_model, spread_heads

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(decode, "bandwidth_meter", lambda device: lambda: 1e9)


def test_decode_times_every_method_in_batches_and_with_lookup(call):
    options = "--shape tiny --prompt 40 --new 4 --rounds 1 --json --batch 2 --lookup 3 --methods".split()
    result = json.loads(call(decode.main, *options, *METHODS, "transformers", "two-pass")[1])
    batches = {f"{name}, batch 2" for name in METHODS}
    lookups = {f"{name}, lookup 3" for name in METHODS if name.split("-")[0] in ("greedy", "masked", "decore")}
    assert set(result["tokens_per_second"]) == {*METHODS, "transformers", "two-pass"} | batches | lookups
    assert all(result[name] > 0 for name in ("decore_over_greedy", "greedy_over_transformers", "decore_over_two_pass"))
    assert result["same_tokens"] == {"greedy and transformers": 5, "decore-entropy and two-pass": 5}


def test_rates_count_all_texts_and_ratios_are_medians_over_the_rounds():
    runs = {"greedy": (None, 1, 50), "decore-entropy": (None, 1, 50), "greedy, batch 4": (None, 4, 20)}
    seconds = {"greedy": [1, 2, 4], "decore-entropy": [2, 4, 4], "greedy, batch 4": [2, 2, 2]}
    results = {name: [([7], 0.5, s) for s in times] for name, times in seconds.items()}
    result = decode.summary(results, np.array([1000] * 3), runs, prompt=10, new=8)
    assert result["tokens_per_second"] == {"greedy": 4, "decore-entropy": 2, "greedy, batch 4": 16}
    assert result["prompt_tokens_per_second"] == {"greedy": 20, "decore-entropy": 20, "greedy, batch 4": 80}
    assert result["share_of_bandwidth"] == {"greedy": 0.2, "decore-entropy": 0.1, "greedy, batch 4": 0.32}
    assert result["decore_over_greedy"] == 0.5 and result["over_greedy"]["greedy, batch 4"] == [3, 4, 6]


def test_the_two_pass_loop_masks_the_heads_that_decore_masks():
    model = random_model(SHAPES["tiny"])
    for p in model.parameters():
        p.data *= 5                             # with weights of 0.02 a head hardly moves the logits
    with torch.inference_mode():
        runs = decode.contestants(model, list(range(12)), 16, ["greedy", "decore-entropy", "transformers", "two-pass"])
        ids = {name: run()[0] for name, (run, *_) in runs.items()}
    assert ids["greedy"] == ids["transformers"] != ids["decore-entropy"] == ids["two-pass"]


def test_lookup_decodes_the_text_that_quotes_the_prompt():
    model = random_model(SHAPES["tiny"])
    settings = dict(method="decore-entropy", heads=spread_heads(model.config))
    ids, *_ = decode.quoting(model, list(range(64)), 30, 7, settings)()
    assert len(ids) == 31 and [i for i, token in enumerate(ids) if token == model.config.vocab_size - 1] == [24]


def test_the_run_on_a_gpu_works_in_a_tiny_shape_on_a_cpu_and_goes_on_after_a_failure(call, monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.SECTIONS, "medium", "--lookup -1")
    monkeypatch.setattr(gpu, "run_tests", lambda dry_run: "5 passed")
    call(gpu.main, "--dry-run", "--out", str(tmp_path / "out.json"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert [failure.split(":")[0] for failure in result["failed"]] == ["medium"]
    runs = {name: len(result[name]["tokens_per_second"]) for name in ("short", "long", "batch", "lookup")}
    assert runs == dict(short=6, long=2, batch=4, lookup=4)


def test_a_plan_counts_the_memory_of_a_rank_and_its_all_reduces():
    one, four = (plan.plan(SHAPES["8b"], ranks, 1024, 64) for ranks in (1, 4))
    assert one["weights"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert one["prompt"] == 4 * four["prompt"] == 32 * 2 * 8 * 128 * 2 * 1024           # layers, k and v, heads, width
    assert one["read"] == one["weights"] - 128_256 * 4096 * 2 + one["prompt"] + one["new"]      # no embedding
    assert one["all_reduces"] == [] and four["all_reduces"] == [4096 * 2] + 64 * [2 * 4096 * 2]


def test_llama_cpps_file_holds_the_weights(tmp_path):
    gguf, model = pytest.importorskip("gguf"), random_model(SHAPES["tiny"])
    write_gguf(tmp_path / "tiny.gguf", model)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert torch.equal(torch.tensor(stored["token_embd.weight"]), model.embed.weight)
    assert len(stored) == 2 + 12 * 4
