"""Shared parts of recurrent layers: the products outside of the loop, and conversion to and from time-major arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from hpnlp.ops.linear import product
from hpnlp.ops.rnn.masks import StepMasks
from hpnlp.ops.rnn.recurrence import Cell, Recurrence, State, run_recurrence
from hpnlp.ops.weight import dense
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """The order of the steps over the sequences of a batch, and the states at their borders.

    Attributes:
      state: State before the first step, arrays `[B, H]` or `[H]`; None for `initial`.
      initial: State at resets; None for zeros.
      masks: Masks within the steps.
      reset: bool `[B, T]`, True where the state before the token is the initial one.
      lengths: int `[B]`, tokens of each sequence; None for T.
      reverse: Whether the last token comes first.
    """

    state: Any = None
    initial: Any = None
    masks: StepMasks = StepMasks()  # noqa: RUF009  (frozen)
    reset: Any = None
    lengths: Any = None
    reverse: bool = dataclasses.field(default=False, metadata={"static": True})


def check_shapes(name: str, x: Array, w: Any, b: Any, kernels: Sequence[tuple[Any, int]], sequences: Sequences) -> int:
    """Checks the shapes of a recurrent layer.

    Args:
      name: Name of the operation, for messages.
      x: Inputs.
      w: Matrix of the inputs.
      b: Biases of the gates, or None.
      kernels: Recurrent matrices, each with its number of gates.
      sequences: Resets and lengths are checked.

    Returns:
      The number of features H.

    Raises:
      InputError: Shapes do not match.
    """
    features, reset, lengths = kernels[0][0].shape[0], sequences.reset, sequences.lengths
    gates = sum(count for _, count in kernels)
    for kernel, count in kernels:
        if tuple(kernel.shape) != (features, count * features):
            raise InputError(
                f"{name}: recurrent matrix {tuple(kernel.shape)}: expected [H, {count} H], which is "
                f"{(features, count * features)} for H = {features}"
            )
    if x.ndim != 3 or 0 in x.shape or tuple(w.shape) != (x.shape[-1], gates * features):
        recurrent = " and ".join(str(tuple(kernel.shape)) for kernel, _ in kernels)
        raise InputError(
            f"{name} of x {x.shape} with w {tuple(w.shape)} and the recurrent matrix {recurrent}: expected x [B, T, D], not "
            f"empty, w [D, {gates} H], and the recurrent matrix [H, ...], whose rows are H = {features}"
        )
    if b is not None and b.shape != (gates * features,):
        raise InputError(f"{name}: b {b.shape}: expected [{gates} H] = {(gates * features,)}")
    if reset is not None and reset.shape != x.shape[:2]:
        raise InputError(f"{name}: reset {reset.shape}: expected [B, T] = {x.shape[:2]}")
    if lengths is not None and lengths.shape != x.shape[:1]:
        raise InputError(f"{name}: lengths {lengths.shape}: expected [B] = {x.shape[:1]}")
    return features


def gate_inputs(x: Array, w: Any, b: Array | None, sequences: Sequences) -> Array:
    """Inputs of the gates, one product over all tokens.

    Args:
      x: `[B, T, D]`.
      w: `[D, G H]`, an array or a Weight.
      b: `[G H]`, or None.
      sequences: Tokens after the end of a sequence count as 0, even if they are NaN.

    Returns:
      float32 `[T, B, G H]`, in the order of the steps.
    """
    if sequences.lengths is not None:
        x = jnp.where(_valid(x.shape[1], sequences.lengths)[..., None], x, jnp.zeros((), x.dtype))
    x = x[:, ::-1] if sequences.reverse else x
    x = x.swapaxes(0, 1)
    gates = product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:2], -1)
    return gates if b is None else gates + b.astype(jnp.float32)[None, None]


def run_layer(
    cell: Cell, gates: Array, kernels: tuple[Any, ...], params: Any, sequences: Sequences, dtype: DTypeLike
) -> tuple[Array, State]:
    """Runs a cell over the sequences of a batch.

    Args:
      cell: The cell.
      gates: Result of `gate_inputs`, or a function of it.
      kernels: Recurrent matrices, arrays or Weights.
      params: Parameters of the cell.
      sequences: States, masks, resets and lengths.
      dtype: Dtype of the results, and of the operands of products.

    Returns:
      `(y [B, T, H], the last state, float32)`.
    """
    steps, batch = gates.shape[:2]
    kernels = tuple(dense(kernel) for kernel in kernels)
    features = kernels[0].shape[0]
    first = state_arrays("initial", cell.states, sequences.initial, batch, features)
    state, masks, reset = sequences.state, sequences.masks, sequences.reset
    start = first if state is None else state_arrays("state", cell.states, state, batch, features)
    _check_masks(masks, cell.states, (batch, steps, features))
    named = {"hidden": masks.hidden, "candidate": masks.candidate, "hold_0": masks.hold_h, "hold_1": masks.hold_c}
    valid = None if sequences.lengths is None else _valid(steps, sequences.lengths)[..., None]
    if reset is not None:  # padding leaves the state as it is
        named["reset"] = reset[..., None] if valid is None else reset[..., None] & valid
    if valid is not None:
        for name in ("hold_0", "hold_1")[: len(start)]:
            named[name] = jnp.where(valid, 0.0 if named[name] is None else named[name], 1.0)
    stepped = {
        name: (mask[:, ::-1] if sequences.reverse else mask).swapaxes(0, 1)
        for name, mask in named.items()
        if mask is not None
    }
    h, last = run_recurrence(cell, Recurrence(gates, kernels, params, start, first, stepped), dtype)
    y = h.swapaxes(0, 1).astype(dtype)
    y = y[:, ::-1] if sequences.reverse else y
    return y if valid is None else jnp.where(valid, y, jnp.zeros((), dtype)), last


def is_plain(masks: StepMasks) -> bool:
    """Whether there are no masks within the steps.

    Args:
      masks: The masks.

    Returns:
      True if all are None.
    """
    return all(mask is None for mask in (masks.hidden, masks.candidate, masks.hold_h, masks.hold_c))


def _valid(steps: int, lengths: Array) -> Array:
    """Bool `[B, T]`, True for the tokens of the sequences."""
    return jnp.arange(steps, dtype=lengths.dtype)[None] < lengths[:, None]


def state_arrays(name: str, count: int, state: Any, batch: int, features: int) -> State:
    """A state with a row for each sequence.

    Args:
      name: Name of the argument, for messages.
      count: Number of arrays.
      state: Arrays `[B, H]` or `[H]`; None for zeros.
      batch: Number of sequences B.
      features: Number of features H.

    Returns:
      float32 arrays `[B, H]`.

    Raises:
      InputError: Another number of arrays, or other shapes.
    """
    shape = batch, features
    if state is None:
        return tuple(jnp.zeros(shape, jnp.float32) for _ in range(count))
    shapes = [tuple(s.shape) for s in state] if isinstance(state, (tuple, list)) else f"of shape {state.shape}"
    if not isinstance(state, (tuple, list)) or len(state) != count or not set(shapes) <= {shape, shape[1:]}:
        raise InputError(f"{name} {shapes}: expected a tuple of {count}, [B, H] = {shape} or [H] = {shape[1:]} each")
    arrays = [s.astype(jnp.float32) for s in state]
    return tuple(jnp.broadcast_to(s if s.ndim == 2 else s[None], shape) for s in arrays)


def _check_masks(masks: StepMasks, states: int, shape: tuple[int, int, int]) -> None:
    """Raises InputError for masks of other shapes, or of a state that the cell does not have."""
    if masks.hold_c is not None and states < 2:
        raise InputError("masks.hold_c: the cell has no cell state: pass hold_h")
    for name in ("hidden", "candidate", "hold_h", "hold_c"):
        mask = getattr(masks, name)
        if mask is not None and (
            mask.ndim != 3 or any(m not in (1, n) for m, n in zip(mask.shape, shape, strict=True))
        ):
            raise InputError(
                f"masks.{name} {mask.shape}: expected [B, T, H] = {shape}, with 1 for an axis of equal values"
            )
