"""Two and four ranks give one rank's tokens and logits.

Every family is run by ranks that are threads, as a sum of gloo's takes milliseconds; one family by
processes. torchrun starts once."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cli import decode as program
from decoders.scoring import score
from decore import DeCoRe, generate, make_head_mask
from heads.measures import answer_batch, effects
from model import Transformer
from runtime.checkpoint import Checkpoint
from runtime.files import read_json
from runtime.parallel import Ranks, Shard, call, check_split, rank_device
from runtime.ranks import TORCHRUN
from runtime.weights import named_tensors
from tests.checkpoints import (
    FAMILIES,
    ids_of,
    random_ids,
    write_checkpoint,
    write_heads,
    write_json,
    write_tokenizer,
)
from tests.core.test_gpu_on_cpu import Full, RecordedOnCPU, graphs_on_cpu
from tests.methods import CASES, HEADS, PROMPTS, method_of
from tests.ranks import on_processes, on_threads
from tests.tables import each

MODELS = {
    family: (family, {}) for family in FAMILIES if "window" not in family and family != "llama3.1"
}
# The last rank has fewer rows than the others.
MODELS["vocabulary-of-97"] = ("llama3", dict(vocab_size=97))
MODELS["one-kv-head"] = ("qwen3", dict(num_key_value_heads=1))
ATOL = 1e-5  # sums in another order, in float32


def results(folder, name, shard=None, cases=("decore-entropy",)):
    """Everything about a model that must not depend on the number of ranks."""
    model = Transformer.load(folder / name, shard=shard)
    amateur = Transformer.load(folder / "amateur", shard=shard)
    ids = torch.tensor([PROMPTS[1]])
    head_mask = make_head_mask([[], HEADS], model)
    answers = [random_ids(3, seed=1), random_ids(2, seed=2)]
    out = {
        "logits": model(ids).tolist(),
        "rows": model(ids, head_mask=head_mask).tolist(),
        "score": score(model, PROMPTS[0], answers, DeCoRe(HEADS)),
        "effects": effects(model, PROMPTS[:2], answers, answers[::-1]).tolist(),
        "heads": [x.tolist() for x in answer_batch(model, [PROMPTS[1]], [(2, 8)], 3)[0][1:]],
    }
    drafted = generate(model, PROMPTS[2] * 3, DeCoRe(HEADS), max_new_tokens=8, draft=4)
    out["drafted"] = drafted.ids, drafted.alphas
    for case in cases:
        texts = generate(model, PROMPTS, method_of(case, amateur), max_new_tokens=4)
        out[case] = ids_of(texts), [text.alphas for text in texts]
    return out


def graphs(folder):
    """(warnings, ids) of a rank if all ranks can record a graph, and if the last one cannot."""
    model = Transformer.load(folder / "llama3")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    out = []
    for kind in (RecordedOnCPU, Full if is_last else RecordedOnCPU):
        with graphs_on_cpu(kind), warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            texts = generate(model, PROMPTS, DeCoRe(HEADS), max_new_tokens=4, graph=True)
        reasons = [str(w.message) for w in messages if "graph" in str(w.message)]
        out.append((reasons, ids_of(texts)))
    return out


def together(folder, ranks):
    """One rank's results of everything that ranks do together."""
    rank = ranks.rank
    gathered = Shard.from_environment().all_gather(torch.full((2, 1), rank, dtype=torch.bfloat16))
    return dict(
        gathered=gathered.tolist(),
        dtype=str(gathered.dtype),
        first=ranks.shard.broadcast(rank),
        graphs=graphs(folder),
        shared=ranks.share(lambda: f"of rank {rank}"),
        lists=ranks.gather(lambda: [rank]),
    )


def command_line(folder, more):
    command = f"decore.py --model {folder}/chat --heads {folder}/heads.json --num-heads 3"
    return f"{command} --prompt one --max-new-tokens 6 --device cpu --json {more}".split()


def of_processes(folder):
    """Writes the results of one of four ranks."""
    # As on two machines with two ranks each.
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
    ranks = Ranks(tp=2)
    out = {
        "4": results(folder, "llama3"),
        "2": results(folder, "llama3", ranks.shard),
        "ranks": [None] * 4,
    }
    dist.all_gather_object(out["ranks"], together(folder, ranks))
    if dist.get_rank() == 0:
        write_json(folder / "results.json", out)


# A rank: runs of decore.py.
OF_TORCHRUN = """
import json, sys
from cli import decode, entry
def main():
    for sys.argv in json.loads(sys.argv[1]):
        decode.main()
sys.exit(entry.run_program(main))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        write_checkpoint(folder / name, family, shards=2, **changes)
    write_checkpoint(folder / "amateur", "llama3", seed=5, num_hidden_layers=2)
    write_tokenizer(write_checkpoint(folder / "chat", "llama3", vocab_size=259))
    write_heads(folder / "heads.json")
    return folder


@pytest.fixture(scope="module")
def one_rank(folder):
    with torch.inference_mode():
        return {name: results(folder, name, cases=cases_of(name)) for name in MODELS}


@pytest.fixture(scope="module")
def processes(folder):
    on_processes(4, lambda: of_processes(folder))
    return read_json(folder / "results.json")


def cases_of(name):
    return CASES if name == "llama3" else ["decore-entropy"]


def compare(several, one):
    # A score is a sum over tokens of (1 + α) base − α masked, with an α of about 4.
    for key in ("logits", "rows", "heads", "effects", "score"):
        atol = 10 * ATOL if key in ("effects", "score") else ATOL
        np.testing.assert_allclose(several.pop(key), one[key], atol=atol, rtol=0)
    for case, (ids, alphas) in several.items():
        assert ids == one[case][0], case
        np.testing.assert_allclose(alphas, one[case][1], atol=ATOL, rtol=0, err_msg=case)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_give_the_logits_scores_and_tokens_of_one(folder, one_rank, size, name):
    for several in on_threads(size, lambda rank: results(folder, name, rank, cases_of(name))):
        compare(several, one_rank[name])


@pytest.mark.parametrize("size", ["2", "4"])
def test_ranks_may_be_processes(processes, one_rank, size):
    compare(processes[size], one_rank["llama3"])


def test_ranks_gather_and_share_in_order(processes):
    for number, rank in enumerate(processes["ranks"]):
        assert rank["dtype"] == "torch.bfloat16" and rank["gathered"] == 2 * [[0, 1, 2, 3]]
        assert rank["first"] == number // 2 * 2  # of two ranks that share a model, the first
        assert rank["shared"] == "of rank 0" and rank["lists"] == [0, 2]


def test_all_ranks_replay_graphs_or_none_does(processes, one_rank):
    for number, reason in enumerate([None, "no memory for a graph"]):
        messages, ids = zip(*(rank["graphs"][number] for rank in processes["ranks"]))
        assert all(one == one_rank["llama3"]["decore-entropy"][0] for one in ids)
        assert [len(lines) for lines in messages] == 4 * [reason is not None]
        assert reason is None or reason in messages[-1][0] and "another rank" in messages[0][0]


def test_decore_prints_the_same_and_its_mistakes_once_with_torchrun(
    folder, done, monkeypatch, tmp_path
):
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    (tmp_path / "program.py").write_text(OF_TORCHRUN)
    right = command_line(folder, "--prompt-file -")
    programs = json.dumps([right, command_line(folder, "--num-heads 99")])
    root = Path(__file__).parents[2]
    how = dict(cwd=root, env=os.environ | dict(PYTHONPATH=str(root)), timeout=240)
    how |= dict(input="and another", capture_output=True, text=True)
    command = [sys.executable, *torchrun, tmp_path / "program.py", programs]
    printed = subprocess.run(command, **how)
    (tmp_path / "input").write_text("and another")
    with (tmp_path / "input").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        alone, _ = done(program.main, *right[1:])
    ids, expected = (
        [json.loads(line)["ids"] for line in text.splitlines()] for text in (printed.stdout, alone)
    )
    assert len(expected) == 2 and ids == expected
    assert printed.stderr.count("tokens/s") == 1
    [mistake] = [line for line in printed.stderr.splitlines() if "error: " in line]
    assert printed.returncode != 0 and "99" in mistake


def test_an_error_of_the_network_is_one_line_with_the_reason():
    def all_reduce(x):
        raise RuntimeError("NCCL error, invalid usage\nLast error:\nDuplicate GPU detected")

    with pytest.raises(ConnectionError, match="^all_reduce failed .* Duplicate GPU detected"):
        call(all_reduce, torch.ones(1))


# The device that is asked for, the local rank, how many GPUs torch finds → the rank's device.
DEVICES = """
cuda:1 | 0 | 2 | cuda:1
cuda | 1 | 2 | cuda:1
cpu | 1 | 2 | cpu
cuda | 2 | 1 | cuda:0
"""  # the last one as with one visible GPU for each process


@each("device, local, gpus, expected", DEVICES)
def test_every_rank_has_its_own_gpu_or_an_error(monkeypatch, device, local, gpus, expected):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpus))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name, value in (dict.fromkeys(TORCHRUN, 0) | dict(WORLD_SIZE=4, LOCAL_RANK=local)).items():
        monkeypatch.setenv(name, str(value))
    assert rank_device(device) == torch.device(expected)
    assert current == [torch.device(expected)] * (device != "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="GPU 2 is not on this machine: torch finds 2"):
        rank_device("cuda")


def test_a_model_that_does_not_divide_is_refused_with_the_reason(llama):
    for changes, reason in (
        (dict(n_heads=6), "6 query heads"),
        (dict(d_ff=50), "50 feed-forward width"),
        (dict(n_heads=12, n_kv_heads=6), "6 key/value heads"),
    ):
        with pytest.raises(ValueError, match=f"4 ranks cannot share {reason}"):
            check_split(replace(llama.config, **changes), 4)


def memory(key):
    """A line of /proc/self/status in bytes: VmRSS is the memory of this process, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024


def test_a_rank_holds_no_more_than_its_share_while_it_loads(tmp_path):
    sizes = dict(hidden_size=1024, intermediate_size=4096, vocab_size=16384)
    write_json(tmp_path / "config.json", FAMILIES["llama3"] | sizes)
    empty = Transformer(Checkpoint(tmp_path).config, Shard(), "meta")
    weights = {name: torch.zeros(tensor.shape) for name, tensor in named_tensors(empty).items()}
    write_checkpoint(tmp_path, "llama3", weights=weights, **sizes)
    stored = sum(weight.nbytes for weight in weights.values())  # about 320 MB
    del weights
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    model = Transformer.load(tmp_path, shard=Shard(1, 4))
    peak = memory("VmHWM") - before
    share = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert share < 0.3 * stored and peak < share + 45e6  # about 20 MB are the libraries'
