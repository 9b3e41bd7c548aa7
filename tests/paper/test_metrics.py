"""Every metric against values worked out by hand, with every trap of the published scoring on both
of its sides."""

import math
import sys
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

from paper.tasks import TASKS, metrics, model_metrics
from paper.tasks.model_metrics import FACTKB, ROBERTA
from tests.tables import cells, each


def one(task, **line):
    """The metric values of a single line."""
    return metrics.compute(TASKS[task], [line])[0]


def many(task, *lines):
    return metrics.summary(metrics.compute(TASKS[task], lines))


# Short answers


SHORT_ANSWERS = r"""
"triviaqa" | "The  U.S.A.!" | "usa" | 1 | 1 | 1  # punctuation is deleted, not replaced
"triviaqa" | "the cat and an owl" | "Cat and owl" | 1 | 1 | 1  # articles as whole words
"triviaqa" | "theatre" | "atre" | 0 | 1 | 1  # substring, not token
"triviaqa" | "\nParis" | "Paris" | 0 | 0 | 0  # only the first line counts, unstripped
"triviaqa" | "Paris\rLondon" | "London" | 0 | 1 | 1  # only \n cuts
"triviaqa" | "" | "*" | 0 | 0 | 1  # nothing is left of the reference
"triviaqa" | "“Paris”" | "paris" | 0 | 1 | 1  # only ASCII punctuation is deleted
"triviaqa" | " *" | "*" | 1 | 1 | 1  # it is the whole answer
"musique-cot-open" | "So the answer is: The Beatles." | "the beatles" | 1 | 1 | 1
"musique-cot-open" | "So the answer is: U.S." | "us" | 0 | 0 | 0  # punctuation stays
"musique-cot-open" | "one\ntwo" | "two" | 0 | 1 | 1  # no cut at the newline
"musique-cot-open" | "It is 1990, so the answer is: 1991." | "1990" | 0 | 0 | 0  # what was cut out
"miniature" | " Temund. The ruler is Ada." | "Temund" | 1 | 1 | 1  # ends at a full stop
"""


@each("task, prediction, reference, exact, contained, published", SHORT_ANSWERS, cells)
def test_short_answers_as_worked_out_by_hand(
    task, prediction, reference, exact, contained, published
):
    for references in ([reference], ["not this", reference]):  # any reference is enough
        values = one(task, prediction=prediction, references=references)
        values.pop("memory_match", None)
        assert values == {
            "exact_match": exact,
            "answer_contained": contained,
            "answer_contained_published": published,
        }


def test_popqas_demonstrations_count_only_as_published_and_lines_without_memory_not_at_all():
    shown = {"prediction": "politician", "references": ["politician"], "demonstration": True}
    other = {"prediction": "cook", "references": ["actor"]}
    assert many("popqa", shown, other) == {
        "exact_match": 0,
        "answer_contained": 0,
        "answer_contained_published": 0.5,
    }
    assert many("nq-swap", other | {"memory": ["Cook"]}, other)["memory_match"] == 1


CUT_OUT = r"""
"So the answer is C" | "C"
"So the answer is: U.S.A.." | "U.S.A."  # one final full stop goes
"the answer is: A. The answer is: B." | "B"  # the last one of the line
"So the answer is: A.\nSo the answer is: B." | "A"  # the first line only
"Well.\nSo the answer is: B." | "Well.\nSo the answer is: B."
"Answer is: C" | "Answer is: C"  # lower case, with a blank in front
" answer is: C." | "C"
"So the answer is:C." | "So the answer is:C."  # a blank behind
"""


@each("prediction, extracted", CUT_OUT, cells)
def test_musique_answers_are_cut_out_as_published(prediction, extracted):
    assert metrics.musique_answer(prediction) == extracted


# Multiple choice


# log p of true and of false answers, which of the true ones is the best → mc1, mc2, mc2 as
# published, mc3.
CHOICES = """
[log(0.5), log(0.1)] | [log(0.3), log(0.1)] | 0 | 1, 0.6, 0.6, 0.5
[log(0.5), log(0.1)] | [log(0.3)] | 1 | 0, 2 / 3, 2 / 3, 0.5
[0, 0] | [0] | 0 | 0, 2 / 3, 2 / 3, 0  # a tie is not won; repeated candidates count twice
[-800] | [-801] | 0 | 1, 1 / (1 + exp(-1)), 1 / (1 + exp(-0.5)), 1  # underflow: each halved once
[-800] | [-700] | 0 | 0, exp(-100), 1, 0  # only -800 is halved: the far likelier false one loses
[-inf] | [-inf] | 0 | 0, 0, 0, 0
[-1] | [None] | 0 | 0, 0, 0, 0
[-inf, -900] | [-inf] | 1 | 1, 1, 1, 0.5
"""


@each("cells", CHOICES)
def test_multiple_choice_as_worked_out_by_hand(cells):
    true, false, best, expected = (eval(cell, {**vars(math)}) for cell in cells)
    values = one("truthfulqa-mc", scores_true=true, scores_false=false, best_position=best)
    values = [values[name] for name in ("mc1", "mc2", "mc2_published", "mc3")]
    assert values == pytest.approx(expected, rel=1e-6, abs=0)


def test_macro_averages_over_splits_and_published_over_five_numbers():
    lines = []
    of_split = zip(sorted(metrics.SPLITS), [(1, 1, 1, -1), (1,), (-1, -1), (0,)], strict=True)
    for split, margins in of_split:
        for margin in margins:  # a tie is wrong
            lines.append({"scores_true": [margin], "scores_false": [0], "split": split})
    expected = {
        "micro": 4 / 8,
        "macro": (0.75 + 1 + 0 + 0) / 4,
        "macro_published": (0.75 + 1 + 0 + 0 + 4 / 8) / 5,
    }
    assert many("memotrap", *lines) == pytest.approx(expected)
    assert many("memotrap", *lines[:-1]) == pytest.approx({"micro": 4 / 7})  # a split is missing


# XSum


ROUGE = """
"c d . a b" | "a b . c d" | 100  # two sentences, whose order does not matter to rougeLsum
"c d; a b" | "a b; c d" | 50  # in one sentence it does
"cats run" | "cat runs" | 0  # no stemmer
"the cat" | "the black cat" | 80  # two of three words, two of two: F = 0.8
"""


@each("prediction, reference, expected", ROUGE, cells)
def test_rouge_as_worked_out_by_hand(prediction, reference, expected):
    values = one("xsum", prediction=prediction, references=[reference])
    assert values["rougeL"] == pytest.approx(expected)


def test_factkb_is_the_probability_of_class_1_on_summary_and_article(monkeypatch):
    library = Mock()
    monkeypatch.setitem(sys.modules, "transformers", library)
    tokenizer = library.AutoTokenizer.from_pretrained(ROBERTA)
    tokenizer.return_value = {"ids": 7}
    model = library.AutoModelForSequenceClassification.from_pretrained(FACTKB).float()
    model.return_value.logits = torch.tensor([[0.0, 2.0]])
    lines = [{"prediction": "A summary.", "document": text} for text in ("An article.", None)]
    first, second = model_metrics.factkb(lines)
    assert first["factkb"] == pytest.approx(100 / (1 + math.exp(-2))) and second["factkb"] is None
    [pair] = tokenizer.call_args_list
    assert pair.args == ("A summary.", "An article.") and pair.kwargs["max_length"] == 512


def test_bertscore_compares_summary_and_first_reference_by_layer_40_up_to_512_tokens(monkeypatch):
    library = Mock()
    monkeypatch.setitem(sys.modules, "bert_score", library)
    scorer = library.BERTScorer.return_value
    scorer.score.return_value = None, None, torch.tensor([0.5])
    tokenizer = scorer._tokenizer
    tokenizer.cls_token_id, tokenizer.sep_token_id = 1, 2
    line = {"prediction": "A summary.", "references": ["The reference.", "not read"]}
    assert model_metrics.bertscore([line]) == [{"bertscore_f1": 50}]
    assert library.BERTScorer.call_args.kwargs["num_layers"] == 40
    scorer.score.assert_called_once_with(["A summary."], ["The reference."])
    scorer._model.float.assert_called_once_with()
    assert tokenizer.model_max_length == 512
    assert tokenizer.build_inputs_with_special_tokens([7]) == [1, 7, 2]


def test_metrics_that_lack_a_library_or_a_model_say_what_to_do_and_are_left_out(
    capsys, monkeypatch
):
    # An interrupted download of roberta-base.
    cached = {f"{FACTKB}/pytorch_model.bin", f"{ROBERTA}/config.json"}
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda *names: path if (path := "/".join(names)) in cached else None,
    )
    missing = {"bert_score", "lm_eval", "nltk"}
    monkeypatch.setattr(model_metrics, "find_spec", lambda module: module not in missing)
    lacking = [
        "bertscore_f1 needs bert_score: pip install -e '.[evaluate]'",
        f"factkb needs the model {ROBERTA} in the cache: hf download {ROBERTA}",
    ]
    assert one("xsum", prediction="A.", references=["A."]) == {"rougeL": 100}
    assert capsys.readouterr().err.splitlines() == [f"left out: {problem}" for problem in lacking]
    [problem] = metrics.problems(TASKS["ifeval"])
    assert problem == "IFEval needs lm_eval, nltk: pip install -e '.[evaluate]'"
    missing.clear()
    monkeypatch.setattr("nltk.data.find", Mock(side_effect=LookupError))
    [problem] = metrics.problems(TASKS["ifeval"])
    assert "python -m nltk.downloader punkt_tab" in problem and "llama-index-core" in problem
    missing.add("bert_score")
    cached.add(f"{ROBERTA}/vocab.json")
    assert metrics.problems(TASKS["xsum"]) == lacking[:1]


# IFEval

COMMA = ("punctuation:no_comma", {})
GERMAN = ("language:response_language", {"language": "de"})


def ifeval(prediction, *instructions):
    if problem := model_metrics.ifeval.problem():
        pytest.skip(f"the checkers of IFEval are optional: {problem}")
    names, kwargs = map(list, zip(*instructions))
    line = dict(prompt="p", instruction_id_list=names, kwargs=kwargs)
    return one("ifeval", prediction=prediction, **line)


# Response, instruction, its arguments → strict, as published.
INSTRUCTIONS = """
"red and green" | "keywords:existence" | {"keywords": ["red", "blue"]} | 0 | 1  # the first alone
"blue sky" | "keywords:forbidden_words" | {"forbidden_words": ["red", "blue"]} | 0 | 1
" \\n" | "punctuation:no_comma" | {} | 0 | 0  # an empty response follows nothing
"#one #two #three #four" | "keywords:letter_frequency" | \
    {"letter": "#", "let_frequency": 4, "let_relation": "at least"} | 1 | 1
"#one #two #three #four" | "keywords:letter_frequency" | \
    {"letter": "#", "let_frequency": 5, "let_relation": "at least"} | 0 | 0
"no" | "keywords:letter_frequency" | \
    {"letter": "!", "let_frequency": 1, "let_relation": "less than"} | 1 | 1
"No, Nan" | "keywords:letter_frequency" | \
    {"letter": "N", "let_frequency": 3, "let_relation": "at least"} | 1 | 1  # in any case
"12345 67" | "language:response_language" | {"language": "de"} | 1 | 1  # none can be detected
"This is plainly English text." | "language:response_language" | {"language": "de"} | 0 | 0
"""


@each("prediction, name, arguments, strict, published", INSTRUCTIONS, cells)
def test_ifeval_as_worked_out_by_hand(prediction, name, arguments, strict, published):
    values = ifeval(prediction, (name, arguments | {"num_words": None}))
    assert (values["prompt_strict"], values["prompt_strict_published"]) == (strict, published)


def test_instructions_are_counted_one_by_one_and_prompts_whole():
    lines = [
        {"instruction_strict": 1.0, "instructions": 3},
        {"instruction_strict": 0.0, "instructions": 1},
    ]
    assert metrics.summary(lines)["instruction_strict"] == 0.75
    [(sums, weights)] = metrics.columns(lines, "instruction_strict")
    assert (sums.tolist(), weights.tolist()) == ([3, 0], [3, 1])
    values = ifeval("a, b", COMMA, ("keywords:existence", {"keywords": ["a"]}))
    expected = {"prompt_strict": 0, "instruction_strict": 0.5, "instructions": 2}
    assert values | expected == values


def test_language_detection_gives_the_same_every_time():
    # Without a seed "ist en" is German in about half of the calls.
    assert len({ifeval("ist en", GERMAN)["prompt_strict"] for _ in range(40)}) == 1


# TruthfulQA, generation


CLEANED = r"""
"Yes. It is. Or" | "Yes. It is."
"I have no comment" | "."
"\nYes." | "."
" Yes." | "Yes."
"It costs 1.5" | "It costs 1."
"It is . " | "It is."
"""


@each("prediction, cleaned", CLEANED, cells)
def test_generated_answers_are_cleaned_as_published(prediction, cleaned):
    assert metrics.clean(prediction) == cleaned


def test_judged_rates_over_all_answers_and_over_those_that_are_not_rejections():
    answers = {
        "i have no comment.": (0.5, 0.9),  # in another case
        "Well, I have no comment. Sorry.": (0.99, 0.0),  # the only rejection
        "I have no comment": (0.49, 1.0),  # no full stop
    }
    lines = []
    for answer, (truth, info) in answers.items():
        lines.append({"prediction": answer, "judge_truth": truth, "judge_info": info})
    assert many("truthfulqa-gen", *lines) == pytest.approx(
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


def test_lines_without_a_value_do_not_count():
    assert metrics.summary([{"m": 1.0}, {"m": None}, {}]) == {"m": 1.0}
    [(sums, weights)] = metrics.columns([{"m": None}, {"m": 1.0}, {}], "m")
    assert sums.tolist() == weights.tolist() == [0, 1, 0]
