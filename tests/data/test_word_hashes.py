"""Hashes of words: published vectors, equality with a loop over bytes, and texts of many words or none."""

import random

import numpy as np
import pytest

from hpnlp.data.tokenizers import word_hashes
from tests import projection_reference as reference

# Words with their hashes, as the package mmh3 5.3.1 computes them (mmh3_x86_128_digest, seed 0).
VECTORS = {
    "": (0x00000000, 0x00000000, 0x00000000, 0x00000000),
    "the": (0x5A568314, 0x34F7BF2E, 0x34F7BF2E, 0x34F7BF2E),
    "straße": (0x2E5AA75E, 0xF748E903, 0x5370536B, 0x5370536B),
    "naïve": (0xC9913695, 0xBA9CCB3D, 0x12B5032D, 0x12B5032D),
    "日本語": (0xBDFCBA6F, 0xC3F6209C, 0xA8A354FD, 0x3B43196F),
    "🙂": (0xAF95C332, 0x59512B97, 0x59512B97, 0x59512B97),
    "größenordnungsmäßig": (0xD061CDBE, 0x458F5AC8, 0x9DC10AD8, 0xD78E4D3E),
}


@pytest.mark.parametrize("word", VECTORS)
def test_hashes_equal_published_vectors(word):
    assert tuple(word_hashes.hashes([word.encode()])[0].tolist()) == VECTORS[word]
    assert tuple(reference.murmur(word.encode())) == VECTORS[word]


def test_hashes_equal_a_loop_over_the_bytes_of_1000_words():
    draw = random.Random(0)
    alphabet = "abcxyzäöüßéñøżλжאहあ漢🙂"
    words = ["".join(draw.choices(alphabet, k=draw.randrange(20))).encode() for _ in range(1000)]
    assert max(map(len, words)) > 32 and any(max(word, default=0) > 127 for word in words)
    np.testing.assert_array_equal(word_hashes.hashes(words), [reference.murmur(word) for word in words])


def test_words_are_in_lower_case_and_split_as_stated():
    assert word_hashes.split("Über  f(x)\n", "whitespace") == ["über", "f(x)"]
    assert word_hashes.split("Über  f(x)\n", "letters") == ["über", "f", "(", "x", ")"]
    assert word_hashes.split("readHTTPHeader_2(Éclair)", "identifiers") == [
        "read",
        "http",
        "header",
        "2",
        "(",
        "éclair",
        ")",
    ]
    assert word_hashes.split("A b", "characters") == ["a", " ", "b"]


def test_texts_of_no_word_and_of_many_words():
    assert word_hashes.encode(" \n", "whitespace").shape == (0, 4)
    result = word_hashes.encode("a b " * 100_000, "whitespace")
    assert result.shape == (200_000, 4)
    np.testing.assert_array_equal(np.unique(result, axis=0), np.sort(word_hashes.hashes([b"a", b"b"]), axis=0))
