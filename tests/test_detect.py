"""Detection of retrieval heads: scoring rule, prompts, shared prefill, resuming, the command line."""

import json
import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import processors

import cli
from heads import detect, load_heads, load_scores, needles
from heads.haystack import write as write_haystack
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


def prompt_of(tokenizer, length=900, depth=50, needle=NEEDLE, template=detect.TEMPLATE, chat=None, seed=0):
    book = needles.make_book(tokenizer, needles.read_haystack(detect.HAYSTACK), 0, length)
    return needles.make_prompt(needles.Sample(0, length, depth, 0), needle, book, tokenizer, template, chat, seed)


# ----------------------------------------------------------------------------------------------------- the scoring rule

# Prompt 10 11 12 13 11 14, its needle 11 12 13 11 (three distinct tokens). One layer of three heads, five steps.
PROMPT, SPAN, GENERATED = [10, 11, 12, 13, 11, 14], (1, 5), [11, 12, 11, 14, 11]
PATTERN = torch.tensor([[[1, 0, 4]], [[2, 2, 1]], [[4, 1, 2]], [[5, 5, 5]], [[1, 4, 9]]])


def test_each_distinct_needle_token_counts_once():
    # Head 0 copies 11, 12, 11, 11: two of three tokens. Head 1: 12, 11, 11. Head 2: 11 once; 14 is outside the needle.
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, SPAN).tolist() == [[2 / 3, 2 / 3, 1 / 3]]


def test_the_published_rule_counts_repeats():
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, SPAN, published=True).tolist() == [[1.0, 0.75, 0.25]]


def test_only_the_published_rule_exceeds_one():
    pattern, generated = torch.ones(9, 1, 1, dtype=torch.long), [11] * 9
    assert detect.head_scores(pattern, generated, PROMPT, (1, 3), published=True).item() == 4.5
    assert detect.head_scores(pattern, generated, PROMPT, (1, 2)).item() == 1.0


def test_a_needle_that_was_not_located_scores_zero():
    assert detect.head_scores(PATTERN, GENERATED, PROMPT, (-1, -1), published=True).tolist() == [[0.0, 0.0, 0.0]]


def test_the_published_place_is_the_first_window_with_the_needles_token_set():
    ids = [1, 7, 6, 5, 2, 5, 6, 7, 3]
    assert needles.find_published(ids, [5, 6, 7]) == (1, 4)        # another order, and not the needle
    assert needles.find_published(ids, [5, 6, 8]) == (-1, -1)


# -------------------------------------------------------------------------------------------------------------- one run


def reference_run(folder, prompt, needle, steps, published):
    """The definition, by transformers, whole sequences and whole attention matrices, token by token."""
    from transformers import AutoModelForCausalLM
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
def test_one_run_is_what_transformers_attention_says(tmp_path, family, published):
    write_checkpoint(tmp_path, family, vocab_size=12)
    prompt, needle = random_ids(40, vocab_size=12), (0, 36)        # ids 3 … 11 only, so the answer never holds them all
    expected, ids = reference_run(tmp_path, prompt, needle, 16, published)
    scores, generated = detect.score_run(Transformer.load(tmp_path), prompt, needle, 16, published=published)
    assert generated == ids
    assert expected.max() > 0
    torch.testing.assert_close(scores, expected.double(), atol=1e-6, rtol=0)    # the reference is float32


@pytest.mark.parametrize("published", [False, True])
def test_a_run_stops_at_an_end_token(model, published):
    prompt = random_ids(30, vocab_size=259)
    _, ids = detect.score_run(model, prompt, (0, 20), max_new_tokens=12)
    assert len(ids) == 12
    stop = ids[4]
    n = ids.index(stop) + 1
    stopped = detect.score_run(model, prompt, (0, 20), max_new_tokens=12, eos_ids=(stop,), published=published)[1]
    assert stopped == ids[:n]


def test_a_run_stops_when_the_answer_holds_the_needle_unless_published(model):
    prompt = random_ids(30, vocab_size=259)
    first = detect.score_run(model, prompt, (0, 20), max_new_tokens=1)[1]
    at = len(prompt)
    prompt = [first[0]] + prompt                                  # a needle of one token; the model may now say others
    ids = detect.score_run(model, prompt, (0, 1), max_new_tokens=at, published=True)[1]
    assert len(ids) == at
    until = ids.index(first[0]) + 1 if first[0] in ids else at
    assert detect.score_run(model, prompt, (0, 1), max_new_tokens=at)[1] == ids[:until]
    assert until < at


def test_a_run_goes_on_until_repeated_tokens_of_the_needle_have_come_again(model, monkeypatch):
    says = iter([7, 8, 9, 7, 7, 9, 8])
    monkeypatch.setattr(Transformer, "head", lambda self, x: torch.eye(259)[next(says)].expand(*x.shape[:-1], -1))
    assert detect.score_run(model, [5, 7, 9, 8, 7, 6], (1, 5))[1] == [7, 8, 9, 7]


@pytest.mark.parametrize("span", [(5, 5), (-1, 4), (4, 31), (-1, -1)])
def test_a_needle_outside_the_prompt_is_refused(model, span):
    with pytest.raises(ValueError, match="no span of tokens in a prompt of 30"):
        detect.score_run(model, random_ids(30), span)


def test_batches_and_shared_beginnings_change_nothing(model):
    text = random_ids(300, vocab_size=259)
    prompts = [text[:n] + random_ids(m, seed=n, vocab_size=259) for n, m in ((0, 7), (120, 60), (250, 90), (300, 1))]
    spans = [(2, 6), (125, 150), (255, 300), (10, 200)]
    together = detect.answer(model, prompts, spans, 8, trunk=detect.open_trunk(model, text[:280]))
    for prompt, span, (ids, attended) in zip(prompts, spans, together, strict=True):
        (alone, attended_alone), = detect.answer(model, [prompt], [span], 8)
        assert ids == alone
        assert torch.equal(attended, attended_alone)


class Threads(Shard):
    """Two ranks as two threads of this process."""

    meeting, box = threading.Barrier(2, timeout=20), [None, None]

    def both(self, x):
        self.box[self.rank] = x
        self.meeting.wait()
        parts = list(self.box)
        self.meeting.wait()
        return parts

    def all_reduce(self, x):
        return x.copy_(sum(self.both(x.clone())))

    def all_gather(self, x):
        return torch.cat(self.both(x), -1)

    def broadcast(self, value):
        return self.both(value)[0]


def test_two_ranks_score_all_heads_as_one_does(tmp_path):
    write_checkpoint(tmp_path, vocab_size=12)
    prompt = random_ids(40, vocab_size=12)

    def run(shard):
        return detect.score_run(Transformer.load(tmp_path, shard=shard), prompt, (0, 36), max_new_tokens=16)

    scores, ids = run(Shard())
    with ThreadPoolExecutor(2) as pool:
        for there, ids_there in pool.map(run, [Threads(rank, 2) for rank in range(2)]):
            assert ids_there == ids
            assert there.shape == (3, 4)
            assert torch.equal(there, scores)
    assert scores.max() > 0


# ------------------------------------------------------------------------------------------------ needles and haystacks


def test_the_default_haystack_is_varied_english_that_its_script_writes_again():
    texts, seen = needles.read_haystack(detect.HAYSTACK), set()
    assert sum(len(text.split()) for text in texts) >= 50_000
    for seed, (text, grammar) in enumerate(zip(texts, write_haystack.BOOKS.values(), strict=True), 1):
        assert write_haystack.write_book(grammar, seed, seen).strip() == text
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[.!?]\")\s+", " ".join(texts))
    assert len(set(sentences)) > 0.99 * len(sentences)


def test_the_default_needles_are_not_in_the_haystack():
    text = " ".join(needles.read_haystack(detect.HAYSTACK))
    rows = needles.read_needles(detect.HAYSTACK / "needles.jsonl")
    assert len(rows) == 3
    assert not any(row.real_needle in text for row in rows)


@pytest.mark.parametrize("chat", [None, {}])
@pytest.mark.parametrize("depth", [0, 33, 78, 100])
def test_the_needle_stands_between_sentences_near_its_depth_and_its_span_is_its_text(tmp_path, depth, chat):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, CHAT))
    prompt = prompt_of(tokenizer, 3000, depth, chat=chat)
    text = tokenizer.core.decode(prompt.ids, skip_special_tokens=False)
    before, after = text.split(NEEDLE.needle)
    assert re.search(r'([.!?]"?\s+|: |^)$', before)
    assert re.match(r"\s", after)
    assert tokenizer.decode(prompt.ids[slice(*prompt.span)]).strip() == NEEDLE.real_needle
    assert abs(prompt.at - depth) <= needles.NEAR
    assert 2700 < len(prompt.ids) <= 3000


def test_other_seeds_put_the_needle_elsewhere(tokenizer):
    assert len({prompt_of(tokenizer, 2000, seed=seed).at for seed in range(8)}) > 1


def test_abbreviations_and_initials_end_no_sentence():
    text = 'Mr. Green met Dr. A. Stone. "Why?" He left at 3.30 p.m. sharp! 他走了。她没有。'
    assert [text[m.end():][:4] for m in needles.SENTENCE_END.finditer(text)] == ['"Why', "He l", "她没有。", ""]


def test_short_haystacks_go_on_with_the_next_text_and_then_repeat(tokenizer):
    book = needles.make_book(tokenizer, ["One is here. ", "Two is here. ", "Three is here."], 1, 5)
    assert book.text.startswith("Two is here. \n\nThree is here.\n\nOne is here. \n\nTwo is here.")


def test_the_plan_is_the_whole_grid_or_draws_needles_in_turn():
    assert len(needles.plan(3, 3, [10, 20], [0, 50, 100])) == 18
    drawn = needles.plan(4, 2, [10, 20], [0, 50, 100], runs=10, seed=1)
    assert len(set(drawn)) == 10
    assert sorted(s.needle for s in drawn) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert all(s.book == s.needle % 2 for s in drawn)
    assert drawn == needles.plan(4, 2, [10, 20], [0, 50, 100], runs=10, seed=1) != needles.plan(
        4, 2, [10, 20], [0, 50, 100], runs=10, seed=2)


def test_the_published_place_is_by_tokens_at_the_full_stop_before_the_depth(tmp_path, monkeypatch):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    begin = ("<|begin|>", tokenizer.core.token_to_id("<|begin|>"))
    tokenizer.core.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    text, needle = "Aaaa bbb. " * 9, needles.Needle("N n.", "q?", "N n.")
    question = "Based on the content of the book, Question: q?\nAnswer:"

    def published(depth):
        prompt = needles.make_published_prompt(needles.Sample(0, 400, depth, 0), needle, text, tokenizer)
        found = tokenizer.core.decode(prompt.ids, skip_special_tokens=False)
        assert tokenizer.decode(prompt.ids[slice(*prompt.span)]) == "N n."
        return found.replace("<|begin|>", "^")

    # 400 tokens less 200 for question and answer less five of the needle: two beginnings and 193 letters.
    kept = (text * 9)[:193]
    assert published(100) == f"^^^{kept}^N n.{question}"
    assert published(50) == f"^^N n.^^{kept}{question}"                 # ids of another vocabulary: none is a full stop
    monkeypatch.setattr(needles, "FULL_STOPS", tuple(tokenizer.core.encode(".", add_special_tokens=False).ids))
    assert published(50) == f"^^^{kept[:89]}^N n.{kept[89:]}{question}"
    assert published(11) == f"^^^{kept[:19]}^N n.{kept[19:]}{question}"
    assert published(0) == f"^^N n.^^{kept}{question}"


# ----------------------------------------------------------------------------------------------------- the command line


QUICK = ("--lengths", "500", "--depths", "1", "--min-success", "1")       # three runs


@pytest.fixture
def command(folder, monkeypatch, tmp_path):
    """Call the command line on the tiny model, whose every answer counts as right."""
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 1.0)

    def call(*more, out="heads.json"):
        monkeypatch.setattr(sys, "argv", ["detect", "--model", str(folder), "--out", str(tmp_path / out), "--lengths",
                                          "420:600:2", "--depths", "3", "--max-new-tokens", "5", *map(str, more)])
        detect.main()
        return tmp_path / out
    return call


def test_the_file_is_read_by_load_heads_and_says_where_it_comes_from(command, tmp_path):
    path = command("--authors-format", tmp_path / "authors.json", "--plot", tmp_path / "plot.png")
    content = json.loads(path.read_text())
    assert len(load_heads(path, 3, 4)) == 12
    assert content["samples"] == len(content["runs"]) == 18
    assert content["success_rate"] == 1
    assert content["settings"]["seed"] == 0
    assert set(content["settings"]["versions"]) == {"torch", "tokenizers", "rouge-score"}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    authors = (tmp_path / "authors.json").read_text()
    assert "\n" not in authors
    assert {len(scores) for scores in json.loads(authors).values()} == {18}
    assert load_scores(tmp_path / "authors.json") == pytest.approx(load_scores(path), abs=1e-6)     # six digits


def test_an_interrupted_detection_ends_in_the_same_file(command, monkeypatch):
    whole = command(out="whole.json")
    run_batch, calls = detect.run_batch, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run_batch(*args)

    monkeypatch.setattr(detect, "run_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        command(out="cut.json")
    part = whole.with_name("cut.json.part")
    with open(part, "a") as file:
        file.write('{"seconds": 1.0, "runs": [{"nee')                # the line that was being written
    cut = command(out="cut.json")
    assert not part.exists()
    assert len(calls) == 4 + 3                                      # six batches in all, three of them kept
    seconds = re.compile(r'"seconds": [\d.]+')
    assert seconds.sub("", cut.read_text()) == seconds.sub("", whole.read_text())


def test_another_detections_part_file_is_not_continued(command, monkeypatch):
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 0.0)
    with pytest.raises(ValueError):
        command()
    with pytest.raises(ValueError, match="unfinished detection with another seed; finish it"):
        command("--seed", 1)


def test_the_forward_tokens_stated_are_those_computed(command, monkeypatch):
    run_layers, counted = Transformer.run_layers, []

    def count(self, ids, *args):
        counted.append(ids.numel())
        return run_layers(self, ids, *args)

    monkeypatch.setattr(Transformer, "run_layers", count)
    content = json.loads(command().read_text())
    assert content["forward_tokens"] == sum(counted)
    assert content["forward_tokens"] < 0.9 * content["forward_tokens_unshared"]


def test_published_runs_are_placed_ended_and_scored_by_the_published_rules(command, monkeypatch, tokenizer):
    answer, asked = detect.answer, []
    monkeypatch.setattr(detect, "answer", lambda *args: asked.append(args) or answer(*args))
    content = json.loads(command("--published", "--batch-size", 3).read_text())
    for _, prompts, spans, _, stops, published, _ in asked:
        assert published and set(stops) == {144, None}              # the end token does not end an answer
        for ids, (start, end) in zip(prompts, spans, strict=True):
            assert tokenizer.decode(ids).count("Based on the content of the book, Question: ") == 1
            assert set(ids[start:end]) and end - start > 10
    # No full stop of Llama 2's vocabulary: in front of everything, or behind it. Equal runs count each time.
    assert [run["at"] for run in content["runs"]] == ([0] * 2 + [100]) * 6
    assert content["settings"]["published"] is True and content["settings"]["template"] == needles.PUBLISHED


def test_a_detection_that_locates_no_needle_is_refused_before_it_runs(command, monkeypatch):
    monkeypatch.setattr(needles, "COVERED", 1.0)
    with pytest.raises(ValueError, match="locates no needle in any of 18 prompts"):
        command("--published")


def test_scores_that_are_all_zero_are_no_result(command, monkeypatch, tmp_path):
    monkeypatch.setattr(detect, "head_scores", lambda *args: torch.zeros(3, 4))
    with pytest.raises(ValueError, match="every head scores 0 in all 3 runs"):
        command(*QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.json.part"]


def test_the_default_lengths_fit_the_context(folder, command, monkeypatch):
    monkeypatch.setattr(detect, "run_all", lambda model, tokenizer, prompts, *rest: pytest.fail(
        str(sorted({prompt.sample.length for prompt in prompts}))))
    argv = ["detect", "--model", str(folder), "--out", str(folder / "heads.json")]
    rows = needles.read_needles(detect.HAYSTACK / "needles.jsonl")      # one token per byte
    least = max(len(detect.TEMPLATE.format(context=row.needle + " ", question=row.question)) for row in rows)
    cases = {(): "[399, 799, 1198, 1598, 1998]", ("--max-new-tokens", "1500"): f"[{least}, 346, 413, 480, 548]"}
    for more, found in cases.items():
        monkeypatch.setattr(sys, "argv", argv + [*more])
        with pytest.raises(pytest.fail.Exception, match=re.escape(found)):
            detect.main()


@pytest.mark.parametrize("line", ["oh", '{"seconds": 1}', '{"seconds": 1.0, "runs": [{}]}'])
def test_a_damaged_part_file_is_said(command, tmp_path, line):
    (tmp_path / "heads.json.part").write_text(f"{{}}\n{line}\n")
    with pytest.raises(ValueError, match="heads.json.part, line 2: .*; (remove|delete) the line"):
        command()


@pytest.mark.parametrize("more, message", [
    (["--plot", "heads.docx"], "--plot heads.docx: no kind of picture; its name should end in .*png"),
    (["--authors-format", "."], ". cannot be written"),
    (["--published", "--raw"], "--raw has no effect with --published"),
    (["--published", "--template", "{context}{question}"], "--template has no effect with --published"),
    (["--published", "--seed", "0"], "--seed has no effect with --published"),
    (["--template-args", '{"a": 1}'], "--template-args has no effect: no prompt goes through a chat template"),
])
def test_outputs_and_options_are_checked_before_the_work(command, monkeypatch, more, message):
    monkeypatch.setattr(detect, "run_all", lambda *args: pytest.fail("ran"))
    with pytest.raises(ValueError, match=message):
        command(*more)


def test_the_plot_shows_scores_above_one_and_layer_0_below(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: seen.append(self))
    scores = {f"{layer}-{head}": 0.4 * layer for layer in range(5) for head in range(2)}
    detect.plot("p.png", {"model": "m", "n_layers": 5, "n_heads": 2, "samples": 1, "scores": scores})
    heat, curve, _ = seen[0].axes
    assert heat.images[0].origin == "lower" and heat.images[0].get_clim() == pytest.approx((0, 1.6))
    assert curve.get_ylim()[0] < 0 and curve.get_ylim()[1] > 1.6


def test_thinking_is_off_and_the_settings_say_so(command, folder, tmp_path, monkeypatch):
    template = CHAT + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    model, seen = shutil.copytree(folder, tmp_path / "model"), []
    core = Tokenizer.load(write_tokenizer(model, template)).core

    def stop(model, tokenizer, prompts, needles, settings, part):
        seen.append((core.decode(prompts[0].ids, skip_special_tokens=False)[-15:], settings["template_args"]))
        raise KeyboardInterrupt
    monkeypatch.setattr(detect, "run_all", stop)
    for more in ((), ("--template-args", '{"enable_thinking": true}')):
        with pytest.raises(KeyboardInterrupt):
            command("--model", model, *QUICK, *more)
    assert seen == [("<think></think>", {"enable_thinking": False}),
                    ("<|turn|>assistant:"[-15:], {"enable_thinking": True})]


def test_other_weights_do_not_continue_an_unfinished_detection(command, folder, tmp_path, monkeypatch):
    model = shutil.copytree(folder, tmp_path / "model")
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 0.0)
    with pytest.raises(ValueError, match="0 of 3 runs"):
        command("--model", model, *QUICK)
    write_checkpoint(model, seed=1, vocab_size=259, max_position_embeddings=2048)
    with pytest.raises(ValueError, match="unfinished detection with another fingerprint"):
        command("--model", model, *QUICK)


def test_no_success_says_what_to_try(command, monkeypatch, capsys):
    monkeypatch.setattr(detect, "rouge_recall", lambda reference, text: 0.5)        # more than half is asked for
    assert cli.run(command) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(r"error: 0 of 18 runs gave a right answer .* try shorter --lengths, another --template", error)
    with pytest.raises(ValueError, match="try shorter --lengths, simpler --needles"):       # its prompts are fixed
        command("--published", *QUICK, out="published.json")


@pytest.mark.parametrize("more, message", [
    (["--lengths", "1000:3000:2"], r"3000 tokens and 5 new ones exceed the context of .* use lengths up to 2043"),
    (["--lengths", "100:600:2"], r"100 tokens cannot hold the needle .*, its question and the template; they take \d+"),
    (["--lengths", "5:4:2"], "argument --lengths: invalid lengths value"),
    (["--depths", "0"], "argument --depths: .0. is no whole number from 1"),
    (["--template", "{context} and that is all"], "must hold {context}, once, and {question}"),
    (["--haystack", "/nowhere.txt"], "No such file"),
    (["--lengths", "500", "--depths", "1"], "3 runs cannot give --min-success 10"),
    (["--runs", "99"], "3 needles at 6 places make 18 runs"),
])
def test_bad_options_are_one_line(command, more, message):
    with pytest.raises((ValueError, OSError), match=message):
        command(*more)


@pytest.mark.parametrize("line, message", [
    ("{}", "line 1: a needle is a JSON object"),
    ('["a"]', "line 1: a needle is a JSON object"),
    ('{"needle": "A b.", "question": "c", "real_needle": "d"}', "real_needle must be a part of needle"),
    ("", "holds no needles"),
])
def test_bad_needles_are_named(tmp_path, line, message):
    (tmp_path / "needles.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        needles.read_needles(tmp_path / "needles.jsonl")


def test_a_chat_template_that_rewrites_the_message_is_refused(tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "{{ messages[0].content | upper }}"))
    with pytest.raises(ValueError, match="rewrites the message"):
        prompt_of(tokenizer, chat={})
