"""The page of published claims: every record resolves against the committed results, and the page is their rendering."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "experiments" / "bench"


@pytest.fixture(scope="module")
def bench():
    """The modules `results` and `claims`."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("results"), importlib.import_module("claims")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def committed(bench):
    paths = sorted(bench[0].RESULTS.glob("*.json"))
    return {path.stem.removesuffix("-cpu"): json.loads(path.read_text()) for path in paths}


def test_records_resolve_against_committed_results(bench, committed):
    results, claims = bench
    records = [claim for area in results.CLAIMS.values() for claim in area]
    assert len(records) > 60
    for claim in records:
        assert claim.figures or claim.note, f"{claim.claim}: neither figures nor the reason"
        assert claim.link.startswith("https://") or not claim.link
        for figure in claim.figures:
            assert (BENCH / f"{figure.bench}.py").exists() or figure.bench in committed
            assert "{" in figure.text
            if figure.bench in committed:
                claims.number(committed, figure)


def test_page_is_up_to_date(bench, committed):
    page = (ROOT / "docs" / "claims.md").read_text("utf-8")
    section = page.partition("<!-- claims -->\n")[2].partition("\n<!-- /claims -->")[0]
    assert section == bench[0].claims_page(committed), "run `make results`"


def test_verdicts_follow_the_measured_numbers(bench):
    _, claims = bench
    results = {"x": {"rows": [{"form": "a", "ms": 4.0}, {"form": "b", "ms": 2.0}]}}
    figure = claims.Figure("x", {"form": "a"}, ("ms",), "{:.0%} of b", over=("ms",), over_row={"form": "b"})
    claim = claims.Claim("twice", "source", "", "there", (figure,))

    def verdict(**changes):
        return claims.verdict(results, dataclasses.replace(claim, figures=(dataclasses.replace(figure, **changes),)))

    assert claims.sentence(results, figure) == "200 % of b"
    assert verdict(reproduced=2.0) == "reproduced" and verdict(reproduced=2.1, partly=1.5) == "partly"
    assert verdict(reproduced=2.1) == verdict(reproduced=1.9, lower_is_better=True) == "not reproduced"
    assert verdict(reproduced=0.5, inverse=True) == "reproduced"
    assert (
        verdict(bench="y", reproduced=1.0)
        == claims.verdict(results, dataclasses.replace(claim, figures=()))
        == "not here"
    )
    assert claims.verdict(results, dataclasses.replace(claim, is_comparable=False)) == "not here"
    with pytest.raises(ValueError, match=r"2 rows of x have \{\}"):
        claims.find_row(results, "x", {})
