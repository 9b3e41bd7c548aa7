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
    pip = f"-m pip --python {python} install -q --no-deps --no-build-isolation"
    pip = [sys.executable, *pip.split()]
    copy = subprocess.run([*pip, ROOT], capture_output=True, text=True)
    assert copy.returncode and "DeCoRe runs from a clone: git clone" in copy.stderr
    subprocess.run([*pip, "-e", ROOT], check=True)
    return python


def run(python, folder, *arguments):
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [python, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


HELP = """
import runpy, sys
sys.argv = ["program", "--help"]
for name in "heads.detect", "integrations.lm_eval":
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
"""


def test_the_readmes_script_and_programs_run_in_another_folder(python, tmp_path):
    shutil.copytree(ROOT / "miniature", tmp_path / "miniature")
    (tmp_path / "miniature" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    block = re.search(r"```python\n(.*?)```", README, re.S)[1]
    block = block.replace("meta-llama/Meta-Llama-3-8B-Instruct", "miniature").replace("cuda", "cpu")
    (tmp_path / "script.py").write_text(block + HELP, encoding="utf-8")
    program = run(python, tmp_path, "-I", "script.py")  # -I: only what is installed is found
    assert program.returncode == 0, program.stderr
    answer, *pages = program.stdout.split("usage: ")
    assert " [" in answer  # with its α and entropies
    assert len(pages) == 2 and all(page.endswith("status 0\n") for page in pages)
