"""Errors and centroids of the mixers that attend within buckets or blocks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Causal, Window
from hpnlp.types import MixerInputs
from tests.contracts import once
from tests.messages import raises


def test_other_masks_raise():
    for name in ("reformer", "routing", "sinkhorn"):
        raises("cannot apply the mask Window", MIXERS[name]().within, Window(3, 0))


def test_centroids_move_towards_the_mean_of_their_tokens():
    """Statistics leave out padding, which is NaN here, and a cluster without tokens keeps its centroid."""
    mixer = MIXERS["routing"](clusters=5, window=2, decay=0.75)
    draw = np.random.default_rng(0)
    q, v = (jnp.asarray(draw.standard_normal((1, 4, n, 6)).astype(jnp.float32)) for n in (2, 1))
    q, v = (x.at[:, 3].set(jnp.nan) for x in (q, v))
    ids = jnp.asarray([[1, 1, 2, 0]], jnp.int32)
    inputs = MixerInputs(x=v[:, :, 0], q=q, v=v, segment_ids=ids, kv_segment_ids=ids)

    def step(inputs):
        variables = nn.meta.unbox(mixer.init(jax.random.key(0), inputs, Causal()))
        statistics = mixer.apply(variables, inputs, Causal()).statistics
        return (
            variables["buffers"],
            statistics,
            mixer.advance(variables["buffers"], statistics, jnp.int32(0), jax.random.key(0)),
        )

    buffers, statistics, moved = jax.device_get(once(step, inputs))
    centroids, moved = buffers["centroids"], moved["centroids"]
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=2), 1.0, atol=1e-5)

    expected = centroids.copy()
    x = np.asarray(q)[0, :3] - np.asarray(q)[0, :3].mean(axis=2, keepdims=True)
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    for head in range(2):
        nearest = (x[:, head] @ centroids[head].T).argmax(axis=1)
        for cluster in set(nearest):
            mean = 0.75 * centroids[head, cluster] + 0.25 * x[nearest == cluster, head].mean(axis=0)
            expected[head, cluster] = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(moved, expected, atol=2e-6)
    assert statistics["counts"].sum() == 6
