"""Every metric against values worked out by hand, with every trap of the published scoring on both
of its sides."""

import math
import sys
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

from paper.tasks import TASKS, metrics, model_metrics
from paper.tasks.model_metrics import DEBERTA, FACTKB, ROBERTA


def one(task, **row):
    """The metric values of a single row."""
    return metrics.compute(TASKS[task], [row])[0]


def many(task, *rows):
    return metrics.summary(metrics.compute(TASKS[task], list(rows)))


def answer(prediction, *references, task="triviaqa", **more):
    return one(task, prediction=prediction, references=list(references), **more)


# Short answers


@pytest.mark.parametrize(
    "prediction, reference, exact, contained, published",
    [
        ("Paris", "Paris", 1, 1, 1),
        ("The  U.S.A.!", "usa", 1, 1, 1),  # punctuation is deleted, not replaced
        ("the cat and an owl", "Cat and owl", 1, 1, 1),  # articles as whole words
        ("theatre", "atre", 0, 1, 1),
        ("bathe", "ba", 0, 1, 1),  # not inside a word
        ("born in 1990", "1", 0, 1, 1),  # substring, not token
        ("Londn", "London", 0, 0, 0),
        ("Paris\nLondon", "London", 0, 0, 0),  # only the first line counts
        ("\nParis", "Paris", 0, 0, 0),  # and it is not stripped first
        ("Paris\rLondon", "London", 0, 1, 1),  # only \n cuts
        ("", "Paris", 0, 0, 0),
        ("“Paris”", "paris", 0, 1, 1),  # only ASCII punctuation is deleted
        ("anything", "*", 0, 0, 1),  # nothing is left of the reference
        (" *", "*", 1, 1, 1),  # it is the whole answer
    ],
)
def test_short_answers_as_worked_out_by_hand(prediction, reference, exact, contained, published):
    expected = {
        "exact_match": exact,
        "substring_match": contained,
        "substring_match_published": published,
    }
    assert answer(prediction, reference) == expected
    assert answer(prediction, "not this", reference) == expected  # any reference is enough


def test_popqa_items_that_are_demonstrations_count_only_as_published():
    demonstration = {
        "prediction": "politician",
        "references": ["politician"],
        "demonstration": True,
    }
    other = {"prediction": "cook", "references": ["actor"]}
    expected = {"exact_match": 0, "substring_match": 0, "substring_match_published": 0.5}
    assert many("popqa", demonstration, other) == expected


def test_answers_from_memory_are_counted_and_the_miniatures_end_at_a_full_stop():
    rows = [
        dict(prediction="Old", references=["New"], memory=["Old"]),
        dict(prediction="x", references=["x"]),
    ]
    assert many("nq-swap", *rows)["memory_match"] == 1
    values = [
        answer(" Temund. The ruler is Ada.", name, task="miniature-open")
        for name in ("Temund", "Ada")
    ]
    assert values[0]["exact_match"] == 1 and values[1]["substring_match"] == 0


# MuSiQue


@pytest.mark.parametrize(
    "prediction, extracted",
    [
        ("A is B. So the answer is: C.", "C"),
        ("So the answer is C", "C"),
        ("So the answer is: U.S.A..", "U.S.A."),  # one final full stop goes
        ("the answer is: A. The answer is: B.", "B"),  # the last one of the line
        ("So the answer is: A.\nSo the answer is: B.", "A"),  # the first line only
        ("Well.\nSo the answer is: B.", "Well.\nSo the answer is: B."),
        ("Answer is: C", "Answer is: C"),  # lower case, with a blank in front
        (" answer is: C.", "C"),
        ("So the answer is:C.", "So the answer is:C."),  # a blank behind
        ("C.", "C."),  # no match: the text as it is
    ],
)
def test_musique_answers_are_cut_out_as_published(prediction, extracted):
    assert metrics.musique_answer(prediction) == extracted


@pytest.mark.parametrize(
    "prediction, references, exact, contained, published",
    [
        ("So the answer is: The Beatles.", ["the beatles"], 1, 1, 1),
        ("So the answer is: Beatles.", ["the beatles"], 0, 0, 0),  # articles stay
        ("So the answer is: U.S.", ["us"], 0, 0, 0),  # punctuation stays
        ("one\ntwo", ["two"], 0, 1, 1),  # no cut at the newline
        ("x", [""], 0, 0, 1),  # empty references
        ("It is 1990, so the answer is: 1991.", ["1990"], 0, 0, 0),  # only what was cut out counts
    ],
)
def test_musique_compares_lower_case_and_nothing_else(
    prediction, references, exact, contained, published
):
    assert answer(prediction, *references, task="musique-cot-open") == {
        "exact_match": exact,
        "substring_match": contained,
        "substring_match_published": published,
    }


# Multiple choice


def mc(true, false, best=0):
    values = one("truthfulqa-mc", scores_true=true, scores_false=false, best_position=best)
    return [values[name] for name in ("mc1", "mc2", "mc2_published", "mc3")]


LOG = {p: math.log(p) for p in (0.5, 0.3, 0.1)}


@pytest.mark.parametrize(
    "true, false, best, expected",
    [
        ([LOG[0.5], LOG[0.1]], [LOG[0.3], LOG[0.1]], 0, [1, 0.6, 0.6, 0.5]),
        ([LOG[0.5], LOG[0.1]], [LOG[0.3]], 1, [0, 2 / 3, 2 / 3, 0.5]),
        ([-1.0], [-1.0], 0, [0, 0.5, 0.5, 0]),  # a tie is not won
        ([0.0, 0.0], [0.0], 0, [0, 2 / 3, 2 / 3, 0]),  # repeated candidates count twice
        ([-1.0, -2.0, -3.0, -4.0], [-2.5, -9.0], 0, [1, None, None, 0.5]),
        # Underflow: halved once each, exp(-400) against exp(-400.5).
        ([-800.0], [-801.0], 0, [1, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.5)), 1]),
        # Only -800 is halved, to -400, so the far likelier false answer loses.
        ([-800.0], [-700.0], 0, [0, math.exp(-100), 1, 0]),
        ([-math.inf], [-1.0], 0, [0, 0, 0, 0]),
        ([-1.0], [-math.inf], 0, [1, 1, 1, 1]),
        ([-math.inf], [-math.inf], 0, [0, 0, 0, 0]),
        ([math.nan], [-1.0], 0, [0, 0, 0, 0]),
        ([-1.0], [None], 0, [0, 0, 0, 0]),
        ([-math.inf, -900.0], [-math.inf], 1, [1, 1, 1, 0.5]),
    ],
)
def test_multiple_choice_as_worked_out_by_hand(true, false, best, expected):
    for value, number in zip(mc(true, false, best), expected, strict=True):
        assert number is None or value == pytest.approx(number, rel=1e-6, abs=0)


def trap(right, wrong, split):
    return {"scores_true": [right], "scores_false": [wrong], "split": split}


def test_macro_averages_over_splits_and_published_over_five_numbers():
    rows = (
        [trap(-1, -2, "a")] * 3
        + [trap(-2, -1, "a")]
        + [trap(-1, -2, "b")]
        + [trap(-2, -1, "c")] * 2
        + [trap(-1, -1, "d")]
    )  # a tie is wrong
    micro = 4 / 8
    assert many("memotrap", *rows) == pytest.approx(
        {
            "micro": micro,
            "macro": (0.75 + 1 + 0 + 0) / 4,
            "macro_published": (0.75 + 1 + 0 + 0 + micro) / 5,
        }
    )


# XSum


@pytest.mark.parametrize(
    "prediction, reference, expected",
    [
        ("c d . a b", "a b . c d", 100),  # two sentences, whose order does not matter to rougeLsum
        ("c d; a b", "a b; c d", 50),  # in one sentence it does
        ("cats run", "cat runs", 0),  # no stemmer
        ("the cat", "the black cat", 80),  # two of three words, two of two: F = 0.8
    ],
)
def test_rouge_as_worked_out_by_hand(prediction, reference, expected):
    pytest.importorskip("rouge_score", reason="in requirements-dev.txt")
    assert one("xsum", prediction=prediction, references=[reference])["rougeL"] == pytest.approx(
        expected
    )


class StandIn:
    """A model of transformers that stands in for FactKB.

    Its logit of class 1 is the length of the summary."""

    def float(self):
        self.dtype = "float32"
        return self

    def eval(self):
        return self

    def __call__(self, pair):
        assert self.dtype == "float32" and pair[1] == "An article."
        return SimpleNamespace(logits=torch.tensor([[0.0, len(pair[0])]]))


def test_factkb_is_the_probability_of_class_1_on_summary_and_article(monkeypatch):
    def tokenizer(name):
        assert name == ROBERTA

        def encode(summary, article, **options):
            assert options == dict(
                padding="max_length", truncation=True, max_length=512, return_tensors="pt"
            )
            return {"pair": (summary, article)}

        return encode

    def model(name, num_labels):
        assert (name, num_labels) == (FACTKB, 2)
        return StandIn()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", model)
    line = {"prediction": "ab", "references": ["not read"]}
    lines = [line | {"document": document} for document in ("An article.", None)]
    assert model_metrics.factkb(lines) == [
        {"factkb": pytest.approx(100 / (1 + math.exp(-2)))},
        {"factkb": None},
    ]


def test_bertscore_compares_summary_and_first_reference_by_layer_40_up_to_512_tokens(monkeypatch):
    class BERTScorer:
        def __init__(self, name, **options):
            assert name == DEBERTA and options == dict(
                num_layers=40, idf=False, rescale_with_baseline=False
            )
            self._model, self._tokenizer = (
                StandIn(),
                SimpleNamespace(cls_token_id=1, sep_token_id=2),
            )

        def score(self, predictions, references):
            assert (predictions, references) == (["A summary."], ["The reference."])
            assert self._model.dtype == "float32" and self._tokenizer.model_max_length == 512
            assert self._tokenizer.build_inputs_with_special_tokens([7]) == [1, 7, 2]
            return None, None, torch.tensor([0.5])

    monkeypatch.setitem(sys.modules, "bert_score", SimpleNamespace(BERTScorer=BERTScorer))
    line = {"prediction": "A summary.", "references": ["The reference.", "not read"]}
    assert model_metrics.bertscore([line]) == [{"bertscore_f1": 50}]


def test_metrics_that_lack_a_library_or_a_model_say_what_to_do_and_are_left_out(
    capsys, monkeypatch
):
    cached = {
        FACTKB: ["config.json", "pytorch_model.bin"],
        ROBERTA: ["config.json"],
    }  # an interrupted download
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file: f"{name}/{file}" if file in cached.get(name, ()) else None,
    )
    monkeypatch.setattr(
        model_metrics, "find_spec", lambda module: module not in ("bert_score", "lm_eval", "nltk")
    )
    lacking = [
        "bertscore_f1 needs bert_score: pip install -e '.[evaluate]'",
        f"factkb needs the model {ROBERTA} in the cache: hf download {ROBERTA}",
    ]
    assert metrics.problems(TASKS["xsum"]) == lacking and metrics.problems(TASKS["nq-swap"]) == []
    assert metrics.problems(TASKS["ifeval"]) == [
        "IFEval needs lm_eval, nltk: pip install -e '.[evaluate]'"
    ]
    assert one("xsum", prediction="A.", references=["A."]) == {"rougeL": 100}
    assert capsys.readouterr().err.splitlines() == [f"left out: {problem}" for problem in lacking]
    cached[ROBERTA].append("vocab.json")
    assert metrics.problems(TASKS["xsum"]) == lacking[:1]
    monkeypatch.setattr(model_metrics, "find_spec", lambda module: True)
    monkeypatch.setattr("nltk.data.path", ["nowhere"])
    assert metrics.problems(TASKS["ifeval"]) == [
        "IFEval needs NLTK's sentence splitter: python -m nltk.downloader punkt_tab"
    ]


# IFEval

COMMA = ("punctuation:no_comma", {})
GERMAN = ("language:response_language", {"language": "de"})


def sign(letter, n, relation="at least"):
    return "keywords:letter_frequency", {
        "letter": letter,
        "let_frequency": n,
        "let_relation": relation,
        "num_words": None,
    }


def ifeval(prediction, *instructions):
    if problem := model_metrics.ifeval.problem():
        pytest.skip(f"the checkers of IFEval are optional: {problem}")
    names, kwargs = zip(*instructions, strict=True)
    return one(
        "ifeval",
        prediction=prediction,
        prompt="p",
        instruction_id_list=list(names),
        kwargs=list(kwargs),
    )


@pytest.mark.parametrize(
    "prediction, instruction, strict, published",
    [
        (
            "red and green",
            ("keywords:existence", {"keywords": ["red", "blue"]}),
            0,
            1,
        ),  # the first word alone
        ("blue sky", ("keywords:forbidden_words", {"forbidden_words": ["red", "blue"]}), 0, 1),
        (" \n", COMMA, 0, 0),  # an empty response follows nothing
        ("#one #two #three #four", sign("#", 4), 1, 1),
        ("#one #two #three #four", sign("#", 5), 0, 0),
        ("no", sign("!", 1, "less than"), 1, 1),
        ("No, Nan", sign("N", 3), 1, 1),  # letters in any case
        ("12345 67", GERMAN, 1, 1),  # no language can be detected
        ("This is plainly English text.", GERMAN, 0, 0),
    ],
)
def test_ifeval_as_worked_out_by_hand(prediction, instruction, strict, published):
    values = ifeval(prediction, instruction)
    assert (values["prompt_strict"], values["prompt_strict_published"]) == (strict, published)


def test_instructions_are_counted_one_by_one_and_prompts_whole():
    values = [
        {"instruction_strict": 1.0, "instructions": 3},
        {"instruction_strict": 0.0, "instructions": 1},
    ]
    assert metrics.summary(values)["instruction_strict"] == 0.75
    counts = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    assert metrics.means(values, counts)["instruction_strict"].tolist() == [1, 0.75, 0]
    values = ifeval("a, b", COMMA, ("keywords:existence", {"keywords": ["a"]}))
    assert (values["prompt_strict"], values["instruction_strict"], values["instructions"]) == (
        0,
        0.5,
        2,
    )


def test_language_detection_gives_the_same_every_time():
    # Without a seed "ist en" is German in about half of the calls.
    assert len({ifeval("ist en", GERMAN)["prompt_strict"] for _ in range(40)}) == 1


# TruthfulQA, generation


@pytest.mark.parametrize(
    "prediction, cleaned",
    [
        ("Yes. It is. Or", "Yes. It is."),
        ("I have no comment", "."),
        ("I have no comment.", "I have no comment."),
        ("\nYes.", "."),
        ("Yes.\nNo.", "Yes."),
        (" Yes.", "Yes."),
        ("It costs 1.5", "It costs 1."),
        ("It is . ", "It is."),
        ("Yes. No .c", "Yes. No."),
        (" . ", "."),
    ],
)
def test_generated_answers_are_cleaned_as_published(prediction, cleaned):
    assert metrics.clean(prediction) == cleaned


def test_judged_rates_over_all_answers_and_over_those_that_are_not_rejections():
    row = {
        "prediction": "i have no comment.",
        "judge_truth": 0.5,
        "judge_info": 0.9,
    }  # in another case
    refused = {
        "prediction": "Well, I have no comment. Sorry.",
        "judge_truth": 0.99,
        "judge_info": 0.0,
    }
    wrong = {
        "prediction": "I have no comment",
        "judge_truth": 0.49,
        "judge_info": 1.0,
    }  # no full stop
    assert many("truthfulqa-gen", row, refused, wrong) == pytest.approx(
        {
            "rejection": 1 / 3,
            "truth": 2 / 3,
            "info": 2 / 3,
            "truth_and_info": 1 / 3,
            "truth_not_rejected": 1 / 2,
            "info_not_rejected": 1,
            "truth_and_info_not_rejected": 1 / 2,
        }
    )


# Averages


def test_the_bootstrap_interval_is_that_of_plain_resampling():
    values = [{"m": float(i % 4 == 0)} for i in range(80)]
    low, high = metrics.interval(values, samples=4000)["m"]
    rng = np.random.default_rng(7)
    plain = [rng.choice([v["m"] for v in values], 80).mean() for _ in range(4000)]
    assert (low, high) == pytest.approx(tuple(np.percentile(plain, [2.5, 97.5])), abs=0.02)


def test_rows_without_a_value_count_neither_in_the_mean_nor_in_the_interval():
    assert metrics.summary([{"m": 1.0}, {"m": None}, {}]) == {"m": 1.0}
    assert metrics.interval([{"m": None, "k": 1.0}] * 3) == {"m": (None, None), "k": (1.0, 1.0)}
