"""Metric losses over the examples of a batch: vectors of one class are nearer to each other than to those of other classes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

MINING = ("hard", "all")

Loss = tuple[Float[Array, ""], Float[Array, ""]]


@array_op("", x="N D")
def triplet_loss(
    x: Float[Array, "N D"],
    labels: Int[Array, " N"],
    *,
    margin: int | float | None = 0.2,
    mining: str = "hard",
    squared: bool = False,
    mask: Bool[Array, " N"] | None = None,
) -> Loss:
    """Triplet loss on Euclidean distances d: max(0, margin + d(anchor, positive) - d(anchor, negative)).

    With mining="hard", each example is the anchor of one triplet, of its farthest positive (an other example of its class) and
    its nearest negative (an example of another class); with "all", of all triplets. Examples without a positive or without a
    negative in the batch are no anchors.

    Args:
      x: [N, D] vectors.
      labels: [N] classes.
      margin: At least 0; None for the soft margin log(1 + exp(d(anchor, positive) - d(anchor, negative))).
      mining: An entry of MINING.
      squared: Squared distances in place of distances.
      mask: [N] examples that count; None for all.

    Returns:
      `(sum, weight)`, float32 scalars: the sum of the losses, and the number of anchors ("hard"), or of triplets that violate
      the margin ("all"; of all triplets without a margin). The loss is their quotient; the weight has no gradient, and is 0
      if there is no triplet.

    Raises:
      InputError: The margin is negative, mining is unknown, shapes do not fit, or all examples are of one class (which is not
          checked where labels are traced: the weight is then 0).

    Cost:
      2 N^2 D operations and N^2 distances; with "all" N^3 triplets.

    References:
      Hermans, Beyer and Leibe 2017, "In defense of the triplet loss for person re-identification", eq. 5 (hard) and 6 (all).
    """
    same, other = _pairs(x, labels, margin, mining, mask)
    y = _counted(x, mask)
    # Differences of the vectors, not of their products, which cancel for near vectors.
    square = jnp.square(y[:, None] - y[None]).sum(axis=2)
    is_zero = square == 0
    distance = square if squared else jnp.where(is_zero, 0.0, lax.sqrt(jnp.where(is_zero, 1.0, square)))
    return _mined(distance, same, other, margin, mining)


@array_op("", x="N D")
def large_margin_loss(
    x: Float[Array, "N D"],
    labels: Int[Array, " N"],
    *,
    margin: int | float | None = 0.2,
    mining: str = "hard",
    mask: Bool[Array, " N"] | None = None,
) -> Loss:
    """Large-margin loss on inner products s: max(0, margin - s(anchor, positive) + s(anchor, negative)).

    Args:
      x: [N, D] vectors; of length 1 for cosines.
      labels: [N] classes.
      margin: At least 0; None for the soft margin, as for `triplet_loss`.
      mining: As for `triplet_loss`: with "hard", the positive is the least similar one, and the negative the most similar one.
      mask: [N] examples that count; None for all.

    Returns:
      As `triplet_loss`.

    Raises:
      InputError: As for `triplet_loss`.

    Cost:
      2 N^2 D operations; with "all" N^3 triplets.

    References:
      Weinberger and Saul 2009, "Distance metric learning for large margin nearest neighbor classification".
      Wu et al. 2018, "StarSpace: embed all the things!", for similarities.
    """
    same, other = _pairs(x, labels, margin, mining, mask)
    y = _counted(x, mask)
    product = lax.dot_general(y, y, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return _mined(-product, same, other, margin, mining)


def _pairs(x: Array, labels: Array, margin: int | float | None, mining: str, mask: Array | None) -> tuple[Array, Array]:
    """Checks the arguments; `(positives, negatives)`, bool [N, N] for each anchor."""
    if x.ndim != 2 or labels.shape != x.shape[:1] or (mask is not None and mask.shape != labels.shape):
        shapes = f"x {x.shape}, labels {labels.shape}" + ("" if mask is None else f", mask {mask.shape}")
        raise InputError(f"{shapes}: expected [N, D], and [N] for each other")
    if margin is not None and not (isinstance(margin, int | float) and 0 <= margin < np.inf):
        raise InputError(f"margin {margin}: expected a number of at least 0, such as 0.2")
    if mining not in MINING:
        raise InputError(f"mining {mining!r}: expected 'hard' or 'all'")
    if not isinstance(labels, Tracer) and not isinstance(mask, Tracer):
        classes = np.unique(np.asarray(labels)[slice(None) if mask is None else np.asarray(mask)])
        if len(classes) < 2:
            raise InputError(
                f"labels: {'no example counts' if not len(classes) else f'all examples are of class {classes[0]}'}, so that "
                "there are no negatives: put at least two classes into a batch"
            )
    counts = jnp.ones(labels.shape, bool) if mask is None else mask
    both = counts[:, None] & counts[None]
    equal = labels[:, None] == labels[None]
    return equal & both & ~jnp.eye(len(labels), dtype=bool), ~equal & both


def _counted(x: Array, mask: Array | None) -> Array:
    """The vectors in float32; 0 for those that do not count, which may be NaN."""
    y = x.astype(jnp.float32)
    return y if mask is None else jnp.where(mask[:, None], y, 0.0)


def _mined(distance: Array, same: Array, other: Array, margin: int | float | None, mining: str) -> Loss:
    """The loss of the distances of all pairs."""

    def loss(violation: Array) -> Array:
        return jax.nn.softplus(violation) if margin is None else jax.nn.relu(violation + margin)

    if mining == "hard":
        farthest = jnp.where(same, distance, -jnp.inf).max(axis=1)
        nearest = jnp.where(other, distance, jnp.inf).min(axis=1)
        is_anchor = same.any(axis=1) & other.any(axis=1)
        violation = jnp.where(is_anchor, farthest, 0.0) - jnp.where(is_anchor, nearest, 0.0)
        losses = jnp.where(is_anchor, loss(violation), 0.0)
        return losses.sum(), is_anchor.sum().astype(jnp.float32)
    is_triplet = same[:, :, None] & other[:, None, :]
    losses = jnp.where(is_triplet, loss(distance[:, :, None] - distance[:, None, :]), 0.0)
    # The soft margin is positive everywhere, and 0 in float32 where the violation is below -104.
    counts = is_triplet if margin is None else is_triplet & (losses > 0)
    return losses.sum(), counts.sum().astype(jnp.float32)
