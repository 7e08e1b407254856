"""The function that an exported file holds: token ids to logits, with the weights inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hpnlp.models import variables
from hpnlp.models.encoder import Encoder
from hpnlp.models.lm import LM
from hpnlp.types import InputError

# Arrays of a batch that are no inputs of the exported function: those of the loss, and positions, which count from 0.
_NOT_EXPORTED = ("labels", "weights", "positions")


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """A function of arrays of token ids.

    Attributes:
      call: The function. Its arguments are int32 `[B, T]`; it returns float32 logits, `[B, T, V]`, or `[B, C]` of an encoder
        with pooling.
      inputs: Names of the arguments.
      length: T.
    """

    call: Callable[..., Any]
    inputs: tuple[str, ...]
    length: int


def logits_function(model: Any, weights: Any, length: int) -> ExportedFunction:
    """The logits of a model as a function of its inputs.

    Args:
      model: An LM or an Encoder.
      weights: Weights of the model.
      length: Tokens of a sequence. An LM takes "tokens"; shorter texts are padded at the end. An Encoder takes "tokens",
        "segment_ids" (1 for text, 0 for padding), and "token_types" if pairs of texts have some.

    Returns:
      The function.

    Raises:
      InputError: Another class of models, or a length that the model does not have.
    """
    if not isinstance(model, LM | Encoder) or model.config.memory_dim:
        raise InputError(
            f"a {type(model).__name__} has no logits of token ids: export a run of task lm, masked_lm, classification or "
            "tagging"
        )
    max_len = model.config.max_len
    if length < 1 or (model.config.position == "learned" and 0 < max_len < length):
        raise InputError(f"length {length}: expected 1 to {max_len or 'the length of the model'}")
    collections = variables.collections(weights)
    if isinstance(model, LM):
        return ExportedFunction(lambda tokens: model.apply(collections, tokens, method="logits"), ("tokens",), length)
    inputs = tuple(name for name in model.batch_axes() if name not in _NOT_EXPORTED)

    def call(*arrays: jax.Array) -> Any:
        batch = dict(zip(inputs, arrays, strict=True))
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), batch["tokens"].shape)
        return model.apply(collections, {**batch, "positions": positions}, method="logits")

    return ExportedFunction(call, inputs, length)
