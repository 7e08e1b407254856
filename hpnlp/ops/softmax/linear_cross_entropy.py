"""Exact softmax cross-entropy over a vocabulary, without an array of tokens x vocabulary.

Three numbers a token are all that a loss needs of its logits: the log-sum-exp of the other words', the label's own, and,
where labels are smoothed, the sum of all. `_statistics` makes them in one pass over blocks of the vocabulary. Its derivative
is one more such pass, linear in the tangents, in which the logits of a block are made anew: transposing it (reverse mode) and
differentiating it again are left to JAX, and neither keeps a block.

The label stands apart from the others because softmax(logits)[label] - 1 is 0 in float32 for a confident token; as
-sigmoid(others - label) it is right to the last digits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import zero_from_primal
from jaxtyping import Array, Float, Int

from hpnlp.ops.manual import vary_alike
from hpnlp.types import InputError

IMPLS = ("auto", "vocabulary", "reference")
REDUCTIONS = ("mean", "sum", "none")
# How many logits are made at a time.
LOGITS = 1 << 22


@dataclasses.dataclass(frozen=True)
class _Form:
    """How many words a block has, how logits come from products, and whether their sum and the best word are asked for."""

    block: int
    soft_cap: float | None = None
    temperature: float = 1.0
    total: bool = False
    best: bool = False

    def logits(self, h: Array, w: Array, bias: Array | None) -> Float[Array, "N c"]:
        s = _product(h, w)
        s = s if bias is None else s + bias.astype(jnp.float32)[None]
        if self.soft_cap is not None:
            s = self.soft_cap * jnp.tanh(s / self.soft_cap)
        return s if self.temperature == 1.0 else s / self.temperature


def linear_cross_entropy(
    h: Float[Array, "N D"],
    w: Float[Array, "V D"],
    labels: Int[Array, " N"],
    *,
    bias: Float[Array, " V"] | None = None,
    weights: Float[Array, " N"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
    impl: str = "auto",
    block_size: int | None = None,
    return_stats: bool = False,
) -> Any:
    """Cross-entropy of softmax(soft_cap(h w^T + bias) / temperature) with the labels, in nats, float32.

    bias: added to the logits. weights: a factor of each token's loss.
    ignore_index: tokens with this label, and tokens of weight 0, count for nothing, NaN or not.
    label_smoothing: the share of the target that is spread evenly over all words (Szegedy et al. 2016, sec. 7).
    z_loss: adds z_loss * lse^2 to each token's loss (Chowdhery et al. 2022, "PaLM", sec. 5).
    soft_cap: logits become soft_cap * tanh(logit / soft_cap) (Gemma Team 2024, "Gemma 2", sec. 2); before the temperature.
    reduction: "mean" over the weights, 0 where there are none, "sum", or "none", [N].
    impl: "vocabulary" goes through blocks of words, and makes their logits again for the gradient; "reference" makes all
      logits. "auto" is "vocabulary".
    block_size: words of a block; None takes a divisor of V, where there is one, that makes some four million logits.
    return_stats: returns (loss, lse [N], argmax [N]); the lse has a gradient.

    Gradients reach h, w, bias and weights, by `grad`, `jvp` and second derivatives; products accumulate in float32.
    Raises InputError on shapes that do not fit, on an empty vocabulary, and on labels out of range where they are known
    while tracing; elsewhere such a token's loss is NaN.
    Cost: 8 N V D operations with the gradients, of which 2 are for the logits again; memory beside inputs and gradients two
    blocks of logits, and a copy of w and of its gradient where no divisor of V is near the block's size.
    Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", algorithms 1 to 3.
    """
    _check(
        h, w, labels, bias, weights, ignore_index, label_smoothing, soft_cap, temperature, reduction, impl, block_size
    )
    n, vocab = h.shape[0], w.shape[0]
    factors = jnp.ones(n, jnp.float32) if weights is None else weights.astype(jnp.float32)
    factors = jnp.where(labels == ignore_index, 0.0, factors)
    silent = factors == 0
    h = jnp.where(silent[:, None], jnp.zeros((), h.dtype), h)
    labels = jnp.where(silent, 0, labels.astype(jnp.int32))
    block = vocab if impl == "reference" else block_size or _block(n, vocab)
    form = _Form(min(block, vocab), soft_cap, temperature, label_smoothing != 0, return_stats)
    others, target, total, best = (_reference if impl == "reference" else _statistics)(form, h, w, bias, labels)
    target = jnp.where((labels >= 0) & (labels < vocab), target, jnp.nan)

    lse = jnp.logaddexp(others, target)
    each = jax.nn.softplus(others - target)
    if label_smoothing != 0:
        each = (1.0 - label_smoothing) * each + label_smoothing * (lse - total / vocab)
    if z_loss != 0:
        each = each + z_loss * lse**2
    each = jnp.where(silent, 0.0, factors * each)
    loss = each if reduction == "none" else each.sum()
    if reduction == "mean":
        weight = factors.sum()
        loss = loss / jnp.where(weight == 0, 1.0, weight)
    return (loss, lse, best) if return_stats else loss


def partial_cross_entropy(
    h: Float[Array, "N D"],
    w_slice: Float[Array, "v D"],
    labels: Int[Array, " N"],
    start: int | Int[Array, ""],
    *,
    bias: Float[Array, " v"] | None = None,
    soft_cap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """(lse, target_logit, logit_sum) of the words from `start` on whose vectors are `w_slice`; float32.

    Over slices, lse merges by logaddexp, the others by sums: target_logit is 0 where another slice has the label. The loss
    is lse - target_logit; with labels smoothed by e, (1 - e) times that and e * (lse - logit_sum / V). Arguments,
    derivatives and cost as `linear_cross_entropy`, which masks and weighs tokens, as this does not.
    """
    n, words = h.shape[0], w_slice.shape[0]
    _check(h, w_slice, None, bias, None, -1, 0.0, soft_cap, temperature, "none", "auto", None)
    labels = labels.astype(jnp.int32) - start
    form = _Form(_block(n, words), soft_cap, temperature, total=True)
    others, target, total, _ = _statistics(form, h, w_slice, bias, labels)
    own = (labels >= 0) & (labels < words)
    return jnp.logaddexp(others, jnp.where(own, target, -jnp.inf)), target, total


def _block(tokens: int, vocab: int) -> int:
    """Words of a block: near LOGITS / tokens, and a divisor of the vocabulary if there is one: slicing it costs a copy."""
    wanted = min(max(LOGITS // max(tokens, 1), 128), vocab)
    divisors = [size for size in range(max(wanted // 2, 1), min(2 * wanted, vocab) + 1) if vocab % size == 0]
    return min(divisors, key=lambda size: abs(size - wanted), default=wanted)


def _over_blocks(form: _Form, body: Callable[..., Any], sums: Any, *tables: Any) -> Any:
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


def _apart(s: Array, labels: Array, start: Array) -> tuple[Array, Array]:
    """Where a block's logits are the labels' own, and the others'."""
    own = labels[:, None] == start + jnp.arange(s.shape[1], dtype=jnp.int32)[None]
    return own, jnp.where(own, -jnp.inf, s)


def _zeros(h: Array, *others: Any) -> Float[Array, " N"]:
    """A number a token, which in `shard_map` varies over all that one of the arrays does."""
    return vary_alike(jnp.zeros(h.shape[0], jnp.float32), *jax.tree.leaves((h, others)))[0]


def _no_infinity(x: Array) -> Array:
    return jnp.where(jnp.isneginf(x), 0.0, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _statistics(form: _Form, h: Array, w: Array, bias: Array | None, labels: Array) -> tuple[Array, ...]:
    """Of each token: the log-sum-exp of all logits but the label's, the label's (0 where it is no word), the sum of all, and
    the first word with the largest; the last two only where the form asks for them."""

    def add(sums: Any, start: Array, w: Array, bias: Array | None) -> Any:
        top, rest, target, total, highest, best = sums
        s = form.logits(h, w, bias)
        own, others = _apart(s, labels, start)
        new = jnp.maximum(top, others.max(axis=1))
        base = _no_infinity(new)
        rest = rest * jnp.exp(top - base) + jnp.exp(others - base[:, None]).sum(axis=1)
        target = target + jnp.where(own, s, 0.0).sum(axis=1)
        if form.total:
            total = total + s.sum(axis=1)
        if form.best:
            here = s.max(axis=1)
            best = jnp.where(here > highest, start + jnp.argmax(s, axis=1).astype(jnp.int32), best)
            highest = jnp.maximum(highest, here)
        return new, rest, target, total, highest, best

    zero = _zeros(h, w, bias, labels)
    sums = (zero - jnp.inf, zero, zero, zero, zero - jnp.inf, zero.astype(jnp.int32))
    top, rest, target, total, _, best = _over_blocks(form, add, sums, w, bias)
    some = rest != 0  # NaN is something
    return jnp.where(some, top + jnp.log(jnp.where(some, rest, 1.0)), -jnp.inf), target, total, best


@_statistics.defjvp
def _(form: _Form, primals: Any, tangents: Any) -> tuple[Any, Any]:
    h, w, bias, labels = primals
    dh, dw, dbias, _ = tangents
    out = _statistics(form, h, w, bias, labels)
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


@jax.custom_jvp
def _product(h: Array, w: Array) -> Float[Array, "N c"]:
    """h w^T, float32. Its tangents are products of h's dtype, and so are what transposes them: float32 ones would take the slow
    units of a GPU."""
    return _dot(h, w.astype(h.dtype), jnp.float32)


@_product.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (h, w), (dh, dw) = primals, tangents
    along = _dot(dh, w.astype(h.dtype), h.dtype) + _dot(h, dw.astype(h.dtype), h.dtype)
    return _product(h, w), along.astype(jnp.float32)


def _dot(h: Array, w: Array, dtype: Any) -> Array:
    return lax.dot_general(h, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _reference(form: _Form, h: Array, w: Array, bias: Array | None, labels: Array) -> tuple[Array, ...]:
    """`_statistics` from all logits."""
    s = h.astype(jnp.float32) @ w.astype(h.dtype).astype(jnp.float32).T
    s = s if bias is None else s + bias.astype(jnp.float32)[None]
    s = s if form.soft_cap is None else form.soft_cap * jnp.tanh(s / form.soft_cap)
    s = s / form.temperature
    own = jax.nn.one_hot(labels, w.shape[0], dtype=jnp.bool_)
    others = jax.nn.logsumexp(s, axis=1, where=~own)
    return others, jnp.where(own, s, 0.0).sum(axis=1), s.sum(axis=1), jnp.argmax(s, axis=1).astype(jnp.int32)


def _check(
    h: Any,
    w: Any,
    labels: Any,
    bias: Any,
    weights: Any,
    ignore_index: int,
    label_smoothing: float,
    soft_cap: float | None,
    temperature: float,
    reduction: str,
    impl: str,
    block_size: int | None,
) -> None:
    if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1]:
        raise InputError(f"h {h.shape}, w {w.shape}: expected [N, D] and [V, D]; flatten tokens to one axis")
    n, vocab = h.shape[0], w.shape[0]
    if not vocab:
        raise InputError(f"w {w.shape}: the vocabulary is empty; expected at least one word")
    shapes = {"labels": (labels, n), "weights": (weights, n), "bias": (bias, vocab)}
    for name, (array, size) in shapes.items():
        if array is not None and array.shape != (size,):
            raise InputError(f"{name} has shape {array.shape}: expected {(size,)}")
    if labels is not None and not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels are {labels.dtype}: expected integers, the number of each token's word")
    if labels is not None and not isinstance(labels, Tracer):
        known = np.asarray(labels)
        wrong = known[(known != ignore_index) & ((known < 0) | (known >= vocab))]
        weigh = None if weights is None or isinstance(weights, Tracer) else np.asarray(weights)
        if wrong.size and (weights is None or weigh is not None and np.isin(wrong, known[weigh != 0]).any()):
            raise InputError(f"a label is {wrong[0]}: expected 0 to {vocab - 1}, or ignore_index={ignore_index}")
    if reduction not in REDUCTIONS:
        raise InputError(f"reduction {reduction!r}: expected one of {', '.join(REDUCTIONS)}")
    if impl not in IMPLS:
        raise InputError(f"impl {impl!r}: expected one of {', '.join(IMPLS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InputError(f"label_smoothing {label_smoothing}: expected 0 to 1")
    if soft_cap is not None and not soft_cap > 0:
        raise InputError(f"soft_cap {soft_cap}: expected a number over 0, or None for no cap")
    if not temperature > 0:
        raise InputError(f"temperature {temperature}: expected a number over 0")
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size {block_size}: expected at least 1 word")
