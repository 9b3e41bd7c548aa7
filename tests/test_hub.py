"""Downloads from a hub on the loopback interface: which files are requested, and what each failure prints.

huggingface_hub reads its environment when it is imported, so downloads run in processes of their own."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.weights import checkpoint_folder

ROOT = Path(__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
FILES = [*TEXT, INDEX, *WEIGHTS, "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth",
         "original/params.json", "onnx/model.safetensors", "README.md", "tokenizer.model"]

MODEL = """
import os, sys
from runtime.weights import checkpoint_folder
for case in sys.argv[1:]:
    name, weights, os.environ["HF_TOKEN"] = case.split(",")
    try:
        folder = checkpoint_folder(name, weights=weights == "weights")
        print(*sorted(path.name for path in folder.rglob("*") if not path.is_dir()))
    except OSError as error:
        print(error)
"""
DATA = """
import json, sys
from tasks import Home, sources
for home in sys.argv[1:]:
    try:
        path, commit = sources.from_hub(Home(*json.loads(home)))
        print(path.read_text(), commit)
    except (ValueError, OSError) as error:
        print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """What a download uses of the hub's interface, for open/model, gated/model (token "good") and open/data."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        self.server.paths.append(path)
        token = self.headers.get("Authorization")
        if "/down/model" in path:
            return self.answer(500, b"out of order")
        if "/datasets/open/data/resolve/" in path:
            name = path.split("/resolve/")[1].split("/", 1)[1]
            return self.answer(200, name.encode(), ETag=f'"{hashlib.sha256(name.encode()).hexdigest()}"')
        if not any(f"/{name}" in path for name in ("open/model", "gated/model")):
            return self.answer(401 if token is None else 404, b"", **{"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/"):         # the description of a gated repository is public, its files are not
            rows = {"id": path.removeprefix("/api/models/").split("/revision")[0], "sha": COMMIT, "siblings": []}
            if "/tree/" in path:
                rows = [{"type": "file", "path": f, "size": len(f), "oid": f"{i:040x}"} for i, f in enumerate(FILES)]
            return self.answer(200, json.dumps(rows).encode(), **{"Content-Type": "application/json"})
        if "gated" in path and token != "Bearer good":
            return self.answer(401 if token is None else 403, b"", **{"X-Error-Code": "GatedRepo"})
        name = path.split(f"/resolve/{COMMIT}/")[1]
        self.answer(200, name.encode(), ETag=f'"{FILES.index(name):040x}"')

    def answer(self, status, body, **headers):
        self.send_response(status)
        for key, value in (headers | {"X-Repo-Commit": COMMIT, "Content-Length": len(body)}).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """hub(script, *arguments, **environment) → the lines that the script prints."""
    server, folder = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub), tmp_path_factory.mktemp("hub")
    server.paths = []
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(script, *arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.upper().startswith("HF_") and "PROXY" not in k.upper()}
        clean |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(folder), "PYTHONPATH": ".",
                  "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run([sys.executable, "-c", script, *arguments], env=clean | environment, cwd=ROOT,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    run.paths = server.paths
    yield run
    server.shutdown()
    server.server_close()


def test_only_json_jinja_and_safetensors_are_downloaded_and_every_failure_is_one_line(hub):
    text, everything, missing, gated, wrong_token, right_token, down, malformed = hub(
        MODEL, "open/model,text,", "open/model,weights,", "open/modle,text,", "gated/model,text,",
        "gated/model,text,bad", "gated/model,text,good", "down/model,text,", "a/b--c,text,")
    assert text.split() == right_token.split() == sorted([*TEXT, INDEX])
    assert everything.split() == sorted([*TEXT, INDEX, *WEIGHTS])
    for name in ("pytorch_model.bin", "consolidated", "original/", "onnx/", "README.md", "tokenizer.model"):
        assert not any(name in path for path in hub.paths), name
    assert "open/modle is neither a folder nor a model on the hub" in missing and "check the spelling" in missing
    for line in (gated, wrong_token):
        assert "gated/model is gated: accept its terms at http://127.0.0.1:" in line and "HF_TOKEN" in line
    for line, name in ((down, "down/model"), (malformed, "a/b--c")):
        assert f"downloading {name} failed: check the connection and HF_HUB_OFFLINE" in line


def test_without_a_connection_the_cache_is_used(hub):
    hub(MODEL, "open/model,weights,")
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        cached, other = hub(MODEL, "open/model,weights,", "open/other,weights,", **environment)
        assert cached.split() == sorted([*TEXT, INDEX, *WEIGHTS])
        assert "downloading open/other failed: check the connection" in other and "give a folder" in other


@pytest.mark.parametrize("name", ["nothing-here", "./nothing", "/nothing/here", "~/nothing", "a/b/c", "a/", "a b", ""])
def test_a_name_that_is_neither_folder_nor_hub_id_never_reaches_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder nor a hub id"):
        checkpoint_folder(name)


def test_a_folder_is_returned_as_it_is_and_a_file_is_refused(tmp_path):
    assert checkpoint_folder(tmp_path) == checkpoint_folder(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ValueError, match="is a file: give the folder"):
        checkpoint_folder(tmp_path / "model.safetensors")


def test_a_data_sets_file_comes_from_its_home_with_the_commit_or_the_content_of_the_paper(hub):
    homes = [("open/data", "data/dev.parquet", COMMIT),
             ("open/data", "d.jsonl", "main", hashlib.sha256(b"d.jsonl").hexdigest()),
             ("open/data", "d.jsonl", "main", "0" * 64), ("other/data", "d.jsonl", COMMIT)]
    lines = hub(DATA, *map(json.dumps, homes))
    assert lines[:2] == [f"data/dev.parquet {COMMIT}", f"d.jsonl {COMMIT}"] and len(lines) == 4
    assert "open/data" in lines[2] and "other/data" in lines[3] and all("--data FILE" in line for line in lines[2:])
    assert any(path.endswith(f"/resolve/{COMMIT}/data/dev.parquet") for path in hub.paths)
