"""Judges of TruthfulQA's answers: one asked over HTTP, one loaded here."""

import json
import math
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

import cli
import evaluate
from model import Transformer
from runtime.jsonl import locked
from tasks import convert_judge, judges
from tests.checkpoints import FAMILIES, random_weights, write_checkpoint, write_tokenizer
from tokenizer import Tokenizer


@pytest.fixture
def call(monkeypatch, capsys):
    """Run evaluate.py rescore → (status, JSON lines of standard output, standard error)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "rescore", "--task", "truthfulqa-gen", *map(str, args)])
        status = cli.run(evaluate.main)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err
    return run


class Judge(BaseHTTPRequestHandler):
    """True answers hold "Yes"; every answer is informative with 0.3. The first request finds the server busy."""
    asked, busy = [], [True]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.busy:
            self.busy.clear()
            return self.send_error(503)
        if body["model"] == "gone":
            return self.send_error(404)
        self.asked.append((body, self.headers["Authorization"]))
        yes = 0.3 if "Helpful" in body["prompt"] else 0.9 if "Yes" in body["prompt"] else None
        top = {" no": -0.1} | ({" yes": math.log(yes)} if yes else {})
        answer = json.dumps({"choices": [{"text": " no", "logprobs": {"top_logprobs": [top]}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(judges.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    Judge.asked, Judge.busy = [], [True]
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_an_endpoint_judges_and_its_verdicts_are_kept(call, server, tmp_path):
    path = tmp_path / "r.jsonl"
    answers = ["Yes. It", "Perhaps.", "no end"]
    rows = [{"id": i, "question": " Q? ", "prediction": answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, [out], err = call(path, "--judge-url", server, "--judge-models", "t,i")
    assert status == 0 and out["metrics"]["truth"] == pytest.approx(1 / 3) and out["metrics"]["info"] == 0
    prompts = sorted(body["prompt"] for body, _ in Judge.asked)
    assert prompts[1] == "Q: Q?\nA: .\nTrue:" and len(prompts) == 6
    body, key = Judge.asked[0]
    assert (body["max_tokens"], body["temperature"], body["logprobs"], key) == (1, 0, 2, "Bearer k3y")
    # Without a judge the kept verdicts are used, and an answered question is not asked again.
    assert call(path)[1] == [out] == call(path, "--judge-url", server, "--judge-models", "t,i")[1]
    assert len(Judge.asked) == 6
    assert "was judged by t, not by other" in call(path, "--judge-url", server, "--judge-models", "other,i")[2]


@pytest.fixture
def judged(tmp_path):
    """A run of two answers, one of them judged, and the file of verdicts."""
    path, store = tmp_path / "r.jsonl", tmp_path / "r.judged.jsonl"
    path.write_text("".join(json.dumps({"id": i, "question": "Q?", "prediction": "Yes."}) + "\n" for i in range(2)))
    store.write_text("".join(json.dumps({"judge": kind, "model": kind[0], "key": "0: Yes.", "yes": 0.4}) + "\n"
                             for kind in ("truth", "info")))
    return path, store


def test_a_judging_that_was_cut_off_goes_on(call, server, judged):
    path, store = judged
    whole = store.read_text()
    store.write_text(whole + '{"judge": "tru')
    status, [out], _ = call(path, "--judge-url", server, "--judge-models", "t,i")
    assert status == 0 and out["metrics"]["truth"] == 0.5 and len(Judge.asked) == 2
    assert store.read_text().startswith(whole) and len(list(map(json.loads, store.read_text().splitlines()))) == 4


@pytest.mark.parametrize("line", [
    "{}", '{"judge": "taste", "model": "t", "key": "1: Yes", "yes": 0.4}',
    '{"judge": "truth", "model": "t", "key": "1: Yes", "yes": "0.4"}',
    '{"judge": "truth", "model": "t", "key": "1: Yes", "yes": 4}', '{"judge": "truth", "key": "1: Yes", "yes": 0.4}'])
def test_verdicts_that_were_edited_are_named_by_line(call, server, judged, line):
    path, store = judged
    store.write_text(store.read_text() + line + "\n")
    for how in ((), ("--judge-url", server, "--judge-models", "t,i")):
        status, _, err = call(path, *how)
        assert status == 2 and f"{store}, line 3: no verdict of a judge" in err
    assert Judge.asked == []


def test_two_processes_do_not_judge_one_run(call, server, judged):
    path, store = judged
    with locked(store):
        status, _, err = call(path, "--judge-url", server, "--judge-models", "t,i")
    assert status == 2 and f"{store} is being written by another process" in err and Judge.asked == []


def test_an_endpoint_that_refuses_is_said_at_once(call, server, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": 1, "question": "Q", "prediction": "A."}\n')
    status, _, err = call(path, "--judge-url", server, "--judge-models", "gone,i")
    assert status == 2 and "did not answer (status 404" in err


def test_a_judge_loaded_here_gives_its_probability_of_yes(tmp_path):
    write_tokenizer(write_checkpoint(tmp_path, vocab_size=259, eos_token_id=257))
    ask = judges.local(str(tmp_path))
    tokenizer, loaded = Tokenizer.load(str(tmp_path)), Transformer.load(str(tmp_path))
    texts = ["Q: a\nA: b.\nTrue:", "Q: longer\nA: bb.\nTrue:"]
    expected = [loaded(torch.tensor([tokenizer.encode(text)]))[0, -1].softmax(-1)[tokenizer.encode(" ")[-1]].item()
                for text in texts]
    assert ask(texts) == pytest.approx(expected, rel=1e-4)


def test_a_judge_that_cannot_be_loaded_points_to_the_conversion(call, tmp_path):
    path, judge = tmp_path / "r.jsonl", tmp_path / "judge"
    path.write_text('{"id": 1, "question": "Q", "prediction": "A."}\n')
    judge.mkdir()
    status, _, err = call(path, "--judge", "--judge-models", f"{judge},i")
    assert status == 2 and f"python -m tasks.convert_judge {judge} FOLDER" in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def pickled(tmp_path_factory):
    """A tiny Llama as the open judges are kept: pytorch_model.bin and tokenizer.model."""
    spm = pytest.importorskip("sentencepiece", reason="in requirements-dev.txt")
    pytest.importorskip("google.protobuf", reason="in requirements-dev.txt")
    folder = tmp_path_factory.mktemp("judge")
    torch.save(random_weights(FAMILIES["llama2"] | {"vocab_size": 400}), folder / "pytorch_model.bin")
    config = FAMILIES["llama2"] | {"vocab_size": 400, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    texts = [f"Q: Why is it {n} miles to the sea?\tA: It is not.\tTrue: yes\tHelpful: no" for n in range(50)]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, bos_id=1, eos_id=2, unk_id=0, pad_id=-1, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2)
    special = {name: {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": True, "rstrip": False,
                      "single_word": False}
               for name, content in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))}
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, **special}))
    return folder


def test_a_converted_judge_reads_and_judges_as_its_pickles_do(pickled, tmp_path, monkeypatch):
    import sentencepiece
    import transformers
    monkeypatch.setattr(sys, "argv", ["convert_judge", str(pickled), str(tmp_path / "judge")])
    assert cli.run(convert_judge.main) == 0
    assert not list((tmp_path / "judge").glob("*.bin"))
    spm = sentencepiece.SentencePieceProcessor(model_file=str(pickled / "tokenizer.model"))
    tokenizer = Tokenizer.load(tmp_path / "judge")
    texts = ["Q: Why?\nA: Because it is 42 miles.\nTrue:", "Q: Is it?\nA: Zoë, no.\nHelpful:"]
    for text in texts:
        assert tokenizer.encode(text) == [1, *spm.encode(text)]
        assert tokenizer.encode(text + " yes")[len(tokenizer.encode(text))] == spm.encode("yes")[0]
    reference = transformers.LlamaForCausalLM.from_pretrained(pickled)
    expected = [reference(torch.tensor([[1, *spm.encode(text)]])).logits[0, -1].softmax(-1)[spm.encode("yes")[0]].item()
                for text in texts]
    assert judges.local(str(tmp_path / "judge"))(texts) == pytest.approx(expected, rel=1e-4)


def test_a_pickle_that_would_run_code_is_not_converted(pickled, tmp_path, monkeypatch, capsys):
    class Code:
        def __reduce__(self):
            return print, ("code was run",)
    shutil.copytree(pickled, tmp_path / "evil")
    torch.save({"model.embed_tokens.weight": Code()}, tmp_path / "evil" / "pytorch_model.bin")
    monkeypatch.setattr(sys, "argv", ["convert_judge", str(tmp_path / "evil"), str(tmp_path / "judge")])
    status, (out, err) = cli.run(convert_judge.main), capsys.readouterr()
    assert status == 2 and "code was run" not in out and err.count("\n") == 1
    assert not (tmp_path / "judge").exists()


def test_a_folder_that_holds_something_is_not_written_over(pickled, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").write_text("x")
    monkeypatch.setattr(sys, "argv", ["convert_judge", str(pickled), str(tmp_path)])
    assert cli.run(convert_judge.main) == 2 and "is not empty" in capsys.readouterr().err
