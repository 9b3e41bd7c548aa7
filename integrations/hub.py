"""Writes a folder for the Hub: DeCoRe in `generate` of transformers, without this project.

    python -m integrations.hub OUT --model HuggingFaceTB/SmolLM2-135M-Instruct
    hf upload USER/REPOSITORY OUT

OUT/custom_generate/ holds the code and the heads of one model; OUT/README.md describes both."""

import ast
import json
import re
import shlex
import sys
from pathlib import Path

from cli.entry import run_program
from cli.options import parser
from heads.reader import best_heads, find_file, find_measures, plain_name, read_scores
from runtime.checkpoint import HUB_ID
from runtime.errors import InputError
from runtime.files import named

ROOT = Path(__file__).parents[1]
MODULES = {  # a module of the folder → what it is a copy of
    "generate": "integrations/custom_generate/generate.py",
    "attention": "hf/attention.py",
    "positions": "hf/positions.py",
    "reader": "heads/reader.py",
    "errors": "runtime/errors.py",
    "values": "runtime/values.py",
}
REQUIREMENTS = "torch\nnumpy\ntransformers>=5.23\ntransformers<5.25\n"  # as in pyproject.toml

README = """---
library_name: transformers
license: apache-2.0
base_model: {model}
tags:
- custom_generate
---

# DeCoRe for {model}

Decoding by Contrasting Retrieval Heads ([Gema et al., 2024](https://arxiv.org/abs/2410.18860))
makes a model keep to the text before it. A few attention heads, the retrieval heads, copy from the
context. Each pass runs the model twice, once without those heads, and amplifies the difference:
the scores are (1 + α) log p − α log p_masked, with α the entropy of p.

## Base model

[{model}](https://huggingface.co/{model}). The folder knows its retrieval heads.

## Compatibility

transformers 5.23 and 5.24; causal language models, also quantized ones. Heads of other models:
`heads="18-6,23-2"`, or the path of a head file. Greedy search and sampling, with all options of
`generate` but beams, assistants, static caches and chunks of a prompt. What cannot be decoded
rightly is refused in a line, before the first token: for example, texts that pass the limit of
LongRoPE, where `generate` alone drops its cache and reads the text again.

`stop_strings` of `generate` also match a text that begins in the prompt, such as the line break at
its end; the stop texts of this project's programs match only new text. After a cast of the loaded
model (`model.bfloat16()`), a warning says that its rotary frequencies are rounded: load it with
`dtype=`.

## Additional arguments

{arguments}

## Outputs

Those of `generate`. With `return_dict_in_generate=True` also `alphas` (α as applied) and
`entropies` (of p, in nats), float32 of shape [batch, new tokens].

## Example

```py
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{model}"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
text = (
    "The Eiffel Tower was moved to Rome in 2031, where it stands beside the Colosseum. "
    "In which city is the Eiffel Tower?"
)
inputs = tokenizer.apply_chat_template(  # without a template: tokenizer(text, return_tensors="pt")
    [{{"role": "user", "content": text}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
out = model.generate(
    **inputs,
    custom_generate="USER/REPOSITORY",  # this repository, or the path of this folder
    trust_remote_code=True,
    do_sample=False,
    max_new_tokens=30,
)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))
```

## Threads

Each such call parses the code of the folder, which fails at times if two threads do so under
Python 3.11. So servers load it once,
`decore_generate = model.load_custom_generate("USER/REPOSITORY", trust_remote_code=True)`,
and call `decore_generate(model=model, **inputs)`.
"""


def build(out, model, heads=None):
    """Write the folder `out`, which must be new or empty.

    model: its name on the Hub. heads: its head file; by default the one in heads/. InputError if
    the folder is not empty or the name is not one of the Hub, FileNotFoundError without a head
    file."""
    out = Path(out)
    hub_id = HUB_ID.fullmatch(model)
    if not hub_id or hub_id[2] or Path(model).exists():
        raise InputError(
            f"{model!r} is not a model's name on the Hub: give OWNER/NAME, and a head file of your "
            "own as --heads FILE"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not a new or empty folder; choose another")
    path = find_file(heads or model)
    ranked = {measure: ranking(path, measure) for measure in find_measures(path)}
    files = {
        f"{name}.py": with_relative_imports((ROOT / source).read_text())
        for name, source in MODULES.items()
    }
    files["published.py"] = (
        f'"""The heads of {model}, best first, by measure."""\n\n'
        f"PUBLISHED = {json.dumps({plain_name(model): ranked}, indent=4)}\n"
    )
    files["requirements.txt"] = REQUIREMENTS
    folder = out / "custom_generate"
    readme = README.format(model=model, arguments=arguments_of(files["generate.py"]))
    with named(out):
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (out / "README.md").write_text(readme, encoding="utf-8")


def arguments_of(code):
    """A list of the arguments that generate.py adds, from the docstring of its `generate`."""
    [function] = [node for node in ast.parse(code).body if getattr(node, "name", "") == "generate"]
    names = "|".join(argument.arg for argument in function.args.kwonlyargs)
    _, paragraph, _ = ast.get_docstring(function).split("\n\n")
    parts = re.split(rf"\b({names}): ", " ".join(paragraph.split()))
    pairs = zip(parts[1::2], parts[2::2])
    return "\n".join(f"- `{name}`: {text.strip()}" for name, text in pairs)


def ranking(path, measure):
    """All heads of a head file, best first: a text."""
    n_layers, n_heads = (max(numbers) + 1 for numbers in zip(*read_scores(path, measure)))
    heads = best_heads(path, n_layers, n_heads, None, measure)
    return " ".join(f"{layer}-{head}" for layer, head in heads)


def with_relative_imports(code):
    """The code of a module as it stands in the folder."""
    code = re.sub("(?m)^PUBLISHED = .*", "from .published import PUBLISHED", code)
    for name, source in MODULES.items():
        module = source.removesuffix(".py").replace("/", ".")
        code = code.replace(f"from {module} import", f"from .{name} import")
    return code


def main():
    p = parser(__doc__)
    p.add_argument("out", metavar="OUT", help="the folder to write, new or empty")
    p.add_argument("--model", required=True, metavar="M", help="the base model's name on the Hub")
    p.add_argument("--heads", metavar="FILE", help="its head file; default: the one in heads/")
    args = p.parse_args()
    build(args.out, args.model, args.heads)
    print(f"{args.out} is written; next: hf upload USER/REPOSITORY {shlex.quote(args.out)}")


if __name__ == "__main__":
    sys.exit(run_program(main))
