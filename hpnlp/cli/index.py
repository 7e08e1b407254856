"""`hpnlp index`: datastores of texts, or of the hidden states of a language model; built in shards, merged and searched."""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names, text_inputs
from hpnlp.cli.text_inputs import Example, TextInputs
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.examples.kind import Kind
    from hpnlp.data.reading.sources import LeftOut
    from hpnlp.jobs.retrieval.next_words import IndexOptions, IndexSource
    from hpnlp.retrieval.datastore import Datastore
    from hpnlp.training.files.metrics import ProgressLines

USAGE = """
hpnlp index build RUN texts.txt --out=DIR [--fields=body] [--index="ivf(cells=1024,probes=32)"]
hpnlp index search DIR "a question" ["another one" ...] [--count=5]
hpnlp index search DIR "a question" --rerank=RUN [--candidates=50] [--label=yes]

hpnlp index build RUN --out=DIR [--keys=1000000] [--k=32]
hpnlp evaluate RUN --datastore=DIR
hpnlp generate RUN --datastore=DIR --prompt="def "

hpnlp index build RUN ... --out=DIR/0 --shard=0/8        (and so on, each in a process or on a machine of its own)
hpnlp index merge DIR/0 DIR/1 ... --out=DIR/all

With files, build encodes their texts by the run's model, as hpnlp encode does, and search prints the texts whose vectors have
the largest products with that of a query: of a dual encoder, cosines.

With --rerank, a cross-encoder, which is a run of task classification on pairs of texts, reads the query with each of the best
candidates, and search prints the candidates by its probability that the two belong together: that of the label --label.

Without files, RUN is of a language model. build stores its hidden state at each position of training text, with the token that
followed (kNN-LM). The last training documents are not stored: on them, the weight and the temperature of the neighbours are
fitted, once for all tokens ("tuned"), and as a function of distances ("learned"). search prints what followed the states that
are nearest to that of a prompt.

Texts of files are numbered from 1 over all files; blank lines are left out and have no number.

A shard holds a part of the texts, or of the documents; merge joins all of them, and gives the same datastore as one build. With
hidden states, merge takes the --keys, --tuning_tokens and --seed of the shards, and fits the mixtures.
--index is exact, ivf(cells,probes), lsh(bits,tables,probes), pq(parts,cells,probes), faiss(factory) or scann(cells,probes); by
default exact up to 20,000 vectors, then ivf.
"""

flags.DEFINE_string("out", None, "Directory to write; that of an older datastore is replaced.")
flags.DEFINE_string("shard", "0/1", "Number of the shard, from 0, and number of shards.")
flags.DEFINE_string("index", "", "Kind of index.")
flags.DEFINE_integer(
    "keys", 1_000_000, "Number of positions to store; the last document is stored whole.", lower_bound=1
)
flags.DEFINE_integer("tuning_tokens", 40_000, "Tokens of training text to fit the mixtures on.", lower_bound=1)
flags.DEFINE_integer("k", 32, "Number of neighbours of a position.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of the order of documents.", lower_bound=0)
flags.DEFINE_list(
    "fields", [], "Fields of records that hold the texts; by default those of the run's data, such as text."
)
flags.DEFINE_integer("batch_size", 64, "Largest number of texts of a batch.", lower_bound=1, upper_bound=2**16)
flags.DEFINE_integer("count", 5, "Number of texts or tokens to print.", lower_bound=1)
flags.DEFINE_string(
    "rerank", None, "Run of task classification on pairs of texts that ranks the best texts of a search again."
)
flags.DEFINE_integer("candidates", 50, "Number of texts of each query that --rerank ranks again.", lower_bound=1)
flags.DEFINE_string(
    "label",
    None,
    "Label of --rerank that says that two texts belong together; by default the one that is named 1, yes, true or similar.",
)
flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")

OF_STATES = ("keys", "tuning_tokens", "k", "seed")
OF_TEXTS = ("fields", "batch_size")
OF_RERANKING = ("candidates", "label")
OF_SEARCH = ("count", "rerank", *OF_RERANKING)
OF_BUILD = ("shard", *OF_STATES, *OF_TEXTS, "step")
FOR_BUILD = "here, only in hpnlp index build: leave it out"
FOR_SEARCH = "here, only in hpnlp index search: leave it out"


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp index`.

    Args:
      argv: "hpnlp index" and the arguments of the command.

    Raises:
      InputError: A flag, a file, a datastore or the run is invalid, or the datastore cannot be written.
    """
    action, *arguments = [*cli.parse(argv, USAGE, positional=True)] or [""]
    actions = {"build": _build, "merge": _merge, "search": _search}
    if action not in actions:
        raise InputError(
            f"hpnlp index {action or '...'}: expected build, merge or search, as in hpnlp index build RUN --out=DIR"
        )
    actions[action](arguments)


def _build(arguments: Sequence[str]) -> None:
    f = cli.FLAGS
    cli.refuse(OF_SEARCH, FOR_SEARCH)
    if not arguments:
        raise InputError("expected a run: write hpnlp index build RUN --out=DIR, or RUN texts.txt --out=DIR")
    (directory, step), names = run_names.expand_one(arguments[0], f.step), arguments[1:]
    out, shard = Path(cli.required("out", "runs/index")), _shard()
    cli.refuse(OF_STATES if names else OF_TEXTS, f"{'with' if names else 'without'} files of texts: leave it out")
    if names:
        _check_files(names, out)
    if shard[1] > 1:
        cli.refuse(["index", "k"], "for a shard: pass it to hpnlp index merge")
    cli.prepare_jax()
    if f.index:
        from hpnlp.retrieval.index import Index

        Index(f.index)  # raises errors before the work
    if names:
        _build_texts(directory, step, names, out, shard)
    else:
        _build_states(directory, step, out, shard)


def _shard() -> tuple[int, int]:
    """`(shard, shards)` of the flag."""
    match = re.fullmatch(r"(\d+)/(\d+)", cli.FLAGS.shard)
    shard, shards = map(int, match.groups()) if match else (0, 0)
    if not shard < shards:
        raise InputError(
            f"--shard={cli.FLAGS.shard}: expected the shard and their number, as in --shard=0/8 to --shard=7/8"
        )
    return shard, shards


def _check_files(names: Sequence[str], out: Path) -> None:
    """Raises InputError for files that cannot be read twice or may be removed, and for --fields without records."""
    for name in names:
        if name == text_inputs.STDIN or (os.path.exists(name) and stat.S_ISFIFO(os.stat(name).st_mode)):
            source = "stdin" if name == text_inputs.STDIN else name
            raise InputError(f"texts of {source} can be read once, and an index reads them twice: write them to a file")
        text_inputs.check_exists(name, otherwise="")
        if Path(name).resolve().parent == out.resolve():
            raise InputError(f"--out={out} holds {name}, which is read: name another directory")
    if not any(map(text_inputs.has_records, names)):
        cli.refuse(["fields"], "without a file of records, such as .jsonl: leave it out")


def _build_texts(
    directory: str | Path, step: int | None, names: Sequence[str], out: Path, shard: tuple[int, int]
) -> None:
    from hpnlp.data.reading import sources
    from hpnlp.jobs.predictor import Predictor
    from hpnlp.jobs.retrieval import texts

    predictor, blank, without_tokens = Predictor(directory, step), sources.LeftOut(), sources.LeftOut()
    kind = text_inputs.with_fields(predictor.text_kind, cli.FLAGS.fields)
    source = texts.texts_digest(example.text for example in _examples(names, kind, blank))
    progress = _progress("texts")
    record, cut = texts.build_shard(
        predictor,
        ((example.place, example.text) for example in _examples(names, kind, sources.LeftOut())),
        source,
        out,
        shard,
        batch_size=cli.FLAGS.batch_size,
        report_bad=lambda place: without_tokens.add("without tokens", place),
        report_done=lambda done, total: progress("encoding", done, total),
    )
    for line in sources.described(blank):
        _note(f"left out: {line}")
    for line in sources.described(without_tokens):
        _note(f"vectors of zeros: {line}")
    if cut:
        _note(predictor.cut_message(cut, record.count))
    _finish(out, [out], record.shards)


def _examples(names: Sequence[str], kind: Kind, blank: LeftOut) -> Iterator[Example]:
    """The examples of all files, without blank lines, which are counted."""
    from hpnlp.data.reading import sources

    inputs = TextInputs(kind, sources.LeftOut(), keeps_blank=True)
    for name in names:
        for example in inputs.from_file(name):
            if any(example.inputs):
                yield example
            else:
                blank.add(text_inputs.WITHOUT_TEXT, example.place)


def _build_states(directory: str | Path, step: int | None, out: Path, shard: tuple[int, int]) -> None:
    from hpnlp.jobs.retrieval import next_words

    source, f = next_words.load_source(directory, _options(), step, _progress("MiB")), cli.FLAGS
    if f.k > source.positions:
        raise InputError(f"--k={f.k}: expected 1 to {source.positions:,}, the number of positions that are stored")
    if source.positions < f.keys:
        _note(
            f"the training text has {source.positions:,} positions to store, fewer than --keys={f.keys:,}: all are stored, but "
            f"for those of the last documents, on which mixtures are fitted (--tuning_tokens={f.tuning_tokens:,})"
        )
    record = next_words.build_shard(source, out, *shard, progress=_progress("windows"))
    _finish(out, [out], record.shards)
    if record.shards == 1:
        _fit(source, out)


def _options() -> IndexOptions:
    from hpnlp.jobs.retrieval.next_words import IndexOptions

    f = cli.FLAGS
    return IndexOptions(f.keys, f.tuning_tokens, f.seed)


def _finish(out: Path, shards: Sequence[Path | str], count: int) -> None:
    """Joins shards if these are all of them, and prints what was written."""
    from hpnlp.retrieval import datastore

    if len(shards) == count:
        flags = [f"--{name}={cli.FLAGS[name].value}" for name in OF_STATES if cli.FLAGS[name].present]
        record = datastore.complete(out, shards, cli.FLAGS.index, flags)
        print(f"{out}: {record.count:,} vectors of {record.dim} numbers, {record.index}", flush=True)
        if record.content == "texts":
            _note(f"search it: hpnlp index search {shlex.quote(str(out))} 'a question'")
        return
    record = datastore.read_record(out)
    print(
        f"{out}: shard {record.shard} of {record.shards}, {record.count:,} vectors of {record.dim} numbers", flush=True
    )


def _fit(source: IndexSource, out: Path) -> None:
    from hpnlp.jobs.retrieval import next_words
    from hpnlp.retrieval import datastore

    values = next_words.fit_mixtures(source, out, cli.FLAGS.k, _progress("steps"))
    print(f"nats per token of the training text that the mixtures are fitted on ({cli.FLAGS.k} neighbours):")
    for name in ("model", "linear(0.25)", "tuned", "learned"):
        print(f"  {name:12}  {values[name]:.4f}")
    run, store = (shlex.quote(str(path)) for path in (datastore.read_record(out).run, out))
    _note(f"score held-out text with it: hpnlp evaluate {run} --datastore={store}")
    _note(f"search it: hpnlp index search {store} 'def '")


def _merge(arguments: Sequence[str]) -> None:
    cli.refuse([name for name in OF_BUILD if name not in OF_STATES], FOR_BUILD)
    cli.refuse(OF_SEARCH, FOR_SEARCH)
    out = Path(cli.required("out", "runs/index"))
    if not arguments:
        raise InputError("expected shards: write hpnlp index merge DIR/0 DIR/1 --out=DIR/all")
    if any(out.resolve() == Path(name).resolve() for name in arguments):
        raise InputError(f"--out={out} is a shard: name another directory")
    cli.prepare_jax()

    from hpnlp.retrieval import datastore

    record = datastore.read_record(arguments[0])
    if record.content == "texts":
        cli.refuse(OF_STATES, "with a datastore of texts: leave it out")
        _finish(out, arguments, len(arguments))
        return
    from hpnlp.jobs.retrieval import next_words

    record.check_run_exists(arguments[0])
    source = next_words.load_source(record.run, _options(), record.step, _progress("MiB"))
    if source.digest() != record.source:
        raise InputError(
            f"{arguments[0]} was built with other --keys, --tuning_tokens or --seed, or text: pass the same flags"
        )
    _finish(out, arguments, len(arguments))
    _fit(source, out)


def _search(arguments: Sequence[str]) -> None:
    f = cli.FLAGS
    cli.refuse(["out", "index", *(name for name in OF_BUILD if name != "k")], FOR_BUILD)
    if len(arguments) < 2:
        raise InputError('expected a datastore and a text: write hpnlp index search DIR "a question"')
    if f.rerank is None:
        cli.refuse(OF_RERANKING, "without --rerank=RUN: leave it out")
    elif f.candidates < f.count:
        raise InputError(f"--candidates={f.candidates} are fewer than --count={f.count}: pass at least as many")
    directory, *queries = arguments
    cli.prepare_jax()

    from hpnlp.retrieval.datastore import Datastore, read_record

    record = read_record(directory)
    store = Datastore.load(directory, record.content)
    record.check_run_exists(directory)
    if record.content == "words":
        cli.refuse(["rerank"], "with a datastore of a language model's text: leave it out")
        from hpnlp.jobs.retrieval.next_words import following

        for query, rows in zip(queries, following(store, queries, f.k), strict=True):
            print(query)
            for share, distance, word in rows[: f.count]:
                print(f"  {share:.3f}  distance {distance:.4g}  {word!r}")
        return
    cli.refuse(["k"], "with a datastore of texts: pass --count")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = _search_texts(store, queries)
    for warning in caught:
        _note(str(warning.message))
    for query, hits in zip(queries, rows, strict=True):
        print(query)
        for score, number, text in hits:
            print(f"  {score:.3f}  {number + 1}  {_one_line(text)}")


def _search_texts(store: Datastore, queries: Sequence[str]) -> list[list[tuple[float, int, Any]]]:
    """The best texts of each query, by the datastore's model or by that of --rerank."""
    from hpnlp.data.reading import sources
    from hpnlp.jobs.predictor import Predictor
    from hpnlp.jobs.retrieval import texts
    from hpnlp.jobs.retrieval.rerank import find_label, rerank

    f, cross_encoder, label = cli.FLAGS, None, ""
    if f.rerank is not None:
        cross_encoder = Predictor(*run_names.expand_one(f.rerank))
        label = find_label(cross_encoder, f.label or "")
    predictor = Predictor(store.record.run, store.record.step)
    inputs = TextInputs(predictor.text_kind, sources.LeftOut(), keeps_blank=True)
    examples = [example.text for example in inputs.from_lines(enumerate(queries, 1), "text")]
    if blank := [number for number, query in enumerate(queries, 1) if not query.strip()]:
        raise InputError(f"query {blank[0]} is empty: pass some text")
    if cross_encoder is None:
        return texts.search(store, predictor, examples, f.count)
    candidates = texts.search(store, predictor, examples, f.candidates)
    return [ranked[: f.count] for ranked in rerank(cross_encoder, examples, candidates, label)]


def _one_line(text: str | Sequence[str]) -> str:
    """A text, or the texts of a pair, without line breaks."""
    return "\t".join(" ".join(part.split()) for part in ([text] if isinstance(text, str) else text))


def _progress(unit: str) -> ProgressLines:
    from hpnlp.training.files.metrics import ProgressLines

    return ProgressLines(_note, unit)


def _note(line: str) -> None:
    print(f"hpnlp: {line}", file=sys.stderr, flush=True)
