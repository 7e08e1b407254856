"""Rounding and pruning of a matrix row by row, with the error of each row compensated in the rows that follow.

The error of the products x w is tr(E^T H E), where E is the change of w and H the second moments of the inputs. A row that is
rounded or zeroed changes all later rows by the step that minimises this error (optimal brain surgeon, for all columns at once).

References:
  Hassibi and Stork 1993, "Second order derivatives for network pruning: optimal brain surgeon".
  Frantar and Alistarh 2023, "SparseGPT: massive language models can be accurately pruned in one-shot", arXiv 2301.00774.
  Frantar et al. 2023, "GPTQ: accurate post-training quantization for generative pre-trained transformers", arXiv 2210.17323.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.weights import ranges
from hpnlp.ops.weights.balanced import BalancedWeight, keep_balanced, kept_count
from hpnlp.ops.weights.integer import IntegerWeight
from hpnlp.ops.weights.sparse import TwoFourWeight, check_share, keep_two_of_four, largest
from hpnlp.types import InputError

DAMPING = 0.01  # share of the mean moment that is added to the diagonal, as in the published code
BLOCK = 128  # rows that are compensated at once; masks are chosen for each block

# (first row, rows after compensation [BLOCK, F], diagonal of the factor [BLOCK]) -> what `_Row` needs.
_Choose = Callable[[Array, Array, Array], Array]
# (number of the row, row after compensation [F], what was chosen for its block, row in the block) -> the row that it becomes.
_Row = Callable[[Array, Array, Array, Array], Array]


@array_op()
def inverse_factor(moments: Float[Array, "D D"], damping: float | int = DAMPING) -> Float[Array, "D D"]:
    """The factor U of the inverse of the damped moments, U^T U.

    Args:
      moments: Sum or mean of x^T x over inputs x.
      damping: Share of the mean of the diagonal that is added to it, over 0 unless the moments have full rank.

    Returns:
      float32 [D, D], upper triangular; a multiple of the identity if the moments are 0.

    Cost:
      A Cholesky decomposition and a triangular solve, O(D^3).
    """
    h = moments.astype(jnp.float32)
    mean = jnp.trace(h) / len(h)
    h = jnp.where(mean > 0, h / jnp.where(mean > 0, mean, 1.0), jnp.eye(len(h))) + damping * jnp.eye(len(h))
    # With the order of rows reversed, h = L L^T becomes h = R R^T, R upper triangular: U is the inverse of R.
    reverse = jnp.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(reverse, jnp.eye(len(h)), lower=False)


@array_op()
def output_error(change: Float[Array, "D F"], moments: Float[Array, "D D"]) -> Float[Array, ""]:
    """Squared error of the products with inputs of these moments.

    Args:
      change: Difference of two matrices.
      moments: Sum or mean of x^T x over inputs x.

    Returns:
      float32 [].
    """
    change = change.astype(jnp.float32)
    return jnp.sum(change * (moments.astype(jnp.float32) @ change))


@array_op()
def quantize_by_moments(
    w: Float[Array, "D F"],
    moments: Float[Array, "_ _"],
    bits: int = 4,
    *,
    group: int = 0,
    limits: str = "mse",
    damping: float | int = DAMPING,
    integer_products: bool = True,
) -> IntegerWeight:
    """Rounds a matrix to integers so that products with inputs of given moments change little (GPTQ).

    Rows are rounded in the order of falling moments of their inputs. Scales are those of the matrix before any compensation,
    also of groups, as with "static groups" in the published program.

    Args:
      w: [D, F].
      moments: Sum or mean of x^T x over the inputs x of the matrix.
      bits: As in `quantize`.
      group: As in `quantize`.
      limits: As in `quantize`.
      damping: As in `inverse_factor`.
      integer_products: As in `IntegerWeight`.

    Returns:
      The quantized matrix, in the layout of `quantize`.

    Raises:
      InputError: As of `quantize`, or `moments` is not [D, D].

    Cost:
      O(D^3 + D^2 F) operations.
    """
    _check_moments(w, moments)
    top, w = ranges.largest_code(bits), w.astype(jnp.float32)
    scales = ranges.steps(ranges.limits(w, bits, limits, group=group), top)
    order = jnp.argsort(-jnp.diagonal(moments), stable=True)
    steps = jnp.repeat(scales, w.shape[0] // scales.shape[0], axis=0)[order]
    factor = inverse_factor(moments[order][:, order], damping)

    def rounded(number: Array, row: Array, chosen: Array, place: Array) -> Array:
        step = steps[jnp.minimum(number, len(steps) - 1)]
        return jnp.clip(jnp.round(row / step), -top, top) * step

    result = _by_rows(w[order], factor, lambda first, block, diagonal: block[:0], rounded)
    codes = jnp.zeros(w.shape, jnp.int8).at[order].set(jnp.round(result / steps).astype(jnp.int8))
    return IntegerWeight(codes if bits > 4 else codes.astype(jnp.int4), scales, integer_products)


@array_op()
def prune_by_moments(
    w: Float[Array, "D F"], moments: Float[Array, "_ _"], share: int | float, *, damping: float | int = DAMPING
) -> Float[Array, "D F"]:
    """Zeroes weights so that products with inputs of given moments change little, and changes the others (SparseGPT).

    Of each `BLOCK` rows, the weights with the largest increase of the error stay.

    Args:
      w: [D, F].
      moments: As in `quantize_by_moments`.
      share: Share of the weights that stays, in (0, 1].
      damping: As in `inverse_factor`.

    Returns:
      float32 [D, F].

    Raises:
      InputError: `share` is out of range, or `moments` is not [D, D].

    Cost:
      As of `quantize_by_moments`, and a sort.
    """
    check_share(share)
    _check_moments(w, moments)
    rows = w.shape[0]

    def choose(first: Array, block: Array, diagonal: Array) -> Array:
        increase = jnp.square(block / diagonal[:, None])
        # Rows of padding are last in rank, so that they take no place of others.
        is_row = (first + jnp.arange(len(block)) < rows)[:, None]
        kept = jnp.minimum(rows - first, len(block)) / len(block)
        return largest(jnp.where(is_row, increase, -1.0), share * kept)

    return _by_rows(w.astype(jnp.float32), inverse_factor(moments, damping), choose, _masked_row)


@array_op()
def two_of_four_by_moments(
    w: Float[Array, "D F"], moments: Float[Array, "_ _"], *, damping: float | int = DAMPING
) -> TwoFourWeight:
    """Keeps two of each four rows of a column, as `keep_two_of_four`, so that products change little (SparseGPT).

    Args:
      w: [D, F].
      moments: As in `quantize_by_moments`.
      damping: As in `inverse_factor`.

    Returns:
      The sparse matrix.

    Raises:
      InputError: D is no multiple of 4, or `moments` is not [D, D].
    """
    if w.shape[0] % 4:
        raise InputError(f"two of four rows are kept: expected a multiple of 4 rows, not {w.shape[0]}")
    _check_moments(w, moments)

    def choose(first: Array, block: Array, diagonal: Array) -> Array:
        increase = jnp.square(block / diagonal[:, None]).reshape(-1, 4, block.shape[1])
        rank = jnp.argsort(jnp.argsort(-increase, axis=1, stable=True), axis=1)
        return (rank < 2).reshape(block.shape)

    # Masks are chosen for each four rows, after all earlier rows are compensated.
    kept = _by_rows(w.astype(jnp.float32), inverse_factor(moments, damping), choose, _masked_row, block=4)
    return keep_two_of_four(kept)


@array_op()
def balanced_by_moments(
    w: Float[Array, "D F"], moments: Float[Array, "_ _"], share: int | float, *, damping: float | int = DAMPING
) -> BalancedWeight:
    """Keeps as many weights of each column as `keep_balanced`, and changes them so that products change little (SparseGPT).

    Of each `BLOCK` rows of a column, the weights whose removal would increase the error most stay.

    Args:
      w: [D, F].
      moments: As in `quantize_by_moments`.
      share: As in `keep_balanced`.
      damping: As in `inverse_factor`.

    Returns:
      The sparse matrix.

    Raises:
      InputError: `share` is out of range, or `moments` is not [D, D].
    """
    _check_moments(w, moments)
    rows = w.shape[0]
    count = kept_count(rows, share)
    ends = [round(count * min(row, rows) / rows) for row in range(0, rows + BLOCK, BLOCK)]
    counts = [end - start for start, end in itertools.pairwise(ends)]

    def choose(first: Array, block: Array, diagonal: Array) -> Array:
        is_row = (first + jnp.arange(len(block)) < rows)[:, None]
        increase = jnp.where(is_row, jnp.square(block / diagonal[:, None]), -1.0)
        rank = jnp.argsort(jnp.argsort(-increase, axis=0, stable=True), axis=0)
        return rank < jnp.asarray(counts, jnp.int32)[first // BLOCK]

    return keep_balanced(_by_rows(w.astype(jnp.float32), inverse_factor(moments, damping), choose, _masked_row), share)


def _masked_row(number: Array, row: Array, mask: Bool[Array, "B F"], place: Array) -> Array:
    return jnp.where(mask[place], row, 0.0)


def _by_rows(
    w: Float[Array, "D F"], factor: Float[Array, "D D"], choose: _Choose, change: _Row, block: int = BLOCK
) -> Float[Array, "D F"]:
    """Changes rows one after the other, and compensates each change in the rows that follow."""
    rows, columns = w.shape
    padding = -rows % block
    w = jnp.pad(w, ((0, padding), (0, 0)))
    factor = jnp.pad(factor, ((0, padding), (0, padding))).at[jnp.arange(rows, rows + padding)].set(0.0)
    diagonal = jnp.where(jnp.arange(rows + padding) < rows, jnp.diagonal(factor), 1.0)

    def step(number: Int[Array, ""], w: Array) -> Array:
        first = number * block
        part = jax.lax.dynamic_slice(w, (first, 0), (block, columns))
        across = jax.lax.dynamic_slice(
            factor, (first, 0), (block, rows + padding)
        )  # [block, D], zero before the diagonal
        within = jax.lax.dynamic_slice(across, (0, first), (block, block))
        scales = jax.lax.dynamic_slice(diagonal, (first,), (block,))
        chosen = choose(first, part, scales)

        def row_step(place: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
            part, errors = state
            row = part[place]
            changed = change(first + place, row, chosen, place)
            error = (row - changed) / scales[place]
            part = part - jnp.outer(within[place], error)
            return part.at[place].set(changed), errors.at[place].set(error)  # exactly, as zeros must be

        part, errors = jax.lax.fori_loop(0, block, row_step, (part, jnp.zeros_like(part)))
        return jax.lax.dynamic_update_slice(w - across.T @ errors, part, (first, 0))

    return jax.lax.fori_loop(0, len(w) // block, step, w)[:rows]


def _check_moments(w: Array, moments: Array) -> None:
    if moments.shape != (w.shape[0], w.shape[0]):
        raise InputError(f"moments is {moments.shape}: expected {(w.shape[0], w.shape[0])}, those of the inputs of w")
