"""Training batches of examples of similar lengths: the rows, their widths, resuming, and processes."""

import json

import numpy as np
import pytest

from hpnlp.data.buckets import BucketOrder
from hpnlp.data.examples import prepare_examples
from tests.data.batches import assert_equal, take
from tests.data.examples.records import KINDS, config, write
from tests.messages import raises


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """The same examples with three buckets and with one."""
    root = tmp_path_factory.mktemp("examples")
    path = write(root / "a.jsonl", KINDS[request.param][0]())
    return [prepare_examples(config(request.param, path, cache=str(root / "cache"), buckets=n)) for n in (3, 1)]


def rows_of(batches):
    """Each row without padding."""
    return sorted(
        row[segments > 0].tobytes()
        for batch in batches
        for row, segments in zip(batch["tokens"], batch["segment_ids"], strict=True)
    )


def test_batches_of_an_epoch_have_the_rows_of_padded_batches_at_fewer_widths(pair):
    """The last rows of an epoch, by which it exceeds a multiple of the batch size, are missing."""
    bucketed, padded = pair
    count = bucketed.train_examples
    batches, expected = take(bucketed.train(seed=0), count // 4), take(padded.train(seed=0), count)
    stored = bucketed.stored["train"]
    lengths = bucketed.kind.row_lengths(np.concatenate(list(stored.lengths())), bucketed.tokenizer, 40)
    order = BucketOrder(lengths, 3, 40, 4, 0)
    widths = {batch["tokens"].shape[1] for batch in batches}
    assert widths == set(order.widths) and min(widths) < 40
    assert len(widths) > 1 or lengths.max() <= 8
    rows, possible = rows_of(batches), set(rows_of(expected))
    assert len(rows) == count // 4 * 4 and len(set(rows)) == len(rows) and set(rows) <= possible
    # The same arrays as those of a padded batch with these rows, cut to the width.
    first = batches[0]
    numbers, width = order.batch(0)
    whole = bucketed.kind.batch(stored, numbers.tolist(), 4, bucketed.tokenizer, 40)
    of_target = [name for name in whole if name.startswith("target_")]  # targets have a length of their own
    cropped = {
        name: array if array.ndim == 1 or name in of_target else array[:, :width] for name, array in whole.items()
    }
    assert_equal([first], [cropped])
    assert all(
        not array[:, width:].any() for name, array in whole.items() if "segment" in name and name not in of_target
    )


@pytest.mark.parametrize("steps", [0, 5, 40])
def test_resumed_iterator_returns_the_same_batches(pair, steps):
    batches = pair[0].train(seed=3)
    take(batches, steps)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 4)
    resumed = pair[0].train(seed=3)
    take(resumed, 2)
    resumed.set_state(state)
    assert_equal(take(resumed, 4), expected)


def test_processes_share_a_batch_of_one_width(pair):
    alone = take(pair[0].train(seed=1), 8)
    shards = [take(pair[0].train(seed=1, process_index=i, process_count=2), 8) for i in range(2)]
    together = [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*shards, strict=True)]
    assert_equal(together, alone)


def test_heldout_batches_have_the_examples_of_padded_ones_at_fewer_widths(pair):
    bucketed, padded = pair
    for limit in (None, 2):
        batches, expected = (list(data.heldout(batch_size=4, limit=limit)) for data in pair)
        assert len(batches) == len(expected) and rows_of(batches) == rows_of(expected)
        widths = [batch["tokens"].shape[1] for batch in batches]
        allowed = {*BucketOrder(bucketed._lengths("train"), 3, 40, 4, 0).widths, 40}
        assert set(widths) <= allowed and min(widths) < 40
        if bucketed.kind.compares_examples:  # the same examples in each batch
            assert [rows_of([batch]) for batch in batches] == [rows_of([batch]) for batch in expected]
        else:
            assert widths == sorted(widths)
    shards = [list(bucketed.heldout(batch_size=4, process_index=i, process_count=2)) for i in range(2)]
    together = [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*shards, strict=True)]
    assert_equal(together, list(bucketed.heldout(batch_size=4)))


def test_states_of_another_division_raise(tmp_path):
    path = write(tmp_path / "a.jsonl", KINDS["classification"][0]())
    one, other = (prepare_examples(config("classification", path, buckets=n)) for n in (2, 3))
    raises("of another division into buckets", lambda: other.train(seed=0).set_state(one.train(seed=0).get_state()))
    raises("seed=-1", one.train, seed=-1)


def test_orders_have_the_texts_of_each_bucket_and_the_longest_of_the_one_before():
    """Two epochs: all texts but 3 of 103, padded to the width of their bucket, but for less than a batch of each bucket."""
    lengths = np.random.default_rng(0).integers(1, 200, 103)
    order = BucketOrder(lengths, 4, 199, 5, 7)
    assert len(order.widths) == 4 and order.widths[-1] == 199
    epochs = [[order.batch(n) for n in range(start, start + 20)] for start in (0, 20)]
    left_out = []
    for batches in epochs:
        numbers = np.concatenate([texts for texts, _ in batches])
        assert len(np.unique(numbers)) == 100
        left_out.append(set(range(103)) - set(numbers.tolist()))
        own = [order.widths[np.searchsorted(order.widths, lengths[n])] for texts, _ in batches for n in texts]
        widths = np.repeat([width for _, width in batches], 5)
        assert (widths >= own).all() and (widths > own).sum() < 4 * 5
    assert left_out[0] != left_out[1] and [width for _, width in epochs[0]] != [width for _, width in epochs[1]]


def test_fewer_texts_than_a_batch_are_repeated():
    order = BucketOrder(np.array([3, 9]), 2, 16, 5, 0)
    for number in range(3):
        texts, width = order.batch(number)
        assert len(texts) == 5 and set(texts) == {0, 1} and width == 16
