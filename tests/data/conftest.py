"""A small corpus, and a new cache for every test."""

import pathlib
import random

import pytest

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "seven", "lazy", "dogs", "while", "wizards", "brew", "tea"]


def story(seed: int, length: int) -> str:
    """Text of about `length` characters, different for every seed."""
    draw = random.Random(seed)
    sentences = [f"Story {seed}."]
    while sum(map(len, sentences)) < length:
        sentences.append(" ".join(draw.choices(WORDS, k=7)).capitalize() + draw.choice([".\n", "?\n", ", said Zoë.\n"]))
    return " ".join(sentences)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> pathlib.Path:
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HPNLP_CACHE", str(path))
    return path


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> pathlib.Path:
    """A directory of 40 text files of 20 to 800 characters."""
    root = tmp_path_factory.mktemp("stories")
    for i in range(40):
        (root / f"{i:02}.txt").write_text(story(i, 20 * (i + 1)), "utf-8")
    return root
