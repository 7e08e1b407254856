"""Tokenizers without a vocabulary: hashes of words and of n-grams, files, and errors."""

import json

import numpy as np
import pytest

from hpnlp.data.config import DataConfig
from hpnlp.data.stream import prepare
from hpnlp.data.tokenizers import build, load, word_hashes
from hpnlp.tasks.classification import ClassifierConfig
from hpnlp.tasks.vocabulary import Sizes, fill_sizes
from hpnlp.types import InputError, Tokenizer
from tests import projection_reference as reference
from tests.messages import raises

TEXT = "Über straße, straße\nNAÏVE 日本語".encode()


@pytest.mark.parametrize("spec", ["hashed_words(by=letters)", "hashed_ngrams(1000, words=3, least=2, most=4)"])
def test_tokenizers_follow_the_protocol_and_load_as_the_same(spec, tmp_path):
    tokenizer = build(spec)
    assert isinstance(tokenizer, Tokenizer) and not tokenizer.lossless and tokenizer.bos_id is None
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32 and tokenizer.decode(ids) == b"" and not len(tokenizer.encode(b" \n"))
    np.testing.assert_array_equal(tokenizer.encode_prompt(TEXT.decode()), ids)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    np.testing.assert_array_equal(load(str(tmp_path)).encode(TEXT), ids)


def test_ids_of_words_are_the_bits_of_their_hashes():
    ids = build("hashed_words").encode(TEXT).reshape(-1, 4).view(np.uint32)
    expected = [reference.murmur(word.encode()) for word in TEXT.decode().lower().split()]
    np.testing.assert_array_equal(ids, expected)


def test_ids_of_ngrams_are_those_of_words_and_characters():
    """The words, the pair of words, and n-grams of the characters of <ab> and <c>."""
    ids = build("hashed_ngrams(65536, words=2, least=3, most=4)").encode(b"AB c")
    ngrams = [b"\1ab", b"\1c", b"\1ab c", b"<ab", b"ab>", b"<ab>", b"<c>"]
    assert ids.tolist() == [1 + reference.murmur(ngram)[0] % 65535 for ngram in ngrams]
    words = build("hashed_ngrams(65536, words=1, most=0)").encode(b"AB c ab")
    assert words.tolist() == [ids[0], ids[1], ids[0]]
    assert set(build("hashed_ngrams(2)").encode(b"a b c")) == {1}


def test_invalid_arguments_raise():
    for spec, message in (
        ("hashed_words(by=sounds)", "unknown split of words by 'sounds'"),
        ("hashed_ngrams(1)", r"expected a number of ids, 2 to 16777216, as in hashed_ngrams\(65536\)"),
        ("hashed_ngrams(100, words=0)", "words=0, least=3, most=6"),
        ("hashed_ngrams(100, least=5, most=4)", "or most=0"),
        ("hashed_ngrams", "size"),
    ):
        raises(message, build, spec)


@pytest.mark.parametrize("spec", ["hashed_words", "hashed_ngrams(100)"])
def test_corpora_of_text_raise(spec, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(InputError, match="hashes cannot be decoded to text: set it to 'bytes'"):
        prepare(DataConfig(path=str(tmp_path / "a.txt"), tokenizer=spec))


def test_encoders_with_a_table_raise():
    sizes = Sizes(build("hashed_words").vocab_size, classes=2)
    raises("choose task='hashed_classification'", lambda: fill_sizes(ClassifierConfig(), sizes, 16))


def test_damaged_files_raise(tmp_path):
    path = tmp_path / "tokenizer.json"
    for form, message in (
        ({"type": "hashed_words", "version": 1, "by": "sounds"}, "is damaged: .*save it again"),
        ({"type": "hashed_ngrams", "version": 1, "size": "many"}, "is damaged"),
        ({"type": "hashed_words", "version": 99}, "format version 99, expected 1"),
    ):
        path.write_text(json.dumps(form))
        raises(message, load, str(path))


def test_every_split_keeps_all_words_of_a_long_text():
    text = "x y " * 5000
    for by in word_hashes.SPLITS:
        words = word_hashes.split(text, by)
        assert len(build(f"hashed_words(by={by})").encode(text.encode())) == 4 * len(words)
