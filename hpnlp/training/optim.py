"""Optimizers and learning-rate schedules by name, most of them optax's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hpnlp.ops.dynamic_quantization import Quantized, dequantize, quantize
from hpnlp.spec import build, lookup, parse_one
from hpnlp.training import sparse_rows
from hpnlp.training.muon import Whole, scale_by_muon
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How parameters move.

    name: an entry of OPTIMIZERS. learning_rate: the peak. schedule: an entry of SCHEDULES, with its arguments, after
    `warmup` steps of linear rise. final: the last learning rate as a fraction of the peak. weight_decay: decoupled, times
    the learning rate, on matrices and tables only. b1, b2, eps: of the optimizers that have such. momentum: of lars, sgd
    and muon. adam_learning_rate: muon's rate for what is no matrix (norms, biases, tables), 0 for learning_rate. clip_norm:
    gradients of a larger global norm are scaled down to it, 0 never. accumulate: parts that a batch is split into, their
    gradients summed. skip_nonfinite: a step whose gradient norm is not finite changes nothing. loss_scale: the first factor
    of a loss whose gradients are float16 (see training/loss_scale.py), 0 for none; None is 1024 for model.dtype=float16,
    else none. With one, a step that is not finite is always skipped. ema: decay of an average of the parameters that
    evaluation, generation and export use, 0 for none. rows: of tables of which a batch looks up some rows (embeddings,
    sampled and tree outputs, model.tied=False), these rows alone are trained: their moments move, and their weights decay,
    in the steps that touch them (lazy Adam). base_batch: rows of the batch that the learning rates are for, 0 for any: with
    one of another size they are multiplied by an entry of SCALINGS, `scaling`, of the sizes' ratio.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup: int = 50
    final: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    adam_learning_rate: float = 0.0
    clip_norm: float = 1.0
    accumulate: int = 1
    skip_nonfinite: bool = True
    loss_scale: float | None = None
    ema: float = 0.0
    rows: bool = False
    base_batch: int = 0
    scaling: str = "linear"

    def __post_init__(self) -> None:
        lookup(OPTIMIZERS, self.name, "optimizer.name")
        _schedule(self, 1)
        lookup(SCALINGS, self.scaling, "optimizer.scaling")
        if self.base_batch < 0:
            raise InputError(f"optimizer.base_batch={self.base_batch}: expected a number of rows, 0 for no scaling")
        if self.accumulate < 1:
            raise InputError(f"optimizer.accumulate={self.accumulate}: expected at least 1, which is no accumulation")
        if self.warmup < 0:
            raise InputError(f"optimizer.warmup={self.warmup}: expected a number of steps, 0 for none")
        if self.loss_scale and not 1.0 <= self.loss_scale < math.inf:
            raise InputError(
                f"optimizer.loss_scale={self.loss_scale}: expected a factor of at least 1, as in 1024, or 0 for none"
            )
        if not 0.0 <= self.ema < 1.0:
            raise InputError(f"optimizer.ema={self.ema}: expected a decay in [0, 1), 0 for no average")
        if self.rows and self.name not in ROWWISE:
            raise InputError(
                f"optimizer.rows=True: {self.name} does not move each row of a table by itself; choose "
                f"optimizer.name from {', '.join(ROWWISE)}"
            )
        if self.rows and self.ema:
            raise InputError(
                f"optimizer.ema={self.ema} with optimizer.rows=True: the average of a row would stand still between its steps; "
                "leave one out"
            )
        for name in ("b1", "b2", "momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"optimizer.{name}={getattr(self, name)}: expected a decay in [0, 1)")
        for name in ("eps", "learning_rate", "adam_learning_rate", "weight_decay", "clip_norm", "final"):
            if not getattr(self, name) >= 0.0:
                raise InputError(f"optimizer.{name}={getattr(self, name)}: expected a number of at least 0")

    def for_batch(self, batch_size: int) -> OptimizerConfig:
        """The same with the learning rates of a batch of so many rows, of all devices and accumulated parts."""
        if not self.base_batch:
            return self
        factor = SCALINGS[self.scaling](batch_size / self.base_batch)
        rates = {name: factor * getattr(self, name) for name in ("learning_rate", "adam_learning_rate")}
        return dataclasses.replace(self, base_batch=0, **rates)


# name -> what a batch so many times as large multiplies the learning rate by. linear: Goyal et al. 2017, "Accurate, large
# minibatch SGD", sec. 2.1. sqrt: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"; You et al.
# 2020 for lamb.
SCALINGS: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


def _wsd(peak: float, final: float, steps: int, decay: int | float = 0.2) -> optax.Schedule:
    """Warm-up, stable, decay (Hu et al. 2024, sec. 4.2): constant, then linear over the last `decay` of the steps."""
    if not 0 < decay <= 1:
        raise InputError(
            f"optimizer.schedule: wsd(decay={decay}): expected a fraction of the steps, over 0 and at most 1"
        )
    decaying = max(1, round(steps * decay))
    parts = [optax.constant_schedule(peak), optax.linear_schedule(peak, peak * final, decaying)]
    return optax.join_schedules(parts, [max(0, steps - decaying)])


def _rsqrt(peak: float, final: float, steps: int, timescale: int | float = 1000) -> optax.Schedule:
    """Falls with the square root of the step over `timescale`."""
    if not timescale > 0:
        raise InputError(f"optimizer.schedule: rsqrt(timescale={timescale}): expected a number of steps over 0")
    return lambda step: peak * jax.lax.rsqrt(jnp.maximum(1.0, 1.0 + step / timescale))


# name -> (peak, final fraction, steps after warm-up, arguments of the spec) -> schedule
SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": lambda peak, final, steps: optax.constant_schedule(peak),
    "linear": lambda peak, final, steps: optax.linear_schedule(peak, peak * final, steps),
    "cosine": lambda peak, final, steps: optax.cosine_decay_schedule(peak, steps, alpha=final),
    "rsqrt": _rsqrt,
    "wsd": _wsd,
}


def _schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The named schedule over `steps` steps, without warm-up. Raises InputError where its arguments cannot be."""
    spec = parse_one(config.schedule, "optimizer.schedule")
    return build(spec, SCHEDULES, "optimizer.schedule", peak=config.learning_rate, final=config.final, steps=steps)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate at each step: linear warm-up from 0 to the peak, then the named schedule down to the last step.

    Raises InputError where the peak depends on a size of batch that nobody has told the config.
    """
    if config.base_batch:
        raise InputError(
            f"optimizer.base_batch={config.base_batch} scales learning rates by the batch: pass config.for_batch(batch_size)"
        )
    body = _schedule(config, max(1, steps - config.warmup))
    if config.warmup == 0:
        return body
    # The first step already moves: step 0 takes 1/warmup of the peak.
    rise = lambda step: config.learning_rate * (step + 1) / config.warmup  # noqa: E731
    return optax.join_schedules([rise, body], [config.warmup])


def is_matrix(params: Any) -> Any:
    """True for kernels and tables, False for norms' scales and for biases: what weight decay acts on."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path) in ("kernel", "table", "head"), params)


def _name(path: Any) -> str:
    # optax maps over parameters that may still be boxed with their axis names; the box's own key is no name.
    return next(reversed(sparse_rows.keys(path)), "")


def _adamw(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=is_matrix)


def _adamw8bit(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW whose moments of large matrices rest in 8 bits.

    Dettmers et al. 2022, "8-bit optimizers via block-wise quantization". A number of a matrix with rows of n takes 2 +
    8/n bytes instead of 8; for an update the moments are float32 again. Embedding tables (sec. 2.3) and what has under
    4096 numbers stay so. Of rows that devices divide, the largest magnitudes are exchanged, 8 bytes a row, and nothing
    else.
    """
    adam = optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps)
    decay = optax.add_decayed_weights(c.weight_decay, mask=is_matrix)
    return optax.chain(_at_rest_in_8_bits(adam), decay, optax.scale_by_learning_rate(rate))


def _at_rest_in_8_bits(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    def rests(path: Any, leaf: jax.Array) -> Any:
        return _name(path) in ("kernel", "head") and leaf.size >= 4096

    def resting(which: Any, state: Any) -> Any:
        def all_of(moments: Any, signed: bool) -> Any:
            pack = lambda rests, x: quantize(x, signed=signed) if rests else x  # noqa: E731
            return jax.tree.map(pack, which, moments)

        return state._replace(mu=all_of(state.mu, True), nu=all_of(state.nu, False))

    def awake(state: Any) -> Any:
        def all_of(moments: Any, signed: bool) -> Any:
            unpack = lambda x: dequantize(x, signed=signed) if _is_quantized(x) else x  # noqa: E731
            return jax.tree.map(unpack, moments, is_leaf=_is_quantized)

        return state._replace(mu=all_of(state.mu, True), nu=all_of(state.nu, False))

    def init(params: Any) -> Any:
        return resting(jax.tree_util.tree_map_with_path(rests, params), adam.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # As they were, and not by their size, which is less where only some rows of a table are trained.
        which = jax.tree.map(_is_quantized, state.mu, is_leaf=_is_quantized)
        updates, state = adam.update(updates, awake(state), params)
        return updates, resting(which, state)

    return optax.GradientTransformation(init, update)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _lion(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.lion(rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=is_matrix)


def _adafactor(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    # optax's adafactor decays by weight_decay_rate without the learning rate; scaled here so that the field means one thing.
    decay = (lambda step: c.weight_decay * rate(step)) if c.weight_decay else None
    return optax.adafactor(
        rate, weight_decay_rate=decay, weight_decay_mask=is_matrix, multiply_by_parameter_scale=False
    )


def _trust_ratio(coefficient: float = 1.0) -> optax.GradientTransformation:
    """Updates times coefficient * |parameter| / |update|, of each layer by itself where layers are stacked."""
    optaxs = optax.scale_by_trust_ratio(trust_coefficient=coefficient)

    def one(update: Any, param: Any) -> Any:
        return optaxs.update(update, optax.EmptyState(), param)[0]

    def scaled(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        return (jax.vmap(one) if "layers" in sparse_rows.keys(path) else one)(update, param)

    def apply(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree_util.tree_map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(optaxs.init, apply)


def _lamb(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2."""
    return optax.chain(
        optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps),
        optax.add_decayed_weights(c.weight_decay, mask=is_matrix),
        _trust_ratio(),
        optax.scale_by_learning_rate(rate),
    )


def _lars(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """You, Gitman and Ginsburg 2017, "Large batch training of convolutional networks", algorithm 1, with its trust of 0.001.

    That is of matrices: they move by a thousandth of what the rate says of their norm, all else as by sgd.
    """
    return optax.chain(
        optax.add_decayed_weights(c.weight_decay, mask=is_matrix),
        optax.masked(_trust_ratio(0.001), is_matrix),
        optax.scale_by_learning_rate(rate),
        optax.trace(c.momentum),
    )


def _muon(c: OptimizerConfig, rate: optax.Schedule, whole: Whole | None = None) -> optax.GradientTransformation:
    """Kernels by muon, a first axis of stacked layers being no part of the matrix; the rest by an Adam."""
    scale = (c.adam_learning_rate or c.learning_rate) / (c.learning_rate or 1.0)
    matrices = optax.chain(
        scale_by_muon(c.momentum, c.eps, whole),
        optax.add_decayed_weights(c.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    adam = optax.adamw(
        lambda step: scale * rate(step),
        b1=c.b1,
        b2=c.b2,
        eps=c.eps,
        weight_decay=c.weight_decay,
        mask=is_matrix,
        nesterov=True,
    )
    kinds = lambda params: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: "muon" if _name(path) == "kernel" else "adam", params
    )
    return optax.partition({"muon": matrices, "adam": adam}, kinds)


def _sgd(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(c.weight_decay, mask=is_matrix)
    return optax.chain(decay, optax.sgd(rate, momentum=c.momentum or None))


def _adagrad(c: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(c.weight_decay, mask=is_matrix)
    scale = optax.scale_by_rss(initial_accumulator_value=0.0, eps=c.eps)
    return optax.chain(scale, decay, optax.scale_by_learning_rate(rate))


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "lion": _lion,
    "adafactor": _adafactor,
    "adagrad": _adagrad,
    "lamb": _lamb,
    "lars": _lars,
    "muon": _muon,
    "sgd": _sgd,
}

# Those that move each number of a table by its own gradients.
ROWWISE = ("adagrad", "adamw", "adamw8bit", "lion", "muon", "sgd")


def make_optimizer(
    config: OptimizerConfig, steps: int, whole: Whole | None = None
) -> optax.GradientTransformationExtraArgs:
    """Clipping by global norm, then the named optimizer over `steps` steps. An update may be told the `norm`.

    whole: what an optimizer that multiplies matrices does where devices have parts of them.
    """
    schedule = make_schedule(config, steps)
    given = {"whole": whole} if config.name == "muon" else {}
    optimizer = OPTIMIZERS[config.name](config, schedule, **given)
    return (
        optax.chain(_clip(config.clip_norm), optimizer)
        if config.clip_norm
        else optax.with_extra_args_support(optimizer)
    )


def _clip(most: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`, which may be told the norm: of gradients of which it is given a part."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        clipped = jax.tree.map(lambda g: jax.lax.select(norm < most, g, g / norm.astype(g.dtype) * most), updates)
        return clipped, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
