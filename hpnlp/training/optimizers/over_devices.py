"""Functions that divide a model over several devices, and their checks; a step on one device has neither."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.models import variables
from hpnlp.parallel import context_parallel, distributed_matrices, pipeline, vocab_parallel
from hpnlp.parallel.layout import Layout
from hpnlp.training.optimizers import sparse_rows
from hpnlp.training.optimizers.sparse_rows import ApplyToWhole
from hpnlp.types import Model


@dataclasses.dataclass(frozen=True)
class OverDevices:
    """The functions of a layout.

    Attributes:
      layout: The plan on its devices.
    """

    layout: Layout

    def axes_and_shapes(self, model: Model) -> tuple[Any, Any]:
        """Calls `variables.axes_and_shapes`; raises InputError if the layout cannot divide variables or losses of mixers."""
        with context_parallel.losses_of_mixers_checked(self.layout):
            axes, shapes = variables.axes_and_shapes(model)
        context_parallel.check_variables(self.layout, axes)
        return axes, shapes

    def model_parallel(self, config: Any, carry_axes: PyTree) -> ModelParallel:
        """Functions that run a model over the mesh. `carry_axes` is the result of `Model.carry_axes`, or None."""
        layout, carry_names = self.layout, None if carry_axes is None else config.split_carry(carry_axes)
        return ModelParallel(
            embedding_lookup=functools.partial(vocab_parallel.lookup, layout),
            run_layers=functools.partial(pipeline.run_layers, layout, carry_names=carry_names),
            loss=functools.partial(vocab_parallel.loss, layout),
            best=functools.partial(vocab_parallel.best, layout),
            logits=functools.partial(vocab_parallel.logits, layout),
            token_order=functools.partial(context_parallel.token_order, layout, config.masks()),
        )

    def apply_to_whole(self, specs: PyTree) -> ApplyToWhole:
        """Function that applies a function of whole matrices to matrices with the given specs."""
        by_path = {sparse_rows.keys(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}

        def apply(path: sparse_rows.Path, function: Callable[..., Any], x: jax.Array) -> jax.Array:
            return distributed_matrices.apply_to_matrices(function, x, self.layout.mesh, by_path[path])

        return apply

    def check_batch(self, batch_size: int, seq_len: int) -> None:
        """Raises InputError if a part of the batch does not divide into microbatches, or its sequences into chunks."""
        pipeline.microbatches(self.layout, batch_size)
        context_parallel.token_order(self.layout, (), seq_len)
