"""Word vectors: skip-gram and CBOW over a stream of words, with any output layer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp import compatibility
from hpnlp.cost.parts import part
from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.model_interfaces.ranges import LIMITS
from hpnlp.models.backbone import DTYPES
from hpnlp.models.lm import example_batch
from hpnlp.models.prediction import Batch
from hpnlp.models.stacks.unstacked import Unstacked, UnstackedModel
from hpnlp.nn.layers import Embed, embed_init, param
from hpnlp.nn.output import OUTPUTS, is_normalized
from hpnlp.ops.embeddings import unit_norm
from hpnlp.ops.embeddings.word2vec import OBJECTIVES, SUBSAMPLING, keep_probabilities
from hpnlp.spec import build, lookup, parse_one
from hpnlp.types import InputError, LossOut, WordStats, check_options, option


@dataclasses.dataclass(frozen=True)
class WordVectorsConfig(Unstacked):
    """Word vectors by skip-gram or CBOW."""

    description: ClassVar[str] = "word vectors"
    no_stages: ClassVar[str] = "which have no layers"
    undivided: ClassVar[str] = "whose windows are not divided"
    not_recomputed: ClassVar[str] = "word vectors have no layers to recompute"
    divisible: ClassVar[str] = "the batch (plan.data, plan.fsdp) or the vocabulary (plan.tensor)"
    # Fields that act in training only: a run may start from a run with other values.
    free_fields: ClassVar[tuple[str, ...]] = ("objective", "window", "dynamic", "subsample", "subsample_form")

    objective: str = option(
        "skip_gram",
        '"skip_gram": a word predicts each word of its context. "cbow": the mean of the context predicts the word.',
        among=OBJECTIVES,
    )
    dim: int = option(128, "Features of a word vector, D.", least=1, most=LIMITS["dim"])
    window: int = option(5, "Largest distance W of a context word.", least=1, most=64)
    dynamic: bool = option(True, "Each word draws the width of its window from 1 to `window`.")
    subsample: float = option(
        1e-3,
        "Threshold of the subsampling of frequent words; 0 keeps all. Needs data.tokenizer=words(...).",
        least=0,
    )
    subsample_form: str = option(
        "c",
        '"c" keeps words with sqrt(t/f) + t/f, as the C program; "paper" with sqrt(t/f).',
        among=SUBSAMPLING,
    )
    vocab: int = option(0, "Rows V of the embedding table, 0 for the tokenizer's.", least=0, most=LIMITS["vocab"])
    dtype: str = option("float32", "Dtype of the vectors in products; parameters stay float32.")
    output: str = option(
        "negative_sampling(64, sampler=unigram, negatives=5)",
        "Output layer, an entry of OUTPUTS: negative_sampling, hierarchical (a Huffman tree), binary (codes) and others.",
    )

    def __post_init__(self) -> None:
        check_options(self, "model")
        lookup(DTYPES, self.dtype, "model.dtype")

    @property
    def layers(self) -> int:
        """The model has no layers; its tables are updated as one."""
        return 1

    @property
    def decodes(self) -> bool:
        """The model cannot continue prompts."""
        return False

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Sizes of the logical axes that a mesh may divide: the words."""
        return {"vocab": (self.vocab, "model.vocab")}

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU: none, as the products are those of the output layer."""
        return 0.0


class WordVectors(UnstackedModel, nn.Module):
    """Embeddings of words that predict the words around them.

    A batch is as for `models.lm.LM`; labels are not read, since the labels are the tokens of the windows. A window ends with
    its document. In training, subsampling removes words before windows are made, so that windows reach more distant words; in
    evaluations, where nothing is drawn, a pair counts with the probability that training would use it.

    Parameters are "embed" (the word vectors), "head" (the output layer's table) and "output".

    Attributes:
      config: Sizes and objective.
      stats: Word statistics of the text, for subsampling and for output layers that need them.
      model_parallel: Lookup and loss over several devices; None for one device.
      remat: "none" only.

    References:
      Mikolov et al. 2013, "Efficient estimation of word representations in vector space"; Mikolov et al. 2013, "Distributed
      representations of words and phrases and their compositionality".
    """

    config: WordVectorsConfig
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(label) of a distribution over the words."""
        return is_normalized(self.config.output)

    def setup(self) -> None:
        c = self.config
        compatibility.check(dataclasses.replace(c.facts(), remat=self.remat))
        self.embed = Embed(c.vocab, c.dim)
        extra = {"vocab": c.vocab, "dim": c.dim, "stats": self.stats, "axis": "vocab"}
        self.output = build(parse_one(c.output, "model.output"), OUTPUTS, "output layer", **extra)
        self.table = None
        if self.output.rows_are:
            self.table = param(self, "head", embed_init, (c.vocab, c.dim), ("vocab", "embed"))
        if c.subsample and self.stats is None:
            raise InputError(
                f"model.subsample={c.subsample} needs the words' counts, which data.tokenizer=words(...) keeps: choose that, "
                "or model.subsample=0"
            )
        threshold = c.subsample if self.stats is not None else 0.0
        counts = np.zeros(c.vocab) if self.stats is None else self.stats.counts
        self.keep = keep_probabilities(counts, threshold, c.subsample_form)

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Tokens and segment_ids.
          deterministic: No subsampling, and full windows; otherwise the rngs "dropout" and "output" are used.

        Returns:
          The loss summed over predictions, in nats. In evaluations with "pair_accuracy": the share of adjacent words whose
          vectors have a larger cosine than that of the first word and another word from elsewhere in the batch; pairs for
          which that word is the same, or padding, do not count.
        """
        c = self.config
        tokens, segments, keep = batch["tokens"], batch["segment_ids"], None
        if deterministic:
            keep = jnp.asarray(self.keep)[tokens]
        else:
            tokens, segments = self._subsampled(tokens, segments)
        weights = self._pairs(segments, keep, deterministic)
        vectors = self._vectors(tokens)
        around = _windows(tokens, c.window)
        if c.objective == "skip_gram":
            h = jnp.repeat(vectors, 2 * c.window, axis=1)
            labels, weights = (x.reshape(x.shape[0], -1) for x in (around, weights))
        else:
            total = weights.sum(axis=2)
            mean = (weights / jnp.maximum(total, 1e-9)[..., None])[..., None]
            h = (mean * _windows(vectors, c.window).astype(jnp.float32)).sum(axis=2)
            labels, weights = tokens, self._weights_of_centres(total, keep)
        rng = None if deterministic else self.make_rng("output")
        with part("output"):
            if self.model_parallel is None:
                out = self.output.loss(self.table, h.reshape(-1, c.dim), labels.reshape(-1), weights.reshape(-1), rng)
            else:
                out = self.model_parallel.loss(self.output, self.table, h, labels, weights, rng)
        if not deterministic:
            return out
        return LossOut(
            out.sum, out.weight, {**out.aux, "pair_accuracy": self._pair_accuracy(tokens, vectors, segments, keep)}
        )

    def _vectors(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        dtype = DTYPES[self.config.dtype]
        if self.model_parallel is None:
            return self.embed(tokens, dtype)
        return self.model_parallel.embedding_lookup(self.embed.table, tokens, dtype)

    def _subsampled(self, tokens: Array, segments: Array) -> tuple[Array, Array]:
        """The words that subsampling keeps, moved to the front of each sequence; segment 0 marks the rest."""
        if not self.config.subsample:
            return tokens, segments
        draws = jax.random.uniform(self.make_rng("dropout"), tokens.shape)
        kept = (draws < jnp.asarray(self.keep)[tokens]) & (segments > 0)
        order = jnp.argsort(~kept, axis=1, stable=True)
        tokens, segments = (jnp.take_along_axis(x, order, axis=1) for x in (tokens, jnp.where(kept, segments, 0)))
        return tokens, segments

    def _pairs(self, segments: Array, keep: Array | None, deterministic: bool) -> Float[Array, "B T W"]:
        """Weights of the pairs of a word and each word of its window of 2 W words."""
        c = self.config
        distance = np.abs(_offsets(c.window))
        pairs = (_windows(segments, c.window) == segments[..., None]) & (segments[..., None] > 0)
        weights = pairs.astype(jnp.float32)
        if deterministic:
            share = (c.window - distance + 1) / c.window if c.dynamic else np.ones(len(distance))
            assert keep is not None
            return weights * share.astype(np.float32)[None, None] * keep[..., None] * _windows(keep, c.window)
        if not c.dynamic:
            return weights
        widths = jax.random.randint(jax.random.fold_in(self.make_rng("dropout"), 1), segments.shape, 1, c.window + 1)
        return jnp.where(distance[None, None] <= widths[..., None], weights, 0.0)

    def _weights_of_centres(self, total: Array, keep: Array | None) -> Float[Array, "B T"]:
        """Weights of the words that CBOW predicts."""
        is_predicted = (total > 0).astype(jnp.float32)
        return is_predicted if keep is None else is_predicted * keep

    def _pair_accuracy(self, tokens: Array, vectors: Array, segments: Array, keep: Array | None) -> tuple[Array, Array]:
        """`(number, weight)` of pairs of adjacent words that are more similar than the word and one half a batch later."""
        assert keep is not None
        length = segments.shape[1]

        def elsewhere(x: Array) -> Array:
            # The shift by half a row gives another word even in a batch of one row.
            distance = len(tokens) // 2 * length + length // 2
            return jnp.roll(x.reshape(-1, *x.shape[2:]), distance, axis=0).reshape(x.shape)

        unit = unit_norm(vectors.astype(jnp.float32))
        following, next_tokens, next_segments = (jnp.roll(x, -1, axis=1) for x in (unit, tokens, segments))
        other = elsewhere(following)
        is_pair = (segments == next_segments) & (segments > 0) & (np.arange(length) < length - 1)[None]
        is_pair &= (elsewhere(next_tokens) != next_tokens) & (elsewhere(next_segments) > 0)
        weights = jnp.where(is_pair, keep * jnp.roll(keep, -1, axis=1), 0.0)
        right = (unit * following).sum(axis=-1) > (unit * other).sum(axis=-1)
        return jnp.where(right, weights, 0.0).sum(), weights.sum()

    def rows(self, batch: Batch) -> dict[tuple[str, ...], Int[Array, " R"]]:
        """Rows of tables that `loss` of this batch looks up with the same rngs: all words of the batch, and samples."""
        tokens = batch["tokens"].reshape(-1)
        per_word = 2 * self.config.window if self.config.objective == "skip_gram" else 1
        # As many labels as the loss has, since the number may decide which samples are drawn; all of them words of the batch.
        labels = jnp.tile(tokens, per_word)
        rows = {("embed", "table"): tokens}
        head_rows = self.output.rows(labels, self.make_rng("output"))
        # Row 0 stands for predictions of weight 0.
        return rows if head_rows is None else {**rows, ("head",): jnp.concatenate([head_rows, jnp.zeros(1, jnp.int32)])}

    @nn.nowrap
    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros; see `models.lm.example_batch`."""
        return example_batch(batch_size, length)

    @nn.nowrap
    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: all of them are `[B, T]`."""
        return dict.fromkeys(example_batch(1, 1), ("batch", "length"))

    def __call__(self, batch: Batch) -> LossOut:
        return self.loss(batch)


def _offsets(window: int) -> np.ndarray:
    """Distances of the words of a window, -W to W without 0."""
    return np.array([*range(-window, 0), *range(1, window + 1)])


def _windows(x: Array, window: int) -> Array:
    """`[B, T, 2 W, ...]`: the elements around each one of `[B, T, ...]`; 0 beyond the ends."""
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (window, window), *((0, 0),) * (x.ndim - 2)))
    return jnp.stack([padded[:, window + d : window + d + length] for d in _offsets(window).tolist()], axis=2)
