"""The benchmarks compare like with like: the same weights, the same tokens. Tiny shapes, no claim about speed."""

import json
import sys

import pytest
import torch

from benchmarks import batches, decode, gpu, loading, lookup, measure, plan
from benchmarks.shapes import SHAPES, random_model, spread_heads, transformers_model
from runtime import weights as checkpoint
from runtime.pack import Packed, pack

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(measure.bandwidth, "__defaults__", ("cpu", 10_000))


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
    assert all(result[name] > 0 for name in ("decore_over_greedy", "greedy_over_transformers", "decore_over_two_pass"))
    assert result["same_tokens"] == {"greedy and transformers": 4, "decore-entropy and two-pass": 4}


def test_decode_times_only_the_methods_it_is_asked_for(monkeypatch, capsys):
    out = run_decode(monkeypatch, capsys, "--methods", "greedy", "masked")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["greedy", "masked", "memory"]


@pytest.mark.parametrize("method", [*decode.METHODS, *(name for name in decode.OTHERS if name != "llama.cpp")])
def test_decode_times_every_method(monkeypatch, capsys, method):
    out = run_decode(monkeypatch, capsys, "--prompt", "40", "--methods", method)
    assert out.splitlines()[1].split()[0] == method


def test_decode_refuses_what_it_does_not_know(monkeypatch, capsys, tmp_path):
    with pytest.raises(ValueError, match="shape '3b' is unknown; known: tiny, 0.5b"):
        run_decode(monkeypatch, capsys, "--shape", "3b")
    with pytest.raises(ValueError, match="method 'beam' is unknown; known: greedy"):
        run_decode(monkeypatch, capsys, "--methods", "beam")
    with pytest.raises(ValueError, match="--llama FOLDER and the method llama.cpp go together"):
        run_decode(monkeypatch, capsys, "--llama", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="llama-bench is missing: python -m benchmarks.peers.llama"):
        run_decode(monkeypatch, capsys, "--methods", "llama.cpp", "--llama", str(tmp_path))


def test_a_summary_tells_rates_ratios_of_rounds_and_the_share_of_the_bandwidth():
    runs = {"greedy": (None, 10, 200), "llama.cpp": (None, 10, 200), "batch": (None, 160, 20), "read": (None, 40, None)}
    seconds = {"greedy": [1.0, 2.0, 4.0], "llama.cpp": [2.0, 2.0, 2.0], "batch": [2.0, 2.0, 2.0], "read": [1.0] * 3}
    found = decode.summary(seconds, {}, [4000.0, 4000.0, 1000.0], runs, 10)
    assert found["tokens_per_second"] == {"greedy": 5, "llama.cpp": 5, "batch": 80, "read": 40}
    assert found["quartiles"]["greedy"] == [3.75, 5, 7.5]
    assert found["greedy_over_llama"] == 1 and found["ratio_quartiles"]["greedy_over_llama"] == [0.75, 1, 1.5]
    assert found["share_of_bandwidth"] == {"greedy": 0.5, "llama.cpp": 0.25, "batch": 0.4}
    assert found["over_greedy"]["batch"] == [12, 16, 24] and "read" not in found["over_greedy"]


def twins():
    """A model and its twin in transformers, in which masked heads matter to the tokens."""
    model = random_model(SHAPES["tiny"])
    for p in model.parameters():
        p.data *= 5                             # heads of a model at 0.02 hardly move the logits
    return model, transformers_model(model)


def test_the_two_pass_loop_masks_what_decore_masks():
    model, twin = twins()
    prompt, heads = list(range(12)), spread_heads(SHAPES["tiny"])
    with torch.inference_mode():
        runs = decode.contestants(model, prompt, 16, ["greedy", "transformers", "decore-entropy", "two-pass"], heads,
                                  twin)
        greedy, generated, decore, two_pass = (prepare()() for prepare, _, _ in runs.values())
    assert greedy == generated
    assert decore == two_pass
    assert decore != greedy


def test_a_prepared_contestant_runs_the_same_every_round():
    model, twin = twins()
    names = [*decode.CONTESTANTS, "lookup", "batch"]
    with torch.inference_mode():
        for prepare, _, _ in decode.contestants(model, list(range(40)), 4, names, [(1, 0)], twin).values():
            assert prepare()() == prepare()()


def test_a_batch_begins_with_the_prompt_of_the_others():
    model, _ = twins()
    with torch.inference_mode():
        runs = decode.contestants(model, list(range(12)), 8, ["greedy", "batch"], [])
        assert runs["greedy"][0]()() == runs["batch"][0]()()
        assert runs["batch"][1] == 16 * runs["greedy"][1]


def test_what_is_read_for_a_token_is_the_weights_and_the_cache():
    model = random_model(SHAPES["8b"], "meta", torch.bfloat16)
    assert measure.read_weights(model) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.01)       # no embedding
    tied = random_model(SHAPES["tiny"])
    assert measure.read_weights(tied) == measure.weights(tied)
    assert measure.cached([tied.cache(torch.tensor([64]), 64)]) == 4 * 2 * 2 * 128 * 16 * 4    # [2, 1, 2, 128, 16] each


def test_a_packed_head_is_counted_beside_the_embedding(monkeypatch):
    monkeypatch.setattr("runtime.pack.SMALL", 0)
    model = random_model(SHAPES["tiny"])
    before, embedding = measure.weights(model), model.embed.weight.nbytes
    pack(model)
    assert isinstance(model.lm_head, Packed)
    assert measure.weights(model) == before + embedding and measure.read_weights(model) == before


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


def run_gpu(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", *map(str, arguments)])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    gpu.main()


def test_everything_about_a_gpu_runs_in_tiny_shapes_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "run_tests", lambda run: dict(status=0))
    run_gpu(monkeypatch, "--out", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["dry_run"] and found["failed"] == []
    assert {name: len(rows) for name, rows in found.items() if isinstance(rows, list) and name != "failed"} == dict(
        tests=1, bandwidth=1, products=4, decode=2 + 8 + 2, kernels=2, prefill=2, attention=6, others=3, agreement=1,
        lookup=5 + 12, group=1, window=3, batches=2, share=2, long=3)
    assert found["group"] == [dict(same_tokens=True, backend="gloo")]
    assert found["agreement"][0]["same_tokens_as_cpu"]
    assert all(row["works"] == {"FLASH_ATTENTION": True} for row in found["attention"])


def test_a_section_that_fails_is_a_line_and_not_the_end(monkeypatch, tmp_path):
    def break_down(run):
        yield dict(row=1)
        raise RuntimeError("CUDA error:\nunspecified launch failure")
    monkeypatch.setattr(gpu, "share_of_two", break_down)
    monkeypatch.setattr(gpu.DRY, "seconds", 600)
    monkeypatch.setattr(gpu, "one_rank", lambda run: 1 / 0)
    monkeypatch.setattr(gpu, "whole_model", lambda run, attempt: None)
    run_gpu(monkeypatch, "--only", "group", "share", "--out", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failed"] == ["group: ZeroDivisionError: division by zero",
                               "share: RuntimeError: CUDA error: unspecified launch failure"]
    assert found["share"] == [dict(row=1)]


def test_sections_that_come_too_late_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.DRY, "seconds", -1)
    run_gpu(monkeypatch, "--only", "kernels", "--out", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failed"] == [f"kernels {m}: TimeoutError: no time is left" for m in gpu.METHODS]


def test_a_plan_counts_what_a_rank_holds_and_how_often_ranks_meet():
    one, four = (plan.share(SHAPES["8b"], ranks, 1000, 8) for ranks in (1, 4))
    assert one["weights"] == pytest.approx(2 * 8.03e9, rel=0.01) and one["weights"] < 4 * four["weights"] < 1.01 * one[
        "weights"]
    assert one["prompt"] == 4 * four["prompt"] == 32 * 2 * 8 * 128 * 2 * 1000           # layers, k and v, heads, width
    assert (one["calls"], four["calls"]) == (0, 65) and four["largest"] == 2 * 4096 * 2   # two rows
    assert four["replicated"] == one["replicated"] == 65 * 4096 * 2                      # norms


def test_a_share_is_loaded_without_reading_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "SHAPE", loading.SHAPE | dict(hidden_size=64, intermediate_size=128, vocab_size=512,
                                                               num_hidden_layers=2, num_attention_heads=4,
                                                               num_key_value_heads=4))
    monkeypatch.setattr("runtime.weights.safe_open", checkpoint.safe_open)           # put back afterwards
    monkeypatch.setattr(loading.Counted, "asked", 0)
    loading.write_checkpoint(tmp_path)
    found = loading.load_share(tmp_path, 1, 2)
    assert found["replicated"] == 5 * 64 * 2 and found["asked"] == found["share"]
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 2 * found["share"] - found["replicated"] == pytest.approx(whole, rel=0.02)   # the files' headers


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
