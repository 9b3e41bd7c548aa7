"""Pages of decoded texts."""

import html
import json
import re

import torch

import program
from decore import DeCoRe
from heads import load_heads
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
    path, file = tmp_path / "page.html", chat_model / "heads.json"
    prompt = ["--prompt", "<script>1</script>", "--max-new-tokens", 8, "--json", "--html", path]
    static = ["--method", "decore-static", "--alpha", 0.25, "--heads", file, "--num-heads", 2]
    _, out, err = call(program.main, "--model", chat_model, *prompt, *static)
    line, text = json.loads(out), path.read_bytes().decode()
    assert f"wrote {path}" in err
    model, tokenizer = Transformer.load(chat_model), Tokenizer.load(chat_model)
    ids = line["ids"][:-1] if line["stop"] == "eos" else line["ids"]
    heads = load_heads(model, 2, file)
    decoder = DeCoRe(model, [line["prompt_ids"]], 8, "decore-static", heads, alpha=0.25)
    favourites, expected = [], []
    for token, h in zip([line["prompt_ids"][-1], *ids[:-1]], line["entropies"], strict=False):
        with torch.inference_mode():
            favourites.append(decoder.step(torch.tensor([[token]])).other.argmax().item())
        favourite = f"masked favourite {tokenizer.decode(favourites[-1:])!r}"
        expected += [f"base entropy {h:.3f} nats", "α 0.250", favourite]
    differ, shades, notes, tokens = zip(*spans(text), strict=True)
    for note, beginning in zip(sum(notes, []), expected, strict=True):
        assert note.startswith(beginning)
    assert "".join(tokens) == tokenizer.decode(ids) and len(ids) > 2
    assert any(differ) == (ids != favourites) and set(shades) != {0.0}
    assert "α = 0.25; N = 2 heads masked: " + ", ".join(line["heads"]) in text
    assert "--method decore-static --alpha 0.25 --heads" in text.partition("<ul")[0]
    call(program.main, "--model", chat_model, *prompt, "--method", "greedy", "--prompt", "Hi")
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;" in text and "Prompt 2" in text
    assert not re.search("favourite|Dotted|Blue", text)


class Bytes:
    """A tokenizer with one token per byte.

    As with SentencePiece, a text's first blank is not decoded."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_pieces_are_whole_characters_and_join_to_the_text():
    pieces = page.pieces(Bytes(), [*"é a文".encode(), 0xF0])
    texts, positions = zip(*pieces, strict=True)
    assert texts == ("é", " ", "a", "文", "\ufffd")
    assert [len(ids) for ids in positions] == [2, 1, 1, 3, 1]
    assert sum(map(list, positions), []) == list(range(8))


def test_pointing_at_a_token_highlights_its_source_and_the_reverse():
    line = dict(
        ids=[*map(ord, "<bc.")],
        alphas=[0.5] * 4,
        entropies=[0.1, 1, 9, 0],
        stop="eos",
        method="<title>",
        prompt_ids=[*map(ord, '<"z')],
        sources=[[(2, 1.0), (0, 0.75)], [], [(1, 0.5), (2, 0.25)], []],
    )
    prompt = dict(name="p0", pieces=page.pieces(Bytes(), line["prompt_ids"]))
    part = page.answer_part(Bytes(), "g0", line, prompt)
    text = page.render(title="<x>", command="c", parts=[prompt, part])
    rule = r":root:has\(#(\w+):is\(:hover, :focus, :target\)\) #(\w+) {[^/}]*/ ([\d.]+)\) }"
    rules = {(pointed, marked): share for pointed, marked, share in re.findall(rule, text)}
    pairs = {"g0t0 p0s0": "0.75", "g0t0 p0s2": "1.00", "g0t2 p0s1": "0.50", "g0t2 p0s2": "0.25"}
    pairs = {tuple(pair.split()): share for pair, share in pairs.items()}
    # Of the title: the largest shares of the answer's tokens.
    shares = {"p0s0": "0.75", "p0s1": "0.50", "p0s2": "1.00"}
    title = {("g0h", piece): share for piece, share in shares.items()}
    assert rules == pairs | title | {pair[::-1]: share for pair, share in pairs.items()}
    assert dict(re.findall(r"#(\w+) { --share: ([\d.]+) }", text)) == shares  # on opening
    assert "Blue" in text and "<title>" not in text.split("<h1>")[1] and "Dotted" not in text
    ids = "p0 p0s0 p0s1 p0s2 g0 g0h g0t0 g0t1 g0t2"
    assert re.findall(r' id="(\w+)"', text) == ids.split()
    notes = [[f"base entropy {h:.3f} nats", "α 0.500"] for h in line["entropies"][:3]]
    notes[0] += ["from 'z' at 2 (100% of the heads)", "from '<' at 0 (75% of the heads)"]
    notes[2] += ["from '\"' at 1 (50% of the heads)", "from 'z' at 2 (25% of the heads)"]
    shades = (0.11, 0.35, 1)  # sqrt(H / 8), at most 1
    assert spans(text) == [*zip([False] * 3, shades, notes, "<bc", strict=True)]
