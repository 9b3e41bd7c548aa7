"""Pages of decoded texts."""

import html
import json
import os
import re
from pathlib import Path

import pytest
import torch

from cli import page as program_page
from cli.decode import main
from decore import DeCoRe, Greedy, generate
from heads import load_heads
from heads.sources import find_sources
from runtime import page
from runtime.errors import InputError
from runtime.generation import Generation
from tests.tables import cells, each

SPAN = re.compile(
    r'( *)<span class="t( differs)?( left)?" id="\w+" tabindex="0"\s+style="--shade: ([\d.]+)"\s+'
    r'(?:data-source="\w+" )?data-note="([^"]*)">([^<]*)</span>'
)


def spans(text):
    """Of each token on a page: (whether it differs, whether greedy decoding is left, shade, lines
    of its note, text)."""
    return [
        (
            bool(differs),
            bool(left),
            float(shade),
            html.unescape(note).split("\n"),
            blank + html.unescape(token),
        )
        for blank, differs, left, shade, note, token in SPAN.findall(text)
    ]


@pytest.fixture
def run(done, chat_model, tmp_path):
    """run(options, *more) → (stdout, the page) of decore.py with eight tokens for Hi. TWO masks two
    heads."""
    path = tmp_path / "page.html"

    def run(options, *more):
        options = options.replace("TWO", f"--heads {chat_model}/heads.json --num-heads 2")
        command = f"--model {chat_model} --max-new-tokens 8 --prompt Hi --html {path} {options}"
        out, err = done(main, *command.split(), *more)
        assert f"wrote {path}" in err
        return out, path.read_bytes().decode()

    return run


def test_notes_hold_entropy_alpha_and_the_favourite_of_the_masked_row(run, chat):
    options = "TWO --method greedy,decore-static --alpha 0.5 --json --prompt"
    out, text = run(options, "<script>1</script>")
    beginning, *_, greedy, section = text.split("<section")
    line = json.loads(out.split("\n")[-2])
    model, tokenizer = chat
    ids = line["ids"][:-1] if line["stop"] == "eos" else line["ids"]
    method = DeCoRe(line["heads"], alpha=0.5)
    again = generate(model, line["prompt_ids"], method, 8, tokenizer=tokenizer, best=1)
    favourites, expected = [], []
    for token, row in zip(ids, again.rows()):
        [[of_greedy, word, _]], [[favourite, masked_word, _]] = row["base"], row["other"]
        favourites.append(favourite)
        expected += [f"base entropy {row['entropy']:.3f} nats", "α 0.500"]
        expected.append(f"masked favourite {masked_word!r}")
        if of_greedy != token:
            expected.append(f"greedy would take {word!r}")
    differ, left, shades, notes, tokens = zip(*spans(section), strict=True)
    for note, begin in zip(sum(notes, []), expected, strict=True):
        assert note.startswith(begin)
    assert "".join(tokens) == tokenizer.decode(ids) and len(ids) > 2
    assert [*left] == ["greedy would" in "".join(note) for note in notes]
    assert any(left) and not all(left) and "<li>Bold: DeCoRe leaves" in beginning
    assert any(differ) == (ids != favourites) and set(shades) != {0.0}
    assert "N = 2; α = 0.5; heads masked: " + ", ".join(line["heads"]) in section
    assert "--method greedy,decore-static --alpha 0.5" in beginning.partition("<ul")[0]
    assert (
        "<script>1" not in text
        and "&lt;" in text
        and "&lt;/" not in text.replace("&lt;/script&gt;", "")
    )
    assert text.count("<article>") == text.count("</article>") == 2
    assert re.findall("<h3>(.*)</h3>", text) == ["[1] Hi", "[2] &lt;script&gt;1&lt;/script&gt;"]
    assert "entropy" in greedy and "favourite" not in greedy and "Blue" not in text


def test_a_page_replaces_a_file_at_once_also_behind_a_link_and_is_written_to_a_device(tmp_path):
    path, link = tmp_path / "page.html", tmp_path / "link"
    link.symlink_to(path)
    program_page.write(link, "before")
    with pytest.raises(UnicodeEncodeError):
        program_page.write(link, "a half, then an error \ud800")
    assert path.read_text() == "before" and {*tmp_path.iterdir()} == {path, link}
    terminal, device = os.openpty()
    program_page.write(Path(os.ttyname(device)), "text")
    assert os.read(terminal, 100) == b"text" and link.is_symlink()
    os.close(terminal)
    os.close(device)


class Bytes:
    """A tokenizer with one token per byte.

    As with SentencePiece, a text's first blank is not decoded."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_pieces_are_whole_characters_and_join_to_the_text():
    ids = [*"é a文".encode(), 0xF0]
    texts, positions = zip(*page.pieces(page.texts_of(Bytes(), ids)), strict=True)
    assert texts == ("é", " ", "a", "文", "\ufffd")
    assert [*map(list, positions)] == [[0, 1], [2], [3], [4, 5, 6], [7]]


# Fields of a prompt → the pieces that the template adds to it; none if it changes the text.
ADDED = """
{"messages": [{"role": "system", "content": "Be brief"}, \
    {"role": "user", "content": " the user"}]} | [0, 1, 3, 4, 6]
{"prompt": "the user"} | [0, 1, 2, 3, 4, 6]
{"prompt": "the user", "begin": "assistant"} | [0, 1, 2, 3, 4]
{"prompt": "THE USER"} | []
{"prompt": "system\\nBe briefuser the userassistant"} | []
"""


@each("fields, outside", ADDED, cells)
def test_what_a_chat_template_adds_is_set_apart_from_the_text_of_the_prompt(fields, outside):
    prompt = "system", "\n", "Be brief", "user", " ", "the user", "assistant"
    texts = [(text, ()) for text in prompt]
    contents = program_page.contents_of(fields)
    assert program_page.template_pieces(texts, contents) == {*outside}
    part = dict(name="p0", pieces=texts, template={0})
    text = page.template().render(title="x", command="c", parts=[part])
    assert re.findall(r'class="s( role)?" id="p0s(\d)"', text)[:2] == [(" role", "0"), ("", "1")]
    assert "Small and grey" in text


def test_pointing_at_a_token_highlights_its_source_and_the_reverse():
    answer = Generation(
        ids=[*map(ord, "<bc.")],
        alphas=[0.5] * 4,
        entropies=[0.1, 1, 9, 0],
        stop="eos",
        tokens=["<", "b", "c", ""],
        prompt=["<", '"', "z"],
        sources=[[(2, 1.0), (0, 0.75)], [], [(1, 0.5), (2, 0.25)], []],
    )
    text = page.page({"": answer}, "<x>")
    rule = r":root:has\(#(\w+):is\(:hover, :focus, :target\)\) #(\w+) {[^/}]*/ ([\d.]+)\) }"
    pairs = "g0t0 p0s0 0.75, g0t0 p0s2 1.00, g0t2 p0s1 0.50, g0t2 p0s2 0.25"
    # Of the title: the largest shares of the answer's tokens.
    title = "g0h p0s0 0.75, g0h p0s1 0.50, g0h p0s2 1.00"
    expected = set()
    for pointed, marked, share in map(str.split, f"{pairs}, {title}".split(", ")):
        expected.add((pointed, marked, share))
        if pointed != "g0h":
            expected.add((marked, pointed, share))
    assert set(re.findall(rule, text)) == expected
    # The prompt scrolls to the strongest source.
    scrolled = re.findall(r'id="(\w+)"[^>]*?data-source="(\w+)"', text)
    assert scrolled == [("g0h", "p0s2"), ("g0t0", "p0s2"), ("g0t2", "p0s1")]
    on_opening = {("p0s0", "0.75"), ("p0s1", "0.50"), ("p0s2", "1.00")}
    assert set(re.findall(r"#(\w+) { --share: ([\d.]+) }", text)) == on_opening
    assert "Blue" in text and "<title>" not in text.split("<h1>")[1] and "Dotted" not in text
    notes = [[f"base entropy {h:.3f} nats", "α 0.500"] for h in answer.entropies[:3]]
    notes[0] += ["from 'z' at 2 (100% of the heads)", "from '<' at 0 (75% of the heads)"]
    notes[2] += ["from '\"' at 1 (50% of the heads)", "from 'z' at 2 (25% of the heads)"]
    shades = (0.11, 0.35, 1)  # sqrt(H / 8), at most 1
    assert spans(text) == [*zip([False] * 3, [False] * 3, shades, notes, "<bc", strict=True)]


def test_a_generation_has_texts_rows_and_the_page_of_the_program(chat, chat_model, run):
    model, tokenizer = chat
    heads = load_heads(model, 2, chat_model / "heads.json")
    ids, method = tokenizer.encode_chat([{"role": "user", "content": "Hi"}]), DeCoRe(heads)
    out = generate(model, ids, method, 8, tokenizer=tokenizer, best=2)
    assert generate(model, ids, method, 8).ids == out.ids
    assert out.text == "".join(out.tokens) == tokenizer.decode(out.ids)
    rows = json.loads(json.dumps(out.rows()))
    assert [row["id"] for row in rows] == out.ids and [*rows[0]][:3] == ["id", "token", "alpha"]
    steps = method.start(model, [ids], 8)
    for row, token in zip(rows, [ids[-1], *out.ids], strict=False):
        with torch.inference_mode():
            step = steps.step(torch.tensor([[token]]))
        for name, log_p in (("base", step.base), ("other", step.other)):
            expected = log_p[0, 0].exp().topk(2)
            assert [token for token, _, _ in row[name]] == expected.indices.tolist()
            assert [p for _, _, p in row[name]] == pytest.approx(expected.values.tolist())
            assert row[name][0][1] == tokenizer.decode(row[name][0][:1])
    out.sources = find_sources(model, ids, out.ids, heads, tokenizer.hidden)
    assert out._repr_html_().startswith('<iframe srcdoc="')
    own, (_, of_program) = page.page({"decore-entropy": out}), run("TWO --sources")
    assert spans(own) == spans(of_program) and len(spans(own)) > 2
    links = r"(?m)^:root:has.*"
    assert re.findall(links, own) == re.findall(links, of_program) != []


def test_a_text_ends_before_a_stop_text_as_in_the_program(chat, run):
    model, tokenizer = chat
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    whole = generate(model, ids, Greedy(), 8, tokenizer=tokenizer)
    stop = whole.text[3:5]
    out = generate(model, ids, Greedy(), 8, tokenizer=tokenizer, stop=stop)
    line = json.loads(run("--method greedy --json --stop", stop)[0])
    assert (out.ids, out.text, out.stop) == (line["ids"], line["text"], "stop")
    assert out.text == whole.text[: whole.text.index(stop)] and len(out.ids) < len(whole.ids)
    for arguments, words in (
        (dict(stop=["x"]), "stop needs tokenizer="),
        (dict(tokenizer=object()), "tokenizer must be one of tokenizer.Tokenizer.load"),
    ):
        with pytest.raises(InputError, match=words):
            generate(model, ids, Greedy(), 8, **arguments)
