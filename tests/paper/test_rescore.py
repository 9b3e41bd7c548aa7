"""`evaluate.py rescore`: metrics of stored lines; and the judges of TruthfulQA's answers."""

import json
import shutil

import pytest
import sentencepiece
import torch

import evaluate
from model import Transformer
from paper import judges
from runtime.files import locked
from tests.checkpoints import FAMILIES, random_weights, write_checkpoint, write_json, write_lines
from tests.tables import each

T_I = "--judge --judge-models t,i"


@pytest.fixture
def rescore(start):
    """rescore(options, path) → status, objects, stderr."""
    return lambda options, path: start("rescore", *options.split(), path)


def write_run(folder, *answers):
    """A run of truthfulqa-gen."""
    lines = [{"header": {"task": "truthfulqa-gen"}}]
    for i, answer in enumerate(answers):
        lines.append({"index": i, "question": " Q? ", "prediction": answer})
    return write_lines(folder / "r.jsonl", lines)


def test_runs_and_folders_of_runs_are_scored_again(start, refused, chat_model, data, tmp_path):
    common = f"--model {chat_model} --method greedy --out {tmp_path}"
    _, [choice], _ = start(common, data["memotrap"])
    _, [text], _ = start(common, data["truthfulqa-gen"], "--max-new-tokens 5")
    assert list(text["metrics"]) == ["rejection"]  # without a judge
    _, [*lines, means], _ = start("rescore", "--rows", choice["run"])
    assert means == {"metrics": choice["metrics"], "n": 2}
    assert [line["id"] for line in lines] == ["b-0", "b-1"]
    assert sum(line["micro"] for line in lines) / 2 == means["metrics"]["micro"]
    assert start("rescore", tmp_path)[1] == [choice, text]
    (tmp_path / "empty").mkdir()
    assert "empty holds no runs" in refused(evaluate.main, "rescore", tmp_path / "empty")


def test_rows_of_another_program_are_scored(rescore, tmp_path):
    line = {"id": "a", "prediction": "Paris", "references": ["paris"]}
    _, [out], _ = rescore("--task popqa", write_lines(tmp_path / "r.jsonl", [line]))
    names = ("exact_match", "answer_contained", "answer_contained_published")
    assert out == {"metrics": dict.fromkeys(names, 1.0), "n": 1}


VERDICT = {"judge": "truth", "model": "t", "key": "k", "yes": 0.5}
UNFIT = """
--task triviaqa | {"prediction": "a", "references": []} | line 1: references is []; it must be
--task nq-swap | {"prediction": "a", "references": ["a"], "memory": 5} | line 1: memory is 5
--task truthfulqa-mc | {"scores_true": [0], "scores_false": [-1], "best_position": -1} | \
    best_position is -1; it must be a whole number from 0
--task triviaqa |  | holds no lines
--rows | {"prediction": "a", "references": ["a"]} | give --task
--rows | {"header": {"task": []}}\\n{"index": 0} | unknown task []
--task= | {"header": {"task": "truthfulqa-gen"}}\\n{"index": 0} | unknown task ''
--task triviaqa --judge | {"prediction": "a", "references": ["a"]} | --judge has no effect on triv
--task truthfulqa-gen --judge-models t | {"prediction": "a"} | give two names
--task truthfulqa-gen --judge-models o,i | {"prediction": "a", "question": "q"} | by t, not by o
"""


@each("options, line, words", UNFIT)
def test_what_cannot_be_scored_is_refused_in_one_line(refused, tmp_path, options, line, words):
    write_lines(tmp_path / "r.judged.jsonl", [VERDICT])
    path = tmp_path / "r.jsonl"
    path.write_text(line.replace(r"\n", "\n"))
    err = refused(evaluate.main, "rescore", *options.split(), path)
    assert err.count("\n") == 1 and words in err


# Judges


def questions(*answers):
    """What the judges read."""
    return [f"Q: Q?\nA: {answer}\n{word}:" for word in ("True", "Helpful") for answer in answers]


@pytest.fixture
def asked(monkeypatch):
    """The prompts that the judges read. True answers contain "Yes"; p(informative) is 0.3."""
    asked = []

    def probabilities(prompts):
        asked.extend(prompts)
        return [0.3 if "Helpful" in text else 0.9 * ("Yes" in text) for text in prompts]

    monkeypatch.setattr(judges, "load_judge", lambda name: probabilities)
    return asked


def test_verdicts_are_stored_and_no_answer_is_judged_twice(rescore, asked, tmp_path):
    path = write_run(tmp_path, "Yes. It", "Perhaps.", "no end")
    _, [unjudged], err = rescore("", path)
    assert list(unjudged["metrics"]) == ["rejection"] and "rescore --judge adds truth, info" in err
    _, [out], err = rescore(T_I, path)
    assert out["metrics"]["truth"] == pytest.approx(1 / 3) and out["metrics"]["info"] == 0
    assert "adds" not in err
    assert rescore("", path)[1] == [out] == rescore(T_I, path)[1]
    assert asked == questions("Yes.", "Perhaps.", ".")


def test_an_interrupted_judging_continues_and_two_processes_do_not_judge_one_run(
    rescore, asked, tmp_path
):
    path = write_run(tmp_path, "Yes.", "Yes.")
    store = tmp_path / "r.judged.jsonl"
    verdict = {"key": "0: Yes.", "yes": 0.4}
    write_lines(store, [verdict | {"judge": k, "model": k[0]} for k in ("truth", "info")])
    stored = store.read_text()
    store.write_text(stored + '{"judge": "tru')
    with locked(store):
        status, _, err = rescore(T_I, path)
    assert status == 2 and f"{store} is being written by another process" in err
    assert asked == []
    status, [out], _ = rescore(T_I, path)
    assert status == 0 and out["metrics"]["truth"] == 0.5 and len(asked) == 2
    assert store.read_text().startswith(stored) and len(store.read_text().splitlines()) == 4


@pytest.fixture(scope="module")
def pickled(tmp_path_factory):
    """A tiny Llama in the format of the open judges: pytorch_model.bin and tokenizer.model."""
    folder = tmp_path_factory.mktemp("judge")
    config = FAMILIES["llama2"] | {"vocab_size": 400, "torch_dtype": "float32"}
    torch.save(random_weights(config), folder / "pytorch_model.bin")
    write_json(folder / "config.json", config)
    line = "Q: Why is it {} miles to the sea?\tA: It is not.\tTrue: yes\tHelpful: no"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=map(line.format, range(50)),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", tokenizer)
    return folder


def test_a_judge_stored_as_pickles_gives_its_probability_of_yes(pickled, rescore, tmp_path):
    answers = ("Because it is 42 miles.", "Zoë, no.")
    path = write_run(tmp_path, *answers)
    assert rescore(f"--judge-models {pickled},{pickled}", path)[0] == 0
    lines = path.with_suffix(".judged.jsonl").read_text().splitlines()
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(pickled / "tokenizer.model"))
    model = Transformer.load(write_checkpoint(tmp_path / "m", "llama2", vocab_size=400))
    for prompt, line in zip(questions(*answers), lines, strict=True):
        logits = model(torch.tensor([[1, *tokenizer.encode(prompt)]]))[0, -1]
        yes = logits.softmax(-1)[tokenizer.encode("yes")[0]].item()
        assert json.loads(line)["yes"] == pytest.approx(yes, rel=1e-4)  # float32 summation order


def test_a_pickle_that_would_run_code_is_not_read(pickled, refused, tmp_path):
    class Code:
        def __reduce__(self):
            return print, ("code was run",)

    evil = shutil.copytree(pickled, tmp_path / "evil")
    torch.save({"model.embed_tokens.weight": Code()}, evil / "pytorch_model.bin")
    options = "rescore", f"--judge-models {evil},i"
    err = refused(evaluate.main, *options, write_run(tmp_path, "A."))
    assert "code was run" not in err
    assert "evil cannot be loaded" in err and len(err.splitlines()[-1]) < 400
