"""DeCoRe inside vLLM beside our own engine, whose tokens vllm_tokens.py writes.

It runs in the environment that .ci/vllm makes of requirements-vllm.txt. Most engines start in this
process, in seconds."""

import gc
import importlib.metadata
import inspect
import json
import logging
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.integrations.vllm_tokens import HEADS, METHODS, N
from tests.tables import each

ROOT = Path(__file__).parents[2]
os.environ |= dict(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
vllm = pytest.importorskip("vllm", reason="needs the environment of requirements-vllm.txt")

import decore_heads  # noqa: E402
import decore_vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.models.llama import LlamaForCausalLM  # noqa: E402
from vllm.sampling_params import BeamSearchParams  # noqa: E402
from vllm.utils.network_utils import get_open_port  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

OPTIONS = dict(
    dtype="float32", max_model_len=256, max_num_seqs=8, block_size=32, kv_cache_memory_bytes=1 << 25
)
IN_PROCESS = dict(enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=False)
PLAIN = {"decore": False}
GREEDY = dict(temperature=0, max_tokens=N, ignore_eos=True, detokenize=False)
DRAFTS = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
# Model Runner V2 is made for GPUs: here its Triton kernels are interpreted.
RUNNER_V2 = """
import json, os, sys, types
os.environ |= dict(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
import triton.backends
driver = types.SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
from tests.integrations import test_vllm
prompts = json.load(open("tokens.json"))["prompts"]
with test_vllm.start(".") as llm:
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    tokens = test_vllm.decode(llm, prompts, prompts)
json.dump(tokens, open("v2.json", "w"))
"""


def refused(folder, words, **options):
    """The engine does not start, and says why in one line."""
    one_line = rf"\A.*{words}.*\Z"
    with pytest.raises(ValueError, match=one_line), start(folder, **options):
        pass


@contextmanager
def start(folder, family="llama3", on=True, settings=None, **options):
    settings = {"decore": {"heads": HEADS} | (settings or {})} if on else {}
    options = OPTIONS | IN_PROCESS | options
    llm = LLM(f"{folder}/{family}", additional_config=settings, **options)
    yield llm
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def decode(llm, prompts, plain=(), **more):
    """Greedy decoding of the contrasted logits, and without DeCoRe for the plain prompts."""
    inputs = [dict(prompt_token_ids=prompt) for prompt in [*prompts, *plain]]
    more |= GREEDY
    params = [SamplingParams(**more)] * len(prompts)
    params += [SamplingParams(**more, extra_args=PLAIN)] * len(plain)
    return [list(o.outputs[0].token_ids) for o in llm.generate(inputs, params, use_tqdm=False)]


def of_request(settings):
    """Settings as a request gives them, in `extra_args`."""
    named = {f"decore_{name}": value for name, value in settings.items()}
    if "heads" in settings:
        named["decore_heads"] = ",".join(f"{layer}-{head}" for layer, head in settings["heads"])
    return named


def metric(llm, name):
    return {metric.name: metric for metric in llm.get_metrics()}[f"vllm:{name}"].value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    python = os.environ.get("DECORE_PYTHON", sys.executable)
    module = "tests.integrations.vllm_tokens"
    subprocess.run([python, "-m", module, folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return json.loads((folder / "tokens.json").read_text())


@pytest.mark.parametrize("method", ["query", "gain"])
def test_engines_choose_our_tokens_and_plain_requests_greedy_ones(folder, ours, method):
    prompts = ours["prompts"]
    options = dict(settings=METHODS[method], max_num_batched_tokens=48)  # prompts in chunks
    with start(folder, **options) as llm:
        assert decode(llm, prompts, prompts) == ours[method] + ours["greedy"]


def test_requests_choose_method_alpha_and_heads_side_by_side(folder, ours):
    """The engine's settings are those of a request that gives none."""
    changes = {}
    for name, settings in METHODS.items():
        changes[name] = of_request({"method": "decore-entropy"} | settings)
    changes |= {"static": {}, "greedy": PLAIN}
    del changes["query"]
    inputs, params, expected = [], [], []
    for i, prompt in enumerate(ours["prompts"]):
        for name, change in changes.items():
            inputs.append(dict(prompt_token_ids=prompt))
            params.append(SamplingParams(**GREEDY, extra_args=change))
            expected.append(ours[name][i])
    with start(folder, settings=METHODS["static"], max_num_batched_tokens=48) as llm:
        out = llm.generate(inputs, params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in out] == expected


@pytest.mark.parametrize("family", ["mistral-window", "qwen3", "qwen3_moe"])
def test_families_choose_our_tokens(folder, ours, family):
    with start(folder, family) as llm:
        assert decode(llm, ours["prompts"]) == ours[family]


@pytest.mark.weights
@pytest.mark.skipif(not os.environ.get("DECORE_WEIGHTS"), reason="DECORE_WEIGHTS is no folder")
def test_a_trained_model_writes_our_tokens_with_the_heads_of_its_name(ours):
    prompts, tokens, greedy = ours["trained"]
    assert tokens != greedy
    options = dict(settings=dict(heads=None), kv_cache_memory_bytes=1 << 28)
    with start(os.environ["DECORE_WEIGHTS"], "", **options) as llm:
        assert decode(llm, prompts, prompts) == tokens + greedy


def test_preempted_requests_choose_our_tokens(folder, ours):
    with start(folder, num_gpu_blocks_override=10) as llm:
        assert decode(llm, ours["prompts"]) == ours["entropy"]
        assert metric(llm, "num_preemptions") > 0


def test_cached_prefixes_hold_keys_of_the_same_masking(folder, ours):
    prompts = ours["prompts"]
    with start(folder, enable_prefix_caching=True) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        for prompt, score in zip(prompts[2:], ours["scores"], strict=True):
            [out] = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)
            answer = zip(out.prompt_logprobs[-9:], prompt[-9:])
            log_p = sum(entry[token].logprob for entry, token in answer)
            assert log_p == pytest.approx(score, abs=1e-3)  # nats: sums of nine float32 logits
        assert decode(llm, prompts) == ours["entropy"]
        assert decode(llm, ours["longer"]) == ours["continued"]
        assert decode(llm, [], prompts) == ours["greedy"]
        assert metric(llm, "prefix_cache_hits") > 3 * 128


def test_hashes_of_masked_blocks_tell_what_is_masked_from_which_token():
    engine = decore_vllm.Settings(heads=HEADS)
    keys = set()
    for length in (1, 2, 32, 33, 34):
        for changes in {}, {"decore_heads": "0-1"}, {"decore_alpha_cap": 1}, PLAIN:
            params = SamplingParams(extra_args=changes)
            request = SimpleNamespace(sampling_params=params, num_prompt_tokens=length)
            keys.add(decore_vllm.salt(lambda *_: ((), 0), engine, request, 0, 32))
    # α does not matter to a cache. Of 33 and 34 tokens no block is masked.
    assert len(keys) == 2 * 3 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_carry_the_numbers_of_their_requests_in_every_precision(monkeypatch, dtype):
    class Model:
        def __call__(self, *, input_ids, positions):
            return input_ids[:, None].to(dtype)

        def compute_logits(self, hidden):
            return hidden

    context = SimpleNamespace(cudagraph_runtime_mode=SimpleNamespace(name="NONE"))
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    monkeypatch.setattr(decore_vllm, "contrast", lambda numbers, *_: numbers)
    first = decore_vllm.Settings(heads=[(0, 0)], method="decore-static", alpha=0.7)
    second = decore_vllm.Settings(heads=[(0, 1)], alpha_rule="gain", alpha_cap=1 / 3)
    model = decore_vllm.contrasting(Model)()
    model.sets, model.silent, model.silent_heads = {}, torch.zeros(3), len
    model.head_set, model.numbers = torch.zeros(8).long(), torch.zeros(8, 6)
    positions = torch.tensor([0, 1, 5, 0])  # two tokens of the first request, one of the second
    model.mark([(first, 1), (second, 5)], positions, torch.tensor([0, 2, 3]))
    assert model.head_set.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    hidden = model(input_ids=positions, positions=positions)
    numbers = torch.tensor([second.numbers(), first.numbers()])
    assert torch.equal(model.compute_logits(hidden[[2, 1]]), numbers)


def test_prompts_are_read_once_and_plain_requests_too(folder, ours, monkeypatch):
    passes = []
    forward = LlamaForCausalLM.forward

    def spy(self, input_ids, *args, **kw):
        passes.append(len(input_ids))
        return forward(self, input_ids, *args, **kw)

    with start(folder, enable_prefix_caching=False) as llm:
        monkeypatch.setattr(LlamaForCausalLM, "forward", spy)
        prompt = ours["prompts"][-1]
        decode(llm, [prompt])
        assert passes == [len(prompt) + 1] + [2] * (N - 1)
        passes.clear()
        decode(llm, [], [prompt])
        assert passes == [len(prompt)] + [1] * (N - 1)


def test_plain_requests_have_the_logits_of_stock_vllm_and_half_its_cache(folder, ours):
    prompts = ours["prompts"]
    penalty = dict(repetition_penalty=1.7)  # depends on the sign of logits
    with start(folder, on=False) as llm:
        stock = decode(llm, prompts, **penalty)
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    del llm
    assert stock != ours["greedy"]
    with start(folder) as llm:
        # Eight requests run at once: four with DeCoRe, and the first four without.
        assert decode(llm, prompts[4:], prompts, **penalty)[4:] == stock
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == blocks // 2


def test_drafts_of_n_grams_do_not_change_tokens(folder, ours, monkeypatch):
    """In a process of its own: vLLM cannot start another engine after this one."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with start(folder, speculative_config=DRAFTS) as llm:
        assert decode(llm, ours["prompts"]) == ours["entropy"]
        assert metric(llm, "spec_decode_num_drafts") > 0


def test_model_runner_v2_chooses_our_tokens(folder, ours):
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | dict(PYTHONPATH=paths)
    subprocess.run([sys.executable, "-c", RUNNER_V2], cwd=folder, env=environment, check=True)
    assert json.loads((folder / "v2.json").read_text()) == ours["entropy"] + ours["greedy"]


# ------------------------------------------------------------------------------- what is refused


REFUSED = """
{"pipeline_parallel_size": 2} | parallel_config.pipeline_parallel_size: see docs
{"load_format": "tensorizer"} | load_format: see docs
{"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 3}} | other than ngram: \
see docs
{"settings": {"head": 1}} | decore head: Extra inputs
{"settings": {"heads": [[9, 9]]}} | give a head file, or pairs from
{"settings": {"alpha": 1}} | alpha has no effect on decore-entropy
{"settings": {"alpha_rule": "gain", "method": "decore-static"}} | alpha_rule has no effect on \
decore-static
{"settings": {"num_heads": 0}} | decore num_heads:
{"settings": {"num_heads": 2}} | num_heads and measure have no effect without
{"settings": {"measure": "all"}} | measure: Input should be 'copy', 'write', 'mass'
{"settings": {"heads": [[true, 0]]}} | decore heads.*: Input should be a valid
"""


@each("options, words", REFUSED)
def test_engines_and_settings_that_do_not_fit_do_not_start(folder, options, words):
    refused(folder, words, **json.loads(options))


def test_a_measure_of_a_head_file_chooses_the_heads(tmp_path):
    path = tmp_path / "heads.json"
    effect = {"0-0": 0.1, "0-1": 0.3, "1-0": -9, "1-1": 0.2}
    path.write_text(json.dumps({"scores": dict.fromkeys(effect, 0), "effect": effect}))
    shape = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2)
    settings = decore_vllm.Settings(heads=str(path), measure="effect", num_heads=2)
    heads = decore_vllm.choose_heads(settings, SimpleNamespace(hf_text_config=shape))
    assert heads == ((0, 1), (1, 1))


def test_tokens_with_logits_of_minus_infinity_stay_out():
    z = torch.tensor([[1.0, 2.0, -torch.inf]])
    for settings in {}, dict(method="decore-static"), dict(alpha_rule="gain"):
        numbers = torch.tensor([decore_vllm.Settings(**settings).numbers()])
        logits = decore_vllm.contrast(numbers, {"gain"}, z, z * 2)
        expected = decore_vllm.contrast(numbers, {"gain"}, z[:, :2], z[:, :2] * 2)
        assert torch.equal(logits[:, :2], expected) and logits[0, 2] == -torch.inf


def test_an_alpha_of_zero_is_stock_vllm_under_every_penalty(folder, ours):
    penalties = dict(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3)
    penalties |= dict(min_tokens=3, logit_bias={5: 2.0})
    settings = dict(method="decore-static", alpha=0.0)
    with start(folder, settings=settings) as llm:
        prompts = ours["prompts"][:4]
        tokens = decode(llm, prompts, prompts, **penalties)
        assert tokens[:4] == tokens[4:]


def test_a_request_for_decore_is_refused_by_an_engine_without_it(folder):
    prompt = dict(prompt_token_ids=[1])
    with start(folder, on=False) as llm:
        for given in {"decore": 1}, {"decore_alpha_cap": 1}, {"decore_heads": [[0, 1]]}:
            params = SamplingParams(extra_args=given | {"other": 1}, detokenize=False)
            with pytest.raises(VLLMValidationError, match=f"without it: {[*given][0]} has no"):
                llm.generate([prompt], params)
        assert decode(llm, [], [[1]])


class Forgetful(SleepModeBackend):
    """Loses what a GPU's allocator loses at level 2: all tensors of the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def suspend(self, level):
        assert level == 2
        for module in self.model.modules():
            tensors = filter(torch.is_tensor, vars(module).values())
            for x in [*module.parameters(False), *module.buffers(False), *tensors]:
                x.data.zero_()

    def resume(self, tags):
        assert not self.model.lm_head.weight.any()


def test_the_plugins_tensors_survive_a_sleep_of_level_2(folder, ours, monkeypatch):
    """By the `sleep` and `wake_up` of vLLM's worker for GPUs, which that for CPUs leaves out."""

    def sleep(wrapper):
        worker = wrapper.worker
        worker._sleep_mode_backend = Forgetful(worker.model_runner.model)
        Worker.sleep(worker, 2)
        Worker.wake_up(worker)
        worker.reload_weights()

    prompt = ours["prompts"][-1]
    with start(folder, enable_prefix_caching=False) as llm:
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
        for _ in range(2):
            assert decode(llm, [prompt]) == ours["entropy"][-1:]
            llm.collective_rpc(sleep)


def test_the_plugin_does_not_install_vllm_over_a_build_of_another_name():
    assert importlib.metadata.requires("decore-vllm") is None


def test_other_versions_of_vllm_do_not_start(folder, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    refused(folder, "vLLM <0.34,>=0.32, not 0.99.0")


def test_a_version_that_was_only_read_says_so(folder, monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    log = logging.getLogger("vllm.decore")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, "vllm.decore")
    settings = {"decore": {"heads": HEADS}}
    EngineArgs(str(folder / "llama3"), additional_config=settings, **OPTIONS).create_engine_config()
    assert "DeCoRe: heads=((0, 1)," in caplog.text  # as docs/serving.md says
    assert "tested with vLLM 0.32, not 0.33.0" in caplog.text


@pytest.mark.parametrize("file, name", [("v1/request", "no_such"), ("v1/no_such", "Request")])
def test_an_engine_without_a_name_that_the_plugin_needs_does_not_start(
    folder, monkeypatch, file, name
):
    monkeypatch.setitem(decore_vllm.NAMES, file, name)
    refused(folder, rf"vLLM 0\.32\.0\S* does not have: use vLLM 0\.32 \({file}: {name}\)")


def test_an_attention_that_writes_its_cache_itself_is_refused(folder, monkeypatch):
    """vLLM 0.33 has such a model; its layers pass no keys to attention."""
    monkeypatch.setattr(Attention, "kv_cache_update_bypass", True, raising=False)
    refused(folder, "cannot mask heads")


def test_heads_are_listed_in_every_form(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text("[[0, 1], [1, 3]]")
    for heads in "0-1,1-3", ["0-1", "1-3"], [[0, 1], [1, 3]], str(path):
        assert decore_vllm.Settings(heads=heads).heads == ((0, 1), (1, 3))


def test_the_plugin_holds_the_head_files_and_their_reader():
    reader = (ROOT / "heads" / "reader.py").read_text()
    assert inspect.getsource(decore_heads) == reader
    copies, files = (
        {path.name: path.read_text() for path in folder.glob("*.json")}
        for folder in (decore_heads.FOLDER, ROOT / "heads/scores")
    )
    assert copies == files


def test_a_server_without_heads_ends_with_one_line(folder):
    result = subprocess.run(serve(folder, "no-such"), capture_output=True, text=True)
    assert result.returncode == 1
    [line] = [line for line in result.stderr.splitlines() if "no-such" in line]
    assert "FileNotFoundError: no-such is neither a head file nor a model" in line


def test_each_setting_that_would_give_other_tokens_is_refused_by_name():
    everything_on = Mock(additional_config={"decore": {}})
    names = """pipeline_parallel_size data_parallel_size decode_context_parallel_size lora_config
        use_ubatching prefill_context_parallel_size enable_batch_sharded_sampling use_mla
        kv_sharing_fast_prefill kv_transfer_config enable_prompt_embeds has_inner_state
        is_diffusion is_encoder_decoder pooler_config supports_multimodal_inputs
        speculative_config kv_events_config enable_return_routed_experts"""
    with pytest.raises(ValueError) as error:
        decore_vllm.create_engine_config(None, lambda args: everything_on)
    assert [name for name in names.split() if name not in str(error.value)] == []


def test_requests_whose_prompts_grow_are_refused(folder):
    prompt = dict(prompt_token_ids=[1])
    with start(folder) as llm:
        process = llm.llm_engine.input_processor.process_inputs
        with pytest.raises(VLLMValidationError, match="streamed inputs"):
            process("name", prompt, SamplingParams(), llm.supported_tasks, resumable=True)
        with pytest.raises(VLLMValidationError, match="beam search"):
            llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's caches of eight bits need AVX-512"
)
def test_caches_of_eight_bits_hold_the_masked_model_as_well_as_the_base(folder, ours, monkeypatch):
    """Without masked heads, the masked model is the base model."""
    prompts = ours["prompts"]
    with start(folder, on=False, kv_cache_dtype="fp8") as llm:
        stock = decode(llm, prompts)
    del llm
    monkeypatch.setattr(decore_vllm, "choose_heads", lambda *_: [])
    with start(folder, settings=dict(method="masked"), kv_cache_dtype="fp8") as llm:
        assert decode(llm, prompts, prompts) == stock + stock


# ----------------------------------------------------------- vllm serve: compiled, two ranks


def serve(folder, heads, **options):
    """The command that starts a server. vllm-cpu has no working command `vllm`."""
    options |= dict(model=folder / "llama3", generation_config="vllm")
    options["additional_config"] = json.dumps({"decore": {"heads": heads}})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


@pytest.fixture(scope="module")
def post(folder):
    """post(**body) → the response of a server that runs on two ranks, compiled."""
    port = get_open_port()
    url = f"http://127.0.0.1:{port}"
    options = dict(served_model_name="tiny", host="127.0.0.1", port=port, tensor_parallel_size=2)
    command = serve(folder, HEADS, **OPTIONS, **options)
    with open(folder / "serve.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(300):
            assert server.poll() is None, (folder / "serve.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health")
                break
            except OSError:
                time.sleep(1)

        def send(**body):
            options = dict(model="tiny", temperature=0, max_tokens=N, ignore_eos=True)
            body = json.dumps(options | dict(return_token_ids=True) | body).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body)
            request.add_header("Content-Type", "application/json")
            return urllib.request.urlopen(request)

        yield send
    finally:
        server.terminate()
        server.wait()


def answers(response):
    return [choice["token_ids"] for choice in json.load(response)["choices"]]


def test_a_server_answers_with_our_tokens_also_sampled_and_streamed(post, ours):
    for prompt, tokens in zip(ours["prompts"], ours["entropy"], strict=True):
        assert answers(post(prompt=prompt)) == [tokens]
    assert answers(post(prompt=prompt, n=3, temperature=1, top_k=1)) == 3 * [tokens]
    streamed = []
    for line in post(prompt=prompt, stream=True):
        if line.startswith(b"data: {"):
            streamed += json.loads(line[6:])["choices"][0]["token_ids"] or []
    assert streamed == tokens


def test_requests_can_leave_decore_out_or_guide_it(post, ours):
    prompt = ours["prompts"][-1]
    guide = {"regex": f"[a-h]{{{N}}}"}
    assert answers(post(prompt=prompt, vllm_xargs=PLAIN)) == [ours["greedy"][-1]]
    [guided] = answers(post(prompt=prompt, structured_outputs=guide))
    assert len(guided) == N and {*guided} <= {*range(64, 72)}  # the ids of a to h


@pytest.mark.parametrize("method", ["static", "masked", "heads", "gain"])
def test_requests_to_a_server_choose_their_settings(post, ours, method):
    settings = of_request(METHODS[method])
    assert answers(post(prompt=ours["prompts"][-1], vllm_xargs=settings)) == [ours[method][-1]]


REFUSED_REQUESTS = """
{"vllm_xargs": {"decore": "off"}} | decore='off' of a request: give false
{"vllm_xargs": {"decore": 0, "decore_alpha_cap": 1}} | alpha_cap has no effect on
{"vllm_xargs": {"decore_alpha": 1}} | alpha has no effect on decore-entropy
{"vllm_xargs": {"decore_alpha_cap": -1}} | alpha_cap: Input should be greater
{"vllm_xargs": {"decore_method": "cad"}} | method: Input should be 'decore-entropy'
{"vllm_xargs": {"decore_heads": "9-9"}} | heads ((9, 9),): give a head file, or pairs
{"vllm_xargs": {"decore_heads": "/etc/passwd"}} | heads of a request must be pairs
{"vllm_xargs": {"decore_heads": 1}} | heads of a request must be pairs
{"vllm_xargs": {"decore_heads": ["1"]}} | decore heads
{"vllm_xargs": {"decore_mask": "query"}} | a request cannot set mask, only alpha,
{"use_beam_search": true} | does not work with beam search
"""


@each("body, words", REFUSED_REQUESTS)
def test_requests_that_do_not_fit_are_answered_with_one_line(post, body, words):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(prompt=[1], **json.loads(body))
    answer = json.load(error.value)["error"]
    assert answer["code"] == 400
    assert answer["message"].startswith("decore") and words in answer["message"]
