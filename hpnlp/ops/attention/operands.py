"""`Operands`: everything that an attention call receives beside q, k, v and the mask, as one record."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

# Operands that only have a meaning with dropout_rate.
_QUALIFIERS = frozenset({"rng", "streams"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands and options of one attention call, under the names and with the meaning that `attend` gives them.

    `attend` makes the record once and validates it. Implementations, `explain` and the choice among implementations take
    the record. None stands for an absent operand. kv_segment_ids and kv_positions default to the same array as segment_ids
    and positions (self-attention).

    Attributes:
      segment_ids: int [B, T]; a query sees only keys of its own segment.
      kv_segment_ids: int [B, S].
      positions: int [B, T]; the mask, bias functions and dropout use these in place of indices.
      kv_positions: int [B, S].
      kv_lengths: int [B]; keys at indices from kv_lengths[b] on are hidden.
      dense_mask: bool, broadcasts to [B, N, T, S]; False hides.
      global_tokens: bool [B, T] or int [B, G], indices with -1 as padding; tokens that see all and are seen by all.
      bias: float array that broadcasts to [B, N, T, S], a PairBias, or a function of (head, query position, key position).
      scale: Factor of the scores, a number or a float array of shape (); None is H ** -0.5.
      soft_cap: Number; scores become soft_cap * tanh(score / soft_cap).
      sinks: float [N], a logit for each head without a value.
      dropout_rate: Probability that an attention weight is dropped.
      rng: PRNG key of dropout.
      streams: int [B, N], the numbers by which dropout distinguishes (batch, head) pairs.
      return_lse: Whether the call returns (o, lse) in place of o.
    """

    segment_ids: Any = None
    kv_segment_ids: Any = None
    positions: Any = None
    kv_positions: Any = None
    kv_lengths: Any = None
    dense_mask: Any = None
    global_tokens: Any = None
    bias: Any = None
    scale: Any = None
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: Any = None
    dropout_rate: float = dataclasses.field(default=0.0, metadata={"static": True})
    rng: Any = None
    streams: Any = None
    return_lse: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("segment_ids", "positions"):
            if getattr(self, f"kv_{name}") is None:
                object.__setattr__(self, f"kv_{name}", getattr(self, name))

    def features(self) -> frozenset[str]:
        """The operands that a call uses.

        Returns:
          Names of the fields that are not None, False or the number 0; without rng and streams, which belong to dropout_rate.
        """
        values = {name: value for name, value in vars(self).items() if name not in _QUALIFIERS and value is not None}
        return frozenset(
            name for name, value in values.items() if not (isinstance(value, bool | int | float) and not value)
        )

    def check_only(self, operation: str, *supported: str) -> None:
        """Checks that a call uses no other operands than some.

        Args:
          operation: Name of the operation, for messages.
          *supported: Names of the operands that it supports.

        Raises:
          InputError: Another operand is used.
        """
        if others := sorted(self.features() - {*supported}):
            raise InputError(f"{operation} does not support {', '.join(others)}: expected only {', '.join(supported)}")


def scale_queries(q: Array, operands: Operands) -> tuple[Array, Operands]:
    """Multiplies a scale that is an array, and may be traced, into the queries, because kernels need a fixed number.

    A query that sees nothing contributes 0 to the gradient of the scale, even if it is NaN.

    Args:
      q: [B, T, N, H].
      operands: Operands of `attend`, whose scale may be an array.

    Returns:
      (q, operands), with 1.0 for a scale that was an array; both unchanged for other scales.
    """
    if not isinstance(operands.scale, jax.Array):
        return q, operands
    wide = q.astype(jnp.float32)
    finite = jnp.isfinite(wide)  # the gradient of the scale sums queries times their cotangents, and 0 * NaN is NaN
    product = jnp.where(finite, wide, 0.0) * operands.scale.astype(jnp.float32)
    q = (product + jnp.where(finite, 0.0, wide)).astype(q.dtype)
    return q, dataclasses.replace(operands, scale=1.0)


@array_op("B", tokens="B")
def as_flags(tokens: Array, length: int) -> Bool[Array, "B T"]:
    """Global tokens as flags.

    Args:
      tokens: bool [B, T], returned as it is, or int [B, G]: indices, of which negative ones are padding.
      length: T.

    Returns:
      bool [B, T], True for global tokens.
    """
    if tokens.dtype == jnp.bool_:
        return tokens
    indices = jnp.where(tokens < 0, length, tokens.astype(jnp.int32))
    return (
        jnp.zeros((tokens.shape[0], length), bool)
        .at[jnp.arange(tokens.shape[0])[:, None], indices]
        .set(True, mode="drop")
    )
