"""Builds llama.cpp's llama-bench and writes random weights as GGUF, for `benchmarks.decode --llama FOLDER`.

    python -m benchmarks.llama FOLDER [--shape 0.5b] [--dtypes float32 bfloat16]

The source comes from the package llama-cpp-python (77 MB). Needs pip, cmake, a C++ compiler and `pip install gguf`. The
build takes a quarter of an hour on one core. llama.cpp's cache is in float16 for all dtypes; this project's cache has
the dtype of the weights."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import torch

import cli
from benchmarks.shapes import SHAPES, random_model
from runtime.config import DTYPES
from runtime.weights import named_tensors

KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def build(folder):
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps",
                    "llama-cpp-python", "-d", folder], check=True)
    sdist = max(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    subprocess.run(["cmake", "-S", source, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
                    "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF",
                    "-DLLAMA_BUILD_EXAMPLES=OFF"], check=True)
    subprocess.run(["cmake", "--build", folder / "build", "--target", "llama-bench", "--parallel"], check=True)


def write_gguf(path, c, dtype):
    """Random weights of the configuration `c`; norms and biases in float32, as llama.cpp stores them."""
    import gguf

    writer = gguf.GGUFWriter(path, c.model_type)
    for name, value in dict(vocab_size=c.vocab_size, context_length=c.max_positions, embedding_length=c.d_model,
                            block_count=c.n_layers, feed_forward_length=c.d_ff, head_count=c.n_heads,
                            head_count_kv=c.n_kv_heads, key_length=c.head_dim, value_length=c.head_dim,
                            layer_norm_rms_eps=c.norm_eps, rope_freq_base=c.rope_theta, tokenizer_model="none").items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[c.model_type.upper()], c.n_layers)
    for name, x in named_tensors(random_model(c, dtype=DTYPES[dtype])).items():
        kind = gguf.GGMLQuantizationType[KINDS[dtype] if x.dim() == 2 else "F32"]
        data = gguf.quants.quantize(x.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def program(folder):
    return folder / "build" / "bin" / "llama-bench"


def timer(folder, shape, dtype, prompt, new):
    """A function that returns the seconds in which llama-bench decodes `new` tokens after a prompt."""
    weights = folder / f"{shape}-{dtype}.gguf"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} is missing; run python -m benchmarks.llama {folder} --shape {shape} "
                                f"--dtypes {dtype}")
    command = [program(folder), "-m", weights, "-p", "0", "-n", str(new), "-d", str(prompt), "-t",
               str(torch.get_num_threads()), "-r", "1", "-o", "json"]
    return lambda: json.loads(subprocess.check_output(command))[0]["samples_ns"][0] / 1e9


def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("folder", type=Path)
    p.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(KINDS))
    args = p.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not program(args.folder).exists():
        build(args.folder)
    for dtype in args.dtypes:
        write_gguf(args.folder / f"{args.shape}-{dtype}.gguf", SHAPES[args.shape], dtype)


if __name__ == "__main__":
    sys.exit(cli.run(main))
