"""A memory of rare events: keys of unit length with a class each, which are found by their nearest neighbours.

The memory is a value: `update_memory` returns a new one, so that it may be carried through a jitted training step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.embeddings.bags import unit_norm
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.search import exact_search
from hpnlp.types import InputError

EMPTY = -1  # the class of a slot without a key
RULES = ("average", "newest", "circular")
# Below the cosine of any two vectors.
_NONE = -4.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueMemory:
    """Keys of M slots, with a class each, as arrays or as their shapes.

    Attributes:
      keys: [M, D] float32 of length 1; 0 in an empty slot.
      values: [M] int32 classes; EMPTY in an empty slot.
      ages: [M] int32 number of updates since a slot was written or was right; the largest int32 / 2 in an empty slot.
      hits: [M] int32 number of queries whose nearest key it was since a slot was written.
      writes: int32 number of slots written so far.
    """

    keys: Any
    values: Any
    ages: Any
    hits: Any
    writes: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(M, D)."""
        return self.keys.shape[0], self.keys.shape[1]


# An empty slot is older than any other, and stays so with the random number that is added to ages.
_NEVER = 2**30


def empty_memory(slots: int, dim: int) -> KeyValueMemory:
    """A memory without keys.

    Args:
      slots: Number of keys that it will hold, M.
      dim: Features of a key, D.

    Returns:
      The memory.

    Raises:
      InputError: A size is under 1.
    """
    if slots < 1 or dim < 1:
        raise InputError(f"memory of {slots} slots and {dim} features: expected at least 1 of each")
    return KeyValueMemory(
        jnp.zeros((slots, dim), jnp.float32),
        jnp.full((slots,), EMPTY, jnp.int32),
        jnp.full((slots,), _NEVER, jnp.int32),
        jnp.zeros((slots,), jnp.int32),
        jnp.zeros((), jnp.int32),
    )


@array_op("B", q="B")
def memory_lookup(
    memory: KeyValueMemory, q: Float[Array, "B D"], k: int = 1
) -> tuple[Float[Array, "B k"], Int[Array, "B k"], Int[Array, "B k"]]:
    """The nearest keys of queries.

    Args:
      memory: The memory.
      q: [B, D] queries of any length.
      k: Number of keys, at most M.

    Returns:
      `(cosines, classes, slots)`, [B, k] each, nearest first; -inf and EMPTY where the memory holds fewer keys. Cosines have
      gradients by the queries and keys.

    Raises:
      InputError: Shapes do not fit, or k is not 1 to M.

    Cost:
      2 B M D operations (`exact_search`).
    """
    bias = jnp.where(memory.values == EMPTY, -jnp.inf, 0.0)
    cosines, slots = exact_search(unit_norm(q.astype(jnp.float32)), memory.keys, k, bias=bias)
    return cosines, jnp.where(jnp.isneginf(cosines), EMPTY, memory.values[slots]), slots


@array_op("B", q="B")
def memory_loss(
    memory: KeyValueMemory, q: Float[Array, "B D"], labels: Int[Array, " B"], *, margin: int | float = 0.1
) -> Float[Array, " B"]:
    """Margin loss on the nearest keys of the right class and of another: max(0, margin + cos(negative) - cos(positive)).

    The keys have no gradient. The paper takes the positive from the k nearest keys, or any if there is none among them; here k
    is M.

    Args:
      memory: The memory.
      q: [B, D] queries of any length.
      labels: [B] classes.
      margin: At least 0.

    Returns:
      [B] float32; 0 for an example of whose class, or of other classes than it, the memory holds no key.

    Raises:
      InputError: The margin is negative, or shapes do not fit.

    Cost:
      2 B M D operations, and B M cosines.

    References:
      Kaiser et al. 2017, "Learning to remember rare events", section 2.
    """
    if not 0 <= margin < math.inf:
        raise InputError(f"margin {margin}: expected a number of at least 0, such as 0.1")
    _check(memory, q, labels)
    keys = lax.stop_gradient(memory.keys)
    q = unit_norm(q.astype(jnp.float32))
    cosines = lax.dot_general(q, keys, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    is_right = memory.values[None] == labels.astype(jnp.int32)[:, None]
    positive = jnp.where(is_right, cosines, _NONE).max(axis=1)
    negative = jnp.where(is_right | (memory.values == EMPTY)[None], _NONE, cosines).max(axis=1)
    is_compared = (positive > _NONE) & (negative > _NONE)
    return jnp.where(is_compared, jax.nn.relu(margin + negative - positive), 0.0)


@array_op("")
def update_memory(
    memory: KeyValueMemory,
    q: Float[Array, "B D"],
    labels: Int[Array, " B"],
    rng: Array | None = None,
    *,
    rule: str = "average",
    noise: int | float = 0.0,
    mask: Bool[Array, " B"] | None = None,
) -> KeyValueMemory:
    """Writes the examples of a batch.

    An example is right if the class of its nearest key is its label. With rule="average", the key of a slot becomes the unit
    vector of its sum with the queries of all right examples that found it, and its age 0. Every other example is written to a
    slot of its own: the oldest slots (with `noise`, about the oldest), in the order of the batch, empty slots first; a slot
    that was right in this batch counts as new. All other ages grow by 1. All examples look the memory up as it was before the
    batch. With one example this is the rule of the paper; the result does not depend on the order of right examples.

    Args:
      memory: The memory.
      q: [B, D] queries of any length; gradients are stopped. A query with a number that is not finite is not written, since
        its key would be the nearest one of all later queries.
      labels: [B] classes; an example of a negative class is not written.
      rng: Key of the random numbers; needed if noise is over 0.
      rule: "average", as above; "newest", in which the query replaces the key of a right slot (of several, the last one);
        "circular", in which all examples, right or not, are written to the slots in turn.
      noise: A random whole number from 0 to noise M is added to each age when old slots are chosen; infinity chooses at
        random among the slots that are not empty. The paper has a small number.
      mask: [B] examples to write; None for all.

    Returns:
      The new memory.

    Raises:
      InputError: Unknown rule, noise without a key or below 0, more examples than slots, or shapes that do not fit.

    Cost:
      2 B M D operations, and a copy of the memory unless it is donated.

    References:
      Kaiser et al. 2017, "Learning to remember rare events", section 2, eq. for the update.
    """
    _check(memory, q, labels)
    slots, count = memory.shape[0], q.shape[0]
    if rule not in RULES:
        raise InputError(f"rule {rule!r}: expected {', '.join(map(repr, RULES))}")
    if not noise >= 0 or (noise and rng is None):
        raise InputError(f"noise {noise}: expected a number of at least 0, with a random key: pass rng=")
    if count > slots:
        raise InputError(f"{count} examples for {slots} slots: each may need a slot of its own; use more slots")
    q = lax.stop_gradient(q).astype(jnp.float32)
    labels = labels.astype(jnp.int32)
    is_written = jnp.isfinite(q).all(axis=1) & (labels >= 0)
    is_written = is_written if mask is None else is_written & mask
    q = unit_norm(jnp.where(is_written[:, None], q, 0.0))
    _, classes, nearest = memory_lookup(memory, q)
    nearest, has_nearest = nearest[:, 0], is_written & (classes[:, 0] != EMPTY)
    is_right = is_written & (classes[:, 0] == labels) & (rule != "circular")
    hits = memory.hits.at[nearest].add(has_nearest.astype(jnp.int32))
    keys, ages = memory.keys, memory.ages + (memory.values != EMPTY).astype(jnp.int32)
    keys = _refreshed(keys, q, nearest, is_right, rule)
    was_right = jnp.zeros((slots,), bool).at[nearest].max(is_right)
    ages = jnp.where(was_right, 0, ages)
    is_miss = is_written & ~is_right
    order = _circular(memory, count) if rule == "circular" else _oldest(memory, ages, was_right, count, noise, rng)
    # The j-th miss takes the j-th slot; an example without a slot writes beyond the end, which is dropped.
    to = jnp.where(is_miss, order[jnp.where(is_miss, jnp.cumsum(is_miss) - 1, 0)], slots)
    options = {"mode": "drop", "unique_indices": False}
    return KeyValueMemory(
        keys.at[to].set(q, **options),
        memory.values.at[to].set(labels, **options),
        ages.at[to].set(0, **options),
        hits.at[to].set(0, **options),
        memory.writes + is_miss.sum().astype(jnp.int32),
    )


def _refreshed(keys: Array, q: Array, nearest: Array, is_right: Array, rule: str) -> Array:
    """Keys after the updates of the slots that were right."""
    slots = len(keys)
    if rule == "average":
        total = keys.at[jnp.where(is_right, nearest, slots)].add(q, mode="drop")
        changed = jnp.zeros((slots,), bool).at[nearest].max(is_right)
        return jnp.where(changed[:, None], unit_norm(total), keys)
    # A slot takes the last of several queries that found it. A scatter would leave the order open.
    last = jnp.full((slots,), -1, jnp.int32)
    last = last.at[nearest].max(jnp.where(is_right, jnp.arange(len(q), dtype=jnp.int32), -1))
    return jnp.where((last >= 0)[:, None], q[jnp.maximum(last, 0)], keys)


def _circular(memory: KeyValueMemory, count: int) -> Array:
    """The next slots in turn."""
    return (memory.writes + jnp.arange(count, dtype=jnp.int32)) % memory.shape[0]


def _oldest(
    memory: KeyValueMemory, ages: Array, was_right: Array, count: int, noise: float, rng: Array | None
) -> Array:
    """Slots in the order in which they are replaced: empty ones, the oldest others, and those that were right last."""
    priority = ages
    if noise and rng is not None:
        slots = memory.shape[0]
        limit = _NEVER // 2 if math.isinf(noise) else min(int(noise * slots), _NEVER // 2)
        drawn = jax.random.randint(rng, (slots,), 0, limit + 1, jnp.int32)
        base = jnp.zeros_like(ages) if math.isinf(noise) else jnp.minimum(ages, _NEVER // 2 - 1)
        priority = jnp.where(memory.values == EMPTY, _NEVER, base + drawn)
    return lax.top_k(jnp.where(was_right, -1, priority), count)[1].astype(jnp.int32)


@array_op("")
def orphaned_slots(memory: KeyValueMemory) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Counts the keys that no query has found since they were written.

    Returns:
      `(orphaned, used)`: numbers of keys that were never the nearest one, and of slots that hold a key.
    """
    is_used = memory.values != EMPTY
    return (is_used & (memory.hits == 0)).sum().astype(jnp.int32), is_used.sum().astype(jnp.int32)


def _check(memory: KeyValueMemory, q: Array, labels: Array) -> None:
    """Raises InputError unless q is [B, D] and labels [B]."""
    if q.ndim != 2 or q.shape[1] != memory.shape[1] or labels.shape != q.shape[:1]:
        raise InputError(
            f"q {q.shape}, labels {labels.shape}: expected [B, {memory.shape[1]}], as the keys, and [B]; "
            "flatten queries to one axis"
        )
