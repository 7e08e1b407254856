"""The trainer: the functions of the training step, compiled for a model, an optimizer and a layout over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from hpnlp.cost.flop_count import flops_by_part
from hpnlp.models import variables
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.plan import Plan
from hpnlp.training.files.checksum import first_difference
from hpnlp.training.gradients import Batch, Gradients
from hpnlp.training.optim import OptimizerConfig, make_optimizer, make_schedule
from hpnlp.training.optimizers import sparse_rows
from hpnlp.training.optimizers.apply_updates import Update, check_compatible
from hpnlp.training.optimizers.state_shardings import (
    TrainState,
    frozen_shapes,
    gradient_shapes,
    place,
    shapes_with,
    state_shardings,
)
from hpnlp.training.step import StepFunctions, initial_state
from hpnlp.types import InputError, Model

if TYPE_CHECKING:
    from hpnlp.training.optimizers.over_devices import OverDevices


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

    def with_frozen(self, values: PyTree) -> Trainer:
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

    def evaluate(self, weights: PyTree, batch: Mapping[str, Any]) -> dict[str, Any]:
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
    prepared = _prepare(model, config, plan, steps, batch_size, None if single else _over_devices(layout), layout)
    alone = Plan("single", remat=plan.remat)
    one_device = functools.partial(make_trainer, model, config, alone, steps=steps, devices=1, batch_size=batch_size)
    return _jitted(prepared, _step_functions(prepared), None if layout.size("layers", "length") == 1 else one_device)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Inputs of the functions of a trainer: model, optimizer and layout, with shapes and shardings of the state.

    Attributes:
      model: The model.
      config: The optimizer's config.
      plan: The plan.
      layout: The plan on its devices.
      divided: The functions that divide the model over devices; None on one device.
      optimizer: The optimizer.
      schedule: Learning rate by number of updates.
      batch_size: Sequences of a batch, 0 for a state without a carry.
      weight_axes: Logical axes of the model's weights.
      weight_shapes: Their shapes.
      statistic_specs: Specs of the optimizer's statistics, by parameter.
      carry_axes: Logical axes of the carry; None for a state without one.
      shapes: Shapes of the state.
      shardings: Its shardings.
    """

    model: Model
    config: OptimizerConfig
    plan: Plan
    layout: Layout
    divided: OverDevices | None
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    batch_size: int
    weight_axes: Any
    weight_shapes: Any
    statistic_specs: Any
    carry_axes: Any
    shapes: TrainState
    shardings: TrainState


def _prepare(
    model: Model,
    config: OptimizerConfig,
    plan: Plan,
    steps: int,
    batch_size: int,
    divided: OverDevices | None,
    layout: Layout,
) -> _Prepared:
    """Shapes and shardings of the state, and the optimizer."""
    axes_and_shapes = variables.axes_and_shapes if divided is None else divided.axes_and_shapes
    weight_axes, weight_shapes = axes_and_shapes(model.clone(remat=plan.remat))
    (axes, _), (param_shapes, buffer_shapes) = variables.split(weight_axes), variables.split(weight_shapes)
    specs = layout.state_specs(axes, param_shapes, divided=layout.zero >= 1)
    optimizer = make_optimizer(config, steps, None if divided is None else divided.apply_to_whole(specs))
    make_state = functools.partial(initial_state, model, config, optimizer, buffer_shapes is not None, batch_size)
    shapes = jax.eval_shape(make_state, jax.eval_shape(lambda: jax.random.key(0)), weight_shapes)
    carry_axes = None if shapes.carry is None else model.carry_axes()
    return _Prepared(
        model=model,
        config=config,
        plan=plan,
        layout=layout,
        divided=divided,
        optimizer=optimizer,
        schedule=make_schedule(config, steps),
        batch_size=batch_size,
        weight_axes=weight_axes,
        weight_shapes=weight_shapes,
        statistic_specs=specs,
        carry_axes=carry_axes,
        shapes=shapes,
        shardings=state_shardings(layout, plan, weight_axes, carry_axes, specs, shapes),
    )


def _step_functions(p: _Prepared) -> StepFunctions:
    """Gradients, update, and the step and evaluation of them; raises InputError for models that do not fit the optimizer."""
    model, config, plan, layout = p.model, p.config, p.plan, p.layout
    tables = {sparse_rows.keys(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(p.shapes.params)}
    allowed = model.allowed_updates if model.changes_weights else None
    update = Update(config, p.optimizer, plan.offload_parameters, model.config.layers, p.schedule, allowed)
    model_parallel = None if p.divided is None else p.divided.model_parallel(model.config, p.carry_axes)
    gradients = Gradients(
        model=model.clone(model_parallel=model_parallel, remat=plan.remat),
        single_model=model,
        update=update,
        layout=layout,
        axes=variables.split(p.weight_axes)[0],
        tables=tables,
        zero2=layout.zero == 2 and p.divided is not None,
        aux_weights=config.aux_weights(),
    )
    gradients.check_aux_weights(p.weight_shapes)
    gradients.check_advance(p.weight_shapes)
    if p.carry_axes is not None:
        gradients.check_carry(p.weight_shapes)
    functions = StepFunctions(
        gradients=gradients,
        update=update,
        schedule=p.schedule,
        tables=tables,
        fetches_optimizer=plan.offload_optimizer and not plan.offload_parameters,
        param_shapes=variables.split(p.weight_shapes)[0],
        weight_shardings=variables.join(p.shardings.params, p.shardings.buffers),
        batch_size=p.batch_size,
    )
    functions.rows_trained(config.accumulate, 8)  # raises InputError for models that cannot train some rows only
    return functions


def _jitted(p: _Prepared, functions: StepFunctions, single_device: Callable[[], Trainer] | None) -> Trainer:
    """The trainer of these functions, with the shardings of their arguments and results."""
    layout, shardings = p.layout, p.shardings
    on_mesh = functools.partial(_OnMesh, layout.mesh)
    frozen = frozen_shapes(layout, p.weight_axes, p.weight_shapes)
    frozen_shardings = jax.tree.map(lambda leaf: leaf.sharding, frozen)
    batch = {name: layout.sharding(*names) for name, names in p.model.batch_axes().items()}
    training_arrays = p.model.training_arrays
    evaluated = {name: sharding for name, sharding in batch.items() if name not in training_arrays}
    replicated = layout.sharding()
    step = jax.jit(
        functions.step,
        donate_argnums=0,
        in_shardings=(shardings, batch, replicated, *frozen_shardings),
        out_shardings=(shardings, replicated),
    )
    evaluate = jax.jit(
        functions.evaluate,
        in_shardings=(None, evaluated, shardings.carry, *frozen_shardings),
        out_shardings=(replicated, shardings.carry),
    )
    return Trainer(
        init=on_mesh(jax.jit(functions.init, out_shardings=shardings)),
        step=on_mesh(step, frozen),
        initial_carry=on_mesh(jax.jit(functions.initial_carry, out_shardings=shardings.carry)),
        evaluate_next=on_mesh(evaluate, frozen),
        state_shapes=shapes_with(p.shapes, shardings),
        example_batch=p.model.example_batch,
        batch_sharding=batch,
        training_arrays=training_arrays,
        gives_probabilities=p.model.is_normalized,
        layout=layout,
        undivided=tuple(layout.undivided(variables.split(p.weight_axes)[0], p.shapes.params)),
        gradient_shapes=gradient_shapes(layout.mesh, p.shapes.params, shardings.params, p.statistic_specs),
        rows_trained=functions.rows_trained,
        single_device=single_device,
    )


def _over_devices(layout: Layout) -> OverDevices:
    """Imports the module only here, because runs on one device do not need it."""
    from hpnlp.training.optimizers.over_devices import OverDevices

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
