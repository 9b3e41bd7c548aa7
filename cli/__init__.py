"""What the programs share: the way into each of them, their options, and loading models."""
# ruff: noqa: F401

from cli.entry import explain, run_program
from cli.models import (
    benchmark_template_args,
    limit_threads,
    load_model,
    load_models,
    read_model,
    read_models,
)
from cli.options import (
    MINIATURE,
    add_decoder,
    add_method_arguments,
    add_model_arguments,
    check_known,
    check_options,
    comma_list,
    did_you_mean,
    fit,
    full_names,
    labels,
    number,
    one_of,
    parser,
    positive,
    refuse_unused,
    say_measures,
    setups,
)
