"""The command line: its JSON, its text, and mistakes that end in one line and status 2."""

import json
import os
import pty
import subprocess
import sys

import pytest
import torch

import baselines
import decore
import cli
from cli import screen as answer
from heads import load_heads, published_random_heads, random_heads
from model import Transformer
from tests.checkpoints import random_weights, write_checkpoint, write_heads, write_tokenizer
from tokenizer import Tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}<|turn|>"
SHORT = ["--max-new-tokens", "6"]
FLAGS = [*SHORT, "--num-heads", "2"]


def write_model(folder, family="llama3", template=None, heads=True, **changes):
    """A checkpoint with tokenizer, and head scores beside it → the arguments that name both."""
    changes = dict(dict(vocab_size=259, eos_token_id=257), **changes)
    write_tokenizer(write_checkpoint(folder, family, **changes), template)
    model = ["--model", str(folder)]
    return model + ["--heads", str(write_heads(folder / "heads.json", 3, 4, 1))] if heads else model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("chat"), template=TEMPLATE)


@pytest.fixture
def call(monkeypatch, capsys):
    """Run decore.py's main, or another, on arguments → (status, standard output, standard error)."""
    def run(*args, main=decore.main):
        monkeypatch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, args)])
        status = cli.run(main)
        return status, *capsys.readouterr()
    return run


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def test_json_holds_what_generate_returns(call, base):
    status, out, _ = call(*base, *FLAGS, "--prompt", "Hi", "--json")
    [got] = objects(out)
    model, tokenizer = Transformer.load(base[1]), Tokenizer.load(base[1])
    heads = [tuple(map(int, head.split("-"))) for head in got["heads"]]
    g = decore.generate(model, tokenizer.encode("Hi"), heads=heads, max_new_tokens=6, eos_ids=tokenizer.eos_ids)
    assert status == 0 and len(heads) == 2
    assert got == dict(prompt_ids=tokenizer.encode("Hi"), ids=g.ids, text=tokenizer.decode(g.ids), alphas=g.alphas,
                       entropies=g.entropies, stop=g.stop, method="decore-entropy", heads=got["heads"],
                       model=model.name)


def test_text_for_people_is_the_text_of_the_json_and_timings_go_to_standard_error(call, base):
    _, out, _ = call(*base, *FLAGS, "--prompt", "Hi", "--json")
    _, text, err = call(*base, *FLAGS, "--prompt", "Hi")
    assert text == objects(out)[0]["text"] + "\n"
    assert "tokens/s" in err


def test_several_prompts_are_one_batch_in_order(call, base, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("from a\nfile", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", open(tmp_path / "prompt.txt", encoding="utf-8"))
    status, out, _ = call(*base, *FLAGS, "--json", "--prompt", "one", "--prompt", "a longer one", "--prompt-file",
                          tmp_path / "prompt.txt", "--prompt-file", "-", "--prompt-ids", "5,6,7")
    got = objects(out)
    encode = Tokenizer.load(base[1]).encode
    file = encode("from a\nfile")
    assert status == 0
    assert [g["prompt_ids"] for g in got] == [encode("one"), encode("a longer one"), file, file, [5, 6, 7]]
    for g in got:
        _, alone, _ = call(*base, *FLAGS, "--json", "--prompt-ids", ",".join(map(str, g["prompt_ids"])))
        assert objects(alone)[0]["ids"] == g["ids"]


def test_compare_shows_greedy_masked_and_decore_under_each_other(call, base):
    _, out, _ = call(*base, *FLAGS, "--compare", "--prompt", "Hi", "--json")
    assert [g["method"] for g in objects(out)] == ["greedy", "masked", "decore-entropy"]
    texts = {g["method"]: g["text"] for g in objects(out)}
    _, text, _ = call(*base, *FLAGS, "--compare", "--prompt", "Hi")
    assert text == "".join(f"{method:>14}  {t}\n" for method, t in texts.items())


def test_compare_with_an_amateur_shows_decore_without_and_with_it_under_names_of_their_own(call, base, tmp_path):
    amateur = write_model(tmp_path, seed=3)
    arguments = ["--amateur", tmp_path, "--amateur-heads", amateur[3], *FLAGS, "--compare", "--prompt", "Hi", "--json"]
    status, out, _ = call(*base, *arguments)
    got = {g["method"]: g for g in objects(out)}
    assert status == 0 and list(got) == ["greedy", "masked", "decore-entropy", "decore-entropy-lite"]
    assert got["decore-entropy-lite"]["amateur"] == tmp_path.name and "amateur" not in got["decore-entropy"]
    for name, more in (("decore-entropy", base), ("decore-entropy-lite", [*base[:2], *arguments[:4]])):
        [alone] = objects(call(*more, *FLAGS, "--prompt", "Hi", "--json")[1])
        assert alone == got[name]
    _, out, err = call(*base[:2], *arguments)                   # the model's own heads are not known
    assert [g["method"] for g in objects(out)] == ["greedy", "decore-entropy-lite"]
    assert "decore-entropy is left out: no head scores are known" in err


def test_chat_models_get_their_template_and_raw_text_does_not(call, chat):
    def prompt(*flags):
        _, out, _ = call(*chat, *FLAGS, "--json", "--prompt", "Hi", *flags)
        return objects(out)[0]["prompt_ids"]
    encode = Tokenizer.load(chat[1]).encode
    assert prompt() == encode("<|begin|><|turn|>user:Hi<|turn|>")
    assert prompt("--system", "Be brief") == encode("<|begin|><|turn|>system:Be brief<|turn|>user:Hi<|turn|>")
    assert prompt("--raw") == encode("Hi")


def test_options_reach_the_method(call, base):
    def ids(*flags):
        _, out, _ = call(*base, "--num-heads", 4, "--max-new-tokens", 24, "--prompt", "Who?", "--json", *flags)
        return objects(out)[0]
    assert objects(call(*base[:2], "--method", "greedy", "--prompt", "Hi", "--json")[1])[0]["heads"] == []
    plain = ids()
    assert max(plain["alphas"]) == max(plain["entropies"]) > 1
    assert max(ids("--alpha-cap", 0.25)["alphas"]) == 0.25
    assert max(ids("--scale-alpha")["alphas"]) <= 1
    assert set(ids("--method", "decore-static", "--alpha", 1.5)["alphas"]) == {1.5}
    assert len(ids("--num-heads", 7)["heads"]) == 7
    first, *others = (ids("--method", "masked", *flags)["entropies"]
                      for flags in ([], ["--mask=query"], ["--mask-prompt"]))
    assert first not in others


def test_entropy_lite_masks_the_amateurs_own_heads(call, base, tmp_path):
    amateur = write_model(tmp_path, seed=3)
    arguments = [*base[:2], "--amateur", tmp_path, "--prompt", "Hi", "--json", *FLAGS]
    status, out, _ = call(*arguments, "--amateur-heads", amateur[3], "--html", tmp_path / "page.html")
    assert status == 0 and len(objects(out)[0]["heads"]) == 2
    assert "decore-entropy-lite</h1>" in (tmp_path / "page.html").read_text()
    status, out, _ = call(*arguments, "--num-heads", 0)
    assert status == 0 and objects(out)[0]["heads"] == []
    status, _, err = call(*base, *arguments[2:])
    assert status == 2 and "--heads has no effect on decore-entropy-lite; the amateur" in err


def test_heads_are_found_by_the_name_of_the_checkpoint(call, tmp_path):
    write_model(tmp_path / "Meta-Llama-3-8B", heads=False)
    status, _, err = call("--model", tmp_path / "Meta-Llama-3-8B", "--prompt", "Hi")
    assert status == 2 and "Meta-Llama-3-8B.json" in err        # found, and refused: it is for 32 layers of 32 heads


# ------------------------------------------------------------------------------------------------------- baselines.py


def test_the_baselines_command_line_gives_what_generate_gives(call, base):
    model = Transformer.load(base[1])
    for args, how in [
        (["--method=cad", "--without-context-ids=72", "--alpha=2"], dict(ids_without_context=[72], alpha=2.0)),
        (["--method=ad", "--info-layer=2", "--relative-top=0"], dict(info_layer=2, relative_top=None)),
        (["--method=dola-high"], {}),
        (["--method=cd", "--amateur", base[1]], dict(amateur=model)),
    ]:
        status, out, _ = call(*base[:2], *SHORT, "--prompt", "Hi", "--json", *args, main=baselines.main)
        [got] = objects(out)
        g = baselines.generate(model, got["prompt_ids"], method=got["method"], max_new_tokens=6, eos_ids=[257], **how)
        assert status == 0 and (got["ids"], got["alphas"], got["stop"]) == (g.ids, g.alphas, g.stop)
        assert got["heads"] == [] and got.get("amateur") == (model.name if "amateur" in how else None)


def test_compare_shows_all_that_apply_and_says_why_others_do_not(call, base):
    def compare(*args):
        status, out, err = call(*base[:2], *SHORT, "--prompt", "Hi", "--json", "--compare", *args, main=baselines.main)
        assert status == 0
        return {g["method"]: g["ids"] for g in objects(out)}, err
    got, err = compare(*base[2:])
    assert list(got) == [*decore.METHODS, "dola-low", "dola-high"]
    for method, reason in (("cd", "needs an amateur"), ("cad", "--without-context"), ("ad", "--info-layer")):
        assert any(line.startswith(f"{method} is left out: ") and reason in line for line in err.splitlines())
    got, _ = compare(*base[2:], "--info-layer=2", "--without-context=i")
    assert list(got) == [*decore.METHODS, "cad", "dola-low", "dola-high", "ad"]
    got, err = compare("--amateur", base[1])
    assert list(got) == ["greedy", "cd", "dola-low", "dola-high"]
    assert "masked is left out: no head scores are known" in err
    got, _ = compare(*base[2:], "--amateur", base[1], "--amateur-heads", base[3])
    assert list(got) == ["greedy", "masked", "decore-static", "decore-static-lite", "decore-entropy",
                         "decore-entropy-lite", "cd", "dola-low", "dola-high"]
    assert call(*base[:2], "--compare", "--method=cd", "--prompt=Hi", main=baselines.main)[0] == 2


def test_where_no_method_applies_compare_ends_in_an_error(call, base):
    status, out, err = call(*base, "--prompt-ids=1,9999", "--compare", main=baselines.main)
    assert status == 2 and out == "" and err.splitlines()[-1].startswith("baselines.py: error: the prompt holds")


def test_random_heads_take_the_place_of_retrieval_heads(call, base):
    ranked = load_heads(base[3], 3, 4)
    ask = ["--num-heads=2", *SHORT, "--prompt=Hi", "--json"]
    for method in ("masked", "decore-entropy"):
        for seed in (1, 2):
            _, out, _ = call(*base, *ask, "--method", method, "--random-heads", "--seed", seed, main=baselines.main)
            assert objects(out)[0]["heads"] == [f"{i}-{j}" for i, j in random_heads(ranked, 2, seed)]
    _, out, _ = call(*base[:2], *ask, "--method=masked", "--random-heads=published", main=baselines.main)
    assert objects(out)[0]["heads"] == [f"{i}-{j}" for i, j in published_random_heads(2, 3, 4)]


@pytest.mark.parametrize("args, message", [
    (["--method=cad"], "--without-context"),
    (["--method=cad", "--without-context= "], "the prompt is empty"),
    (["--method=cad", "--without-context=a", "--without-context=b"], "found 2 for 1"),
    (["--method=ad"], "info_layer 24 is outside"),
    (["--method=cd"], "cd needs an amateur"),
    (["--method=masked"], "no head scores are known"),
    (["--method=decore-entropy", "--random-heads", "--amateur=x"], "--random-heads has no effect on decore-entropy-l"),
    (["--relative-top=2"], "'2' is no finite number from 0 to 1"),
    (["--method=none"], "method 'none' is unknown; known: greedy"),
    (["--method=decore-entropy-lite"], "it is decore-entropy with --amateur M2"),
])
def test_mistakes_with_baselines_are_one_line(call, base, args, message):
    status, out, err = call(*base[:2], "--prompt=Hi", *args, main=baselines.main)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("baselines.py: error: ") and message in err


# ------------------------------------------------------------------------------------------------------------ bad input


def test_mistakes_end_in_one_line_and_status_2(call, base, chat, tmp_path):
    """Each case of what a person can get wrong: arguments → words of the one line."""
    ask = ["--prompt", "Hi"]
    gpt = write_model(tmp_path / "gpt", model_type="gpt2")
    (tmp_path / "empty").mkdir()
    no_tokenizer = write_checkpoint(tmp_path / "no-tokenizer", "llama3")
    small = write_model(tmp_path / "small", max_position_embeddings=8)
    pickle = write_model(tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").rename(tmp_path / "pickle" / "model.bin")
    other = write_model(tmp_path / "other", vocab_size=300)
    weights = random_weights(json.loads((tmp_path / "small" / "config.json").read_text()))
    weights["model.norm.weight"][0] = torch.nan
    bad_weights = ["--model", str(write_tokenizer(write_checkpoint(tmp_path / "nan", weights=weights, vocab_size=259))),
                   *base[2:]]
    index = write_model(tmp_path / "index", shards=2)
    (tmp_path / "index" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    wide = write_heads(tmp_path / "wide.json", 3, 5)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "latin.txt").write_bytes(b"a\ncaf\xe9")
    turns = tmp_path / "turns.json"
    turns.write_text('[{"role": "user", "content": "Hi"}, {"role": "assistant"}]')
    cases = [
        ([*gpt, *ask], "model_type 'gpt2'"),
        (["--model", tmp_path / "nowhere", *ask], "nowhere"),
        (["--model", tmp_path / "empty", *ask], "tokenizer.json"),
        (["--model", no_tokenizer, *ask], "tokenizer.json"),
        ([*pickle, *ask], "pickle"),
        ([*index, *ask], "of its own folder"),
        ([*bad_weights, *ask], "not finite"),
        ([*small, "--prompt", "a prompt of more than eight tokens"], "reads 8"),
        ([*base, "--prompt", ""], "empty"),
        ([*base, "--prompt-file", tmp_path / "none.txt"], "none.txt"),
        ([*base, "--prompt-file", tmp_path / "latin.txt"], "latin.txt is not UTF-8 text: byte 0xe9 in line 2"),
        ([*base, "--prompt-ids", "1,x"], "--prompt-ids: '1,x' is no list"),
        ([*base, "--prompt-ids", "1,9999"], "9999"),
        ([*base, "--prompt-ids=-1"], "--prompt-ids: '-1' is no list"),
        ([*base, f"--prompt-ids={2**70}"], "is no list of token ids"),
        ([*base], "nothing to answer"),
        ([*base[:2], *ask], "give --heads FILE"),
        ([*base[:2], "--heads", wide, *ask], "wide.json"),
        ([*base[:2], "--heads", tmp_path / "broken.json", *ask], "broken.json is not valid JSON"),
        ([*base[:2], "--heads", tmp_path / "none.json", *ask], "none.json"),
        ([*base, "--num-heads", 13, *ask], "--num-heads 13"),
        ([*base, "--num-heads=-1", *ask], "--num-heads: '-1' is no whole number from 0"),
        ([*base, "--num-heads", 0, *ask], "--num-heads 0 masks nothing, so decore-entropy would be greedy"),
        ([*base, "--method", "greedy", *ask], "--heads has no effect on greedy; it is an option of masked"),
        ([*base, "--alpha", 9, *ask], "--alpha has no effect on decore-entropy; it is an option of decore-static"),
        ([*base, "--alpha", "nan", *ask], "--alpha: 'nan' is no finite number"),
        ([*base, "--alpha-cap", -1, *ask], "--alpha-cap: '-1' is no finite number from 0"),
        ([*base, "--seed", 3, *ask], "--seed has no effect without --random-heads"),
        ([*base, "--random-heads", "published", *ask], "--heads has no effect with --random-heads published"),
        ([*base, "--amateur-heads", "x", *ask], "--amateur-heads has no effect on decore-entropy"),
        ([*base, "--lookup", -1, *ask], "--lookup: '-1' is no whole number from 0"),
        ([*base, "--method", "cad", *ask], "method 'cad' is unknown here: baselines.py and evaluate.py know it"),
        ([*base, "--raw", "--prompt-ids", 5], "--raw has no effect on --prompt-ids"),
        ([*base, "--prompt", "caf\udce9"], "argument 6 is not UTF-8 text: '\\udce9' at character 4"),
        ([*base, "--messages", tmp_path / "broken.json"], "broken.json is not JSON"),
        ([*base, "--messages", tmp_path / "wide.json"], "wide.json should hold a list of"),
        ([*base, "--messages", turns], "turns.json, message 2: role or content is missing"),
        ([*base, "--num-heads", "ten", *ask], "--num-heads"),
        ([*base, "--max-new-tokens", 0, *ask], "--max-new-tokens"),
        ([*base, "--method", "beam", *ask], "beam"),
        ([*base, "--mask", "keys", *ask], "keys"),
        ([*base, "--unknown", *ask], "--unknown"),
        ([*base, "--amateur", tmp_path / "small", *ask], "--heads has no effect on decore-entropy-lite; the amateur's"),
        ([*base[:2], "--amateur", tmp_path / "other", "--amateur-heads", other[3], *ask], "one vocabulary"),
        ([*base[:2], "--amateur", tmp_path / "small", *ask], "give --amateur-heads FILE"),
        ([*base, "--system", "S", *ask], "--system needs a chat template"),
        ([*chat, "--raw", "--system", "S", *ask], "drop --raw"),
        ([*base, "--device", "tpu", *ask], "tpu"),
        *([] if torch.cuda.is_available() else [([*base, "--device", "cuda", *ask], "no CUDA device")]),
    ]
    for arguments, words in cases:
        status, out, err = call(*arguments)
        lines = err.strip().splitlines()
        assert status == 2 and out == "" and len(lines) == 1, (arguments, status, out, err)
        assert lines[0].startswith("decore.py: error: ") and words in lines[0], (words, lines[0])


def test_the_process_exits_with_2(base):
    done = subprocess.run([sys.executable, "decore.py", *base, "--prompt", ""], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "decore.py: error: the prompt is empty\n"


# ------------------------------------------------------------------------------------------------------------- terminal


def on_a_terminal(arguments, **environment):
    """What decore.py writes to a terminal."""
    leader, follower = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | dict(TERM="xterm-256color") | environment
    command = [sys.executable, "decore.py", *arguments]
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, env=env)
    os.close(follower)
    out = b""
    try:
        while chunk := os.read(leader, 4096):
            out += chunk
    except OSError:                             # the other end of the terminal closed
        pass
    process.wait()
    os.close(leader)
    return out.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("environment, tiny, threads", [
    ({}, cli.models.TINY, [1]), ({}, 1000, []), ({"OMP_NUM_THREADS": "2"}, cli.models.TINY, []),
], ids=["tiny", "not tiny", "chosen"])
def test_a_tiny_model_gets_one_thread_unless_the_user_chose(call, base, monkeypatch, environment, tiny, threads):
    chosen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(cli.models, "TINY", tiny)
    assert call(*base[:2], "--prompt", "x", "--method", "greedy", "--max-new-tokens", "1")[0] == 0
    assert chosen == threads


def test_a_terminal_shades_uncertain_tokens_amber_unless_no_color_is_set(base, call):
    arguments = [*base, *FLAGS, "--prompt", "Hi"]
    _, plain, _ = call(*arguments)
    shaded = on_a_terminal(arguments)
    assert "\x1b[30;48;5;" in shaded
    assert on_a_terminal(arguments, NO_COLOR="1") == plain


# ------------------------------------------------------------------------------------------------------ what is asked

THINKING = ("{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}<|turn|>"
            "{% if enable_thinking is not defined or enable_thinking %}think{% endif %}")


def prompt_ids(call, *args):
    status, out, err = call(*args, *FLAGS, "--json")
    assert status == 0, err
    return objects(out)[0]["prompt_ids"]


def test_a_file_of_messages_is_a_chat_of_several_turns(call, chat, tmp_path):
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    (tmp_path / "chat.json").write_text(json.dumps([dict(role=role, content=text) for role, text in turns]))
    wanted = "<|begin|>" + "".join(f"<|turn|>{role}:{text}" for role, text in turns) + "<|turn|>"
    assert prompt_ids(call, *chat, "--messages", tmp_path / "chat.json") == Tokenizer.load(chat[1]).encode(wanted)


def test_template_arguments_reach_the_template(call, tmp_path):
    model = write_model(tmp_path, template=THINKING)
    encode = Tokenizer.load(tmp_path).encode
    assert prompt_ids(call, *model, "--prompt", "Hi") == encode("<|turn|>user:Hi<|turn|>think")
    quiet = prompt_ids(call, *model, "--prompt", "Hi", "--template-args", '{"enable_thinking": false}')
    assert quiet == encode("<|turn|>user:Hi<|turn|>")
    for more, message in ((["--template-args", "no"], "'no' is no JSON object"),
                          (["--raw", "--template-args", "{}"], ""),
                          (["--raw", "--template-args", '{"a": 1}'], "--template-args has no effect")):
        status, _, err = call(*model, *FLAGS, "--prompt", "Hi", *more)
        assert (status == 2) == bool(message) and message in err


@pytest.mark.parametrize("text, prompt", [("Hi\n", "Hi"), ("two\nlines", "two\nlines")])
def test_text_that_is_piped_in_is_the_prompt(call, base, tmp_path, monkeypatch, text, prompt):
    (tmp_path / "pipe").write_text(text)
    monkeypatch.setattr("sys.stdin", open(tmp_path / "pipe"))
    assert prompt_ids(call, *base) == Tokenizer.load(base[1]).encode(prompt)


@pytest.mark.parametrize("standard_input", ["/dev/null", "empty"])
@pytest.mark.parametrize("spelling", ["miniature", "./miniature/", "heads/../miniature", str(cli.MINIATURE)])
def test_without_a_prompt_the_miniature_shows_its_example(call, monkeypatch, tmp_path, standard_input, spelling):
    monkeypatch.chdir(cli.MINIATURE.parent)
    (tmp_path / "empty").write_text("")
    monkeypatch.setattr("sys.stdin", open(tmp_path / standard_input))
    status, out, _ = call("--model", spelling)
    assert status == 0 and out.splitlines()[3:] == ["        greedy   Kraskrigard.", "decore-entropy   Dasholm."]


def test_the_miniatures_amateur_is_known_by_its_place(call, monkeypatch):
    monkeypatch.chdir(cli.MINIATURE.parent)
    status, out, _ = call("--amateur", "miniature/amateur", "--prompt", "Hi", "--max-new-tokens", 2, "--json")
    assert status == 0 and objects(out)[0]["method"] == "decore-entropy-lite" and len(objects(out)[0]["heads"]) == 4


def test_several_prompts_have_headings_and_an_empty_line_after_each_answer(call, base):
    long = "word " * 20
    _, out, _ = call(*base, *FLAGS, "--json", "--prompt", "one\ntwo", "--prompt", long, "--prompt-ids", "72,105")
    texts = [g["text"] for g in objects(out)]
    _, out, _ = call(*base, *FLAGS, "--prompt", "one\ntwo", "--prompt", long, "--prompt-ids", "72,105")
    headings = ["[1] one two", f"[2] {long[:59]} …", "[3] " + Tokenizer.load(base[1]).decode([72, 105])]
    assert out == "".join(f"{heading}\n{text}\n\n" for heading, text in zip(headings, texts, strict=True))


def test_a_prompt_that_spells_a_special_token_is_warned_of_once(call, base):
    status, _, err = call(*base, *FLAGS, "--prompt", "a<|turn|>b<|turn|>", "--prompt", "<|turn|>")
    assert status == 0 and err.count("warning") == 1
    assert "decore.py: warning: the prompt spells <|turn|>, and the model reads it as that special token" in err
    assert "warning" not in call(*base, *FLAGS, "--prompt", "a <|turn |> b")[2]


def test_what_may_become_a_stop_text_is_held_back(capsys, base):
    screen = answer.Screen(Tokenizer.load(base[1]), ["> "], stop=("\n\nQ:", "END"))
    shown = []
    for sign in "a\n\nb ENE\n\nQ: c":
        ended = screen.token(0, *Tokenizer.load(base[1]).core.encode(sign).ids, 0.0)
        shown.append(capsys.readouterr().out)
        if ended:
            break
    screen.end()
    assert shown == ["> a", "", "", "\n\nb", " ", "", "", "EN", "E", "", "", ""]
    assert capsys.readouterr().out == "\n"


def test_an_answer_ends_before_a_stop_text(call, base):
    ask = [*base, "--num-heads", 2, "--max-new-tokens", 24, "--prompt", "Who?", "--prompt", "What is it?"]
    whole = [g["text"] for g in objects(call(*ask, "--json")[1])]
    stop = whole[0][8:11]
    cut = [text.partition(stop)[0] for text in whole]
    assert len(cut[0]) in range(1, 9) and cut[1] == whole[1]
    got = objects(call(*ask, "--json", "--stop", "never there", "--stop", stop)[1])
    assert [g["text"] for g in got] == cut and got[0]["stop"] == "stop" and len(got[0]["ids"]) < 24
    _, out, _ = call(*ask, "--stop", stop)
    assert out == f"[1] Who?\n{cut[0]}\n\n[2] What is it?\n{cut[1]}\n\n"
    assert call(*ask, "--stop", "")[0] == 2
