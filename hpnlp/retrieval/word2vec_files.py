"""Files of word vectors in the text and binary formats of word2vec, as the C program and gensim write them.

Both begin with a line of the number of words and the number of features. A line of the text format has a word and its
numbers, with single spaces between them. In the binary format, a word, a space and its numbers (little-endian float32)
follow one another; the C program ends each vector with a newline, and gensim does not.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hpnlp.atomic_file import replaced
from hpnlp.retrieval.word_vectors import WordVectorTable
from hpnlp.spec import shortened
from hpnlp.types import InputError

_MAX_WORD = 1 << 16  # bytes of a word, beyond which a binary file is taken for broken


def save_word2vec(table: WordVectorTable, path: str | os.PathLike[str], binary: bool = True) -> None:
    """Writes word vectors; byte for byte the file that gensim's `KeyedVectors.save_word2vec_format` writes.

    Args:
      table: The vectors.
      path: The file.
      binary: Binary or text.

    Raises:
      InputError: The file cannot be written, or a word has a space or a newline, which the formats cannot hold.
    """
    for word in table.words:
        if not word or any(character in word for character in " \n"):
            raise InputError(
                f"the word {shortened(word, 60)} is empty or has a space or a newline, which files of word2vec cannot hold: "
                "leave it out (without_spaces)"
            )
    with replaced(path, "the word vectors") as file:
        file.write(f"{len(table)} {table.vectors.shape[1]}\n".encode())
        for word, vector in zip(table.words, table.vectors, strict=True):
            name = word.encode("utf-8", "surrogateescape")
            if binary:
                file.write(name + b" " + vector.astype("<f4").tobytes())
            else:
                file.write(name + b" " + " ".join(map(str, vector)).encode() + b"\n")


def without_spaces(table: WordVectorTable) -> WordVectorTable:
    """The words of a table that files of word2vec can hold.

    Args:
      table: The vectors.

    Returns:
      A table without empty words and words with spaces or newlines.
    """
    kept = [row for row, word in enumerate(table.words) if word and not any(c in word for c in " \n")]
    return WordVectorTable([table.words[row] for row in kept], table.vectors[kept])


def load_word2vec(path: str | os.PathLike[str], binary: bool | None = None) -> WordVectorTable:
    """Reads a file of word vectors.

    Args:
      path: The file.
      binary: Whether it is binary; None finds out from its second line.

    Returns:
      The vectors.

    Raises:
      InputError: The file cannot be read; its first line has no two counts; it has more or fewer words than that; a line is
          broken (its number is in the message); or a word repeats.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): name a file of word vectors") from error
    end = data.find(b"\n")
    header = data[: max(end, 0)].split()
    if len(header) != 2 or not all(part.isdigit() for part in header):
        raise InputError(
            f"{path}, line 1: {shortened(data[:40].decode('utf-8', 'replace'), 40)}: expected the numbers of words and of "
            f"features, as files of word2vec begin{_missing_header(data)}"
        )
    count, dim = map(int, header)
    if dim < 1:
        raise InputError(f"{path}, line 1: {dim} features: expected at least 1")
    body = data[end + 1 :]
    read = _read_binary if (_is_binary(body, dim) if binary is None else binary) else _read_text
    words, vectors = read(body, count, dim, str(path))
    try:
        return WordVectorTable(words, vectors)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _missing_header(data: bytes) -> str:
    """The fix for a file of GloVe, which begins with a word and its vector; "" for other files."""
    lines = data.rstrip().split(b"\n")
    try:
        dim = len([float(number) for number in lines[0].split()[1:]])
    except ValueError:
        return ""
    return f"; a file of GloVe begins with a word: insert the line '{len(lines)} {dim}' before it" if dim > 1 else ""


def _is_binary(body: bytes, dim: int) -> bool:
    """Whether the first vector is not text: bytes after the first word and its space that no number in text has."""
    fields = body.split(b"\n", 1)[0].rstrip().split(b" ")[1 : 1 + dim]
    try:
        if [float(field) for field in fields]:
            return False
    except ValueError:
        pass
    # A broken line of a text file is text nevertheless. The word itself may have any bytes.
    vector = body.partition(b" ")[2][: 4 * dim]
    return any(byte < 9 or 13 < byte < 32 or byte > 126 for byte in vector)


def _read_text(body: bytes, count: int, dim: int, path: str) -> tuple[list[str], np.ndarray]:
    lines = body.split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    words: list[str] = []
    vectors = np.empty((0, dim), np.float32)
    for number, line in enumerate(lines[:count], 2):
        fields = line.rstrip().split(b" ")
        if len(fields) != dim + 1:
            raise InputError(
                f"{path}, line {number}: {len(fields) - 1} numbers after the word, and line 1 announces {dim}: correct the line"
            )
        if number == 2:  # `dim` is that of a line, and not only of line 1, so that there is memory for the vectors
            vectors = np.empty((min(len(lines), count), dim), np.float32)
        try:
            with np.errstate(over="ignore"):  # infinity, which WordVectorTable refuses
                vectors[number - 2] = [float(part) for part in fields[1:]]
        except ValueError:
            raise InputError(
                f"{path}, line {number}: {shortened(line.decode('utf-8', 'replace'), 60)} has a value that is no number"
            ) from None
        words.append(fields[0].decode("utf-8", "surrogateescape"))
    if len(lines) != count:
        raise InputError(
            f"{path} has {len(lines)} words, and line 1 announces {count}: correct the count, or restore the file"
        )
    return words, vectors


def _read_binary(body: bytes, count: int, dim: int, path: str) -> tuple[list[str], np.ndarray]:
    words: list[str] = []
    if count * (4 * dim + 1) > len(body):
        raise InputError(
            f"{path} has {len(body):,} bytes of vectors, and line 1 announces {count} words of {dim} features, which take "
            "more: correct the count, or restore the file"
        )
    vectors, start = np.empty((count, dim), "<f4"), 0
    for number in range(count):
        while body[start : start + 1] == b"\n":  # the C program's end of a vector
            start += 1
        space = body.find(b" ", start, start + _MAX_WORD)
        end = space + 1 + 4 * dim
        if space < 0 or end > len(body):
            raise InputError(
                f"{path} ends within word {number + 1}, and line 1 announces {count}: correct the count, or restore the file"
            )
        words.append(body[start:space].decode("utf-8", "surrogateescape"))
        vectors[number] = np.frombuffer(body, "<f4", dim, space + 1)
        start = end
    if body[start:].strip(b"\n"):
        raise InputError(
            f"{path} goes on after {count} words, which line 1 announces: correct the count, or restore the file"
        )
    return words, vectors
