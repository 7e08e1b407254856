"""The names of a Hugging Face model family for the sizes and the tensors of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpnlp.models.encoder import EncoderConfig
from hpnlp.models.huggingface.sliding_windows import WindowLayers
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.pairs.dual_encoder import DualEncoderConfig

ModelConfig = LMConfig | EncoderConfig | DualEncoderConfig


def _read_nothing(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {}


def _write_nothing(config: ModelConfig) -> dict[str, Any]:
    return {}


def _no_remarks(raw: Mapping[str, Any]) -> list[str]:
    return []


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of one class of transformers for the fields of a model's config and for its parameters.

    Attributes:
      model_type: Key of config.json that names the family, together with `architecture` where several have it.
      architecture: Class in transformers.
      fields: Key of config.json -> fields of `config` that it sets.
      activation: Key of the MLP's activation.
      activations: Value of that key -> `config.mlp`.
      fixed: Fields of `config` that have the same value in all models of the family.
      defaults: Values that transformers assumes for keys that config.json lacks; all other keys are required.
      accepted: Key -> values under which the family computes the same as the model.
      modules: Module of the checkpoint, with `{}` for the layer -> modules of the model that it concatenates on the last axis.
      base: First part of all names but the head's, which a checkpoint of the model without a head leaves out.
      omits_base: True if checkpoints are written without `base`, as those of the model without a head.
      free: Fields of `config` that neither config.json nor the tensors decide.
      transposed: True if matrices are stored as [out, in].
      read: Reads fields of `config` that depend on several keys from config.json, with `defaults`, and the name of the file.
      write: Writes these keys from a config.
      remarks: Describes from a config.json how the model differs from that of transformers, one line per difference.
      windows: Layers that may have a sliding window.
      tensors: Tensor of the checkpoint -> path of the parameter, where `modules` does not lead to it.
      flipped: Those of `tensors` that are stored as the transpose.
      copies: Tensor that a checkpoint may hold beside the parameter that it equals -> path of that parameter. Of tied models.
      ignored: Regular expression of tensors that the model does not compute with.
      renamed: Last part of a tensor's name in older checkpoints -> its name now.
      pads_before_positions: True if the position of a token is counted from pad_token_id + 1, so that the rows of the table of
          positions before that row belong to no position.
      has_labels: True if id2label names the classes of the model.
      model: The model.
      config: Dataclass of its config.
      task: The task of such models, a key of TASKS.
      loader: Class of transformers that loads the checkpoint.
    """

    model_type: str
    architecture: str
    fields: dict[str, tuple[str, ...]]
    activation: str
    activations: dict[str, str]
    fixed: dict[str, Any]
    defaults: dict[str, Any]
    accepted: dict[str, tuple[Any, ...]]
    modules: dict[str, tuple[str, ...]]
    base: str
    transposed: bool
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = _read_nothing
    write: Callable[[ModelConfig], dict[str, Any]] = _write_nothing
    remarks: Callable[[Mapping[str, Any]], list[str]] = _no_remarks
    windows: WindowLayers = WindowLayers.NONE
    tensors: dict[str, str] = dataclasses.field(default_factory=dict)
    flipped: tuple[str, ...] = ()
    copies: dict[str, str] = dataclasses.field(default_factory=lambda: {"lm_head.weight": "embed/table"})
    # Causal masks and rotary frequencies, which older checkpoints hold.
    ignored: str = r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$"
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    omits_base: bool = False
    free: tuple[str, ...] = ()
    pads_before_positions: bool = False
    has_labels: bool = False
    model: Any = LM
    config: type[ModelConfig] = LMConfig
    task: str = "lm"
    loader: str = "AutoModelForCausalLM"


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """Settings of a checkpoint that the config of a model lacks.

    Attributes:
      bos_id: Id of bos in the tokenizer, for `generate` of transformers.
      eos_id: Id of eos in the tokenizer, for `generate` of transformers.
      pad_id: Id of padding in the tokenizer, from which RoBERTa counts positions: the table of positions is written with as
        many rows before the first position.
      labels: Names of the classes, for a model with classes.
      seq_len: Largest number of tokens of a text of a dual encoder; 0 for max_len.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    labels: Sequence[str] | None = None
    seq_len: int = 0
