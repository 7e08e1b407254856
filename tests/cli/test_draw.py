"""`hpnlp draw`; expressions are tested in tests/test_mask_parser.py, images in tests/test_mask_plot.py."""

import re
import shlex
from pathlib import Path

import matplotlib.image

from hpnlp.mask_parser import NAMES

EXPRESSION = "Causal() & (Window(64) | Global(8))"


def test_one_mask_is_drawn(run, tmp_path):
    outcome = run("draw", EXPRESSION, f"--out={tmp_path / 'a'}")
    assert outcome.code == 0 and outcome.err == ""
    assert "| 256 x 256 | 16 | 81 of 256 | 42 | 31.6 % | 24.5 % |" in outcome.out
    assert outcome.out.endswith(f"\n{tmp_path / 'a.png'}\n")
    assert matplotlib.image.imread(tmp_path / "a.png").size


def test_several_masks_are_drawn_with_the_sizes_of_the_flags(run, tmp_path):
    sizes = ("--length=30", "--keys=20", "--block=10", f"--out={tmp_path / 'a.png'}")
    outcome = run("draw", "Full()", "sparse_transformer_fixed(8, 2, heads=2)", "~Causal()", *sizes)
    assert outcome.code == 0
    assert "| Full() | 30 x 20 | 10 | 6 of 6 | 6 | 100 % | 100 % |" in outcome.out
    assert "heads=2), head 0 |" in outcome.out and "heads=2), mean of 2 heads |" in outcome.out


def test_invalid_arguments_raise(run):
    for argv, message in (
        ((), 'no mask: write hpnlp draw "Causal() & (Window(64) | Global(8))"'),
        (("~" * 700 + "Causal()",), "is nested too deeply"),
        (("Causal()", "--length=0"), "length=0: expected at least 1"),
        (("Causal()", "--out=/no/such/place/a.png"), "cannot draw /no/such/place/a.png ("),
        (("Causal()", "--out=a.doc"), "name a file that can be written, as pattern.png"),
    ):
        outcome = run("draw", *argv)
        assert outcome.code == 2 and outcome.err.count("\n") == 1
        assert outcome.err.startswith("hpnlp: ") and message in outcome.err


def test_help_lists_every_mask(run):
    outcome = run("draw", "--help")
    assert outcome.code == 0 and all(f"  {name}(" in outcome.out for name in NAMES)


def test_commands_of_the_documentation_run(run, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/guide/attention.md").read_text("utf-8")
    commands = re.findall(r"^hpnlp (draw .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert commands
    for command in commands:
        assert run(*shlex.split(command)).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["patterns.png"]


def test_output_to_a_device_raises(run):
    outcome = run("draw", "Causal()", "--out=/dev/full")
    assert (outcome.code, outcome.out) == (2, "") and "--out=/dev/full is not a regular file" in outcome.err
