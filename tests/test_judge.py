"""Judges of TruthfulQA's answers, over HTTP and as a local model."""

import json
import math
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import sentencepiece
import torch

import evaluate
from model import Transformer
from runtime.jsonl import locked
from tasks import judges
from tests.checkpoints import FAMILIES, random_weights, write_checkpoint


@pytest.fixture
def rescore(call):
    """Runs evaluate.py rescore → (status, JSON lines of standard output, standard error)."""
    def run(*args):
        status, out, err = call(evaluate.main, "rescore", "--task", "truthfulqa-gen", *args)
        return status, [json.loads(line) for line in out.splitlines()], err
    return run


class Judge(BaseHTTPRequestHandler):
    """True answers hold "Yes"; every answer is informative with 0.3. At the first request the server is busy."""
    requests, busy = [], [True]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.busy:
            self.busy.clear()
            return self.send_error(503)
        if body["model"] == "gone":
            return self.send_error(404)
        self.requests.append((body, self.headers["Authorization"]))
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
    """The arguments for a judge over HTTP."""
    monkeypatch.setattr(judges.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    Judge.requests, Judge.busy = [], [True]
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield ["--judge-url", f"http://127.0.0.1:{server.server_port}/v1", "--judge-models"]
        server.shutdown()


def write_run(folder, *answers):
    rows = [{"id": i, "question": " Q? ", "prediction": answer} for i, answer in enumerate(answers)]
    (folder / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "r.jsonl"


def test_an_endpoint_judges_and_its_verdicts_are_stored(rescore, server, tmp_path):
    path = write_run(tmp_path, "Yes. It", "Perhaps.", "no end")
    status, [out], err = rescore(path, *server, "t,i")
    assert status == 0 and out["metrics"]["truth"] == pytest.approx(1 / 3) and out["metrics"]["info"] == 0
    prompts = sorted(body["prompt"] for body, _ in Judge.requests)
    assert prompts[1] == "Q: Q?\nA: .\nTrue:" and len(prompts) == 6
    body, key = Judge.requests[0]
    assert (body["max_tokens"], body["temperature"], body["logprobs"], key) == (1, 0, 2, "Bearer k3y")
    # Stored verdicts are used, also without a judge, and no question is sent twice.
    assert rescore(path)[1] == [out] == rescore(path, *server, "t,i")[1]
    assert len(Judge.requests) == 6
    assert "was judged by t, not by other" in rescore(path, *server, "other,i")[2]


@pytest.fixture
def half_judged(tmp_path):
    """A run of two answers and the file of verdicts, which holds those of the first answer."""
    store = tmp_path / "r.judged.jsonl"
    store.write_text("".join(json.dumps({"judge": kind, "model": kind[0], "key": "0: Yes.", "yes": 0.4}) + "\n"
                             for kind in ("truth", "info")))
    return write_run(tmp_path, "Yes.", "Yes."), store


def test_an_interrupted_judging_continues(rescore, server, half_judged):
    path, store = half_judged
    stored = store.read_text()
    store.write_text(stored + '{"judge": "tru')
    status, [out], _ = rescore(path, *server, "t,i")
    assert status == 0 and out["metrics"]["truth"] == 0.5 and len(Judge.requests) == 2
    assert store.read_text().startswith(stored) and len(list(map(json.loads, store.read_text().splitlines()))) == 4


def test_a_line_that_is_not_a_verdict_is_refused(rescore, server, half_judged):
    path, store = half_judged
    verdicts = store.read_text()
    for line in ("{}", '{"judge": "truth", "model": "t", "key": "1: Yes", "yes": 4}'):
        store.write_text(verdicts + line + "\n")
        for judge in ((), (*server, "t,i")):
            status, _, err = rescore(path, *judge)
            assert status == 2 and f"{store}, line 3: not a verdict of a judge" in err
    assert Judge.requests == []


def test_two_processes_do_not_judge_one_run(rescore, server, half_judged):
    path, store = half_judged
    with locked(store):
        status, _, err = rescore(path, *server, "t,i")
    assert status == 2 and f"{store} is being written by another process" in err and Judge.requests == []


def test_a_refusal_of_the_endpoint_ends_in_one_line(rescore, server, tmp_path):
    status, _, err = rescore(write_run(tmp_path, "A."), *server, "gone,i")
    assert status == 2 and "did not answer (HTTP Error 404" in err


@pytest.fixture(scope="module")
def pickled(tmp_path_factory):
    """A tiny Llama in the format of the open judges: pytorch_model.bin and tokenizer.model."""
    folder = tmp_path_factory.mktemp("judge")
    config = FAMILIES["llama2"] | {"vocab_size": 400, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    torch.save(random_weights(config), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    texts = [f"Q: Why is it {n} miles to the sea?\tA: It is not.\tTrue: yes\tHelpful: no" for n in range(50)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"), vocab_size=320, model_type="bpe",
        byte_fallback=True, bos_id=1, eos_id=2, unk_id=0, pad_id=-1, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2)
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>",
         "eos_token": "</s>", "unk_token": "<unk>"}))
    return folder


def test_a_judge_stored_as_pickles_gives_its_probability_of_yes(pickled, rescore, tmp_path):
    path = write_run(tmp_path, "Because it is 42 miles.", "Zoë, no.")
    assert rescore(path, "--judge", "--judge-models", f"{pickled},{pickled}")[0] == 0
    verdicts = [json.loads(line) for line in path.with_suffix(".judged.jsonl").read_text().splitlines()]
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(pickled / "tokenizer.model"))
    model = Transformer.load(write_checkpoint(tmp_path / "m", "llama2", vocab_size=400))       # the same weights
    prompts = [f"Q: Q?\nA: {answer}\n{word}:" for word in ("True", "Helpful")
               for answer in ("Because it is 42 miles.", "Zoë, no.")]
    for prompt, verdict in zip(prompts, verdicts, strict=True):
        logits = model(torch.tensor([[1, *tokenizer.encode(prompt)]]))[0, -1]
        yes = logits.softmax(-1)[tokenizer.encode("yes")[0]].item()
        assert verdict["yes"] == pytest.approx(yes, rel=1e-4)           # float32 summation order


def test_a_pickle_that_would_run_code_is_not_read(pickled, rescore, tmp_path):
    class Code:
        def __reduce__(self):
            return print, ("code was run",)
    shutil.copytree(pickled, tmp_path / "evil")
    torch.save({"model.embed_tokens.weight": Code()}, tmp_path / "evil" / "pytorch_model.bin")
    status, out, err = rescore(write_run(tmp_path, "A."), "--judge", "--judge-models", f"{tmp_path / 'evil'},i")
    assert status == 2 and out == [] and "code was run" not in err and "evil cannot be loaded" in err
