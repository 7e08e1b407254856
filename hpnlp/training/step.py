"""The training step: loss, gradients, update and metrics, a function from (state, batch, key) to (state, metrics)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from hpnlp.models import variables
from hpnlp.parallel.memory import host_offload
from hpnlp.table import exports
from hpnlp.training.files.example_scores import with_examples
from hpnlp.training.gradients import Batch, Gradients, loss
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.optimizers import averages, loss_scale, sparse_rows
from hpnlp.training.optimizers.apply_updates import Update, mean
from hpnlp.training.optimizers.state_shardings import TrainState, resharded
from hpnlp.types import InputError, Model

# Folded into the key of a step for `Model.advance`: no part of an accumulated batch has this number.
ADVANCE_STREAM = np.uint32(2**32 - 1)

# Names that earlier programs import from here.
__getattr__ = exports("hpnlp.training", {"Trainer": "trainer", "check_batch": "trainer", "make_trainer": "trainer"})


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """The functions of a trainer before they are jitted.

    Attributes:
      gradients: Gradients of a batch.
      update: Update of the parameters by their gradients.
      schedule: Learning rate by number of updates.
      tables: Shapes of the parameters by path.
      fetches_optimizer: True if the optimizer state is in host memory and is fetched as a whole, not layer by layer.
      param_shapes: Shapes of the parameters.
      weight_shardings: Shardings of the model's weights.
      batch_size: Sequences of a batch, 0 for a state without a carry.
    """

    gradients: Gradients
    update: Update
    schedule: optax.Schedule
    tables: Mapping[sparse_rows.Path, tuple[int, ...]]
    fetches_optimizer: bool
    param_shapes: Any
    weight_shardings: Any
    batch_size: int

    def init(self, key: jax.Array, weights: PyTree = None) -> TrainState:
        """The state before the first step; `key` draws the parameters and buffers that are not passed."""
        model, update = self.gradients.single_model, self.update
        has_buffers = variables.BUFFERS in self.weight_shardings
        return initial_state(model, update.config, update.optimizer, has_buffers, self.batch_size, key, weights)

    def initial_carry(self) -> Any:
        """`Trainer.initial_carry`."""
        return self.gradients.single_model.initial_carry(self.batch_size) if self.batch_size else None

    def step(
        self, state: TrainState, batch: Batch, key: jax.Array, frozen: PyTree = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step: gradients, update, metrics.

        With `optimizer.rows`, the state has only the looked-up rows of tables between `sparse_rows.gather` and `scatter`.
        """
        self._check_carry(batch)
        gradients = dataclasses.replace(self.gradients, frozen=frozen)
        key = jax.random.fold_in(key, state.step)
        ids = self.gradients.looked_up(state.params, batch, key)
        full_state, state = state, sparse_rows.gather(state, ids, self.tables)
        grads, (weight, sums, statistics), carry = gradients(
            state.params, state.buffers, ids, state.scale, batch, key, state.carry
        )
        scaled = weight if state.scale is None else weight * state.scale.value
        norm = self.update.norm(grads, scaled)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"][0])
        if self.fetches_optimizer:
            state = dataclasses.replace(state, opt_state=host_offload.to_device_after(state.opt_state, norm))
        skips = self.update.config.skip_nonfinite or state.scale is not None
        averaged = averages.next_count(self.update.config.average, state.averaged, state.step)
        params, opt_state, ema = self.update(
            (state.params, state.opt_state, state.ema),
            grads,
            weight=scaled,
            norm=norm,
            step=state.step,
            is_finite=is_finite if skips else None,
            averaged=averaged,
            factor=(factor := self.update.config.length_factor(batch)),
        )
        with jax.numpy_dtype_promotion("standard"):
            learning_rate = factor * jnp.asarray(self.schedule(_updates(state)), jnp.float32)
        buffers = self._advance(state, statistics, key)
        if skips:
            select = functools.partial(jnp.where, is_finite)
            unchanged = state.buffers, state.carry, state.averaged
            buffers, carry, averaged = jax.tree.map(select, (buffers, carry, averaged), unchanged)
        new_state = TrainState(state.step + 1, params, opt_state, ema, state.scale, buffers, carry, averaged)
        # Vectors, such as a confusion matrix, are metrics of evaluations only.
        metrics = {name: mean(total, count) for name, (total, count) in sums.items() if not total.ndim}
        metrics |= {"grad_norm": norm, "learning_rate": learning_rate, "target_tokens": weight}
        metrics["skipped"] = 1.0 - is_finite.astype(jnp.float32)
        if state.scale is not None:
            metrics["loss_scale"] = state.scale.value
            new_state = dataclasses.replace(new_state, scale=state.scale.after(is_finite))
        return sparse_rows.scatter(full_state, new_state, ids, self.tables), metrics

    def _check_carry(self, batch: Batch) -> None:
        """Raises InputError if the state lacks the carry of the batch's sequences."""
        count = jax.tree.leaves(batch)[0].shape[0]
        if self.batch_size != count and self.gradients.single_model.initial_carry(1) is not None:
            raise InputError(
                f"batch_size={self.batch_size} of make_trainer: the model carries state from batch to batch, and the batch has "
                f"{count} sequences: pass batch_size={count}"
            )

    def _advance(self, state: TrainState, statistics: PyTree, key: jax.Array) -> Any:
        """The buffers of the next step, None if the model has none."""
        if state.buffers is None:
            return None
        rng = jax.random.fold_in(key, ADVANCE_STREAM)
        return self.gradients.model.advance(state.buffers, statistics, state.step, rng)

    def evaluate(
        self, weights: PyTree, batch: Batch, carry: PyTree, frozen: PyTree = None
    ) -> tuple[dict[str, Any], Any]:
        """`Trainer.evaluate_next`. Averaged parameters, which have the shardings of optimizer state, are resharded."""
        if self.batch_size:
            self._check_carry(batch)
        weights = jax.tree.map(resharded, self.weight_shardings, weights)
        joined, model = variables.join(weights, None, frozen), self.gradients.model

        def batch_sums(batch: Batch) -> tuple[dict[str, Any], Any]:
            out = loss(model, joined, batch, None, carry, self.gradients.parts_of_loss(batch))
            sums = {"loss": (out.sum, out.weight), **out.aux}
            return self.gradients.with_auxiliary_losses(sums, out.statistics), out.carry

        return batch_sums(batch) if model.model_parallel is not None else with_examples(batch_sums, batch)

    def rows_trained(self, examples: int, length: int) -> dict[sparse_rows.Path, int]:
        """`Trainer.rows_trained`."""
        example = self.gradients.single_model.example_batch

        def looked_up(params: PyTree) -> Any:
            return self.gradients.looked_up(params, example(examples, length), jax.random.key(0))

        return {path: ids.size for path, ids in jax.eval_shape(looked_up, self.param_shapes).items()}


def initial_state(
    model: Model,
    config: OptimizerConfig,
    optimizer: optax.GradientTransformationExtraArgs,
    has_buffers: bool,
    batch_size: int,
    key: jax.Array,
    weights: PyTree = None,
) -> TrainState:
    """The state before the first step; `key` draws the parameters and buffers that are not passed."""
    params, buffers = (None, None) if weights is None else variables.split(weights)
    if params is None or (has_buffers and buffers is None):
        initial = nn.meta.unbox(model.init(key, model.example_batch(1, 8)))
        params = initial["params"] if params is None else params
        buffers = initial.get(variables.BUFFERS)
    ema = jax.tree.map(jnp.copy, params) if config.ema or config.average else None
    averaged = jnp.zeros((), jnp.int32) if config.average else None
    scale = loss_scale.initial(config.loss_scale, model.config.dtype)
    carry = model.initial_carry(batch_size) if batch_size else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ema, scale, buffers, carry, averaged)


def _updates(state: TrainState) -> jax.Array:
    """Number of the optimizer's updates: skipped steps do not count in its schedule."""
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    return counts[0][1] if counts else state.step
