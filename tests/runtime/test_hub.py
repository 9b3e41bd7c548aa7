"""Downloads from a hub on the loopback interface: the files requested, the line for each failure.

huggingface_hub reads its environment when it is imported. So a second process downloads, once for
all tests."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from heads.reader import plain_name
from runtime.checkpoint import checkpoint_folder
from runtime.files import checkpoint_name
from tests.tables import rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT = """additional_chat_templates/default.jinja chat_template.jinja config.json
generation_config.json model.safetensors.index.json tokenizer.json tokenizer_config.json""".split()
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OTHERS = """pytorch_model.bin consolidated.safetensors original/consolidated.00.pth
original/params.json onnx/model.safetensors README.md tokenizer.model""".split()
FILES = [*TEXT, *WEIGHTS, *OTHERS]
HASH = hashlib.sha256(b"d.jsonl").hexdigest()
# Arguments of checkpoint_folder or of HubFile; after `stop` there is no connection.
CASES = f"""
text | ["open/model", false]
all | ["open/model", true]
pinned | ["open/model@v2", false]
half | ["open/model-half", false]
gated | ["gated/model", false]
error | ["down/model", false]
commit | ["open/data", "data/dev.parquet", "{COMMIT}"]
hash | ["open/data", "d.jsonl", "main", "{HASH}"]
other hash | ["open/data", "d.jsonl", "main", "{"0" * 64}"]
no data | ["other/data", "d.jsonl", "{COMMIT}"]
stop | []
cached | ["open/model", true]
not cached | ["open/other", true]
no weights | ["open/model-half", true]
"""
CASES = {name: json.loads(arguments) for name, arguments in rows(CASES)}
# What is said of those that fail; the reason of the first four comes first, in a few words.
FAILED = """
gated | HF_TOKEN
error | 500
not cached | connection
no weights | no connection
other hash | --data FILE
no data | --data FILE
"""
CLIENT = """
import json, os, sys, urllib.request
from runtime.checkpoint import checkpoint_folder
from paper.tasks import HubFile, data
lines = {}
for name, case in json.loads(sys.argv[1]).items():
    try:
        if name == "stop":
            urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/stop").read()
        elif "data" in case[0]:
            path, record = data.from_hub(HubFile(*case))
            lines[name] = f"{path.read_text()} {record['revision']}"
        else:
            paths = checkpoint_folder(*case).rglob("*")
            lines[name] = sorted(path.name for path in paths if not path.is_dir())
    except (ValueError, OSError) as error:
        lines[name] = str(error)
print(json.dumps(lines))
"""


def object_id(file):
    return f"{FILES.index(file):040x}"


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's interface that downloads use, for open/model and open/data."""

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.partition("/resolve/")[2].partition("/")[2]
        self.server.paths.append(path)
        if path == "/stop":
            self.server.shutdown()
            self.server.server_close()
            self.answer(200, b"")
        elif "down/model" in path:
            self.answer(500, b"out of order")
        elif "open/data" in path:
            self.answer(200, name.encode(), ETag=f'"{hashlib.sha256(name.encode()).hexdigest()}"')
        elif "open/model" not in path:
            self.answer(401, b"", **{"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/"):
            rows = {"id": "open/model", "sha": COMMIT, "siblings": []}
            if "/tree/" in path:
                rows = [dict(type="file", path=f, size=len(f), oid=object_id(f)) for f in FILES]
            self.answer(200, json.dumps(rows).encode(), **{"Content-Type": "application/json"})
        else:
            self.answer(200, name.encode(), ETag=f'"{object_id(name)}"')

    do_HEAD = do_GET

    def answer(self, status, body, **headers):
        self.send_response(status)
        headers |= {"X-Repo-Commit": COMMIT, "Content-Length": len(body)}
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_downloads_take_only_the_files_that_are_read_and_failures_are_one_line(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.paths = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    clean = {k: v for k, v in os.environ.items() if not re.match("HF_|.*PROXY", k.upper())}
    clean |= dict(
        HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
        HF_HOME=str(tmp_path),
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        PYTHONPATH=".",
    )
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, json.dumps(CASES)],
        env=clean,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    text, everything = (sorted(Path(file).name for file in x) for x in (TEXT, [*TEXT, *WEIGHTS]))
    assert lines["text"] == text and lines["all"] == lines["cached"] == everything
    assert lines["pinned"] == everything
    assert [path for path in server.paths if path.endswith(("/model/revision/v2", "/tree/v2"))]
    assert not [path for path in server.paths if path.endswith(tuple(OTHERS))]
    assert (lines["commit"], lines["hash"]) == (f"data/dev.parquet {COMMIT}", f"d.jsonl {COMMIT}")
    assert any(path.endswith(f"/resolve/{COMMIT}/data/dev.parquet") for path in server.paths)
    for name, words in rows(FAILED):
        assert CASES[name][0] in lines[name] and words in lines[name] and "\n" not in lines[name]
        if "data" not in name and "hash" not in name:
            _, _, rest = lines[name].partition(":")
            assert CASES[name][0] in rest and len(lines[name]) <= 200


def test_a_name_with_a_revision_is_the_model_of_that_name():
    assert checkpoint_name("Qwen/Qwen2.5-3B-Instruct@1a2b") == "Qwen/Qwen2.5-3B-Instruct"
    assert plain_name("meta-llama/Llama-2-7b-hf@main") == "llama-2-7b"


def test_a_cache_that_holds_only_the_tokenizer_is_named_when_there_is_no_connection(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **more: tmp_path)
    for offline in True, False:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        assert checkpoint_folder("org/name", weights=False) == tmp_path
        with pytest.raises(OSError, match="no connection .*: the cache has no safetensors files"):
            checkpoint_folder("org/name")


def test_the_folder_of_a_hub_id_in_the_cache_is_named(tmp_path):
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    with pytest.raises(ValueError, match="is the cache of a hub id: give org/name, or"):
        checkpoint_folder(tmp_path / "models--org--name")


@pytest.mark.parametrize(
    "name", ["nothing-here", "/nothing/here", "~/nothing", "a/b/c", "a/", "a b", "", "b/file"]
)
def test_a_name_that_is_neither_folder_nor_hub_id_never_reaches_the_hub(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="neither a folder nor a hub id"):
        checkpoint_folder(name)
