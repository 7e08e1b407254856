"""Memories of labelled bags, the entries of MEMORIES that a spec string names: stored vectors, or a trained table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.errors import RangeError
from hpnlp.model_interfaces.ranges import LIMITS
from hpnlp.spec import build, parse_one
from hpnlp.types import REQUIRED, check_options, option


@dataclasses.dataclass(frozen=True)
class TableMemory:
    """A trained table of vectors."""

    entries: int = option(REQUIRED, "Number of entries of the memory.", least=1, most=LIMITS["vocab"])
    k: int = option(1, "Number of entries whose weighted mean follows the vector of a bag.", least=1)
    temperature: float = option(0.1, "Divisor of the cosines in the weights of the entries.", least=0.001, most=100)
    #: Whether the entries are a buffer that each step writes; otherwise they are parameters.
    is_written: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.k > self.entries:
            raise RangeError(type(self).__name__, f"k={self.k}: expected at most entries={self.entries}")

    def own_entries(self, bags: Int[Array, " B"]) -> Bool[Array, "B N"] | None:
        """Marks the entries that each bag does not find; None for no entry of any bag."""
        return None

    def written(
        self, vectors: Float[Array, "B D"], bags: Int[Array, " B"], is_real: Bool[Array, " B"]
    ) -> dict[str, Array]:
        """Statistics by which a step writes entries, see `BagMemory.written`; none for entries that are parameters."""
        return {}


@dataclasses.dataclass(frozen=True)
class BagMemory(TableMemory):
    """Vectors of training bags: that of bag i is entry i modulo `entries`, written in each step that trains on the bag."""

    is_written: ClassVar[bool] = True

    def own_entries(self, bags: Int[Array, " B"]) -> Bool[Array, "B N"]:
        """Marks the entry of each training bag, which the bag does not find; a bag of the number -1 has none."""
        places = jnp.arange(self.entries, dtype=bags.dtype)
        return (bags >= 0)[:, None] & ((bags % self.entries)[:, None] == places[None])

    def written(
        self, vectors: Float[Array, "B D"], bags: Int[Array, " B"], is_real: Bool[Array, " B"]
    ) -> dict[str, Array]:
        """Sums and numbers of the bags of a step that belong to each entry.

        Args:
          vectors: Vectors of the bags; gradients are stopped.
          bags: Numbers of training bags, -1 for others.
          is_real: False for padding.

        Returns:
          "vectors" `[N, D]` and "counts" `[N]`, float32, which add up over the parts of a batch.
        """
        is_written = (bags >= 0) & is_real
        places = jnp.where(is_written, bags % self.entries, self.entries)
        vectors = jnp.where(is_written[:, None], jax.lax.stop_gradient(vectors), 0.0)
        counts = jax.ops.segment_sum(jnp.ones(len(bags)), places, self.entries + 1)
        return {"vectors": jax.ops.segment_sum(vectors, places, self.entries + 1)[:-1], "counts": counts[:-1]}

    @staticmethod
    def advanced(entries: Float[Array, "N D"], sums: Mapping[str, Array]) -> Float[Array, "N D"]:
        """The entries after a step: several bags of one entry have their mean, and all other entries stay."""
        counts = sums["counts"][:, None]
        return jnp.where(counts > 0, sums["vectors"] / jnp.maximum(counts, 1.0), entries)


MEMORIES: dict[str, type[TableMemory]] = {"bags": BagMemory, "table": TableMemory}


def parse_memory(text: str) -> TableMemory | None:
    """The memory of a config.

    Args:
      text: `model.memory`, an entry of MEMORIES, as in "bags(4096,k=4)"; "" for none.

    Returns:
      The entry, or None.

    Raises:
      InputError: Unknown names, or arguments out of range.
    """
    return build(parse_one(text, "model.memory"), MEMORIES, "model.memory") if text.strip() else None
