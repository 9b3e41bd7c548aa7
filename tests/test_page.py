"""Pages: the tokens of generate, shaded, with what the masked row liked best and where they were read; stored runs."""

import html
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import cli
import decore
import evaluate
from cli import page
from heads import choose_heads
from model import Transformer
from tasks.sources import fingerprint
from tests.checkpoints import write_checkpoint, write_heads, write_tokenizer
from tokenizer import Tokenizer

HEADS = [(0, 1), (2, 3)]
SPAN = re.compile(r'<span class="t( differs)?" id="\w+" tabindex="0" style="--shade: ([\d.]+)" '
                  r'data-note="([^"]*)">([^<]*)</span>')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), "llama3", vocab_size=259, eos_token_id=257)
    write_tokenizer(folder)
    write_heads(folder / "heads.json", 3, 4, 1)
    return folder


@pytest.fixture
def call(monkeypatch, capsys, folder):
    def run(*args):
        model = ["--model", folder, "--max-new-tokens", "8"]
        model += [] if "greedy" in args else ["--heads", folder / "heads.json", "--num-heads", "2"]
        monkeypatch.setattr(sys, "argv", ["decore.py", *map(str, model), *map(str, args)])
        return cli.run(decore.main), *capsys.readouterr()
    return run


def test_a_page_leaves_the_output_as_it_is(call, tmp_path):
    args = "--prompt", "Hello there", "--prompt", "Hi", "--compare", "--json"
    assert call(*args)[:2] == call(*args, "--html", tmp_path / "page.html")[:2]


def test_notes_hold_entropy_alpha_and_the_favourite_of_the_masked_row(call, tmp_path, folder):
    call("--prompt", "Hello there", "--method", "decore-static", "--alpha", "0.25", "--html", tmp_path / "page.html")
    model, tokenizer = Transformer.load(folder), Tokenizer.load(folder)
    heads = choose_heads(model, folder / "heads.json", 2)
    prompt = tokenizer.encode("Hello there")
    out = decore.generate(model, prompt, "decore-static", heads=heads, alpha=0.25, max_new_tokens=8,
                          eos_ids=tokenizer.eos_ids)
    with torch.inference_mode():
        step, _ = decore.open_decore(model, [prompt], 8, "decore-static", heads=heads, alpha=0.25)
        liked = [step(torch.tensor([[token]])).other.argmax().item() for token in [prompt[-1], *out.ids[:-1]]]
    spans = SPAN.findall((tmp_path / "page.html").read_bytes().decode())
    notes = "\n".join(html.unescape(note) for _, _, note, _ in spans).split("\n")
    ids = out.ids[:-1] if out.stop == "eos" else out.ids
    expected = [line for i in range(len(ids)) for line in
                (f"base entropy {out.entropies[i]:.3f} nats", "α 0.250",
                 f"masked favourite {tokenizer.decode([liked[i]])!r}")]
    assert len(notes) == len(expected) and len(ids) > 2
    assert all(note.startswith(line) for note, line in zip(notes, expected, strict=True))
    assert "".join(html.unescape(text) for *_, text in spans) == tokenizer.decode(ids)
    assert any(different for different, *_ in spans) == any(a != b for a, b in zip(ids, liked, strict=False))
    assert {float(shade) for _, shade, _, _ in spans} != {0.0}


def test_markup_in_a_prompt_stays_text(call, tmp_path):
    call("--prompt", "<script>alert(1)</script>", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;" in page and "&gt;" in page


def test_greedy_has_no_favourite_to_show(call, tmp_path):
    call("--prompt", "Hello", "--method", "greedy", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "entropy" in page and "favourite" not in page


def test_a_page_that_cannot_be_written_is_one_line(call, tmp_path):
    status, out, err = call("--prompt", "Hello", "--html", tmp_path / "no" / "page.html")
    assert status == 2 and not out and "page.html" in err and "Traceback" not in err


# Where a token was read

def linked(sources=None, name="g0"):
    """An answer "abc" to the prompt "xyz", a token per letter."""
    g = SimpleNamespace(ids=[*map(ord, "abc")], alphas=[0.5] * 3, entropies=[0.1] * 3, stop="length")
    return page.answer_html(Letters(), "decore-entropy", g, name, None, ([*map(ord, "xyz")], "p0"), sources)


class Letters:
    def stream(self):
        return SimpleNamespace(push=chr, end=lambda: "")

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_pointing_at_a_token_lights_up_its_source_and_the_reverse():
    answer = linked([[(0, 0.75), (2, 0.25)], [], [(2, 1.0)]])
    rules = dict(re.findall(r":root:has\(#(\w+):is\(:hover, :focus, :target\)\) :is\((.*?)\) {", answer))
    assert rules == {"g0t0": "#p0s0, #p0s2", "g0t2": "#p0s2", "p0s0": "#g0t0", "p0s2": "#g0t0, #g0t2"}
    names = re.findall(r'id="(\w+)"', page.prompt_html(Letters(), [*map(ord, "xyz")], "p0") + answer)
    assert names == ["p0", "p0s0", "p0s1", "p0s2", "g0", "g0t0", "g0t1", "g0t2"]
    notes = [html.unescape(note) for note in re.findall(r'data-note="([^"]*)"', answer)]
    assert notes[0].endswith("from 'x' at 0 (75% of the heads)\nfrom 'z' at 2 (25% of the heads)")
    assert "from" not in notes[1]


def test_without_sources_nothing_is_linked():
    assert ":has(" not in linked()
    assert "Blue" in page.document("x", [linked([[(0, 1.0)], [], []])]) and "Blue" not in page.document("x", [linked()])


# Items of stored runs

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two stored runs of the miniature: greedy, DeCoRe."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", "--task", "miniature-conflict", "--method", "greedy,decore-entropy",
                                    "--num-heads", "2", "--limit", "3", "--out", str(out), "--device", "cpu"])
        assert not cli.run(evaluate.main)
    return [out / f"miniature-conflict.miniature.{name}.jsonl" for name in ("greedy", "decore-entropy.n2")]


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    def run(*args):
        out = tmp_path / "page.html"
        out.unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "report", "page", *map(str, args), "--html", str(out)])
        return cli.run(evaluate.main), *capsys.readouterr(), out.read_text(encoding="utf-8") if out.exists() else None
    return run


def test_an_item_of_two_runs_is_a_page_with_prompt_references_and_both_texts(runs, show):
    status, told, err, text = show(runs[0], "--item", 1, "--against", runs[1])
    assert (status, err) == (0, "") and told.strip().endswith("page.html")
    lines = [json.loads(path.read_text().splitlines()[2]) for path in runs]
    assert html.escape(lines[0]["question"]) in text and lines[0]["references"][0] in text
    sections = text.split("<h2>")[1:]
    names = re.findall(r' id="(\w+)"', text)
    assert len(names) == len(set(names)) > 10
    assert [part.split("<")[0] for part in sections] == ["miniature: greedy", "miniature: DeCoRe entropy, N = 2"]
    for line, part in zip(lines, sections, strict=True):
        spans = SPAN.findall(part)
        assert "".join(html.unescape(word) for *_, word in spans) == line["prediction"]
        assert [note.split("&#10;")[0] for _, _, note, _ in spans] == [
            f"base entropy {h:.3f} nats" for h in line["entropies"][:len(spans)]]


def test_what_is_no_item_of_these_runs_is_one_line(runs, show, tmp_path):
    greedy, contrasted = runs
    other = tmp_path / "other.jsonl"

    def refused(content, *args):
        other.write_text(content)
        status, _, err, text = show(*args)
        assert status == 2 and text is None and len(err.splitlines()) == 1
        return err

    assert "has no item 3; it has 3, 0 to 2" in refused("", greedy, "--item", 3)
    assert "is a run of miniature-conflict, --against has one of miniature-open" in refused(
        contrasted.read_text().replace("miniature-conflict", "miniature-open"), greedy, "--item", 0, "--against", other)
    assert "give --model" in refused(greedy.read_text().replace('"prediction": " ', '"prediction": " X'),
                                     other, "--item", 0)
    assert "other.jsonl" in refused('{"question": "Who?"}\n', other, "--item", 0)


def test_the_prompt_of_a_page_is_the_runs_own(show, tmp_path):
    """Chat turns with demonstrations, from the data; another file is refused."""
    data, demos, other = (tmp_path / name for name in ("trivia.jsonl", "demos.jsonl", "other.jsonl"))
    data.write_text("".join(json.dumps({"question": f"Who is {i}?", "answer": {"aliases": ["Ann"]}}) + "\n"
                            for i in range(3)))
    demos.write_text(json.dumps({"question": "Where?", "answer": "here"}) + "\n")
    other.write_text(demos.read_text() * 2)
    settings = {"task": "triviaqa", "version": 1, "model": "/nowhere", "method": "greedy", "n": 3, "layout": "chat"} | {
        name: record for name, record in zip(("data", "demos"), ([fingerprint(data)], fingerprint(demos)), strict=True)}
    line = {"index": 1, "question": "Who is 1?", "references": ["Ann"], "prediction": "Ann", "ids": [1], "alphas": [0],
            "entropies": [0], "stop": "eos"}
    run = tmp_path / "run.jsonl"
    run.write_text(json.dumps({"settings": settings}) + "\n" + json.dumps(line) + "\n")
    text = show(run, "--item", 1, "--data", data, "--demos", demos)[3]
    assert re.findall(r"<b>(\w+)</b> (.*?)</p>", text, re.DOTALL) == [
        ("system", "Answer the given question."), ("user", "Question: Where?\nAnswer:"), ("assistant", "here"),
        ("user", "Question: Who is 1?\nAnswer:"), ("references", "Ann")]
    assert "--demos: another file" in show(run, "--item", 1, "--data", data, "--demos", other)[2]
    assert "the whole prompt needs --data" in show(run, "--item", 1)[3]


def test_a_run_whose_tokenizer_is_not_here_is_shown_without_shades(runs, show, tmp_path):
    far = tmp_path / "far.jsonl"
    far.write_text(runs[0].read_text().replace('"model": "miniature"', '"model": "/nowhere/far"'))
    status, _, err, text = show(far, "--item", 0)
    assert status == 0 and err.startswith("no shades: ") and not SPAN.findall(text)
    assert json.loads(far.read_text().splitlines()[1])["prediction"] in html.unescape(text)


def test_candidates_are_shown_by_score(runs, show, tmp_path):
    settings = json.loads(runs[0].read_text().splitlines()[0])["settings"] | {"task": "truthfulqa-mc", "model": "x"}
    line = {"index": 0, "candidates": ["yes", "no", "maybe"], "scores_true": [-3.0, -1.0], "scores_false": [-2.0]}
    path = tmp_path / "choice.jsonl"
    path.write_text(json.dumps({"settings": settings}) + "\n" + json.dumps(line) + "\n")
    text = show(path, "--item", 0)[3]
    assert re.findall(r"<td>(.*?)</td>", text) == ["-1.00", "true", "no", "-2.00", "false", "maybe",
                                                   "-3.00", "true", "yes"]
