"""Threads that run one model of transformers at the same time, as servers do."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import integrations
from decoders.baselines import DoLa
from decore import DeCoRe, Greedy, Masked, generate
from hf import HFModel
from hf.attention import eager
from tests.checkpoints import random_ids
from tests.families import random_model

PROMPT = random_ids(30, seed=1)
ONES = torch.ones(1, 30, dtype=torch.long)
PLAIN = dict(do_sample=False, max_new_tokens=12, attention_mask=ONES, pad_token_id=0)
HEADS = [(0, 2), (1, 0), (1, 3), (2, 2)]
N = dict(max_new_tokens=12, eos_ids=())


@pytest.fixture(scope="module")
def hf():
    model = random_model("llama")
    for p in model.parameters():
        p.data *= 1.5
    return model


def in_hf_generate(hf_generate, **more):
    return lambda: hf_generate(inputs=torch.tensor([PROMPT]), **PLAIN, **more)[0, 30:].tolist()


def in_generate(model, method):
    return lambda: generate(model, PROMPT, method, **N).ids


@pytest.fixture(scope="module")
def calls(hf):
    model = HFModel(hf)
    # Loaded once: each hf.generate(custom_generate=FOLDER) parses the folder's code, and ast.parse
    # of Python 3.11 fails at times while another thread parses.
    custom = hf.load_custom_generate(integrations.FOLDER, trust_remote_code=True)
    custom = partial(custom, model=hf)
    return [
        in_hf_generate(hf.generate),
        in_hf_generate(custom, heads=HEADS),
        in_hf_generate(custom, heads=HEADS[:2], method="masked"),
        in_generate(model, Greedy()),
        in_generate(model, Masked(HEADS[1:])),
        in_generate(model, DoLa("low")),
        lambda: in_generate(HFModel(hf), DeCoRe(HEADS, alpha=0.5))(),
    ]


def test_threads_that_share_a_model_get_the_texts_of_each_alone(calls):
    alone = [call() for call in calls]
    assert len({*map(tuple, alone)}) >= 5  # the methods differ
    with ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(2):
            assert [*pool.map(lambda call: call(), calls)] == alone


def test_attention_is_eager_in_one_thread_alone(hf):
    def implementation():
        return hf.config._attn_implementation

    with eager(hf.model), ThreadPoolExecutor(1) as pool:
        assert (implementation(), pool.submit(implementation).result()) == ("eager", "sdpa")
    assert implementation() == "sdpa"
