"""Targets that a sequence-to-sequence model decodes greedily."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import PyTree

from hpnlp.models.decode import GREEDY
from hpnlp.models.seq2seq_decode import generate
from hpnlp.tasks.predictions import TextPrediction, TrainedModel
from hpnlp.tasks.task import Batch
from hpnlp.types import Tokenizer

if TYPE_CHECKING:
    from hpnlp.models.seq2seq import Seq2SeqModel


def text_predictions(trained: TrainedModel, batch: Batch, examples: int) -> list[TextPrediction]:
    """Decodes the target of each source greedily.

    Args:
      trained: A Seq2SeqModel.
      batch: The batch.
      examples: Number of sources; the sequences after them are padding.

    Returns:
      One prediction for each source.
    """
    rows = decoded_targets(trained.model, trained.params, batch, trained.tokenizer, trained.config.data.target_len)
    return [TextPrediction(trained.tokenizer.decode(ids).decode("utf-8", "replace")) for ids in rows[:examples]]


def decoded_targets(
    model: Seq2SeqModel, params: PyTree, batch: Mapping[str, Any], tokenizer: Tokenizer, target_len: int
) -> list[np.ndarray]:
    """Greedily decoded targets of a batch, without eos and padding.

    Args:
      model: A Seq2SeqModel.
      params: Weights of the model.
      batch: A batch of `data.examples.kinds.Seq2Seq`.
      tokenizer: The tokenizer.
      target_len: Largest number of tokens of a target.

    Returns:
      Token ids of each target.
    """
    generation = generate(
        model,
        params,
        batch,
        start_id=int(batch["target_tokens"][0, 0]),
        # The decoder's learned positions are as many as the longest target has, and a first id precedes the target.
        tokens=target_len - 1,
        sampling=GREEDY,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
    )
    rows = np.concatenate([*generation], axis=1)
    ends = rows == tokenizer.eos_id
    return [row[: end.argmax() if end.any() else len(row)] for row, end in zip(rows, ends, strict=True)]
