"""The benchmarks compare like with like: the same weights, the same tokens. Tiny shapes, no claim about speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import batches, decode, lookup
from benchmarks.shapes import SHAPES, random_model, spread_heads, transformers_model

pytest.importorskip("transformers")


def run_decode(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["decode.py", "--shape", "tiny", "--prompt", "12", "--new", "4", "--rounds", "1",
                                      *arguments])
    decode.main()
    return capsys.readouterr().out


def test_decode_prints_one_json_line_in_which_both_sides_choose_the_same_tokens(monkeypatch, capsys):
    lines = run_decode(monkeypatch, capsys, "--json").splitlines()
    result = json.loads(lines[0])
    assert len(lines) == 1
    assert set(result["tokens_per_second"]) == {"greedy", "decore-entropy", "transformers", "two-pass"}
    assert all(result[name] > 0 for name in decode.RATIOS)
    assert result["same_tokens"] == {"greedy and transformers": 4, "decore-entropy and two-pass": 4}


def test_decode_times_only_the_methods_it_is_asked_for(monkeypatch, capsys):
    out = run_decode(monkeypatch, capsys, "--methods", "greedy", "masked")
    assert [line.split()[0] for line in out.splitlines()] == ["greedy", "masked"]


@pytest.mark.parametrize("method", decode.METHODS)
def test_decode_times_every_method(monkeypatch, capsys, method):
    out = run_decode(monkeypatch, capsys, "--methods", method)
    assert out.startswith(method) and "tokens/s" in out


def test_decode_refuses_what_it_does_not_know(monkeypatch, capsys):
    with pytest.raises(ValueError, match="shape '3b' is unknown; known: tiny, 0.5b"):
        run_decode(monkeypatch, capsys, "--shape", "3b")
    with pytest.raises(ValueError, match="method 'beam' is unknown; known: greedy"):
        run_decode(monkeypatch, capsys, "--methods", "beam")


def test_the_two_pass_loop_masks_what_decore_masks():
    """Masked heads matter to the tokens here, so that agreement is not agreement of two unmasked runs."""
    model = random_model(SHAPES["tiny"])
    for p in model.parameters():
        p.data *= 5                             # heads of a model at 0.02 hardly move the logits
    prompt, heads = list(range(12)), spread_heads(SHAPES["tiny"])
    with torch.inference_mode():
        runs = decode.contestants(model, prompt, 16, ["greedy", "transformers", "decore-entropy", "two-pass"], heads)
        greedy, generated, decore, two_pass = (prepare()() for prepare in runs.values())
    assert greedy == generated
    assert decore == two_pass
    assert decore != greedy


def test_a_prepared_contestant_runs_the_same_every_round():
    model = random_model(SHAPES["tiny"])
    with torch.inference_mode():
        for prepare in decode.contestants(model, [1, 2, 3], 4, decode.CONTESTANTS, [(1, 0)]).values():
            assert prepare()() == prepare()()


@pytest.mark.parametrize("name, said", [("0.5b", 0.494e9), ("8b", 8.03e9), ("70b-shard", 70.55e9 / 8)])
def test_a_shape_has_as_many_parameters_as_the_checkpoint_it_is_named_after(name, said):
    model = random_model(SHAPES[name], "meta")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(said, rel=0.01)


def test_the_model_in_transformers_holds_the_same_tensors():
    model = random_model(SHAPES["tiny"])
    twin = transformers_model(model)
    assert twin.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in model.parameters())


def test_batches_counts_the_same_work_at_every_size(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "batches.py --shape tiny --items 3 --new 2 --sizes 1 2 --json".split())
    batches.main()
    result = json.loads(capsys.readouterr().out)
    assert set(result["results"]) == {f"{m}, batch {b}" for m in ("greedy", "decore-entropy") for b in (1, 2)}
    for r in result["results"].values():
        assert r["new_tokens_per_second"] == pytest.approx(2 * r["examples_per_second"], rel=0.01)


def test_everything_about_a_gpu_runs_in_tiny_shapes_on_a_cpu(tmp_path):
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(out)], check=True,
                   cwd=Path(__file__).parent.parent)
    found = json.loads(out.read_text())
    assert found["dry_run"] and found["skipped"] == [] and found["bandwidth"] > 0
    assert {name: len(found[name]) for name in ("agreement", "prefill", "others", "lookup", "decode", "share")} == {
        "agreement": 1, "prefill": 2, "others": 2, "lookup": 12, "decode": 8, "share": 2}
    assert all(row["tokens_per_second"] > 0 for name in ("prefill", "others", "lookup", "decode", "share")
               for row in found[name])


def run_lookup(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["lookup.py", "--rounds", "2", "--json", *arguments])
    lookup.main()
    return json.loads(capsys.readouterr().out)["results"]


def test_lookup_forces_texts_that_copy_that_do_not_and_that_mislead(monkeypatch, capsys):
    results = run_lookup(monkeypatch, capsys, *"--shape tiny --prompt 64 --new 25".split())
    passes = {kind: {name: r["tokens_per_pass"] for name, r in row.items()} for kind, row in results.items()}
    assert set(passes) == {"copying", "nothing", "decoys"}
    for kind, row in passes.items():
        assert row["greedy"] == row["decore-entropy"] == 1
        # 24 copied tokens: two to find the place, then 8, 8 and 7 a pass, the last of which does not agree
        expected = pytest.approx(25 / 5, abs=0.01) if kind == "copying" else 1
        assert row["greedy, lookup 7"] == row["decore-entropy, lookup 7"] == expected
    for row in results.values():
        assert row["greedy"]["over_greedy"] == 1 and row["greedy"]["over_greedy_quartiles"] == [1, 1]


def test_lookup_asks_the_miniature_what_its_passages_answer(monkeypatch, capsys):
    results = run_lookup(monkeypatch, capsys, *"--miniature --items 3 --texts conflict needle".split())
    assert set(results) == {"conflict", "needle"}
    for row in results.values():
        assert row["greedy"]["tokens_per_pass"] == 1 < row["decore-entropy, lookup 7"]["tokens_per_pass"]


def test_a_ratio_is_that_of_the_rates_of_each_round():
    greedy = dict(seconds=[2.0, 4.0, 3.0], tokens=30, passes=30)
    one = dict(seconds=[1.0, 1.0, 3.0], tokens=30, passes=15)
    assert lookup.summary(one, greedy) == dict(tokens_per_pass=2, tokens_per_second=10, over_greedy=2,
                                               over_greedy_quartiles=[1.5, 3])
    once = lookup.summary(one | dict(seconds=[1.0], tokens=10), greedy | dict(seconds=[3.0], tokens=10))
    assert (once["over_greedy"], once["over_greedy_quartiles"]) == (3, [3, 3])


@pytest.mark.parametrize("wrong, message", [
    ("--texts open", "--texts open is not one of copying, nothing, decoys"),
    ("--prompt 32", "--prompt 32 --new 4: give 33 to 320 tokens of prompt and at most 320 new ones"),
    ("--new 321", "--prompt 64 --new 321: give 33 to 320"),
])
def test_lookup_refuses_what_it_cannot_force(monkeypatch, capsys, wrong, message):
    with pytest.raises(ValueError, match=message):
        run_lookup(monkeypatch, capsys, *f"--shape tiny --prompt 64 --new 4 {wrong}".split())
