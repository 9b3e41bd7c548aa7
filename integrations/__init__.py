"""DeCoRe inside the software of others. `vllm/` is a package of its own; hub.py makes a folder of
`custom_generate/` that stands alone."""

from pathlib import Path

FOLDER = str(Path(__file__).parent)  # of custom_generate/, for `generate` of transformers
