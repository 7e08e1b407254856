"""`check_examples` and `check_text` list all faults that a training would raise one by one."""

import re

import pytest

from hpnlp.data.check import check_text
from hpnlp.data.examples import prepare_examples
from hpnlp.data.examples.checks.check import check_examples
from hpnlp.data.stream import DataConfig
from hpnlp.types import InputError
from tests.data.examples.records import config, tagging, write
from tests.messages import raises

FAULTY = (
    'text,label\none fish,pos\ntwo,neg\none fish,pos\none fish,neg\n,pos\n"a\nb",Pos\nthree,pos \nx\n'
    "four,neg\nfive,pos\nsix,neg\n  ,neg\n,neg\n"
)


@pytest.fixture
def faulty(tmp_path):
    root = tmp_path / "faulty"
    root.mkdir()
    (root / "a.csv").write_text(FAULTY)
    (root / "b.jsonl").write_text('{"text":"nine","label":"pos"}\n\n{"text":3,"label":"neg"}\n{bad\n')
    (root / "c.parquet").write_text("PAR1")
    (root / "notes.log").write_text("a note")
    (root / "notes.txt").write_text("a note")
    (root / "old.log.gz").write_text("packed")
    return root


def test_all_faults_of_examples_are_listed(faulty, tmp_path):
    made = config("classification", faulty, cache=str(tmp_path / "cache"))
    raises("a.csv, line 6: field 'text' is empty.*; hpnlp check-data lists all such faults$", prepare_examples, made)
    found = check_examples(made)
    faults = "\n".join(found.faults)
    for message in (
        "2 records: field 'text' is empty: .*a.csv, line 6; .*a.csv, line 15$",
        "1 record: 1 cells, expected 2 as in the first line; cells are missing, or one has a line break without quotes: ",
        "1 record: field 'text' is a int, expected a string: .*b.jsonl, line 3$",
        "1 record: not JSON: .*b.jsonl, line 4$",
        r"a label with and without blanks: 'pos' \(4: .*a.csv, line 2, ...\), 'pos ' \(1: .*line 9, .*data.fold_labels",
        "c.parquet: not a Parquet file",
    ):
        assert re.search(message, faults, re.MULTILINE), message
    assert len(found.faults) == 6
    left_out = "\n".join(found.left_out)
    for message in ("1 of other formats (.log): notes.log", "1 of other formats (.txt)", "other formats (.log.gz)"):
        assert message in left_out
    assert "invalid" not in left_out
    remarks = "\n".join(found.remarks)
    assert "of blanks only" in remarks and "'Pos' (1: " in remarks
    assert found.figures[0].endswith("16 records from 18 lines of a.csv and 1 more")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == []  # its temporary files are gone


def test_duplicates_are_counted_within_and_between_the_sets(tmp_path):
    rows = [{"text": text, "label": label} for text, label in (("a", "x"), ("b", "y"), ("a", "x"), ("b", "x"))]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", [{"text": "b", "label": "y"}, {"text": "c", "label": "x"}])
    made = config("classification", tmp_path / "train.jsonl", heldout_path=str(tmp_path / "test.jsonl"))
    remarks = check_examples(made).remarks
    train = tmp_path / "train.jsonl"
    assert remarks == (
        f"1 example with the texts of an earlier training example: {train}, line 3 = {train}, line 1",
        f"1 example with the texts and another label of an earlier training example: {train}, line 4 = {train}, line 2",
        f"1 example of the heldout set with the texts of a training example: {tmp_path}/test.jsonl, line 1 = {train}, line 2",
    )
    first, again = prepare_examples(made), prepare_examples(made)
    assert all(line in first.summary.splitlines() for line in remarks)
    assert "training labels of each class: x 3, y 1" in first.summary and remarks[0] not in again.summary


def test_faults_of_the_header_come_first(tmp_path):
    (tmp_path / "a.csv").write_text("id,a film,good\n1,a play,bad\n", "utf-8")
    header, examples = check_examples(config("classification", tmp_path / "a.csv")).faults
    assert "a.csv, line 1: no field 'text'" in header and "holds no examples" in examples


@pytest.mark.parametrize(
    ("rows", "options", "fault"),
    [
        ([], {}, "holds no examples"),
        ([{"text": "t", "label": "x"}], {}, "holds only one example"),
        ([{"text": "", "label": "x"}] * 3, {}, "3 records: field 'text' is empty"),
        ([{"text": "t", "label": "xy"[i % 2]} for i in range(20)], {"seq_len": 2}, "data.seq_len=2 leaves no room"),
        ([{"text": "t", "label": "xy"[i % 2]} for i in range(20)], {"tokenizer": "none.json"}, "none.json"),
    ],
)
def test_data_without_a_summary_have_faults(tmp_path, rows, options, fault):
    found = check_examples(config("classification", write(tmp_path / "a.jsonl", rows), **options))
    assert any(fault in line for line in found.faults) and not found.figures


def test_skipped_records_are_no_faults(faulty, tmp_path):
    (faulty / "c.parquet").unlink()
    options = {"skip_bad_lines": True, "fold_labels": True, "cache": str(tmp_path / "cache")}
    found = check_examples(config("classification", faulty, **options))
    assert not found.faults and any("not JSON" in line for line in found.left_out)


def test_labels_are_folded_if_asked_to(tmp_path):
    labels = ["Pos", "pos ", "NEG", "neg", "very  Good", "Very good"]
    path = write(tmp_path / "a.jsonl", [{"text": f"t{i}", "label": labels[i % 6]} for i in range(60)])
    made = config("classification", path, fold_labels=True)
    examples = prepare_examples(made)
    assert examples.labels == ("neg", "pos", "very good") and not check_examples(made).faults
    assert prepare_examples(made, ("Neg", "Pos", "very good")).labels == ("Neg", "Pos", "very good")
    with pytest.raises(InputError, match="'pos ' and label 'pos'|write it the same way everywhere, or pass data.fold_"):
        write(path, [{"text": f"t{i}", "label": ("pos", "pos ", "neg")[i % 3]} for i in range(60)])
        prepare_examples(config("classification", path))
    raises("data.fold_labels=True: these examples have no labels", config, "seq2seq", path, fold_labels=True)


def test_trained_tokenizers_and_tags_are_checked(tmp_path):
    path = write(tmp_path / "a.jsonl", [*tagging(), {"words": ["a"], "labels": ["x", "y"]}])
    found = check_examples(config("tagging", path, tokenizer="words(50)"))
    assert found.faults[0].startswith("1 record: field 'words' has 1 words and field 'labels' 2 labels")
    assert "tokens of training sequences: 5 to 5, median 5" in "\n".join(found.figures)


def test_padding_and_its_remedy_are_in_the_summary(tmp_path):
    rows = [{"text": "x" * (9 if i % 10 else 40) + str(i % 10), "label": "ab"[i % 2]} for i in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    summary = prepare_examples(config("classification", path, seq_len=256)).summary
    assert re.search(r"tokens of training sequences: 12 to 43, median 12, 95th percentile 43", summary)
    assert re.search(
        r"padding: 9\d % of the tokens of a batch; with data.seq_len=48, which holds 100 % of the sequences, 69 %; ",
        summary,
    )
    remedy = re.search(r"with data.buckets=4, batches of similar lengths, (\d+) %$", summary)
    bucketed = prepare_examples(config("classification", path, seq_len=256, buckets=4)).summary
    assert f"padding: {remedy[1]} % of the tokens of a batch" in bucketed and int(remedy[1]) < 30
    assert prepare_examples(config("classification", path, seq_len=16)).summary.endswith(
        "\npadding: 23 % of the tokens of a batch"
    )
    assert "padding:" not in prepare_examples(config("classification", path, seq_len=12)).summary
    assert "data.seq_len=16 cuts 8.5 %" in check_examples(config("classification", path, seq_len=16)).figures[-2]


def test_all_faults_of_text_are_listed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": 3}\n{bad\n{"text": "one"}\n')
    found = check_text(DataConfig(str(path)))
    assert [re.sub(r"/\S*/", "", line) for line in found.faults] == [
        "1 record: field 'text' is a int, expected a string: a.jsonl, line 3",
        "1 record: not JSON: a.jsonl, line 4",
    ]
    assert "with the text of an earlier one" in found.remarks[0]
    (tmp_path / "b.txt").write_bytes(b"good\nbad \xff\n" * 400)
    assert "not UTF-8" in check_text(DataConfig(str(tmp_path / "b.txt"), tokenizer="words(50)", seq_len=4)).faults[0]
    found = check_text(DataConfig(str(tmp_path / "b.txt"), seq_len=4, heldout=0.4))
    assert not found.faults and "tokens to train on" in found.figures[0]
    assert "does not exist" in check_text(DataConfig("none.txt")).faults[0]
