"""The model for lm-evaluation-harness beside the harness's own, `hf`, `score` and `generate`.

`hf` gets its tokenizers as objects, because transformers 5 builds others from some old files."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="the extra `harness`: lm-eval")
pytest.importorskip("accelerate", reason="the harness's own backend needs it")

import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer as Core
from tokenizers import processors

from decoders.baselines import CD, DoLa  # noqa: F401 (of a table)
from decoders.scoring import score
from decore import DeCoRe, Greedy, generate  # noqa: F401 (of a table)
from integrations import lm_eval as harness
from integrations.lm_eval_model import HarnessModel
from miniature.data import make_split
from model import Transformer
from runtime.files import read_json
from tests.checkpoints import write_checkpoint, write_json, write_lines, write_tokenizer
from tests.conftest import TEMPLATE
from tests.tables import each, rows
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-data.md").read_text()
BEGIN, END = "<|begin|>", "<|end|>"
HEADS = [(0, 1), (2, 3)]
CHOICES = """
"Who wrote it? " | [" Ann", " Bo and Cy", " D"]
"Ünïcode, 中文:" | [" ja", " nein"]
"Where is the old mill?" | [" on the hill that we saw", " here"]
"LONG" | [" x", " yy", " zzz"]
"" | ["begins", "with nothing"]
""".replace("LONG", "A long one. " * 45)
CHOICES = [[*map(json.loads, row)] for row in rows(CHOICES)]
PROMPTS = [
    "Copy: abc.",
    "Say something about rivers.",
    "1 + 1 =",
    "Long: " + "words " * 90,
    "你好?",
]
# None of the stops is within a special token.
LIMITS = dict(until=["k", "\n", "Qz", "w"], max_gen_toks=24, do_sample=False)


def run(lm, kind, arguments):
    """Calls a method of the harness's interface on requests with these arguments."""
    requests = [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


def write(folder, family):
    write_checkpoint(folder, family, vocab_size=259, bos_token_id=256, eos_token_id=257)
    write_tokenizer(folder, TEMPLATE)
    if family == "qwen2":  # Qwen's tokenizers begin no text with BOS
        config = {"eos_token": END, "chat_template": TEMPLATE}
        write_json(folder / "tokenizer_config.json", config)
    else:
        core = Core.from_file(f"{folder}/tokenizer.json")
        begin = dict(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 256)])
        core.post_processor = processors.TemplateProcessing(**begin)
        core.save(f"{folder}/tokenizer.json")
    return folder


@pytest.mark.parametrize("family", ["llama3", "qwen2"])  # with and without BOS
def test_every_value_equals_that_of_hf(tmp_path, family):
    folder = write(tmp_path / family, family)
    how = dict(dtype="float32", attn_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    special = dict(eos_token=END, pad_token=END, chat_template=TEMPLATE)
    if family != "qwen2":
        special["bos_token"] = BEGIN
    file = f"{folder}/tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, **special)
    own = Transformer.load(folder), Tokenizer.load(folder)
    models = (
        HarnessModel(*own, Greedy(), batch_size=4),
        HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=4),
    )
    shot = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "yes"}]
    chats = [
        [lm.apply_chat_template([*shot, {"role": "user", "content": text}]) for text in PROMPTS]
        for lm in models
    ]
    assert chats[0] == chats[1]
    contexts = [*CHOICES, *((chat, ["yes", " no"]) for chat in chats[0])]
    pairs = [(context, answer) for context, answers in contexts for answer in answers]
    pairs = pairs[::2] + pairs[1::2]  # the answers to a context are not neighbours
    (sums, greedy), (their_sums, theirs_greedy) = (
        zip(*run(lm, "loglikelihood", pairs)) for lm in models
    )
    assert sums == pytest.approx(their_sums, abs=1e-4) and greedy == theirs_greedy
    requests = [(text, LIMITS) for text in PROMPTS + chats[0]]
    texts, their_texts = (run(lm, "generate_until", requests) for lm in models)
    assert texts == their_texts


# The other decoders


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model with its tokenizer, and an amateur with the same."""
    folder = write(tmp_path_factory.mktemp("small"), "llama3")
    model, amateur = Transformer.load(folder), Transformer.load(folder)
    return model, Tokenizer.load(folder), amateur


DECODERS = """
DeCoRe(HEADS, mask_prompt=True)
DeCoRe(HEADS, "query", mask_prompt=True, alpha=2.0)
DeCoRe(HEADS, amateur=amateur)
DoLa("high")
CD(amateur)
"""


@pytest.mark.parametrize("method", DECODERS.split("\n")[1:-1])
def test_a_decoder_gives_what_score_and_generate_give(small, method):
    model, tokenizer, amateur = small
    lm = HarnessModel(model, tokenizer, eval(method), batch_size=2)
    context, answers = "Where is the mill?", [" on the hill", " here", " gone for good"]
    scores = run(lm, "loglikelihood", [(context, answer) for answer in answers])
    ids = [tokenizer.encode(answer, bos=False) for answer in answers]
    expected = score(model, tokenizer.encode(context), ids, lm.method)
    assert [log_p for log_p, _ in scores] == expected
    prompts = ("abc", "A longer prompt", "x")
    limits = dict(until=["w"], max_gen_toks=20)
    texts = run(lm, "generate_until", [(prompt, limits) for prompt in prompts])
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    more = dict(max_new_tokens=20, eos_ids=tokenizer.eos_ids)
    expected = generate(model, ids, lm.method, **more)
    assert texts == [tokenizer.decode(g.ids).split("w")[0] for g in expected]


# Context and answer → the texts that are encoded. "er" is a token.
MERGED = """
["Answe", "r"] | ["Answe", "r"]
["Answe ", "r"] | ["Answe", " r"]
[" ", "r"] | ["<|end|>", " r"]
["Answer", "s"] | ["Answer", "s"]
"""


def test_an_answer_that_merges_with_its_context_is_tokenised_alone(tmp_path):
    folder = write(tmp_path / "m", "qwen2")
    content = read_json(folder / "tokenizer.json")
    vocabulary = content["model"]["vocab"]
    byte = max(vocabulary, key=vocabulary.get)  # that no text has
    vocabulary["er"] = vocabulary.pop(byte)
    content["model"]["merges"] = [["e", "r"]]
    write_json(folder / "tokenizer.json", content)
    model, tokenizer = Transformer.load(folder), Tokenizer.load(folder)
    lm = HarnessModel(model, tokenizer, Greedy())
    for pair, parts in (map(json.loads, row) for row in rows(MERGED)):
        ids = [tokenizer.encode(part, bos=False) for part in parts]
        [(log_p, _)] = run(lm, "loglikelihood", [tuple(pair)])
        assert log_p == pytest.approx(score(model, *ids, Greedy()))


def test_contexts_that_lose_their_beginning_are_a_warning(small):
    lm = HarnessModel(*small[:2], Greedy())
    for kind, rest in (("loglikelihood", "x"), ("generate_until", dict(max_gen_toks=2))):
        for n, count in ((lm.max_length - 3, 0), (lm.max_length, 1)):  # BOS is one more token
            with warnings.catch_warnings(record=True) as caught:
                run(lm, kind, [("w" * n, rest)])
            assert ["lose their beginning" in str(w.message) for w in caught] == [True] * count


REFUSED = """
generate_until | ["abc", {"do_sample": true}] | do_sample True, but decoding is greedy
generate_until | ["abc", {"until": ["<|end|>\\n"]}] | can only be the special token
generate_until | ["abc", {"max_gen_toks": 512}] | a task needs 512 new tokens
loglikelihood_rolling | ["A text."] | choose tasks with answers
loglikelihood | ["a", "b"], ["c", ""] | answer '' to 'c' has 0
command | --method cad --tasks x | method 'cad' is unknown
command | --method greedy --heads f | --heads has no effect on greedy
command | --tasks x --model_args a=y | --model_args has no effect
command |  | --tasks is missing
command | --tasks x --template-args {"a":1} | has no effect without --apply_chat
"""


@each("kind, text, words", REFUSED)
def test_what_cannot_be_run_is_refused_in_one_line(small, kind, text, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["integrations.lm_eval", *text.split()])
    monkeypatch.setattr(sys, "path", sys.path[:])
    lm = HarnessModel(*small[:2], Greedy())
    with pytest.raises(ValueError, match=words):
        if kind == "command":
            harness.main()
        run(lm, kind, [*map(tuple, json.loads(f"[{text}]"))])


def test_options_of_tasks_without_effect_are_read_and_a_chat_without_its_prompt_is_refused(small):
    lm = HarnessModel(*small[:2], Greedy())
    assert lm.read_generation(dict(until="k", top_p=0.9, max_new_tokens=5)) == (("k",), 5)
    with pytest.raises(ValueError, match="leave out --apply_chat_template"):
        lm.apply_chat_template([], False)


def write_example(folder, items, old="", new=""):
    """Write the example of docs/own-data.md with these items → their path. old, new: a change."""
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    [reader] = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    path = write_lines(folder / "conflict.jsonl", items)
    example = example.replace("conflict.jsonl", str(path)).replace(old, new)
    (folder / "conflict.yaml").write_text(example)
    (folder / "rows.py").write_text(reader)
    return path


@pytest.mark.parametrize("answers", [["2026-11-28", "1999-01-01"], ["007", "12"], ["None", "NA"]])
def test_the_example_of_the_page_keeps_answers_as_they_are_typed(answers, tmp_path):
    write_example(tmp_path, [dict(prompt="Q", answer=a) for a in answers])
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["conflict"])
    [task] = tasks["tasks"].values()
    assert [task.doc_to_target(doc) for doc in task.test_docs()] == [f" {a}" for a in answers]


# The command

UTILS = "import evaluate\nload = evaluate.load\n\ndef ask(doc):\n    return doc['prompt']\n"


def test_the_example_of_the_page_gives_the_number_of_evaluate_with_both_engines(tmp_path, start):
    """Tasks may import the library `evaluate`, which is not our evaluate.py."""
    (tmp_path / "utils.py").write_text(UTILS)
    items = [item._asdict() for item in make_split("conflict", 24)]
    items = write_example(tmp_path, items, '"{{prompt}}"', "!function utils.ask")
    tasks = f"--tasks conflict --include_path {tmp_path} --batch_size 12"
    program = f"-m integrations.lm_eval --method decore-entropy {tasks} --output_path"
    results = []
    for engine in "", "--transformers":
        out = tmp_path / f"out{len(results)}"
        command = [sys.executable, *f"{program} {out} {engine}".split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "miniature ({'method': " in done.stdout
        results.append(read_json(next(out.rglob("results_*.json"))))
    own, hf = results
    assert own["results"] == hf["results"]
    configs = [result["config"]["model_args"] for result in results]
    assert [c["engine"] for c in configs] == ["own", "transformers"]
    assert configs[0]["method"] == "decore-entropy"
    assert configs[1]["versions"]["transformers"] == transformers.__version__
    options = f"--task miniature --data {items} --method decore-entropy --out {tmp_path}/runs"
    _, [out], _ = start(options)
    number = out["metrics"]["exact_match"]
    assert own["results"]["conflict"]["exact_match,none"] == number
    assert f"match is {number:.2f} with DeCoRe entropy" in PAGE
