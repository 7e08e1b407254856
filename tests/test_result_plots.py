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
        names = (
            "compression_tables",
            "speed_tables",
            "features",
            "results",
            "form_scores",
            "form_tables",
            "result_plots",
        )
        yield [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]


def test_results_of_all_benchmarks_have_a_table_and_a_section(modules):
    results = modules[3]
    written = {
        name for path in BENCH.glob("*.py") for name in re.findall(r'write_result\(\s*"(\w+)"', path.read_text())
    }
    listed = {name for name in written if not f"{name}-".startswith(results.IN_OTHER_PAGES)}
    sections = {name for names in results.SECTIONS.values() for name in names}
    assert len(listed) > 30 and listed <= results.TABLE.keys() and listed <= sections


def test_techniques_without_measured_sizes_have_empty_cells(modules, tmp_path):
    row = {"task": "tagging", "technique": "int8", "recipe": "int8", "metric": "accuracy", "score": 0.5, "seeds": 1}
    assert modules[0].render([row]).splitlines()[-1] == "| int8 | `int8` | 50.0 % |  |  |"
    modules[0].plot([row], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_near_points_share_a_label(modules):
    points = modules[0].labels([0.1, 1.0, 0.101, 0.1], [70.0, 80.0, 70.1, 75.0])
    assert points == [((0.1, 70.0), "1, 3"), ((1.0, 80.0), "2"), ((0.1, 75.0), "4")]


def test_table_of_features_lists_refusals_only(modules):
    features = modules[2]
    everything = features.section(["bias", "decode"], [])
    assert everything.startswith("The 18 patterns above work with each of these 2 features: bias, decode.")
    assert "| `pallas` | `GlobalAt` |" in everything and "| `splash` | none |" in everything
    assert "yes" not in everything and "refused with" not in everything
    exceptions = features.section(["bias", "decode"], ["| `Full` | bias | reason |"])
    assert "but for the pairs in the table" in exceptions and "| `Full` | bias | reason |" in exceptions


def test_speed_tricks_name_the_size_from_which_a_device_is_faster(modules, tmp_path):
    """Times in microseconds of numpy, a CPU and a GPU."""
    ladder = {"table": "ladder", "flops": 1e6, "is_peer": False}
    rows = [
        {**ladder, "form": "pair by pair", "seconds": 0.5, "factor": 1.0, "over_first": 1.0},
        {**ladder, "form": "stacked", "seconds": 0.01, "factor": 50.0, "over_first": 50.0},
        {"table": "bags", "lengths": "1 to 9", "padding": 0.4, "passes": "forward", "form": "padded", "seconds": 2e-5,
         "factor": 1.5, "claimed": 1.79},
    ]  # fmt: skip
    for form, times in {"numpy": (1, 9), "cpu, operands there": (2, 5), "gpu, operands there": (7, 4)}.items():
        for size, time, numpy in zip((8, 64), times, (1, 9), strict=True):
            fields = {"size": size, "seconds": 1e-6 * time, "gflops": 2e-3 * size**3 / time, "over_numpy": time / numpy}
            rows.append({"table": "sizes", "form": form, **fields})
    text = modules[1].speed_tricks(rows)
    assert "| stacked | 10 ms | 50 | 50 | 1,000,000 |" in text
    assert "| 1 to 9 | 40% | forward | padded | 20 µs | 1.5 | 1.79 |" in text
    assert "`cpu, operands there` is faster than numpy from n = 64 on." in text
    assert "`gpu, operands there` is faster than `cpu, operands there` from n = 64 on." in text
    modules[1].plot_speed_tricks(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_differences_to_the_plain_form_are_paired_by_seed(modules):
    scores = modules[4]
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
