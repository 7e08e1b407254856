"""Properties of every index: equal seeds, one trace for equal sizes, dtypes, and vmap."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.search import PqCodes, build_ivf, build_lsh, build_pq, ivf_search, lsh_search, pq_search
from tests.contracts import ONCE, once
from tests.ops.search.tables import by_sorting, clustered

# Name -> (build, search of all rows, search of some).
INDEXES = {
    "ivf": (functools.partial(build_ivf, cells=8, iterations=2), {"probes": 8}, ivf_search),
    "lsh": (functools.partial(build_lsh, bits=3, tables=2), {"probes": 8, "candidates": 300}, lsh_search),
    "pq": (
        functools.partial(build_pq, form=PqCodes(4, 16), cells=8, iterations=2),
        {"probes": 8, "rerank": 400},
        pq_search,
    ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_depend_on_their_seed_and_share_a_trace(name):
    build, _, search = INDEXES[name]
    q, w, _ = clustered(300, 4)
    first, same, other = (build(w, seed=seed) for seed in (3, 3, 4))
    chex.assert_trees_all_equal(first, same)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True))
    run = jax.jit(chex.assert_max_traces(lambda index, q: search(index, q, 3, probes=2), n=1), compiler_options=ONCE)
    assert [run(index, q)[1].shape for index in (first, other)] == [(4, 3)] * 2
    ids = once(jax.vmap(lambda q: search(first, q, 3, probes=2)[1]), jnp.stack([q, -q]))
    np.testing.assert_array_equal(ids, [run(first, x)[1] for x in (q, -q)])


@pytest.mark.parametrize("name", INDEXES)
def test_search_of_everything_is_exact_in_every_dtype(name):
    """Scores are float32 and ids int32; a bfloat16 table stays in bfloat16."""
    build, everything, search = INDEXES[name]
    q, w, _ = clustered(300, 4)
    for table, dtype in ((w, jnp.float64), (w.astype(jnp.bfloat16), jnp.float32)):
        index = build(table)
        assert table.dtype in {leaf.dtype for leaf in jax.tree.leaves(index)}
        with jax.enable_x64(dtype == jnp.float64):
            scores, ids = once(lambda index, q: search(index, q, 3, **everything), index, q.astype(dtype))  # noqa: B023
        expected = by_sorting(q, table, 3)
        assert (scores.dtype, ids.dtype) == (jnp.float32, jnp.int32)
        np.testing.assert_allclose(scores, expected[0], rtol=5e-6, atol=5e-6)
        np.testing.assert_array_equal(ids, expected[1])
