"""Vocabulary parallelism: embedding lookup and loss where the table is divided over devices by words.

Each device looks up, and scores, its own tokens against its own words. The mesh axes of "vocab" divide words, those of "batch"
and "length" divide tokens. If the compiler placed a loss that runs over chunks of tokens, it would gather a divided table and
its logits, and sum gradients over devices, once per chunk. Here only the table's features are gathered, where ZeRO divides
them. The other messages are, where words are divided, a sum of the looked-up rows, three numbers per token and one sum of the
gradient by h; and, where tokens are divided, one sum of the table's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.model_interfaces.model_parallel import is_zero2
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.softmax import zero_ignored_tokens
from hpnlp.ops.table_rows import is_row_subset
from hpnlp.ops.weight import is_weight
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.varying import sum_over_devices
from hpnlp.types import LossOut


def lookup(layout: Layout, table: PyTree, ids: Int[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
    """Looks up the rows of a table.

    Args:
      layout: Layout of the run.
      table: `[V, D]`, laid out by the layout, a Weight, a `Zero2Parameter` or `TableRows`.
      ids: Rows of the table.
      dtype: Dtype of the result.

    Returns:
      `table[ids]`, laid out by `Layout.activations`.

    Raises:
      InputError: Sequences or tokens do not divide over the mesh.
    """
    layout.check_tokens(ids.shape)
    x_spec = layout.activations(ids.shape[1])
    if is_row_subset(table):
        return lax.with_sharding_constraint(table[ids].astype(dtype), NamedSharding(layout.mesh, x_spec))
    tensor_parallel, vocab_axes = layout.tensor_parallel(ids.shape[1]), layout.rules["vocab"]

    def lookup_on_device(table: PyTree, ids: Array) -> Array:
        if not vocab_axes:
            return tensor_parallel.reduce_output(table[ids].astype(dtype), "vocab")
        index = ids - lax.axis_index(vocab_axes) * table.shape[0]
        is_local = (index >= 0) & (index < table.shape[0])
        looked_up = (
            table.take(jnp.clip(index, 0, table.shape[0] - 1)) if is_weight(table) else table.at[index].get(mode="clip")
        )
        rows = jnp.where(is_local[..., None], looked_up, 0.0)
        return tensor_parallel.reduce_output(rows.astype(dtype), "vocab")

    return _run_with_table(layout, lookup_on_device, x_spec, table, (ids, layout.spec("batch", "length")))


def loss(
    layout: Layout,
    layer: Any,
    table: PyTree,
    h: Float[Array, "B *T D"],
    labels: Int[Array, "B *T"],
    weights: Float[Array, "B *T"],
    rng: jax.Array | None = None,
) -> LossOut:
    """The loss of an output layer, computed on each device for its tokens and words.

    If `layer.merges(rng)` is True, the layer's loss with this rng is the weighted sum of lse - score, merged over the results
    of `layer.partial(rows, index of the first word, h, labels, rng)` for slices of the table: the log-sum-exp of these words,
    and their part of the target's score, such as the logit of the label and 0 where the label is another word. Otherwise
    `layer.loss` runs on global arrays. The layer's own parameters, at most a number per word, are replicated. The mesh axes of
    `layer.axis` divide the words, which may be the classes of a classifier.

    Args:
      layout: Layout of the run.
      layer: An output layer.
      table: `[V, D]`, laid out by the layout, a Weight, a `Zero2Parameter`, or None for a layer without a table.
      h: Hidden states `[B, T, D]`, laid out by `Layout.activations`; or one for each sequence, `[B, D]`.
      labels: Ids of the words to predict, `[B, T]` or `[B]`.
      weights: Weights of the tokens or sequences.
      rng: Key for samples, or None.

    Returns:
      The loss over all devices.

    Raises:
      InputError: Sequences or tokens do not divide over the mesh.

    Numerics: where words are divided, a token's loss is lse - logit, exact to about 1e-7 of the lse.

    Cost, with gradients: on each device that of `layer.loss` for its tokens where it has all words, else that of
    `layer.partial`; and, until gradients are summed, a float32 gradient of its words with all features.
    """
    layout.check_tokens(labels.shape)
    if not layer.merges(rng):
        return layer.loss(
            _global_table(layout, layer, table), _flatten(h), labels.reshape(-1), weights.reshape(-1), rng
        )
    tensor_parallel, vocab_axes = layout.tensor_parallel(_length(labels)), layout.rules[layer.axis]
    module, variables = _unbind(layer)

    def loss_on_device(table: PyTree, variables: PyTree, h: Array, labels: Array, weights: Array) -> LossOut:
        # Marked before any loop and before h grows: the gradient is summed where an array begins to vary.
        leaves, structure = jax.tree.flatten(table)  # several arrays of a Weight
        *leaves, h = vary_alike(*leaves, h)
        table = jax.tree.unflatten(structure, leaves)
        layer = module.bind(jax.tree.map(lambda x: vary_alike(x, h)[0], variables))
        if "tensor" in vocab_axes:
            h = tensor_parallel.gather_tokens(h)
        else:  # the devices of this axis have the same words, so that each token needs one of them only
            labels, weights = (tensor_parallel.local_tokens(x, 1) for x in (labels, weights))
        if copies := _further_axes(h, weights, vocab_axes):  # vectors of sequences: one of the equal copies counts
            weights = jnp.where(lax.axis_index(copies) == 0, weights, 0.0)
        h, labels, weights = _flatten(h), labels.reshape(-1), weights.reshape(-1)
        if vocab_axes:
            h, labels = zero_ignored_tokens(h, labels, weights)
            out = layer.weighted(_merged_nll(vocab_axes, layer, table, h, labels, rng), labels, weights)
        else:
            out = layer.loss(table, h, labels, weights, rng)
        sums = sum_over_devices(out.sum, out.weight)
        return LossOut(*sums, {name: sum_over_devices(*pair) for name, pair in out.aux.items()})

    token_spec, h_spec = _specs(layout, labels)
    operands = (variables, PartitionSpec()), (h, h_spec), (labels, token_spec), (weights, token_spec)
    return _run_with_table(layout, loss_on_device, PartitionSpec(), table, *operands, axis=layer.axis)


def best(layout: Layout, layer: Any, table: PyTree, h: Float[Array, "B *T D"]) -> Int[Array, "B *T"]:
    """The most probable word of each token, or class of each sequence.

    Args:
      layout: Layout of the run.
      layer: An output layer.
      table: As for `loss`.
      h: As for `loss`.

    Returns:
      Ids of words. If `layer.merges(None)` is True, each device computes them for its tokens and words; otherwise `layer.best`
      runs on global arrays.
    """
    if not layer.merges(None):
        return layer.best(_global_table(layout, layer, table), _flatten(h))[1].reshape(h.shape[:-1])
    tensor_parallel, vocab_axes = layout.tensor_parallel(_length(h[..., 0])), layout.rules[layer.axis]
    module, variables = _unbind(layer)

    def best_on_device(table: PyTree, variables: PyTree, h: Array) -> Array:
        layer = module.bind(variables)
        if not vocab_axes:
            ids = layer.best(table, _flatten(h))[1].reshape(h.shape[:-1])
            copies = _further_axes(ids, h)
            return lax.pmax(ids, copies) if copies else ids
        h = tensor_parallel.gather_tokens(h) if "tensor" in vocab_axes else h
        score, ids = layer.best(table, _flatten(h), lax.axis_index(vocab_axes) * table.shape[0])
        is_best = score == lax.pmax(score, vocab_axes)
        # Ties go to the first word.
        return lax.pmin(jnp.where(is_best, ids, layer.vocab), vocab_axes).reshape(h.shape[:-1])

    token_spec, h_spec = _specs(layout, h[..., 0])
    out_spec = token_spec if "tensor" in vocab_axes else PartitionSpec(*h_spec[:-1])
    # The ids are integers, but pmax has no derivative by which a tangent of the operands could pass.
    table, h, variables = lax.stop_gradient((table, h, variables))
    operands = (variables, PartitionSpec()), (h, h_spec)
    return _run_with_table(layout, best_on_device, out_spec, table, *operands, axis=layer.axis)


def logits(layout: Layout, layer: Any, table: PyTree, h: Float[Array, "B *T D"]) -> Float[Array, "B *T V"]:
    """Logits of all words, in a computation that the compiler places.

    Args:
      layout: Layout of the run.
      layer: An output layer.
      table: As for `loss`.
      h: As for `loss`.

    Returns:
      Float32 logits.

    Cost: memory for the logits of a device's tokens.
    """
    return layer.logits(_global_table(layout, layer, table), _flatten(h)).reshape(*h.shape[:-1], -1)


def _unbind(layer: Any) -> tuple[Any, Any]:
    """An output layer without its own parameters, and these, which enter a `shard_map` as arguments."""
    return (layer, {}) if layer.scope is None else layer.unbind()


def _further_axes(x: Array, y: Array, other_axes: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Mesh axes that x varies over and y does not, without `other_axes`.

    Parameters that were gathered from the devices of an axis, and results computed from them, vary over it, although their
    values are equal there.
    """
    varying_x, varying_y = (jax.typeof(array).manual_axis_type.varying for array in (x, y))
    return tuple(sorted(varying_x - varying_y - set(other_axes)))


def _length(labels: Array) -> int:
    """Tokens per sequence of an array `[B, T]`; 1 for `[B]`, so that no mesh axis divides them."""
    return 1 if labels.ndim == 1 else labels.shape[1]


def _specs(layout: Layout, labels: Array) -> tuple[PartitionSpec, PartitionSpec]:
    """PartitionSpecs of labels `[B, T]` or `[B]`, and of the hidden states that predict them."""
    if labels.ndim == 1:
        return layout.spec("batch"), layout.spec("batch", None)
    return layout.spec("batch", "length"), layout.activations(labels.shape[1])


def _global_table(layout: Layout, layer: Any, table: PyTree) -> Any:
    """The table as a global array, for a computation that the compiler places."""
    if not is_zero2(table):
        return table
    spec = layout.state_spec((layer.axis, "embed"), table.full.shape, divided=False)
    return lax.with_sharding_constraint(table.shard, NamedSharding(layout.mesh, spec))


def _flatten(h: Array) -> Array:
    """Makes `[tokens, D]` of `[B, T, D]`."""
    return h.reshape(-1, h.shape[-1])


def _run_with_table(
    layout: Layout,
    function: Callable[..., Any],
    out_spec: PyTree,
    table: PyTree,
    *operands: tuple[PyTree, Any],
    axis: str = "vocab",
) -> Any:
    """Runs `function(table, *arrays)` on each device, on all features of the device's words. operands: (array, spec)."""
    table_spec, gather = layout.parameters((axis, "embed"), table)

    def run_on_device(table: PyTree, *arrays: PyTree) -> Any:
        return function(gather(table), *arrays)

    arrays, specs = zip(*operands, strict=True)
    return jax.shard_map(run_on_device, mesh=layout.mesh, in_specs=(table_spec, *specs), out_specs=out_spec)(
        table, *arrays
    )


def _merged_nll(
    vocab_axes: tuple[str, ...],
    layer: Any,
    table: PyTree,
    h: Float[Array, "N D"],
    labels: Int[Array, " N"],
    rng: Array | None,
) -> Float[Array, " N"]:
    """Losses of the device's tokens over the words of all devices; NaN for a label outside the vocabulary."""
    lse, score = layer.partial(table, lax.axis_index(vocab_axes) * table.shape[0], h, labels, rng)
    max_lse = lax.pmax(lax.stop_gradient(lse), vocab_axes)
    lse = jnp.log(lax.psum(jnp.exp(lse - max_lse), vocab_axes)) + max_lse
    vocab = lax.axis_size(vocab_axes) * table.shape[0]
    return jnp.where((labels >= 0) & (labels < vocab), lse - lax.psum(score, vocab_axes), jnp.nan)
