"""Earlier positions with equal contexts: against a search of the text, and without a look at later tokens."""

import re

import hypothesis
import numpy as np
from hypothesis import strategies as st

from hpnlp.ops.search.contexts import NO_TOKEN, ContextHashes, ContextIndex
from tests.messages import raises

IS_WORD = np.array([chr(i).isalnum() for i in range(128)])
TEXT = b"the cat sat; the cat_sat on 7 mats, the_cat sat on the mat" * 3


def ids(text):
    return np.frombuffer(text, np.uint8)


def last_tokens(text, position, length):
    """The context by definition."""
    return text[max(0, position - length) : position]


def last_words(text, position, words):
    """The context by definition: the present word, and the words that ended before it."""
    found = re.findall(rb"[A-Za-z0-9]+|[^A-Za-z0-9]+", text[:position])
    is_open = bool(found) and found[-1].isalnum()
    present = found.pop() if is_open else b""
    before = [word for word in found if word.isalnum()]
    return present, tuple(before[max(0, len(before) - words) :])


def searched(text, contexts, positions, k):
    """The tokens after the last k earlier positions of equal contexts, most recent first, and the number of all of them."""
    tokens, counts = [], []
    for position in positions:
        equal = [i for i in range(min(position, len(text))) if contexts[i] == contexts[position]]
        following = [text[i] for i in reversed(equal)][:k]
        tokens.append(following + [NO_TOKEN] * (k - len(following)))
        counts.append(len(equal))
    return np.array(tokens).reshape(-1, k), np.array(counts)


def kinds():
    """Hashes of the positions and their contexts by definition."""
    for n in (1, 2, 3, 5, 8, 300):
        yield (lambda h, n=n: h.last_tokens(n)), (lambda text, i, n=n: last_tokens(text, i, n))
    for n in (0, 1, 3):
        yield (lambda h, n=n: h.last_words(IS_WORD, n)), (lambda text, i, n=n: last_words(text, i, n))


@hypothesis.given(st.one_of(st.just(TEXT), st.text("ab_ ", min_size=1, max_size=40).map(str.encode)))
@hypothesis.settings(max_examples=30, deadline=None)
def test_contexts_are_found_as_by_a_search(text):
    positions = np.arange(len(text) + 1)
    for hashed, defined in kinds():
        hashes = hashed(ContextHashes(ids(text)))
        found = ContextIndex.build(hashes[:-1], ids(text)).recent(hashes, positions, 4)
        tokens, counts = searched(text, [defined(text, i) for i in positions], positions, 4)
        np.testing.assert_array_equal(found.count, counts)
        np.testing.assert_array_equal(found.tokens, tokens)


def test_later_text_changes_nothing():
    """400 cuts, within words and between them: all tokens from a position on are replaced."""
    draw = np.random.default_rng(0)
    text = draw.choice(ids(b"abc _\n"), 500)
    before = [hashed(ContextHashes(text)) for hashed, _ in kinds()]
    for cut in draw.integers(0, 500, 400):
        other = np.concatenate([text[:cut], draw.choice(ids(b"abc _\n"), 500 - cut)])
        positions = np.arange(cut + 1)
        for (hashed, _), hashes in zip(kinds(), before, strict=True):
            changed = hashed(ContextHashes(other))
            np.testing.assert_array_equal(changed[: cut + 1], hashes[: cut + 1])
        found, expected = (
            ContextIndex.build(h[:-1], t).recent(h[positions], positions, 3)
            for h, t in ((changed, other), (hashes, text))
        )
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.count, expected.count)


def test_contexts_of_another_text_find_all_positions():
    index = ContextIndex.build(ContextHashes(ids(TEXT)).last_tokens(4)[:-1], ids(TEXT))
    query = ContextHashes(ids(b"a cat ")).last_tokens(4)[-1:]
    found = index.recent(query, np.array([10**9]), 2)
    assert found.count == TEXT.count(b"cat ") and found.tokens.tolist() == [[ord("s"), ord("s")]]


def test_invalid_contexts_raise():
    hashes = ContextHashes(ids(TEXT))
    raises("length=0", hashes.last_tokens, 0)
    raises("words=-1", hashes.last_words, IS_WORD, -1)
    raises("token 116: expected ids under 5", hashes.last_words, IS_WORD[:5], 1)
    raises("token -1", ContextHashes, np.array([3, -1]))
    raises("expected one of each for every position", lambda: ContextIndex.build(hashes.last_tokens(2), ids(TEXT)))
    raises(
        "k=0", ContextIndex.build(hashes.last_tokens(2)[:-1], ids(TEXT)).recent, hashes.last_tokens(2), np.arange(3), 0
    )
