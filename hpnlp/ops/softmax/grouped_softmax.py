"""The loss of tokens whose label's group of words is all that they are compared with.

Tokens are sorted by group, and a group's tokens are taken in blocks, so that a block is one product with words of one group:
how many tokens a group has differs from batch to batch, and shapes may not. A loop runs over the blocks that there are, and
within a block over windows of the group's words; both counts are known at run time only, so the work is that of the groups
that occur. Derived from as it stands, each turn of such a loop would make a gradient of the whole table; here the derivative
is a second such loop, which adds a window's gradient in its place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.linear import widened
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class _Tile:
    """How many tokens meet how many words at a time."""

    tokens: int
    words: int


class _Plan(NamedTuple):
    """Which tokens a block has.

    order [N + a block]: tokens by group. rank [N]: where a token stands in it. first [G + 1]: where a group's tokens begin.
    ends [G]: how many blocks there are up to a group's last. shift [G]: added to a block's number times its tokens, where
    the block begins. starts [G + 1]: a group's first word.
    """

    order: Array
    rank: Array
    first: Array
    ends: Array
    shift: Array
    starts: Array


@array_op("N", h="N")
def grouped_nll(
    h: Float[Array, "N D"],
    w: Float[Array, "R d"],
    groups: Int[Array, " N"],
    targets: Int[Array, " N"],
    starts: Int[Array, " G1"] | Int[np.ndarray, " G1"],
    *,
    bias: Float[Array, " R"] | None = None,
    projection: Float[Array, "d D"] | None = None,
    block: int,
    width: int,
) -> Float[Array, " N"]:
    """-log softmax of each token over the words of its group, at its target; float32, in nats.

    w: vectors of words; group g has rows starts[g] to starts[g + 1]. d is D where there is no projection.
    groups: the group of each token; one outside 0 to G - 1 is none, and the token's loss is 0.
    targets: the row of each token's word, within its group where it has one.
    bias: added to the logits. projection: applied to the tokens that have a group, before the product with the words.
    block, width: tokens and words of one product.

    Gradients reach h, w, bias and projection by reverse mode, once; forward mode over reverse mode gives products with the
    Hessian. `vmap` runs one example after another, each with a gradient of the table: flatten the tokens instead.
    Raises nothing: callers have checked their arguments.
    Cost: of each group that occurs, its tokens, rounded up to blocks, times its words, rounded up to windows, times 8 d
    operations with the gradients. Memory beside inputs and gradients: a few tiles, a copy of the gradient of h, a float32 one
    of w's where w is not float32; XLA:CPU also makes a float32 copy of a bfloat16 w. A float16 h makes float32 products, and
    copies: see `widened`.
    """
    if not h.shape[0]:
        return jnp.zeros(0, jnp.float32)
    h, w, projection = widened(h, w, projection)
    given = {"h": h, "w": w, "bias": bias, "projection": projection}
    numbers = {"groups": groups, "targets": targets, "starts": jnp.asarray(starts)}
    leaves, tree = jax.tree.flatten((given, jax.tree.map(lambda x: x.astype(jnp.int32), numbers)))
    given, numbers = jax.tree.unflatten(tree, vary_alike(*leaves))
    tile = _Tile(min(block, h.shape[0]), min(width, w.shape[0]))
    plan = _plan(tile, numbers["groups"], numbers["starts"])
    return _nll(tile, given, numbers["targets"], plan)


@accepts_numpy
def known_labels(labels: Int[Array, " N"], tokens: int, vocab: int) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """int32 labels, 0 where one is no word, and where they are words. Raises InputError where a wrong one is known."""
    if labels.shape != (tokens,) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels are {labels.dtype} {labels.shape}: expected integers {(tokens,)}, each token's word")
    known = (labels >= 0) & (labels < vocab)
    if not isinstance(labels, Tracer):
        numbers = np.asarray(labels)
        wrong = numbers[(numbers < 0) | (numbers >= vocab)]
        if wrong.size:
            raise InputError(f"a label is {wrong[0]}: expected 0 to {vocab - 1}; mask tokens that have none")
    return jnp.where(known, labels, 0).astype(jnp.int32), known


@array_op()
def best_of(
    best: Float[Array, " k"], ids: Int[Array, " k"], others: Float[Array, " m"], their_ids: Int[Array, " m"]
) -> tuple[Float[Array, " k"], Int[Array, " k"]]:
    """The k highest of both, from the highest on, with their ids."""
    values, at = lax.top_k(jnp.concatenate([best, others]), best.shape[0])
    return values, jnp.concatenate([ids, their_ids.astype(ids.dtype)])[at]


def check_k(k: int, vocab: int) -> None:
    if not 1 <= k <= vocab:
        raise InputError(f"k {k}: expected 1 to {vocab}, the number of words")


def _plan(tile: _Tile, groups: Array, starts: Array) -> _Plan:
    count, n = starts.shape[0] - 1, groups.shape[0]
    groups = jnp.where((groups >= 0) & (groups < count), groups, count)
    order = jnp.argsort(groups).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
    first = jnp.searchsorted(groups[order], jnp.arange(count + 1, dtype=jnp.int32)).astype(jnp.int32)
    blocks = (jnp.diff(first) + tile.tokens - 1) // tile.tokens
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    shift = first[:-1] - tile.tokens * (ends - blocks)
    return _Plan(jnp.pad(order, (0, tile.tokens)), rank, first, ends, shift, starts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(tile: _Tile, given: dict[str, Any], targets: Array, plan: _Plan) -> Array:
    return _nll_forward(tile, given, targets, plan)[0]


@accepts_numpy
def _nll_forward(tile: _Tile, given: dict[str, Any], targets: Array, plan: _Plan) -> tuple[Array, Any]:
    losses, lses = sequential_vmap(functools.partial(_losses, tile))(given, targets, plan)
    own = plan.rank < plan.first[-1]
    return jnp.where(own, losses[plan.rank], 0.0), (given, targets, plan, losses, lses)


def _nll_backward(tile: _Tile, saved: Any, cotangent: Array) -> tuple[Any, None, None]:
    return sequential_vmap(functools.partial(_gradients, tile))(*saved, cotangent), None, None


_nll.defvjp(_nll_forward, _nll_backward)


def _losses(tile: _Tile, given: dict[str, Any], targets: Array, plan: _Plan) -> tuple[Array, Array]:
    """The tokens' losses and log-sum-exps, in the plan's order. What a block writes beyond its group, later ones write over."""

    def block(number: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        group, at, tokens, _ = _tokens(tile, plan, number)
        x = _project(given, given["h"][tokens])

        def window(number: Array, sums: Any) -> Any:
            top, rest, target = sums
            _, s, own = _logits(tile, given, plan, group, number, x, targets[tokens])
            others = jnp.where(own, -jnp.inf, s)
            new = jnp.maximum(top, others.max(axis=1))
            base = jnp.where(jnp.isneginf(new), 0.0, new)
            rest = rest * jnp.exp(top - base) + jnp.exp(others - base[:, None]).sum(axis=1)
            return new, rest, target + jnp.where(own, s, 0.0).sum(axis=1)

        zero = _zeros(given, tile.tokens)
        top, rest, target = lax.fori_loop(
            jnp.int32(0), _windows(tile, plan, group), window, (zero - jnp.inf, zero, zero)
        )
        some = rest != 0  # NaN is something
        others = jnp.where(some, top + jnp.log(jnp.where(some, rest, 1.0)), -jnp.inf)
        # The label apart from the others: lse - target would be 0 for a confident token.
        found = jax.nn.softplus(others - target), jnp.logaddexp(others, target)
        return tuple(lax.dynamic_update_slice(x, y, (at,)) for x, y in zip(out, found, strict=True))  # pyright: ignore

    empty = _zeros(given, plan.order.shape[0])
    return lax.fori_loop(jnp.int32(0), plan.ends[-1], block, (empty, empty))


def _gradients(
    tile: _Tile, given: dict[str, Any], targets: Array, plan: _Plan, losses: Array, lses: Array, cotangent: Array
) -> dict[str, Any]:
    h, projection = given["h"], given["projection"]

    def block(number: Array, carry: tuple[Array, dict[str, Any]]) -> tuple[Array, dict[str, Any]]:
        dh, sums = carry
        group, at, tokens, live = _tokens(tile, plan, number)
        tokens_h = jnp.where(live[:, None], h[tokens], jnp.zeros((), h.dtype))
        x = _project(given, tokens_h)
        loss, lse = (lax.dynamic_slice(x, (at,), (tile.tokens,))[:, None] for x in (losses, lses))

        def window(number: Array, carry: tuple[Array, dict[str, Any]]) -> tuple[Array, dict[str, Any]]:
            dx, sums = carry
            place, s, own = _logits(tile, given, plan, group, number, x, targets[tokens])
            ds = jnp.where(own, jnp.expm1(-loss), jnp.exp(s - lse)) * cotangent[tokens][:, None]
            ds = jnp.where(live[:, None], ds, 0.0)
            narrow = ds.astype(h.dtype)
            sums = sums | {"w": _add(sums["w"], place, _dot(narrow, x, 0, 0))}
            if given["bias"] is not None:
                sums = sums | {"bias": _add(sums["bias"], place, ds.sum(axis=0))}
            return dx + _dot(narrow, _slice(tile, given["w"], place).astype(h.dtype), 1, 0), sums

        dx, sums = lax.fori_loop(jnp.int32(0), _windows(tile, plan, group), window, (_zeros(given, *x.shape), sums))
        if projection is not None:
            narrow = dx.astype(h.dtype)
            sums = sums | {"projection": sums["projection"] + _dot(narrow, tokens_h, 0, 0)}
            dx = _dot(narrow, projection.astype(h.dtype), 1, 0)
        return lax.dynamic_update_slice(dh, dx.astype(h.dtype), (at, jnp.int32(0))), sums

    sums = {name: None if x is None else _zeros(given, *x.shape) for name, x in given.items() if name != "h"}
    dh = _zeros(given, plan.order.shape[0], h.shape[1]).astype(h.dtype)
    dh, sums = lax.fori_loop(jnp.int32(0), plan.ends[-1], block, (dh, sums))
    return {"h": dh[plan.rank]} | jax.tree.map(
        lambda dx, x: dx.astype(x.dtype), sums, {name: given[name] for name in sums}
    )


def _tokens(tile: _Tile, plan: _Plan, number: Array) -> tuple[Array, Array, Array, Array]:
    """Of a block: its group, where it begins, its tokens, and which of them are the group's."""
    group = jnp.sum(plan.ends <= number, dtype=jnp.int32)
    at = plan.shift[group] + number * tile.tokens
    live = at + jnp.arange(tile.tokens, dtype=jnp.int32) < plan.first[group + 1]
    return group, at, lax.dynamic_slice(plan.order, (at,), (tile.tokens,)), live


def _windows(tile: _Tile, plan: _Plan, group: Array) -> Array:
    return (plan.starts[group + 1] - plan.starts[group] + tile.words - 1) // tile.words


def _logits(
    tile: _Tile, given: dict[str, Any], plan: _Plan, group: Array, number: Array, x: Array, targets: Array
) -> tuple[Array, Array, Array]:
    """Of a window: the first row that it takes, the logits, -inf where a row is not its own, and where the targets are."""
    w, bias = given["w"], given["bias"]
    begin = plan.starts[group] + number * tile.words
    place = jnp.minimum(begin, w.shape[0] - tile.words)  # as a slice that would pass the end is moved
    rows = place + jnp.arange(tile.words, dtype=jnp.int32)
    s = _dot(x, _slice(tile, w, place).astype(x.dtype), 1, 1)
    if bias is not None:
        s = s + _slice(tile, bias, place).astype(jnp.float32)[None]
    here = ((rows >= begin) & (rows < plan.starts[group + 1]))[None]
    return place, jnp.where(here, s, -jnp.inf), here & (rows[None] == targets[:, None])


def _project(given: dict[str, Any], h: Array) -> Array:
    projection = given["projection"]
    return h if projection is None else _dot(h, projection.astype(h.dtype), 1, 1).astype(h.dtype)


def _zeros(given: dict[str, Any], *shape: int) -> Array:
    """float32 zeros, which in `shard_map` vary over all that the operands do."""
    return vary_alike(jnp.zeros(shape, jnp.float32), given["h"])[0]


def _slice(tile: _Tile, x: Array, place: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, place, tile.words)


def _add(total: Array, place: Array, part: Array) -> Array:
    part = lax.dynamic_slice_in_dim(total, place, part.shape[0]) + part
    return lax.dynamic_update_slice_in_dim(total, part, place, 0)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)
