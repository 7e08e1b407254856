"""The alias sampler: its table, its draws, and its construction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax import alias_sampler
from hpnlp.ops.softmax.proposals import unigram

COUNTS = np.array([50.0, 1.0, 7.0, 30.0, 1e-3, 9.0, 2.0])


@pytest.mark.parametrize("vocab", [1, 2, 5, 1000, 40001])
def test_alias_table_represents_the_distribution(vocab):
    """The distribution that the table represents is that from which it was built."""
    rng = np.random.default_rng(vocab)
    for counts in (
        np.ones(vocab),
        1 / np.arange(1, vocab + 1) ** 1.1,
        rng.pareto(0.5, vocab) + 1e-9,
        rng.random(vocab),
    ):
        table = unigram(counts)
        q = counts / counts.sum()
        keep, alias = alias_sampler._alias_table(q)
        assert (keep >= 0).all() and (keep <= 1).all()
        actual = (keep + np.bincount(alias, 1 - keep, minlength=vocab)) / vocab
        np.testing.assert_allclose(actual, q, rtol=1e-9, atol=1e-14)
        np.testing.assert_array_equal(table.alias, alias)
        assert (table.fraction >= 0).all() and (table.fraction <= 1).all()
        np.testing.assert_allclose(
            (table.threshold + table.fraction.astype(np.float64)) / 2**32, keep, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("share", [3e-12, 2e-10, 0.3, 1 - 3e-12, 1.0])
def test_alias_draws_are_accurate_to_55_bits(monkeypatch, share):
    """A column's own word is drawn for all random numbers under its probability, and for no others."""
    table = unigram([share / 2, 1 - share / 2])
    edge = int(share * 2**55)
    numbers = [0, 1, edge - 9, edge + 9, 2**55 - 1] if share < 1 else [0, 2**54, 2**55 - 1]
    numbers = [number for number in numbers if 0 <= number < 2**55]
    high = jnp.asarray([number >> 23 for number in numbers], jnp.uint32)
    low = jnp.asarray([number & (2**23 - 1) for number in numbers], jnp.float32) / 2**23
    monkeypatch.setattr(jax.random, "randint", lambda key, shape, *_: jnp.zeros(shape, jnp.int32))
    monkeypatch.setattr(jax.random, "bits", lambda *_: high)
    monkeypatch.setattr(jax.random, "uniform", lambda *_: low)
    drawn = table.draw(jax.random.key(0), high.shape)
    np.testing.assert_array_equal(drawn, [0 if number < share * 2**55 else 1 for number in numbers])


def test_alias_sampler_as_jit_argument_under_vmap():
    """Draws equal those of a sampler whose arrays are constants of the program."""
    table, keys = unigram(COUNTS), jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(jax.vmap(lambda table, key: table.draw(key, (2, 5)), (None, 0)))
    np.testing.assert_array_equal(draw(table, keys), [table.draw(key, (2, 5)) for key in keys])


def test_alias_table_of_one_rare_word_is_fast():
    """Each vectorised round would fill one column; the construction would take hours."""
    counts = np.full(400_000, 100.0)
    counts[3] = 1.0
    keep, alias = alias_sampler._alias_table(counts / counts.sum())
    np.testing.assert_allclose(
        (keep + np.bincount(alias, 1 - keep, minlength=400_000)) / 400_000, counts / counts.sum(), rtol=1e-9
    )
