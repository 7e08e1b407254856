"""Builds the datastore of a language model, hidden states and the tokens that followed, and fits mixtures with it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from hpnlp import tasks
from hpnlp.atomic_file import replaced
from hpnlp.data.corpus import Corpus
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.jobs import ensembles
from hpnlp.jobs.retrieval import gate as gates
from hpnlp.jobs.retrieval.gate import GateDocuments, GateWindow
from hpnlp.jobs.vector_files import VectorFile
from hpnlp.models.mixtures.knn_model import KnnModel, WeightNetwork, mixed_log_prob
from hpnlp.models.variables import FROZEN, collections, weights_digest
from hpnlp.retrieval import datastore as stores
from hpnlp.retrieval import knn
from hpnlp.retrieval.datastore import Datastore, Record
from hpnlp.training import run_directory
from hpnlp.training.config_file import load_config
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

FIT_STEPS = 300


@dataclasses.dataclass(frozen=True)
class IndexOptions:
    """Options of the positions that are stored.

    Attributes:
      keys: Number of positions, of documents in a random order; the last one is stored whole.
      tuning_tokens: Tokens of the last training documents, which are not stored and on which mixtures are fitted.
      seed: Seed of the order.
    """

    keys: int = 1_000_000
    tuning_tokens: int = 40_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.keys < 1 or self.tuning_tokens < 1:
            raise InputError(f"keys={self.keys}, tuning_tokens={self.tuning_tokens}: expected at least 1")


@dataclasses.dataclass(frozen=True)
class IndexSource:
    """A run and its text: the documents that are stored, and those that mixtures are fitted on."""

    directory: str
    run: Run
    documents: GateDocuments
    options: IndexOptions

    @property
    def stored(self) -> int:
        """Number of documents that are stored, the first ones."""
        return self.documents.gate

    @property
    def positions(self) -> int:
        """Number of positions of the documents that are stored: less than `options.keys` only if that is all there is."""
        gate = self.documents.gate
        return int((np.diff(self.documents.ends, prepend=0)[:gate] - self.documents.skips[:gate]).sum())

    @property
    def context(self) -> int:
        """Tokens that the model reads at most."""
        return self.run.config.data.seq_len

    def windows(self, first: int, last: int) -> list[GateWindow]:
        """Windows that predict each position of documents once, with a quarter of the context before it at least."""
        return [*gates.windows(self.documents, first, last, self.context, max(1, 3 * self.context // 4))]

    def digest(self) -> str:
        """Digest of the stored documents and of the options."""
        content = [dataclasses.asdict(self.options), self.context, self.documents.digests(0, self.stored)]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def load_source(
    directory: str | Path, options: IndexOptions, step: int | None, progress: Progress = ignore_progress
) -> IndexSource:
    """Loads a run and its text.

    Args:
      directory: Directory of a run of a language model.
      options: Options.
      step: Step of the checkpoint; None for the best.
      progress: Called while text is read.

    Returns:
      The source.

    Raises:
      InputError: The run gives no probabilities of tokens, or its text is too short.
    """
    config = load_config(directory)
    fix = ", or files of texts after the run"
    run_directory.check_task(directory, config, ensembles.TASKS, "hpnlp index build without files", fix)
    run = run_directory.load(directory, step)
    if not run.model.is_normalized:
        raise InputError(f"{directory}: model.output={run.model.config.output!r} gives no probabilities to mix with")
    corpus = cast(Corpus, tasks.find(config.task).dataset(run.config.data, run.vocabulary, progress))
    documents = GateDocuments.of(corpus.documents[0], None, options.tuning_tokens, options.seed, options.keys)
    return IndexSource(os.path.abspath(directory), run, documents, options)


def build_shard(
    source: IndexSource, out: str | Path, shard: int = 0, shards: int = 1, progress: Progress = ignore_progress
) -> Record:
    """Writes a shard: the hidden states before the positions of some documents, and the tokens there.

    Args:
      source: The run.
      out: Directory of the shard, see `datastore.prepare_directory`.
      shard: Number of the shard, from 0.
      shards: Number of shards.
      progress: Called as `progress(step, done, total)`.

    Returns:
      The record.

    Raises:
      InputError: There are fewer documents than shards, hidden states are not finite or too large for float16, or the directory
        cannot be written.
    """
    if shards > source.stored:
        raise InputError(f"shards={shards}: expected at most {source.stored}, the number of documents that are stored")
    run, (first, last) = source.run, _shard_documents(source, shard, shards)
    directory = stores.prepare_directory(out)
    windows, words = source.windows(first, last), []
    dtype = np.uint16 if run.model.config.vocab <= 1 << 16 else np.int32
    with replaced(directory / stores.VECTORS) as file:
        vectors = VectorFile(file, "float16", run.model.config.dim)
        for done, states, labels in hidden_states(source, windows):
            if not np.abs(states).max(initial=0.0) < np.finfo(np.float16).max:
                raise InputError(
                    f"{source.directory}: hidden states are not finite, or too large for float16: "
                    "train a model with a final norm"
                )
            vectors.append(states)
            words.append(labels.astype(dtype))
            progress("hidden states", done, len(windows))
        vectors.finish()
    with replaced(directory / stores.WORDS) as file:
        np.save(file, np.concatenate([np.zeros(0, dtype), *words]))  # a shard may have no positions
    record = Record(
        "words",
        source.directory,
        run.step,
        weights_digest(run.params),
        tokenizer_digest(run.tokenizer),
        source.digest(),
        shard,
        shards,
        vectors.count,
        vectors.dim,
        source.documents.digests(first, last),
    )
    stores.write_record(directory, record)
    return record


def build_run_shard(
    directory: str | Path,
    out: str | Path,
    shard: int = 0,
    shards: int = 1,
    options: IndexOptions = IndexOptions(),  # noqa: B008  (frozen)
    step: int | None = None,
) -> Record:
    """Writes a shard of a run, in any process: the function, its arguments and its result can be pickled.

    Args:
      directory: Directory of a run of a language model.
      out: As for `build_shard`. A call that was interrupted is repeated with the same directory.
      shard: Number of the shard, from 0.
      shards: Number of shards.
      options: Options, the same for all shards.
      step: Step of the checkpoint; None for the best.

    Returns:
      The record.

    Raises:
      InputError: As `load_source` and `build_shard`.
    """
    return build_shard(load_source(directory, options, step), out, shard, shards)


def _shard_documents(source: IndexSource, shard: int, shards: int) -> tuple[int, int]:
    """`(first document, document after the last)` of a shard, which get about equal numbers of tokens."""
    ends = source.documents.ends[: source.stored]
    cuts = [int(np.searchsorted(ends, ends[-1] * i / shards)) for i in range(shards + 1)]
    for i in range(1, shards + 1):  # one document at least for each shard
        cuts[i] = min(max(cuts[i], cuts[i - 1] + 1), source.stored - shards + i)
    return cuts[shard], source.stored if shard == shards - 1 else cuts[shard + 1]


def hidden_states(source: IndexSource, windows: list[GateWindow]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """`(windows so far, hidden states [n, D], tokens that follow [n])` of the positions that windows predict."""
    model, variables = source.run.model, collections(source.run.params)
    call = jax.jit(lambda variables, batch: model.apply(variables, batch, True, method="token_states")[0])
    for i in range(0, len(windows), gates.WINDOWS):
        batch = gates.window_batch(source.documents, windows[i : i + gates.WINDOWS], gates.WINDOWS, source.context)
        is_predicted = batch["weights"] > 0
        states = np.asarray(call(variables, batch), np.float32)[is_predicted]
        yield min(i + gates.WINDOWS, len(windows)), states, batch["labels"][is_predicted]


def fit_mixtures(
    source: IndexSource, directory: str | Path, k: int, progress: Progress = ignore_progress
) -> Mapping[str, float]:
    """Fits the mixtures of a complete datastore on training text that is not in it, and writes them.

    Args:
      source: The run.
      directory: The datastore.
      k: Number of neighbours.
      progress: Called as `progress(step, done, total)`.

    Returns:
      -log p in nats per token of the text that they are fitted on: of "model", "linear(0.25)", "tuned" and "learned"; and
      the "log_temperature" of linear(0.25), whose temperature is the mean distance to the nearest neighbour.

    Raises:
      InputError: k is larger than the datastore, or the datastore is of another run.
    """
    store = Datastore.load(directory, "words")
    store.check_run(source.directory, weights_digest(source.run.params), tokenizer_digest(source.run.tokenizer))
    start = knn.linear(0.25, 1.0)
    k, _ = knn.find_mixture(store, "linear(weight=0.25)", k)
    model, frozen = knn.with_datastore(source.run.model, store, k, start)
    arrays = _tuning_arrays(source, model, frozen, progress)
    log_prob, distances, words, _ = arrays
    nearest = distances[:, 0][jnp.isfinite(distances[:, 0])]
    start["log_temperature"] = np.float32(np.log(max(float(nearest.mean()), 1e-6)) if nearest.size else 0.0)
    network = WeightNetwork().init(jax.random.key(source.options.seed), distances[:1], words[:1], jnp.float32(1.0))[
        "params"
    ]

    def fit(mixture: PyTree, rate: float, name: str) -> Any:
        state = _optimizer(rate).init(mixture)
        for done in range(FIT_STEPS):
            mixture, state = _fit_step(mixture, state, arrays, rate)
            progress(f"fitting the {name} mixture", done + 1, FIT_STEPS)
        return mixture

    start = jax.tree.map(jnp.asarray, start)
    tuned = fit(start, 0.1, knn.TUNED)
    learned = fit({"network": network, "log_temperature": tuned["log_temperature"]}, 0.02, knn.LEARNED)
    knn.save_mixtures(Path(directory), k, {knn.TUNED: tuned, knn.LEARNED: learned})
    return {
        "log_temperature": float(start["log_temperature"]),
        "model": -float(log_prob.mean()),
        "linear(0.25)": float(_mean_nll(start, arrays)),
        knn.TUNED: float(_mean_nll(tuned, arrays)),
        knn.LEARNED: float(_mean_nll(learned, arrays)),
    }


def _mean_nll(mixture: PyTree, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """Mean -log p of the text of `_tuning_arrays`, in nats."""
    return -jnp.mean(mixed_log_prob(mixture, *arrays))


def _optimizer(rate: float) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, FIT_STEPS))


@functools.partial(jax.jit, static_argnums=3)
def _fit_step(mixture: PyTree, state: PyTree, arrays: tuple[jax.Array, ...], rate: float) -> tuple[Any, Any]:
    """`(mixture, state of the optimizer)` after one step of FIT_STEPS."""
    updates, state = _optimizer(rate).update(jax.grad(_mean_nll)(mixture, arrays), state)
    return optax.apply_updates(mixture, updates), state


def _tuning_arrays(source: IndexSource, model: KnnModel, frozen: Any, progress: Progress) -> tuple[jax.Array, ...]:
    """`(log p of the labels, distances [N, k], words [N, k], labels)` of the text that mixtures are fitted on."""
    documents = source.documents
    weights = {**source.run.params, FROZEN: frozen}

    @jax.jit
    def call(weights: PyTree, states: jax.Array, labels: jax.Array) -> Any:
        of_model = collections({name: tree for name, tree in weights.items() if name != FROZEN})
        losses = model.inner.apply(of_model, states[None], labels[None], method="label_losses")
        return -losses[0], *model.neighbours(weights[FROZEN], states), labels

    windows = source.windows(documents.gate, documents.heldout)
    rows: list[list[np.ndarray]] = []
    size = gates.WINDOWS * source.context
    for done, states, labels in hidden_states(source, windows):
        padding = size - len(labels)
        arrays = call(weights, np.pad(states, ((0, padding), (0, 0))), np.pad(labels, (0, padding)))
        rows.append([np.asarray(x)[: len(labels)] for x in arrays])
        progress("neighbours of the tuning text", done, len(windows))
    return tuple(jnp.asarray(np.concatenate(column)) for column in zip(*rows, strict=True))


def following(store: Datastore, prompts: Sequence[str], k: int) -> list[list[tuple[float, float, str]]]:
    """Finds the tokens that followed the hidden states that are nearest to those of prompts.

    Args:
      store: A datastore of hidden states.
      prompts: Texts.
      k: Number of neighbours.

    Returns:
      `(share of the neighbours, distance of the nearest, token)` of each prompt, the most frequent first.

    Raises:
      InputError: The datastore is of another run, or a prompt is empty.
    """
    run = run_directory.load(store.record.run, store.record.step)
    store.check_run(store.record.run, weights_digest(run.params), tokenizer_digest(run.tokenizer))
    k, mixture = knn.find_mixture(store, "linear(weight=0.5)", k)
    model, frozen = knn.with_datastore(run.model, store, k, mixture)
    results = []
    for prompt in prompts:
        ids = np.asarray(run.tokenizer.encode_prompt(prompt), np.int32)[-run.config.data.seq_len :]
        if not len(ids):
            raise InputError(f"prompt {prompt!r} has no tokens: search for some text")
        batch = {name: np.zeros((1, len(ids)), np.int32) for name in ("labels", "positions")}
        batch |= {"tokens": ids[None], "segment_ids": np.ones((1, len(ids)), np.int32)}
        batch |= {"weights": np.ones((1, len(ids)), np.float32), "positions": np.arange(len(ids), dtype=np.int32)[None]}
        states, _ = run.model.apply(collections(run.params), batch, True, method="token_states")
        distances, words = (np.asarray(x)[0] for x in model.neighbours(frozen, states[0, -1:]))
        kept = words[np.isfinite(distances)]
        rows = [
            (float((kept == word).mean()), float(distances[words == word].min()), run.tokenizer.decode([int(word)]))
            for word in dict.fromkeys(kept.tolist())
        ]
        results.append(
            sorted(
                ((share, near, text.decode("utf-8", "replace")) for share, near, text in rows),
                key=lambda row: -row[0],
            )
        )
    return results
