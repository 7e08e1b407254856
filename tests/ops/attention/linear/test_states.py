"""States of chunks by the loop of a GPU and by a tree of products, against one chunk after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.linear.chunked import _states_by_loop, _states_by_tree


@pytest.mark.parametrize("count", [2, 5, 17])
def test_forms_of_the_states_agree_with_their_gradients(count):
    draw = np.random.default_rng(count)
    heads, features, width = 3, 4, 5
    sums = jnp.asarray(draw.standard_normal((count, heads, features, width), np.float32))
    decays = jnp.asarray(draw.standard_normal((count, heads, features, features), np.float32)) / 3
    start = jnp.asarray(draw.standard_normal((heads, features, width), np.float32))

    def result(form):
        score = lambda *arrays: sum(jnp.sum(jnp.sin(x)) for x in form(*arrays))  # noqa: E731
        return jax.jit(lambda *arrays: (form(*arrays), jax.grad(score, (0, 1, 2))(*arrays)))(sums, decays, start)

    expected = result(lambda *arrays: _states_by_loop(*arrays, False))
    for form in (_states_by_tree, lambda *arrays: _states_by_loop(*arrays, False, 16)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), result(form), expected)
