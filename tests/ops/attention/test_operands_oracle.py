"""The operands of attend against torch and transformers: dense masks, global tokens, biases, the soft cap and sinks.

A bias is added inside the soft cap and masks are applied outside of it, as in tokamax. Gemma 2 and the score_mods that
cap have no bias, so they do not test it.
"""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import (
    Causal,
    Full,
    PerHead,
    Prefix,
    Window,
)
from tests.ops.attention.oracles import assert_agree, draw, flex, ours, qkv, theirs

pytestmark = pytest.mark.oracle

LENGTH, KEYS = 37, 53
SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (2, LENGTH)), axis=1).astype(np.int32)
LENGTHS = np.array([30, LENGTH], np.int32)
CHOSEN = np.array([[3, -1, 30], [9, 9, 0]], np.int32)  # of each example, padded with -1
FLAGS = np.array([[i in row for i in range(LENGTH)] for row in CHOSEN.tolist()])


@pytest.fixture(scope="module", autouse=True)
def torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


def causal(b, h, i, j):
    return j <= i


def with_sinks(o, lse, sinks):
    """(o, lse) with one more logit for each head, which has no value."""
    import torch

    total = torch.logaddexp(lse, sinks)
    return o * torch.exp(lse - total)[..., None], total


BY_HEAD = PerHead((Causal(), Window(5), Full(), Prefix(0)))


def by_head(b, h, i, j):
    return (h == 0) & (j <= i) | (h == 1) & (i - j <= 5) & (j - i <= 5) | (h == 2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_per_head_masks_match_flex(kv_heads, blockwise):
    """The last head sees nothing."""
    arrays = qkv(LENGTH, KEYS, kv_heads=kv_heads)
    results = ours(lambda q, k, v: blockwise(q, k, v, BY_HEAD, return_lse=True), arrays)
    assert_agree(results, theirs(lambda q, k, v: flex(q, k, v, by_head), arrays))


@pytest.mark.parametrize(
    "shape", [(2, 4, LENGTH, KEYS), (2, 1, LENGTH, KEYS), (1, 4, LENGTH, 1), (2, 1, 1, KEYS)], ids=str
)
def test_dense_mask_matches_flex(shape, blockwise, torch):
    """Together with a causal mask; some rows see nothing."""
    arrays, dense = qkv(LENGTH, KEYS), draw(*shape) > 0.3
    visible = torch.from_numpy(np.broadcast_to(dense, (2, 4, LENGTH, KEYS)).copy())

    def run(q, k, v):
        return blockwise(q, k, v, Causal(), dense_mask=jnp.asarray(dense), return_lse=True)

    assert_agree(
        ours(run, arrays), theirs(lambda *a: flex(*a, lambda b, h, i, j: (j <= i) & visible[b, h, i, j]), arrays)
    )


@pytest.mark.parametrize("tokens", [CHOSEN, FLAGS], ids=["places", "flags"])
@pytest.mark.parametrize("within", [(), ("segment_ids",), ("segment_ids", "kv_lengths", "dense_mask")], ids=str)
def test_global_tokens_match_flex(tokens, within, blockwise, torch):
    """They see all and are seen by all, later tokens too, within segments, lengths and the dense mask."""
    arrays = qkv(LENGTH, LENGTH)
    table = {"segment_ids": SEGMENTS, "kv_lengths": LENGTHS, "dense_mask": draw(2, 1, LENGTH, LENGTH) > -1.0}
    flags, segments, lengths, dense = (torch.from_numpy(x) for x in (FLAGS, *table.values()))

    def see(b, h, i, j):
        seen = (j <= i) & (i - j <= 4) | flags[b, i] | flags[b, j]
        seen = seen & (segments[b, i] == segments[b, j]) if "segment_ids" in within else seen
        seen = seen & (j < lengths[b]) if "kv_lengths" in within else seen
        return seen & dense[b, 0, i, j] if "dense_mask" in within else seen

    def run(q, k, v):
        operands = {name: jnp.asarray(table[name]) for name in within}
        mask = Causal() & Window(4)
        return blockwise(q, k, v, mask, global_tokens=jnp.asarray(tokens), return_lse=True, **operands)

    assert_agree(ours(run, arrays), theirs(lambda *a: flex(*a, see), arrays))


@pytest.mark.parametrize(
    "shape", [(2, 4, LENGTH, KEYS), (1, 4, LENGTH, KEYS), (2, 1, 1, KEYS), (1, 4, LENGTH, 1)], ids=str
)
def test_bias_matches_flex(shape, blockwise):
    """The gradient of the array matches as well."""

    def theirs_of(q, k, v, bias):
        full_bias = bias.expand(2, 4, LENGTH, KEYS)
        return flex(q, k, v, causal, lambda score, b, h, i, j: score + full_bias[b, h, i, j])

    arrays = [*qkv(LENGTH, KEYS), draw(*shape)]
    results = ours(lambda q, k, v, bias: blockwise(q, k, v, Causal(), bias=bias, return_lse=True), arrays)
    assert_agree(results, theirs(theirs_of, arrays))


def test_bias_function_at_positions_matches_flex(blockwise, torch):
    """The function is evaluated at the positions of the call."""
    places = {
        "positions": np.stack([np.arange(LENGTH) + 16, np.arange(LENGTH) * 2]).astype(np.int32),
        "kv_positions": np.tile(np.arange(KEYS, dtype=np.int32), (2, 1)),
    }
    rows = torch.from_numpy(places["positions"])
    arrays = qkv(LENGTH, KEYS)

    def run(q, k, v):
        def bias(head, i, j):
            return (j - i).astype(jnp.float32) / (head + 2).astype(jnp.float32)

        operands = {name: jnp.asarray(value) for name, value in places.items()}
        return blockwise(q, k, v, Causal(), bias=bias, return_lse=True, **operands)

    def expected(q, k, v):
        mask_mod = lambda b, h, i, j: j <= rows[b, i]  # noqa: E731
        return flex(q, k, v, mask_mod, lambda score, b, h, i, j: score + (j - rows[b, i]) / (h + 2))

    assert_agree(ours(run, arrays), theirs(expected, arrays))


def test_sinks_match_torch(blockwise):
    """A logit for each head, in the lse too; the first rows see nothing else, so that their lse is the sink."""
    mask, see = Causal() & ~Window(10), lambda b, h, i, j: i - j > 10
    arrays = [*qkv(LENGTH, KEYS), draw(4)]
    results = ours(lambda q, k, v, sinks: blockwise(q, k, v, mask, sinks=sinks, return_lse=True), arrays)
    assert_agree(results, theirs(lambda q, k, v, sinks: with_sinks(*flex(q, k, v, see), sinks), arrays))
    assert not np.asarray(results[0][0])[:, :11].any()


def test_all_operands_together_match_flex(blockwise, torch):
    arrays = [*qkv(LENGTH, LENGTH), draw(2, 4, 1, LENGTH), draw(4)]
    dense = draw(1, 4, LENGTH, LENGTH) > -1.0
    flags, segments, lengths, hidden = (torch.from_numpy(x) for x in (FLAGS, SEGMENTS, LENGTHS, dense))
    operands = {"segment_ids": SEGMENTS, "kv_lengths": LENGTHS, "dense_mask": dense, "global_tokens": CHOSEN}

    def run(q, k, v, bias, sinks):
        options = {"bias": bias, "sinks": sinks, "soft_cap": 2.0, "scale": 0.8, "return_lse": True}
        arrays = {name: jnp.asarray(value) for name, value in operands.items()}
        return blockwise(q, k, v, BY_HEAD, **arrays, **options)

    def expected(q, k, v, bias, sinks):
        def see(b, h, i, j):
            seen = by_head(b, h, i, j) | flags[b, i] | flags[b, j]
            return seen & (segments[b, i] == segments[b, j]) & (j < lengths[b]) & hidden[0, h, i, j]

        def score_mod(score, b, h, i, j):
            return 2.0 * torch.tanh((score + bias[b, h, 0, j]) / 2.0)

        return with_sinks(*flex(q, k, v, see, score_mod, scale=0.8), sinks)

    assert_agree(ours(run, arrays), theirs(expected, arrays))


def eager(function, mask, length, **options):
    """(o,) of transformers' eager attention, whose masks are numbers to be added."""
    import torch

    hidden = torch.where(torch.from_numpy(mask.to_dense(length)), 0.0, torch.finfo(torch.float32).min)[None, None]

    def run(q, k, v, sinks=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        module = types.SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, sinks=sinks)
        return (function(module, q, k, v, hidden, **options)[0],)

    return run


def test_window_with_sinks_matches_gpt_oss(blockwise):
    """Attention in a window with sinks."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    arrays, mask = [*qkv(LENGTH, LENGTH), draw(4)], Causal() & Window(11)
    results = ours(lambda q, k, v, sinks: (blockwise(q, k, v, mask, sinks=sinks, scale=0.3),), arrays)
    assert_agree(results, theirs(eager(eager_attention_forward, mask, LENGTH, scaling=0.3), arrays))


def test_soft_cap_matches_gemma_2(blockwise):
    """Attention in a window with a soft cap."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    arrays, mask = qkv(LENGTH, LENGTH), Causal() & Window(11)
    results = ours(lambda q, k, v: (blockwise(q, k, v, mask, soft_cap=1.5, scale=0.9),), arrays)
    assert_agree(results, theirs(eager(eager_attention_forward, mask, LENGTH, scaling=0.9, softcap=1.5), arrays))
