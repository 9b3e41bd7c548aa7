"""DeCoRe in `generate` of transformers, compared with `--transformers`."""

import copy
import json
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import decore
from decore import DeCoRe, Masked  # noqa: F401 (of a table)
from heads import load_heads
from hf import HFModel
from model import Transformer
from runtime.values import MASKS
from tests import families
from tests.checkpoints import assert_close, ids_of, write_json
from tests.families import left_padded, random_model
from tests.methods import HEADS
from tests.tables import facts, rows

PROMPTS = [[5, 9, 17, 33, 60, 3, 8, 44, 71, 20, 11, 90], [7, 30, 31, 32], [40]]
GREEDY = dict(do_sample=False, max_new_tokens=8, pad_token_id=0, use_cache=True)
FOLDER = dict(
    custom_generate=str(Path(__file__).parents[2] / "integrations"),
    trust_remote_code=True,
    heads=HEADS,
)
# Options, and the record for `decore.generate`.
CASES = """
 | DeCoRe(HEADS)
scale_alpha=true | DeCoRe(HEADS, scale_alpha=True)
alpha_cap=0.7 | DeCoRe(HEADS, alpha_cap=0.7)
method="masked" | Masked(HEADS)
method="decore-static" | DeCoRe(HEADS, alpha=0.5)
method="decore-static" alpha=1.5 | DeCoRe(HEADS, alpha=1.5)
alpha_rule="gain" | DeCoRe(HEADS, alpha_rule="gain")
alpha_rule="gain" alpha_cap=0.01 scale_alpha=true | \
    DeCoRe(HEADS, alpha_rule="gain", alpha_cap=0.01, scale_alpha=True)
"""
CASES = [(facts(options), eval(record)) for options, record in rows(CASES)]


@pytest.fixture(scope="module")
def llama(llama):
    return AutoModelForCausalLM.from_pretrained(llama.checkpoint.folder)


def generate(model, prompts=PROMPTS[:1], **more):
    """The result of `generate`."""
    return model.generate(**left_padded(prompts), **FOLDER | GREEDY | more)


def new_tokens(model, prompts=PROMPTS[:1], **more):
    return generate(model, prompts, **more)[:, len(prompts[0]) :].tolist()


@pytest.mark.parametrize("family", sorted({"llama", *families.FAMILIES}))
def test_a_padded_batch_gives_the_numbers_of_hf_model(family):
    model = random_model(family)
    reference = HFModel(model)
    cases = [CASES[0], CASES[3]]
    if family not in families.NO_QUERY:
        cases.append((dict(mask="query"), DeCoRe(HEADS, "query")))
    if family in ("llama", "gemma2"):  # what follows the logits is the same for all families
        for more, method in CASES:
            cases += [(more | dict(mask=mask), replace(method, mask=mask)) for mask in MASKS]
    for more, method in cases:
        expected = decore.generate(reference, PROMPTS, method, max_new_tokens=5, eos_ids=())
        out = generate(model, PROMPTS, max_new_tokens=5, return_dict_in_generate=True, **more)
        assert out.sequences[:, len(PROMPTS[0]) :].tolist() == ids_of(expected)
        for name in "alphas", "entropies":
            values = torch.tensor([getattr(g, name) for g in expected])
            assert_close(getattr(out, name), values, 1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
@pytest.mark.parametrize("options", [{}, dict(repetition_penalty=1.02)], ids=str)
def test_drafts_from_the_text_change_no_token_and_save_passes(family, options, monkeypatch):
    model = random_model(family)
    prompt = generate(model, max_new_tokens=40)[0].tolist()
    passes, forward = [], model.forward
    count = wraps(forward)(lambda *args, **more: passes.append(1) or forward(*args, **more))
    monkeypatch.setattr(model, "forward", count)

    def decoded(**more):
        passes.clear()
        how = dict(max_new_tokens=30, return_dict_in_generate=True)
        return generate(model, [prompt], **how, **options, **more), len(passes)

    [end] = decoded()[0].sequences[:, -3].tolist()
    for ends in {}, dict(eos_token_id=end):
        plain, n = decoded(**ends)
        drafted, fewer = decoded(**ends, prompt_lookup_num_tokens=4)
        assert plain.sequences.tolist() == drafted.sequences.tolist() and fewer < n
        for name in "alphas", "entropies":
            assert_close(plain[name], drafted[name], 1e-4)


PROCESSORS = """
repetition_penalty=1.05
repetition_penalty=1.3
encoder_repetition_penalty=1.5
exponential_decay_length_penalty=[2,1.5] eos_token_id=5
do_sample=true min_p=0.05 temperature=0.7
do_sample=true top_k=9 top_p=0.9 repetition_penalty=1.2
do_sample=true typical_p=0.9 epsilon_cutoff=1e-3
"""


@pytest.mark.parametrize("options", PROCESSORS.split("\n")[1:-1])
def test_with_an_alpha_of_zero_every_processor_gives_the_tokens_of_plain_generate(llama, options):
    plain = dict(custom_generate=None, trust_remote_code=None, heads=None)
    texts = []
    for more in plain, dict(method="decore-static", alpha=0.0):
        torch.manual_seed(1)
        more |= dict(max_new_tokens=30)
        texts.append(new_tokens(llama, PROMPTS, **facts(options), **more))
    assert texts[0] == texts[1]


def test_tokens_with_logits_of_minus_infinity_are_left_out():
    model = random_model("gemma2")
    model.lm_head.register_forward_hook(
        lambda _, args, z: z.masked_fill(torch.arange(96) >= 60, -torch.inf)
    )
    reference = HFModel(model)
    for settings, method in CASES[:5]:
        expected = decore.generate(reference, PROMPTS, method, max_new_tokens=8, eos_ids=())
        assert new_tokens(model, PROMPTS, **settings) == ids_of(expected)


def test_a_configuration_without_a_cache_decodes_with_one(llama):
    model = copy.deepcopy(llama)
    model.config.use_cache = model.generation_config.use_cache = False
    assert new_tokens(model, use_cache=None) == new_tokens(llama)


def test_options_of_generate_keep_their_meaning(llama):
    plain = new_tokens(llama)[0]
    assert new_tokens(llama, eos_token_id=plain[2])[0] == plain[: plain.index(plain[2]) + 1]
    assert new_tokens(llama, do_sample=True, top_k=1, num_return_sequences=3) == [plain] * 3
    outputs = dict(output_scores=True, output_logits=True, return_dict_in_generate=True)
    out = generate(llama, repetition_penalty=2.0, **outputs)
    assert len(out.scores) == 8 and {"alphas", "entropies"} < {*out.keys()}
    assert all((s <= x).all() for s, x in zip(out.scores, out.logits))
    half = copy.deepcopy(llama).bfloat16()
    assert generate(half, return_dict_in_generate=True).entropies.dtype == torch.float32


def test_a_logits_processor_may_call_the_model(llama):
    """It gets the model's own logits, and the heads of its pass are not masked."""

    greedy = llama.generate(torch.tensor(PROMPTS[:1]), **GREEDY)[0, 12:].tolist()
    replace = [lambda ids, scores: llama(input_ids=ids).logits[:, -1]]
    assert new_tokens(llama, logits_processor=replace) == [greedy]


def test_a_cache_of_an_earlier_turn_gives_the_tokens_of_the_whole_text(llama):
    cache, text = DynamicCache(), PROMPTS[0]
    for more in ([], [3, 4], []):  # the last turn: the cache holds all tokens but one
        text = text + more
        answer = new_tokens(llama, [text], past_key_values=cache)[0]
        assert answer == new_tokens(llama, [text])[0]
        text = text + answer
    ids = torch.tensor([text])
    plain = llama.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(plain, llama.generate(ids, **GREEDY))


def test_the_model_is_as_before_after_an_error(llama):
    def stop(ids, scores):
        raise KeyboardInterrupt

    before = dict(vars(llama))
    with pytest.raises(KeyboardInterrupt):
        new_tokens(llama, stopping_criteria=[stop])
    assert vars(llama) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())


def test_a_model_in_training_mode_decodes_as_in_evaluation_and_stays_in_it(llama):
    model = copy.deepcopy(llama)
    model.activation_checkpointing_enable()
    model.train()
    assert new_tokens(model) == new_tokens(llama)
    assert all(module.training for module in model.modules())


def bypassed(model):
    class Bypassed(torch.nn.Linear):
        __call__ = torch.nn.Linear.forward

    model.model.layers[1].self_attn.o_proj.__class__ = Bypassed


def shared(model):
    model.model.layers[0].self_attn.o_proj = model.model.layers[1].self_attn.o_proj


def replaced_cache(model):
    update = model._update_model_kwargs_for_generation

    def replace(*args, **more):
        return copy.deepcopy(update(*args, **more))

    model._update_model_kwargs_for_generation = replace


def own_loop(model):
    class Own(type(model)):
        def _sample(self, input_ids, *args, **more):
            return torch.cat([input_ids, self(input_ids).logits[:, -1:].argmax(-1)], 1)

    model.__class__ = Own


def static_cache(model):
    return dict(past_key_values=StaticCache(config=model.config, max_cache_len=32))


def encoder_decoder(model):
    model.config.is_encoder_decoder = True


# Options that are JSON, and what is said of them.
REFUSED = """
{"num_beams": 2} | works only with num_beams=1
{"penalty_alpha": 0.6, "top_k": 4} | greedy search or sampling, not contrastive_search
{"use_cache": false} | use_cache
{"guidance_scale": 1.5} | guidance_scale
{"output_attentions": true} | output_attentions
{"measure": "other"} | measure 'other' is unknown; known: copy, write, mass
{"measure": "mass"} | measure have no effect
{"alpha": 1.0} | alpha has no effect on decore-entropy
{"method": "decore-static", "alpha": NaN} | nan
{"method": "decore-static", "alpha": "1"} | alpha '1' is not a finite number
{"alpha_cap": -0.1} | alpha_cap
{"alpha_cap": true} | alpha_cap True is not a finite number
{"heads": 7} | heads 7: give
{"heads": null} | is neither a head file nor a model of heads/
{"heads": "1-0,1-9"} | heads 1-0,1-9: give
{"heads": [[true, 3]]} | heads
{"heads": []} | heads
{"heads": ["1-4"]} | 1-4
{"heads": [[1, 0], "1-0"]} | 1-0
{"num_heads": 2} | num_heads
{"heads": "heads/scores/miniature.json"} | does not fit the model: 32 heads
"""


# Options of a model that is changed first, or of another one.
OF_A_MODEL = r"""
dict(inputs_embeds=torch.ones(1, 12, 32)) | inputs_embeds
dict(assistant_model=model) | works only with assistant_model=None
static_cache(model) | DeCoRe needs a plain DynamicCache
bypassed(model) | layer 1 has 0 heads
shared(model) | layer 1 has 0 heads
replaced_cache(model) | LlamaForCausalLM has replaced its cache while decoding
own_loop(model) | Own has a loop of its own
dict(model=families.round_together(model)) | layers.[012].mlp.down_proj \(Rounded\) computes a text
dict(model=random_model("phi", qk_layernorm=True), mask="query") | layer 1 has no query projection
dict(model=random_model("phi3"), mask="query") | 1 has no query projection
dict(model=random_model("lfm2"), heads=[(0, 1)]) | layer 0 has 0 heads
dict(model=random_model("openai-gpt")) | no layer has an attention
dict(model=random_model("minimax", **families.EXPERTS)) | MiniMax uses cache of its own
encoder_decoder(model) | a causal language model
"""


@pytest.mark.parametrize("options, words", rows(REFUSED) + rows(OF_A_MODEL))
def test_what_cannot_keep_its_meaning_is_refused_in_a_line(llama, options, words):
    model = copy.deepcopy(llama)
    if options.startswith("{"):
        options = json.loads(options)
    else:
        options = eval(options) or {}
    with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
        new_tokens(**dict(model=model) | options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 240


SCORES = {f"{layer}-{head}": -layer - head / 10 for layer in range(3) for head in range(4)}
SCORES |= {f"{layer}-{head}": 9 for layer, head in HEADS}


@pytest.mark.parametrize(
    "scores", [{"scores": SCORES}, {head: [x - 20, x + 20] for head, x in SCORES.items()}]
)
def test_the_best_heads_of_a_file_are_masked(llama, tmp_path, scores):
    path = write_json(tmp_path / "heads.json", scores)
    for heads in dict(heads=path, num_heads=3), dict(heads="1-0,1-3,2-2"):
        assert new_tokens(llama, **heads) == new_tokens(llama)
    # Equal scores: in the order of the file.
    assert new_tokens(llama, heads=str(path), num_heads=2) == new_tokens(llama, heads=HEADS[:2])


@pytest.mark.parametrize("measure, words", [("copy", "13 heads"), ("write", '"write" must be an')])
def test_a_wrong_head_file_is_refused_with_its_path(llama, tmp_path, measure, words):
    path = write_json(tmp_path / "heads.json", SCORES | {"3-0": 1})
    with pytest.raises(ValueError, match=f"{path}.*{words}"):
        new_tokens(llama, heads=path, num_heads=1, measure=measure)


@pytest.mark.parametrize("measure", ["write", "mass", "effect"])
def test_other_measures_of_a_file_choose_other_heads(llama, tmp_path, measure):
    path = tmp_path / "heads.json"
    rest = {head: -score for head, score in SCORES.items()}
    path.write_text("\ufeff" + json.dumps({"scores": rest, measure: SCORES}))
    assert new_tokens(llama, heads=path, measure=measure, num_heads=3) == new_tokens(llama)


def test_head_files_are_found_by_the_name_of_the_model():
    """As the programs do: 4 of the miniature's 32 heads are an eighth."""
    model = AutoModelForCausalLM.from_pretrained("miniature")
    best = load_heads(Transformer.load("miniature"), 4)
    expected = new_tokens(model, heads=best)
    assert new_tokens(model, heads=None) == new_tokens(model, heads="org/Miniature") == expected
    assert new_tokens(model, heads=None, num_heads=5) != expected
    model.config.name_or_path = "/cache/models--org--Miniature/snapshots/8cde5ca"
    assert new_tokens(model, heads=None) == expected
