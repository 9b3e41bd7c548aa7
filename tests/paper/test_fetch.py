"""evaluate.py fetch: what it writes, checks, leaves and says, from a server on this machine."""

import hashlib
import json
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import evaluate
from paper import fetch
from paper.tasks import data, find_task

SOURCE = """
import nowhere

class Data:
    def other(self):
        questions.append("not of this function")

    def create_demo_text(self):
        contexts, questions, answers = [], [], []
        contexts.append("a " "text")
        questions.append(
            "q1"
        )
        answers.append("a1")
        contexts.append("b")
        # questions.append("left out")
        questions.append("q2")
        answers.append("a2")
        if self.chat:
            demos = [f"{question}" for question in questions]
        return demos

    def create_two_kinds(self):
        questions.append("q")
        if self.variation.startswith("cot_"):
            answers.append("Since … So the answer is: a")
        elif self.variation.startswith("direct_"):
            answers.append("a")
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        self.server.requests.append(self.path)


@pytest.fixture
def server(tmp_path):
    """A mirror of the folder tmp_path/mirror; `requests` are the paths that were asked for."""
    (tmp_path / "mirror").mkdir()
    handler = partial(Quiet, directory=tmp_path / "mirror")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.requests = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run(call, server, tmp_path, monkeypatch):
    """run(*options) → (status, stderr), with two files of two tasks."""
    text = b'{"document": "d", "summary": "s"}\n'
    git_id = hashlib.sha1(b"blob %d\0" % len(SOURCE.encode()) + SOURCE.encode()).hexdigest()
    files = (
        fetch.File("xsum", "xsum-1000.jsonl", "data/a b.jsonl", hashlib.sha256(text).hexdigest()),
        fetch.File("nq_swap", "demos.jsonl", "src/x.py", git_id, "create_demo_text"),
    )
    monkeypatch.setattr(fetch, "FILES", files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root = tmp_path / "mirror" / fetch.AUTHORS.removeprefix("https://")
    (root / "data").mkdir(parents=True)
    (root / "src").mkdir()
    (root / "data" / "a b.jsonl").write_bytes(text)
    (root / "src" / "x.py").write_text(SOURCE)
    mirror = f"http://127.0.0.1:{server.server_port}/"

    def run(*options):
        given = "fetch", tmp_path / "data", f"--mirror {mirror}"
        status, _, err = call(evaluate.main, *given, *options)
        return status, err

    run.root = root
    return run


def tree(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_files_and_demonstrations_are_written_once(run, server, tmp_path, monkeypatch):
    status, err = run()
    assert status == 0, err
    assert tree(tmp_path / "data") == ["nq_swap/demos.jsonl", "xsum/xsum-1000.jsonl"]
    demos = (tmp_path / "data/nq_swap/demos.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in demos] == [
        {"context": "a text", "question": "q1", "answer": "a1"},
        {"context": "b", "question": "q2", "answer": "a2"},
    ]
    server.requests.clear()
    monkeypatch.setattr(data, "demos_hash", lambda demos: find_task("nq-swap").demos_hash)
    assert run()[0] == 0 and server.requests == []
    (tmp_path / "data/xsum/xsum-1000.jsonl").write_text("changed")
    assert run("--task xsum")[0] == 0 and len(server.requests) == 1
    assert "document" in (tmp_path / "data/xsum/xsum-1000.jsonl").read_text()


def test_what_cannot_be_had_is_listed_and_the_rest_is_fetched(run, tmp_path):
    (run.root / "data" / "a b.jsonl").write_text("another file")
    status, err = run()
    assert status == 2 and "data/a b.jsonl is not the file that the paper used" in err
    assert "1 of 2 are missing, see above; the same command" in err
    assert err.count("xsum/xsum-1000.jsonl") == 1
    status, err = run("--task=")
    assert status == 2 and "unknown task ''" in err
    assert tree(tmp_path / "data") == ["nq_swap/demos.jsonl"]


def break_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "34")
    handler.end_headers()
    handler.wfile.write(b'{"document"')


def fill_disk(path, content):
    path.touch()
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    "place, name, function, words",
    [
        (Quiet, "do_GET", break_off, "a%20b.jsonl: the connection broke off"),
        (Path, "write_bytes", fill_disk, "xsum-1000.jsonl: No space left on device"),
    ],
)
def test_a_download_that_fails_is_one_line_and_no_file(
    run, tmp_path, monkeypatch, place, name, function, words
):
    monkeypatch.setattr(place, name, function)
    status, err = run("--task xsum")
    assert status == 2 and words in err
    assert list((tmp_path / "data").rglob("*")) in ([], [tmp_path / "data" / "xsum"])


def test_the_bar_moves_during_a_download(run, monkeypatch):
    moves = []
    monkeypatch.setattr(fetch.tqdm, "update", lambda bar, n: moves.append(n))
    monkeypatch.setattr(fetch, "CHUNK", 10)
    assert run("--task xsum")[0] == 0 and moves[:4] == [10, 10, 10, 4]


def test_the_hub_is_the_second_origin_of_a_data_file(run, tmp_path, monkeypatch):
    def hf_hub_download(repo, file, repo_type, revision, endpoint):
        assert (repo, repo_type) == ("akariasai/PopQA", "dataset")
        assert endpoint.endswith("/huggingface.co")
        path = tmp_path / "snapshots" / revision / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.pop(0))
        return path

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    file = fetch.File("popqa", "popqa-test.arrow", "data/none", "0" * 40)
    monkeypatch.setattr(fetch, "FILES", (file,))
    row = 'q\t["a"]\n'
    head = "question\tpossible_answers\n"
    texts = [head + row, "question\tanswers\n" + row, head + row * 14267]
    for words in (
        "test.tsv has 1 rows, not 14267; delete it",
        "test.tsv, line 2: possible_answers is missing",
    ):
        status, err = run("--task popqa")
        assert status == 2 and words in err and tree(tmp_path / "data") == []
    left = tmp_path / "data" / "popqa" / "test.tsv.draft"
    left.parent.mkdir(parents=True)
    left.write_text("of a killed process")
    assert run("--task popqa")[0] == 0
    assert tree(tmp_path / "data") == ["popqa/test.tsv"] and not left.exists()


def test_the_two_kinds_of_answers_are_told_apart_by_their_branches():
    file = fetch.File("musique", "demos.jsonl", "x.py", "", "create_two_kinds")
    assert fetch.demos_in_code(SOURCE, file) == [
        {"question": "q", "cot_answer": "Since … So the answer is: a", "direct_answer": "a"}
    ]
    with pytest.raises(ValueError, match="no demonstrations in nothing"):
        fetch.demos_in_code(SOURCE, file._replace(function="nothing"))


def test_metrics_fetches_models_judges_and_punkt(run, tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **how: fetched.append(name)
    )
    punkt = tmp_path / "mirror" / fetch.PUNKT.removeprefix("https://")
    punkt.parent.mkdir(parents=True)
    with zipfile.ZipFile(punkt, "w") as file:
        file.writestr("punkt_tab/english/x", "x")
    nltk = tmp_path / "nltk"
    monkeypatch.setattr("nltk.downloader.Downloader.default_download_dir", lambda _: str(nltk))
    monkeypatch.setattr(fetch, "FILES", ())
    assert run("--metrics")[0] == 0 and tree(nltk) == ["tokenizers/punkt_tab/english/x"]
    assert fetched == [
        "microsoft/deberta-xlarge-mnli",
        "bunsenfeng/FactKB",
        "roberta-base",
        "allenai/truthfulqa-truth-judge-llama2-7B",
        "allenai/truthfulqa-info-judge-llama2-7B",
    ]
