"""Beam search: the most probable continuations of prompts that a limited search finds.

The rules of scores and of the end of the search are those of `transformers.GenerationMixin.generate`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from hpnlp.models.decode import check_decodes, end_ids
from hpnlp.models.decoding.decoding_weights import for_decoding
from hpnlp.models.lm import LM
from hpnlp.models.variables import collections
from hpnlp.nn.attention import Memory
from hpnlp.types import InputError

# Added to the scores of continuations that must not be chosen; finite, so that differences of scores are finite.
EXCLUDED = np.float32(-1e9)
EARLY_STOPPING = (False, True, "never")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams:
    """The best continuations of each prompt, best first.

    Attributes:
      ids: int32 `[B, beams, n]`, ids that follow the prompt, up to the first eos; padded after it.
      scores: float32 `[B, beams]`, the sum of the log-probabilities over the number of ids to the power of the length penalty.
    """

    ids: jax.Array
    scores: jax.Array

    def lists(self, eos_id: int | Sequence[int]) -> list[list[int]]:
        """The best continuation of each prompt.

        Args:
          eos_id: Id or ids that end a continuation.

        Returns:
          The ids of each, without eos and padding.
        """
        ends = end_ids(eos_id)
        best = np.asarray(self.ids)[:, 0].tolist()
        return [list(itertools.takewhile(lambda token: token not in ends, ids)) for ids in best]


@dataclasses.dataclass(frozen=True)
class BeamOptions:
    """Width of a beam search, scores of its continuations, and its end.

    Attributes:
      width: Number of continuations that are extended side by side, W.
      length_penalty: Exponent of the number of ids by which scores are divided; larger numbers prefer longer continuations.
      early_stopping: When the search of a prompt ends. True: when W continuations have ended. False: when no running one,
          with its present score, is better than the worst of those. "never": when none can become better.
    """

    width: int = 4
    length_penalty: float | int = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if not 1 <= self.width <= 1024:
            raise InputError(f"width={self.width}: expected 1 to 1024 beams")
        if not math.isfinite(self.length_penalty):
            raise InputError(
                f"length_penalty={self.length_penalty}: expected a finite number, 0 for sums of log-probabilities"
            )
        if self.early_stopping not in EARLY_STOPPING:
            raise InputError(f"early_stopping={self.early_stopping!r}: expected True, False or 'never'")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """Numbers that a search depends on.

    Attributes:
      eos: int32 `[E]`, ids that end a continuation.
      pad: int32 scalar, id after the end.
      length_penalty: float32 scalar.
      tokens: Largest number of ids of a continuation.
      beams: Number of continuations that are kept, W.
      early_stopping: One of EARLY_STOPPING.
    """

    eos: jax.Array
    pad: jax.Array
    length_penalty: jax.Array
    tokens: int = dataclasses.field(metadata={"static": True})
    beams: int = dataclasses.field(metadata={"static": True})
    early_stopping: bool | str = dataclasses.field(metadata={"static": True})

    def score(self, log_prob: jax.Array, count: jax.Array | int) -> jax.Array:
        """Scores of continuations of `count` ids with these sums of log-probabilities."""
        return log_prob / jnp.asarray(count, jnp.float32) ** self.length_penalty


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Search:
    """State of a search after `count` ids.

    Attributes:
      count: int32 scalar.
      h: `[B W, D]`, hidden states of the last ids.
      caches: Caches of the `B W` running sequences.
      positions: int32 `[B W]`, positions of the next ids.
      ids: int32 `[B, W, n]`, running continuations.
      log_probs: float32 `[B, W]`, their sums of log-probabilities.
      ended: The best continuations that have ended.
      is_ended: bool `[B, W]`, whether `ended` holds a continuation there.
      can_improve: bool `[B, 1]`, whether a running continuation may become better than those that have ended.
      can_continue: bool scalar, whether any continuation has not ended.
    """

    count: jax.Array
    h: jax.Array
    caches: Any
    positions: jax.Array
    ids: jax.Array
    log_probs: jax.Array
    ended: Beams
    is_ended: jax.Array
    can_improve: jax.Array
    can_continue: jax.Array


def beam_search(
    model: LM,
    params: PyTree,
    prompts: Sequence[np.ndarray | Sequence[int]],
    *,
    tokens: int,
    beams: BeamOptions = BeamOptions(),  # noqa: B008  (frozen)
    eos_id: int | Sequence[int],
    pad_id: int = 0,
    memory: Memory | None = None,
) -> Beams:
    """Searches for the most probable continuations of prompts.

    Args:
      model: A model with `prefill` and `extend`, such as an LM or a Decoder.
      params: Parameters of the model.
      prompts: Ids of each prompt, at least one, of any lengths.
      tokens: Largest number of new ids. A continuation that reaches it has ended.
      beams: Width W, scores and end of the search.
      eos_id: Id or ids that end a continuation.
      pad_id: Id after the end.
      memory: Memory of a decoder, one for each prompt, with segment id 1; None for a model without a memory.

    Returns:
      The W best continuations of each prompt that have ended.

    Raises:
      InputError: Invalid arguments.

    Cost: one pass over the prompts, and per new id one pass over W tokens per prompt. One program, which is compiled once for
    each combination of shapes. Keys and values of a prompt and of a memory are computed once per prompt, and all beams read
    them; those of new ids are not copied where a beam is continued (`kv_cache.BeamCache`).
    """
    arrays = [np.asarray(prompt, np.int32) for prompt in prompts]
    eos = end_ids(eos_id)
    check_decodes(model, memory, len(arrays))
    _check(model, arrays, tokens, eos)
    lengths = np.array([len(prompt) for prompt in arrays], np.int32)
    padded = np.full((len(arrays), int(lengths.max())), pad_id, np.int32)
    for row, prompt in zip(padded, arrays, strict=True):
        row[: len(prompt)] = prompt
    rules = Rules(
        jnp.asarray(eos, jnp.int32),
        jnp.int32(pad_id),
        jnp.float32(beams.length_penalty),
        tokens,
        beams.width,
        beams.early_stopping,
    )
    return _search(params, padded, lengths, memory, rules, model=model)


def _check(model: LM, prompts: list[np.ndarray], tokens: int, eos: list[int]) -> None:
    """Raises InputError for invalid arguments of `beam_search`."""
    vocab, c = model.config.vocab, model.config
    if not prompts or any(prompt.ndim != 1 or not len(prompt) for prompt in prompts):
        raise InputError("prompts: expected at least one prompt, and at least one id in each")
    if any(np.any((prompt < 0) | (prompt >= vocab)) for prompt in prompts):
        raise InputError(f"prompts: expected ids of the model's {vocab}")
    if tokens < 1:
        raise InputError(f"tokens={tokens}: expected at least 1")
    longest = max(map(len, prompts)) + tokens - 1  # the last id is not read
    if c.position == "learned" and longest > c.max_len:
        raise InputError(
            f"tokens={tokens}: with the prompts these exceed the model's {c.max_len} learned positions: set tokens to at most "
            f"{c.max_len - longest + tokens}"
        )
    if not eos or any(not 0 <= i < vocab for i in eos):
        raise InputError(f"eos_id={eos}: expected ids of the model's {vocab}")
    if len(eos) >= vocab:
        raise InputError(f"eos_id={eos}: expected fewer ids than the model's {vocab}")
    if not model.is_normalized:
        raise InputError(
            f"model.output={c.output!r} has no probabilities, which a beam search compares: decode greedily"
        )


@functools.partial(jax.jit, static_argnames="model")
def _search(
    params: PyTree, prompts: jax.Array, lengths: jax.Array, memory: Memory | None, rules: Rules, *, model: LM
) -> Beams:
    """`beam_search` of padded prompts."""
    params = for_decoding(params, model.config, len(prompts) * rules.beams)

    def step(search: _Search) -> _Search:
        return _step(model, params, rules, search)

    def goes_on(search: _Search) -> jax.Array:
        may_end = rules.early_stopping is True
        has_place = ~jnp.all(search.is_ended) if may_end else jnp.asarray(True)
        return jnp.any(search.can_improve) & has_place & search.can_continue

    return lax.while_loop(goes_on, step, _start(model, params, rules, prompts, lengths, memory)).ended


def _start(
    model: LM, params: PyTree, rules: Rules, prompts: jax.Array, lengths: jax.Array, memory: Memory | None
) -> _Search:
    """The search after the pass over the prompts."""
    capacity = prompts.shape[1] + rules.tokens
    h, caches = _apply(model, params, prompts, lengths, capacity, memory, method="prefill")
    h, lengths = (jnp.repeat(x, rules.beams, axis=0) for x in (h, lengths))
    caches = jax.tree.map(functools.partial(_for_beams, len(prompts), rules.beams), caches, is_leaf=_has_beams)
    shape = len(prompts), rules.beams
    ids = jnp.full((*shape, rules.tokens), rules.pad, jnp.int32)
    # All beams are equal at first: only the first one may be extended.
    first = jnp.where(jnp.arange(rules.beams) == 0, jnp.float32(0), EXCLUDED)
    return _Search(
        count=jnp.zeros((), jnp.int32),
        h=h,
        caches=caches,
        positions=lengths,
        ids=ids,
        log_probs=jnp.broadcast_to(first[None], shape),
        ended=Beams(ids, jnp.full(shape, EXCLUDED, jnp.float32)),
        is_ended=jnp.zeros(shape, bool),
        can_improve=jnp.ones((shape[0], 1), bool),
        can_continue=jnp.asarray(True),
    )


def _step(model: LM, params: PyTree, rules: Rules, search: _Search) -> _Search:
    """Extends all running continuations by one id."""
    beams, count = rules.beams, search.count
    logits = _apply(model, params, search.h, method="next_logits")
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1).reshape(-1, beams, logits.shape[-1])
    log_probs = log_probs + search.log_probs[:, :, None]
    # So many candidates that W of them continue even if all others end.
    kept = max(2, 1 + len(rules.eos)) * beams
    best, index = lax.top_k(log_probs.reshape(len(log_probs), -1), kept)
    parent, token = (x.astype(jnp.int32) for x in jnp.divmod(index, logits.shape[-1]))
    ids = lax.dynamic_update_slice_in_dim(_take(search.ids, parent), token[:, :, None], count, axis=2)
    ends = jnp.isin(token, rules.eos) | (count + 1 == rules.tokens)

    running, order = lax.top_k(best + _excluded(ends), beams)
    ended, is_ended = _merge(rules, search, Beams(ids, best), ends)
    parent, token = _take(parent, order), _take(token, order)
    caches = jax.tree.map(functools.partial(_reordered, parent), search.caches, is_leaf=_is_reordered)
    h, caches = _apply(model, params, token.reshape(-1, 1), search.positions[:, None], caches, method="extend")
    longest = rules.tokens if rules.early_stopping == "never" else count + 1
    attainable = rules.score(running[:, :1], longest)
    if rules.early_stopping == "never":  # a score falls with the length unless the penalty is positive
        attainable = jnp.where(rules.length_penalty > 0, attainable, rules.score(running[:, :1], count + 1))
    worst = jnp.where(is_ended, ended.scores.min(axis=1, keepdims=True), EXCLUDED)
    return _Search(
        count=count + 1,
        h=h[:, 0],
        caches=caches,
        positions=search.positions + 1,
        ids=_take(ids, order),
        log_probs=running,
        ended=ended,
        is_ended=is_ended,
        can_improve=search.can_improve & jnp.any(attainable > worst, axis=1, keepdims=True),
        can_continue=~jnp.all(ends),
    )


def _merge(rules: Rules, search: _Search, candidates: Beams, ends: jax.Array) -> tuple[Beams, jax.Array]:
    """`(ended, is_ended)` after a step: the best W of those that ended before and of the candidates with `ends` [B, kept]."""
    ends_now = ends & (jnp.arange(ends.shape[1]) < rules.beams)[None]
    scores = rules.score(candidates.scores, search.count + 1)
    if rules.early_stopping is True:
        scores = scores + _excluded(jnp.all(search.is_ended, axis=1, keepdims=True))
    scores = scores + _excluded(~search.can_improve)
    scores = scores + _excluded(~ends_now)
    scores, order = lax.top_k(jnp.concatenate([search.ended.scores, scores], axis=1), rules.beams)
    ids, is_ended = (
        _take(jnp.concatenate(pair, axis=1), order)
        for pair in ((search.ended.ids, candidates.ids), (search.is_ended, ends_now))
    )
    return Beams(ids, scores), is_ended


def _excluded(mask: jax.Array) -> jax.Array:
    """EXCLUDED where the mask is true, 0 elsewhere."""
    return jnp.where(mask, EXCLUDED, jnp.float32(0))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[b, index[b, i], ...]`, `[B, I, ...]`."""
    return jax.vmap(lambda row, i: row[i])(x, index)


@runtime_checkable
class CacheForBeams(Protocol):
    """A cache that repeats itself for the continuations of each sequence."""

    def for_beams(self, beams: int) -> Any: ...


@runtime_checkable
class ReorderedCache(Protocol):
    """A cache that takes its continuations in another order."""

    def reordered(self, order: jax.Array) -> Any: ...


def _has_beams(cache: object) -> bool:
    return isinstance(cache, CacheForBeams)


def _for_beams(batch: int, beams: int, cache: PyTree) -> Any:
    """A cache of `batch` sequences for `beams` continuations of each: by its own method, or an array `[B k, ...]` repeated."""
    if _has_beams(cache):
        return cache.for_beams(beams)
    by_example = cache.reshape(batch, 1, -1, *cache.shape[1:])
    return jnp.repeat(by_example, beams, axis=1).reshape(-1, *cache.shape[1:])


def _is_reordered(cache: object) -> bool:
    return isinstance(cache, ReorderedCache)


def _reordered(order: jax.Array, cache: PyTree) -> Any:
    """A cache whose continuations are taken in the order `[B, W]`: by its own method, or an array `[B W k, ...]` gathered."""
    if _is_reordered(cache):
        return cache.reordered(order)
    by_beam = cache.reshape(*order.shape, -1, *cache.shape[1:])
    return _take(by_beam, order).reshape(cache.shape)


def _apply(model: LM, params: PyTree, *args: Any, method: Any) -> Any:
    return model.apply(collections(params), *args, method=method)
