"""The schedule of ring attention: it covers the mask, and its work is proportional to the mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpnlp.ops.attention import Blockwise, Causal, Dilated, Full, Global, Strided, Window
from hpnlp.parallel.ring_schedule import FIRST_MASK, HIDDEN, VISIBLE, RingSchedule, assign_chunks, make_schedule

T = 64
PLAIN = tuple((2 * d, 2 * d + 1) for d in range(4))
ZIGZAG = tuple((d, 7 - d) for d in range(4))
MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": Causal() & Window(9, 0),
    "both ways": Window(3, 20),
    "dilated": Causal() & Dilated(4, 3),
    "shifted": Causal().shift(5),
    "empty": Window(1, 0).shift(200),
    "blockwise": Causal() & Blockwise(24),
    "strided": Causal() & Strided(8),
    "global": Causal() & (Window(6) | Global(5)),
}
over_masks = pytest.mark.parametrize("name", MASKS)


def dense(mask, length=T):
    return mask.to_dense(length)


@over_masks
@pytest.mark.parametrize("chunks", [PLAIN, ZIGZAG], ids=["plain", "zigzag"])
def test_schedule_equals_mask(name, chunks):
    """Hidden pairs of chunks allow no pair of tokens, visible ones all, and the others those of their mask."""
    schedule = make_schedule(MASKS[name], T, chunks)
    assert isinstance(schedule, RingSchedule)
    if not MASKS[name].relative:
        assert schedule.masks == (MASKS[name],) and schedule.hop_count == 4
        return
    size, allowed = T // 8, dense(MASKS[name])
    for i in range(8):
        for j in range(8):
            block, kind = allowed[i * size :][:size, j * size :][:, :size], schedule.kinds[i][j]
            uniform = {HIDDEN: np.zeros, VISIBLE: np.ones}
            scheduled = (
                uniform[kind](block.shape) if kind in uniform else dense(schedule.masks[kind - FIRST_MASK], size)
            )
            np.testing.assert_array_equal(block, scheduled)
    # Every pair that is not hidden meets at one of the hops.
    hops = {hop % 4 for hop in schedule.hops}
    for d in range(4):
        for other in range(4):
            active = any(schedule.kinds[i][j] for i in chunks[d] for j in chunks[other])
            assert not active or (d - other) % 4 in hops


def test_mask_is_evaluated_on_few_pairs_of_tokens(monkeypatch):
    """Once or a few times for each distance, however long the chunks are."""
    evaluated, at = [], Dilated.at
    monkeypatch.setattr(Dilated, "at", lambda mask, q, k: evaluated.append(np.broadcast(q, k).size) or at(mask, q, k))
    make_schedule(Dilated(5, 3), 8192, ZIGZAG)
    assert 2 * 8192 <= sum(evaluated) <= 4 * 8192


def test_work_is_proportional_to_the_mask():
    """For a window, the computed pairs and the hops; for a causal mask, the same work on every device."""
    chunks = tuple((2 * d, 2 * d + 1) for d in range(8))
    schedule = make_schedule(Causal() & Window(63, 0), 1024, chunks)
    computed, total = schedule.pair_counts
    assert (computed, total) == (16 + 15, 256) and (schedule.first_hop, schedule.hop_count) == (0, 2)
    both = make_schedule(Window(64, 64), 1024, chunks)
    assert (both.first_hop % 8, both.hop_count) == (7, 3)
    assert make_schedule(MASKS["empty"], T, PLAIN).hop_count == 0

    zigzag = assign_chunks([Causal()], 1024, 8)
    assert zigzag == tuple((d, 15 - d) for d in range(8))
    kinds = np.array(make_schedule(Causal(), 1024, zigzag).kinds)
    work = np.array(
        [
            [np.sum(kinds[np.ix_(pair, zigzag[(d - hop) % 8])] != HIDDEN) for hop in range(8)]
            for d, pair in enumerate(zigzag)
        ]
    )
    assert (work[:, 0] == 3).all() and (work[:, 1:] == 2).all()


@pytest.mark.parametrize("mask", [Full(), Causal() & Window(100, 0), Window(30, 30)])
def test_tokens_keep_their_order_where_a_zigzag_is_not_faster(mask):
    assert assign_chunks([mask], 1024, 8) == tuple((2 * d, 2 * d + 1) for d in range(8))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(-20, 20), st.sampled_from([1, 2, 3, 5]))
def test_hops_cover_all_visible_pairs_of_any_window(left, right, shift, devices):
    mask, length = Window(left, right).shift(shift), 2 * devices * 5
    for chunks in (
        tuple((2 * d, 2 * d + 1) for d in range(devices)),
        tuple((d, 2 * devices - 1 - d) for d in range(devices)),
    ):
        schedule, allowed = make_schedule(mask, length, chunks), mask.to_dense(length)
        hops = {hop % devices for hop in schedule.hops}
        for d in range(devices):
            for other in range(devices):
                queries, keys = (np.concatenate([np.arange(c * 5, c * 5 + 5) for c in chunks[x]]) for x in (d, other))
                assert (d - other) % devices in hops or not allowed[np.ix_(queries, keys)].any()
