"""Setups: defaults, settings without effect, names and words, stored headers, records."""

import json
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest

from decoders.setup import CHOOSING, METHODS, OPTIONS, SETTINGS, MethodSpec, Setup, settings_of
from paper.runfile import packed_lines, packed_paths
from tests.tables import facts

STORED = sorted(Path(__file__).parents[2].glob("results/*/*.jsonl.xz"))
# Two of each that are not the default.
VALUES = facts("""
num_heads=[3,10] measure=["write","mass"] random_heads=["uniform","others","published"] seed=[1,2]
alpha=[0.1234567,0.1234568] alpha_cap=[0.5,0.1] scale_alpha=[true] alpha_rule=["gain"]
mask=["query"] mask_prompt=[true] amateur=["a/b","a/c"] relative_top=[0.0,0.3] info_layer=[3,4]
renormalise=[false] dola_layers=["capped","halves"] repetition_penalty=[1.05,1.1]
""")


def setups_of(method, choice):
    """Setups of a method that differ in one setting each, and those without it."""
    for random_heads in (None, "uniform"):
        names = settings_of(method, choice, random_heads)
        rest = {"random_heads": random_heads} if "random_heads" in names else {}
        yield Setup.of(method, choice, **rest)
        for name in names:
            for value in VALUES[name]:
                yield Setup.of(method, choice, **rest | {name: value})


@pytest.mark.parametrize("method, choice", list(product(METHODS, (False, True))))
def test_setups_that_differ_have_names_labels_and_headers_that_differ(method, choice):
    setups = set(setups_of(method, choice))
    assert len({setup.file_name for setup in setups}) == len(setups)
    assert len({tuple(setup.words().items()) for setup in setups}) == len(setups)
    for setup in setups:
        fitted = replace(setup, heads=((0, 1), (2, 3)))
        header = json.loads(json.dumps(fitted.header() | {"max_new_tokens": None if choice else 5}))
        assert Setup.from_header(header) == fitted


@pytest.mark.parametrize("path", STORED, ids=lambda path: "-".join(path.parts[-2:]))
def test_stored_runs_give_their_setups(path):
    for run in packed_paths(path):
        header = next(packed_lines(run))[1]["header"]
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
    assert ", ".join(setup.words().values()) == (
        "N = 2, mass heads, cap 2, scaled α, query mask, masked prompt, amateur Small-1B"
    )
    random = Setup.of("decore-static", num_heads=5, random_heads="uniform", alpha=-0.5)
    assert random.file_name == "decore-static.n5.random-uniform-seed1234.a-0.5"
    words = ["N = 5", "random heads uniform", "seed 1234", "α = -0.5"]
    assert list(random.words().values()) == words
    del words[2]
    assert list(replace(random, seed=None).words().values()) == words


@pytest.mark.parametrize("method", METHODS)
def test_the_record_has_the_settings(method):
    for setup in setups_of(method, choice=False):
        options = METHODS[method].options
        heads = ((0, 1),) if "num_heads" in options else None
        amateur = "owner/small" if "amateur" in options else None
        record = replace(setup, heads=heads, amateur=amateur).record(amateur="a model")
        values = vars(record)
        assert values.get("heads") == heads and values.get("amateur") in (None, "a model")
        for name in SETTINGS:
            if name != "amateur" and name not in CHOOSING and getattr(setup, name) is not None:
                assert name == "renormalise" or values[name] == getattr(setup, name)


def test_defaults_are_those_of_the_records_and_do_not_depend_on_other_methods(monkeypatch):
    for name, method in METHODS.items():
        own = {field.name: field.default for field in fields(method.load())}
        for option in set(own) & set(method.options) - {"alpha", "relative_top", "heads"}:
            assert option == "amateur" or own[option] == OPTIONS[option].default, (name, option)
        if "alpha" in own and method.record != "decore:DeCoRe":
            assert own["alpha"] == OPTIONS["alpha"].default

    class Late(METHODS["ad"].load()):
        alpha: float = 3

    monkeypatch.setitem(METHODS, "late", MethodSpec(Late, ("alpha",)))
    assert Setup.of("decore-static").alpha == 0.5


@pytest.mark.parametrize("damage", [{"num_heads": "2"}, {"alpha": True}, {"heads": ["x"]}])
def test_a_damaged_header_is_refused(damage):
    header = {"method": "decore-static", "max_new_tokens": 5, "alpha": 1, "heads": ["0-1"]}
    assert Setup.from_header(header).heads == ((0, 1),)
    with pytest.raises(ValueError):
        Setup.from_header(header | damage)


def test_every_setting_is_a_field_and_an_option_of_a_method():
    sources = "heads", "amateur_heads", "without_context"  # where heads and prompts come from
    assert [name for name in OPTIONS if name not in sources] == list(SETTINGS) == list(VALUES)
    assert {name for method in METHODS.values() for name in method.options} == set(OPTIONS)
