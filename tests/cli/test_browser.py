"""The page in a real browser, headless Chromium. A script in the page does what a person does, and
stores what it sees as the page's title."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from runtime.generation import Generation
from runtime.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")

# Focus the first token and the title, and read what has changed.
LOOK = """
<script>
addEventListener("load", () => setTimeout(() => {
  const marked = () => [...document.querySelectorAll(".s")].filter(
    word => !getComputedStyle(word).backgroundColor.endsWith(", 0)")).map(word => word.id)
  const seen = { seconds: performance.now() / 1000, width: innerWidth }
  seen.overflow = document.documentElement.scrollWidth - innerWidth
  seen.background = getComputedStyle(document.body).backgroundColor
  seen.before = marked()
  document.getElementById("g0t0").focus()
  seen.note = getComputedStyle(document.getElementById("g0t0"), "::after").content
  seen.marked = marked()
  const box = document.getElementById("p0").getBoundingClientRect()
  const source = document.getElementById("p0s7").getBoundingClientRect()
  seen.visible = source.top >= box.top && source.bottom <= box.bottom
  document.title = JSON.stringify(seen)
}, 0))
</script>"""


def look(tmp_path, text, *flags, width=1100):
    """What LOOK sees on a page, and the messages of the browser's console."""
    path = tmp_path / "page.html"
    path.write_text(text + LOOK, encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    options += f" --enable-logging=stderr --window-size={width},800 --user-data-dir={tmp_path}/user"
    command = [CHROMIUM, *options.split(), *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    [title] = re.findall("<title>(.*?)</title>", done.stdout, re.S)
    return json.loads(html.unescape(title)), re.findall("CONSOLE.*", done.stderr)


def answer(n):
    """An answer of 40 tokens to a prompt of n, each copied from one of its words."""
    prompt = [f" word{i}" if i % 9 else "\n" for i in range(1, n + 1)]
    return Generation(
        ids=[*range(40)],
        alphas=[0.5] * 40,
        entropies=[1.0] * 40,
        stop="length",
        tokens=[f" copy{i}" for i in range(40)],
        prompt=prompt,
        sources=[[(7 + i * (n - 8) // 40, 0.75)] for i in range(40)],
    )


@pytest.mark.parametrize("width", [1100, 390])
def test_a_focused_token_shows_its_numbers_and_its_source_in_any_window(tmp_path, width):
    text = page({"greedy": answer(600), "DeCoRe": answer(600)}, "a model")
    seen, messages = look(tmp_path, text, width=width)
    assert messages == [] and seen["overflow"] <= 0
    assert "base entropy 1.000 nats" in seen["note"] and "from ' word8' at 7" in seen["note"]
    assert len(seen["before"]) == 40 and seen["marked"] == ["p0s7"] and seen["visible"]


def test_a_long_page_opens_fast_and_follows_the_colour_scheme(tmp_path):
    text = page({"greedy": answer(8000), "DeCoRe": answer(8000)})
    looks = (look(tmp_path, text)[0] for _ in range(4))  # other programs may slow one down
    light = next((seen for seen in looks if seen["seconds"] < 2), None)
    assert light, "the page never opens in two seconds"
    dark, _ = look(tmp_path, text, "--blink-settings=preferredColorScheme=0")
    assert dark["background"] != light["background"]
