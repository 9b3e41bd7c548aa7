"""Every program: a mistake ends in one line and status 2."""

import importlib
import re
from pathlib import Path

import pytest

from cli import decode as program
from tests import fuzz
from tests.checkpoints import write_checkpoint, write_heads, write_tokenizer
from tests.tables import rows

ROOT = Path(__file__).parents[2]
PROGRAMS = []
for path in sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("*/*.py")):
    # lm_eval.py passes unknown options on.
    if "(main))" in path.read_text("utf-8") and path.name != "lm_eval.py":
        PROGRAMS.append(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def places(tmp_path_factory, chat_model):
    """Names of folders and options → their paths and texts. Only the chat model has weights."""
    folder = tmp_path_factory.mktemp("places")
    for name, family in (("base", "llama"), ("other", "llama"), ("strange", "gpt2")):
        write_tokenizer(write_checkpoint(folder / name, vocab_size=259, model_type=family))
        (folder / name / "model.safetensors").write_text("damaged")
    write_heads(folder / "base" / "heads.json")
    tokenizer = folder / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|turn|>", "<|user|>"))
    model = f"--model {folder}/base"
    return dict(
        folder=folder,
        model=model,
        loads=chat_model,
        base=f"{model} --heads {folder}/base/heads.json --prompt Hi",
        chat=f"--model {chat_model} --heads {chat_model}/heads.json --prompt Hi",
        amateur=f"{model} --prompt Hi --amateur-heads {folder}/base/heads.json --amateur",
    )


MISTAKES = """
--prompt Hi --model {folder}/nowhere | nowhere
--prompt Hi --model {folder}/strange | model_type is
--prompt Hi --model {folder}/bse | single files are not read; did you mean /
{model} --prompt Hi --method greedy | model.safetensors
{amateur} {folder}/other | different vocabular
--model {loads} --prompt Hi --amateur {loads} | give --amateur-heads FILE
--model {loads} --prompt Hi --heads no.json | no.json is neither a head file nor a model
{base} --num-heads 99 --device cuda:99 | --device cuda:99 is not on this machine; choose from auto,
{base} --prompt '' | the prompt is empty
{base} --prompt-file {folder}/none.txt | none.txt: no such file or directory
{base} --prompt-ids 1,x | --prompt-ids: 'x' is not a whole number in [0, inf]
{model} --method greedy | nothing to answer
{model} --method greedy --prompt-ids 5 --raw | --raw has no effect on --prompt-ids
{base} --system S | --system and --template-args need a chat template
{chat} --raw --template-args '{{"a": 1}}' | a chat template, and exclude --raw
{chat} --template-args '{{"a": NaN}}' | invalid json_object value: '{"a": NaN}'
{chat} --template-args [1] | --template-args: invalid json_object value: '[1]'
{base} --method greedy | --heads has no effect on greedy; it is an option of masked
{base} --seed 0 | --seed has no effect without --random-heads
{base} --random-heads published | --heads has no effect with --random-heads published
{model} --prompt Hi --method greedy --sources | --sources has no effect on greedy, which
{base} --alpha-cap inf | --alpha-cap: 'inf' is not a finite number
{base} --stop '' | --stop: an empty text
{base} --method decore-entrpy | is unknown, did you mean decore-entropy?; known
{base} --method decore | unknown, did you mean decore-static or decore-entropy?; known
{base} --prompt --json | --prompt: expected one argument; see --help
{base} --html {folder}/no/page.html | /no; make it first
{base} --html {folder} | cannot be written
{base} --html /dev/null --prompt '' | the prompt is empty
"""
FULL = "{model} --method greedy --prompt '" + "word " * 150 + "'"
DEEP = "{chat} --template-args " + "[" * 9999
MISTAKES = [
    *rows(MISTAKES),
    (FULL, "use a model that reads more, such as Qwen/"),
    (DEEP, "--template-args: the object is nested too deeply"),
]


@pytest.mark.parametrize("arguments, words", MISTAKES)
def test_a_mistake_ends_in_one_line_and_status_2(refused, places, arguments, words):
    err = refused(program.main, arguments.format(**places))
    assert err.count("\n") == 1 and err.startswith("decode.py: error: ") and words in err


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_a_program_refuses_unknown_options_and_dashes_as_a_value_and_its_help_shows_its_defaults(
    call, path
):
    assert (ROOT / path).read_text("utf-8").endswith("sys.exit(run_program(main))\n")
    name = ".".join(path.with_suffix("").parts).removesuffix(".__main__")
    main = importlib.import_module(name).main
    status, out, err = call(main, "--help")
    assert status == 0 and out.startswith("usage: ") and err == ""
    assert "(default: None)" not in out and "(default: [])" not in out
    options = sorted(set(re.findall(r"--[a-z-]+", out.partition("examples:")[0])))
    for option in "--nonsense", *(f"{option}=--" for option in options):
        status, out, err = call(main, option)
        assert (status, out, err.count("\n")) == (2, "", 1) and ": error: " in err, option
        assert option == "--nonsense" or f"{option}: '--' is not a value" in err


def test_random_and_damaged_input_ends_in_a_correct_result_or_in_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fuzz.fuzz(range(180), seed=1) == {kind.__name__ for kind in fuzz.KINDS}
