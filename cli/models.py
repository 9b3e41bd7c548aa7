"""Loads the models that the command line names."""

import os

SMALL = 1_000_000_000  # parameters up to which a CPU computes in float32 by default
TINY = 20_000_000  # parameters up to which a CPU computes with one thread by default


def load_models(args, shard=None):
    """(model, tokenizer, amateur or None) named by --model and --amateur."""
    model, tokenizer = load_model(args.model, args, shard)
    limit_threads(model)
    if not args.amateur:
        return model, tokenizer, None
    amateur, other = load_model(args.amateur, args, shard)
    if other.core.get_vocab() != tokenizer.core.get_vocab():
        raise ValueError(
            f"{args.model} and {args.amateur} have different vocabularies; contrasting needs one"
        )
    return model, tokenizer, amateur


def load_model(name, args, shard=None):
    """A model and its tokenizer, by --device, --dtype and --transformers. shard: None joins the ranks of torchrun."""
    import torch  # slow, and not every program loads a model

    from model import Transformer
    from runtime.config import Config
    from runtime.files import read_json
    from runtime.weights import checkpoint_folder
    from tokenizer import Tokenizer, special_ids

    gpus = torch.cuda.device_count()
    devices = ["cuda"] * bool(gpus) + [f"cuda:{i}" for i in range(gpus)] + ["cpu"]
    devices += ["mps"] * torch.backends.mps.is_available()
    device = devices[0] if args.device == "auto" else args.device
    if device not in devices:
        raise ValueError(
            f"--device {device} is not on this machine; choose from auto, {', '.join(devices)}"
        )
    if args.device_map and (not args.transformers or args.device != "auto"):
        raise ValueError("--device-map needs --transformers, and excludes --device")
    tokenizer, dtype = Tokenizer.load(name), None if args.dtype == "auto" else args.dtype
    if not args.transformers:
        Config.from_checkpoint(
            checkpoint_folder(name, weights=False)
        )  # refuses others before they are downloaded
    folder = checkpoint_folder(name)
    if dtype is None and device == "cpu" and not args.device_map:
        stored = sum(
            path.stat().st_size for path in folder.glob("*.safetensors")
        )  # two bytes a parameter, or four
        quantized = read_json(folder / "config.json").get("quantization_config")
        dtype = None if quantized or stored >= 2 * SMALL else "float32"
    if args.transformers:
        from runtime.hf import HFModel

        model = HFModel.load(name, device, dtype, args.device_map)
        model.bos_id, model.eos_ids, model.pad_ids = special_ids(folder)
        return model, tokenizer
    return Transformer.load(name, device=device, dtype=dtype, shard=shard), tokenizer


def limit_threads(model):
    """Use one thread for a tiny model on a CPU, unless OMP_NUM_THREADS is set: starting threads would take longer."""
    import torch

    tiny = (
        sum(x.numel() for x in (*model.parameters(), *model.buffers())) < TINY
    )  # packed weights are buffers
    if tiny and model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def benchmark_template_args(tokenizer, template_args):
    """Arguments of the chat template in benchmarks: no thinking by default. None for no arguments."""
    thinks = tokenizer.template_reads("enable_thinking")
    return ({"enable_thinking": False} if thinks else {}) | (template_args or {}) or None
