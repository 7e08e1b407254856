"""Clusters of queries: their segments, their limit, and the weights of the best keys."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import attend
from hpnlp.ops.attention.clustered import clustered_attention, hamming_kmeans, improved_clustered_attention, sign_bits
from tests.contracts import assert_close, once
from tests.messages import raises


def arrays(length=16, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, heads, 8)).astype(jnp.float32)) for heads in (4, 2, 2))
    return q, k, v, jnp.asarray(rng.standard_normal((8, 31)).astype(jnp.float32))


def test_every_segment_has_clusters_in_proportion_to_its_tokens():
    q, *_, directions = arrays(20)
    ids = np.array([[2] * 12 + [0] + [1] * 7, [3, 5, 3, 7] * 5])
    clusters, many = once(
        lambda q: [
            hamming_kmeans(sign_bits(q, directions), *sizes, jnp.asarray(ids, jnp.int32)) for sizes in ((6, 3), (2, 0))
        ],
        q,
    )
    assert np.asarray(clusters.fits).all()
    np.testing.assert_array_equal(np.sort(clusters.segment_ids, axis=1), [[0, 1, 1, 2, 2, 2], [3, 3, 5, 5, 7, 7]])
    of_tokens = np.asarray(clusters.of_tokens)
    for b in range(2):
        np.testing.assert_array_equal(
            np.asarray(clusters.segment_ids)[b][of_tokens[b]], np.repeat(ids[b][:, None], 4, axis=1)
        )
    np.testing.assert_array_equal(many.fits, [False, False])


def test_iterations_decrease_the_distance_to_centroids():
    q, *_, directions = arrays(64)
    counts = 0, 1, 4

    def clustered(q):
        bits = sign_bits(q, directions)
        return bits, [hamming_kmeans(bits, 5, iterations).of_tokens for iterations in counts]

    bits, of_counts = jax.device_get(once(clustered, q))

    def distance(clusters):
        total = 0
        for b, n in np.ndindex(2, 4):
            for cluster in range(5):
                members = bits[b, clusters[b, :, n] == cluster, n]
                ones = (members > 0).sum(axis=0)
                total += np.minimum(ones, len(members) - ones).sum()
        return total

    distances = [distance(clusters) for clusters in of_counts]
    assert distances[2] < distances[1] < distances[0]


def test_one_cluster_for_each_token_or_all_keys_exact_give_exact_attention():
    q, k, v, directions = arrays()

    def approximations(q):
        own = hamming_kmeans(sign_bits(q, directions), 16, 0)
        few = hamming_kmeans(sign_bits(q, directions), 2, 2)
        return clustered_attention(q, k, v, own), improved_clustered_attention(q, k, v, few, 16), attend(q, k, v)

    *actual, exact = once(approximations, q)
    assert_close(actual, [exact] * 2)


def test_error_decreases_with_clusters_and_with_exact_keys():
    q, k, v, directions = arrays(64)

    def errors(q):
        exact = attend(q, k, v)
        clusters = [hamming_kmeans(sign_bits(q, directions), count, 4) for count in (4, 16, 48)]
        outputs = [clustered_attention(q, k, v, x) for x in clusters]
        outputs += [improved_clustered_attention(q, k, v, clusters[0], top) for top in (8, 32)]
        return jnp.stack([jnp.mean(jnp.abs(o - exact)) for o in outputs])

    few, more, most, improved, better = np.asarray(once(errors, 2 * q))
    assert most < more < few and better < improved < few


def test_invalid_arguments_raise():
    q, k, v, directions = arrays()
    bits = sign_bits(q, directions)
    for count in (0, 17):
        raises(f"count {count}: expected 1 to 16 clusters", hamming_kmeans, bits, count, 1)
    raises("iterations -1", hamming_kmeans, bits, 2, -1)
    clusters = hamming_kmeans(bits, 2, 0)
    raises("top 0: expected at least 1 key", improved_clustered_attention, q, k, v, clusters, 0)
    for function in (clustered_attention, lambda *x: improved_clustered_attention(*x, 2)):
        raises("K that divides N", function, q, q[:, :, :3], q[:, :, :3], clusters)
        raises("those of the queries", function, q[:, :5], k, v, clusters)
    raises("must both have segments", clustered_attention, q, k, v, clusters, jnp.ones((2, 16), jnp.int32))
