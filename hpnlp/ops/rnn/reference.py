"""Recurrent layers step by step in plain loops over the tokens, as their papers write them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.rnn.lstm import LSTMNorms
from hpnlp.ops.rnn.masks import StepMasks
from hpnlp.ops.rnn.sequence import Sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RNNWeights:
    """Parameters of a recurrent layer with G gates.

    Attributes:
      w: Matrix of the inputs, [D, G H].
      u: Matrix of the hidden state, [H, G H].
      b: Biases of the gates, [G H].
      n_bias: As for `gru`.
      norms: As for `lstm`.
    """

    w: Any
    u: Any
    b: Any
    n_bias: Any = None
    norms: LSTMNorms | None = None


@array_op("B", x="B")
def reference_rnn(
    kind: str,
    x: Array,
    weights: RNNWeights,
    sequences: Sequences = Sequences(),  # noqa: B008  (frozen)
    eps: float = 1e-5,
) -> tuple[Array, tuple[Array, ...]]:
    """A recurrent layer in the dtype of its arguments.

    Args:
      kind: "lstm", "gru_cudnn", "gru_original", "minimal_cudnn" or "minimal_original".
      x: [B, T, D].
      weights: Parameters of the layer.
      sequences: States, masks, resets, lengths and direction, as for `lstm`.
      eps: As for `lstm`.

    Returns:
      `(h [B, T, H], the last state)`.

    Cost:
      The program has T copies of a step.
    """
    initial, reset, lengths = sequences.initial, sequences.reset, sequences.lengths
    batch, steps, _ = x.shape
    size = weights.u.shape[0]
    first = tuple(jnp.zeros((batch, size), x.dtype) for _ in range(2 if kind == "lstm" else 1))
    if initial is not None:
        first = tuple(jnp.broadcast_to(s if s.ndim == 2 else s[None], (batch, size)) for s in initial)
    state = first if sequences.state is None else sequences.state
    outputs: list[Any] = [None] * steps
    for t in reversed(range(steps)) if sequences.reverse else range(steps):
        at = jax.tree.map(lambda mask: mask[:, t if mask.shape[1] > 1 else 0], sequences.masks)  # noqa: B023
        before = state  # the state of a sequence that has ended
        if reset is not None:
            state = tuple(jnp.where(reset[:, t, None], s0, s) for s0, s in zip(first, state, strict=True))
        new = _step(kind, x[:, t], weights, state, at, eps)
        holds = at.hold_h, at.hold_c
        new = tuple(n if z is None else z * s + (1 - z) * n for n, s, z in zip(new, state, holds, strict=False))
        is_token = jnp.full((batch, 1), True) if lengths is None else (t < lengths)[:, None]
        state = tuple(jnp.where(is_token, n, s) for n, s in zip(new, before, strict=True))
        outputs[t] = jnp.where(is_token, new[0], jnp.zeros_like(new[0]))
    return jnp.stack(outputs, axis=1), state


def _step(kind: str, x: Array, weights: RNNWeights, state: Any, masks: StepMasks, eps: float) -> tuple[Array, ...]:
    """The state after a step, with the masks of this step."""
    w, u, norms, h = weights.w, weights.u, weights.norms, state[0]
    size = u.shape[0]
    dropped = h if masks.hidden is None else h * masks.hidden
    candidate_mask = jnp.ones_like(h) if masks.candidate is None else masks.candidate
    of_x, of_h = x @ w, dropped @ u
    if norms is not None:
        of_x, of_h = _norm(of_x, norms.x_scale, norms.x_bias, eps), _norm(of_h, norms.u_scale, norms.u_bias, eps)
    of_x = of_x + weights.b[None]
    gates_x = [of_x[:, i : i + size] for i in range(0, of_x.shape[1], size)]
    gates_h = [of_h[:, i : i + size] for i in range(0, of_h.shape[1], size)]
    if kind == "lstm":
        i, f, g, o = (gx + gh for gx, gh in zip(gates_x, gates_h, strict=True))
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g) * candidate_mask
        shown = c if norms is None else _norm(c, norms.c_scale, norms.c_bias, eps)
        return jax.nn.sigmoid(o) * jnp.tanh(shown), c
    gate = jax.nn.sigmoid(gates_x[0] + gates_h[0])  # r of a GRU, f of a minimal gated unit
    if kind.endswith("cudnn"):
        of_state = gate * (gates_h[-1] + (0 if weights.n_bias is None else weights.n_bias[None]))
    else:
        of_state = (gate * h) @ u[:, -size:]
    n = jnp.tanh(gates_x[-1] + of_state) * candidate_mask
    if kind.startswith("minimal"):
        return ((1 - gate) * h + gate * n,)
    z = jax.nn.sigmoid(gates_x[1] + gates_h[1])
    return ((1 - z) * n + z * h,)


def _norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * scale[None] + bias[None]
