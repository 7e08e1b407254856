"""The two ends of a language model over a mesh: each device looks up, and scores, its own tokens against its own words.

Words divide over the mesh axes of "vocab", tokens over those of "batch" and "length". Left to the compiler, a loss that goes
through chunks of tokens gathers a divided table and its logits, and sums gradients over devices, once a chunk. Here the
table's features are gathered where ZeRO divides them, and nothing else of it. What travels otherwise: where words are divided,
the sum of what was looked up, three numbers a token and one sum of the gradient by h; and one sum of the table's gradient,
where tokens are.
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
from hpnlp.ops.softmax import without_silent
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.varying import sum_over_devices
from hpnlp.types import LossOut, TableRows, Zero2Parameter

TABLE = ("vocab", "embed")


def lookup(layout: Layout, table: Any, ids: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """`table[ids]` in dtype, laid out as Blocks take it.

    table: [V, D], held as the layout holds tables, or `TableRows`. Raises InputError where tokens do not divide over the mesh.
    """
    layout.check_tokens(ids.shape)
    out = layout.activations(ids.shape[1])
    if isinstance(table, TableRows):
        return lax.with_sharding_constraint(table[ids].astype(dtype), NamedSharding(layout.mesh, out))
    tensor_parallel, words = layout.tensor_parallel(ids.shape[1]), layout.rules["vocab"]

    def body(table: Array, ids: Array) -> Array:
        if not words:
            return tensor_parallel.reduce_output(table[ids].astype(dtype), "vocab")
        at = ids - lax.axis_index(words) * table.shape[0]
        mine = (at >= 0) & (at < table.shape[0])
        found = jnp.where(mine[..., None], table.at[at].get(mode="clip"), 0.0)
        return tensor_parallel.reduce_output(found.astype(dtype), "vocab")

    return _with_table(layout, body, out, table, (ids, layout.spec("batch", "length")))


def loss(
    layout: Layout,
    layer: Any,
    table: Any,
    h: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    rng: jax.Array | None = None,
) -> LossOut:
    """`layer.loss` of table [V, D], made on each device of its own part; as it is where the layer does not merge.

    layer: an output layer. `merges(rng)` says whether its loss with this rng is the weighted sum of lse - logit, merged over
      what `partial(rows, first word, h, labels)` gives of slices of the table: the lse of these words, and the label's logit,
      0 where the label is another. What it reads of the layer's own parameters, a number a word
      at most, all devices are given whole.
    table: held as the layout holds tables. h: laid out as Blocks give it.
    Raises InputError where tokens do not divide over the mesh.
    Cost, with the gradients: on each device that of `layer.loss` of its tokens where it has all words, else that of
      `layer.partial`; and, until the sums are made, a float32 gradient of its words with all features.
    Numerics: a token's loss is lse - logit where words are divided, exact to some 1e-7 of the lse.
    """
    layout.check_tokens(labels.shape)
    if not layer.merges(rng):
        flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        if isinstance(table, Zero2Parameter):
            spec = layout.state_spec(TABLE, table.full.shape, divided=False)
            table = lax.with_sharding_constraint(table.shard, NamedSharding(layout.mesh, spec))
        return layer.loss(table, flat(h), flat(labels), flat(weights), rng)
    tensor_parallel, words = layout.tensor_parallel(labels.shape[1]), layout.rules["vocab"]

    def body(table: Array, h: Array, labels: Array, weights: Array) -> LossOut:
        # Before any loop and what makes h larger: where an array begins to vary, its gradient is summed.
        table, h = vary_alike(table, h)
        if words:
            h = tensor_parallel.gather_tokens(h)
        else:  # every device has all words: its own tokens are enough
            labels, weights = (tensor_parallel.local_tokens(x, 1) for x in (labels, weights))
        h = h.reshape(-1, h.shape[-1])
        labels, weights = labels.reshape(-1), weights.reshape(-1)
        if words:
            h, labels = without_silent(h, labels, weights)
            out = layer.weighted(_merged(words, layer, table, h, labels), labels, weights)
        else:
            out = layer.loss(table, h, labels, weights)
        sums, aux = (
            sum_over_devices(out.sum, out.weight),
            {name: sum_over_devices(*pair) for name, pair in out.aux.items()},
        )
        return LossOut(*sums, aux)

    of_tokens = layout.spec("batch", "length")
    spread = (h, layout.activations(labels.shape[1])), (labels, of_tokens), (weights, of_tokens)
    return _with_table(layout, body, PartitionSpec(), table, *spread)


def _with_table(layout: Layout, body: Callable[..., Any], out: Any, table: Any, *spread: Any) -> Any:
    """`body` on each device, of the words that are the device's, and of its parts of arrays: (array, spec)."""
    given, take = layout.parameters(TABLE, table)

    def each(table: Any, *parts: Array) -> Any:
        return body(take(table), *parts)

    arrays, specs = zip(*spread, strict=True)
    return jax.shard_map(each, mesh=layout.mesh, in_specs=(given, *specs), out_specs=out)(table, *arrays)


def _merged(
    words: tuple[str, ...], layer: Any, table: Array, h: Float[Array, "N D"], labels: Int[Array, " N"]
) -> Float[Array, " N"]:
    """-log p(label) of the device's tokens over all words; NaN where the label is none."""
    lse, logit = layer.partial(table, lax.axis_index(words) * table.shape[0], h, labels)
    top = lax.pmax(lax.stop_gradient(lse), words)
    lse = jnp.log(lax.psum(jnp.exp(lse - top), words)) + top
    count = lax.axis_size(words) * table.shape[0]
    return jnp.where((labels >= 0) & (labels < count), lse - lax.psum(logit, words), jnp.nan)
