"""attend against torch: FlexAttention with each mask's definition as its mask_mod, and scaled_dot_product_attention."""

import jax.numpy as jnp
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
    Prefix,
    Sinks,
    Strided,
    Where,
    Window,
    bigbird,
    longformer,
    merge,
    sparse_transformer_fixed,
    sparse_transformer_strided,
)
from tests.ops.attention.oracles import assert_agree, draw, flex, ours, qkv, theirs

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module", autouse=True)
def torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


def near(i, j, count):
    return (i - j <= count) & (j - i <= count)


def of_blocks(block, width, count):
    """Big Bird without its random blocks: own block and neighbours, and the first blocks, seeing and seen."""
    return lambda b, h, i, j: near(i // block, j // block, width // 2) | (i < count * block) | (j < count * block)


# name -> (mask, what it means in the language of FlexAttention)
MASKS = {
    "full": (Full(), None),
    "causal": (Causal(), lambda b, h, i, j: j <= i),
    "window": (Window(9, 3), lambda b, h, i, j: (i - j <= 9) & (j - i <= 3)),
    "dilated": (Dilated(4, 5), lambda b, h, i, j: near(i, j, 20) & ((i - j) % 5 == 0)),
    "blockwise": (Blockwise(7), lambda b, h, i, j: i // 7 == j // 7),
    "window and global": (
        Causal() & (Window(9) | Global(4)),
        lambda b, h, i, j: (j <= i) & (near(i, j, 9) | (i < 4) | (j < 4)),
    ),
    "global at": (
        Window(3) | GlobalAt((5, 33)),
        lambda b, h, i, j: near(i, j, 3) | (i == 5) | (i == 33) | (j == 5) | (j == 33),
    ),
    "prefix": (Causal() | Prefix(20), lambda b, h, i, j: (j <= i) | (i < 20) & (j < 20)),
    "streaming": (Causal() & (Sinks(2) | Window(5)), lambda b, h, i, j: (j <= i) & ((j < 2) | (i - j <= 5))),
    "strided": (Causal() & Strided(6), lambda b, h, i, j: (j <= i) & ((i - j) % 6 == 0)),
    "fixed": (Fixed(6, 2), lambda b, h, i, j: j % 6 >= 4),
    "sparse strided": (
        sparse_transformer_strided(6),
        lambda b, h, i, j: (j <= i) & ((i - j <= 6) | ((i - j) % 6 == 0)),
    ),
    "sparse fixed": (sparse_transformer_fixed(6, 2), lambda b, h, i, j: (j <= i) & ((j // 6 == i // 6) | (j % 6 >= 4))),
    "longformer": (
        longformer(4, 2, dilation=3),
        lambda b, h, i, j: near(i, j, 6) & ((i - j) % 3 == 0) | (i < 2) | (j < 2),
    ),
    "bigbird": (bigbird(4, random=0), of_blocks(4, 3, 2)),
    "bigbird, causal": (
        bigbird(4, random=0, causal=True),
        lambda b, h, i, j: (j <= i) & of_blocks(4, 3, 2)(b, h, i, j),
    ),
    "function": (Where(lambda i, j: (i * j) % 3 == 1), lambda b, h, i, j: (i * j) % 3 == 1),
    "not": (~Window(20), lambda b, h, i, j: ~near(i, j, 20)),
    "shifted": (Causal().shift(-5), lambda b, h, i, j: j + 5 <= i),
    "far": (Causal() & ~Window(10), lambda b, h, i, j: (j <= i) & ~near(i, j, 10)),  # the first 11 see nothing
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_match_flex(name, blockwise):
    mask, mask_mod = MASKS[name]
    arrays = qkv(37, 53)
    results = ours(lambda q, k, v: blockwise(q, k, v, mask, return_lse=True), arrays)
    assert_agree(results, theirs(lambda q, k, v: flex(q, k, v, mask_mod), arrays))
    blind = ~mask.to_dense(37, 53).any(axis=1)
    assert not np.asarray(results[0][0])[:, blind].any() and not np.asarray(results[1][0])[:, blind].any()


@pytest.mark.parametrize(
    ("length", "keys", "heads", "kv_heads"),
    [(53, 37, 3, 3), (41, 41, 6, 2), (1, 33, 4, 1), (33, 1, 2, 2), (1, 1, 1, 1)],
)
def test_shapes_match_flex(length, keys, heads, kv_heads, blockwise):
    arrays = qkv(length, keys, heads=heads, kv_heads=kv_heads)
    mask = Causal() | Blockwise(9)
    results = ours(lambda q, k, v: blockwise(q, k, v, mask, scale=0.7, return_lse=True), arrays)
    see = lambda b, h, i, j: (j <= i) | (i // 9 == j // 9)  # noqa: E731
    assert_agree(results, theirs(lambda q, k, v: flex(q, k, v, see, scale=0.7), arrays))


SEGMENTS = {
    length: np.sort(np.random.default_rng(length).integers(0, 3, (2, length)), axis=1).astype(np.int32)
    for length in (40, 50)
}
STARTS = np.array([[np.argmax(row == number) for number in row] for row in SEGMENTS[40]])
PLACES = (np.arange(40) - STARTS).astype(np.int32)
LATER = np.stack([np.arange(40) + 10, np.arange(40) * 2]).astype(np.int32)
EARLIER = np.tile(np.arange(50, dtype=np.int32), (2, 1))
# name -> (mask, keys, operands, mask_mod of these operands as tensors)
OPERANDS = {
    "segments": (
        Causal(),
        40,
        {"segment_ids": SEGMENTS[40]},
        lambda of: lambda b, h, i, j: (j <= i) & (of["segment_ids"][b, i] == of["segment_ids"][b, j]),
    ),
    "packed": (
        Window(4) | Global(2),
        40,
        {"segment_ids": SEGMENTS[40], "positions": PLACES},
        lambda of: (
            lambda b, h, i, j: (
                (
                    near(of["positions"][b, i], of["positions"][b, j], 4)
                    | (of["positions"][b, i] < 2)
                    | (of["positions"][b, j] < 2)
                )
                & (of["segment_ids"][b, i] == of["segment_ids"][b, j])
            )
        ),
    ),
    "cross": (
        Full(),
        50,
        {"segment_ids": SEGMENTS[40], "kv_segment_ids": SEGMENTS[50], "kv_lengths": np.array([0, 44], np.int32)},
        lambda of: (
            lambda b, h, i, j: (of["segment_ids"][b, i] == of["kv_segment_ids"][b, j]) & (j < of["kv_lengths"][b])
        ),
    ),
    "continued": (
        Causal() & Window(20),
        50,
        {"positions": LATER, "kv_positions": EARLIER, "kv_lengths": np.array([45, 50], np.int32)},
        lambda of: (
            lambda b, h, i, j: (
                (j <= of["positions"][b, i]) & near(of["positions"][b, i], j, 20) & (j < of["kv_lengths"][b])
            )
        ),
    ),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_match_flex(name, blockwise, torch):
    mask, keys, operands, mask_mod = OPERANDS[name]
    arrays = qkv(40, keys)
    arrays_of_case = {label: jnp.asarray(value) for label, value in operands.items()}
    results = ours(lambda q, k, v: blockwise(q, k, v, mask, return_lse=True, **arrays_of_case), arrays)
    see = mask_mod({label: torch.from_numpy(value) for label, value in operands.items()})
    assert_agree(results, theirs(lambda q, k, v: flex(q, k, v, see), arrays))


@pytest.mark.parametrize("scale", [0.0, 0.05, 4.0])
def test_small_and_large_scores_match_flex(scale, blockwise):
    """Nearly equal weights, and most of the weight on one key."""
    arrays = qkv(37, 37)
    results = ours(lambda q, k, v: blockwise(q, k, v, Causal(), scale=scale, return_lse=True), arrays)
    expected = theirs(lambda q, k, v: flex(q, k, v, lambda b, h, i, j: j <= i, scale=scale), arrays)
    assert_agree(results, expected)


def test_merged_partials_match_flex(blockwise):
    """The partials are a window, the keys before it, and the keys of another array."""
    q, k, v = qkv(37, 37)
    more_k, more_v = draw(2, 20, 2, 8, seed=5), draw(2, 20, 2, 6, seed=6)

    def parts(q, k, v, more_k, more_v):
        near, far = Causal() & Window(6), Causal() & ~Window(6)
        partials = [blockwise(q, k, v, mask, return_lse=True) for mask in (near, far)]
        return merge(*partials, blockwise(q, more_k, more_v, Full(), return_lse=True))

    def whole(q, k, v, more_k, more_v):
        import torch

        see = lambda b, h, i, j: (j <= i) | (j >= 37)  # noqa: E731
        return flex(q, torch.cat([k, more_k], 1), torch.cat([v, more_v], 1), see)

    arrays = [q, k, v, more_k, more_v]
    assert_agree(ours(parts, arrays), theirs(whole, arrays))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_eager_flex_matches_its_public_function(torch):
    """The other tests compare with the eager form."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q, k, v = (torch.from_numpy(x) for x in qkv(37, 53))
    see = lambda b, h, i, j: (j <= i) & (i >= 2)  # noqa: E731
    bend = lambda score, b, h, i, j: score + (j - i) * torch.exp2(-(h + 1.0))  # noqa: E731
    blocks = create_block_mask(see, None, None, 37, 53, device="cpu")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o, aux = flex_attention(*heads_first, bend, blocks, enable_gqa=True, return_aux=AuxRequest(lse=True))
    for results, expected in zip(flex(q, k, v, see, bend), (o, aux.lse), strict=True):
        torch.testing.assert_close(results, expected.transpose(1, 2))
