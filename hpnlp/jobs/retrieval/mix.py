"""Mixes a trained language model with neighbours from its training text, and scores held-out text with and without them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from hpnlp import tasks
from hpnlp.atomic_file import replaced
from hpnlp.data.corpus import Corpus
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.jobs.retrieval import gate as gates
from hpnlp.jobs.retrieval.gate import DynamicEvaluation, GateDocuments, Inputs
from hpnlp.models.mixtures.bit_gate import BitGate
from hpnlp.models.stacks.layer_forms import carries
from hpnlp.models.variables import FROZEN, collections
from hpnlp.retrieval import suffix
from hpnlp.retrieval.datastore import Datastore
from hpnlp.retrieval.knn import Neighbours
from hpnlp.training import run_directory
from hpnlp.training.config_file import load_config
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

T = TypeVar("T")

DYNAMIC_STRIDE = 128  # positions between two steps of dynamic evaluation; half of a shorter context
GATE = "gate.npz"
STATIC = "static"  # training text only
ADAPTIVE = "adaptive"  # and held-out text before the position


@dataclasses.dataclass(frozen=True)
class MixOptions:
    """Options of `mix`.

    Attributes:
      store: Spec of the contexts, see `retrieval.suffix.find`.
      gate_tokens: Tokens at the end of the training text that the gate is trained on.
      epochs: Passes over them.
      seed: Seed of the order of the training documents, and of the gate.
      dynamic: Whether the model is also scored with dynamic evaluation.
      datastore: A datastore of the run's hidden states that is mixed with the model before; None for none.
    """

    store: str = "suffix"
    gate_tokens: int = 320_000
    epochs: int = 2
    seed: int = 0
    dynamic: bool = True
    datastore: Neighbours | None = None

    def __post_init__(self) -> None:
        if self.gate_tokens < 1 or self.epochs < 1:
            raise InputError(f"gate_tokens={self.gate_tokens}, epochs={self.epochs}: expected at least 1")
        suffix.find(self.store)  # raises errors before the model reads the text
        if self.datastore is not None and self.dynamic:
            raise InputError(
                f"datastore={self.datastore.directory}: dynamic evaluation changes the hidden states that it holds: add "
                "--nodynamic"
            )


@dataclasses.dataclass(frozen=True)
class MixRow:
    """Bits per byte of held-out text.

    Attributes:
      name: What predicts.
      text: STATIC or ADAPTIVE: the text that it has read.
      bits: Bits per byte of all held-out text.
      median: Median over documents of their bits per byte.
    """

    name: str
    text: str
    bits: float
    median: float


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Result of `mix`.

    Attributes:
      rows: Scores.
      params: Parameters of the adaptive gate.
      step: Step of the model's checkpoint.
      heldout_bytes: Bytes of the held-out text.
      heldout_digest: Digest of the held-out text.
      documents: Number of held-out documents.
      epochs: How often the model has read its training text.
      seconds: Name of a phase -> its seconds; of the dynamic evaluation, which runs beside, those after the others.
    """

    rows: list[MixRow]
    params: Any
    step: int
    heldout_bytes: int
    heldout_digest: str
    documents: int
    epochs: float
    seconds: Mapping[str, float]


class Phases:
    """Times of phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()

    def end(self, name: str) -> None:
        """Ends a phase, or adds to its time if it ran before; it began when the preceding phase ended."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._begun
        self._begun = now


@contextlib.contextmanager
def _beside(function: Callable[[Progress], T], progress: Progress) -> Iterator[tuple[Callable[[], T], Progress]]:
    """Runs a function in a thread, beside the block.

    Args:
      function: Called with a function of its progress, which is shown from the time on that its result is waited for.
      progress: Called with the progress.

    Yields:
      `(result, progress)`: a function that waits for the result, and the progress of the block. After an error in the
      function, the next report of the progress of the block raises it; after an error in the block, the function stops at its
      next report.
    """
    stopped, awaited = threading.Event(), threading.Event()

    def report(work: str, done: int, total: int) -> None:
        if stopped.is_set():
            raise futures.CancelledError
        if awaited.is_set():
            progress(work, done, total)

    with futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(function, report)

        def result() -> T:
            awaited.set()
            return future.result()

        def report_of_block(work: str, done: int, total: int) -> None:
            if future.done():
                future.result()  # raises the error of the function
            progress(work, done, total)

        try:
            yield result, report_of_block
        finally:
            stopped.set()


def mix(
    workdir: str | Path,
    options: MixOptions = MixOptions(),  # noqa: B008  (frozen)
    progress: Progress = ignore_progress,
    log: Callable[[MixRow], None] = lambda row: None,
) -> Mixture:
    """Trains the gate of a run, and scores its held-out text.

    Args:
      workdir: Directory of a run of task "lm" whose tokenizer keeps every byte.
      options: MixOptions.
      progress: Called as `progress(step, done, total)`.
      log: Called with each row.

    Returns:
      The gate and the scores.

    Raises:
      InputError: The run does not fit, or its text is too short.
    """
    phases = Phases()
    run, corpus = load_run(workdir, progress)
    if options.dynamic and not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(run.params)):
        raise InputError(
            f"{workdir}: dynamic evaluation trains the model, which has quantized weights: add --nodynamic"
        )
    train, heldout = corpus.documents
    documents = GateDocuments.of(train, heldout, options.gate_tokens, options.seed)
    if options.datastore is not None:
        run, store = with_datastore(run, options.datastore, workdir)
        _check_stored(store, documents)
    phases.end("load")
    scores = _Scores(documents, corpus, log)
    params = _Mixing(run, documents, options, progress, phases).score(scores)
    data = run.config.data
    epochs = run.step * data.batch_size * data.seq_len / corpus.train_tokens
    return Mixture(
        scores.rows,
        params,
        run.step,
        corpus.heldout_bytes,
        corpus.heldout_digest,
        scores.documents,
        epochs,
        phases.seconds,
    )


class _Mixing:
    """The gates of a run, and the scores with them."""

    def __init__(
        self, run: Run, documents: GateDocuments, options: MixOptions, progress: Progress, phases: Phases
    ) -> None:
        self.run, self.documents, self.options = run, documents, options
        self.progress, self.phases = progress, phases
        self.network = BitGate(run.model.config.vocab)
        self.ids = [documents.tokens[positions] for positions in _positions(documents)]

    def score(self, scores: _Scores) -> Any:
        """Adds all rows of scores, and returns the parameters of the adaptive gate."""
        log_odds = _model_log_odds(self.run, self.documents, self.progress)
        self.phases.end("model")
        scores.add("model", STATIC, self._model_nll(log_odds[1]))
        if not self.options.dynamic:
            return self._score_index(scores, log_odds, self.progress)[0]
        # Small products and the search on the host leave cores idle: together they take less time.
        evaluate = functools.partial(_dynamic_log_odds, self.run, self.documents)
        with _beside(evaluate, self.progress) as (dynamic, progress):
            params, adaptive = self._score_index(scores, log_odds, progress)
            odds = dynamic()
        self.phases.end("dynamic evaluation")
        scores.add("model, dynamic", ADAPTIVE, self._model_nll(odds))
        scored = dataclasses.replace(adaptive, log_odds=odds)
        scores.add("model, dynamic, and index", ADAPTIVE, gates.gate_nll(self.network, params, scored))
        return params

    def _score_index(
        self, scores: _Scores, log_odds: tuple[np.ndarray, np.ndarray], progress: Progress
    ) -> tuple[Any, Inputs]:
        """Adds the rows with the index; the parameters of the adaptive gate, and its inputs of the held-out text."""
        scores.add(
            "model and index", STATIC, self._fit(*self._inputs(log_odds, STATIC, progress), progress=progress)[1]
        )
        adaptive = self._inputs(log_odds, ADAPTIVE, progress)
        scores.add("index", ADAPTIVE, self._fit(*map(gates.no_model, adaptive), progress=progress)[1])
        params, nll = self._fit(*adaptive, progress=progress)
        scores.add("model and index", ADAPTIVE, nll)
        return params, adaptive[1]

    def _model_nll(self, log_odds: np.ndarray) -> np.ndarray:
        """The model's -log p at the held-out positions."""
        return gates.model_nll(log_odds, self.ids[1], self.network.vocab)

    def _inputs(self, log_odds: tuple[np.ndarray, np.ndarray], text: str, progress: Progress) -> list[Inputs]:
        """Inputs of the gate in training and of the held-out text; of one text, since neighbours take most of the memory."""
        near = _neighbours(self.run, self.documents, self.options.store, text, progress)
        self.phases.end("index")
        return [*map(Inputs, log_odds, near, self.ids)]

    def _fit(self, training: Inputs, scored: Inputs, progress: Progress) -> tuple[Any, np.ndarray]:
        """Parameters of a new gate, and -log p at the held-out positions."""
        params = gates.fit_gate(self.network, training, self.options.epochs, self.options.seed, progress)
        nll = gates.gate_nll(self.network, params, scored)
        self.phases.end("gates")
        return params, nll


def _positions(documents: GateDocuments) -> tuple[np.ndarray, np.ndarray]:
    """`(positions that the gate is trained on, held-out positions)`."""
    return (
        documents.positions(documents.gate, documents.heldout),
        documents.positions(documents.heldout, len(documents.ends)),
    )


def _check_stored(store: Datastore, documents: GateDocuments) -> None:
    """Raises InputError unless the datastore holds the first documents, and none that the gate is trained on."""
    stored = store.record.documents
    if len(stored) > documents.gate or stored != documents.digests(0, len(stored)):
        raise InputError(
            f"{store.directory} holds other documents than the first ones of the order of --seed, or some of those that train "
            "the gate, which would find themselves: build it with the same --seed, and with fewer --keys"
        )


def _neighbours(
    run: Run, documents: GateDocuments, store: str, text: str, progress: Progress
) -> list[suffix.SuffixNeighbours]:
    """Neighbours of the positions of the gate and of the held-out ones, for STATIC or ADAPTIVE."""
    is_word = np.zeros(run.model.config.vocab, bool)
    words = suffix.word_tokens(run.tokenizer)
    is_word[: len(words)] = words
    positions = _positions(documents)
    limits = positions
    if text == STATIC:  # as if the text from the first of these documents on was unknown
        starts = documents.start(documents.gate), documents.start(documents.heldout)
        limits = tuple(np.full_like(p, start) for p, start in zip(positions, starts, strict=True))
    queries = [*zip(positions, limits, strict=True)]
    return suffix.neighbours(suffix.find(store), documents.tokens, is_word, queries, progress)


def _model_log_odds(run: Run, documents: GateDocuments, progress: Progress) -> tuple[np.ndarray, np.ndarray]:
    """The model's log-odds of decisions at the positions of the gate, and at the held-out ones."""
    variables, context = collections(run.params), run.config.data.seq_len

    def log_odds(first: int, last: int, stride: int) -> np.ndarray:
        windows = list(gates.windows(documents, first, last, context, stride))
        return gates.model_log_odds(run.model, variables, documents, windows, context, progress)

    return (
        log_odds(documents.gate, documents.heldout, max(1, 3 * context // 4)),
        log_odds(documents.heldout, len(documents.ends), run.config.train.eval_stride or context),
    )


def _dynamic_log_odds(run: Run, documents: GateDocuments, progress: Progress) -> np.ndarray:
    """The log-odds at the held-out positions of a model that is trained on each stretch of text after it was predicted."""
    context = run.config.data.seq_len
    stride = min(DYNAMIC_STRIDE, max(1, context // 2))
    windows = list(gates.windows(documents, documents.heldout, len(documents.ends), context, stride))
    return DynamicEvaluation().log_odds(run.model, collections(run.params), documents, windows, context, progress)


def load_run(workdir: str | Path, progress: Progress = ignore_progress) -> tuple[Run, Corpus]:
    """Loads a run and its text.

    Args:
      workdir: The run directory.
      progress: Called while text is read.

    Returns:
      The run and its corpus.

    Raises:
      InputError: The run is not a language model that gives probabilities of every byte.
    """
    config = load_config(workdir)
    run_directory.check_task(workdir, config, ["lm"], "hpnlp mix")
    run = run_directory.load(workdir)
    if not run.model.is_normalized:
        raise InputError(f"{workdir}: model.output={run.model.config.output!r} gives no probabilities to mix with")
    if carries(run.config.model.mixer):
        raise InputError(
            f"{workdir}: model.mixer={run.config.model.mixer!r} carries states from batch to batch, which `hpnlp mix` does not"
        )
    corpus = cast(Corpus, tasks.find(config.task).dataset(run.config.data, run.vocabulary, progress))
    if not corpus.tokenizer.lossless:
        raise InputError(f"{workdir}: the tokenizer {config.data.tokenizer!r} does not keep every byte")
    return run, corpus


def with_datastore(run: Run, neighbours: Neighbours, workdir: str | Path) -> tuple[Run, Datastore]:
    """Mixes a datastore with a run.

    Args:
      run: The run.
      neighbours: The datastore.
      workdir: The run directory, for messages.

    Returns:
      The run, whose model mixes the neighbours in, and the datastore.

    Raises:
      InputError: The datastore is of another run.
    """
    store, model, frozen = neighbours.load(run.model, run.params, run.tokenizer, workdir)
    return dataclasses.replace(run, model=model, params={**run.params, FROZEN: frozen}), store


def save_gate(workdir: Path, result: Mixture, options: MixOptions) -> None:
    """Writes the parameters of a gate with what it was trained on, in one file, so that no kill mixes two of them.

    Args:
      workdir: The run directory.
      result: The gate.
      options: Its options.
    """
    record = {
        "step": result.step,
        "store": options.store,
        "datastore": None if options.datastore is None else dataclasses.asdict(options.datastore),
    }
    arrays: Any = {
        "record": np.frombuffer(json.dumps(record).encode(), np.uint8),
        **flatten_dict(result.params, sep="/"),
    }
    with replaced(workdir / GATE) as file:
        np.savez(file, **arrays)


class _Scores:
    """Bits per byte of held-out documents."""

    def __init__(self, documents: GateDocuments, corpus: Corpus, log: Callable[[MixRow], None]) -> None:
        ends = documents.ends[documents.heldout :]
        self.rows: list[MixRow] = []
        self.documents = len(ends)
        self._log = log
        self._document = np.searchsorted(ends, _positions(documents)[1], "right")
        store = corpus.documents[1]
        self._sizes = np.array([len(store.raw(i)) for i in range(self.documents)])

    def add(self, name: str, text: str, nll: np.ndarray) -> None:
        """Adds the row of -log p in nats of each position."""
        bits = np.bincount(self._document, nll.astype(np.float64), self.documents) / np.log(2.0)
        row = MixRow(
            name, text, float(bits.sum() / self._sizes.sum()), float(np.median(bits / np.maximum(self._sizes, 1)))
        )
        self.rows.append(row)
        self._log(row)
