"""A bar on standard error while a model reads long prompts."""

from contextlib import ExitStack, contextmanager

from tqdm import tqdm

DELAY = 2  # seconds of reading before its bar appears
INTERVAL = 0.1  # seconds between two states of it
SHARE = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"


@contextmanager
def reading_bar(model, cache, passes):
    """Shows a bar, which moves with each layer, if the model reads prompts for longer than DELAY.
    As `Transformer.while_reading`, with the model."""
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
        yield
