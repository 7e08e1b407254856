"""Reports of one run and comparisons of several."""

import json
import math
import os
import time
import warnings
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from hpnlp import report
from hpnlp.cli import experiment
from hpnlp.data import DataConfig
from hpnlp.nn.mixers import MIXERS
from hpnlp.report import next_commands, plots, seeds, single
from hpnlp.report.paired_scores import NO_INTERVAL
from hpnlp.training.config import Config, flat
from hpnlp.training.config_file import write_config
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.files.result import RunResult
from hpnlp.types import InputError
from tests.messages import raises

PROMISED = {
    "heldout_bits_per_byte",
    "gzip_bits_per_byte",
    "xz_bits_per_byte",
    "xz_trained_bits_per_byte",
    "tokens_per_second",
    "peak_memory_bytes",
    "steps",
    "seconds",
}
RAW = b"the quick brown fox jumps over the lazy dog\n" * 40


class Corpus:
    tokenizer = None
    heldout_digest = "one"

    def read_heldout(self):
        return RAW


def result(**changes):
    """Result of ten steps that took five seconds."""
    fields = {
        "step": 10,
        "scored_step": 8,
        "interrupted": False,
        "heldout": {"loss": 1.5, "bits_per_byte": 2.0},
        "baselines": {
            "gzip_bits_per_byte": 2.5,
            "xz_bits_per_byte": 2.25,
            "xz_trained_bits_per_byte": 1.75,
            "xz_trained_share": 1.0,
        },
        "dataset": Corpus(),
        "sums": {"loss": (np.float64(150.0), np.float64(100.0))},
        "model": None,
        "params": None,
        "seconds": {"setup": 3.0, "data": 1.0, "step": 4.0, "checkpoint": 1.0, "eval": 1.0},
        "peak_memory_bytes": 7 << 20,
        "parameters": 1234,
        "flops_per_step": 10**9,
        "tokens": 10 * 16 * 256,
        "timed_tokens": 9 * 16 * 256,
        "devices": "8 cpu devices (data 8)",
    }
    made = object.__new__(RunResult)  # only the fields that a report reads
    made.__dict__.update(fields | changes)
    return made


def summary(**changes):
    return report.summarize(Config(), result(**changes))


def test_summary_holds_the_numbers_of_a_run():
    numbers = summary()
    assert numbers.keys() >= PROMISED
    assert (numbers["gzip_bits_per_byte"], numbers["xz_trained_bits_per_byte"]) == (2.5, 1.75)
    assert numbers["tokens"] == 10 * 16 * 256
    # Of training alone, without the first step, whose seconds are those of its compilation.
    assert numbers["tokens_per_second"] == 0.9 * numbers["tokens"] / 5.0
    shorter = summary(tokens=1000, timed_tokens=800)  # of batches of similar lengths
    assert (shorter["tokens"], shorter["tokens_per_second"]) == (1000, 160.0)
    padded = summary(padding=0.75)
    assert padded["tokens"] == numbers["tokens"] / 4 and padded["tokens_per_second"] == numbers["tokens_per_second"] / 4
    assert padded["flops_per_second"] == numbers["flops_per_second"] and padded["padding"] == 0.75
    assert numbers["flops_per_second"] == 9 * 10**9 / 5.0
    assert (numbers["heldout_bits_per_byte"], numbers["steps"], numbers["parameters"]) == (2.0, 10, 1234)
    json.dumps(numbers, allow_nan=False)


def test_seconds_count_from_the_start_of_the_process():
    first = summary()["seconds"]
    assert 0 < first < 24 * 3600
    time.sleep(0.05)
    assert summary()["seconds"] >= first + 0.03


def test_verdict_ranks_model_and_compressors():
    for bits, text in (
        (
            (1.0, 2.0, 1.6, 1.25),
            "The model needs the fewest bits: 1.000 per byte of held-out text, 20 % fewer than xz -9e after the training text "
            "(gzip -9 alone 2.000, xz -9e alone 1.600, xz -9e after the training text 1.250). Neither",
        ),
        (  # the model is better only than compressors without the training text
            (1.5, 2.0, 1.6, 1.25),
            "xz -9e after the training text needs the fewest bits: 1.250 per byte of held-out text; the model 1.500, 20 % more "
            "(gzip -9 alone 2.000, xz -9e alone 1.600). Neither",
        ),
        (
            (1.5, 2.0, 1.6, None),
            "The model needs 1.500 bits per byte of held-out text; gzip -9 alone 2.000, xz -9e alone",
        ),
        ((None, 1.9, 1.5, 1.25), "The tokenizer does not keep every byte"),
        ((None, 1.9, 1.5, 1.25), "The output layer gives no probabilities of tokens"),
    ):
        names = ("heldout_bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte", "xz_trained_bits_per_byte")
        numbers = {"heldout_loss": 1.0, "heldout_bytes": 10_000} | dict(zip(names, bits, strict=True))
        numbers["config"] = {"model.output": "vmf" if text.startswith("The output") else "full"}
        assert report.verdict(numbers).startswith(text)
        if text.startswith("xz"):
            name = "xz -9e after the last 64 MiB (12 %) of the training text needs the fewest"
            assert report.verdict(numbers | {"xz_trained_share": 0.125}).startswith(name)


def test_verdict_claims_no_lead_after_a_warm_start():
    numbers = {"heldout_loss": 1.0, "heldout_bytes": 10_000, "heldout_bits_per_byte": 1.0}
    numbers |= {"gzip_bits_per_byte": 2.0, "xz_bits_per_byte": 1.6, "xz_trained_bits_per_byte": 1.25}
    numbers["config"] = {"model.output": "full", "train.init_from": "runs/a"}
    assert report.verdict(numbers) == (
        "The model needs 1.000 bits per byte of held-out text; gzip -9 alone 2.000, xz -9e alone 1.600, xz -9e after the "
        "training text 1.250. The model started from runs/a, and the compressors have not seen the text that this was trained "
        "on: this says little of the model."
    )
    assert report.verdict(numbers | {"heldout_bits_per_byte": 1.5}).startswith(
        "xz -9e after the training text needs the"
    )


def test_verdict_gives_the_reason_for_no_comparison(tmp_path):
    assert report.verdict(summary()).startswith("1,760 bytes of held-out text are too few to put the model beside")
    numbers = summary(heldout={"loss": float("nan"), "bits_per_byte": float("inf")})
    assert numbers["heldout_loss"] is numbers["heldout_bits_per_byte"] is None
    assert "not finite" in report.verdict(numbers) and "Lower optimizer.learning_rate" in report.verdict(numbers)
    assert "| held-out loss, nats per token | - |" in report.render(tmp_path, Config(), numbers, "")
    plots.plot_curves({"run": [{"step": 1, "loss": None}]}, tmp_path / "loss.png", numbers)


def test_norms_of_gradients_are_drawn_with_the_clipped_share(tmp_path):
    norms = [0.5, 2.0, 1.0, 4.0]
    lines = [{"step": step, "loss": 1.0, "grad_norm": norm} for step, norm in enumerate(norms, 1)]
    lines += [{"step": 5, "loss": 1.0, "grad_norm": None}, {"step": 5, "heldout_loss": 1.0}]
    plots.plot_norms(lines, tmp_path / "norms.png", 1.0)
    numbers = summary() | single.norm_numbers(norms, 1.0)
    assert (numbers["gradient_norm"], numbers["clipped_share"]) == (1.5, 0.5)
    text = report.render(tmp_path, Config(), numbers, "")
    assert "| gradient norm, median | 1.5 |" in text and "| steps clipped to optimizer.clip_norm=1 | 50 % |" in text
    assert "![gradient norms](gradient_norms.png)" in text
    assert "gradient norm" not in report.render(tmp_path, Config(), summary(), "")  # of an early version
    assert single.norm_numbers(norms, 0.0)["clipped_share"] is None
    assert single.norm_numbers([], 1.0) == {"gradient_norm": None, "clipped_share": None}


def test_damaged_metrics_are_reported_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]
    good = "".join(json.dumps(line) + "\n" for line in lines).encode()
    assert "cannot be read (No such file" in report.read_metrics(tmp_path)[1]
    cases = {
        good: "",
        good[:18] + b"\xff\n{\n3\n" + good: "3 of its 5 lines are damaged",
        good[:27]: "1 of 2 steps have no line",
        b'{"step": 1, "loss": "x"}\n[]\n\n{"loss": 1}\n' + good: "4 of its 6 lines are damaged",
        b"": "2 of 2 steps have no line",
    }
    for content, fault in cases.items():
        path.write_bytes(content)
        read, sentence = report.read_metrics(tmp_path, 2)
        assert (fault in sentence if fault else sentence == "") and "\n" not in sentence, content
        assert [line for line in read if line in lines] == read
    text = report.render(tmp_path, Config(), summary(), "", fault=sentence)
    assert f"![loss](loss.png)\n\n{sentence}\n" in text
    path.unlink()
    path.mkdir()
    assert "cannot be read (Is a directory)" in report.read_metrics(tmp_path, 2)[1]


def test_unwritable_report_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("hpnlp.models.decode.sample_text", lambda *args: "")
    (tmp_path / "report.md").mkdir()
    raises(r"cannot write the report to .*report.md \(.*\): move", lambda: report.write(tmp_path, Config(), result()))
    assert not (tmp_path / "report.json").exists()  # its existence would mark the run as finished


def runs(tmp_path, **numbers):
    """Run directories by name, whose reports have the given numbers."""
    for name, changes in numbers.items():
        (tmp_path / name).mkdir()
        made = summary() | changes
        made["config"] = flat(Config()) | made.pop("config_changes", {})
        (tmp_path / name / "report.json").write_text(json.dumps(made))
    return [tmp_path / name for name in numbers]


def test_compare_lists_the_best_run_first(tmp_path):
    wide = {"heldout_bits_per_byte": 1.5, "config_changes": {"model.dim": 512}}
    deep = {"heldout_bits_per_byte": 2.5, "config_changes": {"model.dim": 512, "model.layers": 8}}
    table = report.compare(runs(tmp_path, deep=deep, wide=wide), tmp_path / "compare.png")
    header, rule, first, second, *below = table.strip().splitlines()
    assert header.startswith("| run | held-out bits/byte |") and set(rule) <= set("| -")
    assert first.startswith(f"| {tmp_path / 'wide'} | 1.5000 |") and first.endswith("| - |")
    assert second.startswith(f"| {tmp_path / 'deep'} | 2.5000 | +1.0000 |") and second.endswith("| model.layers=8 |")
    assert below == ["", NO_INTERVAL]
    assert matplotlib.image.imread(tmp_path / "compare.png").shape[1] > 800


def with_examples(workdir, losses, identity=None):
    """Writes the losses of single held-out examples of two tokens each beside a report."""
    weights = np.full(len(losses), 2.0)
    sums = {"loss": (np.array(losses) * weights, weights)}
    ExampleScores(sums, np.arange(len(losses), dtype=np.uint32) if identity is None else identity).write(workdir)


def test_compare_shows_intervals_paired_on_the_same_examples(tmp_path):
    """The loss of the examples is 1.5 on average, which is 2 bits per byte, so that a nat is 4/3 bits per byte."""
    base = np.array([0.5, 1.0, 2.0, 2.5])
    losses = {"a": base, "b": base + [0.03, 0.031, 0.029, 0.03], "c": base + 0.0375, "d": base + [0.2, -0.1, 0.1, 0.1]}
    made = {
        name: {"heldout_bits_per_byte": of_run.mean() * 4 / 3, "heldout_loss": of_run.mean()}
        for name, of_run in losses.items()
    }
    directories = runs(tmp_path, **made, e=made["d"])
    for path, of_run in zip(directories, losses.values(), strict=False):
        with_examples(path, of_run, identity=np.arange(9, 13, dtype=np.uint32) if path.name == "c" else None)
    rows, below = cells(report.compare(directories, tmp_path / "compare.png"))
    quantile, score = 3.182446, "held-out bits/byte"  # of the t distribution with 3 degrees of freedom
    halves = {name: 4 / 3 * of_run.std(ddof=1) / 2 * quantile for name, of_run in losses.items()}
    assert {name: rows[name][score] for name in halves} == {
        name: f"{made[name]['heldout_bits_per_byte']:.4f} ± {half:.4f}" for name, half in halves.items()
    }
    halves = {name: 4 / 3 * (losses[name] - base).std(ddof=1) / 2 * quantile for name in "bd"}
    assert {name: row["to the best"] for name, row in rows.items()} == {
        "a": "-",
        "b": f"+0.0400 ({0.04 - halves['b']:+.4f} to {0.04 + halves['b']:+.4f})",
        "c": "+0.0500",  # of other examples
        "d": f"no difference, +0.1000 ({0.1 - halves['d']:+.4f} to {0.1 + halves['d']:+.4f})",
        "e": "+0.1000",  # of unknown ones
    }
    assert "± and the values in brackets in the table are 95 % intervals" in below
    assert below.count("A difference without an interval may be chance") == 1
    (directories[1] / "scores.npz").write_bytes(b"PK damaged")
    assert cells(report.compare(directories, tmp_path / "compare.png"))[0]["b"][score] == "2.0400"
    assert cells(report.compare(directories[-1:], tmp_path / "compare.png"))[1] == ""


def test_runs_that_differ_by_seed_have_an_interval_over_seeds(tmp_path):
    scores = {"a0": 2.0, "a1": 2.2, "a2": 2.4, "b0": 2.2, "b1": 2.4, "b3": 2.5, "c0": 1.0}
    made = {
        name: {
            "heldout_bits_per_byte": score,
            "config_changes": {"train.seed": int(name[1]), "model.dim": 64 + 8 * ord(name[0])},
        }
        for name, score in scores.items()
    }
    _, below = cells(report.compare(runs(tmp_path, **made), tmp_path / "compare.png"))
    half = 4.302653 * 0.2 / math.sqrt(3)
    assert f"- {tmp_path}/a0 over seeds 0, 1, 2: mean 2.2000 ± {half:.4f}.\n" in below
    assert f"- {tmp_path}/b0 over seeds 0, 1, 3: mean 2.3667" in below and "c0 over" not in below
    assert "difference to the best +0.2000 (+0.2000 to +0.2000)." in below and below.count(seeds.NOTE) == 1


def test_intervals_of_perplexities_are_those_of_losses(tmp_path):
    base = np.array([0.5, 1.0, 2.0, 2.5])
    losses = {"a": base, "b": base + [0.03, 0.031, 0.029, 0.03]}
    made = {name: {"heldout_bits_per_byte": None, "heldout_loss": of_run.mean()} for name, of_run in losses.items()}
    directories = runs(tmp_path, **made)
    for path in directories:
        with_examples(path, losses[path.name])
    rows, _ = cells(report.compare(directories, tmp_path / "compare.png"))
    half = (losses["b"] - base).std(ddof=1) / 2 * 3.182446
    low, value, high = (math.exp(1.5) * math.expm1(0.03 + change) for change in (-half, 0, half))
    assert rows["b"]["to the best"] == f"{value:+.5g} ({low:+.5g} to {high:+.5g})"


def fold_runs(tmp_path, scores, count=3, **changes):
    """Runs "NAME,fold=K" with bits per byte `scores[NAME][K - 1]`, a loss of 3/4 of them, and a digest for each fold."""
    made = {}
    for name, of_name in scores.items():
        for fold, score in enumerate(of_name, 1):
            fields = {"data.folds": count, "data.fold": fold, "model.dim": 64 + 8 * len(name)}
            numbers = {
                "heldout_bits_per_byte": score,
                "heldout_loss": score and 0.75 * score,
                "heldout_digest": str(fold),
            }
            made[f"{name},fold={fold}"] = {
                **numbers,
                "heldout_text_digest": str(fold),
                "config_changes": fields,
                **changes,
            }
    return runs(tmp_path, **made)


def test_folds_of_a_member_are_one_row(tmp_path):
    directories = fold_runs(tmp_path, {"a": [2.0, 2.2, 2.4], "bb": [2.2, 2.4, 2.5], "c": [1.0, None]})
    table = report.compare(directories, tmp_path / "compare.png")
    rows, below = cells(table)
    assert list(rows) == ["a", "bb", "c"]
    score = "held-out bits/byte"
    assert [rows[name][score] for name in rows] == ["2.2000", "2.3667", "1.0000"]  # c lacks folds
    assert rows["a"]["sd"] == "0.2000" and [rows[name]["folds"] for name in rows] == ["3 of 3", "3 of 3", "1 of 3"]
    half = 4.302653 * 0.2 / math.sqrt(3)  # the t distribution with 2 degrees of freedom
    assert rows["a"]["95 % interval"] == f"{2.2 - half:.4f} to {2.2 + half:.4f}"
    assert (rows["c"]["sd"], rows["c"]["95 % interval"], rows["a"]["to the best"]) == ("-", "-", "-")
    half, mean = 4.302653 * np.std([0.2, 0.2, 0.1], ddof=1) / math.sqrt(3), 0.5 / 3  # paired by fold
    assert rows["bb"]["to the best"] == f"+0.1667 ({mean - half:+.4f} to {mean + half:+.4f})"
    assert rows["bb"]["differs in"] == "model.dim=80"
    assert (
        f"- {tmp_path}/c: without a score of fold 2, 3; {tmp_path}/c,fold=2: its held-out loss is not finite.\n"
        in below
    )
    assert "sd the standard deviation over folds" in below and rows["a"]["peak MiB"] == "7"

    rows, _ = cells(report.compare(directories, tmp_path / "compare.png", each_fold=True))
    assert list(rows)[:5] == ["a", "a,fold=1", "a,fold=2", "a,fold=3", "bb"]
    assert [rows["bb,fold=3"][column] for column in (score, "folds", "to the best")] == ["2.5000", "fold 3", "+0.1000"]


def test_examples_of_all_folds_are_pooled(tmp_path):
    directories = fold_runs(tmp_path, {"a": [2.0, 2.4], "bb": [2.04, 2.44]}, count=2)
    losses = {"a,fold=1": np.array([1.0, 2.0]), "a,fold=2": np.array([1.7, 1.9, 1.8])}
    losses |= {name.replace("a", "bb"): of_name + 0.03 for name, of_name in list(losses.items())}
    for path in directories:
        with_examples(path, losses[path.name])
    rows, _ = cells(report.compare(directories, tmp_path / "compare.png"))
    bits = np.concatenate([losses["a,fold=1"], losses["a,fold=2"]]) / 0.75
    mean, half = bits.mean(), 2.776445 * bits.std(ddof=1) / math.sqrt(5)  # 4 degrees of freedom
    assert rows["a"]["95 % interval"] == f"{mean - half:.4f} to {mean + half:.4f}"
    assert rows["bb"]["to the best"] == "+0.0400 (+0.0400 to +0.0400)"  # paired on the same examples
    (directories[0] / "scores.npz").unlink()
    rows, _ = cells(report.compare(directories, tmp_path / "compare.png"))
    assert rows["a"]["95 % interval"] == f"{2.2 - 12.7062 * 0.2:.4f} to {2.2 + 12.7062 * 0.2:.4f}"


def test_rows_of_folds_are_named_by_their_sweep(tmp_path):
    directories = fold_runs(tmp_path, {"": [2.0, 2.2, 2.4]})
    named = [path.rename(tmp_path / path.name.lstrip(",")) for path in directories]
    assert list(cells(report.compare(named, tmp_path / "c.png"))[0]) == [tmp_path.name]
    named[0] = named[0].rename(tmp_path / "first")
    assert list(cells(report.compare(named, tmp_path / "c.png"))[0]) == ["first and 2 more"]


def test_runs_with_other_folds_are_not_compared(tmp_path):
    (single,) = runs(tmp_path, single={})
    directories = fold_runs(tmp_path, {"a": [2.0, 2.2]}, count=2)
    raises("runs with data.folds of 0, 2 were scored", report.compare, [single, *directories], tmp_path / "compare.png")
    assert report.by_task([single, *directories]) == {"lm": [single], "lm-2-folds": directories}


def test_compare_lists_models_without_a_training_of_their_own(tmp_path):
    (run,) = runs(tmp_path, run={})
    (run / "checkpoints" / "8" / "params").mkdir(parents=True)
    (run / "checkpoints" / "8" / "params" / "data").write_bytes(bytes(3_000_000))
    compressed, converted, export = tmp_path / "compressed", tmp_path / "converted", tmp_path / "export"
    for directory in (compressed, converted):
        directory.mkdir()
        write_config(directory, Config())
    (compressed / "weights.hpnlp").write_bytes(bytes(1_000_000))
    (compressed / "compress.json").write_text(json.dumps({"rows": [{"seconds": {"1": 0.1, "32": 0.5}}]}))
    scored = {
        name: summary()[name] for name in ("heldout_loss", "heldout_bytes", "heldout_digest", "heldout_text_digest")
    }
    scored |= {"heldout_bits_per_byte": 2.5, "parameters": 600, "config": flat(Config()), "scored_step": 8}
    (compressed / "evaluation.json").write_text(json.dumps(scored))
    (converted / "checkpoints" / "0" / "params").mkdir(parents=True)
    export.mkdir()
    (export / "export.json").write_text("{}")
    (export / "model.onnx").write_bytes(bytes(2_000_000))
    assert report.members(tmp_path) == [compressed, converted, export, run]
    assert report.by_task(report.members(tmp_path)) == {"lm": [compressed, converted, run, export]}
    rows, below = cells(report.compare(report.members(tmp_path), tmp_path / "compare.png"))
    assert list(rows) == ["run", "compressed", "converted", "export"]
    columns = ("held-out bits/byte", "to the best", "stored MB", "tokens/s", "sequences/s", "parameters")
    assert [tuple(row[column] for column in columns) for row in rows.values()] == [
        ("2.0000", "-", "3", "7,373", "-", "1,234"),
        ("2.5000", "+0.5000", "1", "-", "64", "600"),
        ("-", "-", "0", "-", "-", "-"),
        ("-", "-", "2", "-", "-", "-"),
    ]
    assert f"- {converted}: not scored: run hpnlp evaluate {converted}." in below
    (compressed / "evaluation.json").write_text("{}")
    raises(r"evaluation.json is not a report .*: run hpnlp", report.compare, [compressed], tmp_path / "compare.png")


LOSSY = {"heldout_bits_per_byte": None, "config_changes": {"data.tokenizer": "words(40)"}}


def cells(table):
    """`(run -> column -> cell, lines below the table)`."""
    above, _, below = table.partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in above.splitlines()]
    header, _, *rows = rows
    return {row[0].rpartition("/")[2]: dict(zip(header, row, strict=True)) for row in rows}, below


def test_compare_uses_perplexity_if_a_tokenizer_loses_text(tmp_path):
    numbers = {"b": LOSSY, "a": LOSSY | {"heldout_loss": 1.25}, "far": LOSSY | {"heldout_loss": 1e4}}
    rows, below = cells(report.compare(runs(tmp_path, **numbers), tmp_path / "compare.png"))
    assert list(rows) == ["a", "b", "far"] and below == f"{NO_INTERVAL}\n"
    assert rows["a"]["held-out perplexity"] == "3.4903" and rows["b"]["held-out perplexity"] == "4.4817"


def test_perplexities_of_different_tokens_are_not_compared(tmp_path):
    """Another tokenizer or another text both change the tokens' digest."""
    other = LOSSY | {"heldout_loss": 0.5, "heldout_digest": "other", "config_changes": {"data.tokenizer": "words(20)"}}
    rows, below = cells(report.compare(runs(tmp_path, other=other, a=LOSSY, b=LOSSY), tmp_path / "compare.png"))
    assert list(rows) == ["a", "b", "other"] and rows["other"]["held-out perplexity"] == "-"
    assert "/other: scored on other tokens than the runs above" in below and below.count("\n") == 2
    (tmp_path / "old").mkdir()
    old = LOSSY | {"heldout_digest": None}
    rows, below = cells(report.compare(runs(tmp_path / "old", a=old, b=old), tmp_path / "c.png"))
    assert {row["held-out perplexity"] for row in rows.values()} == {"-"} and below.count("lacks the digest") == 2
    # Bits per byte compare across tokenizers.
    (tmp_path / "more").mkdir()
    rows, below = cells(report.compare(runs(tmp_path / "more", a={}, b={"heldout_digest": "b"}), tmp_path / "c.png"))
    assert rows["b"]["held-out bits/byte"] == "2.0000" and below == f"{NO_INTERVAL}\n"


@pytest.mark.parametrize("output", ["negative_sampling(64)", "margin", "vmf(norm_penalty=0.1)"])
@pytest.mark.parametrize("compared", [{}, LOSSY])
def test_runs_without_probabilities_are_listed_last(tmp_path, output, compared):
    margin = {"heldout_bits_per_byte": None, "heldout_loss": 0.01, "config_changes": {"model.output": output}}
    rows, below = cells(report.compare(runs(tmp_path, margin=margin, a=compared), tmp_path / "compare.png"))
    label = "held-out perplexity" if compared else "held-out bits/byte"
    assert list(rows) == ["a", "margin"] and rows["margin"][label] == "-" and rows["a"][label] != "-"
    assert (
        below
        == f"- {tmp_path}/margin: {output} gives no probabilities of tokens, and its loss is of a kind of its own.\n"
    )
    assert f"model.output={output}" in rows["margin"]["differs in"]
    # A table is made even if no run has a score.
    rows, below = cells(report.compare([tmp_path / "margin"], tmp_path / "compare.png"))
    assert list(rows) == ["margin"] and "gives no probabilities" in below


def test_runs_with_a_nonfinite_loss_are_listed_last(tmp_path):
    bad = {"heldout_bits_per_byte": None, "heldout_loss": None}
    rows, below = cells(report.compare(runs(tmp_path, bad=bad, good={}), tmp_path / "compare.png"))
    assert list(rows) == ["good", "bad"] and rows["bad"]["held-out bits/byte"] == "-"
    assert rows["good"]["held-out bits/byte"] == "2.0000" and rows["good"]["training s"] == "5.0"
    assert "/bad: its held-out loss is not finite." in below


def test_compare_warns_of_different_heldout_text(tmp_path):
    table = report.compare(runs(tmp_path, a={}, b={"heldout_bytes": 7}), tmp_path / "compare.png")
    assert "scored on different held-out text: quality cannot be compared" in table
    for digests, warns in {("x", "y"): True, ("x", "x"): False, ("x", None): False}.items():
        for name, digest in zip("ab", digests, strict=True):
            (tmp_path / name / "report.json").write_text(
                json.dumps(summary() | {"config": flat(Config()), "heldout_text_digest": digest})
            )
        assert ("different held-out" in report.compare([tmp_path / "a", tmp_path / "b"], tmp_path / "c.png")) == warns


def test_absent_or_damaged_report_raises(tmp_path):
    for content, message in (
        (None, r"holds no run \(it is empty\): train one first, or name another directory"),
        (b"[" * 100_000, "is not a report .*: run the training command again"),
        (b"7", "is not a report .it holds a int.: run the training command again"),
        (b"{}", "is not a report .it lacks heldout_bits_per_byte, .*config.: run the training command again"),
        ({"config": {}}, r"it lacks config.model.output."),
        ({"config": {"model.output": 3}}, "is no spec"),
        ({"peak_memory_bytes": 10**400}, "peak_memory_bytes is 1000"),
        ({"heldout_text_digest": [1]}, r"heldout_text_digest is \[1\]"),
    ):
        if isinstance(content, dict):
            content = json.dumps(summary() | {"config": flat(Config())} | content).encode()
        if content is not None:
            (tmp_path / "report.json").write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            report.compare([tmp_path], tmp_path / "compare.png")
        assert "\n" not in str(caught.value)


def test_unreadable_report_raises(tmp_path):
    path = tmp_path / "report.json"
    path.symlink_to(path)
    raises(r"cannot read .*report.json \(Too many levels of symbolic links\)", report.read_report, tmp_path)
    path.unlink()
    path.mkdir()
    raises(r"cannot read .*report.json \(Is a directory\)", report.read_report, tmp_path)
    raises(r"none holds no run \(No such file or directory\): train one first", report.read_report, tmp_path / "none")


@pytest.mark.parametrize("out", ["nowhere/compare.png", "compare.nonsense"])
def test_unwritable_plot_raises(tmp_path, out):
    raises(r"cannot draw .*: name a file that can be", lambda: report.compare(runs(tmp_path, a={}), tmp_path / out))


def test_smoothed_loss_does_not_lag():
    assert plots.smooth([]).size == 0
    for count in (1, 2, 7, 40, 1000):
        line = np.linspace(5.0, 1.0, count).tolist()
        np.testing.assert_allclose(plots.smooth(line), line, rtol=1e-12)
    noisy = 2.0 + np.random.default_rng(0).normal(size=1000)
    smoothed = plots.smooth(noisy.tolist())
    assert smoothed[50:-50].std() < 0.2 and abs(smoothed[-1] - 2.0) < 0.7
    assert np.abs(np.diff(smoothed[-30:])).max() < 0.2


def test_commands_that_train_have_the_processes_of_the_run():
    text = next_commands.render(Path("runs/a"), Config(), "--config=exp.py", 2)
    trained = [line.count("hpnlp launch --processes=2 -- train") for line in text.splitlines() if "train" in line]
    assert trained == [1, 1] and "hpnlp compare" in text


def test_command_for_other_data_drops_what_describes_the_old():
    data = DataConfig(path="old.txt", weights=(1.0, 2.0), heldout_path="old_heldout.txt")
    flags = "--config=exp.py --config.data.path=old.txt --config.data.heldout_path=old_heldout.txt --config.model.dim=8"
    lines = next_commands.render(Path("runs/a"), Config(data=data), flags).splitlines()
    (line,) = [line for line in lines if "YOUR_FILES" in line]
    assert "old" not in line and "--config.model.dim=8" in line
    assert line.endswith("--data.path=YOUR_FILES '--data.weights=()' --data.heldout_path=`")


def test_proposed_commands_register_an_experiment_that_adds_entries(tmp_path, monkeypatch):
    (tmp_path / "exp.py").write_text("def own(): ...\n")
    for expected in ([0, 0, 0, 0, 0], [1, 0, 0, 1, 1]):
        text = next_commands.render(tmp_path / "run", Config(), f"--config={tmp_path}/exp.py:argument")
        assert [line.count(f"--register={tmp_path}/exp.py") for line in text.splitlines()] == expected
        monkeypatch.setitem(MIXERS, "own", experiment.load(str(tmp_path / "exp.py")).own)


def test_runs_are_grouped_by_task(tmp_path):
    one, two = runs(tmp_path, a={}, b={})
    other = tmp_path / "c"
    other.mkdir()
    numbers = summary() | {"heldout_accuracy": 0.5, "heldout_examples": 3}
    (other / "report.json").write_text(json.dumps(numbers | {"config": {"task": "classification"}}))
    assert report.by_task([one, other, two]) == {"lm": [one, two], "classification": [other]}


def test_repeated_runs_are_listed_once(tmp_path):
    (run,) = runs(tmp_path, a={})
    (tmp_path / "link").symlink_to(run)
    rows, below = cells(report.compare([run, run, tmp_path / "link"], tmp_path / "c.png"))
    assert list(rows) == ["a"] and below == "- A run that was named more than once is listed once.\n"


def test_compare_shows_skipped_steps(tmp_path):
    rows, _ = cells(report.compare(runs(tmp_path, a={"skipped_steps": 3}, b={}), tmp_path / "c.png"))
    assert {name: row["skipped steps"] for name, row in rows.items()} == {"a": "3", "b": "-"}
    assert (tmp_path / "c.md").read_text().startswith("| run |")


def test_compare_does_not_overwrite_other_files(tmp_path):
    (tmp_path / "README.md").write_text("# mine\n")
    raises(r"README.md is there and is no table", lambda: report.compare(runs(tmp_path, a={}), tmp_path / "README.png"))
    assert (tmp_path / "README.md").read_text() == "# mine\n" and not (tmp_path / "README.png").exists()


def test_any_name_can_be_drawn(tmp_path):
    names = ["\U0001f9e0 \u6f22", "$x$ $\\nothing$", "_hidden", os.fsdecode(b"\xff")]
    assert [plots.drawable(name) for name in names] == [
        "<U+1F9E0> <U+6F22>", r"\$x\$ \$\nothing\$", " _hidden", "<U+DCFF>",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.plot_curves(dict.fromkeys(names, [{"step": 1, "loss": 1.0}]), tmp_path / "loss.png")
        report.compare(runs(tmp_path, **{name: {} for name in names}), tmp_path / "compare.png")
