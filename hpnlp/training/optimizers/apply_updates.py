"""Update of a step: the norm of its gradients, and the new parameters, optimizer state and average."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from hpnlp import compatibility
from hpnlp.cost.parts import part
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.memory import host_offload
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.optimizers import averages
from hpnlp.types import Model


@dataclasses.dataclass(frozen=True)
class Update:
    """Applies gradients to parameters, optimizer state and average.

    Attributes:
      config: The optimizer's config.
      optimizer: The optax transformation.
      by_layer: True if layers rest in the host's memory, and are fetched, updated and stored one after another.
      layers: Number of layers.
      schedule: Learning rate as a function of the step.
      allowed: `allowed(parameters, updates, learning rate) -> updates`, which changes updates as the model requires; None if it
        does not.
    """

    config: OptimizerConfig
    optimizer: optax.GradientTransformationExtraArgs
    by_layer: bool
    layers: int
    schedule: optax.Schedule
    allowed: Callable[[Any, Any, Any], Any] | None = None

    def each(self, function: Callable[..., Any], state: PyTree, *trees: PyTree) -> Any:
        """`function(state, *trees)` of trees like the parameters, layer by layer where layers rest on the host.

        Args:
          function: Function of trees like the parameters, which treats each layer by itself.
          state: The tree that is replaced.
          *trees: Further arguments.

        Returns:
          The result of the function.
        """
        return host_offload.by_layer(function, state, *trees) if self.by_layer else function(state, *trees)

    @part("optimizer")
    def norm(self, grads: PyTree, weight: jax.Array) -> jax.Array:
        """Global norm of all gradients.

        Args:
          grads: Sums over tokens, a tree like the parameters.
          weight: Divisor of the sums.

        Returns:
          The norm of the means, a float32 scalar.
        """
        # The norm of the sums is divided, not each sum: XLA:CPU would broadcast the weight to arrays of the parameters' sizes.
        if not self.by_layer:
            return mean(optax.tree.norm(grads), weight)

        def add(totals: PyTree, layer_grads: PyTree) -> Any:
            return jax.tree.map(lambda t: t + optax.tree.norm(layer_grads, squared=True), totals)

        squares = host_offload.by_layer(add, {"layers": jnp.zeros(self.layers), "others": jnp.zeros(())}, grads)
        return mean(jnp.sqrt(jnp.sum(squares["layers"]) + squares["others"]), weight)

    @part("optimizer")
    def __call__(
        self,
        state: PyTree,
        grads: PyTree,
        *,
        weight: jax.Array,
        norm: jax.Array,
        step: jax.Array,
        is_finite: jax.Array | None,
        averaged: jax.Array | None = None,
        factor: float = 1.0,
    ) -> Any:
        """New parameters, optimizer state and average.

        Args:
          state: `(parameters, optimizer state, average or None)`.
          grads: Sums over tokens, a tree like the parameters.
          weight: Divisor of the sums.
          norm: Result of `norm`.
          step: Number of steps done, int32.
          is_finite: bool scalar; where False, the state stays as it is. None means True.
          averaged: Number of steps in the average after this one (`averages.next_count`); None for an exponential average.
          factor: Factor of the learning rate.

        Returns:
          The new state.
        """

        def update(state: PyTree, grads: PyTree) -> Any:
            params, opt_state, ema = state
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = self.optimizer.update(means(grads, weight), opt_state, params, norm=norm)
            if factor != 1.0:
                updates = jax.tree.map(lambda change: factor * change, updates)
            if self.allowed is not None:
                updates = self.allowed(params, updates, factor * jnp.asarray(self.schedule(step), jnp.float32))
            params = optax.apply_updates(params, updates)
            if ema is not None and averaged is not None:
                ema = averages.updated(ema, params, averaged)
            elif ema is not None:
                # Early averages follow the parameters closely, so that the start is forgotten (as in Adam's correction).
                count = step.astype(jnp.float32)
                decay = jnp.minimum(self.config.ema, (1.0 + count) / (10.0 + count))
                ema = jax.tree.map(lambda old, new: decay * old + (1.0 - decay) * new, ema, params)
            return params, opt_state, ema

        def update_if_finite(state: PyTree, grads: PyTree) -> Any:
            # One choice for the whole state: a choice for each array makes XLA:CPU copy the optimizer's state.
            return jax.lax.cond(is_finite, update, lambda state, _: state, state, grads)

        return self.each(update if is_finite is None else update_if_finite, state, grads)


def check_compatible(model: Model, config: OptimizerConfig, plan: Plan, layout: Layout) -> None:
    """Checks that a plan fits a model's layers, and the optimizer.

    Args:
      model: The model.
      config: The optimizer.
      plan: The plan.
      layout: The plan on its devices.

    Raises:
      InputError: One of them does not fit.
    """
    c = model.config
    c.check_accumulation(config.accumulate)
    c.check_layout(layout)
    model.check_layout(layout)
    compatibility.check(
        dataclasses.replace(
            c.facts(),
            zero=layout.zero,
            offload_parameters=plan.offload_parameters,
            offload_optimizer=plan.offload_optimizer,
            optimizer=config.name,
            rows=config.rows,
            changes_weights=model.changes_weights,
        )
    )


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Weighted mean.

    Args:
      total: A weighted sum.
      weight: The sum of the weights, a scalar.

    Returns:
      total / weight; 0 for 0 / 0, which a batch without a target token has.
    """
    return total / jnp.where(weight == 0, 1.0, weight)


def means(totals: PyTree, weight: jax.Array) -> Any:
    """Weighted means of the arrays of a tree.

    Args:
      totals: A tree of weighted sums.
      weight: The sum of the weights, a scalar.

    Returns:
      A tree of means, see `mean`.
    """
    return jax.tree.map(lambda total: mean(total, weight), totals)
