"""Tables and plots of the documentation from incomplete results."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "experiments" / "bench"


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("compression_tables"), importlib.import_module("result_plots")
    for name in ("compression_tables", "result_plots"):
        del sys.modules[name]


def test_techniques_without_measured_sizes_have_empty_cells(modules, tmp_path):
    row = {"task": "tagging", "technique": "int8", "recipe": "int8", "metric": "accuracy", "score": 0.5, "seeds": 1}
    assert modules[0].render([row]).splitlines()[-1] == "| int8 | `int8` | 50.0 % |  |  |"
    modules[0].plot([row], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("mixers", [("full", "linear"), ("linear",)])
def test_lengths_without_full_attention_are_drawn(modules, tmp_path, mixers):
    rows = [{"mixer": mixer, "length": 64, "steps_per_second": 2.0, "peak_memory_bytes": 10} for mixer in mixers]
    rows.append({"mixer": "linear", "length": 128, "steps_per_second": 1.0, "peak_memory_bytes": 20})
    modules[1].plot_efficiency(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
