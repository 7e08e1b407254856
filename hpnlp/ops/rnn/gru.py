"""Gated recurrent units and minimal gated units over sequences, each in two forms."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.rnn.cells import GRUCell, MinimalCell, OriginalGRUCell, OriginalMinimalCell
from hpnlp.ops.rnn.masks import StepMasks
from hpnlp.ops.rnn.recurrence import State
from hpnlp.ops.rnn.sequence import Sequences, check_shapes, gate_inputs, run_layer
from hpnlp.ops.weight import dense
from hpnlp.types import InputError

FORMS = ("cudnn", "original")
# (layer, form) -> cell.
CELLS = {
    ("gru", "cudnn"): GRUCell(),
    ("gru", "original"): OriginalGRUCell(),
    ("minimal_gated_unit", "cudnn"): MinimalCell(),
    ("minimal_gated_unit", "original"): OriginalMinimalCell(),
}


@array_op("B", x="B")
def gru(
    x: Float[Array, "B T D"],
    w: Any,
    u: Any,
    b: Float[Array, " F"] | None = None,
    n_bias: Float[Array, " H"] | None = None,
    state: State | None = None,
    *,
    form: str = "cudnn",
    initial: State | None = None,
    masks: StepMasks = StepMasks(),  # noqa: B008  (frozen)
    reset: Bool[Array, "..."] | None = None,
    lengths: Int[Array, "..."] | None = None,
    reverse: bool = False,
) -> tuple[Float[Array, "B T H"], State]:
    """Gated recurrent unit over the sequences of a batch.

    With the gates r, z, n in the columns of w, u and b, and r and z the sigmoids of theirs in `x w + h u + b`,
    `h' = (1 - z) n + z h`. The candidate is `n = tanh(x w_n + b_n + r (h u_n + n_bias))` in the form "cudnn", which is also
    torch's, and `n = tanh(x w_n + b_n + (r h) u_n)` in the form "original".

    Args:
      x: Inputs.
      w: Matrix of the inputs, [D, 3 H], an array or a Weight.
      u: Matrix of the hidden state, [H, 3 H], an array or a Weight.
      b: Biases of the gates, [3 H]; None for none.
      n_bias: Bias of the candidate's recurrent product, for the form "cudnn"; None for none.
      state: State (h,) before the first token, `[B, H]` or `[H]`; None for `initial`.
      form: "cudnn" or "original".
      initial: State at resets; None for zeros.
      masks: Masks within the steps.
      reset: As for `lstm`.
      lengths: As for `lstm`.
      reverse: Whether tokens are read from the last to the first.

    Returns:
      `(h of each token, in the dtype of x, (h,) after the last token that is read, float32)`.

    Raises:
      InputError: Unknown form, or shapes do not match.

    Cost:
      O(B T (D + H) H) time. The form "original" has two products in each step, one after the other.

    References:
      Cho et al. 2014, "Learning phrase representations using RNN encoder-decoder", eq. 5 to 8 (there z is 1 - z).
    """
    sequences = Sequences(state, initial, masks, reset, lengths, reverse)
    check_shapes("gru", x, w, b, [(u, 3)], sequences)
    return _run("gru", form, u, n_bias, gate_inputs(x, w, b, sequences), sequences, x.dtype)


@array_op("B", x="B")
def minimal_gated_unit(
    x: Float[Array, "B T D"],
    w: Any,
    u: Any,
    b: Float[Array, " F"] | None = None,
    n_bias: Float[Array, " H"] | None = None,
    state: State | None = None,
    *,
    form: str = "original",
    initial: State | None = None,
    masks: StepMasks = StepMasks(),  # noqa: B008  (frozen)
    reset: Bool[Array, "..."] | None = None,
    lengths: Int[Array, "..."] | None = None,
    reverse: bool = False,
) -> tuple[Float[Array, "B T H"], State]:
    """Minimal gated unit over the sequences of a batch.

    With the gates f, n in the columns of w, u and b, and f the sigmoid of its in `x w + h u + b`, `h' = (1 - f) h + f n`. The
    candidate is `n = tanh(x w_n + b_n + (f h) u_n)` in the form "original", and
    `n = tanh(x w_n + b_n + f (h u_n + n_bias))` in the form "cudnn", whose step has one product.

    Args:
      x: Inputs.
      w: Matrix of the inputs, [D, 2 H], an array or a Weight.
      u: Matrix of the hidden state, [H, 2 H], an array or a Weight.
      b: Biases of the gates, [2 H]; None for none.
      n_bias: Bias of the candidate's recurrent product, for the form "cudnn"; None for none.
      state: As for `gru`.
      form: "cudnn" or "original".
      initial: State at resets; None for zeros.
      masks: Masks within the steps.
      reset: As for `lstm`.
      lengths: As for `lstm`.
      reverse: Whether tokens are read from the last to the first.

    Returns:
      As for `gru`.

    Raises:
      InputError: Unknown form, or shapes do not match.

    Cost:
      Two thirds of `gru`.

    References:
      Zhou et al. 2016, "Minimal gated unit for recurrent neural networks", eq. 7 to 9.
    """
    sequences = Sequences(state, initial, masks, reset, lengths, reverse)
    check_shapes("minimal_gated_unit", x, w, b, [(u, 2)], sequences)
    return _run("minimal_gated_unit", form, u, n_bias, gate_inputs(x, w, b, sequences), sequences, x.dtype)


def _run(
    name: str, form: str, u: Any, n_bias: Array | None, gates: Array, sequences: Sequences, dtype: DTypeLike
) -> tuple[Array, State]:
    """Runs the cell of a form."""
    if form not in FORMS:
        raise InputError(f"{name}: form={form!r}: expected one of {', '.join(FORMS)}")
    features = u.shape[0]
    if form == "original":
        if n_bias is not None:
            raise InputError(
                f"{name}: n_bias has no effect in the form 'original', whose candidate has one bias: pass None"
            )
        u = dense(u)
        return run_layer(CELLS[name, form], gates, (u[:, :-features], u[:, -features:]), {}, sequences, dtype)
    if n_bias is not None and n_bias.shape != (features,):
        raise InputError(f"{name}: n_bias {n_bias.shape}: expected [H] = {(features,)}")
    bias = jnp.zeros((features,), jnp.float32) if n_bias is None else n_bias.astype(jnp.float32)
    return run_layer(CELLS[name, form], gates, (u,), {"n_bias": bias}, sequences, dtype)
