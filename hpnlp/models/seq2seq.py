"""Sequence to sequence: an encoder of the source, and a decoder of the target that attends to the encoder's hidden states."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.models.backbone import Backbone, BackboneConfig
from hpnlp.models.encoder import EncoderConfig
from hpnlp.models.lm import LMConfig
from hpnlp.models.prediction import Batch
from hpnlp.models.shared.body import BodyStart
from hpnlp.models.shared.decoder import Decoder, DecoderConfig
from hpnlp.models.stacks.layer_statistics import OfSeveralStacks
from hpnlp.models.variables import join, split
from hpnlp.nn.attention import Context, Memory
from hpnlp.nn.layers import Embed
from hpnlp.nn.output import is_normalized
from hpnlp.types import InputError, LossOut, WordStats, check_options, option

# Fields of the encoder's and the decoder's own configs -> the fields of Seq2SeqModelConfig that set them.
ENCODER_FIELDS = {"layers": "encoder_layers", "mixer": "encoder_mixer", "form": "encoder_form"}
DECODER_FIELDS = {"max_len": "target_len"}


@dataclasses.dataclass(frozen=True)
class Seq2SeqModelConfig(LMConfig):
    """An encoder and a decoder with cross-attention, of one vocabulary and one model size.

    `layers`, `mixer` and `form` are those of the decoder, `encoder_layers`, `encoder_mixer` and `encoder_form` those of the
    encoder. The other fields of a Backbone hold for both.
    """

    # With a shared embedding, the decoder reads and predicts with that of the source too, as in Rothe et al. 2020.
    starts: ClassVar[Mapping[str, tuple[BodyStart, ...]]] = {
        "encoder": (BodyStart("encoder", fields=ENCODER_FIELDS, embed="embed"),),
        "towers": (BodyStart("encoder", "tower", ENCODER_FIELDS, embed="embed"),),
    }

    encoder_layers: int = option(0, "Number of Blocks of the encoder; 0 for as many as model.layers.")
    encoder_mixer: str = option("full", "Mixers of the encoder's layers, as model.mixer; all must be bidirectional.")
    encoder_form: str = option("block", "Forms that the encoder's layers take in turn, as model.form.")
    share_embeddings: bool = option(True, "The encoder and the decoder share the embedding table.")
    max_len: int = option(0, "Longest source that learned positions reach, 0 for data.seq_len.")
    target_len: int = option(0, "Longest target that learned positions reach, 0 for data.target_len.")
    memory_dim: int = option(0, "Features of the encoder's hidden states, which the decoder attends to: 0 for dim.")

    def __post_init__(self) -> None:
        check_options(self, "model")
        if self.memory_dim not in (0, self.dim):
            raise InputError(
                f"model.memory_dim={self.memory_dim}: the decoder attends to the encoder's hidden states, of "
                f"model.dim={self.dim} features: set it to 0"
            )
        self.stacks()  # each of the two makes the checks of a Backbone

    @property
    def has_memory(self) -> bool:
        """The decoder attends to the encoder's hidden states."""
        return True

    @property
    def is_single_stack(self) -> bool:
        """False: encoder and decoder have a stack of layers each."""
        return False

    def stacks(self) -> dict[str, BackboneConfig]:
        """Configs of the two Backbones, by the names of their modules.

        Returns:
          Those of "encoder" and "decoder".
        """
        return {"encoder": self.encoder(), "decoder": self.decoder()}

    def decoder(self) -> DecoderConfig:
        """Config of the decoder.

        Returns:
          The config, with a memory of the encoder's hidden states.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(DecoderConfig)}
        fields |= {"memory_dim": self.dim} | {name: getattr(self, field) for name, field in DECODER_FIELDS.items()}
        return _checked(DecoderConfig, fields, DECODER_FIELDS)

    def encoder(self) -> EncoderConfig:
        """Config of the encoder.

        Returns:
          The config.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BackboneConfig)}
        fields |= {"memory_dim": 0} | {name: getattr(self, field) for name, field in ENCODER_FIELDS.items()}
        fields["layers"] = fields["layers"] or self.layers
        return _checked(EncoderConfig, fields, ENCODER_FIELDS)

    def periodic_fields(self) -> dict[str, str]:
        """The fields by which layers differ, of the decoder and of the encoder."""
        fields = self.encoder().periodic_fields()
        renamed = {
            f"model.{field}": fields[f"model.{name}"]
            for name, field in ENCODER_FIELDS.items()
            if f"model.{name}" in fields
        }
        return super().periodic_fields() | renamed

    def fixed_length(self) -> int:
        """The length of all sources if a mixer of the encoder has a fixed one."""
        return self.encoder().fixed_length()

    def needed_length(self, seq_len: int) -> int:
        """Length to which sources must be padded; see `BackboneConfig.needed_length`."""
        return self.encoder().needed_length(seq_len)

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Sizes of the logical axes that a mesh may divide: the greatest common divisors of both stacks' sizes."""
        encoder, decoder = self.encoder().sizes(), self.decoder().sizes()
        sizes = encoder | decoder  # experts may be in one of the stacks only
        return {name: _common(name, size, encoder.get(name, size)) for name, size in sizes.items()}

    def attention_width(self) -> int:
        """Width of the attention of all layers of both stacks together."""
        return self.encoder().attention_width() + self.decoder().attention_width()

    def non_embedding_parameters(self) -> int:
        """Number of weights in the matrices of the layers of both stacks."""
        return self.encoder().non_embedding_parameters() + self.decoder().non_embedding_parameters()


def _checked(kind: Callable[..., Any], fields: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """A config of one of the two stacks. Its errors name the fields of Seq2SeqModelConfig."""
    try:
        return kind(**fields)
    except InputError as error:
        renamed = re.sub(r"model\.(\w+)", lambda match: f"model.{names.get(match[1], match[1])}", str(error))
        raise InputError(renamed) from None


def _common(name: str, decoder: tuple[int, str], encoder: tuple[int, str]) -> tuple[int, str]:
    """The size of an axis of both stacks, and the fields that set it."""
    (size, field), (other, other_field) = decoder, encoder
    if size == other and field == other_field:
        return size, field
    return math.gcd(size, other), f"the common divisor of {name} of encoder and decoder"


class Seq2SeqModel(OfSeveralStacks, nn.Module):
    """An encoder of the source and a decoder of the target.

    A batch is a mapping with tokens, segment_ids and positions of the sources, int32 `[B, T]`; target_tokens, target_labels,
    target_segment_ids and target_positions, int32 `[B, U]`; and target_weights, float32 `[B, U]`. The tokens of a target
    attend to the source tokens of their own segment id; 0 marks padding. Labels are the target tokens that follow.

    The parameters are those of "encoder" and "decoder"; a shared embedding, "embed", lies beside them.

    Attributes:
      config: Sizes and parts of the model.
      stats: Word statistics of the text, for output layers that need them.
      model_parallel: As for a Backbone.
      remat: As for a Backbone.
    """

    prefixes: ClassVar[Mapping[str, str]] = {"encoder": "encoder_", "decoder": ""}

    config: Seq2SeqModelConfig
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(label) of a distribution over the words."""
        return is_normalized(self.config.output)

    def setup(self) -> None:
        c = self.config
        shared = {"model_parallel": self.model_parallel, "remat": self.remat}
        if c.share_embeddings:
            self.embed = Embed(c.vocab, c.dim)
            shared["shared_embed"] = self.embed
        self.encoder = Backbone(c.encoder(), **shared)
        self.decoder = Decoder(c.decoder(), self.stats, **shared)

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Sources and targets.
          deterministic: No dropout and no sampling in the output layer; otherwise the rngs "dropout" and "output" are used.

        Returns:
          The loss summed over target tokens, in nats, with the statistics, auxiliary losses and metrics of the layers; the
          names of losses and metrics of the encoder begin with "encoder_". Evaluations also report "accuracy", the share of
          target tokens that are the most probable ones given the correct tokens before, and "exact_match", the share of targets
          of which all tokens are: these are the targets that greedy decoding produces.
        """
        memory, encoder_report = self.encode(batch, deterministic)
        target = _target(batch) | {"memory": memory.states, "memory_segment_ids": memory.segment_ids}
        h, target, indices, report = self.decoder.states(target, deterministic)
        # The decoder's own key, which `rows` uses as well.
        rng = None if deterministic else self.decoder.make_rng("output")
        out = self.decoder.output_loss(h, target, indices, rng)
        aux, statistics = self.join_reports({"encoder": encoder_report, "decoder": report})
        aux = {**aux, **out.aux}
        if deterministic:
            weights = target["weights"].astype(jnp.float32)
            is_right = self.decoder.best(h) == target["labels"]
            aux["accuracy"] = (jnp.where(is_right, weights, 0.0).sum(), weights.sum())
            is_target = jnp.any(weights > 0, axis=1)
            matches = is_target & jnp.all(is_right | (weights == 0), axis=1)
            aux["exact_match"] = (matches.astype(jnp.float32).sum(), is_target.astype(jnp.float32).sum())
        return LossOut(out.sum, out.weight, aux, statistics)

    def encode(self, batch: Batch, deterministic: bool = True) -> tuple[Memory, LayerReport]:
        """The hidden states of the sources.

        Args:
          batch: Tokens, segment_ids and positions of the sources.
          deterministic: As for `loss`.

        Returns:
          `(memory for the decoder, report of the encoder's layers)`.
        """
        tokens, segment_ids = batch["tokens"], batch["segment_ids"]
        ids = None if deterministic else jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
        context = Context(batch["positions"], segment_ids, self.encoder.config.mask, deterministic, ids=ids)
        h, _, report = self.encoder.hidden(tokens, context)
        return Memory(h, segment_ids), report

    def logits(self, batch: Batch) -> Float[Array, "B U V"]:
        """Logits of every label of the targets, on one device.

        Args:
          batch: Sources and targets, without labels and weights.

        Returns:
          Float32 logits.
        """
        memory, _ = self.encode(batch)
        target = _target(batch) | {"memory": memory.states, "memory_segment_ids": memory.segment_ids}
        h, *_ = self.decoder.states(target, deterministic=True)
        return self.decoder.output.logits(self.decoder.table, h.reshape(-1, h.shape[-1])).reshape(*h.shape[:-1], -1)

    def rows(self, batch: Batch) -> dict[tuple[str, ...], Int[Array, " R"]]:
        """Rows of tables that `loss` of this batch looks up with the same rngs, as `PredictionModel.rows`.

        Args:
          batch: As for `loss`.

        Returns:
          Path of a table among the parameters -> ids, with repetitions.

        Raises:
          InputError: The embedding and the output layer share their table.
        """
        source, of_decoder = batch["tokens"].reshape(-1), self.decoder.rows(_target(batch))
        rows = {("decoder", *path): ids for path, ids in of_decoder.items()}
        if not self.config.share_embeddings:
            return {("encoder", "embed", "table"): source, **rows}
        return {("embed", "table"): jnp.concatenate([source, rows.pop(("decoder", "embed", "table"))]), **rows}

    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of pairs of a source and a target, B.
          length: Tokens per source, T. Targets have `config.target_len` tokens, or as many as sources if it is 0.

        Returns:
          The batch, all of whose tokens have segment id 1 and weight 1.
        """
        sizes = {"source": length, "target": self.config.target_len or length}
        shapes = {name: (batch_size, sizes["target" if "target" in name else "source"]) for name in self.batch_axes()}
        batch = {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}
        ones = {name: jnp.ones_like(x) for name, x in batch.items() if name.endswith("segment_ids")}
        return batch | ones | {"target_weights": jnp.ones(shapes["target_weights"], jnp.float32)}

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: all of them are ("batch", "length")."""
        inputs = ("tokens", "segment_ids", "positions")
        names = (*inputs, *(f"target_{name}" for name in (*inputs, "labels", "weights")))
        return dict.fromkeys(names, ("batch", "length"))

    def __call__(self, batch: Batch) -> LossOut:
        return self.loss(batch)


def _target(batch: Batch) -> dict[str, jax.Array]:
    """The target's arrays of a batch, by the names that a decoder has for them."""
    prefix = "target_"
    return {name.removeprefix(prefix): x for name, x in batch.items() if name.startswith(prefix)}


def standalone_decoder(model: Seq2SeqModel, weights: PyTree) -> tuple[Decoder, Any]:
    """The decoder as a model of its own, for one device.

    Args:
      model: A Seq2SeqModel.
      weights: Its weights.

    Returns:
      `(decoder, its weights)`, with the embedding if it is shared.
    """
    params, buffers = split(weights)
    embedding = {"embed": params["embed"]} if model.config.share_embeddings else {}
    decoder = Decoder(model.config.decoder(), model.stats)
    return decoder, join(params["decoder"] | embedding, (buffers or {}).get("decoder"))
