"""Softmax cross-entropy from blocks of logits: all tokens by some words, or some tokens by all words.

Three numbers a token are all that a loss needs of its logits: the log-sum-exp of the other words', the label's own, and,
where labels are smoothed, the sum of all. The label stands apart from the others because softmax(logits)[label] - 1 is 0 in
float32 for a confident token; as -sigmoid(others - label) it is right to the last digits.

`statistics` makes the numbers in one pass over blocks of the vocabulary. Its derivative is one more such pass, linear in the
tangents, in which the logits of a block are made anew: transposing it (reverse mode) and differentiating it again are left to
JAX, and neither keeps a block. That is four products of tokens, words and features for a loss with its gradients.

`weighted_sum` does with three, because the cotangent of a sum is one number, by which gradients may be multiplied once they
are made: a chunk of tokens makes its logits, and from them its part of every gradient, before the next one begins.

Gradients are products of h's dtype, which is not float16: callers take `widened` h and w.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jaxtyping import Array, Float

from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.custom_vjp import vary_alike


@dataclasses.dataclass(frozen=True)
class LogitsSpec:
    """How logits come from products, losses from logits, and how much is made at a time.

    block: words of a block. rows: tokens of a chunk, 0 where all tokens go together. best: whether the best word is asked for,
    total: the sum of the logits.
    """

    block: int
    rows: int = 0
    words: int = 0
    soft_cap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    total: bool = False
    best: bool = False

    def logits(self, h: Array, w: Array, bias: Array | None) -> Float[Array, "N c"]:
        s = product(h, w)
        return self.shape(s if bias is None else s + bias.astype(jnp.float32)[None])

    def shape(self, s: Array) -> Array:
        if self.soft_cap is not None:
            s = self.soft_cap * jnp.tanh(s / self.soft_cap)
        return s if self.temperature == 1.0 else s / self.temperature

    def slope(self, s: Array, ds: Array) -> Array:
        """What the gradient of logits `s` is to the products that they come from."""
        if self.soft_cap is not None:
            ds = ds * (1.0 - (s * (self.temperature / self.soft_cap)) ** 2)
        return ds if self.temperature == 1.0 else ds / self.temperature

    def losses(self, others: Array, target: Array, total: Array, words: int) -> Float[Array, " N"]:
        """Each token's loss, of the statistics of its logits."""
        each = jax.nn.softplus(others - target)
        if self.label_smoothing == 0 == self.z_loss:
            return each
        lse = jnp.logaddexp(others, target)
        if self.label_smoothing != 0:
            each = (1.0 - self.label_smoothing) * each + self.label_smoothing * (lse - total / words)
        return each + self.z_loss * lse**2


def reference(form: LogitsSpec, h: Array, w: Array, bias: Array | None, labels: Array) -> tuple[Array, ...]:
    """`statistics` from all logits."""
    s = h.astype(jnp.float32) @ w.astype(h.dtype).astype(jnp.float32).T
    s = s if bias is None else s + bias.astype(jnp.float32)[None]
    s = s if form.soft_cap is None else form.soft_cap * jnp.tanh(s / form.soft_cap)
    s = s / form.temperature
    own = jax.nn.one_hot(labels, w.shape[0], dtype=jnp.bool_)
    others = jax.nn.logsumexp(s, axis=1, where=~own)
    return others, jnp.where(own, s, 0.0).sum(axis=1), s.sum(axis=1), jnp.argmax(s, axis=1).astype(jnp.int32)


# All tokens by some words


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def statistics(form: LogitsSpec, h: Array, w: Array, bias: Array | None, labels: Array) -> tuple[Array, ...]:
    """Of each token: the log-sum-exp of all logits but the label's, the label's (0 where it is no word), the sum of all, and
    the first word with the largest; the last two only where the form asks for them."""

    def add(sums: Any, start: Array, w: Array, bias: Array | None) -> Any:
        return _add(form, sums, form.logits(h, w, bias), labels, start)

    return _finish(_over_blocks(form, add, _nothing(h, w, bias, labels), w, bias))


@statistics.defjvp
@accepts_numpy
def _(form: LogitsSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    h, w, bias, labels = primals
    dh, dw, dbias, _ = tangents
    out = statistics(form, h, w, bias, labels)
    others = _no_infinity(out[0])[:, None]
    dh = dh.astype(jnp.float32)  # so that what the blocks add to its transpose is summed in it

    def add(sums: Any, start: Array, w: Array, bias: Array | None, dw: Array, dbias: Array | None) -> Any:
        d_others, d_target, d_total = sums
        given = (h, w) if bias is None else (h, w, bias)
        along = (dh.astype(h.dtype), dw) if bias is None else (dh.astype(h.dtype), dw, dbias)
        s, ds = jax.jvp(lambda h, w, bias=None: form.logits(h, w, bias), given, along)
        own, rest = _apart(s, labels, start)
        d_others = d_others + (jnp.exp(rest - others) * ds).sum(axis=1)
        d_target = d_target + jnp.where(own, ds, 0.0).sum(axis=1)
        return d_others, d_target, d_total + ds.sum(axis=1) if form.total else d_total

    zero = _zeros(h, w, bias, labels, dh, dw, dbias)
    found = _over_blocks(form, add, (zero, zero, zero), w, bias, dw, dbias)
    return out, (*found, zero_from_primal(out[3]))


def _over_blocks(form: LogitsSpec, body: Callable[..., Any], sums: Any, *tables: Any) -> Any:
    """`sums = body(sums, first word, *blocks of the tables)` for one block of words after another."""
    vocab = tables[0].shape[0]
    count = vocab // form.block
    whole = count * form.block
    if form.block == vocab:
        return body(sums, jnp.int32(0), *tables)
    # What a block computes is computed again by what differentiates it.
    body = jax.checkpoint(body, prevent_cse=False)
    blocks = jax.tree.map(lambda x: x[:whole].reshape(count, form.block, *x.shape[1:]), tables)
    starts = jnp.arange(count, dtype=jnp.int32) * form.block
    sums = lax.scan(lambda sums, x: (body(sums, *x), None), sums, (starts, *blocks))[0]
    if whole == vocab:
        return sums
    return body(sums, jnp.int32(whole), *jax.tree.map(lambda x: x[whole:], tables))


# Some tokens by all words


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_sum(
    form: LogitsSpec, h: Array, w: Array, bias: Array | None, labels: Array, factors: Float[Array, " N"]
) -> Float[Array, ""]:
    """The sum of factors * losses, whose gradients are made along with it. Labels are words; factors of 0 have no gradient."""
    return _summed(form, h, w, bias, labels, factors)[0]


@functools.partial(weighted_sum.defjvp, symbolic_zeros=True)
@accepts_numpy
def _(form: LogitsSpec, primals: Any, tangents: Any) -> tuple[Array, Array]:
    known = [x is not None and not isinstance(x, SymbolicZero) for x in tangents]
    wanted = tuple(known[:3])
    # Symbolic zeros are only told apart here; what is not asked for is not made.
    each, gradients = _gradients(form, wanted, *primals)
    h, w, bias, labels, factors = primals
    along = [_dot_all(g, d) for g, d, wants in zip(gradients, tangents, wanted, strict=False) if wants]
    if known[4]:
        along.append(_dot_all(each, tangents[4]))
    return (factors * each).sum(), sum(along, jnp.zeros((), jnp.float32))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(
    form: LogitsSpec, wanted: tuple[bool, ...], h: Array, w: Array, bias: Array | None, labels: Array, factors: Array
) -> tuple[Array, tuple[Any, ...]]:
    """Each token's loss, 0 where its factor is, and the gradients of their weighted sum, float32.

    wanted: of which of h, w and bias.
    """
    n, words = h.shape[0], w.shape[0]
    chunks = max(-(-n // form.rows), 1)
    rows = -(-n // chunks)
    vectors = w.astype(h.dtype)

    def apart(x: Array) -> Array:
        """Token i goes to chunk i modulo their number: over devices that share the tokens, every chunk does."""
        padded = jnp.pad(x, [(0, chunks * rows - n), *[(0, 0)] * (x.ndim - 1)])
        return jnp.moveaxis(padded.reshape(rows, chunks, *x.shape[1:]), 1, 0)

    def each_block(body: Callable[[Array, int, Any], Any], state: Any) -> Any:
        """`state = body(first word, words, state)` for blocks of words, and for those that are left over."""
        count, left = divmod(words, form.words)
        if count:
            state = lax.fori_loop(0, count, lambda i, state: body(i * form.words, form.words, state), state)
        return body(jnp.int32(words - left), left, state) if left else state

    def own(start: Array, size: int, labels: Array) -> tuple[Array, Array]:
        """Where the labels' logits are in a block; beyond it where they are in another."""
        at = labels - start
        return jnp.arange(rows, dtype=jnp.int32), jnp.where(at < 0, size, at)

    def chunk(sums: Any, x: Any) -> Any:
        s, *sums = sums
        h, labels, factors = x
        # The labels' own logits are made apart, and in their places stand such as the others do not notice.
        target = (h.astype(jnp.float32) * vectors[labels].astype(jnp.float32)).sum(axis=1)
        target = form.shape(target if bias is None else target + bias[labels].astype(jnp.float32))

        def first(start: Array, size: int, state: Any) -> Any:
            s, total, top, rest = state
            block = _dot(h, lax.dynamic_slice_in_dim(vectors, start, size), 1, 1)
            if bias is not None:
                block = block + lax.dynamic_slice_in_dim(bias, start, size).astype(jnp.float32)[None]
            block = form.shape(block)
            if form.total:
                total = total + block.sum(axis=1)
            block = block.at[own(start, size, labels)].set(-jnp.inf, mode="drop", unique_indices=True)
            return lax.dynamic_update_slice_in_dim(s, block, start, axis=1), total, *_add_exp(top, rest, block)

        none = zero((rows,))
        s, total, *sum_exp = each_block(first, (s, none, none - jnp.inf, none))
        others = _log(*sum_exp)
        each, pull = jax.vjp(functools.partial(form.losses, words=words), others, target, total)
        d_others, d_target, d_total = pull(factors)
        others = _no_infinity(others)[:, None]

        def second(start: Array, size: int, state: Any) -> Any:
            s, dw, dbias = state
            block = lax.dynamic_slice_in_dim(s, start, size, axis=1)
            ds = form.slope(block, d_others[:, None] * jnp.exp(block - others) + d_total[:, None])
            at = own(start, size, labels)
            ds = ds.at[at].set(form.slope(target, d_target + d_total), mode="drop", unique_indices=True)
            if dw is not None:
                dw = _add_at(dw, start, _dot(ds.astype(h.dtype), h, 0, 0))
            if dbias is not None:
                dbias = _add_at(dbias, start, ds.sum(axis=0))
            return lax.dynamic_update_slice_in_dim(s, ds, start, axis=1), dw, dbias

        ds, *sums = each_block(second, (s, *sums))
        # The gradient has taken the logits' place. One long product is faster than the sum of many short ones.
        dh = _dot(ds.astype(h.dtype), vectors, 1, 0) if wanted[0] else None
        return (ds, *sums), (each, dh)

    def zero(shape: tuple[int, ...]) -> Array:
        return vary_alike(jnp.zeros(shape, jnp.float32), *jax.tree.leaves((h, w, bias, labels, factors)))[0]

    sums = (
        zero((rows, words)),
        zero(w.shape) if wanted[1] else None,
        zero(bias.shape) if wanted[2] and bias is not None else None,
    )
    (_, dw, dbias), (each, dh) = lax.scan(chunk, sums, (apart(h), apart(labels), apart(factors)))
    together = lambda x: jnp.moveaxis(x, 0, 1).reshape(chunks * rows, *x.shape[2:])[:n]  # noqa: E731
    return jnp.where(factors == 0, 0.0, together(each)), (None if dh is None else together(dh), dw, dbias)


@_gradients.defjvp
@accepts_numpy
def _(form: LogitsSpec, wanted: tuple[bool, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Second derivatives are those of the other form, which JAX knows to differentiate."""

    def anew(*given: Any) -> Any:
        grads, each = jax.grad(functools.partial(_summed, form), tuple(i for i in range(3) if wanted[i]), has_aux=True)(
            *given
        )
        rest = iter(grads)
        return each, tuple(next(rest).astype(jnp.float32) if wants else None for wants in wanted)

    return _gradients(form, wanted, *primals), jax.jvp(anew, primals, tangents)[1]


def _summed(
    form: LogitsSpec, h: Array, w: Array, bias: Array | None, labels: Array, factors: Array
) -> tuple[Array, Float[Array, " N"]]:
    others, target, total, _ = statistics(form, h, w, bias, labels)
    each = form.losses(others, target, total, w.shape[0])
    each = jnp.where(factors == 0, 0.0, each)
    return (factors * each).sum(), each


def _add_at(table: Array, start: Array, block: Array) -> Array:
    before = lax.dynamic_slice_in_dim(table, start, block.shape[0])
    return lax.dynamic_update_slice_in_dim(table, before + block, start, axis=0)


def _dot_all(a: Array, b: Array) -> Float[Array, ""]:
    return (a * b.astype(jnp.float32)).sum()


# What both share


def _nothing(h: Array, *others: Any) -> Any:
    """The statistics of no logits."""
    zero = _zeros(h, *others)
    return zero - jnp.inf, zero, zero, zero, zero - jnp.inf, zero.astype(jnp.int32)


def _add(form: LogitsSpec, sums: Any, s: Array, labels: Array, start: Array) -> Any:
    """The statistics with a block of logits more."""
    top, rest, target, total, highest, best = sums
    own, others = _apart(s, labels, start)
    top, rest = _add_exp(top, rest, others)
    target = target + jnp.where(own, s, 0.0).sum(axis=1)
    if form.total:
        total = total + s.sum(axis=1)
    if form.best:
        here = s.max(axis=1)
        best = jnp.where(here > highest, start + jnp.argmax(s, axis=1).astype(jnp.int32), best)
        highest = jnp.maximum(highest, here)
    return top, rest, target, total, highest, best


def _finish(sums: Any) -> tuple[Array, Array, Array, Array]:
    top, rest, target, total, _, best = sums
    return _log(top, rest), target, total, best


def _add_exp(top: Array, rest: Array, s: Array) -> tuple[Array, Array]:
    """(the largest, the sum of exp(logit - largest)) with a block of logits more."""
    new = jnp.maximum(top, s.max(axis=1))
    base = _no_infinity(new)
    return new, rest * jnp.exp(top - base) + jnp.exp(s - base[:, None]).sum(axis=1)


def _log(top: Array, rest: Array) -> Array:
    some = rest != 0  # NaN is something
    return jnp.where(some, top + jnp.log(jnp.where(some, rest, 1.0)), -jnp.inf)


def _apart(s: Array, labels: Array, start: Array) -> tuple[Array, Array]:
    """Where a block's logits are the labels' own, and the others'."""
    own = labels[:, None] == start + jnp.arange(s.shape[1], dtype=jnp.int32)[None]
    return own, jnp.where(own, -jnp.inf, s)


def _zeros(h: Array, *others: Any) -> Float[Array, " N"]:
    """A number a token, which in `shard_map` varies over all that one of the arrays does."""
    return vary_alike(jnp.zeros(h.shape[0], jnp.float32), *jax.tree.leaves((h, others)))[0]


def _no_infinity(x: Array) -> Array:
    return jnp.where(jnp.isneginf(x), 0.0, x)


@jax.custom_jvp
def product(h: Array, w: Array) -> Float[Array, "N c"]:
    """h w^T, float32. Its tangents are products of h's dtype, and so are what transposes them: float32 ones would take the slow
    units of a GPU."""
    return _dot(h, w.astype(h.dtype), 1, 1)


@product.defjvp
@accepts_numpy
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (h, w), (dh, dw) = primals, tangents
    along = [_dot(a, b.astype(h.dtype), 1, 1, h.dtype) for a, b in ((dh, w), (h, dw))]
    return product(h, w), (along[0] + along[1]).astype(jnp.float32)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int, dtype: Any = jnp.float32) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=dtype)
