"""`hpnlp check-data`; what it finds is tested in tests/data/examples/test_check.py."""

import pytest

from tests import tiny


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"text {i},{'good' if i % 2 else 'bad'}\n" for i in range(40)))
    return path


def test_faults_give_exit_code_2(run, reviews):
    flags = ("--task=classification", f"--data.path={reviews}")
    outcome = run("check-data", *flags)
    assert (outcome.code, outcome.err) == (0, "") and "Data:\n  " in outcome.out
    assert "2 classes" in outcome.out and "padding: " in outcome.out and "No fault stops the training." in outcome.out
    with open(reviews, "a", encoding="utf-8") as file:
        file.write(",good\n" * 25 + "text 1,Good\n")
    outcome = run("check-data", *flags)
    assert (outcome.code, outcome.err) == (2, "")
    assert outcome.out.startswith("Faults that stop the training:\n  25 records: field 'text' is empty: ")
    assert f"{reviews}, line 44; and 22 more\n" in outcome.out and "Remarks:\n" in outcome.out
    assert run("check-data", *flags, "--data.skip_bad_lines=true").code == 0


def test_long_lists_are_cut(run, reviews):
    with open(reviews, "a", encoding="utf-8") as file:
        file.writelines("," * i + "\n" for i in range(2, 40))
    outcome = run("check-data", "--task=classification", f"--data.path={reviews}")
    assert outcome.code == 2 and "\n  and 18 more\n" in outcome.out


def test_data_of_an_experiment_file_are_checked(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HPNLP_CACHE", str(tmp_path))
    outcome = run("check-data", f"--config={tiny.EXPERIMENT}")
    assert outcome.code == 0 and "tokens to train on" in outcome.out


def test_invalid_arguments_raise(run):
    for argv, message in (
        (("--task=lm", "--config.data.pth=a"), "unknown config field 'data.pth': did you mean 'data.path'?"),
        (("--data.path=a.csv",), "--config is required, for example --config=lm/bytes, or --task=TASK"),
        (("--config=lm/bytes", "--data.seq_len=auto"), "sequences of task='lm' are filled with text of any length"),
    ):
        outcome = run("check-data", *argv)
        assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1
