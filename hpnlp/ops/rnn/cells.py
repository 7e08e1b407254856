"""Cells of `recurrence.run_recurrence`: LSTM, layer-normalised LSTM, gated recurrent unit and minimal gated unit.

The gates of a cell stand side by side in the columns of its matrices, in the order that its class states.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from hpnlp.ops.rnn.recurrence import Cell, Masks, Product, State, StepGradients


def sigmoid(x: Array) -> Array:
    """The logistic function.

    Args:
      x: An array.

    Returns:
      1 / (1 + exp(-x)).
    """
    return jax.nn.sigmoid(x)


def split_gates(x: Array, count: int) -> list[Array]:
    """Splits the last axis into gates.

    Args:
      x: [..., G H].
      count: Number of gates G.

    Returns:
      G arrays [..., H].
    """
    return jnp.split(x, count, axis=-1)


@dataclasses.dataclass(frozen=True)
class LSTMCell(Cell):
    """LSTM with the gates i, f, g, o.

    c' = sigmoid(f) c + sigmoid(i) tanh(g) and h' = sigmoid(o) tanh(c'). The mask "candidate" multiplies tanh(g).
    """

    additive: ClassVar[bool] = True
    reads_hidden: ClassVar[bool] = False
    states: ClassVar[int] = 2

    def forward(
        self, x: Array, a: Array, state: State, params: Any, masks: Masks, second: Product
    ) -> tuple[State, tuple[Any, ...]]:
        i, f, g, o = split_gates(x + a, 4)
        i, f, g, o = sigmoid(i), sigmoid(f), jnp.tanh(g), sigmoid(o)
        c = f * state[1] + i * _masked(g, masks)
        # Kept apart: with one array of all gates, XLA:CPU takes 1.2 to 1.5 times as long at B 8, T 128, H 128.
        return (o * jnp.tanh(c), c), (None, i, f, g, o)

    def backward(
        self, x: Any, saved: tuple[Any, ...], state: State, params: Any, masks: Masks, d_new: State, second: Product
    ) -> StepGradients:
        # By hand: the activated gates are kept, so that one tanh is computed again in place of five functions.
        _, i, f, g, o = saved
        dh, dc = d_new
        kept = _masked(g, masks)
        tanh_c = jnp.tanh(f * state[1] + i * kept)
        dc = dc + dh * o * (1.0 - tanh_c * tanh_c)
        d_gates = [
            dc * kept * i * (1.0 - i),
            dc * state[1] * f * (1.0 - f),
            _masked(dc * i, masks) * (1.0 - g * g),
            dh * tanh_c * o * (1.0 - o),
        ]
        return StepGradients(jnp.concatenate(d_gates, axis=-1), None, None, (jnp.zeros_like(dh), dc * f), params)


@dataclasses.dataclass(frozen=True)
class LayerNormLSTMCell(Cell):
    """LSTM whose recurrent product and output are normalised; the inputs of the gates are normalised before the recurrence.

    Parameters: "u_scale" [B, 4 H] of the recurrent product, whose bias is part of the gates' inputs, and "c_scale" and "c_bias"
    [B, H] of the cell state before its tanh. There is a row for each sequence, so that no step sums over sequences.

    Attributes:
      eps: Added to the variance.
    """

    reads_hidden: ClassVar[bool] = False
    states: ClassVar[int] = 2

    eps: float = 1e-5

    def forward(
        self, x: Array, a: Array, state: State, params: Any, masks: Masks, second: Product
    ) -> tuple[State, tuple[Any, ...]]:
        a, a_inverse = _normalized(a, self.eps)
        i, f, g, o = split_gates(x + a * params["u_scale"], 4)
        i, f, g, o = sigmoid(i), sigmoid(f), jnp.tanh(g), sigmoid(o)
        c = f * state[1] + i * _masked(g, masks)
        normed, c_inverse = _normalized(c, self.eps)
        h = o * jnp.tanh(normed * params["c_scale"] + params["c_bias"])
        return (h, c), (None, i, f, g, o, a, a_inverse, normed, c_inverse)

    def backward(
        self, x: Any, saved: tuple[Any, ...], state: State, params: Any, masks: Masks, d_new: State, second: Product
    ) -> StepGradients:
        # By hand, as for LSTMCell: the derivatives of JAX take 1.14 times as long at B 8, T 128, H 128.
        _, i, f, g, o, a, a_inverse, normed, c_inverse = saved
        dh, dc = d_new
        kept = _masked(g, masks)
        tanh_c = jnp.tanh(normed * params["c_scale"] + params["c_bias"])
        d_shown = dh * o * (1.0 - tanh_c * tanh_c)
        dc = dc + _normalized_gradient(d_shown * params["c_scale"], normed, c_inverse)
        d_gates = [
            dc * kept * i * (1.0 - i),
            dc * state[1] * f * (1.0 - f),
            _masked(dc * i, masks) * (1.0 - g * g),
            dh * tanh_c * o * (1.0 - o),
        ]
        dx = jnp.concatenate(d_gates, axis=-1)
        da = _normalized_gradient(dx * params["u_scale"], a, a_inverse)
        d_params = {"u_scale": dx * a, "c_scale": d_shown * normed, "c_bias": d_shown}
        return StepGradients(dx, da, None, (jnp.zeros_like(dh), dc * f), d_params)


@dataclasses.dataclass(frozen=True)
class GRUCell(Cell):
    """Gated recurrent unit with the gates r, z, n, in the form of cuDNN and torch, which multiplies with h once.

    n' = tanh(n_x + r (n_h + bias)) and h' = (1 - z) n' + z h. Parameters: "n_bias" [H].
    """

    def update(self, x: Array, a: Any, b: Any, state: State, params: Any, masks: Masks) -> State:
        (r, z, n), (r_h, z_h, n_h) = split_gates(x, 3), split_gates(a, 3)
        r, z = sigmoid(r + r_h), sigmoid(z + z_h)
        n = _masked(jnp.tanh(n + r * (n_h + params["n_bias"][None])), masks)
        return (n + z * (state[0] - n),)


@dataclasses.dataclass(frozen=True)
class OriginalGRUCell(Cell):
    """Gated recurrent unit with the gates r, z, n of Cho et al. 2014, whose second product is with r h.

    n' = tanh(n_x + (r h) U_n) and h' = (1 - z) n' + z h.
    """

    def operand(self, x: Array, a: Any, state: State) -> Any:
        return sigmoid(split_gates(x, 3)[0] + split_gates(a, 2)[0]) * state[0]

    def update(self, x: Array, a: Any, b: Any, state: State, params: Any, masks: Masks) -> State:
        z = sigmoid(split_gates(x, 3)[1] + split_gates(a, 2)[1])
        n = _masked(jnp.tanh(split_gates(x, 3)[2] + b), masks)
        return (n + z * (state[0] - n),)


@dataclasses.dataclass(frozen=True)
class MinimalCell(Cell):
    """Minimal gated unit with the gates f, n, in the form that multiplies with h once.

    n' = tanh(n_x + f (n_h + bias)) and h' = (1 - f) h + f n'. Parameters: "n_bias" [H].
    """

    def update(self, x: Array, a: Any, b: Any, state: State, params: Any, masks: Masks) -> State:
        (f, n), (f_h, n_h) = split_gates(x, 2), split_gates(a, 2)
        f = sigmoid(f + f_h)
        n = _masked(jnp.tanh(n + f * (n_h + params["n_bias"][None])), masks)
        return (state[0] + f * (n - state[0]),)


@dataclasses.dataclass(frozen=True)
class OriginalMinimalCell(Cell):
    """Minimal gated unit with the gates f, n of Zhou et al. 2016, whose second product is with f h.

    n' = tanh(n_x + (f h) U_n) and h' = (1 - f) h + f n'.
    """

    def operand(self, x: Array, a: Any, state: State) -> Any:
        return sigmoid(split_gates(x, 2)[0] + a) * state[0]

    def update(self, x: Array, a: Any, b: Any, state: State, params: Any, masks: Masks) -> State:
        f = sigmoid(split_gates(x, 2)[0] + a)
        n = _masked(jnp.tanh(split_gates(x, 2)[1] + b), masks)
        return (state[0] + f * (n - state[0]),)


def _normalized(x: Array, eps: float) -> tuple[Array, Array]:
    """`(x with mean 0 and variance 1 over features, the factor [B, 1] of its deviations)`."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse


def _normalized_gradient(d: Array, normed: Array, inverse: Array) -> Array:
    """The gradient of the argument of `_normalized`, from that of its first result and both results."""
    return inverse * (d - jnp.mean(d, axis=-1, keepdims=True) - normed * jnp.mean(d * normed, axis=-1, keepdims=True))


def _masked(candidate: Array, masks: Masks) -> Array:
    """The candidate with its mask, if there is one."""
    return candidate * masks["candidate"] if "candidate" in masks else candidate
