"""The effect of heads: against finite differences and against masking each head alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import evaluate
from cli import decode
from cli import detect as needles_program
from decore import Greedy, Masked, Row, Session, generate, pad
from heads.measures import effects
from hf import HFModel
from model import Transformer
from paper import questions
from paper.tasks import TASKS
from paper.tasks.answers import first_sentence, same
from paper.tasks.prompts import item_to_ids
from runtime import pack
from runtime.files import read_json
from tests.checkpoints import (
    assert_close,
    assert_similar,
    random_ids,
    read_lines,
    tiny,
    write_checkpoint,
    write_json,
    write_lines,
)
from tests.families import random_model
from tests.heads.test_detect import OWN_TEXTS
from tests.tables import each

PROMPTS = [random_ids(23, seed=1), random_ids(1, seed=2), random_ids(70, seed=3)]
ANSWERS = [random_ids(3, seed=4), random_ids(1, seed=5), random_ids(4, seed=6)]
MEMORIES = [random_ids(2, seed=7), [], random_ids(5, seed=8)]
TEXTS = PROMPTS, ANSWERS, MEMORIES


@torch.no_grad()
def differences(model, prompt, answer, memory, step):
    """Finite differences of d by each head's mask, [L, H], exact up to step⁴, by complete texts of
    the model of transformers in an HFModel. From the prompt's last token on, one head at a time is
    multiplied by 1 + n·step."""
    L, H = model.config.n_layers, model.config.n_heads
    one_by_one = torch.eye(L * H, dtype=torch.float64).view(-1, L, H)
    factors = torch.cat([1 + n * step * one_by_one for n in (-2, -1, 1, 2)])  # [N, L, H]
    hooks = []
    for layer, a in model.head_places.items():

        def scale(_, args, layer=layer, H=a.heads):
            by_head = args[0].unflatten(-1, (H, -1)).clone()  # [N, T, H, K]
            by_head[:, len(prompt) - 1 :] *= factors[:, layer, None, :H, None]
            return (by_head.flatten(-2),)

        hooks.append(a.projections["output"].register_forward_pre_hook(scale))
    d = 0
    for ids, sign in ((answer, 1), (memory, -1)):
        text = torch.tensor([prompt + ids])
        log_p = model.hf(text.expand(len(factors), -1)).logits.double().log_softmax(-1)
        for t, token in enumerate(ids, len(prompt) - 1):
            d = d + sign * log_p[:, t, token]
    for hook in hooks:
        hook.remove()
    a, b, c, d = d.view(4, L, H)
    return (a - 8 * b + 8 * c - d) / (12 * step)


@pytest.mark.parametrize("family", ["llama3.1", "mistral-window", "qwen2", "qwen3"])
def test_effects_are_the_finite_differences_of_the_head_mask(tmp_path, family):
    write_checkpoint(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    # The step is large, since norms of transformers are in float32.
    expected = [differences(HFModel(reference), *text, 0.02) for text in zip(*TEXTS)]
    for engine in Transformer, HFModel:
        found = effects(engine.load(tmp_path), *TEXTS)
        assert_close(found, torch.stack(expected), 1e-4, 1e-3)
    # Without a memory, of a needle.
    of_needle = PROMPTS[:1], [PROMPTS[0][4:9]]
    found = effects(Transformer.load(tmp_path), *of_needle)
    assert_close(found, effects(HFModel.load(tmp_path), *of_needle), 1e-4, 1e-3)


@pytest.mark.parametrize(
    "family", ["gemma3_text", "gemma4_text", "gpt2", "phi3", "falcon", "bloom", "lfm2"]
)
def test_effects_in_families_of_transformers_are_finite_differences_too(family):
    model = HFModel(random_model(family))
    expected = differences(model, *(ids[0] for ids in TEXTS), 0.005)  # Gemma's norms curve d more
    [found] = effects(model, *(ids[:1] for ids in TEXTS))
    assert_close(found, expected, 1e-3, 1e-2)
    assert found.abs().sum() > 0.1 and not found[expected == 0].any()  # a head that is not there


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("kind", [pack.Packed, pack.Filled, pack.Blocked])
def test_packed_layers_have_the_gradients_of_plain_ones(tmp_path, monkeypatch, engine, kind):
    write_checkpoint(tmp_path, "qwen2")  # biases, and an embedding that is the head too
    expected = effects(engine.load(tmp_path, dtype="float32"), *TEXTS)
    for dtype, least in ((torch.float32, 1 - 1e-9), (torch.bfloat16, 0.98)):
        if pack.emulates(dtype) and kind != pack.Blocked:
            continue  # oneDNN's products need AVX-512
        with monkeypatch.context() as change:
            change.setattr(pack, "kind_of_layer", lambda dtype: kind)
            change.setattr(pack, "UNPACKED_UP_TO", 0)
            packed = engine.load(tmp_path, dtype=dtype)
        assert packed.product == kind.__name__.lower()
        assert_similar(effects(packed, *TEXTS), expected, least, 1e-5 if least > 0.99 else 0.1)


def test_effects_are_each_prompt_s_own_in_inference_mode_too_and_leave_the_cache(tmp_path, engine):
    write_checkpoint(tmp_path, "mistral-window")
    with torch.inference_mode():  # everything that is made here is an inference tensor
        model = engine.load(tmp_path)
        cache = Session([Row(model, PROMPTS)], 8).cache
        found = effects(model, *TEXTS, cache)
        ids = pad([prompt[-1:] for prompt in PROMPTS])
        logits = model(ids, cache)
        untouched = Session([Row(model, PROMPTS)], 8).cache
        assert_close(logits, model(ids, untouched), 0)
    for b, texts in enumerate(zip(*TEXTS)):
        [alone] = effects(model, *([ids] for ids in texts))
        assert_close(found[b], alone, 1e-5, 1e-4)
    assert not effects(model, PROMPTS[:1], [[]]).any()


def test_of_the_prompt_the_backward_pass_keeps_its_keys_and_which_of_them_are_seen(tmp_path):
    model = tiny(tmp_path)
    kept, keys = [], []
    for n in (60, 480):
        sizes = {}

        def keep(x, sizes=sizes):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        cache = Session([Row(model, [random_ids(n)])], 8).cache
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            effects(model, [random_ids(n)], ANSWERS[:1], cache=cache)
        kept.append(sum(size for size in sizes.values() if size != cache.kv[0].nbytes))
        keys.append(cache.P + cache.S)
    assert kept[1] - kept[0] == 4 * 6 * (keys[1] - keys[0])  # of three tokens, two heads per key


CAPITALS = [
    {
        "id": f"c{i}",
        "question": f"Capital of {name}?",
        "context": f"The king of {name} lives in New{i}. " * (1 + i % 2),
        "answers": [f"New{i}", "another"],
        **({"memory": [f"Old{i}"]} if i < 3 else {}),
        **({"begin": "It is"} if i % 2 else {}),
    }
    for i, name in enumerate("ABCDE")
]


@pytest.fixture
def detect(call, chat_model, tmp_path):
    """Runs `heads.detect --questions` on the tiny chat model: detect(*options) → (status, the head
    file's content or None, stderr)."""
    path = write_lines(tmp_path / "capitals.jsonl", CAPITALS)
    out = tmp_path / "heads.json"

    def run(*options, origin=f"--questions {path}"):
        model = f"--model {chat_model} --out {out} {origin}"
        status, _, err = call(questions.main, model, *options)
        return status, read_json(out) if out.exists() else None, err

    return run


def test_questions_give_the_mean_effect_and_leave_other_scores(detect, chat, tmp_path, monkeypatch):
    model, tokenizer = chat
    expected = 0
    closed = []
    for row in CAPITALS:
        item = TASKS["qa"].read(row) | {"index": 0}
        encoded = item_to_ids(TASKS["qa"], item, [], tokenizer, "chat")
        closed.append(encoded.without_context)
        space = " " * ("begin" in row)
        texts = row["answers"][:1] + row.get("memory", [])
        texts = [[tokenizer.encode(space + text, bos=False)] for text in texts]
        expected += effects(model, [encoded.prompt], *texts)[0] / len(CAPITALS)
    status, content, err = detect("--batch-size 2")
    assert status == 0, err
    assert [*content["effect"]] == [f"{i}-{j}" for i in range(3) for j in range(4)]
    found = torch.tensor([*content["effect"].values()])
    assert_close(found.double(), expected.flatten(), 2e-6, 1e-3)
    assert content.keys() == {"model", "n_layers", "n_heads", "effect", "effect_facts"}
    facts = content["effect_facts"]
    best = divmod(expected.argmax().item(), 4)
    how = dict(max_new_tokens=12, tokenizer=tokenizer)
    texts = [
        [first_sentence(generate(model, ids, method, **how).text) for ids in closed]
        for method in (Greedy(), Masked([best]))
    ]
    assert facts["kept"] == {"1": sum(map(same, *texts)) / 5}
    with monkeypatch.context() as patch:
        patch.setattr("decore.Masked", lambda heads: Greedy())
        assert detect("--limit 2")[1]["effect_facts"]["kept"] == {"1": 1}
    assert facts["ids"] == [f"c{i}" for i in range(5)] and (facts["n"], facts["memories"]) == (5, 3)
    scores = dict.fromkeys(content["effect"], 0.5)
    stored = {"scores": scores, "samples": 7, "mass": {"0-0": 1.0}}
    template = tmp_path / "prompt.txt"
    template.write_text("{context}\nQ: {question}")
    for before, kept in (
        (stored | {"model": model.name}, stored),
        (scores, {"scores": scores}),  # as the authors' files
    ):
        write_json(tmp_path / "heads.json", before)
        status, again, err = detect(f"--limit 1 --template {template}")
        assert status == 0 and kept.items() <= again.items(), err
        assert again["effect"] != content["effect"] and again["effect_facts"]["n"] == 1


REFUSED = """
 | one of the arguments --questions --task is required
--task memotrap | memotrap is multiple choice
--task nq-swap --known x | --known has no effect on nq-swap
--questions FEW --data x | --data has no effect with --questions
--questions FEW --seed 1 | --seed has no effect without --sample
--questions FEW --eos 1 | --eos has no effect on answers that are given
--questions FEW --lengths 5 | unrecognized arguments: --lengths
--questions FEW --skip 5 | --skip 5 leaves none
--questions FEW --sample 2 --seed 1,2 | --seed takes several numbers with --random-h
--questions LONG | longest answer 2 of 2 has 2951 tokens
--questions LONG --transformers | longest answer 2 of 2 has 2951 tokens
"""


@each("options, message", REFUSED)
def test_questions_that_measure_nothing_are_refused(detect, tmp_path, options, message):
    far = write_lines(tmp_path / "f.jsonl", [CAPITALS[0], CAPITALS[1] | {"context": "far " * 700}])
    options = options.replace("FEW", f"{tmp_path}/capitals.jsonl").replace("LONG", str(far))
    status, content, err = detect(origin=options)
    assert (status, content) == (2, None) and message in err.splitlines()[-1]


def test_a_file_of_another_model_is_refused(detect, tmp_path):
    for other in ({"model": "other"}, {"model": "chat0", "n_layers": 5}):
        write_json(tmp_path / "heads.json", other)
        status, content, err = detect()
        words = f"({other.get('n_layers', 3)} layers of 4), not of chat0 (3 layers of 4)"
        assert status == 2 and content == other and words in err.splitlines()[-1]


def test_scored_questions_that_measured_the_heads_are_counted_and_the_measure_is_named(
    detect, done, chat_model, tmp_path
):
    rows = write_lines(tmp_path / "first.jsonl", [r | {"context": "x"} for r in CAPITALS[:2]])
    detect(origin=f"--questions {rows}")
    said = f"heads are ranked by effect, of {tmp_path}/heads.json\n"
    options = f"--task qa --data {tmp_path}/capitals.jsonl --model {chat_model} --max-new-tokens 1"
    options += f" --heads {tmp_path}/heads.json --measure effect --num-heads 1,2"
    _, err = done(evaluate.main, f"{options} --out {tmp_path}/out")
    assert err.count("warning: 2 of 5 questions measured the heads of") == err.count(said) == 1
    _, err = done(evaluate.main, f"{options} --skip 2 --out {tmp_path}/others")
    assert "measured the heads" not in err
    options = f"--model {chat_model} --prompt x --max-new-tokens 1 --heads"
    for heads, is_said in ((tmp_path, True), (chat_model, False)):
        more = f"{heads}/heads.json {'--measure effect' * is_said}"
        assert (said in done(decode.main, f"{options} {more}")[1]) == is_said


def test_needles_keep_the_effect_on_questions_and_questions_leave_the_scores_of_needles(
    call, done, tmp_path
):
    out = tmp_path / "heads.json"
    options = f"{OWN_TEXTS} --lengths 60 --depths 2 --runs 4 --min-success 1 --out {out}"
    done(needles_program.main, options)
    by_needles = read_json(out)
    line = {"question": "The capital of A is", "context": "The capital of A is B.", "answers": "B"}
    write_lines(tmp_path / "q.jsonl", [line])
    done(questions.main, f"--questions {tmp_path}/q.jsonl --out {out}")
    both = read_json(out)
    expected = dict(both)
    assert both.pop("effect") != by_needles.pop("effect") and both.pop("effect_facts")
    assert both == by_needles
    for left_out in ((), by_needles):  # also if the questions came first
        write_lines(out, [{n: x for n, x in expected.items() if n not in left_out}])
        done(needles_program.main, options)
        assert read_json(out) == expected
    # Stored runs of earlier versions have no effect.
    runs = tmp_path / "heads.json.runs.jsonl"
    header, *records = read_lines(runs)
    write_lines(runs, [header, *({**r, "effect": None} for r in records)])
    assert call(needles_program.main, options)[0] == 2
    for record in records:
        del record["effect"]
    write_lines(runs, [header, *records])
    write_json(out, by_needles)
    _, err = done(needles_program.main, options)
    assert "effect is left out: miniature has no gradient, or the stored" in err
    assert read_json(out) == by_needles
