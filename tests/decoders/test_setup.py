"""Setups: defaults, settings without effect, names and words, stored headers, arguments."""

import gzip
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from decoders.setup import CHOOSING, METHODS, OPTIONS, SETTINGS, Setup, has, no_effect
from paper.runfile import run_name

STORED = sorted(Path(__file__).parents[2].glob("docs/results*/*.jsonl.gz"))
VALUES = {  # two that are not the default
    "num_heads": (3, 10),
    "measure": ("write", "mass"),
    "random_heads": ("uniform", "published"),
    "seed": (1, 2),
    "alpha": (0.1234567, 0.1234568),
    "alpha_cap": (0.5, 0.1),
    "scale_alpha": (True,),
    "alpha_rule": ("gain",),
    "mask": ("query",),
    "mask_prompt": (True,),
    "amateur": ("a/b", "a/c"),
    "relative_top": (0.0, 0.3),
    "info_layer": (3, 4),
    "renormalise": (False,),
    "dola_layers": ("capped", "halves"),
    "repetition_penalty": (1.05, 1.1),
}


def setups_of(method, choice):
    """Setups of a method that differ in one setting each, and those without it."""
    for name, values in VALUES.items():
        for random_heads in (None, "uniform"):
            rest = {} if no_effect("random_heads", [method]) else {"random_heads": random_heads}
            if no_effect(name, [method], choice, random_heads):
                continue
            for value in values:
                yield Setup.of(method, choice, **rest | {name: value})
            yield Setup.of(method, choice, **rest)


@pytest.mark.parametrize("method, choice", list(product(METHODS, (False, True))))
def test_setups_that_differ_have_names_labels_and_headers_that_differ(method, choice):
    setups = set(setups_of(method, choice)) or {Setup.of(method, choice)}
    assert len({setup.file_name for setup in setups}) == len(setups)
    assert len({setup.label for setup in setups}) == len(setups)
    for setup in setups:
        fitted = replace(setup, heads=((0, 1), (2, 3)))
        header = json.loads(json.dumps(fitted.header() | {"max_new_tokens": None if choice else 5}))
        assert Setup.from_header(header) == fitted


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_a_stored_run_gives_its_setup_and_its_name(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header = json.loads(file.readline())["header"]
    assert run_name(header) == path.name.removesuffix(".jsonl.gz")
    setup = Setup.from_header(header)
    assert Setup.from_header(header | setup.header()) == setup
    for name in ("heads", "num_heads", "alpha", "random_heads", "amateur"):
        assert setup.header()[name] == header[name]


def test_names_and_labels_have_one_order():
    setup = Setup.of(
        "decore-entropy-lite",
        num_heads=2,
        measure="mass",
        alpha_cap=2.0,
        scale_alpha=True,
        mask="query",
        mask_prompt=True,
        amateur="owner/Small-1B",
    )
    assert setup.file_name == "decore-entropy-lite.n2.mass.cap2.scaled.query.mask-prompt.Small-1B"
    assert setup.label == (
        "decore-entropy-lite, N = 2, mass heads, cap 2, scaled α, query mask, masked prompt, "
        "amateur Small-1B"
    )
    random = Setup.of("decore-static", num_heads=5, random_heads="uniform", alpha=-0.5)
    assert random.file_name == "decore-static.n5.random-uniform-seed1234.a-0.5"
    assert random.label == "decore-static, N = 5, random heads uniform, seed 1234, α = -0.5"
    assert replace(random, seed=None).label == (
        "decore-static, N = 5, random heads uniform, α = -0.5"
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_record_has_the_settings(method):
    for setup in setups_of(method, choice=False):
        heads = ((0, 1),) if has(method, "num_heads") else None
        amateur = "owner/small" if has(method, "amateur") else None
        record = replace(setup, heads=heads, amateur=amateur).record(amateur="a model")
        values = vars(record)
        assert values.get("heads") == heads and values.get("amateur") in (None, "a model")
        for name in SETTINGS:
            if name != "amateur" and name not in CHOOSING and getattr(setup, name) is not None:
                assert name == "renormalise" or values[name] == getattr(setup, name)


@pytest.mark.parametrize(
    "method, values, words",
    [
        ("cad", {"alpha_cap": 1.0}, "alpha_cap has no effect on cad; it is an option of decore-st"),
        ("masked", {"seed": 1}, "seed has no effect without --random-heads"),
        ("masked", {"random_heads": "published", "measure": "mass"}, "which draws from all heads"),
        ("decore-entropy", {"renormalise": False}, "renormalise has no effect on generated texts"),
    ],
)
def test_a_setting_without_effect_is_refused(method, values, words):
    with pytest.raises(ValueError, match=words):
        Setup.of(method, **values)


@pytest.mark.parametrize("damage", [{"num_heads": "2"}, {"alpha": True}, {"heads": ["x"]}])
def test_a_damaged_header_is_refused(damage):
    header = {"method": "decore-static", "max_new_tokens": 5, "alpha": 1, "heads": ["0-1"]}
    assert Setup.from_header(header).heads == ((0, 1),)
    with pytest.raises(ValueError):
        Setup.from_header(header | damage)


def test_every_setting_is_a_field_and_an_option():
    assert set(SETTINGS) == set(OPTIONS) - {"heads", "amateur_heads", "without_context"}
    assert [name for name in OPTIONS if name in SETTINGS] == list(SETTINGS)
    assert set(CHOOSING) < set(SETTINGS) == set(VALUES)
