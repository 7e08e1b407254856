"""Batches of random lengths: their distribution, the stream that they cut, resumption and errors."""

import json

import numpy as np
import pytest

from hpnlp.data import DataConfig, prepare
from hpnlp.data.random_lengths import SMALLEST, VALUES, RandomLengths
from hpnlp.types import InputError
from tests.data.batches import assert_equal, config, take
from tests.messages import raises


@pytest.mark.parametrize(("base", "deviation"), [(70, 5.0), (20, 5.0), (8, 0.3)])
def test_lengths_follow_the_distribution(base, deviation):
    lengths = RandomLengths(3, base, deviation)
    positions, drawn = np.array([lengths.at(batch) for batch in range(5000)]).T
    np.testing.assert_array_equal(positions, np.cumsum(drawn) - drawn)
    assert set(drawn.tolist()) <= set(lengths.values) and len(lengths.values) <= VALUES and min(drawn) >= SMALLEST
    assert RandomLengths(3, base, deviation).at(4321) == (positions[4321], drawn[4321])
    assert RandomLengths(4, base, deviation).at(4321) != (positions[4321], drawn[4321])
    if base == 70:  # no value of one mean is a value of the other
        halves = drawn < 50
        assert halves.mean() == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / 5000) ** 0.5)
        assert drawn[~halves].mean() == pytest.approx(70, abs=4 * 5 / 5000**0.5)
        assert drawn[~halves].std() == pytest.approx(5, rel=0.05)


def test_examples_of_a_stream_continue_from_batch_to_batch(stories):
    """More than a pass over the text: labels are the tokens that follow, and no batch has padding."""
    corpus = prepare(config(stories, order="stream", length_deviation=4.0))
    count = 2 + corpus.train_tokens // 24
    batches = take(corpus.train(seed=2), count)
    lengths = RandomLengths(2, 32, 4.0)
    assert [batch["tokens"].shape[1] for batch in batches] == [lengths.at(batch)[1] for batch in range(count)]
    read = {name: np.concatenate([batch[name] for batch in batches], axis=1) for name in batches[0]}
    follows = read["segment_ids"][:, 1:] == read["segment_ids"][:, :-1]
    assert (read["segment_ids"] > 0).all() and not follows.all()
    np.testing.assert_array_equal(read["labels"][:, :-1][follows], read["tokens"][:, 1:][follows])
    np.testing.assert_array_equal(read["positions"][:, 1:], np.where(follows, read["positions"][:, :-1] + 1, 0))
    text = corpus.read_training_text(10**6)[0]
    for tokens in read["tokens"]:
        decoded = corpus.tokenizer.decode(tokens)
        assert len(decoded) > len(text)
        # The last token of the text is a label only.
        assert decoded[: len(text) - 1] in (text[:-1] + text) or decoded[: len(text) - 1] in (text + text)


def test_a_resumed_stream_returns_the_same_batches_and_no_other_stream_resumes(stories):
    options = {"order": "stream", "length_deviation": 4.0}
    batches = prepare(config(stories, **options)).train(seed=3)
    take(batches, 7)
    state = json.loads(json.dumps(batches.get_state()))
    resumed = prepare(config(stories, **options)).train(seed=3)
    resumed.set_state(state)
    assert_equal(take(resumed, 4), take(batches, 4))
    shards = [prepare(config(stories, **options)).train(seed=3, process_index=i, process_count=2) for i in (0, 1)]
    whole, parts = take(prepare(config(stories, **options)).train(seed=3), 3), [take(shard, 3) for shard in shards]
    assert_equal([{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*parts, strict=True)], whole)
    with pytest.raises(InputError, match="is of another lengths of batches"):
        prepare(config(stories, order="stream", length_deviation=2.0)).train(seed=3).set_state(state)


def test_deviations_that_do_not_fit_raise():
    for options, message in (
        ({"length_deviation": 5.0}, "sequences of data.order='shuffle' have one length: set data.order='stream'"),
        ({"length_deviation": -1.0, "order": "stream"}, "data.length_deviation=-1.0: expected 0 to a quarter"),
        ({"length_deviation": 5.0, "order": "stream", "seq_len": 16}, "expected 0 to a quarter of data.seq_len=16"),
    ):
        raises(message, DataConfig, **options)
