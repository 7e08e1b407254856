"""Experts divided over devices: the exchange against all experts on one device, for even and uneven routings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from hpnlp.ops.moe import Gates, Routing, exchange, expert_mlp, route, route_by_expert
from tests.contracts import assert_close

S, N, D, F, K = 8, 24, 6, 5, 2  # devices, tokens of each
RNG = np.random.default_rng(0)
X = RNG.normal(size=(S * N, D)).astype(np.float32)
SIGNS = RNG.normal(size=(S * N, D)).astype(np.float32)
ZIPF = np.arange(1, 17.0) ** -1.5


def drawn(weights, experts=16):
    """K different experts for each token, with these probabilities."""
    return np.argsort(np.log(weights) + RNG.gumbel(size=(S * N, experts)), axis=1)[:, -K:]


def constant(*experts):
    return np.tile(np.array(experts), (S * N, 1))


# Experts of each token; 16 for none, 2 experts on each device.
ROUTINGS = {
    "uniform": drawn(np.ones(16)),
    "zipf": drawn(ZIPF),
    "one expert": constant(5, 16),
    "one device": constant(4, 5),
    "alternating": np.stack([np.arange(S * N) * 2 % 16, np.arange(S * N) * 2 % 16 + 1], axis=1),
    "a device without tokens": drawn(np.where(np.arange(16) // 2 == 3, 1e-9, 1.0)),
    "only padding": constant(16, 16),
    "a device of padding": np.where(np.arange(S * N)[:, None] // N == 2, 16, drawn(np.ones(16))),
}


def experts_of(count):
    draw = np.random.default_rng(1)
    shapes = {"up": (D, F), "gate": (D, F), "down": (F, D)}
    return {name: draw.normal(size=(count, *shape)).astype(np.float32) for name, shape in shapes.items()}


def local_routing(chosen, gates, tokens, experts):
    return Routing(chosen.reshape(-1), gates.reshape(-1), None, tokens).kept(chosen.reshape(-1) < experts, experts)


def on_devices(body):
    """The function on S devices, which divide the first axis of all arrays."""
    mesh = Mesh(np.array(jax.devices()[:S]), ("expert",))
    spec = PartitionSpec("expert")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))


def swap(x):
    return jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)


def exchanged(x, routing, experts, factor=0.0):
    """`(results, number of assignments that were kept)` of a device."""
    count = experts["up"].shape[0] * S
    rows = exchange.exchanged_rows(routing, x.shape[0], count, S, factor)
    if factor:
        routing = exchange.within_exchange(routing, count, S, rows)
    y = exchange.exchanged_expert_mlp(x, routing, experts, jax.nn.silu, "auto", shards=S, rows=rows, swap=swap)
    return y, jnp.sum(routing.experts < count)[None]


@functools.cache
def program(experts, factor=0.0):
    """`(x, chosen, gates, experts, signs) -> (results, kept, gradients)` on S devices."""

    def body(x, chosen, gates, weights, signs):
        def score(x, gates, weights):
            y, kept = exchanged(x, local_routing(chosen, gates, len(x), experts), weights, factor)
            return jnp.sum(y * signs), (y, kept)

        gradients, (y, kept) = jax.grad(score, (0, 1, 2), has_aux=True)(x, gates, weights)
        return y, kept, gradients

    return on_devices(body)


@functools.cache
def reference(experts):
    def run(x, chosen, gates, weights, signs):
        def score(x, gates, weights):
            y = expert_mlp(x, local_routing(chosen, gates, len(x), experts), weights, jax.nn.silu)
            return jnp.sum(y * signs), y

        gradients, y = jax.grad(score, (0, 1, 2), has_aux=True)(x, gates, weights)
        return y, gradients

    return jax.jit(run)


@pytest.mark.parametrize("name", ROUTINGS)
def test_exchange_matches_one_device_and_loses_no_token(name):
    chosen = ROUTINGS[name].astype(np.int32)
    gates = RNG.uniform(0.1, 1.0, chosen.shape).astype(np.float32)
    y, kept, gradients = program(16)(X, chosen, gates, experts_of(16), SIGNS)
    assert kept.sum() == (chosen < 16).sum()
    expected_y, expected = reference(16)(X, chosen, gates, experts_of(16), SIGNS)
    assert_close(y, expected_y)
    for gradient, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        # Sums of many rows, whose terms of up to 70 cancel, are rounded as the largest element, not as the sum.
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-6 * max(1.0, np.abs(wanted).max()))


def test_more_experts_than_tokens():
    chosen = RNG.permuted(np.tile(np.arange(264), (S, 1)), axis=1)[:, :K].astype(np.int32)
    arguments = X[:S], chosen, np.full(chosen.shape, 0.5, np.float32), experts_of(264), SIGNS[:S]
    y, kept, gradients = program(264)(*arguments)
    assert kept.sum() == chosen.size
    assert_close((y, gradients), reference(264)(*arguments))


def test_assignments_beyond_the_exchange_capacity_are_counted_and_have_no_result():
    """The first 2 N / S of 2 N assignments of a device to the experts of one are sent: those of the first N / S tokens."""
    chosen = ROUTINGS["one device"].astype(np.int32)
    y, kept, _ = program(16, 1.0)(X, chosen, np.ones(chosen.shape, np.float32), experts_of(16), SIGNS)
    np.testing.assert_array_equal(kept, K * N // S)
    has_result = np.asarray(y).reshape(S, N, D).any(axis=2)
    np.testing.assert_array_equal(has_result, np.tile(np.arange(N) < N // S, (S, 1)))


def test_buffers_are_as_large_as_the_routing_allows():
    """`exchanged_rows` by the number of tokens, different experts of a token, capacities, and the factor."""
    logits, real = jnp.zeros((N, 16)), jnp.ones(N, bool)
    by_token, one, all_of_device = (route(logits, k, Gates("softmax"), real) for k in (2, 1, 4))
    assert exchange.exchanged_rows(by_token, N, 16, S) == 2 * N
    assert exchange.exchanged_rows(one, N, 16, S) == N
    assert exchange.exchanged_rows(all_of_device, N, 16, S) == 2 * N  # only 2 of the 4 are on one device
    assert exchange.exchanged_rows(by_token, N, 16, S, 1.5) == 2 * N * 1.5 / S
    by_expert = route_by_expert(logits.reshape(2, N // 2, 16), 2, 1.0, real.reshape(2, -1))
    assert exchange.exchanged_rows(by_expert, N, 16, S) == by_expert.experts.size // S
