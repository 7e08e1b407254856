"""Parts of the data for cross-validation: they are disjoint, cover all data, keep groups together, and stay the same."""

import re

import pytest

from hpnlp.data import DataConfig, prepare
from hpnlp.data.examples import prepare_examples
from hpnlp.data.reading import split
from hpnlp.data.reading.split import Folds, HeldOutHashes, hash_fraction
from tests.data import batches
from tests.data.examples import records
from tests.messages import raises

NAMES = [f"file {i}" for i in range(23)]


@pytest.mark.parametrize("count", [2, 5, 23])
@pytest.mark.parametrize("is_ranked", [True, False])
def test_parts_are_disjoint_cover_everything_and_are_of_equal_size(monkeypatch, count, is_ranked):
    if not is_ranked:
        monkeypatch.setattr(split, "MAX_RANKED", 22)
    parts = [Folds(count, number).held_out(NAMES * 2) for number in range(1, count + 1)]
    held_out = [[name for name in NAMES if part and part.includes(name)] for part in parts]
    assert sorted(sum(held_out, [])) == sorted(NAMES)
    if is_ranked:
        assert {len(part) for part in held_out} <= {23 // count, -(-23 // count)}
    else:
        assert parts == [HeldOutHashes((i + 1) / count, i / count) for i in range(count)]


def test_parts_do_not_depend_on_order_or_machine():
    assert Folds(3, 2).held_out(NAMES) == Folds(3, 2).held_out(NAMES[::-1])
    ordered = sorted(NAMES, key=hash_fraction)
    assert ordered[:3] == ["file 4", "file 9", "file 6"]
    part = Folds(3, 2).held_out(NAMES)
    assert part and [name for name in ordered if part.includes(name)] == ordered[7:15]


def test_each_example_is_held_out_once_with_its_group(tmp_path):
    rows = [{**row, "page": f"page {i // 4}"} for i, row in enumerate(records.classification())]
    path = records.write(tmp_path / "a.jsonl", rows)
    for options, noun in (({}, "examples"), ({"group_field": "page"}, "groups ('page')")):
        held_out = []
        for fold in (1, 2, 3):
            config = records.config("classification", path, folds=3, fold=fold, heldout_examples=2000, **options)
            examples = prepare_examples(config)
            sides = [[t.decode() for t, *_ in examples.stored[side].texts()] for side in ("heldout", "train")]
            assert sorted(sum(sides, [])) == sorted(row["text"] for row in rows)
            assert f"held out, part {fold} of 3" in examples.summary and len(sides[0]) == 20
            held_out += sides[0]
            pages = [{row["page"] for row in rows if row["text"] in side} for side in sides]
            assert not options or not pages[0] & pages[1]
        assert sorted(held_out) == sorted(row["text"] for row in rows)
        config = records.config("classification", path, folds=61, fold=1, **options)
        message = f"data.folds=61: data.path='{path}' holds fewer {noun} than parts: lower data.folds (--folds of hpnlp"
        raises(re.escape(message), prepare_examples, config)


def test_each_document_is_held_out_once(tmp_path):
    texts = [f"{i} " * (20 + i) + "\n" for i in range(7)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    corpora = [prepare(batches.config(tmp_path, folds=3, fold=fold, heldout_bytes=1_000_000)) for fold in (1, 2, 3)]
    assert sorted(corpus.heldout_documents for corpus in corpora) == [2, 2, 3]
    assert sorted(text for corpus in corpora for text in re.findall(rb"[^\n]+\n", corpus.read_heldout())) == sorted(
        text.encode() for text in texts
    )
    assert all(corpus.train_documents + corpus.heldout_documents == 7 for corpus in corpora)
    # Fewer files than parts are cut into pieces at line ends; there are not enough of these either.
    raises(r"data.folds=9: .* holds fewer", lambda: prepare(batches.config(tmp_path, folds=9, fold=1, heldout_bytes=0)))
    (tmp_path / "0.txt").write_text("".join(f"line {i} of a long text\n" for i in range(2000)))
    cut = [prepare(batches.config(tmp_path, folds=9, fold=fold)) for fold in range(1, 10)]
    assert sum(corpus.heldout_bytes for corpus in cut) == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_invalid_parts_raise():
    for fields, message in (
        ({"fold": 1}, "data.folds=0, data.fold=1: expected at least 2 parts, or 0 for none: set data.folds"),
        ({"folds": 1, "fold": 1}, "data.folds=1, data.fold=1: expected at least 2 parts, or 0 for none"),
        ({"folds": 5}, "data.fold=0, data.folds=5: expected the part to hold out, 1 to 5; hpnlp sweep --folds=5"),
        ({"folds": 5, "fold": 1, "heldout_path": "a"}, "data.heldout_path='a', data.folds=5: both decide what is held"),
        ({"folds": 5, "fold": 1, "heldout_bytes": 7}, "data.heldout_bytes=7, data.folds=5: all of a part is held"),
    ):
        raises(f"^{re.escape(message)}", DataConfig, **fields)


def test_data_with_their_own_heldout_examples_have_no_parts():
    config = records.config("classification", "stdlib_titles", folds=5, fold=1)
    raises("data.folds=5: data.path='stdlib_titles' has held-out examples of its own", prepare_examples, config)
