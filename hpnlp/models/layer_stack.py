"""The layers of a language model on one device: Blocks with plain or reversible residuals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hpnlp.model_parallel import TensorParallel
from hpnlp.nn.attention import Context
from hpnlp.nn.block import Block
from hpnlp.nn.stack import reversible_layer, run_layers, run_reversible_layers
from hpnlp.parallel import remat
from hpnlp.types import Aux


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStack:
    """Consecutive layers of a model.

    Attributes:
      blocks: The Block of each form of layers, in the order in which layers take them.
      layers: Number of layers of the whole model, by which dropout keys of the branches differ.
      unroll: Number of layers in one iteration of the loop over layers, 0 for all.
      dtype: Dtype of the activations in branches.
      tensor_parallel: Tensor parallelism of the Blocks; also gathers a layer's parameters.
      remat: Rematerialisation policy, a spec string.
    """

    blocks: Sequence[Block]
    layers: int
    unroll: int
    dtype: Any
    tensor_parallel: TensorParallel
    remat: str

    def run_plain(
        self, params: Any, x: jax.Array, context: Context, rng: Any, first: Any, caches: Any = None
    ) -> tuple[jax.Array, Any, Aux]:
        """Runs layers of which each adds its branches to one stream.

        Args:
          params: Stacked parameters of these layers, or a tuple of one tree per layer.
          x: `[B, T, D]`.
          context: Positions, segments and mask, shared by all layers.
          rng: Key for dropout, or None.
          first: Index of the first layer.
          caches: As `nn.stack.run_layers` returns them, or None.

        Returns:
          `(x, caches, aux)`.
        """
        count = _layer_count(params)
        layers = [functools.partial(self._plain_layer, block, context, rng) for block in self.blocks]
        unroll = self.unroll or count
        policy = remat.policy(self.remat)
        if policy is not None or self.tensor_parallel.regathers:
            policy = self.tensor_parallel.remat_policy(policy)
            layers = [jax.checkpoint(layer, policy=policy, prevent_cse=False) for layer in layers]
            # With several layers in one iteration, XLA would replace what is to be recomputed by the results of the forward
            # pass, and keep these.
            unroll = 1
        return run_layers(layers, x, params, caches, count, unroll, first)

    def run_reversible(
        self, params: Any, x: jax.Array, context: Context, rng: Any, first: Any, caches: Any = None
    ) -> tuple[jax.Array, Any, Aux]:
        """Runs layers of which each branch is added to the stream that the other branch reads.

        Activations are recomputed in the backward pass, unless there are caches or separate parameters.

        Args:
          params: As for `run_plain`.
          x: `[B, T, 2 D]`, the two streams side by side.
          context: Positions, segments and mask, shared by all layers.
          rng: Key for dropout, or None.
          first: Index of the first layer.
          caches: As for `run_plain`.

        Returns:
          `(x, caches, aux)`.
        """
        count = _layer_count(params)
        branches = [
            (functools.partial(self._mix, block), functools.partial(self._feed, block)) for block in self.blocks
        ]
        x1, x2 = jnp.split(x, 2, axis=-1)
        if caches is None and context.capacity is None and not isinstance(params, tuple):
            streams, aux = run_reversible_layers(branches, (x1, x2), params, count, (context, rng), first)
        else:
            layers = [reversible_layer(pair, (context, rng)) for pair in branches]
            streams, caches, aux = run_layers(layers, (x1, x2), params, caches, count, self.unroll or count, first)
        return jnp.concatenate(streams, axis=-1), caches, aux

    def _apply(self, block: Block, method: str, params_and_index: Any, rng: Any, *args: Any) -> Any:
        """Calls a method of a Block with the parameters and the dropout key of one layer."""
        params, index = params_and_index
        rngs = {} if rng is None else {"dropout": jax.random.fold_in(rng, index)}
        params = self.tensor_parallel.gather_parameters(params)
        return block.apply({"params": params}, *args, rngs=rngs, method=method)

    def _plain_layer(
        self, block: Block, context: Context, rng: Any, x: jax.Array, slices: tuple[Any, jax.Array, Any]
    ) -> tuple[jax.Array, tuple[Any, Aux]]:
        *params_and_index, cache = slices
        x, cache, aux = self._apply(block, "__call__", params_and_index, rng, x, context, cache)
        return x, (cache, aux)

    def _mix(
        self, block: Block, params_and_index: Any, x: jax.Array, context: Context, rng: Any, cache: Any = None
    ) -> tuple[jax.Array, tuple[Any, Aux]]:
        y, cache, aux = self._apply(block, "mix", params_and_index, rng, x.astype(self.dtype), context, cache)
        return y, (cache, aux)

    def _feed(
        self, block: Block, params_and_index: Any, x: jax.Array, context: Context, rng: Any
    ) -> tuple[jax.Array, Aux]:
        # Applied by itself, the branch would draw the same numbers as the first branch of its layer.
        rng = None if rng is None else jax.random.fold_in(rng, self.layers + 1)
        return self._apply(block, "feed", params_and_index, rng, x.astype(self.dtype), context)


def _layer_count(params: Any) -> int:
    return len(params) if isinstance(params, tuple) else jax.tree.leaves(params)[0].shape[0]
