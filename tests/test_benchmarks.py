"""The benchmarks run in tiny shapes, and both sides of a comparison decode the same tokens."""

import json
import sys

import pytest
import torch

from benchmarks import decode, gpu, plan
from benchmarks.shapes import SHAPES, random_model, spread_heads, transformers_model

pytest.importorskip("transformers")


def run_decode(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(decode, "bandwidth", lambda device: lambda: 1e9)
    monkeypatch.setattr(sys, "argv", ["decode.py", "--shape", "tiny", "--prompt", "40", "--new", "4", "--rounds", "1",
                                      "--json", *arguments])
    decode.main()
    return json.loads(capsys.readouterr().out)


def test_decode_prints_one_json_line_in_which_both_sides_choose_the_same_tokens(monkeypatch, capsys):
    result = run_decode(monkeypatch, capsys)
    assert set(result["tokens_per_second"]) == {"greedy", "decore-entropy", "transformers", "two-pass"}
    assert all(result[name] > 0 for name in ("decore_over_greedy", "greedy_over_transformers", "decore_over_two_pass"))
    assert result["same_tokens"] == {"greedy and transformers": 5, "decore-entropy and two-pass": 5}


def test_decode_times_every_method_in_batches_and_with_lookup(monkeypatch, capsys):
    result = run_decode(monkeypatch, capsys, "--batch", "2", "--lookup", "3", "--methods", *decode.METHODS)
    batches = {f"{name}, batch 2" for name in decode.METHODS}
    lookups = {f"{name}, lookup 3" for name in decode.METHODS if name.split("-")[0] in ("greedy", "masked", "decore")}
    assert set(result["over_greedy"]) == {*decode.METHODS} | batches | lookups


def test_the_two_pass_loop_masks_the_heads_that_decore_masks():
    model = random_model(SHAPES["tiny"])
    for p in model.parameters():
        p.data *= 5                             # with weights of 0.02 a head hardly moves the logits
    names = ["greedy", "transformers", "decore-entropy", "two-pass"]
    with torch.inference_mode():
        runs = decode.contestants(model, list(range(12)), 16, names, spread_heads(model.config),
                                  transformers_model(model))
        greedy, generated, decore, two_pass = (run()[0] for run, *_ in runs.values())
    assert greedy == generated and decore == two_pass and decore != greedy


@pytest.mark.parametrize("k", [0, 7])
def test_lookup_decodes_the_text_that_quotes_the_prompt(k):
    model = random_model(SHAPES["tiny"])
    ids, *_ = decode.copying(model, list(range(64)), 30, "decore-entropy", k, dict(heads=[(1, 0)]))()
    quoted = [i for i in ids if i < model.config.vocab_size // 2]
    assert len(ids) == 31 and len(quoted) == 30 and ids[24] not in quoted


def test_the_run_on_a_gpu_works_in_tiny_shapes_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "products", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(tmp_path / "out.json")])
    gpu.main()
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["failed"] == ["products: ZeroDivisionError: division by zero"]
    assert {name: len(result[name]) for name in ("tests", "decode", "peers", "prompts", "batch", "lookup", "loading")} \
        == dict(tests=1, decode=8, peers=8, prompts=3, batch=4, lookup=4, loading=1)


def test_a_plan_counts_what_a_rank_holds_and_how_often_ranks_meet():
    one, four = (plan.share(SHAPES["8b"], ranks, 1024, 64) for ranks in (1, 4))
    assert one["weights"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert one["prompt"] == 4 * four["prompt"] == 32 * 2 * 8 * 128 * 2 * 1024           # layers, k and v, heads, width
    assert (one["calls"], four["calls"]) == (0, 65) and four["largest"] == 2 * 4096 * 2   # two rows
    assert four["replicated"] == one["replicated"] == 65 * 4096 * 2                      # norms
