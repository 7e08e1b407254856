"""`Weight`: representations of a matrix of parameters other than an array, such as quantized, sparse or low-rank ones."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import as_arrays
from hpnlp.types import AnyArray


class Weight(abc.ABC):
    """A matrix `[D, F]` of parameters in a representation of its own: a kernel, or a table of D rows.

    A subclass is a frozen dataclass, registered as a pytree whose leaves are arrays. It stands among the parameters of a model
    in place of an array. Every product with a parameter (`hpnlp.ops.linear`) and every row lookup (`table[ids]`) calls its
    methods, so that layers and models do not know which representation they have.

    Leaves may have a leading axis of layers, which a loop over layers takes off: methods are called without it, and
    `shape` is that of the last two axes.

    Attributes:
      stage: Stage of recipes that makes such a weight; "" for one that `stages` names.
      takes_signs: Whether products take the signs of their inputs, so that the matrix alone does not give them.
    """

    stage: ClassVar[str] = ""
    takes_signs: ClassVar[bool] = False

    @property
    def stages(self) -> set[str]:
        """Stages of recipes that make such a weight: `stage`, or else the name of the class."""
        return {self.stage or type(self).__name__}

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """(D, F)."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, "D F"]:
        """The matrix that is represented.

        Returns:
          float32 [D, F].
        """

    @abc.abstractmethod
    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        """The product `x w`.

        Args:
          x: [M, D].

        Returns:
          [M, F] float32.
        """

    def as_array(self, dtype: DTypeLike) -> Array | None:
        """The matrix as an array, if products of rows of a dtype with the array are those of `matmul`.

        Args:
          dtype: Dtype of the rows.

        Returns:
          [D, F] in that dtype, or None.
        """
        del dtype
        return None

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        """The product `x w^T`, such as logits of a table.

        Args:
          x: [M, F].

        Returns:
          [M, D] float32.
        """
        return jax.lax.dot_general(
            x, self.dense().astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        """Rows of the matrix.

        Args:
          ids: Indices of rows, [...].

        Returns:
          [..., F] float32.
        """
        return self.dense()[ids]

    @abc.abstractmethod
    def axes(self, names: tuple[str | None, ...]) -> Any:
        """Logical axes of the leaves.

        Args:
          names: Logical names of the axes of the matrix, with those of leading axes, as ("layers", "embed", "mlp").

        Returns:
          This object with a tuple of names in place of each array.
        """

    def is_in_range(self) -> bool:
        """Whether all numbers of the matrix were in the range of the representation; False only for known arrays."""
        return True

    def parameter_count(self) -> int:
        """Numbers of the representation: codes, factors, scales and indices.

        Returns:
          The number; several codes in a byte count each.
        """
        return sum(leaf.size for leaf in jax.tree.leaves(self))

    def __getitem__(self, ids: ArrayLike) -> Float[Array, "*tokens F"]:
        """`take`; also of numpy arrays."""
        return as_arrays(self).take(as_arrays(ids))


def is_weight(node: object) -> bool:
    """Whether a node of a tree of parameters is a Weight.

    Returns:
      True for a Weight; False for an array or a container.
    """
    return isinstance(node, Weight)


def parameter_count(params: PyTree) -> int:
    """Numbers of all parameters of a tree.

    Args:
      params: A tree of arrays, or their shapes, and Weights of these.

    Returns:
      The sum of the sizes of arrays and of `Weight.parameter_count`.
    """
    nodes = jax.tree.leaves(params, is_leaf=is_weight)
    return sum(node.parameter_count() if isinstance(node, Weight) else node.size for node in nodes)


def weight_axes(w: Any, names: tuple[str | None, ...]) -> Any:
    """Logical axes of a parameter's arrays.

    Args:
      w: An array or a Weight.
      names: Logical names of the axes of the matrix.

    Returns:
      The names for an array, the result of `Weight.axes` for a Weight.
    """
    return w.axes(names) if isinstance(w, Weight) else names


def scale_axes(scales: AnyArray, names: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Logical axes of the scales of a matrix.

    Args:
      scales: [..., 1, F], [..., 1, 1], [..., D, 1] or [..., D / group, F].
      names: Logical names of the axes of the matrix, with those of leading axes.

    Returns:
      The names; None for an axis of size 1. Groups are consecutive rows, so that they divide as rows do.
    """
    *leading, row, column = names
    return (*leading, row if scales.shape[-2] > 1 else None, column if scales.shape[-1] > 1 else None)


@array_op()
def dense(w: AnyArray | Weight) -> Any:
    """The matrix of a parameter.

    Args:
      w: An array or a Weight.

    Returns:
      The array, or the float32 [..., D, F] of `Weight.dense`, with the leading axes of a Weight of several matrices.
    """
    if not isinstance(w, Weight):
        return w
    function: Callable[[Any], Any] = lambda layer: layer.dense()  # noqa: E731
    for _ in range(leading_axes(w)):
        function = jax.vmap(function)
    return function(w)


@array_op()
def dense_tree(params: PyTree) -> Any:
    """Parameters in which all Weights are arrays, for functions that read arrays only.

    Args:
      params: A tree of arrays and Weights; leaves of Weights may have leading axes of layers and experts.

    Returns:
      The tree of arrays.
    """
    return jax.tree.map(dense, params, is_leaf=is_weight)


def is_stacked(w: AnyArray | Weight) -> bool:
    """Whether a parameter holds the matrices of several layers.

    Args:
      w: An array or a Weight.

    Returns:
      True if its arrays have a first axis of layers.
    """
    return leading_axes(w) > 0


def leading_axes(w: AnyArray | Weight) -> int:
    """Number of axes before those of the matrix.

    Args:
      w: An array or a Weight.

    Returns:
      The number, of axes of layers and experts.
    """
    if not isinstance(w, Weight):
        return w.ndim - 2
    axes = jax.tree.leaves(w.axes(("a", "b")), is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.leaves(w)[0].ndim - len(axes[0])
