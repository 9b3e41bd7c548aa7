"""Pages of decoded texts and of items of stored runs."""

import html
import json
import re
from types import SimpleNamespace

import pytest
import torch

import decore
import evaluate
from cli import page
from heads import choose_heads
from model import Transformer
from tasks.sources import file_record
from tests.checkpoints import write_lines
from tokenizer import Tokenizer

SPAN = re.compile(r'<span class="t( differs)?" id="\w+" tabindex="0" style="--shade: ([\d.]+)" '
                  r'data-note="([^"]*)">([^<]*)</span>')


def test_notes_hold_entropy_alpha_and_the_favourite_of_the_masked_row(call, chat_model, tmp_path):
    def decode(*arguments):
        _, out, _ = call(decore.main, "--model", chat_model, "--max-new-tokens", 8, "--prompt", "<script>1</script>",
                         *arguments, "--json", "--html", tmp_path / "page.html")
        return json.loads(out), (tmp_path / "page.html").read_bytes().decode()

    out, text = decode("--method", "decore-static", "--alpha", 0.25, "--heads", chat_model / "heads.json",
                       "--num-heads", 2)
    model, tokenizer = Transformer.load(chat_model), Tokenizer.load(chat_model)
    ids = out["ids"][:-1] if out["stop"] == "eos" else out["ids"]
    with torch.inference_mode():
        step, _ = decore.open_decore(model, [out["prompt_ids"]], 8, "decore-static", alpha=0.25,
                                     heads=choose_heads(model, chat_model / "heads.json", 2))
        steps = [step(None if i == 0 else torch.tensor([ids[i - 1:i]])) for i in range(len(ids))]
    favourites = [result.other.argmax().item() for result in steps]
    spans = SPAN.findall(text)
    notes = [line for _, _, note, _ in spans for line in html.unescape(note).split("\n")]
    expected = [line for h, favourite in zip(out["entropies"], favourites, strict=False) for line in
                (f"base entropy {h:.3f} nats", "α 0.250", f"masked favourite {tokenizer.decode([favourite])!r}")]
    assert len(ids) > 2
    assert all(note.startswith(line) for note, line in zip(notes, expected, strict=True))
    assert "".join(html.unescape(text) for *_, text in spans) == tokenizer.decode(ids)
    assert any(differs for differs, *_ in spans) == (ids != favourites)
    assert {float(shade) for _, shade, _, _ in spans} != {0.0}
    text = decode("--method", "greedy")[1]
    assert "<script" not in text and "&lt;" in text and "entropy" in text and "favourite" not in text


def linked(sources=None):
    """An answer to a prompt, a token per letter."""
    g = SimpleNamespace(ids=[*map(ord, "<bc")], alphas=[0.5] * 3, entropies=[0.1] * 3, stop="length")
    return page.answer_html(Letters(), "decore-entropy", g, "g0", None, ([*map(ord, '<"z')], "p0"), sources)


class Letters:
    def stream(self):
        return SimpleNamespace(push=chr, end=lambda: "")

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_pointing_at_a_token_highlights_its_source_and_the_reverse():
    answer = linked([[(2, 1.0), (0, 0.75)], [], [(1, 0.5), (2, 0.25)]])
    rules = re.findall(r":root:has\(#(\w+):is\(:hover, :focus, :target\)\) #(\w+) { .*? / ([\d.]+)\) }", answer)
    pairs = {("g0t0", "p0s0"): "0.75", ("g0t0", "p0s2"): "1.00", ("g0t2", "p0s1"): "0.50", ("g0t2", "p0s2"): "0.25"}
    # Of the title: the largest shares of the answer's tokens.
    title = {("g0h", "p0s0"): "0.75", ("g0h", "p0s1"): "0.50", ("g0h", "p0s2"): "1.00"}
    assert {rule[:2]: rule[2] for rule in rules} == pairs | title | {pair[::-1]: pairs[pair] for pair in pairs}
    names = re.findall(r'id="(\w+)"', page.prompt_html(Letters(), [*map(ord, '<"z')], "p0") + answer)
    assert names == ["p0", "p0s0", "p0s1", "p0s2", "g0", "g0h", "g0t0", "g0t1", "g0t2"]
    notes, texts = zip(*re.findall(r'data-note="([^"]*)">([^<]*)</span>', answer), strict=True)
    assert texts == ("&lt;", "b", "c")
    assert html.unescape(notes[0]).endswith("from 'z' at 2 (100% of the heads)\nfrom '<' at 0 (75% of the heads)")
    assert "from" not in notes[1] and "from '&quot;' at 1" in notes[2].replace("&#x27;", "'")
    assert ":has(" not in linked() and "Blue" not in page.document("x", [linked()])
    assert "Blue" in page.document("x", [answer])


# Items of stored runs

@pytest.fixture
def show(tmp_path, call):
    """show(*arguments) → (status, standard error, the page or None)"""
    def run(*args):
        out = tmp_path / "page.html"
        out.unlink(missing_ok=True)
        status, _, err = call(evaluate.main, "report", "page", *args, "--html", out)
        return status, err, out.read_text(encoding="utf-8") if out.exists() else None
    return run


def test_an_item_of_two_runs_is_a_page_with_prompt_references_and_both_texts(call, show, tmp_path):
    call(evaluate.main, "--task", "miniature-conflict", "--method", "greedy,decore-entropy", "--num-heads", 2,
         "--limit", 3, "--out", tmp_path, "--device", "cpu")
    runs = [tmp_path / f"miniature-conflict.miniature.{name}.jsonl" for name in ("greedy", "decore-entropy.n2")]
    lines = [json.loads(path.read_text().splitlines()[2]) for path in runs]
    status, err, text = show(runs[0], "--item", 1, "--against", runs[1])
    assert (status, err) == (0, "")
    assert html.escape(lines[0]["question"]) in text and lines[0]["references"][0] in text
    names = re.findall(r' id="(\w+)"', text)
    assert len(names) == len(set(names)) > 10
    parts = re.split("<h2[^>]*>", text)[1:]
    for line, part, method in zip(lines, parts, ("greedy", "DeCoRe entropy, N = 2"), strict=True):
        spans = SPAN.findall(part)
        right = line["references"][0] in line["prediction"]
        assert part.startswith(f'miniature: {method} <span class="{"right" if right else "wrong"}">')
        assert "".join(html.unescape(word) for *_, word in spans) == line["prediction"]
        assert [note.split("&#10;")[0] for _, _, note, _ in spans] == [
            f"base entropy {h:.3f} nats" for h in line["entropies"][:len(spans)]]
    greedy, contrasted = (path.read_text() for path in runs)
    other = tmp_path / "other.jsonl"
    for content, args, words in (
            ("", (runs[0], "--item", 3), "has no item 3"),
            (contrasted.replace("miniature-conflict", "miniature-open"), (runs[0], "--item", 0, "--against", other),
             "is a run of miniature-conflict, --against has one of miniature-open"),
            (greedy.replace('"prediction": " ', '"prediction": " X'), (other, "--item", 0), "give --model")):
        other.write_text(content)
        status, err, text = show(*args)
        assert status == 2 and text is None and words in err and len(err.splitlines()) == 1


def test_candidates_are_sorted_by_score_and_the_answer_is_marked(show, tmp_path):
    settings = {"task": "truthfulqa-mc", "version": 1, "model": "x", "method": "greedy", "n": 1, "layout": "plain"}
    line = {"index": 0, "candidates": ["yes", "no", "maybe"], "scores_true": [-3.0, -1.0], "scores_false": [-2.0]}
    for best, mark in ((0, "✗ wrong"), (1, "✓ right")):
        path = write_lines(tmp_path / "choice.jsonl", [{"settings": settings}, line | {"best_position": best}])
        text = show(path, "--item", 0)[2]
        assert re.findall(r"<td.*?>(.*?)</td>", text) == ["-1.00", "true", "no", "-2.00", "false", "maybe",
                                                          "-3.00", "true", "yes"]
        assert mark in text


def test_the_prompt_of_a_page_is_the_runs_own(show, tmp_path, chat_model):
    """Chat turns with demonstrations, from the data; another file is refused."""
    data = write_lines(tmp_path / "trivia.jsonl", [{"question": f"Who is {i}?", "answer": {"aliases": ["Ann"]}}
                                                   for i in range(3)])
    demo = {"question": "Where?", "answer": "here"}
    demos, other = write_lines(tmp_path / "demos.jsonl", [demo]), write_lines(tmp_path / "other.jsonl", [demo, demo])
    settings = {"task": "triviaqa", "version": 1, "model": str(chat_model), "method": "greedy", "n": 3,
                "layout": "chat", "data": [file_record(data)], "demos": file_record(demos)}
    line = {"index": 1, "question": "Who is 1?", "references": ["Ann"], "prediction": "Ann", "alphas": [0] * 3,
            "ids": Tokenizer.load(chat_model).encode("Ann", bos=False), "entropies": [0] * 3, "stop": "length"}
    run = write_lines(tmp_path / "run.jsonl", [{"settings": settings}, line])
    text = show(run, "--item", 1, "--data", data, "--demos", demos)[2]
    assert re.findall(r"<b>(\w+)</b> (.*?)</p>", text, re.DOTALL) == [
        ("system", "Answer the given question."), ("user", "Question: Where?\nAnswer:"), ("assistant", "here"),
        ("user", "Question: Who is 1?\nAnswer:"), ("references", "Ann")]
    assert "--demos is not the run's file" in show(run, "--item", 1, "--data", data, "--demos", other)[1]
    assert "prompt needs --data" in show(run, "--item", 1)[2]
