"""A bar on standard error while a model reads long prompts."""

from contextlib import ExitStack

from tqdm import tqdm

from model import Transformer, prefill_chunks

DELAY = 2  # seconds of reading before its bar appears
INTERVAL = 0.1  # seconds between two states of it
SHARE = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"


def show_reading(model):
    """From now on, show a bar while the model reads prompts, if that takes more than DELAY. It
    moves with each layer."""
    read = model.prefill

    def prefill(ids, cache, *args):
        passes = [ids.numel()]  # tokens of each
        if isinstance(model, Transformer):
            chunks = prefill_chunks(ids, cache.lengths.tolist())
            passes = [tokens.numel() for _, tokens, _ in chunks]
        layers = model.output_projections()
        moves = (n for n in passes for _ in layers)
        bar = tqdm(
            desc=f"reading {int(cache.lengths.sum()):,} tokens",
            total=sum(passes) * len(layers),
            bar_format=SHARE,
            delay=DELAY,
            mininterval=INTERVAL,
            miniters=0,
            leave=False,
        )

        def tick(*_):  # what a hook returns would be the layer's output
            bar.update(next(moves, 0))

        with bar, ExitStack() as hooks:
            for layer in layers:
                hooks.callback(layer.register_forward_hook(tick).remove)
            read(ids, cache, *args)

    model.prefill = prefill
