"""Rotary and relative positions against their definitions in loops, and against transformers."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.positions.bias import (
    alibi,
    alibi_slopes,
    relative_shift,
    shaw,
    t5_bias,
    t5_buckets,
    transformer_xl,
)
from hpnlp.ops.attention.positions.rope import Scaling, frequencies, rope, sinusoids, yarn
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

B, T, S, N, H = 2, 5, 7, 3, 6
SCALINGS = {
    "none": Scaling(),
    "linear": Scaling("linear", 4.0),
    "ntk": Scaling("ntk", 4.0),
    "llama3": Scaling("llama3", 8.0, 1.0, 4.0, original_length=64),
    "yarn": yarn(4.0, 64),
}


def normal(*shape, seed=0, dtype=jnp.float32):
    """A numpy array, since the loops of definitions read single numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


# Rotary embedding.


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_rotates_feature_pairs(kind):
    scaling, x = SCALINGS[kind], normal(B, T, N, H)
    places = np.asarray([[0, 1, 2, 3, 50], [9, 8, 70, 1, 0]])
    results, inv = rope(x, ints(*places), 100.0, scaling), frequencies(H, 100.0, scaling)
    expected = np.zeros(x.shape)
    for b, t, n, i in np.ndindex(B, T, N, H // 2):
        pair = complex(x[b, t, n, i], x[b, t, n, i + H // 2])
        rotated = scaling.magnitude * pair * np.exp(1j * places[b, t] * inv[i])
        expected[b, t, n, [i, i + H // 2]] = rotated.real, rotated.imag
    assert_close(results, expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["ntk", "yarn"])
def test_high_frequencies_are_kept_and_low_ones_divided(kind):
    plain, stretched = frequencies(32, 500.0), frequencies(32, 500.0, SCALINGS[kind])
    assert stretched[0] == plain[0]
    np.testing.assert_allclose(stretched[-1], plain[-1] / 4, rtol=1e-12)
    assert np.all(np.diff(plain / stretched) >= 0)


def test_yarn_interpolates_between_its_limiting_pairs():
    """Pair i rotates 64 / (2 pi 100 ** (i / 16)) times: 10 times at index 0.06, twice at 5.65; rounded outwards, 0 and 6."""
    ratio = frequencies(32, 100.0, yarn(4.0, 64, beta_fast=10.0, beta_slow=2.0)) / frequencies(32, 100.0)
    np.testing.assert_allclose(ratio, [1 - 0.75 * min(i / 6, 1) for i in range(16)], rtol=1e-12)
    first, last = (16 * math.log(64 / (2 * math.pi * turns)) / math.log(100) for turns in (10, 2))
    ratio = frequencies(32, 100.0, yarn(4.0, 64, beta_fast=10.0, beta_slow=2.0, truncate=False)) / frequencies(
        32, 100.0
    )
    expected = [1 - 0.75 * min(max((i - first) / (last - first), 0), 1) for i in range(16)]
    np.testing.assert_allclose(ratio, expected, rtol=1e-12)


def test_yarn_scales_scores_by_the_square_of_its_magnitude():
    scaling, q, k = yarn(8.0, 64), normal(1, 1, 1, H), normal(1, 1, 1, H, seed=1)
    assert scaling.magnitude == 0.1 * math.log(8) + 1
    assert yarn(0.5, 64).magnitude == 1 and yarn(8.0, 64, magnitude=1.5).magnitude == 1.5
    score = (rope(q, ints([3]), scaling=scaling) * rope(k, ints([3]), scaling=scaling)).sum()
    assert_close(score, (0.1 * math.log(8) + 1) ** 2 * (q * k).sum())


def test_rope_keeps_the_dtype():
    x = normal(B, T, N, H)
    half = rope(x.astype(jnp.bfloat16), jnp.arange(T, dtype=jnp.int32)[None], scaling=SCALINGS["yarn"])
    assert half.dtype == jnp.bfloat16
    expected = rope(x, jnp.arange(T, dtype=jnp.int32)[None], scaling=SCALINGS["yarn"])
    assert_close(half, expected.astype(jnp.bfloat16), "bfloat16")


def test_sinusoids_match_definition():
    results = sinusoids(ints([-3, 0], [2, 1000]), 8)
    assert results.shape == (2, 2, 8)
    for (i, j), place in np.ndenumerate([[-3, 0], [2, 1000]]):
        angles = [place / 10000 ** (2 * d / 8) for d in range(4)]
        np.testing.assert_allclose(results[i, j], [*map(math.sin, angles), *map(math.cos, angles)], atol=1e-4)


# Functions of (head, query position, key position).


def three_ways(bias, heads=N):
    """The bias of T queries from 2 on and S keys from 0 on, as [N, T, S], for all shapes of arguments."""
    head, q, k = (jnp.arange(n, dtype=jnp.int32) for n in (heads, T, S))
    q += 2
    yield bias(head[:, None, None], q[None, :, None], k[None, None, :])
    yield bias(head[:, None, None], q[:, None], k)
    yield bias(head[None, :, None, None], q[None, None, :, None], k[None, None, None, :])[0]
    yield jnp.stack([bias(n, q[:, None], k[None, :]) for n in head])
    yield jax.vmap(jax.vmap(jax.vmap(bias, (None, None, 0)), (None, 0, None)), (0, None, None))(head, q, k)
    yield jax.jit(lambda f: f(head[:, None, None], q[:, None], k))(bias)
    yield bias(*np.ogrid[:heads, 2 : T + 2, :S])


def test_alibi_matches_definition():
    slopes = [2**-4, 2**-8, 2**-2]
    expected = np.asarray([[[-slope * abs(i + 2 - j) for j in range(S)] for i in range(T)] for slope in slopes])
    for results in once(lambda: list(three_ways(alibi(3)))):
        assert_close(results, expected.astype(np.float32))


def test_alibi_slopes_match_definition():
    """The values of the paper (section 3) and, for 12 heads, of its code."""
    np.testing.assert_array_equal(alibi_slopes(8), [2.0**-n for n in range(1, 9)])
    np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])
    np.testing.assert_array_equal(
        alibi_slopes(12), [2.0**-n for n in range(1, 9)] + [2.0**-n for n in (0.5, 1.5, 2.5, 3.5)]
    )
    assert alibi(4) == alibi(4) != alibi(5) and hash(alibi(4)) == hash(alibi(4))


def t5_bucket(distance, buckets, max_distance, bidirectional):
    """The bucket of one distance, by the function in the appendix of T5's code."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        bucket = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    single = buckets // 2
    if distance < single:
        return bucket + distance
    # Where a range begins at a whole number the quotient is a whole one too, less or more a rounding.
    share = math.log(distance / single) / math.log(max_distance / single) * (buckets - single) + 1e-9
    return bucket + min(single + int(share), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 64), (7, 20), (32, 18), (4, 3), (20, 1000)])
def test_t5_buckets_match_definition(buckets, max_distance, bidirectional):
    distance = np.arange(-1100, 1101)
    results = t5_buckets(jnp.asarray(distance, jnp.int32), buckets, max_distance, bidirectional=bidirectional)
    assert results.dtype == jnp.int32
    np.testing.assert_array_equal(results, [t5_bucket(int(d), buckets, max_distance, bidirectional) for d in distance])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias_matches_definition(bidirectional):
    table = normal(8, N)
    expected = np.zeros((N, T, S), np.float32)
    for n, i, j in np.ndindex(expected.shape):
        expected[n, i, j] = table[t5_bucket(j - i - 2, 8, 5, bidirectional), n]
    bias = t5_bias(jnp.asarray(table), max_distance=5, bidirectional=bidirectional)
    for results in once(lambda: list(three_ways(bias))):
        np.testing.assert_array_equal(results, expected)


def test_t5_bias_of_a_traced_table_has_gradients():
    q, k = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)[None]
    weight = normal(N, T, S)

    @jax.jit
    def loss(table):
        bias = t5_bias(table, max_distance=5)
        return sum((weight[n] * bias(jnp.int32(n), q, k)).sum() for n in range(N))

    results, expected = jax.grad(loss)(normal(8, N)), np.zeros((8, N))
    for n, i, j in np.ndindex(N, T, S):
        expected[t5_bucket(j - i, 8, 5, True), n] += weight[n, i, j]
    assert_close(results, expected.astype(np.float32))
    assert {bias := t5_bias(normal(8, N))} == {bias}  # static arguments have to have a hash


# Terms that depend on the query.


@pytest.mark.parametrize(
    ("rows", "left", "scale"), [(5, None, None), (4, 3, 1.0), (6, 1, 0.3), (1, None, None), (40, 20, 1.0)]
)
def test_shaw_matches_definition(rows, left, scale):
    q, table = normal(B, T, N, H), normal(rows, H, seed=1)
    positions, kv_positions = np.asarray([[4, 0, 1, 2, 9], [0, 1, 2, 3, 4]]), np.arange(S)[None]
    results = shaw(q, table, ints(*positions), ints(*kv_positions), left=left, scale=scale)
    left, scale = rows // 2 if left is None else left, H**-0.5 if scale is None else scale
    expected = np.zeros((B, N, T, S), np.float32)
    for b, n, i, j in np.ndindex(expected.shape):
        row = min(max(j - positions[b, i], -left), rows - 1 - left) + left
        expected[b, n, i, j] = np.dot(q[b, i, n], table[row]) * scale
    assert_close(results, expected)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 6), (5, 1), (5, 7), (7, 5), (4, 4)])
def test_relative_shift_matches_definition(queries, keys):
    for distances in {1, keys, queries + keys - 1}:
        x = normal(2, queries, distances)
        expected = np.zeros((2, queries, keys), np.float32)
        for i, j in itertools.product(range(queries), range(keys)):
            column = queries - 1 - i + j
            expected[:, i, j] = x[:, i, column] if column < distances else 0
        np.testing.assert_array_equal(once(lambda x: relative_shift(x, keys), x), expected)


@pytest.mark.parametrize("memory", [0, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_transformer_xl_matches_definition(memory, causal):
    """Every score by the four terms of A^rel, with W_kE x = k and W_kR R = r."""
    keys = memory + T
    q, k = normal(B, T, N, H), normal(B, keys, N, H, seed=1)
    u, v, w = normal(N, H, seed=2), normal(N, H, seed=3), normal(8, N, H, seed=4)
    distances = np.arange(keys - 1, -1 if causal else -T, -1)

    def scores(q, k, u, v, w):
        r = jnp.einsum("rd,dnh->rnh", sinusoids(jnp.asarray(distances, jnp.int32), 8), w)
        query, bias = transformer_xl(q, r, u, v, keys)
        return r, bias, jnp.einsum("btnh,bsnh->bnts", query, k) * H**-0.5 + bias

    r, bias, results = jax.device_get(once(scores, q, k, u, v, w))
    for b, n, i, j in np.ndindex(B, N, T, keys):
        distance = memory + i - j
        if causal and distance < 0:
            np.testing.assert_array_equal(bias[b, n, i, j], 0)
            continue
        row = r[list(distances).index(distance), n]
        terms = np.dot(q[b, i, n], k[b, j, n]), np.dot(q[b, i, n], row), np.dot(u[n], k[b, j, n]), np.dot(v[n], row)
        np.testing.assert_allclose(results[b, n, i, j], sum(terms) * H**-0.5, atol=2e-5, rtol=1e-5)


def test_biases_of_bfloat16_queries_are_float32():
    q, r, u = normal(B, T, N, H, dtype=jnp.bfloat16), normal(T + S - 1, N, H, seed=1), normal(N, H, seed=2)
    run = jax.jit(lambda q: transformer_xl(q, r, u, u, S, scale=0.5), compiler_options=ONCE)
    (query, bias), (float32_query, float32_bias) = run(q), run(q.astype(jnp.float32))
    assert query.dtype == jnp.bfloat16 and bias.dtype == jnp.float32
    assert_close(query, float32_query.astype(jnp.bfloat16), "bfloat16")
    np.testing.assert_allclose(bias, float32_bias, atol=6e-2, rtol=6e-2)
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    assert shaw(q, r[:, 0], positions, positions).dtype == jnp.float32


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: frequencies(7), "head size 7 is odd"),
        (lambda: frequencies(2, scaling=Scaling("ntk", 2.0)), "head size 2 .*expected an even head size of at least 4"),
        (lambda: frequencies(8, scaling=Scaling("yarm")), "'yarm': expected none, linear, ntk, llama3 or yarn"),
        (lambda: Scaling("linear", 0.0), "'linear' with factor=0.0: expected a finite number over 0"),
        (lambda: Scaling("ntk", -2.0), "'ntk' with factor=-2.0: expected a finite number over 0"),
        (lambda: Scaling("llama3", 8.0, 4.0, 4.0), "expected the former below the latter"),
        (lambda: frequencies(8, 1.0, yarn(2.0, 64)), "rope theta 1.0 .* expected a number over 1"),
        (lambda: yarn(-2.0, 64), "factor=-2.0.*expected positive"),
        (lambda: yarn(2.0, 64, beta_fast=1.0, beta_slow=2.0), "beta_slow below beta_fast"),
        (lambda: alibi(0), "alibi with 0 heads"),
        (lambda: t5_bias(jnp.zeros((2, 4))), "2 T5 buckets .*at least 4"),
        (lambda: t5_buckets(jnp.int32(3), 32, 16, bidirectional=False), "max_distance over 16"),
        (lambda: shaw(*SHAW[:1], jnp.zeros((4, H)), *SHAW[1:]), "table of 4 rows and left=None: expected an odd"),
        (lambda: shaw(*SHAW[:1], jnp.zeros((4, H)), *SHAW[1:], left=4), "left=4.*0 <= left < 4"),
        (lambda: relative_shift(jnp.zeros((2, 6)), 4), "6 distances: expected at most 5 for 2 queries and 4 keys"),
    ):
        raises(message, call)


SHAW = (jnp.zeros((1, 2, 1, H)), jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 3), jnp.int32))


# Comparison with transformers.


def torch_of(x):
    import torch

    return torch.from_numpy(np.array(x))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("scaling", "parameters", "length"),
    [
        (yarn(4.0, 32), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (
            yarn(40.0, 4096, beta_fast=16.0, beta_slow=2.0, truncate=False, magnitude=1.2),
            {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "attention_factor": 1.2,
            },
            163840,
        ),
        # Dynamic NTK at the length of 96 places, three times the model's own: 2 * 96 / 32 - (2 - 1) = 5.
        (Scaling("ntk", 5.0), {"rope_type": "dynamic", "factor": 2.0}, 32),
        (Scaling("linear", 3.0), {"rope_type": "linear", "factor": 3.0}, 32),
    ],
    ids=["yarn", "yarn_of_own_numbers", "dynamic_ntk", "linear"],
)
def test_rope_matches_transformers(scaling, parameters, length):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=length,
        rope_parameters={"rope_theta": 300.0, **parameters},
    )
    x, places = normal(1, 96, 4, 16), np.arange(96)
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch_of(x), torch_of(places[None]))
    theirs, _ = llama.apply_rotary_pos_emb(torch_of(x), torch_of(x), cos, sin, unsqueeze_dim=2)
    # Of an angle of 95, float32 knows 4e-6.
    np.testing.assert_allclose(rope(x, ints(places), 300.0, scaling), theirs.numpy(), atol=3e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20, 71])
def test_alibi_matches_bloom(heads):
    """BLOOM's is slope * key position, which differs by a number that is the same for all keys of a query."""
    bloom, torch = (pytest.importorskip(name) for name in ("transformers.models.bloom.modeling_bloom", "torch"))
    theirs = bloom.build_alibi_tensor(torch.ones(1, S), heads, torch.float32).numpy()
    last = alibi(heads)(*np.ogrid[:heads, S - 1 : S, :S])
    np.testing.assert_allclose(last - last[:, :, :1], theirs, rtol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 300), (20, 64)])
def test_t5_matches_transformers(buckets, max_distance, decoder):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=8,
        d_kv=4,
        num_heads=N,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=decoder,
    )
    layer = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = t5_bias(
        jnp.asarray(layer.relative_attention_bias.weight.detach().numpy()),
        max_distance=max_distance,
        bidirectional=not decoder,
    )
    theirs = layer.compute_bias(40, 450, past_seen_tokens=390).detach().numpy()[0]
    np.testing.assert_array_equal(ours(*np.ogrid[:N, 390:430, :450]), theirs)
