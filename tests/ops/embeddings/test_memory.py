"""The memory of rare events against a loop over examples, and its invariants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import embeddings
from hpnlp.ops.embeddings.memory import EMPTY
from tests.contracts import assert_close, once
from tests.messages import raises

M, D = 12, 3
RNG = np.random.default_rng(0)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


class Loop:
    """The update rules in numpy, without noise."""

    def __init__(self, slots, rule):
        self.keys, self.values = np.zeros((slots, D)), np.full(slots, EMPTY)
        self.ages, self.hits, self.writes, self.rule = np.zeros(slots, int), np.zeros(slots, int), 0, rule

    def update(self, queries, labels):
        used = self.values != EMPTY
        cosines = np.where(used[None], unit(queries) @ self.keys.T, -np.inf)
        nearest, keys = cosines.argmax(axis=1), self.keys.copy()
        self.ages[used] += 1
        right, misses = {}, []
        for q, label, slot in zip(unit(queries), labels, nearest, strict=True):
            self.hits[slot] += used[slot]
            if self.rule != "circular" and used[slot] and self.values[slot] == label:
                right.setdefault(slot, []).append(q)
            else:
                misses.append((q, label))
        for slot, found in right.items():
            keys[slot] = unit(keys[slot] + sum(found)) if self.rule == "average" else found[-1]
            self.ages[slot] = 0
        order = sorted(range(len(keys)), key=lambda i: (i in right, used[i], -self.ages[i], i))
        if self.rule == "circular":
            order = [(self.writes + i) % len(keys) for i in range(len(misses))]
        for slot, (q, label) in zip(order, misses, strict=False):
            keys[slot], self.values[slot], self.ages[slot], self.hits[slot] = q, label, 0, 0
        self.keys, self.writes = keys, self.writes + len(misses)


@pytest.mark.parametrize("rule", ["average", "newest", "circular"])
def test_updates_match_a_loop(rule):
    """Batches of 1 to 5 examples with 6 classes, so that slots are found twice, and are replaced."""
    loop, memory = Loop(M, rule), embeddings.empty_memory(M, D)
    centres = RNG.standard_normal((6, D))
    update = jax.jit(lambda memory, q, y, mask: embeddings.update_memory(memory, q, y, rule=rule, mask=mask))
    for count in (5, 1, 5, 4, 5, 2, 5, 5, 3, 5):
        labels = RNG.integers(0, 6, 5)
        queries = (centres[labels] + 0.6 * RNG.standard_normal((5, D))).astype(np.float32)
        loop.update(queries[:count], labels[:count])
        memory = update(memory, queries, labels, np.arange(5) < count)
        used = loop.values != EMPTY
        np.testing.assert_array_equal(memory.values, loop.values)
        np.testing.assert_array_equal(np.asarray(memory.ages)[used], loop.ages[used])
        np.testing.assert_array_equal(memory.hits, loop.hits)
        assert_close(memory.keys, loop.keys.astype(np.float32))
        assert int(memory.writes) == loop.writes
    orphaned, count = embeddings.orphaned_slots(memory)
    assert (int(orphaned), int(count)) == (int((used & (loop.hits == 0)).sum()), int(used.sum()))
    assert loop.writes > M  # slots were replaced


def filled(classes=(0, 1, 2, 1)):
    """A memory whose first slots hold a key of each class, the first one the oldest; and the keys."""
    count = len(classes)
    keys, memory = unit(RNG.standard_normal((count, D))).astype(np.float32), embeddings.empty_memory(M, D)
    full = embeddings.KeyValueMemory(
        np.concatenate([keys, memory.keys[count:]]),
        np.concatenate([np.array(classes, np.int32), memory.values[count:]]),
        np.concatenate([np.arange(count, dtype=np.int32)[::-1], memory.ages[count:]]),
        np.zeros(M, np.int32),
        np.int32(count),
    )
    return jax.tree.map(jnp.asarray, full), keys


def test_lookup_returns_the_nearest_keys_and_none_of_empty_slots():
    memory, keys = filled()
    cosines, classes, slots = once(lambda m, q: embeddings.memory_lookup(m, q, 6), memory, 3 * keys[1:3])
    np.testing.assert_array_equal(slots[:, 0], [1, 2])
    assert_close(cosines[:, :4], -np.sort(-(keys[1:3] @ keys.T), axis=1))
    np.testing.assert_array_equal(classes[:, 0], [1, 2])
    assert np.all(np.asarray(classes)[:, 4:] == EMPTY) and np.all(np.isneginf(np.asarray(cosines)[:, 4:]))


def test_loss_is_the_margin_of_the_nearest_keys():
    memory, keys = filled()
    q = RNG.standard_normal((4, D)).astype(np.float32)
    labels, values = np.array([1, 0, 2, 7]), np.array([0, 1, 2, 1])

    def expected(q):
        cosines = unit(q.astype(np.float64)) @ keys.T.astype(np.float64)
        rows = zip(cosines, labels, strict=True)
        return [max(0, 0.4 + c[values != y].max() - c[values == y].max()) if y < 3 else 0 for c, y in rows]

    def loss(q):
        return embeddings.memory_loss(memory, q, labels, margin=0.4)

    assert_close(once(loss, q), np.array(expected(q), np.float32))
    step = 1e-4 * RNG.standard_normal(q.shape)
    gradient = once(jax.grad(lambda q: loss(q).sum()), q)
    difference = (sum(expected(q + step)) - sum(expected(q - step))) / 2
    np.testing.assert_allclose((gradient * step).sum(), difference, rtol=1e-3)
    assert not np.any(once(lambda m: embeddings.memory_loss(m, q, labels), embeddings.empty_memory(M, D)))

    def by_keys(keys):
        return embeddings.memory_loss(dataclasses.replace(memory, keys=keys), q, labels, margin=0.4).sum()

    assert not np.any(once(jax.grad(by_keys), memory.keys))


def test_noise_chooses_other_slots_but_empty_ones_first():
    memory = filled((0, 1, 2, 3))[0]
    q, y = RNG.standard_normal((8, D)).astype(np.float32), np.arange(10, 18)
    update = {
        noise: jax.jit(lambda m, mask, key, n=noise: embeddings.update_memory(m, q, y, key, noise=n, mask=mask))
        for noise in (0.1, np.inf)
    }
    full = update[np.inf](memory, np.ones(8, bool), jax.random.key(0))
    assert sorted(np.asarray(full.values).tolist()) == [0, 1, 2, 3, *range(10, 18)]

    def replaced(seed, noise):
        other = dataclasses.replace(full, values=full.values % 10)  # so that the nearest key is not right
        new = update[noise](other, np.arange(8) == 0, jax.random.key(seed))
        return int(np.flatnonzero(np.asarray(new.values) == 10)[0])

    assert {replaced(seed, 0.1) for seed in range(20)} <= {0, 1, 2, 3}  # ages 11 to 8, and 0 for the others
    assert len({replaced(seed, np.inf) for seed in range(40)}) > 6


def test_batches_as_large_as_the_memory_replace_right_slots_last():
    memory = filled(range(M))[0]
    q = np.asarray(memory.keys)
    labels = np.where(np.arange(M) < 2, np.arange(M), 50 + np.arange(M))
    values = np.asarray(once(embeddings.update_memory, memory, q, labels).values)
    assert sorted(values.tolist()) == [0, 1, *range(52, 50 + M)]


def test_queries_that_are_not_finite_and_negative_classes_are_not_written():
    """A key of NaN would be the nearest one of all queries from then on."""
    memory, keys = filled()
    bad = np.array([[np.nan, 0, 0], [np.inf, 1, 0], keys[1], keys[2]], np.float32)
    queries, labels = np.concatenate([bad, keys[:1]]), np.array([1, 1, EMPTY, -5, 0])

    def update(q, labels):
        empty = embeddings.update_memory(embeddings.empty_memory(M, D), q[2:3], labels[2:3])
        return embeddings.update_memory(memory, q, labels), embeddings.update_memory(memory, q[4:], labels[4:]), empty

    updated, expected, empty = once(update, queries, labels)
    jax.tree.map(np.testing.assert_array_equal, updated, expected)
    assert int(empty.writes) == 0


def test_queries_in_bfloat16_are_normalised_in_float32():
    memory, keys = filled()
    q = jnp.asarray(keys, jnp.bfloat16)
    cosines, slots = once(lambda m, q: embeddings.memory_lookup(m, q, 1)[::2], memory, q)
    exact = unit(np.asarray(q, np.float64)) @ keys.T
    np.testing.assert_array_equal(slots[:, 0], exact.argmax(axis=1))
    assert_close(cosines[:, 0], exact.max(axis=1).astype(np.float32))


Q, Y = np.ones((2, D), np.float32), np.zeros(2, int)
INVALID = {
    "slots": (lambda m: embeddings.empty_memory(0, 3), "memory of 0 slots and 3 features: expected at least 1"),
    "margin": (lambda m: embeddings.memory_loss(m, Q, Y, margin=-1), "margin -1: expected a number of at least 0"),
    "rule": (lambda m: embeddings.update_memory(m, Q, Y, rule="mean"), "rule 'mean': expected 'average', 'newest', 'c"),
    "noise": (lambda m: embeddings.update_memory(m, Q, Y, noise=0.1), "noise 0.1: expected .* pass rng="),
    "negative noise": (lambda m: embeddings.update_memory(m, Q, Y, jax.random.key(0), noise=-1), "noise -1: expected"),
    "batch": (
        lambda m: embeddings.update_memory(m, np.ones((13, D)), np.zeros(13, int)),
        "13 examples for 12 slots: each may need a slot of its own; use more slots",
    ),
    "features": (lambda m: embeddings.update_memory(m, Q[:, :2], Y), r"expected \[B, 3\], as the keys, and \[B\]"),
    "labels": (lambda m: embeddings.memory_loss(m, Q, Y[:1]), r"expected \[B, 3\], as the keys, and \[B\]"),
}


@pytest.mark.usefixtures("symbolic_sizes")  # beartype would raise first
@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise(name):
    call, message = INVALID[name]
    raises(message, lambda: call(embeddings.empty_memory(M, D)))
