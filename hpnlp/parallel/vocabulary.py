"""The loss of an output layer over a mesh: each device scores its own tokens against its own words.

Words divide over the mesh axes of "vocab", tokens over those of "batch". Left to the compiler, a loss that goes through chunks
of tokens gathers a divided table and its logits, and sums gradients over devices, once a chunk. Here the table's features
are gathered where ZeRO divides them, and nothing else of it. What travels otherwise: three numbers a token and one sum of the
gradient by h, where words are divided; and one sum of the table's gradient, where tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from hpnlp.ops.manual import vary_alike
from hpnlp.ops.softmax import without_silent
from hpnlp.parallel.plan import RULES, check
from hpnlp.types import LossOut


def loss(
    mesh: Mesh,
    layer: Any,
    table: Any,
    h: Float[Array, "N D"],
    labels: Int[Array, " N"],
    weights: Float[Array, " N"],
    rng: jax.Array | None = None,
) -> LossOut:
    """`layer.loss` of table [V, D], made on each device of its own part; as it is where the layer does not merge.

    layer: an output layer. `merges(rng)` says whether its loss with this rng is the weighted sum of lse - logit, merged over
      what `partial(rows, first word, h, labels)` gives of slices of the table: the lse of these words, and the label's logit,
      0 where the label is another. What it reads of the layer's own parameters, a number a word
      at most, all devices are given whole.
    Raises InputError where V, D or N does not divide over the mesh; for V and D, checking the plan has told before.
    Cost, with the gradients: on each device that of `layer.loss` of its tokens where it has all words, else that of
      `layer.partial`; and, until the sums are made, a float32 gradient of its words with all features.
    Numerics: a token's loss is lse - logit where words are divided, exact to some 1e-7 of the lse.
    """
    if not layer.merges(rng):
        return layer.loss(table, h, labels, weights, rng)
    tokens = _axes(mesh, "batch")

    def own(table: Array, h: Array, labels: Array, weights: Array) -> LossOut:
        if _axes(mesh, "vocab"):
            h, labels = without_silent(h, labels, weights)
            out = layer.weighted(_merged(mesh, layer, table, h, labels), labels, weights)
        else:
            out = layer.loss(table, h, labels, weights)
        return jax.tree.map(lambda x: lax.psum(x, tokens), out)

    return _on_each(mesh, own, PartitionSpec(), table, h, labels, weights)


def _axes(mesh: Mesh, name: str) -> tuple[str, ...]:
    """The mesh axes that a logical axis divides over."""
    return tuple(axis for axis in RULES[name] if mesh.shape[axis] > 1)


def _on_each(mesh: Mesh, own: Callable[..., Any], out: Any, table: Array, h: Array, *others: Array) -> Any:
    """`own` on each device, of the table's rows that are the device's, whole, and of its tokens."""
    (vocab, dim), tokens = table.shape, h.shape[0]
    check(mesh, {"vocab": (vocab, "words"), "embed": (dim, "features"), "batch": (tokens, "tokens")})
    features = _axes(mesh, "embed")

    def body(table: Array, h: Array, *others: Array) -> Any:
        # Before any loop: where an array begins to vary, its gradient is summed.
        table, h = vary_alike(table, h)
        whole = lax.all_gather(table, features, axis=1, tiled=True) if features else table
        return own(whole, h, *others)

    rows = PartitionSpec(_axes(mesh, "batch"))
    specs = PartitionSpec(_axes(mesh, "vocab"), features), rows, *[rows for _ in others]
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out)(table, h, *others)


def _merged(mesh: Mesh, layer: Any, table: Array, h: Array, labels: Array) -> Float[Array, " N"]:
    """-log p(label) of the device's tokens over all words; NaN where the label is none."""
    words = _axes(mesh, "vocab")
    lse, logit = layer.partial(table, lax.axis_index(words) * table.shape[0], h, labels)
    top = lax.pmax(lax.stop_gradient(lse), words)
    lse = jnp.log(lax.psum(jnp.exp(lse - top), words)) + top
    count = lax.axis_size(words) * table.shape[0]
    return jnp.where((labels >= 0) & (labels < count), lse - lax.psum(logit, words), jnp.nan)
