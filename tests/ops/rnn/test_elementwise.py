"""Elementwise recurrences equal loops over the tokens, in one part and in several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.rnn import linear_recurrence, qrnn, sru
from tests.contracts import assert_close, once
from tests.messages import raises

B, T, D, H = 2, 9, 3, 4
RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(jnp.float32))


DECAY, ADDED, START, SIGNS = jax.nn.sigmoid(draw(B, T, H)), draw(B, T, H), draw(B, H), draw(B, T, H)
RESET = jnp.asarray(RNG.random((B, T)) < 0.3)
HOLD = jnp.asarray(RNG.random((B, T, H)).astype(jnp.float32))


def loop(decay, added, start):
    states, c = [], start
    for t in range(decay.shape[1]):
        c = decay[:, t] * c + added[:, t]
        states.append(c)
    return jnp.stack(states, axis=1)


@pytest.mark.parametrize("impl", ["parallel", "loop"])
def test_values_and_gradients_match_a_loop(impl):
    def both(function):
        loss = lambda *a: (function(*a) * SIGNS).sum()  # noqa: E731
        return lambda *a: (function(*a), jax.grad(loss, (0, 1, 2))(*a))

    found = once(both(lambda *a: linear_recurrence(*a, impl=impl)), DECAY, ADDED, START)
    assert_close(found, once(both(loop), DECAY, ADDED, START))


def qrnn_loop(x, w, b, width, pooling, reset, hold):
    """Equations 1 to 6 of the paper, token by token, with shares of c that are held."""
    outputs, states = [], []
    for row, resets, held in zip(np.asarray(x, np.float64), np.asarray(reset), np.asarray(hold), strict=True):
        c, start, of_row = np.zeros(H), 0, []
        for t in range(T):
            if resets[t]:
                c, start = np.zeros(H), t
            window = [row[t - j] if t - j >= start else np.zeros(D) for j in range(width)]
            gates = np.split(np.concatenate(window) @ np.asarray(w, np.float64) + b, w.shape[1] // H)
            z, (f, *further) = np.tanh(gates[0]), [1 / (1 + np.exp(-g)) for g in gates[1:]]
            new = f * c + (further[1] * z if pooling == "ifo" else (1 - f) * z)
            c = held[t] * c + (1 - held[t]) * new
            of_row.append(c if pooling == "f" else further[0] * c)
        outputs.append(of_row)
        states.append(c)
    return np.array(outputs, np.float32), np.array(states, np.float32)


@pytest.mark.parametrize(("pooling", "gates", "width"), [("f", 2, 1), ("fo", 3, 2), ("ifo", 4, 3)])
def test_quasi_recurrent_network_matches_the_paper_and_continues(pooling, gates, width):
    x, w, b = draw(B, T, D), draw(width * D, gates * H), draw(gates * H)
    options = {"width": width, "pooling": pooling}

    def run(x):
        first, state = qrnn(x[:, :5], w, b, **options)
        second, end = qrnn(x[:, 5:], w, b, state, **options)
        continued = jnp.concatenate([first, second], axis=1), end
        return qrnn(x, w, b, reset=RESET, hold=HOLD, **options), qrnn(x, w, b, **options), continued

    (y, (c, before)), whole, continued = once(run, x)
    assert_close((y, c), qrnn_loop(x, w, b, width, pooling, RESET, HOLD))
    assert_close(before, x[:, T + 1 - width :])
    assert_close(continued, whole)


def test_lengths_end_the_recurrence():
    x, w, v = draw(B, T, D), draw(2 * D, 3 * H), draw(D, 4 * H)
    lengths = jnp.int32([5, 5])
    padded = x.at[:, 5:].set(jnp.nan)

    def run(padded, x):
        layers = (lambda x, **kw: qrnn(x, w, width=2, **kw), lambda x, **kw: sru(x, v, **kw))
        return [(layer(padded, lengths=lengths), layer(x)) for layer in layers]

    for (y, state), expected in once(run, padded, x[:, :5]):
        assert_close((y[:, :5], state), expected)
        assert not np.asarray(y[:, 5:]).any()


def test_a_reversed_network_reads_each_text_from_its_last_token():
    x, w, b = draw(B, T, D), draw(3 * D, 3 * H), draw(3 * H)
    lengths = jnp.int32([5, T])
    padded = x.at[0, 5:].set(jnp.nan)

    def run(padded, x):
        y, state = qrnn(padded, w, b, width=3, hold=HOLD, reset=RESET, lengths=lengths, reverse=True)
        flipped = [a[:, ::-1] for a in (x, HOLD, RESET)]
        first, _ = qrnn(
            flipped[0][:1, T - 5 :], w, b, width=3, hold=flipped[1][:1, T - 5 :], reset=flipped[2][:1, T - 5 :]
        )
        second, end = qrnn(flipped[0][1:], w, b, width=3, hold=flipped[1][1:], reset=flipped[2][1:])
        return (y[0, :5], y[1], y[0, 5:], state[0][1], state[1][1]), (
            first[0, ::-1],
            second[0, ::-1],
            end[0][0],
            end[1][0],
        )

    (first, second, padding, *state), expected = once(run, padded, x)
    assert_close((first, second, *state), expected)
    assert not np.asarray(padding).any()


def test_resets_keep_nan_out_of_later_segments():
    x, w, v = draw(B, T, D), draw(2 * D, 3 * H), draw(D, 4 * H)
    reset = jnp.zeros((B, T), bool).at[:, 5].set(True)

    def run(x):
        layers = (lambda x: qrnn(x, w, width=2, reset=reset)[0], lambda x: sru(x, v, reset=reset)[0])
        return [jax.value_and_grad(lambda x, f=f: (y := f(x)[:, 5:]).sum() + (y * y).sum())(x) for f in layers]

    found, expected = once(lambda x: (run(x.at[:, :5].set(jnp.nan)), run(x)), x)
    for (value, gradient), (expected_value, expected_gradient) in zip(found, expected, strict=True):
        assert_close((value, gradient[:, 5:]), (expected_value, expected_gradient[:, 5:]))


@pytest.mark.parametrize("columns", [3, 4])
def test_simple_recurrent_unit_matches_the_paper_and_continues(columns):
    size = D if columns == 3 else H
    x, w, b = draw(B, T, D), draw(D, columns * size), draw(2 * size)

    def run(x):
        z, f, r, *skip = jnp.split(jnp.einsum("btd,df->btf", x, w, precision="highest"), columns, axis=-1)
        f, r = jax.nn.sigmoid(f + b[None, None, :size]), jax.nn.sigmoid(r + b[None, None, size:])
        c = loop(jnp.where(RESET[..., None], 0.0, f), (1 - f) * z, jnp.zeros((B, size)))
        expected = r * jnp.tanh(c) + (1 - r) * (skip[0] if skip else x), c[:, -1]
        first, state = sru(x[:, :5], w, b)
        second, end = sru(x[:, 5:], w, b, state)
        continued = jnp.concatenate([first, second], axis=1), end
        return (sru(x, w, b, reset=RESET), continued), (expected, sru(x, w, b))

    assert_close(*once(run, x))


def test_bfloat16_inputs_give_bfloat16_outputs_and_float32_states():
    x, w = draw(B, T, D), draw(D, 3 * H)
    (y, (c, _)), (expected, _) = qrnn(x.astype(jnp.bfloat16), w), qrnn(x, w)
    assert y.dtype == jnp.bfloat16 and c.dtype == jnp.float32
    assert_close(y, expected.astype(jnp.bfloat16), "bfloat16")


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: linear_recurrence(DECAY, ADDED[:, 1:]), "expected two"),
        (lambda: linear_recurrence(DECAY, ADDED, impl="fast"), "parallel, loop"),
        (lambda: linear_recurrence(DECAY, ADDED, START[:1]), r"start \(1, 4\): expected"),
        (lambda: qrnn(ADDED, ADDED[0], pooling="o"), "f, fo, ifo"),
        (lambda: qrnn(ADDED, draw(H, 3 * H), width=2), "2 D, 3 H"),
        (lambda: qrnn(ADDED, draw(2 * H, 3 * H), None, (START, ADDED[:1, :1]), width=2), "qrnn: state"),
        (lambda: sru(ADDED, draw(H, 5)), "expected x"),
        (lambda: sru(ADDED, draw(H, 3 * H), features=5), "features=5"),
        (lambda: sru(ADDED[:, :0], draw(H, 4 * H)), "not empty"),
    ):
        raises(message, call)
