"""Every program: its exit status, its streams, its one line for a mistake."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import speed.decode
from cli import decode
from cli.entry import run_program
from heads.reader import HeadFileError
from runtime.errors import ArgumentError, InputError
from tests.tables import each

ROOT = Path(__file__).parents[2]


def raiser(error):
    def main():
        raise error

    return main


def start(shell):
    """Runs Python with these arguments in a shell."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-o", "pipefail", "-c", f"{sys.executable} {shell}"]
    return subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


ERRORS = r"""
torch.empty(10**15) | out of memory: use fewer
raiser(torch.OutOfMemoryError("CUDA out of memory. Tried …"))() | out of memory: use
raiser(ConnectionError("no\nnetwork"))() | no network
__import__("nosuch.part") | No module named 'nosuch'; pip install nosuch
open("nowhere/file") | nowhere/file: no such file or directory
raiser(ArgumentError("alpha_cap", "is odd"))() | error: --alpha-cap is odd$
raiser(ArgumentError("renormalise", "is odd"))() | error: --no-renormalise is odd$
"""


@each("code, words", ERRORS)
def test_mistakes_and_limits_are_one_line_and_a_bug_keeps_its_traceback(call, refused, code, words):
    err = refused(lambda: eval(code))
    assert err.count("\n") == 1 and re.search(words, err)
    assert call(raiser(KeyboardInterrupt())) == (130, "", "\n")
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        call(raiser(RuntimeError("shapes do not fit")))


@pytest.mark.parametrize(
    "error", [ArgumentError("n", "is odd"), InputError("a"), HeadFileError("b")]
)
def test_errors_survive_a_pool_of_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_traceback_can_be_had_and_the_line_of_a_foreign_error_says_how(call, monkeypatch):
    hint = " (DECORE_TRACEBACK=1 prints a traceback)\n"
    foreign = [lambda: torch.tensor([[1], [2, 3]]), lambda: int("x"), lambda: json.loads("{")]
    for main in (*foreign, raiser(ValueError("bad"))):
        assert call(main)[2].endswith(hint)
    own = "test_entry.py: error: bad\n"
    for kind in InputError, HeadFileError, OSError:
        assert call(raiser(kind("bad"))) == (2, "", own)
    monkeypatch.setenv("DECORE_TRACEBACK", "1")
    status, _, err = call(raiser(InputError("bad")))
    assert status == 2 and err.startswith("Traceback (most") and err.endswith("bad\n" + own)


def test_rank_0_alone_prints_and_a_rank_that_is_left_over_in_a_shell_counts_for_nothing(
    call, refused, monkeypatch
):
    monkeypatch.setattr("cli.entry.time.sleep", lambda seconds: None)
    monkeypatch.setenv("RANK", "3")
    assert call(lambda: print("text")) == (0, "text\n", "")
    for name in "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT":
        monkeypatch.setenv(name, "4")
    assert call(lambda: print("text")) == (0, "", "")
    assert call(raiser(InputError("bad"))) == (2, "", "test_entry.py: rank 3: error: bad\n")
    for name, text in (("RANK", "-1"), ("RANK", "4"), ("WORLD_SIZE", "x"), ("LOCAL_RANK", "x")):
        monkeypatch.setenv(name, text)
        err = refused(lambda: print("text"))
        assert err.count("\n") == 1 and "are not those of torchrun" in err


@pytest.mark.parametrize(
    "shell, err",
    [
        ("-W error -m miniature.data --split open --n 1 | true", ""),
        ("decore.py --prompt-ids 5 --method greedy <&- >&-", " tokens/s\n"),
    ],
)
def test_streams_may_be_closed_and_warnings_errors(shell, err):
    done = start(shell)
    assert done.returncode == 0 and done.stderr.decode().endswith(err)
    assert done.stderr.count(b"\n") == bool(err)


def test_a_full_disk_is_one_line(call, monkeypatch):
    stdout = open("/dev/full", "w")
    monkeypatch.setattr("sys.stdout", stdout)
    err = "test_entry.py: error: writing: no space left on device\n"
    assert call(lambda: print(1)) == (2, "", err)
    assert sys.stdout is None  # Python's exit would write again
    with pytest.raises(OSError):
        stdout.close()


def test_arguments_may_have_any_bytes_and_docstrings_may_be_absent(done, refused, monkeypatch):
    err = refused(decode.main, "--html", "a\udcff")
    assert err.count("\n") == 1
    assert err.endswith("error: 'a\\udcff' has bytes that are not UTF-8; see --help\n")
    monkeypatch.setattr(speed.decode, "__doc__", None)  # python -OO
    assert done(speed.decode.main, "--help")


def test_pipes_get_utf_8_and_terminals_a_question_mark_for_a_character_that_they_lack(
    monkeypatch, tmp_path
):
    def run(file, encoding):
        with open(file, "w", encoding=encoding) as stdout:
            monkeypatch.setattr("sys.stdout", stdout)
            assert run_program(lambda: print("1 α ←")) == 0

    run(tmp_path / "out", "ascii")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "1 α ←\n"
    terminal, side = os.openpty()
    run(side, "latin-1")
    assert os.read(terminal, 100) == b"1 ? ?\r\n"
    os.close(terminal)
