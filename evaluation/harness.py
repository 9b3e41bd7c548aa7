"""Run the tasks of lm-evaluation-harness with DeCoRe or a baseline.

    python -m evaluation.harness --model M --method decore-entropy --tasks triviaqa,truthfulqa_mc2

takes the options of decore.py and baselines.py, and passes all others to `lm_eval run`."""

import sys
from pathlib import Path

import baselines
import cli
from runtime.files import short_hash
from runtime.weights import fingerprint

ROOT = Path(__file__).resolve().parent.parent
# CAD needs the prompt without its context, which the harness's tasks do not mark. Activation Decoding scores an answer
# by all its positions at once, which is not a log-probability.
METHODS = tuple(method for method in baselines.METHODS if method not in ("cad", "ad"))


def main():
    p = cli.parser("Run tasks of lm-evaluation-harness with DeCoRe or a baseline. All options but these go to "
                   "`lm_eval run`: --tasks, --num_fewshot, --apply_chat_template, --limit, --output_path …")
    cli.add_model_arguments(p)
    p.add_argument("--method", type=cli.method_name(METHODS), default="decore-entropy", metavar="M",
                   help=", ".join(METHODS))
    cli.add_method_arguments(p, METHODS)
    p.add_argument("--no-renormalise", dest="renormalise", action="store_false",
                   help="answers of a task: sum the contrasted scores without normalising them")
    p.add_argument("--batch-size", "--batch_size", type=cli.positive, default=1, metavar="B",
                   help="prompts that are continued at once")
    args, rest = p.parse_known_args()
    [method] = cli.full_names([args.method], args.amateur)
    cli.check_options(args, [method], seeded=True)
    HarnessModel, HarnessCLI = import_harness()
    sys.argv[1:] = ["run", *rest, *([] if args.seed is None else [f"--seed={args.seed}"])]
    run = rest and HarnessCLI().parse_args()            # without options it prints its help and ends
    if not run or not (run.tasks or run.config):
        raise ValueError("--tasks is missing: name tasks of lm-evaluation-harness, such as --tasks triviaqa")
    if run.model_args:
        raise ValueError("--model_args has no effect: the model is --model's, and its options are those of --help")
    if args.template_args and not getattr(run, "apply_chat_template", False):
        raise ValueError("--template-args has no effect without --apply_chat_template")
    model, tokenizer, amateur = cli.load_models(args)
    run.model = HarnessModel(model, tokenizer, batch_size=args.batch_size, renormalise=args.renormalise,
                             template_args=cli.benchmark_template_args(tokenizer, args.template_args),
                             **cli.method_settings(method, args, model, amateur))
    run.model_args, run.batch_size = run.model.get_model_info() | dict(pretrained=args.model), args.batch_size
    if run.use_cache:                       # its keys are the texts alone, so each setting gets a file
        key = run.model_args, fingerprint(args.model), args.amateur and fingerprint(args.amateur)
        run.use_cache += "-" + short_hash(repr(key).encode())
    run.func(run)


def import_harness():
    """Import the harness. Its tasks import the library `evaluate`, so our evaluate.py must be found after it."""
    sys.path.sort(key=lambda entry: Path(entry or ".").resolve() == ROOT)
    try:
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging

        from evaluation.harness_model import HarnessModel
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'lm-eval>=0.4.10'") from None
    setup_logging()
    return HarnessModel, HarnessCLI


if __name__ == "__main__":
    sys.exit(cli.run(main))
