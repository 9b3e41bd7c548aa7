"""Builds llama.cpp's `llama-bench` and random weights of a shape as GGUF, for `benchmarks.decode --llama FOLDER`.

    python -m benchmarks.llama FOLDER [--shape 0.5b] [--dtypes float32 bfloat16]

The source is that of the package llama-cpp-python (77 MB). Needs pip, cmake, a C++ compiler and `pip install gguf`; a
quarter of an hour on one core. llama.cpp's cache is in float16 whatever the weights are; ours has their dtype."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import torch

import cli
from benchmarks.shapes import find_shape
from runtime.config import DTYPES

TENSORS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",             # the checkpoint's → GGUF's
           "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def build(folder):
    run(sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps", "llama-cpp-python",
        "-d", folder)
    sdist = max(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    run("cmake", "-S", source, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
        "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")
    run("cmake", "--build", folder / "build", "--target", "llama-bench")


def run(*command):
    """Run a program → its standard output."""
    try:
        return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise ChildProcessError(f"{command[0]} ended with status {error.returncode}; its messages are above") from None


def write_gguf(path, c, dtype):
    """Random weights of the shape `c`; norms and biases in float32, as llama.cpp stores them."""
    import gguf

    f32 = gguf.GGMLQuantizationType.F32
    kind = {torch.float32: f32, torch.bfloat16: gguf.GGMLQuantizationType.BF16,
            torch.float16: gguf.GGMLQuantizationType.F16}[dtype]
    writer = gguf.GGUFWriter(path, c.model_type)
    for name, value in dict(vocab_size=c.vocab_size, context_length=c.max_positions, embedding_length=c.d_model,
                            block_count=c.n_layers, feed_forward_length=c.d_ff, head_count=c.n_heads,
                            head_count_kv=c.n_kv_heads, key_length=c.head_dim, value_length=c.head_dim,
                            layer_norm_rms_eps=c.norm_eps, rope_freq_base=c.rope_theta, tokenizer_model="none").items():
        getattr(writer, f"add_{name}")(value)

    def add(name, *shape):
        values, of = (torch.randn(shape) * 0.02).numpy(), kind if len(shape) == 2 else f32
        writer.add_tensor(name, gguf.quants.quantize(values, of), raw_dtype=of)

    H, G, D = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.d_model
    shapes = dict(q=(H, D), k=(G, D), v=(G, D), o=(D, H), gate=(c.d_ff, D), up=(c.d_ff, D), down=(D, c.d_ff))
    for name in ["token_embd"] + ["output"] * (not c.tied_embeddings):
        add(f"{name}.weight", c.vocab_size, D)
    add("output_norm.weight", D)
    for layer in range(c.n_layers):
        for name, shape in shapes.items():
            add(f"blk.{layer}.{TENSORS[name]}.weight", *shape)
            if c.qkv_bias and name in "qkv":
                add(f"blk.{layer}.{TENSORS[name]}.bias", shape[0])
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{norm}.weight", D)
    writer.write_header_to_file(path.with_suffix(".part"))
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)


def paths(folder, shape, dtype):
    """llama-bench and the weights."""
    return folder / "build" / "bin" / "llama-bench", folder / f"{shape}-{dtype}.gguf"


def timer(folder, shape, dtype, prompt, new):
    """A function → the seconds in which llama-bench decodes `new` tokens after a prompt."""
    program, weights = paths(folder, shape, dtype)
    if not (program.exists() and weights.exists()):
        raise FileNotFoundError(f"{program} or {weights} is missing; make both by python -m benchmarks.llama {folder} "
                                f"--shape {shape} --dtypes {dtype}")
    command = (program, "-m", weights, "-p", 0, "-n", new, "-d", prompt, "-t", torch.get_num_threads(), "-r", 1,
               "-o", "json")
    return lambda: json.loads(run(*command))[0]["samples_ns"][0] / 1e9


def main():
    p = cli.parser(__doc__.splitlines()[0])
    p.add_argument("folder", type=Path)
    p.add_argument("--shape", default="0.5b")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    args = p.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for dtype in args.dtypes:
        program, weights = paths(args.folder, args.shape, dtype)
        if not program.exists():
            build(args.folder)
        if not weights.exists():
            write_gguf(weights, find_shape(args.shape), DTYPES[dtype])


if __name__ == "__main__":
    sys.exit(cli.run(main))
