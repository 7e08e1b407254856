"""Documents with a key of three words and a value, and texts with two words of a key, whose value is hidden."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.reading.sources import File

DOCUMENTS = 1_000
VALUES = 20
_KEY_WORDS, _COMMON_WORDS = 300, 40
_COMMON = {"document": 6, "text": 2}  # common words in a document, and in a text


def examples(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates 1,000 documents, and three texts of each: "text", "answer" (the value), "document" and "group" (its number).

    A key has three of 300 words; no two keys share two words. A text has two words of the key of its document, in any order,
    so that no other document has both. Documents also have 4 of 40 common words, and texts 2, at any place before the value.
    The value is one of 20, at random, so that it cannot be predicted without the document. All texts of a document are one
    group.
    """
    draw = random.Random(0)
    taken: set[tuple[int, int]] = set()
    for number in range(DOCUMENTS):
        key: list[int] = []
        while not key or taken & set(itertools.combinations(key, 2)):
            key = sorted(draw.sample(range(_KEY_WORDS), 3))
        taken.update(itertools.combinations(key, 2))
        value = f"value{draw.randrange(VALUES)}"
        document = _text([f"key{word}" for word in key], value, draw, "document")
        for pair in itertools.combinations(key, 2):
            text = _text([f"key{word}" for word in pair], value, draw, "text")
            yield {"text": text, "answer": value, "document": document, "group": str(number)}


def _text(words: list[str], value: str, draw: random.Random, part: str) -> str:
    """The words among common words, and the value at the end."""
    words = [*words, *(f"common{word}" for word in draw.sample(range(_COMMON_WORDS), _COMMON[part]))]
    return " ".join([*draw.sample(words, len(words)), value])


KEY_VALUES = Generated(examples)
