"""Detection of retrieval heads: scoring rule, prompts, resuming, the command line."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM

import cli
from heads import detect, load_heads, load_scores, needles
from model import Transformer
from runtime.parallel import Shard
from tests.checkpoints import random_ids, write_checkpoint, write_tokenizer
from tokenizer import Tokenizer

CHAT = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content | trim }}<|end|>{% endfor %}<|turn|>assistant:"
NEEDLE = needles.Needle("The night watch hid the keys under the blue stone.",
                        "Where did the night watch hide the keys?", "under the blue stone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, vocab_size=259, max_position_embeddings=2048)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder):
    return Transformer.load(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def prompt_of(tokenizer, length=900, depth=50, chat=None, seed=0):
    book = needles.make_book(tokenizer, needles.read_haystack(detect.HAYSTACK), 0, length)
    sample = needles.Sample(0, length, depth, 0)
    return needles.make_prompt(sample, NEEDLE, book, tokenizer, detect.TEMPLATE, chat, seed)


# The score of one run

# Prompt 10 11 12 13 11 14, its needle 11 12 13 11 (three distinct tokens). One layer of three heads, five steps.
PROMPT, SPAN, GENERATED = [10, 11, 12, 13, 11, 14], (1, 5), [11, 12, 11, 14, 11]
PATTERN = torch.tensor([[[1, 0, 4]], [[2, 2, 1]], [[4, 1, 2]], [[5, 5, 5]], [[1, 4, 9]]])


def test_each_distinct_needle_token_counts_once_and_repeats_count_if_published():
    # Head 0 copies 11, 12, 11, 11: two of three tokens. Head 1: 12, 11, 11. Head 2: 11 once; 14 is outside the needle.
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, SPAN).tolist() == [[2 / 3, 2 / 3, 1 / 3]]
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, SPAN, published=True).tolist() == [[1.0, 0.75, 0.25]]
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, (-1, -1), published=True).tolist() == [[0.0, 0.0, 0.0]]


def reference_run(folder, prompt, needle, steps, published):
    """The definition, with transformers: complete sequences and attention matrices, token by token."""
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    L, H = reference.config.num_hidden_layers, reference.config.num_attention_heads
    copied, ids = {(layer, head): [] for layer in range(L) for head in range(H)}, list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            out = reference(torch.tensor([ids]), output_attentions=True)
        token = int(out.logits[0, -1].argmax())
        for layer, head in copied:
            at = int(out.attentions[layer][0, head, -1].argmax())
            if needle[0] <= at < needle[1] and ids[at] == token:
                copied[layer, head].append(token)
        ids.append(token)
    span = prompt[slice(*needle)]
    scores = {h: len(c) / len(span) if published else len(set(c)) / len(set(span)) for h, c in copied.items()}
    return torch.tensor([[scores[layer, head] for head in range(H)] for layer in range(L)]), ids[len(prompt):]


@pytest.mark.parametrize("family, published", [("llama3", False), ("qwen2", True)])
def test_a_run_scores_heads_as_the_attention_of_transformers_does(tmp_path, family, published):
    write_checkpoint(tmp_path, family, vocab_size=12)
    prompt, needle = random_ids(40, vocab_size=12), (0, 36)     # ids 3 … 11 only, so no answer contains them all
    expected, ids = reference_run(tmp_path, prompt, needle, 16, published)
    scores, generated = detect.score_run(Transformer.load(tmp_path), prompt, needle, 16, published=published)
    assert generated == ids and expected.max() > 0
    torch.testing.assert_close(scores, expected.double(), atol=1e-6, rtol=0)    # the reference is float32


def test_an_answer_ends_with_an_end_token_or_the_complete_needle_unless_published(tmp_path):
    model, prompt = Transformer.load(write_checkpoint(tmp_path, "qwen2", vocab_size=8)), random_ids(40, vocab_size=8)
    ids = detect.score_run(model, prompt, (0, 40), 12, published=True)[1]
    assert ids == [0, 4, 6, 1, 3, 4, 6, 1, 3, 6, 0, 4]
    assert detect.score_run(model, prompt, (0, 40), 12, eos_ids=(6,))[1] == ids[:3]
    for start, needle, end in ((1, [3], 5), (2, [6, 6], 7), (16, [4, 3, 4], 6), (0, [7], 12)):
        span = (start, start + len(needle))
        assert prompt[slice(*span)] == needle
        assert detect.score_run(model, prompt, span, 12)[1] == ids[:end]
    assert detect.score_run(model, prompt, (1, 2), 12, published=True)[1] == ids


def test_a_needle_outside_the_prompt_is_refused(model):
    for span in (5, 5), (-1, 4), (4, 31):
        with pytest.raises(ValueError, match="is not a range of tokens in a prompt of 30"):
            detect.score_run(model, random_ids(30), span)


def test_batches_change_nothing(model):
    prompts = [random_ids(n, seed=n, vocab_size=259) for n in (7, 180, 340, 1)]
    spans = [(2, 6), (125, 150), (255, 300), (0, 1)]
    for prompt, span, together in zip(prompts, spans, detect.answer_batch(model, prompts, spans, 8), strict=True):
        (ids, attended), = detect.answer_batch(model, [prompt], [span], 8)
        assert together[0] == ids and torch.equal(together[1], attended)


class Twice(Shard):
    """Two ranks with the same heads and the same part of the vocabulary."""

    def all_gather(self, x):
        return torch.cat([x, x], -1)


def test_the_heads_of_all_ranks_are_scored(tmp_path):
    model, prompt = Transformer.load(write_checkpoint(tmp_path, vocab_size=12)), random_ids(40, vocab_size=12)
    scores, ids = detect.score_run(model, prompt, (0, 36), 16)
    assert scores.shape == (3, 4) and scores.max() > 0
    model.shard = Twice()
    assert detect.score_run(model, prompt, (0, 36), 16)[1] == ids
    assert torch.equal(detect.score_run(model, prompt, (0, 36), 16)[0], torch.cat([scores, scores], -1))


# Needles and prompts

@pytest.mark.parametrize("chat", [None, {}])
@pytest.mark.parametrize("depth", [0, 33, 100])
def test_the_needle_is_between_sentences_near_its_depth_and_its_tokens_are_its_text(tmp_path, depth, chat):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, CHAT))
    prompt = prompt_of(tokenizer, 3000, depth, chat)
    before, after = tokenizer.core.decode(prompt.ids, skip_special_tokens=False).split(NEEDLE.needle)
    assert re.search(r'([.!?]"?\s+|: |^)$', before) and re.match(r"\s", after)
    assert tokenizer.decode(prompt.ids[slice(*prompt.needle)]) == NEEDLE.real_needle
    assert abs(prompt.depth - depth) <= needles.NEAR
    assert 2700 < len(prompt.ids) <= 3000


def test_a_prompt_that_is_too_long_is_cut_sentence_by_sentence(tokenizer):
    book = needles.make_book(tokenizer, needles.read_haystack(detect.HAYSTACK), 0, 500)
    prompts = [needles.make_prompt(needles.Sample(0, 500, 50, 0), NEEDLE, book._replace(counts=counts), tokenizer,
                                   detect.TEMPLATE, None, 0) for counts in (book.counts, [0] * len(book.counts))]
    assert prompts[0] == prompts[1]                                             # also if the estimate is far too low


def test_abbreviations_and_initials_do_not_end_a_sentence():
    text = 'Mr. Green met Dr. A. Stone. "Why?" He left at 3.30 p.m. sharp! 他走了。她没有。'
    assert [text[m.end():][:4] for m in needles.SENTENCE_END.finditer(text)] == ['"Why', "He l", "她没有。", ""]


def test_short_haystacks_continue_with_the_next_text_and_then_repeat(tokenizer):
    book = needles.make_book(tokenizer, ["One is here. ", "Two is here. ", "Three is here."], 1, 5)
    assert book.text.startswith("Two is here. \n\nThree is here.\n\nOne is here. \n\nTwo is here.")


def test_the_plan_is_the_complete_grid_or_draws_needles_in_turn():
    assert len(needles.plan(3, 3, [10, 20], [0, 50, 100])) == 18
    drawn = needles.plan(4, 2, [10, 20], [0, 50, 100], runs=10, seed=1)
    assert len(set(drawn)) == 10
    assert sorted(s.needle for s in drawn) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert all(s.book == s.needle % 2 for s in drawn)
    assert drawn != needles.plan(4, 2, [10, 20], [0, 50, 100], runs=10, seed=2)


def test_the_published_position_is_by_tokens_at_the_full_stop_before_the_depth(tmp_path, monkeypatch):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    begin = ("<|begin|>", tokenizer.core.token_to_id("<|begin|>"))
    tokenizer.core.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    text, needle = "Aaaa bbb. " * 9, needles.Needle("N n.", "q?", "N n.")
    question = "Based on the content of the book, Question: q?\nAnswer:"

    def published(depth, length=400):
        prompt = needles.make_published_prompt(needles.Sample(0, length, depth, 0), needle, text, tokenizer)
        assert tokenizer.decode(prompt.ids[slice(*prompt.needle)]) == "N n."
        return tokenizer.core.decode(prompt.ids, skip_special_tokens=False).replace("<|begin|>", "^")

    # 400 tokens less 200 for question and answer less five of the needle: two beginnings and 193 letters.
    context = (text * 9)[:193]
    assert published(100) == f"^^^{context}^N n.{question}"
    assert published(50) == f"^^N n.^^{context}{question}"              # other vocabulary: no token is a full stop
    monkeypatch.setattr(needles, "FULL_STOPS", tuple(tokenizer.core.encode(".", add_special_tokens=False).ids))
    assert published(50) == f"^^^{context[:89]}^N n.{context[89:]}{question}"
    assert published(11) == f"^^^{context[:19]}^N n.{context[19:]}{question}"
    assert published(0) == f"^^N n.^^{context}{question}"
    assert published(50, length=0) == f"^^N n.{question}"               # the shortest of the authors' 20 lengths
    ids = [1, 7, 6, 5, 2, 5, 6, 7, 3]
    assert needles.locate_published(ids, [5, 6, 7]) == (1, 4)           # the first window with the needle's token set
    assert needles.locate_published(ids, [5, 6, 8]) == (-1, -1)


def test_texts_and_needles_are_read_from_files(tmp_path):
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"text": "One. "}\n{"text": "Two."}\n')
    assert needles.read_haystack(lines) == ["One.", "Two."]
    for i in (2, 1):
        (tmp_path / f"part{i}").mkdir()
        (tmp_path / f"part{i}" / "p1.txt").write_text(f"Text {i}.\n")
    assert needles.read_haystack(tmp_path) == ["Text 1.", "Text 2."]
    for line, message in (("{}", 'line 1: must have texts "needle"'), ("", "holds no needles"),
                          ('{"needle": "A b.", "question": "c", "real_needle": "d"}', "which is a part of needle")):
        lines.write_text(line)
        with pytest.raises(ValueError, match=message):
            needles.read_needles(lines)


# Settings and prompts from the command line


@pytest.fixture
def prepare(folder, monkeypatch):
    """The settings and the prompts of a command on the tiny model."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["detect", "--model", str(folder), "--out", "x", *map(str, arguments)])
        args = detect.parse_args()
        rows, texts = needles.read_needles(args.needles), needles.read_haystack(args.haystack)
        model, tokenizer = cli.load_model(args.model, args)
        settings = detect.make_settings(args, model, tokenizer, rows, texts)
        return settings, detect.make_prompts(settings, rows, texts, tokenizer)
    return run


def test_the_default_lengths_fit_the_context_and_published_ones_are_as_given(prepare, tokenizer):
    assert prepare("--depths", 1)[0]["lengths"] == [399, 799, 1198, 1598, 1998]
    settings, prompts = prepare("--published", "--lengths", "0:1900:20", "--depths", 1)
    assert settings["lengths"] == list(range(0, 1901, 100)) and len(prompts) == 60
    books = [text[:20] for text in needles.read_haystack(detect.HAYSTACK)]
    for prompt in prompts:
        text = tokenizer.decode(prompt.ids)
        assert prompt.sample.length < 400 or books[prompt.sample.needle] in text
        assert text.count("Based on the content of the book, Question: ") == 1


def test_thinking_is_off_and_the_settings_say_so(prepare, folder, tmp_path):
    template = CHAT + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    model = shutil.copytree(folder, tmp_path / "model")
    core = Tokenizer.load(write_tokenizer(model, template)).core
    for end, thinks, *more in (("<think></think>", False),
                               ("assistant:", True, "--template-args", '{"enable_thinking": true}')):
        settings, prompts = prepare("--model", model, "--lengths", 500, "--depths", 1, *more)
        assert core.decode(prompts[0].ids, skip_special_tokens=False).endswith(end)
        assert settings["template_args"] == {"enable_thinking": thinks}


def test_right_answers_recall_more_than_half_and_published_ones_end_at_two_ids_only(prepare, tokenizer, monkeypatch):
    def answer_batch(model, prompts, spans, max_new_tokens, stops, published):
        assert set(stops) == ({144, None} if published else {257})              # the vocabulary has no "<0x0A>"
        return [(tokenizer.encode(text), torch.zeros(len(text), 1, 1, dtype=int)) for text in texts]

    monkeypatch.setattr(detect, "answer_batch", answer_batch)
    needle = NEEDLE._replace(real_needle="under the blue stone")
    for more in ([], ["--published"]):
        settings, prompts = prepare("--lengths", 500, "--depths", 1, *more)
        texts = ["The stones under", "under the", "I do not know"]              # recall 0.75, 0.5, 0
        records = detect.run_batch(None, tokenizer, prompts, [needle] * 3, settings)
        assert [record["right"] for record in records] == [True, False, False]


# The program, on the miniature

DETECTION = cli.MINIATURE / "detection"
MINIATURE = ["--model", cli.MINIATURE, "--needles", DETECTION / "needles.jsonl",
             "--haystack", DETECTION / "haystack.jsonl", "--template", "Context: {context}\\n{question}",
             "--lengths", "60:120:2", "--runs", "8", "--batch-size", "3", "--max-new-tokens", "9"]


def test_an_interrupted_detection_continues_and_its_file_is_read_by_load_heads(call, tmp_path):
    path, part, authors = (tmp_path / name for name in ("heads.json", "heads.json.part", "new/authors.json"))
    part.touch()                                            # stopped before the settings
    status, _, err = call(detect.main, *MINIATURE, "--min-success", 9, "--out", path)      # leaves all runs in `part`
    assert status == 2 and "of 8 runs gave a right answer" in err and not path.exists()
    settings, first, second, third = part.read_bytes().splitlines(keepends=True)
    first = first.replace(b'"recall": 1.0, "right": true', b'"recall": 0.0, "right": false', 1)
    part.write_bytes(settings.replace(b'"fingerprint": {"', b'"fingerprint": {"more": 1, "'))
    _, _, err = call(detect.main, *MINIATURE, "--out", path, "--seed", 1)
    assert "unfinished detection with another fingerprint, seed; " in err
    part.write_bytes(settings + first + second[:-9])
    status, out, err = call(detect.main, *MINIATURE, "--min-success", 4, "--out", path, "--authors-format", authors)
    assert status == 0 and f"wrote {path}" in out and not part.exists(), err
    content = json.loads(path.read_text())
    assert content["runs"] == [run for line in (first, second, third) for run in json.loads(line)["runs"]]
    assert {*load_heads(path, 4, 8)[:3]} == {(2, 0), (2, 1), (3, 1)}
    right = [run for run in content["runs"] if run["recall"] > 0.5]
    assert content["samples"] == len(right) >= 4 and content["success_rate"] == round(len(right) / 8, 4)
    assert content["settings"] == json.loads(settings) and content["settings"]["fingerprint"]["weights"]
    assert {len(scores) for scores in json.loads(authors.read_text()).values()} == {len(right)}
    assert load_scores(authors) == pytest.approx(load_scores(path), abs=1e-6)       # six digits


def test_scores_that_are_all_zero_are_refused():
    model = SimpleNamespace(name="m", config=SimpleNamespace(n_layers=1, n_heads=2))
    with pytest.raises(ValueError, match="every head scores 0 in all 3 runs"):
        detect.summarise(model, [{"right": True, "scores": {}}] * 3, {}, 1)


@pytest.mark.parametrize("more, message", [
    (["--lengths", "1000:3000:2"], "3000 tokens do not fit the context of"),
    (["--lengths", "0:600:2"], "0 tokens cannot hold the needle"),
    (["--lengths", "5:4:2"], "argument --lengths: invalid lengths value"),
    (["--template", "{context} and that is all"], "must contain {context}, once, and {question}"),
    (["--haystack", "/proc/self/fdinfo"], "holds no text"),
    (["--lengths", "500", "--depths", "2", "--runs", "99"], "3 needles at 2 places make 6 runs"),
    (["--out", "."], "--out . is a folder"),
    (["--published", "--raw"], "--raw has no effect with --published"),
    (["--published", "--seed", "0"], "--seed has no effect with --published"),
    (["--template-args", '{"a": 1}'], "--template-args has no effect: no prompt goes through a chat template"),
])
def test_bad_options_are_refused_before_the_first_run(call, folder, tmp_path, more, message):
    status, _, err = call(detect.main, "--model", folder, "--out", tmp_path / "h.json", *more)
    assert status == 2 and message in err.splitlines()[-1] and not list(tmp_path.iterdir())
