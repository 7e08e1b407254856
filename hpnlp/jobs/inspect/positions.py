"""Loss of held-out tokens by the length of the context: the number of tokens of the same document before the token."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hpnlp.data.reading.files import Progress
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.gradients import loss
from hpnlp.types import InputError

Z = 1.96  # standard errors to each side of a 95 % interval


@dataclasses.dataclass(frozen=True)
class Bin:
    """Tokens with about the same number of tokens before them.

    Attributes:
      first: Smallest number of tokens of the same document before the token, in the same sequence.
      last: Largest number.
      loss: Mean loss in nats.
      error: Standard error of the mean over sequences, which are taken to be independent; None for a single sequence.
      weight: Sum of the weights of the tokens.
    """

    first: int
    last: int
    loss: float
    error: float | None
    weight: float

    @property
    def name(self) -> str:
        """The numbers of tokens, as "4-7"."""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


@dataclasses.dataclass(frozen=True)
class ContextLosses:
    """Losses by the length of the context.

    Attributes:
      bins: Tokens without context, and those of each power of two.
      loss: Mean loss of all tokens, that of an evaluation on the same batches.
      sequences: Number of sequences with a loss.
    """

    bins: tuple[Bin, ...]
    loss: float
    sequences: int


def context_losses(
    model: Any, weights: PyTree, batches: Iterable[Mapping[str, np.ndarray]], progress: Progress
) -> ContextLosses | None:
    """Scores held-out text.

    The loss of a batch is a sum over tokens of weight times loss, so that its derivative by the weights gives the losses.

    Args:
      model: A model on one device.
      weights: Its weights.
      batches: Batches in the order of an evaluation; each continues the one before for models with a carry.
      progress: Called with numbers of batches.

    Returns:
      The losses; None if they are not those of tokens, but of whole sequences.

    Raises:
      InputError: No token of the batches has a label.
    """

    @jax.jit
    def token_losses(weights: PyTree, batch: Mapping[str, jax.Array], carry: PyTree) -> tuple[jax.Array, Any]:
        def total(factors: jax.Array) -> tuple[jax.Array, Any]:
            out = loss(model, weights, {**batch, "weights": factors}, None, carry)
            return out.sum, out.carry

        return jax.grad(total, has_aux=True)(batch["weights"].astype(jnp.float32))

    names, carry, sums, longest, count = model.batch_axes(), None, [], 0, operator.length_hint(batches)
    for number, batch in enumerate(batches):
        if batch["weights"].ndim != 2:
            return None
        progress("scoring held-out examples", number, count)
        if not number:
            carry = model.initial_carry(len(batch["weights"]))
        losses, carry = token_losses(weights, {name: batch[name] for name in names}, carry)
        longest = max(longest, batch["weights"].shape[1] - 1)
        sums.append(
            _binned(np.asarray(losses, np.float64), np.asarray(batch["weights"], np.float64), batch["segment_ids"])
        )
    width = max(x.shape[2] for x in sums)
    return _joined(
        longest, np.concatenate([np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]))) for x in sums], axis=1)
    )


def context_lengths(segment_ids: np.ndarray) -> np.ndarray:
    """Number of tokens of the same segment before each token.

    Args:
      segment_ids: `[B, T]`, of which equal numbers are side by side.

    Returns:
      `[B, T]`.
    """
    index = np.broadcast_to(np.arange(segment_ids.shape[1]), segment_ids.shape)
    is_first = np.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - np.maximum.accumulate(np.where(is_first, index, 0), axis=1)


def _binned(losses: np.ndarray, weights: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """`[2, B, bins]`: sums of weighted losses and of weights, of tokens with 0, 1, 2 to 3, 4 to 7, ... tokens before them."""
    lengths = context_lengths(np.asarray(segment_ids))
    bins = np.where(lengths > 0, np.frexp(lengths)[1], 0)
    member = bins[..., None] == np.arange(int(np.frexp(lengths.shape[1] - 1)[1]) + 1)
    totals = np.where(weights > 0, losses * weights, 0.0)
    return np.stack([(x[..., None] * member).sum(axis=1) for x in (totals, weights)])


def _joined(longest: int, sums: np.ndarray) -> ContextLosses:
    """The losses of all sequences, of `[2, sequences, bins]`; `longest` is the largest number of tokens before a token."""
    scored = sums[:, sums[1].sum(axis=1) > 0]
    if not scored.size:
        raise InputError("no held-out token has a label, so that there is no loss: name a run with more held-out text")
    bins = []
    for index, (total, weight) in enumerate(zip(scored[0].T, scored[1].T, strict=True)):
        if weight.sum():
            scores = ExampleScores({"loss": (total, weight)}, np.arange(len(weight), dtype=np.uint32))
            first, last = (0, 0) if not index else (2 ** (index - 1), min(2**index - 1, longest))
            mean = float(total.sum() / weight.sum())
            bins.append(Bin(first, last, mean, scores.standard_error("loss"), float(weight.sum())))
    total, weight = scored.sum(axis=(1, 2))
    return ContextLosses(tuple(bins), float(total / weight), scored.shape[1])


def table(losses: ContextLosses) -> list[str]:
    """Lines of a table of losses by the length of the context.

    Returns:
      Lines of text.
    """
    lines = [f"{'tokens before':>14}{'loss, nats':>12}{'95 % interval':>20}{'tokens':>12}"]
    for item in losses.bins:
        interval = (
            "-" if item.error is None else f"{item.loss - Z * item.error:.4f} to {item.loss + Z * item.error:.4f}"
        )
        lines.append(f"{item.name:>14}{item.loss:12.4f}{interval:>20}{item.weight:12,.0f}")
    return [*lines, f"{'all':>14}{losses.loss:12.4f}"]


def as_json(losses: ContextLosses) -> Sequence[Mapping[str, Any]]:
    """The losses for inspect.json."""
    return [dataclasses.asdict(item) for item in losses.bins]
