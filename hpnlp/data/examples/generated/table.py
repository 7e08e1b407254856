"""Labelled examples that every machine has or can generate, as JSON lines in the cache.

A path such as "stdlib_functions" in `ExampleConfig.path` names an entry of GENERATED. The examples of the standard library
depend on the version of Python; 3.11.7 has:

| path | example | to train on | held out | scored apart |
|---|---|---|---|---|
| stdlib_functions | code of a function -> one of 14 packages | 5,964 | 681 | |
| stdlib_tokens | tokens of a line of code -> one of 11 kinds each | 20,252 | 2,000 | |
| stdlib_docstrings | docstring of a function, and its code | 4,088 | 1,000 | |
| number_words | number in digits -> in words, and back | 35,964 | 2,000 | 2,000 with more significant digits |

`baselines` reach an accuracy of 0.71 (words) and 0.77 (characters) on functions, where the largest class has a share of 0.15,
a recall of 0.41 at 1 and 0.77 at 10 on the 1,000 docstrings (0.48 and 0.85 over tokens of bpe(2000, by=identifiers)), and exact
matches of 0.61 on numbers (0 on those that are scored apart).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpnlp import spec as specs
from hpnlp.data import sources, token_store
from hpnlp.data.digest import Snapshot
from hpnlp.data.examples.generated import library, number_words
from hpnlp.data.files import ignore_progress
from hpnlp.data.sources import File, LeftOut, Source
from hpnlp.types import InputError

_FORMAT = 2  # version of the files that are written; part of the cache key
GROUP_FIELD = "group"

# Name -> (path of the files that the examples are made from, "" for none; function from the files to the examples to train on
# and hold out; function to the examples that are scored apart, or None). Every example has a field "group".
_Make = Callable[[Sequence[File]], Iterator[dict[str, Any]]]
GENERATED: dict[str, tuple[str, _Make, _Make | None]] = {
    "stdlib_functions": ("stdlib", library.functions, None),
    "stdlib_tokens": ("stdlib", library.tokens, None),
    "stdlib_docstrings": ("stdlib", library.docstrings, None),
    "number_words": ("", number_words.examples, number_words.longer),
}


def is_generated(path: str) -> bool:
    """Decides whether a path names generated examples.

    Args:
      path: Value of `ExampleConfig.path`.

    Returns:
      Whether it is an entry of GENERATED.

    Raises:
      InputError: `path` is no file but looks like a name.
    """
    if path not in GENERATED and specs.is_name(path) and not os.path.exists(path):
        raise InputError(
            f"data.path={path!r} is neither a file nor the name of generated examples: "
            f"{specs.did_you_mean(path, GENERATED)}"
        )
    return path in GENERATED


def find(path: str, root: str) -> tuple[tuple[Source, ...], str, tuple[Source, ...]]:
    """Finds generated examples, which are written to the cache unless they are there already.

    Args:
      path: Value of `ExampleConfig.path`.
      root: Directory of the cache.

    Returns:
      Sources of the examples, name of the field with their groups, and sources of examples that are scored apart; all are empty
      if `path` is no entry of GENERATED.

    Raises:
      InputError: `path` is no file but looks like a name, the standard library cannot be read, or the cache cannot be written.
    """
    if not is_generated(path):
        return (), "", ()
    origin, make, make_challenge = GENERATED[path]
    read_from = sources.find(origin, "the standard library")[0].files if origin else ()
    content = Snapshot([file.path for file in read_from]).digest(root, ignore_progress)
    version = [platform.python_version(), [file.name for file in read_from], content] if origin else []
    key = token_store.key_of([_FORMAT, path, version])

    def write(directory: str) -> dict[str, Any]:
        for name, function in (("examples", make), ("challenge", make_challenge)):
            if function is not None:
                with open(os.path.join(directory, f"{name}.jsonl"), "x", encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(example)}\n" for example in function(read_from))
        return {}

    directory, _ = token_store.cached(root, f"generated-{path}-{key}", write)
    challenge = (_source(path, directory, "challenge"),) if make_challenge else ()
    return (_source(path, directory, "examples"),), GROUP_FIELD, challenge


def _source(path: str, directory: str, name: str) -> Source:
    """The source of one generated file."""
    file = os.path.join(directory, f"{name}.jsonl")
    return Source(path, (File(file, f"{name}.jsonl", os.path.getsize(file)),), False, LeftOut())
