"""Reports: what a run saw in numbers, words and pictures, and several runs beside each other."""

import gzip
import json
import lzma
import time

import matplotlib.image
import pytest

from hpnlp import report
from hpnlp.training.config import Config, flat
from hpnlp.training.loop import Result
from hpnlp.types import InputError

PROMISED = {
    "heldout_bits_per_byte",
    "gzip_bits_per_byte",
    "xz_bits_per_byte",
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
    """Of ten steps that took five seconds."""
    fields = {
        "step": 10,
        "interrupted": False,
        "heldout": {"loss": 1.5, "bits_per_byte": 2.0},
        "corpus": Corpus(),
        "model": None,
        "params": None,
        "seconds": {"setup": 3.0, "data": 1.0, "step": 4.0, "checkpoint": 1.0, "eval": 1.0},
        "peak_memory_bytes": 7 << 20,
        "parameters": 1234,
        "flops_per_step": 10**9,
        "devices": "8 cpu devices (data 8)",
    }
    made = object.__new__(Result)  # not what a Result must hold, but what a report reads
    made.__dict__.update(fields | changes)
    return made


def summary(**changes):
    return report.summarize(Config(), result(**changes))


def test_numbers_of_a_run():
    numbers = summary()
    assert numbers.keys() >= PROMISED
    assert numbers["gzip_bits_per_byte"] == 8 * len(gzip.compress(RAW, 9)) / len(RAW)
    assert numbers["xz_bits_per_byte"] == 8 * len(lzma.compress(RAW, preset=9 | lzma.PRESET_EXTREME)) / len(RAW)
    assert numbers["tokens"] == 10 * 16 * 256
    assert numbers["tokens_per_second"] == numbers["tokens"] / 5.0  # of training, not of what else a run does
    assert numbers["flops_per_second"] == 10 * 10**9 / 5.0
    assert (numbers["heldout_bits_per_byte"], numbers["steps"], numbers["parameters"]) == (2.0, 10, 1234)
    json.dumps(numbers, allow_nan=False)


def test_seconds_are_those_of_the_process():
    first = summary()["seconds"]
    assert 0 < first < 24 * 3600
    time.sleep(0.05)
    assert summary()["seconds"] >= first + 0.03


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (
            (1.0, 2.0, 1.6),
            "The model won: 1.000 bits a byte of held-out text, 38 % fewer than xz -9e (1.600); gzip -9 needs",
        ),
        (
            (2.0, 1.9, 1.5),
            "xz -9e won: 1.500 bits a byte of held-out text, 21 % fewer than gzip -9 (1.900); the model needs",
        ),
        ((1.8, 1.7, 1.9), "gzip -9 won: 1.700"),
        ((None, 1.9, 1.5), "The tokenizer does not keep every byte"),
        ((None, 1.9, 1.5), "The output layer gives no probabilities"),
    ],
)
def test_verdict_says_who_won(needs, said):
    names = ("heldout_bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte")
    numbers = {"heldout_loss": 1.0, "heldout_bytes": 10_000} | dict(zip(names, needs, strict=True))
    numbers["config"] = {"model.output": "vmf" if said.startswith("The output") else "full"}
    assert report.verdict(numbers).startswith(said)


def test_verdict_on_little_text_and_on_a_loss_that_is_not_finite(tmp_path):
    assert report.verdict(summary()).startswith("1,760 bytes of held-out text are too few to put the model beside")
    numbers = summary(heldout={"loss": float("nan"), "bits_per_byte": float("inf")})
    assert numbers["heldout_loss"] is numbers["heldout_bits_per_byte"] is None
    assert "not finite" in report.verdict(numbers) and "Lower optimizer.learning_rate" in report.verdict(numbers)
    assert "| held-out loss, nats a token | - |" in report.render(tmp_path, Config(), numbers, "")
    report.plot_curves({"run": [{"step": 1, "loss": None}]}, tmp_path / "loss.png", numbers)


def test_text_of_a_report(tmp_path):
    text = report.render(tmp_path, Config(), summary(), "def main():\n")
    assert report.verdict(summary()) in text
    assert "| held-out bits a byte | 2.0000 |" in text and "| achieved GFLOP/s | 2.0 |" in text
    assert "| held-out bytes | 1,760 |" in text and "| wall time of the last process, s |" in text
    assert "Where the time went, over all restarts: setup" in text
    assert (
        f"--config=FILE --workdir={tmp_path}-tuned --config.train.init_from={tmp_path} --config.data.path=std" in text
    )
    mine = report.render(tmp_path, Config(), summary(), "", "--config=mine.py --config.train.steps=5")
    assert f"`hpnlp train --config=mine.py --config.train.steps=5 --workdir={tmp_path}-tuned" in mine
    assert f"`hpnlp train --config=mine.py --workdir={tmp_path} --config.train.steps=2000 --accept" in mine
    assert "| devices | 8 cpu devices (data 8) |" in text and "skipped" not in text
    assert "| steps skipped, not finite | 2 |" in report.render(
        tmp_path, Config(), summary() | {"skipped_steps": 2.0}, ""
    )
    assert "step 4.0 s (40 %)" in text and "setup 3.0 s (30 %)" in text
    assert "```\ndef main():\n```" in text and "![loss](loss.png)" in text
    for command in ("generate", "train", "compare"):
        assert f"`hpnlp {command} " in text
    lossy = report.render(tmp_path, Config(), summary(heldout={"loss": 1.5}), "")
    assert "| held-out bits a byte | - |" in lossy and "A sample" not in lossy


def test_curve_is_drawn_also_with_gaps(tmp_path):
    lines = [{"step": step, "loss": 3.0 / step} for step in range(1, 9)]
    lines[4:6] = [{"step": 5, "loss": None}, {"step": 5, "heldout_loss": 1.0}]
    report.plot_curves({"run": lines, "begun": [], "other": lines[:2]}, tmp_path / "loss.png")
    picture = matplotlib.image.imread(tmp_path / "loss.png")
    report.plot_curves({"run": lines}, tmp_path / "scored.png", summary())
    assert (matplotlib.image.imread(tmp_path / "scored.png") != picture).any()
    assert picture.shape[0] > 300 and picture.std() > 0.01


def test_metrics_as_they_are_read(tmp_path):
    assert report.read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": 0.5}\n')
    assert report.read_metrics(tmp_path) == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]


def test_report_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(report.decode, "sample_text", lambda *args: "")
    (tmp_path / "report.md").mkdir()
    with pytest.raises(InputError, match=r"cannot write the report to .*: free some space there and run the same"):
        report.write(tmp_path, Config(), result())
    assert not (tmp_path / "report.json").exists()  # which would say that the run is done


def runs(tmp_path, **numbers):
    """Run directories by name, each with these numbers."""
    for name, changes in numbers.items():
        (tmp_path / name).mkdir()
        made = summary() | changes
        made["config"] = flat(Config()) | made.pop("config_changes", {})
        (tmp_path / name / "report.json").write_text(json.dumps(made))
    return [tmp_path / name for name in numbers]


def test_compare_puts_the_best_first(tmp_path):
    wide = {"heldout_bits_per_byte": 1.5, "config_changes": {"model.dim": 512}}
    deep = {"heldout_bits_per_byte": 2.5, "config_changes": {"model.dim": 512, "model.layers": 8}}
    table = report.compare(runs(tmp_path, deep=deep, wide=wide), tmp_path / "compare.png")
    header, rule, first, second = table.strip().splitlines()
    assert header.startswith("| run | held-out bits/byte |") and set(rule) <= set("| -")
    assert first.startswith(f"| {tmp_path / 'wide'} | 1.5000 |") and first.endswith("| - |")
    assert second.startswith(f"| {tmp_path / 'deep'} | 2.5000 |") and second.endswith("| model.layers=8 |")
    assert matplotlib.image.imread(tmp_path / "compare.png").shape[1] > 800


LOSSY = {"heldout_bits_per_byte": None, "config_changes": {"data.tokenizer": "words(40)"}}


def cells(table):
    """run -> what its row says of it, in the order of the table; then the lines below."""
    above, _, below = table.partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in above.splitlines()]
    header, _, *rows = rows
    return {row[0].rpartition("/")[2]: dict(zip(header, row, strict=True)) for row in rows}, below


def test_compare_by_perplexity_where_a_tokenizer_loses_text(tmp_path):
    numbers = {"b": LOSSY, "a": LOSSY | {"heldout_loss": 1.25}, "far": LOSSY | {"heldout_loss": 1e4}}
    rows, below = cells(report.compare(runs(tmp_path, **numbers), tmp_path / "compare.png"))
    assert list(rows) == ["a", "b", "far"] and below == ""
    assert rows["a"]["held-out perplexity"] == "3.4903" and rows["b"]["held-out perplexity"] == "4.4817"


def test_perplexities_of_other_tokens_are_not_compared(tmp_path):
    """Of another tokenizer, or another text: both show in the tokens."""
    other = LOSSY | {"heldout_loss": 0.5, "heldout_digest": "other", "config_changes": {"data.tokenizer": "words(20)"}}
    rows, below = cells(report.compare(runs(tmp_path, other=other, a=LOSSY, b=LOSSY), tmp_path / "compare.png"))
    assert list(rows) == ["a", "b", "other"] and rows["other"]["held-out perplexity"] == "-"
    assert "/other: scored on other tokens than the runs above" in below and below.count("\n") == 1
    (tmp_path / "old").mkdir()
    old = LOSSY | {"heldout_digest": None}
    rows, below = cells(report.compare(runs(tmp_path / "old", a=old, b=old), tmp_path / "c.png"))
    assert {row["held-out perplexity"] for row in rows.values()} == {"-"} and below.count("does not say") == 2
    # Bits a byte compare whatever the tokenizer, and are of bytes, not of tokens.
    (tmp_path / "more").mkdir()
    rows, below = cells(report.compare(runs(tmp_path / "more", a={}, b={"heldout_digest": "b"}), tmp_path / "c.png"))
    assert rows["b"]["held-out bits/byte"] == "2.0000" and below == ""


@pytest.mark.parametrize("output", ["negative_sampling(64)", "margin", "vmf(norm_penalty=0.1)"])
@pytest.mark.parametrize("others", [{}, LOSSY])
def test_a_loss_of_no_probabilities_is_listed_and_not_ranked(tmp_path, output, others):
    own = {"heldout_bits_per_byte": None, "heldout_loss": 0.01, "config_changes": {"model.output": output}}
    rows, below = cells(report.compare(runs(tmp_path, own=own, a=others), tmp_path / "compare.png"))
    label = "held-out perplexity" if others else "held-out bits/byte"
    assert list(rows) == ["a", "own"] and rows["own"][label] == "-" and rows["a"][label] != "-"
    assert below == f"- {tmp_path}/own: {output} gives no probabilities, and its loss is of a kind of its own.\n"
    assert f"model.output={output}" in rows["own"]["differs in"]
    # Where no run has a score, there is a table all the same.
    rows, below = cells(report.compare([tmp_path / "own"], tmp_path / "compare.png"))
    assert list(rows) == ["own"] and "gives no probabilities" in below


def test_compare_copes_with_a_loss_that_is_not_finite(tmp_path):
    bad = {"heldout_bits_per_byte": None, "heldout_loss": None}
    rows, below = cells(report.compare(runs(tmp_path, bad=bad, good={}), tmp_path / "compare.png"))
    assert list(rows) == ["good", "bad"] and rows["bad"]["held-out bits/byte"] == "-"
    assert rows["good"]["held-out bits/byte"] == "2.0000" and rows["good"]["training s"] == "5.0"
    assert "/bad: its held-out loss is not finite." in below


def test_compare_warns_of_different_text(tmp_path):
    table = report.compare(runs(tmp_path, a={}, b={"heldout_bytes": 7}), tmp_path / "compare.png")
    assert "scored on different held-out text: quality cannot be compared" in table


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no report.json: finish the run first, with the command that began it"),
        ("{", "is not a report .*: run the training command again"),
        ("{}", "is not a report .it lacks heldout_bits_per_byte, .*config.: run the training command again"),
    ],
)
def test_report_that_is_missing_or_damaged(tmp_path, content, message):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError, match=message):
        report.compare([tmp_path], tmp_path / "compare.png")
    with pytest.raises(InputError, match=r"there is no directory .*none': name the workdir of a run"):
        report.read_report(tmp_path / "none")


@pytest.mark.parametrize("out", ["nowhere/compare.png", "compare.nonsense"])
def test_plot_that_cannot_be_drawn(tmp_path, out):
    with pytest.raises(InputError, match=r"cannot draw .*: name a file that can be written, as compare.png"):
        report.compare(runs(tmp_path, a={}), tmp_path / out)


def test_smoothing_starts_at_the_first_value():
    assert report._smooth([3.0] * 5) == pytest.approx([3.0] * 5)
    assert report._smooth([1.0, 3.0])[1] == pytest.approx((0.9 * 0.1 * 1.0 + 0.1 * 3.0) / (1 - 0.9**2))
