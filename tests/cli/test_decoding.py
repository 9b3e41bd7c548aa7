"""The program behind decore.py: prompts, options, JSON, text for people."""

import json
import re
from functools import partial

import pytest
import torch

from cli import models, prompts
from cli.decode import main, make_parser
from cli.options import MINIATURE
from cli.printing import Texts, sources_below
from cli.prompts import EXAMPLE
from decoders.baselines import AD, CAD, CD, DoLa  # noqa: F401 (of a table)
from decore import DeCoRe, generate
from heads import FOLDER, load_heads
from heads.sources import find_sources
from model import Transformer
from tests.checkpoints import (
    stand_in,
    write_checkpoint,
    write_heads,
    write_json,
    write_lines,
    write_tokenizer,
)
from tests.tables import each, rows
from tokenizer import Tokenizer

SHORT = "--max-new-tokens 6"
FLAGS = f"{SHORT} --num-heads 2"
THINKING = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|end|>{% endfor "
    "%}<|turn|>assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"
)


def write_model(folder, template=None, seed=0):
    """A tiny checkpoint with head scores → its folder."""
    write_checkpoint(folder, vocab_size=259, eos_token_id=257, seed=seed)
    write_heads(folder / "heads.json", seed=1)
    return write_tokenizer(folder, template)


def named(folder):
    return f"--model {folder} --heads {folder}/heads.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def bare(folder):
    return f"--model {folder}"


@pytest.fixture(scope="module")
def base(folder):
    return named(folder)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """The folder of a chat model."""
    return write_model(tmp_path_factory.mktemp("thinking"), THINKING)


@pytest.fixture(scope="module")
def loaded(folder):
    return Transformer.load(folder), Tokenizer.load(folder)


@pytest.fixture
def objects(done):
    """The JSON objects that decore.py prints."""

    return lambda *arguments: [*map(json.loads, done(main, *arguments, "--json")[0].splitlines())]


def labels(heads):
    return [f"{layer}-{head}" for layer, head in heads]


def turns(**texts):
    """A chat: role → text."""
    return [dict(role=role, content=text) for role, text in texts.items()]


def test_texts_are_printed_in_the_order_of_the_prompts_each_as_it_grows(capsys):
    tokenizer = Tokenizer.load(MINIATURE)
    end = tokenizer.eos_ids[0]
    ids = tokenizer.encode(" Dasholm is", bos=False)
    for holds_ends in False, True:
        texts = Texts(tokenizer, [], ["[1] ", "[2] "], "|", holds_ends, quiet=False)
        printed = []
        for b, token in [(1, ids[0]), (0, ids[0]), (1, end), (0, ids[1]), (0, end)]:
            assert texts.push(b, token, 0.0) is False
            printed.append(capsys.readouterr().out)
        one, two = (tokenizer.decode(ids[:n]) for n in (1, 2))
        rest = "" if holds_ends else f"|[2] {one}|"
        assert printed == ["[1] ", one, "", two.removeprefix(one), rest]
        for b in 0, 1:
            texts.complete(b, "below" * holds_ends)
        assert capsys.readouterr().out == f"below|[2] {one}below|" * holds_ends


def test_an_interruption_prints_what_there_is_of_all_answers(call, base, loaded, monkeypatch):
    tokens = []

    def generate(model, ids, method, on_token, **settings):
        for b, token in tokens:
            on_token(b, token, 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("decore.generate", generate)
    two = base, FLAGS, "--prompt Hi --prompt Ho --stop 'some text'"  # holds back
    assert call(main, *two)[:2] == (130, "")
    tokens += [(0, 72), (1, 73), (1, 257)]  # 257 ends an answer
    one, other = (loaded[1].decode([i]) for i in (72, 73))
    assert call(main, *two)[:2] == (130, f"[1] Hi\n{one}\n\n[2] Ho\n{other}\n\n")
    assert call(main, *two, "--json")[:2] == (130, "")


def test_json_holds_what_generate_and_find_sources_return(objects, base, loaded, folder):
    text = "<|turn|>" * 3 + "Hi"  # special tokens are no sources
    [line] = objects(base, FLAGS, "--prompt", text, "--sources")
    model, tokenizer = loaded
    heads, prompt = load_heads(model, 2, folder / "heads.json"), tokenizer.encode(text)
    g = generate(model, prompt, DeCoRe(heads), max_new_tokens=6, eos_ids=tokenizer.eos_ids)
    sources = find_sources(model, prompt, g.ids, heads, tokenizer.hidden)
    settings = dict(measure="copy", scale_alpha=False, alpha_rule="entropy", mask="output")
    numbers = {name: getattr(g, name) for name in ("ids", "alphas", "entropies", "stop")}
    assert line == numbers | settings | dict(
        mask_prompt=False,
        index=0,
        prompt=text,
        prompt_ids=prompt,
        text=tokenizer.decode(g.ids),
        method="decore-entropy",
        model=model.name,
        heads=labels(heads),
        num_heads=2,
        sources=json.loads(json.dumps(sources)),
    )


def test_prompts_of_all_kinds_are_decoded_in_order_and_the_text_is_that_of_the_json(
    done, refused, base, loaded, tmp_path, monkeypatch
):
    path = tmp_path / "prompt.txt"
    path.write_text("from a\nfile\n\n", encoding="utf-8-sig")  # editors begin files so

    def run(*options, ends=done):
        with path.open(encoding="utf-8") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            return ends(main, base, FLAGS, *options)

    several = ["--prompt", "word " * 20, f"--prompt-file {path} --prompt-ids 72,105"]
    piped = [*several, "--prompt-file -"]
    out, err = run(*piped)
    lines = [*map(json.loads, run(*piped, "--json")[0].splitlines())]
    _, tokenizer = loaded
    file = tokenizer.encode("from a\nfile\n")  # without one final newline
    ids = [tokenizer.encode("word " * 20), file, [72, 105], file]
    assert [line["prompt_ids"] for line in lines] == ids
    titles = f"{'word ' * 12}…", "from a file", tokenizer.decode([72, 105]), "from a file"
    expected = ""
    for i, title in enumerate(titles):
        expected += f"[{i + 1}] {title}\n{lines[i]['text']}\n\n"
    assert out == expected and "tokens/s" in err
    assert run()[0] == lines[1]["text"] + "\n"
    assert "add --prompt-file - to decode it" in run(*several, ends=refused)


def test_a_line_of_a_file_is_a_prompt_and_json_gives_its_fields_back_in_order(
    done, objects, thinking, tmp_path
):
    chat = turns(user="Who?", assistant="I") + turns(user="And?")
    given = [
        dict(id=7, prompt="A document. Who is it?", without_context="Who is it?", gold=["x"]),
        dict(prompt="A document. What is it?", without_context=turns(user="it?")),
        dict(messages=chat, without_context="And?"),
    ]
    path = write_lines(tmp_path / "prompts.jsonl", given)
    command = f"{named(thinking)} {FLAGS} --prompts {path} --method"
    for more in "", "--batch-size 2":
        lines = objects(f"{command} cad,decore-entropy {more}")
        assert [line["index"] for line in lines] == [0, 1, 2] * 2
        for line, prompt in zip(lines, given * 2, strict=True):
            assert line | prompt == line and list(line)[1 : 1 + len(prompt)] == list(prompt)
        for i in range(2):
            [line] = objects(named(thinking), FLAGS, "--prompt", given[i]["prompt"])
            assert line["ids"] == lines[3 + i]["ids"]
    encode = Tokenizer.load(thinking).encode
    texts = "user:A document. What is it?", "user:it?"
    ids, without = (encode(f"<|turn|>{text}<|end|><|turn|>assistant:") for text in texts)
    g = generate(Transformer.load(thinking), ids, CAD(without), 6)
    assert lines[1]["ids"] == g.ids and lines[1]["alpha"] == 0.5
    out, _ = done(main, f"{command} decore-entropy")
    titles = "A document. Who is it?", "A document. What is it?", "And?"
    assert out == "".join(
        f"[{i}] {title}\n{line['text']}\n\n"
        for i, (title, line) in enumerate(zip(titles, lines[3:], strict=True), 1)
    )
    write_lines(path, given[:1])
    command = f"--model {thinking} {SHORT} --method cad --prompt b --without-context it?"
    ids = [line["ids"] for line in objects(command, f"--prompts {path}")]
    assert ids == [objects(command)[0]["ids"], lines[0]["ids"]]


LINES = """
[] | p.jsonl, line 2: not JSON in UTF-8 (a list instead of an object)
{"prompt": "\\ud800"} | p.jsonl, line 2: not JSON in UTF-8 (
{"text": "a"} | p.jsonl, line 2: it must have either "prompt", a text, or "messages", a
{"prompt": "a", "messages": []} | p.jsonl, line 2: it must have either
{"prompt": 5} | p.jsonl, line 2: "prompt" must be a text
{"messages": "a"} | p.jsonl, line 2: a chat is a list of messages: [{
{"messages": []} | p.jsonl, line 2: the chat must end in a message for
{"prompt": "a", "begin": ["b"]} | p.jsonl, line 2: "begin" must be a text
{"messages": [{"role": "assistant", "content": "a"}], "begin": "b"} | p.jsonl, line 2: "messages" \
end with an assistant's turn, so "begin" has no place
{"prompt": "a", "without_context": 5} | p.jsonl, line 2: "without_context" must be
{"prompt": "a", "without_context": [5]} | p.jsonl, line 2: 5 must be {"role"
{"prompt": " "} | prompt 2 of 2: the prompt is empty
{"prompt": "a", "num_heads": 5} | prompt 2 has a field 'num_heads', as the answer in --json has
{"prompt": "a"} | cad needs --without-context for each prompt, or
"""


@each("line, words", LINES)
def test_a_line_that_is_not_a_prompt_is_named(refused, bare, tmp_path, line, words):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a", "without_context": "b"}}\n{line}\n')
    err = refused(main, bare, f"--prompts {path} --method=cad --json")
    assert err.count("\n") == 1 and words in err
    path.write_text("\n")
    assert "p.jsonl: it is empty" in refused(main, bare, f"--prompts {path}")


def test_titles_begin_with_the_line_or_the_word_in_which_prompts_differ():
    document = "Long ago there was a document. " * 9
    one, other = f"{document}\nQ: Who was he?\nA:", f"{document}\nQ: When did he live?\nA:"
    third = f"{document}When was it?"
    texts = [one, other, one, third, "Hi", "Hi there"]
    titles = "Q: Who was he? A:|Q: When did he live? A:|Q: Who was he? A:|…When was it?|Hi|Hi there"
    assert prompts.titles(texts) == titles.split("|")
    assert prompts.titles([document]) == [document[:60] + "…"]


def test_an_answer_that_fills_the_context_says_so(call):
    prompt = f"--prompt-ids 5{',5' * 249} --method greedy"
    for n, full in ((6, False), (7, True)):  # the miniature reads 256 tokens
        _, _, err = call(main, f"{prompt} --max-new-tokens {n}")
        assert "greedy: 6 tokens" in err
        assert ("an answer ended because the context is full" in err) == full


def test_a_head_file_that_was_found_by_a_name_is_said(call):
    file = FOLDER / "scores" / "miniature.json"
    one = f"--prompt-file {EXAMPLE} --max-new-tokens 1"
    for more in "", "--heads miniature":
        assert f"heads are ranked by copy, of {file}\n" in call(main, f"{one} {more}")[2]
    for more in f"--heads {file}", "--heads 2-0,2-1", "--method greedy":
        assert "ranked" not in call(main, f"{one} {more}")[2]


def test_an_alpha_that_stays_high_is_reported_with_its_remedy(call, base):
    """The tiny model is unsure of everything: its entropy is near ln 259."""
    one = f"{base} {FLAGS} --eos 0 --prompt a"
    err = call(main, f"{one} --prompt b")[2]
    assert re.search(r"\ndecore-entropy: mean α 5\.\d in 2 of 2 answers; .* --alpha-cap 0.5 ", err)
    assert "entropy: mean α 5" in call(main, one)[2]
    for more in (
        "--alpha-cap 0.5",
        "--max-new-tokens 5",  # the first tokens of an answer are often unsure
        "--method decore-static --alpha 3",  # as requested
    ):
        assert "mean α" not in call(main, f"{one} --prompt b {more}")[2]


def test_sources_stand_below_each_answer_word_by_word(call):
    _, out, _ = call(main, f"--prompt-file {EXAMPLE} --sources")
    assert out == " Dasholm.\n  Dasholm. ← Dasholm. 75%, is 8%, on 4%, 2 more\n"


def test_tokens_without_sources_do_not_count_in_the_shares_of_a_word():
    tokenizer = Tokenizer.load(MINIATURE)
    prompt, ids = tokenizer.encode(" Dasholm"), tokenizer.encode(" Dasholm", bos=False)
    last = len(prompt) - 1
    sources = [[]] * (len(ids) - 1) + [[(last, 1.0)]]
    line = dict(prompt_ids=prompt, ids=ids, stop="length", sources=sources)
    assert len(ids) > 1 and sources_below(line, tokenizer, 0) == "\n  Dasholm ← Dasholm 100%"
    silent = "\n  1 of 1 words have no source: the heads attended to special tokens or blanks"
    assert sources_below(line | {"sources": [[]] * len(ids)}, tokenizer, 0) == silent


def test_of_many_words_the_most_telling_sources_are_shown_and_the_rest_counted(call, monkeypatch):
    monkeypatch.setattr("cli.printing.LINES", 2)
    text = "--raw", "--prompt", EXAMPLE.read_text().partition("Answer")[0]
    _, out, _ = call(main, *text, "--max-new-tokens 60 --sources")
    shares = re.findall(r"← \S+ (\d+)%", out)
    assert len(shares) == 2 and min(map(int, shares)) >= 75
    assert re.search(r"\n +… and \d+ more words\n$", out)


def test_compare_shows_greedy_masked_and_decore_without_and_with_an_amateur(
    done, objects, base, bare, tmp_path
):
    heads = write_model(tmp_path, seed=3) / "heads.json"
    amateur = f"--amateur {tmp_path} --amateur-heads {heads}"
    prompt = f"{FLAGS} --prompt Hi"
    lines = {line["method"]: line for line in objects(base, amateur, prompt, "--compare")}
    assert list(lines) == ["greedy", "masked", "decore-entropy", "decore-entropy-lite"]
    lite = lines.pop("decore-entropy-lite")
    assert lite["amateur"] == tmp_path.name and "amateur" not in lines["decore-entropy"]
    assert lines["decore-entropy"] == objects(base, prompt)[0]
    assert lite == objects(bare, amateur, prompt)[0]
    assert lite["heads"] == labels(load_heads(stand_in(), 2, heads))
    text, _ = done(main, base, prompt, "--compare")
    assert text == "".join(f"{name:>14}  {line['text']}\n" for name, line in lines.items())


def test_several_methods_read_a_batch_of_prompts_once(objects, done, base, bare, passes):
    prompts = f"{SHORT} --raw --prompt 'A prompt' --prompt 'Another one'"
    several = f"{base} {prompts} --num-heads 2 --method"
    alone = []
    for options in f"{bare} {prompts} --method greedy", f"{bare} {prompts} --method dola-low":
        alone += objects(options)
    for method in "masked", "decore-entropy":
        alone += objects(f"{several} {method}")
    passes.clear()
    lines = objects(f"{several} greedy,dola-low,masked,decore-entropy")
    fields = "ids", "alphas", "entropies", "method"
    assert [[x[f] for f in fields] for x in lines] == [[x[f] for f in fields] for x in alone]
    assert [shape for shape in passes if shape[1] > 1] == [(2, 10)]
    passes.clear()
    _, err = done(main, f"{several} greedy,masked --batch-size 1")
    assert [shape for shape in passes if shape[1] > 1] == [(1, 7), (1, 10)] * 2
    assert "already" not in err
    _, err = done(main, f"{several} greedy,masked")
    assert re.findall("(.*): .*, prompts already read", err) == ["masked"]


def test_added_methods_that_fail_are_left_out_and_a_requested_one_ends_in_an_error(
    done, refused, bare
):
    compare = f"{bare} {SHORT} --prompt Hi --json --compare --method"  # no heads are known
    out, err = done(main, f"{compare} dola-low")
    assert re.findall('"method": "(.*?)"', out) == ["greedy", "dola-low"]
    assert "masked is left out: no head scores are known" in err
    for method, words in (
        ("cad", "cad needs --without-context"),
        ("cd", "cd needs --amateur"),
        ("dola-high,ad", "error: --info-layer 24 is outside"),
    ):
        assert words in refused(main, f"{compare} {method}")


def test_a_prompt_that_is_not_the_miniatures_names_a_real_model(call):
    for prompt, unknown in (("The capital of France is", True), (EXAMPLE.read_text(), False)):
        _, _, err = call(main, "--prompt", prompt.strip(), SHORT)
        assert ("the miniature knows invented facts" in err) == unknown


CHATS = r"""
[{"role": "user"}] | {'role': 'user'} must be
5 | chat.json: it must be a chat: [{"role": "user", "content": "…"}, …], or {"mess
{"role": "user"} | chat.json: it must be a chat
{ | chat.json is not valid JSON
{"messages": [{"role": "user", "content": "a"}], "x": NaN} | chat.json: NaN is not a number in JSON
[{"role": "User", "content": "a"}] | chat.json: "role": 'User' must be 'user'
[{"role": "user", "content": "\ud800"}] | chat.json: '\ud800' is half of a
[{"role": "user", "content": [{"type": "image"}]}] | chat.json: a message has the part
[{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}] | of the answer, ' '
"""


def test_prompts_of_chat_models_pass_the_template_unless_raw_and_a_file_is_a_chat_of_several_turns(
    refused, objects, thinking, tmp_path
):
    path = tmp_path / "chat.json"
    chat = turns(system="S", user="a", assistant="b") + turns(user="c")
    write_json(path, chat)
    encode = Tokenizer.load(thinking).encode
    user = "<|turn|>user:b<|end|><|turn|>assistant:"
    text = "".join(f"<|turn|>{turn['role']}:{turn['content']}<|end|>" for turn in chat)
    text += "<|turn|>assistant:"
    for options, texts in (
        (f"--messages {path}", [user, text]),
        ("--system=S", ["<|turn|>system:S<|end|>" + user]),
        ("--raw", ["b"]),
        ('--template-args={"enable_thinking": false}', [user + "quiet"]),
    ):
        lines = objects(named(thinking), FLAGS, "--prompt=b", options)
        assert [line["prompt_ids"] for line in lines] == [*map(encode, texts)]
    refusal = partial(refused, main, named(thinking), f"--messages {path}")
    assert "--system has no effect on --prompt-ids and --messages" in refusal("--system=S")
    chat[1]["content"] = [dict(type="text", text="a")]
    write_json(path, dict(messages=chat, id=7))
    [line] = objects(named(thinking), FLAGS, f"--messages {path}")
    assert line["prompt_ids"] == encode(text) and line["id"] == 7 and line["messages"] == chat
    for text, words in rows(CHATS):
        path.write_text(text)
        err = refusal()
        assert err.count("\n") == 1 and words in err


def test_the_beginning_of_an_answer_is_continued_in_every_form_of_prompt(
    done, refused, objects, thinking, tmp_path
):
    tokenizer = Tokenizer.load(thinking)
    encode = tokenizer.encode
    chat = turns(user="Where?", assistant="It is")
    closed = turns(user="Who?") + chat
    given = [
        dict(prompt="In Rome. Where?", without_context="Where?"),
        dict(prompt="Where?", without_context="?", begin="It"),
        dict(messages=chat, without_context="?"),
        dict(messages=chat[:1], without_context=closed),
    ]
    path = write_lines(tmp_path / "p.jsonl", given)
    command = named(thinking), FLAGS, f"--prompts {path} --begin 'It is'"
    lines = objects(*command)
    questions = "In Rome. Where?", "Where?", "Where?", "Where?"
    begins = "It is", "It", "It is", "It is"
    for line, prompt, text, begin in zip(lines, given, questions, begins, strict=True):
        assert line["prompt_ids"] == encode(f"<|turn|>user:{text}<|end|><|turn|>assistant:{begin}")
        assert line["begin"] == begin and line | prompt == line
    out, _ = done(main, *command)
    for begin, line in zip(begins, lines):
        assert f"\n{begin}{line['text']}\n\n" in out and not line["text"].startswith(begin)
    [raw] = objects(named(thinking), FLAGS, "--raw '--prompt=A: ' '--begin=It is'")
    assert raw["prompt_ids"] == encode("A: It is")
    args = make_parser().parse_args(["--begin=It is"])
    without = prompts.without_context(prompts.with_begin(given, args.begin), [])
    expected = [f"<|turn|>user:{text}<|end|><|turn|>assistant:" for text in ("Where?", "?", "?")]
    expected.append("<|turn|>user:Who?<|end|><|turn|>user:Where?<|end|><|turn|>assistant:")
    for prompt, text, begin in zip(without, expected, begins, strict=True):
        assert prompts.encode_one(prompt, tokenizer, args) == encode(text + begin)
    write_lines(path, given[2:3])
    for option in "--prompt-ids=5", f"--prompts={path}":
        err = refused(main, named(thinking), option, "--begin=It")
        assert "--begin has no effect on --prompt-ids and on answers that" in err


def test_lists_of_values_are_decoded_one_after_the_other(done, objects, base, tmp_path):
    options = f"{base} {SHORT} --prompt Hi --num-heads"
    lines = objects(f"{options} 2,5 --compare")
    names = [(line["method"], len(line["heads"])) for line in lines]
    two = [(method, n) for method in ("masked", "decore-entropy") for n in (2, 5)]
    assert names == [("greedy", 0), *two]
    for line in lines[3:]:
        assert [line] == objects(f"{options} {len(line['heads'])}")
    page = tmp_path / "page.html"
    out, _ = done(main, f"{options} 2,5 --html {page}")
    labels = [f"decore-entropy, N = {n}" for n in (2, 5)]
    assert [line.partition("  ")[0] for line in out.splitlines()] == labels
    assert all(f">{label}</h2>" in page.read_text() for label in labels)


def test_the_miniature_has_an_example_and_an_amateur_with_head_scores(done, objects, monkeypatch):
    monkeypatch.chdir(MINIATURE.parent)
    out, _ = done(main, "--model ./miniature/")
    answers = ["        greedy   Kraskrigard.", "decore-entropy   Dasholm."]
    assert out.splitlines()[3:] == answers
    out, _ = done(main, "--method cad")  # the example without its context is known
    assert out.endswith("cad   Dasholm.\n")
    amateur = "miniature/miniature-amateur"
    [line] = objects(f"--amateur {amateur} --prompt Hello", SHORT, "--sources")
    assert line["method"] == "decore-entropy-lite" and len(line["heads"]) == 2
    heads = [tuple(map(int, head.split("-"))) for head in line["heads"]]
    special = Tokenizer.load(amateur).hidden
    texts = line["prompt_ids"], line["ids"]
    sources = find_sources(Transformer.load(amateur), *texts, heads, special)
    assert line["sources"] == json.loads(json.dumps(sources))


BASELINES = """
--method cad --without-context i --alpha 2 | CAD([72], alpha=2.0)
--method ad --info-layer 2 --relative-top 0 | AD(2, relative_top=0)
--method dola-high --dola-layers halves --repetition-penalty 1.3 | \
    DoLa("high", "halves", repetition_penalty=1.3)
--method cd --amateur {folder} | CD(model)
"""


@each("options, record", BASELINES)
def test_the_baselines_command_line_gives_what_generate_gives(
    objects, bare, folder, loaded, options, record
):
    [line] = objects(bare, SHORT, "--prompt Hi", options.format(folder=folder))
    model, _ = loaded
    g = generate(model, line["prompt_ids"], eval(record), 6)
    assert line["ids"] == g.ids and line["alphas"] == g.alphas
    assert line["heads"] == [] and ("amateur" in line) == record.startswith("CD")


def test_an_answer_ends_before_a_stop_text(objects, base):
    command = f"{base} --num-heads 2 --prompt Who? --prompt 'What is it?'"
    first, second = objects(command)
    stop = first["text"][8:11]
    lines = objects(command, "--stop 'never there'", "--stop", stop)
    assert lines[0]["text"] == first["text"].partition(stop)[0] and lines[0]["stop"] == "stop"
    assert lines[1]["text"] == second["text"].partition(stop)[0]
    assert len(lines[0]["ids"]) < len(first["ids"])
    eos = first["ids"][8]
    line = objects(command, f"--eos 5,{eos}")[0]
    assert line["ids"] == first["ids"][: first["ids"].index(eos) + 1] and line["stop"] == "eos"


def test_an_empty_answer_is_reported_and_min_new_tokens_prevents_it(done, refused, objects, base):
    command = f"{base} {FLAGS} --prompt Who? --prompt 'What is it?'"
    token = objects(command)[1]["ids"][0]
    out, err = done(main, command, f"--eos {token}")
    assert out.endswith("[2] What is it?\n\n\n") and "1 of 2 answers are empty" in err
    longer = f"{command} --eos {token} --min-new-tokens 2"
    lines = objects(longer)
    assert token not in lines[1]["ids"][:2] and len(lines[1]["ids"]) > 2
    assert "empty" not in done(main, longer)[1]
    words = "--min-new-tokens 7 is above --max-new-tokens 6"
    assert words in refused(main, command, "--min-new-tokens 7")


def test_a_tiny_model_gets_one_thread_unless_the_user_chose(folder, monkeypatch):
    chosen, model = [], Transformer.load(folder)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    models.limit_threads(model)  # conftest sets OMP_NUM_THREADS
    monkeypatch.delenv("OMP_NUM_THREADS")
    models.limit_threads(model)
    model.register_buffer("packed", torch.empty(30_000_000, device="meta"))
    models.limit_threads(model)
    assert chosen == [1]
