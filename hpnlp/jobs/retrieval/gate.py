"""A trained language model with neighbours from its training text: the gate that mixes them, and scores of held-out text.

Documents stand in one sequence: training text in a random order, then the held-out text. The gate is trained on the last
training documents, which see the documents before them and what they have of themselves: the position in which held-out
documents are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from hpnlp import measure
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.data.reading.token_store import Tokens
from hpnlp.models.mixtures.bit_gate import BitGate
from hpnlp.ops.softmax.bit_paths import path_log_odds, path_log_prob
from hpnlp.retrieval.datastore import document_digest
from hpnlp.retrieval.suffix import SuffixNeighbours
from hpnlp.types import InputError, Model

ROWS = 512  # positions of a step of the gate, and of a call that scores
WINDOWS = 8  # windows of a call of the language model
MOST_TOKENS = 2**31 - 1  # numbers of occurrences are int32
LOGITS = 256  # positions whose logits are computed at a time


@dataclasses.dataclass(frozen=True)
class GateDocuments:
    """All documents in the order in which they are read.

    Attributes:
      tokens: int32 `[N]`.
      ends: int64 `[documents]`, the index after each document.
      skips: Integers `[documents]`, the number of initial tokens of each document that are not predicted, at least one.
      gate: Index of the first document that the gate is trained on.
      heldout: Index of the first held-out document.
    """

    tokens: np.ndarray
    ends: np.ndarray
    skips: np.ndarray
    gate: int
    heldout: int

    @classmethod
    def of(
        cls, train: Tokens, heldout: Tokens | None, gate_tokens: int, seed: int, keys: int | None = None
    ) -> GateDocuments:
        """Orders documents.

        Args:
          train: Training text.
          heldout: Held-out text, which keeps its order; None for none.
          gate_tokens: Least number of tokens that the gate is trained on; a fifth of the training text if that is less.
          seed: Seed of the order of the training text.
          keys: Number of predicted positions of the documents before those of the gate that are kept, of which the last one is
            whole; None for all.

        Returns:
          The documents.

        Raises:
          InputError: There are fewer than three training documents, the last ones are more than half of the text, no token of
            the first ones, the last ones or the held-out text is predicted, or the text is larger than the memory.

        Cost: 4 bytes for each token that is kept.
        """
        order = np.random.default_rng(seed).permutation(len(train.ends))
        sizes = np.diff(np.asarray(train.ends), prepend=0)[order]
        last = np.cumsum(sizes[::-1])  # tokens of the last documents, by their number
        count = 1 + int(np.searchsorted(last, min(gate_tokens, last[-1] // 5))) if len(order) else 0
        if len(order) < 3 or 2 * last[count - 1] > last[-1]:
            raise InputError(
                f"{len(order)} training documents, of which the last {count} would be more than half of the text: the gate of "
                "hpnlp mix, or the mixture of a datastore, is fitted on them, with neighbours from the others: divide the text "
                "into more documents, such as files, or records of .jsonl"
            )
        first = len(order) - count
        if keys is not None:
            predicted = np.cumsum(np.maximum(sizes[:first] - train.skips[order[:first]], 0))
            first = 1 + int(np.searchsorted(predicted[:-1], keys))
            order = np.concatenate([order[:first], order[-count:]])
        stores = [(train, order)] if heldout is None else [(train, order), (heldout, np.arange(len(heldout.ends)))]
        result = cls._joined(stores, first, len(order))
        ranges = [("first", "training", 0, first), ("last", "training", first, len(order))]
        ranges += [] if heldout is None else [("last", "held-out", len(order), len(result.ends))]
        for place, name, start, end in ranges:
            if not result.has_positions(start, end):
                raise InputError(
                    f"no token of the {place} {end - start} {name} documents is predicted: pass longer documents"
                )
        return result

    @classmethod
    def _joined(cls, stores: Sequence[tuple[Tokens, np.ndarray]], gate: int, heldout: int) -> GateDocuments:
        """Reads documents by their numbers."""
        sizes = [np.diff(np.asarray(store.ends), prepend=0)[numbers] for store, numbers in stores]
        ends = np.cumsum(np.concatenate(sizes), dtype=np.int64)
        needed, limit = 4 * int(ends[-1]), measure.machine_bytes()
        if ends[-1] > MOST_TOKENS or needed > limit:
            raise InputError(
                f"{ends[-1]:,} tokens of text: expected at most {min(MOST_TOKENS, limit // 4):,}, which are kept in memory: "
                "train on less text, or store fewer keys"
            )
        tokens, start = np.empty(ends[-1], np.int32), 0
        for store, numbers in stores:
            for number in numbers.tolist():
                document = store.document(number)
                tokens[start : start + len(document)] = document
                start += len(document)
        skips = np.concatenate([store.skips[numbers] for store, numbers in stores])
        return cls(tokens, ends, skips, gate, heldout)

    def start(self, document: int) -> int:
        """Index of the first token of a document."""
        return int(self.ends[document - 1]) if document else 0

    def digests(self, first: int, last: int) -> tuple[str, ...]:
        """Digests of documents."""
        starts = [self.start(i) for i in range(first, last + 1)]
        return tuple(document_digest(self.tokens[start:end]) for start, end in itertools.pairwise(starts))

    def has_positions(self, first: int, last: int) -> bool:
        """Whether a token of documents is predicted."""
        sizes = np.diff(self.ends, prepend=0)
        return bool((sizes > self.skips)[first:last].any())

    def positions(self, first: int, last: int) -> np.ndarray:
        """Positions of the tokens of documents that are predicted: all but the first of each and those of prompts."""
        spans = [np.arange(self.start(i) + int(self.skips[i]), self.ends[i]) for i in range(first, last)]
        return np.concatenate([np.zeros(0, np.int64), *spans])


@dataclasses.dataclass(frozen=True)
class GateWindow:
    """A part of a document that the model reads at once.

    Attributes:
      start: Position of the first token that is read.
      first: First position that is predicted.
      end: Position after the last one that is predicted.
    """

    start: int
    first: int
    end: int


def windows(documents: GateDocuments, first: int, last: int, context: int, stride: int) -> Iterator[GateWindow]:
    """Windows that predict every position of documents once, in their order.

    Args:
      documents: The documents.
      first: The first document.
      last: The document after the last.
      context: Tokens that the model reads.
      stride: Positions that a window predicts, at most `context`.

    Yields:
      The windows.
    """
    assert 1 <= stride <= context
    for document in range(first, last):
        begin, end = documents.start(document), int(documents.ends[document])
        for position in range(begin + int(documents.skips[document]), end, stride):
            stop = min(position + stride, end)
            yield GateWindow(max(begin, stop - 1 - context), position, stop)


def window_batch(
    documents: GateDocuments, window_list: list[GateWindow], count: int, context: int
) -> dict[str, np.ndarray]:
    """The batch of windows, padded to `count` sequences of `context` tokens; weights mark what is predicted."""
    names = ("tokens", "labels", "segment_ids", "positions", "weights")
    batch = {name: np.zeros((count, context), np.float32 if name == "weights" else np.int32) for name in names}
    for row, window in enumerate(window_list):
        length = window.end - 1 - window.start
        batch["tokens"][row, :length] = documents.tokens[window.start : window.end - 1]
        batch["labels"][row, :length] = documents.tokens[window.start + 1 : window.end]
        batch["segment_ids"][row, :length] = 1
        batch["positions"][row, :length] = np.arange(length)
        batch["weights"][row, window.first - 1 - window.start : length] = 1
    return batch


def _log_odds(model: Model, params: PyTree, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Mean -log p of the predicted labels, and the log-odds of the decisions of all labels, `[B, T, L]`."""
    h, _ = model.apply(params, batch, True, method="token_states")
    labels, weights = jnp.asarray(batch["labels"]).reshape(-1), jnp.asarray(batch["weights"]).reshape(-1)

    def score_part(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, ids = part
        log_probs = jax.nn.log_softmax(model.apply(params, states, method="next_logits"))
        return -jnp.take_along_axis(log_probs, ids[:, None], axis=1)[:, 0], path_log_odds(log_probs, ids)

    # All logits of a batch would take gigabytes of large vocabularies.
    padding = -len(labels) % LOGITS
    states = jnp.pad(h.reshape(len(labels), -1), ((0, padding), (0, 0))).reshape(-1, LOGITS, h.shape[-1])
    losses, odds = jax.lax.map(score_part, (states, jnp.pad(labels, (0, padding)).reshape(-1, LOGITS)))
    losses, odds = losses.reshape(-1)[: len(labels)], odds.reshape(-1, odds.shape[-1])[: len(labels)]
    return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), 1.0), odds.reshape(*h.shape[:2], -1)


_compiled_log_odds = jax.jit(_log_odds, static_argnums=0)


def model_log_odds(
    model: Any,
    params: Any,
    documents: GateDocuments,
    window_list: list[GateWindow],
    context: int,
    progress: Progress = ignore_progress,
) -> np.ndarray:
    """Log-odds of the decisions of the tokens that windows predict, under the model.

    Args:
      model: A language model with `token_states` and `next_logits`.
      params: Its variables.
      documents: The documents.
      window_list: The windows.
      context: Tokens that the model reads at most.
      progress: Called as `progress(step, done, total)`.

    Returns:
      float32 `[Q, L]`, in the order of the windows.
    """
    results = []
    for i in range(0, len(window_list), WINDOWS):
        batch = window_batch(documents, window_list[i : i + WINDOWS], WINDOWS, context)
        results.append(np.asarray(_compiled_log_odds(model, params, batch)[1])[batch["weights"] > 0])
        progress("probabilities of the model", min(i + WINDOWS, len(window_list)), len(window_list))
    return np.concatenate(results)


@dataclasses.dataclass(frozen=True)
class DynamicEvaluation:
    """Training of the model on what it has predicted.

    Attributes:
      learning_rate: Of Adam.
      b1: Of Adam.
      clip: Largest norm of a gradient.
      decay: Share of the way back to the trained parameters, in each step.

    References: Krause et al. 2018, "Dynamic evaluation of neural sequence models", arXiv 1709.07432.
    """

    learning_rate: float = 5e-4
    b1: float = 0.5
    clip: float = 1.0
    decay: float = 0.002

    def log_odds(
        self,
        model: Any,
        params: Any,
        documents: GateDocuments,
        window_list: list[GateWindow],
        context: int,
        progress: Progress,
    ) -> np.ndarray:
        """As `model_log_odds`, with a step of the optimizer on the parameters after each window was predicted."""
        optimizer = optax.chain(optax.clip_by_global_norm(self.clip), optax.adam(self.learning_rate, b1=self.b1))

        @jax.jit
        def step(current: PyTree, state: PyTree, others: PyTree, batch: Mapping[str, jax.Array]) -> Any:
            loss = lambda trained: _log_odds(model, {**others, "params": trained}, batch)  # noqa: E731
            gradient, odds = jax.grad(loss, has_aux=True)(current)
            updates, state = optimizer.update(gradient, state)
            moved = optax.apply_updates(current, updates)
            return odds, jax.tree.map(lambda new, old: new + self.decay * (old - new), moved, start), state

        start, others = params["params"], {name: tree for name, tree in params.items() if name != "params"}
        current, state, results = start, optimizer.init(start), []
        for i, window in enumerate(window_list, 1):
            batch = window_batch(documents, [window], 1, context)
            odds, current, state = step(current, state, others, batch)
            results.append(np.asarray(odds)[batch["weights"] > 0])
            progress("dynamic evaluation", i, len(window_list))
        return np.concatenate(results)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of the gate for Q positions: the model's log-odds `[Q, L]`, neighbours, and the tokens int32 `[Q]`."""

    log_odds: np.ndarray
    neighbours: SuffixNeighbours
    ids: np.ndarray

    def rows(self, chosen: np.ndarray | slice) -> tuple[np.ndarray, ...]:
        """The arguments of BitGate for some positions."""
        near = self.neighbours
        return self.log_odds[chosen], near.tokens[chosen], near.count[chosen], self.ids[chosen]


def _gate_optimizer(steps: int) -> optax.GradientTransformation:
    """The optimizer of a gate that is trained for a number of steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(50, steps // 10), steps)
    return optax.adamw(schedule, weight_decay=1e-3)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gate_step(gate: BitGate, steps: int, params: PyTree, state: PyTree, *rows: jax.Array) -> Any:
    """`(parameters, state of the optimizer)` after one of `steps` steps."""
    loss = lambda p: jnp.mean(jnp.asarray(gate.apply(p, *rows, method="nll")))  # noqa: E731
    updates, state = _gate_optimizer(steps).update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


@functools.partial(jax.jit, static_argnums=0)
def _gate_nll(gate: BitGate, params: PyTree, *rows: jax.Array) -> jax.Array:
    return jnp.asarray(gate.apply(params, *rows, method="nll"))


def fit_gate(gate: BitGate, inputs: Inputs, epochs: int, seed: int, progress: Progress = ignore_progress) -> Any:
    """Trains a gate.

    Args:
      gate: The gate.
      inputs: Positions to train on.
      epochs: Number of passes.
      seed: Seed of parameters and order.
      progress: Called as `progress(step, done, total)`.

    Returns:
      The parameters.
    """
    size = min(ROWS, len(inputs.ids))
    steps = epochs * (len(inputs.ids) // size)
    params = gate.init(jax.random.key(seed), *map(jnp.asarray, inputs.rows(slice(0, 1))))
    state = _gate_optimizer(steps).init(params)
    draw, done = np.random.default_rng(seed), 0
    for _ in range(epochs):
        order = draw.permutation(len(inputs.ids))
        for i in range(0, len(order) - size + 1, size):
            params, state = _gate_step(gate, steps, params, state, *inputs.rows(np.sort(order[i : i + size])))
            done += 1
            progress("training the gate", done, steps)
    return params


def gate_nll(gate: BitGate, params: PyTree, inputs: Inputs) -> np.ndarray:
    """-log p of each position under the mixture, in nats, float32 `[Q]`."""
    results = []
    for i in range(0, len(inputs.ids), ROWS):
        chosen = np.arange(i, i + ROWS).clip(max=len(inputs.ids) - 1)  # one shape for all calls
        results.append(np.asarray(_gate_nll(gate, params, *inputs.rows(chosen))))
    return np.concatenate(results)[: len(inputs.ids)]


def no_model(inputs: Inputs) -> Inputs:
    """Inputs whose model says nothing: log-odds of 0."""
    return dataclasses.replace(inputs, log_odds=np.zeros_like(inputs.log_odds))


def model_nll(log_odds: np.ndarray, ids: np.ndarray, vocab: int) -> np.ndarray:
    """-log p of each position under the model alone, in nats."""
    return -np.asarray(path_log_prob(jnp.asarray(log_odds), jnp.asarray(ids), vocab))
