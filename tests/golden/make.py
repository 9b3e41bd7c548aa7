"""Record logits of transformers for the tiny checkpoints of tests/checkpoints.py, in float32:
logits.npz.

python -m tests.golden.make"""

import json
import platform
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.checkpoints import FAMILIES, random_ids, write_checkpoint

FOLDER = Path(__file__).parent
PROMPTS = [
    random_ids(5, seed=1),
    random_ids(24, seed=2),
    random_ids(40, seed=3),
]  # two exceed the window of 8


def load(family):
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), family)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="eager"
        ).eval()


@torch.inference_mode()
def main():
    arrays = {}
    for family in FAMILIES:
        model = load(family)
        for i, prompt in enumerate(PROMPTS):
            arrays[f"{family}/{i}"] = model(torch.tensor([prompt])).logits[0].numpy()
    np.savez_compressed(FOLDER / "logits.npz", **arrays)
    origin = dict(
        command="python -m tests.golden.make",
        transformers=transformers.__version__,
        torch=torch.__version__,
        numpy=np.__version__,
        python=platform.python_version(),
        prompts=PROMPTS,
    )
    (FOLDER / "logits.json").write_text(json.dumps(origin, indent=1) + "\n")


if __name__ == "__main__":
    main()
