"""Mixers of both directions whose cost is linear in the length: Linformer, Nystromformer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import param
from hpnlp.nn.mixers.checks import check_has_effect, check_mask, dropout_option
from hpnlp.ops.attention import Full, attend
from hpnlp.ops.attention.low_rank.compression import convolve_tokens, padding_ids, pool_tokens, project_tokens
from hpnlp.ops.attention.low_rank.nystrom import nystrom_attend
from hpnlp.ops.attention.low_rank.value_conv import value_conv
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection, option

MAX_WIDTH = 513  # products of Nystromformer's convolution grow with its width
# Every output depends on all tokens of the sequence but padding.
TRAITS = MixerTraits(causal=False, prefix_consistent=False, isolates_segments=False, any_padding=False, decodes=False)
NEEDS: Mapping[str, Projection] = {
    "q": Projection("heads", norm=True, rope=True),
    "k": Projection("kv_heads", norm=True, rope=True),
    "v": Projection("kv_heads"),
}


def real_tokens(inputs: MixerInputs) -> jax.Array | None:
    """The tokens of a sequence that are no padding.

    Args:
      inputs: Inputs of a mixer.

    Returns:
      bool `[B, T]`, True for positive segment ids; None without segment ids.
    """
    return None if inputs.segment_ids is None else inputs.segment_ids > 0


def length_param(module: nn.Module, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
    """A parameter with an axis "positions" for sequences of one length, of which shorter sequences use the beginning.

    Args:
      module: The module.
      name: Name of the parameter.
      init: Initialiser.
      shape: Shape for the sequence at hand; sizes of axes "positions" are its length.
      axes: Logical names of the axes.

    Returns:
      The parameter, cut to `shape`.

    Raises:
      InputError: The parameter is for shorter sequences.
    """
    stored: Any = nn.meta.unbox(module.get_variable("params", name))
    full = shape
    if stored is not None:
        sizes = zip(axes, stored.shape, shape, strict=True)
        full = tuple(stored_size if axis == "positions" else size for axis, stored_size, size in sizes)
    if any(size > stored_size for size, stored_size in zip(shape, full, strict=True)):
        raise InputError(
            f"{type(module).__name__} has {name} for sequences of {full[axes.index('positions')]} tokens, and these have "
            f"{shape[axes.index('positions')]}: cut them, or make a model of this length"
        )
    value = param(module, name, init, full, axes)
    return value[tuple(slice(size) for size in shape)] if full != shape else value


class AllTokensMixer(Mixer):
    """A mixer of all tokens of a sequence, whose mask is `Full()`.

    Attributes:
      entry: Name in MIXERS, for messages.
    """

    entry: ClassVar[str]

    def within(self, mask: AnyMask) -> Any:
        return check_mask(self.entry, mask, Full(), reason="it mixes all tokens of a sequence")


class LinformerMixer(AllTokensMixer):
    """Softmax attention of all queries to keys and values that are compressed along the sequence.

    Padding contributes to no compressed token, and its output is 0. Several segments of a sequence are mixed.

    Cost: O(B N T R H) time and memory linear in T; with "conv", R = T / width.

    References: Wang et al. 2020, "Linformer: self-attention with linear complexity", eq. 7 and sec. 4. Matrices begin with a
    variance of 1 / T, so that compressed tokens are of the size of the tokens.
    """

    entry: ClassVar[str] = "linformer"
    needs: ClassVar[Mapping[str, Projection]] = NEEDS

    rank: int = option(128, "Number of compressed tokens R, for projection and pool.", least=1)
    compression: str = option(
        "projection",
        "projection, by a learned matrix [R, T] for sequences of one length; pool, by means of windows of ceil(T / R) tokens; "
        "conv, by a depthwise convolution whose width is its stride.",
        among=("projection", "pool", "conv"),
    )
    width: int = option(4, "Tokens in a window of conv.", least=1)
    share: str = option(
        "heads",
        "Matrices of projection: none for two of each key head, heads for one of all keys and one of all values, key_value "
        "for a single one.",
        among=("none", "heads", "key_value"),
    )
    dropout: float = dropout_option()

    @property
    def traits(self) -> MixerTraits:
        return TRAITS if self.compression != "projection" else dataclasses.replace(TRAITS, any_length=False)

    @nn.compact
    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        self.within(mask)
        real = real_tokens(inputs)
        (k, filled), (v, _) = self._compressed(inputs.k, inputs.v, real)
        ids, kv_ids = padding_ids(real, filled)
        rate = 0.0 if inputs.deterministic else self.dropout
        o: Any = attend(
            inputs.q,
            k,
            v,
            segment_ids=ids,
            kv_segment_ids=kv_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        return MixerOutput(o)

    def _compressed(self, k: jax.Array, v: jax.Array, real: jax.Array | None) -> list[tuple[jax.Array, jax.Array]]:
        """Compressed keys and values, and with each the compressed tokens that some token contributes to."""
        length, heads, width = k.shape[1:]
        if self.compression == "pool":
            return [pool_tokens(x, -(-length // self.rank), real) for x in (k, v)]
        if self.compression == "conv":
            mean = nn.initializers.constant(1 / self.width)
            shape, axes = (self.width, heads, width), ("taps", "kv_heads", "head_dim")
            taps = [param(self, f"{name}_taps", mean, shape, axes) for name in ("key", "value")]
            return [convolve_tokens(x, weights, real) for x, weights in zip((k, v), taps, strict=True)]
        shape, axes = (self.rank, length), ("ranks", "positions")
        if self.share == "none":
            shape, axes = (heads, *shape), ("kv_heads", *axes)
        names = ("projection",) if self.share == "key_value" else ("key_projection", "value_projection")
        matrices = [length_param(self, name, nn.initializers.normal(length**-0.5), shape, axes) for name in names]
        filled = jnp.ones((k.shape[0], self.rank), bool)
        return [(project_tokens(x, matrix, real), filled) for x, matrix in zip((k, v), 2 * matrices, strict=False)]


class NystromMixer(AllTokensMixer):
    """Nystrom approximation of softmax attention by landmarks (`nystrom_attend`), and a convolution of the values.

    Padding contributes to nothing, and its output is 0. Several segments of a sequence are mixed.

    Cost: O(B N T (M + W) H) time, and memory linear in T.

    References: Xiong et al. 2021, "Nystromformer", eq. 13 and fig. 2.
    """

    entry: ClassVar[str] = "nystrom"
    needs: ClassVar[Mapping[str, Projection]] = NEEDS
    traits: ClassVar[MixerTraits] = TRAITS

    landmarks: int = option(
        64, "Largest number of landmarks M. Sequences of at most M tokens have exact attention.", least=1
    )
    width: int = option(
        33,
        "Neighbours in the depthwise convolution of each head's values, the token itself included; 0 for none.",
        least=0,
        most=MAX_WIDTH,
        rule=("0 or odd", lambda width: width == 0 or width % 2 == 1),
    )
    dropout: float = dropout_option()

    @nn.compact
    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        self.within(mask)
        real, rate = real_tokens(inputs), 0.0 if inputs.deterministic else self.dropout
        o = nystrom_attend(
            inputs.q,
            inputs.k,
            inputs.v,
            self.landmarks,
            real,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        if not self.width:
            return MixerOutput(o)
        # The variance of PyTorch's convolutions, with which the authors begin.
        init = nn.initializers.normal((3 * self.width) ** -0.5)
        taps = param(self, "taps", init, (self.width, inputs.q.shape[2]), ("taps", "heads"))
        v = inputs.v if real is None else jnp.where(real[..., None, None], inputs.v, jnp.zeros((), inputs.v.dtype))
        near = value_conv(v, taps)
        if real is not None:
            near = jnp.where(real[..., None, None], near, jnp.zeros((), near.dtype))
        return MixerOutput(o + near)


def linformer(
    rank: int | None = None,
    compression: str = "projection",
    *,
    width: int | None = None,
    share: str | None = None,
    dropout: float = 0.0,
    name: str | None = None,
) -> LinformerMixer:
    """Entry of MIXERS: attention to compressed keys and values.

    Args:
      rank: Number of compressed tokens, for projection and pool; 128 if None.
      compression: projection, pool or conv.
      width: Tokens that one compressed token is made of, for conv; 4 if None.
      share: Matrices of projection: none for two of each key head, heads for two, key_value for one; heads if None.
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: An unknown compression or sharing, a rank or width below 1, or an argument that the compression ignores.
    """
    choice = f"compression={compression}"
    if compression == "conv":
        check_has_effect("linformer", choice, "compression=projection or pool", rank=rank)
    else:
        check_has_effect("linformer", choice, "compression=conv", width=width)
    if compression != "projection":
        check_has_effect("linformer", choice, "compression=projection", share=share)
    given = {name: value for name, value in {"rank": rank, "width": width, "share": share}.items() if value is not None}
    return LinformerMixer(compression=compression, **given, dropout=dropout, name=name)
