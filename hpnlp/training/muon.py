"""Muon (Jordan et al. 2024): momentum whose matrices are made orthogonal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from hpnlp.training import sparse_rows

# Of the quintic that drives singular values towards 1, quickly rather than all the way: x, x^3, x^5.
QUINTIC = (3.4445, -4.7750, 2.0315)

# (a parameter's path, a function of its whole matrices, what it is of) -> what the function makes of it
Whole = Callable[[sparse_rows.Path, Callable[[Array], Array], Array], Array]


class MuonState(NamedTuple):
    count: Array
    mu: Any


def orthogonal(x: Array, eps: float, steps: int = 5) -> Array:
    """[..., A, B] -> about U V^T of each matrix's U S V^T, by Newton-Schulz: 4 A B min(A, B) + 2 min(A, B)^3 FLOPs a step."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    first, third, fifth = QUINTIC

    def closer(_: Array, x: Array) -> Array:
        square = x @ x.mT
        return first * x + (third * square + fifth * square @ square) @ x

    x = lax.fori_loop(0, steps, closer, x)  # written out, it would be most of what a compiler has to do for a step
    return x.mT if tall else x


def scale_by_muon(decay: float, eps: float, whole: Whole | None = None) -> optax.GradientTransformation:
    """Nesterov momentum of matrices, [..., A, B] each, made orthogonal, times sqrt(max(1, B / A)).

    whole: as `hpnlp.parallel.distributed_matrices.of_whole`, where devices have parts of the matrices.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def one(path: Any, moment: Array) -> Array:
        made = lambda x: orthogonal(x, eps)  # noqa: E731
        update = made(moment) if whole is None else whole(sparse_rows.keys(path), made, moment)
        return jnp.sqrt(jnp.maximum(1.0, moment.shape[-1] / moment.shape[-2])) * update

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        mu, count = optax.tree.update_moment(updates, state.mu, decay, 1), state.count + 1
        ahead = optax.tree.bias_correction(mu, decay, count + 1), optax.tree.bias_correction(updates, decay, count)
        moments = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, *ahead)
        return jax.tree_util.tree_map_with_path(one, moments), MuonState(count, mu)

    return optax.GradientTransformation(init, update)
