"""Techniques of training that replace the kernels which layers read, with gradients for the kernels and for scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from hpnlp.compress.training.penalties import group_lasso, lasso
from hpnlp.compress.training.training_technique import Technique
from hpnlp.ops.weights import dense, quantize
from hpnlp.ops.weights.sparse import largest
from hpnlp.types import InputError

# Share of the weights of a matrix that soft movement pruning keeps at least.
FLOOR = 0.005


@dataclasses.dataclass(frozen=True)
class QuantizedTechnique(Technique):
    """Rounds matrices in the forward pass; gradients pass as if they were not (Jacob et al. 2018, section 3)."""

    kind: str = "integer"
    bits: int = 8
    group: int = 0
    inputs: bool = False

    @property
    def input_bits(self) -> int:
        return (1 if self.kind == "binary" else 8) if self.inputs else 0

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        if self.kind == "binary":  # BinaryConnect: no gradient where latent weights are beyond 1
            w = jnp.clip(w, -1.0, 1.0)
        rounded = _by_layer(lambda layer: _ROUNDING[self.kind](layer, self.bits, self.group), w)
        return w + jax.lax.stop_gradient(rounded - w)


@dataclasses.dataclass(frozen=True)
class MagnitudeTechnique(Technique):
    """Zeroes the smallest weights, more and more of them (Zhu and Gupta 2017, eq. 1)."""

    keep: int | float = 0.1
    begin: int | float = 0.1
    end: int | float = 0.7

    @property
    def share(self) -> Callable[[Array], Array]:
        return lambda step: cubic_share(step / max(self.steps, 1), self.keep, self.begin, self.end)

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w * _mask(self.ranked(w, scores), threshold)


@dataclasses.dataclass(frozen=True)
class MovementTechnique(MagnitudeTechnique):
    """Keeps the weights with the largest scores, whose gradient is dL/dw' * w (Sanh et al. 2020, section 4)."""

    @property
    def has_scores(self) -> bool:
        return True

    def ranked(self, w: Array, scores: PyTree) -> Any:
        assert scores is not None
        return scores

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        assert scores is not None
        mask = _mask(scores, threshold)
        return w * (mask + (scores - jax.lax.stop_gradient(scores)))


@dataclasses.dataclass(frozen=True)
class SoftMovementTechnique(Technique):
    """Keeps the weights whose sigmoid of scores is over a threshold, with a penalty on the sigmoids (Sanh et al. 2020).

    The largest scores of each matrix, a share FLOOR of them, stay whatever the threshold, as in the paper's code: a matrix
    without weights has no gradients that could bring any back.
    """

    threshold: int | float = 0.1
    weight: int | float = 1.0
    rate: int | float = 10.0

    @property
    def has_scores(self) -> bool:
        return True

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        assert scores is not None
        gate = jax.nn.sigmoid(self.rate * scores)
        over = jax.lax.stop_gradient(gate) > self.threshold

        def with_largest() -> Array:
            return over | _by_layer(lambda layer: largest(layer, FLOOR), jax.lax.stop_gradient(scores))

        # Without the condition, each step would sort each matrix.
        has_few = jnp.any(over.mean(axis=(-2, -1), dtype=jnp.float32) < FLOOR)
        kept = jax.lax.cond(has_few, with_largest, lambda: over).astype(w.dtype)
        return w * (kept + (gate - jax.lax.stop_gradient(gate)))

    def penalty(self, scores: PyTree) -> Array:
        return self.weight * jax.nn.sigmoid(self.rate * scores.astype(jnp.float32)).mean()


@dataclasses.dataclass(frozen=True)
class MaskedTechnique(Technique):
    """Keeps zeros: weights that are exactly 0 stay 0."""

    def allowed(self, w: Array, update: Array) -> Any:
        return jnp.where(w != 0, update, 0)

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w * (jax.lax.stop_gradient(w) != 0).astype(w.dtype)


@dataclasses.dataclass(frozen=True)
class SharedTechnique(Technique):
    """Keeps numbers equal that are equal, and zeros: trains the values of a codebook (Han et al. 2016, section 3).

    The update of a value is the mean of the updates of the numbers that share it. Each step sorts each matrix.
    """

    def allowed(self, w: Array, update: Array) -> Any:
        return _by_layer(_mean_of_equals, w, update)

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w


@dataclasses.dataclass(frozen=True)
class LowRankTechnique(Technique):
    """Trains two factors in place of each matrix, which begin as its best approximation."""

    kept: int | float = 0.5

    @property
    def parameters(self) -> int | float:
        return self.kept

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w if scores is None else scores


@dataclasses.dataclass(frozen=True)
class WeightDropTechnique(Technique):
    """Zeroes weights at random in training and scales the others by 1 / (1 - rate) (Wan et al. 2013, "DropConnect")."""

    rate: int | float = 0.5

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        if rng is None:
            return w
        return jnp.where(jax.random.bernoulli(rng, 1 - self.rate, w.shape), w / (1 - self.rate), 0.0)


def cubic_share(progress: Array, keep: int | float, begin: int | float, end: int | float) -> Array:
    """The share of weights that stays, by a cubic schedule.

    Args:
      progress: Share of the steps that are done.
      keep: The last share.
      begin: Progress at which pruning begins.
      end: Progress at which it ends.

    Returns:
      `keep + (1 - keep) (1 - t)^3`, where t rises from 0 to 1 between begin and end.

    References:
      Zhu and Gupta 2017, "To prune, or not to prune", eq. 1.
    """
    t = jnp.clip((progress - begin) / max(end - begin, 1e-9), 0.0, 1.0)
    return keep + (1.0 - keep) * (1.0 - t) ** 3


def quantized(bits: int = 8, group: int = 0, inputs: bool = False, *, steps: int) -> Technique:
    """Quantization-aware training: matrices of integers with a scale for each column, or each group of its rows.

    Args:
      bits: 2 to 8.
      group: Rows of a group, a divisor of the rows of every kernel; 0 for one scale for each column.
      inputs: Products round their inputs to 8 bits as well, as those of the stage `int8` do (Zafrir et al. 2019, "Q8BERT").
      steps: Steps of the run.

    Returns:
      The technique.

    Raises:
      InputError: `bits` is out of range.
    """
    if not 2 <= bits <= 8:
        raise InputError(f"train.weights: quantized({bits}): expected 2 to 8 bits")
    return QuantizedTechnique(steps, "integer", bits, group, inputs)


def ternary(inputs: bool = False, *, steps: int) -> Technique:
    """Matrices of -a, 0 and a: 0 up to 0.7 times the mean magnitude, and a the mean of the others.

    Args:
      inputs: As for `quantized`; the paper has it.
      steps: Steps of the run.

    Returns:
      The technique.

    References:
      Zhang et al. 2020, "TernaryBERT", eq. 6 and 7.
    """
    return QuantizedTechnique(steps, "ternary", inputs=inputs)


def binary(inputs: bool = False, *, steps: int) -> Technique:
    """Matrices of -a and a, a the mean magnitude of each column; latent weights beyond 1 have no gradient.

    Args:
      inputs: Products round their inputs to -b and b as well, b the mean magnitude of each row, as those of the stage
        `binary(inputs=True)` do; inputs beyond 1 have no gradient.
      steps: Steps of the run.

    Returns:
      The technique.

    References:
      Rastegari et al. 2016, "XNOR-Net", eq. 6. Courbariaux et al. 2015, "BinaryConnect", section 2.4, and 2016,
      "Binarized neural networks".
    """
    return QuantizedTechnique(steps, "binary", inputs=inputs)


def magnitude(keep: int | float, begin: int | float = 0.1, end: int | float = 0.7, *, steps: int) -> Technique:
    """Magnitude pruning in training: the largest weights of each kernel of each layer stay.

    Args:
      keep: Share of the weights that stays at last, in (0, 1].
      begin: Share of the steps at which pruning begins.
      end: Share of the steps at which `keep` is reached.
      steps: Steps of the run.

    Returns:
      The technique.

    Raises:
      InputError: A share is out of range.
    """
    _check_schedule("magnitude", keep, begin, end)
    return MagnitudeTechnique(steps, keep, begin, end)


def movement(keep: int | float, begin: int | float = 0.1, end: int | float = 0.7, *, steps: int) -> Technique:
    """Movement pruning: the weights with the largest scores stay, which are trained from 0.

    Args:
      keep: As for `magnitude`.
      begin: As for `magnitude`.
      end: As for `magnitude`.
      steps: Steps of the run.

    Returns:
      The technique.

    Raises:
      InputError: A share is out of range.
    """
    _check_schedule("movement", keep, begin, end)
    return MovementTechnique(steps, keep, begin, end)


def soft_movement(
    threshold: int | float = 0.1, penalty: int | float = 1.0, rate: int | float = 10.0, *, steps: int
) -> Technique:
    """Soft movement pruning: weights stay whose sigmoid of scores is over a threshold, and the largest 0.5 % of each kernel.

    Args:
      threshold: The threshold, in (0, 1).
      penalty: Factor of the mean sigmoid in the loss, at least 0.
      rate: Factor of the scores in the sigmoid: how fast scores move, relative to weights.
      steps: Steps of the run.

    Returns:
      The technique.

    Raises:
      InputError: An argument is out of range.
    """
    if not 0 < threshold < 1 or penalty < 0 or rate <= 0:
        raise InputError(
            f"train.weights: soft_movement({threshold}, {penalty}, {rate}): expected a threshold in (0, 1), a penalty of at "
            "least 0 and a rate over 0"
        )
    return SoftMovementTechnique(steps, threshold, penalty, rate)


def masked(*, steps: int) -> Technique:
    """Training in which zeros stay zeros: fine-tuning after pruning (train.init_from), and lottery tickets.

    Args:
      steps: Steps of the run.

    Returns:
      The technique.
    """
    return MaskedTechnique(steps)


def shared(*, steps: int) -> Technique:
    """Training of the values of codebooks: equal numbers of a kernel stay equal, and zeros stay zeros (train.init_from).

    Args:
      steps: Steps of the run.

    Returns:
      The technique.
    """
    return SharedTechnique(steps)


def low_rank(parameters: int | float = 0.5, *, steps: int) -> Technique:
    """Training of two factors in place of each kernel, where they have fewer parameters: fine-tuning of `factorize`.

    Args:
      parameters: Share of the parameters of each kernel that its factors have, in (0, 1): as that of the stage `factorize`,
        which finds the trained factors.
      steps: Steps of the run.

    Returns:
      The technique.

    Raises:
      InputError: `parameters` is out of range.
    """
    if not 0 < parameters < 1:
        raise InputError(
            f"train.weights: low_rank({parameters}): expected a share of the parameters, over 0 and below 1"
        )
    return LowRankTechnique(steps, parameters)


def weight_drop(rate: int | float, *, steps: int) -> Technique:
    """DropConnect: single weights are dropped in training.

    Args:
      rate: Probability that a weight is dropped, in [0, 1).
      steps: Steps of the run.

    Returns:
      The technique.

    Raises:
      InputError: `rate` is out of range.
    """
    if not 0 <= rate < 1:
        raise InputError(f"train.weights: weight_drop({rate}): expected a rate of at least 0 and below 1")
    return WeightDropTechnique(steps, rate)


# Entries of the config field `train.weights`.
WEIGHT_TRAININGS: dict[str, Callable[..., Technique]] = {
    "quantized": quantized,
    "ternary": ternary,
    "binary": binary,
    "magnitude": magnitude,
    "movement": movement,
    "soft_movement": soft_movement,
    "l1": lasso,
    "group_lasso": group_lasso,
    "masked": masked,
    "shared": shared,
    "low_rank": low_rank,
    "weight_drop": weight_drop,
}


def _mask(ranked: Array, threshold: Array | None) -> Array:
    """1 for numbers of at least the threshold of their matrix."""
    assert threshold is not None
    return (jax.lax.stop_gradient(ranked) >= threshold[..., None, None].astype(ranked.dtype)).astype(ranked.dtype)


def _round_integers(w: Array, bits: int, group: int) -> Any:
    return dense(quantize(w, bits, group=group))


def _round_ternary(w: Array, bits: int, group: int) -> Any:
    magnitude = jnp.abs(w)
    kept = magnitude > 0.7 * magnitude.mean()
    scale = jnp.sum(magnitude * kept) / jnp.maximum(kept.sum(), 1)
    return jnp.sign(w) * kept * scale


def _round_binary(w: Array, bits: int, group: int) -> Any:
    return jnp.where(w >= 0, 1.0, -1.0) * jnp.abs(w).mean(axis=0, keepdims=True)


_ROUNDING = {"integer": _round_integers, "ternary": _round_ternary, "binary": _round_binary}


def _by_layer(function: Callable[..., Any], *matrices: Array) -> Any:
    return jax.vmap(function)(*matrices) if matrices[0].ndim == 3 else function(*matrices)


def _mean_of_equals(w: Array, update: Array) -> Any:
    """The mean of the updates of all numbers with the same value; 0 for zeros."""
    order = jnp.argsort(w.reshape(-1))
    numbers, updates = w.reshape(-1)[order], update.reshape(-1)[order].astype(jnp.float32)
    ids = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), (numbers[1:] != numbers[:-1]).astype(jnp.int32)]))
    sums = jax.ops.segment_sum(updates, ids, w.size, indices_are_sorted=True)
    counts = jax.ops.segment_sum(jnp.ones_like(updates), ids, w.size, indices_are_sorted=True)
    means = jnp.zeros_like(updates).at[order].set((sums / jnp.maximum(counts, 1.0))[ids], unique_indices=True)
    return jnp.where(w != 0, means.reshape(w.shape), 0.0).astype(update.dtype)


def _check_schedule(name: str, keep: int | float, begin: int | float, end: int | float) -> None:
    if not 0 < keep <= 1 or not 0 <= begin < end <= 1:
        raise InputError(
            f"train.weights: {name}({keep}, {begin}, {end}): expected a share that stays, over 0 and at most 1, and "
            "begin < end as shares of the steps"
        )
