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
from jaxtyping import Array, Float, Int

from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.softmax import zero_ignored_tokens
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.varying import sum_over_devices
from hpnlp.parallel.zero import is_zero2
from hpnlp.types import LossOut, TableRows

TABLE = ("vocab", "embed")  # logical names of the axes of a table


def lookup(layout: Layout, table: Any, ids: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Looks up the rows of a table.

    Args:
      layout: Layout of the run.
      table: `[V, D]`, laid out by the layout, a `Zero2Parameter` or `TableRows`.
      ids: Rows of the table.
      dtype: Dtype of the result.

    Returns:
      `table[ids]`, laid out by `Layout.activations`.

    Raises:
      InputError: Sequences or tokens do not divide over the mesh.
    """
    layout.check_tokens(ids.shape)
    x_spec = layout.activations(ids.shape[1])
    if isinstance(table, TableRows):
        return lax.with_sharding_constraint(table[ids].astype(dtype), NamedSharding(layout.mesh, x_spec))
    tensor_parallel, vocab_axes = layout.tensor_parallel(ids.shape[1]), layout.rules["vocab"]

    def lookup_on_device(table: Array, ids: Array) -> Array:
        if not vocab_axes:
            return tensor_parallel.reduce_output(table[ids].astype(dtype), "vocab")
        index = ids - lax.axis_index(vocab_axes) * table.shape[0]
        is_local = (index >= 0) & (index < table.shape[0])
        rows = jnp.where(is_local[..., None], table.at[index].get(mode="clip"), 0.0)
        return tensor_parallel.reduce_output(rows.astype(dtype), "vocab")

    return _run_with_table(layout, lookup_on_device, x_spec, table, (ids, layout.spec("batch", "length")))


def loss(
    layout: Layout,
    layer: Any,
    table: Any,
    h: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    rng: jax.Array | None = None,
) -> LossOut:
    """The loss of an output layer, computed on each device for its tokens and words.

    If `layer.merges(rng)` is True, the layer's loss with this rng is the weighted sum of lse - logit, merged over the results
    of `layer.partial(rows, index of the first word, h, labels)` for slices of the table: the log-sum-exp of these words, and
    the logit of the label, 0 where the label is another word. Otherwise `layer.loss` runs on global arrays. The layer's own
    parameters, at most a number per word, are replicated.

    Args:
      layout: Layout of the run.
      layer: An output layer.
      table: `[V, D]`, laid out by the layout, a `Zero2Parameter`, or None for a layer without a table.
      h: Hidden states, laid out by `Layout.activations`.
      labels: Ids of the words to predict.
      weights: Weights of the tokens.
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
        return _global_loss(layout, layer, table, h, labels, weights, rng)
    tensor_parallel, vocab_axes = layout.tensor_parallel(labels.shape[1]), layout.rules["vocab"]

    def loss_on_device(table: Array, h: Array, labels: Array, weights: Array) -> LossOut:
        # Marked before any loop and before h grows: the gradient is summed where an array begins to vary.
        table, h = vary_alike(table, h)
        if vocab_axes:
            h = tensor_parallel.gather_tokens(h)
        else:  # every device has all words, so that each token needs one device only
            labels, weights = (tensor_parallel.local_tokens(x, 1) for x in (labels, weights))
        h, labels, weights = _flatten(h), _flatten(labels), _flatten(weights)
        if vocab_axes:
            h, labels = zero_ignored_tokens(h, labels, weights)
            out = layer.weighted(_merged_nll(vocab_axes, layer, table, h, labels), labels, weights)
        else:
            out = layer.loss(table, h, labels, weights)
        sums = sum_over_devices(out.sum, out.weight)
        return LossOut(*sums, {name: sum_over_devices(*pair) for name, pair in out.aux.items()})

    token_spec = layout.spec("batch", "length")
    operands = (h, layout.activations(labels.shape[1])), (labels, token_spec), (weights, token_spec)
    return _run_with_table(layout, loss_on_device, PartitionSpec(), table, *operands)


def _global_loss(
    layout: Layout, layer: Any, table: Any, h: Array, labels: Array, weights: Array, rng: jax.Array | None
) -> LossOut:
    """`layer.loss` on global arrays, which the compiler places."""
    if is_zero2(table):
        spec = layout.state_spec(TABLE, table.full.shape, divided=False)
        table = lax.with_sharding_constraint(table.shard, NamedSharding(layout.mesh, spec))
    return layer.loss(table, _flatten(h), _flatten(labels), _flatten(weights), rng)


def _flatten(x: Array) -> Array:
    """[B, T, ...] -> [B T, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _run_with_table(layout: Layout, function: Callable[..., Any], out_spec: Any, table: Any, *operands: Any) -> Any:
    """Runs `function(table, *arrays)` on each device, on all features of the device's words. operands: (array, spec)."""
    table_spec, gather = layout.parameters(TABLE, table)

    def run_on_device(table: Any, *arrays: Array) -> Any:
        return function(gather(table), *arrays)

    arrays, specs = zip(*operands, strict=True)
    return jax.shard_map(run_on_device, mesh=layout.mesh, in_specs=(table_spec, *specs), out_specs=out_spec)(
        table, *arrays
    )


def _merged_nll(
    vocab_axes: tuple[str, ...], layer: Any, table: Array, h: Float[Array, "N D"], labels: Int[Array, " N"]
) -> Float[Array, " N"]:
    """-log p(label) of the device's tokens over the words of all devices; NaN for a label outside the vocabulary."""
    lse, logit = layer.partial(table, lax.axis_index(vocab_axes) * table.shape[0], h, labels)
    max_lse = lax.pmax(lax.stop_gradient(lse), vocab_axes)
    lse = jnp.log(lax.psum(jnp.exp(lse - max_lse), vocab_axes)) + max_lse
    vocab = lax.axis_size(vocab_axes) * table.shape[0]
    return jnp.where((labels >= 0) & (labels < vocab), lse - lax.psum(logit, vocab_axes), jnp.nan)
