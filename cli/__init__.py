"""What the programs share: the way into each of them, their options, and loading models."""

from cli.entry import explain, out_of_memory, run
from cli.models import (
    MINIATURE,
    benchmark_template_args,
    default_num_heads,
    limit_threads,
    load_model,
    load_models,
    method_settings,
)
from cli.options import (
    DEFAULTS,
    MASKING,
    OPTIONS,
    SEED,
    add_method_arguments,
    add_model_arguments,
    check_options,
    comma_list,
    flag,
    full_names,
    json_object,
    method_name,
    number,
    parser,
    positive,
)

__all__ = [
    "DEFAULTS", "MASKING", "MINIATURE", "OPTIONS", "SEED", "add_method_arguments", "add_model_arguments",
    "benchmark_template_args", "check_options", "comma_list", "default_num_heads", "explain", "flag", "full_names",
    "json_object", "limit_threads", "load_model", "load_models", "method_name", "method_settings", "number",
    "out_of_memory", "parser", "positive", "run",
]
