"""evaluate.py choose: from a table of conflicts to one tested setting, on the miniature."""

import signal
import sys
from contextlib import suppress
from runpy import run_module

import pytest

from cli.entry import continuing, run_program
from miniature.data import make_split
from paper import choose
from runtime.errors import InputError
from tests.checkpoints import read_lines, write_lines
from tests.tables import rows


def run_detection():
    with suppress(SystemExit):
        run_module("heads.detect", run_name="__main__")


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Those of `choose` with 60 conflicts of the miniature. Its commands run in this process."""

    def run(command, only_print=False):
        print("$", *command)
        if not only_print:
            import evaluate

            program, arguments = evaluate.main, command[1:]
            if command[0] == "-m":
                program, arguments = run_detection, command[2:]
            monkeypatch.setattr(sys, "argv", ["x", *arguments])
            assert not run_program(program)

    monkeypatch.setattr(choose, "run", run)
    few = "--method greedy", "--method decore-entropy --num-heads 1,2", "--method cad --alpha 0.5,1"
    monkeypatch.setattr(choose, "GRID", few)
    conflict, agreement = [], []
    for i, (prompt, answer, memory) in enumerate(make_split("conflict", 60, seed=3)):
        context, question = prompt.removeprefix("Context: ").split("\nAnswer: ")
        line = dict(id=f"q{i}", question=question, context=context)
        conflict.append(line | dict(answers=answer, memory=memory))
        agreement.append(line | dict(context=context.replace(answer, memory), answers=memory))
    write_lines(tmp_path / "conflict.jsonl", conflict)
    write_lines(tmp_path / "agreement.jsonl", agreement)
    template = tmp_path / "template.txt"
    template.write_text("Context: {context}\nAnswer: {question}")
    paths = f"--data {tmp_path}/conflict.jsonl --agreement {tmp_path}/agreement.jsonl"
    options = f"{paths} --model miniature --template {template} --max-new-tokens 6"
    return f"{options} --out {tmp_path}/runs".split()


@pytest.mark.parametrize("end", ["os._exit(130)", "os.kill(os.getpid(), 9)"])
def test_ctrl_c_lets_the_command_that_runs_end_and_is_explained_once(end, capfd, tmp_path):
    """A command that ends with status 130 has explained it."""
    late = tmp_path / "late"  # `subprocess.run` would kill the command before
    code = "import os, pathlib, time; os.kill(os.getppid(), 2); time.sleep(1); "
    code += f"pathlib.Path({str(late)!r}).touch(); {end}"
    signal.signal(2, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped, continuing():
        choose.run(["-c", code])
    explained = "the same command continues" in capfd.readouterr().err
    assert late.exists() and explained == ("kill" in end)
    assert explained or stopped.value.code == 130


def test_choose_goes_from_conflicts_to_one_tested_setting_and_goes_on(options, capsys, tmp_path):
    choose.main([*options, "--dry-run"])
    planned = capsys.readouterr().out
    assert not (tmp_path / "runs").exists() and "60 questions (those that are known" in planned
    choose.main(options)
    first = capsys.readouterr()
    assert "known: " in first.out and "to test" in first.out
    table = first.out.rpartition("setting\n")[2].split("\n\n")[0].splitlines()
    assert len(table) == 5
    verdict = first.out.splitlines()[-1]
    assert verdict.startswith(("use DeCoRe: --method decore-", "use CAD: --method cad")), verdict
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("test/*/*.jsonl")}
    assert len(files) == 6  # greedy, DeCoRe, CAD; conflict and agreement
    choose.main(options)
    again = capsys.readouterr().out
    assert again.splitlines()[-1] == verdict
    # The items of the three parts are different ones.
    ids = {}
    for part in ("choose", "test"):
        [path] = tmp_path.glob(f"runs/{part}/conflict/*greedy*.jsonl")
        ids[part] = {line["id"] for line in read_lines(path)[1:]}
    assert not ids["choose"] & ids["test"]


def test_a_folder_of_another_model_is_refused(options, tmp_path):
    closed = tmp_path / "runs" / "closed"
    closed.mkdir(parents=True)
    (closed / "qa.other.greedy.closed-book.jsonl").touch()
    with pytest.raises(InputError, match="of another model than miniature; choose another --out"):
        choose.main(options)
    assert len([*closed.iterdir()]) == 1


def test_the_known_questions_are_split_and_too_few_are_refused():
    for n, of_rank, of_choose in (24, 6, 6), (1000, 50, 100):
        before = of_rank + of_choose
        parts = (0, of_rank), (of_rank, of_choose), (before, n - before)
        assert choose.split(n, None, None) == dict(zip(("rank", "choose", "test"), parts))
    with pytest.raises(ValueError, match="23 known questions are too few"):
        choose.split(23, None, None)
    with pytest.raises(ValueError, match="leave 10 of 40"):
        choose.split(40, 20, 10)


# Setting, right answers of 100 with conflicts and with agreement.
SHARES = """
--method greedy | 20 | 100
--method decore-entropy --num-heads 10 | 60 | 90
--method decore-static --alpha 1.0 --num-heads 3 | 50 | 98
--method cad --alpha 1.0 | 70 | 97
--method cad --alpha 0.5 | 30 | 99
"""


def test_the_best_setting_may_lose_so_much_and_no_more(monkeypatch, capsys):
    runs = {}
    for setting, *shares in rows(SHARES):
        conflict, agreement = ([1] * int(n) + [0] * (100 - int(n)) for n in shares)
        runs[tuple(setting.split())] = {"conflict": conflict, "agreement": agreement}
    monkeypatch.setattr(choose, "shares", lambda *_: runs)
    for points, decore, cad in ((2, 3, 0.5), (0, 3, 0.5), (5, 3, 1.0), (10, 10, 1.0)):
        chosen = choose.choose(None, ["conflict", "agreement"], points)
        assert chosen["DeCoRe"][-1] == str(decore) and chosen["CAD"][-1] == str(cad)


def test_no_gain_that_is_not_shown_is_recommended(monkeypatch, capsys):
    values = {"conflict": [0] * 12}
    better = {"conflict": [1] * 5 + [0] * 7}
    cad = ("--method", "cad", "--alpha", "1.0")
    monkeypatch.setattr(choose, "shares", lambda *_: {choose.GREEDY: values, cad: better})
    choose.advise(None, ["conflict"], {"CAD": cad}, [])
    assert "no gain is shown: use greedy decoding" in capsys.readouterr().out
    better["conflict"][:6] = [1] * 6
    choose.advise(None, ["conflict"], {"CAD": cad}, [])
    assert "use CAD: --method cad --alpha 1.0" in capsys.readouterr().out
