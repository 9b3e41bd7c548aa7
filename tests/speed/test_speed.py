"""The programs of speed/ run in tiny shapes, and both sides of a comparison decode the same
tokens."""

import json

import pytest
import torch

from runtime.files import read_json
from speed import decode, gpu
from speed.shapes import SHAPES, random_model, spread_heads
from tests.checkpoints import stand_in

TINY = "--shape tiny --prompt 40 --new 4 --rounds 1"


def test_decode_times_every_method_on_several_prompts(call):
    names = [*decode.OURS, *decode.PEERS]
    result = json.loads(call(decode.main, TINY, "--batch 2 --json --methods", *names)[1])
    assert [*result["tokens_per_second"]] == names
    fixed = {"decore_over_greedy", "greedy_over_transformers", "decore_over_two_pass"}
    assert fixed <= result["ratios"].keys()
    assert list(result["same_tokens"].values()) == [5] * 5


def test_rates_count_all_texts_and_ratios_are_medians_over_the_rounds():
    """The clock runs from the first token to the last."""
    seconds = {"greedy": [1, 2, 4], "decore-entropy": [2, 4, 4]}
    results = {
        name: [([[7]], [3, 3.5, 3.7, 3.5 + s, 99]) for s in times]
        for name, times in seconds.items()
    }
    result = decode.summary(results, prompt=10, new=8)
    assert result["tokens_per_second"] == {"greedy": [3, 4, 6], "decore-entropy": [2, 2, 3]}
    assert result["prompt_tokens_per_second"] == {"greedy": 20, "decore-entropy": 20}
    assert result["ratios"] == {"decore_over_greedy": [0.5, 0.5, 0.75]}


def test_every_decore_masks_the_same_heads():
    model, ticks = random_model(SHAPES["tiny"]), []
    for p in model.parameters():
        p.data *= 5  # with weights of 0.02 a head hardly moves the logits
    names = ["greedy", "decore-entropy", *decode.PEERS]
    ids = {}
    with torch.inference_mode():
        for name, run in decode.contestants(model, 16, names, SHAPES["tiny"]).items():
            ids[name] = run([[*range(12)]], lambda *_: ticks.append(0))
    assert ids["greedy"] == ids["transformers"] == ids["hf-greedy"] != ids["decore-entropy"]
    assert ids["decore-entropy"] == ids["two-pass"] == ids["hf"] == ids["custom-generate"]
    assert len(ticks) == 17 * len(names)
    layers = [layer for layer, _ in spread_heads(stand_in(32, 32).config)]
    assert layers == [6, 8, 11, 13, 16, 19, 21, 24, 26, 29]


def test_a_checkpoint_is_measured_as_a_table(call, llama):
    options = f"--model {llama.checkpoint.folder} --prompt 40 --new 2 --rounds 1 --methods"
    _, out, _ = call(decode.main, *options.split(), "greedy", "transformers")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert names == ["greedy", "transformers", "greedy"]


def test_the_run_on_a_gpu_keeps_what_each_section_measures_or_why_it_failed(
    call, monkeypatch, tmp_path
):
    sections = {
        "slow": (2, "-c print('begun',flush=True)or(__import__('time').sleep(99))"),
        "fails": (60, "-c raise(ValueError('why'))"),
        "empty": (60, "-c pass"),
        "bad JSON": (60, "-c print('{')"),
        "tests": (60, "-c print('1passed')"),
        "short": (60, "-c print('x\\n{\"a\":1}')"),
    }
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    monkeypatch.setattr(gpu, "dry", lambda command: command)
    status, _, _ = call(gpu.main, f"--dry-run --out {tmp_path}/out.json")
    result = read_json(tmp_path / "out.json")
    failed = result["failed"]
    assert status == 0 and [*failed] == [*sections][:4]
    assert failed["fails"].startswith("exit status 1\n") and failed["fails"].endswith("why")
    assert failed["empty"] == "no result" and failed["bad JSON"] == "no result\n{"
    assert failed["slow"] == "stopped after 2 seconds\nbegun"
    assert result["tests"] == "1passed" and result["short"] == {"a": 1}


@pytest.mark.parametrize("name", [name for name in gpu.SECTIONS if name != "tests"])
def test_a_section_of_the_run_on_a_gpu_works_in_a_tiny_shape_on_a_cpu(call, name):
    command = gpu.dry(gpu.SECTIONS[name][1]).split()
    status, out, err = call(decode.main, *command[2:])
    assert (command[:2], status) == (["-m", "speed.decode"], 0), err
    n_peers = sum(peer in command for peer in decode.PEERS)
    assert len(json.loads(out)["tokens_per_second"]) == 2 + n_peers


def test_the_sections_of_the_run_on_a_gpu_end_in_the_promised_time():
    assert "in at most ten minutes" in gpu.__doc__
    assert sum(seconds for seconds, _ in gpu.SECTIONS.values()) <= 600
    assert (gpu.ROOT / gpu.SECTIONS["tests"][1].split()[-1]).exists()


NO_GRAPH = "--no-graph has no effect without a GPU"


def test_bad_options_are_refused_in_one_line(refused, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # as torchrun does
    not_alone = TINY, "two-pass: not with torchrun"
    for options, words in not_alone, ("--methods greedy --no-graph", NO_GRAPH):
        err = refused(decode.main, options)
        assert words in err and err.count("\n") == 1
