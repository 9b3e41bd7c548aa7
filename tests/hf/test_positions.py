"""Rotary positions that are scaled by length, in both ways of decoding with transformers."""

import pytest
import torch
from transformers import LlamaConfig

from decoders.scoring import score
from decore import DeCoRe, Greedy, generate
from hf import HFModel
from hf.positions import position_problem
from integrations.custom_generate import generate as custom_generate
from tests.checkpoints import assert_close, ids_of, random_ids
from tests.families import EXPERTS, left_padded, random_model
from tests.methods import HEADS
from tests.tables import each, facts

LONGROPE = facts("""
rope_type="longrope" short_factor=[1.0,1.1,1.2,1.3] long_factor=[4.0,5.0,6.0,7.0]
rope_theta=10000.0 original_max_position_embeddings=16 factor=16.0
""")
MODELS = {
    "phi3": {},  # its `generate` drops the cache when a text passes the limit
    "phimoe": EXPERTS,
    "llama": {},
}
BELOW = [random_ids(8, seed=1), random_ids(5, seed=2)]
BEYOND = [random_ids(40, seed=3), random_ids(18, seed=4)]
GREEDY = dict(do_sample=False, max_new_tokens=6, eos_token_id=None, pad_token_id=0)
N = dict(max_new_tokens=6, eos_ids=())


def scaled(family):
    rope = LONGROPE | (dict(short_mscale=1.0, long_mscale=1.2) if family == "phimoe" else {})
    facts = dict(rope_parameters=rope, original_max_position_embeddings=16) | MODELS[family]
    return random_model(family, **facts)


def dynamic():
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
    return random_model("llama", rope_parameters=rope, max_position_embeddings=16)


def decode_inside(model, prompts, **more):
    """By custom_generate."""
    settings = GREEDY | dict(return_dict_in_generate=True) | more
    return custom_generate.generate(model, heads=HEADS, **left_padded(prompts), **settings)


@pytest.mark.parametrize("prompts", [BELOW, BEYOND], ids=["below", "beyond"])
@pytest.mark.parametrize("family", MODELS)
def test_texts_on_one_side_of_the_limit_decode_as_each_alone(family, prompts):
    hf = scaled(family)
    model = HFModel(hf)
    alone = []
    for p in prompts:
        text = hf.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), **GREEDY)
        alone.append(text[0, len(p) :].tolist())
    assert ids_of(generate(model, prompts, Greedy(), **N)) == alone
    out = decode_inside(hf, prompts, method="decore-static", alpha=0.0)
    assert out.sequences[:, len(prompts[0]) :].tolist() == alone
    expected = generate(model, prompts, DeCoRe(HEADS), **N)
    out = decode_inside(hf, prompts)
    assert out.sequences[:, len(prompts[0]) :].tolist() == ids_of(expected)
    alphas = torch.tensor([g.alphas for g in expected])
    assert_close(out.alphas, alphas, 1e-4)
    answer = BELOW[1]
    with torch.no_grad():
        log_p = hf(torch.tensor([prompts[0] + answer])).logits[0].log_softmax(-1)
    plain = sum(log_p[len(prompts[0]) - 1 + i, token].item() for i, token in enumerate(answer))
    assert score(model, prompts[0], answer, Greedy()) == pytest.approx(plain, abs=1e-3)


WAYS = """
generate(HFModel(hf), prompts, DeCoRe(HEADS), **N)
decode_inside(hf, prompts)
score(HFModel(hf), prompts, [[BELOW[0][:6]]] * len(prompts), DeCoRe(HEADS))
"""
REFUSED = """
scaled("phi3") | 12 | this prompt with its answer passes that
scaled("llama") | 12 | this prompt with its answer passes that
scaled("llama") | 17 | this prompt with its answer passes that
dynamic() | 12 | this prompt with its answer passes that
dynamic() | 20 | this prompt with its answer passes that
scaled("phi3") | 20 7 | a part of this batch is longer
"""


@pytest.mark.parametrize("call", WAYS.split("\n")[1:-1])
@each("model, lengths, words", REFUSED)
def test_texts_on_both_sides_of_the_limit_are_refused_before_the_first_token(
    call, model, lengths, words
):
    hf, prompts = eval(model), [random_ids(int(n)) for n in lengths.split()]
    with pytest.raises(ValueError, match="scales positions beyond 16 tokens") as error:
        eval(call, globals() | dict(hf=hf, prompts=prompts))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("n", [16, 20])  # the limit, and beyond
def test_a_text_read_at_once_does_not_have_the_scale_of_a_longer_one_before(n):
    ids = torch.tensor([random_ids(n, seed=5)])
    model = HFModel(dynamic())
    expected = dynamic()(ids).logits
    model.hf(torch.tensor([BEYOND[0]]))
    torch.testing.assert_close(model(ids), expected)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "bfloat16 float"])
def test_rotary_frequencies_that_a_cast_has_rounded_are_named(cast, recwarn):
    hf = random_model("llama")
    for name in cast.split():
        hf = getattr(hf, name)()
    HFModel(hf)
    decode_inside(hf, BELOW)
    words = "a cast has rounded the rotary frequencies to torch."
    assert [words in str(w.message) for w in recwarn] == [True, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loading_in_a_dtype_does_not_round_them(dtype, tmp_path, recwarn):
    random_model("llama").save_pretrained(tmp_path)
    model = HFModel.load(tmp_path, dtype=dtype)
    decode_inside(model.hf, BELOW)
    assert model.dtype == getattr(torch, dtype) and not recwarn


@pytest.mark.parametrize("total, fits", [(16, True), (17, False)])
def test_the_last_token_is_not_read(total, fits):
    config = LlamaConfig(rope_parameters=LONGROPE, hidden_size=32)
    problem = position_problem(config, [9], [total], "tiny")
    assert problem is None if fits else problem.startswith("tiny scales")
