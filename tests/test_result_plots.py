"""Tables and plots of the documentation from incomplete results."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import scipy.stats

BENCH = Path(__file__).parents[1] / "experiments" / "bench"


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        names = ("results", "form_scores")
        yield [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]


def test_results_of_all_benchmarks_have_a_table_and_a_section(modules):
    results = modules[0]
    written = {
        name for path in BENCH.glob("*.py") for name in re.findall(r'write_result\(\s*"(\w+)"', path.read_text())
    }
    listed = {name for name in written if not f"{name}-".startswith(results.IN_OTHER_PAGES)}
    sections = {name for names in results.SECTIONS.values() for name in names}
    assert len(listed) > 30 and listed <= results.TABLE.keys() and listed <= sections


def test_differences_to_the_plain_form_are_paired_by_seed(modules):
    scores = modules[1]
    plain, form = [1.5, 1.7, 1.6], [1.4, 1.65, 1.45]
    result = scores.compared(form, plain)
    interval = scipy.stats.ttest_rel(form, plain).confidence_interval(0.95)
    assert result["difference"] - result["half_interval"] == pytest.approx(interval.low)
    assert result["difference"] + result["half_interval"] == pytest.approx(interval.high)
    assert result["over_plain"] == pytest.approx(4.5 / 4.8)
    assert scores.compared([1.0], [1.0])["half_interval"] is None
    curve = [[10, 2.0], [20, 1.5], [30, 1.8]]
    assert [scores.best_score(curve, steps, "loss") for steps in (10, 25, 30)] == [2.0, 1.5, 1.5]
    assert scores.best_score(curve, 30, "pair_accuracy") == 2.0
