"""Prompts to the letter, in every layout; data files of every kind, and the ways in which they can
be wrong."""

import csv
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from paper.tasks import PAPER, TASKS, data, find, prompts
from tests.checkpoints import write_checkpoint, write_tokenizer
from tokenizer import Tokenizer

QA = {"question": "who won", "answer": "Ann"}
QA2 = {"question": "who lost", "answer": "Bob"}


def write(path, rows):
    """A data file of the kind that its name says → its path.

    Rows of a table are lists, the header first."""
    if ".jsonl" in path.name:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    elif path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


ORACLE = {
    "question": "who got it",
    "answers": ["Ada", "Bea"],
    "ctxs": [{"title": " A title ", "text": "\n A text. ", "hasanswer": True, "isgold": True}],
}
SWAP = {
    "question": "who",
    "org_context": "o",
    "org_answer": ["Old"],
    "sub_context": "<P> {New} </P>",
    "sub_answer": ["New"],
}
MUSIQUE = {
    "id": "2hop__1",
    "question": "Which?",
    "answer": "X",
    "answer_aliases": ["Y"],
    "answerable": True,
    "paragraphs": [
        {"title": f"T{i}", "paragraph_text": f"p{i}", "is_supporting": i > 0} for i in range(3)
    ],
}
TRUTHFUL = [
    "Type",
    "Category",
    "Question",
    "Best Answer",
    "Correct Answers",
    "Incorrect Answers",
    "Source",
]
TRIVIA = {
    "question": "Which?",
    "question_id": "tc_1",
    "answer": {"aliases": ["A", "B"], "value": "V", "normalized_aliases": ["n"]},
}
INSTRUCTIONS = {
    "key": 1000,
    "prompt": "Write. ",
    "instruction_id_list": ["keywords:existence", "length_constraints"],
    "kwargs": [
        {"keywords": ["a", "b"], "num_words": None},
        {"num_words": 0, "relation": "at least"},
    ],
}


FILES = {
    "musique": ("m.jsonl", [MUSIQUE]),
    "truthfulqa": (
        "t.csv",
        [TRUTHFUL, ["A", "C", "Why?", "Because", "Because; So.; ;Because.", "No;Never.", "u"]],
    ),
    "nq-open": ("nq.jsonl.gz", [ORACLE]),
    "nq-closed": ("nq.jsonl.gz", [ORACLE]),
    "nq-swap": ("dev.parquet", [SWAP]),
    "xsum": ("x.jsonl", [{"document": "Doc.", "summary": "Sum.", "id": "7"}]),
    "ifeval": ("i.jsonl", [INSTRUCTIONS]),
    "triviaqa": ("t.parquet", [TRIVIA]),
    "popqa": (
        "p.tsv",
        [["id", "question", "possible_answers"], ["4", "Job?", '["politician", "pol"]']],
    ),
}


def write_data(name, folder):
    """A file of a few rows for a task → its path; MemoTrap's is a folder."""
    if name == "memotrap":
        header = ["prompt", "classes", "answer_index"]
        write(
            folder / "1-proverb-ending.csv",
            [header, ['Say "no": one two', "[' three.', ' four.']", "1"]],
        )
        write(
            folder / "4-history-of-science-qa.csv", [header, ["Q?\nAnswer:", '[" A", " B"]', "0"]]
        )
        return folder
    file, rows = FILES[name if name in FILES else name.split("-")[0]]
    return write(folder / file, rows)


def write_demos(name, folder):
    rows = [QA, QA2]
    if name == "nq-swap":
        rows = [QA | {"context": "<P> c </P>"}]
    elif name.startswith("musique"):
        row = {"cot_answer": "It is. So the answer is: 5.", "direct_answer": "5"}
        rows = [row | {"question": "Q1?", "used_in_paper": True}]
        rows.append(row | {"question": "left out", "used_in_paper": False})
        rows.append(row | {"question": "Q2?"})
    return write(folder / "d.jsonl", rows) if TASKS[name].shots and name != "nq-open" else None


@pytest.fixture
def first(tmp_path):
    """first(task, layout) → the dry-run line of the task's first item."""

    def read(name, layout="chat", index=0):
        task = TASKS[name]
        items, _, demos, _ = data.load(
            task, write_data(name, tmp_path), write_demos(name, tmp_path)
        )
        return prompts.dry_run(task, items[index], demos, layout)

    return read


SUMMARISE = "Generate a summary comprising of 1 sentence for the given article."
OPEN = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which "
    "might be irrelevant). Provide the answer in 5 words or less without any explanation."
)
CLOSED = (
    "Write a high-quality answer for the given question. Provide the answer in 5 words or less "
    "without any "
    "explanation."
)
SWAPPED = "Answer the following question based on the provided context:"
LITERAL = (
    "Interpret each question literally, and as a question about the real world; carefully "
    "research each answer, "
    "without falling prey to any common myths; and reply “I have no comment” unless you are "
    "completely certain "
    "of the answer."
)

# name → (instruction, turns, last turn without context or None)
EXPECTED = {
    "xsum": (SUMMARISE, ["Article: Doc.\n\nSummary: "], "Summary: "),
    "memotrap": ("", ['Say "no": one two'], "one two"),
    "ifeval": ("", ["Write. "], None),
    "nq-open": (
        OPEN,
        [
            "Document [0](Title: Example Title) Example Text\nQuestion: example question\nAnswer: ",
            "march 2018",
            "Document [1](Title: A title) A text.\n\nQuestion: who got it\nAnswer: ",
        ],
        "Question: who got it\nAnswer: ",
    ),
    "nq-closed": (
        CLOSED,
        [
            "Question: who won\nAnswer: ",
            "Ann",
            "Question: who lost\nAnswer: ",
            "Bob",
            "Question: who got it\nAnswer: ",
        ],
        "Question: who got it\nAnswer: ",
    ),
    "nq-swap": (
        SWAPPED,
        [
            "Context: <P> c </P>\nQuestion: who won\nAnswer:",
            "Ann",
            "Context: <P> {New} </P>\nQuestion: who\nAnswer:",
        ],
        "Question: who\nAnswer:",
    ),
    "truthfulqa-mc": (
        LITERAL,
        ["Q: who won\nA:", "Ann", "Q: who lost\nA:", "Bob", "Q: Why?\nA:"],
        None,
    ),
    "triviaqa": (
        "Answer the given question.",
        [
            "Question: who won\nAnswer:",
            "Ann",
            "Question: who lost\nAnswer:",
            "Bob",
            "Question: Which?\nAnswer:",
        ],
        None,
    ),
    "musique-direct-closed": (
        "Answer the following question.",
        ["Q: Q1?\nA:", "5", "Q: Q2?\nA:", "5", "Q: Which?\nAnswer:"],
        "Q: Which?\nAnswer:",
    ),
    "musique-cot-open": (
        "Answer the following question by reasoning step-by-step.",
        [
            "Q: Q1?\nA:",
            "It is. So the answer is: 5.",
            "Q: Q2?\nA:",
            "It is. So the answer is: 5.",
            "Wikipedia Title: T1\np1 \n\nWikipedia Title: T2\np2 \n\nQ: Which?\nAnswer:",
        ],
        "Q: Which?\nAnswer:",
    ),
}
EXPECTED["truthfulqa-gen"] = EXPECTED["truthfulqa-mc"]


def chat(instruction, turns, mistral=False):
    """The messages of turns."""
    front = instruction + "\n" if mistral and instruction else ""
    messages = []
    if instruction and not mistral:
        messages.append({"role": "system", "content": instruction})
    for number, turn in enumerate(turns):
        if number % 2:
            messages.append({"role": "assistant", "content": turn})
        else:
            messages.append({"role": "user", "content": front + turn})
    return messages


@pytest.mark.parametrize("name", EXPECTED)
def test_prompts_are_those_of_the_published_runs(first, name):
    instruction, turns, bare = EXPECTED[name]
    # MuSiQue's chat without context shows no demonstrations.
    turns_without = bare is not None and ([] if name.startswith("musique") else turns[:-1]) + [bare]
    for layout in ("chat", "mistral"):
        line, mistral = first(name, layout), layout == "mistral"
        assert line["messages"] == chat(instruction, turns, mistral)
        expected = chat(instruction, turns_without, mistral) if turns_without else None
        assert line["messages_without_context"] == expected
    *demos, last = turns
    blocks = [
        f"{question.rstrip()} {answer}"
        for question, answer in zip(demos[::2], demos[1::2], strict=True)
    ]
    gap = "" if name.startswith("musique") or not instruction else "\n\n"
    assert line["text"] == instruction + gap + "\n\n".join([*blocks, last])
    gap = "" if name == "nq-swap" else gap
    assert line["text_without_context"] == (
        bare and instruction + gap + "\n\n".join([*blocks, bare])
    )


def test_items_hold_what_the_metrics_read(first, tmp_path):
    trap, mc = first("memotrap"), first("truthfulqa-mc")
    assert trap["candidates"] == [" four.", " three."]  # the true one first
    assert (trap["references"], trap["split"]) == ([" four."], "proverb-ending")
    trap = first("memotrap", index=1)
    assert trap["split"] == "history-of-science-qa"
    assert trap["messages_without_context"] == [{"role": "user", "content": ""}]
    # Stripped, closed with a full stop, without the empty one, with the repeated one.
    assert mc["candidates"] == [" Because.", " So.", " Because.", " No.", " Never."]
    assert mc["references"] == ["Because.", "So.", "Because."] and mc["best_position"] == 0
    references = {
        "triviaqa": ["A", "B"],
        "popqa": ["politician", "pol"],
        "nq-swap": ["New"],
        "musique-cot-open": ["X", "Y"],
    }
    for name, expected in references.items():
        assert first(name)["references"] == expected
    assert first("nq-swap")["memory"] == ["Old"]
    [item], _ = data.load_items(TASKS["ifeval"], write_data("ifeval", tmp_path))
    assert item["kwargs"] == [{"keywords": ["a", "b"]}, {"relation": "at least"}]
    assert item["id"] == 1000


TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)


def test_candidates_are_scored_with_their_end_of_turn_and_whole_if_they_merge_with_the_prompt(
    tmp_path,
):
    write_tokenizer(write_checkpoint(tmp_path, vocab_size=260), TEMPLATE)
    core = json.loads((tmp_path / "tokenizer.json").read_text())
    core["model"] |= {"vocab": core["model"]["vocab"] | {"ox": 259}, "merges": [["o", "x"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(core))
    tokenizer, task = Tokenizer.load(tmp_path), TASKS["memotrap"]
    x, y, end = tokenizer.encode("x"), tokenizer.encode("y"), prompts.end_of_turn(tokenizer)
    assert end == [tokenizer.core.token_to_id("<|end|>")]
    item = {"index": 0, "question": "So", "without_context": "", "candidates": ["x", "y"]}
    encoded = prompts.item_to_ids(task, item, [], tokenizer, "plain")
    # "Sox" has as many tokens as "So": nothing would be scored, and an empty sum is the best score
    # there is.
    assert len(tokenizer.encode("Sox")) == len(encoded.prompt)
    assert encoded.answers == [x, y] and encoded.merged == 1 and encoded.without_context == []
    encoded = prompts.item_to_ids(task, item, [], tokenizer, "chat", end)
    assert encoded.answers == [x + end, y + end] and encoded.merged == 0
    assert (
        tokenizer.core.decode(encoded.prompt, skip_special_tokens=False)
        == "<|turn|>So<|end|><|turn|>"
    )
    tokenizer.chat_template = TEMPLATE.replace("<|turn|>", "So")  # merges with "x", too
    encoded = prompts.item_to_ids(task, item, [], tokenizer, "chat", end)
    assert encoded.answers == [x + end, y + end] and encoded.merged == 1


def test_triviaqas_demonstrations_are_the_first_rows_of_the_training_split_in_lower_case(
    tmp_path, monkeypatch
):
    path = write(
        tmp_path / "train.jsonl",
        [{"question": f"Q{i}?", "answer": {"value": f"A{i}"}} for i in range(50)],
    )
    monkeypatch.setattr(data, "from_hub", lambda *home: (path, {"revision": "c0ffee"}))
    demos, record = data.load(TASKS["triviaqa"], write_data("triviaqa", tmp_path))[2:]
    assert [demo["answer"] for demo in demos] == [f"a{i}" for i in range(8)]
    assert record == {"source": "train", "revision": "c0ffee", "paper": False}


def test_without_a_training_split_the_first_questions_are_demonstrations_and_are_not_scored(
    tmp_path, capsys
):
    def write_rows(questions):  # three rows to each question, as in the real file
        rows = []
        for question in questions:
            for n in range(3):
                text = f"{question} {n}"
                rows.append(SWAP | dict(question=question, sub_context=text, sub_answer=[text]))
        return write(tmp_path / "dev.parquet", rows)

    path = write_rows("abcdef")
    items, records, demos, record = data.load(TASKS["nq-swap"], path)
    assert [demo["answer"] for demo in demos] == ["a 0", "b 0", "c 0", "d 0"]
    assert demos[1]["user"] == "Context: b 0\nQuestion: b\nAnswer:"
    assert "".join(item["question"] for item in items) == "eeefff"
    assert [(item["index"], item["id"]) for item in items] == list(enumerate(range(12, 18)))
    assert record == {"source": "first items", "paper": False} | records[0]
    assert capsys.readouterr().err.splitlines() == [
        "nq-swap: 18 items of dev.parquet, the paper scores 4,746",
        "nq-swap: 4 demonstrations (first items dev.parquet), not the paper's (give those with "
        "--demos)",
    ]
    assert data.load(TASKS["nq-swap"], path, limit=2)[0] == items[:2]
    with pytest.raises(
        ValueError, match="first 4 questions are its demonstrations, and nothing is left to score"
    ):
        data.load(TASKS["nq-swap"], write_rows("abcd"))
    with pytest.raises(
        ValueError, match="musique-cot-open needs --demos FILE: its items have no reasoning"
    ):
        data.load(TASKS["musique-cot-open"], write_data("musique-cot-open", tmp_path))


def test_popqa_shows_eight_of_its_first_nine_items_and_never_the_item_itself(tmp_path):
    rows = [[str(i), f"Job of {i}?", f'["job {i}"]'] for i in range(12)]
    path = write(tmp_path / "p.tsv", [["id", "question", "possible_answers"], *rows])
    items, _, demos, record = data.load(TASKS["popqa"], path)
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
        path = write(tmp_path / "d.jsonl", [QA | {"context": context, "note": 1}] * 2)
        record = data.load(task, write_data("nq-swap", tmp_path), path)[3]
        assert (record["source"], record["file"], record["paper"]) == ("file", "d.jsonl", expected)
    # The only demonstration of the paper that is part of this project is the dummy of NQ open book.
    record = data.load(TASKS["nq-open"], write_data("nq-open", tmp_path))[3]
    assert record == {"source": "fixed", "paper": True}


@pytest.mark.parametrize(
    "name, rows, message",
    [
        (
            "nq-closed",
            [ORACLE, {"query": "q", "answer": ["a"]}],
            r"line 2: missing field: 'question', 'answers' \(found: query, answer\)",
        ),
        (
            "nq-open",
            [ORACLE | {"ctxs": ORACLE["ctxs"] * 2}],
            "field 'ctxs' should hold the one gold .*, not 2",
        ),
        ("musique-cot-open", [MUSIQUE | {"answerable": False}], "full MuSiQue"),
        (
            "musique-cot-open",
            [MUSIQUE | {"paragraphs": [{"title": "T"}]}],
            "holds no supporting paragraph",
        ),
        ("popqa", [{"question": "q", "possible_answers": "x"}], "line 1: Expecting value"),
        (
            "ifeval",
            [{"prompt": "p", "instruction_id_list": ["a", "b"], "kwargs": [{}]}],
            "one object for each of the 2",
        ),
        (
            "memotrap",
            [{"prompt": "p", "classes": "[' a']", "answer_index": "0"}],
            "Python list of two strings",
        ),
        (
            "truthfulqa-mc",
            [dict(zip(TRUTHFUL, ["", "", "Q", "Z", "A;B", "C", ""], strict=True))],
            "'Best Answer' is not among",
        ),
    ],
)
def test_a_wrong_row_is_refused_with_field_and_line(tmp_path, name, rows, message):
    with pytest.raises(ValueError, match=f"(?s)x.jsonl, .*{message}"):
        data.load_items(TASKS[name], write(tmp_path / "x.jsonl", rows))


@pytest.mark.parametrize(
    "suffix, content, message",
    [
        ("jsonl.gz", gzip.compress(b"{}" * 2000)[:20], "a damaged gzip file"),
        ("jsonl", b"", "holds no items"),
        ("csv", b"a\n\xe9\n", "x.csv: 'utf-8' codec"),
        ("parquet", b"PAR", "Parquet file size is 3 bytes"),
        ("xlsx", b"x", "unknown kind of file; known: .jsonl"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, suffix, content, message):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        data.load_items(TASKS["nq-closed"], path)
    assert "\n" not in str(error.value)


def test_wrong_names_and_files_are_refused_with_what_to_give(tmp_path):
    def refuse(message, name, *arguments):
        with pytest.raises((ValueError, OSError), match=message):
            data.load(find(name), *arguments)

    write(tmp_path / "demos.jsonl", [QA])
    refuse("--data .*: no file for xsum in this folder", "xsum", tmp_path)
    for name in ("validation-1.parquet", "validation-2.parquet"):
        (tmp_path / name).write_bytes(b"")
    refuse("several files fit triviaqa, name one", "triviaqa", tmp_path)
    refuse("memotrap needs --data FILE: python evaluate.py fetch", "memotrap")
    refuse("unknown task 'nqswap', did you mean nq-swap.; known tasks: xsum", "nqswap")
    refuse(
        "demos.jsonl, line 1: missing field: 'context'",
        "nq-swap",
        write_data("nq-swap", tmp_path),
        tmp_path,
    )


def test_without_a_connection_data_fail_at_once_with_host_and_remedy(tmp_path, monkeypatch):
    changes = {
        "ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in changes.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    with pytest.raises(
        OSError, match=r"^no connection to 127.0.0.1:9.*NQ-Swap; give yours with --data FILE"
    ) as error:
        data.load(TASKS["nq-swap"])
    # Without retries, which the library would make only if it were online.
    assert len(str(error.value)) <= 200 and huggingface_hub.constants.HF_HUB_OFFLINE


def test_the_table_holds_the_papers_sizes():
    sizes = {
        task.name: (task.n, None if task.choice else task.max_new_tokens, task.shots)
        for task in PAPER
    }
    musique = [name for name in sizes if name.startswith("musique")]
    assert len(musique) == 4
    assert sizes == dict.fromkeys(musique, (2417, 100, 17)) | {
        "xsum": (1000, 128, 0),
        "ifeval": (541, 1280, 0),
        "nq-open": (2655, 12, 1),
        "nq-closed": (2655, 12, 8),
        "nq-swap": (4746, 12, 4),
        "truthfulqa-gen": (817, 64, 6),
        "triviaqa": (11313, 12, 8),
        "popqa": (14267, 12, 8),
        "memotrap": (2539, None, 0),
        "truthfulqa-mc": (817, None, 6),
    }


def test_the_miniature_asks_in_its_last_line():
    [item], *_ = data.load(TASKS["miniature-conflict"], limit=1)
    line = prompts.dry_run(TASKS["miniature-conflict"], item, [], "plain")
    assert line["text"].startswith("Context: ") and line["text_without_context"].startswith(
        "Answer: The "
    )
    assert (
        line["text"].endswith(line["text_without_context"]) and line["memory"] != line["references"]
    )


def test_the_page_of_data_names_every_tasks_fields_and_commit():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    table = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    for task in PAPER:
        [cells] = [cells for cells in table if task.name in re.split(", | ", cells[1])]
        assert [field for field in task.fields if field not in cells[5]] == [], task.name
        assert task.origin is None or task.origin.revision[:7] in cells[4] or "the same" in cells[2]
