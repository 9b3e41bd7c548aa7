"""Shared fixtures: calls of programs, a tiny chat model, small data sets of the benchmarks."""

import gc
import json
import os
import re
import shlex
import sys

import pytest
import torch

from cli.entry import run_program
from decore import Decoding
from model import Transformer
from runtime.progress import Bar
from tests.checkpoints import tiny, write_checkpoint, write_heads, write_lines, write_tokenizer
from tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)

torch.set_num_threads(1)  # several threads make tiny models slower
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start


def pytest_collection_finish():
    gc.freeze()  # later collections, as before each CUDA graph, skip the libraries


@pytest.fixture(autouse=True)
def no_standard_input(monkeypatch):
    with open(os.devnull) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a program in this process: call(main, *arguments) → (status, stdout, stderr). A text of
    several options is split as by a shell."""

    def run(main, *arguments):
        argv = [main.__module__.replace(".", "/") + ".py"]
        for text in map(str, arguments):
            argv += shlex.split(text) if re.match("--?[a-z-]+ ", text) else [text]
        monkeypatch.setattr(sys, "argv", argv)
        try:
            status = run_program(main)
        except SystemExit as end:  # after --help
            status = end.code or 0
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def start(call):
    """Runs evaluate.py. Returns the status, the objects of standard output, and standard error."""
    import evaluate  # slow, and few tests need it

    def run(*arguments):
        status, out, err = call(evaluate.main, *arguments)
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


@pytest.fixture(scope="session", params=["llama3", "mistral-window", "qwen2-window", "qwen3"])
def model(request, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("m"), request.param)


@pytest.fixture(params=["own", "transformers"])
def engine(request):
    """The class of models: ours, or that of transformers."""
    if request.param == "own":
        return Transformer
    return pytest.importorskip("hf").HFModel


@pytest.fixture
def moves(monkeypatch):
    """By how much bars have moved, each time."""
    out = []
    update = Bar.update

    def record(self, n=1):
        before = self.n
        update(self, n)
        out.append(self.n - before)

    monkeypatch.setattr(Bar, "update", record)
    return out


@pytest.fixture
def passes(monkeypatch):
    """The (B, T) of every pass."""
    shapes = []
    embedding = Transformer.embedding

    def record(self, ids):
        shapes.append(tuple(ids.shape))
        return embedding(self, ids)

    monkeypatch.setattr(Transformer, "embedding", record)
    return shapes


@pytest.fixture
def steps(monkeypatch):
    """How many tokens each step of a decoding reads."""
    widths = []
    step = Decoding.step

    def record(self, tokens):
        widths.append(tokens.shape[1])
        return step(self, tokens)

    monkeypatch.setattr(Decoding, "step", record)
    return widths


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A tiny Llama 3 of 3 layers and 4 heads."""
    return tiny(tmp_path_factory.mktemp("llama") / "llama3")


@pytest.fixture(scope="session")
def amateur(tmp_path_factory):
    """A smaller model of llama's vocabulary, of 2 layers and 2 heads."""
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    small = dict(num_hidden_layers=2, hidden_size=16, seed=5) | heads
    return tiny(tmp_path_factory.mktemp("amateur"), **small)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The folder of a tiny chat model of 3 layers and 4 heads, with the head scores heads.json."""
    folder = tmp_path_factory.mktemp("chat")
    write_checkpoint(folder, vocab_size=259, eos_token_id=257, max_position_embeddings=2048)
    write_tokenizer(folder, TEMPLATE)
    write_heads(folder / "heads.json")
    return folder


@pytest.fixture(scope="session")
def chat(chat_model):
    """That model and its tokenizer."""
    return Transformer.load(chat_model), Tokenizer.load(chat_model)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Task → its arguments --task, --data and --demos: files of a few rows."""
    folder = tmp_path_factory.mktemp("data")

    questions = []
    for i in range(7):
        question = f"how {'very ' * (7 * i % 5)}long {i}"
        questions.append({"question": question, "answers": [f"a{i}"]})
    swaps = []
    for i in range(5):
        swap = {"question": f"who is {i}", "org_answer": ["Old"], "sub_answer": ["New"]}
        swaps.append(swap | {"sub_context": f"{i} is New. " * (i % 3 + 1)})
    qa = write_lines(folder / "qa.jsonl", questions)
    swap = write_lines(folder / "swap.jsonl", swaps)
    demos = write_lines(
        folder / "demos.jsonl", [{"question": "q", "answer": "a", "context": "c"}] * 2
    )
    (folder / "2-b.csv").write_text(
        "prompt,classes,answer_index\nSay: one,\"[' two', ' three']\",1\nSo,\"[' x', ' yy']\",0\n"
    )
    (folder / "t.csv").write_text(
        "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
        "A,C,Why?,Because,Because; So,No; Never; Not,u\nA,C,Who?,I,I,You,u\n",
        encoding="utf-8-sig",
    )
    return {
        "nq-closed": f"--task nq-closed --data {qa} --demos {demos}",
        "nq-swap": f"--task nq-swap --data {swap} --demos {demos}",
        "memotrap": f"--task memotrap --data {folder}/2-b.csv",
        "truthfulqa-mc": f"--task truthfulqa-mc --data {folder}/t.csv --demos {demos}",
        "truthfulqa-gen": f"--task truthfulqa-gen --data {folder}/t.csv --demos {demos}",
    }


@pytest.fixture
def done(call):
    """Runs a program that must succeed: done(main, *arguments) → (stdout, stderr)."""

    def run(main, *arguments):
        status, out, err = call(main, *arguments)
        assert status == 0, err
        return out, err

    return run


@pytest.fixture
def refused(call):
    """Runs a program that must refuse: refused(main, *arguments) → stderr."""

    def run(main, *arguments):
        status, out, err = call(main, *arguments)
        assert (status, out) == (2, ""), err
        return err

    return run
