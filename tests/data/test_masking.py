"""Masks of tokens: rates within four standard errors, runs, and the same masks for every process and after a resume."""

import json

import numpy as np
import pytest

from hpnlp.data import prepare
from hpnlp.data.masking import MaskedCorpus, mask_tokens, sequence_rng
from hpnlp.data.tokenizers import ByteTokenizer
from tests.data.batches import assert_equal, config, take
from tests.messages import raises

TOKENIZER = ByteTokenizer()
MASK = TOKENIZER.find_mask_id()
SPECIAL = [256, 257, 258]


def masked(tokens, segment_ids=None, number=0, **options):
    segment_ids = np.ones_like(tokens) if segment_ids is None else segment_ids
    return mask_tokens(tokens, segment_ids, sequence_rng(5, number), TOKENIZER, MASK, **options)


def assert_rate(hits, share):
    """The share of hits is within four standard errors of `share`, for independent hits."""
    assert abs(hits.mean() - share) < 4 * np.sqrt(share * (1 - share) / hits.size)


def test_selected_tokens_become_masks_random_tokens_or_stay():
    tokens = np.full(200_000, ord("a"))
    batch = masked(tokens)
    selected = batch["weights"] == 1
    assert_rate(selected, 0.15)
    hidden = batch["tokens"][selected]
    assert_rate(hidden == MASK, 0.8)
    is_random = (hidden != MASK) & (hidden != ord("a"))
    ids = TOKENIZER.vocab_size - len(SPECIAL)
    assert_rate(is_random, 0.1 * (1 - 1 / ids))
    assert not np.isin(hidden, SPECIAL).any()
    counts = np.bincount(hidden[is_random], minlength=TOKENIZER.vocab_size)
    assert (np.flatnonzero(counts == 0).tolist(), counts.max() < 40) == ([ord("a"), *SPECIAL], True)
    assert (batch["labels"] == np.where(selected, tokens, 0)).all()
    assert (batch["tokens"][~selected] == tokens[~selected]).all()
    assert [batch[name].dtype for name in ("tokens", "labels", "weights")] == [np.int32, np.int32, np.float32]


@pytest.mark.parametrize("span", [0.0, 3.0])
def test_special_tokens_and_padding_are_never_selected(span):
    tokens = np.arange(30_000) % 264
    segment_ids = (np.arange(30_000) < 20_000).astype(np.int32)
    batch = masked(tokens, segment_ids, span=span)
    assert not batch["weights"][np.isin(tokens, SPECIAL) | (segment_ids == 0)].any()
    assert batch["weights"].any()


@pytest.mark.parametrize(("rate", "span"), [(0.15, 3.0), (0.3, 1.0), (0.4, 8.0)])
def test_runs_have_the_mean_length_and_every_token_the_rate(rate, span):
    weights = np.stack([masked(np.full(200, ord("a")), number=i, rate=rate, span=span)["weights"] for i in range(4000)])
    for column in (0, 1, 20, 199):  # sequences are independent, tokens of one are not
        assert_rate(weights[:, column], rate)
    edges = np.diff(np.pad(weights, ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    lengths = (ends - starts)[:, 1]
    inner = lengths[(starts[:, 1] > 0) & (starts[:, 1] < 50)]  # runs that begin within the sequence, and end there
    assert abs(inner.mean() - span) <= 4 * inner.std() / np.sqrt(len(inner))


def test_tokens_of_a_run_are_hidden_in_the_same_way():
    tokens = np.full(20_000, ord("a"))
    batch = masked(tokens, span=4.0)
    selected = batch["weights"] == 1
    inside = selected[1:] & selected[:-1]
    is_mask = batch["tokens"] == MASK
    assert (is_mask[1:] == is_mask[:-1])[inside].all()


def test_masks_depend_on_seed_and_number_alone():
    tokens = np.arange(100) % 256
    first, again, other = (masked(tokens, number=number) for number in (7, 7, 8))
    assert_equal([first], [again])
    assert (first["weights"] != other["weights"]).any()


@pytest.fixture
def corpus(stories):
    return MaskedCorpus(prepare(config(stories, packing="fit")))


def test_masked_batches_hide_the_tokens_of_the_corpus(corpus):
    plain = take(corpus.corpus.train(seed=2), 5)
    for batch, expected in zip(take(corpus.train(seed=2), 5), plain, strict=True):
        assert set(batch) == {"tokens", "labels", "segment_ids", "positions", "weights"}
        restored = np.where(batch["weights"] > 0, batch["labels"], batch["tokens"])
        np.testing.assert_array_equal(restored, expected["tokens"])
        np.testing.assert_array_equal(batch["segment_ids"], expected["segment_ids"])


def test_masked_batches_resume_and_shard(corpus):
    alone = corpus.train(seed=1)
    take(alone, 7)
    state = json.loads(json.dumps(alone.get_state()))
    expected = take(alone, 4)
    for count in (1, 2, 4):
        shards = [corpus.train(seed=1, process_index=i, process_count=count) for i in range(count)]
        for shard in shards:
            shard.set_state(state)
        together = [
            {name: np.concatenate([shard[name] for shard in batch]) for name in batch[0]}
            for batch in zip(*(take(shard, 4) for shard in shards), strict=True)
        ]
        assert_equal(together, expected)
    heldout = [list(corpus.heldout(batch_size=4, process_index=i, process_count=2)) for i in range(2)]
    rows = [np.concatenate([a["tokens"], b["tokens"]]) for a, b in zip(*heldout, strict=True)]
    for batch, row in zip(corpus.heldout(batch_size=4), rows, strict=True):
        np.testing.assert_array_equal(batch["tokens"], row)


def test_masks_of_a_sequence_change_with_the_epoch(corpus):
    rows = corpus.corpus.train_rows
    batches = take(corpus.train(seed=0), 2 * rows // 4 + 1)
    restored = [np.where(b["weights"] > 0, b["labels"], b["tokens"]) for b in batches]
    keys = [row.tobytes() for batch in restored for row in batch]
    weights = [row for batch in batches for row in batch["weights"]]
    second = keys.index(keys[0], 1)
    assert (weights[0] != weights[second]).any()


def test_invalid_masks_raise(corpus):
    for options, message in (
        ({"rate": 0.0}, "rate=0.0: expected a probability between 0 and 1"),
        ({"span": 0.5}, "span=0.5: expected a mean length of 1 to 100, or 0 for single tokens"),
        ({"rate": 0.9, "span": 2.0}, "runs would touch each other: pass a longer span or a lower rate"),
    ):
        raises(message, MaskedCorpus, corpus.corpus, **options)
