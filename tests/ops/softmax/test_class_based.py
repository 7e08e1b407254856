"""Class-based softmax against its definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax.structured import class_based as module
from hpnlp.ops.softmax.structured.class_based import (
    class_log_probs,
    class_nll,
    class_sample,
    class_top_k,
    classes_from,
    equal_mass_classes,
    equal_size_classes,
)
from hpnlp.types import InputError
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

N, D, V, C = 13, 6, 37, 5
# Classes of sizes 1 to 20, in random order of the ids, so that position, order and id differ.
RAGGED = np.random.default_rng(0).permutation(np.repeat(np.arange(C), [4, 1, 20, 9, 3]))


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A small width, so that large classes take several products."""
    monkeypatch.setattr(module, "WIDTH", 8)


def arrays(dtype="float32", n=N):
    rng = np.random.default_rng(1)
    shapes = (n, D), (C, D), (V, D), (C,), (V,)
    h, class_table, word_table, class_bias, word_bias = (
        jnp.asarray((rng.standard_normal(shape) / 2).astype(dtype)) for shape in shapes
    )
    return h, class_table, word_table, {"class_bias": class_bias, "word_bias": word_bias}


def definition(h, class_table, word_table, classes, class_bias, word_bias):
    """Log-probabilities [N, V] by id, one token and class at a time, in float64."""
    h, class_table, word_table, class_bias, word_bias = (
        np.asarray(x, np.float64) for x in (h, class_table, word_table, class_bias, word_bias)
    )
    actual = np.empty((len(h), classes.order.size))
    for i, x in enumerate(h):
        s = class_table @ x + class_bias
        of_class = s - np.log(np.exp(s).sum())
        for c in range(classes.count):
            rows = np.arange(classes.starts[c], classes.starts[c + 1])
            s = word_table[rows] @ x + word_bias[rows]
            actual[i, classes.order[rows]] = of_class[c] + s - np.log(np.exp(s).sum())
    return actual


def test_classes_are_consistent():
    classes = classes_from(RAGGED, C)
    np.testing.assert_array_equal(classes.order[classes.position], np.arange(V))
    np.testing.assert_array_equal(classes.class_of, RAGGED)
    np.testing.assert_array_equal(np.diff(classes.starts), [4, 1, 20, 9, 3])
    np.testing.assert_array_equal(RAGGED[classes.order], np.repeat(np.arange(C), [4, 1, 20, 9, 3]))
    assert (classes.count, classes.widest) == (C, 20)
    leaves, tree = jax.tree.flatten(classes)
    assert all(x.dtype == np.int32 for x in leaves) and hash(tree) is not None


@pytest.mark.parametrize(("vocab", "count"), [(37, 5), (36, 6), (7, 7), (5, 1)])
def test_equal_size_classes_differ_by_one_word(vocab, count):
    classes = equal_size_classes(vocab, count)
    np.testing.assert_array_equal(classes.order, np.arange(vocab))
    sizes = np.diff(classes.starts)
    assert sizes.max() == classes.widest == -(-vocab // count) and sizes.min() == vocab // count


def test_equal_mass_classes_have_similar_mass():
    """Shuffled counts of Zipf's law: classes of several words have similar mass; the largest has about 2 sqrt(V) words."""
    vocab, count = 10_000, 100
    occurs = np.random.default_rng(0).permutation(1e7 / np.arange(1, vocab + 1))
    for power, widest in ((0.5, None), (1.0, None), (1.0, 300)):
        classes = equal_mass_classes(occurs, count, power=power, widest=widest)
        assert np.all(np.diff(classes.class_of[np.argsort(-occurs)]) >= 0), "neighbours in frequency"
        mass = np.add.reduceat(occurs[classes.order] ** power, classes.starts[:-1])
        if widest is None:
            several = np.diff(classes.starts) > 1
            assert mass[several].max() < 2 * mass.sum() / count
        assert classes.widest <= (widest or vocab)
        if power == 0.5:
            assert classes.widest <= 2.1 * vocab**0.5
            np.testing.assert_allclose(mass, mass.sum() / count, rtol=0.5)


def test_equal_mass_leaves_no_class_empty():
    for occurs in ([100, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 100]):
        for count in range(1, 6):
            for widest in (None, -(-5 // count)):
                classes = equal_mass_classes(occurs, count, widest=widest)
                assert np.diff(classes.starts).min() >= 1 and classes.widest <= (widest or 5)


LABELS = {
    "all": np.arange(N) * 3 % V,
    "one class": np.flatnonzero(RAGGED == 2)[np.arange(N) % 20],
    "one word": np.full(N, 11),
    "a class of one word": np.full(N, np.flatnonzero(RAGGED == 1)[0]),
}


def weighted_sum(losses):
    return jnp.sum(losses * jnp.cos(jnp.arange(losses.size, dtype=jnp.float32)))


@functools.cache
def program():
    """((loss, losses), gradients) of class_nll, and ((loss, log_probs), gradients) of class_log_probs."""

    # The classes are an argument of the compiled program.
    def run(h, class_table, word_table, biases, classes, labels):
        def fast(*arguments):
            losses = class_nll(*arguments[:3], classes, labels, **arguments[3], block=4)
            return weighted_sum(losses), losses

        def slow(*arguments):
            log_probs = class_log_probs(*arguments[:3], classes, **arguments[3])
            losses = -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]
            return weighted_sum(losses), log_probs

        arguments = h, class_table, word_table, biases
        return tuple(jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True)(*arguments) for f in (fast, slow))

    return jax.jit(run, compiler_options=ONCE)


@functools.cache
def top(k):
    run = lambda h, a, b, biases, classes: class_top_k(h, a, b, classes, k, **biases)  # noqa: E731
    return jax.jit(run, compiler_options=ONCE)


def test_losses_and_gradients_match_definition():
    h, class_table, word_table, biases = arrays()
    classes = classes_from(RAGGED, C)
    expected = definition(h, class_table, word_table, classes, **biases)
    np.testing.assert_allclose(np.exp(expected).sum(axis=1), 1)
    for labels in LABELS.values():
        fast, slow = program()(h, class_table, word_table, biases, classes, jnp.asarray(labels, jnp.int32))
        np.testing.assert_allclose(fast[0][1], -expected[np.arange(N), labels], rtol=2e-6)
        np.testing.assert_allclose(slow[0][1], expected, rtol=2e-6)
        assert fast[0][1].dtype == slow[0][1].dtype == jnp.float32
        assert_close(fast[1], slow[1])


@pytest.mark.parametrize("classes", [equal_size_classes(V, V), equal_size_classes(V, 1)], ids=lambda x: x.count)
def test_one_token_without_biases(classes):
    h, _, word_table, _ = arrays(n=1)
    class_table = jnp.asarray(np.random.default_rng(2).standard_normal((classes.count, D)).astype(jnp.float32))
    expected = definition(h, class_table, word_table, classes, np.zeros(classes.count), np.zeros(V))
    losses = once(class_nll, h, class_table, word_table, classes, jnp.array([V - 1]))
    np.testing.assert_allclose(losses, -expected[:, -1], rtol=2e-6)


def test_sixteen_bits_accumulate_in_float32():
    arguments, classes, labels = arrays("bfloat16"), classes_from(RAGGED, C), jnp.asarray(LABELS["all"], jnp.int32)
    expected = definition(*arguments[:3], classes, **arguments[3])
    fast, slow = program()(*arguments, classes, labels)
    assert fast[0][1].dtype == slow[0][1].dtype == jnp.float32
    np.testing.assert_allclose(fast[0][1], -expected[np.arange(N), labels], rtol=1e-5)
    np.testing.assert_allclose(slow[0][1], expected, rtol=1e-5)
    _, wide = program()(*jax.tree.map(lambda x: x.astype(jnp.float32), arguments), classes, labels)
    for actual, reference in zip(jax.tree.leaves(fast[1]), jax.tree.leaves(wide[1]), strict=True):
        assert actual.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(actual, np.float32) - reference) <= 0.01 * np.linalg.norm(reference)


def test_top_k_matches_sorting_all_words():
    h, class_table, word_table, biases = arrays()
    classes = classes_from(RAGGED, C)
    class_table = 8 * class_table  # so that bounds leave classes out for some tokens, and not for others
    expected = definition(h, class_table, word_table, classes, **biases)
    best = np.argsort(-expected, axis=1)
    for k in (6, V):
        values, ids = top(k)(h, class_table, word_table, biases, classes)
        np.testing.assert_array_equal(ids, best[:, :k])
        np.testing.assert_allclose(values, np.take_along_axis(expected, best[:, :k], axis=1), rtol=5e-6)


def test_top_k_skips_classes_below_the_bound():
    h, class_table, word_table, biases = arrays()
    classes = classes_from(RAGGED, C)
    word_table = jnp.where(jnp.asarray(RAGGED[classes.order] == 3)[:, None], word_table, jnp.nan)
    biases["class_bias"] = jnp.where(jnp.arange(C) == 3, 30.0, 0.0)
    values, ids = top(6)(h, class_table, word_table, biases, classes)
    assert np.isfinite(values).all() and (RAGGED[ids] == 3).all()


def test_samples_follow_the_distribution():
    h, class_table, word_table, biases = arrays(n=1)
    classes = classes_from(RAGGED, C)
    p = np.exp(definition(h, class_table, word_table, classes, **biases)[0])
    n = 20_000
    drawn = once(
        functools.partial(class_sample, **biases),
        jnp.tile(h, (n, 1)),
        class_table,
        word_table,
        classes,
        jax.random.key(0),
    )
    actual = np.bincount(drawn, minlength=V)
    assert actual.size == V
    # 36 degrees of freedom: 77 is passed once in 10,000 keys.
    assert ((actual - n * p) ** 2 / (n * p)).sum() < 77


def test_invalid_labels_give_nan_or_raise():
    """Traced labels give NaN and no gradient; known labels raise."""
    h, class_table, word_table, biases = arrays()
    classes = classes_from(RAGGED, C)
    wrong = np.isin(np.arange(N), [2, 5])
    labels = np.where(wrong, [-1, V] * 6 + [V], LABELS["all"])
    (_, losses), slopes = program()(h, class_table, word_table, biases, classes, jnp.asarray(labels, jnp.int32))[0]
    np.testing.assert_array_equal(np.isnan(losses), wrong)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    np.testing.assert_array_equal(np.asarray(slopes[0]).any(axis=1), ~wrong)
    for label in (-1, V):
        raises(
            f"label is {label}: expected 0 to 36", class_nll, h, class_table, word_table, classes, jnp.full(N, label)
        )


def temporary(vocab, dtype="float32", n=4096, dim=512):
    classes = equal_size_classes(vocab, int(vocab**0.5))
    shapes = (n, dim), (classes.count, dim), (vocab, dim)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    run = jax.grad(lambda *arguments: class_nll(*arguments[:3], classes, arguments[3]).sum(), (0, 1, 2))
    compiled = jax.jit(run).lower(*arguments, jax.ShapeDtypeStruct((n,), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_vocabulary(monkeypatch):
    """Beside the gradients: logits of classes, and one more array like h; for 16 bits, a float32 gradient of the table."""
    monkeypatch.undo()
    bound = 4 * 4096 * (2 * 512 + 4 * 224)
    assert temporary(50_000) < bound < 50_000 * 512 * 4 / 2
    assert temporary(50_000, "float16") < bound + 50_000 * 512 * 4


def test_invalid_partitions_raise():
    for call, message in (
        (lambda: classes_from([0, 2, 2], 3), "class 1 has no word"),
        (lambda: classes_from([0, 1, 3], 3), "classes 0 to 3: expected 0 to 2"),
        (lambda: classes_from([0, -1], 2), "classes -1 to 0"),
        (lambda: classes_from([[0, 1]], 2), "integers \\[V\\]"),
        (lambda: classes_from([0.0, 1.0], 2), "float64"),
        (lambda: equal_size_classes(3, 4), "count 4: expected 1 to 3"),
        (lambda: equal_size_classes(3, 0), "count 0"),
        (lambda: equal_mass_classes([1.0, -1.0], 1), "at least 0"),
        (lambda: equal_mass_classes([1.0, np.nan], 1), "finite"),
        (lambda: equal_mass_classes(np.ones(9), 2, widest=4), "do not hold 9"),
    ):
        raises(message, call)


def test_mismatched_shapes_raise():
    h, class_table, word_table, biases = arrays()
    classes, labels = classes_from(RAGGED, C), jnp.zeros(N, jnp.int32)
    with pytest.raises(InputError, match="word_table has shape .37, 6.: expected .36, 6."):
        class_nll(h, class_table, word_table, equal_size_classes(V - 1, C), labels)
    with pytest.raises(InputError, match="class_table has shape .5, 6.: expected .4, 6."):
        class_log_probs(h, class_table, word_table, equal_size_classes(V, 4))
    raises("block 0", class_nll, h, class_table, word_table, classes, labels, block=0)
    for k in (0, V + 1):
        raises(f"k {k}: expected 1 to 37", class_top_k, h, class_table, word_table, classes, k)
