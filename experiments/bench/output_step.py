"""A training step of an output layer by itself, with Adam for its parameters and the gradient of the hidden states."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpnlp import measure
from hpnlp.nn.output import OUTPUTS
from hpnlp.spec import build, parse_one
from hpnlp.training.optimizers import sparse_rows
from hpnlp.types import WordStats


def output_arrays(tokens: int, vocab: int, dim: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """h [N, D] and w [V, D], whose scores are of order 1, and labels [N] by Zipf's law."""
    rng = np.random.default_rng(0)
    h, w = (rng.standard_normal((rows, dim), np.float32) / dim**0.25 for rows in (tokens, vocab))
    labels = np.minimum(rng.zipf(1.2, tokens), vocab) - 1
    return jnp.asarray(h, dtype), jnp.asarray(w, dtype), jnp.asarray(labels, jnp.int32)


class OutputStep:
    """A step of an output layer as a call without arguments, which returns the gradient of h.

    Attributes:
      program: The compiled step.
    """

    def __init__(
        self, spec: str, tokens: int, vocab: int, dim: int, *, dtype: Any = jnp.float32, rows: bool = False
    ) -> None:
        """Compiles the step.

        Args:
          spec: Entry of OUTPUTS.
          tokens: N.
          vocab: V.
          dim: D.
          dtype: Dtype of h; parameters are float32.
          rows: Update only the rows of the table that the step looks up, as with `optimizer.rows=True`.
        """
        h, table, labels = output_arrays(tokens, vocab, dim)
        h = h.astype(dtype)
        stats = WordStats((1e8 / (np.arange(vocab) + 2.7)).astype(np.int64))
        layer = build(parse_one(spec, "output layer"), OUTPUTS, "output layer", vocab=vocab, dim=dim, stats=stats)
        weights, key = jnp.ones(tokens), jax.random.key(0)
        initial_table = None if not layer.rows_are else table
        init = functools.partial(layer.init, method="loss")
        params = jax.jit(init)(key, initial_table, h, labels, weights)
        params = {"layer": jax.tree.map(jnp.asarray, jax.tree.leaves(params)), "table": initial_table}
        tree = jax.tree.structure(jax.eval_shape(init, key, initial_table, h, labels, weights))
        adam = optax.adam(1e-3)
        shapes = {("table",): table.shape}

        def step(params_and_state: Any, h: jax.Array, labels: jax.Array, key: jax.Array) -> Any:
            def loss(params: Any, h: jax.Array) -> jax.Array:
                params = sparse_rows.as_tables(params, ids)
                layer_params = jax.tree.unflatten(tree, params["layer"])
                return layer.apply(layer_params, params["table"], h, labels, weights, key, method="loss").sum / tokens

            row_ids = layer.apply(jax.tree.unflatten(tree, params_and_state[0]["layer"]), labels, key, method="rows")
            ids = {} if row_ids is None or not rows else {("table",): sparse_rows.distinct(row_ids, vocab)}
            params, state = sparse_rows.gather(params_and_state, ids, shapes)
            grads, dh = jax.grad(loss, (0, 1))(params, h)
            updates, state = adam.update(grads, state)
            updated = optax.apply_updates(params, updates), state
            return sparse_rows.scatter(params_and_state, updated, ids, shapes), dh

        self._state, self._batch = (params, jax.jit(adam.init)(params)), (h, labels, key)
        self.program = measure.compile(step, self._state, *self._batch, jit_options={"donate_argnums": 0})

    def __call__(self) -> jax.Array:
        self._state, dh = self.program(self._state, *self._batch)
        return dh
