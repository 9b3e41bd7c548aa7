"""Own questions: tables of every kind, prompts of one's own, runs and reports of them."""

import codecs
import csv
import json
import lzma
import math
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas
import pyarrow
import pytest
from pyarrow import parquet

import evaluate
from decoders.scoring import score
from decore import Greedy
from paper import fetch, running
from paper.report import figures, results, stored
from paper.tasks import TASKS, answers, data, metrics, prompts, with_prompt
from tests.checkpoints import read_lines, write_json, write_lines
from tests.tables import cells, each, rows

QA = TASKS["qa"]
ROWS = [
    {"question": "Who won?", "context": "Ann beat Bob, 3:1.", "answers": ["Ann", "Ann B."]},
    {"question": "What is 1 + 1?", "context": "", "answers": "2"},
]
SYSTEM = "Answer the question in a few words. If there is a context, answer from it."


def cell(value):
    return value if isinstance(value, str) else json.dumps(value)


def write_questions(path, questions=ROWS, separator=","):
    """A file of the kind that its name says → its path."""
    if path.suffix == ".parquet":
        table = pandas.DataFrame(questions)
        table["answers"] = [x if isinstance(x, list) else [x] for x in table.answers]
        table.to_parquet(path)
    elif path.suffix == ".json":
        write_json(path, questions)
    elif path.suffix == ".jsonl":
        write_lines(path, questions)
    else:
        table = pandas.DataFrame([{name: cell(row[name]) for name in row} for row in questions])
        # As a spreadsheet writes it.
        table.to_csv(path, sep=separator, index=False, encoding="utf-8-sig", lineterminator="\r\n")
    return path


def load(path, demos=None):
    """(items, demonstrations)"""
    items, _, demos, _ = data.load_data(QA, path, demos)
    return items, demos


def chat_of(task, item, demos=(), with_context=True):
    messages = prompts.messages(task, item, list(demos), "chat", with_context)
    return [message["content"] for message in messages]


@pytest.fixture
def refusal(refused):
    """refusal(path, *options) → the last line of evaluate.py's refusal of a file of questions."""

    def run(path, *options):
        qa = f"--task qa --data {path} --dry-run"
        return refused(evaluate.main, qa, *options).splitlines()[-1]

    return run


# Files


@pytest.mark.parametrize(
    "kind", ["csv ,", "csv ;", "csv \t", "tsv \t", "jsonl ", "json ", "parquet "]
)
def test_questions_are_the_same_from_every_kind_of_file(tmp_path, kind):
    suffix, _, separator = kind.partition(" ")
    items, _ = load(write_questions(tmp_path / f"q.{suffix}", separator=separator))
    first = dict(id=0, question="Who won?", context="Ann beat Bob, 3:1.")
    second = dict(id=1, question="What is 1 + 1?", context="")
    assert items == [first | dict(references=["Ann", "Ann B."]), second | dict(references=["2"])]


def test_an_id_is_kept_and_a_context_of_blanks_or_null_is_empty(tmp_path):
    contexts = None, " \n", "c"
    others = dict(key=9, question_id=8)
    lines = [ROWS[0] | others | {"context": text, "id": f"a{text}"} for text in contexts]
    items, _ = load(write_lines(tmp_path / "q.jsonl", lines))
    assert [item["context"] for item in items] == ["", "", "c"]
    assert [item["id"] for item in items] == ["aNone", "a \n", "ac"]


def test_cells_of_any_length_are_read_and_rows_of_empty_cells_are_not(tmp_path):
    text = "0123456789" * 20_000  # longer than the csv module's limit
    path = tmp_path / "q.csv"
    path.write_text(f'question,context,answers\nWho?,"{text}",Ann\n,,\nWhy?,"two\nlines",So\n,,\n')
    items, _ = load(path)
    assert [item["context"] for item in items] == [text, "two\nlines"]


WRONG_FILES = r"""
q.csv | question,context,answers\nWho?,a, b,Ann\n | line 2 has not as many cells
q.csv | question;context;answers\nWho?;a; b\nWho?;a\n | cell that contains ';' must
q.csv | question,context,answers\nWho?,"a,b\n | unexpected end of data
q.csv | question,context,answers\nWho?,\xe9,a\n | save the table as “CSV UTF-8”
q.csv | question,passage,answers\nWho?,a,b\n | context is missing (found: quest
q.csv | question,context,answers\n ,a,b\n | line 2: field 'question' is empty
q.csv | question,context,answers\nWho?,a,\n | line 2: field 'answers' is empty
q.csv | question,context,answers\nWho?,a,"['b', 'c']"\n | is not a JSON list, as
q.csv | question,context,answers\nWho?,a,"[""b"", 1]"\n | it must be a list of texts
q.json | {"question": {}} | q.json must contain a JSON list of objects
q.json | [{"question": 1}] | q.json, line 1: question is 1; it must be a text
q.json | [{"question": "", "x": NaN}] | q.json, line 1: NaN is not a number in JSON
q.jsonl | {"question": "", "id": NaN} | q.jsonl, line 1: not JSON in UTF-8 (NaN is not a number
q.xlsx | x | unknown kind of file; known: .csv, .tsv (a spreadsheet is saved as one)
"""


@each("file, content, words", WRONG_FILES)
def test_a_file_that_is_not_right_is_refused_in_one_line(refusal, tmp_path, file, content, words):
    path = tmp_path / file
    path.write_bytes(codecs.decode(content, "unicode_escape").encode("latin-1"))
    last = refusal(path)
    assert words in last and str(path) in last


@pytest.mark.parametrize(
    "value", [date(2026, 1, 1), Decimal("1.5"), b"a", ["a"], {"a": 1}, math.nan, True]
)
def test_an_id_that_a_run_cannot_store_is_refused_before_decoding(refusal, start, tmp_path, value):
    path = tmp_path / "q.parquet"
    for name in "id", "ignored":
        lines = [row | {"answers": ["Ann"], name: value} for row in ROWS]
        parquet.write_table(pyarrow.Table.from_pylist(lines), path)
        if name == "id":
            assert "q.parquet, line 1: " in refusal(path)
    assert start(f"--task qa --data {path} --dry-run")[0] == 0


def test_a_text_in_brackets_is_a_list_of_texts_or_refused(tmp_path):
    texts = ('["[0, 1]"]', "[1]: a note", "x[1]", ' [ "a" ]\n')
    lines = [ROWS[0] | {"answers": text} for text in texts]
    items, _ = load(write_questions(tmp_path / "q.csv", lines))
    assert [item["references"] for item in items] == [["[0, 1]"], ["[1]: a note"], ["x[1]"], ["a"]]
    for text in ("[0, 1]", "[“23”, “23 days”]", "[„a“", "[a, b]", "['a', 'b']"):
        with pytest.raises(ValueError, match="list of texts|is not a JSON list"):
            load(write_questions(tmp_path / "q.csv", [ROWS[0] | {"answers": text}]))


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, kind):
    names = ["question", "context", "answers", "answers"]
    path = tmp_path / f"q.{kind}"
    row = json.dumps(dict.fromkeys(names, "x")).replace("}", ', "answers": "y"}')
    if kind == "arrow":
        table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 4, names)
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        path.write_text({"csv": f"{','.join(names)}\na,b,c,d\n", "json": f"[{row}]"}.get(kind, row))
    with pytest.raises(ValueError, match=f"q.{kind}.* 'answers'"):
        load(path)
    if kind == "csv":  # columns at the end without a name, as spreadsheets write them
        path.write_text("question,context,answers,,\na,b,c,,\n")
        assert load(path)[0][0]["references"] == ["c"]


def test_a_folder_without_the_file_says_which_file_is_looked_for(refusal, start, tmp_path):
    looked_for = """
qa | (qa.csv, qa.tsv, qa.jsonl, qa.json, qa.parquet); name one with --data
nq-swap | (dev-*.parquet, data/dev-*.parquet, there or in nq_swap/); evaluate.py fetch
"""
    for task, words in rows(looked_for):
        assert f"{tmp_path}: no file for {task} {words}" in refusal(tmp_path, f"--task {task}")
    write_questions(tmp_path / "qa.csv")
    assert len(start(f"--task qa --data {tmp_path} --dry-run")[1]) == 2


# Prompts


def test_the_prompt_leaves_out_an_empty_context(tmp_path):
    (full, empty), _ = load(write_questions(tmp_path / "q.csv"))
    assert chat_of(QA, full) == [SYSTEM, "Context: Ann beat Bob, 3:1.\nQuestion: Who won?\nAnswer:"]
    assert chat_of(QA, full, with_context=False) == [SYSTEM, "Question: Who won?\nAnswer:"]
    assert chat_of(QA, empty) == [SYSTEM, "Question: What is 1 + 1?\nAnswer:"]
    assert chat_of(QA, empty) == chat_of(QA, empty, with_context=False)
    text = prompts.plain_text(QA, full, [])
    assert text == f"{SYSTEM}\n\nContext: Ann beat Bob, 3:1.\nQuestion: Who won?\nAnswer:"


TEMPLATES = r"""
Read.\n\n# {context}\n\nQ {question} {{x}}\n | Read.\n\n# C\n\nQ Who? {x} | Read.\n\nQ Who? {x}
{question}\nUse: {context}\nSo: | Who?\nUse: C\nSo: | Who?\nSo:
{question}\n\nUse: {context}\n | Who?\n\nUse: C | Who?
{question} | Who? | none
"""


@each("cells", TEMPLATES)
def test_a_template_without_context_lacks_the_line_of_the_context(tmp_path, cells):
    template, expected, without = (cell.replace(r"\n", "\n") for cell in cells)
    (tmp_path / "t.txt").write_text(template)
    task = with_prompt(QA, tmp_path / "t.txt", "")
    item = {"question": "Who?", "context": "C"}
    assert chat_of(task, item) == [expected]
    if without == "none":
        assert task.without_context == ""
    else:
        assert chat_of(task, item, with_context=False) == [without]
        assert chat_of(task, item | {"context": ""}) == [without]


WRONG_TEMPLATES = r"""
{Context}\n{question} | must name {question} once
{context} | (found: context)
Nothing | (found: neither)
{context} {question} | on another line
{context}\n{context}\n{question} | at most once
a } {question} | Single '}'
{context:>5}\n{question} | without a format
{context}\n{question!r} | without a format
"""


@each("template, words", WRONG_TEMPLATES)
def test_a_template_that_is_not_right_is_refused(refusal, tmp_path, template, words):
    path = tmp_path / "t.txt"
    path.write_text(template.replace(r"\n", "\n"))
    last = refusal(write_questions(tmp_path / "q.csv"), f"--template {path}")
    assert words in last and f"error: {path}" in last


def test_a_template_is_a_file_and_it_and_the_system_prompt_are_of_own_questions(refusal, tmp_path):
    path = write_questions(tmp_path / "q.csv")
    last = refusal(path, "--template 'Q: {question}'")
    assert "--template takes a file: write 'Q: {question}' in one" in last
    for option in ("--template", "--system"):
        last = refusal(path, f"--task miniature {option} x")
        assert f"{option} has no effect on miniature" in last


def test_demonstrations_are_rows_like_the_data_and_come_from_demos_alone(tmp_path, capsys):
    path = write_questions(tmp_path / "qa.csv")
    write_questions(tmp_path / "demos.jsonl")
    assert load(tmp_path)[1] == []
    (item, _), demos = load(path, path)
    one, other = (chat_of(QA, row)[1] for row in ROWS)
    assert chat_of(QA, item, demos)[1:5] == [one, "Ann", other, "2"]
    assert capsys.readouterr().err.endswith("qa: 2 demonstrations (file qa.csv)\n")


@pytest.mark.parametrize("column", ["answers", "memory"])
def test_cells_that_look_like_lists_are_named_with_the_form_of_a_list(tmp_path, capsys, column):
    row = {"question": "?", "context": "", "answers": "Nice", "memory": "Paris"}
    typed = row | {column: "Lyon; the city of Lyon"}
    load(write_questions(tmp_path / "q.csv", [row] * 8 + [typed] * 2))
    assert (
        f"2 of 10 rows have one answer with ; or | in {column}, such as row 9, 'Lyon; the city of "
        'Lyon\'; several answers are a JSON list: ["Lyon", "the city of Lyon"]\n'
    ) in capsys.readouterr().err
    load(write_questions(tmp_path / "q.csv", [row] * 9 + [typed]))
    load(write_questions(tmp_path / "q.csv", [row | {column: ["Lyon;", "Lyon"]}]))
    assert "JSON" not in capsys.readouterr().err


# Metrics


PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"


def cases(heading):
    """The rows of a table of the page: for each cell the texts in backquotes."""
    table = PAGE.read_text("utf-8").partition(f"| {heading} |")[2].partition("\n\n")[0]
    table = re.sub(r"\\u(....)", lambda code: chr(int(code[1], 16)), table)
    lines = [line.split(" |")[:-1] for line in table.splitlines()[2:]]
    return [[re.findall("`([^`]*)`", cell) for cell in line] for line in lines]


@pytest.mark.parametrize("reference, same, inside, other", cases("reference"))
def test_answers_are_the_same_as_the_page_says(reference, same, inside, other):
    """Whether the name is the passage's or the memorised one."""
    for texts, exact, contained in (same, 1, 1), (inside, 0, 1), (other, 0, 0):
        for text in texts:
            line = {"prediction": text, "references": ["x y z", *reference]}
            [values] = metrics.compute(QA, [line])
            assert (values["exact_match"], values["answer_contained"]) == (exact, contained), text
            if exact:
                assert answers.same(*reference, text) and values["f1"] == 1
            sides = {"passage": (reference, ["x y z"]), "memory": (["x y z"], reference)}
            for kind, names in sides.items():
                assert answers.source_of(text, *names) == (kind if contained else "neither"), text


@pytest.mark.parametrize("sentence, rest", cases("first sentence"))
def test_the_first_sentence_ends_where_the_page_says(sentence, rest):
    text = " ".join(sentence + rest)
    assert text[: answers.sentence_end(text)] == sentence[0]


BY_HAND = r"""
"\n\n Ann" | "Ann" | 1 | 1  # blanks in front are left out, unlike in the paper's tasks
"\u200b\nAnn" | "Ann" | 1 | 1
"Ann\nQuestion: Bob" | "Bob" | 0 | 0
"Ann beat Bob" | "Bob" | 1 | 0.5  # precision 1/3, recall 1
"Ann and Ann" | "Ann Ann Lee" | 0 | 0.6666667  # a word as often as in both
"Bob" | "Ann Lee;Bob Lee" | 0 | 0.6666667  # the best reference counts
"" | "?" | 0 | 0
"""


@each("prediction, references, contained, f1", BY_HAND, cells)
def test_answers_as_worked_out_by_hand(prediction, references, contained, f1):
    line = {"prediction": prediction, "references": references.split(";")}
    [values] = metrics.compute(QA, [line])
    assert (values["answer_contained"], values["f1"]) == pytest.approx((contained, f1))


# Runs and reports


@pytest.fixture
def run(start, chat_model, tmp_path):
    """run(*options) of a small sweep on 12 questions → (status, objects, stderr)."""
    lines = []
    for i in range(12):
        context = f"The code of {i} is k{i}." if i else ""
        line = dict(id=f"q{i}", question=f"Code of {i}?", context=context, answers=f"k{i}")
        lines.append(line)
    path = write_questions(tmp_path / "mine.csv", lines)
    model = f"--model {chat_model} --heads {chat_model}/heads.json --max-new-tokens 3"
    options = f"{model} --task qa --data {path} --out {tmp_path}/out"
    return lambda *more: start(options, *more)


def test_all_methods_run_and_another_prompt_does_not_continue_a_run(run, tmp_path):
    sweep = "--method greedy,masked,decore-entropy,cad --num-heads 2"
    status, out, err = run(sweep, "--sample 6")
    assert status == 0 and len(out) == 4, err
    assert set(out[0]["metrics"]) == {"answer_contained", "exact_match", "f1"}
    header, *lines = read_lines(out[0]["run"])
    assert header["header"]["template"] == "Context: {context}\nQuestion: {question}\nAnswer:"
    assert header["header"]["system"] == SYSTEM and header["header"]["max_new_tokens"] == 3
    assert lines[0]["id"] in {f"q{i}" for i in range(12)} and "context" not in lines[0]
    assert run(sweep, "--sample 8")[1][0]["n"] == 8
    template = tmp_path / "t.txt"
    template.write_text("Context: {context}\nQ: {question}\n")
    was = 'template: "Context: {context}\\nQuestion: {question}\\nAns'
    for options, words in (f"--template {template}", was), ("--system ''", "system: "):
        status, _, err = run(sweep, f"--sample 8 {options}")
        assert status == 2 and "was made with other settings" in err and words in err


def test_a_report_names_the_file_and_compares_only_runs_of_one_prompt(run, done, tmp_path):
    sweep = "--method greedy,masked --num-heads 1,2"
    assert run(sweep)[0] == 0
    assert run(sweep, f"--num-heads 1 --system '' --out {tmp_path}/out/other")[0] == 0
    report = partial(done, evaluate.main, "report", tmp_path / "out")
    out, _ = report()
    assert "| answer contained | exact match |" in out
    assert "runs: qa, 12 items of mine.csv." in out
    assert " items of 0" not in out and "paper's demonstrations" not in out
    assert "greedy, prompt " in out  # two prompts: two rows
    assert "qa f1" in report("--all")[0] and "f1" in report("--csv")[0]


@pytest.mark.parametrize("limit, n", [("", 5), ("--limit 1", 1)])
def test_a_report_on_own_data_of_the_papers_tasks_names_their_file(
    start, done, data, chat_model, tmp_path, limit, n
):
    options = f"--model {chat_model} --method greedy --max-new-tokens 2 --out {tmp_path} {limit}"
    assert start(data["nq-swap"], options)[0] == 0
    out, _ = done(evaluate.main, "report", tmp_path)
    assert f"nq-swap, {n} items of swap.jsonl." in out and "4,746" not in out


def test_the_papers_files_are_recognised_by_their_hash():
    swap = next(file for file in fetch.FILES if file.folder == "nq_swap")
    popqa = next(file for file in fetch.FILES if file.folder == "popqa")
    assert fetch.of_paper({"file": "any.parquet", "sha256": swap.digest})
    assert fetch.of_paper({"hub": "akariasai/PopQA", "file": "test.tsv", "sha256": "0"})
    assert fetch.of_paper({"file": popqa.name, "sha256": "0"})
    assert not fetch.of_paper({"file": swap.name, "sha256": "0"})


# Memory, and the beginning of the answer

CAPITAL = {
    "question": "What is the capital of Spain?",
    "context": "The parliament of Spain meets in Valencia.",
    "answers": ["Valencia"],
    "memory": ["Madrid"],
    "begin": "The capital of Spain is",
}


@pytest.mark.parametrize("name", ["q.csv", "q.jsonl", "q.parquet"])
def test_memory_and_begin_are_optional_columns_with_cells_that_may_be_empty(tmp_path, name):
    bare = CAPITAL | {"memory": "" if name == "q.csv" else None, "begin": ""}
    items, _ = load(write_questions(tmp_path / name, [CAPITAL, bare]))
    assert (items[0]["memory"], items[0]["begin"]) == (["Madrid"], "The capital of Spain is")
    assert not {"memory", "begin"} & items[1].keys()


def test_one_id_of_two_questions_is_refused_when_the_data_are_read(tmp_path):
    lines = [CAPITAL | {"id": "x"}] * 2  # of two passages
    assert len(load(write_lines(tmp_path / "q.jsonl", lines))[0]) == 2
    write_lines(tmp_path / "q.jsonl", [*lines, lines[0] | {"question": "Who?"}])
    with pytest.raises(ValueError, match="rows 1 and 3 are different questions with one id, 'x'"):
        load(tmp_path / "q.jsonl")


WRONG_FIELDS = """
{"memory": [" "]} | field 'memory' is empty
{"begin": " "} | field 'begin' is empty
{"begin": ["x"]} | begin is [
{"memory": "Valencia"} | 'Valencia' is in both answers and memory: leave out `memory` if
"""


@each("changes, words", WRONG_FIELDS)
def test_memory_and_begin_that_are_not_right_are_refused(refusal, tmp_path, changes, words):
    last = refusal(write_lines(tmp_path / "q.jsonl", [CAPITAL | json.loads(changes)]))
    assert "line 1: " in last and words in last


def test_the_beginning_follows_the_last_question_in_all_layouts_with_and_without_context(tmp_path):
    """Demonstrations show their first answers alone."""
    (item,), demos = load(*[write_lines(tmp_path / "q.jsonl", [CAPITAL])] * 2)
    assert chat_of(QA, item, demos)[2:] == ["Valencia", chat_of(QA, item)[1], CAPITAL["begin"]]
    for with_context in (True, False):
        for layout in prompts.LAYOUTS[:3]:
            last = prompts.messages(QA, item, demos, layout, with_context)[-1]
            assert last == {"role": "assistant", "content": "The capital of Spain is"}
        text = prompts.plain_text(QA, item, demos, with_context)
        assert text.endswith("Spain?\nAnswer: The capital of Spain is")
        assert text.count("The capital of Spain is") == 1


@pytest.mark.parametrize("layout", prompts.LAYOUTS)
def test_what_is_decoded_continues_the_beginning(layout, chat):
    """The byte-level ids are the text's. The turn of the assistant is open."""
    _, tokenizer = chat
    item = QA.read(CAPITAL) | {"index": 0}
    closed = replace(QA, context="", without_context="", closed_book=True)
    encoded = prompts.item_to_ids(QA, item, [], tokenizer, layout)
    alone = prompts.item_to_ids(closed, item, [], tokenizer, layout)
    for ids in encoded.prompt, encoded.without_context, alone.prompt:
        assert tokenizer.decode(ids).endswith("The capital of Spain is")
    assert encoded.without_context == alone.prompt and encoded.answers is None
    assert list(map(tokenizer.decode, alone.answers)) == [" Madrid"]
    del item["begin"]
    alone = prompts.item_to_ids(closed, item, [], tokenizer, layout)
    assert list(map(tokenizer.decode, alone.answers)) == [
        " Madrid" if layout == "plain" else "Madrid"
    ]


SOURCES = r"""
"Valencia." | "passage"
" the city of Valencia, not Madrid." | "passage"
"Madrid." | "memory"
"Madrid, though the passage says Valencia." | "memory"  # the first one counts
"not the capital of Spain." | "neither"  # after “Valencia is”
"Valencia is not the capital of Spain." | "neither"
"Valencia isn’t the capital of Spain, Madrid is." | "memory"
"no longer Madrid but Valencia." | "passage"
"formerly Madrid, now Valencia." | "passage"
"unknown. It may be Valencia." | "neither"  # the first sentence counts
"Valenciana." | "neither"
"\n\n**Valencia**\nMadrid" | "passage"
" \n" | "blank"
"" | "blank"
"""


@each("answer, kind", SOURCES, cells)
def test_an_answer_is_the_passages_the_memorised_one_neither_or_blank(answer, kind):
    line = {"prediction": answer, "references": ["Valencia"]}
    [without] = metrics.compute(QA, [line])
    [values] = metrics.compute(QA, [line | {"memory": ["Madrid", "Madrid City"]}])
    shares = dict.fromkeys(answers.SOURCES, 0) | {kind: 1}
    assert without.keys() == {"answer_contained", "exact_match", "f1"}
    assert values == without | shares


def test_of_two_names_the_passages_counts_and_of_those_that_begin_at_one_word_the_longest():
    names = """
Old. | Old | Old,older | passage
Mexico City. | Mexico | Mexico City | memory
Mexico City. | Mexico City | Mexico | passage
Mexico. | Mexico | Mexico City | passage
"""
    for text, references, memory, kind in rows(names):
        assert answers.source_of(text, [references], memory.split(",")) == kind


@pytest.fixture
def capitals(start, chat_model, tmp_path):
    """capitals(*options) runs 6 questions with memory → (status, objects, stderr). Their file is
    qa.jsonl."""
    lines = []
    for i in range(6):
        line = dict(id=f"c{i}", question=f"Capital of {i}?", context=f"It is New{i}.")
        lines.append(line | dict(answers=[f"New{i}"], memory=[f"Old{i}", "Old"], begin="It is"))
    write_lines(tmp_path / "qa.jsonl", lines)
    options = f"--model {chat_model} --task qa --data {tmp_path} --max-new-tokens 2"
    return lambda *more: start(f"{options} --out {tmp_path}/out", *more)


def rewrite(path, field, values):
    """Gives the lines of a run other values → its path."""
    header, *lines = read_lines(path)
    lines = [line | {field: value} for line, value in zip(lines, values, strict=True)]
    return write_lines(path, [header, *lines])


def closed_book(capitals, known):
    """A closed-book run whose answers are made to be `known` → its path."""
    [out] = capitals("--method greedy --closed-book")[1]
    texts = [f" Old{i}." if f"c{i}" in known else " Else." for i in range(6)]
    return rewrite(Path(out["run"]), "prediction", texts)


def test_a_closed_book_run_has_prompts_without_context_and_the_certainty_of_the_model(
    capitals, chat
):
    status, [out], err = capitals("--method greedy --closed-book --limit 2")
    assert status == 0 and out["run"].endswith(".greedy.closed-book.jsonl"), err
    assert {"passage", "memory", "neither", "blank"} < out["metrics"].keys()
    header, *lines = read_lines(out["run"])
    assert header["header"]["closed_book"] is True
    model, tokenizer = chat
    for line in lines:
        *_, prompt = capitals(f"--dry-run --closed-book --limit {line['index'] + 1}")[1]
        assert "New" not in str(prompt["messages"]) and prompt["messages_without_context"] is None
        chat = prompt["messages"]
        ids = tokenizer.encode_chat(chat, continue_final_message=True, today=prompts.DAY)
        answers = [tokenizer.encode(f" {text}") for text in line["memory"]]
        log_ps = score(model, ids, answers, Greedy())
        assert line["memory_log_p"] == pytest.approx(max(log_ps), abs=1e-5)  # rounded
    status, _, err = capitals("--method cad --closed-book")
    assert status == 2 and "cad is left out: its prompts have no context to leave out" in err


def test_the_certainty_is_that_of_the_most_probable_wording_which_may_be_the_runs_own(chat):
    model, tokenizer = chat
    prompt, listed = tokenizer.encode("Who?"), tokenizer.encode(" Eric Blair, called Orwell")
    texts = " Orwell, who was", " Eric", " Orwellian"
    runs = [[SimpleNamespace(ids=tokenizer.encode(text, bos=False))] for text in texts]
    batch = [prompts.Encoded(0, prompt, None, [listed], False)]
    items = [{"memory": ["Orwell"]}]
    values = running.memory_log_ps(batch, items, runs, model, tokenizer)
    own, long = score(model, prompt, [runs[0][0].ids[: len(" Orwell")], listed], Greedy())
    assert own > long and [of_run[0]["memory_log_p"] for of_run in values] == pytest.approx(
        [own, long, long], abs=1e-5
    )


def test_known_and_unknown_keep_the_rows_that_a_closed_book_run_answers_from_memory(
    capitals, tmp_path
):
    run = closed_book(capitals, known=("c1", "c4"))
    for kind, expected in (("known", ["c1", "c4"]), ("unknown", ["c0", "c2", "c3", "c5"])):
        status, [out], err = capitals(f"--method greedy --{kind} {run}")
        assert status == 0 and f"qa: {len(expected)} of 6 rows are {kind}\n" in err
        header, *lines = read_lines(out["run"])
        assert [line["id"] for line in lines] == expected
        record = header["header"]["known"]
        assert record["rows"] == kind and record["file"] == run.name
        assert out["run"].endswith(f".{kind}-{record['sha256'][:6]}.jsonl")
    assert len(capitals(f"--dry-run --known {run} --sample 1")[1]) == 1
    packed = tmp_path / "known.jsonl.xz"
    packed.write_bytes(lzma.compress(run.read_bytes()))
    options = "--dry-run --sample 1 --known"
    assert capitals(f"{options} {packed}/qa/{run.name}") == capitals(f"{options} {run}")
    # A file in which the passage says the truth is matched by ids; one without ids, by questions.
    questions = read_lines(tmp_path / "qa.jsonl")[::-1]
    truth = [row | {"answers": row.pop("memory")} for row in questions]
    path = write_lines(tmp_path / "truth.jsonl", truth)
    options = f"--dry-run --known {run} --data {path}"
    lines = capitals(options)[1]
    assert [line["id"] for line in lines] == ["c4", "c1"]
    assert all(line["memory"] == line["references"] for line in lines)  # of the run
    for row in truth:
        del row["id"]
    write_lines(path, truth)
    assert [line["id"] for line in capitals(options)[1]] == [1, 4]


NOT_KNOWN = """
[header] | it holds no answers
lines | it was not made with --closed-book
[changed(closed_book=None), *lines] | it was not made with --closed-book
[header, *bare] | rows of it have no field 'memory'
[changed(model="tiny"), *lines] | it is of tiny, not of chat
[changed(fingerprint={"weights": "others"}), *lines] | it is of another checkpoint called chat
[changed(method="masked"), *lines] | it is of masked; what a model knows, greedy decoding says
[header, *lines[1:]] | lacks 1 of 6 questions of the data, such as 'c0', 'Capital of 0?'
[header, *moved] | lacks 1 of 6 questions of the data, such as 'c0'
[changed(limit=6), *moved] | lacks 1 of 6 questions of the data, such as 'c0'
[header, *unknown] | no row of the data is known
"""


def test_a_run_that_does_not_tell_what_is_known_is_refused_in_one_line(capitals, tmp_path):
    header, *lines = read_lines(closed_book(capitals, known=("c1",)))
    names = dict(
        header=header,
        lines=lines,
        changed=lambda **more: {"header": header["header"] | more},
        bare=[{n: line[n] for n in line if n != "memory"} for line in lines],
        moved=[lines[0] | {"question": "Who?"}, *lines[1:]],
        unknown=[line | {"prediction": "Else"} for line in lines],
    )
    for content, words in rows(NOT_KNOWN):
        path = write_lines(tmp_path / "run.jsonl", eval(content, names))
        status, _, err = capitals(f"--method greedy --known {path}")
        assert status == 2 and words in err.splitlines()[-1] and str(path) in err, words
    write_lines(path, [names["changed"](limit=6), *lines[1:4]])
    status, printed, err = capitals(f"--known {path} --dry-run")
    assert [line["id"] for line in printed] == ["c1"] and "lacks 3 rows: left out" in err
    status, _, err = capitals("--task miniature --closed-book")
    assert status == 2 and "--closed-book has no effect on miniature" in err


def test_reports_show_the_shares_and_the_gain_by_the_certainty_of_the_closed_book_run(
    capitals, done, chat_model, tmp_path
):
    heads = f"--heads {chat_model}/heads.json --num-heads 2"
    run = closed_book(capitals, known=("c0",))
    rewrite(run, "memory_log_p", [-3, -1, -2, -0.5, -5, -4])
    greedy, masked = (Path(one["run"]) for one in capitals("--method greedy,masked", heads)[1])
    rewrite(greedy, "prediction", "Old0,New1,Old2,New3,Else, ".split(","))
    rewrite(masked, "prediction", [f"New{i}" for i in range(6)])
    out, _ = done(evaluate.main, "report", tmp_path / "out")
    assert "closed book\n" in out and "passages against memory\n" in out
    assert "passage, memory, neither, blank: what the answer's first sentence gives" in out
    shares = """
| setup         | n | passage | memory | neither | blank |
| greedy        | 6 | 33.3    | 33.3   | 16.7    | 16.7  |
| masked, N = 2 | 6 | 100.0   | 0.0    | 0.0     | 0.0   |
"""
    assert all(line in out for line in shares.split("\n"))
    runs = results.select(stored.collect(tmp_path / "out"))
    short = [*results.short_tables(runs).values()]
    [bars] = figures.FIGURES["memory"][0](short, 7).axes  # no other panel
    assert [[bar.get_width() for bar in bars.patches[kind::4]] for kind in range(4)] == [
        pytest.approx(shares) for shares in ([100 / 3, 100], [100 / 3, 0], [50 / 3, 0], [50 / 3, 0])
    ]
    assert [name.get_text() for name in bars.get_yticklabels()] == ["greedy", "masked, N = 2"]
    [gains] = figures.FIGURES["certainty"][0](short, 7).axes
    _, line, *ends = gains.lines
    assert [[*end.get_ydata()] for end in ends] == []  # the items of each quarter agree
    # In the order of p: items 4 and 5, 0 and 2, 1, 3; greedy has 1 and 3.
    means = [(math.exp(-5) + math.exp(-4)) / 2, (math.exp(-3) + math.exp(-2)) / 2]
    assert list(line.get_xdata()) == pytest.approx([*means, math.exp(-1), math.exp(-0.5)])
    assert list(line.get_ydata()) == pytest.approx([100, 100, 0, 0])
    header, *lines = read_lines(run)
    other = {"header": header["header"] | {"fingerprint": {"weights": "others"}}}
    write_lines(run, [other, *lines])  # of a checkpoint of the same name
    runs = results.select(stored.collect(tmp_path / "out"))
    short = [*results.short_tables(runs).values()]
    assert not figures.FIGURES["certainty"][0](short, 7)


def test_a_value_is_a_mean_over_the_n_beside_it_and_each_row_is_in_a_table(
    capitals, done, tmp_path
):
    """Of six rows the first has a memory against its passage, the second one that agrees."""
    for one in capitals("--method greedy,cad")[1]:
        path = rewrite(Path(one["run"]), "memory", [["Old0"], ["The new1"], *[None] * 4])
        rewrite(path, "prediction", ["Else", "New1", "New2", *["Else"] * 3])
    tables = results.short_tables(results.select(stored.collect(tmp_path / "out")))
    kinds = "passages against memory", "passages that agree with memory", "without memory"
    expected = ("passage", 1, 0), ("passage", 1, 100), ("answer_contained", 4, 25)
    for kind, (metric, n, value) in zip(kinds, expected):
        [setups] = [setups for (title, _), setups in tables.items() if kind in title]
        assert [row.metric for row in setups] == [metric] * 2 and setups[1].versus.n == n
        for row in setups:
            assert (row.n, row.value, row.beside["exact_match"]) == (n, value, value)
    out = json.loads(done(evaluate.main, "rescore", path)[0])
    assert (out["n"], out["n_of"]) == (6, dict.fromkeys(answers.SOURCES, 2))
    table = done(evaluate.main, "report", tmp_path, "--csv")[0].splitlines()
    of_metric = {}
    for row in csv.DictReader(table):
        of_metric[row["conditions"].split(", ")[-1], row["metric"]] = row["n"]
    assert of_metric[kinds[0], "exact_match"] == of_metric[kinds[0], "passage"] == "1"
