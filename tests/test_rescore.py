"""`evaluate.py rescore`: the metrics of stored rows, without a model."""

import json

import pytest

import evaluate


@pytest.fixture
def start(call):
    """Runs evaluate.py. Returns the status, the objects of standard output, and standard error."""
    def run(*arguments):
        status, out, err = call(evaluate.main, *arguments)
        return status, [json.loads(line) for line in out.splitlines()], err
    return run


def test_runs_and_folders_of_runs_are_scored_again(start, chat_model, data, tmp_path):
    _, [choice], _ = start("--model", chat_model, *data["memotrap"], "--method", "greedy", "--out", tmp_path)
    _, [text], _ = start("--model", chat_model, *data["truthfulqa-gen"], "--method", "greedy", "--max-new-tokens", 5,
                         "--out", tmp_path)
    assert list(text["metrics"]) == ["rejection"]               # without a judge
    status, lines, _ = start("rescore", "--rows", choice["run"])
    assert status == 0 and lines[-1] == {"metrics": choice["metrics"], "n": 2}
    assert [row["id"] for row in lines[:-1]] == ["b-0", "b-1"]
    assert sum(row["micro"] for row in lines[:-1]) / 2 == choice["metrics"]["micro"]
    assert start("rescore", tmp_path)[1] == [choice, text]
    (tmp_path / "empty").mkdir()
    status, _, err = start("rescore", tmp_path / "empty")
    assert status == 2 and "empty holds no runs" in err


def test_rows_of_another_program_are_scored_and_demonstrations_are_counted(start, tmp_path):
    row = {"id": "a", "prediction": "Paris", "references": ["paris"]}
    path = tmp_path / "r.jsonl"
    path.write_text("\n" + json.dumps(row))                     # without a newline at the end
    assert start("rescore", "--task", "popqa", path)[1] == [
        {"metrics": {"exact_match": 1.0, "substring_match": 1.0, "substring_match_published": 1.0}, "n": 1}]
    path.write_text((json.dumps(row | {"demonstration": True}) + "\n") * 2)
    status, [out], err = start("rescore", "--task", "popqa", path)
    assert status == 0 and out["metrics"]["exact_match"] is None
    assert "2 of 2 items are demonstrations: only the published scores count them" in err


@pytest.mark.parametrize("text, options, message", [
    ('{"id": 1, "prediction": "a"}\n', ["--task", "triviaqa"], "line 1: field 'references' is missing"),
    ('{"id": 1, "prediction": "a", "references": []}\n', ["--task", "triviaqa"], "line 1: field 'references' should"),
    ('{"prediction": "a", "references": ["a"], "memory": "b"}\n', ["--task", "nq-swap"], "line 1: field 'memory'"),
    ('{"a": 1}\nnonsense\n{}\n', ["--task", "triviaqa"], "line 2: not JSON"),
    ("", ["--task", "triviaqa"], "holds no rows"),
    ('{"id": 1}\n', [], "give --task"),
])
def test_rows_that_cannot_be_scored_are_named_by_line(start, tmp_path, text, options, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    status, _, err = start("rescore", *options, path)
    assert status == 2 and message in err and err.count("\n") == 1
