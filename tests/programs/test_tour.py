"""docs/tour.ipynb runs from a clone, and its stored outputs are those that it has today."""

import json
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat")

TOUR = Path(__file__).parents[2] / "docs" / "tour.ipynb"


def texts(notebook):
    """What the cells print and return, without pictures and pages."""
    out = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            is_page = "<iframe" in json.dumps(output.get("data", {}))
            text = output.get("text") or output.get("data", {}).get("text/plain")
            out.append("a page" if is_page else text)
    return out


def test_the_tour_runs_and_gives_the_outputs_that_it_shows():
    stored = nbformat.read(TOUR, 4)
    fresh = nbformat.read(TOUR, 4)
    folder = {"metadata": {"path": str(TOUR.parent)}}
    nbclient.NotebookClient(fresh, timeout=100, resources=folder).execute()
    assert texts(fresh) == texts(stored)
    assert TOUR.stat().st_size < 40_000
