"""What the programs share: the way into each of them, and their options; models.py loads models."""
# ruff: noqa: F401

from cli.entry import explain, run_program
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
