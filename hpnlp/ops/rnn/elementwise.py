"""Recurrences without a recurrent matrix, computed for all steps in parallel: quasi-recurrent and simple recurrent units."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.convolutions.convolution import last_tokens, token_windows
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.linear import product
from hpnlp.types import InputError

IMPLS = ("parallel", "loop")
POOLINGS = {"f": 2, "fo": 3, "ifo": 4}  # name -> number of gates


@array_op("B T", decay="B T")
def linear_recurrence(
    decay: Float[Array, "B T H"],
    added: Float[Array, "..."],
    start: Float[Array, "..."] | None = None,
    *,
    impl: str = "parallel",
) -> Float[Array, "B T H"]:
    """The recurrence `c_t = decay_t c_{t-1} + added_t` of each feature by itself.

    A decay of 0 erases the state, even one that is NaN.

    Args:
      decay: Factors of the state.
      added: Terms of the steps, [B, T, H].
      start: State before the first step, [B, H]; None for zeros.
      impl: "parallel" for an associative scan of O(log T) passes, "loop" for a scan of T steps.

    Returns:
      The states, float32.

    Raises:
      InputError: Unknown implementation, or shapes do not match.

    Cost:
      O(B T H) operations and memory. The backward pass is the same recurrence from the last step to the first.

    References:
      Martin and Cundy 2018, "Parallelizing linear recurrent neural nets over sequence length", sec. 2.
    """
    if decay.shape != added.shape or decay.ndim != 3:
        raise InputError(f"linear_recurrence of decay {decay.shape} and added {added.shape}: expected two [B, T, H]")
    if impl not in IMPLS:
        raise InputError(f"linear_recurrence: impl={impl!r}: expected one of {', '.join(IMPLS)}")
    start = jnp.zeros_like(decay, shape=decay.shape[::2]) if start is None else start
    if start.shape != decay.shape[::2]:
        raise InputError(f"linear_recurrence: start {start.shape}: expected [B, H] = {decay.shape[::2]}")
    arrays = (x.astype(jnp.float32) for x in (decay, added, start))
    return _recurrence(impl, *vary_alike(*arrays))


def _recurrence_of(impl: str, decay: Array, added: Array, start: Array) -> Array:
    if impl == "loop":

        def step(c: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            c = _decayed(inputs[0], c) + inputs[1]
            return c, c

        _, states = lax.scan(step, start, (decay.swapaxes(0, 1), added.swapaxes(0, 1)))
        return states.swapaxes(0, 1)
    first = added[:, :1] + _decayed(decay[:, :1], start[:, None])

    def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return _decayed(right[0], left[0]), _decayed(right[0], left[1]) + right[1]

    return lax.associative_scan(combine, (decay, jnp.concatenate([first, added[:, 1:]], axis=1)), axis=1)[1]


def _decayed(decay: Array, c: Array) -> Array:
    """The product, 0 for a decay of 0, so that NaN and infinity stay in the segment in which they occur."""
    return jnp.where(decay == 0.0, 0.0, decay * c)


def _recurrence_forward(impl: str, decay: Array, added: Array, start: Array) -> tuple[Array, Any]:
    states = _recurrence_of(impl, decay, added, start)
    return states, (decay, start, states)


def _recurrence_backward(impl: str, saved: Any, dy: Array) -> tuple[Array, Array, Array]:
    decay, start, states = saved
    # Gradients of the states: d_t = dy_t + decay_{t+1} d_{t+1}.
    later = jnp.concatenate([decay[:, 1:], jnp.zeros_like(decay[:, :1])], axis=1)
    d = _recurrence_of(impl, later[:, ::-1], dy[:, ::-1], jnp.zeros_like(start))[:, ::-1]
    before = jnp.concatenate([start[:, None], states[:, :-1]], axis=1)
    return d * before, d, _decayed(decay[:, 0], d[:, 0])


_recurrence = jax.custom_vjp(_recurrence_of, nondiff_argnums=(0,))
_recurrence.defvjp(accepts_numpy(_recurrence_forward), _recurrence_backward)


@array_op("B", x="B")
def qrnn(
    x: Float[Array, "B T D"],
    w: Any,
    b: Float[Array, " F"] | None = None,
    state: tuple[Array, Array] | None = None,
    *,
    width: int = 1,
    pooling: str = "fo",
    hold: Float[Array, "#B #T H"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    reverse: bool = False,
    impl: str = "parallel",
) -> tuple[Float[Array, "B T H"], tuple[Array, Array]]:
    """Quasi-recurrent network: gates from a causal convolution, and pooling by an elementwise recurrence.

    With the gates z, f, o, i in the columns of `windows w + b`, z a tanh and the others sigmoids,
    `c' = f c + (1 - f) z`, or `c' = f c + i z` with the pooling "ifo"; h' is c', or `o c'` with a gate o.

    Args:
      x: Inputs.
      w: Matrix of the convolution, [W D, G H]: rows of the current token, then of the one before it, and so on. An array or a
        Weight. The gates are z, f for the pooling "f", z, f, o for "fo" and z, f, o, i for "ifo".
      b: Biases of the gates, [G H]; None for none.
      state: State `(c [B, H], the W - 1 tokens before the first one [B, W - 1, D])`; None for zeros.
      width: Tokens W that a gate reads.
      pooling: "f", "fo" or "ifo".
      hold: Share of c that a step leaves as it was, as for zoneout: `f` becomes `hold + (1 - hold) f`, and z counts 1 - hold.
      reset: True for tokens before which c and the tokens before them count as zeros.
      lengths: Tokens of each sequence, as for `lstm`; None for T.
      reverse: Whether the last token comes first: "before" and "after" change places in all of the above.
      impl: As for `linear_recurrence`.

    Returns:
      `(h of each token, in the dtype of x, the state after the last token)`.

    Raises:
      InputError: Unknown pooling, or shapes do not match.

    Cost:
      One product of O(B T W D H), and the recurrence.

    References:
      Bradbury et al. 2017, "Quasi-recurrent neural networks", eq. 1 to 6.
    """
    if pooling not in POOLINGS:
        raise InputError(f"qrnn: pooling={pooling!r}: expected one of {', '.join(POOLINGS)}")
    count = POOLINGS[pooling]
    if width < 1 or x.ndim != 3 or 0 in x.shape or w.shape[0] != width * x.shape[-1] or w.shape[1] % count:
        raise InputError(
            f"qrnn of x {x.shape} with w {tuple(w.shape)}: expected x [B, T, D], not empty, and w [{width} D, {count} H], "
            "width at least 1"
        )
    x = _zero_padding(x, lengths)
    if reverse:
        x = x[:, ::-1]
        hold, reset = (None if a is None else a[:, ::-1] for a in (hold, reset))
    features = w.shape[1] // count
    c, before = _qrnn_state(state, x, width, features)
    tokens = jnp.concatenate([before, x], axis=1)
    ids = None if reset is None else _segments(reset, width - 1)
    windows = token_windows(tokens, width, ids)[:, width - 1 :]
    z, f, *further = _gates(windows, w, b, count)
    z, f, further = jnp.tanh(z), jax.nn.sigmoid(f), [jax.nn.sigmoid(gate) for gate in further]
    added = further[1] * z if pooling == "ifo" else (1.0 - f) * z
    if hold is not None:
        added, f = (1.0 - hold) * added, hold + (1.0 - hold) * f
    states = _pool(f, added, c, reset, lengths, impl, reverse)
    y = states if pooling == "f" else further[0] * states
    end = jnp.full((len(x),), x.shape[1], jnp.int32)
    if lengths is not None and not reverse:  # padding comes before the tokens if these are reversed
        end = lengths
    new_state = states[:, -1], last_tokens(tokens, end + (width - 1), width - 1)
    return _zero_padding((y[:, ::-1] if reverse else y).astype(x.dtype), lengths), new_state


@array_op("B", x="B")
def sru(
    x: Float[Array, "B T D"],
    w: Any,
    b: Float[Array, " F"] | None = None,
    state: Float[Array, "B H"] | None = None,
    *,
    features: int | None = None,
    reset: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    impl: str = "parallel",
) -> tuple[Float[Array, "B T H"], Float[Array, "B H"]]:
    """Simple recurrent unit with a highway connection.

    With the columns z, f, r, s of `x w + b`, f and r sigmoids, `c' = f c + (1 - f) z` and `h' = r tanh(c') + (1 - r) s`. With
    the columns z, f, r only, s is x itself.

    Args:
      x: Inputs.
      w: Matrix [D, 4 H], or [D, 3 H] with H = D; an array or a Weight.
      b: Biases [2 H] of f and r; None for none.
      state: State c before the first token; None for zeros.
      features: Features H; None for D if w has 3 D columns, and otherwise for a quarter of the columns.
      reset: True for tokens before which c counts as zeros.
      lengths: Tokens of each sequence, as for `lstm`; None for T.
      impl: As for `linear_recurrence`.

    Returns:
      `(h of each token, in the dtype of x, c after the last token, float32)`.

    Raises:
      InputError: Shapes do not match.

    Cost:
      One product of O(B T D H), and the recurrence.

    References:
      Lei et al. 2017, "Simple recurrent units for highly parallelizable recurrence", eq. 3 to 7 of the first version, whose
      gates do not read the state.
    """
    dim, columns = x.shape[-1], w.shape[1]
    size = (dim if columns == 3 * dim else columns // 4) if features is None else features
    count = 3 if size == dim and columns == 3 * dim else 4
    if x.ndim != 3 or 0 in x.shape or w.shape[0] != dim or columns != count * size:
        raise InputError(
            f"sru of x {x.shape} with w {tuple(w.shape)}, features={size}: expected x [B, T, D], not empty, and w [D, 4 H] "
            "or [D, 3 D]"
        )
    x = _zero_padding(x, lengths)
    if b is not None:
        b = jnp.pad(b, (size, (count - 3) * size))
    z, f, r, *skip = _gates(x, w, b, count)
    f, r = jax.nn.sigmoid(f), jax.nn.sigmoid(r)
    c = jnp.zeros((len(x), size), jnp.float32) if state is None else state
    states = _pool(f, (1.0 - f) * z, c, reset, lengths, impl)
    y = r * jnp.tanh(states) + (1.0 - r) * (skip[0] if skip else x.astype(jnp.float32))
    return _zero_padding(y.astype(x.dtype), lengths), states[:, -1]


def _gates(x: Array, w: Any, b: Array | None, count: int) -> list[Array]:
    """The gates of all tokens before their activations, float32 `[B, T, H]` each."""
    gates = product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:2], -1)
    gates = gates if b is None else gates + b.astype(jnp.float32)[None, None]
    return jnp.split(gates, count, axis=-1)


def _pool(
    f: Array,
    added: Array,
    c: Array,
    reset: Array | None,
    lengths: Array | None,
    impl: str,
    reverse: bool = False,
) -> Array:
    """The recurrence, which begins again at resets and ends with the sequences."""
    if reset is not None:
        f = jnp.where(reset[..., None], 0.0, f)
    if lengths is not None:
        valid = (jnp.arange(f.shape[1], dtype=lengths.dtype)[None] < lengths[:, None])[..., None]
        valid = valid[:, ::-1] if reverse else valid
        f, added = jnp.where(valid, f, 1.0), jnp.where(valid, added, 0.0)
    return linear_recurrence(f, added, c, impl=impl)


def _qrnn_state(state: tuple[Array, Array] | None, x: Array, width: int, features: int) -> tuple[Array, Array]:
    """`(c, tokens before the first one)`."""
    shapes = (len(x), features), (len(x), width - 1, x.shape[-1])
    if state is None:
        return jnp.zeros(shapes[0], jnp.float32), jnp.zeros(shapes[1], x.dtype)
    if tuple(s.shape for s in state) != shapes:
        raise InputError(f"qrnn: state {[s.shape for s in state]}: expected arrays {shapes[0]} and {shapes[1]}")
    return state[0].astype(jnp.float32), state[1].astype(x.dtype)


def _segments(reset: Array, before: int) -> Array:
    """Segments of the tokens, after `before` tokens of the segment that the first token continues."""
    ids = jnp.cumsum(reset.astype(jnp.int32), axis=1)
    return jnp.pad(ids, ((0, 0), (before, 0)))


def _zero_padding(x: Array, lengths: Array | None) -> Array:
    """X with 0 for tokens after the end of a sequence."""
    if lengths is None:
        return x
    valid = jnp.arange(x.shape[1], dtype=lengths.dtype)[None] < lengths[:, None]
    return jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))
