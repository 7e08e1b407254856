"""Softmax cross-entropy from blocks of logits: all tokens by some words, or some tokens by all words.

Three numbers a token are all that a loss needs of its logits: the log-sum-exp of the other words', the label's own, and,
where labels are smoothed, the sum of all. The label stands apart from the others because softmax(logits)[label] - 1 is 0 in
float32 for a confident token; as -sigmoid(others - label) it is right to the last digits.

`statistics` makes the numbers in one pass over blocks of the vocabulary. Its derivative is one more such pass, linear in the
tangents, in which the logits of a block are made anew: transposing it (reverse mode) and differentiating it again are left to
JAX, and neither keeps a block. That is four products of tokens, words and features for a loss with its gradients.

`weighted_sum` does with three, because the cotangent of a sum is one number, by which gradients may be multiplied once they
are made: a chunk of tokens makes its logits, and from them its part of every gradient, before the next one begins.
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

from hpnlp.ops.manual import vary_alike


@dataclasses.dataclass(frozen=True)
class Form:
    """How logits come from products, losses from logits, and how much is made at a time.

    block: words of a block. rows: tokens of a chunk, 0 where all tokens go together. best: whether the best word is asked for,
    total: the sum of the logits.
    """

    block: int
    rows: int = 0
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

    def losses(self, others: Array, target: Array, total: Array, words: int) -> Float[Array, " N"]:
        """Each token's loss, of the statistics of its logits."""
        each = jax.nn.softplus(others - target)
        if self.label_smoothing == 0 == self.z_loss:
            return each
        lse = jnp.logaddexp(others, target)
        if self.label_smoothing != 0:
            each = (1.0 - self.label_smoothing) * each + self.label_smoothing * (lse - total / words)
        return each + self.z_loss * lse**2


def reference(form: Form, h: Array, w: Array, bias: Array | None, labels: Array) -> tuple[Array, ...]:
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
def statistics(form: Form, h: Array, w: Array, bias: Array | None, labels: Array) -> tuple[Array, ...]:
    """Of each token: the log-sum-exp of all logits but the label's, the label's (0 where it is no word), the sum of all, and
    the first word with the largest; the last two only where the form asks for them."""

    def add(sums: Any, start: Array, w: Array, bias: Array | None) -> Any:
        return _add(form, sums, form.logits(h, w, bias), labels, start)

    return _finish(_over_blocks(form, add, _nothing(h, w, bias, labels), w, bias))


@statistics.defjvp
def _(form: Form, primals: Any, tangents: Any) -> tuple[Any, Any]:
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


def _over_blocks(form: Form, body: Callable[..., Any], sums: Any, *tables: Any) -> Any:
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
    form: Form, h: Array, w: Array, bias: Array | None, labels: Array, factors: Float[Array, " N"]
) -> Float[Array, ""]:
    """The sum of factors * losses, whose gradients are made along with it. Labels are words; factors of 0 have no gradient."""
    return _summed(form, h, w, bias, labels, factors)[0]


@functools.partial(weighted_sum.defjvp, symbolic_zeros=True)
def _(form: Form, primals: Any, tangents: Any) -> tuple[Array, Array]:
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
    form: Form, wanted: tuple[bool, ...], h: Array, w: Array, bias: Array | None, labels: Array, factors: Array
) -> tuple[Array, tuple[Any, ...]]:
    """Each token's loss, 0 where its factor is, and the gradients of their weighted sum, float32.

    wanted: of which of h, w and bias.
    """
    n, words = h.shape[0], w.shape[0]
    chunks, blocks = max(-(-n // form.rows), 1), -(-words // form.block)
    rows = -(-n // chunks)

    def apart(x: Array) -> Array:
        """Token i goes to chunk i modulo their number: over devices that share the tokens, every chunk does."""
        padded = jnp.pad(x, [(0, chunks * rows - n), *[(0, 0)] * (x.ndim - 1)])
        return jnp.moveaxis(padded.reshape(rows, chunks, *x.shape[1:]), 1, 0)

    def slices(i: Array) -> tuple[Array, Array, Any]:
        """First word, vectors and biases of a block. The last one reaches back where blocks do not divide the words."""
        start = jnp.minimum(i * form.block, words - form.block)
        take = lambda x: lax.dynamic_slice_in_dim(x, start, form.block)  # noqa: E731
        return start, take(w), None if bias is None else take(bias)

    def fresh(i: Array, start: Array) -> Array | None:
        """Which words of a block were in none before."""
        if words % form.block == 0:
            return None
        return (start + jnp.arange(form.block, dtype=jnp.int32) >= i * form.block)[None]

    def chunk(sums: Any, x: Any) -> Any:
        h, labels, factors = x

        def first(stats: Any, i: Array) -> tuple[Any, Array]:
            start, vectors, biases = slices(i)
            raw = product(h, vectors)
            raw = raw if biases is None else raw + biases.astype(jnp.float32)[None]
            return _add(form, stats, form.shape(raw), labels, start, fresh(i, start)), raw

        numbers = jnp.arange(blocks, dtype=jnp.int32)
        stats, raws = lax.scan(first, _nothing(h, w, bias, labels, factors), numbers)
        others, target, total, _ = _finish(stats)
        each, pull = jax.vjp(functools.partial(form.losses, words=words), others, target, total)
        d_others, d_target, d_total = pull(factors)
        others = _no_infinity(others)

        def second(i: Array, sums: Any) -> Any:
            dh, dw, dbias = sums
            start, vectors, _ = slices(i)
            s, pull = jax.vjp(form.shape, lax.dynamic_index_in_dim(raws, i, keepdims=False))
            own, rest = _apart(s, labels, start)
            ds = jnp.where(own, d_target[:, None], d_others[:, None] * jnp.exp(rest - others[:, None]))
            if form.total:
                ds = ds + d_total[:, None]
            new = fresh(i, start)
            ds = pull(ds if new is None else jnp.where(new, ds, 0.0))[0]
            if wanted[2]:
                dbias = _add_at(dbias, start, ds.sum(axis=0))
            ds = ds.astype(h.dtype)
            if wanted[0]:
                dh = dh + _dot(ds, vectors.astype(h.dtype), 1, 0)
            if wanted[1]:
                dw = _add_at(dw, start, _dot(ds, h, 0, 0))
            return dh, dw, dbias

        dh = zero(h) if wanted[0] else None
        dh, *sums = lax.fori_loop(0, blocks, second, (dh, *sums))
        return tuple(sums), (each, dh)

    def zero(x: Array) -> Array:
        return vary_alike(jnp.zeros(x.shape, jnp.float32), *jax.tree.leaves((h, w, bias, labels, factors)))[0]

    sums = zero(w) if wanted[1] else None, zero(bias) if bias is not None and wanted[2] else None
    (dw, dbias), (each, dh) = lax.scan(chunk, sums, (apart(h), apart(labels), apart(factors)))
    together = lambda x: jnp.moveaxis(x, 0, 1).reshape(chunks * rows, *x.shape[2:])[:n]  # noqa: E731
    return jnp.where(factors == 0, 0.0, together(each)), (None if dh is None else together(dh), dw, dbias)


@_gradients.defjvp
def _(form: Form, wanted: tuple[bool, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Second derivatives are those of the other form, which JAX knows to differentiate."""

    def anew(*given: Any) -> Any:
        grads, each = jax.grad(functools.partial(_summed, form), tuple(i for i in range(3) if wanted[i]), has_aux=True)(
            *given
        )
        rest = iter(grads)
        return each, tuple(next(rest).astype(jnp.float32) if wants else None for wants in wanted)

    return _gradients(form, wanted, *primals), jax.jvp(anew, primals, tangents)[1]


def _summed(
    form: Form, h: Array, w: Array, bias: Array | None, labels: Array, factors: Array
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


def _add(form: Form, sums: Any, s: Array, labels: Array, start: Array, fresh: Array | None = None) -> Any:
    """The statistics with a block of logits more, of which only the fresh words count."""
    top, rest, target, total, highest, best = sums
    own, others = _apart(s, labels, start)
    if fresh is not None:
        own, others = own & fresh, jnp.where(fresh, others, -jnp.inf)
    new = jnp.maximum(top, others.max(axis=1))
    base = _no_infinity(new)
    rest = rest * jnp.exp(top - base) + jnp.exp(others - base[:, None]).sum(axis=1)
    target = target + jnp.where(own, s, 0.0).sum(axis=1)
    if form.total:
        total = total + (s if fresh is None else jnp.where(fresh, s, 0.0)).sum(axis=1)
    if form.best:
        here = s.max(axis=1)
        best = jnp.where(here > highest, start + jnp.argmax(s, axis=1).astype(jnp.int32), best)
        highest = jnp.maximum(highest, here)
    return new, rest, target, total, highest, best


def _finish(sums: Any) -> tuple[Array, Array, Array, Array]:
    top, rest, target, total, _, best = sums
    some = rest != 0  # NaN is something
    return jnp.where(some, top + jnp.log(jnp.where(some, rest, 1.0)), -jnp.inf), target, total, best


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
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (h, w), (dh, dw) = primals, tangents
    along = _dot(dh, w.astype(h.dtype), 1, 1, h.dtype) + _dot(h, dw.astype(h.dtype), 1, 1, h.dtype)
    return product(h, w), along.astype(jnp.float32)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int, dtype: Any = jnp.float32) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=dtype)
