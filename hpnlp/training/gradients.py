"""Gradients of a batch's loss, computed at once or summed over parts of the batch (gradient accumulation).

Gradients are sums over tokens. `optimizers.apply_updates` divides them by their weight, and `optim.make_optimizer` clips them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from hpnlp.model_interfaces.model_parallel import Zero2Parameter
from hpnlp.models import variables
from hpnlp.ops.helpers.arrays import split_examples
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.memory import host_offload
from hpnlp.parallel.plan import TABLES
from hpnlp.training.files.checksum import first_difference
from hpnlp.training.optimizers import sparse_rows
from hpnlp.training.optimizers.apply_updates import Update, mean
from hpnlp.types import InputError, LossOut, Model, Statistics

if TYPE_CHECKING:
    from hpnlp.models.pairs.grad_cache import Encoded
    from hpnlp.training.optimizers.loss_scale import LossScale

Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of a model's loss.

    Under ZeRO 2, parameters are replicated and their gradients are sharded. Gradients are then taken with respect to shards of
    the parameters (`_shards`), which `_with_shards` joins with the replicated parameters for the model.

    Attributes:
      model: The model, laid out over the mesh.
      single_model: The same model for a single device.
      update: The update that follows; it has the optimizer's config, and treats trees layer by layer where needed.
      layout: The plan on its devices.
      axes: Logical axis names of the parameters, a tree like them.
      tables: Shapes of the parameters by path.
      zero2: True if gradients are sharded where parameters are replicated.
      aux_weights: Factor of each auxiliary loss: a metric of layers whose name ends in `_loss`, or a result of the model's
        `auxiliary_loss`; 1 by default.
      frozen: The model's frozen variables within the trace of a step; None if it has none.
    """

    model: Model
    single_model: Model
    update: Update
    layout: Layout
    axes: Any
    tables: Mapping[sparse_rows.Path, tuple[int, ...]]
    zero2: bool
    aux_weights: Mapping[str, float]
    frozen: Any = None

    def __call__(
        self,
        params: PyTree,
        buffers: PyTree,
        ids: Mapping[sparse_rows.Path, jax.Array],
        scale: LossScale | None,
        batch: Batch,
        key: jax.Array,
        carry: PyTree,
    ) -> tuple[Any, tuple[Any, Any, Any], Any]:
        """Gradients of the sum of a batch's losses.

        Args:
          params: Parameters; tables in `ids` have their looked-up rows only.
          buffers: Buffers, or None.
          ids: Ids of the looked-up rows, by the path of their table, as `looked_up` returns them.
          scale: A `LossScale`, or None.
          batch: Arrays whose first axis is that of the examples.
          key: Key of the step, for dropout and sampled losses.
          carry: Carry of the batch before, or None.

        Returns:
          `(gradients, (weight, sums, statistics), carry)`. `sums` has the `(total, weight)` of "loss", of each metric and of
          each auxiliary loss; these and the layers' `statistics` are summed over the batch. `carry` is that for the next batch.

        Cost: with accumulation, a model with `auxiliary_loss`, or one that compares the examples of a batch, runs one more
        forward pass.
        """
        constants = self._shards(params, ids), params, buffers, ids, scale
        gradient = jax.grad(self._sum, has_aux=True)
        if self._is_single_sum:
            grads, ((weight, sums, statistics), carry) = gradient(*constants, None, (batch, key, carry))
            return grads, (weight, self.with_auxiliary_losses(sums, statistics), statistics), carry
        inputs = (*self._split_for_accumulation(batch, key), self._split(carry, 1))
        first = jax.tree.map(lambda x: x[0], inputs)
        _, (shapes, _) = jax.eval_shape(gradient, *constants, None, first)
        cotangent = self._statistics_cotangent(shapes, *constants, inputs)

        def accumulate(totals: Any, inputs: tuple[Batch, jax.Array, Any]) -> tuple[Any, Any]:
            grads, (sums, carry) = gradient(*constants, cotangent, inputs)
            return self.update.each(_add, totals, (grads, sums)), carry

        start = self.update.each(_zeros, constants[0]), _zeros(shapes)
        (grads, (weight, sums, statistics)), carries = jax.lax.scan(accumulate, start, inputs)
        carry = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1, *x.shape[3:]), carries)
        return grads, (weight, self.with_auxiliary_losses(sums, statistics), statistics), carry

    def parts_of_loss(self, batch: Batch) -> int:
        """Number of parts of a batch that one loss encodes in turn: 1 unless it compares the examples of all parts."""
        if not self.model.config.compares_examples:
            return 1
        return math.gcd(self.update.config.accumulate, len(jax.tree.leaves(batch)[0]))

    @property
    def _is_single_sum(self) -> bool:
        """Whether the gradient is that of one loss of the whole batch, and not a sum over the losses of several parts."""
        return self.update.config.accumulate == 1 or self.model.config.compares_examples

    def with_auxiliary_losses(self, sums: Mapping[str, Any], statistics: Statistics) -> dict[str, Any]:
        """Adds the model's auxiliary losses to its metrics.

        Args:
          sums: `(total, weight)` of each metric.
          statistics: Sums over the batch.

        Returns:
          The metrics, with `(loss, 1)` of each auxiliary loss.

        Raises:
          InputError: A metric and a loss have the same name.
        """
        losses = {name: (value, jnp.ones(())) for name, value in self.model.auxiliary_loss(statistics).items()}
        if twice := sums.keys() & losses.keys():
            raise InputError(
                f"auxiliary_loss returns {', '.join(twice)}, the name of a metric of the model: rename the loss"
            )
        return {**sums, **losses}

    def _statistics_cotangent(
        self,
        shapes: PyTree,
        shards: PyTree,
        params: PyTree,
        buffers: PyTree,
        ids: Mapping[sparse_rows.Path, jax.Array],
        scale: LossScale | None,
        inputs: tuple[Batch, jax.Array, Any],
    ) -> Any:
        """Gradient of the sum of the losses with respect to the statistics of the batch, by a forward pass over all parts.

        Auxiliary losses are functions of the sums over all parts, and each part has only its own sums.

        Args:
          shapes: Shapes of `(weight, metrics, statistics)`.
          shards: The result of `_shards`.
          params: As for `__call__`.
          buffers: As for `__call__`.
          ids: As for `__call__`.
          scale: As for `__call__`.
          inputs: The parts: batches, keys and carries, each with a first axis of parts.

        Returns:
          A tree like the statistics; None if the model has no auxiliary losses.
        """
        weight_shape, _, statistics_shapes = shapes
        values = jax.eval_shape(self.model.auxiliary_loss, statistics_shapes)
        if not any(name.endswith("_loss") for name in values):
            return None
        tables = sparse_rows.as_tables(self._with_shards(shards, params, ids), ids)

        def add(totals: PyTree, part: tuple[Batch, jax.Array, Any]) -> tuple[Any, None]:
            out = loss(self.model, variables.join(tables, buffers, self.frozen), *part)
            return _add(totals, (out.weight, out.statistics)), None

        (weight, statistics), _ = jax.lax.scan(add, _zeros((weight_shape, statistics_shapes)), inputs)
        weight = weight if scale is None else weight * scale.value
        return jax.tree.map(lambda d: d * weight, jax.grad(self._auxiliary_loss)(statistics))

    def _auxiliary_loss(self, statistics: Statistics) -> jax.Array:
        """The sum of the model's auxiliary losses with their factors."""
        values = self.model.auxiliary_loss(statistics)
        losses = (self.aux_weights.get(name, 1.0) * value for name, value in values.items() if name.endswith("_loss"))
        return sum(losses, jnp.zeros(()))

    def looked_up(self, params: PyTree, batch: Batch, key: jax.Array) -> dict[sparse_rows.Path, jax.Array]:
        """Rows that a step looks up, by the path of their table; empty unless `optimizer.rows` is set.

        Args:
          params: Parameters.
          batch: Arrays whose first axis is that of the examples.
          key: Key of the step: sampled losses look up the rows that they draw.

        Returns:
          int32 ids, ascending and distinct, padded as `sparse_rows.distinct` does.
        """
        if not self.update.config.rows:
            return {}

        def example_rows(inputs: tuple[Batch, jax.Array]) -> Any:
            batch, key = inputs
            return self.single_model.apply({"params": params}, batch, rngs=_rngs(key), method="rows")

        if self._is_single_sum:
            ids_by_path = example_rows((batch, key))
        else:
            ids_by_path = jax.lax.map(example_rows, self._split_for_accumulation(batch, key))
        return {path: sparse_rows.distinct(ids.reshape(-1), self.tables[path][0]) for path, ids in ids_by_path.items()}

    def check_aux_weights(self, weights: PyTree) -> None:
        """Checks that the layers report every loss in `optimizer.aux`. Allocates nothing.

        Args:
          weights: Shapes of the model's weights.

        Raises:
          InputError: No layer reports a loss in `optimizer.aux`.
        """
        if not self.aux_weights:
            return
        batch, key = _example(self.single_model), jax.random.key(0)

        def reported(weights: PyTree) -> Any:
            out = loss(self.single_model, weights, batch, key)
            return out.aux, out.statistics

        aux, statistics = jax.eval_shape(reported, weights)
        losses = [name for name in aux if name.endswith("_loss")]
        values = jax.eval_shape(self.single_model.auxiliary_loss, statistics)
        losses += [name for name in values if name.endswith("_loss")]
        for name in self.aux_weights:
            if name not in losses:
                known = f"the model has {', '.join(losses)}" if losses else "the model has none"
                raise InputError(
                    f"optimizer.aux={self.update.config.aux!r} weights {name}, a loss that no layer reports ({known}): "
                    "leave it out"
                )

    def check_advance(self, weights: PyTree) -> None:
        """Checks that `Model.advance` keeps the names and shapes of buffers. Allocates nothing.

        Args:
          weights: Shapes of the model's weights.

        Raises:
          InputError: `advance` changes a name, a shape or a dtype.
        """
        buffers = variables.split(weights)[1]
        if buffers is None:
            return
        model, batch, key = self.single_model, _example(self.single_model), jax.random.key(0)

        def advance(weights: PyTree) -> Any:
            statistics = loss(model, weights, batch, key).statistics
            return model.advance(variables.split(weights)[1], statistics, jnp.int32(0), key)

        if difference := first_difference(buffers, jax.eval_shape(advance, weights)):
            name, old, new = difference
            raise InputError(
                f"advance of a mixer or feed-forward network makes the buffer {name} {new} from {old}: return buffers of the "
                "same names, shapes and dtypes"
            )

    def check_carry(self, weights: PyTree) -> None:
        """Checks that a batch leaves a carry like the one that it got. Allocates nothing.

        Args:
          weights: Shapes of the model's weights.

        Raises:
          InputError: The carry has other names, shapes or dtypes, so that the next step or a resumed run could not read it.
        """
        model, batch, key = self.single_model, _example(self.single_model), jax.random.key(0)
        carry = jax.eval_shape(lambda: model.initial_carry(1))
        new = jax.eval_shape(lambda weights, carry: loss(model, weights, batch, key, carry).carry, weights, carry)
        if difference := first_difference(carry, new):
            name, old, returned = difference
            mixers = [f"model.mixer={stack.mixer!r}" for stack in model.config.stacks().values()]
            subject = " and ".join(mixers) or type(model).__name__
            raise InputError(
                f"{subject} returns the carry{name} as {returned} where it was {old}: return arrays "
                "of the names, shapes and dtypes of `initial_carry`"
            )

    def _split_for_accumulation(self, batch: Batch, key: jax.Array) -> tuple[Batch, jax.Array]:
        """The batch as arrays `[accumulate, B / accumulate, ...]`, and a key for each part."""
        numbers = jnp.arange(self.update.config.accumulate, dtype=jnp.uint32)
        return self._split(batch, 0), jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)

    def _split(self, tree: PyTree, axis: int) -> Any:
        """Arrays with a first axis of parts, from arrays with the examples on `axis`."""
        return jax.tree.map(lambda x: split_examples(x, self.update.config.accumulate, axis), tree)

    def _shards(self, params: PyTree, ids: Mapping[sparse_rows.Path, jax.Array]) -> Any:
        """The arrays that gradients are taken with respect to: parameters, each sharded as its gradient will be."""
        if not self.zero2:
            return params

        def shard(path: KeyPath, leaf: jax.Array, names: PyTree, spec: PartitionSpec) -> jax.Array:
            if not _has_divided_gradient(names, sparse_rows.keys(path) in ids):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.layout.mesh, spec))

        specs = self.layout.state_specs(self.axes, params, divided=True)
        return jax.tree_util.tree_map_with_path(shard, params, self.axes, specs)

    def _with_shards(self, shards: PyTree, params: PyTree, ids: Mapping[sparse_rows.Path, jax.Array]) -> Any:
        """Parameters for the model, from replicated ones and the shards that gradients are taken with respect to."""
        if not self.zero2:
            return shards

        def join(path: KeyPath, shard: jax.Array, names: PyTree, leaf: jax.Array) -> Any:
            if _has_divided_gradient(names, sparse_rows.keys(path) in ids):
                return Zero2Parameter(jax.lax.stop_gradient(leaf), shard)
            return shard

        return jax.tree_util.tree_map_with_path(join, shards, self.axes, params)

    def _sum(
        self,
        shards: Any,
        params: Any,
        buffers: Any,
        ids: Any,
        scale: Any,
        cotangent: Any,
        inputs: tuple[Batch, jax.Array, Any],
    ) -> tuple[jax.Array, tuple[tuple[jax.Array, Any, Any], Any]]:
        """`(sum of the loss with auxiliary losses, ((weight, metrics, statistics), carry))`.

        The loss is a sum, not a mean: sums add up over devices and accumulated parts, whatever the number of target tokens in
        each of them, and they keep float16 gradients of order 1 in the backward pass. `shards` are the arguments of the
        gradient (`_shards`). `cotangent` is the result of `_statistics_cotangent` for a part of a batch; None for a whole one.
        `inputs` are the batch, its key and the carry before it.
        """
        batch, key, carry = inputs
        tables = sparse_rows.as_tables(self._with_shards(shards, params, ids), ids)
        out = loss(
            self.model, variables.join(tables, buffers, self.frozen), batch, key, carry, self.parts_of_loss(batch)
        )
        total = out.sum
        for name, (value, weight) in out.aux.items():
            if name.endswith("_loss"):
                total = total + self.aux_weights.get(name, 1.0) * mean(value, weight) * out.weight
        if cotangent is None and out.statistics:
            total = total + self._auxiliary_loss(out.statistics) * out.weight
        if scale is not None:
            total = total * scale.value
        if cotangent is not None:
            products = jax.tree.map(lambda d, statistic: jnp.sum(d * statistic), cotangent, out.statistics)
            total = total + sum(jax.tree.leaves(products))
        return total, ((out.weight, {"loss": (out.sum, out.weight), **out.aux}, out.statistics), out.carry)


def loss(model: Model, weights: Any, batch: Batch, key: jax.Array | None, carry: Any = None, count: int = 1) -> LossOut:
    """Loss of a batch.

    Args:
      model: The model.
      weights: Weights of the model, see `models.variables`.
      batch: Arrays whose first axis is that of the examples.
      key: Key for dropout and sampled losses in training; None for evaluation, which draws nothing.
      carry: Carry of the batch before, or None.
      count: Number of parts of the batch that are encoded one after another; 1 unless the model is a `ComparingModel`.

    Returns:
      The sum of the losses, its weight, the layers' metrics and statistics, and the carry for the next batch.
    """
    if model.model_parallel is None:
        weights = host_offload.to_device(weights)
    rngs = {} if key is None else _rngs(key)
    apply: Any = functools.partial(model.apply, variables.collections(weights, carry), rngs=rngs)
    if count == 1:
        return apply(batch, key is None, method="loss")
    from hpnlp.models.pairs.grad_cache import encode_in_parts  # of models that compare examples

    def encode(part: Batch, numbers: jax.Array) -> Encoded:
        return apply(part, numbers, key is None, method="encode")

    return apply(encode_in_parts(encode, batch, count), batch, method="compare")


def _add(totals: PyTree, new: PyTree) -> Any:
    return jax.tree.map(jnp.add, totals, new)


def _example(model: Model) -> dict[str, jax.Array]:
    """A batch of one short example, or one of the length that the model needs."""
    return model.example_batch(1, model.config.fixed_length() or 8)


def _zeros(shapes: PyTree) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _rngs(key: jax.Array) -> dict[str, jax.Array]:
    return {"dropout": key, "output": jax.random.fold_in(key, 1)}


def _has_divided_gradient(names: tuple[str, ...] | None, by_rows: bool) -> bool:
    """True if ZeRO 2 shards the gradient of a parameter with these logical axes.

    It does in layers, and for tables that are not trained row by row: their programs gather what ZeRO divides.
    """
    return names is not None and not by_rows and ("layers" in names or names in TABLES)
