"""A judge as its makers keep it → a folder that evaluate.py loads: safetensors in place of pickles, and tokenizer.json.

    python -m tasks.convert_judge allenai/truthfulqa-truth-judge-llama2-7B judges/truth
    python -m tasks.convert_judge allenai/truthfulqa-info-judge-llama2-7B judges/info
    python evaluate.py --task truthfulqa-gen … --judge --judge-models judges/truth,judges/info

transformers reads the pickles as weights alone, so nothing in them is run. The whole model is in memory once: about
14 GB for 7 billion parameters in half precision."""

import pickle
import sys
from importlib.util import find_spec
from pathlib import Path

import cli

NEEDED = ("transformers", "sentencepiece", "google.protobuf")


def convert(source, folder):
    """source: a folder or hub id with pytorch_model*.bin and tokenizer.model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        read = [AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source, dtype="auto")]
    except pickle.UnpicklingError:
        raise ValueError(f"{source}: its pickle holds more than weights and is not read; take another copy") from None
    for part in read:
        part.save_pretrained(folder)


def main():
    p = cli.parser("Convert a judge's pickles and tokenizer.model to safetensors and tokenizer.json.")
    p.add_argument("source", metavar="JUDGE", help="folder or hub id")
    p.add_argument("folder", metavar="FOLDER", help="where the converted judge goes; it must be empty or not exist")
    args = p.parse_args()
    missing = [name for name in NEEDED if not installed(name)]
    if missing:
        raise ValueError("the conversion needs more libraries: pip install transformers sentencepiece protobuf")
    if Path(args.folder).exists() and (not Path(args.folder).is_dir() or any(Path(args.folder).iterdir())):
        raise ValueError(f"{args.folder} is not empty: name a new folder for the converted judge")
    convert(args.source, args.folder)
    print(f"wrote {args.folder}; evaluate.py takes it with --judge --judge-models TRUTH,INFO")


def installed(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:         # of the package that should hold it
        return False


if __name__ == "__main__":
    sys.exit(cli.run(main))
