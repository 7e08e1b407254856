"""Labelled bags: vectors of texts and of labels, of which each is similar to the others of its bag (StarSpace)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.model_interfaces.ranges import LIMITS, classes_option, rate_option
from hpnlp.models.classifiers.bag_memory import BagMemory, parse_memory
from hpnlp.models.prediction import Batch, classification_metrics
from hpnlp.models.stacks.unstacked import Unstacked, UnstackedModel
from hpnlp.nn.layers import Embed, buffer, dropout, embed_init, param
from hpnlp.ops.embeddings import concat_nearest, frequency_factors, pool_segments, scale_gradient, unit_norm
from hpnlp.ops.embeddings.bags import MODES
from hpnlp.ops.softmax.margin import hardest, margin_loss
from hpnlp.types import InputError, LossOut, Statistics, WordStats, check_options, option

MEMORY = "memory"  # name of the statistics of the memory, and of its entries


@dataclasses.dataclass(frozen=True)
class LabelledBagsConfig(Unstacked):
    """Vectors of words and labels; a text is the bag of its words."""

    description: ClassVar[str] = "a model of labelled bags"
    no_stages: ClassVar[str] = "which has no layers"
    undivided: ClassVar[str] = "whose texts are not divided"

    dim: int = option(128, "Features of the vectors, D.", least=1, most=LIMITS["dim"])
    mode: str = option(
        "mean", 'The vector of a text: "mean", "sum" or "sqrt" of the vectors of its tokens.', among=MODES
    )
    similarity: str = option("cosine", '"cosine", or "dot" for inner products of the vectors.', among=("cosine", "dot"))
    loss: str = option(
        "margin",
        '"margin", by which the similarity to the left-out text or label exceeds those to negatives; or "softmax" over them.',
        among=("margin", "softmax"),
    )
    margin: float = option(0.2, "Margin of the loss.", least=0, below=100)
    hard_negatives: int = option(10, "Most similar negatives in the margin loss.", least=1, most=2**16)
    temperature: float = option(0.1, "Divisor of the similarities in the softmax.", least=0.001, most=100)
    frequency_power: float = option(
        0.0,
        "Gradients of a word's vector are scaled by (number of occurrences)^-power: 0 for no scaling, 1 for the inverse "
        "frequency. Needs optimizer.name=sgd, as Adam divides the factor out, and a tokenizer of words.",
        least=0,
        most=1,
    )
    memory: str = option(
        "",
        "An entry of MEMORIES, whose nearest entries follow the vector of a bag where it is compared with the labels: "
        '"bags(4096)", the vectors of training bags as of the latest steps that read them, or "table(256)", a trained table; '
        'bags(4096,k=4,temperature=0.1) for the mean of 4 entries, weighted by exp(cosine / temperature). "" for none.',
    )
    vocab: int = option(0, "Number of ids of tokens; 0 for the tokenizer's.", least=0, most=LIMITS["vocab"])
    classes: int = classes_option()
    max_texts: int = option(0, "Largest number of texts of a bag; 0 for data.max_texts.", least=0, most=2**10)
    dropout: float = rate_option("Share of features of the tokens' vectors that are dropped in training.")
    dtype: str = option("float32", 'Dtype of the vectors: "float32".')

    def __post_init__(self) -> None:
        check_options(self, "model")
        if self.dtype != "float32":
            raise InputError(f"model.dtype={self.dtype!r}: vectors of bags are small, and float32 only: leave it out")
        parse_memory(self.memory)

    @property
    def layers(self) -> int:
        """Number of layers: none, vectors are sums of those of words."""
        return 0

    def check_accumulation(self, accumulate: int) -> None:
        """Refuses parts of a batch, in which a text would have fewer negatives."""
        if accumulate > 1:
            raise InputError(
                f"optimizer.accumulate={accumulate} computes the loss of one part of the batch at a time, and a text is "
                "compared with those of the whole batch: set optimizer.accumulate=1"
            )

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU: three times those of the similarities.

        Args:
          batch_size: Bags of a batch.
          length: Tokens of a bag.

        Returns:
          The number of FLOPs.
        """
        texts, memory = batch_size * self.max_texts, parse_memory(self.memory)
        compared = self.classes if memory is None else 2 * self.classes + memory.entries
        return 6.0 * self.dim * (texts * texts + batch_size * compared)


class LabelledBagsModel(UnstackedModel, nn.Module):
    """Vectors of words and labels, by which the texts and the label of a bag are similar to each other.

    A batch is that of `data.examples.kinds.bags.LabelledBags`. A text is a bag of words. Each text, and the label, is left out
    in turn, and compared with the sum of the vectors of all others of its bag: it should be more similar than the texts of bags
    with another label in the batch, or than the other labels. All sums are the total less the vector that is left out, so that
    a vector is computed once. The parameters are the tables "embed" of the words and "labels".

    With a memory, the sum h of the texts of a bag is followed by its nearest entries, h || nn(mem, h), and compared with labels
    of twice as many features, of which the first half belongs to the sums of bags without a text. The entries are the buffer
    "memory" [N, D], in which the sum of each bag of a training step is written, and in which a training bag never finds its own
    entry; or the parameter "memory".

    Attributes:
      config: Sizes and parts of the model.
      stats: Counts of the words, for `frequency_power`.
      model_parallel: As for a TreeClassifier; not used: the compiler divides the batch.
      remat: Not used.

    References:
      Wu et al. 2018, "StarSpace: embed all the things!", with "trainMode 1", which draws the text or label to leave out;
      Kaiser et al. 2017, "Learning to remember rare events", for memories that any layer may read by nearest neighbours.
    """

    config: LabelledBagsConfig
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p of the left-out text or label."""
        return self.config.loss == "softmax"

    def setup(self) -> None:
        c = self.config
        self.embed = Embed(c.vocab, c.dim)
        self.memory = parse_memory(c.memory)
        width = c.dim if self.memory is None else 2 * c.dim
        self.labels = param(self, "labels", embed_init, (c.classes, width), ("labels", "embed"))
        if self.memory is not None and self.memory.is_written:
            self.entries = buffer(self, MEMORY, nn.initializers.zeros, (self.memory.entries, c.dim), (None, None))
        elif self.memory is not None:
            self.entries = param(self, MEMORY, embed_init, (self.memory.entries, c.dim), ("entries", "embed"))

    def _length_1(self, x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """The vectors divided by their norms, for cosines."""
        return unit_norm(x) if self.config.similarity == "cosine" else x

    def vectors(
        self, batch: Batch, deterministic: bool = True
    ) -> tuple[Float[Array, "B M D"], Bool[Array, "B M"], Float[Array, "B D"]]:
        """Vectors of the texts and of the label of each bag.

        Args:
          batch: Bags.
          deterministic: No dropout; otherwise the rng "dropout" is used.

        Returns:
          `(texts, which of them exist, labels)`; of length 1 if similarities are cosines.
        """
        c, tokens, segments = self.config, batch["tokens"], batch["segment_ids"]
        bags, texts = len(tokens), c.max_texts
        x = self.embed(tokens)
        if c.frequency_power and self.stats is not None:
            factors = jnp.asarray(frequency_factors(self.stats.counts, c.frequency_power))
            x = scale_gradient(x, factors[tokens])
        ids = jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
        x = dropout(x, c.dropout, None if deterministic or not c.dropout else self.make_rng("dropout"), ids)
        is_token = (segments > 0) & (segments <= texts)
        number = jnp.where(is_token, jnp.arange(bags, dtype=jnp.int32)[:, None] * texts + segments - 1, -1).reshape(-1)
        pooled = pool_segments(x.reshape(-1, c.dim), number, bags * texts, mode=c.mode)
        counts = jax.ops.segment_sum(
            is_token.reshape(-1).astype(jnp.int32), jnp.where(number < 0, bags * texts, number), bags * texts + 1
        )
        exists = counts[:-1].reshape(bags, texts) > 0
        label_vectors = self._length_1(self.labels[batch["labels"]][:, : c.dim])
        return self._length_1(pooled).reshape(bags, texts, -1), exists, label_vectors

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Bags, labels and weights.
          deterministic: No dropout; otherwise the rng "dropout" is used.

        Returns:
          The loss summed over texts and labels, with "accuracy", of the label that is most similar to the texts of a bag,
          "confusion" in evaluations (`prediction.classification_metrics`), and "text_recall_at_1", the share of texts that are
          more similar to the others of their bag than every text of another label in the batch.
        """
        texts, exists, label_vectors = self.vectors(batch, deterministic)
        weights, labels = batch["weights"].astype(jnp.float32), batch["labels"]
        exists = exists & (weights != 0)[:, None]
        contexts, sums = self._contexts(texts, label_vectors)
        shape, flat = exists.shape, exists.reshape(-1)
        of_text = jnp.repeat(labels, shape[1])
        scores = _product(contexts.reshape(-1, texts.shape[-1]), texts.reshape(-1, texts.shape[-1]))
        target = jnp.diagonal(scores)
        text_losses, best = self._losses(target, scores, jnp.where(flat, of_text, -1), of_text)
        text_weights = jnp.where(exists, weights[:, None], 0.0).reshape(-1)
        label_scores = self._label_scores(sums, batch)
        target_label = jnp.take_along_axis(label_scores, labels[:, None], axis=1)[:, 0]
        classes = jnp.arange(self.config.classes, dtype=labels.dtype)
        label_losses, _ = self._losses(target_label, label_scores, classes, labels)
        total = jnp.where(flat, text_losses * text_weights, 0.0).sum() + (label_losses * weights).sum()
        has_negative = ~jnp.isneginf(best) & flat
        compared = jnp.where(has_negative, text_weights, 0.0)
        metrics = classification_metrics(
            batch, label_scores.argmax(axis=1).astype(labels.dtype), self.config.classes, deterministic
        )
        hits = jnp.where(target > best, compared, 0.0).sum()
        memory = None if deterministic else self.memory
        written = {} if memory is None else memory.written(sums, batch["bag"], weights != 0)
        statistics: Statistics = {MEMORY: written} if written else {}
        metrics["text_recall_at_1"] = hits, compared.sum()
        return LossOut(total, text_weights.sum() + weights.sum(), metrics, statistics)

    def _label_scores(self, sums: Float[Array, "B D"], batch: Batch) -> Float[Array, "B C"]:
        """Similarities of the sums of bags, with what they find in the memory, to all labels."""
        if self.memory is None:
            return _product(sums, self._length_1(self.labels))
        memory = self.memory
        is_hidden = memory.own_entries(batch["bag"])
        h = concat_nearest(sums, self.entries, memory.k, temperature=memory.temperature, is_hidden=is_hidden)
        return _product(self._length_1(h), self._length_1(self.labels))

    @nn.nowrap
    def advance(self, buffers: PyTree, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """Buffers for the next step: the memory with the bags of this one, of which several with one entry have their mean.

        Args:
          buffers: The model's buffers.
          statistics: Those of `loss`, summed over the whole batch.
          step: Not read.
          rng: Not read.

        Returns:
          A tree like `buffers`.
        """
        if MEMORY not in statistics:
            return buffers
        return {**buffers, MEMORY: BagMemory.advanced(buffers[MEMORY], statistics[MEMORY])}

    def _contexts(self, texts: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sums of the vectors of a bag without each text `[B, M, D]`, and without the label `[B, D]`."""
        sums = texts.sum(axis=1)
        return self._length_1((sums + labels)[:, None] - texts), self._length_1(sums)

    def _losses(
        self, target: jax.Array, scores: jax.Array, ids: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Losses of each row, and the score of its most similar negative: a candidate whose id is another label, and not -1."""
        c = self.config
        negatives, _ = hardest(scores, ids, labels, min(c.hard_negatives, scores.shape[1]))
        if c.loss == "margin":
            return margin_loss(target, negatives, margin=c.margin), negatives[:, 0]
        is_negative = (ids[None] != labels[:, None]) & (ids >= 0)[None]
        others = jnp.where(is_negative, scores / c.temperature, np.float32(np.finfo(np.float32).min))
        total = jnp.logaddexp(jax.nn.logsumexp(others, axis=1), target / c.temperature)
        return total - target / c.temperature, negatives[:, 0]

    def embed_bags(self, batch: Batch) -> tuple[Float[Array, "B M D"], Float[Array, "B M D"], Bool[Array, "B M"]]:
        """Vectors of texts, and of what is left of their bags without them.

        Args:
          batch: Bags, labels and weights.

        Returns:
          `(texts, contexts, which of them exist)`.
        """
        texts, exists, label_vectors = self.vectors(batch)
        return texts, self._contexts(texts, label_vectors)[0], exists & (batch["weights"] != 0)[:, None]

    def logits(self, batch: Batch) -> Float[Array, "B C"]:
        """Similarities of the labels to the texts of each bag, divided by the temperature.

        Args:
          batch: Bags.

        Returns:
          Float32 logits of each bag.
        """
        texts, _, label_vectors = self.vectors(batch)
        return self._label_scores(self._contexts(texts, label_vectors)[1], batch) / self.config.temperature

    @nn.nowrap
    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of bags, B.
          length: Tokens of a bag, T.

        Returns:
          Bags whose tokens are divided evenly among their texts.
        """
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32)[None], (batch_size, 1))
        return {
            "tokens": jnp.zeros_like(positions),
            "segment_ids": jnp.minimum(positions % max(self.config.max_texts, 1) + 1, length),
            "positions": positions,
            "labels": jnp.arange(batch_size, dtype=jnp.int32) % max(self.config.classes, 1),
            "bag": jnp.arange(batch_size, dtype=jnp.int32),
            "weights": jnp.ones((batch_size,), jnp.float32),
        }

    @nn.nowrap
    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: ("batch", "length") for those of tokens, otherwise ("batch",)."""
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(("tokens", "segment_ids", "positions"), ("batch", "length"))
        return axes | dict.fromkeys(("labels", "bag", "weights"), ("batch",))

    def __call__(self, batch: Batch) -> LossOut:
        return self.loss(batch)


def _product(x: jax.Array, y: jax.Array) -> Float[Array, "N C"]:
    """Inner products of all rows, in float32."""
    return jnp.einsum("id,jd->ij", x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
