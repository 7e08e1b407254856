"""The end of a step: the norm of its gradients, and what they make of parameters, their statistics and their average."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hpnlp.models.lm import LM
from hpnlp.nn.attention import alternation
from hpnlp.parallel import host_offload
from hpnlp.training.optim import OptimizerConfig
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Update:
    """by_layer: whether layers rest in the host's memory, so that one after another is moved. layers: how many there are."""

    config: OptimizerConfig
    optimizer: optax.GradientTransformationExtraArgs
    by_layer: bool
    layers: int

    def each(self, function: Callable[..., Any], state: Any, *given: Any) -> Any:
        """`function(state, *given)` of arrays like the parameters, of which it treats each layer by itself."""
        return host_offload.by_layer(function, state, *given) if self.by_layer else function(state, *given)

    def norm(self, grads: Any, weight: jax.Array) -> jax.Array:
        """Of all gradients; weight: what these sums are to be divided by."""
        if not self.by_layer:
            return optax.tree.norm(means(grads, weight))

        def add(total: Any, some: Any) -> Any:
            return jax.tree.map(lambda t: t + optax.tree.norm(means(some, weight), squared=True), total)

        squares = host_offload.by_layer(add, {"layers": jnp.zeros(self.layers), "others": jnp.zeros(())}, grads)
        return jnp.sqrt(jnp.sum(squares["layers"]) + squares["others"])

    def __call__(
        self, old: Any, grads: Any, *, weight: jax.Array, norm: jax.Array, step: jax.Array, fine: jax.Array | None
    ) -> Any:
        """`(parameters, optimizer's state, average or None)` from the old ones.

        weight, norm: as `norm` takes and gives them. fine: where False, the old ones are the new; None means True.
        """

        def moved(old: Any, grads: Any) -> Any:
            params, opt_state, ema = old
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = self.optimizer.update(means(grads, weight), opt_state, params, norm=norm)
            params = optax.apply_updates(params, updates)
            if ema is not None:
                # Early averages follow the parameters closely, so that the start is forgotten (as in Adam's correction).
                count = step.astype(jnp.float32)
                decay = jnp.minimum(self.config.ema, (1.0 + count) / (10.0 + count))
                ema = jax.tree.map(lambda old, new: decay * old + (1.0 - decay) * new, ema, params)
            return params, opt_state, ema

        def guarded(old: Any, grads: Any) -> Any:
            # One choice of all, where one of each array would have XLA:CPU copy the optimizer's whole state.
            return jax.lax.cond(fine, moved, lambda old, _: old, old, grads)

        return self.each(moved if fine is None else guarded, old, grads)


def check_by_layer(model: LM, config: OptimizerConfig) -> None:
    """Raises InputError where layers do not run, or are not updated, one by one."""
    c, leave = model.config, "or plan.offload_parameters=False"
    if c.residual == "reversible":
        raise InputError(
            "plan.offload_parameters=True fetches a layer once in a backward pass, and model.residual='reversible' takes each "
            f"branch by itself: set model.residual='plain' and plan.remat='full', {leave}"
        )
    if len(alternation(c.mixer)) > 1:
        raise InputError(
            f"plan.offload_parameters=True fetches one layer at a time, and model.mixer={c.mixer!r} takes several in turn: "
            f"name one mixer, {leave}"
        )
    if config.name == "adafactor":
        raise InputError(
            "plan.offload_parameters=True updates one layer at a time, and optimizer.name='adafactor' measures all of them at "
            f"once: choose another, as 'adamw8bit', {leave}"
        )


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight; 0 / 0, of a batch without a target token, is 0."""
    return total / jnp.where(weight == 0, 1.0, weight)


def means(totals: Any, weight: jax.Array) -> Any:
    """`mean` of every array of a tree."""
    return jax.tree.map(lambda total: mean(total, weight), totals)
