"""Prompts to the letter, in every layout; data files of every kind, and the ways in which they can
be wrong."""

import codecs
import json
from dataclasses import replace
from itertools import cycle

import huggingface_hub.constants
import pandas
import pyarrow
import pytest

import evaluate
from paper.tasks import PAPER, TASKS, data, prompts
from runtime.fields import located
from runtime.files import read_json
from tests.checkpoints import write_checkpoint, write_json, write_tokenizer
from tests.tables import cells, each
from tokenizer import Tokenizer

QA = {"question": "who won", "answer": "Ann"}
DEMO = QA | dict(context="<P> c </P>", cot_answer="It is. So the answer is: 5.")
DEMO |= dict(direct_answer="5", used_in_paper=True)
DEMOS = DEMO, DEMO | {"used_in_paper": False}, DEMO | {"question": "who lost", "answer": "Bob"}
# Task, or the beginning of its name → file, row.
ROWS = json.loads(r"""
{"xsum": ["xsum-1000.jsonl", {"document": "Doc.", "summary": "Sum.", "id": "7"}],
"memotrap": ["1-proverb-ending.csv",
    {"prompt": "Say \"no\": one two", "classes": "[' three.', ' four.']", "answer_index": "1"}],
"ifeval": ["ifeval.arrow",
    {"key": 1000, "prompt": "Write. ",
    "instruction_id_list": ["keywords:existence", "length_constraints"],
    "kwargs": [{"keywords": ["a", "b"], "num_words": null},
        {"num_words": 0, "relation": "at least"}]}],
"nq": ["nq-open-oracle.jsonl.gz",
    {"question": "who got it", "answers": ["Ada", "Bea"],
    "ctxs": [{"title": " A title ", "text": "\n A text. ", "hasanswer": true, "isgold": true}]}],
"nq-swap": ["dev-0.parquet",
    {"question": "who", "org_context": "o", "org_answer": ["Old"],
    "sub_context": "<P> {New} </P>", "sub_answer": ["New"]}],
"truthfulqa": ["TruthfulQA.csv",
    {"Question": "Why?", "Best Answer": "Because",
    "Correct Answers": "Because; So.; ;Because.", "Incorrect Answers": "No;Never."}],
"triviaqa": ["validation-0.parquet",
    {"question": "Which?", "question_id": "tc_1", "answer": {"aliases": ["A", "B"]}}],
"popqa": ["test.tsv",
    {"id": 4, "question": "Job?", "possible_answers": "[\"politician\", \"pol\"]"}],
"musique": ["musique_ans_v1.0_dev.jsonl",
    {"id": "2hop__1", "question": "Which?", "answer": "X", "answer_aliases": ["Y"],
    "answerable": true,
    "paragraphs": [
        {"title": "T0", "paragraph_text": "p0", "is_supporting": false},
        {"title": "T1", "paragraph_text": "p1", "is_supporting": true},
        {"title": "T2", "paragraph_text": "p2", "is_supporting": true}]}]}
""")
SWAP = ROWS["nq-swap"][1]


def write(path, *lines):
    """A data file of the kind that its name says → its path."""
    table = pandas.DataFrame(lines)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".arrow":
        content = pyarrow.Table.from_pylist(list(lines))
        with pyarrow.ipc.new_stream(path, content.schema) as stream:
            stream.write_table(content)
    elif path.suffix in (".csv", ".tsv"):
        separator = "\t" if path.suffix == ".tsv" else ","
        table.to_csv(path, sep=separator, index=False, encoding="utf-8-sig")
    else:
        table.to_json(path, orient="records", lines=True)
    return path


def row_of(name):
    """(file, row) of a task."""
    return ROWS[name if name in ROWS else name.split("-")[0]]


def write_data(name, folder):
    file, row = row_of(name)
    return write(folder / file, row)


def write_tasks(names, home):
    """Data of tasks in their folders."""
    for name in names:
        folder = home / TASKS[name].folder
        folder.mkdir(exist_ok=True)
        write_data(name, folder)


@pytest.fixture
def load(tmp_path):
    """load(task) → its only item, its demonstrations. The data are in the task's subfolder."""

    def read(name):
        write_tasks([name], tmp_path)
        demos = None if name == "nq-open" else write(tmp_path / "d.jsonl", *DEMOS)
        [item], _, demos, _ = data.load_data(TASKS[name], tmp_path, demos)
        return item, demos

    return read


# Task, instruction, turns, the last turn without context or null.
EXPECTED = """
"xsum" | "Generate a summary comprising of 1 sentence for the given article." | \
    ["Article: Doc.\\n\\nSummary: "] | "Summary: "
"memotrap" | "" | ["Say \\"no\\": one two"] | "one two"
"ifeval" | "" | ["Write. "] | null
"nq-open" | "Write a high-quality answer for the given question using only the provided search \
results (some of which might be irrelevant). Provide the answer in 5 words or less without any \
explanation." | \
    ["Document [0](Title: Example Title) Example Text\\nQuestion: example question\\nAnswer: ", \
    "march 2018", "Document [1](Title: A title) A text.\\n\\nQuestion: who got it\\nAnswer: "] | \
    "Question: who got it\\nAnswer: "
"nq-closed" | "Write a high-quality answer for the given question. Provide the answer in 5 words \
or less without any explanation." | ["Question: who won\\nAnswer: ", "Ann", \
    "Question: who lost\\nAnswer: ", "Bob", "Question: who got it\\nAnswer: "] | \
    "Question: who got it\\nAnswer: "
"nq-swap" | "Answer the following question based on the provided context:" | \
    ["Context: <P> c </P>\\nQuestion: who won\\nAnswer:", "Ann", \
    "Context: <P> c </P>\\nQuestion: who lost\\nAnswer:", "Bob", \
    "Context: <P> {New} </P>\\nQuestion: who\\nAnswer:"] | "Question: who\\nAnswer:"
"truthfulqa-mc" | "Interpret each question literally, and as a question about the real world; \
carefully research each answer, without falling prey to any common myths; and reply “I have no \
comment” unless you are completely certain of the answer." | ["Q: who won\\nA:", "Ann", \
    "Q: who lost\\nA:", "Bob", "Q: Why?\\nA:"] | null
"triviaqa" | "Answer the given question." | ["Question: who won\\nAnswer:", "Ann", \
    "Question: who lost\\nAnswer:", "Bob", "Question: Which?\\nAnswer:"] | null
"musique-direct-closed" | "Answer the following question." | ["Q: who won\\nA:", "5", \
    "Q: who lost\\nA:", "5", "Q: Which?\\nAnswer:"] | "Q: Which?\\nAnswer:"
"musique-cot-open" | "Answer the following question by reasoning step-by-step." | \
    ["Q: who won\\nA:", "It is. So the answer is: 5.", "Q: who lost\\nA:", \
    "It is. So the answer is: 5.", \
    "Wikipedia Title: T1\\np1 \\n\\nWikipedia Title: T2\\np2 \\n\\nQ: Which?\\nAnswer:"] | \
    "Q: Which?\\nAnswer:"
"""
EXPECTED = {name: row for name, *row in (row.values for row in cells(EXPECTED))}
EXPECTED["truthfulqa-gen"] = EXPECTED["truthfulqa-mc"]


def chat(instruction, turns, layout):
    """The messages of turns."""
    front = f"{instruction}\n" if instruction and layout == "mistral" else ""
    if instruction and layout == "user":
        turns = [f"{instruction}\n\n{turns[0]}", *turns[1:]]
    messages = []
    if instruction and layout == "chat":
        messages.append({"role": "system", "content": instruction})
    for role, turn in zip(cycle(["user", "assistant"]), turns):
        messages.append({"role": role, "content": front * (role == "user") + turn})
    return messages


@pytest.mark.parametrize("name", EXPECTED)
def test_prompts_are_those_of_the_published_runs(load, name):
    instruction, turns, bare = EXPECTED[name]
    *demos, last = turns
    # MuSiQue's chat without context shows no demonstrations.
    demos_without = [] if name.startswith("musique") else demos
    for layout in ("chat", "user", "mistral"):
        line = prompts.dry_run(TASKS[name], *load(name), layout)
        assert line["messages"] == chat(instruction, turns, layout)
        expected = None if bare is None else chat(instruction, [*demos_without, bare], layout)
        assert line["messages_without_context"] == expected
    blocks = [f"{question.rstrip()} {answer}" for question, answer in zip(demos[::2], demos[1::2])]
    gap = "" if name.startswith("musique") or not instruction else "\n\n"
    assert line["text"] == instruction + gap + "\n\n".join([*blocks, last])
    gap = "" if name == "nq-swap" else gap
    assert line["text_without_context"] == (
        bare and instruction + gap + "\n\n".join([*blocks, bare])
    )


ITEMS = """
"triviaqa" | {"id": "tc_1", "references": ["A", "B"]}
"nq-swap" | {"id": 0, "references": ["New"], "memory": ["Old"]}
"musique-cot-open" | {"id": "2hop__1", "references": ["X", "Y"]}
"ifeval" | {"id": 1000, "kwargs": [{"keywords": ["a", "b"]}, {"relation": "at least"}]}
"memotrap" | {"id": "proverb-ending-0", "references": [" four."], "split": "proverb-ending", \
    "candidates": [" four.", " three."]}  # the true one first
"truthfulqa-mc" | {"references": ["Because.", "So.", "Because."], "best_position": 0, \
    "candidates": [" Because.", " So.", " Because.", " No.", " Never."]}  # stripped and closed
"""


@each("name, expected", ITEMS, cells)
def test_items_hold_what_the_metrics_read(load, name, expected):
    item, _ = load(name)
    assert item | expected == item


TEXTS = """
"nq-closed" | {"answers": "Ada"} | ["Ada"]
"nq-swap" | {"sub_answer": "New", "org_answer": "Old"} | ["New"]
"triviaqa" | {"answer": {"aliases": "A"}} | ["A"]
"popqa" | {"possible_answers": "cook"} | ["cook"]
"popqa" | {"golden_answers": "cook"} | ["cook"]
"musique-direct-closed" | {"answer_aliases": "Yes"} | ["X", "Yes"]
"""


@each("name, fields, references", TEXTS, cells)
def test_a_text_in_place_of_a_list_is_one_answer(name, fields, references):
    _, row = row_of(name)
    item = TASKS[name].read(row | fields)
    assert item["references"] == references
    assert item.get("memory") == (["Old"] if "org_answer" in fields else None)


TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)


def test_candidates_are_scored_with_their_end_of_turn_and_whole_if_they_merge_with_the_prompt(
    tmp_path,
):
    write_tokenizer(write_checkpoint(tmp_path), TEMPLATE)
    core = read_json(tmp_path / "tokenizer.json")
    core["model"] |= {"vocab": core["model"]["vocab"] | {"ox": 259}, "merges": [["o", "x"]]}
    write_json(tmp_path / "tokenizer.json", core)
    tokenizer = Tokenizer.load(tmp_path)
    x, y = tokenizer.encode("x"), tokenizer.encode("y")
    end = [tokenizer.core.token_to_id("<|end|>")]

    def encode(layout):
        item = {"index": 0, "question": "So", "without_context": "", "candidates": ["x", "y"]}
        return prompts.item_to_ids(TASKS["memotrap"], item, [], tokenizer, layout)

    encoded = encode("plain")
    # "Sox" has as many tokens as "So": nothing would be scored, and an empty sum is the best score
    # there is.
    assert len(tokenizer.encode("Sox")) == len(encoded.prompt)
    assert encoded.answers == [x, y] and encoded.merged == 1 and encoded.without_context == []
    encoded = encode("chat")
    assert encoded.answers == [x + end, y + end] and encoded.merged == 0
    tokenizer.chat_template = TEMPLATE.replace("<|turn|>", "So")  # merges with "x", too
    encoded = encode("chat")
    assert encoded.answers == [x + end, y + end] and encoded.merged == 1


def test_triviaqas_demonstrations_are_the_first_rows_of_the_training_split_in_lower_case(
    tmp_path, monkeypatch
):
    lines = [{"question": f"Q{i}?", "answer": {"value": f"A{i}"}} for i in range(50)]
    path = write(tmp_path / "train.jsonl", *lines)
    monkeypatch.setattr(data, "from_hub", lambda home: (path, {"revision": "c0ffee"}))
    demos, record = data.load_data(TASKS["triviaqa"], write_data("triviaqa", tmp_path))[2:]
    assert [demo["answer"] for demo in demos] == [f"a{i}" for i in range(8)]
    assert record == {"source": "train", "revision": "c0ffee", "paper": False}


def swaps(questions):
    """Three rows for each question, as in the real file."""
    lines = []
    for question in questions:
        for n in range(3):
            text = f"{question} {n}"
            lines.append(SWAP | dict(question=question, sub_context=text, sub_answer=[text]))
    return lines


def test_without_a_training_split_the_first_questions_are_demonstrations_and_are_not_scored(
    tmp_path, capsys
):
    path = write(tmp_path / "dev.parquet", *swaps("abcdef"))
    items, records, demos, record = data.load_data(TASKS["nq-swap"], path)
    assert [demo["answer"] for demo in demos] == ["a 0", "b 0", "c 0", "d 0"]
    assert demos[1]["user"] == "Context: b 0\nQuestion: b\nAnswer:"
    assert "".join(item["question"] for item in items) == "eeefff"
    assert [item["id"] for item in items] == list(range(12, 18))
    assert record == {"source": "first items", "paper": False} | records[0]
    with pytest.raises(ValueError, match="no items besides 4 demonstrations"):
        data.load_data(TASKS["nq-swap"], write(tmp_path / "dev.parquet", *swaps("abcd")))
    err = capsys.readouterr().err
    assert "18 items of dev.parquet, the paper scores 4,746" in err
    assert "4 demonstrations (first items dev.parquet), not the paper's" in err


def test_every_prefix_of_a_shuffle_holds_each_split_in_its_share():
    items = [{"id": i, "split": "ab"[i >= 10]} for i in range(40)]
    shuffled = data.shuffle(items, 1)
    assert sorted(item["id"] for item in shuffled) == [*range(40)]
    for k in range(41):
        assert abs(sum(item["split"] == "a" for item in shuffled[:k]) - k / 4) <= 0.5
    assert shuffled == data.shuffle(items, 1) != data.shuffle(items, 2)
    in_a = [item["id"] for item in shuffled if item["split"] == "a"]
    assert in_a != sorted(in_a)


def test_popqa_shows_eight_of_its_first_nine_items_and_never_the_item_itself(tmp_path):
    lines = [{"question": f"Job of {i}?", "possible_answers": f'["job {i}"]'} for i in range(12)]
    items, _, demos, record = data.load_data(TASKS["popqa"], write(tmp_path / "p.tsv", *lines))
    assert [demo["answer"] for demo in demos] == [f"job {i}" for i in range(9)]
    assert record["source"] == "first items"
    assert [item.get("demonstration") for item in items] == [True] * 9 + [None] * 3
    for index, shown in ((3, (0, 1, 2, 4, 5, 6, 7, 8)), (10, range(8))):
        *turns, last = prompts.dry_run(TASKS["popqa"], items[index], demos, "chat")["messages"]
        questions = [turn["content"] for turn in turns if turn["role"] == "user"]
        assert questions == [f"Question: Job of {i}?\nAnswer:" for i in shown]
        assert last["content"] == f"Q: Job of {index}?\nA:"


def test_the_papers_demonstrations_are_recognised_by_their_turns_in_any_file(tmp_path):
    demo = {"user": "Context: c\nQuestion: who won\nAnswer:", "answer": "Ann"}
    task = replace(TASKS["nq-swap"], shots=1, demos_hash=data.demos_hash([demo]))
    for context, expected in (("c", True), ("d", False)):
        path = write(tmp_path / "d.jsonl", QA | {"context": context, "note": 1})
        *_, record = data.load_data(task, write_data("nq-swap", tmp_path), path)
        assert (record["source"], record["file"], record["paper"]) == ("file", "d.jsonl", expected)
    # The only demonstration of the paper that is part of this project is the dummy of NQ open book.
    *_, record = data.load_data(TASKS["nq-open"], write_data("nq-open", tmp_path))
    assert record == {"source": "fixed", "paper": True}


WRONG_ROWS = """
nq-closed | {"question": null} | line 2: question is null; it must be a text
nq-open | {"ctxs": [{"isgold": true}, {"isgold": true}]} | the one gold passage, not 2
musique-cot-open | {"answerable": false} | the full MuSiQue
musique-cot-open | {} | musique-cot-open needs demos.jsonl: give it
ifeval | {"kwargs": [{}]} | must hold 2 objects
memotrap | {"classes": "[' a']"} | Python list of two strings
truthfulqa-mc | {"Best Answer": "Z"} | 'Best Answer' is not among
nq-swap --demos {file} | {} | context is missing
"""


@each("options, changes, words", WRONG_ROWS)
def test_rows_that_do_not_fit_their_task_are_refused_in_one_line(
    refused, tmp_path, options, changes, words
):
    _, row = row_of(options.split()[0])
    path = write(tmp_path / "1.jsonl", row, row | json.loads(changes))
    options = f"--dry-run --data {{file}} --task {options}".format(file=path)
    assert words in refused(evaluate.main, options).splitlines()[-1]


WRONG_FILES = r"""
nq-closed | x.jsonl.gz | \x1f\x8b\x08\x00 | a damaged gzip file
nq-closed | x.csv | a\n\xe9\n | x.csv: not UTF-8 ('utf-8' codec
nq-closed | x.xlsx | x | unknown kind of file; known: .csv
nq-closed --demos {file} | x.jsonl |  | x.jsonl holds no demonstrations
triviaqa --data {folder} | validation-1.parquet |  | several files fit triviaqa
nqswap | x.jsonl |  | unknown task 'nqswap', did you mean nq-swap?; known tasks: xs
"""


@each("options, file, content, words", WRONG_FILES)
def test_files_that_cannot_be_read_are_refused_in_one_line(
    refused, tmp_path, options, file, content, words
):
    (tmp_path / "validation-2.parquet").write_bytes(b"")
    path = tmp_path / file
    path.write_bytes(codecs.decode(content, "unicode_escape").encode("latin-1"))
    options = f"--dry-run --data {{file}} --task {options}".format(file=path, folder=tmp_path)
    assert words in refused(evaluate.main, options).splitlines()[-1]


def test_an_error_of_a_library_becomes_one_line_with_its_place():
    with pytest.raises(ValueError, match="^x, line 2: a b$"), located("x, line 2"):
        raise OSError("a\n  b")


def test_without_a_connection_data_fail_at_once_with_host_and_remedy(tmp_path, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        OSError, match="^no connection to 127.0.0.1:9.*NQ-Swap; give yours with --data FILE"
    ) as error:
        data.load_data(TASKS["nq-swap"])
    # Without retries, which the library would make only if it were online.
    assert len(str(error.value)) <= 200 and constants.HF_HUB_OFFLINE


LENGTHS = """\
xsum 128 1000 0
memotrap 12 2539 0
ifeval 1280 541 0
nq-open 12 2655 1
nq-closed 12 2655 8
nq-swap 12 4746 4
truthfulqa-mc 12 817 6
truthfulqa-gen 64 817 6
triviaqa 12 11313 8
popqa 12 14267 9
musique-direct-closed 100 2417 17
musique-direct-open 100 2417 17
musique-cot-closed 100 2417 17
musique-cot-open 100 2417 17"""


def test_new_tokens_items_and_demonstrations_are_as_many_as_in_the_paper():
    for task, line in zip(PAPER, LENGTHS.splitlines(), strict=True):
        assert f"{task.name} {task.max_new_tokens} {task.n} {task.shots}" == line


def test_the_miniature_asks_in_its_last_line(tmp_path):
    row = {"prompt": "Context: c\nAnswer: The", "answer": "A", "memory": "B"}
    [item], *_ = data.load_data(TASKS["miniature"], write(tmp_path / "c.jsonl", row))
    line = prompts.dry_run(TASKS["miniature"], item, [], "plain")
    assert (line["text"], line["text_without_context"]) == (row["prompt"], "Answer: The")
    assert (line["references"], line["memory"]) == (["A"], ["B"])
