"""Texts whose labels or next letters are learned in a few hundred steps, so that fixtures differ in cost and not in data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CLASSES = "abcd"
LETTERS = "efghijklmnop"
MARKED = 0.1  # share of the letters that are those of the class; at least one
LIKELY = 0.9  # probability of the likely next letter


def write_labelled(path: Path, count: int, least: int, most: int, *, long: float = 1.0) -> None:
    """Writes texts of random letters, among which those of one of four classes are spread, as JSONL.

    Any mixer can tell the classes apart, since no token depends on another one.

    Args:
      path: The file.
      count: Number of texts.
      least: Letters of the shortest text.
      most: Letters of the longest one.
      long: Share of the texts that have `most` letters; other lengths are uniform in the lower eighth of the range.
    """
    rng, lines = np.random.default_rng(0), []
    for _ in range(count):
        length = most if rng.random() < long else int(rng.integers(least, least + (most - least) // 8 + 1))
        label = CLASSES[rng.integers(len(CLASSES))]
        letters = rng.choice(list(LETTERS), length)
        letters[rng.choice(length, max(1, round(MARKED * length)), replace=False)] = label
        lines.append(json.dumps({"text": "".join(letters), "label": label}))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def write_chain(path: Path, lines: int, length: int = 63) -> None:
    """Writes lines of a Markov chain, in which each letter has a likely successor.

    Args:
      path: The file.
      lines: Number of lines.
      length: Letters of a line.
    """
    rng = np.random.default_rng(0)
    likely = rng.permutation(len(LETTERS))
    states = rng.integers(len(LETTERS), size=(length, lines))
    follows = rng.random((length, lines)) < LIKELY
    for i in range(1, length):
        states[i] = np.where(follows[i], likely[states[i - 1]], states[i])
    texts = ("".join(LETTERS[i] for i in line) for line in states.T)
    path.write_text("\n".join(texts) + "\n", "utf-8")
