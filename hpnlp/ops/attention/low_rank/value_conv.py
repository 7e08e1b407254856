"""Depthwise convolution of values along the sequence, with one filter for each head, by products of banded matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

_BLOCK = 64  # tokens that one product computes; of 32 to 128 the fastest on two x86 cores for 33 taps


@array_op("B T N", v="B T N")
def value_conv(v: Float[Array, "B T K H"], taps: Float[Array, "W N"]) -> Float[Array, "B T N H"]:
    """Convolves the values of each head: `y[t, n] = sum_j taps[j, n] * v[t + j - W // 2, n * K // N]`.

    Tokens before and after the sequence count as 0. Blocks of tokens are multiplied by a banded matrix of the taps, because
    one term for each tap would be a pass over all values in the forward pass, and two in the backward pass.

    Args:
      v: Values of K heads.
      taps: Weights of the neighbours of a token for each of N heads, where N is a multiple of K; W is odd.

    Returns:
      The convolved values, in the dtype of v; sums are float32.

    Raises:
      InputError: An even number of taps, or a number of heads that is no multiple of K.

    Cost: B T N H (64 + W) multiplications in matrix products, and a copy of v that is (64 + W) / 64 times as large.

    References:
      Xiong et al. 2021, "Nystromformer", fig. 2 (the skip connection by a convolution of the values).
    """
    (batch, length, kv_heads, width), (count, heads) = v.shape, taps.shape
    if count % 2 == 0 or heads % kv_heads:
        raise InputError(
            f"taps {taps.shape}: expected an odd number of taps for a multiple of the {kv_heads} heads of v"
        )
    reach = count // 2
    block = max(min(_BLOCK, length), 2 * reach, 1)
    blocks, group = -(-length // block), heads // kv_heads
    band = _band(taps.T.astype(v.dtype), block).reshape(kv_heads, group * block, block + 2 * reach)
    # [K, block + 2 reach, B x blocks x H]: one product for each head, in place of one for each head, sequence and block.
    windows = _overlapping(v, block, reach).transpose(3, 2, 0, 1, 4).reshape(kv_heads, block + 2 * reach, -1)
    y = jax.lax.dot_general(band, windows, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    y = y.astype(v.dtype).reshape(kv_heads, group, block, batch, blocks * width)
    y = y.transpose(3, 2, 0, 1, 4).reshape(batch, block, heads, blocks, width)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, blocks * block, heads, width)[:, :length]


@array_op("B T N", v="B T N")
def value_conv_reference(v: Float[Array, "B T K H"], taps: Float[Array, "W N"]) -> Float[Array, "B T N H"]:
    """`value_conv` by its definition, as a sum of one term for each tap.

    Args:
      v: Values of K heads.
      taps: Weights of the neighbours of a token for each of N heads.

    Returns:
      The convolved values, in the dtype of v.
    """
    reach, length = taps.shape[0] // 2, v.shape[1]
    repeated = jnp.repeat(v.astype(jnp.float32), taps.shape[1] // v.shape[2], axis=2)
    padded = jnp.pad(repeated, [(0, 0), (reach, reach), (0, 0), (0, 0)])
    weights = taps.astype(jnp.float32)[:, None, None, :, None]
    terms = [weights[j] * padded[:, j : j + length] for j in range(taps.shape[0])]
    return jnp.sum(jnp.stack(terms), axis=0).astype(v.dtype)


def _band(taps: Array, block: int) -> Array:
    """[N, W] -> [N, block, block + W - 1]: row i holds the taps from column i on, and zeros."""
    heads, count = taps.shape
    columns = block + count - 1
    row = jnp.pad(taps, [(0, 0), (0, columns + 1 - count)])
    # Rows of one column more than the band has, which then begin one column later from row to row.
    rows = jnp.broadcast_to(row[:, None], (heads, block, columns + 1)).reshape(heads, -1)
    return rows[:, : block * columns].reshape(heads, block, columns)


def _overlapping(v: Array, block: int, reach: int) -> Array:
    """[B, T, K, H] -> [B, blocks, block + 2 reach, K, H]: each block with its neighbours; 2 reach is at most a block."""
    batch, length, heads, width = v.shape
    blocks = -(-length // block)
    v = jnp.pad(v, [(0, 0), (reach, (blocks + 1) * block - length - reach), (0, 0), (0, 0)])
    v = v.reshape(batch, blocks + 1, block, heads, width)
    return jnp.concatenate([v[:, :-1], v[:, 1:, : 2 * reach]], axis=2)
