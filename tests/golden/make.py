"""Record results of transformers for the tiny checkpoints of tests/checkpoints.py, in float32.

python -m tests.golden.make                         # logits.npz
pip install torch==2.13.0 transformers==4.55.4      # the last version with DoLa in its core
python -m tests.golden.make dola                    # dola.npz: tokens and scores of DoLa
"""

import json
import platform
import sys
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

# Untied and tied embeddings, few layers, and more than 40, of which only 20 are candidates.
DOLA_MODELS = {
    "llama3-8": ("llama3", 8),
    "qwen2-8": ("qwen2", 8),
    "llama3.2-4": ("llama3.2", 4),
    "qwen2-2": ("qwen2", 2),
    "llama3-42": ("llama3", 42),
}
DOLA_PROMPTS, NEW_TOKENS = PROMPTS[:2], 8


def load(family, **changes):
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), family, **changes)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="eager"
        ).eval()


def logits():
    for family in FAMILIES:
        model = load(family)
        for i, prompt in enumerate(PROMPTS):
            yield f"{family}/{i}", model(torch.tensor([prompt])).logits[0]


def dola():
    for name, (family, layers) in DOLA_MODELS.items():
        model = load(family, num_hidden_layers=layers)
        model.generation_config.eos_token_id = None
        for half in ("low", "high"):
            for i, prompt in enumerate(DOLA_PROMPTS):
                out = model.generate(
                    torch.tensor([prompt]),
                    dola_layers=half,
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
                yield f"{name}/{half}/{i}/ids", out.sequences[0, len(prompt) :]
                yield f"{name}/{half}/{i}/scores", torch.cat(out.scores)


def write(name, arrays, prompts, command):
    with torch.inference_mode():
        np.savez_compressed(
            FOLDER / f"{name}.npz", **{key: tensor.numpy() for key, tensor in arrays}
        )
    origin = dict(
        command=command,
        transformers=transformers.__version__,
        torch=torch.__version__,
        numpy=np.__version__,
        python=platform.python_version(),
        prompts=prompts,
    )
    (FOLDER / f"{name}.json").write_text(json.dumps(origin, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["dola"]:
        write("dola", dola(), DOLA_PROMPTS, "python -m tests.golden.make dola")
    else:
        write("logits", logits(), PROMPTS, "python -m tests.golden.make")
