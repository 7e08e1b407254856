"""Iterators over labelled examples: resume bit for bit, shards of several processes, and one pass over held-out examples."""

import json
import operator

import numpy as np
import pytest

from hpnlp.data.examples import prepare_examples
from hpnlp.data.reading.split import hash_fraction
from tests.data.batches import assert_equal, take
from tests.data.examples.records import KINDS, config, write
from tests.messages import raises


@pytest.fixture(scope="module", params=KINDS)
def examples(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("examples")
    rows, _, _ = KINDS[request.param]
    return prepare_examples(config(request.param, write(root / "a.jsonl", rows()), cache=str(root / "cache")))


def weights(batch):
    values = batch.get("weights", batch.get("target_weights"))
    return values if values.ndim == 1 else values.max(axis=1)


@pytest.mark.parametrize("steps", [0, 5, 40])
def test_resumed_iterator_returns_the_same_batches(examples, steps):
    batches = examples.train(seed=3)
    take(batches, steps)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 4)
    resumed = examples.train(seed=3)
    take(resumed, 2)  # read ahead, which set_state must discard
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert_equal(take(resumed, 4), expected)


def test_processes_share_a_batch(examples):
    for count in (2, 4):
        alone = examples.train(seed=1)
        shards = [examples.train(seed=1, process_index=i, process_count=count) for i in range(count)]
        together = [
            {name: np.concatenate([shard[name] for shard in batch]) for name in batch[0]}
            for batch in zip(*(take(shard, 5) for shard in shards), strict=True)
        ]
        assert_equal(together, take(alone, 5))


def test_each_epoch_has_every_example_once_in_a_new_order(examples):
    count = examples.train_examples
    batches = take(examples.train(seed=0), 2 * count // 4 + 1)
    rows = [row.tobytes() for batch in batches for row in batch["tokens"]]
    first, second = rows[:count], rows[count : 2 * count]
    assert sorted(first) == sorted(second) and first != second
    other = [row.tobytes() for batch in take(examples.train(seed=1), count // 4 + 1) for row in batch["tokens"]][:count]
    assert sorted(first) == sorted(other) and first != other


@pytest.mark.parametrize("process_count", [1, 3])
def test_heldout_has_every_example_once(examples, process_count):
    per_process = [
        list(examples.heldout(batch_size=6, process_index=i, process_count=process_count)) for i in range(process_count)
    ]
    assert len({len(batches) for batches in per_process}) == 1
    in_order = [batch for batches in zip(*per_process, strict=True) for batch in batches]
    assert all(len(batch["tokens"]) == 6 // process_count for batch in in_order)
    rows = [row for batch in in_order for row in batch["tokens"][weights(batch) > 0]]
    assert len(rows) == examples.heldout_examples
    stored = examples.stored["heldout"]
    for number, row in enumerate(rows):
        assert examples.tokenizer.decode(row).startswith(stored.text(number, 0)[:18])
    assert all((batch["segment_ids"][weights(batch) == 0] == 0).all() for batch in in_order)


def test_iterators_over_heldout_examples_have_a_length(examples):
    for options in ({"batch_size": 6}, {"batch_size": 2, "limit": 2}):
        batches = examples.heldout(**options)
        lengths = [operator.length_hint(batches)]
        lengths += [operator.length_hint(batches) for _ in batches]
        assert lengths == list(range(lengths[0], -1, -1)) and lengths[0] == len(list(examples.heldout(**options)))


def test_heldout_limit_spreads_over_the_examples(examples):
    everything = [row.tobytes() for batch in examples.heldout(batch_size=1) for row in batch["tokens"]]
    limited = [row.tobytes() for batch in examples.heldout(batch_size=2, limit=2) for row in batch["tokens"]]
    assert limited == [everything[i * len(everything) // 4] for i in range(4)]


def test_training_examples_are_all_but_the_heldout(examples):
    texts = {name: sorted(stored.texts()) for name, stored in examples.stored.items()}
    assert len(texts["train"]) + len(texts["heldout"]) == 60 and not set(texts["train"]) & set(texts["heldout"])
    assert examples.heldout_sets == ("heldout",)


def test_states_of_other_data_raise(tmp_path):
    rows = KINDS["classification"][0]()
    path = write(tmp_path / "a.jsonl", rows)
    batches = prepare_examples(config("classification", path)).train(seed=0)
    state = batches.get_state()
    number = next(i for i in range(60) if i % 3 < 2 and hash_fraction(f"a.jsonl#{i}") > 0.2)
    rows[number]["label"] = "class 2"
    changed = prepare_examples(config("classification", write(path, rows)))
    raises("of another data set: .*old data back", lambda: changed.train(seed=0).set_state(state))
    raises("damaged.*another checkpoint", batches.set_state, {})


def test_invalid_heldout_arguments_raise(examples):
    for arguments, message in (
        ({"process_count": 3}, "batch_size=4 is not a multiple of the 3 processes"),
        ({"limit": 0}, "limit=0"),
        ({"name": "challenge"}, "there are no examples 'challenge': expected 'heldout'"),
    ):
        raises(message, examples.heldout, batch_size=4, **arguments)
