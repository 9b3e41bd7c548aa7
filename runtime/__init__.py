"""What models stand on: configurations, weights, ranks, attention, and checks of arguments."""

from importlib.util import find_spec
from pathlib import Path

# Python looks for modules beside the script first, so a file of the same name there hides ours.
for name in "cli decoders decore heads hf integrations model paper tokenizer".split():
    ours = Path(__file__).parents[1] / f"{name}.py"
    if not ours.exists():
        ours = ours.with_suffix("") / "__init__.py"
    first = find_spec(name).origin
    if not ours.samefile(first):
        remedy = f"rename it, or put {ours.parent} first on sys.path"
        raise ImportError(f"{first} hides {ours}: {remedy}")
