"""The training step: one jitted function from (state, batch) to (state, metrics)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hpnlp import measure
from hpnlp.models.lm import LM, axes_and_shapes, example_batch, masks_of, mixers_of
from hpnlp.parallel import context_parallel, distributed_matrices, host_offload, pipeline, vocab_parallel
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.plan import Plan
from hpnlp.training import loss_scale, sparse_rows
from hpnlp.training.apply_updates import Update, check_by_layer, mean
from hpnlp.training.gradients import Batch, Gradients, loss
from hpnlp.training.muon import Whole
from hpnlp.training.optim import OptimizerConfig, make_optimizer, make_schedule
from hpnlp.types import InputError, ModelParallel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes: arrays, or their shapes or shardings. step: how many are done. ema: averaged
    parameters, or None. scale: a `LossScale`, or None."""

    step: Any
    params: Any
    opt_state: Any
    ema: Any = None
    scale: Any = None

    @property
    def best_params(self) -> Any:
        """What evaluation, generation and export use."""
        return self.params if self.ema is None else self.ema


@dataclasses.dataclass(frozen=True)
class _OnMesh:
    """A jitted function, called where its mesh is known."""

    mesh: Mesh | AbstractMesh
    jitted: Any

    def __call__(self, *args: Any) -> Any:
        if isinstance(self.mesh, AbstractMesh):
            raise InputError(f"{self.mesh.size} devices were asked for by their number: pass devices=, or none for all")
        with jax.set_mesh(self.mesh):
            return self.jitted(*args)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one model on one mesh.

    init(key[, params]) -> state; step(state, batch, key) -> (state, metrics), state donated; evaluate(params, batch) -> (sum,
    weight) of the loss in nats. Batches are global arrays over batch_sharding. state_shapes carries the shardings.
    gives_probabilities: whether that loss is -log p(label). undivided: the matrices that no axis of the mesh divides.
    part_shapes: as the parameters', laid out as their statistics are. rows_trained(rows, length): how many rows of a table a
    batch of that shape trains at most, by the table's path, where it does not train all. counted: makes the
    trainer of one device, whose products are the model's, where here some are left out or made in idle ticks.
    """

    init: _OnMesh
    step: _OnMesh
    evaluate: _OnMesh
    state_shapes: TrainState
    batch_sharding: NamedSharding
    gives_probabilities: bool
    layout: Layout
    undivided: tuple[str, ...]
    part_shapes: Any
    rows_trained: Callable[[int, int], Mapping[sparse_rows.Path, int]]
    counted: Callable[[], Trainer] | None

    def flops(self, rows: int, length: int) -> int | None:
        """Floating-point operations of the matrix products of one step, recomputation counted.

        None where the batch decides how many there are: with output layers that group tokens by their labels.
        """
        batch = jax.eval_shape(lambda: example_batch(rows, length))
        key = jax.eval_shape(lambda: jax.random.key(0))
        try:
            counted = self if self.counted is None else self.counted()
            return measure.count_flops(counted.step.jitted, counted.state_shapes, batch, key)
        except InputError:
            return None


def make_trainer(
    model: LM,
    config: OptimizerConfig,
    plan: Plan,
    *,
    steps: int,
    devices: Sequence[Any] | int | None = None,
    aux_weights: Mapping[str, float] | None = None,
) -> Trainer:
    """Builds the step of `model` for a run of `steps` steps, laid out over `devices` (default: all) as `plan` says.

    devices: a number stands for so many that are not there: the functions may be traced, and not called.

    aux_weights: the factor of each auxiliary loss (what the layers report under a name that ends in `_loss`); 1 where
    it is not named. Nothing is allocated; a model that the plan does not divide raises InputError.
    """
    layout = plan.layout(model.config.sizes(), devices)
    c, mesh, (axes, own) = model.config, layout.mesh, axes_and_shapes(model.clone(remat=plan.remat))
    context_parallel.check(layout, mixers_of(model), masks_of(model), (c.heads, c.kv_head_count), c.dropout)
    if c.residual == "reversible" and layout.size("layers") > 1 and (layout.zero == 3 or plan.rounds > 1):
        raise InputError(
            "model.residual='reversible': layers of a pipeline that take their parameters again, with ZeRO 3 or plan.rounds "
            "over 1, are not reversible: set plan.zero=2 and plan.rounds=1, or model.residual='plain'"
        )
    if plan.offload_optimizer and config.rows:
        raise InputError(
            "plan.offload_optimizer=True fetches whole tables, and optimizer.rows=True trains some of their rows: leave one out"
        )
    if plan.offload_parameters:
        check_by_layer(model, config)
    # Who looks for a NaN has every operation run by itself, and of those inside a shard_map jax does so without end.
    alone = (mesh.size == 1 and not plan.offload_parameters) or jax.config.values["jax_debug_nans"]
    placement = None if alone else _placement(layout, axes["layers"], masks_of(model))
    schedule, parts = make_schedule(config, steps), layout.tree(axes, own, divided=layout.zero >= 1)
    optimizer = make_optimizer(config, steps, None if alone else _whole(mesh, parts))
    update = Update(config, optimizer, plan.offload_parameters, c.layers)

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(key, state.step)
        ids = gradients.looked_up(state.params, batch, key)
        whole, state = state, sparse_rows.gather(state, ids, tables)
        grads, (weight, sums) = gradients(state.params, ids, state.scale, batch, key)
        scaled = weight if state.scale is None else weight * state.scale.value
        norm = update.norm(grads, scaled)
        fine = jnp.isfinite(norm) & jnp.isfinite(sums["loss"][0])
        if plan.offload_optimizer and not plan.offload_parameters:
            state = dataclasses.replace(state, opt_state=host_offload.fetched(state.opt_state, norm))
        skips = config.skip_nonfinite or state.scale is not None
        old = state.params, state.opt_state, state.ema
        params, opt_state, ema = update(
            old, grads, weight=scaled, norm=norm, step=state.step, fine=fine if skips else None
        )
        with jax.numpy_dtype_promotion("standard"):
            learning_rate = jnp.asarray(schedule(_updates(state)), jnp.float32)
        new = TrainState(state.step, params, opt_state, ema, state.scale)
        metrics = {name: mean(total, count) for name, (total, count) in sums.items()}
        metrics |= {"grad_norm": norm, "learning_rate": learning_rate, "target_tokens": weight}
        metrics["skipped"] = 1.0 - fine.astype(jnp.float32)
        if state.scale is not None:
            metrics["loss_scale"] = state.scale.value
            new = dataclasses.replace(new, scale=state.scale.after(fine))
        new = dataclasses.replace(new, step=state.step + 1)
        return sparse_rows.scatter(whole, new, ids, tables), metrics

    def init(key: jax.Array, params: Any = None) -> TrainState:
        if params is None:
            params = nn.meta.unbox(model.init(key, example_batch(1, 8)))["params"]
        ema = jax.tree.map(jnp.copy, params) if config.ema else None
        scale = loss_scale.begin(config.loss_scale, c.dtype)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), ema, scale)

    def evaluate(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        # Averaged ones are laid out as statistics are.
        params = jax.tree.map(jax.lax.with_sharding_constraint, params, shardings.params)
        out = loss(gradients.model, params, batch, None)
        return out.sum, out.weight

    shapes = jax.eval_shape(lambda params: init(jax.random.key(0), params), own)
    tables = {sparse_rows.keys(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(shapes.params)}
    gradients = Gradients(
        model=model.clone(placement=placement, remat=plan.remat),
        whole=model,
        update=update,
        layout=layout,
        axes=axes,
        tables=tables,
        apart=layout.zero == 2 and not alone,
        aux_weights=aux_weights or {},
    )

    def rows_trained(count: int, length: int) -> dict[sparse_rows.Path, int]:
        found = jax.eval_shape(
            lambda params: gradients.looked_up(params, example_batch(count, length), jax.random.key(0)), own
        )
        return {path: ids.size for path, ids in found.items()}

    rows_trained(config.accumulate, 8)  # or says why not
    shardings = _state_shardings(layout, axes, parts, shapes)
    if plan.offload_optimizer:
        shardings = dataclasses.replace(shardings, opt_state=host_offload.hosted(shardings.opt_state))
    if plan.offload_parameters:
        ema = shardings.ema and host_offload.hosted_layers(shardings.ema)
        shardings = dataclasses.replace(shardings, params=host_offload.hosted_layers(shardings.params), ema=ema)
    spread, replicated = layout.sharding("batch", "length"), layout.sharding()

    return Trainer(
        init=_OnMesh(mesh, jax.jit(init, out_shardings=shardings)),
        step=_OnMesh(
            mesh,
            jax.jit(
                step,
                donate_argnums=0,
                in_shardings=(shardings, spread, replicated),
                out_shardings=(shardings, replicated),
            ),
        ),
        evaluate=_OnMesh(mesh, jax.jit(evaluate, in_shardings=(None, spread), out_shardings=replicated)),
        state_shapes=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        batch_sharding=spread,
        gives_probabilities=model.is_normalized,
        layout=layout,
        undivided=tuple(layout.undivided(axes, shapes.params)),
        rows_trained=rows_trained,
        counted=None
        if layout.size("layers", "length") == 1
        else functools.partial(
            make_trainer,
            model,
            config,
            Plan("single", remat=plan.remat),
            steps=steps,
            devices=1,
            aux_weights=aux_weights,
        ),
        part_shapes=jax.tree.map(
            lambda x, held, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec, memory_kind=held.memory_kind)
            ),
            shapes.params,
            shardings.params,
            parts,
        ),
    )


def _updates(state: TrainState) -> jax.Array:
    """How often the optimizer has moved: skipped steps do not count in its schedule."""
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    return counts[0][1] if counts else state.step


def _placement(layout: Layout, layers: Any, masks: Any) -> ModelParallel:
    """A model's parts over a mesh. layers: the logical names of the axes of the layers' parameters. masks: the layers'."""
    return ModelParallel(
        lookup=functools.partial(vocab_parallel.lookup, layout),
        through=functools.partial(pipeline.through, layout, layers),
        loss=functools.partial(vocab_parallel.loss, layout),
        order=functools.partial(context_parallel.arranged, layout, masks),
    )


def _whole(mesh: Any, parts: Any) -> Whole:
    """What an optimizer does that multiplies matrices of which devices have parts."""
    by_path = {sparse_rows.keys(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(parts)}
    return lambda path, function, x: distributed_matrices.of_whole(function, x, mesh, by_path[path])


def _state_shardings(layout: Layout, axes: Any, parts: Any, shapes: TrainState) -> TrainState:
    """Parameters by their names; optimizer statistics as the parameter that they belong to, found by its path."""

    def at(specs: Any) -> Any:
        return jax.tree.map(lambda x, spec: NamedSharding(layout.mesh, spec), shapes.params, specs)

    params, parts = at(layout.tree(axes, shapes.params, divided=layout.zero == 3)), at(parts)
    leaves = jax.tree_util.tree_leaves_with_path(shapes.params)
    sizes = {sparse_rows.keys(path): leaf.shape for path, leaf in leaves}
    by_path = {sparse_rows.keys(path): own for (path, _), own in zip(leaves, jax.tree.leaves(parts), strict=True)}

    def statistic(path: Any, leaf: Any) -> NamedSharding:
        # Replicated are counters, and the factored statistics of adafactor, which are small.
        owner = sparse_rows.owner(path, leaf.shape, sizes)
        if owner is None or leaf.shape == sizes[owner]:
            return by_path.get(owner or (), layout.sharding())
        return NamedSharding(layout.mesh, PartitionSpec(*by_path[owner].spec[: len(leaf.shape) - 1]))  # of rows

    opt_state = jax.tree_util.tree_map_with_path(statistic, shapes.opt_state)
    scale = jax.tree.map(lambda _: layout.sharding(), shapes.scale)
    return TrainState(layout.sharding(), params, opt_state, None if shapes.ema is None else parts, scale)


def check_batch(layout: Layout, batch_size: int, seq_len: int, accumulate: int) -> None:
    """Raises InputError unless the batch splits over devices, accumulation and microbatches."""
    devices = layout.size("batch")
    if batch_size % (devices * accumulate):
        whose = "1 device's" if devices == 1 else f"{devices} devices'"
        raise InputError(
            f"data.batch_size={batch_size} does not split into {whose} rows (plan.data x plan.fsdp) times "
            f"optimizer.accumulate={accumulate}: make it a multiple of {devices * accumulate}"
        )
    if seq_len % layout.size("length"):
        raise InputError(
            f"data.seq_len={seq_len} does not divide over plan.sequence={layout.size('length')}: make it a multiple of it"
        )
    pipeline.microbatches(layout, batch_size // accumulate)
    context_parallel.arranged(layout, (), seq_len)
