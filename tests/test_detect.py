"""Detection of retrieval heads: scoring rule, prompts, resuming, the command line."""

import json
import re
import shutil
import sys

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM

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


# Prompt 10 11 12 13 11 14, its needle 11 12 13 11 (three distinct tokens). One layer of three heads, five steps.
PROMPT, SPAN, GENERATED = [10, 11, 12, 13, 11, 14], (1, 5), [11, 12, 11, 14, 11]
PATTERN = torch.tensor([[[1, 0, 4]], [[2, 2, 1]], [[4, 1, 2]], [[5, 5, 5]], [[1, 4, 9]]])


def test_each_distinct_needle_token_counts_once_and_repeats_count_if_published():
    # Head 0 copies 11, 12, 11, 11: two of three tokens. Head 1: 12, 11, 11. Head 2: 11 once; 14 is outside the needle.
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, SPAN).tolist() == [[2 / 3, 2 / 3, 1 / 3]]
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, SPAN, published=True).tolist() == [[1.0, 0.75, 0.25]]
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, (-1, -1), published=True).tolist() == [[0.0, 0.0, 0.0]]


def test_the_published_position_is_the_first_window_with_the_needles_token_set():
    ids = [1, 7, 6, 5, 2, 5, 6, 7, 3]
    assert needles.locate_published(ids, [5, 6, 7]) == (1, 4)       # another order, and not the needle
    assert needles.locate_published(ids, [5, 6, 8]) == (-1, -1)


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


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_a_run_scores_heads_as_the_attention_of_transformers_does(tmp_path, family, published):
    write_checkpoint(tmp_path, family, vocab_size=12)
    prompt, needle = random_ids(40, vocab_size=12), (0, 36)        # ids 3 … 11 only, so the answer never holds them all
    expected, ids = reference_run(tmp_path, prompt, needle, 16, published)
    scores, generated = detect.score_run(Transformer.load(tmp_path), prompt, needle, 16, published=published)
    assert generated == ids
    assert expected.max() > 0
    torch.testing.assert_close(scores, expected.double(), atol=1e-6, rtol=0)    # the reference is float32


def test_a_run_stops_at_an_end_token(model):
    prompt = random_ids(30, vocab_size=259)
    ids = detect.score_run(model, prompt, (0, 20), max_new_tokens=12)[1]
    assert len(ids) == 12
    stop = ids[4]
    assert detect.score_run(model, prompt, (0, 20), 12, eos_ids=(stop,))[1] == ids[:ids.index(stop) + 1]


@pytest.mark.parametrize("published, n", [(False, 4), (True, 6)])
def test_a_run_stops_when_the_answer_holds_the_needle_unless_published(model, monkeypatch, published, n):
    tokens = [7, 8, 9, 7, 7, 9]
    steps = iter(tokens)

    def forward(self, ids, cache, weights):
        weights.append(torch.ones(1, 1, 1, 4, 64))
        return torch.eye(259)[next(steps)].view(1, 1, 1, 259)
    monkeypatch.setattr(Transformer, "forward", forward)
    assert detect.score_run(model, [5, 7, 9, 8, 7, 6], (1, 5), 6, published=published)[1] == tokens[:n]


@pytest.mark.parametrize("span", [(5, 5), (-1, 4), (4, 31), (-1, -1)])
def test_a_needle_outside_the_prompt_is_refused(model, span):
    with pytest.raises(ValueError, match="is not a span of tokens in a prompt of 30"):
        detect.score_run(model, random_ids(30), span)


def test_batches_change_nothing(model):
    prompts, spans = [random_ids(n, seed=n, vocab_size=259) for n in (7, 180, 340, 1)], [(2, 6), (125, 150), (255, 300)]
    together = detect.answer(model, prompts, [*spans, (0, 1)], 8)
    for prompt, span, (ids, attended) in zip(prompts, [*spans, (0, 1)], together, strict=True):
        (alone, attended_alone), = detect.answer(model, [prompt], [span], 8)
        assert ids == alone
        assert torch.equal(attended, attended_alone)


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


def test_the_default_haystack_does_not_hold_the_needles():
    texts, rows = needles.read_haystack(detect.HAYSTACK), needles.read_needles(detect.HAYSTACK / "needles.jsonl")
    assert len(texts) == len(rows) == 3 and sum(len(text.split()) for text in texts) >= 50_000
    assert not any(row.real_needle in text for row in rows for text in texts)


@pytest.mark.parametrize("chat", [None, {}])
@pytest.mark.parametrize("depth", [0, 33, 100])
def test_the_needle_stands_between_sentences_near_its_depth_and_its_span_is_its_text(tmp_path, depth, chat):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, CHAT))
    prompt = prompt_of(tokenizer, 3000, depth, chat)
    before, after = tokenizer.core.decode(prompt.ids, skip_special_tokens=False).split(NEEDLE.needle)
    assert re.search(r'([.!?]"?\s+|: |^)$', before) and re.match(r"\s", after)
    assert tokenizer.decode(prompt.ids[slice(*prompt.span)]).strip() == NEEDLE.real_needle
    assert abs(prompt.at - depth) <= needles.NEAR
    assert 2700 < len(prompt.ids) <= 3000


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
        assert tokenizer.decode(prompt.ids[slice(*prompt.span)]) == "N n."
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


QUICK = ("--lengths", "500", "--depths", "1", "--min-success", "1")       # three runs


@pytest.fixture
def command(folder, monkeypatch, tmp_path):
    """Calls the command line on the tiny model, whose every answer counts as right."""
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 1.0)

    def call(*more, out="heads.json"):
        monkeypatch.setattr(sys, "argv", ["detect", "--model", str(folder), "--out", str(tmp_path / out), "--lengths",
                                          "420:600:2", "--depths", "3", "--max-new-tokens", "5", *map(str, more)])
        detect.main()
        return tmp_path / out
    return call


@pytest.fixture
def prepared(command, monkeypatch):
    """Stops the command line before the first run and returns the prompts and the settings."""
    def call(*more):
        calls = []
        monkeypatch.setattr(detect, "run_all", lambda *args: calls.append(args) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command(*more)
        return calls[0][2], calls[0][4]
    return call


def test_the_file_is_read_by_load_heads_and_says_where_it_comes_from(command, tmp_path):
    path = command("--authors-format", tmp_path / "authors.json")
    content = json.loads(path.read_text())
    assert len(load_heads(path, 3, 4)) == 12
    assert content["samples"] == len(content["runs"]) == 18 and content["success_rate"] == 1
    assert content["settings"]["seed"] == 0 and content["settings"]["fingerprint"]["weights"]
    authors = (tmp_path / "authors.json").read_text()
    assert "\n" not in authors
    assert {len(scores) for scores in json.loads(authors).values()} == {18}
    assert load_scores(tmp_path / "authors.json") == pytest.approx(load_scores(path), abs=1e-6)     # six digits


def test_an_interrupted_detection_ends_in_the_same_bytes(command, monkeypatch):
    complete = command(out="complete.json")
    run_batch, calls = detect.run_batch, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run_batch(*args)

    monkeypatch.setattr(detect, "run_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        command(out="cut.json")
    part = complete.with_name("cut.json.part")
    with open(part, "a") as file:
        file.write('{"runs": [{"nee')                               # the line that was being written
    cut = command(out="cut.json")
    assert not part.exists()
    assert len(calls) == 4 + 2                                      # five batches in all, three of them stored
    assert cut.read_bytes() == complete.read_bytes()


def test_a_detection_with_other_settings_or_weights_is_not_continued(command, folder, tmp_path, monkeypatch):
    model = shutil.copytree(folder, tmp_path / "model")
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 0.0)
    with pytest.raises(ValueError, match="0 of 3 runs"):
        command("--model", model, *QUICK)
    with pytest.raises(ValueError, match="unfinished detection with another seed; finish it"):
        command("--model", model, *QUICK, "--seed", 1)
    write_checkpoint(model, seed=1, vocab_size=259, max_position_embeddings=2048)
    with pytest.raises(ValueError, match="unfinished detection with another fingerprint"):
        command("--model", model, *QUICK)


def test_published_runs_are_placed_ended_and_scored_by_the_published_rules(command, monkeypatch, tokenizer):
    answer, calls = detect.answer, []
    monkeypatch.setattr(detect, "answer", lambda *args: calls.append(args) or answer(*args))
    content = json.loads(command("--published", "--batch-size", 3).read_text())
    for _, prompts, spans, _, stops, published in calls:
        assert published and set(stops) == {144, None}              # the end token does not end an answer
        for ids, (start, end) in zip(prompts, spans, strict=True):
            assert tokenizer.decode(ids).count("Based on the content of the book, Question: ") == 1
            assert set(ids[start:end]) and end - start > 10
    # No full stop of Llama 2's vocabulary: in front of everything, or behind it. Equal runs count each time.
    assert [run["at"] for run in content["runs"]] == ([0] * 2 + [100]) * 6
    assert content["settings"]["published"] is True and content["settings"]["template"] == needles.PUBLISHED


def test_the_authors_grid_and_folders_are_taken(prepared, tokenizer, tmp_path):
    for i in (1, 2, 3):
        (tmp_path / f"part{i}").mkdir()
        (tmp_path / f"part{i}" / "p1.txt").write_text(f"This is text {i}. " * 20)
    assert needles.read_haystack(tmp_path)[1].startswith("This is text 2.")
    prompts, settings = prepared("--published", "--lengths", "0:1900:20", "--depths", 3, "--haystack", tmp_path)
    assert settings["lengths"] == list(range(0, 1901, 100)) and len(prompts) == 180
    for prompt in prompts[10:]:
        assert prompt.sample.length < 400 or f"text {1 + prompt.sample.needle}" in tokenizer.decode(prompt.ids)
    assert detect.lengths("0:5000:20")[:4] == [0, 263, 526, 789]


def test_the_default_lengths_fit_the_context(prepared, folder, monkeypatch):
    rows = needles.read_needles(detect.HAYSTACK / "needles.jsonl")      # one token per byte
    least = max(len(detect.TEMPLATE.format(context=row.needle + " ", question=row.question)) for row in rows)
    monkeypatch.setattr(detect, "lengths", lambda text: None)
    assert prepared()[1]["lengths"] == [408, 817, 1226, 1634, 2043]
    assert prepared("--max-new-tokens", 1500)[1]["lengths"] == [least, 346, 413, 480, 548]


def test_thinking_is_off_and_the_settings_say_so(prepared, folder, tmp_path):
    template = CHAT + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    model = shutil.copytree(folder, tmp_path / "model")
    core = Tokenizer.load(write_tokenizer(model, template)).core
    for more, end, arguments in (((), "<think></think>", {"enable_thinking": False}),
                                 (("--template-args", '{"enable_thinking": true}'), "assistant:",
                                  {"enable_thinking": True})):
        prompts, settings = prepared("--model", model, *QUICK, *more)
        assert core.decode(prompts[0].ids, skip_special_tokens=False).endswith(end)
        assert settings["template_args"] == arguments


def test_results_that_cannot_rank_heads_say_what_to_try(command, monkeypatch, tmp_path):
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 0.5)        # a right answer has more
    with pytest.raises(ValueError, match="0 of 18 runs gave a right answer .* shorter --lengths, another --template"):
        command()
    with pytest.raises(ValueError, match="shorter --lengths, simpler --needles"):       # its prompts are fixed
        command("--published", *QUICK, out="published.json")
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 1.0)
    monkeypatch.setattr(detect, "head_scores", lambda *args: torch.zeros(3, 4))
    with pytest.raises(ValueError, match="every head scores 0 in all 3 runs"):
        command(*QUICK, out="zero.json")
    assert not (tmp_path / "zero.json").exists() and (tmp_path / "zero.json.part").exists()


@pytest.mark.parametrize("more, message", [
    (["--lengths", "1000:3000:2"], r"3000 tokens and 5 new ones exceed the context of .* use lengths up to 2043"),
    (["--lengths", "0:600:2"], r"0 tokens cannot hold the needle .*, its question and the template; they take \d+"),
    (["--lengths", "5:4:2"], "argument --lengths: invalid lengths value"),
    (["--depths", "0"], "argument --depths: "),
    (["--template", "{context} and that is all"], "must hold {context}, once, and {question}"),
    (["--haystack", "/nowhere.txt"], "/nowhere.txt is missing"),
    (["--haystack", "/proc/self/fdinfo"], "holds no text"),
    (["--lengths", "500", "--depths", "1"], "3 runs cannot give --min-success 10"),
    (["--runs", "99"], "3 needles at 6 places make 18 runs"),
    (["--authors-format", "."], ". is a folder"),
    (["--published", "--raw"], "--raw has no effect with --published"),
    (["--published", "--template", "{context}{question}"], "--template has no effect with --published"),
    (["--published", "--seed", "0"], "--seed has no effect with --published"),
    (["--template-args", '{"a": 1}'], "--template-args has no effect: no prompt goes through a chat template"),
])
def test_bad_options_are_refused_before_the_first_run(command, monkeypatch, more, message):
    monkeypatch.setattr(detect, "run_all", lambda *args: pytest.fail("ran"))
    with pytest.raises((ValueError, OSError), match=message):
        command(*more)


def test_bad_needles_are_named(tmp_path):
    path = tmp_path / "needles.jsonl"
    for line, message in (("{}", "line 1: a needle is a JSON object"), ('["a"]', "line 1: a needle is a JSON object"),
                          ('{"needle": "A b.", "question": "c", "real_needle": "d"}', "must be a part of needle"),
                          ("", "holds no needles")):
        path.write_text(line)
        with pytest.raises(ValueError, match=message):
            needles.read_needles(path)


def test_a_chat_template_that_rewrites_the_message_is_refused(tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "{{ messages[0].content | upper }}"))
    with pytest.raises(ValueError, match="rewrites the message"):
        prompt_of(tokenizer, chat={})
