"""The benchmarks run in tiny shapes, and both sides of a comparison decode the same tokens."""

import json

import numpy as np
import pytest
import torch

from baselines import METHODS
from speed import decode, gpu
from speed.llama import write_gguf
from speed.shapes import SHAPES, random_model

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(decode, "bandwidth_meter", lambda device: lambda: 1e9)


def test_decode_times_every_method_alone_and_in_batches(call):
    options = "--shape tiny --prompt 40 --new 4 --rounds 1 --json --batch 2 --methods".split()
    result = json.loads(call(decode.main, *options, *METHODS, "transformers", "two-pass")[1])
    batches = {f"{name}, batch 2" for name in METHODS}
    assert set(result["tokens_per_second"]) == {*METHODS, "transformers", "two-pass"} | batches
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


def test_the_run_on_a_gpu_works_in_a_tiny_shape_on_a_cpu_and_goes_on_after_a_failure(call, monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.SECTIONS, "medium", "--batch 0")
    monkeypatch.setattr(gpu, "run_tests", lambda dry_run: "5 passed")
    call(gpu.main, "--dry-run", "--out", str(tmp_path / "out.json"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert [failure.split(":")[0] for failure in result["failed"]] == ["medium"]
    runs = {name: len(result[name]["tokens_per_second"]) for name in ("short", "long", "batch")}
    assert runs == dict(short=6, long=2, batch=4)


def test_llama_cpps_file_holds_the_weights(tmp_path):
    gguf, model = pytest.importorskip("gguf"), random_model(SHAPES["tiny"])
    write_gguf(tmp_path / "tiny.gguf", model)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert torch.equal(torch.tensor(stored["token_embd.weight"]), model.embed.weight)
    assert len(stored) == 2 + 12 * 4
