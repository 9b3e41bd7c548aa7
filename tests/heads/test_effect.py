"""The effect of heads: against finite differences and against masking each head alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import cli
from decore import Row, Session, make_head_mask, pad
from heads.detect import score_run
from heads.measures import effects
from hf import HFModel
from miniature.data import make_split
from model import Transformer
from runtime import pack
from tests.checkpoints import random_ids, write_checkpoint
from tokenizer import Tokenizer

PROMPTS = [random_ids(23, seed=1), random_ids(1, seed=2), random_ids(70, seed=3)]
ANSWERS = [random_ids(3, seed=4), random_ids(1, seed=5), random_ids(4, seed=6)]
MEMORIES = [random_ids(2, seed=7), [], random_ids(5, seed=8)]
STEP = 0.02  # of the mask, since norms of transformers are in float32


@torch.no_grad()
def preference(reference, factors, prompt, answer, memory):
    """d of each of N models, [N] float64, by complete texts. factors: [N, L, H], which multiply the
    heads from the prompt's last token on."""
    hooks = []
    for i, layer in enumerate(reference.model.layers):

        def scale(_, args, i=i):
            [x] = args  # [N, T, H·K]
            by_head = x.unflatten(-1, (factors.shape[-1], -1)).clone()
            by_head[:, len(prompt) - 1 :] *= factors[:, i, None, :, None]
            return (by_head.flatten(-2),)

        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(scale))
    d = 0
    for ids, sign in ((answer, 1), (memory, -1)):
        text = torch.tensor([prompt + ids])
        log_p = reference(text.expand(len(factors), -1)).logits.log_softmax(-1)
        for t, token in enumerate(ids, len(prompt) - 1):
            d = d + sign * log_p[:, t, token]
    for hook in hooks:
        hook.remove()
    return d


def one_by_one(L, H, value):
    """[L·H, L, H]: in each model one other head is multiplied by a value."""
    return 1 + (value - 1) * torch.eye(L * H, dtype=torch.float64).view(-1, L, H)


@pytest.mark.parametrize("family", ["llama3.1", "mistral-window", "qwen2", "qwen3"])
def test_effects_are_the_finite_differences_of_the_head_mask(tmp_path, family):
    write_checkpoint(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    L, H = reference.config.num_hidden_layers, reference.config.num_attention_heads
    expected = []
    for texts in zip(PROMPTS, ANSWERS, MEMORIES):
        factors = torch.cat([one_by_one(L, H, 1 + n * STEP) for n in (-2, -1, 1, 2)])
        a, b, c, d = preference(reference, factors, *texts).view(4, L, H)
        expected.append((a - 8 * b + 8 * c - d) / (12 * STEP))  # exact up to STEP⁴
    for engine in Transformer, HFModel:
        found = effects(engine.load(tmp_path), PROMPTS, ANSWERS, MEMORIES)
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-3)
    # Without a memory, of a needle.
    found, _ = score_run(Transformer.load(tmp_path), PROMPTS[0], (4, 9), 1, measure="effect")
    [expected] = effects(HFModel.load(tmp_path), PROMPTS[:1], [PROMPTS[0][4:9]])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_effects_are_those_of_masking_each_head_where_the_logits_are_linear_in_it(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3", num_hidden_layers=1))
    model.layers[0].mlp.down.weight.zero_()
    model.norm.eps = 1e6  # divides by a constant
    model.norm.weight.mul_(1e3)
    prompt, [answer], [memory] = PROMPTS[0], ANSWERS[1:2], [[90]]
    rows = [[], *([(0, head)] for head in range(4)), [(0, head) for head in range(4)]]
    with torch.no_grad():
        cache = model.new_cache([len(prompt) - 1], 1, len(rows))
        model.prefill(pad([prompt[:-1]]), cache)
        logits = model(pad([prompt[-1:]]), cache, make_head_mask(rows, model))[:, 0, 0].double()
    d = logits[:, answer[0]] - logits[:, memory[0]]
    [found] = effects(model, [prompt], [answer], [memory])
    assert found.abs().min() > 1e-3
    torch.testing.assert_close(found[0], d[0] - d[1:-1], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.sum(), d[0] - d[-1], atol=1e-6, rtol=1e-4)


def test_on_a_trained_model_effects_rank_heads_as_masking_each_alone_does():
    model, tokenizer = Transformer.load(cli.MINIATURE), Tokenizer.load(cli.MINIATURE)
    L, H = model.config.n_layers, model.config.n_heads
    rows = [[], *([(i // H, i % H)] for i in range(L * H))]
    prompts, answers, memories, masked = [], [], [], torch.zeros(L * H)
    for item in make_split("conflict", 12, seed=1):
        prompt = tokenizer.encode(item.prompt)
        answer, memory = (
            tokenizer.encode(f"{item.prompt} {text}")[len(prompt) :][:1]
            for text in (item.answer, item.memory)
        )
        with torch.no_grad():
            cache = model.new_cache([len(prompt) - 1], 1, len(rows))
            model.prefill(pad([prompt[:-1]]), cache)
            z = model(pad([prompt[-1:]]), cache, make_head_mask(rows, model))[:, 0, 0]
        d = z[:, answer[0]] - z[:, memory[0]]
        masked += d[0] - d[1:]
        prompts.append(prompt), answers.append(answer), memories.append(memory)
    found = effects(model, prompts, answers, memories).sum(0).flatten().float()
    assert torch.corrcoef(torch.stack([found, masked]))[0, 1] > 0.85
    assert {*found.topk(3).indices.tolist()} == {*masked.topk(3).indices.tolist()}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("engine", [Transformer, HFModel])
@pytest.mark.parametrize("kind", [pack.Packed, pack.Filled])
def test_packed_layers_have_the_gradients_of_plain_ones(tmp_path, monkeypatch, engine, kind):
    write_checkpoint(tmp_path, "qwen2")  # biases, and an embedding that is the head too
    for dtype, least in ((torch.float32, 1 - 1e-9), (torch.bfloat16, 0.98)):
        plain = engine.load(tmp_path, dtype="float32")
        expected = effects(plain, PROMPTS, ANSWERS, MEMORIES).flatten()
        with monkeypatch.context() as change:
            change.setattr(pack, "KERNELS", {pack.processor(): {dtype: kind}})
            change.setattr(pack, "SMALL", 0)
            packed = engine.load(tmp_path, dtype=dtype)
        assert packed.kernel == kind.__name__.lower()
        found = effects(packed, PROMPTS, ANSWERS, MEMORIES).flatten()
        assert torch.corrcoef(torch.stack([found, expected]))[0, 1] > least
        assert abs(found.norm() / expected.norm() - 1) < (1e-5 if least > 0.99 else 0.1)


@pytest.mark.parametrize("engine", [Transformer, HFModel])
def test_effects_are_each_prompt_s_own_in_inference_mode_too_and_leave_the_cache(tmp_path, engine):
    write_checkpoint(tmp_path, "mistral-window")
    with torch.inference_mode():  # everything that is made here is an inference tensor
        model = engine.load(tmp_path)
        cache = Session([Row(model, PROMPTS)], 8).cache
        found = effects(model, PROMPTS, ANSWERS, MEMORIES, cache)
        ids = pad([prompt[-1:] for prompt in PROMPTS])
        logits = model(ids, cache)
        untouched = Session([Row(model, PROMPTS)], 8).cache
        torch.testing.assert_close(logits, model(ids, untouched), atol=0, rtol=0)
    for b, texts in enumerate(zip(PROMPTS, ANSWERS, MEMORIES)):
        [alone] = effects(model, *([ids] for ids in texts))
        torch.testing.assert_close(found[b], alone, atol=1e-5, rtol=1e-4)
    assert not effects(model, PROMPTS[:1], [[]]).any()


def test_of_the_prompt_the_backward_pass_keeps_its_keys_and_which_of_them_are_seen(tmp_path):
    model = Transformer.load(write_checkpoint(tmp_path, "llama3"))
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
