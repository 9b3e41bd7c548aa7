"""A hub on the loopback interface: what is asked of it, and what a person reads when it says no.

huggingface_hub reads its environment when it is imported, so every case runs in a process of its own."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from runtime.files import one_line, read_json
from runtime.weights import checkpoint_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
         "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
         "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "original/params.json",
         "onnx/model.safetensors", "README.md", "tokenizer.model"]
TEXT = FILES[:5]
WEIGHTS = FILES[5:8]

SCRIPT = """
import sys
from runtime.weights import checkpoint_folder
try:
    folder = checkpoint_folder(sys.argv[1], weights=sys.argv[2] == "True")
    print(*sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()), sep="\\n")
except (ValueError, OSError) as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(2)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs: open/model, gated/model (token "good"), and nothing else."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        token = self.headers.get("Authorization")
        if "/down/model" in path:
            return self.answer(500, b"out of order")
        if not any(f"/{name}" in path for name in ("open/model", "gated/model")):
            return self.answer(401 if token is None else 404, b"", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/"):         # a gated repository's description is public, its files are not
            if "/tree/" in path:
                rows = [{"type": "file", "path": f, "size": len(f), "oid": f"{i:040x}"} for i, f in enumerate(FILES)]
            else:
                rows = {"id": path.removeprefix("/api/models/").split("/revision")[0], "sha": COMMIT, "siblings": []}
            return self.answer(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        if "gated" in path and token != "Bearer good":
            return self.answer(401 if token is None else 403, b"", {"X-Error-Code": "GatedRepo"})
        name = path.split(f"/resolve/{COMMIT}/")[1]
        self.answer(200, name.encode(), {"ETag": f'"{FILES.index(name):040x}"', "X-Repo-Commit": COMMIT})

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """fetch(name, weights, **environment) in a process of its own; fetch.asked lists the paths it asked for."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def fetch(name, weights=True, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.upper().startswith("HF_") and "PROXY" not in k.upper()}
        clean |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
                  "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.getcwd()}
        return subprocess.run([sys.executable, "-c", SCRIPT, name, str(weights)], env=clean | environment,
                              cwd=tmp_path, capture_output=True, text=True, timeout=180)

    fetch.asked = server.asked
    fetch.close = lambda: (server.shutdown(), server.server_close())
    yield fetch
    fetch.close()


def last_line(result):
    """The error, which must be one line; the library's own progress and warnings may stand above it."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.rstrip("\n").rpartition("\n")[2]


def test_only_json_jinja_and_safetensors_are_downloaded(hub):
    result = hub("open/model")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == sorted(TEXT + WEIGHTS)
    for unwanted in ("pytorch_model.bin", "consolidated", "original/", "onnx/", "README.md", "tokenizer.model"):
        assert not any(unwanted in path for path in hub.asked), unwanted


def test_without_weights_only_the_text_files_come_and_offline_uses_the_cache(hub):
    assert hub("open/model", weights=False).stdout.split() == sorted(TEXT + ["model.safetensors.index.json"])
    offline = hub("open/model", weights=False, HF_HUB_OFFLINE="1")
    assert offline.stdout.split() == sorted(TEXT + ["model.safetensors.index.json"]), offline.stderr


def test_a_gated_model_needs_its_terms_accepted_and_a_token(hub):
    for environment in ({}, {"HF_TOKEN": "bad"}):
        line = last_line(hub("gated/model", weights=False, **environment))
        assert line.startswith("OSError: gated/model is gated: accept its terms at http://127.0.0.1:")
        assert "HF_TOKEN" in line
    assert hub("gated/model", weights=False, HF_TOKEN="good").returncode == 0


def test_a_missing_model_says_so(hub):
    line = last_line(hub("open/modle"))
    assert "no such folder here and no such model on the hub" in line and "check the spelling" in line


def test_offline_and_not_in_the_cache_names_the_switch(hub):
    line = last_line(hub("open/model", HF_HUB_OFFLINE="1"))
    assert "open/model" in line and "HF_HUB_OFFLINE is set" in line and not hub.asked


def test_an_unreachable_hub_names_the_connection(hub):
    hub.close()
    line = last_line(hub("open/model"))
    assert "the hub could not be reached" in line and "give a folder" in line


def test_a_hub_out_of_order_is_one_line(hub):
    assert "down/model" in last_line(hub("down/model"))


@pytest.mark.parametrize("name", ["nothing-here", "./nothing", "/nothing/here", "~/nothing", "a/b/c", "a/", "a b", ""])
def test_a_name_that_is_neither_folder_nor_hub_id_never_reaches_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder here nor a hub id"):
        checkpoint_folder(name)


def test_names_that_only_the_hub_library_refuses_are_one_line_too():
    for name in ("a/-b", "a/b--c", "a/" + "b" * 200):
        with pytest.raises(ValueError, match="is no hub id") as error:
            checkpoint_folder(name)
        assert "\n" not in str(error.value)


def test_a_folder_is_returned_as_it_is_and_a_file_is_refused(tmp_path):
    assert checkpoint_folder(tmp_path) == checkpoint_folder(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ValueError, match="is a file: give the folder"):
        checkpoint_folder(tmp_path / "model.safetensors")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000, b""])
def test_json_that_is_no_object_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="config.json") as error:
        read_json(path)
    assert "\n" not in str(error.value)


def test_a_long_message_becomes_one_short_line():
    assert one_line("a\n  b") == "a b" and one_line(KeyError()) == "KeyError" and len(one_line("x" * 999)) == 301


# ---------------------------------------------------------------------------------------------------------- data sets


class DataSets(Hub):
    """One data set, whose every file holds its own name, at a commit and at main."""

    def do_GET(self):
        self.server.asked.append(self.path)
        _, found, name = self.path.partition("/datasets/open/data/resolve/")
        if not found:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        self.answer(200, name.split("/", 1)[1].encode(), {"ETag": '"abc"', "X-Repo-Commit": COMMIT})


FETCH = """
import json, sys
from tasks import Home, sources
try:
    path, commit = sources.from_hub(Home(*json.loads(sys.argv[1])))
    print(path.read_text(), commit)
except (ValueError, OSError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("home, expected", [
    (("open/data", "data/dev.parquet", COMMIT), f"data/dev.parquet {COMMIT}"),
    (("open/data", "d.jsonl", "main", hashlib.sha256(b"d.jsonl").hexdigest()), f"d.jsonl {COMMIT}"),
    (("open/data", "d.jsonl", "main", "0" * 64), "ValueError: d.jsonl of the hub data set open/data is not the file "
     "that the paper scores, it has changed there; give yours with --data FILE"),
    (("other/data", "d.jsonl", COMMIT), "OSError: cannot fetch d.jsonl of the hub data set other/data "
     "(RepositoryNotFoundError); give yours with --data FILE"),
], ids=["commit", "content", "another content", "missing"])
def test_a_data_sets_file_comes_from_its_home(tmp_path, home, expected):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), DataSets)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    clean = {k: v for k, v in os.environ.items() if not k.upper().startswith("HF_") and "PROXY" not in k.upper()}
    clean |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
              "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", FETCH, json.dumps(home)], env=clean, cwd=tmp_path, timeout=180,
                          capture_output=True, text=True)
    server.shutdown()
    server.server_close()
    assert (done.stdout or done.stderr).strip() == expected
    assert any(f"/resolve/{home[2]}/{home[1]}" in path for path in server.asked)
