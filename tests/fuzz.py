"""Bad input of every kind, and good input that is only unusual. On demand:

    python -m tests.fuzz --cases 3400 --seed 1

A case ends in a right answer (where transformers accepts the same file, the same as its answer) or in an error that
`cli.run` turns into one line. Anything else is a failure: another exception, a number that is not finite, another
answer. It is printed with its seed: `--seed S --only N` repeats case N. `--kind NAME` draws one kind alone, and
`--real N` gives the first N command lines to processes of their own too."""

import argparse
import contextlib
import copy
import gzip
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import transformers

import baselines
import cli
import decore
import evaluate
from heads import load_heads
from model import Transformer
from runtime.config import Config
from tasks import TASKS, runs, sources
from tests.against_transformers import REAL, SIZES, compare_model, draw_configuration
from tests.checkpoints import CLASSES, write_checkpoint, write_heads, write_tokenizer
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
ODD = (None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e300, math.nan, math.inf, "", "4", "x", [], {}, [1],
       {"a": 1}, "\ud800")
TEXTS = ("", "Hi", " ", "é \u200d 😀", "<|end|>", "\n\n", "x" * 300, "{{ 1 }}", "\x00")
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|turn|>"
SETTINGS = dict(max_new_tokens=3, eos_ids=())


class World:
    """What the cases change copies of."""

    def __init__(self, folder):
        self.folder = folder
        self.model = write_tokenizer(write_checkpoint(folder / "model", vocab_size=259, shards=3), TEMPLATE)
        self.heads = write_heads(folder / "heads.json")
        self.loaded, self.tokenizer = Transformer.load(self.model), Tokenizer.load(self.model)
        self.ids = [5, 9, 7, 7, 30]
        with torch.inference_mode():
            self.logits = self.loaded(torch.tensor([self.ids]))
        self.greedy = decore.generate(self.loaded, self.ids, method="greedy", **SETTINGS).ids
        rows = [{"question": f"who is {i}", "sub_context": f"{i} is New. ", "org_answer": ["Old"],
                 "sub_answer": ["New"]} for i in range(5)]
        self.data = write_lines(folder / "data.jsonl", rows)
        self.demos = write_lines(folder / "demos.jsonl", [{"question": "q", "answer": "a", "context": "c"}])
        self.options = ["--model", str(self.model), "--heads", str(self.heads), "--device", "cpu"]
        self.task = ["--task", "nq-swap", "--data", str(self.data), "--demos", str(self.demos), "--method", "greedy",
                     "--max-new-tokens", "2"]
        status, _, said = call(evaluate.main, ["evaluate.py", *self.options[:2], *self.task, "--out",
                                               str(folder / "out")])
        assert status == 0, said
        [self.run] = (folder / "out").glob("*.jsonl")

    def copy(self):
        return Path(shutil.copytree(self.model, tempfile.mkdtemp(dir=self.folder), dirs_exist_ok=True))


class Wrong(Exception):
    """An answer that is not the right one."""


def expect(right, message):
    if not right:
        raise Wrong(message)


def answer(work):
    """What `work` returns; None where it refuses with an error that is one line. Other errors pass."""
    try:
        return work()
    except Exception as error:
        said = cli.explain(error)
        if "unexpected keyword argument 'unknown'" in str(error):
            return None                                     # Python's own error, which names it
        if said is None or isinstance(error, Wrong):
            raise
        expect(5 < len(said) < 1500, f"an error of {len(said)} characters: {said[:300]}")
        return None


def call(main, argv):
    """A program in this process → (status, standard output, standard error)."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = list(argv)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = cli.run(main)
            except SystemExit as end:
                status = end.code
    finally:
        sys.argv = before
    return status, out.getvalue(), err.getvalue()


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def change(dice, value, odd=ODD):
    """The JSON value with one thing in it changed: removed, repeated, replaced or renamed."""
    places = []

    def walk(here):
        for key, inner in list(here.items() if isinstance(here, dict) else enumerate(here)):
            places.append((here, key))
            if isinstance(inner, dict | list) and len(places) < 3000:
                walk(inner)
    if isinstance(value, dict | list):
        walk(value)
    if not places:
        return dice.choice(odd)
    here, key = dice.choice(places if dice.random() < 0.5 else places[:40])
    how = dice.randrange(4)
    if how == 0:
        del here[key]
    elif how == 1 and isinstance(here, dict):
        here[dice.choice(["", "x", str(key).upper(), f"{key} "])] = here.pop(key)
    elif how == 2 and isinstance(here, list):
        here.insert(key, here[key])
    else:
        here[key] = copy.deepcopy(dice.choice(odd))
    return value


def damage(dice, content):
    """The bytes with something done to them that disks, editors and transfers do."""
    if not content:
        return b"\x00"
    at = dice.randrange(len(content))
    return dice.choice([
        content[:at], content[:at] + bytes([dice.randrange(256)]) + content[at + 1:], content[:at] + content[at + 1:],
        content[:at] + b"\xff" + content[at:], b"\xef\xbb\xbf" + content, content + content, content + b"\n\n",
        content.replace(b"\n", b"\r\n"), content.replace(b'"', b"'"), b"", content[at:], content + b"\x00"])


# ------------------------------------------------------------------------------------------------------------ the kinds


def configuration(dice, world):
    c = draw_configuration(dice) if dice.random() < 0.5 else SIZES | dice.choice(list(REAL.values()))
    c = json.loads(json.dumps(c))
    for _ in range(dice.choice([0, 1, 1, 2])):
        c = change(dice, c)
    with tempfile.TemporaryDirectory(dir=world.folder) as name:
        (Path(name) / "config.json").write_text(json.dumps(c))
        config = answer(lambda: Config.from_checkpoint(name))
        if config is None:
            return "refused"
        try:
            cls = getattr(transformers, CLASSES[c["model_type"]])
            model = cls._from_config(transformers.AutoConfig.from_pretrained(name), attn_implementation="eager")
            model(torch.tensor([[1, 2]]))               # some that it builds it cannot run
        except Exception:
            return "refused by transformers alone"
    if config.vocab_size < 4:
        return "too small to compare"
    different = answer(lambda: compare_model(c, 0, Counter()))
    expect(not different, f"{different}: {json.dumps(c)}")
    return "right"


def index(dice, world):
    folder = world.copy()
    path, shards = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    how = dice.randrange(7)
    if how < 3:
        found = change(dice, json.loads(path.read_text()), ODD + ("config.json", "../x", "/etc/passwd", shards[0].name))
        path.write_text(json.dumps(found))
    elif how == 3:
        path.write_bytes(damage(dice, path.read_bytes()))
    elif how == 4:
        shard, content = dice.choice(shards), dice.choice(shards).read_bytes()
        head = 8 + int.from_bytes(content[:8], "little")
        shard.write_bytes(damage(dice, content[:head]) + content[head:])
    elif how == 5:
        dice.choice([lambda: shards[0].unlink(), lambda: shards[0].rename(folder / "other.safetensors"),
                     lambda: (path.unlink(), path.symlink_to("nowhere")), lambda: (path.unlink(), path.mkdir()),
                     lambda: shutil.copy(shards[1], shards[0])])()
    model = answer(lambda: Transformer.load(folder))
    if model is None:
        return "refused"
    with torch.inference_mode():
        expect(torch.equal(model(torch.tensor([world.ids])), world.logits), "loaded, with other weights")
    return "right"


def head_file(dice, world):
    table = json.loads(world.heads.read_text())
    if dice.random() < 0.3:                                 # the form in which the paper's authors publish theirs
        table = {name: [score, score / 2] for name, score in table["scores"].items()}
    for _ in range(dice.choice([0, 1, 1, 2])):
        table = change(dice, table)
    content = json.dumps(table).encode()
    path = Path(tempfile.mkdtemp(dir=world.folder)) / "heads.json"
    path.write_bytes(damage(dice, content) if dice.random() < 0.3 else content)
    heads = answer(lambda: load_heads(path, 3, 4))
    if heads is None:
        return "refused"
    scores = json.loads(path.read_bytes())
    scores = {name: np.mean(value) for name, value in scores.get("scores", scores).items()}
    expect([f"{i}-{j}" for i, j in heads] == sorted(scores, key=scores.get, reverse=True), "another order")
    expect(sorted(heads) == [(i, j) for i in range(3) for j in range(4)], "not every head once")
    return "right"


def tokenizer(dice, world):
    folder = world.copy()
    path = folder / dice.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
    content = path.read_text() if path.exists() else '{"eos_token_id": [257, 2], "bos_token_id": 256}'
    path.write_text(json.dumps(change(dice, json.loads(content))))
    if dice.random() < 0.2:
        path.write_bytes(damage(dice, path.read_bytes()))
    text = dice.choice(TEXTS)
    ours = answer(lambda: Tokenizer.load(folder))
    if ours is None or answer(lambda: ours.encode_chat([{"role": "user", "content": text}])) is None:
        return "refused"
    ids = answer(lambda: ours.encode(text, bos=False))
    expect(ids is None or all(type(i) is int for i in ids) and isinstance(ours.decode(ids), str), "no ids or no text")
    try:
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        expected = theirs(text, add_special_tokens=False)["input_ids"]
    except Exception:
        return "refused by transformers alone"
    expect(ids is None or ids == expected, f"{ids} for {expected}: {text!r}")
    return "right"


PIECES = (
    "{{ bos_token }}", "{{ eos_token }}", "{{ unk_token }}", "{{ nothing }}", "{{ messages[0].content }}", "text ",
    "{{ messages[0]['content'] | upper }}", "{{ messages | tojson }}", "{{ messages | length }}", "{{ 1 / 0 }}",
    "{% for m in messages %}{{ loop.index }}{{ m.role }}{% endfor %}", "{% set x = namespace(n=0) %}{{ x.n }}",
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% else %}{{ raise_exception('no') }}"
    "{% endif %}{% endfor %}", "{% if add_generation_prompt %}A:{% endif %}", "{{ messages[9].content }}",
    "{% generation %}{{ messages[0].role }}{% endgeneration %}", "{{ strftime_now('%Y') }}", "{% if %}", "{{", "}}",
    "{% break %}", "{{ messages.append(1) }}", "{{ ''.__class__ }}", "{{ tools }}{{ documents }}", "{{- ' a ' -}}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('y') }}", "{{ 'é😀' }}", "{% for i in range(3) %}{{ i }}{% endfor %}",
    "{{ messages[0].content.split('i') }}", "{{ undefined_function() }}", "{{ '%d' % 1 }}", "{{ 'x' * 1000 }}",
    "\n", " ")


def template(dice, world):
    text = "".join(dice.choice(PIECES) for _ in range(dice.randrange(1, 5)))
    folder = world.copy()
    (folder / "chat_template.jinja").write_text(text)
    ours = answer(lambda: Tokenizer.load(folder))
    messages = [{"role": role, "content": dice.choice(TEXTS)} for role in ("user", "assistant")[:dice.choice([1, 2])]]
    found = None if ours is None else answer(lambda: ours.render(messages))
    if found is None:
        return "refused"
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=text,
                                                  bos_token="<|begin|>", eos_token="<|end|>")
    try:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:
        return "refused by transformers alone"
    expect(found == expected, f"{found!r} for {expected!r}: {text!r}")
    return "right"


OPTIONS = {
    "--max-new-tokens": ("1", "2", "0", "-1", "x", "1e3", ""), "--alpha": ("0.5", "-1", "nan", "inf", "x", ""),
    "--alpha-cap": ("1", "-1", "nan", "x"), "--num-heads": ("0", "2", "13", "-1", "x", "1,2"), "--scale-alpha": (),
    "--mask": ("output", "query", "x"), "--mask-prompt": (), "--compare": (), "--json": (), "--raw": (),
    "--method": ("greedy", "masked", "decore-static", "decore-entropy", "cad", "dola-low", "ad", "x", ""),
    "--prompt": TEXTS, "--prompt-ids": ("1,2,3", "1", "", "x", "999", "-1", "1,,2", "1.5"), "--system": TEXTS,
    "--prompt-file": ("nowhere", ".", "README.md"), "--heads": ("nowhere", "README.md", "."),
    "--dtype": ("float32", "bfloat16", "x"), "--device": ("cpu", "cuda", "x"), "--amateur": ("nowhere", "."),
    "--info-layer": ("1", "99", "x"), "--relative-top": ("0.1", "2", "nan"), "--template-args": ("{}", "[", "1"),
    "--lookup": ("2", "0", "-1"), "--x": ()}
EVALUATE = {
    "--task": ("nq-swap", "all", "x", "", "memotrap"), "--limit": ("1", "0", "x"),
    "--batch-size": ("auto", "1", "0", "x"),
    "--layout": ("plain", "chat", "x"), "--seed": ("1", "x", "1,2"), "--tp": ("1", "2", "0"), "--dry-run": (),
    "--random-heads": ("uniform", "published", "x"), "--data": ("nowhere", ".", "README.md"), "--judge": (),
    "--demos": ("nowhere", "README.md")}
REAL_LINES = [0]


def command_line(dice, world):
    program = dice.choice([decore, baselines, evaluate])
    options = OPTIONS | EVALUATE if program is evaluate else OPTIONS
    argv = [f"{program.__name__}.py", *world.options[:dice.choice([2, 4, 6])], "--max-new-tokens", "2"]
    argv += [*world.task, "--out", tempfile.mkdtemp(dir=world.folder)] if program is evaluate else ["--prompt", "Hi"]
    for name in dice.sample(list(options), dice.randrange(4)):
        values = options[name]
        argv += [name, dice.choice(values)] if values else [name]
    if "all" in argv[7:]:
        argv += ["--data", str(world.folder)]               # never from the hub
    status, out, err = call(program.main, argv)
    expect(status in (0, 2), f"status {status}: {argv}\n{err[-500:]}")
    expect(status == 0 or err.count("error: ") == 1 and not err[err.rindex("error: "):].rstrip().count("\n"),
           f"not one line: {argv}\n{err}")
    expect("Traceback" not in err, f"{argv}\n{err[-2000:]}")
    expect(not re.search(r"\b(NaN|nan|Infinity|inf)\b", out), f"not finite: {argv}\n{out[:500]}")
    if REAL_LINES[0] and not any("\x00" in one for one in argv):
        REAL_LINES[0] -= 1
        done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        expect(done.returncode == status and "Traceback" not in done.stderr,
               f"as a process: status {done.returncode}, not {status}: {argv}\n{done.stderr[-500:]}")
    return "refused" if status else "right"


def python_arguments(dice, world):
    """Every way to give the same ids gives the same tokens; every other argument gives finite numbers or an error."""
    ids = list(world.ids)
    same = dice.choice([ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]])
    odd = dice.choice([
        *ODD, "1,2", [ids, "x"], [1.5], [True], [[[1]]], [None], [-1], [10**9], [2**70], torch.tensor([1.5]),
        torch.ones(2, 2, 2), np.array(["a"]), {1, 2}, [ids, []], [math.nan], range(3), (i for i in ids)])
    given = same if dice.random() < 0.5 else odd
    arguments = dict(SETTINGS, method=dice.choice(["greedy", "masked", "decore-static", "decore-entropy"]))
    if arguments["method"] != "greedy":
        arguments["heads"] = [(0, 1), (2, 3)]
    usual = given is same and arguments["method"] == "greedy"
    for name in dice.sample(["heads", "alpha", "alpha_cap", "scale_alpha", "mask", "mask_prompt", "max_new_tokens",
                             "eos_ids", "lookup", "method", "unknown"], dice.choice([0, 1, 1, 2])):
        arguments[name] = dice.choice([*ODD, [(0, 1)], ["0-1"], [(0, 9)], [(0, 1), (0, 1)], [5], (257,), "query", 1e9,
                                       1.5, 10**30, torch.tensor(2), np.float32(0.5)])
        usual = False
    if dice.random() < 0.3:
        arguments = {name: value for name, value in arguments.items()
                     if name not in ("max_new_tokens", "eos_ids", "lookup")}
        answers = dice.choice([[1, 2], [[1], [2, 3]], odd, []])
        found = answer(lambda: decore.score(world.loaded, given, answers, **arguments))
        numbers = [] if found is None else found if isinstance(found, list) else [found]
        expect(all(math.isfinite(number) for number in numbers), f"{numbers}: {given!r}, {arguments}")
        return "refused" if found is None else "right"
    found = answer(lambda: decore.generate(world.loaded, given, **arguments))
    if found is None:
        expect(not usual, f"refused: {given!r}, {arguments}")
        return "refused"
    for one in found if isinstance(found, list) else [found]:
        expect(len(one.ids) == len(one.alphas) == len(one.entropies) and all(0 <= i < 259 for i in one.ids)
               and all(map(math.isfinite, one.alphas + one.entropies)), f"{one}: {given!r}, {arguments}")
    expect(not usual or found.ids == world.greedy, f"{found.ids} for {world.greedy}")
    return "right"


def data(dice, world):
    rows = [json.loads(line) for line in world.data.read_text().splitlines()]
    for _ in range(dice.choice([0, 1, 1, 2])):
        rows = change(dice, rows)
    name = dice.choice(["d.jsonl"] * 6 + ["d.jsonl.gz"] * 3 + ["d.csv", "d.tsv", "d.parquet", "d.txt"])
    path = Path(tempfile.mkdtemp(dir=world.folder)) / name
    rows = rows if isinstance(rows, list) else [rows]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    content = gzip.compress(content) if name.endswith(".gz") else content
    path.write_bytes(damage(dice, content) if dice.random() < 0.4 else content)
    task = TASKS[dice.choice(["nq-swap"] * 5 + ["nq-closed", "memotrap", "xsum", "ifeval", "popqa"])]
    with contextlib.redirect_stderr(io.StringIO()):
        found = answer(lambda: sources.load(task, path, world.demos))
    if found is None:
        return "refused"
    items = found[0]
    expect(items and all(type(item["index"]) is int for item in items), "items without index")
    for item in items:
        json.dumps(item, ensure_ascii=False, allow_nan=False).encode()
    return "right"


RESULTS = ("prediction", "ids", "alphas", "entropies", "seconds", "stop", "continued", "line")


def run_file(dice, world):
    """Read, scored again and continued: the same rows in the end, whatever was done to the file but to the answers."""
    folder = Path(tempfile.mkdtemp(dir=world.folder))
    path, lines = folder / world.run.name, [json.loads(line) for line in world.run.read_text().splitlines()]
    if dice.random() < 0.6:
        lines = change(dice, lines)
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    else:
        content = damage(dice, world.run.read_bytes())
    path.write_bytes(content)
    if dice.random() < 0.7:
        found = answer(lambda: runs.read_run(path))
        status, _, err = call(evaluate.main, ["evaluate.py", "rescore", "--task", "nq-swap", str(path)])
        expect(status in (0, 2) and "Traceback" not in err, f"rescore: status {status}\n{err[-1500:]}")
        expect(status == 2 or found is not None, "read_run refuses what rescore scores")
        return "refused" if status else "right"
    status, _, err = call(evaluate.main, ["evaluate.py", *world.options[:2], *world.task, "--out", str(folder)])
    expect(status in (0, 2) and "Traceback" not in err, f"continued: status {status}\n{err[-1500:]}")
    if status:
        expect(path.read_bytes() == content, "refused, and changed")
        return "refused"
    asked = [[{name: value for name, value in row.items() if name not in RESULTS} for row in runs.read_run(one)[1]]
             for one in (path, world.run)]
    expect(asked[0] == asked[1], "continued, with other rows than it began with")
    expect([file.name for file in folder.iterdir()] == [path.name], "something is left beside the file")
    return "right"


KINDS = {kind.__name__: kind for kind in (configuration, index, head_file, tokenizer, template, command_line,
                                          python_arguments, data, run_file)}


def fuzz(cases, seed=1, only=None, kinds=tuple(KINDS), seconds=math.inf):
    """→ (Counter of (kind, outcome), failures as text). The kinds take turns. Ends early after so many seconds."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    count, failures, start = Counter(), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number in range(cases) if only is None else [only]:
            if time.monotonic() - start > seconds:
                break
            dice, name = random.Random(f"{seed}/{number}"), kinds[number % len(kinds)]
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    outcome = KINDS[name](dice, world)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:                  # a panic of a library in Rust is no Exception
                outcome = "FAILED"
                place = traceback.extract_tb(error.__traceback__)[-1]
                again = f"--seed {seed} --only {number}" + f" --kind {name}" * (len(kinds) == 1)
                failures.append(f"{again}: {name}: {type(error).__name__}: {str(error)[:1000]} "
                                f"({Path(place.filename).name}:{place.lineno})")
                print(failures[-1], flush=True)
            count[name, outcome] += 1
    return count, failures


def main():
    p = argparse.ArgumentParser(description="Bad input of every kind.")
    p.add_argument("--cases", type=int, default=900)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--only", type=int, metavar="N", help="repeat case N")
    p.add_argument("--kind", choices=list(KINDS), help="one kind alone")
    p.add_argument("--real", type=int, default=0, metavar="N", help="command lines that are also run as processes")
    args = p.parse_args()
    REAL_LINES[0] = args.real
    count, failures = fuzz(args.cases, args.seed, args.only, (args.kind,) if args.kind else tuple(KINDS))
    for (name, outcome), n in sorted(count.items()):
        print(f"{n:>6}  {name}: {outcome}")
    print(f"{sum(count.values())} cases, {len(failures)} failures (seed {args.seed})")
    return len(failures) > 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
