"""Positions that equal the indices: the tiles then follow from the mask, and results are those without positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, RandomBlocks, Window, attend
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.reference import dense_attention

T = 96
MASK = Causal() & (Window(8) | RandomBlocks(8, 2))
INDICES = np.tile(np.arange(T, dtype=np.int32), (2, 1))
POSITIONS = {
    "indices": INDICES,
    "one token further": INDICES + 1,
    "one example shuffled": np.stack([INDICES[0], np.random.default_rng(0).permutation(T).astype(np.int32)]),
}


@pytest.fixture(scope="module")
def losses():
    """Functions of (q, k, v, positions) -> (sum of o * weights, gradients), by blocks and dense."""
    weights = jax.random.normal(jax.random.key(1), (2, T, 2, 8))

    def by_blocks(q, k, v, positions):
        return jnp.sum(attend(q, k, v, MASK, positions=positions, block_size=8) * weights)

    def dense(q, k, v, positions):
        return jnp.sum(dense_attention(q, k, v, MASK, Operands(positions=positions)) * weights)

    return [jax.jit(jax.value_and_grad(function, (0, 1, 2))) for function in (by_blocks, dense)]


@pytest.mark.parametrize("name", POSITIONS)
def test_results_follow_the_positions(losses, name):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, T, 2, 8))
    (actual, gradients), (expected, expected_gradients) = (loss(q, k, v, POSITIONS[name]) for loss in losses)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-6)


def test_tiles_follow_from_the_mask_where_positions_are_indices():
    """The first branch of the condition, for positions that are the indices, has the operations of a call without positions."""
    q, k, v = jnp.zeros((3, 2, T, 2, 8))

    def operations(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "jaxpr"):
                    yield from operations(inner.jaxpr)

    def products(**positions):
        jaxpr = jax.make_jaxpr(lambda q, k, v: attend(q, k, v, MASK, block_size=8, **positions))(q, k, v)
        return [name for name in operations(jaxpr.jaxpr) if name in ("dot_general", "cond", "scan")]

    static, dynamic = products(), products(positions=jnp.asarray(INDICES))
    assert "cond" in dynamic
    assert dynamic.count("dot_general") > static.count("dot_general") > 0
