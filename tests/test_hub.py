"""Downloads from a hub on the loopback interface: which files are requested, and what each failure prints.

huggingface_hub reads its environment when it is imported, so every case runs in its own process."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from runtime.weights import checkpoint_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
FILES = [*TEXT, INDEX, *WEIGHTS, "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth",
         "original/params.json", "onnx/model.safetensors", "README.md", "tokenizer.model"]

MODEL = """
import sys
from runtime.weights import checkpoint_folder
try:
    folder = checkpoint_folder(sys.argv[1], weights=sys.argv[2] == "True")
    print(*sorted(path.name for path in folder.rglob("*") if not path.is_dir()))
except OSError as error:
    sys.exit(str(error))
"""
DATA = """
import json, sys
from tasks import Home, sources
try:
    path, commit = sources.from_hub(Home(*json.loads(sys.argv[1])))
    print(path.read_text(), commit)
except (ValueError, OSError) as error:
    sys.exit(str(error))
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


@pytest.fixture
def hub(tmp_path):
    """hub(script, *arguments, **environment) → (status, standard output, last line of standard error)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.paths = []
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(script, *arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.upper().startswith("HF_") and "PROXY" not in k.upper()}
        clean |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
                  "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.getcwd()}
        done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], env=clean | environment,
                              cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]

    run.paths, run.close = server.paths, lambda: (server.shutdown(), server.server_close())
    yield run
    run.close()


def test_only_json_jinja_and_safetensors_are_downloaded_and_then_used_offline(hub):
    assert hub(MODEL, "open/model", False)[1].split() == sorted([*TEXT, INDEX])
    assert not any(path.endswith(".safetensors") for path in hub.paths)
    assert hub(MODEL, "open/model", True)[1].split() == sorted([*TEXT, INDEX, *WEIGHTS])
    for name in ("pytorch_model.bin", "consolidated", "original/", "onnx/", "README.md", "tokenizer.model"):
        assert not any(name in path for path in hub.paths), name
    assert hub(MODEL, "open/model", True, HF_HUB_OFFLINE="1")[1].split() == sorted([*TEXT, INDEX, *WEIGHTS])


def test_a_gated_model_needs_its_terms_accepted_and_a_token(hub):
    for environment in ({}, {"HF_TOKEN": "bad"}):
        status, _, line = hub(MODEL, "gated/model", False, **environment)
        assert status and "gated/model is gated: accept its terms at http://127.0.0.1:" in line and "HF_TOKEN" in line
    assert hub(MODEL, "gated/model", False, HF_TOKEN="good")[0] == 0


def test_every_failed_download_is_one_line_that_says_what_to_do(hub):
    status, _, line = hub(MODEL, "open/modle", True)
    assert status and "open/modle is neither a folder nor a model on the hub" in line and "check the spelling" in line
    for name, environment in (("down/model", {}), ("a/b--c", {}), ("open/model", {"HF_HUB_OFFLINE": "1"})):
        status, _, line = hub(MODEL, name, True, **environment)
        assert status and f"downloading {name} failed: check the connection and HF_HUB_OFFLINE" in line
    hub.close()
    status, _, line = hub(MODEL, "open/model", True)
    assert status and "downloading open/model failed: check the connection" in line and "give a folder" in line


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
    def fetch(*home):
        return hub(DATA, json.dumps(home))[1:]

    assert fetch("open/data", "data/dev.parquet", COMMIT) == (f"data/dev.parquet {COMMIT}", "")
    assert any(path.endswith(f"/resolve/{COMMIT}/data/dev.parquet") for path in hub.paths)
    digest = hashlib.sha256(b"d.jsonl").hexdigest()
    assert fetch("open/data", "d.jsonl", "main", digest) == (f"d.jsonl {COMMIT}", "")
    assert "d.jsonl" in fetch("open/data", "d.jsonl", "main", "0" * 64)[1]
    assert "--data FILE" in fetch("open/data", "d.jsonl", "main", "0" * 64)[1]
    assert "other/data" in fetch("other/data", "d.jsonl", COMMIT)[1]
