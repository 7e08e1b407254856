"""Recurrences whose step multiplies the hidden state with a matrix, with a custom VJP.

The automatic derivative of a scan adds an outer product to the gradient of the recurrent matrix in every step. Here the reverse
scan returns the gradients of the gates of all steps, and the gradient of the matrix is one product over all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike

# Arrays [B, H] in float32, of which the first is the hidden state h, the output of the step.
State = tuple[Array, ...]
# Masks by name: "reset" [T, B, 1], bool: the state is the initial one before the step. "hidden" [T, B, H]: factor of h in the
# products. "candidate" [T, B, H]: factor of the candidate. "hold_0", "hold_1" [T, B, H or 1]: share of each state that the step
# leaves as it was. The first axis is 1 for masks that are equal in all steps.
Masks = Mapping[str, Array]
Product = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """Gradients of one step of a cell.

    Attributes:
      x: Of the inputs of the gates, [B, G H].
      a: Of the first product, [B, G' H]; None if it is that of x.
      b: Of the second product, [B, H]; None without one.
      state: Of the state before the step.
      params: Of the cell's parameters.
    """

    x: Array
    a: Array | None
    b: Array | None
    state: State
    params: Any


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step of a recurrence, in float32.

    A cell implements `update`, and `operand` if a second matrix multiplies a function of the first product. Derivatives are
    those of JAX, and recompute the step from its products; a cell may override `forward` and `backward`.
    """

    # Whether the step reads the sum of the gates' inputs and the first product only.
    additive: ClassVar[bool] = False
    # Whether the step reads the hidden state other than by products.
    reads_hidden: ClassVar[bool] = True
    # Number of arrays of the state.
    states: ClassVar[int] = 1

    def update(self, x: Array, a: Any, b: Any, state: State, params: Any, masks: Masks) -> State:
        """The state after the step.

        Args:
          x: Inputs of the gates [B, G H]; the sum with the first product if the cell is `additive`.
          a: First product [B, G' H]; None if the cell is `additive`.
          b: Second product [B, H], or None.
          state: State before the step.
          params: Parameters of the cell.
          masks: Masks of the step.

        Returns:
          The new state.
        """
        raise NotImplementedError

    def operand(self, x: Array, a: Any, state: State) -> Any:
        """The operand [B, H] of the second product; None for a cell with one product.

        Args:
          x: As for `update`.
          a: As for `update`.
          state: As for `update`.

        Returns:
          The operand.
        """
        return None

    def forward(
        self, x: Array, a: Array, state: State, params: Any, masks: Masks, second: Product
    ) -> tuple[State, tuple[Any, ...]]:
        """The state after the step, and the arrays that `backward` reads.

        Args:
          x: Inputs of the gates.
          a: First product.
          state: State before the step.
          params: Parameters of the cell.
          masks: Masks of the step.
          second: Multiplies with the second matrix.

        Returns:
          `(state, (operand of the second product or None, further arrays))`.
        """
        x, first = (x + a, None) if self.additive else (x, a)
        operand = self.operand(x, first, state)
        b = None if operand is None else second(operand)
        new = self.update(x, first, b, state, params, masks)
        return new, (operand, x if self.additive else a, b)

    def backward(
        self, x: Any, saved: tuple[Any, ...], state: State, params: Any, masks: Masks, d_new: State, second: Product
    ) -> StepGradients:
        """Gradients of the step.

        Args:
          x: Inputs of the gates; None if the cell is `additive`.
          saved: The second result of `forward`.
          state: State before the step. The hidden state is zeros unless the cell `reads_hidden`.
          params: Parameters of the cell.
          masks: Masks of the step.
          d_new: Gradient of the new state.
          second: Multiplies with the transpose of the second matrix.

        Returns:
          The gradients.
        """
        _, a, b = saved
        x, a = (a, None) if self.additive else (x, a)
        _, pull = jax.vjp(
            lambda x, a, b, state, params: self.update(x, a, b, state, params, masks), x, a, b, state, params
        )
        dx, da, db, d_state, d_params = pull(d_new)
        if b is not None:
            _, pull = jax.vjp(self.operand, x, a, state)
            dx, da, d_state = jax.tree.map(jnp.add, (dx, da, d_state), pull(second(db)))
        return StepGradients(dx, da, db, d_state, d_params)


class Recurrence(NamedTuple):
    """Arrays of a recurrence.

    Attributes:
      x: Inputs of the gates of all steps, float32 [T, B, G H].
      kernels: Matrices of the products: [H, G' H], and [H, H] if the cell has a second product.
      params: Parameters of the cell, a tree of arrays.
      start: State before the first step, float32.
      initial: State at resets.
      masks: Masks of the steps. They receive no gradient.
    """

    x: Array
    kernels: tuple[Array, ...]
    params: Any
    start: State
    initial: State
    masks: Masks


def run_recurrence(cell: Cell, arrays: Recurrence, dtype: DTypeLike) -> tuple[Array, State]:
    """Runs a cell over a sequence.

    Args:
      cell: The cell, a static object.
      arrays: Inputs, parameters and masks.
      dtype: Dtype of the operands of products.

    Returns:
      `(hidden states float32 [T, B, H], the last state)`.

    Cost:
      O(T B G H^2) time; keeps O(T B G H) numbers for the backward pass, whose products are as many again twice.
    """
    leaves, structure = jax.tree.flatten(arrays)
    return _run(cell, dtype, jax.tree.unflatten(structure, vary_alike(*leaves)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(cell: Cell, dtype: DTypeLike, arrays: Recurrence) -> tuple[Array, State]:
    # Without gradients nothing is stacked but the hidden states.
    return _scan(cell, dtype, arrays, keeps=False)[0]


@accepts_numpy
def _run_forward(cell: Cell, dtype: DTypeLike, arrays: Recurrence) -> tuple[Any, Any]:
    result, saved = _scan(cell, dtype, arrays, keeps=True)
    return result, (None if cell.additive else arrays.x, arrays.kernels, arrays.params, arrays.masks, saved)


def _scan(cell: Cell, dtype: DTypeLike, arrays: Recurrence, keeps: bool) -> tuple[tuple[Array, State], Any]:
    """`((hidden states, last state), arrays that the backward pass reads)`."""
    x, kernels, params, start, initial, masks = arrays
    kernels = [kernel.astype(dtype) for kernel in kernels]
    constant, stepped = _by_step(masks, x.shape[0])

    def step(state: State, inputs: tuple[Array, Masks]) -> tuple[State, Any]:
        x, masks = inputs[0], {**constant, **inputs[1]}
        state, operand = _before(state, initial, masks, dtype)
        a = _dot(operand, kernels[0])
        new, (second, *further) = cell.forward(x, a, state, params, masks, lambda v: _dot(v.astype(dtype), kernels[1]))
        second = None if second is None else second.astype(dtype)
        new = _held(new, state, masks)
        kept = (operand, second, state if cell.reads_hidden else state[1:], further) if keeps else None
        return new, (new[0], kept)

    last, (h, saved) = lax.scan(step, start, (x, stepped))
    return (h, last), saved


def _run_backward(cell: Cell, dtype: DTypeLike, residuals: Any, cotangents: tuple[Array, State]) -> tuple[Any, ...]:
    x, kernels, params, masks, saved = residuals
    dy, d_last = cotangents
    operands, seconds, states, further = saved
    constant, stepped = _by_step(masks, dy.shape[0])
    # Transposed once: XLA:CPU takes longer for a product with the transpose of a matrix.
    transposes = [kernel.astype(dtype).T for kernel in kernels]
    resets = "reset" in masks
    zeros = _zeros_like(d_last, dy)

    def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
        d_state, d_params, d_initial = carry
        dy, x, state, further, second, masks = inputs
        masks = {**constant, **masks}
        state = state if cell.reads_hidden else (jnp.zeros_like(dy), *state)
        d_state = (d_state[0] + dy, *d_state[1:])
        d_new, d_held = _held_gradients(d_state, masks)
        g = cell.backward(
            x, (second, *further), state, params, masks, d_new, lambda d: _dot(d.astype(dtype), transposes[1])
        )
        dh = _dot((g.x if g.a is None else g.a).astype(dtype), transposes[0])
        dh = dh * masks["hidden"] if "hidden" in masks else dh
        d_state = tuple(d if held is None else d + held for d, held in zip(g.state, d_held, strict=True))
        d_state = (d_state[0] + dh, *d_state[1:])
        if resets:
            d_initial = tuple(
                total + jnp.where(masks["reset"], d, 0.0) for total, d in zip(d_initial, d_state, strict=True)
            )
            d_state = tuple(jnp.where(masks["reset"], 0.0, d) for d in d_state)
        return (d_state, jax.tree.map(jnp.add, d_params, g.params), d_initial), (g.x, g.a, g.b)

    carry = d_last, _zeros_like(params, dy), zeros if resets else ()
    inputs = dy, x, states, further, seconds, stepped
    (d_start, d_params, d_initial), (dx, da, db) = lax.scan(step, carry, inputs, reverse=True)
    d_kernels = [_outer(operands, dx if da is None else da)]
    if db is not None:
        d_kernels.append(_outer(seconds, db))
    d_kernels = tuple(d.astype(kernel.dtype) for d, kernel in zip(d_kernels, kernels, strict=True))
    d_params = jax.tree.map(lambda d, p: d.astype(p.dtype), d_params, params)
    return (Recurrence(dx, d_kernels, d_params, d_start, d_initial if resets else zeros, None),)  # pyright: ignore[reportArgumentType]


_run.defvjp(_run_forward, _run_backward)


def _by_step(masks: Masks, steps: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """`(masks of all steps, masks of each step)`."""
    constant = {name: mask[0] for name, mask in masks.items() if mask.shape[0] == 1 != steps}
    return constant, {name: mask for name, mask in masks.items() if name not in constant}


def _before(state: State, initial: State, masks: Masks, dtype: DTypeLike) -> tuple[State, Array]:
    """`(state before a step, operand of its first product)`."""
    if "reset" in masks:
        state = tuple(jnp.where(masks["reset"], first, s) for first, s in zip(initial, state, strict=True))
    h = state[0] * masks["hidden"] if "hidden" in masks else state[0]
    return state, h.astype(dtype)


def _held(new: State, old: State, masks: Masks) -> State:
    """The state after a step, of which a share is that before it."""
    shares = [masks.get(f"hold_{i}") for i in range(len(new))]
    return tuple(
        n if share is None else share * o + (1.0 - share) * n for n, o, share in zip(new, old, shares, strict=True)
    )


def _held_gradients(d_state: State, masks: Masks) -> tuple[State, tuple[Any, ...]]:
    """Gradients of `_held`: `(gradient of new, gradient of old)`; the latter is None for arrays without a mask "hold_i"."""
    shares = [masks.get(f"hold_{i}") for i in range(len(d_state))]
    d_new = tuple(d if share is None else (1.0 - share) * d for d, share in zip(d_state, shares, strict=True))
    return d_new, tuple(None if share is None else share * d for d, share in zip(d_state, shares, strict=True))


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _outer(operands: Array, d: Array) -> Array:
    """The gradient [H, G H] of a matrix, from its operands [T, B, H] and the gradients [T, B, G H] of the products."""
    operands, d = operands.reshape(-1, operands.shape[-1]), d.reshape(-1, d.shape[-1]).astype(operands.dtype)
    return lax.dot_general(operands, d, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _zeros_like(tree: Any, like: Array) -> Any:
    """Float32 zeros of the shapes of a tree, which vary over the mesh axes that `like` varies over."""
    leaves, structure = jax.tree.flatten(tree)
    *zeros, _ = vary_alike(*(jnp.zeros(x.shape, jnp.float32) for x in leaves), like)
    return jax.tree.unflatten(structure, zeros)
