"""Models that predict words or classes from hidden states: a Backbone and an output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.cost.parts import part
from hpnlp.models.backbone import Backbone
from hpnlp.nn.attention import Context, Memory
from hpnlp.nn.layers import embed_init, param
from hpnlp.nn.output import OUTPUTS, is_normalized
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, LossOut

if TYPE_CHECKING:
    from hpnlp.model_interfaces.layer_report import LayerReport
    from hpnlp.nn.output.base import OutputLayer

Batch = Mapping[str, jax.Array]
MAX_CONFUSED = 1000  # largest number of classes for which a confusion matrix is reported


def classification_metrics(
    batch: Batch, best: Int[Array, "B *T"], classes: int, is_evaluation: bool
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Metrics of predicted labels.

    Args:
      batch: Labels and weights, `[B]` or `[B, T]`.
      best: Predicted label of each of them.
      classes: Number of classes; 0 for words.
      is_evaluation: Whether to count the confusion of up to MAX_CONFUSED classes.

    Returns:
      "accuracy" as (sum, weight); and in evaluations "confusion", the weights `[C, C]` by label and predicted class.
    """
    weights = batch["weights"].astype(jnp.float32)
    metrics = {"accuracy": (jnp.where(best == batch["labels"], weights, 0.0).sum(), weights.sum())}
    if is_evaluation and 0 < classes <= MAX_CONFUSED:
        confusion = jnp.zeros((classes, classes), jnp.float32)
        metrics["confusion"] = (confusion.at[batch["labels"], best].add(weights), weights.sum())
    return metrics


class PredictionModel(Backbone):
    """A Backbone and an output layer over the words of the vocabulary, or over classes.

    Its config has the fields `output` and `tied`, the method `outputs`, and the attribute `mask`. The parameters of the head
    lie beside those of the Backbone: "head", the output layer's table, or the columns of it, that are not those of the
    embedding, and "output", its own.
    """

    has_taps: ClassVar[bool] = True

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(label) of a distribution over the words or classes."""
        return is_normalized(self.config.output)

    def setup(self) -> None:
        super().setup()
        c = self.config
        count, axis = c.outputs()
        stats = self.stats if axis == "vocab" else None
        extra = {"vocab": count, "dim": c.dim, "stats": stats, "axis": axis}
        self.output = build(parse_one(c.output, "model.output"), OUTPUTS, "output layer", **extra)
        if c.tied and self.output.rows_are != "words":
            raise InputError(
                f"model.output={c.output!r} has no table of words by id that the embedding could share: set model.tied=False"
            )
        if not self.output.rows_are:
            self.table = None
        elif c.tied:
            self.table = self.embed.table
            if (missing := c.dim - c.embedding_size) > 0:
                new_columns = param(self, "head", embed_init, (count, missing), (axis, "embed"))
                self.table = jax.tree.map(lambda *columns: jnp.concatenate(columns, axis=1), self.table, new_columns)
        else:
            self.table = param(self, "head", embed_init, (count, c.dim), (axis, "embed"))

    def states(
        self, batch: Batch, deterministic: bool, taps: tuple[str, ...] = ()
    ) -> tuple[jax.Array, Batch, np.ndarray | None, Any]:
        """Hidden states of a batch.

        Args:
          batch: Tokens, segment_ids and positions, int32 `[B, T]`, and other arrays `[B, T]` or `[B]`.
          deterministic: No dropout; otherwise the rng "dropout" is used.
          taps: As for `tapped`.

        Returns:
          `(h [B, T, D], batch, indices, report)`. The batch has an array more, `ids`, a number for each token. On a ring of
          devices, h and the arrays `[B, T]` are in the token order `indices`; otherwise `indices` is None. `report` is the
          `LayerReport`.
        """
        order = indices = None
        ids = jnp.arange(batch["tokens"].size, dtype=jnp.int32).reshape(batch["tokens"].shape)
        batch = {**batch, "ids": ids}
        if self.model_parallel is not None:
            order, indices = self.model_parallel.token_order(batch["tokens"].shape[1])
            if indices is not None:
                batch = {name: x[:, indices] if x.ndim > 1 else x for name, x in batch.items()}
        ids = None if deterministic else batch["ids"]
        context = Context(
            batch["positions"],
            batch["segment_ids"],
            self.config.mask,
            deterministic,
            ids=ids,
            order=order,
            memory=self.batch_memory(batch),
            taps=tuple(name for name in taps if name in ("embedding", "hidden", "attention", "routing")),
        )
        h, _, report = self.hidden(batch["tokens"], context, added=self.added_embeddings(batch))
        return h, batch, indices, report

    def added_embeddings(self, batch: Batch) -> jax.Array | None:
        """Embeddings that a model adds to those of tokens and positions.

        Args:
          batch: As for `states`, in the order of the tokens on devices.

        Returns:
          `[B, T, D]`, or None.
        """
        return None

    def batch_memory(self, batch: Batch) -> Memory | None:
        """The memory that layers attend to.

        Args:
          batch: As for `states`.

        Returns:
          The memory, or None for a model without one.
        """
        return None

    @part("output")
    def output_loss(self, h: jax.Array, batch: Batch, indices: np.ndarray | None, rng: Array | None) -> LossOut:
        """The output layer's loss.

        Args:
          h: Hidden states `[B, T, D]`, or `[B, D]` for one of each sequence.
          batch: Labels and weights, `[B, T]` or `[B]`.
          indices: Order of the tokens, as `states` returns it; None for `[B, D]`.
          rng: Key for samples, or None.

        Returns:
          The loss summed over the batch.
        """
        operands = h, batch["labels"], batch["weights"]
        if self.model_parallel is None:
            h, labels, weights = h.reshape(-1, h.shape[-1]), *(x.reshape(-1) for x in operands[1:])
            return self.output.loss(self.table, h, labels, weights, rng)
        if indices is not None and not self.output.merges(rng):
            # Such a layer may draw samples per token, by the token's index: tokens return to their original order.
            operands = tuple(x[:, np.argsort(indices)] for x in operands)
        return self.model_parallel.loss(self.output, self.table, *operands, rng)

    def tapped(self, taps: tuple[str, ...], h: jax.Array, head: jax.Array, report: LayerReport) -> dict[str, Any]:
        """Logits and states of a batch, which a distillation compares.

        Args:
          taps: Names of "logits" (of every token or sequence, float32 `[B, T, C]` or `[B, C]`), "last" (hidden states after
            the final norm), "embedding" (the input of the first layer), "hidden" (the output of every layer), "attention"
            (queries and keys of every layer) and "routing" (gates of the experts of every layer that has experts).
          h: Hidden states `[B, T, D]`.
          head: Hidden states that the output layer reads, `[B, T, D]` or `[B, D]`.
          report: Report of the layers.

        Returns:
          Name -> array. Those of layers are under "layers", by the name of their stack, stacked in the order of the layers:
          "hidden" `[n, B, T, D]`, "queries" `[n, B, T, N, H]`, "keys" `[n, B, T, K, H]` and "gates" `[n, B, T, E]`.
        """
        result = dict(report.taps)
        if "last" in taps:
            result["last"] = h
        if "logits" in taps and self.model_parallel is not None:
            result["logits"] = self.model_parallel.logits(self.output, self.table, head)
        elif "logits" in taps:
            flat = self.output.logits(self.table, head.reshape(-1, head.shape[-1]))
            result["logits"] = flat.reshape(*head.shape[:-1], -1)
        return result

    @part("output")
    def best(self, h: jax.Array) -> Int[Array, "B *T"]:
        """The most probable word or class of each hidden state.

        Args:
          h: Hidden states `[B, T, D]` or `[B, D]`.

        Returns:
          Ids.
        """
        if self.model_parallel is not None:
            return self.model_parallel.best(self.output, self.table, h)
        return self.output.best(self.table, h.reshape(-1, h.shape[-1]))[1].reshape(h.shape[:-1])

    def rows(self, batch: Batch) -> dict[tuple[str, ...], Int[Array, " R"]]:
        """Rows of tables that `loss` of this batch looks up with the same rngs.

        Args:
          batch: As for `loss`.

        Returns:
          Path of a table among the parameters -> ids, with repetitions. `TableRows` of them may replace the table. Tables
          that are used in full are left out.

        Raises:
          InputError: The embedding and the output layer share their table.
        """
        return looked_up_rows(self.config.tied, self.output, batch, self.make_rng)


def label_losses(
    output: OutputLayer, table: PyTree, h: Float[Array, "B T D"], labels: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """-log p(label) of each token, in nats, on one device.

    Args:
      output: An output layer.
      table: Its table, or None.
      h: Hidden states.
      labels: Ids of words.

    Returns:
      Float32.
    """
    return output.nll(table, h.reshape(-1, h.shape[-1]), labels.reshape(-1)).reshape(labels.shape)


def looked_up_rows(
    tied: bool, output: OutputLayer, batch: Batch, make_rng: Callable[[str], jax.Array]
) -> dict[tuple[str, ...], Int[Array, " R"]]:
    """Rows of the embedding "embed" and of the output layer's table "head" that the loss of a batch looks up.

    Args:
      tied: Whether both are one table.
      output: The output layer.
      batch: Tokens, labels and weights.
      make_rng: Gives the key of the output layer's samples, for the name "output".

    Returns:
      Path of a table among the parameters -> ids, with repetitions.

    Raises:
      InputError: Both are one table.
    """
    if tied:
        raise InputError(
            "optimizer.rows=True trains only the rows that a batch looks up, but the output layer uses all rows of a tied "
            "table: set model.tied=False"
        )
    rows = {("embed", "table"): batch["tokens"].reshape(-1)}
    labels = jnp.where(batch["weights"] != 0, batch["labels"], 0).reshape(-1)
    head_rows = output.rows(labels, make_rng("output"))
    return rows if head_rows is None else {**rows, ("head",): head_rows}
