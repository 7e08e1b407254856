"""A corpus: text from disk, split, tokenised and cached, then read as batches that shuffle, mix, shard and resume.

    corpus = prepare(DataConfig(path="stdlib", seq_len=256, batch_size=16))
    batches = corpus.train(seed=0)
    batch = next(batches)  # tokens, labels, segment_ids, positions, weights: [16, 256]

grain orders rows by number (shuffle, repeat, mix, shard, read ahead) and `packing` says what a row holds. So the state
of an iterator is how many batches it gave, whatever the packing, the mixture and the number of processes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpnlp import spec as specs
from hpnlp.data import packing, text, token_store, tokenizers
from hpnlp.data.digest import Snapshot
from hpnlp.data.files import printable
from hpnlp.data.ingest import Ingest, Progress
from hpnlp.types import InputError, Tokenizer

_STATE_VERSION = 1
# Rows in a training stream. grain takes lengths through floats, and overflows on those of its own endless repeat.
_ENDLESS = 1 << 52
_PACKINGS = {"concat": packing.ConcatRows, "fit": packing.FitRows}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read and how it is cut into batches.

    path: "stdlib" (the source of the running Python's standard library, without tests and site-packages; "stdlib+tests" with
      tests), a file, a directory or a glob; several separated by commas, each file read once. By extension, files are JSONL,
      `.json` (an array of records or strings; any other JSON is text), Parquet, `.npy` (token ids), or text. Text and JSON may
      be compressed, as `.gz` or `.zst`.
    weights: a source's share of the training tokens, one a source, to within one percent; () takes each source once an
      epoch.
    tokenizer: "bytes", "words(CAP)", "words(CAP, by=whitespace)", "bpe(SIZE)", or the path of a tokenizer.json.
    text_field, prompt_field: of records (JSONL, JSON arrays, Parquet). A prompt stands before the text and carries no loss.
    skip_bad_lines: leave out, and count in the summary, lines of text that are not UTF-8 and records that are not JSON or have
      no valid text; otherwise they are errors, as far as the tokenizer needs UTF-8.
    seq_len: tokens a row. batch_size: rows of one optimizer step, over all processes.
    heldout: fraction of documents held out, chosen by a hash of their names; where that leaves nothing on one side, one
      document. A lone text file counts as many documents: it is cut at line ends into pieces. Fewer than 50 documents are
      cut in the same way where the fraction of their number is less than one, as of 2 files, or of 49 with 0.02.
    heldout_path: text to hold out instead, all of it; files that are also under `path` are not trained on.
    heldout_bytes: evaluate on a fixed sample of the held-out documents of at most so many bytes, but at least one document; 0
      takes all. Documents over the limit are not trained on.
    packing: "concat" lays documents one after another and cuts rows where they fill; "fit" keeps documents whole, or in
      pieces of seq_len, and fills rows with those that fit.
    cache: where tokenised text is kept; "" is $HPNLP_CACHE, or hpnlp under $XDG_CACHE_HOME or ~/.cache.
    """

    path: str = "stdlib"
    weights: tuple[float, ...] = ()
    tokenizer: str = "bytes"
    text_field: str = "text"
    prompt_field: str = ""
    skip_bad_lines: bool = False
    seq_len: int = 256
    batch_size: int = 16
    heldout: float = 0.02
    heldout_path: str = ""
    heldout_bytes: int = 1_000_000
    packing: str = "concat"
    cache: str = ""

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"data.{name}={getattr(self, name)}: expected at least 1")
        if not all(isinstance(weight, int | float) and 1e-100 <= weight <= 1e100 for weight in self.weights):
            raise InputError(
                f"data.weights={self.weights}: expected numbers over 0, 1e-100 to 1e100; leave a source out to give it none"
            )
        if not self.heldout_path and not 0 < self.heldout < 1:
            raise InputError(
                f"data.heldout={self.heldout}: expected a fraction between 0 and 1; to train on all of data.path, pass "
                "data.heldout_path=PATH with other text"
            )
        if self.heldout_bytes < 0:
            raise InputError(f"data.heldout_bytes={self.heldout_bytes}: expected a number of bytes, or 0 for all")
        specs.lookup(_PACKINGS, self.packing, "data.packing")


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None, progress: Progress | None = None) -> Corpus:
    """Reads, splits and tokenises the text of `config`, or finds the result in the cache.

    tokenizer: used in place of `config.tokenizer`, as when a run goes on with the one it saved. progress: called as
    `progress(what, bytes_done, bytes_total)` while text is read. Raises InputError for whatever is wrong with the text,
    the config or the cache. Time: one pass over the text, and one more where a vocabulary is made; memory does not grow
    with the text.
    """
    progress = progress or (lambda what, done, total: None)
    sources = text.find(config.path, "data.path")
    heldout_sources = text.find(config.heldout_path, "data.heldout_path") if config.heldout_path else ()
    if heldout_sources:
        held = [file.path for source in heldout_sources for file in source.files]
        sources = text.distinct(sources, "data.path", held, "held out by data.heldout_path")
    ingest = Ingest(
        sources=sources,
        heldout_sources=heldout_sources,
        text_field=config.text_field,
        prompt_field=config.prompt_field,
        heldout=config.heldout,
        heldout_bytes=config.heldout_bytes,
        skip_bad_lines=config.skip_bad_lines,
    )
    if config.weights and len(config.weights) != len(ingest.sources):
        raise InputError(
            f"data.weights has {len(config.weights)} weights and data.path {len(ingest.sources)} sources: pass one a "
            "source, or none"
        )
    root = token_store.cache_root(config.cache)
    if tokenizer is None and not tokenizers.is_trained(config.tokenizer):
        tokenizer = tokenizers.build(config.tokenizer)  # before text is read, so that a wrong path is found at once
    snapshot = Snapshot(ingest.paths)
    content = [ingest.fingerprint(), snapshot.digest(root, progress)]
    tokenizer = tokenizer or _trained_tokenizer(config.tokenizer, ingest, root, content, snapshot, progress)
    is_cached = True

    def write(path: str) -> dict[str, Any]:
        nonlocal is_cached
        is_cached = False
        record = ingest.write(path, tokenizer, progress)
        snapshot.check()
        return record

    directory, record = token_store.cached(
        root, f"tokens-{token_store.key_of([content, tokenizer_digest(tokenizer)])}", write
    )
    return Corpus(config, tokenizer, directory, record, is_cached)


def _trained_tokenizer(
    spec: str, ingest: Ingest, root: str, content: Any, snapshot: Snapshot, progress: Progress
) -> Tokenizer:
    """Trains what `spec` names, or finds it in the cache. content: a key of all that is read."""

    def write(directory: str) -> dict[str, Any]:
        built = tokenizers.build(spec, ingest.training_texts(progress))
        built.save(os.path.join(directory, "tokenizer.json"))
        snapshot.check()
        return {}

    directory, _ = token_store.cached(root, f"tokenizer-{token_store.key_of([tokenizers.MADE, spec, content])}", write)
    return tokenizers.load(directory)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """The same for tokenizers that save the same. Through the disk, because that is what every tokenizer can do."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save(os.path.join(directory, "tokenizer.json"))
            for name in sorted(os.listdir(directory)):
                with open(os.path.join(directory, name), "rb") as file:
                    digest.update(file.read())
    except OSError as error:
        raise InputError(f"cannot write temporary files: {error}: free some space, or set TMPDIR elsewhere") from error
    return digest.hexdigest()


class Corpus:
    """Tokenised text, split and memory-mapped; made by `prepare`.

    tokenizer: the one it was made with. heldout_bytes: bytes of `read_heldout()`. heldout_digest: of the tokens that these
    became. train_tokens, heldout_tokens, train_documents, heldout_documents: what there is, with bos and eos. directory: the
    cache entry. is_cached: whether the tokens were there already. summary: one line with these figures, the share that is held
    out, the cache entry that was used, and what was left out.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        directory: str,
        record: Mapping[str, Any],
        is_cached: bool = False,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.directory = directory
        self._train = token_store.Tokens(directory, "train", record["train"])
        self._heldout = token_store.Tokens(directory, "heldout", record["heldout"])
        self._bounds = record["bounds"]
        # Of the held-out text, too: losses on another cannot be put beside those that a run has seen.
        self.heldout_digest: str = record["heldout"]["digest"]
        self._digests = {"corpus": record["train"]["digest"], "held-out text": self.heldout_digest}
        self.train_tokens: int = record["train"]["tokens"]
        self.train_documents: int = record["train"]["documents"]
        self.heldout_tokens: int = record["heldout"]["tokens"]
        self.heldout_documents: int = record["heldout"]["documents"]
        self.heldout_bytes: int = record["heldout"]["raw_bytes"]
        self.is_cached = is_cached
        self.summary = "; ".join(self._facts(record))
        if self.train_tokens <= config.seq_len:
            raise InputError(
                f"data.path={config.path!r} holds {self.train_tokens} tokens to train on, and a row of "
                f"data.seq_len={config.seq_len} takes {config.seq_len + 1}: add text, or lower data.seq_len"
            )
        if self.heldout_tokens < 2:
            raise InputError(
                "the held-out text is under two tokens: raise data.heldout, or pass data.heldout_path=PATH"
            )

    def _facts(self, record: Mapping[str, Any]) -> Iterator[str]:
        """The parts of the summary."""
        config, aside = self.config, record["aside"]
        total = self.train_tokens + self.heldout_tokens + aside["tokens"]
        of_all = "" if config.heldout_path else f" ({100 * self.heldout_tokens / total:.2g} % of all)"
        yield f"{printable(config.path)}: {_documents(self.train_documents)}, {self.train_tokens:,} tokens to train on"
        yield f"{_documents(self.heldout_documents)}, {self.heldout_bytes:,} bytes{of_all} held out"
        if aside["documents"]:
            yield (
                f"{_documents(aside['documents'])}, {aside['raw_bytes']:,} bytes over data.heldout_bytes="
                f"{config.heldout_bytes} neither trained on nor evaluated"
            )
        if not config.heldout_path and 0 < config.heldout_bytes < self.heldout_bytes:
            yield f"data.heldout_bytes={config.heldout_bytes} is less than this one document"
        share = 1 - self.train_tokens / total
        if not config.heldout_path and share > max(2 * config.heldout, 0.05):
            yield (
                f"data.heldout={config.heldout} takes {100 * share:.0f} % from training, because documents are taken whole: "
                "add text, or pass data.heldout_path=PATH with other text"
            )
        if self.is_cached:
            yield f"tokens read from the cache, {printable(self.directory)}"
        if record["left_out"]:
            yield f"left out: {text.LeftOut(record['left_out'])}"

    def read_heldout(self) -> bytes:
        """The held-out text as it was read, prompts left out, for other compressors to show what they can."""
        return self._heldout.raw()

    def read_training_text(self, limit: int) -> tuple[bytes, float]:
        """Reads the end of the training text, decoded from its tokens, prompts included.

        Args:
            limit: bytes to return at most.

        Returns:
            The last `limit` bytes of the training documents, laid one after another, and the share of the whole training
            text that they are, by tokens. The text is exact where the tokenizer is lossless.
        """
        pieces: list[bytes] = []
        size, index = 0, self.train_documents
        while index and size < limit:
            index -= 1
            pieces.append(self.tokenizer.decode(self._train.document(index)))
            size += len(pieces[-1])
        read = self.train_tokens - (int(self._train.ends[index - 1]) if index else 0)
        return b"".join(reversed(pieces))[-limit:], read / self.train_tokens * min(1.0, limit / max(1, size))

    def train(self, *, seed: int, process_index: int = 0, process_count: int = 1) -> Batches:
        """Endless training batches of `batch_size / process_count` rows, in another order each epoch.

        Process p of n gets rows `[p b, (p + 1) b)` of every batch of `batch_size` rows, b a process: one after another,
        the shards of all processes are the batch that one process alone would get. A batch is a dict of arrays, see
        `packing.assemble`.
        """
        import grain  # half a second, which only those pay who train

        if seed < 0:
            raise InputError(f"seed={seed}: expected at least 0")
        rows = self._rows
        per_process = self._share(self.config.batch_size, "data.batch_size", process_index, process_count)
        sources = [
            grain.MapDataset.range(first, last)
            .seed(int(np.random.SeedSequence([seed, i]).generate_state(1)[0]))
            .shuffle()
            .repeat(_ENDLESS // (last - first))
            for i, (first, last) in enumerate(rows.ranges)
        ]
        order = grain.MapDataset.mix(sources, self.config.weights) if self.config.weights else sources[0]
        batches = order.batch(per_process, batch_fn=np.array)[process_index::process_count].map(
            functools.partial(self._batch, self._train, rows, per_process)
        )
        # One thread, two batches ahead, hides the page faults of text that is not in memory yet: no more is needed.
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        return Batches(iter(batches.to_iter_dataset(ahead)), {**self._digests, "packing": self.config.packing})

    def heldout(
        self,
        *,
        batch_size: int,
        stride: int | None = None,
        limit: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[packing.Batch]:
        """The held-out text as batches of `batch_size / process_count` rows: every token is predicted exactly once.

        stride: under `seq_len`, every token has at least `seq_len - stride` tokens of context where its document has
        them. limit: at most so many batches, of rows spread evenly over the text. The last batch is filled with rows of
        weight 0; every process gets the same number of batches, of rows as in `train`.
        """
        seq_len = self.config.seq_len
        if stride is not None and not 1 <= stride <= seq_len:
            raise InputError(f"stride={stride}: expected 1 to data.seq_len={seq_len}")
        if limit is not None and limit < 1:
            raise InputError(f"limit={limit}: expected at least one batch, or None for all")
        per_process = self._share(batch_size, "batch_size", process_index, process_count)
        rows = packing.ConcatRows(self._heldout, seq_len, [(0, self.heldout_tokens)], stride)
        total = rows.ranges[0][1]
        count = min(total, limit * batch_size) if limit else total
        numbers = np.arange(count) * total // count
        starts = range(process_index * per_process, -(-count // batch_size) * batch_size, batch_size)
        return (self._batch(self._heldout, rows, per_process, numbers[i : i + per_process]) for i in starts)

    @property
    def train_rows(self) -> int:
        """Rows in an epoch."""
        return self._rows.ranges[-1][1]

    @functools.cached_property
    def _rows(self) -> packing.ConcatRows | packing.FitRows:
        bounds = self._bounds if self.config.weights else [0, self.train_tokens]
        rows = _PACKINGS[self.config.packing](
            self._train, self.config.seq_len, list(zip(bounds[:-1], bounds[1:], strict=True))
        )
        paths = self.config.path.split(",") if self.config.weights else [self.config.path]
        for path, (first, last) in zip(paths, rows.ranges, strict=True):
            if first == last:
                raise InputError(
                    f"data.path: {path!r} leaves nothing to train on, as its only document was held out: pass "
                    "data.heldout_path=PATH with other text to hold out, or add text to it"
                )
        return rows

    def _share(self, batch_size: int, argument: str, process_index: int, process_count: int) -> int:
        if not 0 <= process_index < process_count:
            raise InputError(f"process_index={process_index}: expected 0 to {process_count - 1}")
        if batch_size % process_count:
            raise InputError(
                f"{argument}={batch_size} is not a multiple of the {process_count} processes that share it: pass "
                f"{math.ceil(batch_size / process_count) * process_count}"
            )
        return batch_size // process_count

    def _batch(self, tokens: token_store.Tokens, rows: Any, count: int, numbers: np.ndarray) -> packing.Batch:
        return packing.assemble(tokens, rows.segments(numbers), count, self.config.seq_len, self.tokenizer.pad_id)


class Batches:
    """An endless iterator over training batches whose state is a small JSON-able dict, the same on every process.

    What was read ahead is not part of the state: after `set_state`, the next batch is the one that followed when the
    state was taken, bit for bit, also on another number of processes.
    """

    def __init__(self, batches: Any, made_from: Mapping[str, str]):
        self._batches = batches
        self._made_from = dict(made_from)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> packing.Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands."""
        return {"version": _STATE_VERSION, **self._made_from, "batches": self._batches.get_state()["next_index"]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to where `get_state` stood. Raises InputError where the state is damaged or of other data."""
        try:
            version, batches = state["version"], int(state["batches"])
            # What a state does not tell does not count against it: the first ones said nothing of the held-out text.
            differing = [name for name, value in self._made_from.items() if state.get(name, value) != value]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the data iterator's state is damaged ({error!r}): take another checkpoint") from error
        if version != _STATE_VERSION:
            raise InputError(
                f"the data iterator's state is of version {version}, expected {_STATE_VERSION}: update hpnlp"
            )
        if not 0 <= batches <= _ENDLESS:
            raise InputError(f"the data iterator's state is damaged (batches={batches}): take another checkpoint")
        if differing:
            raise InputError(
                f"the data iterator's state is of another {' and '.join(differing)}: the text, its split or its "
                "tokenizer has changed since, or another version of hpnlp, which held out whole files, began the run: give the "
                "run its old data back, go on with that version, or start another run (train.init_from takes this one's model)"
            )
        self._batches.set_state({"next_index": batches})

    def close(self) -> None:
        """Ends reading ahead."""
        self._batches.close()


def _documents(count: int) -> str:
    return f"{count:,} document{'s' * (count != 1)}"
