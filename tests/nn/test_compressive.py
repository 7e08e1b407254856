"""The compressive memory over several batches, against attention to memories that numpy compresses."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.mixers.compressive import CompressiveMixer
from hpnlp.ops.attention import Causal, Full, Operands
from hpnlp.ops.attention.memory.relative import reference_relative_attention
from hpnlp.ops.attention.positions.rope import sinusoids
from hpnlp.spec import parse_one
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

B, D, N, K, H = 2, 16, 4, 2, 8
M, C, RATE = 5, 3, 2
PARTS = (4, 6, 2, 8)  # of a sequence; the last is longer than the memory
TOTAL = sum(PARTS)
HOWS = ("conv", "mean", "max", "most_used")


# Compiled, because the operations of four lengths take longer to compile one by one.
reference = jax.jit(reference_relative_attention, compiler_options=ONCE)


def layer(how):
    return Attention(N, K, H, parse_one(f"compressive({M},{C},{RATE},{how})", "mixer"), qk_norm=True)


def stream():
    rng = np.random.default_rng(0)
    ids = np.concatenate([np.ones((B, 7)), np.sort(rng.integers(2, 5, (B, TOTAL - 7)), axis=1)], axis=1).astype(
        np.int32
    )
    return jnp.asarray(rng.standard_normal((B, TOTAL, D)).astype(jnp.float32)), jnp.asarray(ids)


@functools.cache
def params_of(attention):
    x, ids = stream()
    context = Context(jnp.zeros_like(ids[:, :1]), ids[:, :1], Causal())
    shapes = jax.eval_shape(lambda: nn.meta.unbox(attention.init(jax.random.key(0), x[:, :1], context))["params"])
    rng = np.random.default_rng(1)

    def value(path, like):
        return jnp.asarray((path[-1].key == "scale") + 0.3 * rng.standard_normal(like.shape), like.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes)


@functools.partial(jax.jit, static_argnums=0, compiler_options=ONCE)
def in_parts(attention, params, x, ids):
    """Outputs, carries and statistics of the parts, which follow one another."""
    mixer = CompressiveMixer(M, C, RATE, attention.mixer.args[3])
    carry, results = mixer.initial_carry(B, D, x.dtype), []
    for start, end in zip(np.cumsum((0, *PARTS)), np.cumsum(PARTS), strict=False):
        positions = jnp.broadcast_to(jnp.arange(start, end, dtype=jnp.int32)[None], (B, end - start))
        context = Context(positions, ids[:, start:end], Causal(), carry=carry)
        y, _, report = attention.apply({"params": params}, x[:, start:end], context)
        assert jax.tree.map(jnp.shape, report.carry) == jax.tree.map(jnp.shape, carry)
        carry = report.carry
        results.append((y, carry, report.statistics))
    return results


def norm(x, scale):
    x = np.asarray(x)
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * np.asarray(scale)


def expected_parts(how, params, x, ids):
    """Outputs and compressed memories by lists of (hidden state, segment) for each sequence."""
    params = jax.tree.map(np.asarray, params)
    mixer, results = params["mixer"], []
    embeddings = np.asarray(once(lambda: sinusoids(jnp.arange(M + C + TOTAL, dtype=jnp.int32), D)))
    memory = [[(np.zeros(D, np.float32), 0)] * M for _ in range(B)]
    compressed = [[(np.zeros(D, np.float32), 0)] * C for _ in range(B)]
    for start, end in zip(np.cumsum((0, *PARTS)), np.cumsum(PARTS), strict=False):
        tokens = [memory[b] + [(x[b, t], ids[b, t]) for t in range(start, end)] for b in range(B)]
        keys = [compressed[b] + tokens[b] for b in range(B)]
        states = np.stack([[state for state, _ in row] for row in keys])
        k, v = ((states @ params[name]["kernel"]).reshape(B, -1, K, H) for name in ("k", "v"))
        q = (x[:, start:end] @ params["q"]["kernel"]).reshape(B, -1, N, H)
        table = embeddings[: states.shape[1]]
        relative = mixer["relative"]
        o = reference(
            norm(q, params["q_norm"]["scale"]),
            norm(k, params["k_norm"]["scale"]),
            v,
            (table @ relative["kernel"]).reshape(-1, N, H),
            relative["content_bias"],
            relative["position_bias"],
            Operands(
                segment_ids=ids[:, start:end],
                kv_segment_ids=jnp.asarray([[number for _, number in row] for row in keys], jnp.int32),
            ),
        )
        for b in range(B):
            leaving, memory[b] = tokens[b][: end - start], tokens[b][end - start :]
            for first in range(0, len(leaving), RATE):
                group = leaving[first : first + RATE]
                kept = np.stack([s if number == group[-1][1] else np.full(D, np.nan) for s, number in group])
                state = {
                    "mean": np.nanmean(kept, axis=0),
                    "max": np.nanmax(kept, axis=0),
                    "conv": np.nan_to_num(kept).reshape(-1) @ mixer["kernel"] if how == "conv" else None,
                }[how]
                compressed[b] = [*compressed[b][1:], (state, group[-1][1])]
        results.append((o.reshape(B, -1, N * H) @ params["out"]["kernel"], [list(row) for row in compressed]))
    return results


@pytest.mark.parametrize("how", ["conv", "mean", "max"])
def test_parts_of_a_sequence_match_lists_of_memories(how):
    attention, (x, ids) = layer(how), stream()
    params = params_of(attention)
    actual = in_parts(attention, params, x, ids)
    for (y, carry, _), (expected, memories) in zip(actual, expected_parts(how, params, x, ids), strict=True):
        np.testing.assert_allclose(y, expected, atol=2e-5, rtol=2e-5)
        np.testing.assert_allclose(
            carry.compressed.states, [[state for state, _ in row] for row in memories], atol=1e-5
        )
        np.testing.assert_array_equal(carry.compressed.segment_ids, [[number for _, number in row] for row in memories])


@pytest.mark.parametrize("how", HOWS)
def test_documents_stay_apart(how):
    """Values of 1e4 in one document change no bit of the outputs and the compressed memories of others."""
    attention, (x, ids) = layer(how), stream()
    params = params_of(attention)
    plain, large = (
        in_parts(attention, params, y, ids) for y in (x, jnp.where((ids == 3)[..., None], jnp.float32(1e4), x))
    )
    for number, ((y, carry, _), (other_y, other_carry, _)) in enumerate(zip(plain, large, strict=True)):
        start = sum(PARTS[:number])
        elsewhere = ids[:, start : start + PARTS[number]] != 3
        np.testing.assert_array_equal(np.asarray(y)[elsewhere], np.asarray(other_y)[elsewhere])
        apart = np.asarray(carry.compressed.segment_ids) != 3
        np.testing.assert_array_equal(
            np.asarray(carry.compressed.states)[apart], np.asarray(other_carry.compressed.states)[apart]
        )
    assert (ids == 3).any()


def test_usage_is_the_mean_attention_of_all_queries_that_see_a_token():
    """The one of two leaving tokens that received more attention is kept; usage adds up to one for each query."""
    attention, (x, _) = layer("most_used"), stream()
    ids = jnp.ones((B, TOTAL), jnp.int32)
    results = in_parts(attention, params_of(attention), x, ids)
    received, queries = (np.asarray(results[1][1].usage[name]) for name in ("received", "queries"))
    # The second part has 6 tokens: its last 5 are in memory, and were seen by themselves and those after them.
    np.testing.assert_array_equal(queries, np.tile(np.arange(5, 0, -1), (B, 1)))
    assert (received > 0).all() and (received <= queries).all()
    _, carry, _ = results[2]
    kept, candidates = np.asarray(carry.compressed.positions)[:, -1], np.asarray(results[1][1].recent.positions)[:, :2]
    # Two tokens leave with the third part, after two more queries; every compressed memory is one of the tokens as it was.
    assert all(position in row for position, row in zip(kept, candidates, strict=True))
    for b, position in enumerate(kept):
        np.testing.assert_array_equal(carry.compressed.states[b, -1], x[b, position])


@pytest.mark.slow
def test_the_reconstruction_loss_trains_the_convolution_alone():
    attention, (x, ids) = layer("conv"), stream()
    mixer = CompressiveMixer(M, C, RATE)

    def losses(params, x):
        results = in_parts.__wrapped__(attention, params, x, ids)
        statistics = [statistics for *_, statistics in results]
        return sum(mixer.auxiliary_loss(s)["reconstruction_loss"] for s in statistics), sum(
            y.sum() for y, *_ in results
        )

    def gradients(params, x):
        sums, pull = jax.vjp(losses, params, x)
        return [pull((jnp.float32(i == 0), jnp.float32(i == 1))) for i in range(len(sums))]

    of_auxiliary, of_outputs = once(gradients, params_of(attention), x)
    by_path = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(of_auxiliary[0])}
    assert {path for path, leaf in by_path.items() if np.asarray(leaf).any()} == {"['mixer']['kernel']"}
    assert not np.asarray(of_auxiliary[1]).any()
    assert not np.asarray(of_outputs[0]["mixer"]["kernel"]).any()
    others = {**of_outputs[0], "mixer": of_outputs[0]["mixer"]["relative"]}
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(others))


def test_a_lossless_convolution_has_no_reconstruction_loss():
    """At rate 1 with the identity as kernel, attention to the compressed memories is that to the memories."""
    attention, (x, ids) = Attention(N, K, H, parse_one(f"compressive({M},{C},1,conv)", "mixer")), stream()
    params = params_of(attention)
    params = params | {"mixer": params["mixer"] | {"kernel": jnp.eye(D)}}
    first = CompressiveMixer(M, C, 1).initial_carry(B, D, jnp.float32)

    def report_of(params, start, carry):
        places = jnp.broadcast_to(jnp.arange(start, start + 6, dtype=jnp.int32)[None], (B, 6))
        context = Context(places, ids[:, start : start + 6], Causal(), carry=carry)
        return attention.apply({"params": params}, x[:, start : start + 6], context)[2]

    def errors(params):
        statistics = report_of(params, 6, report_of(params, 0, first).carry).statistics
        return statistics, CompressiveMixer(M, C, 1).auxiliary_loss(statistics)

    statistics, losses = once(errors, params)
    assert statistics["reconstructed_tokens"] > 0
    assert_close(losses["reconstruction_loss"], jnp.float32(0))


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: CompressiveMixer().within(Full()), "a compressive memory cannot apply the mask Full"),
    ):
        raises(message, call)
