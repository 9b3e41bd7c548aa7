"""`pip install -e .` in a fresh environment, used from another folder; other ways are refused."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a new environment that has this one's packages, and the clone installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    pip += ["--no-build-isolation"]
    copy = subprocess.run([*pip, ROOT], capture_output=True, text=True)
    assert copy.returncode and "DeCoRe runs from a clone: git clone" in copy.stderr
    subprocess.run([*pip, "-e", ROOT], check=True)
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


def test_the_readmes_script_runs_and_a_module_of_ones_own_that_hides_ours_is_named(
    python, tmp_path
):
    shutil.copytree(ROOT / "miniature", tmp_path / "miniature")
    (tmp_path / "miniature" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    block = re.search(r"```python\n(.*?)```", README, re.S)[1]
    block = block.replace("meta-llama/Meta-Llama-3-8B-Instruct", "miniature")
    script = tmp_path / "script.py"
    script.write_text(block.replace("cuda", "cpu"), encoding="utf-8")
    program = run(python, tmp_path, "script.py")
    assert program.returncode == 0, program.stderr
    assert " [" in program.stdout  # the answer, and its α and entropies
    own = tmp_path / "model.py"
    own.write_text("class Net: pass\n")
    error = run(python, tmp_path, "script.py").stderr.splitlines()[-1]
    remedy = f"rename it, or put {ROOT} first on sys.path"
    assert error.endswith(f"{own} hides {ROOT / 'model.py'}: {remedy}")
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport decore, model\n")
    assert run(python, tmp_path, "script.py").returncode == 0
