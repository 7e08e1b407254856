"""REALM: an encoder that predicts hidden tokens with documents that it learns to retrieve."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.compatibility import Facts
from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.model_interfaces.ranges import LIMITS
from hpnlp.models.backbone import BackboneConfig
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.pairs.documents import Documents
from hpnlp.models.pairs.dual_encoder import LOWEST_TEMPERATURE
from hpnlp.models.pairs.marginal import check_marginal, log_marginal, text_weights
from hpnlp.models.pairs.temperature import inverse_temperature
from hpnlp.models.pairs.tower import INPUTS, Tower
from hpnlp.models.prediction import Batch, label_losses
from hpnlp.models.shared.body import BodyStart
from hpnlp.models.stacks.layer_statistics import OfSeveralStacks
from hpnlp.nn.layers import buffer, param
from hpnlp.nn.pooling import POOLINGS
from hpnlp.ops.search.exact import top_k
from hpnlp.types import InputError, LossOut, Statistics, WordStats, option

if TYPE_CHECKING:
    from hpnlp.parallel.layout import Layout

REFRESHES = ("rolling", "every", "never")
INDEX = "index"  # name of the statistics of the index, and of the buffer of its vectors
HIGHEST = jax.lax.Precision.HIGHEST
_TOWER_FIELDS = {"layers": "tower_layers"}


@dataclasses.dataclass(frozen=True)
class RealmConfig(BackboneConfig):
    """Towers that make vectors of texts and of documents, and a reader of a text with a document; all have the same Blocks."""

    data_buffers: ClassVar[tuple[str, ...]] = ("index", "age", "back", "position")
    starts: ClassVar[Mapping[str, tuple[BodyStart, ...]]] = {
        "encoder": (BodyStart("reader", output=True),),
        "towers": (
            BodyStart("tower", "tower", _TOWER_FIELDS, pooling=True),
            BodyStart("document_tower", "pair_tower", _TOWER_FIELDS, pooling=True),
        ),
    }
    # Fields that a run that starts from another one may change.
    free_fields: ClassVar[tuple[str, ...]] = ("candidates", "marginal", "refresh", "documents_per_step")

    tower_layers: int = option(
        -1,
        "Number of Blocks of the towers; 0 for pooled embeddings, -1 for `layers`, that of the reader.",
        least=-1,
        most=LIMITS["layers"],
    )
    pooling: str = option(
        "mean", "An entry of POOLINGS: how the hidden states of a text become one vector.", among=POOLINGS
    )
    shared: bool = option(True, "Texts and documents pass the same tower; otherwise each has a tower of its own.")
    temperature: float = option(
        0.05,
        "Divisor of the cosine similarities; its initial value if it is learned.",
        least=LOWEST_TEMPERATURE,
        most=100,
    )
    learn_temperature: bool = option(False, "Train the temperature, which stays at 0.01 or above.")
    candidates: int = option(
        7,
        "Documents that are retrieved for a text and read with it, beside the empty document, whose similarity to all texts is "
        "trained, 0 at first. 0 reads texts with the empty document alone, for comparisons; towers are not trained.",
        least=0,
    )
    marginal: str = option(
        "token",
        '"token", a document for each hidden token; or "sequence", one document for all hidden tokens of a text.',
    )
    refresh: str = option(
        "rolling",
        '"rolling" encodes some documents again in each step, and searches among them once all are done; "every" encodes all '
        'documents in each step; "never" searches among vectors of the first step.',
        among=REFRESHES,
    )
    documents_per_step: int = option(
        256,
        "Documents that are encoded at a time: in each step with refresh=rolling, so that the index is at most twice as many "
        "steps old as the documents have such parts.",
        least=1,
    )
    tied: bool = option(False, "The reader's output layer shares its embedding table.")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            check_marginal(self.marginal)
        except InputError as error:
            raise InputError(f"model.{error}") from None
        if not all(traits.any_length for traits in self.traits):
            raise InputError(
                f"model.mixer={self.mixer!r} mixes sequences of one length, and texts, documents and pairs of both have "
                "several: choose a mixer of any length"
            )
        self.stacks()  # makes the checks of encoders

    def tower(self) -> EncoderConfig:
        """Config of a tower.

        Returns:
          The config.
        """
        fields = self._backbone()
        if self.tower_layers != -1:
            fields["layers"] = self.tower_layers
        return EncoderConfig(**fields, pooling=self.pooling)

    def reader(self) -> EncoderConfig:
        """Config of the reader.

        Returns:
          The config, with a token type for the text and one for the document.
        """
        return EncoderConfig(**self._backbone(), token_types=2, tied=self.tied)

    def _backbone(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(BackboneConfig)}

    def stacks(self) -> dict[str, BackboneConfig]:
        """Configs of the towers and the reader, by the names of their modules.

        Returns:
          Those of "tower", of "document_tower" if the towers are not shared, and of "reader".
        """
        towers = ["tower"] if self.shared else ["tower", "document_tower"]
        return {**dict.fromkeys(towers, self.tower()), "reader": self.reader()}

    @property
    def is_single_stack(self) -> bool:
        """False: towers and reader have a stack of layers each."""
        return False

    def check_layout(self, layout: Layout) -> None:
        """Refuses layouts that divide sequences or layers: texts are joined with documents that a step retrieves.

        Args:
          layout: The plan on its devices.

        Raises:
          InputError: The layout divides them.
        """
        super().check_layout(layout)
        if self.documents_per_step % (size := layout.size("batch")):
            raise InputError(
                f"model.documents_per_step={self.documents_per_step} does not divide over {size} devices (plan.data x "
                f"plan.fsdp): make it a multiple of {size}"
            )

    def facts(self) -> Facts:
        """Facts on the layers, for `compatibility`."""
        reason = "texts are joined with the documents that a step retrieves, and are not divided"
        return dataclasses.replace(super().facts(), undivided={"length": (reason, ""), "layers": (reason, "")})

    @property
    def retrieved(self) -> int:
        """Number of documents that are retrieved for a text: the candidates, or one that is counted if there are none."""
        return max(1, self.candidates)

    def attention_width(self) -> int:
        """Width of the attention of all layers that a text and its candidates pass."""
        passes = 1 + self.candidates
        return passes * (self.reader().attention_width() + self.tower().attention_width())

    def non_embedding_parameters(self) -> int:
        """Number of weights in the matrices of the layers that a text and its candidates pass."""
        passes = 1 + self.candidates
        return passes * (self.reader().non_embedding_parameters() + self.tower().non_embedding_parameters())


class Realm(OfSeveralStacks, nn.Module):
    """A reader of texts with retrieved documents; log p(y | x) is summed over the documents.

    A batch has tokens, segment_ids and positions of the texts, int32 `[B, T]`; targets, the places of M hidden tokens in each
    text, their labels, int32, and weights, float32, `[B, M]`; and, int32 `[B]`, source, the document that a text was taken
    from, which is not retrieved for it, and gold, the document that a text should retrieve, which "retrieval_at_1" counts; -1
    for none.

    Each text is read with the empty document, and with the `candidates` documents whose vectors in the index are the most
    similar to that of the text. The index decides about the candidates only: scores are those of the towers as they are, cosine
    similarities divided by the temperature. The similarity of the empty document to all texts is a parameter, 0 at first. The
    index is encoded in the first step. It lies in the buffers "index" `[N, D]` and "age", the number of steps since its oldest
    vector was encoded, -1 for an index that is not encoded yet; with refresh=rolling also "back" `[N, D]`, the next index, of
    which "position" documents are encoded. With refresh=every there are no buffers.

    Attributes:
      config: Sizes and parts of the model.
      documents: The documents.
      stats: Not used; models of the other tasks have it.
      model_parallel: As for a Backbone.
      remat: As for a Backbone.

    References:
      Guu et al. 2020, "REALM: retrieval-augmented language model pre-training".
    """

    prefixes: ClassVar[Mapping[str, str]] = {"tower": "tower_", "document_tower": "document_", "reader": ""}

    config: RealmConfig
    documents: Documents
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """The loss is -log p(label)."""
        return True

    def setup(self) -> None:
        c, shared = self.config, {"model_parallel": self.model_parallel, "remat": self.remat}
        self.tower = Tower(c.tower(), **shared)
        if not c.shared:
            self.document_tower = Tower(c.tower(), **shared)
        self.reader = Encoder(c.reader(), **shared)
        if c.learn_temperature:
            start = nn.initializers.constant(-math.log(c.temperature))
            self.log_scale = param(self, "log_scale", start, (1,), ("hidden",))
        shape, zeros = (len(self.documents), c.dim), nn.initializers.zeros
        self.empty_similarity = param(self, "empty_similarity", zeros, (1,), ("hidden",))
        if c.refresh != "every":
            self.index = buffer(self, INDEX, zeros, shape, (None, None))
            self.age = buffer(self, "age", nn.initializers.constant(-1.0), (1,), (None,))
        if c.refresh == "rolling":
            self.back = buffer(self, "back", zeros, shape, (None, None))
            self.position = buffer(self, "position", zeros, (1,), (None,))

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Texts with hidden tokens.
          deterministic: No dropout; otherwise the rng "dropout" is used.

        Returns:
          -log p(y | x) in nats, summed over hidden tokens, or over texts with marginal=sequence; with the statistics,
          auxiliary losses and metrics of the layers (those of the towers begin with "tower_" and "document_"), "utility", the
          mean over hidden tokens of log p(y | x) - log p(y | x, the empty document), "staleness", the age of the index in
          steps, "retrieval_at_1", the share of the texts with a gold document that retrieve it first, and "temperature" if
          it is learned.
        """
        c, weights = self.config, batch["weights"].astype(jnp.float32)
        queries, query_report = _vectors(self.tower, batch, deterministic)
        vectors, age, statistics = self._index()
        ids = self._search(jax.lax.stop_gradient(queries), vectors, batch["source"])
        documents = self._texts(ids.reshape(-1))
        candidates, candidate_report = _vectors(self._document_tower(), documents, deterministic)
        candidates = candidates.reshape(*ids.shape, -1)
        similarities = jnp.einsum("bd,bkd->bk", queries, candidates, precision=HIGHEST)
        empty = jnp.broadcast_to(self.empty_similarity, (len(ids), 1))  # the empty document comes first
        scores = jnp.concatenate([empty, similarities[:, : c.candidates]], axis=1) * self._scale()
        log_probs, reader_report = self._read(batch, ids[:, : c.candidates], deterministic)
        values, value_weights = log_marginal(scores, log_probs, weights, c.marginal)
        reports = {"tower": query_report, "reader": reader_report}
        if c.shared:
            reports["tower"] = jax.tree.map(jnp.add, query_report, candidate_report)
        else:
            reports["document_tower"] = candidate_report
        aux, layer_statistics = self.join_reports(reports)
        metrics = self._metrics(batch, ids, (values * value_weights).sum(), log_probs[:, 0]) | {
            "staleness": (age, jnp.ones(()))
        }
        total = -(values * value_weights).sum()
        return LossOut(total, value_weights.sum(), {**aux, **metrics}, {**layer_statistics, **statistics})

    def _metrics(
        self, batch: Batch, ids: Int[Array, "B k"], marginal: jax.Array, null: Float[Array, "B M"]
    ) -> dict[str, Any]:
        """Metrics of retrieval; `null` are the log-probabilities with the empty document."""
        weights = batch["weights"].astype(jnp.float32)
        utility = marginal - jnp.where(weights != 0, weights * null, 0.0).sum()
        has_gold = jnp.where(batch["gold"] >= 0, text_weights(weights), 0.0)
        metrics: dict[str, Any] = {
            "utility": (utility, weights.sum()),
            "retrieval_at_1": (jnp.where(ids[:, 0] == batch["gold"], has_gold, 0.0).sum(), has_gold.sum()),
        }
        if self.config.learn_temperature:
            metrics["temperature"] = (1 / self._scale(), jnp.ones(()))
        return metrics

    def retrieve(self, batch: Batch) -> Int[Array, "B k"]:
        """Documents that texts are read with.

        Args:
          batch: Texts; of the hidden tokens and the gold documents nothing is read.

        Returns:
          Numbers of the documents, the most similar first.
        """
        queries, _ = _vectors(self.tower, batch, True)
        return self._search(queries, self._index()[0], batch["source"])

    def _search(self, queries: jax.Array, vectors: jax.Array, sources: Int[Array, " B"]) -> Int[Array, "B k"]:
        """The documents with the most similar vectors, without the source of the text; the lower of equal ones first."""
        scores, k = jnp.einsum("bd,nd->bn", queries, vectors, precision=HIGHEST), self.config.retrieved
        # Within the step, XLA:CPU compiles lax.top_k of all scores to a sort, which takes 10 times as long as their product.
        ids = top_k(scores, min(k + 1, len(self.documents)))[1]
        # Columns from the source on move up by one.
        is_after = jnp.cumsum((ids == sources[:, None]).astype(jnp.int32), axis=1)[:, :k]
        return jnp.take_along_axis(ids, jnp.arange(k, dtype=jnp.int32)[None] + is_after, axis=1)

    def _read(
        self, batch: Batch, ids: Int[Array, "B k"], deterministic: bool
    ) -> tuple[Float[Array, "B K M"], LayerReport]:
        """Computes log p(y | x, z) of the hidden tokens for the empty document and the candidates."""
        count, length = batch["tokens"].shape
        read_with = 1 + ids.shape[1]
        documents = {name: x.reshape(*ids.shape, x.shape[-1]) for name, x in self._texts(ids.reshape(-1)).items()}
        empty = {"tokens": 0, "segment_ids": 0, "positions": 0}
        documents = {
            name: jnp.pad(x, ((0, 0), (1, 0), (0, 0)), constant_values=empty[name]) for name, x in documents.items()
        }
        documents["positions"] = jnp.broadcast_to(
            length + jnp.arange(documents["tokens"].shape[2]), documents["tokens"].shape
        )
        pairs = {
            name: jnp.concatenate([jnp.repeat(batch[name][:, None], read_with, axis=1), documents[name]], axis=2)
            for name in INPUTS
        }
        pairs = {name: x.reshape(count * read_with, -1).astype(jnp.int32) for name, x in pairs.items()}
        types = (jnp.arange(pairs["tokens"].shape[1]) >= length).astype(jnp.int32)
        pairs["token_types"] = jnp.broadcast_to(types, pairs["tokens"].shape)
        h, _, _, report = self.reader.states(pairs, deterministic)
        targets, labels = (jnp.repeat(batch[name], read_with, axis=0) for name in ("targets", "labels"))
        h = jnp.take_along_axis(h, targets[:, :, None], axis=1)
        losses = label_losses(self.reader.output, self.reader.table, h, labels)
        return -losses.reshape(count, read_with, -1), report

    def _texts(self, ids: Int[Array, " n"]) -> dict[str, jax.Array]:
        """Documents as inputs of a tower."""
        tokens, lengths = jnp.asarray(self.documents.tokens)[ids], jnp.asarray(self.documents.lengths)[ids]
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return {"tokens": tokens, "segment_ids": (places < lengths[:, None]).astype(jnp.int32), "positions": places}

    def _index(self) -> tuple[Float[Array, "N D"], jax.Array, dict[str, Any]]:
        """`(vectors of the documents for the search, their age in steps, statistics for `advance`)`."""
        c, count = self.config, len(self.documents)
        if self.is_initializing():  # the tower has no parameters yet
            return jnp.zeros((count, c.dim)), jnp.zeros(()), {}
        encode, part = self._encoder(), c.documents_per_step

        def encode_from(start: jax.Array) -> jax.Array:
            return encode(jnp.minimum(start + jnp.arange(part, dtype=jnp.int32), count - 1))

        def encode_all() -> jax.Array:
            starts = jnp.arange(0, count, part, dtype=jnp.int32)
            return jax.lax.map(encode_from, starts).reshape(-1, c.dim)[:count]

        if c.refresh == "every":
            return encode_all(), jnp.zeros(()), {}
        vectors = jax.lax.cond(self.age[0] < 0, encode_all, lambda: self.index)
        statistics = {"vectors": vectors, "count": jnp.ones(())}
        if c.refresh == "rolling":
            statistics["refreshed"] = encode_from(self._start(self.position))[:count]
        return vectors, jnp.maximum(self.age[0], 0.0), {INDEX: statistics}

    @nn.nowrap
    def _start(self, position: jax.Array) -> jax.Array:
        """Number of the first document to encode in a step; the last part of the documents overlaps with the one before."""
        return jnp.minimum(position[0].astype(jnp.int32), max(0, len(self.documents) - self.config.documents_per_step))

    def _encoder(self) -> Callable[[jax.Array], jax.Array]:
        """Function from numbers of documents to their vectors, without gradient; of arrays only, for `lax.cond`."""
        bound = self._document_tower()
        variables = jax.lax.stop_gradient(bound.variables)
        tower = bound.clone(parent=None)

        def encode(ids: jax.Array) -> Any:
            numbers = jnp.arange(len(ids), dtype=jnp.int32)
            return tower.apply(variables, self._texts(ids), numbers, True, method="vectors")[0]

        return encode

    def _document_tower(self) -> Tower:
        return self.tower if self.config.shared else self.document_tower

    def _scale(self) -> jax.Array:
        """1 / temperature, a float32 scalar."""
        if not self.config.learn_temperature:
            return jnp.float32(1 / self.config.temperature)
        return inverse_temperature(self.log_scale[0], LOWEST_TEMPERATURE)

    @nn.nowrap
    def advance(self, buffers: Mapping[str, Array], statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """Buffers for the next step: those of the layers, and the index.

        Args:
          buffers: The model's buffers.
          statistics: Those of `loss`, summed over the whole batch.
          step: Number of steps done, int32.
          rng: Key.

        Returns:
          A tree like `buffers`.
        """
        new = super().advance(buffers, statistics, step, rng)
        return new if INDEX not in statistics else new | self._advance_index(buffers, statistics[INDEX])

    def _advance_index(self, buffers: Mapping[str, Array], sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The next index; the next one but one receives the vectors of the step, and replaces it when it is complete."""
        age, count = buffers["age"], len(self.documents)
        # Each part of an accumulated batch has encoded the same documents.
        vectors = jnp.where(age[0] < 0, sums["vectors"] / sums["count"], buffers[INDEX])
        new = {INDEX: vectors, "age": jnp.maximum(age, 0.0) + 1}
        if self.config.refresh == "never":
            return new
        part, start = min(self.config.documents_per_step, count), self._start(buffers["position"])
        back = jax.lax.dynamic_update_slice(buffers["back"], sums["refreshed"] / sums["count"], (start, jnp.int32(0)))
        is_full = start == count - part
        return {
            INDEX: jnp.where(is_full, back, new[INDEX]),
            "age": jnp.where(is_full, jnp.float32(math.ceil(count / part)), new["age"]),
            "back": back,
            "position": jnp.where(is_full, 0.0, buffers["position"] + part),
        }

    def rows(self, batch: Batch) -> dict[tuple[str, ...], jax.Array]:
        """Raises InputError: the documents that a batch reads are not known before the search."""
        raise InputError(
            "optimizer.rows=True trains only the rows that a batch looks up, and those of retrieved documents are not known "
            "before the step: set optimizer.rows=False"
        )

    @nn.nowrap
    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch with the shapes and dtypes of a batch of data, with one hidden token in each text.

        Args:
          batch_size: Number of texts, B.
          length: Tokens per text, T.

        Returns:
          The batch, all of whose tokens have segment id 1, and whose weights are 1.
        """
        if self.config.position == "learned":  # positions reach over a text and a document
            length = min(length, self.config.max_len - self.documents.tokens.shape[1])
        zeros, none = jnp.zeros((batch_size, length), jnp.int32), jnp.full((batch_size,), -1, jnp.int32)
        hidden = zeros[:, :1]
        return {
            "tokens": zeros,
            "segment_ids": jnp.ones_like(zeros),
            "positions": zeros,
            "targets": hidden,
            "labels": hidden,
            "weights": jnp.ones(hidden.shape, jnp.float32),
            "source": none,
            "gold": none,
        }

    @nn.nowrap
    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: ("batch", "length") for those of all tokens, otherwise ("batch",)."""
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(INPUTS, ("batch", "length"))
        return axes | dict.fromkeys(("targets", "labels", "weights", "source", "gold"), ("batch",))

    def __call__(self, batch: Batch) -> LossOut:
        return self.loss(batch)


def _vectors(tower: Tower, batch: Batch, deterministic: bool) -> tuple[Float[Array, "B D"], LayerReport]:
    """Vectors of the texts of a batch."""
    texts = {name: batch[name] for name in INPUTS}
    return tower.vectors(texts, jnp.arange(len(batch["tokens"]), dtype=jnp.int32), deterministic)
