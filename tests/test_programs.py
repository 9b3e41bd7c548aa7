"""Programs: one way in, and one line for whatever goes wrong on it."""

import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import cli

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "heads", "miniature", "runtime", "tasks")
WAY_IN = re.compile(r'\nif __name__ == "__main__":\n'
                    r'(    from runtime\.cli import run\n)?    sys\.exit\((cli\.)?run\(main\)\)\n\Z')
PROGRAMS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.py"), *(path for folder in FOLDERS
                                                                           for path in (ROOT / folder).rglob("*.py"))]
                  if WAY_IN.search(path.read_text(encoding="utf-8")))
SCRIPTS = ("decore.py", "baselines.py", "evaluate.py")          # the others are modules, run with -m


def start(path, *args):
    """The command that runs a program as its help says."""
    module = str(path.with_suffix("")).replace("/", ".")
    return [sys.executable, *([str(path)] if str(path) in SCRIPTS else ["-m", module]), *args]


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a program in this process on arguments → (status, standard output, standard error)."""
    def run(path, *args):
        monkeypatch.setattr(sys, "argv", [str(path), *args])
        monkeypatch.chdir(ROOT)
        before = sys.path[:]
        try:
            with warnings.catch_warnings():
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return end.code, *capsys.readouterr()
        finally:
            sys.path[:] = before
    return run


@pytest.fixture
def attempt(capsys):
    """cli.run on a function → (status, standard output, standard error)."""
    return lambda main: (cli.run(main), *capsys.readouterr())


def test_every_program_is_entered_through_cli_run():
    assert len(PROGRAMS) > 12 and {Path(script) for script in SCRIPTS} <= {*PROGRAMS}
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    others = [path for path in map(Path, tracked) if path not in PROGRAMS and path.parts[0] != "tests"
              and 'if __name__ == "__main__"' in (ROOT / path).read_text(encoding="utf-8")]
    # The harness hands on what it does not know.
    assert others == [Path("tasks/harness.py")]
    assert (ROOT / others[0]).read_text(encoding="utf-8").endswith("    sys.exit(cli.run(main))\n")


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_a_program_refuses_what_it_does_not_know_and_its_help_shows_how_it_is_run(call, path):
    status, out, err = call(path, "--help")
    assert status in (0, None) and out.startswith("usage: python ") and err == ""
    for flags, _, text in re.findall(r"^  (-[^\n]*?)(  |\n)(.*?)(?=^  -|\Z)", out, re.S | re.M):
        takes_value = re.search(r"--[\w-]+ [A-Z]", flags)
        assert not takes_value or "None)" not in text and "[])" not in text, flags
    status, out, err = call(path, "--nonsense")
    assert status == 2 and out == "" and err.count("\n") == 1 and err.startswith(f"{path.name}: error: ")


def test_the_help_of_a_module_is_run_as_a_module():
    done = subprocess.run(start(Path("miniature/data.py"), "--help"), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("usage: python -m miniature.data ")
    assert "items (default: 256)" in done.stdout


def test_the_help_of_evaluate_lists_its_commands(call):
    assert {"rescore", "report"} <= set(call("evaluate.py", "--help")[1].replace("`", " ").split())


@pytest.fixture(autouse=True)
def control_c_counts():
    """Also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_control_c_while_torch_loads_prints_a_newline(path, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    done = subprocess.run(start(path, "--help"), cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    # What does not need torch to begin with shows its help.
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n") or done.stdout.startswith("usage: "), done


def test_control_c_at_work_prints_a_newline(attempt):
    assert attempt(lambda: os.kill(os.getpid(), signal.SIGINT)) == (130, "", "\n")


def raiser(error):
    def main():
        raise error
    return main


@pytest.mark.parametrize("main, message", [
    (lambda: torch.empty(10 ** 15), "out of memory: use fewer"),
    (raiser(MemoryError()), "out of memory: use fewer"),
    (raiser(torch.OutOfMemoryError("CUDA out of memory. Tried …")), "out of memory: use fewer"),
    (raiser(RecursionError("maximum recursion depth exceeded")), "nested too deeply"),
    (raiser(torch.distributed.DistNetworkError("no\nnetwork")), "no network"),
    (lambda: open("nowhere/file"), "nowhere/file: no such file or directory; check the spelling"),
    (lambda: open(ROOT), "is a directory; give a file, this is a folder"),
    (lambda: "\udce9".encode(), "at place 0 of a text cannot be read or written as utf-8"),
], ids=str)
def test_limits_of_the_machine_are_one_line(attempt, main, message):
    status, out, err = attempt(main)
    assert status == 2 and out == "" and err.count("\n") == 1 and message in err


def test_a_mistake_of_the_program_keeps_its_traceback(attempt):
    with pytest.raises(KeyError):
        attempt(lambda: {}["a"])
    with pytest.raises(RuntimeError):
        attempt(raiser(RuntimeError("shapes do not fit")))


@pytest.mark.parametrize("environment, message", [
    ({"RANK": "x"}, "RANK='x' in the environment is no whole number"),
    ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
    ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 in the environment is not below WORLD_SIZE=0"),
])
def test_an_environment_that_torchrun_does_not_make_is_one_line(attempt, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, out, err = attempt(lambda: pytest.fail("main was called"))
    assert status == 2 and err.count("\n") == 1 and message in err


DATA = "-m miniature.data --split closed --n 320"


@pytest.mark.parametrize("shell, status, err", [
    (f"python {DATA} | head -1", 0, ""),                                        # a reader that goes away
    (f"python {DATA} > /dev/full", 2, "data.py: error: writing: no space left on device; free some space"),
    ("python -m miniature.data --split open --n 1 > /dev/full", 2, "data.py: error: writing: no space left on device"),
    (f"python {DATA} >&-", 0, ""), (f"python {DATA} <&-", 0, ""),
    ("python -m miniature.data --split none 2>&-", 2, ""),
    ("python -m miniature.data --split caf$(printf '\\351')", 2, "data.py: error: argument 2 is not UTF-8 text: '\\ud"),
])
def test_closed_and_broken_streams_are_no_traceback(shell, status, err):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell.replace("python", sys.executable, 1)], cwd=ROOT,
                          capture_output=True, text=True, env=buffered)
    assert done.returncode == status and done.stderr.startswith(err) and done.stderr.count("\n") == bool(err), done


def test_decore_loads_no_command_line():
    code = ("import sys, decore; print(sorted({'tokenizers', 'cli', 'cli.program', 'heads', 'report'} "
            "& {*sys.modules}))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
