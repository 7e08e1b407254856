"""The causal language model: a Backbone and an output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from hpnlp import compatibility
from hpnlp.models.backbone import DTYPES, BackboneConfig
from hpnlp.models.prediction import PredictionModel, label_losses
from hpnlp.models.stacks.layer_stack import carry_axes, initial_carry
from hpnlp.nn.attention import Context, Memory
from hpnlp.ops.attention.masks.patterns import Causal
from hpnlp.types import LossOut, option

if TYPE_CHECKING:
    from hpnlp.model_interfaces.layer_report import LayerReport


@dataclasses.dataclass(frozen=True)
class LMConfig(BackboneConfig):
    """A causal language model."""

    output: str = option("full", "Output layer, an entry of OUTPUTS.")
    tied: bool = option(True, "The output layer shares the embedding table, if its rows are words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        compatibility.check(dataclasses.replace(self.trait_facts(), predicts_next=True))

    @property
    def mask(self) -> Any:
        """Tokens depend on earlier ones only."""
        return Causal()

    @property
    def decodes(self) -> bool:
        """Whether the model can continue prompts: all mixers have a cache, and mix sequences of any length."""
        return all(traits.decodes and traits.any_length for traits in self.traits)

    @property
    def keeps_carry(self) -> bool:
        """A batch may continue the previous one."""
        return True

    def outputs(self) -> tuple[int, str]:
        """Outputs of the head.

        Returns:
          `(V, "vocab")`: their number, and the logical name of their axis.
        """
        return self.vocab, "vocab"


class LM(PredictionModel):
    """A causal language model over `config.vocab` ids.

    A batch is a mapping with tokens, labels, segment_ids and positions, int32 `[B, T]`, and weights, float32 `[B, T]`. Labels
    are the tokens that follow; segment id 0 marks padding.

    Attributes:
      config: Sizes and parts of the model, an LMConfig.
    """

    predicts_next_words: ClassVar[bool] = True

    def loss(self, batch: Mapping[str, jax.Array], deterministic: bool = True, taps: tuple[str, ...] = ()) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Tokens, labels, segment_ids, positions and weights.
          deterministic: No dropout and no sampling in the output layer; otherwise the rngs "dropout" and "output" are used.
          taps: Names of logits and states to return, see `tapped`.

        Returns:
          The loss summed over tokens, in nats, with the auxiliary losses, metrics and statistics of the layers, and their carry
          if the collection "carry" is given.
        """
        h, batch, indices, report = self.states(batch, deterministic, taps)
        rng = None if deterministic else self.make_rng("output")
        out = self.output_loss(h, batch, indices, rng)
        carry = self._carried(report)
        aux, tapped = {**report.aux, **out.aux}, self.tapped(taps, h, h, report)
        return LossOut(out.sum, out.weight, aux, self.reported_statistics(report), carry, tapped)

    def token_states(
        self, batch: Mapping[str, jax.Array], deterministic: bool = True
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Hidden states of a batch, which the output layer reads, on one device.

        Args:
          batch: As for `loss`.
          deterministic: As for `loss`.

        Returns:
          `(hidden states, carry)`, the carry as of `loss`.
        """
        h, _, _, report = self.states(batch, deterministic)
        return h, self._carried(report)

    def label_losses(self, h: Float[Array, "B T D"], labels: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """-log p(label) of each token, on one device; see `prediction.label_losses`."""
        return label_losses(self.output, self.table, h, labels)

    def _carried(self, report: LayerReport) -> Any:
        """The carry after a batch, None if the layers carry nothing."""
        if not report.carry:
            return None
        return {"layers": jax.lax.stop_gradient(self.config.stack_order().join(report.carry))}

    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros; see the function `example_batch`."""
        return example_batch(batch_size, length)

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: all of them are `[B, T]`."""
        return dict.fromkeys(example_batch(1, 1), ("batch", "length"))

    @nn.nowrap
    def initial_carry(self, batch_size: int) -> Any:
        """The carry before the first batch of a stream.

        Args:
          batch_size: Sequences of a batch.

        Returns:
          Under "layers", arrays `[L, B, ...]` as of the parameters' stacks; None for a model without a carry.
        """
        c = self.config
        carry = initial_carry(c.forms(), c.layers, c.stack_order(), batch_size, DTYPES[c.dtype])
        return None if carry is None else {"layers": carry}

    @nn.nowrap
    def carry_axes(self) -> Any:
        """Logical axes of the carry: a tree like that of `initial_carry`, of tuples of names."""
        c = self.config
        return {"layers": carry_axes(c.forms(), c.layers, c.stack_order())}

    def logits(self, tokens: Int[Array, "B T"], memory: Memory | None = None) -> Float[Array, "B T V"]:
        """Logits of every next token.

        Args:
          tokens: Ids, one document per sequence.
          memory: Memory of cross-attention, with segment id 1; None for a model without a memory.

        Returns:
          Float32 logits.
        """
        segment_ids = None if memory is None else jnp.ones_like(tokens)
        h, _, _ = self.hidden(tokens, Context(_positions(tokens), segment_ids, Causal(), memory=memory))
        return self.output.logits(self.table, h.reshape(-1, h.shape[-1])).reshape(*tokens.shape, -1)

    def next_logits(self, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Logits of the tokens that follow, on one device.

        Args:
          h: Hidden states of the last tokens, as `prefill` and `extend` return them.

        Returns:
          Float32 logits.
        """
        return self.output.logits(self.table, h)

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int, memory: Memory | None = None
    ) -> tuple[Float[Array, "B D"], Any]:
        """Runs prompts through the model and fills caches.

        Args:
          tokens: Ids of the prompts, padded at the end.
          lengths: Number of tokens of each prompt.
          capacity: Number of tokens per sequence that the caches have room for.
          memory: As for `logits`. Its keys and values are stored in the caches.

        Returns:
          `(hidden state of each prompt's last token, caches)`.
        """
        positions = _positions(tokens)
        segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
        context = Context(positions, segment_ids, Causal(), capacity=capacity, memory=memory, decoding=True)
        h, caches, _ = self.hidden(tokens, context)
        return jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0], caches

    def extend(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], caches: PyTree
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs new tokens, which continue those in the caches.

        Args:
          tokens: Ids of the tokens.
          positions: Positions of the tokens.
          caches: Caches of all preceding tokens.

        Returns:
          `(hidden states, the extended caches)`.
        """
        h, caches, _ = self.hidden(tokens, Context(positions, None, Causal(), decoding=True), caches)
        return h, caches

    def __call__(self, batch: Mapping[str, jax.Array]) -> LossOut:
        return self.loss(batch)


def _positions(tokens: jax.Array) -> jax.Array:
    """Positions 0, 1, ... of each sequence, `[B, T]`."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)


def example_batch(batch_size: int, length: int) -> dict[str, jax.Array]:
    """A batch of zeros with the shapes and dtypes of a batch of data.

    Args:
      batch_size: Number of sequences, B.
      length: Tokens per sequence, T.

    Returns:
      The batch, all of whose tokens have segment id 1 and weight 1.
    """
    ints = jnp.zeros((batch_size, length), jnp.int32)
    return {
        "tokens": ints,
        "labels": ints,
        "segment_ids": jnp.ones_like(ints),
        "positions": ints,
        "weights": jnp.ones((batch_size, length), jnp.float32),
    }
