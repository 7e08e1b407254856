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


def test_home_page_states_measured_figures(modules):
    row = {"task": "classification", "score": 0.5}
    sizes = {"disk_bytes": 1, "original_disk_bytes": 20, "seconds": {"8": 1.0}, "original_seconds": {"8": 8.0}}
    ladder = {"table": "ladder", "is_peer": False}
    results = {
        "speed_tricks": {
            "rows": [
                {**ladder, "form": "pair by pair", "seconds": 0.5, "over_first": 1.0},
                {**ladder, "form": "one call", "seconds": 0.001, "over_first": 500.0},
            ]
        },
        "compression": {
            "rows": [{**row, "technique": "teacher"}, {**row, **sizes, "technique": "stack", "recipe": "int8"}]
        },
    }
    text = modules[3].home(results)
    assert "from 500 ms (pair by pair) to 1 ms (one call): 500 times as fast" in text
    assert "`int8`, with 300 further steps, leaves 5 % of the bytes of a text classifier and 12 % of its time" in text


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


def test_tables_of_forms_have_both_budgets_and_the_published_claim(modules, tmp_path):
    scores, tables = modules[4:6]

    def row(group, form, plain, by_seed, claim=""):
        budgets = {name: {"steps": 100, **scores.compared(by_seed, [2.0, 2.2])} for name in ("steps", "time")}
        figures = {"parameters": 1000, "step_seconds": 0.1, "step_time_over_plain": 1.5, "flops_over_plain": 1.0}
        curves = {str(seed): [[50, 3.0], [100, score]] for seed, score in enumerate(by_seed)}
        names = {"group": group, "form": form, "plain": plain, "metric": "loss", "paper": "Author 2000", "claim": claim}
        return {**names, **figures, **budgets, "scores": curves}

    rows = [
        row("gates", "a", "a", [2.0, 2.2]),
        row("gates", "b", "a", [1.9, 2.1], "better"),
    ]
    (plain, loss), (label, figure) = tables.forms(rows)
    assert plain.endswith("held-out loss after 100 steps") and loss == "2.1000"
    assert label.startswith("byte-level recurrent language model, two layers, b (1,000 parameters), over a")
    assert "(95 % intervals of 2 seeds)" in label
    assert figure.startswith("-0.1000 +- 0.0000; -0.1000") and figure.endswith(
        "time of a step 1.50; Author 2000: better"
    )
    sizes = [row("size1", form, "transformer", [2.0, 2.2]) for form in ("transformer", "LSTM")]
    assert len(tables.recurrent_sizes(sizes)) == 1
    modules[6].plot_sizes(sizes, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
    stored = {
        "group": "storage",
        "form": "1 bit",
        "words": 9,
        "bytes_per_word": 16.0,
        "recall": 0.5,
        "pair_accuracy": 0.7,
    }
    assert tables.word_codes([{**stored, "time_over_float32": 0.25}])[0][1] == "16; 0.500; 0.700; 0.25"


def test_lines_of_the_search_by_docstrings_compare_with_the_model_from_scratch(modules):
    scratch = {"method": "from scratch", "pairs": 50, "recall_at_1": 0.2, "recall_at_10": 0.4, "steps": 65, "batch": 8}
    scratch |= {"recall_at_1_over_scratch": 0.0, "recall_at_1_over_scratch_interval": [0.0, 0.0]}
    tuned = scratch | {"method": "fine-tuned", "recall_at_1": 0.5, "recall_at_1_over_scratch": 0.3}
    tuned |= {"recall_at_1_over_scratch_interval": [0.1, 0.5]}
    (_, first), (label, figure) = modules[3].TABLE["docstring_search"]([scratch, tuned])
    assert first == "20.0%; 40.0% (65 steps of 8 pairs)"
    assert label == "code of a docstring among 50, fine-tuned: recall@1; recall@10"
    assert figure.endswith("recall@1 +30.0 points (+10.0 to +50.0) over from scratch")


def test_lines_of_large_batches_have_the_paired_difference(modules):
    small = {
        "optimizer": "lamb",
        "rule": "small",
        "batch": 1,
        "length": 32,
        "steps": 160,
        "loss": 1.5,
        "over_small": 1.0,
    }
    large = small | {
        "rule": "sqrt",
        "batch": 16,
        "steps": 10,
        "over_small": 1.02,
        "difference": 0.03,
        "half_interval": 0.01,
    }
    (_, first), (label, figure) = modules[3].TABLE["large_batch"]([small, large])
    assert first == "1.500 nats per byte (160 steps)" and "scaled by the square root" in label
    assert figure == "1.020 (10 steps); +0.030 +- 0.010 nats per byte"
