"""Every Python block and every command of the pages runs, with the miniature in the place of large models."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "heads/README.md", ROOT / "miniature/README.md"]
DETECT = "-m heads.detect --model miniature --needles miniature/detection/needles.jsonl --runs 8 --lengths 60:100:20 " \
         "--haystack miniature/detection/haystack --template 'Context: {context}\n{question}' --max-new-tokens 12 --out TMP/"

# Command of a page → what is run here (TMP: an empty folder), or the reason why it is not run.
NOT_HERE = "not run: needs "
COMMANDS = {
    "python decore.py": "decore.py",
}


def commands():
    """The commands of all pages: lines of blocks, and inline code, that start with python or torchrun."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line.partition("  # ")[0].partition(" && ")[::-2][0] or line for line in text.splitlines()]
        for line in lines:
            for command in re.findall(r"^ *((?:python|torchrun) .*)$", line) + re.findall(r"`(python [^`]+)`", line):
                yield " ".join(command.split())


def test_every_command_of_the_pages_is_listed_here():
    assert set(commands()) == set(COMMANDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("docs")


@pytest.mark.parametrize("command", [c for c, run in COMMANDS.items() if not run.startswith(NOT_HERE)])
def test_a_command_of_the_pages_runs(command, folder, monkeypatch, capsys):
    program, *arguments = shlex.split(COMMANDS[command].replace("TMP", str(folder)))
    monkeypatch.chdir(ROOT)
    if program == "-m":
        program, *arguments = arguments
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as end:
        (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
    assert not end.value.code, capsys.readouterr().err


BLOCKS = [pytest.param(block, id=page.name) for page in PAGES
          for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_of_the_pages_runs(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tokenizer.Tokenizer.encode_chat", lambda self, messages: self.encode(messages[0]["content"]))
    for large, small in (("meta-llama/Meta-Llama-3-8B-Instruct", "miniature"), ('device="cuda"', 'device="cpu"')):
        block = block.replace(large, small)
    exec(block, {})
