"""The header of a run, and the name of its file."""

import datetime
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import cli
from runtime.files import commit


def make_header(job, bench, settings, model, fingerprints):
    """The first line of a run's file: what determines its lines, the software, the machine."""
    task, _, args, more = job
    settings = dict(settings)
    heads = settings.pop("amateur_heads", settings.get("heads"))
    amateur = settings.get("amateur")
    is_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_cuda else platform.machine()
    libraries = ("torch", "tokenizers", "numpy", *["transformers"] * args.transformers)
    fields = settings | {
        "num_heads": heads and len(heads),
        "alpha": settings.get("alpha"),
        "seed": cli.SEED if args.seed is None else args.seed,
        "method": job.method,
        "heads": heads and [f"{layer}-{head}" for layer, head in heads],
        "random_heads": args.random_heads if "heads" in settings else None,
        "amateur": amateur and amateur.name,
        "model": model.name,
        "fingerprint": fingerprints[0],
        "tp": args.tp,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": f"{model.device.type} ({device})",
        "engine": "transformers" if args.transformers else "own",
        "versions": {name: version(name) for name in libraries}
        | {"python": platform.python_version()},
        "commit": commit(),
        "date": str(datetime.date.today()),
        "command": shlex.join(["evaluate.py", *sys.argv[1:]]),
        "task": task.name,
        "version": task.version,
        "layout": bench.layout,
        "template_args": bench.template_args,
        "n": len(bench.items),
        "limit": args.limit,
        "data": bench.data,
        "demos": bench.demo_record,
        "amateur_fingerprint": amateur and fingerprints[1],
        "batch_size": args.batch_size,
        "max_new_tokens": None if task.choice else args.max_new_tokens or task.max_new_tokens,
        # Scoring masks every position.
        "mask_prompt": None if task.choice else settings.get("mask_prompt"),
        "renormalise": not args.no_renormalise if task.choice else None,
        "product": model.product,
    }
    return fields | more


def run_name(header):
    """The name of a run's file: task, model, method and some of its options."""
    options = {
        "num_heads": "n{num_heads}",
        "random_heads": "random-{random_heads}-seed{seed}",
        "alpha": "a{alpha:g}",
        "alpha_cap": "cap{alpha_cap:g}",
        "scale_alpha": "scaled",
        "mask": "query",
        "mask_prompt": "mask-prompt",
        "amateur": "{amateur}",
    }
    names = {name: Path(header[name] or "").name for name in ("model", "amateur")}
    parts = [
        text.format(**header | names)
        for name, text in options.items()
        if header.get(name) not in (None, "output") and header[name] is not False
    ]
    return ".".join([header["task"], names["model"], header["method"], *parts])
