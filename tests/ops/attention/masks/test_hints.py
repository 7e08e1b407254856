"""The methods by which masks describe themselves agree with `at`, on every pattern and on random mask expressions."""

import dataclasses
import math
import random

import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Full, Global, Mask, Where, Window
from hpnlp.ops.attention.block_sparse.decomposition.decompose import decompose
from tests.contracts import PATTERNS
from tests.ops.attention.block_sparse.test_block_mask import draw_tree

LENGTH = 41
Q, K = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]


@pytest.fixture(
    scope="module", params=[pytest.param((0, 300)), pytest.param((1, 6000), marks=pytest.mark.slow)], ids=str
)
def masks(request):
    seed, count = request.param
    rng = random.Random(seed)
    return [*PATTERNS, *(draw_tree(rng, 3) for _ in range(count))]


def test_union_of_terms_and_intersection_of_factors_are_the_mask(masks):
    several = 0
    for mask in masks:
        dense, terms = mask.to_dense(LENGTH), mask.union_terms()
        np.testing.assert_array_equal(np.any([term.to_dense(LENGTH) for term in terms], axis=0), dense, str(mask))
        for term in terms:
            factors = term.factors()
            several += len(terms) > 1 or len(factors) > 1
            expected = term.to_dense(LENGTH)
            np.testing.assert_array_equal(np.all([x.to_dense(LENGTH) for x in factors], axis=0), expected, str(term))
    assert several > len(masks) / 4


def test_lookback_bounds_the_keys_of_the_mask_and_its_complement(masks):
    for mask in masks:
        dense = mask.to_dense(LENGTH)
        for allowed, bound in ((dense, mask.lookback()), (~dense, mask.complement_lookback())):
            assert not (allowed & (bound.pinned <= K) & (bound.back < Q - K)).any(), mask


def test_only_named_queries_keys_and_residues_are_allowed(masks):
    named = 0
    for mask in masks:
        for factor in (factor for term in mask.union_terms() for factor in term.factors()):
            dense = factor.to_dense(LENGTH)
            queries, keys, period = factor.query_indices(LENGTH), factor.key_indices(LENGTH), factor.residue_period()
            named += queries is not None or keys is not None or period > 1
            for axis, indices in enumerate((queries, keys)):
                if indices is not None:
                    indices = list(indices)
                    assert indices == sorted(set(indices)) and not np.delete(dense, indices, axis=axis).any(), factor
            assert not dense[(Q - K) % period != 0].any(), factor
    assert named > len(masks) / 4


def test_folded_masks_are_the_mask_within_each_residue_class(masks):
    exact_masks = 0
    for number, mask in enumerate(masks):
        stride = 2 + number % 4
        folded, exact = mask.fold(stride)
        exact_masks += exact
        a, b = np.arange(LENGTH // stride)[:, None], np.arange(LENGTH // stride)[None, :]
        some_pair, every_pair = folded.tile(a, a, b, b)
        for residue in range(stride):
            dense = mask.at(residue + stride * a, residue + stride * b)
            assert not (dense & ~np.asarray(some_pair)).any() and not (~dense & np.asarray(every_pair)).any(), mask
            if exact:
                np.testing.assert_array_equal(folded.at(a, b), dense, str(mask))
    assert exact_masks > 20


def test_bands_are_exact(masks):
    bands = 0
    shifted = Window(2).shift(3), Causal() & Window(2).shift(-4)
    for mask in (*masks, Causal(), Window(3, 1), Causal() & Window(4), *shifted):
        if (band := mask.band()) is None:
            continue
        bands += 1
        left, right = (math.inf if bound is None else bound for bound in band)
        np.testing.assert_array_equal(mask.to_dense(LENGTH), (-left <= K - Q) & (right >= K - Q), str(mask))
    assert bands > 5


def test_relative_masks_depend_on_the_distance_alone(masks):
    for mask in masks:
        if mask.relative:
            np.testing.assert_array_equal(mask.at(Q + 7, K + 7), mask.at(Q, K), str(mask))


def test_masks_that_allow_all_allow_all(masks):
    for mask in masks:
        assert mask.to_dense(LENGTH).all() or not mask.allows_all
    assert (Full() & Causal()) == (Causal() & Full()) == Causal()


def user_pattern(cls):
    """A class with the fields, `at` and hints of a pattern of the library, but not derived from it."""
    kept = ("__annotations__", "__post_init__", "__module__")
    members = {name: value for name, value in vars(cls).items() if name in kept or not name.startswith("__")}
    return dataclasses.dataclass(frozen=True)(type(f"User{cls.__name__}", (Mask,), members))


def schedule_of(mask, length=600):
    def arrays(part):
        for group in part.schedule.groups:
            yield from (group.first.tolist(), group.keys.tolist(), group.state.tolist())

    sub_masks = decompose(mask & Causal(), length, length, 16, 4, False)
    return [(part.selection, part.schedule.block, part.over_quotients, *arrays(part)) for part in sub_masks]


@pytest.mark.parametrize("mask", [mask for mask in PATTERNS if type(mask).__module__.endswith(".patterns")], ids=repr)
def test_patterns_of_users_have_the_schedules_of_those_of_the_library(mask):
    copy = user_pattern(type(mask))(**{field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)})
    assert not isinstance(copy, type(mask)) and schedule_of(copy) == schedule_of(mask)


@dataclasses.dataclass(frozen=True)
class Wider(Window):
    """Derives from a pattern of the library and redefines which pairs it allows."""

    def at(self, q, k):
        return abs(q - k) <= 2 * self.left


@dataclasses.dataclass(frozen=True)
class EvenKeys(Full):
    """Derives from the mask that intersections drop, and allows fewer pairs."""

    def at(self, q, k):
        return (q == q) & (k % 2 == 0)


@dataclasses.dataclass(frozen=True)
class Named(Window):
    """Derives from a pattern of the library and keeps its pairs."""

    name: str = "near"


def test_subclass_that_redefines_at_loses_the_hints_of_its_base():
    wider = Wider(3)
    assert (
        wider.band() is None and wider.lookback().slots() == (0, None) and wider.needs_search() and not wider.relative
    )
    assert wider.tile(0, 5, 90, 95) == (True, False) and wider.fold(3)[1] is False
    even = EvenKeys()
    assert not even.allows_all and even.band() is None
    for mask in (Causal() & even, even & Causal()):
        np.testing.assert_array_equal(mask.to_dense(LENGTH), (K <= Q) & (K % 2 == 0))


def test_subclass_that_keeps_at_keeps_the_hints_of_its_base():
    named = Named(3)
    assert named.band() == (3, 3) and named.lookback().slots() == (0, 3) and named.relative and not named.needs_search()


def test_global_tokens_beyond_any_sequence_cost_nothing():
    assert [len(x) for term in Global(1 << 30).union_terms() if (x := term.query_indices(100)) is not None] == [100]
    assert Where(lambda i, j: i == j).union_terms()[0].key_indices(5) is None
