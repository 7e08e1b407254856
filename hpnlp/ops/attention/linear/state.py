"""The state of linear attention, and the division by the normaliser."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearState:
    """The sums over preceding tokens that a query reads. Their size does not depend on the number of tokens.

    Attributes:
      s: float32 `[B, K, M, H]`, the sum of `k v^T`, after decays and the delta rule.
      z: float32 `[B, K, M]`, the sum of the keys after decays, with which outputs are normalised; None without normalisation.
    """

    s: Any
    z: Any = None


def zero_state(batch: int, heads: int, features: int, width: int, normalize: bool = False) -> LinearState:
    """The state before the first token.

    Args:
      batch: Number of sequences B.
      heads: Number of key heads K.
      features: Features of a key M.
      width: Size of a value H.
      normalize: Whether outputs are normalised.

    Returns:
      A state of zeros.
    """
    z = jnp.zeros((batch, heads, features), jnp.float32) if normalize else None
    return LinearState(jnp.zeros((batch, heads, features, width), jnp.float32), z)


def check_state(state: LinearState, k: jax.Array, v: jax.Array) -> None:
    """Checks the shapes of a state.

    Args:
      state: The state.
      k: `[B, ..., K, M]`, keys.
      v: `[B, ..., K, H]`, values.

    Raises:
      InputError: The state has another shape.
    """
    z = (k.shape[0], *k.shape[-2:])
    for name, x, shape in (("s", state.s, (*z, v.shape[-1])), ("z", state.z, z)):
        if x is not None and x.shape != shape:
            raise InputError(f"state.{name} {x.shape}: expected {shape} for k {k.shape} and v {v.shape}")


def normalized(
    numerator: Float[Array, "*tokens H"], denominator: Float[Array, "*tokens"], eps: float
) -> Float[Array, "*tokens H"]:
    """Divides sums of values by sums of weights.

    Args:
      numerator: Weighted sums of values.
      denominator: Sums of weights.
      eps: Least size of a denominator: smaller ones are replaced by eps with their sign. With 0, a denominator of 0 counts as
        1.

    Returns:
      The quotients. Where the denominator is replaced, it has no gradient.
    """
    is_small = jnp.abs(denominator) <= eps
    least = jnp.where(denominator < 0, jnp.float32(-eps), jnp.float32(eps)) if eps > 0 else jnp.ones_like(denominator)
    return _quotient(numerator, jnp.where(is_small, least, denominator)[..., None])


@jax.custom_jvp
def _quotient(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """The quotient. Its derivatives do not contain the square of the denominator, which may be 0 in float32."""
    return numerator / denominator


@_quotient.defjvp
def _quotient_jvp(primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    o = _quotient(*primals)
    return o, (tangents[0] - o * tangents[1]) / primals[1]
