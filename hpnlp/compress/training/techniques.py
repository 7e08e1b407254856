"""Techniques of training that replace the kernels which layers read, with gradients for the kernels and for scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from hpnlp.compress.training.penalties import GroupLassoTechnique, LassoTechnique
from hpnlp.compress.training.training_technique import WeightTechnique
from hpnlp.errors import RangeError
from hpnlp.ops.weights import dense, quantize
from hpnlp.ops.weights.sparse import largest
from hpnlp.types import REQUIRED, option

# Share of the weights of a matrix that soft movement pruning keeps at least.
FLOOR = 0.005


class RoundingTechnique(WeightTechnique):
    """Rounds matrices in the forward pass; gradients pass as if they were not (Jacob et al. 2018, section 3)."""

    def rounded(self, w: Array) -> Array:
        """One matrix [D, F], rounded."""
        raise NotImplementedError

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w + jax.lax.stop_gradient(_by_layer(self.rounded, w) - w)


@dataclasses.dataclass(frozen=True)
class QuantizedTechnique(RoundingTechnique):
    """Quantization-aware training: matrices of integers with a scale for each column, or each group of its rows."""

    bits: int = option(8, "Bits of a weight.", least=2, most=8)
    group: int = option(
        0, "Rows of a group, a divisor of the rows of every kernel; 0 for one scale for each column.", least=0
    )
    inputs: bool = option(
        False,
        'Products round their inputs to 8 bits as well, as those of the stage int8 do (Zafrir et al. 2019, "Q8BERT").',
    )

    @property
    def input_bits(self) -> int:
        return 8 if self.inputs else 0

    def rounded(self, w: Array) -> Array:
        return dense(quantize(w, self.bits, group=self.group))


@dataclasses.dataclass(frozen=True)
class TernaryTechnique(RoundingTechnique):
    """Matrices of -a, 0 and a: 0 up to 0.7 times the mean magnitude, and a the mean of the others.

    References:
      Zhang et al. 2020, "TernaryBERT", eq. 6 and 7.
    """

    inputs: bool = option(False, "Products round their inputs to 8 bits as well, as in the paper.")

    @property
    def input_bits(self) -> int:
        return 8 if self.inputs else 0

    def rounded(self, w: Array) -> Array:
        magnitude = jnp.abs(w)
        kept = magnitude > 0.7 * magnitude.mean()
        return jnp.sign(w) * kept * (jnp.sum(magnitude * kept) / jnp.maximum(kept.sum(), 1))


@dataclasses.dataclass(frozen=True)
class BinaryTechnique(RoundingTechnique):
    """Matrices of -a and a, a the mean magnitude of each column; latent weights beyond 1 have no gradient.

    References:
      Rastegari et al. 2016, "XNOR-Net", eq. 6. Courbariaux et al. 2015, "BinaryConnect", section 2.4, and 2016,
      "Binarized neural networks".
    """

    inputs: bool = option(
        False,
        "Products round their inputs to -b and b as well, b the mean magnitude of each row, as those of the stage "
        "binary(inputs=True) do; inputs beyond 1 have no gradient.",
    )

    @property
    def input_bits(self) -> int:
        return 1 if self.inputs else 0

    def rounded(self, w: Array) -> Array:
        return jnp.where(w >= 0, 1.0, -1.0) * jnp.abs(w).mean(axis=0, keepdims=True)

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return super().bind(jnp.clip(w, -1.0, 1.0), scores, threshold, rng)


@dataclasses.dataclass(frozen=True)
class MagnitudeTechnique(WeightTechnique):
    """Magnitude pruning: zeroes the smallest weights of each kernel, more and more of them (Zhu and Gupta 2017, eq. 1)."""

    keep: int | float = option(REQUIRED, "Share of the weights that stays at last.", above=0, most=1)
    begin: int | float = option(0.1, "Share of the steps at which pruning begins.", least=0)
    end: int | float = option(0.7, "Share of the steps at which `keep` is reached.", most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.begin < self.end:
            shares = f"begin={self.begin}, end={self.end}"
            raise RangeError(type(self).__name__, f"{shares}: expected begin < end as shares of the steps")

    @property
    def share(self) -> Callable[[Array], Array]:
        return lambda step: cubic_share(step / max(self.steps, 1), self.keep, self.begin, self.end)

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w * _mask(self.ranked(w, scores), threshold)


@dataclasses.dataclass(frozen=True)
class MovementTechnique(MagnitudeTechnique):
    """Movement pruning: keeps the weights with the largest scores, which are trained from 0.

    The gradient of the scores is dL/dw' * w (Sanh et al. 2020, section 4).
    """

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
class SoftMovementTechnique(WeightTechnique):
    """Keeps the weights whose sigmoid of scores is over a threshold, with a penalty on the sigmoids (Sanh et al. 2020).

    The largest scores of each matrix, a share FLOOR of them, stay whatever the threshold, as in the paper's code: a matrix
    without weights has no gradients that could bring any back.
    """

    threshold: int | float = option(0.1, "Threshold of the sigmoid.", above=0, below=1)
    penalty: int | float = option(1.0, "Factor of the mean sigmoid in the loss.", least=0)
    rate: int | float = option(
        10.0, "Factor of the scores in the sigmoid: how fast scores move, relative to weights.", above=0
    )

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

    def score_penalty(self, scores: PyTree) -> Array:
        return self.penalty * jax.nn.sigmoid(self.rate * scores.astype(jnp.float32)).mean()


@dataclasses.dataclass(frozen=True)
class MaskedTechnique(WeightTechnique):
    """Keeps zeros: fine-tuning after pruning (train.init_from), and lottery tickets."""

    def allowed(self, w: Array, update: Array) -> Any:
        return jnp.where(w != 0, update, 0)

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w * (jax.lax.stop_gradient(w) != 0).astype(w.dtype)


@dataclasses.dataclass(frozen=True)
class SharedTechnique(WeightTechnique):
    """Keeps numbers equal that are equal, and zeros: trains the values of a codebook (Han et al. 2016, section 3).

    The update of a value is the mean of the updates of the numbers that share it. Each step sorts each matrix.
    """

    def allowed(self, w: Array, update: Array) -> Any:
        return _by_layer(_mean_of_equals, w, update)

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w


@dataclasses.dataclass(frozen=True)
class LowRankTechnique(WeightTechnique):
    """Trains two factors in place of each kernel, where they have fewer parameters: fine-tuning of the stage `factorize`.

    The factors begin as the best approximation of the kernel.
    """

    parameters: int | float = option(
        0.5,
        "Share of the parameters of each kernel that its factors have: as that of the stage factorize, which finds the trained "
        "factors.",
        above=0,
        below=1,
    )

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w if scores is None else scores


@dataclasses.dataclass(frozen=True)
class WeightDropTechnique(WeightTechnique):
    """Zeroes weights at random in training and scales the others by 1 / (1 - rate) (Wan et al. 2013, "DropConnect")."""

    rate: int | float = option(REQUIRED, "Probability that a weight is dropped.", least=0, below=1)

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


# Entries of the config field `train.weights`.
WEIGHT_TRAININGS: dict[str, type[WeightTechnique]] = {
    "quantized": QuantizedTechnique,
    "ternary": TernaryTechnique,
    "binary": BinaryTechnique,
    "magnitude": MagnitudeTechnique,
    "movement": MovementTechnique,
    "soft_movement": SoftMovementTechnique,
    "l1": LassoTechnique,
    "group_lasso": GroupLassoTechnique,
    "masked": MaskedTechnique,
    "shared": SharedTechnique,
    "low_rank": LowRankTechnique,
    "weight_drop": WeightDropTechnique,
}


def _mask(ranked: Array, threshold: Array | None) -> Array:
    """1 for numbers of at least the threshold of their matrix."""
    assert threshold is not None
    return (jax.lax.stop_gradient(ranked) >= threshold[..., None, None].astype(ranked.dtype)).astype(ranked.dtype)


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
