"""Dual encoder: two towers whose vectors of similar texts are similar, trained with negatives, labels or grades of pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.model_interfaces.ranges import LIMITS, classes_option
from hpnlp.models.backbone import BackboneConfig
from hpnlp.models.encoder import EncoderConfig
from hpnlp.models.pairs.grad_cache import Encoded
from hpnlp.models.pairs.pair_losses import cosine_losses, pair_features, softmax_losses
from hpnlp.models.pairs.temperature import inverse_temperature
from hpnlp.models.pairs.tower import INPUTS, Tower
from hpnlp.models.prediction import Batch, classification_metrics
from hpnlp.models.shared.body import BodyStart
from hpnlp.models.stacks.layer_statistics import OfSeveralStacks
from hpnlp.nn.layers import Dense, param
from hpnlp.nn.pooling import POOLINGS
from hpnlp.ops.helpers.counter_rng import mix
from hpnlp.types import InputError, LossOut, WordStats, check_options, option

LOSSES = ("contrastive", "triplet", "softmax", "cosine")
LOSSES_OF_NEGATIVES = ("contrastive", "triplet")  # the other losses are of single pairs, with a label or a grade
NEGATIVES = ("batch", "part")
MAX_NEGATIVE_TEXTS = 64
PAIR = "pair_"  # beginning of the names of the second texts' arrays
HASH_SEEDS = (0x243F6A88, 0x85A308D3)  # a text has two hashes
LOWEST_TEMPERATURE = 0.01  # a learned temperature does not fall below it (Radford et al. 2021, section 2.5)


@dataclasses.dataclass(frozen=True)
class DualEncoderConfig(BackboneConfig):
    """Two bidirectional towers of one form, each of which makes a vector of a text."""

    output: ClassVar[str] = ""  # no output layer over words
    tied: ClassVar[bool] = False
    body: ClassVar[str] = "towers"
    starts: ClassVar[Mapping[str, tuple[BodyStart, ...]]] = {"encoder": (BodyStart("tower"), BodyStart("pair_tower"))}
    # Training may go on from a run with another loss (`train.init_from`): its fields do not change the vectors, and its own
    # parameters begin anew.
    free_fields: ClassVar[tuple[str, ...]] = (
        "loss",
        "classes",
        "margin",
        "temperature",
        "negative_texts",
        "learn_temperature",
        "symmetric",
        "negatives",
    )
    loss_params: ClassVar[tuple[str, ...]] = ("classifier", "log_scale")

    layers: int = option(4, "Number of Blocks L; 0 leaves the embeddings as they are.", least=0, most=LIMITS["layers"])
    pooling: str = option(
        "mean", "An entry of POOLINGS: how the hidden states of a text become one vector.", among=POOLINGS
    )
    token_types: int = option(
        0,
        "Rows of the table of token types, of which every token has the first (BERT: 2, of which the second is never read); 0 "
        "for no table.",
    )
    shared: bool = option(True, "Both texts of a pair pass the same tower; otherwise each has a tower of its own.")
    loss: str = option(
        "contrastive",
        '"contrastive", the cross-entropy of the partner among the partners and hard negatives of the batch; "triplet", by '
        "how much the distance to the partner plus the margin exceeds that to each hard negative of the same text; "
        '"softmax", the cross-entropy of a label of the pair by a dense layer over both vectors and their absolute difference; '
        'or "cosine", the squared difference of the cosine of both vectors and a grade from 0 to 1.',
        among=LOSSES,
    )
    classes: int = classes_option("for the number of labels in the data, of the loss softmax")
    margin: float = option(
        1.0, "Margin of the triplet loss: Euclidean distances of the vectors are 0 to 2.", above=0, most=2
    )
    temperature: float = option(
        0.05,
        "Divisor of the cosine similarities; its initial value if it is learned.",
        least=LOWEST_TEMPERATURE,
        most=100,
    )
    negative_texts: int = option(
        0,
        "Hard negatives of each text, which only texts and not partners are compared with; 0 for the number in the data.",
        least=0,
        most=MAX_NEGATIVE_TEXTS,
    )
    learn_temperature: bool = option(False, "Train the temperature, which stays at 0.01 or above.")
    symmetric: bool = option(
        True,
        "The loss is the mean of both directions, text to partner and partner to text; otherwise of the first only.",
    )
    negatives: str = option(
        "batch",
        'Partners that a text is compared with: "batch", those of all texts of a step, also where optimizer.accumulate divides '
        'the batch, at the cost of one more forward pass; or "part", those of the same part, so that there are fewer.',
        among=NEGATIVES,
    )

    def __post_init__(self) -> None:
        check_options(self, "model")
        if self.loss != "contrastive" and self.learn_temperature:
            raise InputError(
                f"model.learn_temperature=True, and model.loss={self.loss!r} has no temperature: set one to its default"
            )
        if self.classes and self.loss != "softmax":
            raise InputError(f"model.classes={self.classes}, and model.loss={self.loss!r} has no labels: set it to 0")
        if self.negative_texts and self.loss not in LOSSES_OF_NEGATIVES:
            raise InputError(
                f"model.negative_texts={self.negative_texts}, and model.loss={self.loss!r} has no negatives: set it to 0"
            )
        self.tower()  # makes the checks of a Backbone, and those of a bidirectional one

    def tower(self) -> EncoderConfig:
        """Config of a tower.

        Returns:
          The config.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BackboneConfig)}
        return EncoderConfig(**fields, pooling=self.pooling, token_types=self.token_types)

    def stacks(self) -> dict[str, BackboneConfig]:
        """Configs of the towers, by the names of their modules.

        Returns:
          That of "tower", and of "pair_tower" if the towers are not shared.
        """
        return dict.fromkeys(["tower"] if self.shared else ["tower", "pair_tower"], self.tower())

    def text_prefixes(self) -> tuple[str, ...]:
        """Beginnings of the names of the arrays of each text of an example.

        Returns:
          Those of the first text, of its partner, and of its hard negatives.
        """
        return "", PAIR, *(f"negative_{i}_" for i in range(1, self.negative_texts + 1))

    @property
    def has_unit_vectors(self) -> bool:
        """Whether the loss reads vectors of length 1: that of labels reads the pooled states as they are."""
        return self.loss != "softmax"

    @property
    def is_single_stack(self) -> bool:
        """False: the layers are in the stacks of the towers, not under "layers"."""
        return False

    @property
    def compares_examples(self) -> bool:
        """Whether the loss compares the texts of all parts of a batch."""
        return self.negatives == "batch" and self.loss == "contrastive"

    def attention_width(self) -> int:
        """Width of the attention of all layers that an example passes: those of all of its texts."""
        return len(self.text_prefixes()) * super().attention_width()

    def non_embedding_parameters(self) -> int:
        """Number of weights in the matrices of the layers that an example passes: those of all of its texts."""
        return len(self.text_prefixes()) * super().non_embedding_parameters()


class DualEncoder(OfSeveralStacks, nn.Module):
    """Two towers, whose similarity is the cosine of their vectors.

    A batch is a mapping with tokens, segment_ids and positions of the first texts, pair_tokens, pair_segment_ids and
    pair_positions of their partners, int32 `[B, T]`, and weights, float32 `[B]`. Segment id 0 marks padding. A pair of weight
    0 is padding as well, and no negative. Names of the arrays of hard negatives begin with negative_1_, negative_2_, ...

    The loss is the cross-entropy of a text's partner among the partners and hard negatives of all texts of the batch, on
    whatever devices they are. If the loss is symmetric, a partner is compared with the first texts. The partner of another pair
    is no negative if the two texts, or the two partners, have the same tokens; a hard negative is none of texts whose partner
    has the same tokens. (Equal texts are recognised by 64-bit hashes of their tokens.) The triplet loss is the mean over the
    hard negatives of the same example.

    The softmax loss is the cross-entropy of "labels", int32 `[B]`, from a dense layer over [u; v; |u - v|], where u and v are
    the pooled hidden states before they are divided by their length, as in Sentence-BERT. The cosine loss is the squared
    difference of the cosine and "grades", float32 `[B]`. These two are of single pairs, whatever else is in the batch.

    The parameters are those of "tower", and of "pair_tower" if the towers are not shared; "log_scale", the logarithm of 1 /
    temperature, if that is learned; and "classifier", the dense layer of the softmax loss.

    Attributes:
      config: Sizes and parts of the model.
      stats: Not used; models of the other tasks have it.
      model_parallel: As for a Backbone.
      remat: As for a Backbone.

    References:
      Henderson et al. 2017, "Efficient natural language response suggestion for Smart Reply", section 4.
      Radford et al. 2021, "Learning transferable visual models from natural language supervision", for both directions.
      Reimers and Gurevych 2019, "Sentence-BERT: sentence embeddings using Siamese BERT-networks", section 3, for the losses of
        triplets, labels and grades.
    """

    prefixes: ClassVar[Mapping[str, str]] = {"tower": "", "pair_tower": PAIR}

    config: DualEncoderConfig
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(partner) over the candidates of a batch, or -log p(label)."""
        return self.config.loss in ("contrastive", "softmax")

    def setup(self) -> None:
        if self.config.loss == "triplet" and not self.config.negative_texts:
            raise InputError(
                "model.loss='triplet' needs hard negatives: set data.negative_fields, or without data model.negative_texts"
            )
        if self.config.loss == "softmax" and not self.config.classes:
            raise InputError(
                "model.loss='softmax' needs labels: set data.label_field, or without data model.classes to their number"
            )
        c, shared = self.config, {"model_parallel": self.model_parallel, "remat": self.remat}
        self.tower = Tower(c.tower(), **shared)
        if not c.shared:
            self.pair_tower = Tower(c.tower(), **shared)
        if c.learn_temperature:
            start = nn.initializers.constant(-math.log(c.temperature))
            self.log_scale = param(self, "log_scale", start, (1,), ("hidden",))
        if c.loss == "softmax":
            self.classifier = Dense(c.classes, ("embed", "classes"), use_bias=True)

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Pairs, with weights.
          deterministic: No dropout; otherwise the rng "dropout" is used.

        Returns:
          The loss summed over pairs, in nats if it is contrastive or softmax, with the statistics, auxiliary losses and metrics
          of the layers (the names of losses and metrics of a separate second tower begin with "pair_"), "accuracy" and
          "temperature" if it is learned. The accuracy is the share of texts whose partner is more similar than all negatives
          (texts without negatives do not count). That of the softmax loss is of the predicted labels, with their "confusion" in
          evaluations, and the cosine loss has none.
        """
        numbers = jnp.arange(len(batch["weights"]), dtype=jnp.int32)
        return self._compare(self.encode(batch, numbers, deterministic), batch, is_evaluation=deterministic)

    def encode(self, batch: Batch, numbers: Int[Array, " B"], deterministic: bool) -> Encoded:
        """Vectors of texts and of their partners, see `grad_cache.ComparingModel`."""
        options = {"deterministic": deterministic, "is_unit": self.config.has_unit_vectors}
        texts, candidates, reports = self._vectors(batch, self.config.text_prefixes(), numbers, **options)
        return Encoded((texts, candidates), *self.join_reports(reports))

    def _vectors(
        self, batch: Batch, prefixes: Sequence[str], numbers: jax.Array, *, deterministic: bool, is_unit: bool = True
    ) -> tuple[jax.Array, jax.Array, dict[str, LayerReport]]:
        """Vectors of the first texts `[B, D]` and of the others `[B, n, D]`, and the report of each tower."""
        options = {"deterministic": deterministic, "is_unit": is_unit}
        if self.config.shared:
            vectors, report = self._side(self.tower, batch, prefixes, numbers, **options)
            return vectors[:, 0], vectors[:, 1:], {"tower": report}
        texts, report = self._side(self.tower, batch, prefixes[:1], numbers, **options)
        others, pair_report = self._side(self.pair_tower, batch, prefixes[1:], numbers, **options)
        return texts[:, 0], others, {"tower": report, "pair_tower": pair_report}

    def _side(
        self,
        tower: Tower,
        batch: Batch,
        prefixes: Sequence[str],
        numbers: jax.Array,
        *,
        deterministic: bool,
        is_unit: bool,
    ) -> tuple[jax.Array, LayerReport]:
        """Vectors `[B, n, D]` of n texts of each example, by one tower."""
        count = len(prefixes)
        # Interleaved, so that every device keeps its examples.
        texts = {name: jnp.stack([batch[prefix + name] for prefix in prefixes], axis=1) for name in INPUTS}
        texts = {name: x.reshape(-1, x.shape[-1]) for name, x in texts.items()}
        text_numbers = count * numbers[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        encode = tower.vectors if is_unit else tower.pooled
        vectors, report = encode(texts, text_numbers.reshape(-1), deterministic)
        return vectors.reshape(-1, count, vectors.shape[-1]), report

    def compare(self, encoded: Encoded, batch: Batch) -> LossOut:
        """Loss of vectors of texts and partners, see `grad_cache.ComparingModel`."""
        return self._compare(encoded, batch, is_evaluation=False)

    def _compare(self, encoded: Encoded, batch: Batch, is_evaluation: bool) -> LossOut:
        if self.config.loss in LOSSES_OF_NEGATIVES:
            return self._negatives_loss(encoded, batch)
        return self._pairs_loss(encoded, batch, is_evaluation)

    def _negatives_loss(self, encoded: Encoded, batch: Batch) -> LossOut:
        """Loss of vectors by comparisons with negatives."""
        texts, candidates = encoded.vectors
        weights = batch["weights"].astype(jnp.float32)
        scale = self._scale()
        # The vectors of all devices are small beside the towers' activations. Scores [B, n, B] of text, candidate and example.
        scores = jnp.einsum("id,jkd->ikj", texts, candidates, precision=jax.lax.Precision.HIGHEST) * scale
        lowest, is_pair = np.float32(np.finfo(np.float32).min), weights != 0
        is_negative = is_pair[:, None, None] & is_pair[None, None, :] & ~self._positives(batch)
        positives, negatives = jnp.diagonal(scores[:, 0]), jnp.where(is_negative, scores, lowest)
        if self.config.loss == "triplet":
            losses = self._triplets(texts, candidates, jnp.diagonal(is_negative, axis1=0, axis2=2).T)
        else:
            losses = jnp.logaddexp(positives, jax.nn.logsumexp(negatives, axis=(1, 2))) - positives
            if self.config.symmetric:
                losses = (losses + jnp.logaddexp(positives, jax.nn.logsumexp(negatives[:, 0], axis=0)) - positives) / 2
        hits = positives > negatives.max(axis=(1, 2))  # a tie with a negative is no hit
        compared = jnp.where(is_negative.any(axis=(1, 2)), weights, 0.0)
        aux = {**encoded.aux, "accuracy": (jnp.where(hits, compared, 0.0).sum(), compared.sum())}
        if self.config.learn_temperature:
            aux["temperature"] = (1 / scale, jnp.float32(1))
        return LossOut(jnp.where(is_pair, losses * weights, 0.0).sum(), weights.sum(), aux, encoded.statistics)

    def _pairs_loss(self, encoded: Encoded, batch: Batch, is_evaluation: bool) -> LossOut:
        """Loss of vectors by the labels or grades of the pairs."""
        texts, candidates = encoded.vectors
        partners, weights, aux = candidates[:, 0], batch["weights"].astype(jnp.float32), dict(encoded.aux)
        if self.config.loss == "cosine":
            losses = cosine_losses(texts, partners, batch["grades"])
        else:
            logits = self.classifier(pair_features(texts, partners))
            losses = softmax_losses(logits, batch["labels"])
            aux |= classification_metrics(batch, logits.argmax(axis=-1), self.config.classes, is_evaluation)
        return LossOut(jnp.where(weights != 0, losses * weights, 0.0).sum(), weights.sum(), aux, encoded.statistics)

    def logits(self, batch: Batch) -> Float[Array, "B C"]:
        """Logits of the labels of pairs, of a model with the softmax loss.

        Args:
          batch: Pairs; labels and weights are not read.

        Returns:
          float32.
        """
        numbers = jnp.arange(len(batch["tokens"]), dtype=jnp.int32)
        texts, candidates = self.encode(batch, numbers, deterministic=True).vectors
        return self.classifier(pair_features(texts, candidates[:, 0]))

    def _triplets(self, texts: jax.Array, candidates: jax.Array, is_negative: jax.Array) -> jax.Array:
        """Triplet losses `[B]` of vectors `[B, D]` and `[B, n, D]`; is_negative: bool `[B, n]`."""
        squares = jnp.square(texts[:, None] - candidates).sum(axis=-1)
        # The root of 0 has no gradient.
        distances = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
        excess = jax.nn.relu(distances[:, :1] - distances + self.config.margin)
        counts = jnp.maximum(is_negative.sum(axis=1, dtype=jnp.float32), 1.0)
        return jnp.where(is_negative, excess, 0.0).sum(axis=1) / counts

    def embed(self, batch: Batch) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
        """Vectors of the texts of a batch.

        Args:
          batch: Pairs; weights are not read.

        Returns:
          `(vectors of the first texts, vectors of their partners)`, float32, of length 1.
        """
        numbers = jnp.arange(len(batch["tokens"]), dtype=jnp.int32)
        texts, others, _ = self._vectors(batch, ("", PAIR), numbers, deterministic=True)
        return texts, others[:, 0]

    def vectors(self, batch: Batch) -> Float[Array, "B D"]:
        """Vectors of the first texts of a batch, without the work for their partners.

        Args:
          batch: Tokens, segment_ids and positions.

        Returns:
          float32, of length 1.
        """
        numbers = jnp.arange(len(batch["tokens"]), dtype=jnp.int32)
        return self.tower.vectors(batch, numbers, deterministic=True)[0]

    def partner_vectors(self, batch: Batch) -> Float[Array, "B D"]:
        """Vectors of texts as partners of others, by the second tower if there are two.

        Args:
          batch: As for `vectors`.

        Returns:
          float32, of length 1.
        """
        numbers = jnp.arange(len(batch["tokens"]), dtype=jnp.int32)
        tower = self.tower if self.config.shared else self.pair_tower
        return tower.vectors(batch, numbers, deterministic=True)[0]

    def _positives(self, batch: Batch) -> Bool[Array, "B n B"]:
        """Whether a candidate, the partner or a hard negative of an example, belongs to a text: [text, candidate, example]."""
        hashes = [text_hashes(batch[f"{p}tokens"], batch[f"{p}segment_ids"]) for p in self.config.text_prefixes()]
        first, partner, candidates = hashes[0], hashes[1], jnp.stack(hashes[1:])
        is_own_text = (partner[:, None, None] == candidates[None]).all(axis=-1)
        is_own_pair = (first[:, None] == first[None]).all(axis=-1)
        return is_own_text | (is_own_pair[:, None] & (jnp.arange(len(candidates)) == 0)[None, :, None])

    def _scale(self) -> jax.Array:
        """1 / temperature, a float32 scalar."""
        if not self.config.learn_temperature:
            return jnp.float32(1 / self.config.temperature)
        return inverse_temperature(self.log_scale[0], LOWEST_TEMPERATURE)

    def rows(self, batch: Batch) -> dict[tuple[str, ...], Int[Array, " R"]]:
        """Rows of tables that `loss` of this batch looks up.

        Args:
          batch: As for `loss`.

        Returns:
          Path of a table among the parameters -> ids, with repetitions.
        """
        first, *others = (batch[f"{prefix}tokens"].reshape(-1) for prefix in self.config.text_prefixes())
        if self.config.shared:
            return {("tower", "embed", "table"): jnp.concatenate([first, *others])}
        return {("tower", "embed", "table"): first, ("pair_tower", "embed", "table"): jnp.concatenate(others)}

    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of pairs, B.
          length: Tokens per text, T.

        Returns:
          The batch, all of whose tokens have segment id 1, and whose weights are 1.
        """
        sizes = {"batch": batch_size, "length": length}
        shapes = {name: tuple(sizes[axis] for axis in axes) for name, axes in self.batch_axes().items()}
        batch = {
            name: jnp.zeros(shape, jnp.float32 if name in ("weights", "grades") else jnp.int32)
            for name, shape in shapes.items()
        }
        ones = {name: jnp.ones_like(x) for name, x in batch.items() if name.endswith(("segment_ids", "weights"))}
        return batch | ones

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: ("batch",) for weights, labels and grades, otherwise ("batch", "length")."""
        names = [prefix + name for prefix in self.config.text_prefixes() for name in INPUTS]
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(names, ("batch", "length"))
        answers = {"softmax": ("labels",), "cosine": ("grades",)}.get(self.config.loss, ())
        return axes | dict.fromkeys((*answers, "weights"), ("batch",))

    def __call__(self, batch: Batch) -> LossOut:
        return self.loss(batch)


def text_hashes(tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> UInt32[Array, "B 2"]:
    """Hashes of texts, which do not depend on padding.

    Args:
      tokens: Token ids.
      segment_ids: 0 for padding, which follows the text.

    Returns:
      Two hashes of the tokens and their order.
    """
    steps = jnp.arange(tokens.shape[1], dtype=jnp.uint32)[None] * np.uint32(0x9E3779B1)
    mixed = [mix(mix(tokens.astype(jnp.uint32) ^ np.uint32(seed)) + steps) for seed in HASH_SEEDS]
    return jnp.stack([jnp.where(segment_ids > 0, x, 0).sum(axis=1, dtype=jnp.uint32) for x in mixed], axis=1)
