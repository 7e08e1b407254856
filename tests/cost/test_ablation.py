"""Programs without a part: loops, calls, branches and derivatives keep all other operations, and lose those of the part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hpnlp.cost.ablation import without_part
from hpnlp.cost.flop_count import count_flops
from hpnlp.cost.parts import part

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), jnp.float32)


def block(x):
    """A residual block: only the branch is of the part."""
    with part("feed_forward"):
        branch = jax.jit(jnp.tanh)(x @ W)
    return x + branch


def scanned(x):
    return lax.scan(lambda x, _: (block(x), None), x, length=3)[0]


def looped(x):
    return lax.while_loop(lambda state: state[0] < 3, lambda state: (state[0] + 1, block(state[1])), (0, x))[1]


def counted_inside(x):
    def step(state):
        with part("feed_forward"):
            count = state[0] + 1
        return count, block(state[1])

    return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]


@jax.custom_vjp
def identity(x):
    return block(x)


identity.defvjp(lambda x: (block(x), None), lambda _, g: (g,))

PROGRAMS = {
    "plain": block,
    "jit": jax.jit(block),
    "checkpoint": jax.checkpoint(block),
    "custom derivative": identity,
    "scan": scanned,
    "cond": lambda x: lax.cond(x[0, 0] > -100, block, lambda x: x, x),
    "vmap": jax.vmap(lambda row: block(row[None])[0]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_residual_block_without_its_branch_is_the_identity(name):
    jaxpr = jax.make_jaxpr(PROGRAMS[name])(X)
    (y,) = jax.jit(without_part(jaxpr, "feed_forward"))(X)
    np.testing.assert_array_equal(y, X)
    (y,) = jax.jit(without_part(jaxpr, "norms"))(X)
    np.testing.assert_allclose(y, PROGRAMS[name](X), rtol=1e-5)


@pytest.mark.parametrize("program", [looped, counted_inside])
def test_loops_of_several_parts_that_end_by_their_data_are_computed(program):
    jaxpr = jax.make_jaxpr(program)(X)
    (y,) = jax.jit(without_part(jaxpr, "feed_forward"))(X)
    np.testing.assert_allclose(y, program(X), rtol=1e-5)


def test_gradients_lose_the_operations_of_the_part_and_keep_the_rest():
    def loss(w, x):
        with part("feed_forward"):
            y = x @ w["inner"]
        with part("output"):
            return jnp.sum(y @ w["outer"])

    w = {"inner": W, "outer": W.T}
    gradient = jax.value_and_grad(loss)
    leaves = jax.tree.leaves((w, X))
    jaxpr = jax.make_jaxpr(gradient)(w, X)
    removed = without_part(jaxpr, "feed_forward")
    value, inner, outer = jax.jit(removed)(*leaves)
    assert value == 0 and not inner.any() and not outer.any()  # the output layer reads zeros
    total, kept = (count_flops(f, *leaves) for f in (lambda *x: gradient(w, x[-1]), removed))
    assert total == 5 * 2 * 4 * 8 * 8 and kept == 3 * 2 * 4 * 8 * 8


def test_random_keys_of_a_part_stay_keys():
    def draw(key, x):
        with part("embedding"):
            keys = jax.random.split(key, 3)
            x = x * 2
        return x + jax.random.normal(keys[0], x.shape)

    key = jax.random.key(0)
    (y,) = jax.jit(without_part(jax.make_jaxpr(draw)(key, X), "embedding"))(key, X)
    assert y.shape == X.shape and np.isfinite(y).all()
