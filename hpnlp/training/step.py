"""The training step: one jitted function from (state, batch) to (state, metrics)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from hpnlp.flop_count import flops_by_part
from hpnlp.models import variables
from hpnlp.parallel import host_offload
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.plan import Plan
from hpnlp.training import averages, loss_scale, sparse_rows
from hpnlp.training.apply_updates import Update, check_compatible, mean
from hpnlp.training.checksum import first_difference
from hpnlp.training.example_scores import with_examples
from hpnlp.training.gradients import Batch, Gradients, loss
from hpnlp.training.optim import OptimizerConfig, make_optimizer, make_schedule
from hpnlp.training.state_shardings import (
    TrainState,
    frozen_shapes,
    gradient_shapes,
    place,
    resharded,
    shapes_with,
    state_shardings,
)
from hpnlp.types import CarryingModel, InputError, Model, TrainingModel

if TYPE_CHECKING:
    from hpnlp.training.over_devices import OverDevices

# Folded into the key of a step for `Model.advance`: no part of an accumulated batch has this number.
ADVANCE_STREAM = np.uint32(2**32 - 1)


@dataclasses.dataclass(frozen=True)
class _OnMesh:
    """A jitted function, called with its mesh set.

    Attributes:
      mesh: The mesh.
      jitted: The function.
      frozen: The last arguments of the function: (), or a tuple of the model's frozen variables. Before
        `Trainer.with_frozen`, the tuple holds their shapes.
    """

    mesh: Mesh | AbstractMesh
    jitted: Any
    frozen: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Any:
        if isinstance(self.mesh, AbstractMesh):
            raise InputError(
                f"devices={self.mesh.size}: a trainer for devices that are not present can only be traced; pass a list of "
                "devices, or None for all"
            )
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self.frozen)[:1]):
            raise InputError(
                "the model has frozen variables, and the trainer has none: pass them to Trainer.with_frozen"
            )
        with self.in_mesh():
            return self.jitted(*args, *self.frozen)

    def in_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Context that sets the mesh; traces within and outside of it are different ones."""
        return contextlib.nullcontext() if isinstance(self.mesh, AbstractMesh) else jax.set_mesh(self.mesh)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one model on one mesh.

    Attributes:
      init: `init(key[, weights]) -> state`; parameters or buffers that are not passed are initialised from the key.
      step: `step(state, batch, key) -> (state, metrics)`; the state is donated.
      initial_carry: `initial_carry()` returns the carry before the first batch, None for a model without one.
      evaluate_next: `evaluate_next(weights, batch, carry) -> (sums, carry)`: the (sum, weight) of "loss", in nats, and of each
        metric and auxiliary loss by name, and the carry for the batch that continues this one. Where the devices hold whole
        examples, `sums` has those of each example as well, see `example_scores.with_examples`.
      state_shapes: Shapes of the state, with their shardings.
      example_batch: `example_batch(batch_size, length)` returns a batch of zeros with the shapes and dtypes of a batch of data.
      batch_sharding: Sharding of each array of a batch, by name; the arrays are global.
      training_arrays: Names of the arrays of a batch that only training reads.
      gives_probabilities: True if the loss is -log p(label).
      layout: The plan on its devices.
      undivided: Names and shapes of the matrices that no axis of the mesh divides.
      gradient_shapes: Shapes of the parameters, with the shardings of their gradients and statistics.
      rows_trained: `rows_trained(examples, length)` returns the largest number of rows that a batch of that shape trains, by
        the path of the table, for tables that are trained row by row.
      single_device: Makes the trainer of one device, from which FLOPs are counted under sequence parallelism and pipelines: a
        ring skips products, and a pipeline computes products in idle ticks. None under other plans.
    """

    init: _OnMesh
    step: _OnMesh
    initial_carry: _OnMesh
    evaluate_next: _OnMesh
    state_shapes: TrainState
    example_batch: Callable[[int, int], Batch]
    batch_sharding: Mapping[str, NamedSharding]
    training_arrays: tuple[str, ...]
    gives_probabilities: bool
    layout: Layout
    undivided: tuple[str, ...]
    gradient_shapes: Any
    rows_trained: Callable[[int, int], Mapping[sparse_rows.Path, int]]
    single_device: Callable[[], Trainer] | None

    def with_frozen(self, values: Any) -> Trainer:
        """Returns the trainer with values of the model's frozen variables, which steps and evaluations read and do not donate.

        Args:
          values: A tree of arrays like the model's collection "frozen"; None for a model without frozen variables.

        Returns:
          The trainer.

        Raises:
          InputError: The arrays have other names, shapes or dtypes than the model's.
        """
        shapes = self.step.frozen[0] if self.step.frozen else None
        if difference := first_difference(shapes, values):
            name, expected, actual = difference
            raise InputError(
                f"the frozen variables{name} of the model are {expected}, and the values are {actual}: pass the arrays that "
                "this model was made for"
            )
        if shapes is None:
            return self
        frozen = (jax.tree.map(place, shapes, values),)
        step, evaluate = (dataclasses.replace(run, frozen=frozen) for run in (self.step, self.evaluate_next))
        return dataclasses.replace(self, step=step, evaluate_next=evaluate)

    def evaluate(self, weights: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Sums over one batch.

        Args:
          weights: Weights of the model.
          batch: Arrays of all sequences.

        Returns:
          As `evaluate_next`, from the initial carry: name -> (sum, weight), and under "examples" those of single examples.
        """
        return self.evaluate_next(weights, batch, self.initial_carry())[0]

    def flops(self, examples: int, length: int) -> int | None:
        """Floating-point operations of the matrix products of one step, recomputation included.

        Args:
          examples: Sequences of a batch.
          length: Tokens of a sequence.

        Returns:
          The number; None for output layers that group tokens by their labels, whose products depend on the batch.
        """
        by_part = self.flops_by_part(examples, length)
        return None if by_part is None else sum(by_part.values())

    def flops_by_part(self, examples: int, length: int) -> dict[str, int] | None:
        """The operations of `flops` by part of the model, see `flop_count.flops_by_part`."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        try:
            trainer = self if self.single_device is None else self.single_device()
            batch = shapes_with(jax.eval_shape(lambda: self.example_batch(examples, length)), trainer.batch_sharding)
            with trainer.step.in_mesh():  # as in a call of the step, whose trace is reused
                return flops_by_part(trainer.step.jitted, trainer.state_shapes, batch, key, *trainer.step.frozen)
        except InputError:
            return None


def make_trainer(
    model: Model,
    config: OptimizerConfig,
    plan: Plan,
    *,
    steps: int,
    devices: Sequence[Any] | int | None = None,
    batch_size: int = 0,
) -> Trainer:
    """Builds the training step of a model. Nothing is allocated.

    Args:
      model: The model.
      config: The optimizer.
      plan: The layout over devices, rematerialisation and offloading.
      steps: Number of steps of the run, for the learning rate's schedule.
      devices: Devices to use, all by default. A number stands for that many devices that are not present: the functions can
        be traced, but not called.
      batch_size: Sequences of a batch, which a model with a carry needs in order to train; 0 leaves the carry out of the state.

    Returns:
      The compiled functions, with the shapes and shardings of their arguments.

    Raises:
      InputError: The plan does not divide the model, or does not fit the model or the optimizer; or `optimizer.aux` names a
        loss that no layer reports; or `advance` changes the shape of a buffer, or a batch that of the carry.
    """
    layout = plan.layout(model.config.sizes(), devices)
    check_compatible(model, config, plan, layout)
    # jax_debug_nans re-executes the program operation by operation, which does not terminate inside shard_map.
    single = (layout.mesh.size == 1 and not plan.offload_parameters) or jax.config.values["jax_debug_nans"]
    divided = None if single else _over_devices(layout)
    axes_and_shapes = variables.axes_and_shapes if divided is None else divided.axes_and_shapes
    weight_axes, weight_shapes = axes_and_shapes(model.clone(remat=plan.remat))
    (axes, _), (param_shapes, buffer_shapes) = variables.split(weight_axes), variables.split(weight_shapes)
    statistic_specs = layout.state_specs(axes, param_shapes, divided=layout.zero >= 1)
    optimizer = make_optimizer(config, steps, None if divided is None else divided.apply_to_whole(statistic_specs))
    make_state = functools.partial(_initial_state, model, config, optimizer, buffer_shapes is not None, batch_size)
    shapes = jax.eval_shape(make_state, jax.eval_shape(lambda: jax.random.key(0)), weight_shapes)
    carry_axes = model.carry_axes() if shapes.carry is not None and isinstance(model, CarryingModel) else None
    shardings = state_shardings(layout, plan, weight_axes, carry_axes, statistic_specs, shapes)
    tables = {sparse_rows.keys(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(shapes.params)}
    trained = model if isinstance(model, TrainingModel) else None
    allowed = trained.allowed_updates if trained is not None and trained.changes_weights else None
    schedule = make_schedule(config, steps)
    update = Update(config, optimizer, plan.offload_parameters, model.config.layers, schedule, allowed)
    gradients = Gradients(
        model=model.clone(
            model_parallel=None if divided is None else divided.model_parallel(model.config, carry_axes),
            remat=plan.remat,
        ),
        single_model=model,
        update=update,
        layout=layout,
        axes=axes,
        tables=tables,
        zero2=layout.zero == 2 and not single,
        aux_weights=config.aux_weights(),
    )
    gradients.check_aux_weights(weight_shapes)
    gradients.check_advance(weight_shapes)
    if carry_axes is not None:
        gradients.check_carry(weight_shapes)
    functions = _StepFunctions(
        gradients=gradients,
        update=update,
        schedule=schedule,
        tables=tables,
        fetches_optimizer=plan.offload_optimizer and not plan.offload_parameters,
        param_shapes=param_shapes,
        weight_shardings=variables.join(shardings.params, shardings.buffers),
        batch_size=batch_size,
    )
    functions.rows_trained(config.accumulate, 8)  # raises InputError for models that cannot train some rows only
    on_mesh = functools.partial(_OnMesh, layout.mesh)
    frozen = frozen_shapes(layout, weight_axes, weight_shapes)
    frozen_shardings = jax.tree.map(lambda leaf: leaf.sharding, frozen)
    batch_sharding = {name: layout.sharding(*names) for name, names in model.batch_axes().items()}
    training_arrays = () if trained is None else trained.training_arrays
    evaluated = {name: sharding for name, sharding in batch_sharding.items() if name not in training_arrays}
    replicated = layout.sharding()
    one_device = functools.partial(
        make_trainer,
        model,
        config,
        Plan("single", remat=plan.remat),
        steps=steps,
        devices=1,
        batch_size=batch_size,
    )
    return Trainer(
        init=on_mesh(jax.jit(functions.init, out_shardings=shardings)),
        step=on_mesh(
            jax.jit(
                functions.step,
                donate_argnums=0,
                in_shardings=(shardings, batch_sharding, replicated, *frozen_shardings),
                out_shardings=(shardings, replicated),
            ),
            frozen,
        ),
        initial_carry=on_mesh(jax.jit(functions.initial_carry, out_shardings=shardings.carry)),
        evaluate_next=on_mesh(
            jax.jit(
                functions.evaluate,
                in_shardings=(None, evaluated, shardings.carry, *frozen_shardings),
                out_shardings=(replicated, shardings.carry),
            ),
            frozen,
        ),
        state_shapes=shapes_with(shapes, shardings),
        example_batch=model.example_batch,
        batch_sharding=batch_sharding,
        training_arrays=training_arrays,
        gives_probabilities=model.is_normalized,
        layout=layout,
        undivided=tuple(layout.undivided(axes, shapes.params)),
        gradient_shapes=gradient_shapes(layout.mesh, shapes.params, shardings.params, statistic_specs),
        rows_trained=functions.rows_trained,
        single_device=None if layout.size("layers", "length") == 1 else one_device,
    )


def _initial_state(
    model: Model,
    config: OptimizerConfig,
    optimizer: Any,
    has_buffers: bool,
    batch_size: int,
    key: jax.Array,
    weights: Any = None,
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
    carry = variables.initial_carry(model, batch_size) if batch_size else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ema, scale, buffers, carry, averaged)


@dataclasses.dataclass(frozen=True)
class _StepFunctions:
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

    def init(self, key: jax.Array, weights: Any = None) -> TrainState:
        """The state before the first step; `key` draws the parameters and buffers that are not passed."""
        model, update = self.gradients.single_model, self.update
        has_buffers = variables.BUFFERS in self.weight_shardings
        return _initial_state(model, update.config, update.optimizer, has_buffers, self.batch_size, key, weights)

    def initial_carry(self) -> Any:
        """`Trainer.initial_carry`."""
        return variables.initial_carry(self.gradients.single_model, self.batch_size) if self.batch_size else None

    def step(
        self, state: TrainState, batch: Batch, key: jax.Array, frozen: Any = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step: gradients, update, metrics. Only the trained rows of a table take part in it."""
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
        if self.batch_size != count and variables.initial_carry(self.gradients.single_model, 1) is not None:
            raise InputError(
                f"batch_size={self.batch_size} of make_trainer: the model carries state from batch to batch, and the batch has "
                f"{count} sequences: pass batch_size={count}"
            )

    def _advance(self, state: TrainState, statistics: Any, key: jax.Array) -> Any:
        """The buffers of the next step, None if the model has none."""
        if state.buffers is None:
            return None
        rng = jax.random.fold_in(key, ADVANCE_STREAM)
        return self.gradients.model.advance(state.buffers, statistics, state.step, rng)

    def evaluate(self, weights: Any, batch: Batch, carry: Any, frozen: Any = None) -> tuple[dict[str, Any], Any]:
        """`Trainer.evaluate_next`. Averaged parameters, which have the shardings of optimizer state, are resharded."""
        if self.batch_size:
            self._check_carry(batch)
        weights = jax.tree.map(resharded, self.weight_shardings, weights)
        joined, model = variables.join(weights, None, frozen), self.gradients.model

        def sums_of(batch: Batch) -> tuple[dict[str, Any], Any]:
            out = loss(model, joined, batch, None, carry, self.gradients.parts_of_loss(batch))
            sums = {"loss": (out.sum, out.weight), **out.aux}
            return self.gradients.with_auxiliary_losses(sums, out.statistics), out.carry

        return sums_of(batch) if model.model_parallel is not None else with_examples(sums_of, batch)

    def rows_trained(self, examples: int, length: int) -> dict[sparse_rows.Path, int]:
        """`Trainer.rows_trained`."""
        example = self.gradients.single_model.example_batch

        def looked_up(params: Any) -> Any:
            return self.gradients.looked_up(params, example(examples, length), jax.random.key(0))

        return {path: ids.size for path, ids in jax.eval_shape(looked_up, self.param_shapes).items()}


def _updates(state: TrainState) -> jax.Array:
    """Number of the optimizer's updates: skipped steps do not count in its schedule."""
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    return counts[0][1] if counts else state.step


def _over_devices(layout: Layout) -> OverDevices:
    """Imported here, so that a run on one device does not import the layouts of several."""
    from hpnlp.training.over_devices import OverDevices

    return OverDevices(layout)


def check_batch(layout: Layout, batch_size: int, seq_len: int, accumulate: int) -> None:
    """Checks that a batch divides over devices, accumulation and microbatches.

    Args:
      layout: The plan on its devices.
      batch_size: Sequences of a batch.
      seq_len: Tokens of a sequence.
      accumulate: Number of parts that gradients are accumulated from.

    Raises:
      InputError: One of the sizes does not divide; the message names the field and the multiple to use.
    """
    devices = layout.size("batch")
    if batch_size % (devices * accumulate):
        owner = "1 device's" if devices == 1 else f"{devices} devices'"
        raise InputError(
            f"data.batch_size={batch_size} does not split into {owner} sequences (plan.data x plan.fsdp) times "
            f"optimizer.accumulate={accumulate}: make it a multiple of {devices * accumulate}"
        )
    if seq_len % layout.size("length"):
        raise InputError(
            f"data.seq_len={seq_len} does not divide over plan.sequence={layout.size('length')}: make it a multiple"
        )
    if layout.mesh.size > 1:
        _over_devices(layout).check_batch(batch_size // accumulate, seq_len)
