"""The methods by which masks describe themselves, held against `at` on random mask expressions."""

import dataclasses
import math
import random

import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Global, Mask, Strided, Where, Window
from hpnlp.ops.attention.block_sparse.decompose import parts
from tests.ops.attention.block_sparse.test_block_mask import draw_tree

LENGTH = 41
Q, K = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]


def masks(seed, count):
    rng = random.Random(seed)
    return [draw_tree(rng, 3) for _ in range(count)]


@pytest.fixture(
    scope="module", params=[pytest.param((0, 300)), pytest.param((1, 6000), marks=pytest.mark.slow)], ids=str
)
def trees(request):
    return masks(*request.param)


def test_union_of_terms_and_intersection_of_factors_are_the_mask(trees):
    several = 0
    for mask in trees:
        dense, terms = mask.to_dense(LENGTH), mask.union_terms()
        np.testing.assert_array_equal(np.any([term.to_dense(LENGTH) for term in terms], axis=0), dense, str(mask))
        for term in terms:
            factors = term.factors()
            several += len(terms) > 1 or len(factors) > 1
            expected = term.to_dense(LENGTH)
            np.testing.assert_array_equal(np.all([x.to_dense(LENGTH) for x in factors], axis=0), expected, str(term))
    assert several > len(trees) / 4


def test_bounds_on_keys_hold_for_the_mask_and_its_complement(trees):
    for mask in trees:
        dense = mask.to_dense(LENGTH)
        for seen, bound in ((dense, mask.lookback()), (~dense, mask.complement_lookback())):
            assert not (seen & (bound.pinned <= K) & (bound.back < Q - K)).any(), mask


def test_only_the_named_queries_keys_and_residues_are_allowed(trees):
    named = 0
    for mask in trees:
        for factor in (factor for term in mask.union_terms() for factor in term.factors()):
            dense = factor.to_dense(LENGTH)
            queries, keys, period = factor.query_indices(LENGTH), factor.key_indices(LENGTH), factor.residue_period()
            named += queries is not None or keys is not None or period > 1
            if queries is not None:
                assert list(queries) == sorted(set(queries)) and not np.delete(dense, list(queries), axis=0).any(), (
                    factor
                )
            if keys is not None:
                assert list(keys) == sorted(set(keys)) and not np.delete(dense, list(keys), axis=1).any(), factor
            assert not dense[(Q - K) % period != 0].any(), factor
    assert named > len(trees) / 4


def test_folded_masks_are_the_mask_within_each_residue_class(trees):
    exact = 0
    for number, mask in enumerate(trees):
        stride = 2 + number % 4
        folded, same = mask.fold(stride)
        exact += same
        a, b = np.arange(LENGTH // stride)[:, None], np.arange(LENGTH // stride)[None, :]
        some, every = folded.tile(a, a, b, b)
        for residue in range(stride):
            dense = mask.at(residue + stride * a, residue + stride * b)
            assert not (dense & ~np.asarray(some)).any() and not (~dense & np.asarray(every)).any(), mask
            if same:
                np.testing.assert_array_equal(folded.at(a, b), dense, str(mask))
    assert exact > 20


def test_bands_are_exact(trees):
    bands = 0
    for mask in (
        *trees,
        Causal(),
        Window(3, 1),
        Causal() & Window(4),
        Window(2).shift(3),
        Causal() & Window(2).shift(-4),
    ):
        if (band := mask.band()) is None:
            continue
        bands += 1
        left, right = (math.inf if bound is None else bound for bound in band)
        np.testing.assert_array_equal(mask.to_dense(LENGTH), (-left <= K - Q) & (right >= K - Q), str(mask))
    assert bands > 5


def test_relative_masks_depend_on_the_distance_alone(trees):
    for mask in trees:
        if mask.relative:
            np.testing.assert_array_equal(mask.at(Q + 7, K + 7), mask.at(Q, K), str(mask))


@dataclasses.dataclass(frozen=True)
class EveryThird(Mask):
    """A pattern of a user's own, with the hints that Strided has."""

    def at(self, q, k):
        return (q - k) % 3 == 0

    def tile(self, q0, q1, k0, k1):
        return Strided(3).tile(q0, q1, k0, k1)

    def residue_period(self):
        return 3

    def fold(self, stride):
        return Strided(3).fold(stride)


def test_patterns_of_users_run_as_fast_as_those_of_the_library():
    """The schedule of a pattern with the same hints is the same: residue classes side by side."""
    theirs, ours = (parts(mask & Causal(), 3000, 3000, None, 4, False) for mask in (EveryThird(), Strided(3)))
    assert [part.order for part in theirs] == [part.order for part in ours] and theirs[0].order.stride == 3
    assert [part.blocks.block for part in theirs] == [part.blocks.block for part in ours]


@dataclasses.dataclass(frozen=True)
class Wider(Window):
    """Derives from a pattern of the library and redefines which pairs it allows."""

    def at(self, q, k):
        return abs(q - k) <= 2 * self.left


@dataclasses.dataclass(frozen=True)
class Named(Window):
    """Derives from a pattern of the library and keeps its pairs."""

    name: str = "near"


def test_a_subclass_that_redefines_at_loses_the_hints_of_its_base():
    wider = Wider(3)
    assert (
        wider.band() is None and wider.lookback().slots() == (0, None) and wider.needs_search() and not wider.relative
    )
    assert wider.tile(0, 5, 90, 95) == (True, False) and wider.fold(3)[1] is False


def test_a_subclass_that_keeps_at_keeps_the_hints_of_its_base():
    named = Named(3)
    assert named.band() == (3, 3) and named.lookback().slots() == (0, 3) and named.relative and not named.needs_search()


def test_global_tokens_beyond_any_sequence_cost_nothing():
    assert [len(x) for term in Global(1 << 30).union_terms() if (x := term.query_indices(100)) is not None] == [100]
    assert Where(lambda i, j: i == j).union_terms()[0].key_indices(5) is None
