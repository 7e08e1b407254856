"""Biases of attention that "xla" computes tile by tile from arrays: `PairBias`, and the sum of bias arrays, `BiasArrays`."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hpnlp.types import InputError

# Start and size of consecutive elements of an axis.
Span = tuple[Any, int]


@runtime_checkable
class BiasOfHeads(Protocol):
    """A function of (head, query position, key position) for a number of query heads, as `positions.bias.alibi` returns.

    Attributes:
      heads: The number.
    """

    heads: int

    def __call__(self, head: ArrayLike, q: ArrayLike, k: ArrayLike) -> Array: ...


class PairBias(abc.ABC):
    """A bias that is computed from arrays `[B, N, X, Y]`, of which each tile of queries and keys reads a part.

    Subclasses are frozen dataclasses and pytrees. Axes B and N of an array may be 1, and the executor slices them. It passes
    parts of the arrays to `combine`, and adds the results of `gradients` to the gradients of the arrays.

    Attributes:
      joins_blocks: Whether consecutive key blocks of a step are one tile. Its parts may then extend beyond the ends of the
        arrays, which are copied to append zeros.
    """

    joins_blocks: ClassVar[bool] = True

    @property
    def dense_terms(self) -> tuple[Array, ...]:
        """Arrays that broadcast to [B, N, T, S], of which the bias is a sum."""
        return ()

    def check(self) -> None:
        """Checks that the parts of the bias fit each other; raises InputError if they do not."""
        return None  # a bias of one part fits itself

    @property
    @abc.abstractmethod
    def arrays(self) -> tuple[Array, ...]:
        """The arrays."""

    @abc.abstractmethod
    def with_arrays(self, arrays: tuple[Array, ...]) -> PairBias:
        """This bias with other arrays.

        Args:
          arrays: Arrays in the order of `arrays`.

        Returns:
          The bias.
        """

    @abc.abstractmethod
    def windows(self, queries: Span, keys: Span) -> tuple[tuple[Span, Span], ...]:
        """The parts of the arrays that a tile reads.

        Args:
          queries: The queries of the tile.
          keys: The keys of the tile.

        Returns:
          The part of the last two axes of each array. Parts beyond the end of an array are read as zeros.
        """

    @abc.abstractmethod
    def combine(self, *tiles: Array) -> Float[Array, "B N r c"]:
        """The bias of a tile.

        Args:
          *tiles: The parts of the arrays, [B, N, x, y] each.

        Returns:
          float32; axes may be 1.
        """

    @abc.abstractmethod
    def gradients(self, db: Array, *tiles: Array) -> tuple[Array, ...]:
        """Gradients of the parts.

        Args:
          db: float32 [B, N, r, c], the gradient of the bias of the tile.
          *tiles: As for `combine`.

        Returns:
          float32, in the shapes of the parts.
        """

    def dense(self) -> Float[Array, "B N T S"]:
        """The bias as an array, for implementations other than "xla".

        Returns:
          float32; axes may be 1.

        Raises:
          InputError: The bias is computed tile by tile only.
        """
        raise InputError(f'a bias of type {type(self).__name__} is computed tile by tile: pass impl="xla"')

    def select_heads(self, heads: Any) -> PairBias:
        """The bias of some query heads.

        Args:
          heads: int `[heads]`, their numbers.

        Returns:
          The bias of these heads.
        """
        return self.with_arrays(tuple(x[:, heads] if x.shape[1] > 1 else x for x in self.arrays))


def is_pair_bias(bias: Any) -> bool:
    """Whether a bias is a PairBias; False for an array, a function or None."""
    return isinstance(bias, PairBias)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BiasArrays(PairBias):
    """The bias `sum_i weights[i] * terms[i]`, which is not stored.

    Attributes:
      terms: `[B, N, T, S]` each, any axis of which may be 1. Those with a weight are finite.
      weights: float32 `[1, 1, 1, 1]` for each term, or None for 1.
    """

    joins_blocks: ClassVar[bool] = False  # arrays of all pairs are not copied

    terms: tuple[Any, ...]
    weights: tuple[Any, ...]

    @property
    def dense_terms(self) -> tuple[Array, ...]:
        return self.terms

    def check(self) -> None:
        if len(self.terms) != len(self.weights):
            raise InputError(
                f"BiasArrays of {len(self.terms)} terms and {len(self.weights)} weights: expected one for each"
            )

    @property
    def arrays(self) -> tuple[Array, ...]:
        return *self.terms, *(weight for weight in self.weights if weight is not None)

    def with_arrays(self, arrays: tuple[Array, ...]) -> BiasArrays:
        terms, weights = arrays[: len(self.terms)], iter(arrays[len(self.terms) :])
        return BiasArrays(terms, tuple(None if weight is None else next(weights) for weight in self.weights))

    def windows(self, queries: Span, keys: Span) -> tuple[tuple[Span, Span], ...]:
        def along(length: int, span: Span) -> Span:
            return (0, 1) if length == 1 else span

        return tuple((along(x.shape[2], queries), along(x.shape[3], keys)) for x in self.arrays)

    def combine(self, *tiles: Array) -> Float[Array, "B N r c"]:
        bias = self.with_arrays(tiles)
        return functools.reduce(jnp.add, map(weighted, bias.terms, bias.weights))

    def gradients(self, db: Array, *tiles: Array) -> tuple[Array, ...]:
        bias = self.with_arrays(tiles)
        terms = [_sum_to(weighted(db, weight), x.shape) for x, weight in zip(bias.terms, bias.weights, strict=True)]
        pairs = [pair for pair in zip(bias.terms, bias.weights, strict=True) if pair[1] is not None]
        return *terms, *(_sum_to(db * x.astype(jnp.float32), weight.shape) for x, weight in pairs)

    def dense(self) -> Float[Array, "B N T S"]:
        return self.combine(*self.arrays)


def weighted(x: ArrayLike, weight: ArrayLike | None) -> Float[Array, "..."]:
    """An array in float32, times its weight.

    Args:
      x: Any shape.
      weight: float32, which broadcasts to x; None for 1.

    Returns:
      The product.
    """
    x = jnp.asarray(x, jnp.float32)
    return x if weight is None else x * jnp.asarray(weight, jnp.float32)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes that are 1 in a shape."""
    axes = tuple(axis for axis in range(x.ndim) if shape[axis] == 1 != x.shape[axis])
    return x.sum(axis=axes, keepdims=True) if axes else x
