"""evaluate.py paper: the runs of the paper's tables, what they cost, and running them."""

import json
import re
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import pytest

import evaluate
from decoders.setup import Setup
from paper import plan, printed
from paper.tasks.prompts import Encoded
from tests.paper.test_evaluate import content
from tests.paper.test_tasks import QA, SWAP, write

BASE = "Meta-Llama-3-8B-Instruct"
LARGE = "Meta-Llama-3-70B-Instruct"
VALUES = {"answer_contained_published": 66.08}  # of DeCoRe entropy


def test_the_main_tables_come_with_greedy_and_decore_entropy_first():
    runs = plan.planned_runs(f"meta-llama/{BASE}", ["main"])
    assert [run.setup.method for run in runs[:28]] == ["greedy"] * 14 + ["decore-entropy"] * 14
    assert [run.task.name for run in runs[:14]] == [run.task.name for run in runs[14:28]]
    xsum = runs[14]
    assert xsum.task.name == "xsum"
    assert xsum.setup == Setup.of("decore-entropy", num_heads=90, mask="query")


@pytest.mark.parametrize("model", [BASE, LARGE, "Mistral-7B-Instruct-v0.3", "Qwen2-7B-Instruct"])
def test_every_number_of_the_paper_belongs_to_one_run(model):
    runs = plan.planned_runs(model, plan.ORDER)
    for row in printed.csv_rows("paper"):
        if row["model"] == model:
            of_row = [r for r in runs if r.task.name == row["task"] and row["table"] in r.tables]
            values = [r.values.get(row["metric"], 1e9) for r in of_row]
            nearest = min(abs(value - float(row["value"])) for value in values)
            assert nearest < 0.011, row  # the inferred N of one row has a value 0.01 lower
            columns = printed.METRICS[row["task"]]
            assert row["metric"].removesuffix("_published") in [*columns, "entropy"]


def test_an_unstated_n_is_the_inferred_one_or_that_of_the_closest_table():
    def n(model, task, method, group="main"):
        [run] = plan.planned_runs(model, [group], [task], [method])
        return run.setup.num_heads, run.num_heads_from

    assert n(BASE, "truthfulqa-mc", "decore-entropy") == (80, "inferred")
    assert n(BASE, "xsum", "decore-static") == (90, f"as xsum {BASE} decore-entropy")
    assert n(LARGE, "nq-closed", "decore-entropy") == (70, "inferred")  # 70 or 100
    assert n(LARGE, "xsum", "decore-entropy-lite", "lite") == (90, f"as xsum {BASE} decore-entropy")


def test_other_tables_are_chosen_by_name():
    alphas = [run.setup.alpha for run in plan.planned_runs(BASE, ["alpha"], ["nq-swap"])]
    assert alphas == [-0.5, 0, 1, 2, 4, 8]
    [iti] = plan.planned_runs(BASE, ["iti"], ["nq-swap"])
    assert (iti.setup.method, iti.checkpoint) == ("greedy", "jujipotle/honest_llama3_8B_instruct")
    random = plan.planned_runs(BASE, ["random"], ["nq-swap"])
    assert len(random) == 2 * 10 * len(plan.SEEDS)
    assert {run.setup.random_heads for run in random} == {"published"}
    [cd] = plan.planned_runs(LARGE, ["main"], ["nq-swap"], ["cd"])
    assert (cd.setup.amateur, cd.setup.alpha) == (plan.AMATEUR, 0.5)


def test_the_common_prefix_of_a_batch_is_counted_once():
    prompts = [[1] * 100 + [n] * (n + 1) for n in range(2, 5)] + [[9] * 70]
    items = [Encoded(i, ids, None, None, 0) for i, ids in enumerate(prompts)]
    total = 103 + 104 + 105 + 70
    assert plan.prompt_tokens(items, 3) == (total, total - 2 * 100)
    assert plan.prompt_tokens(items, 1) == (total, total)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and demonstrations of nq-swap, as `fetch` arranges them."""
    folder = tmp_path_factory.mktemp("data")
    rows = [SWAP | {"question": f"who is {i}", "sub_context": f"{i} is New."} for i in range(40)]
    (folder / "nq_swap").mkdir()
    write(folder / "nq_swap" / "dev-0.parquet", *rows)
    write(folder / "nq_swap" / "demos.jsonl", *[QA | {"context": "c"}] * 4)
    return folder


@pytest.fixture
def paper(done, folder):
    """paper(*options) → (stdout, stderr) of `evaluate.py paper`."""
    return partial(done, evaluate.main, "paper", f"--data {folder}")


def test_the_plan_says_what_is_missing_and_the_command_that_gets_it(
    paper, chat_model, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    options = f"--model {chat_model} --like {BASE} --plan"
    lines = [*map(json.loads, paper(options, "--json")[0].splitlines())]
    assert len(lines) == len(plan.planned_runs(BASE, ["main"]))
    swap = next(line for line in lines if line["task"] == "nq-swap" and line["num_heads"])
    assert swap["paper"] == VALUES and swap["items"] == 40
    assert swap["missing"] == [
        "nq-swap has 40 items, the paper scores 4,746: python evaluate.py fetch "
        f"{folder} --task nq-swap",
        f"no head scores of {chat_model.name}: python -m heads.detect --model {chat_model} "
        f"--out heads/scores/{chat_model.name}.json",
    ]
    out, err = paper(options)
    assert re.findall(r"(?m)^nq-swap +(\d+) +(\d+) ", out) == [("7", "40")]
    assert out.count("python evaluate.py fetch") == 1 and f"fetch {folder} --task " in out
    assert f"N is the paper's for the 1,024 heads of {BASE}; {chat_model.name} has 12\n" in err


def test_runs_have_the_settings_of_the_published_ones(paper, monkeypatch):
    sweeps = []
    monkeypatch.setattr(evaluate, "sweep", lambda *args, lenient: sweeps.append(args))
    paper("--like Qwen2-7B-Instruct --method dola-low")
    [(args, wanted)] = sweeps
    assert args.dtype == "bfloat16"
    penalties = {(task.choice, setup.repetition_penalty) for task, setup, _ in wanted}
    assert penalties == {(True, None), (False, 1.05)}


def test_the_papers_rows_run_in_order_and_their_headers_hold_its_values(paper, folder, tmp_path):
    rows = f"--like {BASE} --task nq-swap --method greedy,decore-entropy,cad"
    rows += f" --table main,n --limit 36 --dtype float32 --out {tmp_path}"
    out, err = paper(rows)
    assert "nq-swap with decore-entropy is left out: 40 heads" in err
    paths = [Path(json.loads(line)["run"]) for line in out.splitlines()]
    methods = "greedy decore-entropy.n10.query cad.a0.5 decore-entropy.n20.query "
    methods = f"{methods}decore-entropy.n30.query".split()
    assert [path.stem for path in paths] == [f"nq-swap.miniature.{name}" for name in methods]
    header = content(paths[1])[0]
    tables = "result_faithfulness, result_ablation_num_masked_retr_head_faithfulness"
    assert header["paper"] == dict(table=tables, num_heads="inferred", values=VALUES)
    assert header["like"] == BASE
