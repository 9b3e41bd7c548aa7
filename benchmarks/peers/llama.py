"""llama.cpp's speed on the same shape: builds `llama-bench`, writes random weights as GGUF, decodes greedily.

    python -m benchmarks.peers.llama FOLDER [--shape 0.5b] [--prompts 512 4096] [--new 32] [--rounds 5] [--threads N]

What FOLDER already holds is not made again, so a second run only measures; `benchmarks.decode --llama FOLDER` runs what
is there in turns with ours. The source is the sdist of llama-cpp-python (77 MB from the package index), which brings
llama.cpp along. Needs pip, cmake, a C++ compiler and `pip install gguf`; a quarter of an hour on one core.

llama.cpp keeps its cache in float16 whatever the weights are; ours has the dtype of the weights.
"""

import argparse
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import torch

import cli
from benchmarks.shapes import SHAPES, find_shape
from runtime.config import DTYPES

TENSORS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",             # the checkpoint's → GGUF's
           "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def build(folder, jobs=1):
    """Fetch the sdist and build folder/build/bin/llama-bench."""
    run(sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "llama-cpp-python", "-d", folder)
    sdist = max(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    run("cmake", "-S", source, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
        "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")
    run("nice", "-n", "19", "cmake", "--build", folder / "build", "--target", "llama-bench", "-j", jobs)


def run(*command):
    try:
        subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    except FileNotFoundError:
        raise FileNotFoundError(f"{command[0]} is not installed here, and building llama.cpp needs it") from None
    except subprocess.CalledProcessError as error:
        raise ChildProcessError(f"{' '.join(map(str, command[:4]))} … ended with status {error.returncode}") from None


def write_gguf(path, c, dtype):
    """Random weights of the shape `c` as a GGUF file; norms and biases in float32, as llama.cpp has them."""
    import gguf

    f32 = gguf.GGMLQuantizationType.F32
    kind = {torch.float32: f32, torch.bfloat16: gguf.GGMLQuantizationType.BF16,
            torch.float16: gguf.GGMLQuantizationType.F16}[dtype]
    writer = gguf.GGUFWriter(path, c.model_type)
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_tokenizer_model("none")
    torch.manual_seed(0)

    def add(name, *shape):
        values, of = (torch.randn(shape) * 0.02).numpy(), kind if len(shape) == 2 else f32
        writer.add_tensor(name, gguf.quants.quantize(values, of), raw_dtype=of)

    H, G, D = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.d_model
    add("token_embd.weight", c.vocab_size, D)
    if not c.tied_embeddings:
        add("output.weight", c.vocab_size, D)
    add("output_norm.weight", D)
    shapes = dict(q=(H, D), k=(G, D), v=(G, D), o=(D, H), gate=(c.d_ff, D), up=(c.d_ff, D), down=(D, c.d_ff))
    for layer in range(c.n_layers):
        for name, shape in shapes.items():
            add(f"blk.{layer}.{TENSORS[name]}.weight", *shape)
            if c.qkv_bias and name in "qkv":
                add(f"blk.{layer}.{TENSORS[name]}.bias", shape[0])
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{norm}.weight", D)
    part = path.with_suffix(".part")
    writer.write_header_to_file(part)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def places(folder, shape, dtype):
    """Where llama-bench and the weights are, or will be."""
    return folder / "build" / "bin" / "llama-bench", folder / f"{shape}-{dtype}.gguf"


def made(folder, shape, dtype):
    """Both, which must be there."""
    for path in places(folder, shape, dtype):
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: python -m benchmarks.peers.llama {folder} --shape {shape} "
                                    f"--dtypes {dtype} makes it")
    return places(folder, shape, dtype)


def bench(program, weights, prompt, new, threads, rounds=1):
    """Seconds of decoding `new` tokens after `prompt` others, once per round: what llama-bench times itself."""
    command = [program, "-m", weights, "-p", 0, "-n", new, "-d", prompt, "-t", threads, "-r", rounds, "-o", "json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise ChildProcessError(f"llama-bench ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return [nanoseconds / 1e9 for nanoseconds in json.loads(done.stdout)[0]["samples_ns"]]


def main():
    p = cli.parser(__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("folder", type=Path, help="where the source, the program and the weights are kept")
    p.add_argument("--shape", default="0.5b", help=f"one of {', '.join(SHAPES)}")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    p.add_argument("--prompts", type=cli.positive, nargs="+", default=[512, 4096])
    p.add_argument("--new", type=cli.positive, default=32)
    p.add_argument("--rounds", type=cli.positive, default=5)
    p.add_argument("--threads", type=cli.positive, default=torch.get_num_threads())
    p.add_argument("--jobs", type=cli.positive, default=1, help="of the compiler")
    args = p.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for dtype in args.dtypes:
        program, weights = places(args.folder, args.shape, dtype)
        if not program.exists():
            build(args.folder, args.jobs)
        if not weights.exists():
            write_gguf(weights, find_shape(args.shape), DTYPES[dtype])
        for prompt in args.prompts:
            speeds = sorted(args.new / s for s in bench(program, weights, prompt, args.new, args.threads, args.rounds))
            print(f"{dtype:9} prompt {prompt:5} {speeds[len(speeds) // 2]:8.2f} tokens/s "
                  f"({speeds[0]:.2f} to {speeds[-1]:.2f})", flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
