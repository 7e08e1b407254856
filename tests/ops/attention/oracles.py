"""Comparison with torch: equal arrays and equal cotangents, in the axes of `attend`.

A function under test takes arrays and returns a tuple of them; torch is imported only where a test calls for it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.contracts import once

OUTPUT, GRADIENT = 1e-5, 1e-4  # absolute and relative tolerances in float32


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def qkv(length, keys, *, batch=2, heads=4, kv_heads=2, size=8, value_size=6):
    """q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]."""
    shapes = (batch, length, heads, size), (batch, keys, kv_heads, size), (batch, keys, kv_heads, value_size)
    return [draw(*shape, seed=n) for n, shape in enumerate(shapes)]


def ours(function, arrays):
    """(outputs, gradients) under random cotangents; an output of -inf has none."""

    def value(*arrays):
        outs = function(*arrays)
        finite = [jnp.where(jnp.isneginf(x), jnp.zeros_like(x), x) for x in outs]
        return sum(jnp.sum(x * draw(*x.shape, seed=9)) for x in finite), outs

    grad = jax.grad(value, argnums=tuple(range(len(arrays))), has_aux=True)
    grads, outs = once(grad, *(jnp.asarray(x) for x in arrays))
    return outs, grads


def theirs(function, arrays):
    """(outputs, gradients) of a function of torch."""
    import torch

    leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in arrays]
    outs = function(*leaves)
    finite = [torch.where(torch.isneginf(x), 0.0, x) for x in outs]
    sum((x * torch.from_numpy(draw(*x.shape, seed=9))).sum() for x in finite).backward()
    return [x.detach().numpy() for x in outs], [x.grad.numpy() for x in leaves]


def assert_agree(results, expected):
    for mine, other, tolerance in zip(results, expected, (OUTPUT, GRADIENT), strict=True):
        for a, b in zip(mine, other, strict=True):
            np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def flex(q, k, v, mask_mod=None, score_mod=None, scale=None):
    """(o, lse) of torch's FlexAttention: the eager form, because the public function has no gradients on a CPU.

    mask_mod(b, h, i, j) -> bool and score_mod(score, b, h, i, j) -> score; the scores are scaled.
    """
    from torch._higher_order_ops.flex_attention import math_attention

    def all_see(b, h, i, j):
        return i >= 0

    def as_it_is(score, b, h, i, j):
        return score

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse, _ = math_attention(q, k, v, score_mod or as_it_is, (mask_mod or all_see,), scale, {})
    return o.transpose(1, 2), lse.transpose(1, 2) * math.log(2)  # torch counts in powers of 2
