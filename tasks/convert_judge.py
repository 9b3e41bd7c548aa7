"""Converts a judge's pickles and tokenizer.model to safetensors and tokenizer.json, which evaluate.py loads.

    python -m tasks.convert_judge allenai/truthfulqa-truth-judge-llama2-7B judges/truth
    python -m tasks.convert_judge allenai/truthfulqa-info-judge-llama2-7B judges/info
    python evaluate.py --task truthfulqa-gen … --judge --judge-models judges/truth,judges/info

transformers reads the pickles as weights only, so no code in them is run. The model is in memory once: about 14 GB
for 7 billion parameters in half precision."""

import pickle
import sys
from pathlib import Path

import cli


def main():
    p = cli.parser("Convert a judge's pickles and tokenizer.model to safetensors and tokenizer.json.")
    p.add_argument("source", metavar="JUDGE", help="folder or hub id")
    p.add_argument("folder", metavar="FOLDER", help="folder for the converted judge, new or empty")
    args = p.parse_args()
    if Path(args.folder).exists() and any(Path(args.folder).iterdir()):
        raise ValueError(f"{args.folder} is not empty: name a new folder for the converted judge")
    try:
        import google.protobuf  # noqa: F401 (transformers needs both for tokenizer.model)
        import sentencepiece  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError(f"{error}: pip install -e '.[evaluate]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.source)
        model = AutoModelForCausalLM.from_pretrained(args.source, dtype="auto")
    except pickle.UnpicklingError:
        raise ValueError(f"{args.source}: its pickle holds more than weights and is not read; take another copy"
                         ) from None
    tokenizer.save_pretrained(args.folder)
    model.save_pretrained(args.folder)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
