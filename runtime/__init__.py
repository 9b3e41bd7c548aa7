"""What models stand on: configurations, weights, ranks, attention, and checks of arguments."""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIRED = "torch safetensors tokenizers huggingface_hub numpy jinja2 tqdm filelock".split()

problem = None
absent = [name for name in REQUIRED if find_spec(name) is None]
if sys.version_info < (3, 11):  # noqa: UP036
    problem = f"it needs Python 3.11 or later, and this is {sys.version.split()[0]}"
elif absent:
    command = f"{sys.executable} -m pip install -r {ROOT / 'requirements.txt'}"
    problem = f"{', '.join(absent)} not installed: {command}"
if problem:
    program = getattr(sys.modules["__main__"], "__file__", None) or ""
    if sys.argv[0] == "-m":  # `python -m heads.detect` imports the package first
        name = getattr(sys, "orig_argv", sys.argv)[-len(sys.argv)]
        module = ROOT / f"{name.replace('.', '/')}.py"
        program = module if module.exists() else ""
    if ROOT in Path(program).resolve().parents:  # one of ours, not an import by others
        print(f"{Path(program).name}: error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(f"DeCoRe: {problem}")

# Python looks for modules beside the script first, so a file of the same name there hides ours.
for name in "cli decoders decore heads hf integrations model paper tokenizer".split():
    ours = ROOT / f"{name}.py"
    if not ours.exists():
        ours = ours.with_suffix("") / "__init__.py"
    first = find_spec(name).origin
    if not ours.samefile(first):
        remedy = f"rename it, or put {ROOT} first on sys.path"
        raise ImportError(f"{first} hides {ours}: {remedy}")
