"""Recurrent language models: an embedding, a stack of recurrent layers and an output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from hpnlp import compatibility
from hpnlp.cost.parts import part
from hpnlp.model_interfaces.layer_report import CARRY
from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.model_interfaces.ranges import LIMITS, rate_option
from hpnlp.models.backbone import DTYPES
from hpnlp.models.lm import example_batch
from hpnlp.models.prediction import Batch, label_losses, looked_up_rows
from hpnlp.models.stacks.unstacked import Unstacked, UnstackedModel
from hpnlp.nn.layers import Embed, embed_init, param
from hpnlp.nn.output import OUTPUTS, is_normalized
from hpnlp.nn.rnn import RecurrentInputs
from hpnlp.nn.rnn_stack import RecurrentStack, StackConfig
from hpnlp.ops.rnn import dropout_factors, segment_resets
from hpnlp.spec import build, lookup, parse_one
from hpnlp.types import InputError, LossOut, WordStats, option


@dataclasses.dataclass(frozen=True)
class RNNConfig(Unstacked, StackConfig):
    """A recurrent language model."""

    description: ClassVar[str] = "a recurrent network"
    undivided: ClassVar[str] = "which reads tokens one after another"
    not_recomputed: ClassVar[str] = "recurrent layers are not recomputed"
    divisible: ClassVar[str] = "the batch (plan.data, plan.fsdp) or the vocabulary (plan.tensor)"

    # Fields that act in training only, or do not change results: a run may start from a run with other values.
    free_fields: ClassVar[tuple[str, ...]] = (
        "input_dropout", "layer_dropout", "output_dropout", "embedding_dropout", "hidden_dropout", "candidate_dropout",
        "weight_drop", "variational", "activation_penalty", "temporal_penalty", "impl",
    )  # fmt: skip

    vocab: int = option(0, "Rows V of the embedding table, 0 for the tokenizer's.", least=0, most=LIMITS["vocab"])
    embed_dim: int = option(0, "Features of the embedding, 0 for those of the outputs.", least=0, most=LIMITS["dim"])
    embedding_dropout: float = rate_option(
        "Share of the words whose embeddings are 0 throughout a batch (Gal and Ghahramani 2016)."
    )
    resets: bool = option(True, "The state is the initial one at the beginning of each document.")
    dtype: str = option("float32", "Dtype of the activations; parameters and states stay float32.")
    output: str = option("full", "Output layer, an entry of OUTPUTS.")
    tied: bool = option(True, "The output layer shares the embedding table, if its rows are words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        lookup(DTYPES, self.dtype, "model.dtype")
        if self.tied and self.embed_dim not in (0, self.dim):
            raise InputError(
                f"model.embed_dim={self.embed_dim}, and the outputs of model.cells={self.cells!r} have {self.dim} features: "
                "set model.tied=False, or embed_dim=0"
            )
        if self.impl == "cudnn" and self.resets:
            raise InputError(
                "model.impl='cudnn' cannot reset states within sequences: set model.resets=False, or impl='xla'"
            )

    @property
    def dim(self) -> int:
        """Features of the outputs."""
        return self.widths()[-1]

    @property
    def embedding_size(self) -> int:
        """Features of the embedding."""
        return self.embed_dim or self.dim

    @property
    def layers(self) -> int:
        """Number of recurrent layers."""
        return len(self.widths())

    @property
    def decodes(self) -> bool:
        """The model can continue prompts."""
        return True

    @property
    def position(self) -> str:
        """The model has no positions."""
        return "none"

    @property
    def max_len(self) -> int:
        """The longest sequence: there is no limit."""
        return 1 << 30

    @property
    def memory_dim(self) -> int:
        """The model attends to no memory."""
        return 0

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Sizes of the logical axes that a mesh may divide: the words."""
        return {"vocab": (self.vocab, "model.vocab")}

    def matrix_sizes(self) -> list[int]:
        """Number of weights in the matrices of each layer.

        Returns:
          A number for each layer.
        """
        sizes, dim = [], self.embedding_size
        for layer in self.layer_modules():
            sizes.append(layer.matrix_size(dim))
            dim = layer.features
        return sizes

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU: three times those of the layers' products.

        Args:
          batch_size: Sequences of a batch.
          length: Tokens of a sequence.

        Returns:
          The number of FLOPs.
        """
        return 6.0 * batch_size * length * sum(self.matrix_sizes())


class RNN(UnstackedModel, nn.Module):
    """A recurrent language model over `config.vocab` ids.

    A batch is as for `models.lm.LM`. The state begins anew at the first token of each segment. With `keeps_state`, the state
    after a batch is the carry, with which the next batch begins; no gradient passes through it.

    The layers read embeddings times the root of their width (Vaswani et al. 2017, sec. 3.4).

    Parameters are under "embed", "stack" (by layer), "head" and "output".

    Attributes:
      config: Sizes and parts of the model.
      stats: Word statistics of the text, for output layers that need them.
      model_parallel: Embedding lookup and loss over several devices; None for one device. The compiler divides the layers by
        sequences.
      remat: Rematerialisation policy, "none" only.
      keeps_state: Whether a batch continues the one before (truncated back-propagation through time).
    """

    config: RNNConfig
    stats: WordStats | None = None
    model_parallel: ModelParallel | None = None
    remat: str = "none"
    keeps_state: bool = False

    is_stackable: ClassVar[bool] = True  # its loss runs under vmap
    predicts_next_words: ClassVar[bool] = True

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(label) of a distribution over the words."""
        return is_normalized(self.config.output)

    def setup(self) -> None:
        c = self.config
        compatibility.check(dataclasses.replace(c.facts(), remat=self.remat))
        self.embed = Embed(c.vocab, c.embedding_size)
        self.stack = RecurrentStack(c)
        extra = {"vocab": c.vocab, "dim": c.dim, "stats": self.stats, "axis": "vocab"}
        self.output = build(parse_one(c.output, "model.output"), OUTPUTS, "output layer", **extra)
        if c.tied and self.output.rows_are != "words":
            raise InputError(
                f"model.output={c.output!r} has no table of words by id that the embedding could share: set model.tied=False"
            )
        if not self.output.rows_are:
            self.table = None
        elif c.tied:
            self.table = self.embed.table
        else:
            self.table = param(self, "head", embed_init, (c.vocab, c.dim), ("vocab", "embed"))

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Tokens, labels, segment_ids, positions and weights.
          deterministic: No dropout and no sampling in the output layer; otherwise the rngs "dropout" and "output" are used.

        Returns:
          The loss summed over tokens, in nats, with the penalties, and the carry if the collection "carry" is given.
        """
        h, outputs, carried = self._run(batch, deterministic)
        rng = None if deterministic else self.make_rng("output")
        with part("output"):
            if self.model_parallel is None:
                labels, weights = batch["labels"].reshape(-1), batch["weights"].reshape(-1)
                out = self.output.loss(self.table, h.reshape(-1, h.shape[-1]), labels, weights, rng)
            else:
                out = self.model_parallel.loss(self.output, self.table, h, batch["labels"], batch["weights"], rng)
        aux = out.aux if deterministic else {**out.aux, **self._penalties(outputs, batch["segment_ids"])}
        return LossOut(out.sum, out.weight, aux, {}, carried)

    def token_states(self, batch: Batch, deterministic: bool = True) -> tuple[Float[Array, "B T D"], Any]:
        """Outputs of the last layer, which the output layer reads.

        Args:
          batch: As for `loss`.
          deterministic: As for `loss`.

        Returns:
          `(outputs, carry)`, the carry as of `loss`.
        """
        h, _, carried = self._run(batch, deterministic)
        return h, carried

    def label_losses(self, h: Float[Array, "B T D"], labels: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """-log p(label) of each token, on one device; see `prediction.label_losses`."""
        return label_losses(self.output, self.table, h, labels)

    def _run(self, batch: Batch, deterministic: bool) -> tuple[Float[Array, "B T D"], Mapping[str, Array], Any]:
        """`(outputs, outputs for penalties, carry)` of a batch."""
        c, segment_ids = self.config, batch["segment_ids"]
        carry: Any = self.get_variable(CARRY, "layers")
        previous = states = reset = None
        if carry is not None:
            previous = carry["segment_ids"][0]
            states = [tuple(x[0] for x in carry[f"layer_{i}"].values()) for i in range(c.layers)]
        if c.resets:
            reset = segment_resets(segment_ids, previous)
        ids = jnp.arange(segment_ids.size, dtype=jnp.int32).reshape(segment_ids.shape)
        inputs = RecurrentInputs(reset=reset, ids=None if deterministic else ids, deterministic=deterministic)
        h, states, outputs = self.stack(self._embedded(batch["tokens"], inputs), inputs, states)
        carried = None if carry is None else {"layers": self._carried(carry, states, segment_ids)}
        return h, outputs, carried

    @part("embedding")
    def _embedded(self, tokens: Int[Array, "B T"], inputs: RecurrentInputs) -> Float[Array, "B T D"]:
        """Embeddings of tokens times the root of their width, in training without those of dropped words."""
        c, parallel = self.config, self.model_parallel
        dtype = DTYPES[c.dtype]
        x = (
            self.embed(tokens, dtype)
            if parallel is None
            else parallel.embedding_lookup(self.embed.table, tokens, dtype)
        )
        # Rows begin small, for the logits of a tied table. Unscaled, they hardly move the gates in the first hundreds of steps.
        x = x * jnp.asarray(c.embedding_size**0.5, dtype)
        if inputs.deterministic or not c.embedding_dropout:
            return x
        # The factor depends on the word alone, so that all its occurrences in a batch are dropped.
        return (x * dropout_factors(self.make_rng("dropout"), tokens, 1, c.embedding_dropout)).astype(dtype)

    def _penalties(
        self, outputs: Mapping[str, Array], segment_ids: Int[Array, "B T"]
    ) -> dict[str, tuple[Array, Array]]:
        """Penalties of the outputs of the last layer, as (sum, weight)."""
        c, result = self.config, {}
        if c.activation_penalty:
            squares = jnp.square(outputs["dropped"].astype(jnp.float32)).mean(axis=-1)
            is_token = (segment_ids > 0).astype(jnp.float32)
            result["activation_loss"] = (c.activation_penalty * (squares * is_token).sum(), is_token.sum())
        if c.temporal_penalty:
            raw = outputs["raw"].astype(jnp.float32)
            squares = jnp.square(raw[:, 1:] - raw[:, :-1]).mean(axis=-1)
            together = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
            weights = together.astype(jnp.float32)
            result["temporal_loss"] = (c.temporal_penalty * (squares * weights).sum(), weights.sum())
        return result

    def _carried(self, carry: Mapping[str, Any], states: Sequence[PyTree], segment_ids: Int[Array, "B T"]) -> Any:
        """The carry after a batch."""
        new: dict[str, Any] = {
            f"layer_{i}": {name: x[None] for name, x in zip(carry[f"layer_{i}"], state, strict=True)}
            for i, state in enumerate(states)
        }
        new["segment_ids"] = segment_ids[None, :, -1]
        return jax.lax.stop_gradient(jax.tree.map(lambda x, old: x.astype(old.dtype), new, dict(carry)))

    @nn.nowrap
    def initial_carry(self, batch_size: int) -> Any:
        """The carry before the first batch of a stream.

        Args:
          batch_size: Sequences of a batch.

        Returns:
          Under "layers", the state of each layer `[1, B, ...]` and the segments of the tokens before, 0 for none; None for a
          model that keeps no state.
        """
        if not self.keeps_state:
            return None
        carry, dim = {}, self.config.embedding_size
        for index, layer in enumerate(self.config.layer_modules()):
            shapes = layer.state_shapes(dim)
            carry[f"layer_{index}"] = {
                f"state_{i}": jnp.zeros((1, batch_size, *shape), jnp.float32) for i, shape in enumerate(shapes)
            }
            dim = layer.features
        return {"layers": {**carry, "segment_ids": jnp.zeros((1, batch_size), jnp.int32)}}

    @nn.nowrap
    def carry_axes(self) -> Any:
        """Logical axes of the carry: a tree like that of `initial_carry`, of tuples of names."""
        carry = jax.eval_shape(lambda: self.initial_carry(1))
        return jax.tree.map(lambda x: ("layers", "batch", *(None,) * (x.ndim - 2)), carry)

    def logits(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every next token, on one device.

        Args:
          tokens: Ids, one document per sequence.

        Returns:
          Float32 logits.
        """
        h, _, _ = self.stack(self._embedded(tokens, RecurrentInputs()), RecurrentInputs())
        return self.output.logits(self.table, h.reshape(-1, h.shape[-1])).reshape(*tokens.shape, -1)

    def next_logits(self, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Logits of the tokens that follow, on one device.

        Args:
          h: Outputs of the last tokens, as `prefill` and `extend` return them.

        Returns:
          Float32 logits.
        """
        return self.output.logits(self.table, h)

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int, memory: PyTree = None
    ) -> tuple[Float[Array, "B D"], Any]:
        """Runs prompts through the model.

        Args:
          tokens: Ids of the prompts, padded at the end.
          lengths: Number of tokens of each prompt.
          capacity: Not read: states have a constant size.
          memory: None.

        Returns:
          `(output of each prompt's last token, the states after it)`.
        """
        inputs = RecurrentInputs(lengths=lengths)
        h, states, _ = self.stack(self._embedded(tokens, inputs), inputs)
        return jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0], states

    def extend(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], caches: PyTree
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs new tokens.

        Args:
          tokens: Ids of the tokens.
          positions: Not read.
          caches: States after the preceding tokens.

        Returns:
          `(outputs, the states after the tokens)`.
        """
        inputs = RecurrentInputs()
        h, states, _ = self.stack(self._embedded(tokens, inputs), inputs, caches)
        return h, states

    def rows(self, batch: Batch) -> dict[tuple[str, ...], Int[Array, " R"]]:
        """Rows of tables that `loss` of this batch looks up with the same rngs; see `prediction.looked_up_rows`."""
        return looked_up_rows(self.config.tied, self.output, batch, self.make_rng)

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


def filled(config: RNNConfig, vocab: int) -> RNNConfig:
    """A config with the size of the vocabulary.

    Args:
      config: The config.
      vocab: Number of ids of the tokenizer.

    Returns:
      The config with `vocab`.

    Raises:
      InputError: The config's vocabulary is smaller than the tokenizer's.
    """
    if config.vocab and config.vocab < vocab:
        raise InputError(
            f"model.vocab={config.vocab} is less than the tokenizer's {vocab}: set it to 0, or to at least {vocab}"
        )
    return dataclasses.replace(config, vocab=config.vocab or vocab)
