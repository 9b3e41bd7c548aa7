"""Several ranks give one rank's tokens and logits. torchrun starts this file once per number of ranks, with gloo."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cli
from baselines import generate
from decore import METHODS, decode, make_head_mask, open_decore, score
from model import MASKS, Transformer
from runtime.fast import record
from runtime.parallel import Shard, check_split, rank_device
from tests.checkpoints import FAMILIES, random_ids, write_checkpoint, write_heads, write_tokenizer
from tests.test_capture import dry_run, lying

ROOT = Path(__file__).parent.parent
MODELS = {family: (family, {}) for family in FAMILIES} | {
    "vocabulary-of-97": ("llama3", dict(vocab_size=97)),        # the last rank has fewer rows than the others
    "one-kv-head": ("qwen3", dict(num_key_value_heads=1)),
}
HEADS = [(1, 0), (1, 3), (2, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (7, 1, 20)]           # the last one exceeds the window of 8
ATOL = 1e-5                                                     # sums in another order, in float32
RUNS = {f"{method}, {mask}, {strict}": dict(method=method, heads=HEADS, mask=mask, mask_prompt=strict)
        for method in METHODS for mask in MASKS for strict in (False, True)
        if method == "decore-entropy" or not strict and (mask == "output" or method == "decore-static")}
RUNS |= {"decore-entropy, lookup": dict(method="decore-entropy", heads=HEADS, lookup=5),
         "entropy-lite": dict(method="decore-entropy", amateur_heads=HEADS[:2]),
         "entropy-lite, query": dict(method="decore-entropy", amateur_heads=HEADS[:2], mask="query"),
         "cd": dict(method="cd")}
RUNS |= {"cad": dict(method="cad", ids_without_context=[p[-2:] for p in PROMPTS]),
         "dola-high": dict(method="dola-high"), "ad": dict(method="ad", info_layer=2)}


def results(folder):
    """Everything that must not depend on the number of ranks, of the model in `folder`."""
    model = Transformer.load(folder)
    out = {"logits": model(torch.tensor([PROMPTS[2]])).tolist(),
           "rows": model(torch.tensor([PROMPTS[2]]), head_mask=make_head_mask([[], HEADS], model)).tolist(),
           "score": score(model, PROMPTS[0], [random_ids(3, seed=1), random_ids(2, seed=2)], heads=HEADS)}
    amateur = Transformer.load(folder.with_name(folder.name + "-amateur"))
    for name, how in RUNS.items():
        other = dict(amateur=amateur) if name == "cd" or "amateur_heads" in how else {}
        prompts = [2 * p for p in PROMPTS] if "lookup" in how else PROMPTS     # what is there twice is proposed again
        batch = generate(model, prompts, max_new_tokens=4, **how, **other)
        out[name] = [g.ids for g in batch], [g.alphas for g in batch]
    return out


def disagreement(folder):
    """What each rank says when rank 0 loads one checkpoint and the others another."""
    shard = Shard.from_environment()
    try:
        Transformer.load(folder / ("llama2" if shard.rank else "llama3"))
        said = [""]
    except ValueError as error:
        said = [str(error)]
    everyone = [None] * shard.size
    torch.distributed.all_gather_object(everyone, said)
    return [line for said in everyone for line in said]


def halting(run):
    """A recorder that fails after the step has run once."""
    run()
    raise RuntimeError("out of graphs")


def recordings(folder):
    """Of each rank, why it goes on without its record and the tokens, by what becomes of the last rank's record."""
    model, last, out = Transformer.load(folder / "llama3"), torch.tensor([p[-1:] for p in PROMPTS]), {}
    for name, recorder in {"right": dry_run, "failing": halting, "lying": lying}.items():
        step, caches = open_decore(model, PROMPTS, 4, heads=HEADS)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = record(step, caches, last, (1, 3), recorder if model.shard.rank == model.shard.size - 1 else dry_run,
                          model.shard)
        assert (made is step) == bool(said)
        mine = [str(w.message) for w in said], torch.cat([token for token, _ in decode(made, last, 4)], 1).tolist()
        out[name] = [None] * model.shard.size
        torch.distributed.all_gather_object(out[name], mine)
    return out


def worker(folder):
    out = {name: results(folder / name) for name in MODELS}
    out |= {"disagreement": disagreement(folder), "recordings": recordings(folder)}
    if Shard.from_environment().rank == 0:
        (folder / f"{Shard.from_environment().size}.json").write_text(json.dumps(out))
    torch.distributed.destroy_process_group()


def decode_until_rank_1_dies(folder):
    def step_sees(b, token, entropy):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    generate(Transformer.load(folder / "llama3"), PROMPTS[0], method="greedy", max_new_tokens=400, on_token=step_sees)


def run(*command, stdin=None):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, input=stdin, capture_output=True,
                          text=True, timeout=300)


def torchrun(n, *command, stdin=None):
    return run("-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-port", str(free_port()), *command,
               stdin=stdin)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        write_checkpoint(folder / name, family, shards=2, **changes)
        write_checkpoint(folder / f"{name}-amateur", family, seed=5, num_hidden_layers=2, **changes)
    write_tokenizer(write_checkpoint(folder / "speaker", "llama3", vocab_size=259))
    write_heads(folder / "heads.json")
    return folder


@pytest.fixture(scope="module")
def one_rank(folder):
    return {name: results(folder / name) for name in MODELS}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, folder):
    n = request.param
    done = torchrun(n, "-m", "tests.test_parallel", "worker", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / f"{n}.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_several_ranks_compute_the_logits_and_scores_of_one(ranks, one_rank, name):
    for what in ("logits", "rows"):
        np.testing.assert_allclose(ranks[name][what], one_rank[name][what], atol=ATOL, rtol=0)
    # A score is a sum over tokens of (1 + α) base − α masked, with an α of about 4.
    np.testing.assert_allclose(ranks[name]["score"], one_rank[name]["score"], atol=10 * ATOL, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_several_ranks_choose_the_tokens_of_one(ranks, one_rank, name):
    for run in RUNS:
        ids, alphas = one_rank[name][run]
        assert ranks[name][run][0] == ids, run
        np.testing.assert_allclose(ranks[name][run][1], alphas, atol=ATOL, rtol=0, err_msg=run)


def test_ranks_that_load_another_model_than_rank_0_say_so(ranks):
    first, *others = ranks["disagreement"]
    assert first == ""
    assert others and all("another config.json or other weights than rank 0" in said for said in others)


def test_all_ranks_use_their_record_of_a_step_or_none(ranks, one_rank):
    expected = one_rank["llama3"]["decore-entropy, output, False"][0]
    for name, why in (("right", None), ("failing", "out of graphs"), ("lying", "a replay differs")):
        said, ids = zip(*ranks["recordings"][name], strict=True)
        assert all(one == expected for one in ids)
        reasons = [re.findall(r"\((.*)\)", " ".join(lines)) for lines in said]
        if why is None:
            assert not any(reasons)
        else:
            assert reasons == [["another rank cannot use its own"]] * (len(said) - 1) + [[why]]


def test_the_command_line_prints_once_and_the_same_with_two_ranks(folder):
    command = ["decore.py", "--model", str(folder / "speaker"), "--heads", str(folder / "heads.json"), "--num-heads",
               "3", "--prompt", "one", "--prompt-file", "-", "--max-new-tokens", "6", "--device", "cpu", "--json"]
    alone, both = run(*command, stdin="and another"), torchrun(2, *command, stdin="and another")
    assert both.returncode == alone.returncode == 0, both.stderr
    assert both.stderr.count("tokens/s") == 1
    printed = [[json.loads(line) for line in out.stdout.splitlines()] for out in (alone, both)]
    assert len(printed[0]) == len(printed[1]) == 2
    for a, b in zip(*printed, strict=True):
        assert {k: v for k, v in a.items() if k not in ("alphas", "entropies")} == \
               {k: v for k, v in b.items() if k not in ("alphas", "entropies")}
        np.testing.assert_allclose(b["alphas"], a["alphas"], atol=ATOL, rtol=0)


def test_a_mistake_on_all_ranks_is_one_line(folder):
    done = torchrun(3, "decore.py", "--model", str(folder / "speaker"), "--prompt", "x", "--method", "greedy",
                    "--device", "cpu")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("decore.py: ")]
    assert said == ["decore.py: error: 3 ranks cannot share 4 query heads; use a number of ranks that divides them"]
    assert 'decore.py", line' not in done.stderr            # torchrun prints a traceback of its own; not ours


def test_when_a_rank_dies_the_others_end_soon_and_say_why(folder):
    port, ranks = free_port(), []
    for rank in range(2):                       # without torchrun, which would end the other one by itself
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2",
                                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen([sys.executable, "-m", "tests.test_parallel", "die", str(folder)], cwd=ROOT,
                                      env=environment, stderr=subprocess.PIPE, text=True))
    assert ranks[1].wait(300) == -signal.SIGKILL               # two processes start: on a busy machine that takes time
    ranks[1].stderr.close()
    died = time.monotonic()
    _, said = ranks[0].communicate(timeout=60)
    assert time.monotonic() - died < 30
    assert ranks[0].returncode == 2
    assert "error: rank 0 of 2 lost the others, one of them ended" in said


@pytest.mark.parametrize("changes, size, what", [
    (dict(num_attention_heads=6, head_dim=8), 4, "6 query heads"),
    (dict(intermediate_size=50), 4, "50 feed-forward width"),
    (dict(num_attention_heads=12, num_key_value_heads=6, head_dim=8), 4, "6 key/value heads"),
])
def test_a_model_that_does_not_divide_is_refused_by_what_does_not(tmp_path, changes, size, what):
    folder = write_checkpoint(tmp_path, "llama3", **changes)
    with pytest.raises(ValueError, match=f"{size} ranks cannot share {what}"):
        Transformer.load(folder, shard=Shard(1, size))


@pytest.mark.parametrize("present", [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_half_of_torchruns_variables_are_refused(monkeypatch, present):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in present.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="start with torchrun"):
        Shard.from_environment()


def test_one_rank_needs_no_process_group(monkeypatch):
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    assert Shard.from_environment().size == 1
    assert not torch.distributed.is_initialized()


def test_every_rank_has_a_gpu_of_its_own_or_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(torch.device("cuda", device) if
                                                                               isinstance(device, int) else device))
    assert rank_device("cuda:1") == torch.device("cuda:1")      # without torchrun, as given, and the current one
    assert current == [torch.device("cuda:1")]
    assert rank_device("cuda") == torch.device("cuda") and len(current) == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("cuda") == torch.device("cuda:1") == current.pop()
    assert rank_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="is one GPU and several ranks ask for it"):
        rank_device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 has no GPU, there are 2 here"):
        rank_device("cuda")


@pytest.mark.parametrize("n, size", [(1, 4), (2, 4), (4, 4), (8, 4), (8, 2)])
def test_every_query_head_finds_its_key_head_on_its_rank(n, size):
    H = 16
    for rank in range(size):
        shard = Shard(rank, size)
        mine, held = range(H)[shard.part(H)], range(n)[shard.part(n, copies=True)]
        for i, head in enumerate(mine):
            assert held[i // (len(mine) // len(held))] == head // (H // n)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_70b_shape_divides_among_as_many_ranks_as_people_have(size):
    check_split(SimpleNamespace(n_heads=64, n_kv_heads=8, d_ff=28_672), size)


if __name__ == "__main__":
    what, at = sys.argv[1], Path(sys.argv[2])
    with torch.inference_mode():
        sys.exit(worker(at) if what == "worker" else cli.run(lambda: decode_until_rank_1_dies(at)))
