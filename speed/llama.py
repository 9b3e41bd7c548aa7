"""llama.cpp as a contestant of `speed.decode`: its llama-bench decodes a model's weights, stored as GGUF.

The source comes from the package llama-cpp-python (77 MB). Needs pip, cmake, a C++ compiler and `pip install gguf`. The
build takes a quarter of an hour on one core. llama.cpp's cache is in float16 for all dtypes; this project's cache has
the dtype of the weights."""

import json
import shutil
import subprocess
import sys

import torch

from runtime.weights import named_tensors


def build(folder):
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps",
                    "llama-cpp-python", "-d", folder], check=True, stdout=sys.stderr)
    shutil.unpack_archive(max(folder.glob("llama_cpp_python-*.tar.gz")), folder, filter="data")
    source = max(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    options = dict(CMAKE_BUILD_TYPE="Release", GGML_NATIVE="ON", LLAMA_CURL="OFF", LLAMA_BUILD_TESTS="OFF",
                   LLAMA_BUILD_SERVER="OFF", LLAMA_BUILD_EXAMPLES="OFF")
    for command in (["-S", source, "-B", folder / "build", *(f"-D{name}={value}" for name, value in options.items())],
                    ["--build", folder / "build", "--target", "llama-bench", "--parallel"]):
        subprocess.run(["cmake", *command], check=True, stdout=sys.stderr)


def write_gguf(path, model):
    """Store a model's weights; norms and biases in float32, as llama.cpp does."""
    import gguf

    c, writer = model.config, gguf.GGUFWriter(path, model.config.model_type)
    for name, value in dict(vocab_size=c.vocab_size, context_length=c.max_positions, embedding_length=c.d_model,
                            block_count=c.n_layers, feed_forward_length=c.d_ff, head_count=c.n_heads,
                            head_count_kv=c.n_kv_heads, key_length=c.head_dim, value_length=c.head_dim,
                            layer_norm_rms_eps=c.norm_eps, rope_freq_base=c.rope_theta, tokenizer_model="none").items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[c.model_type.upper()], c.n_layers)
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    for name, x in named_tensors(model).items():
        kind = gguf.GGMLQuantizationType[kinds[model.dtype] if x.dim() == 2 else "F32"]
        data = gguf.quants.quantize(x.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_bench(path, model, prompt, new):
    """llama.cpp as a contestant. path: its file of the model. It and llama-bench, in the same folder, are made once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    program = path.parent / "build" / "bin" / "llama-bench"
    if not program.exists():
        build(path.parent)
    if not path.exists():
        write_gguf(path, model)
    command = [program, "-m", path, "-p", "0", "-n", str(new), "-d", str(len(prompt)), "-r", "1", "-o", "json",
               "-t", str(torch.get_num_threads())]
    return lambda: ([], None, json.loads(subprocess.check_output(command))[0]["samples_ns"][0] / 1e9)
