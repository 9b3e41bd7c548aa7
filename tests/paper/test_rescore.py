"""`evaluate.py rescore`: metrics of stored lines; and the judges of TruthfulQA's answers."""

import json
import shutil

import pytest
import sentencepiece
import torch

from model import Transformer
from paper import judges
from runtime.files import locked
from tests.checkpoints import FAMILIES, random_weights, write_checkpoint, write_lines


@pytest.fixture
def rescore(start):
    return lambda *arguments: start("rescore", "--task", "truthfulqa-gen", *arguments)


def write_run(folder, *answers):
    lines = []
    for i, answer in enumerate(answers):
        lines.append({"id": i, "question": " Q? ", "prediction": answer})
    return write_lines(folder / "r.jsonl", lines)


def test_runs_and_folders_of_runs_are_scored_again(start, chat_model, data, tmp_path):
    common = "--model", chat_model, "--method", "greedy", "--out", tmp_path
    _, [choice], _ = start(*common, *data["memotrap"])
    _, [text], _ = start(*common, *data["truthfulqa-gen"], "--max-new-tokens", 5)
    assert list(text["metrics"]) == ["rejection"]  # without a judge
    status, lines, _ = start("rescore", "--rows", choice["run"])
    assert status == 0 and lines[-1] == {"metrics": choice["metrics"], "n": 2}
    assert [row["id"] for row in lines[:-1]] == ["b-0", "b-1"]
    assert sum(row["micro"] for row in lines[:-1]) / 2 == choice["metrics"]["micro"]
    assert start("rescore", tmp_path)[1] == [choice, text]
    (tmp_path / "empty").mkdir()
    status, _, err = start("rescore", tmp_path / "empty")
    assert status == 2 and "empty holds no runs" in err


def test_rows_of_another_program_are_scored(start, tmp_path):
    line = {"id": "a", "prediction": "Paris", "references": ["paris"]}
    path = write_lines(tmp_path / "r.jsonl", [line])
    _, [out], _ = start("rescore", "--task", "popqa", path)
    names = ("exact_match", "substring_match", "substring_match_published")
    assert out == {"metrics": dict.fromkeys(names, 1.0), "n": 1}


ANSWER = {"prediction": "a", "references": ["a"]}


@pytest.mark.parametrize(
    "text, task, message",
    [
        (ANSWER | {"references": []}, "triviaqa", "line 1: field 'references' should"),
        (ANSWER | {"memory": "b"}, "nq-swap", "line 1: field 'memory'"),
        (
            {"scores_true": [0], "scores_false": [-1], "best_position": -1},
            "truthfulqa-mc",
            "line 1: field 'best_position' should be a whole number from 0, not '-1'",
        ),
        ('{"a": 1}\nnonsense\n{}\n', "triviaqa", "line 2: not JSON"),
        ("", "triviaqa", "holds no lines"),
        (ANSWER, "triviaqa --judge", "--judge has no effect on triviaqa"),
        ({"id": 1}, "", "give --task"),
        ('{"header": {"task": []}}\n{"index": 0}\n', "", "unknown task []"),
    ],
)
def test_rows_that_cannot_be_scored_are_named_by_line(start, tmp_path, text, task, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text if isinstance(text, str) else json.dumps(text) + "\n")
    options = f"--task {task}".split() if task else []
    status, _, err = start("rescore", *options, path)
    assert status == 2 and message in err and err.count("\n") == 1


# Judges


class Judge:
    """In place of `judges.load`. True answers contain "Yes"; p(informative) is 0.3."""

    def __init__(self):
        self.prompts = []

    def __call__(self, name):
        return self.probabilities

    def probabilities(self, prompts):
        self.prompts += prompts
        return [0.3 if "Helpful" in text else 0.9 * ("Yes" in text) for text in prompts]


@pytest.fixture
def judge(monkeypatch):
    judge = Judge()
    monkeypatch.setattr(judges, "load", judge)
    return judge


T_I = ("--judge", "--judge-models", "t,i")


def test_verdicts_are_stored_with_their_judges_and_no_answer_is_judged_twice(
    rescore, judge, tmp_path
):
    path = write_run(tmp_path, "Yes. It", "Perhaps.", "no end")
    _, [unjudged], err = rescore(path)
    assert list(unjudged["metrics"]) == ["rejection"] and "rescore --judge adds truth, info" in err
    _, [out], err = rescore(path, *T_I)
    assert out["metrics"]["truth"] == pytest.approx(1 / 3) and out["metrics"]["info"] == 0
    assert "adds" not in err
    prompts = []
    for word in ("True", "Helpful"):
        prompts += [f"Q: Q?\nA: {answer}\n{word}:" for answer in ("Yes.", "Perhaps.", ".")]
    assert judge.prompts == prompts
    assert rescore(path)[1] == [out] == rescore(path, *T_I)[1] and judge.prompts == prompts
    other = "--judge", "--judge-models", "other,i"
    assert "was judged by t, not by other" in rescore(path, *other)[2]
    assert "--judge-models has no effect without --judge" in rescore(path, *T_I[1:])[2]
    assert "give two names" in rescore(path, "--judge", "--judge-models", "t")[2]


def test_a_line_that_is_not_a_verdict_is_named(rescore, tmp_path):
    path = write_run(tmp_path, "Yes.")
    for verdict, cause in (({"judge": "truth"}, "'model'"), ({"model": "t", "yes": []}, "float")):
        store = write_lines(tmp_path / "r.judged.jsonl", [verdict])
        status, _, err = rescore(path)
        assert status == 2 and f"{store}, line 1: " in err and cause in err


def test_an_interrupted_judging_continues_and_two_processes_do_not_judge_one_run(
    rescore, judge, tmp_path
):
    path = write_run(tmp_path, "Yes.", "Yes.")
    store = tmp_path / "r.judged.jsonl"
    verdict = {"key": "0: Yes.", "yes": 0.4}
    write_lines(store, [verdict | {"judge": k, "model": k[0]} for k in ("truth", "info")])
    stored = store.read_text()
    store.write_text(stored + '{"judge": "tru')
    with locked(store):
        status, _, err = rescore(path, *T_I)
    assert status == 2 and f"{store} is being written by another process" in err
    assert judge.prompts == []
    status, out, err = rescore(path, *T_I)
    assert status == 0, err
    [out] = out
    assert out["metrics"]["truth"] == 0.5 and len(judge.prompts) == 2
    assert store.read_text().startswith(stored) and len(store.read_text().splitlines()) == 4


@pytest.fixture(scope="module")
def pickled(tmp_path_factory):
    """A tiny Llama in the format of the open judges: pytorch_model.bin and tokenizer.model."""
    folder = tmp_path_factory.mktemp("judge")
    config = FAMILIES["llama2"] | {"vocab_size": 400, "torch_dtype": "float32"}
    torch.save(random_weights(config), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    line = "Q: Why is it {} miles to the sea?\tA: It is not.\tTrue: yes\tHelpful: no"
    texts = map(line.format, range(50))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=-1,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_judge_stored_as_pickles_gives_its_probability_of_yes(pickled, rescore, tmp_path):
    answers = ("Because it is 42 miles.", "Zoë, no.")
    path = write_run(tmp_path, *answers)
    assert rescore(path, "--judge", "--judge-models", f"{pickled},{pickled}")[0] == 0
    lines = path.with_suffix(".judged.jsonl").read_text().splitlines()
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(pickled / "tokenizer.model"))
    same_weights = write_checkpoint(tmp_path / "m", "llama2", vocab_size=400)
    model = Transformer.load(same_weights)
    prompts = [f"Q: Q?\nA: {answer}\n{word}:" for word in ("True", "Helpful") for answer in answers]
    for prompt, line in zip(prompts, lines, strict=True):
        logits = model(torch.tensor([[1, *tokenizer.encode(prompt)]]))[0, -1]
        yes = logits.softmax(-1)[tokenizer.encode("yes")[0]].item()
        assert json.loads(line)["yes"] == pytest.approx(yes, rel=1e-4)  # float32 summation order


def test_a_pickle_that_would_run_code_is_not_read(pickled, rescore, tmp_path):
    class Code:
        def __reduce__(self):
            return print, ("code was run",)

    shutil.copytree(pickled, tmp_path / "evil")
    torch.save({"model.embed_tokens.weight": Code()}, tmp_path / "evil" / "pytorch_model.bin")
    names = f"{tmp_path / 'evil'},i"
    path = write_run(tmp_path, "A.")
    status, out, err = rescore(path, "--judge", "--judge-models", names)
    assert (status, out) == (2, []) and "code was run" not in err
    assert "evil cannot be loaded" in err
    assert len(err.splitlines()[-1]) < 400
