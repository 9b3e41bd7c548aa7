"""Every program: a mistake ends in one line and status 2."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import program
from tests import fuzz
from tests.checkpoints import write_checkpoint, write_heads, write_tokenizer

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "heads", "integrations", "miniature", "paper", "paper/report", "program", "speed")
PROGRAMS = ["program/__main__.py"]
for folder in (ROOT, *map(ROOT.joinpath, ROOMS)):
    for path in sorted(folder.glob("*.py")):
        # decore.py starts program/; lm_eval.py passes unknown options on.
        if path.name not in ("decore.py", "lm_eval.py") and "(main))" in path.read_text("utf-8"):
            PROGRAMS.append(str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def places(tmp_path_factory, chat_model):
    """Names of folders, files and options → their paths and texts."""
    folder = tmp_path_factory.mktemp("places")
    base, other = (
        write_tokenizer(write_checkpoint(folder / name, vocab_size=259))
        for name in ("base", "other")
    )
    write_heads(base / "heads.json")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|turn|>", "<|user|>"))
    return dict(
        folder=folder,
        base=base,
        model=f"--model {base}",
        heads=f"--heads {base}/heads.json",
        chat=f"--model {chat_model} --heads {chat_model}/heads.json",
    )


BASE = "{model} {heads} --prompt Hi"
MISTAKES = [
    # models and heads
    (program, "--prompt Hi --model {folder}/nowhere", "nowhere"),
    (
        program,
        "--prompt Hi {model} --amateur {folder}/other --amateur-heads {base}/heads.json",
        "different vocabular",
    ),
    (program, "--prompt Hi {model} --amateur {base}", "give --amateur-heads FILE"),
    (
        program,
        BASE + " --device cuda:99",
        "--device cuda:99 is not on this machine; choose from auto, ",
    ),
    # prompts
    (program, "{model} {heads} --prompt ''", "the prompt is empty"),
    (program, "{model} {heads} --prompt-file {folder}/none.txt", "none.txt"),
    (
        program,
        "{model} {heads} --prompt-ids 1,x",
        "--prompt-ids: 'x' is not a whole number in [0, inf]",
    ),
    (program, "{model} {heads}", "nothing to answer"),
    (program, "{model} {heads} --prompt-ids 5 --raw", "--raw has no effect on --prompt-ids"),
    (program, BASE + " --system S", "--system and --template-args need a chat template"),
    (
        program,
        "{chat} --prompt Hi --raw --template-args '{{\"a\": 1}}'",
        "need a chat template, and exclude --raw",
    ),
    (
        program,
        "{chat} --prompt Hi --template-args [1]",
        "--template-args: invalid json_object value: '[1]'",
    ),
    (
        program,
        BASE + " --template-args " + "[" * 9999,
        "--template-args: the object is nested too deeply",
    ),
    # options without effect, and their values
    (
        program,
        BASE + " --method greedy",
        "--heads has no effect on greedy; it is an option of masked",
    ),
    (program, BASE + " --seed 0", "--seed has no effect without --random-heads"),
    (
        program,
        BASE + " --random-heads published",
        "--heads has no effect with --random-heads published",
    ),
    (
        program,
        "{model} --prompt Hi --method greedy --sources",
        "--sources has no effect on greedy, which masks no",
    ),
    (program, BASE + " --no-graph", "--no-graph has no effect on cpu"),
    (program, BASE + " --num-heads 0", "--num-heads: '0' is not a whole number in [1, "),
    (program, BASE + " --alpha-cap inf", "--alpha-cap: 'inf' is not a finite number in [0, "),
    (program, BASE + " --stop ''", "--stop: an empty text"),
    (program, BASE + " --method decore-entrpy", "is unknown, did you mean decore-entropy?; known"),
    (
        program,
        BASE + " --alpha 2",
        "--alpha has no effect on decore-entropy; it is an option of decore-static, cd, cad, ad",
    ),
    (program, BASE + " --html {folder}/no/page.html", "no/page.html cannot be written"),
]


@pytest.mark.parametrize(
    "program, arguments, words", MISTAKES, ids=[words[:40] for *_, words in MISTAKES]
)
def test_a_mistake_ends_in_one_line_and_status_2(call, places, program, arguments, words):
    status, out, err = call(program.main, *shlex.split(arguments.format(**places)))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{program.__name__}.py: error: ") and words in err


@pytest.mark.parametrize("path", PROGRAMS)
def test_a_program_refuses_unknown_options_and_dashes_as_a_value_and_its_help_shows_its_defaults(
    call, path
):
    assert (ROOT / path).read_text("utf-8").endswith("sys.exit(cli.run(main))\n")
    name = path.removesuffix(".py").removesuffix("/__main__")
    main = importlib.import_module(name.replace("/", ".")).main
    status, out, err = call(main, "--help")
    assert status == 0 and out.startswith("usage: ") and err == ""
    assert "(default: None)" not in out and "(default: [])" not in out
    options = sorted(set(re.findall(r"--[a-z-]+", out.partition("examples:")[0])))
    for option in "--nonsense", *(f"{option}=--" for option in options):
        status, out, err = call(main, option)
        assert (status, out, err.count("\n")) == (2, "", 1) and ": error: " in err, option
        assert option == "--nonsense" or f"{option}: '--' is not a value" in err


@pytest.mark.parametrize("path", ["decore.py", "model.py", "tokenizer.py", "runtime/*.py"])
def test_the_core_as_a_library_loads_no_command_line(path):
    above = r"^(import|from) (cli|heads|program|tasks|report)\b"
    for file in ROOT.glob(path):
        assert not re.search(above, file.read_text(encoding="utf-8"), re.M), file


def test_random_and_damaged_input_ends_in_a_correct_result_or_in_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    counts, failures = fuzz.fuzz(range(180), seed=1, seconds=40)
    assert not failures
    assert {name for name, outcome in counts if outcome == "right"} == set(fuzz.KINDS)
