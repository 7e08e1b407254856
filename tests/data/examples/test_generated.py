"""Generated examples: a small directory in place of the standard library, and numbers in words."""

import json
import re

import pytest

from hpnlp.data.examples import ClassificationConfig, Seq2SeqConfig, generated, prepare_examples
from hpnlp.data.examples.generated import number_words, standard_library
from hpnlp.data.reading import sources
from tests.messages import raises

SOURCE = '''
"""A module of PACKAGE."""
import PACKAGE

@decorator
def NAME(x, *, key=1):
    """Adds the NAME of PACKAGE to things.

    More text.
    """
    # a comment
    total = PACKAGE.add(x, key) + _PACKAGE.other(len(x))
    for value in range(10):
        total += PACKAGED.value(value) @ key
    def inner():
        """Not an example of its own."""
    return total

class C:
    async def method_NAME(self):
        """Too few words."""
        if True:
            await self.a_rather_long_name_of_NAME_that_makes_the_function_long_enough()
            return "{}".format(self)

    def short(self):
        return 1
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    for package in ("mail", "web"):
        (root / package).mkdir(parents=True)
        for i in range(6):
            text = SOURCE.replace("PACKAGE", package).replace("NAME", f"{package}_{i}")
            (root / package / f"m{i}.py").write_text(text)
        (root / package / "z.py").write_text(text)
    (root / "single.py").write_text(SOURCE)
    (root / "bad.py").write_text("def f(:\n  pass '''")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(standard_library, "_MIN_FUNCTIONS", 5)
    monkeypatch.setattr(standard_library, "_LINES_SHARE", 1.0)
    return root


def records(name, cache):
    (source,), heldout, challenge, group_field = generated.find(name, str(cache))
    assert group_field == "group" and not challenge and not heldout
    with open(source.files[0].path) as file:
        return [json.loads(line) for line in file]


def test_functions_are_labelled_with_their_package(root, cache):
    rows = records("stdlib_functions", cache)
    assert sorted({row["label"] for row in rows}) == ["mail", "web"]
    assert sorted({row["group"] for row in rows}) == [
        f"{package}/m{i}.py" for package in ("mail", "web") for i in range(6)
    ]
    assert len(rows) == 24 == len({row["text"] for row in rows})
    text = rows[0]["text"]
    assert text.startswith("def mail_0(x, *, key=1):\n    total = package.add(x, key) + package.other(len(x))")
    assert not re.search("comment|decorator|Adds", text) and "PACKAGED" not in text and "mailD.value" in text
    examples = prepare_examples(ClassificationConfig(heldout=0.2, cache=str(cache)))
    assert examples.labels == ("mail", "web") and examples.train_examples + examples.heldout_examples == 24


def test_docstrings_are_paired_with_the_rest_of_the_function(root, cache):
    rows = records("stdlib_docstrings", cache)
    assert len(rows) == 13
    assert rows[0]["text"] == "Adds the mail_0 of mail to things.\n\nMore text."
    for row in rows:
        assert row["text"] not in row["pair"] and "Adds" not in row["pair"] and "return total" in row["pair"]


def test_passages_are_consecutive_functions(root, cache):
    functions, rows = records("stdlib_functions", cache), records("stdlib_passages", cache)
    assert all(len(row["text"]) <= 2000 for row in rows)
    for row in rows:
        expected = [f["text"] for f in functions if f["group"] == row["group"]]
        assert row["text"] in "\n\n".join(expected) and row["label"] == row["group"].partition("/")[0]


def test_pairs_of_one_file_are_balanced_and_groups_share_no_file(root, cache, monkeypatch):
    monkeypatch.setattr(standard_library, "_PAIR_GROUPS", 3)
    monkeypatch.setattr(standard_library, "_PASSAGE", 300)
    rows = records("stdlib_same_file", cache)
    files = {}
    for row in rows:
        names = [set(re.findall(r"(?:mail|web)_\d", row[part])) for part in ("text", "pair")]
        assert (names[0] == names[1]) == (row["label"] == "1")
        files.setdefault(row["group"], set()).update(*names)
    assert len(rows) > 10 and sum(row["label"] == "1" for row in rows) == len(rows) / 2
    groups = list(files.values())
    assert len(groups) > 1 and sum(map(len, groups)) == len(set.union(*groups))


def test_tokens_are_labelled_with_their_kinds(root, cache):
    rows = records("stdlib_tokens", cache)
    assert len({tuple(row["words"]) for row in rows}) == len(rows)
    (row,) = (row for row in rows if row["words"][:2] == ["def", "web_3"])
    assert row["labels"] == [
        "keyword",
        "definition",
        "operator",
        "name",
        "operator",
        "operator",
        "operator",
        "argument",
        "operator",
        "number",
        "operator",
        "operator",
    ]
    (row,) = (row for row in rows if "web" in row["words"] and "total" in row["words"])
    assert list(zip(row["words"], row["labels"], strict=True))[:8] == [
        ("# a comment", "comment"), ("total", "name"), ("=", "operator"), ("web", "name"), (".", "operator"),
        ("add", "attribute"), ("(", "operator"), ("x", "name"),
    ]  # fmt: skip
    assert ("len", "builtin") in zip(row["words"], row["labels"], strict=True)


def test_examples_are_generated_once(root, cache):
    first = generated.find("stdlib_functions", str(cache))
    assert generated.find("stdlib_functions", str(cache)) == first
    (root / "web" / "new.py").write_text("x = 1")
    assert generated.find("stdlib_functions", str(cache)) != first
    assert generated.find("a.csv", str(cache)) == ((), (), (), "")
    raises("data.path='stdlib_function' is neither", lambda: prepare_examples(ClassificationConfig("stdlib_function")))


def test_numbers_in_words():
    for number, words in (
        (0, "zero"),
        (7, "seven"),
        (13, "thirteen"),
        (20, "twenty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (110, "one hundred ten"),
        (1000, "one thousand"),
        (12_001, "twelve thousand one"),
        (1_000_000, "one million"),
        (1_234_021, "one million two hundred thirty-four thousand twenty-one"),
        (5_000_000_300, "five billion three hundred"),
    ):
        assert number_words.to_words(number) == words


def test_longer_numbers_have_more_digits_than_those_trained_on(cache, monkeypatch):
    monkeypatch.setattr(number_words, "_COUNT", 3000)
    significant = [
        {len(row["group"].rstrip("0")) for row in make([])} for make in (number_words.examples, number_words.longer)
    ]
    assert significant == [set(range(1, 7)), {7, 8, 9}]
    trained, longer = (
        {word for row in make([]) for word in re.split("[- ]", row["target"]) if word.isalpha()}
        for make in (number_words.examples, number_words.longer)
    )
    assert longer <= trained
    rows = list(number_words.examples([]))
    assert all(
        {row["source"], row["target"]} == {row["group"], number_words.to_words(int(row["group"]))} for row in rows
    )
    examples = prepare_examples(Seq2SeqConfig(cache=str(cache), target_len=128))
    assert examples.heldout_sets == ("heldout", "challenge") and examples.stored["challenge"].count == 2000
    groups = [
        {min(texts, key=lambda text: not text.isdigit()) for texts in examples.stored[side].texts()}
        for side in ("train", "heldout")
    ]
    assert not groups[0] & groups[1] and all(group.isdigit() for group in groups[0])
