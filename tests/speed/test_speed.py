"""The programs of speed/ run in tiny shapes, and both sides of a comparison decode the same
tokens."""

import json
import time
from collections import Counter
from unittest.mock import Mock

import pytest
import torch

from decore import METHODS
from speed import decode, gpu, suite
from speed.shapes import SHAPES, random_model, spread_heads, weight_bytes
from tests.checkpoints import write_lines

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(decode, "bandwidth_meter", lambda device: lambda: 1e9)


def test_decode_times_every_method_on_several_prompts(call):
    options = "--shape tiny --prompt 40 --new 4 --rounds 1 --batch 2 --json --methods".split()
    result = json.loads(call(decode.main, *options, *METHODS, *decode.PEERS)[1])
    assert set(result["tokens_per_second"]) == {*METHODS, *decode.PEERS}
    assert result.keys() >= {
        "decore_over_greedy",
        "greedy_over_transformers",
        "decore_over_two_pass",
    }
    assert list(result["same_tokens"].values()) == [5] * 5


def test_rates_count_all_texts_and_ratios_are_medians_over_the_rounds():
    seconds = {"greedy": [1, 2, 4], "decore-entropy": [2, 4, 4]}
    results = {name: [([7], 0.5, s) for s in times] for name, times in seconds.items()}
    result = decode.summary(results, [1000] * 3, read=50, prompt=10, new=8)
    assert result["tokens_per_second"] == {"greedy": 4, "decore-entropy": 2}
    assert result["prompt_tokens_per_second"] == {"greedy": 20, "decore-entropy": 20}
    assert result["share_of_bandwidth"] == {"greedy": 0.2, "decore-entropy": 0.1}
    assert result["decore_over_greedy"] == 0.5 and result["ratio_quartiles"] == {
        "decore_over_greedy": [0.5, 0.5, 0.75]
    }


def test_every_decore_masks_the_same_heads_and_reads_the_weights_once_for_a_batch():
    model, counts = random_model(SHAPES["tiny"]), Counter()
    assert decode.bytes_per_token(model, 10, 2) == weight_bytes(model) / 2 + 10 * 2 * 4 * 2 * 16 * 4
    for p in model.parameters():
        p.data *= 5  # with weights of 0.02 a head hardly moves the logits
    with torch.inference_mode():
        runs = decode.contestants(
            model, [list(range(12))], 16, ["greedy", "decore-entropy", *decode.PEERS]
        )
        ids = {name: run(lambda *_, name=name: counts.update([name])) for name, run in runs.items()}
    assert ids["greedy"] == ids["transformers"] == ids["hf-greedy"] != ids["decore-entropy"]
    assert ids["decore-entropy"] == ids["two-pass"] == ids["hf"] == ids["custom-generate"]
    assert set(counts.values()) == {17}
    assert [layer for layer, _ in spread_heads(SHAPES["8b"])] == [
        6,
        8,
        11,
        13,
        16,
        19,
        21,
        24,
        26,
        29,
    ]


def test_the_clock_runs_from_the_first_token_to_the_last():
    def run(tick):
        for seconds in (0, 0.02, 0.02):
            time.sleep(seconds)
            tick()
        return [[7], [8]]

    ids, first, rest = decode.clock(run)
    assert ids == [7] and first < 0.04 <= rest


def test_a_checkpoint_is_measured_as_a_table_without_transformers(call, monkeypatch, llama):
    monkeypatch.setattr(decode, "find_spec", lambda name: name == "torch")
    clock, generate = decode.clock, Mock(side_effect=decode.decore.generate)
    monkeypatch.setattr(decode, "clock", lambda run: (clock(run)[0], 0.5, 2))
    monkeypatch.setattr(decode.decore, "generate", generate)
    options = (
        "--model",
        llama.folder,
        "--prompt",
        40,
        "--new",
        2,
        "--batch",
        3,
        "--methods",
        "greedy",
        "decore-entropy",
    )
    _, out, _ = call(decode.main, *options)
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["greedy", "3.00"],
        ["decore-entropy", "3.00"],
        ["decore", "over"],
    ]
    assert all(run.kwargs["graph"] is True for run in generate.mock_calls)
    status, out, error = call(decode.main, *options, "two-pass")
    assert (status, out) == (2, "") and "two-pass: pip install transformers" in error


def test_the_run_on_a_gpu_works_in_a_tiny_shape_on_a_cpu_and_goes_on_after_a_failure(
    call, monkeypatch, tmp_path
):
    assert not any(
        "--no-graph" in gpu.dry(command) for _, command in gpu.SECTIONS.values()
    )  # refused on a CPU
    sections = {name: gpu.SECTIONS[name] for name in ("tests", "short")}
    monkeypatch.setattr(gpu, "SECTIONS", {"bad": (60, "-c raise(ValueError)")} | sections)
    call(gpu.main, "--dry-run", "--out", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert [failure.split(":")[0] for failure in result["failed"]] == ["bad"]
    assert "tests collected" in result["tests"]
    assert len(result["short"]["tokens_per_second"]) == 6


def test_the_suite_compares_the_same_answers_in_turns(call, tmp_path):
    rows = []
    for i in range(20):
        document = " ".join(str(100 * i + n) for n in range(30 + 3 * (i % 5)))
        rows.append({"document": document, "summary": "s"})
    data = write_lines(tmp_path / "xsum-1000.jsonl", rows)
    options = "--shape", "tiny", "--task", "xsum", "--limit", 18, "--data", data
    status, out, err = call(suite.main, *options)
    assert status == 0, err
    result = json.loads(out)
    assert result["items"] == 18 and result["new_tokens"] == 128
    assert result["same_answers"] == {"one by one": 18, "batches": 18}
    assert set(result["examples_per_second"]) == {"evaluate", "one by one", "batches"}
    assert len(result["faster_than"]["one by one"]) == 3
    status, _, err = call(suite.main, "--task", "memotrap")
    assert status == 2 and "memotrap scores answers; choose a task that generates" in err
