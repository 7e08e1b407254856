"""The middle of a step: the gradients of a batch's loss, summed over the parts that it is accumulated from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hpnlp.models.lm import LM
from hpnlp.parallel import host_offload
from hpnlp.parallel.layout import Layout
from hpnlp.training import sparse_rows
from hpnlp.training.apply_updates import Update, mean
from hpnlp.types import LossOut, Split

Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Gradients:
    """model: as laid out over the mesh; whole: the same model, as one device has it. axes: the names of its parameters' axes,
    tables: the shapes of its parameters by their path. apart: whether ZeRO divides gradients where parameters lie whole.
    aux_weights: the factor of each auxiliary loss, 1 where it is not named.
    """

    model: LM
    whole: LM
    update: Update
    layout: Layout
    axes: Any
    tables: Mapping[sparse_rows.Path, tuple[int, ...]]
    apart: bool
    aux_weights: Mapping[str, float]

    def __call__(self, params: Any, ids: Any, scale: Any, batch: Batch, key: jax.Array) -> tuple[Any, tuple[Any, Any]]:
        """`(gradients, (weight, sums))` of the loss's sum over a batch; sums: `(total, weight)` of each metric.

        ids: the rows of tables that are trained, by the table's path, of which params hold no others. scale: a `LossScale`, or
        None.
        """
        given = self._parts(params, ids), params, ids, scale
        of_part = jax.grad(self._sum, has_aux=True)
        if self.update.config.accumulate == 1:
            return of_part(*given, batch, key)

        def add(carry: Any, some: Any) -> tuple[Any, None]:
            return self.update.each(functools.partial(jax.tree.map, jnp.add), carry, of_part(*given, *some)), None

        each = self._accumulated_from(batch, key)
        first = jax.tree.map(lambda x: x[0], each)
        _, like = jax.eval_shape(of_part, *given, *first)
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        return jax.lax.scan(add, (self.update.each(zeros, given[0]), zeros(like)), each)[0]

    def looked_up(self, params: Any, batch: Batch, key: jax.Array) -> dict[sparse_rows.Path, jax.Array]:
        """The rows that a step looks up, by their table's path, where these alone are to be trained."""
        if not self.update.config.rows:
            return {}

        def one(part: tuple[Batch, jax.Array]) -> Any:
            return self.whole.apply({"params": params}, part[0], rngs=_rngs(part[1]), method="rows")

        one_part = self.update.config.accumulate == 1
        found = one((batch, key)) if one_part else jax.lax.map(one, self._accumulated_from(batch, key))
        return {path: sparse_rows.distinct(ids.reshape(-1), self.tables[path][0]) for path, ids in found.items()}

    def _accumulated_from(self, batch: Batch, key: jax.Array) -> tuple[Batch, jax.Array]:
        """The parts of a batch, and a key for each."""
        count = self.update.config.accumulate
        # Interleaved, so that every device keeps its own rows in every part.
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch)
        return parts, jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count, dtype=jnp.uint32))

    def _parts(self, params: Any, ids: Any) -> Any:
        """What gradients are taken by: parameters, each laid out as its gradient is to be."""
        if not self.apart:
            return params

        def one(path: Any, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
            if not _summed_apart(sparse_rows.keys(path), ids):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.layout.mesh, spec))

        return jax.tree_util.tree_map_with_path(one, params, self.layout.tree(self.axes, params, divided=True))

    def _joined(self, parts: Any, params: Any, ids: Any) -> Any:
        """Parameters as the model takes them, from these and the parts that gradients are taken by."""
        if not self.apart:
            return parts

        def one(path: Any, part: jax.Array, leaf: jax.Array) -> Any:
            return Split(jax.lax.stop_gradient(leaf), part) if _summed_apart(sparse_rows.keys(path), ids) else part

        return jax.tree_util.tree_map_with_path(one, parts, params)

    def _sum(
        self, parts: Any, params: Any, ids: Any, scale: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        # The sum, not the mean: sums add up over devices and accumulated parts, whatever their shares of target tokens,
        # and in float16 they keep gradients of order 1 on the way down.
        out = loss(self.model, sparse_rows.as_tables(self._joined(parts, params, ids), ids), batch, key)
        total = out.sum
        for name, (value, weight) in out.aux.items():
            if name.endswith("_loss"):
                total = total + self.aux_weights.get(name, 1.0) * mean(value, weight) * out.weight
        if scale is not None:
            total = total * scale.value
        return total, (out.weight, {"loss": (out.sum, out.weight), **out.aux})


def loss(model: LM, params: Any, batch: Batch, key: jax.Array | None) -> LossOut:
    """A batch's loss; key: what is drawn in training, None where nothing is."""
    if model.placement is None:
        params = host_offload.here(params)
    rngs = {} if key is None else _rngs(key)
    out: Any = model.apply({"params": params}, batch, key is None, rngs=rngs, method="loss")
    return out


def _rngs(key: jax.Array) -> dict[str, jax.Array]:
    return {"dropout": key, "output": jax.random.fold_in(key, 1)}


def _summed_apart(path: sparse_rows.Path, ids: Any) -> bool:
    """Whether a parameter's gradient is summed in parts: that of the layers and of tables of which all rows are trained."""
    return path not in ids and (path[0] in ("layers", "head") or path == ("embed", "table"))
