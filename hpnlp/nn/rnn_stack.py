"""Stacks of recurrent layers, with dropout between the layers and penalties of the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.cost.parts import part
from hpnlp.model_interfaces.ranges import rate_option
from hpnlp.nn.layers import dropout
from hpnlp.nn.rnn import RecurrentInputs, RecurrentLayer, Regularization, State, build_layers
from hpnlp.types import InputError, option


@dataclasses.dataclass(frozen=True)
class StackConfig(Regularization):
    """A stack of recurrent layers."""

    cells: str = option(
        "lstm(256)*2",
        'Layers from the inputs to the outputs, entries of nn.rnn.CELLS with their widths, as in "lstm(512)*2,lstm(400)": '
        '"lstm(width, norm=True)", "gru(width, form=original)", "mgu(...)", "qrnn(width, width=2, pooling=fo)", "sru(width)"; '
        "forget_bias of lstm and qrnn, reset_bias of gru and mgu: the initial bias of these gates.",
    )
    initial: str = option(
        "zeros", 'State before the first token of a document: "zeros" or "learned".', among=("zeros", "learned")
    )
    outputs: str = option(
        "last",
        '"last" layer, or the "sum" of the outputs of all layers, which then have one width.',
        among=("last", "sum"),
    )
    input_dropout: float = rate_option("Dropout of the inputs of the first layer.")
    layer_dropout: float = rate_option("Dropout of the inputs of all layers but the first (Zaremba et al. 2014).")
    output_dropout: float = rate_option("Dropout of the outputs of the last layer.")
    variational: bool = option(
        False, "One mask of inputs, layers and outputs for all tokens of a sequence (Gal and Ghahramani 2016)."
    )
    activation_penalty: float = option(
        0.0,
        "Factor of the mean square of the dropped outputs (Merity et al. 2017, AR), as the loss activation_loss.",
        least=0,
    )
    temporal_penalty: float = option(
        0.0,
        "Factor of the mean square of differences of neighbouring outputs (TAR), as the loss temporal_loss.",
        least=0,
    )
    impl: str = option("xla", '"xla", or "cudnn" for plain LSTMs on NVIDIA GPUs.', among=("xla", "cudnn"))

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self.widths()
        if self.outputs == "sum" and len(set(widths)) > 1:
            raise InputError(
                f"model.outputs='sum': the layers of model.cells={self.cells!r} have several widths: use one"
            )

    def regularization(self) -> Regularization:
        """The rates within layers.

        Returns:
          The rates.
        """
        return Regularization(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Regularization)})

    def layer_modules(self, reverse: bool = False) -> list[RecurrentLayer]:
        """The layers.

        Args:
          reverse: Whether they read tokens from the last to the first.

        Returns:
          Modules.

        Raises:
          InputError: As `build_layers`.
        """
        fields = {"regularization": self.regularization(), "initial": self.initial, "impl": self.impl}
        return build_layers(self.cells, **fields, reverse=reverse)

    def widths(self) -> list[int]:
        """Widths of the layers.

        Returns:
          A number for each layer.
        """
        return [layer.features for layer in self.layer_modules()]


class RecurrentStack(nn.Module):
    """Recurrent layers one after another, with dropout between them.

    Attributes:
      config: The layers and their regularization, a StackConfig.
      bidirectional: Whether each layer has two directions, whose outputs stand side by side.
    """

    config: Any
    bidirectional: bool = False

    @nn.compact
    @part("mixing")
    def __call__(
        self, x: Float[Array, "B T D"], inputs: RecurrentInputs, states: Sequence[State] | None = None
    ) -> tuple[Float[Array, "B T H"], tuple[State, ...], dict[str, Array]]:
        """Runs the layers.

        Args:
          x: Inputs.
          inputs: Resets, lengths and dropout. Resets of the other direction follow from `reset`, where it begins segments.
          states: State of each layer before the first token, for one direction; None for the initial states.

        Returns:
          `(outputs, the states after the last token, raw outputs "raw" and dropped outputs "dropped" for penalties)`.

        Raises:
          InputError: Both directions, and states or a cell that reads forwards only.
        """
        c = self.config
        if self.bidirectional and states is not None:
            raise InputError(
                "a bidirectional stack reads whole sequences, and has no states of earlier tokens: pass None"
            )
        x = self._dropped(x, c.input_dropout, inputs)
        new_states, outputs, raw = [], [], x
        for index, layer in enumerate(c.layer_modules()):
            if index:
                x = self._dropped(raw, c.layer_dropout, inputs)
            module = layer.clone(parent=self)
            y, state = module(x, inputs, None if states is None else states[index])
            if self.bidirectional:
                y = jnp.concatenate([y, self._backwards(layer, x, inputs)], axis=-1)
            new_states.append(state)
            outputs.append(y)
            raw = y
        if c.outputs == "sum":
            raw = sum(outputs[1:], outputs[0])
        y = self._dropped(raw, c.output_dropout, inputs)
        return y, tuple(new_states), {"raw": raw, "dropped": y}

    def _backwards(self, layer: RecurrentLayer, x: Array, inputs: RecurrentInputs) -> Array:
        """The outputs of a layer that reads tokens from the last to the first."""
        reset = inputs.reset
        if reset is not None:
            # A token that begins a segment forwards ends the one before it, which begins it backwards.
            reset = jnp.pad(reset[:, 1:], ((0, 0), (0, 1)))
        module = layer.clone(reverse=True, name=f"{layer.name}_reverse", parent=self)
        module.check()
        return module(x, dataclasses.replace(inputs, reset=reset))[0]

    def _dropped(self, x: Array, rate: float, inputs: RecurrentInputs) -> Array:
        if inputs.deterministic or not rate:
            return x
        ids = inputs.ids[:, :1] if self.config.variational else inputs.ids
        return dropout(x, rate, self.make_rng("dropout"), ids)
