"""The program behind decore.py: prompts, options, JSON, text for people."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import cli
import decore
import program
from heads import detect, load_heads, published_random_heads, random_heads
from heads.sources import find_sources
from model import Transformer
from paper import decoders
from program.prompts import EXAMPLE
from tests.checkpoints import stand_in, write_checkpoint, write_heads, write_tokenizer
from tokenizer import Tokenizer

SHORT = ["--max-new-tokens", "6"]
FLAGS = [*SHORT, "--num-heads", "2"]
THINKING = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|end|>{% endfor "
    "%}<|turn|>assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"
)


def write_model(folder, template=None, seed=0):
    """A tiny checkpoint → the arguments that name it and its head scores."""
    write_tokenizer(write_checkpoint(folder, vocab_size=259, eos_token_id=257, seed=seed), template)
    return ["--model", str(folder), "--heads", str(write_heads(folder / "heads.json", 3, 4, 1))]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def objects(call):
    """The JSON objects that a program prints, by default decore.py."""

    def run(*arguments, main=program.main):
        status, out, err = call(main, *arguments, "--json")
        assert status == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return run


def labels(heads):
    return [f"{layer}-{head}" for layer, head in heads]


def test_each_of_several_answers_is_printed_when_it_ends(call, base, monkeypatch):
    def generate(model, ids, method, **settings):
        if method == "masked":
            for _ in range(6):
                settings["on_token"](1, 72, 0.0)
            raise KeyboardInterrupt
        return generated(model, ids, method, **settings)

    generated = decore.generate
    monkeypatch.setattr("decore.generate", generate)
    several = ["--method", "greedy,masked", "--prompt", "Hi", "--prompt", "Ho"]
    status, out, _ = call(program.main, *base, *FLAGS, *several)
    assert status == 130 and re.findall(r"\[\d\] H[io]\n *\w+", out) == [
        "[1] Hi\n        greedy",
        "[2] Ho\n        greedy",
        "[2] Ho\n        masked",
    ]


def test_json_holds_what_generate_and_find_sources_return(objects, base):
    [line] = objects(*base, *FLAGS, "--prompt", "Hi", "--sources")
    model, tokenizer = Transformer.load(base[1]), Tokenizer.load(base[1])
    heads, prompt = load_heads(stand_in(), 2, base[3]), tokenizer.encode("Hi")
    g = decore.generate(model, prompt, heads=heads, max_new_tokens=6, eos_ids=tokenizer.eos_ids)
    assert line == dict(
        prompt_ids=prompt,
        ids=g.ids,
        text=tokenizer.decode(g.ids),
        alphas=g.alphas,
        entropies=g.entropies,
        stop=g.stop,
        method="decore-entropy",
        model=model.name,
        heads=labels(heads),
        sources=[
            [[*place] for place in token] for token in find_sources(model, prompt, g.ids, heads)
        ],
    )


def test_prompts_of_all_kinds_are_decoded_in_order_and_the_text_is_that_of_the_json(
    call, base, tmp_path, monkeypatch
):
    (tmp_path / "prompt.txt").write_text("from a\nfile\n\n", encoding="utf-8")
    prompts = [
        "--prompt",
        "word " * 20,
        "--prompt-file",
        tmp_path / "prompt.txt",
        "--prompt-file",
        "-",
        "--prompt-ids",
        "72,105",
    ]
    outputs = []
    for options in (prompts, [*prompts, "--json"], ["--json"]):
        monkeypatch.setattr("sys.stdin", open(tmp_path / "prompt.txt", encoding="utf-8"))
        outputs.append(call(program.main, *base, *FLAGS, *options))
    _, out, err = outputs[0]
    lines = [json.loads(line) for line in outputs[1][1].splitlines()]
    piped = json.loads(outputs[2][1])
    tokenizer = Tokenizer.load(base[1])
    file = tokenizer.encode("from a\nfile\n")  # without one final newline
    assert [line["prompt_ids"] for line in lines] == [
        tokenizer.encode("word " * 20),
        file,
        file,
        [72, 105],
    ]
    assert piped["ids"] == lines[1]["ids"] and piped["prompt_ids"] == file
    titles = [
        f"[1] {'word ' * 12}…",
        "[2] from a file",
        "[3] from a file",
        f"[4] {tokenizer.decode([72, 105])}",
    ]
    assert out == "".join(
        f"{title}\n{line['text']}\n\n" for title, line in zip(titles, lines, strict=True)
    )
    assert "tokens/s" in err


def test_text_that_would_be_dropped_or_misread_is_named(call, base, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("a text")
    for options, status, words in (
        ([], 2, "standard input has a text too: add --prompt-file -"),
        (["--prompt-file", "-"], 0, "tokens/s"),
        (["--prompt", r"a\nb", "--prompt-file", "-"], 0, "which is not a line break"),
    ):
        with (tmp_path / "text").open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            result, _, err = call(program.main, *base, *FLAGS, "--prompt", "Hi", *options)
        assert result == status and words in err and ("line break" in err) == (r"a\nb" in options)


def test_an_answer_that_fills_the_context_says_so(call):
    prompt = "--prompt-ids", "5" + ",5" * 249, "--method", "greedy"
    for n, full in ((6, False), (7, True)):  # the miniature reads 256 tokens
        _, _, err = call(program.main, *prompt, "--max-new-tokens", n)
        assert "greedy: 6 tokens" in err
        assert ("an answer ended because the context is full" in err) == full
    status, out, err = call(program.main, "--prompt", "word " * 150, "--compare")
    assert (status, out) == (2, "") and "use a model that reads more, such as Qwen/" in err


def test_sources_stand_below_each_answer_word_by_word(call, objects):
    command = ["--prompt-file", cli.MINIATURE / "example.txt", "--sources"]
    _, out, _ = call(program.main, *command)
    assert out == " Dasholm.\n  Dasholm. ← Dasholm. 75%, is 8%, on 4%\n"
    [line] = objects(*command)
    assert Tokenizer.load(cli.MINIATURE).decode(line["prompt_ids"][25:31]) == " Dasholm."
    shares = [
        share
        for token in line["sources"][:-1]
        for position, share in token
        if position in range(25, 31)
    ]
    assert sum(shares) / len(line["sources"][:-1]) == pytest.approx(0.75, abs=0.005)


def test_of_many_words_the_most_telling_sources_are_shown_and_the_rest_counted(call, monkeypatch):
    monkeypatch.setattr("program.printing.LINES", 2)
    prompt = (cli.MINIATURE / "example.txt").read_text()
    text = ["--raw", "--prompt", prompt.partition("Answer")[0], "--max-new-tokens", 60]
    _, out, _ = call(program.main, *text, "--sources")
    shares = [int(share) for share in re.findall(r"← \S+ (\d+)%", out)]
    assert len(shares) == 2 and min(shares) >= 75
    assert re.search(r"^ +… and \d+ more words$", out, re.M)


def test_a_page_that_cannot_be_written_is_refused_first_and_a_failure_leaves_none(
    call, base, tmp_path
):
    page = tmp_path / "page.html"
    two = ["--prompt", "Hi", "--prompt", "Ho"]
    assert (
        "wrote" in call(program.main, *base, *FLAGS, *two, "--html", page)[2]
        and "Prompt 2" in page.read_text()
    )
    page.unlink()
    assert (
        call(program.main, *base, "--num-heads", 99, "--prompt", "Hi", "--html", page)[0] == 2
        and not page.exists()
    )


def test_compare_shows_greedy_masked_and_decore_without_and_with_an_amateur(
    call, objects, base, tmp_path
):
    heads = write_model(tmp_path, seed=3)[3]
    amateur = ["--amateur", tmp_path, "--amateur-heads", heads]
    prompt = [*FLAGS, "--prompt", "Hi"]
    lines = {line["method"]: line for line in objects(*base, *amateur, *prompt, "--compare")}
    assert list(lines) == ["greedy", "masked", "decore-entropy", "decore-entropy-lite"]
    assert (
        lines["decore-entropy-lite"]["amateur"] == tmp_path.name
        and "amateur" not in lines["decore-entropy"]
    )
    assert lines["decore-entropy"] == objects(*base, *prompt)[0]
    assert lines["decore-entropy-lite"] == objects(*base[:2], *amateur, *prompt)[0]
    assert lines["decore-entropy-lite"]["heads"] == labels(load_heads(stand_in(), 2, heads))
    _, text, _ = call(program.main, *base, *prompt, "--compare")
    assert text == "".join(
        f"{name:>14}  {line['text']}\n" for name, line in lines.items() if "amateur" not in line
    )


def test_added_methods_that_fail_are_left_out_and_a_requested_one_ends_in_an_error(
    call, base, tmp_path
):
    prompt = ["--prompt", "Hi", "--json", *SHORT]

    def run(*options):
        status, out, err = call(program.main, *prompt, *options)
        methods = [json.loads(line)["method"] for line in out.splitlines()]
        return status, methods, err

    no_heads = base[:2]
    status, methods, err = run(*no_heads, "--method", "dola-low", "--compare")
    assert (status, methods) == (0, ["greedy", "dola-low"])
    assert "masked is left out: no head scores are known" in err
    status, methods, err = run(*no_heads, "--method", "ad,dola-high", "--compare")
    assert (status, methods) == (2, ["greedy", "dola-high"])
    assert err.splitlines()[-1].startswith("program.py: error: info_layer 24 is outside")


def test_heads_prompts_and_methods_are_checked_before_weights_are_read(call, base, tmp_path):
    folder = tmp_path / "no weights"
    shutil.copytree(base[1], folder)
    (folder / "model.safetensors").write_text("damaged")
    named = ["--model", folder, "--prompt", "Hi"]
    for options, words in (
        ([], "no head scores are known"),
        (["--heads", "nosuch.json"], "nosuch.json is neither a head file nor a model"),
        (["--heads", folder / "heads.json", "--num-heads", 99], "99 heads are too many"),
        (["--method", "greedy", "--prompt-ids", "999"], "contains the id 999"),
        (["--method", "greedy", "--system", "S"], "need a chat template"),
        (["--method", "greedy"], "model.safetensors"),
    ):
        status, out, err = call(program.main, *named, *options)
        assert (status, out, err.count("\n")) == (2, "", 1) and words in err


@pytest.mark.parametrize("flags", [[], ["--transformers"]])
def test_the_suggested_detection_runs_as_printed(call, base, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(detect, "EARLY", 4)
    _, _, err = call(program.main, *base[:2], "--prompt", "Hi", *flags)
    command = shlex.split(err.rpartition("measure them: ")[2])
    assert command[:3] == ["python", "-m", "heads.detect"]
    status, _, err = call(detect.main, *command[3:])
    assert status == 2 and "0 of 4 answers are right" in err  # a random model
    [runs] = Path("heads").glob("*.json.runs.jsonl")
    facts = json.loads(runs.read_text().partition("\n")[0])["header"]
    assert facts["engine"] == ("transformers" if flags else "own")


def test_random_heads_without_scores_are_drawn_from_all_heads_and_say_so(call, base):
    random = ["--random-heads", "--method", "masked", "--prompt", "Hi"]
    _, out, err = call(program.main, *base[:2], *FLAGS, *random, "--json")
    assert len(set(json.loads(out)["heads"])) == 2
    assert "random heads are drawn from all heads, retrieval heads included" in err


def test_a_prompt_that_is_not_the_miniatures_names_a_real_model(call):
    for prompt, unknown in (("The capital of France is", True), (EXAMPLE.read_text(), False)):
        _, _, err = call(program.main, "--prompt", prompt.strip(), *SHORT)
        assert ("the miniature knows invented facts" in err) == unknown


def test_prompts_of_chat_models_pass_the_template_unless_raw(objects, tmp_path):
    model = write_model(tmp_path / "thinking", THINKING)
    for options, text in (
        (["--prompt=b"], "<|turn|>user:b<|end|><|turn|>assistant:"),
        (
            ["--prompt=b", "--system=S"],
            "<|turn|>system:S<|end|><|turn|>user:b<|end|><|turn|>assistant:",
        ),
        (["--prompt=b", "--raw"], "b"),
        (
            ["--prompt=b", '--template-args={"enable_thinking": false}'],
            "<|turn|>user:b<|end|><|turn|>assistant:quiet",
        ),
    ):
        assert objects(*model, *FLAGS, *options)[0]["prompt_ids"] == Tokenizer.load(
            model[1]
        ).encode(text)


def test_options_reach_the_method(objects, base):
    def line(*flags):
        return objects(*base, "--num-heads", 4, "--max-new-tokens", 24, "--prompt", "Who?", *flags)[
            0
        ]

    plain = line()
    assert max(plain["alphas"]) == max(plain["entropies"]) > 1
    assert max(line("--alpha-cap", 0.25)["alphas"]) == 0.25
    assert max(line("--scale-alpha")["alphas"]) <= 1
    assert set(line("--method", "decore-static", "--alpha", 1.5)["alphas"]) == {1.5}
    assert len(line("--num-heads", 7)["heads"]) == 7
    first, *others = (
        line("--method", "masked", *flags)["entropies"]
        for flags in ([], ["--mask=query"], ["--mask-prompt"])
    )
    assert first not in others
    random = line("--random-heads", "--seed", 0, "--num-heads", 2)
    assert random["heads"] == labels(random_heads(load_heads(stand_in(), name=base[3]), 2, 0))
    [published] = objects(
        *base[:2], *FLAGS, "--prompt=Hi", "--method=masked", "--random-heads=published"
    )
    assert published["heads"] == labels(published_random_heads(2, 3, 4))


def test_the_miniature_has_an_example_and_an_amateur_with_head_scores(call, objects, monkeypatch):
    monkeypatch.chdir(cli.MINIATURE.parent)
    status, out, _ = call(program.main, "--model", "./miniature/")
    assert status == 0 and out.splitlines()[3:] == [
        "        greedy   Kraskrigard.",
        "decore-entropy   Dasholm.",
    ]
    status, out, _ = call(
        program.main, "--method", "cad"
    )  # the example without its context is known
    assert status == 0 and out.endswith("cad   Dasholm.\n")
    [line] = objects(
        "--amateur",
        "miniature/amateur",
        "--prompt",
        "Hello you",
        "--max-new-tokens",
        4,
        "--sources",
    )
    assert line["method"] == "decore-entropy-lite" and len(line["heads"]) == 4
    heads = [tuple(map(int, head.split("-"))) for head in line["heads"]]
    sources = find_sources(
        Transformer.load("miniature/amateur"), line["prompt_ids"], line["ids"], heads
    )
    assert line["sources"] == [[[*place] for place in token] for token in sources]


@pytest.mark.parametrize(
    "arguments, settings",
    [
        ("--method=cad --without-context=i --alpha=2", dict(ids_without_context=[72], alpha=2.0)),
        ("--method=ad --info-layer=2 --relative-top=0", dict(info_layer=2, relative_top=0)),
        ("--method=dola-high --dola-layers=halves", dict(dola_layers="halves")),
        ("--method=cd --amateur={base}", dict(amateur=True)),
    ],
)
def test_the_baselines_command_line_gives_what_generate_gives(objects, base, arguments, settings):
    model = Transformer.load(base[1])
    settings = settings | (dict(amateur=model) if "amateur" in settings else {})
    [line] = objects(*base[:2], *SHORT, "--prompt", "Hi", *arguments.format(base=base[1]).split())
    g = decoders.generate(
        model, line["prompt_ids"], line["method"], max_new_tokens=6, eos_ids=[257], **settings
    )
    assert (line["ids"], line["alphas"], line["stop"]) == (g.ids, g.alphas, g.stop)
    assert line["heads"] == [] and line.get("amateur") == (
        model.name if "amateur" in settings else None
    )


def test_an_answer_ends_before_a_stop_text(objects, base):
    command = [
        *base,
        "--num-heads",
        2,
        "--max-new-tokens",
        24,
        "--prompt",
        "Who?",
        "--prompt",
        "What is it?",
    ]
    first, second = (line["text"] for line in objects(*command))
    stop = first[8:11]
    lines = objects(*command, "--stop", "never there", "--stop", stop)
    assert [line["text"] for line in lines] == [
        first.partition(stop)[0],
        second,
    ] and stop not in second
    assert lines[0]["stop"] == "stop" and len(lines[0]["ids"]) < 24


def test_a_tiny_model_gets_one_thread_unless_the_user_chose(base, monkeypatch):
    chosen, model = [], Transformer.load(base[1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    cli.limit_threads(model)  # conftest sets OMP_NUM_THREADS
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.limit_threads(model)
    assert chosen == [1]
    model.register_buffer("packed", torch.empty(30_000_000, device="meta"))
    cli.limit_threads(model)
    assert chosen == [1]
