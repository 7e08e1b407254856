"""The decoder: a causal language model whose layers also attend to a memory, such as the hidden states of an encoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.prediction import Batch
from hpnlp.nn.attention import Memory
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class DecoderConfig(LMConfig):
    """A causal language model whose layers attend to a memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory_dim:
            raise InputError("model.memory_dim=0: set it to the features of the memory, or choose an LM")

    @property
    def has_memory(self) -> bool:
        """Batches have a memory."""
        return True

    @property
    def keeps_carry(self) -> bool:
        """The memory of a batch is complete."""
        return False


class Decoder(LM):
    """A causal language model whose layers attend to a memory.

    A batch is one of an LM, and has memory, `[B, S, memory_dim]`, and memory_segment_ids, int32 `[B, S]`. A token attends to
    the vectors of its own segment id; 0 marks padding.

    Attributes:
      config: Sizes and parts of the model, a DecoderConfig.
    """

    def batch_memory(self, batch: Batch) -> Memory:
        """The memory of a batch."""
        return Memory(batch["memory"], batch["memory_segment_ids"])

    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros, with a memory of `length` vectors; otherwise as that of an LM."""
        states = jnp.zeros((batch_size, length, self.config.memory_dim), jnp.float32)
        ids = jnp.ones((batch_size, length), jnp.int32)
        return super().example_batch(batch_size, length) | {"memory": states, "memory_segment_ids": ids}

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: those of the memory are ("batch", "memory", "hidden")."""
        memory = {"memory": ("batch", "memory", "hidden"), "memory_segment_ids": ("batch", "memory")}
        return super().batch_axes() | memory
