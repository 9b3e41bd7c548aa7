"""Run the tasks of lm-evaluation-harness with DeCoRe or a baseline.

    python -m integrations.lm_eval --model M --method decore-entropy --tasks triviaqa,truthfulqa_mc2

takes the options of decore.py, and passes all others to `lm_eval run`."""

import sys
from importlib.metadata import version
from pathlib import Path

from cli import models
from cli.entry import run_program
from cli.options import (
    add_method_arguments,
    add_model_arguments,
    check_options,
    fit,
    full_names,
    parser,
    positive,
    setups,
)
from decoders.setup import METHODS, method_names
from runtime.errors import InputError, hub_reason, offline_if_unreachable, one_line

ROOT = Path(__file__).resolve().parent.parent
# CAD needs the prompt without its context, which the harness's tasks do not mark. Activation
# Decoding scores an answer by all its positions at once, which is not a log-probability.
NAMES = [name for name in method_names(METHODS) if name not in ("cad", "ad")]


def main():
    args, rest = make_parser().parse_known_args()
    [name] = full_names([args.method], args.amateur)
    check_options(args, [name], seeded=True)
    offline_if_unreachable()
    # The harness's tasks import the library `evaluate`, so our evaluate.py must be found after it.
    sys.path.sort(key=lambda entry: Path(entry or ".").resolve() == ROOT)
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    from integrations.lm_eval_model import HarnessModel

    setup_logging()
    if args.seed is not None:
        rest.append(f"--seed={args.seed}")  # of the harness's few-shot examples too
    sys.argv[1:] = ["run", *rest]
    run = rest and HarnessCLI().parse_args()  # without options it prints its help and ends
    if not run or not (run.tasks or run.config):
        raise InputError(
            "--tasks is missing: name tasks of lm-evaluation-harness, such as --tasks triviaqa"
        )
    for option in ("model_args", "use_cache", "cache_requests"):
        if getattr(run, option, None):
            raise InputError(
                f"--{option} has no effect: the model is --model's, and nothing is cached"
            )
    if args.template_args and not getattr(run, "apply_chat_template", False):
        raise InputError("--template-args has no effect without --apply_chat_template")
    checkpoint, tokenizer, of_amateur = models.read_models(args)
    [setup] = setups(args, [name])
    setup = fit(setup, args, checkpoint, of_amateur)
    model, amateur = models.load_models(checkpoint, of_amateur, args)
    template_args = models.benchmark_template_args(tokenizer, args.template_args)
    renormalise = args.renormalise is None  # --no-renormalise is the only value
    method = setup.record(amateur)
    run.model = HarnessModel(model, tokenizer, method, args.batch_size, renormalise, template_args)
    libraries = ["torch", "tokenizers", *["transformers"] * args.transformers]
    run.batch_size = args.batch_size
    run.model_args = setup.stated() | {  # stored beside the results
        "engine": "transformers" if args.transformers else "own",
        "versions": {name: version(name) for name in libraries},
        "pretrained": args.model,
        "amateur": args.amateur,
        "dtype": str(model.dtype),
        "renormalise": renormalise,
        "template_args": template_args,
        "eos": args.eos,
    }
    try:
        run.func(run)
    except ConnectionError as error:
        raise OSError(
            f"{hub_reason(error)}: {one_line(error, 80)}; fetch the task's data with a connection "
            "first, or set HF_ENDPOINT to a mirror"
        ) from None


def make_parser():
    p = parser(
        "Run tasks of lm-evaluation-harness with DeCoRe or a baseline. All options but these go to "
        "`lm_eval run`: --tasks, --num_fewshot, --apply_chat_template, --limit, --output_path …"
    )
    add_model_arguments(p)
    add_method_arguments(p, NAMES, single=True)
    p.add_argument(
        "--batch-size",
        "--batch_size",
        type=positive,
        default=1,
        metavar="B",
        help="prompts that are continued at once",
    )
    return p


if __name__ == "__main__":
    sys.exit(run_program(main))
