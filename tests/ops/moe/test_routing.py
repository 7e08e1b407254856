"""Routers, capacity, statistics and losses: definitions in loops, and the faults of published implementations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import moe
from hpnlp.ops.moe.dispatch import rows_of_tokens
from hpnlp.ops.moe.schedule import equal_schedule, make_schedule
from tests.contracts import assert_close, once
from tests.messages import raises
from tests.ops.moe_kernels import replace_kernels

RNG = np.random.default_rng(0)


def real_tokens(count):
    return np.ones(count, bool)


def loop_within_capacity(experts, groups, capacity, first_choices_first):
    """Places given one by one, `[N, k]`."""
    taken, keep = {}, np.zeros(experts.shape, bool)
    by_token = [(t, j) for t in range(len(experts)) for j in range(experts.shape[1])]
    order = sorted(by_token, key=lambda tj: (tj[1], tj[0])) if first_choices_first else by_token
    for t, j in order:
        key = groups[t], experts[t, j]
        keep[t, j] = taken.get(key, 0) < capacity[t]
        taken[key] = taken.get(key, 0) + 1
    return keep


@pytest.mark.parametrize("first_choices_first", [False, True])
def test_capacity_matches_places_given_one_by_one(first_choices_first):
    logits = RNG.normal(size=(48, 4)).astype(np.float32)
    lengths = [10, 14, 24]
    groups = np.repeat(np.arange(3, dtype=np.int32), lengths)
    counts = np.repeat(np.array(lengths, np.int32), lengths)
    routing = moe.route(logits, 2, moe.Gates(), real_tokens(48))
    kept = moe.within_capacity(routing, groups, counts, 24, 2, 1.0, 4, first_choices_first)
    experts = np.asarray(routing.experts).reshape(-1, 2)
    expected = loop_within_capacity(experts, groups, np.ceil(counts / 2), first_choices_first)
    np.testing.assert_array_equal(np.asarray(kept.experts).reshape(-1, 2) < 4, expected)
    assert 0 < expected.sum() < expected.size  # some assignments are dropped
    np.testing.assert_array_equal(np.asarray(kept.gates).reshape(-1, 2) > 0, expected)


def test_places_of_a_token_do_not_depend_on_later_tokens():
    """Trap: with all first choices first, a later token takes the place of an earlier one."""
    logits = RNG.normal(size=(12, 3)).astype(np.float32)
    groups, counts = np.zeros(12, np.int32), np.full(12, 12, np.int32)

    def kept(logits, first):
        routing = moe.route(logits, 2, moe.Gates(), real_tokens(12))
        return np.asarray(moe.within_capacity(routing, groups, counts, 12, 2, 1.0, 3, first).experts[:12])

    changes = {False: 0, True: 0}
    for first, seed in itertools.product((False, True), range(8)):
        later = np.random.default_rng(seed).normal(size=(6, 3)).astype(np.float32)
        changes[first] += np.any(kept(np.concatenate([logits[:6], later]), first) != kept(logits, first))
    assert changes[False] == 0 and changes[True] > 0


def test_capacity_of_a_document_ignores_the_others():
    logits = RNG.normal(size=(20, 3)).astype(np.float32)
    groups, counts = np.repeat(np.arange(2, dtype=np.int32), 10), np.full(20, 10, np.int32)

    def kept(logits):
        routing = moe.route(logits, 2, moe.Gates(), real_tokens(20))
        return np.asarray(moe.within_capacity(routing, groups, counts, 20, 2, 1.0, 3).experts)[20:]

    np.testing.assert_array_equal(kept(logits), kept(np.concatenate([logits[:10] * 0, logits[10:]])))


def test_padding_has_no_expert_no_place_and_no_count():
    """Trap: padding that is routed takes capacity and counts in losses (transformers#28505)."""
    logits = RNG.normal(size=(16, 4)).astype(np.float32)
    real = RNG.random(16) < 0.5
    gates = moe.Gates("softmax")
    routing = moe.route(logits, 2, gates, real)
    assert np.all(np.asarray(routing.experts).reshape(-1, 2)[~real] == 4)
    full = moe.routing_sums(logits, moe.normalized_scores(logits, gates), real, routing, routing)
    short = moe.route(logits[real], 2, gates, real_tokens(real.sum()))
    scores = moe.normalized_scores(logits[real], gates)
    assert_close(full, moe.routing_sums(logits[real], scores, real_tokens(real.sum()), short, short))


def test_dropped_tokens_get_zero():
    """Trap: a dropped token keeps a value (transformers#37017)."""
    x, stacks = RNG.normal(size=(6, 5)).astype(np.float32), make_stacks(3, 5, 4)
    routing = moe.route(np.tile(np.float32([2, 1, 0]), (6, 1)), 1, moe.Gates("softmax"), real_tokens(6))
    routing = moe.within_capacity(routing, np.zeros(6, np.int32), np.full(6, 6, np.int32), 6, 1, 1.0, 3)
    y = np.asarray(moe.expert_mlp(x, routing, stacks, jax.nn.relu))
    assert np.all(np.any(y != 0, axis=1) == [True, True, False, False, False, False])


def test_expert_choice_takes_the_largest_probabilities():
    """Trap: unassigned tokens of score 0 beat negative logits (DeepSpeed#7986)."""
    logits = RNG.normal(size=(2, 12, 4)).astype(np.float32) - 5.0
    real = np.ones((2, 12), bool)
    real[1, 7:] = False
    routing = moe.route_by_expert(logits, 2, 1.0, real)
    chosen = np.zeros((24, 4), bool)
    experts = np.asarray(routing.experts)
    chosen[np.asarray(routing.tokens)[experts < 4], experts[experts < 4]] = True
    p = np.asarray(jax.nn.softmax(logits, axis=2))
    for b, count in enumerate((12, 7)):
        taken = int(np.ceil(2 * count / 4))
        for e in range(4):
            best = np.argsort(-p[b, :count, e], kind="stable")[:taken]
            np.testing.assert_array_equal(np.flatnonzero(chosen[12 * b : 12 * b + 12, e]), np.sort(best))


def test_groups_without_the_best_experts_are_never_chosen():
    """Trap: masked groups filled with 0 win where all scores with biases are negative (DeepSeek-V3#741)."""
    logits, bias = RNG.normal(size=(30, 8)).astype(np.float32), np.full(8, -3, np.float32)
    gates = moe.Gates("sigmoid", normalize=True)
    routing = moe.route(logits, 4, gates, real_tokens(30), bias=bias, groups=4, kept_groups=2)
    groups = np.asarray(routing.experts).reshape(-1, 4) // 2
    assert all(len(set(row)) == 2 for row in groups)


def test_bias_changes_the_choice_and_not_the_gates():
    """Trap: the bias is part of the gate (vllm#12002)."""
    logits = RNG.normal(size=(10, 4)).astype(np.float32)
    gates = moe.Gates("sigmoid", normalize=True)
    bias = np.float32([9, 0, 0, 9])
    routing = moe.route(logits, 2, gates, real_tokens(10), bias=bias)
    assert set(np.asarray(routing.experts)) == {0, 3}
    scores = 1 / (1 + np.exp(-logits[:, [0, 3]].astype(np.float64)))
    by_expert = np.zeros((10, 4))
    by_expert[np.arange(10).repeat(2), np.asarray(routing.experts)] = np.asarray(routing.gates)
    np.testing.assert_allclose(by_expert[:, [0, 3]], scores / scores.sum(1, keepdims=True), atol=1e-6)


def test_biases_move_towards_equal_loads_without_a_drift():
    """Trap: biases drift as a whole (torchtitan#1506)."""
    bias = np.float32([1, -2, 0.5, 0.5])
    moved = np.asarray(moe.moved_bias(bias, np.float32([9, 1, 1, 1]), 0.1))
    change = moved - bias
    assert change[0] < 0 and np.all(change[1:] > 0) and abs(change.sum()) < 1e-6
    np.testing.assert_array_equal(moe.moved_bias(bias, np.float32([2, 2, 2, 2]), 0.1), bias)


@pytest.mark.parametrize("gates", [moe.Gates(), moe.Gates("softmax"), moe.Gates("sigmoid", normalize=True)], ids=str)
def test_balance_loss_is_one_for_equal_loads_and_rises_with_skew(gates):
    """Traps: sums over the k slots in place of experts (transformers#28093), and losses of value k."""

    def loss(logits):
        routing = moe.route(logits, 2, gates, real_tokens(len(logits)))
        scores = moe.normalized_scores(logits, gates)
        return moe.balance_loss(moe.routing_sums(logits, scores, real_tokens(len(logits)), routing, routing))

    even = np.eye(8, dtype=np.float32)[np.arange(64) % 8] + np.eye(8, dtype=np.float32)[(np.arange(64) + 1) % 8] * 0.5
    skewed = even + 2 * np.eye(8, dtype=np.float32)[0]
    assert_close(np.asarray(loss(even)), np.float32(1.0))
    value, gradient = once(jax.value_and_grad(loss), skewed)
    assert value > 1.2
    assert np.mean(np.asarray(gradient)[:, 0]) > 1e-4  # descent lowers the scores of the overloaded expert


def test_router_cannot_lower_the_balance_loss_by_small_sigmoids():
    """Trap: sigmoid scores below the constant of the normalisation "solve" the loss (Megatron#1545)."""
    logits = RNG.normal(size=(32, 4)).astype(np.float32)
    scores = moe.normalized_scores(logits - 60.0, moe.Gates("sigmoid", normalize=True))
    np.testing.assert_allclose(np.asarray(scores).sum(axis=1), 1.0, atol=1e-5)


def test_load_counts_choices_before_drops():
    """Trap: loads from the capacity mask (Megatron#1513)."""
    logits = np.tile(np.float32([3, 0, -1]), (9, 1))
    routing = moe.route(logits, 1, moe.Gates("softmax"), real_tokens(9))
    kept = moe.within_capacity(routing, np.zeros(9, np.int32), np.full(9, 9, np.int32), 9, 1, 1.0, 3)
    sums = moe.routing_sums(logits, jax.nn.softmax(logits), real_tokens(9), routing, kept)
    np.testing.assert_array_equal(sums["load"], [9, 0, 0])
    metrics = moe.load_metrics(sums)
    assert_close(metrics["dropped"], np.float32(6 / 9))
    assert metrics["dead_experts"] == 2 and metrics["load_max"] == 3
    np.testing.assert_allclose(metrics["load_variation"], np.sqrt(2.0), rtol=1e-6)
    largest = moe.router_metrics(sums)["router_largest"]
    np.testing.assert_allclose(largest, 1.0 / (1.0 + np.exp(-3.0) + np.exp(-4.0)), rtol=1e-6)


def test_losses_of_summed_statistics_match_those_of_the_batch_in_one_part():
    """Trap: means of losses of microbatches (megablocks#85), whose numbers of tokens differ."""
    logits = RNG.normal(size=(48, 4)).astype(np.float32) * np.linspace(0.1, 3, 48)[:, None].astype(np.float32)
    real, gates = RNG.random(48) < np.repeat([1.0, 0.3, 0.7, 0.0], 12), moe.Gates("sigmoid", normalize=True)

    def losses(logits, parts):
        size, total = 48 // parts, None
        for i in range(parts):
            part, real_part = logits[i * size : (i + 1) * size], jnp.asarray(real[i * size : (i + 1) * size])
            routing = moe.route(part, 2, gates, real_part)
            sums = moe.routing_sums(part, moe.normalized_scores(part, gates), real_part, routing, routing)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        metrics = moe.load_metrics(total) | moe.router_metrics(total)
        return moe.balance_loss(total) + moe.z_loss(total), metrics

    def both(logits):
        return [jax.value_and_grad(lambda x, n=n: losses(x, n), has_aux=True)(logits) for n in (4, 1)]

    actual, expected = once(both, logits)
    assert_close(actual, expected)


def test_z_loss_is_the_mean_square_of_the_logsumexp():
    logits = RNG.normal(size=(20, 5)).astype(np.float32) * 4
    routing = moe.route(logits, 2, moe.Gates(), real_tokens(20))
    sums = moe.routing_sums(logits, jax.nn.softmax(logits), real_tokens(20), routing, routing)
    expected = np.mean(np.log(np.exp(logits.astype(np.float64)).sum(1)) ** 2)
    np.testing.assert_allclose(moe.z_loss(sums), expected, rtol=1e-5)


def test_choice_probability_matches_redrawn_noise():
    """Shazeer et al. 2017, eq. 9: the noise of one expert is drawn again, that of the others stays."""
    clean, spread = RNG.normal(size=(2, 3, 5)).astype(np.float32)
    noise = RNG.normal(size=(3, 5)).astype(np.float32)
    noisy, deviation = (np.asarray(x) for x in moe.noisy_logits(clean, spread, noise))
    expected = np.zeros((3, 5))
    again = np.random.default_rng(1).normal(size=20000)
    for t, e in itertools.product(range(3), range(5)):
        others = np.sort(np.delete(noisy[t], e))[-2]
        expected[t, e] = np.mean(clean[t, e] + again * deviation[t, e] > others)
    actual = moe.choice_probability(clean, noisy, deviation, 2)
    np.testing.assert_allclose(actual, expected, atol=4 * 0.5 / np.sqrt(20000))


def test_second_choices_are_kept_with_the_published_probability():
    logits = np.tile(np.float32([0.0, -1.5, -9, -9]), (20000, 1))
    routing = moe.route(logits, 2, moe.Gates("softmax", normalize=True), real_tokens(20000))
    second = np.asarray(routing.gates).reshape(-1, 2)[:, 1]
    uniform = np.random.default_rng(0).random(20000).astype(np.float32)
    for threshold in (0.5, 0.2):
        kept = moe.drop_second_choice(routing, uniform, threshold, 4)
        share = np.mean(np.asarray(kept.experts).reshape(-1, 2)[:, 1] < 4)
        assert abs(share - min(1, second[0] / threshold)) < 4 * 0.5 / np.sqrt(20000)
        np.testing.assert_array_equal(np.asarray(kept.gates).reshape(-1, 2)[:, 0], 1 - second)


def test_hashed_experts_are_distinct_spread_and_fixed():
    ids = np.arange(4000, dtype=np.int32)
    chosen = np.asarray(moe.hashed_experts(ids, 2, 8))
    assert np.all(chosen[:, 0] != chosen[:, 1])
    counts = np.bincount(chosen[:, 0], minlength=8)
    assert np.all(np.abs(counts - 500) < 5 * np.sqrt(500))
    np.testing.assert_array_equal(chosen[100:110], moe.hashed_experts(ids[100:110], 2, 8))


def test_gates_without_an_effect_raise():
    """Traps: the router of one normalised expert gets no gradient (minimind#858); normalisation twice."""
    for make, message in (
        (lambda: moe.Gates("softmax", normalize=True).check(1), "no gradient"),
        (lambda: moe.Gates().check(1), "no gradient"),
        (lambda: moe.Gates("softmax_k", normalize=True), "sum to 1 already"),
        (lambda: moe.Gates("softmx"), "expected one of"),
    ):
        raises(message, make)


def make_stacks(experts, dim, columns, gated=False):
    shapes = {"up": (experts, dim, columns), "down": (experts, columns, dim)}
    if gated:
        shapes["gate"] = shapes["up"]
    return {name: RNG.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}


# Loads of experts that break implementations: (tokens, experts, k, logits of a token).
LOADS = {
    "uniform": (64, 8, 2, lambda t: np.random.default_rng(t).normal(size=8)),
    "zipf": (64, 8, 2, lambda t: np.random.default_rng(t).normal(size=8) - 2 * np.log(np.arange(1, 9))),
    "one expert": (40, 4, 1, lambda t: np.array([5.0, 0, 0, 0])),
    "alternating": (40, 4, 1, lambda t: np.eye(4)[t % 2 * 3]),
    "more experts than tokens": (5, 257, 2, lambda t: np.eye(257)[256 - t] + np.eye(257)[t] * 0.5),
    "one token": (1, 16, 2, lambda t: np.arange(16.0)),
    "large": (600, 2, 1, lambda t: np.random.default_rng(t).normal(size=2)),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("impl", ["loops", "ragged", "pallas", "batched"])
def test_expert_mlp_loses_no_token(monkeypatch, name, impl):
    if impl == "pallas":
        replace_kernels(monkeypatch)
    count, experts, k, token_logits = LOADS[name]
    logits = np.stack([token_logits(t) for t in range(count)]).astype(np.float32)
    x, stacks = RNG.normal(size=(count, 6)).astype(np.float32), make_stacks(experts, 6, 5, gated=True)
    real = np.arange(count) % 7 != 3

    def run(expert_mlp, x, logits, stacks):
        routing = moe.route(logits, k, moe.Gates("softmax"), real)
        y = expert_mlp(x, routing, stacks, jax.nn.silu)
        return jnp.mean(jnp.sin(y)), y

    def both(*args):
        forms = (moe.reference_expert_mlp, lambda *a: moe.expert_mlp(*a, impl))
        return [jax.value_and_grad(lambda *a, f=f: run(f, *a), (0, 1, 2), has_aux=True)(*args) for f in forms]

    expected, actual = once(both, x, logits, stacks)
    assert_close(actual, expected)
    assert np.all(np.any(np.asarray(actual[0][1]) != 0, axis=1) == real)


def test_padding_of_nan_changes_nothing():
    """Trap: padding reaches products and gradients (Megatron#1984)."""
    x, stacks = RNG.normal(size=(12, 4)).astype(np.float32), make_stacks(3, 4, 5)
    real = np.arange(12) < 9
    logits = RNG.normal(size=(12, 3)).astype(np.float32)
    routing = moe.route(logits, 2, moe.Gates(), real)

    def run(x, stacks):
        return jnp.sum(moe.expert_mlp(x, routing, stacks, jax.nn.relu) ** 2)

    gradients = once(jax.grad(run, (0, 1)), x, stacks)
    with_nan = once(jax.grad(run, (0, 1)), np.where(real[:, None], x, np.nan).astype(np.float32), stacks)
    jax.tree.map(np.testing.assert_array_equal, gradients, with_nan)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_gradient_of_copied_tokens_is_summed_in_float32(has_tokens):
    """256 and eight times 1: sums in bfloat16 would end at 256."""
    x, count = jnp.ones((3, 2), jnp.bfloat16), 9
    experts, tokens = jnp.tile(jnp.arange(count, dtype=jnp.int32), 3), jnp.arange(3, dtype=jnp.int32).repeat(count)
    routing = moe.Routing(experts, jnp.ones(3 * count), tokens if has_tokens else None, 3)
    schedule = equal_schedule(routing.experts, count, 2)  # the third token has no row

    def run(x):
        rows = rows_of_tokens(x, routing, schedule.source, schedule.row).astype(jnp.float32)
        return jnp.sum(rows * jnp.where(jnp.arange(2 * count) < 2, 256.0, 1.0)[:, None])

    assert jax.grad(run)(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(once(jax.grad(run), x).astype(np.float32), [[264, 264], [264, 264], [0, 0]])


@pytest.mark.parametrize("impl", ["loops", "ragged", "pallas", "batched"])
def test_gradients_of_bfloat16_match_float32(monkeypatch, impl):
    if impl == "pallas":
        replace_kernels(monkeypatch)
    x, stacks = RNG.normal(size=(40, 6)).astype(np.float32), make_stacks(4, 6, 5, gated=True)
    x, stacks = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, stacks))
    routing = moe.route(RNG.normal(size=(40, 4)).astype(np.float32), 3, moe.Gates(), real_tokens(40))

    def gradients(x, stacks, impl):
        def score(x, stacks):
            signs = jnp.sin(jnp.arange(x.size)).reshape(x.shape)
            return jnp.sum(signs * moe.expert_mlp(x, routing, stacks, jax.nn.silu, impl).astype(jnp.float32))

        return jax.grad(score, (0, 1))(x, stacks)

    expected = once(lambda *a: gradients(*jax.tree.map(lambda v: v.astype(jnp.float32), a), "dense"), x, stacks)
    actual = once(lambda *a: gradients(*a, impl), x, stacks)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.linalg.norm(a.astype(np.float32) - b) < 0.02 * np.linalg.norm(b)


@pytest.mark.parametrize("name", ["route", "route_by_expert"])
def test_padding_with_token_logits_nan_changes_nothing(name):
    logits, real = RNG.normal(size=(2, 6, 3)).astype(np.float32), np.arange(12).reshape(2, 6) % 6 < 4

    def run(logits):
        if name == "route":
            routing = moe.route(logits.reshape(12, 3), 2, moe.Gates("softmax"), real.reshape(12))
        else:
            routing = moe.route_by_expert(logits, 2, 1.0, real)
        return jnp.sum(jnp.sin(routing.gates)), (routing.experts, routing.gates)

    run_with_gradient = jax.jit(jax.value_and_grad(run, has_aux=True))
    expected, actual = run_with_gradient(logits), run_with_gradient(np.where(real[..., None], logits, np.nan))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert np.all(np.isfinite(actual[1])) and np.any(actual[1])


def test_groups_that_do_not_fit_raise():
    logits = np.zeros((2, 8), np.float32)
    for k, options, message in (
        (4, {"groups": 4, "kept_groups": 1}, "have fewer experts"),
        (2, {"groups": 3}, "does not divide 8 experts"),
        (2, {"groups": 4, "kept_groups": 5}, "at most groups=4"),
        (2, {"groups": 4, "kept_groups": 2, "group_score": "worst"}, "group_score='worst'"),
    ):
        raises(message, moe.route, logits, k, moe.Gates("sigmoid", normalize=True), real_tokens(2), **options)


@pytest.mark.parametrize(
    ("backend", "count", "experts", "factor", "impl"),
    [
        ("cpu", 64, 4, 0.0, "loops"),
        ("tpu", 64, 4, 0.0, "ragged"),
        ("gpu", 64, 8, 0.0, "batched"),
        ("gpu", 64, 64, 1.0, "batched"),
        ("gpu", 64, 64, 0.0, "loops"),
        ("gpu", 1, 64, 0.0, "loops"),
        ("hopper", 64, 8, 0.0, "pallas"),
        ("hopper", 64, 8, 1.0, "batched"),
        ("hopper", 64, 8, 1.5, "pallas"),
    ],
)
def test_implementation_of_a_device_is_the_one_with_the_least_rows(monkeypatch, backend, count, experts, factor, impl):
    used = []

    def run(x, logits, stacks):
        routing = moe.route(logits, 2, moe.Gates(), jnp.ones(count, bool))
        if factor:
            routing = moe.within_capacity(routing, None, jnp.full(count, count), count, 2, factor, experts)
        return moe.expert_mlp(x, routing, stacks, jax.nn.relu)

    def compute(weights, activation, rows, schedule, name):
        used.append((name, len(schedule.blocks)))
        return rows

    def grouped_mlp(x, routing, weights, schedule, activation):
        used.append(("loops", len(schedule.blocks)))
        return x

    for name in ("ragged", "pallas", "batched"):
        monkeypatch.setattr(f"hpnlp.ops.moe.experts._{name}", functools.partial(compute, name=name))
    monkeypatch.setattr("hpnlp.ops.moe.experts.grouped_mlp", grouped_mlp)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if backend == "hopper" else backend)
    if backend == "hopper":
        replace_kernels(monkeypatch)
    jax.eval_shape(run, jnp.zeros((count, 2)), jnp.zeros((count, experts)), make_stacks(experts, 2, 3))
    blocks = {"loops": 4 if backend == "cpu" else 1}.get(impl, 0)
    assert used == [(impl, blocks)]


def test_hessian_products_match_the_reference():
    """Forward mode over reverse mode, by which the curvature of a loss is measured."""
    draw = np.random.default_rng(0)
    x, logits = draw.normal(size=(6, 4)).astype(np.float32), draw.normal(size=(6, 3)).astype(np.float32)
    stacks, real = make_stacks(3, 4, 5), np.ones(6, bool)

    def products(expert_mlp, x, logits):
        def loss(x, logits):
            return jnp.sum(expert_mlp(x, moe.route(logits, 2, moe.Gates(), real), stacks, jax.nn.silu) ** 2)

        return jax.jvp(jax.grad(loss, (0, 1)), (x, logits), (jnp.ones_like(x), jnp.cos(logits)))[1]

    both = (once(lambda *a, f=f: products(f, *a), x, logits) for f in (moe.expert_mlp, moe.reference_expert_mlp))
    assert_close(*both)


def test_blocks_cover_each_row_once_with_one_block_for_the_rest_of_an_expert():
    counts = np.array([0, 5, 23, 8, 16, 12, 40])
    experts = np.random.default_rng(0).permutation(np.repeat(np.arange(8), [*counts, 3])).astype(np.int32)  # 7: none
    schedule = once(lambda experts: make_schedule(experts, 7, (16, 12, 8), 104), experts)
    rows_of_expert, blocks_of_expert = [[] for _ in counts], np.zeros(7, int)
    for group in schedule.blocks:
        for expert, start, rows in zip(
            *(np.asarray(a)[: group.used] for a in (group.experts, group.starts, group.rows)), strict=True
        ):
            assert 0 < rows <= group.size
            rows_of_expert[expert].extend(range(start, start + rows))
            blocks_of_expert[expert] += 1
    ends = np.cumsum(counts)
    assert [sorted(rows) for rows in rows_of_expert] == [
        list(range(end - n, end)) for n, end in zip(counts, ends, strict=True)
    ]
    np.testing.assert_array_equal(blocks_of_expert, -(-counts // 16))


def test_unknown_implementation_raises():
    routing = moe.route(np.zeros((2, 2), np.float32), 1, moe.Gates("softmax"), real_tokens(2))
    raises(
        "impl='loop'", moe.expert_mlp, np.zeros((2, 3), np.float32), routing, make_stacks(2, 3, 3), jax.nn.relu, "loop"
    )
