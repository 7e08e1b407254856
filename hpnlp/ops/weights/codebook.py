"""Matrices of a few shared values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight
from hpnlp.types import InputError

MAX_VALUES = 256
_ROW = 1024  # numbers that are summed in one float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodebookWeight(Weight):
    """Shared values: w[i, j] = values[codes[i, j]].

    The gradient of a value is the sum over the numbers that share it, so that the values can be trained (Han et al. 2016,
    section 3). A product looks the matrix up and takes longer than one with an array: 1/4 of the memory, and in files, with
    codes of log2 K bits or Huffman codes, less. A NaN of x reaches its own row only.

    Attributes:
      codes: uint8 [D, F].
      values: float32 [K], at most 256.
    """

    stage: ClassVar[str] = "codebook"

    codes: Any
    values: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[-2:]

    def dense(self) -> Float[Array, "D F"]:
        return self.values[self.codes]

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return product(x, self.dense())

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        return self.values[self.codes[ids]]

    def axes(self, names: tuple[str | None, ...]) -> Any:
        return CodebookWeight(names, (*names[:-2], None))


@array_op()
def cluster(
    w: Float[Array, "D F"], values: int = 16, *, keep_zeros: bool = False, iterations: int = 30
) -> CodebookWeight:
    """Replaces numbers by the means of clusters, by k-means.

    The clusters begin evenly spaced between the smallest and the largest number, so that the few large numbers, which matter
    most, have values of their own. A cluster that becomes empty keeps its value. A matrix of at most K distinct numbers stays
    as it is.

    Args:
      w: [D, F]; the result is NaN if a number is not finite.
      values: Number of values K, 2 to 256.
      keep_zeros: Zeros, as pruned matrices have them, stay 0: the first value is 0, and the others are means without zeros.
      iterations: Rounds of k-means.

    Returns:
      The matrix of shared values.

    Raises:
      InputError: `values` or `iterations` is out of range.

    Cost:
      A sort of w; each iteration takes K binary searches.

    References:
      Han et al. 2016, "Deep compression", section 3: linear initialisation.
    """
    if not 2 <= values <= MAX_VALUES:
        raise InputError(f"values={values}: expected 2 to {MAX_VALUES}")
    if iterations < 0:
        raise InputError(f"iterations={iterations}: expected at least 0")
    w = w.astype(jnp.float32)
    numbers = jnp.sort(w.reshape(-1))
    counted = (numbers != 0) if keep_zeros else jnp.ones_like(numbers, bool)
    # Sums of a cluster, a range of the sorted numbers, are differences of sums from the left.
    counts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counted.astype(jnp.int32))])
    sums = _sums_to_the_left(numbers)
    centroids = jnp.linspace(numbers[0], numbers[-1], values - keep_zeros)

    def step(_: int | Array, centroids: Array) -> Array:
        inner = jnp.searchsorted(numbers, _midpoints(centroids), side="right")
        edges = jnp.concatenate([jnp.zeros(1, inner.dtype), inner, jnp.full(1, numbers.size, inner.dtype)])
        sizes = counts[edges[1:]] - counts[edges[:-1]]
        totals = (sums[:, edges[1:]] - sums[:, edges[:-1]]).sum(axis=0)
        return jnp.where(sizes > 0, totals / jnp.maximum(sizes, 1).astype(jnp.float32), centroids)

    centroids = jax.lax.fori_loop(0, iterations, step, centroids)
    is_new = counted & jnp.concatenate([jnp.ones(1, bool), numbers[1:] != numbers[:-1]])
    ranks = jnp.cumsum(is_new.astype(jnp.int32)) - 1
    distinct = jnp.full_like(centroids, numbers[-1]).at[jnp.where(is_new, ranks, values)].set(numbers, mode="drop")
    centroids = jnp.sort(jnp.where(ranks[-1] < len(centroids), distinct, centroids))
    if keep_zeros:
        centroids = jnp.sort(jnp.concatenate([centroids, jnp.zeros(1)]))
    codes = jnp.searchsorted(_midpoints(centroids), w, side="left")
    if keep_zeros:  # zero comes first, so that the codes of pruned matrices are zeros mostly
        zero = jnp.abs(centroids).argmin()
        codes = jnp.where((w == 0) | (codes == zero), 0, codes + (codes < zero).astype(codes.dtype))
        centroids = centroids[jnp.argsort(jnp.arange(values) != zero, stable=True)]
    centroids = jnp.where(jnp.isfinite(numbers[0]) & jnp.isfinite(numbers[-1]), centroids, jnp.nan)
    return CodebookWeight(codes.astype(jnp.uint8), centroids)


def _sums_to_the_left(numbers: Float[Array, "n"]) -> Float[Array, "3 n+1"]:
    """Three numbers for each index, whose sum is that of the numbers before it.

    Sums of a few numbers are differences of sums of millions, in which one float32 would leave no digit of them: rows of 1,024
    numbers are summed by themselves, and the sums of rows before them in two floats (Knuth's TwoSum).
    """
    rows = jnp.pad(numbers, (0, _ROW - numbers.size % _ROW)).reshape(-1, _ROW)
    within = jnp.cumsum(rows, axis=1)

    def step(carry: tuple[Array, Array], total: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        high, low = carry
        added = high + total
        part = added - high
        return (added, low + ((high - (added - part)) + (total - part))), carry

    _, (high, low) = jax.lax.scan(step, (jnp.zeros(()), jnp.zeros(())), within[:, -1])
    stacked = jnp.stack([jnp.repeat(high, _ROW), jnp.repeat(low, _ROW), (within - rows).reshape(-1)])
    return stacked[:, : numbers.size + 1]


def _midpoints(centroids: Float[Array, "K"]) -> Float[Array, "K-1"]:
    return (centroids[1:] + centroids[:-1]) / 2
