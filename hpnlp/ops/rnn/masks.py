"""Masks of recurrent networks: resets at segments, lengths, and the regularisations that act within a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.dropout import keep_mask, seed_words
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMasks:
    """Masks within the steps of a recurrence: float32 `[B, T, H]`, or `[B, 1, H]` for one mask of all steps; None for none.

    Attributes:
      hidden: Factor of the hidden state in the recurrent products (Gal and Ghahramani 2016: one mask per sequence).
      candidate: Factor of the candidate that is added to the state (Semeniuta et al. 2016).
      hold_h: Share of the hidden state that a step leaves as it was, 0 or 1 in training and the rate in evaluation (Krueger et
        al. 2017, "Zoneout").
      hold_c: The same of the cell state of an LSTM.
    """

    hidden: Any = None
    candidate: Any = None
    hold_h: Any = None
    hold_c: Any = None


@array_op("B T", segment_ids="B T")
def segment_resets(
    segment_ids: Int[Array, "B T"], previous: Int[Array, " B"] | None = None, reverse: bool = False
) -> Bool[Array, "B T"]:
    """Tokens before which the state of a recurrence is reset: the first of each segment in the direction of reading.

    Args:
      segment_ids: Segment of each token.
      previous: Segment of the token before the first one, to which the start state belongs; None if the first token is not to
        be reset. Not with `reverse`.
      reverse: Whether tokens are read from the last to the first.

    Returns:
      bool `[B, T]`, in the order of the tokens.
    """
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    if reverse:
        return jnp.pad(changes, ((0, 0), (0, 1)))
    first = jnp.zeros_like(changes, shape=(len(segment_ids), 1))
    if previous is not None:
        first = segment_ids[:, :1] != previous[:, None]
    return jnp.concatenate([first, changes], axis=1)


@array_op("B T", ids="B T")
def dropout_factors(rng: Array, ids: Int[Array, "B T"], features: int, rate: float) -> Float[Array, "B T H"]:
    """Factors of inverted dropout.

    Args:
      rng: A PRNG key.
      ids: A number for each token, or `[B, 1]` for each sequence, on which its factors depend, whatever the layout.
      features: Number of features H.
      rate: Probability of 0.

    Returns:
      float32: 0 with the probability `rate`, and 1 / (1 - rate) otherwise.

    Raises:
      InputError: The rate is not in [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise InputError(f"dropout rate {rate}: expected at least 0, and less than 1")
    return jnp.where(_keep(rng, ids, features, rate), jnp.float32(1.0 / (1.0 - rate)), jnp.float32(0.0))


@array_op("B T", ids="B T")
def zoneout_shares(
    rng: Array | None, ids: Int[Array, "B T"], features: int, rate: float, deterministic: bool
) -> Float[Array, "B _ H"]:
    """Shares of a state that zoneout leaves as it was.

    Args:
      rng: A PRNG key; not read if deterministic.
      ids: A number for each token.
      features: Number of features H.
      rate: Probability that a feature is left as it was.
      deterministic: Whether to take the expectation, as in evaluation.

    Returns:
      float32, 1 with the probability `rate` and 0 otherwise; if deterministic, the rate, `[B, 1, H]`.

    Raises:
      InputError: The rate is not in [0, 1).

    References:
      Krueger et al. 2017, "Zoneout: regularizing RNNs by randomly preserving hidden activations", sec. 3.
    """
    if not 0.0 <= rate < 1.0:
        raise InputError(f"zoneout rate {rate}: expected at least 0, and less than 1")
    if deterministic:
        return jnp.full((len(ids), 1, features), rate, jnp.float32)
    assert rng is not None
    return 1.0 - _keep(rng, ids, features, rate).astype(jnp.float32)


@array_op("H F", w="H F")
def drop_weights(w: Float[Array, "H F"], rng: Array, rate: float) -> Float[Array, "H F"]:
    """DropConnect of a matrix: one mask for a forward pass, so that all steps of all sequences multiply with the same matrix.

    Args:
      w: The matrix.
      rng: A PRNG key.
      rate: Probability that a weight is dropped.

    Returns:
      The matrix with dropped weights 0 and the others divided by 1 - rate, in the dtype of w.

    Raises:
      InputError: The rate is not in [0, 1).

    References:
      Wan et al. 2013, "Regularization of neural networks using DropConnect"; Merity et al. 2018, "Regularizing and optimizing
      LSTM language models", sec. 2.
    """
    rows = jnp.arange(w.shape[0], dtype=jnp.int32)[:, None]
    factors = dropout_factors(rng, rows, w.shape[1], rate)[:, 0]
    return (w.astype(jnp.float32) * factors).astype(w.dtype)


def _keep(rng: Array, ids: Array, features: int, rate: float) -> Array:
    """Bool `[B, T, H]`, True with the probability 1 - rate."""
    columns = jnp.arange(features, dtype=jnp.uint32)[None, None]
    return keep_mask(seed_words(rng), ids[..., None], columns, jnp.zeros((1, 1, 1), jnp.uint32), rate)
