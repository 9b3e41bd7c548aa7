"""Each folder uses only those before it, in the order of CONTRIBUTING.md."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = "runtime, model tokenizer, decore, hf, heads, decoders, cli, paper, evaluate"
LEVELS = {name: i for i, names in enumerate(ORDER.split(",")) for name in names.split()}


def imported(path):
    """The first parts of the modules that a file imports."""
    tree = ast.parse(path.read_text("utf-8"))
    if path.name == "decore.py":
        tree.body.pop()  # starts the program of cli/
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("name", LEVELS)
def test_a_folder_imports_nothing_that_comes_after_it(name):
    paths = [ROOT / f"{name}.py"] if (ROOT / f"{name}.py").exists() else (ROOT / name).rglob("*.py")
    for path in paths:
        others = {*imported(path)} - {name}
        later = [other for other in others if LEVELS.get(other, -1) >= LEVELS[name]]
        assert not later and not others & {"integrations", "miniature", "speed"}, path
