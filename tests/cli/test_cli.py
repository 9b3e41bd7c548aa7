"""The program behind decore.py and paper/decoders.py: prompts, options, JSON, text for people."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

import cli
import decore
import program
from heads import load_heads, published_random_heads, random_heads
from heads.sources import find_sources
from model import Transformer
from paper import decoders
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


def test_answers_to_several_prompts_are_printed_also_after_ctrl_c(call, base, monkeypatch):
    def generate(*args, method, **settings):
        if method == "decore-entropy":
            raise KeyboardInterrupt
        return generated(*args, method=method, **settings)

    generated = decore.generate
    monkeypatch.setattr("decore.generate", generate)
    status, out, _ = call(
        program.main, *base, *FLAGS, "--compare", "--prompt", "Hi", "--prompt", "Ho"
    )
    assert status == 130 and out.count("greedy") == out.count("masked") == 2


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
    (_, out, err), lines, [piped] = (
        outputs[0],
        *([*map(json.loads, text.splitlines())] for _, text, _ in outputs[1:]),
    )
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
    _, out, _ = call(
        program.main, *base, *FLAGS, *prompts[:2], *prompts[-2:], "--compare"
    )  # by prompt, then method
    methods = ["greedy", "masked", "decore-entropy"]
    assert re.findall(r"^\[\d\]|^ *(?:greedy|masked|decore-entropy)(?=  )", out, re.M) == [
        label for i in (1, 2) for label in (f"[{i}]", *(f"{method:>14}" for method in methods))
    ]


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
    for n, full in ((6, False), (7, True)):  # the miniature reads 256 tokens
        _, _, err = call(
            program.main,
            "--prompt-ids",
            "5" + ",5" * 249,
            "--method",
            "greedy",
            "--max-new-tokens",
            n,
        )
        assert (
            "greedy: 6 tokens" in err
            and ("an answer ended because the context is full" in err) == full
        )
    status, out, err = call(program.main, "--prompt", "word " * 150, "--compare")
    assert (status, out, err.count("\n")) == (
        2,
        "",
        1,
    ) and "use a model that reads more, such as Qwen/" in err


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
    status, out, err = call(
        program.main, *base[:2], *amateur, *prompt, "--compare"
    )  # no heads of the model itself
    assert (
        status == 0
        and "masked  " not in out
        and "masked is left out: no head scores are known" in err
    )


@pytest.mark.parametrize(
    "options, status, methods, reasons",
    [
        (
            "{heads}",
            0,
            [*decore.METHODS, "dola-low", "dola-high"],
            [
                "cd is left out: cd needs an amateur",
                "cad is left out: cad needs",
                "ad is left out: info_layer 24",
            ],
        ),
        (
            "--amateur {base}",
            0,
            ["greedy", "cd", "dola-low", "dola-high"],
            ["masked is left out: no head scores"],
        ),
        (
            "--method ad",
            2,
            ["greedy", "dola-low", "dola-high"],
            ["error: info_layer 24"],
        ),  # requested
        (
            "--method masked",
            2,
            ["greedy", "dola-low", "dola-high"],
            ["error: no head scores are known"],
        ),
    ],
)
def test_compare_leaves_out_methods_that_fail_and_ends_in_an_error_if_the_requested_one_fails(
    call, base, options, status, methods, reasons
):
    options = options.format(heads=" ".join(base[2:]), base=base[1]).split()
    result, out, err = call(
        program.main, *base[:2], *SHORT, "--prompt", "Hi", "--json", "--compare", *options
    )
    assert (result, [json.loads(line)["method"] for line in out.splitlines()]) == (status, methods)
    assert all(reason in err for reason in reasons) and err.count("error: ") == bool(status)


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
        ("--method=ad --info-layer=2 --relative-top=0", dict(info_layer=2, relative_top=None)),
        ("--method=dola-high --dola-layers=halves", dict(dola_layers="halves")),
        ("--method=cd --amateur={base}", dict(amateur=True)),
    ],
)
def test_the_baselines_command_line_gives_what_generate_gives(objects, base, arguments, settings):
    model = Transformer.load(base[1])
    settings = settings | (dict(amateur=model) if "amateur" in settings else {})
    [line] = objects(
        *base[:2],
        *SHORT,
        "--prompt",
        "Hi",
        *arguments.format(base=base[1]).split(),
        main=program.main,
    )
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


def test_on_a_cpu_small_models_are_float32_and_others_are_refused_before_their_download(
    tmp_path, monkeypatch
):
    write_tokenizer(write_checkpoint(tmp_path, vocab_size=259, dtype=torch.bfloat16))
    args = program.make_parser("", decore.METHODS, "", ()).parse_args(["--device", "cpu"])
    assert cli.load_model(tmp_path, args)[0].dtype == torch.float32
    monkeypatch.setattr(
        "runtime.hf.HFModel.load",
        lambda name, device, dtype, device_map: SimpleNamespace(dtype=dtype),
    )
    args.transformers = True
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, dtype in (({}, "float32"), ({"quantization_config": {"bits": 4}}, None)):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        assert cli.load_model(tmp_path, args)[0].dtype == dtype
    args.transformers = False
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    monkeypatch.setattr(
        "runtime.weights.checkpoint_folder",
        lambda name, weights=True: weights and pytest.fail("downloaded") or tmp_path,
    )
    with pytest.raises(ValueError, match="gemma"):
        cli.load_model(tmp_path, args)


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
