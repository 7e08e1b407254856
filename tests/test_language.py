"""Counts patterns of the source code that are hard to read; a pattern may become rarer, and not more frequent."""

import re
from pathlib import Path

import pytest

SOURCES = {path: path.read_text() for path in (Path(__file__).parents[1] / "hpnlp").rglob("*.py")}
PRONOUN = "(?:[Oo]f|[Ww]hich|[Ww]hose|[Tt]hat|[Tt]hose|[Tt]hese)"
QUESTION = "(?:What|Who|Whose|How|In which|Of|Which|That|Those|These)"
NAME = r"\*?_?(?:own|found|given|one|parts|whole|rest|some|things|what)_?"

# pattern -> (regular expression, largest number of matches). Lower a limit when matches are removed.
PATTERNS = {
    "comment that continues the code's sentence": (rf"(?:^ *|  )# ?{PRONOUN}\b", 7),
    "docstring that begins with a relative clause": (rf'^ *"""{QUESTION}\b', 0),
    "plural by arithmetic, in place of hpnlp.errors.plural": (r"'s' \* ", 1),
    "function that is named *_of or of_*": (r"^ *def _?(?:\w+_of|of_\w+)\(", 12),
    "argument, variable or function without a content in its name": (
        rf"^ *(?:for )?(?:\w+, )*{NAME}(?:, \w+)* (?:=|in) |^ *def (?:\w+\(.*[(,] ?{NAME}: |{NAME}\()|^ +{NAME}: .*,$",
        32,
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_does_not_become_more_frequent(name):
    expression, limit = PATTERNS[name]
    pattern = re.compile(expression, re.MULTILINE)
    matches = [(path.name, match[0].strip()) for path, text in SOURCES.items() for match in pattern.finditer(text)]
    assert len(matches) <= limit, matches
