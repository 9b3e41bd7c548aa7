"""A quick run of tests/fuzz.py."""

from tests import fuzz


def test_random_and_damaged_input_ends_in_a_correct_result_or_in_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    counts, failures = fuzz.fuzz(range(200), seed=1, seconds=40)
    assert not failures
    assert {name for name, outcome in counts if outcome == "right"} == set(fuzz.KINDS)
