"""Labelled examples that every machine has or can generate, as JSON lines in the cache.

A path such as "stdlib_functions" in `ExampleConfig.path` names an entry of GENERATED. The examples of the standard library
depend on the version of Python; 3.11.7 has:

| path | example | to train on | held out | scored apart |
|---|---|---|---|---|
| stdlib_functions | code of a function -> one of 14 packages | 5,964 | 681 | |
| stdlib_trees | abstract syntax tree of a function -> one of 14 packages | 5,964 | 681 | |
| stdlib_tokens | tokens of a line of code -> one of 11 kinds each | 20,252 | 2,000 | |
| stdlib_titles | four titles of docstrings of a module -> one of 212 modules | 1,125 | 213 | |
| stdlib_docstrings | docstring of a function, and its code | 4,088 | 1,000 | |
| stdlib_names | passage of a docstring with a hidden name, and the document that it is from | about 7,100 in all | | |
| stdlib_sentences | sentence of a docstring, and the rest of its passage | about 3,800 in all | | |
| stdlib_passages | code of consecutive functions of a file -> one of 14 packages | about 1,000 in all | | |
| stdlib_same_file | two passages of code -> whether they are of one file | about 5,000 in all | | |
| list_ops | nested operations on digits, 501 to 1999 tokens -> result | 98,000 in all | | |
| list_ops_short | 65 to 249 tokens | 50,000 in all | | |
| pathfinder | image of 32 x 32 pixels -> whether a curve joins two discs | 40,000 in all | | |
| path_x | 128 x 128 pixels | 10,000 in all | | |
| drawn_digits | image of 32 x 32 pixels -> digit | 20,000 in all | | |
| imdb:DIRECTORY | review -> pos or neg | 25,000 | 25,000 | |
| aan:DIRECTORY | texts of two papers -> whether one cites the other | 147,086 | 17,437 | |
| cifar10:DIRECTORY | image of 32 x 32 pixels in grey -> one of 10 classes | 50,000 | 10,000 | |
| key_values | text with two words of a key and a hidden value, and the document with both | 2,700 | 300 | |
| number_words | number in digits -> in words, and back | 35,964 | 2,000 | 2,000 with more significant digits |

`baselines` reach an accuracy of 0.71 (words) and 0.77 (characters) on functions, where the largest class has a share of 0.15,
a recall of 0.41 at 1 and 0.77 at 10 on the 1,000 docstrings (0.48 and 0.85 over tokens of bpe(2000, by=identifiers)), and exact
matches of 0.61 on numbers (0 on those that are scored apart).
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any, NamedTuple

from hpnlp import spec as specs
from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.reading import sources, token_store
from hpnlp.data.reading.digest import Snapshot
from hpnlp.data.reading.files import ignore_progress
from hpnlp.data.reading.sources import File, LeftOut, Source
from hpnlp.table import Table
from hpnlp.types import InputError

_FORMAT = 2  # version of the files that are written; part of the cache key
GROUP_FIELD = "group"

GENERATED: Table[Generated] = Table(
    {
        "stdlib_functions": "hpnlp.data.examples.generated.standard_library:STDLIB_FUNCTIONS",
        "stdlib_trees": "hpnlp.data.examples.generated.syntax_trees:STDLIB_TREES",
        "stdlib_tokens": "hpnlp.data.examples.generated.standard_library:STDLIB_TOKENS",
        "stdlib_docstrings": "hpnlp.data.examples.generated.standard_library:STDLIB_DOCSTRINGS",
        "stdlib_passages": "hpnlp.data.examples.generated.standard_library:STDLIB_PASSAGES",
        "stdlib_same_file": "hpnlp.data.examples.generated.standard_library:STDLIB_SAME_FILE",
        "stdlib_names": "hpnlp.data.examples.generated.documentation:STDLIB_NAMES",
        "stdlib_sentences": "hpnlp.data.examples.generated.documentation:STDLIB_SENTENCES",
        "stdlib_titles": "hpnlp.data.examples.generated.titles:STDLIB_TITLES",
        "key_values": "hpnlp.data.examples.generated.key_values:KEY_VALUES",
        "number_words": "hpnlp.data.examples.generated.number_words:NUMBER_WORDS",
        "list_ops": "hpnlp.data.examples.generated.list_ops:LIST_OPS",
        "list_ops_short": "hpnlp.data.examples.generated.list_ops:LIST_OPS_SHORT",
        "pathfinder": "hpnlp.data.examples.generated.images.pathfinder:PATHFINDER",
        "path_x": "hpnlp.data.examples.generated.images.pathfinder:PATH_X",
        "drawn_digits": "hpnlp.data.examples.generated.images.drawn_digits:DRAWN_DIGITS",
        "imdb": "hpnlp.data.examples.generated.published:IMDB",
        "aan": "hpnlp.data.examples.generated.published:AAN",
        "cifar10": "hpnlp.data.examples.generated.published:CIFAR10",
    }
)


class Found(NamedTuple):
    """Sources of generated examples; all are empty if a path names none.

    Attributes:
      train: Examples to train on, some of which are held out if `heldout` is empty.
      heldout: Examples to hold out.
      challenge: Examples that are scored apart.
      group_field: Name of the field with the groups of examples.
    """

    train: tuple[Source, ...] = ()
    heldout: tuple[Source, ...] = ()
    challenge: tuple[Source, ...] = ()
    group_field: str = ""


def is_generated(path: str) -> bool:
    """Whether `data.path` is an entry of GENERATED, or NAME:PATH with one that is made from the files of a path.

    Raises InputError if it is no file but looks like a name, or the path after the name is missing, superfluous or absent.
    """
    name, colon, directory = path.partition(":")
    if name not in GENERATED:
        if specs.is_name(path) and not os.path.exists(path):
            raise InputError(
                f"data.path={path!r} is neither a file nor the name of generated examples: "
                f"{specs.did_you_mean(path, GENERATED)}"
            )
        return False
    if GENERATED[name].origin is not None:
        if colon:
            raise InputError(f"data.path={path!r}: {name} is generated, and reads no path: write data.path={name}")
    elif not directory:
        raise InputError(f"data.path={path!r}: {name} is read from a path: write data.path={name}:DIRECTORY")
    elif not os.path.exists(os.path.expanduser(directory)):
        raise InputError(f"data.path={path!r}: {directory!r} does not exist: pass the directory of the published files")
    return True


def has_heldout(path: str) -> bool:
    """Whether `data.path` names generated examples with held-out examples of their own."""
    entry = GENERATED.get(path.partition(":")[0])
    return entry is not None and entry.heldout is not None


def check_published(path: str) -> None:
    """Reads the first example of published data, so that a wrong directory is noticed before anything is started.

    Raises InputError if the directory has not the files of the data set, or the first one is malformed.
    """
    name, _, directory = path.partition(":")
    entry = GENERATED[name]
    if entry.origin is None:
        files = sources.find(directory, "data.path", entry.formats)[0].files
        for make in filter(None, (entry.make, entry.heldout)):
            next(iter(make(files)), None)


def find(path: str, root: str) -> Found:
    """Finds generated examples, which are written to the cache `root` unless they are there already."""
    if not is_generated(path):
        return Found()
    name, _, directory = path.partition(":")
    entry = GENERATED[name]
    origin = directory if entry.origin is None else entry.origin
    argument = "data.path" if entry.origin is None else "the standard library"
    read_from = sources.find(origin, argument, entry.formats)[0].files if origin else ()
    content = Snapshot([file.path for file in read_from]).digest(root, ignore_progress)
    version = [platform.python_version(), [file.name for file in read_from], content] if origin else []
    key = token_store.json_hash([_FORMAT, name, version])
    makers = {"examples": entry.make, "heldout": entry.heldout, "challenge": entry.challenge}

    def write(directory: str) -> dict[str, Any]:
        for part, function in makers.items():
            if function is not None:
                with open(os.path.join(directory, f"{part}.jsonl"), "x", encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(example)}\n" for example in function(read_from))
        return {}

    directory, _ = token_store.cached(root, f"generated-{name}-{key}", write)
    train, heldout, challenge = ((_source(path, directory, part),) if makers[part] else () for part in makers)
    return Found(train, heldout, challenge, GROUP_FIELD)


def _source(path: str, directory: str, name: str) -> Source:
    """The source of one generated file."""
    file = os.path.join(directory, f"{name}.jsonl")
    return Source(path, (File(file, f"{name}.jsonl", os.path.getsize(file)),), False, LeftOut())
