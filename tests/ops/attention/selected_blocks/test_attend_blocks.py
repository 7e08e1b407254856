"""Attention to chosen blocks against its definition, and the sorting of rows into tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Full, reference
from hpnlp.ops.attention.selected_blocks import (
    ChosenBlocks,
    attend_blocks,
    attend_blocks_reference,
    block_summaries,
    choose_blocks,
    document_blocks,
)
from hpnlp.ops.attention.selected_blocks.row_tiles import row_tiles
from tests.contracts import assert_close, once
from tests.messages import raises

BLOCK = 4


def problem(groups, length=19, keys=21, seed=0):
    """q, k, v of 4 and 2 heads, starts of 6 overlapping blocks, and up to 3 blocks for each query and group of heads."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, n, *shape)).astype(jnp.float32))
        for n, shape in ((length, (4, 8)), (keys, (2, 8)), (keys, (2, 6)))
    )
    starts = jnp.asarray(np.sort(rng.integers(0, keys - BLOCK + 1, (2, 6))), jnp.int32).at[:, 4].set(-1)
    order = np.argsort(rng.random((2, length, groups, 6)), axis=3)[..., :3]
    # Overlapping blocks would count keys twice: two of the three are at least a block apart, or none.
    start = np.take_along_axis(np.asarray(starts)[:, None, None], order, axis=3)
    ok = start >= 0
    for i in range(3):
        for j in range(i):
            ok[..., i] &= ~ok[..., j] | (np.abs(start[..., i] - start[..., j]) >= BLOCK)
    chosen = np.where(ok & (rng.random(order.shape) < 0.8), order, -1)
    chosen[0, 2] = -1  # a query without blocks
    return (q, k, v), starts, jnp.asarray(chosen, jnp.int32)


@pytest.mark.parametrize("groups", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_and_gradients_match_the_definition(groups):
    qkv, starts, chosen = problem(groups)
    visible = jnp.asarray(np.random.default_rng(1).random((2, 21, 2)) < 0.8)
    rng = np.random.default_rng(2)
    signs = [jnp.asarray(rng.standard_normal(shape).astype(jnp.float32)) for shape in ((2, 19, 4, 6), (2, 19, 4))]

    def score(function, qkv):
        o, lse = function(*qkv, ChosenBlocks(starts, chosen, BLOCK, visible))
        finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return jnp.sum(o * signs[0]) + jnp.sum(finite * signs[1]), (o, lse)

    def gradients(function, qkv):
        return jax.grad(lambda x: score(function, x), has_aux=True)(qkv)

    functions = attend_blocks, attend_blocks_reference
    actual, expected = once(lambda qkv: [gradients(function, qkv) for function in functions], qkv)
    assert np.isneginf(actual[1][1]).any() and not np.asarray(actual[1][0])[0, 2].any()
    assert_close(actual, expected)


def test_dropout_is_that_of_dense_attention():
    """All blocks together are all keys, so that the same weights are dropped as by `attend`; values and gradients."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 12, n, 8)).astype(jnp.float32)) for n in (4, 2, 2))
    starts = jnp.asarray([[0, 4, 8]] * 2, jnp.int32)
    chosen = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 12, 4, 3))
    dropout = {
        "dropout_rate": 0.4,
        "rng": jax.random.key(1),
        "streams": jnp.arange(7, 15, dtype=jnp.int32).reshape(2, 4),
    }
    signs = jnp.asarray(rng.standard_normal(q.shape).astype(jnp.float32))

    def chosen_blocks(qkv):
        return attend_blocks(*qkv, ChosenBlocks(starts, chosen, 4), **dropout)[0]

    def dense(qkv):
        return reference(*qkv, Full(), **dropout)

    def gradients(function, qkv):
        return jax.value_and_grad(lambda x: jnp.sum(function(x) * signs))(qkv)

    assert_close(*once(lambda qkv: [gradients(f, qkv) for f in (chosen_blocks, dense)], (q, k, v)))


def test_rows_are_sorted_into_tiles_of_one_group():
    groups = np.random.default_rng(0).integers(-1, 5, (3, 29)).astype(np.int32)
    groups[2] = 3  # all rows of one problem in one group
    tiles = once(lambda x: row_tiles(x, 5, 4), jnp.asarray(groups))
    rows, of_tile, places = np.asarray(tiles.rows), np.asarray(tiles.groups), np.asarray(tiles.places)
    assert rows.shape == (3, 29 // 4 + 5, 4)
    for problem in range(3):
        assert sorted(rows[problem][rows[problem] >= 0]) == list(np.flatnonzero(groups[problem] >= 0))
        for row, group in enumerate(groups[problem]):
            if group < 0:
                assert places[problem, row] == -1
            else:
                tile, index = divmod(places[problem, row], 4)
                assert rows[problem, tile, index] == row and of_tile[problem, tile] == group


def test_blocks_are_counted_from_the_start_of_each_document():
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2, 2, 1, 1]], jnp.int32)
    k = np.arange(11.0, dtype=np.float32)[None, :, None, None]

    def everything(ids):
        blocks = document_blocks(ids, 1, 11, 2)
        return blocks, block_summaries(k, blocks), document_blocks(None, 1, 5, 2)

    blocks, summaries, alone = once(everything, ids)
    starts = np.asarray(blocks.starts)
    exists = starts >= 0
    np.testing.assert_array_equal(starts[exists], [0, 3, 5, 7, 9])
    np.testing.assert_array_equal(np.asarray(blocks.segment_ids)[exists], [1, 2, 2, 2, 1])
    np.testing.assert_array_equal(np.asarray(blocks.is_first)[exists], [True, True, False, False, True])
    np.testing.assert_array_equal(blocks.own[0], [0, 0, 2, 3, 3, 5, 5, 7, 7, 9, 9])
    np.testing.assert_array_equal(np.asarray(summaries)[0, exists[0], 0, 0], [0.5, 3.5, 5.5, 7.5, 9.5])
    np.testing.assert_array_equal(alone.starts, [[0, 2, -1]])


def test_chosen_blocks_in_chunks_equal_those_of_one_call(monkeypatch):
    (q, k, _), *_ = problem(4, length=21)
    ids = jnp.asarray([[1] * 9 + [2] * 12, [1] * 21], jnp.int32)

    def choices(q, k):
        blocks = document_blocks(ids, 2, 21, 2)
        summaries = block_summaries(k, blocks)
        whole = choose_blocks(q, summaries, blocks, 3, segment_ids=ids)
        monkeypatch.setattr("hpnlp.ops.attention.selected_blocks.blocks.CHUNK", 8)
        return whole, choose_blocks(q, summaries, blocks, 3, segment_ids=ids), blocks.starts

    whole, in_chunks, starts = jax.device_get(once(choices, q, k))
    np.testing.assert_array_equal(whole, in_chunks)
    starts = np.take_along_axis(starts[:, None, None], np.maximum(whole, 0), axis=3)
    assert ((whole < 0) | (starts + 2 <= np.arange(21)[None, :, None, None])).all()
    assert (whole[1, 20] >= 0).all()


def test_invalid_arguments_raise():
    qkv, starts, chosen = problem(4)
    for change, message in (
        ({"starts": starts[:1]}, "expected equal B and T"),
        ({"block": 22}, "block 22: expected 1 to 21"),
        ({"block": 0}, "block 0: expected 1 to 21"),
        ({"chosen": chosen[:, :, :3]}, "chosen has 3 groups of heads for 4 query and 2 key heads"),
        ({"chosen": chosen[:, :5]}, "expected equal B and T"),
    ):
        arguments = {"starts": starts, "chosen": chosen, "block": BLOCK} | change
        raises(message, attend_blocks, *qkv, ChosenBlocks(**arguments))
    (q, k, v), blocks = qkv, ChosenBlocks(starts, chosen, BLOCK)
    raises("dropout_rate 0.5: .*a key `rng`", attend_blocks, q, k, v, blocks, dropout_rate=0.5)
    raises("expected equal B, equal H in q and k, equal S", attend_blocks, q, k, v[:, :5], blocks)
    raises("block 0: expected at least 1", document_blocks, None, 1, 5, 0)
    raises("count -1: expected 0 or more", lambda: choose_blocks(q, k, document_blocks(None, 2, 21, 1), -1))


def test_no_blocks_give_zeros():
    (q, k, v), starts, chosen = problem(4)
    for arrays, lists in (((q, k, v), chosen[..., :0]), ((q[:, :0], k, v), chosen[:, :0])):
        o, lse = attend_blocks(*arrays, ChosenBlocks(starts, lists, BLOCK))
        assert o.shape == (*lists.shape[:3], 6) and not np.asarray(o).any() and np.isneginf(lse).all()


def test_weights_of_large_scores_are_exact_in_the_backward_pass():
    """Scores of 1e8, of different and of equal keys, against the definition; gradients of values are sums of the weights."""
    (q, k, v), starts, chosen = problem(2)
    blocks = ChosenBlocks(starts, chosen, BLOCK)
    signs = jnp.asarray(np.random.default_rng(2).standard_normal((2, 19, 4, 6)).astype(jnp.float32))

    def gradients(k):
        functions = attend_blocks, attend_blocks_reference
        return [jax.grad(lambda v, f=f: jnp.sum(f(q * 1e4, k * 1e4, v, blocks)[0] * signs))(v) for f in functions]

    for actual, expected in once(lambda k: [gradients(x) for x in (k, jnp.broadcast_to(k[:, :1], k.shape))], k):
        assert_close(actual, expected)
