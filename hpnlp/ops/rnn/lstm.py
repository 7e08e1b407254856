"""Long short-term memory over sequences, plain and layer-normalised."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.norms import layer_norm
from hpnlp.ops.rnn.cells import LayerNormLSTMCell, LSTMCell
from hpnlp.ops.rnn.cudnn import cudnn_limits, cudnn_lstm
from hpnlp.ops.rnn.masks import StepMasks
from hpnlp.ops.rnn.recurrence import State
from hpnlp.ops.rnn.sequence import Sequences, check_shapes, gate_inputs, is_plain, run_layer
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LSTMNorms:
    """Parameters of the normalisations of a layer-normalised LSTM.

    Attributes:
      x_scale: Of the product of the inputs, [4 H].
      x_bias: [4 H].
      u_scale: Of the product of the hidden state, [4 H].
      u_bias: [4 H].
      c_scale: Of the cell state before its tanh, [H].
      c_bias: [H].
    """

    x_scale: Any
    x_bias: Any
    u_scale: Any
    u_bias: Any
    c_scale: Any
    c_bias: Any


@array_op("B", x="B")
def lstm(
    x: Float[Array, "B T D"],
    w: Any,
    u: Any,
    b: Float[Array, " F"] | None = None,
    state: State | None = None,
    *,
    initial: State | None = None,
    norms: LSTMNorms | None = None,
    masks: StepMasks = StepMasks(),  # noqa: B008  (frozen)
    reset: Bool[Array, "..."] | None = None,
    lengths: Int[Array, "..."] | None = None,
    reverse: bool = False,
    eps: float = 1e-5,
    impl: str = "xla",
) -> tuple[Float[Array, "B T H"], State]:
    """LSTM over the sequences of a batch.

    With the gates i, f, g, o in the columns of `x w + h u + b`, `c' = sigmoid(f) c + sigmoid(i) tanh(g)` and
    `h' = sigmoid(o) tanh(c')`. With `norms`, the gates are `LN(x w) + LN(h u) + b`, each over all 4 H columns, and
    `h' = sigmoid(o) tanh(LN(c'))`.

    Args:
      x: Inputs.
      w: Matrix of the inputs, [D, 4 H], an array or a Weight.
      u: Matrix of the hidden state, [H, 4 H], an array or a Weight.
      b: Biases of the gates, [4 H]; None for none. (cuDNN and torch have two, which are added.)
      state: State (h, c) before the first token, each `[B, H]` or `[H]`; None for `initial`.
      initial: State at resets; None for zeros.
      norms: Parameters of the normalisations; None for a plain LSTM.
      masks: Masks within the steps.
      reset: [B, T], True for tokens before which the state is the initial one, as those that begin a segment of a packed
        sequence (`segment_resets`).
      lengths: [B], tokens of each sequence, whose padding neither changes the state nor has outputs other than 0; None for T.
      reverse: Whether tokens are read from the last to the first.
      eps: Added to the variances of `norms`.
      impl: "xla", or "cudnn" for plain LSTMs on NVIDIA GPUs.

    Returns:
      `(h of each token, in the dtype of x, (h, c) after the last token that is read, float32)`.

    Raises:
      InputError: Shapes do not match, or the implementation does not support an argument.

    Cost:
      O(B T (D + H) H) time. The states and the activated gates are kept for the backward pass: 6 B T H numbers, with `norms`
      11 B T H.

    References:
      Hochreiter and Schmidhuber 1997, "Long short-term memory", with the forget gate of Gers et al. 2000.
      Ba et al. 2016, "Layer normalization", eq. 20 to 22.
    """
    sequences = Sequences(state, initial, masks, reset, lengths, reverse)
    check_shapes("lstm", x, w, b, [(u, 4)], sequences)
    if impl == "cudnn":
        if limits := cudnn_limits(x, norms is None and is_plain(masks), reset, reverse):
            raise InputError(f"impl='cudnn' does not support {', '.join(limits)}: set impl='xla'")
        start = initial if state is None else state
        return cudnn_lstm(x, w, u, b, start, lengths)
    if impl != "xla":
        raise InputError(f"impl={impl!r}: expected 'xla' or 'cudnn'")
    gates = gate_inputs(x, w, b if norms is None else None, sequences)
    cell, params = LSTMCell(), {}
    if norms is not None:
        bias = norms.x_bias.astype(jnp.float32) + norms.u_bias.astype(jnp.float32)
        bias = bias if b is None else bias + b.astype(jnp.float32)
        gates = layer_norm(gates, norms.x_scale.astype(jnp.float32), bias, eps)
        cell = LayerNormLSTMCell(eps)
        params = {name: _rows(getattr(norms, name), len(x)) for name in ("u_scale", "c_scale", "c_bias")}
    return run_layer(cell, gates, (u,), params, sequences, x.dtype)


def _rows(x: Array, count: int) -> Array:
    """The array in float32, once for each sequence."""
    return jnp.broadcast_to(x.astype(jnp.float32)[None], (count, x.shape[0]))
