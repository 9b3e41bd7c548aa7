"""Several ranks give one rank's tokens and logits. torchrun starts this file once per number of ranks, with gloo."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cli
from baselines import generate
from decore import METHODS, make_head_mask, score
from model import MASKS, Transformer
from runtime import parallel
from runtime.graph import GRAPHS
from runtime.parallel import Ranks, Shard, first_on_node, rank_device
from tests.checkpoints import FAMILIES, random_ids, write_checkpoint, write_heads, write_tokenizer

ROOT = Path(__file__).parent.parent
MODELS = {family: (family, {}) for family in FAMILIES} | {
    "vocabulary-of-97": ("llama3", dict(vocab_size=97)),        # the last rank has fewer rows than the others
    "one-kv-head": ("qwen3", dict(num_key_value_heads=1)),
}
HEADS = [(1, 0), (1, 3), (2, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (7, 1, 20)]           # the last one exceeds the window of 8
ATOL = 1e-5                                                     # sums in another order, in float32
RUNS = {f"{method}, {mask}": dict(method=method, heads=HEADS, mask=mask)
        for method in METHODS for mask in MASKS if mask == "output" or method.startswith("decore")}
RUNS |= {"masked prompt": dict(method="decore-entropy", heads=HEADS, mask_prompt=True),
         "lookup": dict(method="decore-entropy", heads=HEADS, lookup=5),
         "entropy-lite": dict(method="decore-entropy", amateur_heads=HEADS[:2]),
         "cd": dict(method="cd"),
         "cad": dict(method="cad", ids_without_context=[p[-2:] for p in PROMPTS]),
         "dola-high": dict(method="dola-high"),
         "ad": dict(method="ad", info_layer=2)}


def results(folder):
    """Everything about the model in `folder` that must not depend on the number of ranks."""
    model = Transformer.load(folder)
    out = {"logits": model(torch.tensor([PROMPTS[2]])).tolist(),
           "rows": model(torch.tensor([PROMPTS[2]]), head_mask=make_head_mask([[], HEADS], model)).tolist(),
           "score": score(model, PROMPTS[0], [random_ids(3, seed=1), random_ids(2, seed=2)], heads=HEADS)}
    amateur = Transformer.load(folder.with_name(folder.name + "-amateur"))
    for name, settings in RUNS.items():
        more = dict(amateur=amateur) if name in ("cd", "entropy-lite") else {}
        prompts = [2 * p for p in PROMPTS] if name == "lookup" else PROMPTS         # repeated text is proposed again
        batch = generate(model, prompts, max_new_tokens=4, **settings, **more)
        out[name] = [g.ids for g in batch], [g.alphas for g in batch]
    return out


def collectives(folder):
    """One rank's results of everything that ranks do together."""
    shard = Shard.from_environment()
    try:
        Transformer.load(folder / ("llama2" if shard.rank else "llama3"))
        disagreement = ""
    except ValueError as error:
        disagreement = str(error)
    x = torch.full((2, 1), shard.rank, dtype=torch.bfloat16)
    gathered = shard.all_gather(x)
    os.environ["LOCAL_RANK"] = str(shard.rank % 2)              # as on machines with two ranks each
    ranks, log = Ranks(tp=2), folder / f"{shard.size}.log"

    def download():
        time.sleep(0.5 * (shard.rank == 0))
        with log.open("a") as file:
            file.write(f"{shard.rank}\n")
        return shard.rank

    return dict(disagreement=disagreement, graphs=graphs(folder, shard),
                gathered=gathered.tolist(), dtype=str(gathered.dtype),
                downloaded=first_on_node(download), first=ranks.shard().broadcast(shard.rank),
                shared=ranks.share(lambda: f"of rank {shard.rank}"), lists=ranks.gather(lambda: [shard.rank]),
                timeout=dist.distributed_c10d._get_default_store().timeout.total_seconds())


class Replay:
    """In place of a CUDA graph: computes the step again, into the tensors of the first time."""

    def __init__(self, step, tokens, restore):
        self.step, self.result = step, [x.clone() for x in step(tokens)]

    def __call__(self, tokens):
        result = self.step(tokens)
        for old, new in zip(self.result, result, strict=True):
            old.copy_(new)
        return type(result)(*self.result)


class Failing(Replay):
    def __init__(self, *args):
        super().__init__(*args)
        raise RuntimeError("out of graphs")


class Wrong(Replay):
    def __call__(self, tokens):
        result = super().__call__(tokens)
        result.scores.add_(1)
        return result


def graphs(folder, shard):
    """This rank's warnings and tokens, by what becomes of the last rank's graph."""
    model, out = Transformer.load(folder / "llama3"), {}
    for kind in (Replay, Failing, Wrong):
        with (patch("runtime.graph.Graph", kind if shard.rank == shard.size - 1 else Replay),
              warnings.catch_warnings(record=True) as caught):
            warnings.simplefilter("always")
            batch = generate(model, PROMPTS, method="decore-entropy", heads=HEADS, max_new_tokens=4, graph=True)
        out[kind.__name__] = [str(w.message) for w in caught if "graph" in str(w.message)], [g.ids for g in batch]
        GRAPHS.clear()
    return out


def worker(folder):
    out = {name: results(folder / name) for name in MODELS}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, collectives(folder))
    if dist.get_rank() == 0:
        (folder / f"{len(everyone)}.json").write_text(json.dumps(out | {"collectives": everyone}))


def fail(folder, error):
    """Rank 1 fails while the other rank waits for it inside the model, as in evaluate.py."""
    def on_token(b, token, entropy):
        if os.environ["RANK"] == "1":
            error()

    ranks = Ranks(tp=2)
    model = Transformer.load(folder / "llama3", shard=ranks.shard())
    ranks.gather(lambda: [generate(model, PROMPTS[0], method="greedy", max_new_tokens=40, on_token=on_token).ids])


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


PROGRAMS = {"worker": worker,
            "die": lambda folder: fail(folder, lambda: os.kill(os.getpid(), signal.SIGKILL)),
            "memory": lambda folder: fail(folder, run_out_of_memory)}


def run(*command, stdin=None):
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, input=stdin,
                          capture_output=True, text=True, timeout=240)


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
    with torch.inference_mode():
        return {name: results(folder / name) for name in MODELS}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, folder):
    done = torchrun(request.param, "-m", "tests.test_parallel", "worker", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / f"{request.param}.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_several_ranks_give_the_logits_scores_and_tokens_of_one(ranks, one_rank, name):
    for key in ("logits", "rows"):
        np.testing.assert_allclose(ranks[name][key], one_rank[name][key], atol=ATOL, rtol=0)
    # A score is a sum over tokens of (1 + α) base − α masked, with an α of about 4.
    np.testing.assert_allclose(ranks[name]["score"], one_rank[name]["score"], atol=10 * ATOL, rtol=0)
    for key in RUNS:
        ids, alphas = one_rank[name][key]
        assert ranks[name][key][0] == ids, key
        np.testing.assert_allclose(ranks[name][key][1], alphas, atol=ATOL, rtol=0, err_msg=key)


def test_ranks_that_load_another_model_than_rank_0_say_so(ranks):
    first, *others = [one["disagreement"] for one in ranks["collectives"]]
    assert first == ""
    assert others and all("has another one than rank 0" in message for message in others)


def test_collectives_keep_the_dtype_and_the_order_of_the_ranks(ranks):
    n = len(ranks["collectives"])
    for rank, one in enumerate(ranks["collectives"]):
        assert one["dtype"] == "torch.bfloat16" and one["gathered"] == 2 * [list(range(n))]
        assert one["first"] == rank // 2 * 2                    # of two ranks that share a model, the first
        assert one["shared"] == "of rank 0" and one["lists"] == list(range(0, n, 2))


def test_the_first_rank_of_each_machine_downloads_and_the_others_wait_for_all_of_them(ranks, folder):
    n = len(ranks["collectives"])
    order = [int(line) for line in (folder / f"{n}.log").read_text().split()]
    assert sorted(order) == list(range(n)) and {rank % 2 for rank in order[:n // 2]} == {0}
    assert [one["downloaded"] for one in ranks["collectives"]] == list(range(n))


def test_all_ranks_replay_graphs_or_none_does(ranks, one_rank):
    expected, results = one_rank["llama3"]["decore-entropy, output"][0], [one["graphs"] for one in ranks["collectives"]]
    for kind, reason in (("Replay", None), ("Failing", "out of graphs"), ("Wrong", "a replay differs")):
        messages, ids = zip(*(one[kind] for one in results), strict=True)
        assert all(one == expected for one in ids)
        assert [len(lines) for lines in messages] == len(messages) * [reason is not None]
        assert reason is None or reason in messages[-1][0] and "another rank" in messages[0][0]


def test_ranks_that_have_met_wait_for_each_other_as_long_as_in_a_collective(ranks):
    assert {one["timeout"] for one in ranks["collectives"]} == {parallel.COLLECTIVE.total_seconds()}


def test_the_command_line_prints_once_and_the_same_with_two_ranks(folder):
    command = ["decore.py", "--model", str(folder / "speaker"), "--heads", str(folder / "heads.json"), "--num-heads",
               "3", "--prompt", "one", "--prompt-file", "-", "--max-new-tokens", "6", "--device", "cpu", "--json"]
    alone, both = run(*command, stdin="and another"), torchrun(2, *command, stdin="and another")
    assert both.returncode == alone.returncode == 0, both.stderr
    assert both.stderr.count("tokens/s") == 1
    expected, printed = [[json.loads(line) for line in out.stdout.splitlines()] for out in (alone, both)]
    assert len(expected) == 2 and [one["ids"] for one in printed] == [one["ids"] for one in expected]


def test_a_mistake_on_all_ranks_is_one_line(folder):
    done = torchrun(3, "decore.py", "--model", str(folder / "speaker"), "--prompt", "x", "--method", "greedy",
                    "--device", "cpu")
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("decore.py: ")] == [
        "decore.py: error: 3 ranks cannot share 4 query heads; use a number of ranks that divides them"]
    assert 'decore.py", line' not in done.stderr            # torchrun prints a traceback of its own; not ours


@pytest.mark.parametrize("program, message", [("die", "Signal 9"), ("memory", "rank 1: error: out of memory")])
def test_when_a_rank_fails_all_end_in_time(folder, program, message):
    start = time.monotonic()
    done = torchrun(2, "-m", "tests.test_parallel", program, str(folder))
    assert done.returncode != 0 and message in done.stderr
    assert time.monotonic() - start < 120                   # importing torch on a busy machine takes most of it


def test_an_error_of_the_network_is_one_line_that_keeps_the_reason(monkeypatch):
    def all_reduce(x, group):
        raise RuntimeError("NCCL error in: NCCLUtils.cpp:77, invalid usage\nLast error:\nDuplicate GPU detected")

    shard = Shard(1, 2)
    with pytest.raises(ConnectionError, match="^rank 1 of 2: all_reduce failed;.* Last error: Duplicate GPU detected"):
        shard.call(all_reduce, torch.ones(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="^NCCL error"):      # what records the graph decides
        shard.call(all_reduce, torch.ones(1))


def test_graphs_are_gone_before_the_ranks_part(monkeypatch):
    class Graph:
        pass

    graphs, alive = [Graph()], []
    graphs[0].model = SimpleNamespace(graphs=graphs[0])         # a cycle: only the garbage collector frees it
    gone = weakref.ref(graphs[0])
    monkeypatch.setattr(parallel, "before_leaving", [graphs.clear])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: alive.append(gone() is not None))
    gc.disable()
    try:
        parallel.leave()
    finally:
        gc.enable()
    assert alive == [False]


def set_environment(monkeypatch, **values):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_that_stays_alone_says_so(monkeypatch):
    set_environment(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    monkeypatch.setattr(parallel, "TO_MEET", parallel.timedelta(seconds=1))
    with pytest.raises(ConnectionError, match="^the ranks did not meet at 127.0.0.1:.* start them together"):
        Shard.from_environment()


@pytest.mark.parametrize("present", [{"RANK": 1}, {"WORLD_SIZE": 2}])
def test_half_of_torchruns_variables_are_refused(monkeypatch, present):
    set_environment(monkeypatch, **present)
    with pytest.raises(ValueError, match="start with torchrun"):
        Shard.from_environment()


def test_every_rank_has_a_gpu_of_its_own_or_an_error(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert rank_device("cuda:1") == current.pop() == torch.device("cuda:1")
    set_environment(monkeypatch, WORLD_SIZE=4, LOCAL_RANK=1)
    assert rank_device("cuda") == current.pop() == torch.device("cuda:1")
    assert rank_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="cuda:1 is one GPU for several ranks"):
        rank_device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 needs a GPU and there are 2"):
        rank_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)      # as with one visible GPU for each process
    assert rank_device("cuda") == current.pop() == torch.device("cuda:0")


@pytest.mark.parametrize("changes, size, reason", [
    (dict(num_attention_heads=6, head_dim=8), 4, "6 query heads"),
    (dict(intermediate_size=50), 4, "50 feed-forward width"),
    (dict(num_attention_heads=12, num_key_value_heads=6, head_dim=8), 4, "6 key/value heads"),
])
def test_a_model_that_does_not_divide_is_refused_with_the_reason(tmp_path, changes, size, reason):
    folder = write_checkpoint(tmp_path, "llama3", **changes)
    with pytest.raises(ValueError, match=f"{size} ranks cannot share {reason}"):
        Transformer.load(folder, shard=Shard(1, size))


def test_a_rank_holds_no_more_than_its_share_while_it_loads(tmp_path):
    """146 MB of weights, in a process of its own; some 20 MB are the libraries'."""
    write_checkpoint(tmp_path, "llama3", hidden_size=1024, intermediate_size=2816, vocab_size=512)
    code = f"""
from benchmarks.measure import status, weights
from model import Transformer
from runtime.parallel import Shard
open("/proc/self/clear_refs", "w").write("5")               # the peak counts from here on
before = status("VmRSS")
model = Transformer.load({str(tmp_path)!r}, shard=Shard(1, 4))
print(weights(model), status("VmHWM") - before)
"""
    share, peak = map(int, run("-c", code).stdout.split())
    assert share < 0.3 * (tmp_path / "model.safetensors").stat().st_size
    assert peak < share + 40e6


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(cli.run(lambda: PROGRAMS[sys.argv[1]](Path(sys.argv[2]))))
