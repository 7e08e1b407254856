"""Word vectors: neighbours, analogies, projections, and files in the formats of word2vec."""

import numpy as np
import pytest

from hpnlp.data import tokenizers
from hpnlp.ops.weights import quantize
from hpnlp.retrieval.word2vec_files import load_word2vec, save_word2vec, without_spaces
from hpnlp.retrieval.word_vectors import WordVectorTable, token_vectors
from hpnlp.tasks.word_embeddings import trained_vectors
from tests.messages import raises

WORDS = ["king", "queen", "man", "woman", "ñandú", "apple"]
VECTORS = np.array(
    [[3, 3, 0.5], [3, -3, 0.5], [0, 1, 0], [0, -1, 0], [1e-7, 123.5, -0.1], [0, 0, 2]], np.float64
)  # numpy's default dtype


@pytest.fixture
def table():
    return WordVectorTable(WORDS, VECTORS)


def test_neighbours_have_the_largest_cosines(table):
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    cosines = unit @ unit[0]
    expected = [WORDS[row] for row in np.argsort(-cosines) if row != 0]
    near = table.neighbours("king", 5)
    assert [word for word, _ in near] == expected
    np.testing.assert_allclose([cosine for _, cosine in near], sorted(np.delete(cosines, 0), reverse=True), rtol=1e-6)
    assert table.neighbours("king", 2) == near[:2] and len(table.neighbours("king", 99)) == 5


def test_analogies_leave_out_their_words(table):
    best = table.evaluate("king - man + woman", 3)
    assert best[0][0] == "queen" and not {"king", "man", "woman"} & {word for word, _ in best}
    assert best == table.analogy(["king", "woman"], ["man"], 3)


def test_without_each_word_ranks_are_those_of_the_other_words(table):
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    rows = {word: row for row, word in enumerate(WORDS)}
    outside = [rows[word] for word in ("queen", "man", "ñandú")]
    for text, signed in (
        ("king woman apple", {"king": 1, "woman": 1, "apple": 1}),
        ("king - woman + apple", {"king": 1, "woman": -1, "apple": 1}),
    ):
        expected = []
        for left_out in ("", *signed):
            x = sum(sign * unit[rows[word]] for word, sign in signed.items() if word != left_out)
            expected.append(unit[outside] @ x / np.linalg.norm(x))
        for name in ("", "queen"):
            followed, whole, without = table.without_each(text, name)
            assert followed == (name or WORDS[outside[int(np.argmax(expected[0]))]])
            at = outside.index(rows[followed])
            assert [x.word for x in (whole, *without)] == ["", *signed]
            assert [x.cosine for x in (whole, *without)] == pytest.approx([x[at] for x in expected], abs=1e-6)
            assert [x.rank for x in (whole, *without)] == [1 + np.sum(x > x[at]) for x in expected]
            assert [x.nearest for x in (whole, *without)] == [WORDS[outside[int(x.argmax())]] for x in expected]
    # A word that is there twice is left out once.
    assert table.without_each("king king woman", "queen")[2][1].cosine == pytest.approx(
        table.without_each("king woman", "queen")[1].cosine, abs=1e-6
    )


def test_texts_without_words_to_leave_out_raise(table):
    for text, expected, message in (
        ("king", "", "'king': expected at least 2 words, each of which is left out in turn"),
        ("king - king", "", "the vectors of 'king - king' add up to zero, which has no cosine with others"),
        ("king - king + apple", "", "the vectors of 'king - king [+] apple' without 'apple' add up to zero"),
        ("king man", "man", "the word 'man' is in the text: expected a neighbour of it"),
        (" ".join(WORDS), "", "all words are in the text, so that it has no neighbours"),
    ):
        raises(message, table.without_each, text, expected)


def test_plane_keeps_the_distances_of_points_in_a_plane():
    points = np.array([[1, 0, 0], [0, 1, 0], [-1, 0, 0], [0.6, 0.8, 0]])
    plane = WordVectorTable(list("abcd"), points).plane(list("abcd"))

    def distances(x):
        return np.linalg.norm(x[:, None] - x[None], axis=-1)

    np.testing.assert_allclose(distances(plane), distances(points), atol=1e-5)
    far = np.concatenate([points, [[0, 0, 1]]])  # a word outside of the plane, which it leaves as it is
    beside = WordVectorTable(list("abcde"), far).plane(list("abcd"), ["e"])
    np.testing.assert_allclose(distances(beside[:4]), distances(points), atol=1e-5)
    assert np.linalg.norm(beside[4] - beside[0]) == pytest.approx(1, abs=1e-5)  # (0, 0) is in the plane of the others


def test_vectors_of_a_tokenizer_have_no_special_tokens():
    tokenizer = tokenizers.build("words(9)", [b"one two, two"])
    vectors = np.arange(2.0 * tokenizer.vocab_size).reshape(-1, 2)
    table = token_vectors(vectors, tokenizer)
    assert table.words[0] == "two" and "<unk>" not in table.words
    np.testing.assert_array_equal(table["two"], vectors[tokenizer.encode(b"two")[0]])


def test_vectors_of_a_quantized_embedding(table):
    tokenizer = tokenizers.build("words(9)", [b"one two, two"])
    matrix = np.arange(2.0 * tokenizer.vocab_size, dtype=np.float32).reshape(-1, 2)
    exact, rounded = (trained_vectors({"embed": {"table": w}}, tokenizer) for w in (matrix, quantize(matrix)))
    assert exact.words == rounded.words
    np.testing.assert_allclose(rounded.vectors, exact.vectors, atol=0.1)


@pytest.mark.parametrize("binary", [False, True])
def test_files_are_read_back(table, tmp_path, binary):
    save_word2vec(table, tmp_path / "a", binary)
    for choice in (None, binary):
        loaded = load_word2vec(tmp_path / "a", choice)
        assert loaded.words == WORDS
        np.testing.assert_array_equal(loaded.vectors, table.vectors)


def test_files_of_the_c_program_are_read(tmp_path):
    """It ends lines of numbers by a space and a newline, and binary vectors by a newline."""
    (tmp_path / "text").write_bytes(b"2 2\na 1.5 -2 \nb 0 3 \n")
    numbers = np.array([[1.5, -2], [0, 3]], "<f4")
    (tmp_path / "binary").write_bytes(b"2 2\na " + numbers[0].tobytes() + b"\nb " + numbers[1].tobytes() + b"\n")
    for name in ("text", "binary"):
        loaded = load_word2vec(tmp_path / name)
        assert loaded.words == ["a", "b"]
        np.testing.assert_array_equal(loaded.vectors, numbers)


def test_words_with_control_characters_and_huge_vectors(tmp_path):
    (tmp_path / "text").write_bytes(b"2 3\na\x01b\tc 0.1 0.2 0.3\n\x7f 1 2 3\n")
    loaded = load_word2vec(tmp_path / "text")
    assert loaded.words == ["a\x01b\tc", "\x7f"]
    np.testing.assert_array_equal(loaded.vectors, np.array([[0.1, 0.2, 0.3], [1, 2, 3]], np.float32))
    table = WordVectorTable(["a", "b", "c"], [[3e38, 3e38], [1e-38, 1e-38], [0, 1]])  # norms beyond float32
    assert dict(table.neighbours("a")) == pytest.approx({"b": 1.0, "c": 0.5**0.5}, rel=1e-6)


def test_words_with_spaces_are_left_out():
    table = WordVectorTable(["a", "b c", "\n"], np.eye(3))
    assert without_spaces(table).words == ["a"]


BINARY = b"2 2\na " + np.array([1, 2], "<f4").tobytes() + b"b " + np.array([3, 4], "<f4").tobytes()


def test_broken_files_raise(tmp_path):
    for content, message in (
        (b"", "line 1: '': expected the numbers of words and of features"),
        (b"a 1 2\nb 3 4\n", "line 1: 'a 1 2.*a file of GloVe begins with a word: insert the line '2 2' before it"),
        (b"1 0\na\n", "line 1: 0 features: expected at least 1"),
        (b"3 2\na 1 2\nb 3 4\n", "has 2 words, and line 1 announces 3: correct the count"),
        (b"2 2\na 1 2\nb 3\n", "line 3: 1 numbers after the word, and line 1 announces 2: correct the line"),
        (b"2 2\na 1 2\nb 3 x\n", "line 3: 'b 3 x' has a value that is no number"),
        (b"2 2\na 1 2\na 3 4\n", "the word 'a' repeats: keep one row of it"),
        (b"2 2\na 1 2\nb 3 1e39\n", "the vector of 'b' has a number that is not finite"),
        (BINARY[:-1], "bytes of vectors, and line 1 announces 2 words|ends within word 2, and line 1 announces 2"),
        (BINARY + b"c \x00", "goes on after 2 words, which line 1 announces"),
        (b"9" + BINARY[1:], "line 1 announces 9 words of 2 features, which take more"),
    ):
        (tmp_path / "a").write_bytes(content)
        raises(message, load_word2vec, tmp_path / "a")


def test_invalid_arguments_raise(table):
    for call, message in (
        (lambda t: t["quen"], "the word 'quen' has no vector: did you mean 'queen'?"),
        (lambda t: t["zzzzzz"], "the word 'zzzzzz' has no vector: there are 6 others"),
        (lambda t: t.evaluate("king - men"), "the word 'men' has no vector: did you mean 'man'"),
        (lambda t: t.evaluate("king - "), "'king - ': expected words with ' [+] ' or ' - ' between them|no vector"),
        (lambda t: t.analogy([], ["man"]), "an analogy needs a word that is added"),
        (lambda t: t.neighbours("king", 0), "count=0: expected at least 1 neighbour"),
        (lambda t: WordVectorTable(["a", "b"], np.array([[0.0, 0], [1, 1]])).evaluate("a"), "the vector of 'a' is"),
        (lambda t: t.evaluate("king - king"), "a vector of zeros has no direction, and no cosine with others"),
        (lambda t: t.plane(["king"]), "a picture of 1 words: expected at least 2"),
        (lambda t: WordVectorTable(["a"], np.eye(2)), r"1 words, and vectors of shape \(2, 2\): expected one row"),
        (lambda t: WordVectorTable(["a", "a"], np.eye(2)), "the word 'a' repeats"),
        (lambda t: save_word2vec(WordVectorTable(["a b"], np.eye(1)), "x"), "has a space or a newline"),
    ):
        raises(message, call, table)


@pytest.mark.oracle
@pytest.mark.parametrize("binary", [False, True])
def test_files_are_those_of_gensim(table, tmp_path, binary):
    gensim = pytest.importorskip("gensim", reason="pip install gensim==4.4.0")
    save_word2vec(table, tmp_path / "ours", binary)
    vectors = gensim.models.KeyedVectors(3)
    vectors.add_vectors(WORDS, np.asarray(VECTORS, np.float32))
    vectors.save_word2vec_format(str(tmp_path / "theirs"), binary=binary)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    loaded = gensim.models.KeyedVectors.load_word2vec_format(str(tmp_path / "ours"), binary=binary)
    assert loaded.index_to_key == load_word2vec(tmp_path / "theirs").words
    np.testing.assert_array_equal(loaded.vectors, load_word2vec(tmp_path / "theirs").vectors)
    ours = table.evaluate("king - man + woman", 3)
    theirs = loaded.most_similar(["king", "woman"], ["man"], topn=3)
    assert [word for word, _ in ours] == [word for word, _ in theirs]
    np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], rtol=1e-5)
