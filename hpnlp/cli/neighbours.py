"""`hpnlp neighbours`: words that are similar to a word, and analogies, from the word vectors of a run or a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.retrieval.word_vectors import WordVectorTable

USAGE = """
hpnlp neighbours RUN WORD ["A - B + C" ...] [--count=10] [--draw=words.png] [--save=FILE]
hpnlp neighbours --vectors=FILE WORD ["A - B + C" ...] [--count=10] [--draw=words.png] [--save=FILE]
hpnlp neighbours RUN "several words" ... --without_each [--expected=WORD] [--format=jsonl]

Lists the words whose vectors have the largest cosine with that of a word, or with a sum of unit vectors such as "king - man +
woman", whose words are left out. The vectors are the embedding of a run of any task that embeds tokens, or a file in the
text or binary format of word2vec. --draw draws the words, their neighbours and the most frequent words in the plane of their
first two principal components. --save writes the vectors as a file of word2vec, binary if its name ends with .bin.

--without_each takes texts of several words, whose vectors are added, and leaves out each word in turn: it prints how the cosine
and the rank of the nearest neighbour, or of --expected, change without the word. A word helps if the cosine falls without it.
"""

FREQUENT = 60  # most frequent words that a picture shows beside the words of the command

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_string(
    "vectors", None, "File of word vectors in the text or binary format of word2vec, in place of a run."
)
flags.DEFINE_integer("count", 10, "Number of neighbours.")
flags.DEFINE_string("draw", None, "File of a picture of the words and their neighbours.")
flags.DEFINE_string("save", None, "File of word2vec to write the vectors to.")
flags.DEFINE_bool("without_each", False, "Rank again without each word of a text.")
flags.DEFINE_string(
    "expected", "", "With --without_each: the neighbour to follow, by default the nearest one of the whole text."
)
flags.DEFINE_enum("format", "text", ["text", "jsonl"], "Form of the output; jsonl has a record for each text.")
flags.DEFINE_integer(
    "step", None, "Step of the run's checkpoint; by default the best, or the newest if none was evaluated."
)


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp neighbours`.

    Args:
      argv: "hpnlp neighbours" and the arguments of the command.

    Raises:
      InputError: A word, a flag, the run or the file is invalid.
    """
    workdir, expressions = _run_and_words(cli.parse(argv, USAGE, positional=True))
    f = cli.FLAGS
    if not expressions and not f.draw and not f.save:
        raise InputError("no word: write hpnlp neighbours RUN WORD, or pass --draw or --save")
    if f.vectors:
        cli.refuse(["step"], "with --vectors, a file without checkpoints: leave it out")
    if not expressions:
        cli.refuse(["count", "without_each", "format"], "without a word: name one, or leave it out")
    if not f.without_each:
        cli.refuse(["expected"], "without --without_each: set that as well, or leave it out")
    else:
        cli.refuse(["count", "draw"], "with --without_each, which follows one neighbour: leave it out")
    picture = None if f.draw is None else cli.plot_path(f.draw, "words.png", "draw")
    table = _table(workdir)
    neighbours = {} if f.without_each else {text: table.evaluate(text, f.count) for text in expressions}
    for text in expressions:
        if f.without_each:
            _print_without_each(table, text)
        else:
            _print_neighbours(text, neighbours[text])
    if picture is not None:
        _draw(table, neighbours, picture)
        print(picture)
    if f.save:
        from hpnlp.retrieval.word2vec_files import save_word2vec, without_spaces

        writable = without_spaces(table)
        save_word2vec(writable, f.save, binary=f.save.endswith(".bin"))
        print(f"{f.save}: {len(writable):,} words")


def _print_neighbours(text: str, near: Sequence[tuple[str, float]]) -> None:
    if cli.FLAGS.format == "jsonl":
        _print_record({"text": text, "neighbours": [{"word": word, "cosine": cosine} for word, cosine in near]})
    else:
        print(f"{text}\n" + "\n".join(f"  {cosine:.3f}  {word}" for word, cosine in near))


def _print_without_each(table: WordVectorTable, text: str) -> None:
    """Prints the changes of a text's neighbour without each word of the text."""
    followed, full, without = table.without_each(text, cli.FLAGS.expected)
    changes = [(x, x.cosine - full.cosine, x.rank - full.rank) for x in without]
    if cli.FLAGS.format == "jsonl":
        _print_record({
            "text": text, "neighbour": followed, "cosine": full.cosine, "rank": full.rank, "nearest": full.nearest,
            "without": [
                {
                    "word": x.word, "cosine": x.cosine, "rank": x.rank, "nearest": x.nearest,
                    "cosine_change": cosine, "rank_change": rank,
                }
                for x, cosine, rank in changes
            ],
        })  # fmt: skip
        return
    print(f"{text}\n  {full.cosine:.3f}          rank {full.rank:,}  {followed}")
    for x, change, _ in changes:
        print(f"  {x.cosine:.3f}  {change:+.3f}  rank {x.rank:,}  without {x.word}, nearest {x.nearest}")


def _print_record(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False))


def _run_and_words(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The run, "" for --vectors, and the words of the positional arguments, of which the first is the run unless a flag is."""
    f = cli.FLAGS
    if f.vectors and f.workdir:
        raise InputError(
            f"--vectors={f.vectors} and --workdir={f.workdir} both name word vectors: leave out one of them"
        )
    if f.vectors:
        return "", list(arguments)
    from hpnlp.training.files.contents import Contents, contents_of

    is_run = [contents_of(name) in (Contents.RUN, Contents.COMPRESSED) for name in arguments[:1]]
    count = 1 if any(is_run) or not f.workdir else 0
    return cli.named_run(arguments[:count], "hpnlp neighbours RUN WORD", "workdir"), list(arguments[count:])


def _table(workdir: str) -> WordVectorTable:
    """The vectors of a run, or of --vectors."""
    f = cli.FLAGS
    if not workdir:
        from hpnlp.retrieval.word2vec_files import load_word2vec

        return load_word2vec(f.vectors)
    cli.prepare_jax()
    from hpnlp.tasks.word_embeddings import trained_vectors
    from hpnlp.training import run_directory

    loaded = run_directory.load(*run_names.expand_one(workdir, f.step))
    return trained_vectors(loaded.params, loaded.tokenizer)


def _draw(table: WordVectorTable, neighbours: dict[str, list[tuple[str, float]]], path: Path) -> None:
    """Draws words: each expression with its neighbours in a colour, and frequent words in grey."""
    from hpnlp.report.word_plots import plot_words
    from hpnlp.retrieval.word_vectors import expression_words

    groups: dict[str, str] = {}
    for expression, near in neighbours.items():
        for word in (*expression_words(expression), *(word for word, _ in near)):
            groups.setdefault(word, expression)
    coloured = list(groups)
    for word in [word for word in table.words if len(word) > 2 and word.isalpha()][:FREQUENT]:
        groups.setdefault(word, "")
    if len(groups) < 2:
        groups |= {word: "" for word in table.words[:FREQUENT] if word not in groups}
    words = list(groups)
    # Three words or more determine a plane by themselves.
    points = table.plane(coloured, words[len(coloured) :]) if len(coloured) > 2 else table.plane(words)
    plot_words(points, words, list(groups.values()), path)
