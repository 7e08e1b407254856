"""Text of a language model with neighbours from its training text: the distribution of the next token, and continuations."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import PyTree

from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.jobs.retrieval.mix import GATE, load_run, with_datastore
from hpnlp.models.mixtures.bit_gate import BitGate
from hpnlp.models.variables import collections
from hpnlp.ops.sampling import pick
from hpnlp.ops.softmax.bit_paths import path_log_odds
from hpnlp.retrieval import suffix
from hpnlp.retrieval.knn import Neighbours
from hpnlp.retrieval.suffix import SuffixIndex
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError, Model

ROWS = 256  # ids whose probabilities are computed at a time
HISTORY = 512  # tokens at the end of a text in which contexts are found


@dataclasses.dataclass(frozen=True)
class MixedModel:
    """A run with the index of its training text and the gate of `hpnlp mix`.

    Attributes:
      run: The run.
      gate: Parameters of the gate.
      index: The contexts of the training text.
    """

    run: Run
    gate: Any
    index: SuffixIndex

    @classmethod
    def load(cls, workdir: str | Path, progress: Progress = ignore_progress) -> MixedModel:
        """Reads a run and its gate, and indexes its training text.

        Args:
          workdir: Directory of a run that `hpnlp mix` has scored.
          progress: Called as `progress(step, done, total)`.

        Returns:
          The model.

        Raises:
          InputError: There is no gate, or it is of another checkpoint.
        """
        record, gate = _read_gate(Path(workdir))
        store, step, datastore = (record[name] for name in ("store", "step", "datastore"))
        run, corpus = load_run(workdir, progress)
        if run.step != step:
            raise InputError(
                f"{workdir}: the gate is of step {step}, and the scored checkpoint is of step {run.step}: run hpnlp mix "
                f"{workdir} again"
            )
        if datastore is not None:
            run, _ = with_datastore(run, Neighbours(**datastore), workdir)
        is_word = np.zeros(run.model.config.vocab, bool)
        words = suffix.word_tokens(run.tokenizer)
        is_word[: len(words)] = words
        tokens = corpus.documents[0].tokens
        return cls(run, gate, SuffixIndex.build(suffix.find(store), tokens.astype(np.int32), is_word, progress))

    def log_probs(self, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities of all tokens after a text.

        Args:
          ids: The tokens of the text, at least one.

        Returns:
          float32 `[V]`, normalised.

        Cost: a pass of the model over at most `data.seq_len` tokens, and of the gate over V ids.
        """
        tail, length = ids[-self.run.config.data.seq_len :], self.run.config.data.seq_len
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(tail)] = tail
        near = self.index.neighbours(ids[-HISTORY:].astype(np.int64))
        arguments = (tokens, np.int32(len(tail)), near.tokens, near.count)
        return np.asarray(_log_probs(collections(self.run.params), self.gate, *arguments, model=self.run.model))

    def continued(
        self, ids: np.ndarray, tokens: int, temperature: float, top_k: int = 0, top_p: float = 1.0, seed: int = 0
    ) -> Iterator[int]:
        """Continues a text, until an end or for a number of tokens.

        Args:
          ids: The tokens of the text.
          tokens: Largest number of new tokens.
          temperature: Temperature of sampling; 0 takes the most probable token.
          top_k: Number of most probable tokens to draw from, 0 for all.
          top_p: Draw from the most probable tokens that together reach this probability.
          seed: Seed of the samples.

        Yields:
          The tokens.
        """
        allowed = self.run.tokenizer.drawable_ids()
        draw, drawable = np.random.default_rng(seed), np.zeros(self.run.model.config.vocab, bool)
        drawable[: len(allowed)] = allowed[: len(drawable)]
        drawable[[*self.run.eos_ids]] = True
        options: dict[str, Any] = {"temperature": temperature, "allowed": jnp.asarray(drawable)}
        if temperature > 0:
            options |= ({"top_k": top_k} if top_k else {}) | ({"top_p": top_p} if top_p < 1 else {})
        for _ in range(tokens):
            logits = jnp.asarray(self.log_probs(ids))[None]
            token = int(pick(logits, jnp.asarray(draw.random((1,), np.float32)), **options)[0])
            yield token
            if token in self.run.eos_ids:
                return
            ids = np.append(ids, token)


def _read_gate(workdir: Path) -> tuple[dict[str, Any], Any]:
    """`(spec of the contexts, step of the run's checkpoint and datastore by name, parameters)` of `save_gate`."""
    try:
        with np.load(workdir / GATE, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return json.loads(arrays.pop("record").tobytes()), unflatten_dict(arrays, sep="/")
    except FileNotFoundError as error:
        raise InputError(f"{workdir} has no gate to mix with: run hpnlp mix {workdir} first") from error
    except Exception as error:  # damaged files raise all kinds of errors in json, zipfile and numpy
        raise InputError(
            f"{workdir}: gate.npz is damaged, or of an earlier version: run hpnlp mix {workdir} again"
        ) from error


@functools.partial(jax.jit, static_argnames="model")
def _log_probs(
    variables: PyTree,
    gate: PyTree,
    tokens: jax.Array,
    length: jax.Array,
    near: jax.Array,
    count: jax.Array,
    *,
    model: Model,
) -> jax.Array:
    """Log-probabilities `[V]` of the token after the first `length` of tokens `[1, T]`, with neighbours of one position."""
    vocab, places = model.config.vocab, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    batch = {"tokens": tokens, "labels": tokens, "positions": places}
    batch |= {"segment_ids": (places < length).astype(jnp.int32), "weights": jnp.ones(tokens.shape, jnp.float32)}
    h, _ = model.apply(variables, batch, True, method="token_states")
    of_model = jax.nn.log_softmax(model.apply(variables, h[:, length - 1], method="next_logits"))[0]
    network = BitGate(vocab)

    def rows(ids: jax.Array) -> jax.Array:
        odds = path_log_odds(jnp.broadcast_to(of_model, (len(ids), vocab)), ids)
        neighbours = (jnp.broadcast_to(x, (len(ids), *x.shape[1:])) for x in (near, count))
        return -jnp.asarray(network.apply(gate, odds, *neighbours, ids, method="nll"))

    ids = jnp.arange(-(-vocab // ROWS) * ROWS, dtype=jnp.int32).reshape(-1, ROWS)
    return jax.lax.map(rows, jnp.minimum(ids, vocab - 1)).reshape(-1)[:vocab]
