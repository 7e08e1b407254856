"""Neighbours by equal contexts: against a search, with limits, and of tokens of any tokenizer."""

import numpy as np
import pytest

from hpnlp.data import tokenizers
from hpnlp.retrieval import suffix
from hpnlp.types import InputError
from tests.messages import raises

TEXT = np.frombuffer(b"a cat sat, a cat ran; the cat sat, the dog ran. " * 4, np.uint8)
IS_WORD = np.array([chr(i).isalnum() for i in range(256)])


def test_neighbours_of_limited_positions_are_earlier_tokens():
    kind = suffix.find("suffix(shortest=2,longest=4,words=1,k=3)")
    positions = np.arange(10, len(TEXT))
    limits = np.minimum(positions, 100)
    every, limited = suffix.neighbours(kind, TEXT, IS_WORD, [(positions, positions), (positions, limits)])
    assert every.tokens.shape == (len(positions), kind.contexts, 3) and kind.contexts == 4
    for column, length in enumerate((2, 3, 4)):
        for found, bounds in ((every, positions), (limited, limits)):
            for row, (i, limit) in enumerate(zip(positions, bounds, strict=True)):
                equal = [j for j in range(length, limit) if (TEXT[j - length : j] == TEXT[i - length : i]).all()]
                expected = [int(TEXT[j]) for j in reversed(equal)][:3]
                assert [t for t in found.tokens[row, column].tolist() if t >= 0] == expected
                assert found.count[row, column] == len(equal)


def test_words_of_any_tokenizer():
    is_word = suffix.word_tokens(tokenizers.build("bytes"))
    assert is_word.shape == (264,)
    assert [bool(is_word[i]) for i in (*b"aZ_9 -", 200, 256)] == [True] * 4 + [False] * 2 + [True, False]
    words = tokenizers.build("words(20)", [b"the cat, the dog"])
    assert {words.decode([i]).strip() for i in np.flatnonzero(suffix.word_tokens(words)).tolist()} >= {b"cat", b"dog"}


def test_invalid_specs_raise():
    for spec, message in (
        ("suffix(longest=1)", "shortest=2, longest=1: expected shortest <= longest"),
        ("sufix", "did you mean 'suffix'?"),
    ):
        raises(message.replace("(", r"\(").replace("?", r"\?"), suffix.find, spec)


def test_positions_that_see_themselves_raise():
    with pytest.raises(InputError, match="would see itself or a later one"):
        suffix.neighbours(suffix.Suffix(), TEXT, IS_WORD, [(np.array([3]), np.array([4]))])
