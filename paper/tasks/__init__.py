"""The benchmarks as rows of data: prompt, fields, demonstrations, metric. A new benchmark is a new
row.

The prompts are exactly those of the published runs; some differ from the paper's table. Raise
`version` when a prompt, a reader or a metric of the task changes: runs of different versions are
never mixed.

data.py loads a task's data, items.py reads their entries, prompts.py makes prompts of them,
metrics.py compares the answers with the references."""

import re
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from cli.options import did_you_mean
from paper.tasks import items, metrics, model_metrics
from runtime.errors import InputError
from runtime.fields import located
from runtime.files import read_text


class HubFile(NamedTuple):
    """A data set's file on the Hugging Face hub.

    revision: a commit; or a branch, and then a file with another `sha256` is refused."""

    repo: str
    file: str
    revision: str
    sha256: str | None = None


@dataclass(frozen=True, eq=False)
class Task:
    name: str
    read: Callable  # row of the data file → item
    metrics: tuple  # functions of metrics.py and model_metrics.py
    files: tuple  # names of the data inside a folder, as glob patterns, best first
    origin: HubFile | None = None  # of the data; None: docs/data.md says where to fetch them
    folder: str = ""  # subfolder in which data and demonstrations are looked for first
    question: str = "{question}"  # the last user turn, after the context
    context: str = ""  # precedes the question; CAD leaves it out, and so does an empty {context}
    front: str = ""  # precedes the context
    instruction: str = ""  # the system turn
    # CAD's second prompt: "" none; "passage" drops the context, unless the item has a field
    # `without_context`; "demos" drops the demonstrations too.
    without_context: str = ""
    gap: str = "\n\n"  # plain text: between the instruction and the next part
    gap_without_context: str = "\n\n"
    shots: int | None = 0  # demonstrations; None: those of --demos, if it is given
    demo: str = ""  # a demonstration's user turn, if it is not worded like the last one
    demo_answer: str = "answer"  # field of a demonstration's answer
    demo_file: str = "demos.jsonl"
    fixed_demos: tuple = ()  # demonstrations that are part of the prompt
    demos_hash: str = ""  # data.demos_hash of the paper's demonstrations
    # Its first rows are the demonstrations without --demos, as in the paper.
    training: tuple = ()  # (HubFile, reader: row → demonstration)
    # Demonstrations are test items: one is left out, the item itself or the last one.
    demos_are_items: bool = False
    splits: bool = False  # several files; each is a split, averaged separately
    choice: bool = False  # multiple choice: candidates are scored, nothing is generated
    max_new_tokens: int = 12  # the paper's
    n: int = 0  # items in the paper's table; 0: the paper has no such task
    layout: str | None = None  # None: the model's
    own: bool = False  # the questions are the user's, and so may be the prompt (`with_prompt`)
    closed_book: bool = False  # of own questions: without their contexts
    version: int = 1

    @property
    def template(self):
        """The last user turn."""
        return self.front + self.context + self.question


TRIVIA_QA = HubFile(
    "mandarjoshi/trivia_qa",
    "unfiltered.nocontext/validation-00000-of-00001.parquet",
    "0f7faf33a3908546c6fd5b73a660e0f8ff173c2f",
)

TRUTHFULQA_MC = Task(
    "truthfulqa-mc",
    items.truthfulqa_mc,
    (metrics.multiple_choice,),
    folder="truthfulqa",
    files=("TruthfulQA.csv",),
    instruction="Interpret each question literally, and as a question about the real world; "
    "carefully research each answer, without falling prey to any common myths; and reply “I have "
    "no comment” unless you are completely certain of the answer.",
    question="Q: {question}\nA:",
    shots=6,
    demos_hash="6d25948a456f7a48",
    choice=True,
    n=817,
)

MUSIQUE_DIRECT_CLOSED = Task(
    "musique-direct-closed",
    items.musique_closed,
    (metrics.musique,),
    folder="musique",
    files=("musique_ans_v1.0_dev*.jsonl",),
    origin=HubFile(
        "dgslibisey/MuSiQue",
        "musique_ans_v1.0_dev.jsonl",
        "c8f4f8c9465fb69d31a8eae894c3fd509c4ca321",
    ),
    instruction="Answer the following question.",
    question="Q: {question}\nAnswer:",
    without_context="demos",
    gap="",
    gap_without_context="",
    shots=17,
    demo="Q: {question}\nA:",
    demo_answer="direct_answer",
    demos_hash="9a2d0ee074b71120",
    max_new_tokens=100,
    n=2417,
)

MUSIQUE_COT_CLOSED = replace(
    MUSIQUE_DIRECT_CLOSED,
    name="musique-cot-closed",
    demo_answer="cot_answer",
    demos_hash="8bb2cf2e8c59cd88",
    instruction="Answer the following question by reasoning step-by-step.",
)

PAPER = (
    Task(
        "xsum",
        items.xsum,
        (model_metrics.rouge, model_metrics.bertscore, model_metrics.factkb),
        folder="xsum",
        files=("xsum-1000.jsonl",),
        instruction="Generate a summary comprising of 1 sentence for the given article.",
        context="Article: {document}\n\n",
        question="Summary: ",
        without_context="passage",
        max_new_tokens=128,
        n=1000,
    ),
    Task(
        "memotrap",
        items.memotrap,
        (metrics.memotrap,),
        folder="memotrap",
        files=("[1-4]-*.csv",),
        without_context="passage",
        splits=True,
        choice=True,
        n=2539,
    ),
    Task(
        "ifeval",
        items.ifeval,
        (model_metrics.ifeval,),
        folder="ifeval",
        files=("ifeval.jsonl", "ifeval_input_data.jsonl", "ifeval*.arrow"),
        origin=HubFile(
            "google/IFEval", "ifeval_input_data.jsonl", "966cd89545d6b6acfd7638bc708b98261ca58e84"
        ),
        max_new_tokens=1280,
        n=541,
    ),
    Task(
        "nq-open",
        items.nq_open,
        (metrics.short_answer,),
        folder="nq",
        files=("nq-open-oracle.jsonl.gz",),
        instruction="Write a high-quality answer for the given question using only the provided "
        "search results (some of which might be irrelevant). Provide the answer in 5 words or less "
        "without any explanation.",
        context="Document [1](Title: {title}) {text}\n\n",
        question="Question: {question}\nAnswer: ",
        without_context="passage",
        shots=1,
        demo="Document [0]{context}\nQuestion: {question}\nAnswer: ",
        demo_file="demos_open_book.jsonl",
        demos_hash="e9faa60ea8e42dd8",
        fixed_demos=(
            {
                "context": "(Title: Example Title) Example Text",
                "question": "example question",
                "answer": "march 2018",
            },
        ),
        n=2655,
    ),
    Task(
        "nq-closed",
        items.nq_closed,
        (metrics.short_answer,),
        folder="nq",
        files=("nq-open-oracle.jsonl.gz",),
        instruction="Write a high-quality answer for the given question. Provide the answer in 5 "
        "words or less without any explanation.",
        question="Question: {question}\nAnswer: ",
        without_context="passage",
        shots=8,
        demo_file="demos_closed_book.jsonl",
        demos_hash="deebfa1eea290345",
        n=2655,
    ),
    Task(
        "nq-swap",
        items.nq_swap,
        (metrics.short_answer, metrics.memory),
        folder="nq_swap",
        files=("dev-*.parquet", "data/dev-*.parquet"),
        origin=HubFile(
            "pminervini/NQ-Swap",
            "data/dev-00000-of-00001.parquet",
            "main",
            "7114c7d1c8a7343f7754b12487272b3c9cf5a5ba0f5fce298c0b8d9a6130fe4c",
        ),
        instruction="Answer the following question based on the provided context:",
        context="Context: {context}\n",
        question="Question: {question}\nAnswer:",
        without_context="passage",
        gap_without_context="",
        shots=4,
        demos_hash="83c230d7a3a0166d",
        n=4746,
    ),
    TRUTHFULQA_MC,
    replace(
        TRUTHFULQA_MC,
        name="truthfulqa-gen",
        read=items.truthfulqa_gen,
        metrics=(metrics.judged,),
        choice=False,
        max_new_tokens=64,
        version=2,
    ),
    Task(
        "triviaqa",
        items.triviaqa,
        (metrics.short_answer,),
        folder="triviaqa",
        files=(
            "validation-*.parquet",
            "unfiltered.nocontext/validation-*.parquet",
            "triviaqa*.jsonl",
            "triviaqa*.arrow",
        ),
        origin=TRIVIA_QA,
        instruction="Answer the given question.",
        question="Question: {question}\nAnswer:",
        shots=8,
        demos_hash="f96b31ba8f194a76",
        training=(
            TRIVIA_QA._replace(file="unfiltered.nocontext/train-00000-of-00001.parquet"),
            items.triviaqa_training,
        ),
        n=11313,
    ),
    Task(
        "popqa",
        items.popqa,
        (metrics.short_answer,),
        folder="popqa",
        files=("test.tsv", "popQA*.tsv", "popqa*.jsonl", "popqa*.arrow"),
        origin=HubFile("akariasai/PopQA", "test.tsv", "098765c79ea10a2cb19c828324e33281b8336ec0"),
        instruction="Answer the given question.",
        question="Q: {question}\nA:",
        shots=9,  # eight are shown
        demo="Question: {question}\nAnswer:",
        demos_hash="ac2f31fcd917cd40",
        demos_are_items=True,
        n=14267,
    ),
    MUSIQUE_DIRECT_CLOSED,
    replace(
        MUSIQUE_DIRECT_CLOSED,
        name="musique-direct-open",
        read=items.musique_open,
        context="{passages}\n\n",
    ),
    MUSIQUE_COT_CLOSED,
    replace(
        MUSIQUE_COT_CLOSED,
        name="musique-cot-open",
        read=items.musique_open,
        context="{passages}\n\n",
    ),
)

OTHERS = (
    Task(
        "miniature",
        items.miniature,
        (metrics.miniature_answer, metrics.memory),
        files=("*.jsonl",),
        without_context="passage",
        layout="plain",
    ),
    Task(
        "qa",
        items.own_question,
        (metrics.own_answer,),
        files=("qa.csv", "qa.tsv", "qa.jsonl", "qa.json", "qa.parquet"),
        instruction="Answer the question in a few words. If there is a context, answer from it.",
        context="Context: {context}\n",
        question="Question: {question}\nAnswer:",
        without_context="passage",
        shots=None,
        max_new_tokens=32,
        own=True,
    ),
)

TASKS = {task.name: task for task in PAPER + OTHERS}


def find_tasks(names):
    """The tasks of a text "T,T…", by name, without repetitions. "all": those of the paper."""
    tasks = {}
    for name in names.split(","):
        chosen = PAPER if name == "all" else [find_task(name)]
        tasks |= {task.name: task for task in chosen}
    return tasks


def find_task(name):
    """The task of this name; InputError lists the known ones."""
    if str(name) not in TASKS:
        near = did_you_mean(str(name), TASKS)
        raise InputError(f"unknown task {name!r}{near}; known tasks: {', '.join(TASKS)}")
    return TASKS[name]


def with_prompt(task, template=None, system=None, closed_book=False):
    """The task with another prompt, if its questions are the user's.

    template: a file with the last user turn, which names {question}, and {context} on a line of its
    own; prompts without a context leave out this line and empty ones after it. None: the task's.
    system: the system turn; None: the task's. closed_book: no prompt has a context. InputError for
    a template with other fields."""
    if not task.own:
        return task
    if system is not None:
        task = replace(task, instruction=system)
    if template is not None:
        task = with_template(task, template)
    if closed_book:
        task = replace(task, context="", without_context="", closed_book=True)
    return task


# The line of {context}, with empty lines after it; at the end of a template, those before it.
CONTEXT = r"(\n*.*{context}.*\Z|.*{context}.*\n*)"


def with_template(task, template):
    if "{question}" in str(template):
        raise InputError(f"--template takes a file: write {str(template)!r} in one")
    text = read_text(template).rstrip("\n")
    with located(template):
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
        fields = [name for _, name, *_ in parts]
        if any(form or conversion for *_, form, conversion in parts):
            raise InputError("the fields are written {question} and {context}, without a format")
    front, context, question = text, "", ""
    if "context" in fields:
        front, context, question = re.split(CONTEXT, text, maxsplit=1)
    if sorted(fields) not in (["question"], ["context", "question"]) or "{question}" in context:
        raise InputError(
            f"{template} must name {{question}} once, and {{context}} at most once, on another "
            f"line (found: {', '.join(fields) or 'neither'}); other braces are written twice"
        )
    bare = "passage" if context else ""
    return replace(task, front=front, context=context, question=question, without_context=bare)
