"""Dilated convolution as a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import param
from hpnlp.nn.mixers.checks import check_mask, dropout_option
from hpnlp.nn.mixers.convolution import MAX_WIDTH
from hpnlp.ops.attention import Causal, Full, Strided, Window
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.convolutions.convolution import dilated_conv, last_tokens
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option

MAX_DILATION = 2**16


class DilatedConvMixer(Mixer):
    """Dilated convolution (`dilated_conv`) of each head, between two ReLUs.

    An output depends on W tokens at distances that are multiples of the dilation d: with a causal mask, on itself and W - 1
    earlier ones; otherwise on (W - 1) // 2 earlier and W // 2 later ones. Layers whose dilation doubles from one to the next
    reach a number of tokens that grows exponentially with their number.

    Cost: B T W N H^2 multiplications. The cache holds d (W - 1) values of each sequence and head.

    References: Kalchbrenner et al. 2016, "Neural machine translation in linear time" (ByteNet), fig. 3. Its residual block is
    this mixer with one head, whose size H is half of D, between the projections of Attention; the norms before the second and
    third ReLU are left out.
    """

    needs: ClassVar[Mapping[str, Projection]] = {"v": Projection("heads")}
    traits: ClassVar[MixerTraits] = MixerTraits()

    width: int = option(3, "Number of taps W.", least=1, most=MAX_WIDTH)
    dilation: int = option(1, "Distance d between neighbouring taps, in tokens.", least=1, most=MAX_DILATION)
    dropout: float = dropout_option("Ignored: a convolution has no attention probabilities.", has_effect=False)

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        self.within(mask)
        assert inputs.v is not None
        values = jax.nn.relu(inputs.v)
        ahead = 0 if mask == Causal() else self.width // 2
        o = self._convolve(values, segment_ids=inputs.segment_ids, ahead=ahead)
        cache = None if inputs.capacity is None else last_tokens(values, inputs.lengths(), self._reach())
        return MixerOutput(o, cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: Values of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Values of the d (W - 1) preceding tokens `[B, d (W - 1), N, H]`, zeros before the sequence.

        Returns:
          `(o [B, T, N, H], the cache of the tokens that follow)`.

        Raises:
          InputError: The mask is not causal.
        """
        check_mask("a convolution with a cache", mask, Causal())
        assert inputs.v is not None
        values = jax.nn.relu(inputs.v)
        o = self._convolve(values, preceding=cache)
        values = jnp.concatenate([cache, values], axis=1)
        return o, values[:, values.shape[1] - self._reach() :]

    def within(self, mask: AnyMask) -> Any:
        """The tokens that the convolution reads.

        Args:
          mask: `Causal()` or `Full()`.

        Returns:
          The mask of the pairs that influence each other.

        Raises:
          InputError: Another mask, which a convolution cannot honour.
        """
        is_causal = check_mask("a convolution", mask, Causal(), Full()) == Causal()
        earlier, later = (self.width - 1, 0) if is_causal else ((self.width - 1) // 2, self.width // 2)
        window = Window(earlier * self.dilation, later * self.dilation)
        return window & Strided(self.dilation) if self.dilation > 1 else window

    def _reach(self) -> int:
        """Number of earlier tokens that a causal convolution reads, and skips."""
        return self.dilation * (self.width - 1)

    @nn.compact
    def _convolve(self, values: jax.Array, **options: Any) -> jax.Array:
        heads, size = values.shape[2:]
        # Not named "kernel": optimizers treat a kernel as one matrix, and this is one for each head and tap. A ReLU before the
        # product leaves half of its inputs.
        init = nn.initializers.normal((2 / (self.width * size)) ** 0.5)
        taps = param(self, "taps", init, (heads, self.width, size, size), ("heads", "taps", "head_dim", "head_dim"))
        return jax.nn.relu(dilated_conv(values, taps, dilation=self.dilation, **options))
