"""`pip install -e .` in a fresh environment, used from another folder."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a new environment that has this one's packages, and the clone installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-e", ROOT], check=True)
    return python


def run(python, folder, *arguments):
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [python, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["heads.detect", "integrations.lm_eval"])
def test_programs_start_in_another_folder(python, tmp_path, name):
    program = run(python, tmp_path, "-m", name, "--help")
    assert program.returncode == 0, program.stderr
    assert program.stdout.startswith("usage: ")


def test_modules_are_found_and_a_module_of_ones_own_that_hides_ours_is_named(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from decore import generate\nfrom model import Transformer\n")
    program = run(python, tmp_path, "script.py")
    assert program.returncode == 0, program.stderr
    own = tmp_path / "model.py"
    own.write_text("class Net: pass\n")
    error = run(python, tmp_path, "script.py").stderr.splitlines()[-1]
    remedy = f"rename it, or put {ROOT} first on sys.path"
    assert error.endswith(f"{own} hides {ROOT / 'model.py'}: {remedy}")
    first = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(first + script.read_text())
    assert run(python, tmp_path, "script.py").returncode == 0
