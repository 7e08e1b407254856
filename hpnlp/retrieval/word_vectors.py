"""Word vectors with their words: nearest neighbours, analogies and projections to the plane."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jax.typing import ArrayLike

from hpnlp.spec import shortened
from hpnlp.types import InputError, Tokenizer

_SIGNS = re.compile(r"\s+([+-])\s+")


def _unit_norm(x: np.ndarray) -> np.ndarray:
    """Vectors along the last axis divided by their norms, which may be beyond the range of float32; zeros stay zeros."""
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0.0)
    x = x / np.where(largest > 0, largest, 1)
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norms > 0, norms, 1)


@dataclasses.dataclass(frozen=True)
class LeftOutVectors:
    """A text without one of its words, or the whole text.

    Attributes:
      word: The word that is left out; "" for the whole text.
      cosine: Cosine of the text and the neighbour that is followed.
      rank: Rank of that neighbour among the words that are not in the text, 1 for the nearest.
      nearest: The nearest neighbour.
    """

    word: str
    cosine: float
    rank: int
    nearest: str


class WordVectorTable:
    """Word vectors, found by their words.

    Attributes:
      words: The words, usually by falling frequency.
      vectors: float32 [V, D].
    """

    def __init__(self, words: Sequence[str], vectors: ArrayLike) -> None:
        """Makes a table.

        Args:
          words: The words, all different.
          vectors: [V, D] numbers, one row for each word.

        Raises:
          InputError: The numbers of words and rows differ, a word repeats, or a number is not finite.
        """
        self.words = list(words)
        self.vectors: np.ndarray = np.ascontiguousarray(vectors, np.float32)
        if self.vectors.ndim != 2 or self.vectors.shape[0] != len(self.words):
            raise InputError(
                f"{len(self.words)} words, and vectors of shape {self.vectors.shape}: expected one row for each word"
            )
        self._rows = {word: row for row, word in enumerate(self.words)}
        if len(self._rows) < len(self.words):
            raise InputError(f"the word {_first_repeated(self.words)!r} repeats: keep one row of it")
        finite = np.isfinite(self.vectors).all(axis=1)
        if not finite.all():
            raise InputError(f"the vector of {self.words[int(finite.argmin())]!r} has a number that is not finite")
        self._unit = _unit_norm(self.vectors)

    def __len__(self) -> int:
        return len(self.words)

    def row(self, word: str) -> int:
        """Row of a word.

        Returns:
          Its number.

        Raises:
          InputError: The word is not there; the message has the nearest spelled words.
        """
        if (row := self._rows.get(word)) is not None:
            return row
        near = difflib.get_close_matches(word, self._candidates(word), n=3, cutoff=0.6)
        known = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {len(self):,} others"
        raise InputError(f"the word {shortened(word, 60)} has no vector: {known}")

    def _candidates(self, word: str) -> list[str]:
        """Words of a length from which `word` may be misspelled."""
        if word.lower() in self._rows:
            return [word.lower()]
        return [other for other in self.words if abs(len(other) - len(word)) <= max(2, len(word) // 3)]

    def __getitem__(self, word: str) -> np.ndarray:
        return self.vectors[self.row(word)]

    def nearest(self, vector: ArrayLike, count: int = 10, without: Iterable[int] = ()) -> list[tuple[str, float]]:
        """Words whose vectors have the largest cosine with a vector.

        Args:
          vector: [D] numbers.
          count: Number of words.
          without: Rows that are left out.

        Returns:
          `(word, cosine)` of each, the largest first.

        Raises:
          InputError: `count` is under 1, or the vector is zero.
        """
        if count < 1:
            raise InputError(f"count={count}: expected at least 1 neighbour")
        if not np.any(vector):
            raise InputError("a vector of zeros has no direction, and no cosine with others: choose other words")
        scores = self._unit @ _unit_norm(np.asarray(vector, np.float32))
        scores[list(without)] = -np.inf
        count = min(count, len(self) - len(set(without)))
        best = np.argpartition(-scores, max(count - 1, 0))[:count] if count else np.zeros(0, np.int64)
        best = best[np.lexsort((best, -scores[best]))]
        return [(self.words[row], float(scores[row])) for row in best]

    def neighbours(self, word: str, count: int = 10) -> list[tuple[str, float]]:
        """Nearest neighbours of a word, without itself.

        Args:
          word: The word.
          count: Number of neighbours.

        Returns:
          `(word, cosine)` of each, the largest first.

        Raises:
          InputError: The word is not there, or `count` is under 1.
        """
        row = self.row(word)
        if not np.any(self.vectors[row]):
            raise InputError(
                f"the vector of {shortened(word, 60)} is zero, so that it has no cosine with others: choose another word"
            )
        return self.nearest(self.vectors[row], count, [row])

    def analogy(self, positive: Sequence[str], negative: Sequence[str], count: int = 10) -> list[tuple[str, float]]:
        """Words nearest to a sum of words minus other words, as "king - man + woman": without the words of the sum.

        Args:
          positive: Words that are added.
          negative: Words that are subtracted.
          count: Number of words.

        Returns:
          `(word, cosine)` of each, the largest first.

        Raises:
          InputError: A word is not there, or there is none.

        References:
          Mikolov et al. 2013, "Linguistic regularities in continuous space word representations"; Levy and Goldberg 2014,
          "Linguistic regularities in sparse and explicit word representations" (3CosAdd: unit vectors are added).
        """
        added, subtracted = [self.row(word) for word in positive], [self.row(word) for word in negative]
        if not added:
            raise InputError("an analogy needs a word that is added: write 'king - man + woman'")
        vector = self._unit[added].sum(axis=0) - self._unit[subtracted].sum(axis=0)
        return self.nearest(vector, count, [*added, *subtracted])

    def evaluate(self, expression: str, count: int = 10) -> list[tuple[str, float]]:
        """Neighbours of a word, or of an expression as "king - man + woman".

        Args:
          expression: A word; or words with + and - between them, which have spaces on both sides.
          count: Number of neighbours.

        Returns:
          `(word, cosine)` of each, the largest first.

        Raises:
          InputError: A word is not there, or the expression is incomplete.
        """
        words = expression_words(expression)
        if len(words) == 1:
            return self.neighbours(words[0], count)
        signed = list(zip(*signed_words(expression), strict=True))
        added, subtracted = ([word for word, s in signed if s == sign] for sign in (1, -1))
        return self.analogy(added, subtracted, count)

    def without_each(self, text: str, expected: str = "") -> tuple[str, LeftOutVectors, list[LeftOutVectors]]:
        """Leaves out each word of a text in turn, and ranks its neighbours again.

        The vector of a text is the sum of the unit vectors of its words, as of `analogy`. The neighbours are always words that
        are not in the whole text, so that ranks compare.

        Args:
          text: Words separated by blanks, or with ` + ` and ` - ` between them, at least two.
          expected: The neighbour to follow; by default the nearest one of the whole text.

        Returns:
          `(neighbour that is followed, the whole text, the text without each of its words)`.

        Raises:
          InputError: A word is not there, there are fewer than two, `expected` is in the text, no word is outside of it, or the
            vectors of the text, or those without a word, add up to zero.

        Cost:
          One product of the N + 1 texts with the V vectors.
        """
        words, signs = signed_words(text)
        if len(words) < 2:
            raise InputError(f"{shortened(text, 60)}: expected at least 2 words, each of which is left out in turn")
        rows = np.array([self.row(word) for word in words])
        if expected and self.row(expected) in rows:
            raise InputError(f"the word {shortened(expected, 60)} is in the text: expected a neighbour of it")
        signed = self._unit[rows] * np.array(signs, np.float32)[:, None]
        # Sums of the other words, and not the total less a word, which leaves rounding errors where the others cancel.
        is_kept = np.concatenate([np.ones((1, len(words))), 1 - np.eye(len(words))]).astype(np.float32)
        sums = is_kept @ signed
        for word, vector in zip(["", *words], sums, strict=True):
            if not vector.any():
                raise InputError(
                    f"the vectors of {shortened(text, 60)}{f' without {shortened(word, 60)}' if word else ''} add up to zero, "
                    "which has no cosine with others: choose other words"
                )
        if len(set(rows.tolist())) == len(self):
            raise InputError("all words are in the text, so that it has no neighbours: choose fewer words")
        scores = _unit_norm(sums) @ self._unit.T
        scores[:, rows] = -np.inf
        followed = self.row(expected) if expected else int(scores[0].argmax())
        cosines = scores[:, followed]
        ranks, nearest = 1 + (scores > cosines[:, None]).sum(axis=1), scores.argmax(axis=1)
        full, *without = (
            LeftOutVectors(word, float(cosine), int(rank), self.words[best])
            for word, cosine, rank, best in zip(["", *words], cosines, ranks, nearest, strict=True)
        )
        return self.words[followed], full, without

    def plane(self, words: Sequence[str], further_words: Sequence[str] = ()) -> np.ndarray:
        """Projection of the unit vectors of words to their first two principal components.

        Args:
          words: At least two words.
          further_words: M other words in the same plane, which do not determine the components.

        Returns:
          float32 [N + M, 2]. The largest entry of each column is positive, so that the picture does not flip.

        Raises:
          InputError: A word is not there, or there are fewer than two.
        """
        if len(words) < 2:
            raise InputError(f"a picture of {len(words)} words: expected at least 2")
        chosen = self._unit[[self.row(word) for word in words]]
        mean = chosen.mean(axis=0)
        directions = np.linalg.svd(chosen - mean, full_matrices=False)[2][:2]
        points = np.zeros((len(words) + len(further_words), 2), np.float32)
        points[: len(words), : len(directions)] = (chosen - mean) @ directions.T
        points[len(words) :, : len(directions)] = (
            self._unit[[self.row(word) for word in further_words]] - mean
        ) @ directions.T
        return points * np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1).astype(np.float32)


def expression_words(expression: str) -> list[str]:
    """Words of an expression.

    Args:
      expression: A word; or words with + and - between them, which have spaces on both sides.

    Returns:
      The words.

    Raises:
      InputError: A word is missing.
    """
    words = _SIGNS.split(expression.strip())[::2]
    if not all(words) or len(words) > 1 and any({"+", "-"} & set(word.split()) for word in words):
        raise InputError(
            f"{shortened(expression, 80)}: expected words with ' + ' or ' - ' between them, as 'a - b + c'"
        )
    return words


def signed_words(text: str) -> tuple[list[str], list[int]]:
    """Words of a text and their signs.

    Args:
      text: Words separated by blanks, or with ` + ` and ` - ` between them.

    Returns:
      `(words, 1 or -1 for each)`.

    Raises:
      InputError: A word is missing.
    """
    if not _SIGNS.search(text):
        return text.split(), [1] * len(text.split())
    words = expression_words(text)
    return words, [1, *(1 if sign == "+" else -1 for sign in _SIGNS.split(text.strip())[1::2])]


def token_vectors(vectors: np.ndarray, tokenizer: Tokenizer) -> WordVectorTable:
    """Vectors of the tokens of a tokenizer, under the text of each token.

    Args:
      vectors: [V, D], a row for each id; rows beyond the ids are left out.
      tokenizer: The tokenizer.

    Returns:
      The vectors of all tokens that have a text of their own; special tokens are left out.
    """
    special_ids = {getattr(tokenizer, f"{name}_id", None) for name in ("unk", "bos", "eos")}
    words: dict[str, int] = {}
    for row in range(min(tokenizer.vocab_size, len(vectors))):
        text = tokenizer.decode([row]).decode("utf-8", "surrogateescape")
        if text and row not in special_ids:
            words.setdefault(text, row)
    return WordVectorTable(list(words), vectors[list(words.values())])


def _first_repeated(words: Iterable[str]) -> str:
    seen: set[str] = set()
    for word in words:
        if word in seen:
            return word
        seen.add(word)
    return ""
