"""LSTM by cuDNN on NVIDIA GPUs, through `jax.experimental.rnn`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import rnn
from jaxtyping import Array, Float, Int

from hpnlp.ops.rnn.sequence import state_arrays
from hpnlp.ops.weight import dense


def cudnn_limits(x: Array, is_plain: bool, reset: Array | None, reverse: bool) -> list[str]:
    """Properties of a call of `lstm` that cuDNN cannot compute.

    Args:
      x: Inputs.
      is_plain: Whether there are neither normalisations nor masks within the steps.
      reset: As for `lstm`.
      reverse: As for `lstm`.

    Returns:
      Short descriptions, empty where there are none.
    """
    reasons = [] if jax.default_backend() == "gpu" else [f"the backend {jax.default_backend()}"]
    reasons += [] if is_plain else ["normalisations and masks within the steps"]
    reasons += [] if reset is None else ["resets"]
    reasons += ["reverse=True"] if reverse else []
    return reasons + ([] if x.dtype == jnp.float32 else [f"dtype {x.dtype}"])


def flat_weights(w: Array, u: Array, b: Array | None) -> Float[Array, " P"]:
    """The parameters of an LSTM in cuDNN's order: both matrices with a row for each gate and feature, and two biases.

    Args:
      w: [D, 4 H].
      u: [H, 4 H].
      b: [4 H], or None for zeros; the second bias is 0.

    Returns:
      float32 [4 H (D + H + 2)].
    """
    zeros = jnp.zeros((w.shape[1],), jnp.float32)
    parts = w.T, u.T, zeros if b is None else b, zeros
    return jnp.concatenate([part.astype(jnp.float32).reshape(-1) for part in parts])


def cudnn_lstm(
    x: Float[Array, "B T D"], w: Any, u: Any, b: Array | None, state: Any, lengths: Int[Array, " B"] | None
) -> tuple[Array, tuple[Array, Array]]:
    """LSTM by cuDNN, for calls without `cudnn_limits`.

    Args:
      x: Inputs, float32.
      w: As for `lstm`.
      u: As for `lstm`.
      b: As for `lstm`.
      state: State before the first token, or None for zeros.
      lengths: As for `lstm`.

    Returns:
      As `lstm`.

    References:
      `jax.experimental.rnn.lstm`.
    """
    batch, steps, width = x.shape
    w, u = dense(w), dense(u)
    features = u.shape[0]
    h, c = (s[None] for s in state_arrays("state", 2, state, batch, features))
    ends = jnp.full((batch,), steps, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    result: Any = rnn.lstm(
        x, h, c, flat_weights(w, u, b), ends, input_size=width, hidden_size=features, num_layers=1, dropout=0.0,
        bidirectional=False,
    )  # fmt: skip
    y, h, c = result
    valid = jnp.arange(steps, dtype=jnp.int32)[None] < ends[:, None]
    return jnp.where(valid[..., None], y, 0.0), (h[0], c[0])
