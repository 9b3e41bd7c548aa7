"""custom_generate/generate.py: DeCoRe in `generate` of transformers, beside our engine and beside copies of a model
whose output projections have zeros for the masked heads."""

import copy
import json
from pathlib import Path

import pytest
import torch

import decore
from model import Transformer
from tests.checkpoints import TINY, write_checkpoint

transformers = pytest.importorskip("transformers", reason="needs transformers")
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

from custom_generate.generate import generate  # noqa: E402

HEADS = [(1, 0), (1, 3), (2, 2)]
PROMPTS = [[5, 9, 17, 33, 60, 3, 8, 44, 71, 20, 11, 90], [7, 30, 31, 32], [40]]
GREEDY = dict(do_sample=False, max_new_tokens=8, pad_token_id=0)
FOLDER = dict(custom_generate=str(Path(__file__).parents[1]), trust_remote_code=True, heads=HEADS)
WINDOWS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
HYBRID = dict(layer_types=["conv", "full_attention", "full_attention"])
FAMILIES = {"gemma2": dict(head_dim=12, query_pre_attn_scalar=12, sliding_window=6), "phi3": {}, "olmo2": {},
            "gemma3_text": dict(WINDOWS, head_dim=12, query_pre_attn_scalar=12), "cohere2": WINDOWS, "gpt_neox": {},
            "gpt_oss": WINDOWS | EXPERTS, "qwen3_moe": EXPERTS, "lfm2": HYBRID}


def random_model(family):
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **TINY | dict(pad_token_id=0) | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        p.data.normal_(1 if p.ndim == 1 else 0, 0.25)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path_factory.mktemp("llama"))).eval()


def new_tokens(model, prompts=PROMPTS[:1], **more):
    """The new tokens of prompts that are padded on the left with -1, which the attention mask leaves out."""
    ids = torch.tensor([[-1] * (max(map(len, prompts)) - len(p)) + p for p in prompts])
    inputs = dict(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long())
    return model.generate(**inputs, **FOLDER | GREEDY | more)[:, ids.shape[1]:].tolist()


@pytest.mark.parametrize("mask", ["output", "query"])
@pytest.mark.parametrize("family", ["llama3", "mistral-window", "qwen2", "qwen3"])
def test_a_padded_batch_gives_the_tokens_of_our_engine(tmp_path, family, mask):
    own = Transformer.load(write_checkpoint(tmp_path, family))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for settings in (dict(method="masked"), dict(method="decore-static", alpha=1.5), dict(scale_alpha=True),
                     dict(alpha_cap=0.7), {}):
        settings |= dict(heads=HEADS, mask=mask, max_new_tokens=8)
        expected = decore.generate(own, PROMPTS, eos_ids=(), **settings)
        assert new_tokens(model, PROMPTS, **settings) == [g.ids for g in expected]


@torch.no_grad()
def two_passes(model, alpha=decore.entropy):
    """Tokens and scores of DeCoRe with a model for each row: the masked one has zeros in its output projections."""
    masked, ids = copy.deepcopy(model), torch.tensor(PROMPTS[:1])
    for layer, head in HEADS:
        projections = dict(masked.get_decoder().layers[layer].named_modules())
        names = ("self_attn.o_proj", "self_attn.out_proj", "attention.dense")
        projection = next(projections[name] for name in names if name in projections)
        projection.weight.data.unflatten(1, (4, -1))[:, head] = 0
    caches = [DynamicCache(config=model.config)]
    model(ids[:, :-1], past_key_values=caches[0])
    caches, tokens, scores = caches + copy.deepcopy(caches), [ids[:, -1:]], []
    for _ in range(8):
        rows = zip((model, masked), caches, strict=True)
        base, other = (m(tokens[-1], past_key_values=c).logits[0, -1].log_softmax(-1) for m, c in rows)
        scores.append(decore.contrast(base, other, alpha(base)))
        tokens.append(scores[-1].argmax().view(1, 1))
    return torch.cat(tokens[1:], 1)[0], torch.stack(scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_equal_two_passes_of_which_one_has_zeroed_projections(family):
    model, ids = random_model(family), torch.tensor(PROMPTS[:1])
    for settings, alpha in (({}, decore.entropy), (dict(method="decore-static"), lambda _: torch.tensor(0.5)),
                            (dict(method="masked"), lambda _: torch.tensor(-1.0))):
        tokens, scores = two_passes(model, alpha)
        out = model.generate(ids, **FOLDER, **GREEDY, **settings, output_logits=True, return_dict_in_generate=True)
        assert out.sequences[0, 12:].tolist() == tokens.tolist()
        torch.testing.assert_close(torch.cat(out.logits), scores, atol=2e-3, rtol=1e-3)  # α is up to 4.5


def test_log_softmax_is_float32_in_a_bfloat16_model(llama):
    out = copy.deepcopy(llama).bfloat16().generate(torch.tensor(PROMPTS[:1]), **FOLDER, **GREEDY, method="masked",
                                                   output_logits=True, return_dict_in_generate=True)
    assert (out.logits[0] != out.logits[0].bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("way", [".", generate], ids=["relative path", "callable"])
def test_other_ways_to_name_the_function_give_the_same_tokens(llama, monkeypatch, way):
    monkeypatch.chdir(FOLDER["custom_generate"])
    assert new_tokens(llama, custom_generate=way) == new_tokens(llama)


def test_options_of_generate_keep_their_meaning(llama):
    class Streamer:
        seen = []

        def put(self, ids):
            self.seen += ids.flatten().tolist()

        def end(self):
            self.seen.append("end")

    plain, streamer = new_tokens(llama)[0], Streamer()
    new_tokens(llama, streamer=streamer)
    assert streamer.seen == PROMPTS[0] + plain + ["end"]
    assert plain[0] not in new_tokens(llama, suppress_tokens=plain[:1])[0]
    assert new_tokens(llama, eos_token_id=plain[2])[0] == plain[:plain.index(plain[2]) + 1]
    enough = transformers.StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] == 15])])
    assert new_tokens(llama, stopping_criteria=enough)[0] == plain[:3]
    assert new_tokens(llama, do_sample=True, top_k=1, num_return_sequences=3) == [plain] * 3
    out = llama.generate(torch.tensor(PROMPTS[:1]), **FOLDER, **GREEDY, output_scores=True, output_logits=True,
                         return_dict_in_generate=True, repetition_penalty=2.0)
    assert all((s <= x).all() for s, x in zip(out.scores, out.logits, strict=True)) and len(out.scores) == 8


def test_a_cache_of_an_earlier_turn_gives_the_tokens_of_the_whole_text(llama):
    cache, text = DynamicCache(), PROMPTS[0]
    for more in ([], [3, 4], []):                   # the last turn: the cache holds all tokens but one
        text = text + more
        answer = new_tokens(llama, [text], past_key_values=cache)[0]
        assert answer == new_tokens(llama, [text])[0]
        text = text + answer
    expected = llama.generate(torch.tensor([text]), **GREEDY)
    assert llama.generate(torch.tensor([text]), past_key_values=cache, **GREEDY).tolist() == expected.tolist()


@pytest.mark.parametrize("end", [ValueError, KeyboardInterrupt])
def test_the_model_is_as_before_after_each_way_to_end(llama, end):
    def stop(ids, scores):
        raise end

    before, greedy = dict(vars(llama)), llama.generate(torch.tensor(PROMPTS[:1]), **GREEDY).tolist()
    new_tokens(llama)
    with pytest.raises(end):
        new_tokens(llama, stopping_criteria=transformers.StoppingCriteriaList([stop]))
    assert vars(llama) == before and not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())
    assert llama.generate(torch.tensor(PROMPTS[:1]), **GREEDY).tolist() == greedy


@pytest.mark.parametrize("options, name", [
    (dict(num_beams=2), "assistant"), (dict(prompt_lookup_num_tokens=2), "assistant"),
    (dict(use_cache=False), "use_cache"), (dict(cache_implementation="static"), "cache_implementation"),
    (dict(prefill_chunk_size=4), "prefill_chunk_size"), (dict(guidance_scale=1.5), "guidance_scale"),
    (dict(output_attentions=True), "output_attentions"), (dict(output_hidden_states=True), "output_hidden_states"),
    (dict(inputs_embeds=torch.ones(1, 12, 32)), "inputs_embeds"), (dict(synced_gpus=True), "synced_gpus"),
    (dict(method="greedy"), "greedy"), (dict(mask="both"), "both"), (dict(alpha=1.0), "alpha"),
    (dict(method="decore-static", alpha=float("nan")), "nan"), (dict(method="masked", alpha_cap=1.0), "alpha_cap"),
    (dict(heads=None), "None"), (dict(heads=[]), "heads"), (dict(heads=(1, 0)), "heads"), (dict(heads=["1-4"]), "1-4"),
    (dict(heads=[(1, 0), "1-0"]), "1-0"), (dict(num_heads=2), "num_heads"), (dict(heads="no-file"), "no-file")])
def test_what_cannot_keep_its_meaning_is_refused_in_a_line(llama, options, name):
    with pytest.raises(ValueError, match=name) as error:
        new_tokens(llama, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 160


def test_a_static_cache_that_is_passed_in_is_refused(llama):
    with pytest.raises(ValueError, match="DynamicCache"):
        new_tokens(llama, past_key_values=transformers.StaticCache(config=llama.config, max_cache_len=32))


@pytest.mark.parametrize("wrap", [lambda scores: {"scores": scores}, lambda s: {h: [x, x + 2] for h, x in s.items()}])
def test_the_best_heads_of_a_file_are_masked(llama, tmp_path, wrap):
    scores = {f"{layer}-{head}": -layer - head / 10 for layer in range(3) for head in range(4)}
    (tmp_path / "heads.json").write_text(json.dumps(wrap(scores | {f"{la}-{h}": 9 for la, h in HEADS})))
    assert new_tokens(llama, heads=tmp_path / "heads.json", num_heads=3) == new_tokens(llama)
    (tmp_path / "heads.json").write_text(json.dumps(wrap(scores | {"3-0": 1})))
    with pytest.raises(ValueError, match="13 heads"):
        new_tokens(llama, heads=str(tmp_path / "heads.json"))


@pytest.mark.parametrize("family", ["phi3", "olmo2"])            # fused; normalised over all heads together
def test_queries_that_cannot_be_masked_one_by_one_are_refused(family):
    with pytest.raises(ValueError, match="query"):
        new_tokens(random_model(family), mask="query")


@pytest.mark.parametrize("change", ["bypassed", "more heads", "renamed"])
def test_a_mask_without_effect_is_refused(llama, change):
    model = copy.deepcopy(llama)
    attention = model.model.layers[1].self_attn
    if change == "bypassed":
        attention.o_proj.__class__ = type("Bypassed", (torch.nn.Linear,), {"__call__": torch.nn.Linear.forward})
    elif change == "more heads":
        model.config.num_attention_heads = 8
    else:
        attention.projection = attention.o_proj
        del attention.o_proj
    with pytest.raises(ValueError, match="layer 1"):
        new_tokens(model)
