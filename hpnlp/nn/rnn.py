"""Recurrent layers, which `nn.rnn_stack` runs one after another.

CELLS lists the layers by their name in `model.cells`. Each has a width of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hpnlp.model_interfaces.ranges import LIMITS, rate_option
from hpnlp.nn.layers import dense_init, param
from hpnlp.ops import rnn as ops
from hpnlp.ops.rnn import LSTMNorms, StepMasks, drop_weights, dropout_factors, zoneout_shares
from hpnlp.spec import build, parse
from hpnlp.types import InputError, check_options

State = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Regularization:
    """Dropout within recurrent layers, in training; rates of 0 switch it off."""

    hidden_dropout: float = rate_option(
        "Dropout of the hidden state in recurrent products, one mask per sequence (Gal and Ghahramani 2016)."
    )
    candidate_dropout: float = rate_option(
        "Dropout of the candidate that is added to the state, per step (Semeniuta et al. 2016)."
    )
    zoneout: float = rate_option("Share of the hidden state that a step leaves as it was (Krueger et al. 2017).")
    zoneout_cell: float = rate_option("The same of the cell state of LSTMs, and of the state of QRNNs.")
    weight_drop: float = rate_option(
        "Dropout of recurrent weights, one mask per forward pass (Wan et al. 2013, Merity et al. 2018)."
    )

    def __post_init__(self) -> None:
        check_options(self, "model")

    def active(self) -> list[str]:
        """Names of the rates over 0.

        Returns:
          The names.
        """
        return [field.name for field in dataclasses.fields(Regularization) if getattr(self, field.name)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentInputs:
    """Inputs that all layers of a stack share.

    Attributes:
      reset: bool `[B, T]`, True for tokens before which the state is the initial one; None for none.
      lengths: int32 `[B]`, tokens of each sequence; None for T.
      ids: int32 `[B, T]`, a number for each token, on which dropout depends; None without dropout.
      deterministic: True switches dropout off, and takes expectations of zoneout.
    """

    reset: Any = None
    lengths: Any = None
    ids: Any = None
    deterministic: bool = dataclasses.field(default=True, metadata={"static": True})


class RecurrentLayer(nn.Module):
    """A recurrent layer that reads tokens in one direction. Subclasses are the entries of CELLS.

    The model sets the fields after `features`; fields that subclasses add are arguments of a spec string.

    Attributes:
      features: Features H of the hidden state.
      regularization: Dropout within the layer.
      initial: "zeros", or "learned" for a parameter for each array of the state.
      reverse: Whether tokens are read from the last to the first.
      impl: "xla" or "cudnn".
    """

    features: int = 256
    regularization: Regularization = Regularization()  # noqa: RUF009  (frozen)
    initial: str = "zeros"
    reverse: bool = False
    impl: str = "xla"

    # Rates of the regularization that the layer supports.
    supports: ClassVar[frozenset[str]] = frozenset()
    # Arrays [B, H] of the state.
    states: ClassVar[int] = 1
    # Number of gates, in the order of the columns of the matrices.
    gates: ClassVar[int] = 0

    def check(self) -> None:
        """Checks the options.

        Raises:
          InputError: A width is out of range, or the layer does not support an option.
        """
        name = type(self).__name__
        if not 1 <= self.features <= LIMITS["dim"]:
            raise InputError(f"model.cells: {name} of {self.features} features: expected 1 to {LIMITS['dim']}")
        for rate in self.regularization.active():
            if rate not in self.supports:
                raise InputError(
                    f"model.{rate}={getattr(self.regularization, rate)}: {name} does not support it: set it to 0, or choose "
                    "another cell"
                )
        if self.impl != "xla" and not isinstance(self, LSTM):
            raise InputError(f"model.impl={self.impl!r}: {name} has no such implementation: set it to 'xla'")

    def matrix_size(self, dim: int) -> int:
        """Number of weights in the matrices.

        Args:
          dim: Features of the inputs.

        Returns:
          The number.
        """
        return (dim + self.features) * self.gates * self.features

    def state_shapes(self, dim: int) -> list[tuple[int, ...]]:
        """Shapes of the state without the axis of sequences.

        Args:
          dim: Features of the inputs.

        Returns:
          A shape for each array.
        """
        return [(self.features,)] * self.states

    def initial_state(self) -> State | None:
        """The learned state before the first token, arrays `[H]`; None for zeros. Called in a compact method.

        Returns:
          The state.
        """
        if self.initial == "zeros":
            return None
        zeros, names = nn.initializers.zeros, ("h0", "c0")
        return tuple(param(self, names[i], zeros, (self.features,), ("hidden",)) for i in range(self.states))

    def matrices(self, dim: int, inputs: RecurrentInputs) -> tuple[Any, Any, Any]:
        """The parameters kernel `[D, G H]`, recurrent `[H, G H]`, from which weights may be dropped, and bias `[G H]`.

        Args:
          dim: Features of the inputs D.
          inputs: Inputs of the layer.

        Returns:
          The three parameters.
        """
        size, columns = self.features, self.gates * self.features
        w = param(self, "kernel", dense_init, (dim, columns), ("embed", "gates"))
        u = param(self, "recurrent", _orthogonal_gates, (size, columns), ("embed", "gates"))
        if self.regularization.weight_drop and not inputs.deterministic:
            u = drop_weights(u, self.make_rng("dropout"), self.regularization.weight_drop)
        return w, u, param(self, "bias", self.bias_init, (columns,), ("gates",))

    def bias_init(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Initial biases of the gates.

        Args:
          key: Not read.
          shape: `(G H,)`.
          dtype: Dtype of the biases.

        Returns:
          Zeros, unless a subclass overrides this method.
        """
        return jnp.zeros(shape, dtype)

    def step_masks(self, inputs: RecurrentInputs) -> StepMasks:
        """The masks of the regularization.

        Args:
          inputs: Inputs of the layer.

        Returns:
          The masks; zoneout has some in evaluation, too.
        """
        r, size, ids = self.regularization, self.features, inputs.ids
        masks: dict[str, Any] = {}
        if not inputs.deterministic:
            if r.hidden_dropout:
                masks["hidden"] = dropout_factors(self.make_rng("dropout"), ids[:, :1], size, r.hidden_dropout)
            if r.candidate_dropout:
                masks["candidate"] = dropout_factors(self.make_rng("dropout"), ids, size, r.candidate_dropout)
        for name, rate in (("hold_h", r.zoneout), ("hold_c", r.zoneout_cell)):
            if rate and inputs.deterministic:
                masks[name] = jnp.full((1, 1, size), rate, jnp.float32)
            elif rate:
                masks[name] = zoneout_shares(self.make_rng("dropout"), ids, size, rate, False)
        return StepMasks(**masks)

    def __call__(
        self, x: Float[Array, "B T D"], inputs: RecurrentInputs, state: State | None = None
    ) -> tuple[Float[Array, "B T H"], State]:
        """Runs the layer.

        Args:
          x: Inputs.
          inputs: Resets, lengths and dropout.
          state: State before the first token; None for the initial state.

        Returns:
          `(hidden state of each token, state after the last token that is read)`.
        """
        raise NotImplementedError


class LSTM(RecurrentLayer):
    """Long short-term memory with the gates i, f, g, o; see `ops.rnn.lstm`.

    Attributes:
      norm: Layer normalisation of each product and of the cell state (Ba et al. 2016).
      forget_bias: Initial bias of the forget gates (Gers et al. 2000; 1 in Jozefowicz et al. 2015).
    """

    norm: bool = False
    forget_bias: int | float = 1.0

    supports: ClassVar[frozenset[str]] = frozenset(field.name for field in dataclasses.fields(Regularization))
    states: ClassVar[int] = 2
    gates: ClassVar[int] = 4

    def bias_init(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return jnp.zeros(shape, dtype).at[self.features : 2 * self.features].set(self.forget_bias)

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: RecurrentInputs, state: State | None = None
    ) -> tuple[Float[Array, "B T H"], State]:
        w, u, b = self.matrices(x.shape[-1], inputs)
        return ops.lstm(
            x, w, u, b, state,
            initial=self.initial_state(),
            norms=self._norms() if self.norm else None,
            masks=self.step_masks(inputs),
            reset=inputs.reset,
            lengths=inputs.lengths,
            reverse=self.reverse,
            impl=self.impl,
        )  # fmt: skip

    def _norms(self) -> LSTMNorms:
        sizes = {"x": self.gates * self.features, "u": self.gates * self.features, "c": self.features}
        inits = {"scale": nn.initializers.ones, "bias": nn.initializers.zeros}
        fields = {
            f"{part}_{name}": param(self, f"{part}_{name}", init, (size,), ("gates",))
            for part, size in sizes.items()
            for name, init in inits.items()
        }
        return LSTMNorms(**fields)


class GRU(RecurrentLayer):
    """Gated recurrent unit with the gates r, z, n; see `ops.rnn.gru`.

    Attributes:
      form: "cudnn" or "original".
      reset_bias: Initial bias of the reset gates.
    """

    form: str = "cudnn"
    reset_bias: int | float = -1.0

    supports: ClassVar[frozenset[str]] = frozenset(("hidden_dropout", "candidate_dropout", "zoneout", "weight_drop"))
    gates: ClassVar[int] = 3

    def check(self) -> None:
        super().check()
        if self.form not in ("cudnn", "original"):
            raise InputError(f"model.cells: form={self.form!r}: expected 'cudnn' or 'original'")

    def bias_init(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return jnp.zeros(shape, dtype).at[: self.features].set(self.reset_bias)

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: RecurrentInputs, state: State | None = None
    ) -> tuple[Float[Array, "B T H"], State]:
        w, u, b = self.matrices(x.shape[-1], inputs)
        zeros = nn.initializers.zeros
        n_bias = param(self, "n_bias", zeros, (self.features,), ("hidden",)) if self.form == "cudnn" else None
        return self.operation()(
            x, w, u, b, n_bias, state,
            form=self.form,
            initial=self.initial_state(),
            masks=self.step_masks(inputs),
            reset=inputs.reset,
            lengths=inputs.lengths,
            reverse=self.reverse,
        )  # fmt: skip

    def operation(self) -> Callable[..., Any]:
        """The function of `ops.rnn` that computes the layer.

        Returns:
          `gru`; subclasses return another function with the same arguments.
        """
        return ops.gru


class MinimalGatedUnit(GRU):
    """Minimal gated unit with the gates f, n; see `ops.rnn.minimal_gated_unit`.

    A gate f of 0 keeps the state; its bias begins with `reset_bias`, by default so that 0.73 of the state is kept, as by a
    forget bias of 1.
    """

    form: str = "original"

    gates: ClassVar[int] = 2

    def operation(self) -> Callable[..., Any]:
        return ops.minimal_gated_unit


class QRNN(RecurrentLayer):
    """Quasi-recurrent network; see `ops.rnn.qrnn`.

    Attributes:
      width: Tokens W that a gate reads.
      pooling: "f", "fo" or "ifo".
      forget_bias: Initial bias of the forget gates.
    """

    width: int = 2
    pooling: str = "fo"
    forget_bias: int | float = 1.0

    supports: ClassVar[frozenset[str]] = frozenset(("zoneout_cell", "weight_drop"))

    def check(self) -> None:
        super().check()
        if self.pooling not in ops.POOLINGS or self.width < 1:
            raise InputError(
                f"model.cells: width={self.width}, pooling={self.pooling!r}: expected a width of at least 1 and one of "
                f"{', '.join(ops.POOLINGS)}"
            )
        if self.initial != "zeros":
            raise InputError(
                "model.cells: qrnn begins with a state of zeros only: set model.initial='zeros', or choose another cell"
            )

    def matrix_size(self, dim: int) -> int:
        return self.width * dim * ops.POOLINGS[self.pooling] * self.features

    def state_shapes(self, dim: int) -> list[tuple[int, ...]]:
        return [(self.features,), (self.width - 1, dim)]

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: RecurrentInputs, state: State | None = None
    ) -> tuple[Float[Array, "B T H"], State]:
        columns = ops.POOLINGS[self.pooling] * self.features
        w = param(self, "kernel", dense_init, (self.width * x.shape[-1], columns), ("embed", "gates"))
        if self.regularization.weight_drop and not inputs.deterministic:
            w = drop_weights(w, self.make_rng("dropout"), self.regularization.weight_drop)
        b = param(self, "bias", self.bias_init, (columns,), ("gates",))
        hold = self.step_masks(inputs).hold_c
        options = {"hold": hold, "reset": inputs.reset, "lengths": inputs.lengths, "reverse": self.reverse}
        before = None if state is None else (state[0], state[1])
        return ops.qrnn(x, w, b, before, width=self.width, pooling=self.pooling, **options)

    def bias_init(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return jnp.zeros(shape, dtype).at[self.features : 2 * self.features].set(self.forget_bias)


class SRU(RecurrentLayer):
    """Simple recurrent unit; see `ops.rnn.sru`."""

    def check(self) -> None:
        super().check()
        if self.reverse or self.initial != "zeros":
            raise InputError("model.cells: sru reads forwards from a state of zeros only: choose another cell")

    def matrix_size(self, dim: int) -> int:
        return dim * (3 if dim == self.features else 4) * self.features

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: RecurrentInputs, state: State | None = None
    ) -> tuple[Float[Array, "B T H"], State]:
        dim, size = x.shape[-1], self.features
        columns = (3 if dim == size else 4) * size
        w = param(self, "kernel", dense_init, (dim, columns), ("embed", "gates"))
        b = param(self, "bias", nn.initializers.zeros, (2 * size,), ("gates",))
        c = None if state is None else state[0]
        y, c = ops.sru(x, w, b, c, features=size, reset=inputs.reset, lengths=inputs.lengths)
        return y, (c,)


CELLS: dict[str, type[RecurrentLayer]] = {
    "lstm": LSTM,
    "gru": GRU,
    "mgu": MinimalGatedUnit,
    "qrnn": QRNN,
    "sru": SRU,
}


def build_layers(cells: str, **fields: Any) -> list[RecurrentLayer]:
    """The layers of a stack.

    Args:
      cells: `model.cells`, as in "lstm(512)*2,lstm(400)": entries of CELLS, of which the first argument is the width.
      **fields: The fields that a spec cannot set.

    Returns:
      Modules, named "layer_0" and so on where they are submodules.

    Raises:
      InputError: Unknown names, or wrong arguments.
    """
    layers = []
    for spec in parse(cells, "model.cells"):
        for _ in range(spec.repeat):
            name = f"layer_{len(layers)}"
            layer = build(dataclasses.replace(spec, repeat=1), CELLS, "cell", **fields, name=name, parent=None)
            layer.check()
            layers.append(layer)
    return layers


def _orthogonal_gates(key: Array, shape: tuple[int, int], dtype: DTypeLike) -> Array:
    """An orthogonal matrix for each gate."""
    count = shape[1] // shape[0]
    init = nn.initializers.orthogonal()
    return jnp.concatenate([init(k, (shape[0], shape[0]), dtype) for k in jax.random.split(key, count)], axis=1)
