"""Parameters and training states drawn by numpy: no program is compiled for them."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def drawn(shapes, deviation, deviations=None, means=None):
    """Normal numbers in the shapes of a tree.

    Args:
      shapes: A tree of arrays or shapes.
      deviation: The standard deviation.
      deviations: Name of a leaf -> another deviation, a number or a function of the shape.
      means: Name of a leaf -> its mean; by default 1 for "scale", and 0 for the others.

    Returns:
      A tree of arrays.
    """
    rng, deviations, means = np.random.default_rng(0), deviations or {}, means or {"scale": 1.0}

    def draw(path, leaf):
        name = getattr(path[-1], "key", None)
        scale = deviations.get(name, deviation)
        numbers = rng.normal(means.get(name, 0.0), scale(leaf.shape) if callable(scale) else scale, leaf.shape)
        return jnp.asarray(numbers.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def drawn_params(model, deviation, deviations=None, means=None):
    """Parameters of a model, see `drawn`."""
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), model.example_batch(1, 2))["params"])
    return drawn(shapes, deviation, deviations, means)


def drawn_state(shapes):
    """A state before the first step, with parameters of the magnitudes that models start with.

    Args:
      shapes: `Trainer.state_shapes` for an optimizer whose statistics begin at 0; without buffers and carry.

    Returns:
      A `TrainState` of numpy arrays.
    """
    assert shapes.buffers is None and shapes.carry is None
    deviations = {"kernel": lambda shape: shape[-2] ** -0.5, "table": 0.02, "head": 0.02}
    params = jax.device_get(drawn(shapes.params, 0.1, deviations))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return dataclasses.replace(zeros, params=params, ema=None if shapes.ema is None else params)
