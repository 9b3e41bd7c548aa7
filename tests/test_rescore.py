"""`evaluate.py rescore`: metrics of stored rows, without a model; judges over HTTP and as local models."""

import json
import math
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import sentencepiece
import torch

import evaluate
from evaluation import judges
from model import Transformer
from runtime.files import locked
from tests.checkpoints import FAMILIES, random_weights, write_checkpoint, write_lines


@pytest.fixture
def start(call):
    """Runs evaluate.py. Returns the status, the objects of standard output, and standard error."""
    def run(*arguments):
        status, out, err = call(evaluate.main, *arguments)
        return status, [json.loads(line) for line in out.splitlines()], err
    return run


@pytest.fixture
def rescore(start):
    return lambda *arguments: start("rescore", "--task", "truthfulqa-gen", *arguments)


def write_run(folder, *answers):
    return write_lines(folder / "r.jsonl", [{"id": i, "question": " Q? ", "prediction": answer}
                                            for i, answer in enumerate(answers)])


def test_runs_and_folders_of_runs_are_scored_again(start, chat_model, data, tmp_path):
    _, [choice], _ = start("--model", chat_model, *data["memotrap"], "--method", "greedy", "--out", tmp_path)
    _, [text], _ = start("--model", chat_model, *data["truthfulqa-gen"], "--method", "greedy", "--max-new-tokens", 5,
                         "--out", tmp_path)
    assert list(text["metrics"]) == ["rejection"]               # without a judge
    status, lines, _ = start("rescore", "--rows", choice["run"])
    assert status == 0 and lines[-1] == {"metrics": choice["metrics"], "n": 2}
    assert [row["id"] for row in lines[:-1]] == ["b-0", "b-1"]
    assert sum(row["micro"] for row in lines[:-1]) / 2 == choice["metrics"]["micro"]
    assert start("rescore", tmp_path)[1] == [choice, text]
    (tmp_path / "empty").mkdir()
    status, _, err = start("rescore", tmp_path / "empty")
    assert status == 2 and "empty holds no runs" in err


def test_rows_of_another_program_are_scored_and_demonstrations_are_counted(start, tmp_path):
    row = {"id": "a", "prediction": "Paris", "references": ["paris"]}
    path = write_lines(tmp_path / "r.jsonl", [row])
    assert start("rescore", "--task", "popqa", path)[1] == [
        {"metrics": {"exact_match": 1.0, "substring_match": 1.0, "substring_match_published": 1.0}, "n": 1}]
    write_lines(path, [row | {"demonstration": True}] * 2)
    status, [out], err = start("rescore", "--task", "popqa", path)
    assert status == 0 and out["metrics"]["exact_match"] is None
    assert "2 of 2 items are demonstrations: only the published scores count them" in err


@pytest.mark.parametrize("text, task, message", [
    ('{"id": 1, "prediction": "a", "references": []}\n', ["--task", "triviaqa"], "line 1: field 'references' should"),
    ('{"prediction": "a", "references": ["a"], "memory": "b"}\n', ["--task", "nq-swap"], "line 1: field 'memory'"),
    ('{"scores_true": [0], "scores_false": [-1], "best_position": -1}\n', ["--task", "truthfulqa-mc"],
     "line 1: field 'best_position' should be a whole number from 0, not '-1'"),
    ('{"a": 1}\nnonsense\n{}\n', ["--task", "triviaqa"], "line 2: not JSON"),
    ("", ["--task", "triviaqa"], "holds no rows"),
    ('{"id": 1}\n', [], "give --task")])
def test_rows_that_cannot_be_scored_are_named_by_line(start, tmp_path, text, task, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    status, _, err = start("rescore", *task, path)
    assert status == 2 and message in err and err.count("\n") == 1


# Judges over HTTP

class Judge(BaseHTTPRequestHandler):
    """True answers hold "Yes"; every answer is informative with 0.3. At the first request the server is busy."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "gone" or not self.requests:
            self.requests.append(None)
            return self.send_error(404 if body["model"] == "gone" else 503)
        self.requests.append((body, self.headers["Authorization"]))
        yes = 0.3 if "Helpful" in body["prompt"] else 0.9 if "Yes" in body["prompt"] else None
        top = {" no": -0.1} | ({" yes": math.log(yes)} if yes else {})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"text": " no", "logprobs": {"top_logprobs": [top]}}]}).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """The arguments for a judge over HTTP."""
    monkeypatch.setattr(judges.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    Judge.requests = []
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield ["--judge-url", f"http://127.0.0.1:{server.server_port}/v1", "--judge-models"]
        server.shutdown()


def test_an_endpoint_judges_and_its_verdicts_are_stored(rescore, server, tmp_path):
    path = write_run(tmp_path, "Yes. It", "Perhaps.", "no end")
    status, [out], err = rescore(path, *server, "t,i")
    assert status == 0
    assert out["metrics"]["truth"] == pytest.approx(1 / 3) and out["metrics"]["info"] == 0
    assert Judge.requests[0] is None and len(Judge.requests) == 7       # the first was repeated
    (body, key), prompts = Judge.requests[1], sorted(body["prompt"] for body, _ in Judge.requests[1:])
    assert prompts[1] == "Q: Q?\nA: .\nTrue:"
    assert (body["max_tokens"], body["temperature"], body["logprobs"], key) == (1, 0, 2, "Bearer k3y")
    # Stored verdicts are used, also without a judge, and no question is sent twice.
    assert rescore(path)[1] == [out] == rescore(path, *server, "t,i")[1]
    assert len(Judge.requests) == 7
    assert "was judged by t, not by other" in rescore(path, *server, "other,i")[2]
    path.with_suffix(".judged.jsonl").unlink()
    status, _, err = rescore(path, *server, "gone,i")
    assert status == 2 and "did not answer (HTTP Error 404" in err
    assert "did not answer (nonnumeric port: 'x'" in rescore(path, "--judge-url", "http://127.0.0.1:x")[2]


def test_an_interrupted_judging_continues_unless_a_line_is_not_a_verdict(rescore, server, tmp_path):
    path, store = write_run(tmp_path, "Yes.", "Yes."), tmp_path / "r.judged.jsonl"
    write_lines(store, [{"judge": kind, "model": kind[0], "key": "0: Yes.", "yes": 0.4} for kind in ("truth", "info")])
    stored = store.read_text()
    for line in ("{}", '{"judge": "truth", "model": "t", "key": "1: Yes", "yes": 4}',
                 '{"judge": "truth", "model": [], "key": "1: Yes", "yes": 0.4}'):
        store.write_text(stored + line + "\n")
        for judge in ((), (*server, "t,i")):
            status, _, err = rescore(path, *judge)
            assert status == 2 and f"{store}, line 3: " in err and "(not a verdict of a judge" in err
    store.write_text(stored + '{"judge": "tru')
    with locked(store):
        status, _, err = rescore(path, *server, "t,i")
    assert status == 2 and f"{store} is being written by another process" in err and Judge.requests == []
    status, [out], _ = rescore(path, *server, "t,i")
    assert status == 0 and out["metrics"]["truth"] == 0.5 and len(Judge.requests) == 3
    assert store.read_text().startswith(stored) and len(list(map(json.loads, store.read_text().splitlines()))) == 4


# Judges as local models

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
    answers = ("Because it is 42 miles.", "Zoë, no.")
    path = write_run(tmp_path, *answers)
    assert rescore(path, "--judge", "--judge-models", f"{pickled},{pickled}")[0] == 0
    verdicts = [json.loads(line) for line in path.with_suffix(".judged.jsonl").read_text().splitlines()]
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(pickled / "tokenizer.model"))
    model = Transformer.load(write_checkpoint(tmp_path / "m", "llama2", vocab_size=400))        # the same weights
    prompts = [f"Q: Q?\nA: {answer}\n{word}:" for word in ("True", "Helpful") for answer in answers]
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
