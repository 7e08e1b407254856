"""Recurrent layers equal their references in value and gradient, under all masks, lengths, directions and layouts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpnlp.ops.rnn import StepMasks, gru, lstm, minimal_gated_unit, segment_resets
from hpnlp.ops.rnn.sequence import state_arrays
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises
from tests.ops.rnn.cases import KINDS, B, D, H, T, arguments, as_float, fast, reference, value_and_gradients

# Every kind with all options in one direction, and the LSTM without them; the other cases are slow.
QUICK = {("lstm", "plain"), *zip(KINDS, itertools.cycle(["options", "reverse"]), strict=False)}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(KINDS, ("plain", "options", "reverse"))
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_values_and_gradients_match_the_reference_in_double_precision(kind, case):
    arrays, options = arguments(kind, case != "plain")
    reverse = case == "reverse"
    with jax.enable_x64(True):
        double = functools.partial(reference, kind, reverse=reverse, **as_float(options, np.float64))
        expected = once(functools.partial(value_and_gradients, double), as_float(arrays, np.float64))
        expected = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), expected)
    single = functools.partial(fast, kind, reverse=reverse, **as_float(options, np.float32))
    found = once(functools.partial(value_and_gradients, single), as_float(arrays, np.float32))
    scale = lambda leaf: leaf / max(1.0, np.abs(leaf).max())  # noqa: E731
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(np.asarray(a) / max(np.float32(1), np.abs(b).max()), scale(b))


@pytest.mark.parametrize("kind", KINDS)
def test_one_product_gives_the_gradient_of_the_recurrent_matrix(kind):
    """The loops have as many products as the step has matrices, so none of them sums outer products."""
    arrays, _ = arguments(kind, False)
    program = jax.make_jaxpr(functools.partial(value_and_gradients, functools.partial(fast, kind)))(
        as_float(arrays, np.float32)
    )
    bodies = [str(eqn.params["jaxpr"]) for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    matrices = 2 if kind.endswith("original") else 1
    counts = [body.count("dot_general[") for body in bodies]
    assert counts == [matrices, matrices]


def joined(results):
    """Outputs of parts of a sequence, one after another."""
    return jnp.concatenate([y for y, _ in results], axis=1)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_equal_their_parts(kind):
    """Continued from a state, packed as segments in both directions, and padded, even with NaN."""
    arrays, _ = arguments(kind, False)
    arrays = as_float(arrays, np.float32)
    arrays["initial"] = as_float(arguments(kind, True)[0]["initial"], np.float32)
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2]] * B, jnp.int32)
    lengths = jnp.asarray([3] * B, jnp.int32)

    def run(arrays):
        x = arrays["x"]
        parts = jnp.split(x, [3], axis=1)
        of = functools.partial(fast, kind)
        alone = {reverse: [of({**arrays, "x": part}, reverse=reverse) for part in parts] for reverse in (False, True)}
        second = of({**arrays, "x": parts[1], "state": alone[False][0][1]})
        packed = {
            reverse: of(arrays, reset=segment_resets(ids, reverse=reverse), reverse=reverse)[0] for reverse in alone
        }
        # The segment ids of padding differ from those of the text, and begin no segment.
        resets = segment_resets(jnp.asarray([[1, 1, 1, 0, 0, 0, 0]] * B, jnp.int32))
        padded, state = of({**arrays, "x": x.at[:, 3:].set(np.nan)}, lengths=lengths, reset=resets)
        zeros = jnp.zeros_like(padded[:, 3:])
        first = alone[False][0]
        found = (joined([first, second]), second[1]), packed, (padded, state)
        expected = (
            of(arrays),
            {reverse: joined(alone[reverse]) for reverse in alone},
            (joined([first, (zeros, 0)]), first[1]),
        )
        return found, expected

    assert_close(*once(run, arrays))


def test_resets_compare_with_the_segment_before():
    ids = jnp.asarray([[1, 1, 2], [3, 4, 4]], jnp.int32)
    found = segment_resets(ids), segment_resets(ids, jnp.int32([1, 2])), segment_resets(ids, reverse=True)
    expected = [[[0, 0, 1], [0, 1, 0]], [[0, 0, 1], [1, 1, 0]], [[0, 1, 0], [1, 0, 0]]]
    np.testing.assert_array_equal(np.stack(found), np.array(expected, bool))


@pytest.mark.parametrize("kind", ["lstm", "lstm_norms", "gru_original"])
def test_bfloat16_is_close_to_float32(kind):
    arrays, options = arguments(kind, True)
    arrays, options = as_float(arrays, np.float32), as_float(options, np.float32)
    arrays["u"], arrays["w"] = arrays["u"] / 2, arrays["w"] / 2

    def run(arrays):
        of = functools.partial(fast, kind, **options)
        return of(arrays), of({**arrays, "x": arrays["x"].astype(jnp.bfloat16)})

    (y, state), (low, low_state) = once(run, arrays)
    assert low.dtype == jnp.bfloat16 and low_state[0].dtype == jnp.float32
    assert_close((low.astype(jnp.float32), low_state), (y, state), "bfloat16")


@pytest.mark.parametrize("kind", [pytest.param("lstm", marks=pytest.mark.slow), "lstm_norms", "gru_original"])
def test_gradients_are_equal_when_devices_have_parts_of_the_batch(kind):
    arrays, _ = arguments(kind, True)
    arrays = as_float(arrays, np.float32)
    reset = jnp.asarray(np.random.default_rng(1).random((B, T)) < 0.3)
    arrays = {**arrays, "x": jnp.concatenate([arrays["x"], arrays["x"][:1]])}
    arrays["state"] = tuple(jnp.concatenate([s, s[:1]]) for s in arrays["state"])
    reset = jnp.concatenate([reset, reset[:1]])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: P("data") if name in ("x", "state") else P() for name in arrays}

    def loss(arrays, reset):
        y, _ = fast(kind, arrays, reset=reset)
        return (y * y).sum()

    def divided(arrays):
        program = jax.shard_map(
            lambda arrays, reset: jax.lax.psum(loss(arrays, reset), "data"),
            mesh=mesh,
            in_specs=(specs, P("data")),
            out_specs=P(),
        )
        return program(arrays, reset)

    found = jax.jit(jax.grad(divided), compiler_options=ONCE)(arrays)
    expected = once(jax.grad(lambda arrays: loss(arrays, reset)), arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a / max(1.0, np.abs(b).max()), b / max(1.0, np.abs(b).max()))


X, W, U = np.zeros((B, T, D), np.float32), np.zeros((D, 4 * H), np.float32), np.zeros((H, 4 * H), np.float32)


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: lstm(X, W[:-1], U), "expected x"),
        (lambda: lstm(X, W, U[:, :-1]), r"recurrent matrix \(4, 15\): expected \[H, 4 H\], which is \(4, 16\) for H ="),
        (lambda: lstm(X, W, U[:-1]), r"recurrent matrix \(3, 16\): expected \[H, 4 H\], which is \(3, 12\) for H = 3"),
        (lambda: lstm(X, W, U[:-1, :-4]), r"with w \(.*, 16\) and the recurrent matrix \(3, 12\): expected x"),
        (lambda: lstm(X[:, :0], W, U), "not empty"),
        (lambda: lstm(X, W, U, np.zeros(1, np.float32)), r"lstm: b \(1,\): expected"),
        (lambda: state_arrays("state", 2, np.zeros((2, B, H)), B, H), r"state of shape \(2, 3, 4\): expected a tuple"),
        (lambda: lstm(X, W, U, None, (X[:1, 0, :H], X[:1, 0, :H])), r"state .*: expected a tuple of 2, \[B, H\] ="),
        (lambda: lstm(X, W, U, initial=(X[0, 0, :H],)), "initial .*: expected a tuple of 2"),
        (
            lambda: lstm(X, W, U, masks=StepMasks(hidden=np.ones((B, H), np.float32))),
            r"masks.hidden \(3, 4\): expected",
        ),
        (
            lambda: lstm(X, W, U, masks=StepMasks(hold_c=np.ones((B, 2, H), np.float32))),
            r"masks.hold_c \(3, 2, 4\): expected",
        ),
        (lambda: lstm(X, W, U, reset=np.zeros((B, T - 1), bool)), "reset"),
        (lambda: lstm(X, W, U, lengths=np.zeros((B, 1), np.int32)), "lengths"),
        (lambda: lstm(X, W, U, impl="cuda"), "expected 'xla' or 'cudnn'"),
        (lambda: lstm(X, W, U, impl="cudnn", masks=StepMasks(hidden=np.ones((B, 1, H), np.float32))), "masks within"),
        (lambda: gru(X, W[:, : 3 * H], U[:, : 3 * H], form="torch"), "expected one of cudnn, original"),
        (lambda: gru(X, W[:, : 3 * H], U[:, : 3 * H], n_bias=np.zeros(H, np.float32), form="original"), "no effect"),
        (lambda: gru(X, W[:, : 3 * H], U[:, : 3 * H], n_bias=np.zeros(1, np.float32)), r"gru: n_bias \(1,\): expected"),
        (
            lambda: gru(X, W[:, : 3 * H], U[:, : 3 * H], masks=StepMasks(hold_c=X[..., :H])),
            "the cell has no cell state",
        ),
        (lambda: minimal_gated_unit(X, W, U), r"recurrent matrix \(4, 16\): expected \[H, 2 H\]"),
    ):
        raises(message, call)
