"""Every Python block and every command of the pages runs, with the miniature in place of large
models."""

import re
import runpy
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from miniature.data import make_split
from tests.checkpoints import write_lines
from tests.tables import rows

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += [ROOT / "heads" / "README.md", ROOT / "miniature" / "README.md"]
# How a command of a page begins → what is run in its place, in this order. TMP is an empty folder.
RUN_HERE = """
python decore.py --compare --sources --html | decore.py --compare --sources --html TMP/page.html
python decore.py --model Qwen | decore.py --model miniature --prompt-file miniature/example.txt \
    --compare
python decore.py --transformers | decore.py --transformers --heads heads/scores/miniature.json \
    --prompt Hi
torchrun --nproc-per-node 8 decore.py | decore.py --prompt-file miniature/example.txt
python decore.py | decore.py
python evaluate.py --help | evaluate.py --task miniature --data TMP/open.jsonl \
    --method greedy,decore-entropy --mask query --limit 4 --out TMP/8b
python evaluate.py --task qa | evaluate.py --task qa --data docs/office.csv --limit 2 \
    --method greedy,decore-entropy --num-heads 2,5 --out TMP/qa
python evaluate.py report runs | evaluate.py report TMP/qa --plots TMP/figures
python evaluate.py report results | evaluate.py report \
    results/transfer/SmolLM2-135M-Instruct.jsonl.xz --plots TMP/figures
python evaluate.py report heads | evaluate.py report heads miniature --plots TMP/pictures
python evaluate.py unpack | evaluate.py unpack results/seen/gemma-3-270m.jsonl.xz TMP/seen \
    --only '*greedy*'
python evaluate.py rescore RUN.jsonl | evaluate.py rescore \
    TMP/8b/miniature.miniature.greedy.jsonl
python -m heads.detect --model Qwen | DETECT
python -m heads.detect --model miniature | DETECT
python -m heads.detect --questions | -m heads.detect --questions docs/office.csv --limit 2 \
    --out TMP/questions.json
python -m heads.detect --transformers | DETECT --out TMP/theirs.json --transformers
python -m speed.drafts | -m speed.drafts --model miniature --task miniature --data TMP/open.jsonl \
    --limit 1 --max-new-tokens 8 --rounds 1
python -m miniature.data | -m miniature.data --split conflict --n 3
"""
DETECT = (
    "-m heads.detect --needles miniature/detection/needles.jsonl --lengths 60:240:5 --runs 20 "
    "--haystack miniature/detection/haystack.jsonl --out TMP/heads.json "
    "--template 'Context: {context}\\n{question}' --max-new-tokens 12"
)
RUN_HERE = dict(rows(RUN_HERE.replace("DETECT", DETECT)))
# Commands that other tests run, or that need a network or too much time.
ELSEWHERE = """
python -m results.tables  # test_results
python -m speed.gpu  # test_speed
python -m speed.decode
torchrun --nproc-per-node 2 -m speed.decode
python -m integrations.lm_eval  # test_lm_eval
python -m integrations.gguf  # test_gguf
python -m integrations.hub  # test_hub
python evaluate.py --task TASK
python evaluate.py --task truthfulqa-gen  # test_rescore
python evaluate.py rescore runs
python evaluate.py fetch  # test_fetch
python evaluate.py choose  # test_choose
python evaluate.py paper  # test_plan
torchrun --nproc-per-node 8 evaluate.py  # test_evaluate
torchrun --nnodes  # several machines
python -m heads.detect --model M  # test_detect
python -m heads.detect --model meta-llama
python -m heads.detect --task  # test_effect
python -m paper.facts  # test_facts
python -m speed.suite  # at an older commit
python -m paper.masking
python -m miniature.train  # 25 minutes
python -m nltk.downloader  # the network
python -I  # an option, not a command
python -m vllm.entrypoints  # vLLM and a GPU
"""
ELSEWHERE = [line.partition("  # ")[0] for line in ELSEWHERE.strip().splitlines()]


def commands():
    """Commands of the pages: in blocks, and as inline code."""
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            for command in re.findall(r"(?:^ *|&& |`)((?:python|torchrun) [^`#&]+)", line):
                yield " ".join(command.split())


def test_every_command_of_the_pages_is_run_here_or_elsewhere():
    known = (*RUN_HERE, *ELSEWHERE)
    assert [command for command in commands() if not command.startswith(known)] == []
    for start in known:
        assert any(command.startswith(start) for command in commands()), start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    write_lines(folder / "open.jsonl", [item._asdict() for item in make_split("open", 4)])
    return folder


@pytest.mark.parametrize("command", RUN_HERE.values(), ids=RUN_HERE)
def test_a_command_of_the_pages_runs(command, folder, monkeypatch, capsys):
    program, *arguments = shlex.split(command.replace("TMP", str(folder)))
    monkeypatch.chdir(ROOT)
    if program == "-m":
        program, *arguments = arguments
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    with pytest.raises(SystemExit) as end:
        run(program, run_name="__main__")
    assert end.value.code == 0, capsys.readouterr().err


def test_every_file_of_code_that_a_page_names_exists():
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md)\b", page.read_text("utf-8")):
            assert (ROOT / name).exists() or (page.parent / name).exists(), (page.name, name)


def test_the_loop_of_the_readme_is_that_of_decore():
    [loop] = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert textwrap.indent(loop, "    ") in (ROOT / "decore.py").read_text(encoding="utf-8")


BLOCKS = [
    pytest.param(block, id=page.name)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_of_the_pages_runs(block, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    folder = shutil.copytree("miniature", tmp_path / "miniature")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    block = re.sub(r"(meta-llama|Qwen)/[\w.-]+", str(folder), block)
    exec(block.replace('device="cuda"', 'device="cpu"'), {})
