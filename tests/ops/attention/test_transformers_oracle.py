"""The attention of transformers' Longformer and Big Bird, with the same weights, out of masks, attend and merge."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Full, GlobalAt, PerHead, Where, Window, bigbird, merge
from tests.ops.attention.oracles import assert_agree, draw, ours, theirs

pytestmark = pytest.mark.oracle

WIDTH, HEADS = 16, 2
LOCAL, FAR = ("query", "key", "value"), ("query_global", "key_global", "value_global")


@pytest.fixture(scope="module", autouse=True)
def torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return torch


def inputs(length, names):
    """x [B, T, D], and a matrix [out, in] and a bias [out] for each name; so large that weights differ between keys."""
    pairs = [(0.4 * draw(WIDTH, WIDTH, seed=n), 0.4 * draw(WIDTH, seed=n)) for n in range(len(names))]
    return [draw(2, length, WIDTH), *(array for pair in pairs for array in pair)]


def projections(x, arrays):
    """x times each matrix, plus its bias, as [B, T, N, H]."""
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [(x @ matrix.T + bias[None, None]).reshape(*x.shape[:2], HEADS, -1) for matrix, bias in pairs]


def module_of(module, names, **options):
    """The module of torch as a function of x and of its weights, in the order of `inputs`."""
    import torch

    parameters = [f"{name}.{part}" for name in names for part in ("weight", "bias")]

    def run(x, *arrays):
        return torch.func.functional_call(module, dict(zip(parameters, arrays, strict=True)), (x,), options)[:1]

    return run


def segments(queries, keys):
    """Operands with which queries that are True see the keys that are True, and other queries see nothing."""
    return {
        "segment_ids": jnp.asarray(queries, jnp.int32),
        "kv_segment_ids": jnp.where(jnp.asarray(keys), jnp.int32(1), jnp.int32(-1)),
    }


# Longformer: three more projections, of the queries of the global tokens and of the keys and values that these see.

VALID = np.ones((2, 48), bool)
VALID[1, 37:] = False
GLOBALS = np.array([[0, 9, 30], [5, -1, -1]], np.int32)  # of each example, padded with -1


def longformer_attention(attend, x, *arrays, window, valid, chosen):
    """[B, T, D]: `window` tokens and the chosen ones with one set of projections; the chosen ones' rows with the other.

    chosen: int [B, G], padded with -1.
    """
    q, k, v, far_q, far_k, far_v = projections(x, arrays)
    batch, places = np.arange(len(chosen))[:, None], np.where(chosen < 0, x.shape[1], chosen)
    is_global = np.zeros((len(chosen), x.shape[1] + 1), bool)
    is_global[batch, places] = True

    def taken(array):
        return array.at[batch, places].get(mode="fill", fill_value=0)

    near = attend(q, k, v, Window(window // 2), return_lse=True, **segments(valid, valid & ~is_global[:, :-1]))
    far = attend(q, taken(k), taken(v), Full(), return_lse=True, **segments(valid, chosen >= 0))
    rows = attend(taken(far_q), far_k, far_v, Full(), **segments(chosen >= 0, valid))
    return merge(near, far)[0].at[batch, places].set(rows, mode="drop").reshape(x.shape)


def longformer_of_transformers(window, valid, chosen, names=LOCAL + FAR):
    import torch
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[window])
    is_global = torch.tensor([[i in row for i in range(valid.shape[1])] for row in chosen.tolist()])
    masked = ~torch.from_numpy(valid)
    return module_of(
        LongformerSelfAttention(config, 0).eval(),
        names,
        attention_mask=is_global * 10000.0 - masked * 10000.0,
        is_index_masked=masked,
        is_index_global_attn=is_global,
        is_global_attn=bool(is_global.any()),
    )


@pytest.mark.parametrize(
    ("window", "valid", "chosen"),
    [(8, VALID, GLOBALS), (4, VALID, GLOBALS), (16, VALID | True, GLOBALS[::-1])],
    ids=["padded", "narrow", "whole"],
)
def test_longformer_matches_transformers(window, valid, chosen, blockwise):
    arrays = inputs(48, LOCAL + FAR)
    expected = theirs(longformer_of_transformers(window, valid, chosen), arrays)
    run = functools.partial(longformer_attention, blockwise, window=window, valid=valid, chosen=chosen)
    assert_agree(ours(lambda *a: (run(*a),), arrays), expected)


def test_longformer_without_global_tokens_matches_transformers(blockwise):
    arrays = inputs(48, LOCAL)

    def run(x, *arrays):
        return (blockwise(*projections(x, arrays), Window(4), **segments(VALID, VALID)).reshape(x.shape),)

    no_tokens = np.zeros((2, 0), np.int32)
    assert_agree(ours(run, arrays), theirs(longformer_of_transformers(8, VALID, no_tokens, LOCAL), arrays))


# Big Bird: the first and the last block are global; the random blocks are drawn for each head.

BLOCK, RANDOM = 4, 2


def big_bird_of_transformers(valid, training):
    """(its function of x and the weights, the random blocks of each head [blocks - 2, RANDOM], there once it has run)."""
    import torch
    from transformers import BigBirdConfig, BigBirdModel
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    config = BigBirdConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        block_size=BLOCK,
        num_random_blocks=RANDOM,
        max_position_embeddings=64,
    )
    module, random_blocks = BigBirdBlockSparseAttention(config, seed=3).train(training), []
    draw_plan = module._bigbird_block_rand_mask_with_head

    def drawn(**options):
        random_blocks[:] = draw_plan(**options)
        return random_blocks

    module._bigbird_block_rand_mask_with_head = drawn
    create = BigBirdModel.create_masks_for_block_sparse_attn
    blocks, band, rows, columns = create(torch.from_numpy(valid).float(), BLOCK)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
    return module_of(module, LOCAL, from_blocked_mask=blocks, to_blocked_mask=blocks, **masks), random_blocks


def big_bird_mask(length, drawn):
    """transformers' layout: a window of three blocks, the first and last block, and the blocks drawn for inner ones."""
    inner = np.arange(1, length // BLOCK - 1)
    table = np.zeros((length // BLOCK,) * 2, bool)
    table[inner[:, None], drawn] = True
    ends = GlobalAt((*range(BLOCK), *range(length - BLOCK, length)))
    return (
        bigbird(BLOCK, global_blocks=0, random=0)
        | ends
        | Where(lambda i, j: jnp.asarray(table)[i // BLOCK, j // BLOCK])
    )


@pytest.mark.parametrize("length", [28, 52])  # 7 blocks are drawn from by another rule than 13
def test_big_bird_matches_transformers(length, blockwise):
    arrays, valid = inputs(length, LOCAL), np.arange(length) < np.array([[length], [length - 6]])
    run, random_blocks = big_bird_of_transformers(valid, training=True)
    expected = theirs(run, arrays)
    mask = PerHead(tuple(big_bird_mask(length, drawn) for drawn in random_blocks))

    def run(x, *arrays):
        return (blockwise(*projections(x, arrays), mask, **segments(valid, valid)).reshape(x.shape),)

    assert_agree(ours(run, arrays), expected)


def test_big_bird_in_evaluation_matches_transformers(blockwise):
    """transformers then takes block 0 in place of every random block, and counts it as often."""
    length = 28
    arrays, valid = inputs(length, LOCAL), np.ones((2, length), bool)
    run, random_blocks = big_bird_of_transformers(valid, training=False)
    expected = theirs(run, arrays)
    assert not np.any(random_blocks)
    again = Where(lambda i, j: (j < BLOCK) & (i >= BLOCK) & (i < length - BLOCK))

    def run(x, *arrays):
        q, k, v = projections(x, arrays)
        full = blockwise(q, k, v, big_bird_mask(length, random_blocks[0]), return_lse=True)
        first = blockwise(q, k, v, again, return_lse=True)
        return (merge(full, *[first] * RANDOM)[0].reshape(x.shape),)

    assert_agree(ours(run, arrays), expected)
