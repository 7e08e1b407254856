"""The layers of a Backbone on one device: Blocks with plain or reversible residuals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hpnlp.model_interfaces.layer_report import CARRY, LayerReport
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.models.stacks.layer_forms import build_mixer
from hpnlp.nn.attention import Context, Memory
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.blocks import block_kind
from hpnlp.nn.stack import run_layers
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.helpers.stacks import StackOrder, layer_count, single_stack
from hpnlp.parallel.memory import remat
from hpnlp.spec import parse_one
from hpnlp.types import WithCarry

Rngs = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStack:
    """Consecutive layers of a model.

    Attributes:
      blocks: The Block of each form of layers, in the order in which layers take them.
      order: The stack of parameters that holds the layers of each form.
      layers: Number of layers of the whole model, by which dropout keys of the branches differ.
      unroll: Number of layers in one iteration of the loop over layers, 0 for all.
      dtype: Dtype of the activations in branches.
      tensor_parallel: Tensor parallelism of the Blocks; also gathers a layer's parameters.
      remat: Rematerialisation policy, a spec string.
    """

    blocks: Sequence[Block]
    order: StackOrder
    layers: int
    unroll: int
    dtype: DTypeLike
    tensor_parallel: TensorParallel
    remat: str

    def run_plain(
        self, params: PyTree, x: jax.Array, context: Context, rngs: Rngs, chunk: jax.Array | int, caches: PyTree = None
    ) -> tuple[jax.Array, Any, LayerReport]:
        """Runs layers of which each adds its branches to one stream.

        Args:
          params: Stacks of the variables of these layers by name, or a tuple of one tree per layer: dicts of collections.
          x: `[B, T, D]`.
          context: Positions, segments and mask, shared by all layers.
          rngs: Keys by name, into which each layer folds its index: "dropout" in training with dropout, and "draws" if a
              mixer of the model draws.
          chunk: Index of these layers among equal chunks of the model's layers, 0 for all layers.
          caches: As `nn.stack.run_layers` returns them, or None.

        Returns:
          `(x, caches, report)`.
        """
        layers = [functools.partial(self._plain_layer, form, context, rngs) for form in range(len(self.blocks))]
        unroll = self.unroll
        policy = remat.policy(self.remat)
        if policy is not None or self.tensor_parallel.regathers:
            policy = self.tensor_parallel.remat_policy(policy)
            layers = [jax.checkpoint(layer, policy=policy, prevent_cse=False) for layer in layers]
            # With several layers in one iteration, XLA would replace what is to be recomputed by the results of the forward
            # pass, and keep these.
            unroll = 1
        return run_layers(layers, x, params, caches, unroll, _first_layer(params, chunk), self.order)

    def run_reversible(
        self, params: PyTree, x: jax.Array, context: Context, rngs: Rngs, chunk: jax.Array | int, caches: PyTree = None
    ) -> tuple[jax.Array, Any, LayerReport]:
        """Runs layers of which each branch is added to the stream that the other branch reads.

        Activations are recomputed in the backward pass, unless there are caches or separate parameters.

        Args:
          params: As for `run_plain`.
          x: `[B, T, 2 D]`, the two streams side by side.
          context: Positions, segments and mask, shared by all layers.
          rngs: As for `run_plain`.
          chunk: As for `run_plain`.
          caches: As for `run_plain`.

        Returns:
          `(x, caches, report)`.
        """
        from hpnlp.nn.reversible_stack import reversible_layer, run_reversible_layers

        first = _first_layer(params, chunk)
        forms = range(len(self.blocks))
        branches = [(functools.partial(self._mix, form), functools.partial(self._feed, form)) for form in forms]
        x1, x2 = jnp.split(x, 2, axis=-1)
        if caches is None and context.capacity is None and not isinstance(params, tuple):
            streams, report = run_reversible_layers(branches, (x1, x2), params, (context, rngs), first, self.order)
        else:
            layers = [reversible_layer(pair, (context, rngs)) for pair in branches]
            streams, caches, report = run_layers(layers, (x1, x2), params, caches, self.unroll, first, self.order)
        return jnp.concatenate(streams, axis=-1), caches, report

    def _apply(self, form: int, method: str, params_and_index: Sequence[Any], rngs: Rngs, *args: Any) -> Any:
        """Calls a method of a form's Block with the variables and the keys of one layer."""
        params, index = params_and_index
        x, context, *further = args
        rngs = {name: jax.random.fold_in(rng, index) for name, rng in rngs.items()}
        variables = self.tensor_parallel.gather_parameters(params, self.order.names[form])
        if CARRY in variables:
            context = dataclasses.replace(context, carry=variables[CARRY])
            variables = {name: tree for name, tree in variables.items() if name != CARRY}
        return self.blocks[form].apply(variables, x, context, *further, rngs=rngs, method=method)

    def _plain_layer(
        self, form: int, context: Context, rngs: Rngs, x: jax.Array, slices: tuple[Any, jax.Array, Any]
    ) -> tuple[jax.Array, tuple[Any, LayerReport]]:
        *params_and_index, cache = slices
        x, cache, report = self._apply(form, "__call__", params_and_index, rngs, x, context, cache)
        if "hidden" in context.taps:
            report = dataclasses.replace(report, taps={**report.taps, "hidden": x})
        return x, (cache, report)

    def _mix(
        self,
        form: int,
        params_and_index: Sequence[Any],
        x: jax.Array,
        context: Context,
        rngs: Rngs,
        cache: PyTree = None,
    ) -> tuple[jax.Array, tuple[Any, LayerReport]]:
        y, cache, report = self._apply(form, "mix", params_and_index, rngs, x.astype(self.dtype), context, cache)
        return y, (cache, report)

    def _feed(
        self, form: int, params_and_index: Sequence[Any], x: jax.Array, context: Context, rngs: Rngs
    ) -> tuple[jax.Array, LayerReport]:
        # Applied by itself, the branch would draw the same numbers as the first branch of its layer.
        rngs = {name: jax.random.fold_in(rng, self.layers + 1) for name, rng in rngs.items()}
        return self._apply(form, "feed", params_and_index, rngs, x.astype(self.dtype), context)


def layer_rngs(rng: jax.Array | None, layers: int, drops: bool, draws: bool) -> dict[str, jax.Array]:
    """Keys for the layers of a model.

    Args:
      rng: Key of the model in training, or None in evaluation. Layers fold numbers up to `layers + 1` into it for dropout.
      layers: Number of layers.
      drops: Whether the model has dropout.
      draws: Whether a mixer reads `MixerInputs.draws`.

    Returns:
      "dropout" in training, if the model drops; "draws" if a mixer draws, always the same key in evaluation.
    """
    rngs = {"dropout": rng} if drops and rng is not None else {}
    if draws:
        rngs["draws"] = jax.random.key(0) if rng is None else jax.random.fold_in(rng, layers + 2)
    return rngs


def _first_layer(params: PyTree, chunk: jax.Array | int) -> Any:
    """Index of the first layer of a chunk of layers with these parameters."""
    return chunk * (len(params) if isinstance(params, tuple) else layer_count(params))


@functools.cache
def stack_order(forms: tuple[BlockConfig, ...], mask: AnyMask, length: int) -> StackOrder:
    """Groups layer forms by the variables of their layers.

    Forms share a stack if the names, shapes and axes of their variables are equal. A mixer with parameters of its own shares
    a stack with mixers of the same spec only, because its parameters may be initialised in another way; so does a mixer or
    feed-forward network that has buffers or a carry, or returns statistics.

    Args:
      forms: The forms of one period.
      mask: The model's static Mask.
      length: As for `init_layers`.

    Returns:
      The order. Several stacks are named after their first layer, as "0_conv" and "2_full".
    """
    if len(set(forms)) == 1:
        return single_stack(len(forms))
    blocks = make_blocks(forms, 1, NO_TENSOR_PARALLEL)
    keys = {form: _stack_key(block, mask, length) for form, block in zip(forms, blocks, strict=True)}
    firsts = [next(i for i, other in enumerate(forms) if keys[other] == keys[form]) for form in forms]
    if len(set(firsts)) == 1:
        return single_stack(len(forms))
    digits = len(str(len(forms) - 1))
    return StackOrder(tuple(f"{first:0{digits}}_{blocks[first].mixer.name}" for first in firsts))


def make_blocks(forms: Sequence[BlockConfig], layers: int, tensor_parallel: TensorParallel) -> list[Block]:
    """The Block of each form. They are no submodules of a model: their parameters are slices of stacks.

    Args:
      forms: The forms of one period.
      layers: Number of layers of the model.
      tensor_parallel: Tensor parallelism of the Blocks.

    Returns:
      The Blocks.
    """
    # Residual branches start small, so that the variance of the stream does not grow with depth (GPT-2, sec. 2.3).
    out_init = nn.initializers.variance_scaling(1.0 / (2 * layers), "fan_in", "truncated_normal")
    return [
        block_kind(form.block).make(form, out_init, parse_one(form.mixer, "model.mixer"), tensor_parallel)
        for form in forms
    ]


def init_layers(
    forms: tuple[BlockConfig, ...], layers: int, mask: AnyMask, length: int, rng: jax.Array
) -> dict[str, Any]:
    """Initial variables of all layers, which depend on the layer's index and form alone.

    Args:
      forms: The forms of one period.
      layers: Number of layers.
      mask: The model's static Mask.
      length: Tokens of a sequence, on which the parameters of mixers of a fixed length depend.
      rng: Key; each layer folds in its index.

    Returns:
      By collection, a stack, or a dict of several stacks by name. Each array is stacked on a first axis with the logical name
      "layers". Layers without buffers have no such collection.
    """
    order, blocks = stack_order(forms, mask, length), make_blocks(forms, layers, NO_TENSOR_PARALLEL)
    keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(layers))
    stacks = {}
    for name in order.stack_names:
        members = order.members(name, layers)
        init = functools.partial(_init_layer, blocks[order.names.index(name)], mask, length)
        _, stacked = jax.vmap(init)(keys if len(members) == layers else keys[jnp.asarray(members)])
        stacks[name] = jax.tree.map(
            lambda box: box.add_axis(0, {nn.PARTITION_NAME: "layers"}),
            stacked,
            is_leaf=lambda node: isinstance(node, nn.LogicallyPartitioned),
        )
    names = dict.fromkeys(collection for variables in stacks.values() for collection in variables)
    return {
        collection: order.join({name: stack[collection] for name, stack in stacks.items() if collection in stack})
        for collection in names
    }


@functools.cache
def layer_axes(forms: tuple[BlockConfig, ...], layers: int, mask: AnyMask, length: int) -> dict[str, Any]:
    """Logical axis names of the variables of all layers. Allocates nothing.

    Args:
      forms: The forms of one period.
      layers: Number of layers.
      mask: The model's static Mask.
      length: As for `init_layers`.

    Returns:
      Name of each stack -> by collection, a tree like its arrays of tuples of names, of which the first is "layers".
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    boxed = jax.eval_shape(functools.partial(init_layers, forms, layers, mask, length), key)
    names = jax.tree.map(
        lambda box: tuple(box.names), boxed, is_leaf=lambda node: isinstance(node, nn.LogicallyPartitioned)
    )
    return stack_order(forms, mask, length).by_stack(names)


def initial_carry(forms: tuple[BlockConfig, ...], layers: int, order: StackOrder, batch: int, dtype: DTypeLike) -> Any:
    """The carry of all layers before the first tokens.

    Args:
      forms: The forms of one period.
      layers: Number of layers.
      order: The stack that holds each layer.
      batch: Number of sequences B.
      dtype: Dtype of the activations.

    Returns:
      Arrays `[n, B, ...]` of the n layers of a stack; if the model has several stacks, by the names of those whose mixers carry
      state. None if no mixer carries state.
    """

    def stack(mixer: WithCarry, dim: int, count: int) -> Any:
        carry = mixer.initial_carry(batch, dim, dtype)
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), carry)

    return _by_carrying_stack(stack, forms, layers, order)


def carry_axes(forms: tuple[BlockConfig, ...], layers: int, order: StackOrder) -> Any:
    """Logical axes of the carry of all layers.

    Args:
      forms: The forms of one period.
      layers: Number of layers.
      order: The stack that holds each layer.

    Returns:
      A tree like the result of `initial_carry`, of tuples of names, of which the first are "layers" and "batch".
    """

    def axes(mixer: WithCarry, dim: int, count: int) -> Any:
        # Guided by the carry, which may have tuples, as the names of axes are.
        carry = jax.eval_shape(lambda: mixer.initial_carry(1, dim, jnp.float32))
        return jax.tree.map(lambda _, names: ("layers", *names), carry, mixer.carry_axes)

    return _by_carrying_stack(axes, forms, layers, order)


def _by_carrying_stack(
    make: Callable[[Any, int, int], Any], forms: tuple[BlockConfig, ...], layers: int, order: StackOrder
) -> Any:
    """Joins `make(mixer, dim, number of layers)` of the stacks whose mixers have a carry; None without any."""
    mixers = {name: build_mixer(forms[order.names.index(name)]) for name in order.stack_names}
    result = {
        name: make(mixer, forms[0].dim, len(order.members(name, layers)))
        for name, mixer in mixers.items()
        if mixer.carries
    }
    return order.join(result) if result else None


def _init_layer(block: Block, mask: AnyMask, length: int, key: jax.Array) -> tuple[LayerReport, Any]:
    """`(report, variables)` of one layer."""
    x, positions = jnp.zeros((1, length, block.config.dim), jnp.float32), jnp.arange(length, dtype=jnp.int32)[None]
    width = block.config.memory_dim
    memory = Memory(jnp.zeros((1, 1, width), jnp.float32), jnp.zeros((1, 1), jnp.int32)) if width else None
    context = Context(positions, None, mask, memory=memory)
    rngs = {"params": key, "draws": key}
    (_, _, report), variables = block.init_with_output(rngs, x, context)  # pyright: ignore[reportGeneralTypeIssues]
    return report, dict(variables)


def _stack_key(block: Block, mask: AnyMask, length: int) -> Any:
    """A key that is equal for Blocks whose layers share a stack."""
    init = functools.partial(_init_layer, block, mask, length)
    report, variables = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    has_own = "attention" in report.statistics or any(
        "mixer" in tree.get("attention", {}) for tree in variables.values()
    )
    mixer = block.mixer if has_own or jax.tree.leaves(report.carry) else None
    has_buffers = "mlp" in variables.get("buffers", {})
    return variables, mixer, block.config.mlp if has_buffers or "mlp" in report.statistics else None
