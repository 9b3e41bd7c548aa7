"""Pages of decoded texts and of items of stored runs."""

import html
import json
import re

import pytest
import torch

import evaluate
import program
from decore import DeCoRe
from heads import choose_heads
from model import Transformer
from program import page
from tests.checkpoints import write_lines
from tokenizer import Tokenizer

SPAN = re.compile(
    r'<span class="t( differs)?" id="\w+" tabindex="0"\s+style="--shade: ([\d.]+)"\s+'
    r'data-note="([^"]*)">([^<]*)</span>'
)


def spans(text):
    """Of each token on a page: (whether it differs, shade, lines of its note, text)."""
    return [
        (bool(differs), float(shade), html.unescape(note).split("\n"), html.unescape(token))
        for differs, shade, note, token in SPAN.findall(text)
    ]


def test_notes_hold_entropy_alpha_and_the_favourite_of_the_masked_row(call, chat_model, tmp_path):
    def decode(*arguments):
        _, out, _ = call(
            program.main,
            "--model",
            chat_model,
            "--max-new-tokens",
            8,
            "--prompt",
            "<script>1</script>",
            *arguments,
            "--json",
            "--html",
            tmp_path / "page.html",
        )
        return json.loads(out), (tmp_path / "page.html").read_bytes().decode()

    line, text = decode(
        "--method",
        "decore-static",
        "--alpha",
        0.25,
        "--heads",
        chat_model / "heads.json",
        "--num-heads",
        2,
    )
    model, tokenizer = Transformer.load(chat_model), Tokenizer.load(chat_model)
    ids = line["ids"][:-1] if line["stop"] == "eos" else line["ids"]
    with torch.inference_mode():
        decoder = DeCoRe(
            model,
            [line["prompt_ids"]],
            8,
            "decore-static",
            alpha=0.25,
            heads=choose_heads(model, chat_model / "heads.json", 2),
        )
        steps = [
            decoder.step(torch.tensor([[token]])) for token in [line["prompt_ids"][-1], *ids[:-1]]
        ]
    favourites = [result.other.argmax().item() for result in steps]
    tokens = spans(text)
    expected = [
        note
        for h, favourite in zip(line["entropies"], favourites, strict=False)
        for note in (
            f"base entropy {h:.3f} nats",
            "α 0.250",
            f"masked favourite {tokenizer.decode([favourite])!r}",
        )
    ]
    notes = [note for *_, lines, _ in tokens for note in lines]
    assert len(ids) > 2 and all(
        note.startswith(start) for note, start in zip(notes, expected, strict=True)
    )
    assert "".join(token for *_, token in tokens) == tokenizer.decode(ids)
    assert any(differs for differs, *_ in tokens) == (ids != favourites)
    assert {shade for _, shade, *_ in tokens} != {0.0}
    _, text = decode("--method", "greedy")
    assert (
        "<script" not in text and "&lt;" in text and "entropy" in text and "favourite" not in text
    )


class Bytes:
    """A tokenizer with one token per byte.

    As with SentencePiece, a text's first blank is not decoded."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_pieces_are_whole_characters_and_join_to_the_text():
    assert page.pieces(Bytes(), [*"é a文".encode(), 0xF0]) == [
        ("é", range(2)),
        (" ", range(2, 3)),
        ("a", range(3, 4)),
        ("文", range(4, 7)),
        ("\ufffd", range(7, 8)),
    ]


@pytest.mark.parametrize("sources", [[[(2, 1.0), (0, 0.75)], [], [(1, 0.5), (2, 0.25)], []], None])
def test_pointing_at_a_token_highlights_its_source_and_the_reverse(sources):
    line = dict(
        ids=[*map(ord, "<bc.")],
        alphas=[0.5] * 4,
        entropies=[0.1, 1, 9, 0],
        stop="eos",
        prompt_ids=[*map(ord, '<"z')],
        sources=sources,
    )
    prompt = dict(name="p0", pieces=page.pieces(Bytes(), line["prompt_ids"]))
    text = page.render(
        title="<x>", parts=[prompt, page.answer_part(Bytes(), "<title>", "g0", line, prompt)]
    )
    rules = re.findall(
        r":root:has\(#(\w+):is\(:hover, :focus, :target\)\) #(\w+) {[^/}]*/ ([\d.]+)\) }", text
    )
    pairs = {
        ("g0t0", "p0s0"): "0.75",
        ("g0t0", "p0s2"): "1.00",
        ("g0t2", "p0s1"): "0.50",
        ("g0t2", "p0s2"): "0.25",
    }
    # Of the title: the largest shares of the answer's tokens.
    title = {("g0h", "p0s0"): "0.75", ("g0h", "p0s1"): "0.50", ("g0h", "p0s2"): "1.00"}
    both_ways = pairs | title | {pair[::-1]: pairs[pair] for pair in pairs}
    assert {rule[:2]: rule[2] for rule in rules} == (both_ways if sources else {})
    assert (
        ("Blue" in text) == bool(sources)
        and "<title>" not in text.split("<h1>")[1]
        and "Dotted" not in text
    )
    assert re.findall(r' id="(\w+)"', text) == [
        "p0",
        "p0s0",
        "p0s1",
        "p0s2",
        "g0",
        "g0h",
        "g0t0",
        "g0t1",
        "g0t2",
    ]
    notes = [[f"base entropy {h:.3f} nats", "α 0.500"] for h in line["entropies"][:3]]
    if sources:
        notes[0] += ["from 'z' at 2 (100% of the heads)", "from '<' at 0 (75% of the heads)"]
        notes[2] += ["from '\"' at 1 (50% of the heads)", "from 'z' at 2 (25% of the heads)"]
    assert spans(text) == [
        *zip([False] * 3, (0.11, 0.35, 1), notes, "<bc", strict=True)
    ]  # sqrt(H / 8), at most 1
    on_opening = {
        f"p0s{i}": share for i, share in zip((0, 1, 2), ("0.75", "0.50", "1.00"), strict=True)
    }
    assert dict(re.findall(r"#(\w+) { --share: ([\d.]+) }", text)) == (
        on_opening if sources else {}
    )


# Items of stored runs


@pytest.fixture
def show(tmp_path, call):
    """show(*arguments) → (standard error, the page or None)"""

    def run(*args):
        out = tmp_path / "page.html"
        out.unlink(missing_ok=True)
        status, _, err = call(evaluate.main, "report", "page", *args, "--html", out)
        assert (status, out.exists()) in ((0, True), (2, False)) and err.count(
            "error: "
        ) == status / 2
        return err, out.read_text(encoding="utf-8") if out.exists() else None

    return run


def test_an_item_of_two_runs_is_a_page_with_prompt_references_and_both_texts(call, show, tmp_path):
    call(
        evaluate.main,
        "--task",
        "miniature-conflict",
        "--method",
        "greedy,decore-entropy",
        "--num-heads",
        2,
        "--limit",
        3,
        "--out",
        tmp_path,
        "--device",
        "cpu",
    )
    runs = [
        tmp_path / f"miniature-conflict.miniature.{name}.jsonl"
        for name in ("greedy", "decore-entropy.n2")
    ]
    lines = [json.loads(path.read_text().splitlines()[2]) for path in runs]
    err, text = show(runs[0], "--item", 1, "--against", runs[1])
    assert (
        err == ""
        and html.escape(lines[0]["question"]) in text
        and lines[0]["references"][0] in text
    )
    names = re.findall(r' id="(\w+)"', text)
    assert len(names) == len(set(names)) > 10
    for line, part, method in zip(
        lines, re.split("<h2[^>]*>", text)[1:], ("greedy", "DeCoRe entropy, N = 2"), strict=True
    ):
        verdict = "right" if line["references"][0] in line["prediction"] else "wrong"
        assert part.startswith(f'miniature: {method}\n<span class="{verdict}">')
        tokens = spans(part)
        assert "".join(token for *_, token in tokens) == line["prediction"]
        assert [lines[0] for *_, lines, _ in tokens] == [
            f"base entropy {h:.3f} nats" for h in line["entropies"][: len(tokens)]
        ]
    greedy, contrasted = (path.read_text() for path in runs)
    other = tmp_path / "other.jsonl"
    for content, args, words in (
        ("", (runs[0], "--item", 3), "has no item 3"),
        (
            contrasted.replace("miniature-conflict", "miniature-open"),
            (runs[0], "--item", 0, "--against", other),
            "is a run of miniature-conflict, --against has one of miniature-open",
        ),
        (
            greedy.replace('"prediction": " ', '"prediction": " X'),
            (other, "--item", 0),
            "give --model",
        ),
    ):
        other.write_text(content)
        assert words in show(*args)[0]


def test_candidates_are_sorted_by_score_and_the_answer_is_marked(show, tmp_path):
    settings = {
        "task": "truthfulqa-mc",
        "version": 1,
        "model": "x",
        "method": "greedy",
        "n": 1,
        "layout": "plain",
    }
    line = {
        "index": 0,
        "candidates": ["yes", "no", "maybe"],
        "scores_true": [-3.0, -1.0],
        "scores_false": [-2.0],
    }
    for best, mark in ((0, "✗ wrong"), (1, "✓ right")):
        path = write_lines(
            tmp_path / "choice.jsonl", [{"header": settings}, line | {"best_position": best}]
        )
        _, text = show(path, "--item", 0)
        assert re.findall(r"<td.*?>(.*?)</td>", text) == [
            "-1.00",
            "true",
            "no",
            "-2.00",
            "false",
            "maybe",
            "-3.00",
            "true",
            "yes",
        ]
        assert mark in text
