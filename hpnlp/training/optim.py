"""Optimizers and learning-rate schedules by name, most of them optax's, and the clipping of gradients by their global norm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike
from jaxtyping import PyTree

from hpnlp.spec import build, lookup, parse, parse_one
from hpnlp.table import Table
from hpnlp.training.optimizers import averages, sparse_rows
from hpnlp.training.optimizers.sparse_rows import ApplyToWhole
from hpnlp.types import InputError, check_options, option

LARS_TRUST_COEFFICIENT = 0.001  # value of You et al. 2017
# Names of the parameters that weight decay acts on.
_MATRICES = ("kernel", "table", "head", "left", "right")  # left and right are the factors of a kernel


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and processing of gradients."""

    name: str = option("adamw", "An entry of OPTIMIZERS.")
    learning_rate: float = option(1e-3, "The peak learning rate.", least=0)
    schedule: str = option("cosine", "An entry of SCHEDULES, with its arguments, which starts after the warm-up.")
    warmup: int = option(50, "Steps of linear rise from 0 to the peak, 0 for none.", least=0)
    final: float = option(0.1, "The last learning rate as a fraction of the peak.", least=0)
    weight_decay: float = option(
        0.1,
        "Decoupled weight decay, multiplied by the learning rate, of matrices and tables only.",
        least=0,
    )
    b1: float = option(0.9, "Decay of the first moment.", least=0, below=1)
    b2: float = option(0.95, "Decay of the second moment.", least=0, below=1)
    eps: float = option(1e-8, "Constant added to the denominator.", least=0)
    momentum: float = option(0.95, "Decay of the momentum of lars, sgd and muon.", least=0, below=1)
    adam_learning_rate: float = option(
        0.0,
        "Learning rate of the parameters that muon leaves to Adam (norms, biases, tables), 0 for learning_rate.",
        least=0,
    )
    clip_norm: float = option(
        1.0, "Gradients with a larger global norm are scaled down to it, 0 for no clipping.", least=0
    )
    accumulate: int = option(
        1, "Number of parts of a batch whose gradients are computed one after another and summed.", least=1
    )
    skip_nonfinite: bool = option(True, "A step whose gradient norm is not finite leaves the state unchanged.")
    loss_scale: float | None = option(
        None,
        "Initial factor of the loss for float16 gradients (see training/optimizers/loss_scale.py), 0 for none, None for 1024 "
        "with model.dtype=float16 and none otherwise; with loss scaling, steps that are not finite are always "
        "skipped.",
        rule=("0 for none, or at least 1", lambda scale: scale == 0 or scale >= 1),
    )
    ema: float = option(
        0.0,
        "Decay of an average of the parameters that evaluation, generation and export use, 0 for no average.",
        least=0,
        below=1,
    )
    average: str = option(
        "",
        "An entry of AVERAGES, an equally weighted average of the parameters that evaluation, generation and export use: "
        '"uniform(start=1000)" from a step on, "ntasgd(5)" from the first evaluation on that is worse than the best one of '
        'more than 5 evaluations before; "" for none.',
    )
    rows: bool = option(
        False,
        "Train only the rows of a table that a batch looks up (embeddings, sampled and tree outputs; needs "
        "model.tied=False), so that moments and weight decay of the other rows wait (lazy Adam).",
    )
    base_batch: int = option(
        0,
        "Batch size that the learning rates are meant for, 0 for any; for another batch size they are scaled.",
        least=0,
    )
    base_length: int = option(
        0,
        "Length of sequences that the learning rates are meant for; in a batch of another length they are scaled by the ratio "
        "of the lengths (data.length_deviation); 0 for any length.",
        least=0,
    )
    aux: str = option(
        "",
        'Factors of the layers\' auxiliary losses, which are reported beside the loss, as in "balance_loss(0.01)"; 1 for '
        "those that are not named.",
    )
    scaling: str = option(
        "linear",
        "An entry of SCALINGS, the factor of the learning rates as a function of batch_size / base_batch.",
    )

    def __post_init__(self) -> None:
        check_options(self, "optimizer")
        lookup(OPTIMIZERS, self.name, "optimizer.name")
        _named_schedule(self, 1)
        lookup(SCALINGS, self.scaling, "optimizer.scaling")
        self.aux_weights()  # raises InputError if it is not valid
        if self.rows and self.name not in ROWWISE:
            raise InputError(
                f"optimizer.rows=True: {self.name} does not update the rows of a table independently; choose "
                f"optimizer.name from {', '.join(ROWWISE)}"
            )
        self._check_averages()

    def _check_averages(self) -> None:
        """Raises InputError if the fields of averages are invalid, or do not fit each other or `rows`."""
        average = averages.find(self.average)
        if average is not None and self.ema:
            raise InputError(
                f"optimizer.average={self.average!r} and optimizer.ema={self.ema} are two averages: leave out one of the two"
            )
        for name, value in (("ema", self.ema), ("average", self.average)):
            if self.rows and value:
                raise InputError(
                    f"optimizer.{name}={value} with optimizer.rows=True: the average of a row would not follow between the "
                    "steps that train it; leave out one of the two"
                )

    def aux_weights(self) -> dict[str, float]:
        """Factors of auxiliary losses.

        Returns:
          Name of a loss -> factor, for the losses that `aux` names.

        Raises:
          InputError: `aux` is not a list of names, each with one number of at least 0.
        """
        weights: dict[str, float] = {}
        for spec in parse(self.aux, "optimizer.aux") if self.aux.strip() else ():
            is_number = len(spec.args) == 1 and type(spec.args[0]) in (int, float) and spec.args[0] >= 0
            if not is_number or spec.kwargs or spec.repeat > 1 or spec.name in weights:
                raise InputError(
                    f"optimizer.aux={self.aux!r}: expected the name of each loss once, with a factor of at least 0, as in "
                    '"balance_loss(0.01)"'
                )
            weights[spec.name] = float(spec.args[0])
        return weights

    def length_factor(self, batch: Mapping[str, Any]) -> float:
        """Factor of the learning rate of a batch.

        Args:
          batch: Its arrays, of which the longest have the length of its sequences.

        Returns:
          That length over `base_length`; 1 for `base_length` 0.
        """
        lengths = [x.shape[1] for x in batch.values() if x.ndim > 1]
        return max(lengths) / self.base_length if self.base_length and lengths else 1.0

    def for_batch(self, batch_size: int) -> OptimizerConfig:
        """Config with the learning rates scaled for a batch size.

        Args:
          batch_size: Sequences of a batch, over all devices and accumulated parts.

        Returns:
          The config with `base_batch` 0; the same config if `base_batch` is 0 already.
        """
        if not self.base_batch:
            return self
        factor = SCALINGS[self.scaling](batch_size / self.base_batch)
        rates = {name: factor * getattr(self, name) for name in ("learning_rate", "adam_learning_rate")}
        return dataclasses.replace(self, base_batch=0, **rates)


# name -> factor of the learning rate as a function of batch_size / base_batch. linear: Goyal et al. 2017, "Accurate, large
# minibatch SGD", section 2.1. sqrt: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"; for
# lamb, You et al. 2020.
SCALINGS: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


def _constant(peak: float, final: float, steps: int) -> optax.Schedule:
    return optax.constant_schedule(peak)


def _linear(peak: float, final: float, steps: int) -> optax.Schedule:
    return optax.linear_schedule(peak, peak * final, steps)


def _cosine(peak: float, final: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, steps, alpha=final)


def _rsqrt(peak: float, final: float, steps: int, timescale: int | float = 1000) -> optax.Schedule:
    """Peak / sqrt(1 + step / timescale); ignores `final`."""
    if not timescale > 0:
        raise InputError(f"optimizer.schedule: rsqrt(timescale={timescale}): expected a number of steps over 0")
    return lambda step: peak * jax.lax.rsqrt(jnp.maximum(1.0, 1.0 + step / timescale))


def _wsd(peak: float, final: float, steps: int, decay: int | float = 0.2) -> optax.Schedule:
    """Warm-up, stable, decay (Hu et al. 2024, section 4.2): constant, then linear over the last `decay` of the steps."""
    if not 0 < decay <= 1:
        raise InputError(
            f"optimizer.schedule: wsd(decay={decay}): expected a fraction of the steps, over 0 and at most 1"
        )
    decay_steps = max(1, round(steps * decay))
    stable = optax.constant_schedule(peak)
    return optax.join_schedules(
        [stable, optax.linear_schedule(peak, peak * final, decay_steps)], [max(0, steps - decay_steps)]
    )


# name -> (peak, final fraction, steps after warm-up, arguments of the spec) -> schedule
SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "rsqrt": _rsqrt,
    "wsd": _wsd,
}


def _named_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The schedule of the config over `steps` steps, without warm-up; raises InputError if its arguments are invalid."""
    spec = parse_one(config.schedule, "optimizer.schedule")
    return build(spec, SCHEDULES, "optimizer.schedule", peak=config.learning_rate, final=config.final, steps=steps)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the step: linear warm-up from 0 to the peak, then the named schedule to the last step.

    Args:
      config: The optimizer.
      steps: Number of steps of the run.

    Returns:
      The schedule.

    Raises:
      InputError: The learning rates are for another batch size: `config.for_batch` was not called.
    """
    if config.base_batch:
        raise InputError(
            f"optimizer.base_batch={config.base_batch} scales learning rates by the batch: pass config.for_batch(batch_size)"
        )
    body = _named_schedule(config, max(1, steps - config.warmup))
    if config.warmup == 0:
        return body

    def warmup(step: ArrayLike) -> Any:
        return config.learning_rate * (step + 1) / config.warmup  # step 0 takes 1/warmup of the peak, not 0

    return optax.join_schedules([warmup, body], [config.warmup])


def is_matrix(params: PyTree) -> Any:
    """Parameters that weight decay acts on.

    Args:
      params: Parameters.

    Returns:
      A tree like them: True for kernels and tables, False for biases and for scales of norms.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_name(path) in _MATRICES, params)


def parameter_name(path: KeyPath) -> str:
    """Last dict key of the path of a parameter."""
    # optax also maps over parameters that are still boxed with their axis names: the box's own key is not a dict key.
    return next(reversed(sparse_rows.keys(path)), "")


def _adamw(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=is_matrix)


def _lion(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.lion(rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=is_matrix)


def _adafactor(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    # optax's adafactor applies weight_decay_rate without the learning rate. Multiplied here, so that the config field means the
    # same for all optimizers.
    decay = (lambda step: c.weight_decay * rate(step)) if c.weight_decay else None
    return optax.adafactor(
        rate, weight_decay_rate=decay, weight_decay_mask=is_matrix, multiply_by_parameter_scale=False
    )


def _trust_ratio(coefficient: float = 1.0) -> optax.GradientTransformation:
    """Multiplies updates by coefficient * |parameter| / |update|; each layer of a stack has its own ratio."""
    scaling = optax.scale_by_trust_ratio(trust_coefficient=coefficient)

    def scale(update: PyTree, param: PyTree) -> Any:
        return scaling.update(update, optax.EmptyState(), param)[0]

    def scale_leaf(path: KeyPath, update: jax.Array, param: jax.Array) -> jax.Array:
        is_stack = "layers" in sparse_rows.keys(path)
        return (jax.vmap(scale) if is_stack else scale)(update, param)

    def apply(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        return jax.tree_util.tree_map_with_path(scale_leaf, updates, params), state

    return optax.GradientTransformation(scaling.init, apply)


def _lamb(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2."""
    return optax.chain(
        optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps),
        optax.add_decayed_weights(c.weight_decay, mask=is_matrix),
        _trust_ratio(),
        optax.scale_by_learning_rate(rate),
    )


def _lars(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """You, Gitman and Ginsburg 2017, "Large batch training of convolutional networks", algorithm 1.

    The trust ratio applies to matrices; all other parameters move as under sgd.
    """
    return optax.chain(
        optax.add_decayed_weights(c.weight_decay, mask=is_matrix),
        optax.masked(_trust_ratio(LARS_TRUST_COEFFICIENT), is_matrix),
        optax.scale_by_learning_rate(rate),
        optax.trace(c.momentum),
    )


def _sgd(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(c.weight_decay, mask=is_matrix)
    return optax.chain(decay, optax.sgd(rate, momentum=c.momentum or None))


def _adagrad(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(c.weight_decay, mask=is_matrix)
    scale = optax.scale_by_rss(initial_accumulator_value=0.0, eps=c.eps)
    return optax.chain(scale, decay, optax.scale_by_learning_rate(rate))


OPTIMIZERS: Table[Callable[..., optax.GradientTransformation]] = Table(
    {
        "adamw": _adamw,
        "adamw8bit": "hpnlp.training.optimizers.adamw_8bit:adamw8bit",
        "lion": _lion,
        "adafactor": _adafactor,
        "adagrad": _adagrad,
        "lamb": _lamb,
        "lars": _lars,
        "muon": "hpnlp.training.optimizers.muon:muon",
        "sgd": _sgd,
    }
)

# Optimizers that move each number of a table by its own gradients, so that rows can be trained independently.
ROWWISE = ("adagrad", "adamw", "adamw8bit", "lion", "muon", "sgd")

# Optimizers that multiply matrices, and take `apply_to_whole` for matrices that are sharded over devices.
MATRIX_OPTIMIZERS = ("muon",)


def make_optimizer(
    config: OptimizerConfig, steps: int, apply_to_whole: ApplyToWhole | None = None
) -> optax.GradientTransformationExtraArgs:
    """Clipping by global norm, then the named optimizer with its schedule.

    Args:
      config: The optimizer.
      steps: Number of steps of the run.
      apply_to_whole: Applies a function of whole matrices to matrices that are sharded over devices (see `muon`); None if
        every device holds whole matrices.

    Returns:
      The transformation. Its `update` takes the gradients' global norm as `norm`; without it, clipping computes the norm.
    """
    schedule = make_schedule(config, steps)
    if config.name in MATRIX_OPTIMIZERS:
        optimizer = OPTIMIZERS[config.name](config, schedule, apply_to_whole)
    else:
        optimizer = OPTIMIZERS[config.name](config, schedule)
    if config.clip_norm:
        return optax.chain(_clip(config.clip_norm), optimizer)
    return optax.with_extra_args_support(optimizer)


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` that takes the norm as an argument, because updates may be a part of all gradients."""

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, norm: jax.Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        clipped = jax.tree.map(
            lambda g: jax.lax.select(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm), updates
        )
        return clipped, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
