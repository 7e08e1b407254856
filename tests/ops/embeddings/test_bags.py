"""Embedding bags against loops and torch, gradients by frequency, and invalid bags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import embeddings
from hpnlp.ops.embeddings.bags import MODES
from hpnlp.ops.table_rows import TableRows
from tests.contracts import assert_close, once
from tests.messages import raises

V, D = 11, 5
BAGS = [[3, 1, 3], [7], [0, 2, 4, 6, 8], [10, 10]]
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((V, D)).astype(np.float32)
IDS, LENGTHS = embeddings.pad_bags(BAGS, width=6, vocab=V)
FLAT, SEGMENTS = embeddings.join_bags(BAGS, vocab=V)
WEIGHTS = RNG.random(IDS.shape).astype(np.float32)
FLAT_WEIGHTS = np.concatenate([row[:n] for row, n in zip(WEIGHTS, LENGTHS, strict=True)])
DOWN = RNG.standard_normal((len(BAGS), D)).astype(np.float32)


def by_loop(table, mode, unit):
    """The weighted bags in float64."""
    rows = []
    for bag, weights in zip(BAGS, WEIGHTS.astype(np.float64), strict=True):
        total = sum(w * table[i] for i, w in zip(bag, weights, strict=False))
        total = total / {"sum": 1, "mean": len(bag), "sqrt": len(bag) ** 0.5}[mode]
        rows.append(total / np.linalg.norm(total) if unit else total)
    return np.array(rows)


def both_forms(mode, unit):
    """Values, and gradients of the table, of padded bags and of segments."""

    def padded(table, ids=IDS):
        return embeddings.embedding_bag(table, ids, LENGTHS, mode=mode, weights=WEIGHTS, unit=unit)

    def by_segments(table):
        return embeddings.segment_embedding_bag(
            table, FLAT, SEGMENTS, len(BAGS), mode=mode, weights=FLAT_WEIGHTS, unit=unit, is_sorted=True
        )

    def of(table):
        return [(f(table), jax.vjp(f, table)[1](jnp.asarray(DOWN))[0]) for f in (padded, by_segments)]

    return once(of, jnp.asarray(TABLE))


@pytest.mark.parametrize(("mode", "unit"), [(mode, False) for mode in MODES] + [("mean", True)])
def test_bags_match_a_loop(mode, unit):
    padded, by_segments = both_forms(mode, unit)
    assert_close(padded, by_segments)
    assert_close(padded[0], by_loop(TABLE.astype(np.float64), mode, unit).astype(np.float32))
    step = 1e-5 * RNG.standard_normal(TABLE.shape)
    ahead, behind = (by_loop(TABLE + sign * step, mode, unit) for sign in (1, -1))
    np.testing.assert_allclose(
        (padded[1] * step).sum(), (DOWN * (ahead - behind) / 2).sum(), rtol=1e-4, err_msg="directional derivative"
    )


def test_padding_and_empty_bags_are_zero_with_zero_gradient():
    table = jnp.asarray(np.where(np.arange(V)[:, None] == 0, np.nan, TABLE))  # id 0 is that of padding
    factors = jnp.array([[2, 1, jnp.nan], [jnp.nan] * 3])

    def bags(table, factors):
        ids = jnp.array([[1, 2, 0], [0, 0, 0]], jnp.int32)
        padded = embeddings.embedding_bag(table, ids, jnp.array([2, 0], jnp.int32), weights=factors, unit=True)
        segments, options = jnp.array([0, 0, 2, -1, -1, 9], jnp.int32), {"weights": factors.reshape(-1), "unit": True}
        return padded, embeddings.segment_embedding_bag(table, ids.reshape(-1), segments, 2, **options)

    def with_gradient(table, factors):
        both, pull = jax.vjp(bags, table, factors)
        return both, *pull((jnp.ones_like(both[0]), jnp.ones_like(both[1])))

    (padded, by_segments), gradient, of_factors = once(with_gradient, table, factors)
    assert np.all(np.isfinite(of_factors)) and np.all(np.asarray(of_factors).reshape(-1)[2:] == 0)
    assert_close(padded, by_segments)
    assert np.all(np.asarray(padded[1]) == 0) and np.all(np.isfinite(padded))
    assert np.all(np.asarray(gradient)[[0, *range(3, V)]] == 0) and np.all(np.isfinite(gradient))


def test_vectors_of_any_length_have_unit_norm():
    """Squares of the numbers of the first two vectors are no float32."""
    x = np.array([[3e-25, -4e-25], [3e25, 4e25], [0.3, 0.4], [0, 0]], np.float32)

    def with_gradient(x):
        y, pull = jax.vjp(embeddings.unit_norm, x)
        return y, pull(jnp.ones_like(y))[0]

    y, gradient = once(with_gradient, x)
    assert_close(y, np.array([[0.6, -0.8], [0.6, 0.8], [0.6, 0.8], [0, 0]], np.float32))
    lengths = np.linalg.norm(x.astype(np.float64), axis=1)[:, None]
    expected = np.where(lengths > 0, (1 - y * np.asarray(y).sum(axis=1, keepdims=True)) / np.maximum(lengths, 1e-99), 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


def test_rows_of_a_table_take_its_place():
    rows = TableRows(jnp.array([0, 1, 2, 3, 4, 6, 7, 8, 10], jnp.int32), jnp.asarray(TABLE)[np.r_[:5, 6:9, 10]])
    for table in (rows, jnp.asarray(TABLE)):
        actual = once(lambda table: embeddings.embedding_bag(table, IDS, LENGTHS, mode="sum"), table)
        assert_close(actual, np.array([TABLE[bag].sum(axis=0) for bag in BAGS]))


def test_bfloat16_sums_accumulate_in_float32():
    table = jnp.ones((2, 1), jnp.bfloat16)
    ids, lengths = embeddings.pad_bags([[1] * 1000])

    def sums(table):
        return (
            embeddings.embedding_bag(table, ids, lengths, mode="sum"),
            embeddings.segment_embedding_bag(table, ids[0], 0 * ids[0], 1, mode="sum"),
        )

    assert [float(x[0, 0]) for x in once(sums, table)] == [1000, 1000]


def test_gradients_are_scaled_by_frequency():
    counts = np.array([9, 1, 0, 4] + [1] * 7)
    factors = embeddings.frequency_factors(counts)
    assert (factors * counts).sum() / counts.sum() == pytest.approx(1)
    np.testing.assert_allclose(factors[[0, 3]] * 9, factors[1] * np.array([1, 9 / 4]), rtol=1e-6)
    assert factors[2] == factors[1]
    np.testing.assert_allclose(embeddings.frequency_factors(counts, 0.0), 1)

    def bags(table, factors=None):
        x = jnp.asarray(table)[FLAT]
        x = x if factors is None else embeddings.scale_gradient(x, factors[FLAT])
        return embeddings.pool_segments(x, SEGMENTS, len(BAGS))

    def with_gradients(table, down, factors):
        pairs = [jax.vjp(lambda t, f=f: bags(t, f), table) for f in (None, factors)]
        return [(value, pull(down)[0]) for value, pull in pairs]

    plain, scaled = once(with_gradients, TABLE, DOWN, factors)
    np.testing.assert_array_equal(plain[0], scaled[0])
    assert_close(scaled[1], factors[:, None] * np.asarray(plain[1]))


def test_share_of_occurrences_counts_the_batch():
    shares = once(lambda ids: embeddings.share_of_occurrences(ids, V), np.array([[3, 1, 3], [3, 0, -1]]))
    np.testing.assert_allclose(shares, [[1 / 3, 1, 1 / 3], [1 / 3, 1, 0]], rtol=1e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_and_gradients_match_torch(mode):
    """Frequencies are compared with those of `Embedding`.

    torch 2.13's `EmbeddingBag` on the CPU divides the gradient of a row by the number of occurrences of another id where an id
    occurs twice: the count of the i-th occurrence in the place of that of the i-th distinct id.
    """
    torch = pytest.importorskip("torch")
    bag = torch.nn.EmbeddingBag(V, D, mode=mode, _weight=torch.tensor(TABLE))
    starts = np.searchsorted(SEGMENTS, np.arange(len(BAGS)))
    (bag(torch.tensor(FLAT), torch.tensor(starts)) * torch.tensor(DOWN)).sum().backward()
    single = torch.nn.Embedding(V, D, scale_grad_by_freq=True, _weight=torch.tensor(TABLE))
    sums = torch.zeros(len(BAGS), D).index_add(0, torch.tensor(SEGMENTS), single(torch.tensor(FLAT)))
    expected = sums / torch.tensor(LENGTHS)[:, None] if mode == "mean" else sums
    (expected * torch.tensor(DOWN)).sum().backward()

    def bags(table, factors):
        return embeddings.pool_segments(embeddings.scale_gradient(table[FLAT], factors), SEGMENTS, len(BAGS), mode=mode)

    factors = np.ones(len(FLAT), np.float32), embeddings.share_of_occurrences(FLAT, V)
    for layer, f in zip((bag, single), factors, strict=True):
        actual, pull = jax.vjp(lambda table, f=f: bags(table, f), jnp.asarray(TABLE))
        assert_close(actual, expected.detach().numpy())
        assert_close(pull(jnp.asarray(DOWN))[0], layer.weight.grad.numpy())


IDS_1 = jnp.zeros((3,), jnp.int32)
INVALID = {
    "no bags": (lambda: embeddings.pad_bags([]), "there are no bags"),
    "empty": (lambda: embeddings.join_bags([[1], []]), "bag 1 is empty: expected at least one id; leave it out"),
    "empty padded": (lambda: embeddings.pad_bags([[], [1]]), "bag 0 is empty"),
    "unknown id": (lambda: embeddings.pad_bags([[1, 11]], vocab=V), "bag 0 has the id 11: expected 0 to 10, rows"),
    "negative id": (lambda: embeddings.join_bags([[2], [-1]]), r"bag 1 has the id -1: expected 0 to 2\^31 - 1"),
    "large id": (lambda: embeddings.pad_bags([[2**31]]), r"bag 0 has the id 2147483648: expected 0 to 2\^31 - 1"),
    "words": (lambda: embeddings.join_bags([["a"]]), "bag 0 is <U1 .*: expected a list of whole numbers"),
    "width": (lambda: embeddings.pad_bags(BAGS, width=4), "bag 2 has 5 ids, and width is 4: cut it, or raise width"),
    "mode": (lambda: embeddings.embedding_bag(TABLE, IDS, LENGTHS, mode="max"), "mode 'max': expected 'sum', 'sqrt'"),
    "lengths": (lambda: embeddings.embedding_bag(TABLE, IDS, LENGTHS[1:]), r"expected \[B, L\] and \[B\]; pad_bags"),
    "weights": (lambda: embeddings.embedding_bag(TABLE, IDS, LENGTHS, weights=WEIGHTS[1:]), r"weights \(3, 6\): expec"),
    "segments": (lambda: embeddings.segment_embedding_bag(TABLE, FLAT, IDS_1, 2), r"expected \[N, D\] and \[N\]; join"),
    "bags": (lambda: embeddings.segment_embedding_bag(TABLE, FLAT, SEGMENTS, 0), "bags is 0: expected the number"),
    "factors": (lambda: embeddings.scale_gradient(TABLE, TABLE), r"factors \(11, 5\): expected \(11,\), one factor"),
    "counts": (lambda: embeddings.frequency_factors(np.zeros(3, int)), "at least 0 and not all 0"),
    "power": (lambda: embeddings.frequency_factors(np.ones(3, int), 1.5), "power 1.5: expected 0 .* to 1"),
}


@pytest.mark.usefixtures("symbolic_sizes")  # beartype would raise first
@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise(name):
    call, message = INVALID[name]
    raises(message, call)
