"""The forward and backward pass of a mixer by itself, with random inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import measure
from hpnlp.nn.mixers import MIXERS
from hpnlp.spec import build, parse_one
from hpnlp.types import MixerInputs


def make_mixer(spec: str) -> Any:
    """The module of a mixer."""
    return build(parse_one(spec, "mixer"), MIXERS, "mixer", name=None)


class MixerPass:
    """A call without arguments that returns the gradients of all inputs of a mixer and of its own parameters.

    A mixer gets the projections that it needs as arrays, so that only mixing is measured. One sequence, one segment.

    Attributes:
      program: The compiled pass.
      operands: Its arguments: parameters, inputs, and the cotangent of the outputs.
    """

    def __init__(self, spec: str, mask: Any, length: int, heads: int, dim: int, dtype: Any = jnp.float32) -> None:
        """Compiles the pass.

        Args:
          spec: The mixer.
          mask: Mask of the mixer.
          length: Tokens T.
          heads: Heads N.
          dim: Features H of a head.
          dtype: Dtype of the inputs.
        """
        module = make_mixer(spec)
        draw, width = np.random.default_rng(0), heads * dim
        shapes = {"x": (1, length, width)} | {
            name: (1, length, heads, projection.width or dim) for name, projection in module.needs.items()
        }
        arrays = {name: jnp.asarray(draw.standard_normal(shape, np.float32), dtype) for name, shape in shapes.items()}
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        shared = {"positions": positions, "kv_positions": positions}
        if module.traits.draws:
            shared["draws"] = jax.random.key(1)

        def inputs(arrays: Mapping[str, jax.Array]) -> MixerInputs:
            fields = {name: array for name, array in arrays.items() if name in ("x", "q", "k", "v")}
            projections = {name: array for name, array in arrays.items() if name not in fields}
            return MixerInputs(**fields, projections=projections, **shared)

        variables = jax.jit(lambda key: nn.meta.unbox(module.init(key, inputs(arrays), mask)))(jax.random.key(0))
        others = {name: tree for name, tree in variables.items() if name != "params"}
        signs = jnp.asarray(np.random.default_rng(1).standard_normal((1, length, width), np.float32))

        def score(params: Any, arrays: Mapping[str, jax.Array], signs: jax.Array) -> jax.Array:
            o = module.apply({**others, "params": params}, inputs(arrays), mask).o
            return jnp.sum(o.reshape(signs.shape) * signs)

        # A cotangent that the program closes over would be a constant of up to some 100 MB in it.
        self.operands = variables.get("params", {}), arrays, signs
        self.program = measure.compile(jax.grad(score, (0, 1)), *self.operands)

    def __call__(self) -> Any:
        return self.program(*self.operands)
