"""The folder for the Hub, used where this project is not on Python's path."""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch

from heads.reader import best_heads
from integrations import hub
from integrations.custom_generate.generate import generate
from tests.checkpoints import random_ids, write_heads
from tests.families import random_model
from tests.tables import each

PROMPT = random_ids(12)
GREEDY = dict(do_sample=False, max_new_tokens=8, pad_token_id=0)
ALONE = """
import importlib.util, json, sys, torch, transformers
assert not any(map(importlib.util.find_spec, ["hf", "heads", "integrations"]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
settings = dict(custom_generate=sys.argv[2], trust_remote_code=True, **json.loads(sys.argv[3]))
for more in {}, dict(heads="1-0,1-3,2-2"), dict(measure="mass", num_heads=2):
    try:
        print(model.generate(torch.tensor([json.loads(sys.argv[4])]), **settings, **more).tolist())
    except ValueError as error:
        print(error)
"""


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "decore-tiny"
    hub.build(out, "org/Tiny", write_heads(tmp_path / "heads.json"))
    return out


def test_the_folder_decodes_alone_as_the_clone_does(folder, tmp_path):
    model = random_model("llama")
    model.save_pretrained(tmp_path / "Tiny")
    ids = torch.tensor([PROMPT])
    best = best_heads(tmp_path / "heads.json", 3, 4, 1)  # an eighth of 12
    expected = [
        generate(model, heads=heads, input_ids=ids, **GREEDY) for heads in (best, "1-0,1-3,2-2")
    ]
    empty = tmp_path / "empty"
    empty.mkdir()
    modules = str(tmp_path / "modules")
    hidden = dict(PYTHONPATH="", HF_MODULES_CACHE=modules, HF_HUB_OFFLINE="1")
    arguments = tmp_path / "Tiny", folder, json.dumps(GREEDY), json.dumps(PROMPT)
    run = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, arguments)],
        cwd=empty,
        env=os.environ | hidden,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    default, listed, wrong = run.stdout.splitlines()
    assert [json.loads(default), json.loads(listed)] == [x.tolist() for x in expected]
    assert wrong.startswith("0 mass scores of ")


def test_the_folder_follows_the_convention_of_custom_generate(folder):
    from huggingface_hub import ModelCard

    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and card.data.tags == ["custom_generate"]
    assert (card.data.base_model, card.data.license) == ("org/Tiny", "apache-2.0")
    for path in (folder / "custom_generate").glob("*.py"):
        imports = re.findall(r"^ *(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
        assert not {"hf", "heads", "runtime"} & {name.split(".")[0] for name in imports}
    signature = inspect.signature(generate)
    own = [name for name, x in signature.parameters.items() if x.kind is x.KEYWORD_ONLY]
    assert re.findall(r"^- `(\w+)`: .", card.content, re.MULTILINE) == own
    [example] = re.findall("```py\n(.*?)```", card.content, re.DOTALL)
    compile(example, "README.md", "exec")


def test_the_folder_wants_the_versions_of_transformers_that_are_tested():
    with open("pyproject.toml", "rb") as f:
        extra = tomllib.load(f)["project"]["optional-dependencies"]["transformers"]
    [tested] = [line for line in extra if line.startswith("transformers")]
    lines = hub.REQUIREMENTS.split()
    assert tested == ",".join(lines[2:]).replace(",transformers", ",")


def test_the_program_says_where_the_folder_goes_next(done, tmp_path):
    out = tmp_path / "a b"
    text, _ = done(hub.main, out, "--model HuggingFaceTB/SmolLM2-135M-Instruct")
    assert text == f"{out} is written; next: hf upload USER/REPOSITORY '{out}'\n"


REFUSED = """
. | is not a new or empty folder
NEW --model org/unknown | is neither a head file nor a model of heads/
NEW --heads README.md | README.md is not valid JSON
NEW --model org\\a\"\"\" | is not a model's name on the Hub
NEW --model org/name@main | is not a model's name on the Hub
NEW --model tests/golden | is not a model's name on the Hub
"""


@each("arguments, words", REFUSED)
def test_what_cannot_be_built_is_refused_and_nothing_is_written(
    refused, tmp_path, arguments, words
):
    new = tmp_path / "new"
    arguments = arguments.replace("NEW", str(new)).split()
    err = refused(hub.main, "--model HuggingFaceTB/SmolLM2-135M-Instruct", *arguments)
    assert words in err and not new.exists()
