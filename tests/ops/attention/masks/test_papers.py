"""Masks and named patterns against the definitions of their papers, in plain Python.

Each definition returns the set of keys of one query, in the paper's notation; positions and blocks count from 0.
"""

import numpy as np
import pytest

from hpnlp.ops.attention import (
    Blockwise,
    Causal,
    Dilated,
    Fixed,
    Full,
    Global,
    GlobalAt,
    PerHead,
    Prefix,
    RandomBlocks,
    Sinks,
    Strided,
    Where,
    Window,
    bigbird,
    longformer,
    sparse_transformer_fixed,
    sparse_transformer_strided,
)
from hpnlp.ops.attention.block_sparse.block_mask import density

SHAPES = [(1, 1), (1, 37), (37, 1), (24, 24), (37, 37), (37, 53), (53, 37)]  # blocks of 4, 6 and 8 fit some of them


def written_out(keys_of, length, keys):
    """The dense mask, bool `[T, S]`, of a function that returns the set of keys of each query."""
    rows = []
    for i in range(length):
        seen = keys_of(i, length, keys)
        rows.append([j in seen for j in range(keys)])
    return np.array(rows, bool).reshape(length, keys)


def those(condition):
    """The definition {j : condition(i, j)}."""
    return lambda i, length, keys: {j for j in range(keys) if condition(i, j)}


def up_to(i, wanted):
    """The members of `wanted` up to i, as in autoregressive attention."""
    return {j for j in wanted if j <= i}


# Child et al. 2019, "Generating long sequences with sparse transformers", sec. 4.3.


def strided_1(stride):
    """A(1) = {t, t + 1, ..., i} with t = max(0, i - l)."""
    return lambda i, length, keys: set(range(max(0, i - stride), i + 1))


def strided_2(stride):
    """A(2) = {j : (i - j) mod l = 0}."""
    return lambda i, length, keys: up_to(i, {j for j in range(keys) if (i - j) % stride == 0})


def fixed_1(block):
    """A(1) = {j : floor(j / l) = floor(i / l)}."""
    return lambda i, length, keys: up_to(i, {j for j in range(keys) if j // block == i // block})


def fixed_2(block, columns):
    """A(2) = {j : j mod l in {t, t + 1, ..., l}} with t = l - c."""
    ends = set(range(block - columns, block + 1))
    return lambda i, length, keys: up_to(i, {j for j in range(keys) if j % block in ends})


def union(*sets):
    return lambda i, length, keys: set().union(*(keys_of(i, length, keys) for keys_of in sets))


# Beltagy et al. 2020, "Longformer", sec. 3.1.


def sliding(window, dilation=1):
    """window / 2 tokens on each side, with gaps of size `dilation`, and the token itself."""
    steps = range(-(window // 2), window // 2 + 1)
    return lambda i, length, keys: {i + step * dilation for step in steps}


def with_global(keys_of, chosen):
    """The chosen tokens attend to all tokens across the sequence, and all tokens attend to them."""
    return lambda i, length, keys: set(range(keys)) if i in chosen else keys_of(i, length, keys) | set(chosen)


def causal(keys_of):
    return lambda i, length, keys: up_to(i, keys_of(i, length, keys))


# Zaheer et al. 2020, "Big Bird", app. D: blocks of queries see blocks of keys.


def blocks(block, key_blocks_of):
    """All keys of the blocks that the query's block sees."""

    def keys_of(i, length, keys):
        return {b * block + place for b in key_blocks_of(i // block) for place in range(block)}

    return keys_of


def block_window(block, width):
    """The key blocks q - (w - 1) / 2 to q + (w - 1) / 2."""
    return blocks(block, lambda q: range(q - (width - 1) // 2, q + (width - 1) // 2 + 1))


def big_bird(block, width, global_blocks):
    """The window and the global part of the internal construction (ITC), where the first tokens are global."""
    return with_global(block_window(block, width), range(global_blocks * block))


# Qiu et al. 2020, "Blockwise self-attention for long document understanding": j is seen where pi(block of i) = block of j.


def permuted(block, pi):
    return blocks(block, lambda q: {pi[q]} if q < len(pi) else set())


def turned(block, count, by):
    """The mask of a head whose blocks see the block `by` places to the right, in a ring of `count` blocks."""
    return (Blockwise(block).shift(by * block) | Blockwise(block).shift((by - count) * block)) & Prefix(count * block)


# Xiao et al. 2023, "StreamingLLM", fig. 1(d): the first tokens, and a rolling window of the latest.


def streaming(sinks, recent):
    return lambda i, length, keys: up_to(i, {*range(sinks), *range(i - recent + 1, i + 1)})


# Raffel et al. 2020, "T5", fig. 3, right: tokens of the prefix see the whole prefix; later tokens are causal.


def prefix_lm(count):
    return lambda i, length, keys: set(range(count)) | set(range(i + 1)) if i < count else set(range(i + 1))


DEFINITIONS = [
    (Full(), those(lambda i, j: True)),
    (Causal(), those(lambda i, j: j <= i)),
    (Window(5, 2), those(lambda i, j: i - 5 <= j <= i + 2)),
    (Window(0), those(lambda i, j: i == j)),
    (Window(3), sliding(6)),
    (Window(99), those(lambda i, j: True)),
    (Dilated(3, 4), sliding(6, 4)),
    (Dilated(0, 4), those(lambda i, j: i == j)),
    (Dilated(4, 1), sliding(8)),
    (Blockwise(6), permuted(6, range(99))),
    (Blockwise(1), those(lambda i, j: i == j)),
    (turned(4, 5, 1), permuted(4, [1, 2, 3, 4, 0])),
    (turned(4, 5, 3), permuted(4, [3, 4, 0, 1, 2])),
    (Strided(5), those(lambda i, j: (i - j) % 5 == 0)),
    (Strided(1), those(lambda i, j: True)),
    (Fixed(6, 2), those(lambda i, j: j % 6 in (4, 5))),
    (Fixed(6, 0), those(lambda i, j: False)),
    (Fixed(6, 6), those(lambda i, j: True)),
    (Global(3), with_global(lambda *_: set(), range(3))),
    (Global(0), those(lambda i, j: False)),
    (GlobalAt((2, 11, 30)), with_global(lambda *_: set(), {2, 11, 30})),
    (GlobalAt(()), those(lambda i, j: False)),
    (Sinks(4), those(lambda i, j: j < 4)),
    (Sinks(0), those(lambda i, j: False)),
    (Prefix(9), those(lambda i, j: i < 9 and j < 9)),
    (Prefix(0), those(lambda i, j: False)),
    (Causal() & Window(4), those(lambda i, j: j <= i and abs(i - j) <= 4)),
    (Causal() & ~Window(4), those(lambda i, j: j <= i and not abs(i - j) <= 4)),
    (~Causal(), those(lambda i, j: j > i)),
    (Causal().shift(3), those(lambda i, j: j - 3 <= i)),
    (Causal().shift(-3), those(lambda i, j: j + 3 <= i)),
    ((Fixed(6, 2) & Causal()).shift(2), those(lambda i, j: j - 2 <= i and (j - 2) % 6 >= 4)),
    (Causal() | Prefix(9), prefix_lm(9)),
    (Causal() | Prefix(0), prefix_lm(0)),
    (Causal() & (Sinks(4) | Window(7)), streaming(4, 8)),
    (Causal() & (Sinks(0) | Window(7)), streaming(0, 8)),
    (sparse_transformer_strided(6), union(strided_1(6), strided_2(6))),
    (sparse_transformer_strided(1), union(strided_1(1), strided_2(1))),
    (sparse_transformer_fixed(6, 2), union(fixed_1(6), fixed_2(6, 2))),
    (sparse_transformer_fixed(6, 0), fixed_1(6)),
    (sparse_transformer_fixed(8, 8), those(lambda i, j: j <= i)),
    (longformer(8), sliding(8)),
    (longformer(8, 3), with_global(sliding(8), range(3))),
    (longformer(0, 3), with_global(sliding(0), range(3))),
    (longformer(6, 2, dilation=3), with_global(sliding(6, 3), range(2))),
    (longformer(8, 3, causal=True), causal(with_global(sliding(8), range(3)))),
    (longformer(6, 0, dilation=3, causal=True), causal(sliding(6, 3))),
    (longformer(6) | GlobalAt((0, 20)), with_global(sliding(6), {0, 20})),
    (bigbird(4, random=0), big_bird(4, 3, 2)),
    (bigbird(6, window=5, global_blocks=1, random=0), big_bird(6, 5, 1)),
    (bigbird(8, window=1, global_blocks=0, random=0), block_window(8, 1)),
    (bigbird(4, random=0, causal=True), causal(big_bird(4, 3, 2))),
]
HEADS = [
    (sparse_transformer_strided(6, heads=4), [strided_1(6)] * 2 + [strided_2(6)] * 2),
    (sparse_transformer_fixed(6, 2, heads=2), [fixed_1(6), fixed_2(6, 2)]),
    (sparse_transformer_strided(5, heads=2, causal=False), [sliding(10), those(lambda i, j: (i - j) % 5 == 0)]),
    (PerHead((Blockwise(4), turned(4, 5, 1))), [permuted(4, range(99)), permuted(4, [1, 2, 3, 4, 0])]),
    (PerHead((Window(2), Full())) & Causal(), [causal(sliding(4)), those(lambda i, j: j <= i)]),
    (Sinks(2) | ~PerHead((Full(), Causal())), [those(lambda i, j: j < 2), those(lambda i, j: j < 2 or j > i)]),
]
shapes = pytest.mark.parametrize(("length", "keys"), SHAPES)


@shapes
@pytest.mark.parametrize(("mask", "keys_of"), DEFINITIONS, ids=[repr(mask) for mask, _ in DEFINITIONS])
def test_mask_equals_definition(mask, keys_of, length, keys):
    expected = written_out(keys_of, length, keys)
    np.testing.assert_array_equal(mask.to_dense(length, keys), expected)
    assert density(mask, length, keys) == pytest.approx(expected.mean())


@shapes
@pytest.mark.parametrize(("mask", "heads"), HEADS, ids=[repr(mask) for mask, _ in HEADS])
def test_heads_equal_definitions(mask, heads, length, keys):
    expected = np.stack([written_out(keys_of, length, keys) for keys_of in heads])
    np.testing.assert_array_equal(mask.to_dense(length, keys), expected)
    assert density(mask, length, keys) == pytest.approx(expected.mean())


TABLE = np.random.default_rng(0).random((53, 53)) < 0.3


@shapes
def test_where_equals_its_function(length, keys):
    """A function may look positions up in a table, which has no entries beyond T and S."""
    table = TABLE[:length, :keys]
    by_rule, by_table = Where(lambda i, j: (i * j) % 3 == 1), Where(lambda i, j: table[i, j])
    for mask, keys_of in (
        (by_rule, those(lambda i, j: i * j % 3 == 1)),
        (by_table, those(lambda i, j: table[i, j])),
        (by_table & Causal(), causal(those(lambda i, j: table[i, j]))),
    ):
        expected = written_out(keys_of, length, keys)
        np.testing.assert_array_equal(mask.to_dense(length, keys), expected)
        assert density(mask, length, keys) == pytest.approx(expected.mean())


def blocks_seen(dense, block):
    """The set of key blocks that each query sees, after a check that every block is seen fully or not at all."""
    rows = []
    for row in dense.tolist():
        seen = {j // block for j, allowed in enumerate(row) if allowed}
        assert row == [j // block in seen for j in range(len(row))]
        rows.append(seen)
    return rows


@pytest.mark.parametrize(
    ("block", "count", "among"), [(4, 3, 13), (4, 1, 2), (5, 3, 3), (5, 4, 2), (3, 0, 9), (3, 2, 0)]
)
def test_random_blocks_are_distinct_and_one_choice_per_query_block(block, count, among):
    """Big Bird, app. D: each query block attends to r random key blocks."""
    mask, keys = RandomBlocks(block, count, seed=3, among=among), max(among * block, 7)
    dense = mask.to_dense(150, keys)
    assert density(mask, 150, keys) == pytest.approx(dense.mean())
    seen = blocks_seen(dense, block)
    for i, chosen in enumerate(seen):
        assert len(chosen) == min(count, among) and all(b < among for b in chosen)
        assert chosen == seen[i // block * block]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_random_blocks_without_among_are_blocks_up_to_the_query(count):
    """If there are fewer than r blocks, all of them are drawn."""
    seen = blocks_seen(RandomBlocks(4, count, seed=3).to_dense(53, 53), 4)
    for i, chosen in enumerate(seen):
        assert len(chosen) == min(count, i // 4 + 1) and all(b <= i // 4 for b in chosen)
        assert chosen == seen[i // 4 * 4]


def test_random_blocks_differ_by_row_and_by_seed():
    dense = [RandomBlocks(2, 3, seed=seed, among=20).to_dense(40, 40) for seed in range(4)]
    rows = {tuple(row) for mask in dense for row in mask[::2].tolist()}
    assert len(rows) > 70  # of 80, out of 1140 possible choices


@pytest.mark.parametrize(("length", "keys"), [(52, 52), (37, 53), (53, 37)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_big_bird_is_the_union_of_window_global_and_random_blocks(is_causal, length, keys):
    block, width, count, random, among = 4, 3, 2, 3, 9
    mask = bigbird(block, width, count, random, seed=5, among=among, causal=is_causal).to_dense(length, keys)
    fixed = written_out(big_bird(block, width, count), length, keys)
    drawn = RandomBlocks(block, random, 5, None if is_causal else among).to_dense(length, keys)
    for i in range(length):
        for j in range(keys):
            assert mask[i, j] == ((fixed[i, j] or drawn[i, j]) and (j <= i or not is_causal))
