"""Reads and loads the models that the command line names. torch is imported where one is loaded, so
that mistakes and plans need not wait for it."""

import os
from functools import partial
from typing import NamedTuple

from cli.reading import reading_bar
from runtime.checkpoint import Checkpoint
from runtime.errors import InputError
from tokenizer import Tokenizer

TINY = 20_000_000  # parameters up to which a CPU computes with one thread by default


class Facts(NamedTuple):
    """What is known of a model before its weights are read or downloaded."""

    checkpoint: Checkpoint
    config: object  # has n_layers, n_heads, vocab_size, max_positions, tied_embeddings
    tokenizer: object
    has_exits = True  # until the model is loaded, see `model.Transformer`
    name = property(lambda self: self.checkpoint.name)


def read_models(args):
    """(`Facts`, the tokenizer, `Facts` of the amateur or None): --model and --amateur.

    InputError or OSError for what can be known without weights."""
    model = read_model(args.model, args)
    amateur = read_model(args.amateur, args) if args.amateur else None
    if amateur and amateur.tokenizer.core.get_vocab() != model.tokenizer.core.get_vocab():
        raise InputError(
            f"{args.model} and {args.amateur} have different vocabularies; contrasting needs one"
        )
    return model, model.tokenizer, amateur


def read_model(name, args):
    """The `Facts` of a folder or a hub id."""
    if args.device != "auto" or args.device_map:
        choose_device(args)
    checkpoint = Checkpoint(name)
    if args.transformers:
        from hf.config import describe, read_config

        config = describe(read_config(checkpoint.folder))
    else:
        config = checkpoint.config
    wrong = [i for i in args.eos or () if i >= config.vocab_size]
    if wrong:
        raise InputError(f"--eos {wrong[0]}: {name} has only {config.vocab_size} tokens")
    return Facts(checkpoint, config, Tokenizer.load(checkpoint, args.eos))


def load_models(facts, of_amateur, args, shard=None):
    """(model, amateur or None), of the `Facts` of `read_models`."""
    model = load_model(facts.checkpoint, args, shard)
    limit_threads(model)
    amateur = load_model(of_amateur.checkpoint, args, shard) if of_amateur else None
    return model, amateur


def load_model(checkpoint, args, shard=None):
    """A model, by --device, --dtype and --transformers. shard: None joins the ranks of torchrun."""
    from model import Transformer

    device = choose_device(args)
    dtype = None if args.dtype == "auto" else args.dtype
    if args.transformers:
        from hf import HFModel

        model = HFModel.load(checkpoint, device, dtype, args.device_map)
    else:
        model = Transformer.load(checkpoint, device, dtype, shard)
    model.while_reading = partial(reading_bar, model)
    return model


def choose_device(args):
    """The device that --device names. InputError if this machine does not have it."""
    import torch

    gpus = torch.cuda.device_count()
    devices = ["cuda"] * bool(gpus) + [f"cuda:{i}" for i in range(gpus)] + ["cpu"]
    devices += ["mps"] * torch.backends.mps.is_available()
    device = devices[0] if args.device == "auto" else args.device
    if device not in devices:
        raise InputError(
            f"--device {device} is not on this machine; choose from auto, {', '.join(devices)}"
        )
    if args.device_map and (not args.transformers or args.device != "auto"):
        raise InputError("--device-map needs --transformers, and excludes --device")
    return device


def limit_threads(model):
    """Use one thread for a tiny model on a CPU, unless OMP_NUM_THREADS is set: starting threads
    would take longer."""
    import torch

    tensors = *model.parameters(), *model.buffers()  # packed weights are buffers
    tiny = sum(x.numel() for x in tensors) < TINY
    if tiny and model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def benchmark_template_args(tokenizer, template_args):
    """Arguments of the chat template in benchmarks, without thinking by default. None: none."""
    thinks = tokenizer.template_reads("enable_thinking")
    return ({"enable_thinking": False} if thinks else {}) | (template_args or {}) or None
