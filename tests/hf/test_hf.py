"""Models of transformers: compared with our engine, with `generate` of transformers, and with
copies of a model whose output projections have zeros for the masked heads."""

import copy
import importlib
import math
import pickle
import sys
import weakref
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import transformers

from cli import decode as program
from cli.entry import explain
from decoders.baselines import AD, CAD, CD, DoLa
from decoders.scoring import score
from decoders.sweep import PromptsReadOnce
from decore import DeCoRe, Greedy, Masked, contrast, entropy, generate, make_head_mask, pad
from heads import measures
from heads.sources import find_sources
from hf import HFModel, attention
from hf.config import describe, read_config
from integrations.custom_generate import generate as custom_generate
from model import Transformer
from runtime import pack, ranks
from runtime.files import read_json
from tests import checkpoints, families
from tests.checkpoints import (
    assert_close,
    ids_of,
    random_ids,
    random_weights,
    write_checkpoint,
    write_json,
)
from tests.families import FAMILIES, NO_QUERY, random_model, without_heads
from tests.methods import HEADS, MASKING
from tests.tables import each

PROMPTS = [random_ids(14, seed=1), random_ids(5, seed=2), random_ids(11, seed=3)]
BASELINES = """
CAD([prompt[2:] for prompt in PROMPTS])
DoLa("low", "halves")
DoLa("high", repetition_penalty=1.3)
AD(info_layer=1)
AD(info_layer=3)
"""
BASELINES = [*map(eval, BASELINES.split("\n")[1:-1])]
N = dict(max_new_tokens=6, eos_ids=())
FEW = dict(max_new_tokens=3, eos_ids=())
RECURRENT = ["falcon_h1", "qwen3_next", "lfm2", "inkling_text"]  # their layers keep a state


@pytest.fixture(scope="module", params=["llama3.1", "mistral-window", "qwen2-window", "qwen3"])
def engines(request, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return Transformer.load(folder), HFModel.load(folder)


def assert_equal(ours, theirs):
    assert ids_of(ours) == ids_of(theirs)
    for g, h in zip(ours, theirs):
        assert g.alphas == pytest.approx(h.alphas, abs=1e-4)
        assert g.entropies == pytest.approx(h.entropies, abs=1e-4)


def test_both_engines_decode_the_same_tokens_by_every_method(engines):
    for method in MASKING + BASELINES:
        assert_equal(*(generate(model, PROMPTS, method, **N) for model in engines))
        if type(method) is not CAD:  # a prompt of one token
            assert_equal(*(generate(model, [[7]], method, **FEW) for model in engines))


def test_both_engines_score_alike(engines):
    answers = [[3, 4, 5, 6, 8], [7, 3], [60]]
    for method in [*MASKING, *BASELINES[1:], CAD(PROMPTS[0][4:])]:
        ours, theirs = (score(m, PROMPTS[0], answers, method) for m in engines)
        assert ours == pytest.approx(theirs, abs=2e-4)


def test_either_engine_is_the_amateur_of_either(engines):
    for make in CD, lambda amateur: DeCoRe(HEADS, amateur=amateur):
        expected, *others = (
            generate(model, PROMPTS, make(amateur), **N) for model in engines for amateur in engines
        )
        for other in others:
            assert_equal(expected, other)


def test_heads_attend_to_the_same_tokens_in_both_engines(engines):
    ids = generate(engines[0], PROMPTS[0], DeCoRe(HEADS), **N).ids
    ours, theirs = (find_sources(model, PROMPTS[0], ids, HEADS) for model in engines)
    assert ours == theirs


def restricted(model, change):
    """The model with changed logits: for tokens that cannot be, −∞ or nothing."""
    model = copy.deepcopy(getattr(model, "hf", model))
    model.lm_head.register_forward_hook(lambda _, args, z: change(z))
    return model if isinstance(model, Transformer) else HFModel(model)


@pytest.mark.parametrize("engines", ["llama3.1"], indirect=True)
@pytest.mark.parametrize("kind", [Greedy, Masked, DeCoRe, CD, CAD, DoLa, AD])
def test_tokens_with_logits_of_minus_infinity_are_as_if_they_did_not_exist(engines, kind):
    size = 90  # of a vocabulary of 96
    methods = [method for method in MASKING[::4] + BASELINES[:4] if type(method) is kind]
    for engine in engines:
        padded = restricted(engine, lambda z: z.masked_fill(torch.arange(96) >= size, -math.inf))
        cut = restricted(engine, lambda z: z[..., :size])
        object.__setattr__(cut.config, "vocab_size", size)
        answers = [[3, 4, 5, 6, 8], [7, 3]]
        pairs = [(CD(padded), CD(cut))] if kind is CD else zip(methods, methods)
        for of_padded, of_cut in pairs:
            assert_equal(
                generate(padded, PROMPTS, of_padded, **FEW), generate(cut, PROMPTS, of_cut, **FEW)
            )
            if kind is CAD:
                of_padded = of_cut = CAD(PROMPTS[0][2:])
            scores = score(padded, PROMPTS[0], answers, of_padded)
            assert scores == pytest.approx(score(cut, PROMPTS[0], answers, of_cut), abs=1e-4)
            assert score(padded, PROMPTS[0], [[3, size], [3]], of_padded)[0] == -math.inf


@pytest.mark.parametrize(
    "family", "gemma3_text gpt2 phi3 gemma4_text qwen3_next deepseek_v3".split()
)
@torch.no_grad()
def test_a_head_writes_what_its_output_projection_adds_where_values_are_known(family):
    model = HFModel(random_model(family))
    known = family not in ("qwen3_next", "deepseek_v3")
    prompt = PROMPTS[0]
    whole = [(0, len(prompt)), (0, 3)]  # no key of the first prompt is left out
    [answer, _] = measures.answer_batch(model, [prompt, PROMPTS[1]], whole, 1)
    assert answer.write.any() == known
    if known:
        u = model.hf.get_output_embeddings().weight[answer.ids[0]]
        expected = []
        for o in model.output_projections():
            o.register_forward_hook(lambda o, args, y: expected.append(added(o, args[0], u)))
        model(pad([prompt]))
        assert_close(answer.write[0], torch.stack(expected), 1e-4, 1e-4)


def added(o, x, u):
    """What each head adds to a logit at the last token: o's input x [1, T, 4·K], its row u."""
    heads = torch.zeros(4, x.shape[-1]).unflatten(1, (4, -1))
    heads[range(4), range(4)] = x[0, -1].unflatten(0, (4, -1))
    heads = heads.flatten(1)
    return (o.forward(heads) - o.forward(torch.zeros_like(heads))) @ u


# Other families: the heads that are found by a rule must be the right ones in each


def masked_attention(model, ids, heads):
    """Probabilities of each layer at the last five tokens; the queries of these heads masked."""
    cache = model.new_cache([len(ids) - 5], 5)
    model.prefill(pad([ids[:-5]]), cache)
    head_mask = make_head_mask([heads], model)
    return model.read_attention(pad([ids[-5:]]), cache, head_mask, "query")[1]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return HFModel(random_model(request.param))


@torch.no_grad()
def test_other_families_decode_as_transformers_and_as_copies_without_the_heads(model):
    other = without_heads(model, HEADS)
    prompt = PROMPTS[0]

    def log_p(hf, ids):
        return hf(torch.tensor([prompt + ids])).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]

    ones = torch.ones(1, len(prompt), dtype=torch.long)
    options = dict(do_sample=False, max_new_tokens=3, eos_token_id=None, attention_mask=ones)
    text = model.hf.generate(torch.tensor([prompt]), **options)[0].tolist()
    assert prompt + generate(model, prompt, Greedy(), **FEW).ids == text
    methods = [kind(HEADS, mask_prompt=True) for kind in (Masked, DeCoRe)]
    batch = generate(model, PROMPTS, methods[1], **FEW)
    assert_equal(batch, [generate(model, ids, methods[1], **FEW) for ids in PROMPTS])
    for method in *methods, replace(methods[1], alpha=0.5):
        alpha = getattr(method, "alpha", -1)
        ids = generate(model, prompt, method, **FEW).ids
        base = log_p(model.hf, ids)
        alpha = entropy(base) if alpha is None else torch.full((1, 3), alpha)
        assert contrast(base, log_p(other, ids), alpha).argmax(-1)[0].tolist() == ids
    answer = PROMPTS[2][:5]
    base = log_p(model.hf, answer)
    total = contrast(base, log_p(other, answer), entropy(base)).log_softmax(-1)[0]
    expected = sum(total[i, token].item() for i, token in enumerate(answer))
    assert score(model, prompt, answer, DeCoRe(HEADS)) == pytest.approx(expected, abs=1e-3)


def test_runs_that_share_their_prompts_decode_alike(model, monkeypatch):
    methods = [DeCoRe(HEADS), Masked(HEADS), DeCoRe(HEADS, alpha=0.5)]
    expected = [generate(model, PROMPTS, method, **FEW) for method in methods]
    lengths, caches = [], []
    run_hf, new_cache = model.run_hf, model.new_cache

    def kept(*args):
        cache = new_cache(*args)
        caches.append(weakref.ref(cache))
        return cache

    def counted(inputs, *args, **more):
        lengths.append(inputs["input_ids"].shape[1])
        return run_hf(inputs, *args, **more)

    monkeypatch.setattr(model, "run_hf", counted)
    monkeypatch.setattr(model, "new_cache", kept)
    reader = PromptsReadOnce(model)
    for method, alone in zip(methods, expected):
        assert_equal(generate(reader, PROMPTS, method, **FEW), alone)
    assert [cache() is not None for cache in caches] == [True, False, False]
    longest = max(map(len, PROMPTS)) - 1
    assert lengths.count(longest) == (3 if model.name in RECURRENT else 1)
    short = [PROMPTS[0][:1], PROMPTS[1][:1]]  # whose caches are empty
    for method in methods:
        assert_equal(generate(reader, short, method, **FEW), generate(model, short, method, **FEW))


@pytest.mark.parametrize("model", [n for n in FAMILIES if n not in NO_QUERY], indirect=True)
def test_masked_queries_of_other_families_attend_evenly_and_leave_other_heads_alone(model):
    plain, masked = (masked_attention(model, PROMPTS[0], heads) for heads in ([], HEADS))
    for layer, head in HEADS:  # the same for all keys that the query may see
        p = masked[layer][..., head, :]
        assert ((p == 0) | (p > p.amax(-1, keepdim=True) - 1e-6)).all()
    torch.testing.assert_close(plain[1][..., 1:3, :], masked[1][..., 1:3, :])
    if model.name == "lfm2":  # layer 0 has no attention
        assert plain[0][..., -1].all() and not plain[0][..., :-1].any()


def test_facts_and_hidden_states_of_other_families_are_those_of_transformers(model, tmp_path):
    queries = {"query" in a.projections for a in model.head_places.values()}
    assert queries == {model.name not in NO_QUERY}
    model.hf.config.save_pretrained(tmp_path)
    assert describe(read_config(tmp_path)) == model.config
    ids = torch.tensor(PROMPTS[:1])
    states = model.hf(ids, output_hidden_states=True).hidden_states
    cache = model.new_cache([9], 5)
    model.prefill(ids[:, :9], cache)
    last, [early] = model.read_layers(ids[:, 9:], [1], cache)
    assert_close(early[0], states[1][:, 9:], 1e-4, 1e-4)
    assert_close(model.logits(last)[0], model(ids)[:, 9:], 1e-4, 1e-4)


# What is refused, and what a failure leaves behind


def wrap(family, sizes=""):
    return HFModel(random_model(family, **families.facts(sizes, families.GROUPS)))


def load(folder, changes):
    weights = random_weights(checkpoints.FAMILIES["llama3"])
    changes = families.facts(changes)
    return HFModel.load(write_checkpoint(folder, weights=weights, **changes))


def wrap_renamed():
    hf = random_model("gemma2")
    forward = hf.forward
    hf.forward = lambda input_ids, kv=None, **others: forward(input_ids, **others)
    return HFModel(hf)


def load_pickle(folder):
    (write_checkpoint(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")
    HFModel.load(folder)


REFUSED = """
wrap("mamba") | mamba (mamba): no layer has an attention
wrap_renamed() | the cache does not reach its attention in transformers VERSION
HFModel(families.round_together(random_model("gemma2"))) | mlp.down_proj (Rounded) computes a \
text differently beside others
wrap("jamba", "mamba_d_state=8 attn_layer_period=2 attn_layer_offset=1") | jamba (jamba): a \
padded batch with a cache gives other logits
generate(wrap("lfm2"), PROMPTS, DeCoRe([(1, 0), (0, 2)])) | lfm2: layer 0 has 0 heads
generate(wrap("phi", "qk_layernorm=true"), PROMPTS, DeCoRe(HEADS, "query")) | phi: layer 1 has no \
query projection whose heads stay apart
generate(wrap("gemma3n_text", "WINDOWS hidden_size_per_layer_input=8 laurel_rank=4 \
vocab_size_per_layer_input=96 num_kv_shared_layers=0 activation_sparsity_pattern=null"), PROMPTS, \
DoLa("high")) | gemma3n_text: the layers cannot be read, as dola-high does
wrap("gemma2")(torch.tensor([[5]]), head_mask=torch.ones(1, 2, 4)) | [R, L, H] = [1, 2, 4]; \
gemma2 has L = 3, H = 4
load(folder, 'model_type="t5"') | is not a causal language model
load_pickle(folder) | Pickles (.bin, .pt, .pth) are not read
load(folder, 'attention_bias="x"') | 'attention_bias' expected bool
load(folder, 'hidden_act="nope"') | (KeyError: 'nope'); are its files
load(folder, "intermediate_size=7") | down_proj.weight is [32, 48]; config.json requires [32, 7]
load(folder, "num_hidden_layers=2") | unused ['model.layers.2.
load(folder, "num_hidden_layers=4") | has 4 layers, the safetensors files
"""


@each("call, words", REFUSED.replace("VERSION", transformers.__version__))
def test_what_cannot_be_masked_or_read_is_refused_in_one_line(call, words, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        eval(call, globals() | {"folder": tmp_path})
    message = explain(error.value)
    assert words in message and "\n" not in message


def test_ranks_of_torchrun_do_not_share_a_model_of_transformers(tmp_path, monkeypatch):
    for name in ranks.TORCHRUN:
        monkeypatch.setenv(name, "1" if name == "RANK" else "2")
    with pytest.raises(ValueError, match="ranks .* do not share a model.*device_map="):
        HFModel.load(tmp_path)


def test_a_users_own_model_can_be_pickled_after_it_was_wrapped_and_read_by_layers():
    hf = random_model("llama")
    HFModel(hf)
    again = HFModel(pickle.loads(pickle.dumps(hf)))
    assert generate(again, [5, 6], DoLa("high")) == generate(HFModel(hf), [5, 6], DoLa("high"))


def test_a_users_own_model_keeps_its_layers_ids_and_context(monkeypatch):
    monkeypatch.setattr(pack, "UNPACKED_UP_TO", 0)
    hf = random_model("gemma2").bfloat16()
    ids = torch.tensor(PROMPTS[:1])
    hf.generation_config.eos_token_id = [5, 7]
    model = HFModel(hf)
    assert (model.eos_ids, model.pad_ids, model.config.max_positions) == ((5, 7), (0,), 256)
    assert model(ids).dtype == torch.float32 and not model(ids).requires_grad
    assert model.product is None and type(hf.lm_head) is torch.nn.Linear


def test_a_model_in_training_mode_stays_in_it_and_decodes_without_dropout():
    hf = random_model("llama", attention_dropout=0.5)
    how = dict(method=DeCoRe(HEADS), **N)
    expected = generate(HFModel(hf), PROMPTS, **how)
    hf.activation_checkpointing_enable()
    hf.train()
    model = HFModel(hf)
    assert_equal(generate(model, PROMPTS, **how), expected)
    assert all(module.training for module in hf.modules())
    with torch.no_grad():
        hf.get_output_embeddings().weight *= -1  # as a step of training: the tensors are shared
    assert generate(model, PROMPTS[0], **how).ids != expected[0].ids


def test_a_copy_of_an_hf_model_is_a_model_of_its_own():
    model = HFModel(random_model("gemma2"))
    expected = generate(model, PROMPTS, DeCoRe(HEADS), **N)
    other = copy.deepcopy(model)
    assert_equal(generate(other, PROMPTS, DeCoRe(HEADS), **N), expected)
    with torch.no_grad():
        other.hf.get_output_embeddings().weight *= -1
    assert_equal(generate(model, PROMPTS, DeCoRe(HEADS), **N), expected)
    assert generate(other, PROMPTS[0], DeCoRe(HEADS), **N).ids != expected[0].ids


def with_peft(kind, hf, **options):
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(hf, getattr(peft, kind)(task_type="CAUSAL_LM", **options))


def with_lora(hf):
    options = dict(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return with_peft("LoraConfig", hf, **options)


def with_prompt(hf):
    return with_peft("PromptTuningConfig", hf, num_virtual_tokens=3)


@pytest.mark.parametrize("wrapper", [torch.compile, with_lora])
def test_wrapped_models_decode_as_those_inside(wrapper):
    wrapped = wrapper(random_model("gemma2"))
    ids = torch.tensor(PROMPTS[:1])
    text = wrapped.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    out = generate(HFModel(wrapped), PROMPTS[0], Greedy(), **N)
    assert PROMPTS[0] + out.ids == text[0].tolist()


@pytest.mark.parametrize("wrapper", [torch.nn.DataParallel, with_prompt])
def test_other_wrappers_are_named(wrapper):
    wrapped = wrapper(random_model("gemma2"))
    with pytest.raises(ValueError, match=f"{type(wrapped).__name__} is not a model of transfor"):
        HFModel(wrapped)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_kernel_that_config_json_asks_for_is_not_needed(family, tmp_path):
    random_model(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = read_json(path)
    for part in config, config.get("text_config", {}):
        part["_attn_implementation"] = "flash_attention_2"
    write_json(path, config)
    assert HFModel.load(tmp_path).hf.config._attn_implementation == "sdpa"


def test_scoring_copies_the_keys_of_the_prompt_that_it_scores_alone(monkeypatch):
    model = HFModel(random_model("qwen3_next"))
    expected = [score(model, prompt, [3, 4], DeCoRe(HEADS)) for prompt in PROMPTS]
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda *_: 1 / 0)
    together = score(model, PROMPTS, [[[3, 4]]] * 3, DeCoRe(HEADS))
    assert sum(together, []) == pytest.approx(expected, abs=1e-4)


def test_models_decode_as_before_after_a_notebook_loads_the_hooks_again():
    hf = random_model("llama")
    expected = generate(HFModel(hf), PROMPTS, DeCoRe(HEADS), **N)
    for _ in range(2):
        importlib.reload(attention)
    assert hf.config._attn_implementation == "sdpa"
    assert_equal(generate(HFModel(hf), PROMPTS, DeCoRe(HEADS), **N), expected)


def test_a_failed_pass_leaves_the_model_as_it_was():
    hf = random_model("gemma3_text")
    ids = torch.tensor([PROMPTS[0]])
    hf.model.forward = forward = hf.model.forward  # as accelerate does
    before = hf(ids).logits
    model = HFModel(hf)
    failing = model.decoder.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.read_attention(ids, model.new_cache([0], 14), make_head_mask([HEADS], model))
    failing.remove()
    with pytest.raises(RuntimeError):
        model.logits(torch.zeros(1, 1, 2, 5))
    assert vars(hf.model)["forward"] is forward and hf.config._attn_implementation == "sdpa"
    for module in hf.modules():
        hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
        assert "hf.attention" not in [hook.__module__ for hook in hooks]
    assert torch.equal(hf(ids).logits, before)


# Programs, and quantized weights


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "biogpt"])
def test_a_batch_may_end_beyond_learned_positions_for_texts_that_have_ended(family):
    model = HFModel(random_model(family, max_position_embeddings=32))
    prompts = [random_ids(30, seed=1), random_ids(2, seed=2)]
    how = dict(method=DeCoRe(HEADS), max_new_tokens=20, eos_ids=())
    batch = generate(model, prompts, **how)
    assert [len(g.ids) for g in batch] == [2, 20]
    assert_equal(batch, [generate(model, prompt, **how) for prompt in prompts])


def test_the_engines_agree_on_the_ids_that_begin_end_and_pad_texts(chat_model):
    for model in Transformer.load(chat_model), HFModel.load(chat_model):
        assert model.name == chat_model.name
        assert (model.bos_id, model.eos_ids, model.pad_ids) == (256, (257,), (257,))


def test_transformers_needs_its_package(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hf")
    err = refused(program.main, "--prompt x --transformers")
    assert err.endswith("needs transformers: pip install transformers\n")


@pytest.mark.skipif(
    not (find_spec("bitsandbytes") and find_spec("accelerate")),
    reason="pip install bitsandbytes accelerate",
)
def test_quantized_weights_decode_alike_in_both_ways_of_transformers(tmp_path):
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    full = tmp_path / "full"
    random_model("gemma2", hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(full)
    options = dict(quantization_config=quantization, device_map="cpu")
    quantized = transformers.AutoModelForCausalLM.from_pretrained(full, **options)
    quantized.save_pretrained(tmp_path / "quantized")
    model = HFModel.load(tmp_path / "quantized")
    ids = torch.tensor([PROMPTS[0]])
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    options["attention_mask"] = torch.ones_like(ids)
    text = custom_generate.generate(model.hf, heads=HEADS, input_ids=ids, **options)
    assert PROMPTS[0] + generate(model, PROMPTS[0], DeCoRe(HEADS), **N).ids == text[0].tolist()
