"""Orders of similar words: planted clusters, and the trees and classes built from an order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpnlp.ops.softmax.structured.class_based import equal_mass_classes
from hpnlp.ops.softmax.structured.trees import huffman_tree
from hpnlp.ops.softmax.structured.word_order import similarity_order
from tests.messages import raises


def planted(clusters=8, each=12, seed=0):
    """Well separated clusters of words, scattered over the ids: `(cluster of a word, embeddings)`."""
    rng = np.random.default_rng(seed)
    member = rng.permutation(np.repeat(np.arange(clusters), each))
    vectors = 5 * rng.standard_normal((clusters, 16))[member] + 0.3 * rng.standard_normal((member.size, 16))
    return member, vectors


def leaves(tree, node=0):
    """The words of a tree from left to right."""
    if tree.vocab == 1:
        return [0]
    return [w for child in tree.children[node] for w in ([~child] if child < 0 else leaves(tree, child))]


def depths_of(tree):
    return (tree.signs != 0).sum(axis=1)


@pytest.mark.parametrize(("clusters", "each"), [(8, 12), (4, 32), (2, 33), (96, 1)])
def test_clusters_stand_side_by_side(clusters, each):
    member, vectors = planted(clusters, each)
    order = similarity_order(vectors, seed=3)
    np.testing.assert_array_equal(np.sort(order), np.arange(clusters * each))
    assert (np.diff(member[order]) != 0).sum() == clusters - 1
    np.testing.assert_array_equal(order, similarity_order(vectors, seed=3))


def test_classes_of_an_order_are_its_clusters():
    member, vectors = planted()
    order = similarity_order(vectors)
    classes = equal_mass_classes(np.ones(96), 8, order=order)
    assert len({(a, b) for a, b in zip(member, classes.class_of, strict=True)}) == 8
    for count in (1, 7, 96):
        sizes = np.diff(equal_mass_classes(np.ones(96), count, order=order).starts)
        assert sizes.max() - sizes.min() <= 1
    heavy = equal_mass_classes(np.where(member == member[order[0]], 1e6, 1.0), 8, order=order, power=1.0)
    assert set(member[heavy.order[: heavy.starts[4]]]) == {member[order[0]]}, "classes of mass, not of words"


def halves(words, below):
    """Mask of the words in the first half of their node: at each depth the split that fits and is nearest to the middle."""
    share = 2.0**-below
    first, room = np.zeros(len(words), bool), np.array([0.5, 0.5])
    early = np.cumsum(share) - share / 2 < 0.5
    for depth in np.unique(below):
        here, unit = np.flatnonzero(below == depth), 2.0**-depth
        fits = [k for k in range(len(here) + 1) if k * unit <= room[0] and (len(here) - k) * unit <= room[1]]
        taken = fits[np.abs(np.array(fits) - early[here].sum()).argmin()]
        first[here[:taken]] = True
        room -= [taken * unit, (len(here) - taken) * unit]
    return first


def dealt(words, depths, level=0):
    """The leaves from left to right of the tree over an order, one node at a time."""
    if len(words) == 1:
        return words.tolist()
    first = halves(words, (depths[words] - level).astype(float))
    return dealt(words[first], depths, level + 1) + dealt(words[~first], depths, level + 1)


COUNTS = st.one_of(
    st.lists(st.one_of(st.integers(1, 5), st.integers(1, 10**12)), min_size=1, max_size=60),
    st.sampled_from([2, 4, 8, 16, 32]).map(lambda size: [7] * size),
)


@settings(max_examples=60)
@given(COUNTS, st.randoms())
def test_ordered_tree_matches_node_by_node_definition(counts, random):
    """Depths are Huffman's, and every node divides its words as the definition does."""
    order = np.array(random.sample(range(len(counts)), len(counts)))
    tree = huffman_tree(np.array(counts), order)
    depths = depths_of(huffman_tree(np.array(counts)))
    np.testing.assert_array_equal(depths_of(tree), depths)
    assert leaves(tree) == dealt(order, depths)
    if set(counts) == {7}:
        assert leaves(tree) == order.tolist()


def test_similar_words_share_their_nodes():
    """The paths of two words of a cluster separate deeper than those of words of different clusters, for any counts."""
    member, vectors = planted(clusters=4, each=32)
    counts = np.random.default_rng(1).integers(1, 9, 128)
    tree = huffman_tree(counts, similarity_order(vectors))
    shared = (tree.nodes[:, None] == tree.nodes[None]) & (tree.signs[:, None] == tree.signs[None])
    shared &= tree.signs[:, None] != 0
    together = np.cumprod(shared, axis=2).sum(axis=2)
    same = member[:, None] == member[None]
    off = ~np.eye(128, dtype=bool)
    assert together[same & off].mean() > 2 * together[~same].mean()


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: similarity_order(np.full((3, 2), np.nan)), "finite vector"),
        (lambda: similarity_order(np.ones(3)), r"\[V, E\]"),
        (lambda: similarity_order(np.ones((0, 2))), r"\[V, E\]"),
        (lambda: huffman_tree(np.ones(3), np.array([0, 1, 1])), "each of the ids 0 to 2 once"),
        (lambda: huffman_tree(np.ones(3), np.array([0, 1])), r"order: int64 of shape \(2,\)"),
        (lambda: equal_mass_classes(np.ones(3), 2, order=np.array([0.0, 1.0, 2.0])), "order: float64"),
    ):
        raises(message, call)


def test_one_feature_is_sorted():
    values = np.random.default_rng(0).standard_normal(200)
    order = similarity_order(values[:, None])
    steps = np.diff(values[order])
    assert (steps > 0).all() or (steps < 0).all()


@pytest.mark.parametrize("scale", [1e30, 1e300, 1e-30, 1e-300])
def test_order_does_not_depend_on_scale(scale):
    _, vectors = planted()
    np.testing.assert_array_equal(similarity_order(vectors * scale), similarity_order(vectors))


def test_equal_embeddings_give_a_permutation():
    np.testing.assert_array_equal(np.sort(similarity_order(np.zeros((40, 3)))), np.arange(40))
    assert similarity_order(np.ones((1, 3))).tolist() == [0]
