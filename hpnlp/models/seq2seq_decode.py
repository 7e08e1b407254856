"""Decoding of a Seq2SeqModel: greedy, sampled, and by beam search."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from hpnlp.models.decode import Generation
from hpnlp.models.decoding.beam_search import Beams, beam_search
from hpnlp.models.seq2seq import Seq2SeqModel, standalone_decoder
from hpnlp.models.variables import collections
from hpnlp.nn.attention import Memory


def generate(
    model: Seq2SeqModel, params: PyTree, batch: Mapping[str, Any], *, start_id: int, **options: Any
) -> Generation:
    """Targets of sources, decoded token by token.

    Args:
      model: The model.
      params: Parameters of the model.
      batch: Tokens, segment_ids (1, and 0 on padding) and positions of the sources, int32 `[B, T]`.
      start_id: Id that targets begin with.
      **options: Arguments of `decode.Generation`: tokens, eos_id, sampling (GREEDY for greedy decoding) and others.

    Returns:
      The targets' ids, in pieces.

    Raises:
      InputError: Invalid options.
    """
    prompts = _prompts(batch, start_id)
    memory = _encode(params, _source(batch), model=model)
    return Generation(*standalone_decoder(model, params), prompts, memory=memory, **options)


def search(model: Seq2SeqModel, params: PyTree, batch: Mapping[str, Any], *, start_id: int, **options: Any) -> Beams:
    """The most probable targets of sources that a beam search finds.

    Args:
      model: The model.
      params: Parameters of the model.
      batch: As for `generate`.
      start_id: Id that targets begin with.
      **options: Arguments of `beam_search.beam_search`: tokens, eos_id, beams (BeamOptions) and others.

    Returns:
      The best targets of each source.

    Raises:
      InputError: Invalid options.
    """
    prompts = _prompts(batch, start_id)
    memory = _encode(params, _source(batch), model=model)
    return beam_search(*standalone_decoder(model, params), prompts, memory=memory, **options)


def _source(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in ("tokens", "segment_ids", "positions")}


def _prompts(batch: Mapping[str, Any], start_id: int) -> list[np.ndarray]:
    """The beginning of the target of each source."""
    return [np.array([start_id], np.int32)] * len(batch["tokens"])


@functools.partial(jax.jit, static_argnames="model")
def _encode(params: PyTree, source: Mapping[str, jax.Array], *, model: Seq2SeqModel) -> Memory:
    encoded: Any = model.apply(collections(params), source, method="encode")
    return encoded[0]
