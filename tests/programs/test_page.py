"""Pages of decoded texts."""

import html
import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import program
from decore import DeCoRe
from heads import choose_heads
from model import Transformer
from program import page
from tokenizer import Tokenizer

SPAN = re.compile(
    r'( *)<span class="t( differs)?" id="\w+" tabindex="0"\s+style="--shade: ([\d.]+)"\s+'
    r'data-note="([^"]*)">([^<]*)</span>'
)


def spans(text):
    """Of each token on a page: (whether it differs, shade, lines of its note, text)."""
    return [
        (bool(differs), float(shade), html.unescape(note).split("\n"), blank + html.unescape(token))
        for blank, differs, shade, note, token in SPAN.findall(text)
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
    assert "α = 0.25; N = 2 heads masked: " + ", ".join(line["heads"]) in text
    assert "--method decore-static --alpha 0.25 --heads" in text.partition("<ul")[0]
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
        title="<x>",
        command="c",
        parts=[prompt, page.answer_part(Bytes(), "<title>", "g0", line, prompt)],
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


def test_a_page_that_cannot_be_written_completely_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def write_text(draft, text, encoding):
        draft.open("w").write(text[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    model = SimpleNamespace(name="m", shard=SimpleNamespace(rank=0))
    with pytest.raises(OSError, match="No space"):
        page.write_page(path, model, Bytes(), {}, {})
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"


def test_a_page_for_a_device_is_written_into_it(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    model = SimpleNamespace(name="m", shard=SimpleNamespace(rank=0))
    texts = []
    reader = threading.Thread(target=lambda: texts.append(path.read_text()))
    reader.start()
    page.write_page(path, model, Bytes(), {}, {})
    reader.join(timeout=10)
    assert path.is_fifo() and "DeCoRe: m" in texts[0]
