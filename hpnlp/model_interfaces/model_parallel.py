"""A model's computation over several devices, as the modules of `nn` and `models` see it.

The classes here are interfaces: `parallel` implements them for a mesh, and their defaults are those of one device, so that
neither package imports the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
from jaxtyping import PyTree

from hpnlp.model_interfaces.branch import Branch, Mixer
from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.types import Array, InputError, LossOut, MixerInputs, MixerOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Zero2Parameter:
    """A parameter that every device holds in full, while each device keeps a shard of its gradient (ZeRO-2).

    Attributes:
      full: The parameter, which the forward pass reads; it receives no gradient. Or its PartitionSpec.
      shard: The same array, laid out as its gradient is to be, which receives the gradient. Or its PartitionSpec.
    """

    full: Any
    shard: Any


def is_zero2(node: Any) -> bool:
    """Whether a node of a tree is a `Zero2Parameter`.

    Args:
      node: Node of a tree of parameters.

    Returns:
      True for a `Zero2Parameter`, False for an array or a container.
    """
    return isinstance(node, Zero2Parameter)


class TensorParallel:
    """Division of a Block's branches over the devices of a mesh: a device's heads and columns, and the collectives.

    Heads, columns and experts have the logical axis names "heads", "mlp" and "experts". This class is the identity, for one
    device; `hpnlp.parallel.tensor_parallel` overrides it for a mesh.
    """

    # True if no method changes its argument.
    is_identity: ClassVar[bool] = True

    @property
    def regathers(self) -> bool:
        """Whether the backward pass gathers parameters again instead of keeping the result of `gather_parameters`."""
        return False

    def local_size(self, name: str, size: int) -> int:
        """Number of the device's heads, columns or experts.

        Args:
          name: "heads", "mlp" or "experts".
          size: Their number on all devices together.

        Returns:
          The device's share of `size`.
        """
        return size

    def local_start(self, name: str, size: int) -> Any:
        """Index of the device's first head or column.

        Args:
          name: "heads" or "mlp".
          size: Number of heads or columns on all devices together.

        Returns:
          An int, or an int32 scalar inside `shard_map`.
        """
        return 0

    def gather_tokens(self, x: Array) -> Array:
        """Gathers the hidden states that a branch reads.

        Args:
          x: `[B, t, D]`, for the device's tokens.

        Returns:
          `[B, T, D]`, for all tokens of the device's sequences.
        """
        return x

    def reduce_output(self, y: Array, name: str) -> Array:
        """Sums the devices' partial results of a branch.

        Args:
          y: `[B, T, D]`, the device's partial result.
          name: Logical name of the contracted axis, whose devices hold the other partial results.

        Returns:
          `[B, t, D]`, the sum for the device's tokens.
        """
        return y

    def exchange(self, x: Array, name: str) -> Array:
        """Sends block i of an array to the i-th of the devices that divide a logical axis: an all-to-all.

        Args:
          x: `[S, ...]` for S devices.
          name: "experts".

        Returns:
          `[S, ...]`, the blocks that the devices have sent to this one.
        """
        return x

    def local_tokens(self, x: Array, axis: int) -> Array:
        """Selects the device's tokens.

        Args:
          x: An array over all tokens that a branch reads.
          axis: The axis of tokens.

        Returns:
          The slice of x for the device's tokens.
        """
        return x

    def mix(self, mixer: Mixer, inputs: MixerInputs, mask: Any) -> MixerOutput:
        """Runs a mixer on the device's tokens and heads.

        Args:
          mixer: A mixer.
          inputs: Inputs of the device's tokens and heads.
          mask: A static Mask over all tokens.

        Returns:
          `mixer(inputs, mask)`, for the device's tokens and heads.
        """
        return mixer(inputs, mask)

    def report(self, module: Branch, output: MixerOutput) -> LayerReport:
        """The report of a mixer or feed-forward network, with the device's terms of its statistics.

        Args:
          module: The mixer or feed-forward network.
          output: Result of the module.

        Returns:
          The report.

        Raises:
          InputError: The module does not list a statistic in `statistic_axes`.
        """
        axes = module.statistic_axes
        if undeclared := [name for name in output.statistics if name not in axes]:
            raise InputError(
                f"{type(module).__name__} returns the statistics {', '.join(undeclared)} without their axes: list them in its "
                "attribute statistic_axes"
            )
        statistics = output.statistics.items()
        return LayerReport(
            output.aux, {name: self.local_statistic(value.astype("float32"), axes[name]) for name, value in statistics}
        )

    def local_statistic(self, value: Array, axes: Sequence[str | None]) -> Array:
        """The device's terms of a statistic, which is then summed over devices.

        Args:
          value: Sums of the device's tokens and heads.
          axes: Logical axes of the statistic.

        Returns:
          Sums for all heads, 0 for those of other devices; all 0 where another device counts the same tokens.
        """
        return value

    def same_on_all(self, x: Array) -> Array:
        """Marks an array as equal on all devices that have the same sequences.

        Args:
          x: An array that is equal on these devices, as a function of `gather_tokens` is.

        Returns:
          x.
        """
        return x

    def remat_policy(self, policy: Callable[..., Any] | None) -> Any:
        """Excludes parameters that the backward pass gathers again from the values that a policy saves.

        Args:
          policy: Policy of `jax.checkpoint`; None saves everything.

        Returns:
          A policy of `jax.checkpoint`, or None.
        """
        return policy

    def gather_parameters(self, params: PyTree, stack: str) -> Any:
        """Gathers the parameters of one layer.

        Args:
          params: The device's shards.
          stack: Name of the stack that holds the layer.

        Returns:
          A tree of full parameters (of the device's heads and columns).
        """
        return params


NO_TENSOR_PARALLEL = TensorParallel()


@dataclasses.dataclass(frozen=True, eq=False)
class ModelParallel:
    """The embedding lookup, the layers, the loss and the predictions of a model, each as a program over a mesh.

    Attributes:
      embedding_lookup: `(table, ids [B, T], dtype) -> x [B, T, D]`.
      run_layers: `(axes of the stacks, run, stacks of variables by name, x, context, rngs) -> (x, report)` for all layers of a
          Backbone. axes: logical names of the variables' axes, by collection, by the name of a stack.
          `run(tensor_parallel, stacks of a chunk of the layers, x, context, rngs, index of the chunk) -> (x, report)`.
      loss: `(output layer, *arguments of its loss) -> LossOut`, for hidden states `[B, T, D]` or `[B, D]`.
      best: `(output layer, table, h) -> ids` of the most probable words or classes, `[B, T]` or `[B]`.
      logits: `(output layer, table, h) -> logits` of all words or classes, float32 `[B, T, V]` or `[B, V]`.
      token_order: `(sequence length) -> (order, indices)`. order: a static description of the order of the tokens over
          devices, for `run`. indices: int `[T]`, the tokens in that order, or None if they keep their order.
    """

    embedding_lookup: Callable[..., Array]
    run_layers: Callable[..., tuple[Array, LayerReport]]
    loss: Callable[..., LossOut]
    best: Callable[..., Array]
    logits: Callable[..., Array]
    token_order: Callable[..., Any]
