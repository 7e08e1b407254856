"""Linear attention with decays and gated outputs: retention, gated linear attention and the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import Dense, buffer, param
from hpnlp.nn.mixers.checks import check_mask, dropout_option
from hpnlp.nn.mixers.linear import chunk_option, extend, mix
from hpnlp.ops.attention import Causal
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.convolutions.convolution import causal_conv, last_tokens
from hpnlp.ops.norms import layer_norm, rms_norm
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option

TEMPERATURE = 16.0  # tau of gated linear attention: the decay is this root of the gate
MAX_CONV = 128  # the convolution has one term for each token of the width
LARGEST_RATE = 16.0  # upper bound of initial decay rates of the gated delta rule
STEPS = 1e-3, 1e-1  # least and largest initial step size that multiplies the rate


def _eps_option() -> Any:
    # Positive, so that the norm of outputs of zeros is 0 and not NaN.
    return option(1e-5, "Added to variances in the norm of the outputs.", above=0)


class GatedMixer(Mixer):
    """A causal mixer with a state of constant size; subclasses define `mixed`."""

    needs: ClassVar[Mapping[str, Projection]] = {}
    traits: ClassVar[MixerTraits] = MixerTraits(bidirectional=False)

    chunk: int = chunk_option()
    dropout: float = dropout_option("Ignored: there are no attention probabilities.", has_effect=False)

    def mixed(self, inputs: MixerInputs, cache: PyTree) -> tuple[jax.Array, Any]:
        """Mixes tokens.

        Args:
          inputs: The tokens.
          cache: Cache of the preceding tokens; None for none.

        Returns:
          `(o [B, T, N, H], the cache with these tokens, or None)`.
        """
        raise NotImplementedError

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        self.within(mask)
        o, cache = self.mixed(inputs, None)
        return MixerOutput(o, cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: Any) -> tuple[jax.Array, Any]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: Projections of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the cache with these tokens)`.
        """
        self.within(mask)
        return self.mixed(inputs, cache)

    def within(self, mask: AnyMask) -> Any:
        """The mask of the pairs that influence each other.

        Args:
          mask: `Causal()`.

        Returns:
          The mask.

        Raises:
          InputError: Another mask.
        """
        return check_mask(type(self).__name__, mask, Causal())


def _run(
    inputs: MixerInputs, cache: Any, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
) -> tuple[jax.Array, Any]:
    """`mix`, or `extend` with a cache: `(o, cache or None)`."""
    if cache is not None:
        return extend(q, k, v, cache, **options)
    out = mix(inputs, q, k, v, **options)
    return out.o, out.cache


class RetentionMixer(GatedMixer):
    """Attention without softmax whose weights decay with the distance, at a rate of its own in each head.

    `o_t = sum_s gamma^(t-s) (q_t . k_s) v_s / sqrt(H)` with gamma = 1 - 2^(-5-h) in key head h. Outputs of a head are
    normalised to mean 0 and variance 1, without parameters, and multiplied by silu(gate). With `model.position="rope"`, queries
    and keys are rotated, as in the paper, whose xPos has another decay besides. Decays are buffers, which training does not
    change.

    Cost: that of `linear` without the normaliser, and the projection of the gate. The cache has H^2 numbers per key head.

    References: Sun et al. 2023, "Retentive network", arXiv 2307.08621, eq. 5 to 8. Values and gates of the paper are twice as
    wide as queries; here all have width H.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
        "gate": Projection("heads"),
    }

    eps: float = _eps_option()

    @nn.compact
    def mixed(self, inputs: MixerInputs, cache: PyTree) -> tuple[jax.Array, Any]:
        """Retention; see `GatedMixer.mixed`.

        Args:
          inputs: q, k, v and the projection "gate".
          cache: A LinearState, or None.

        Returns:
          `(o, the cache with these tokens, or None)`.
        """
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        # The state belongs to a key head, so that the queries of a group have one decay.
        log_decay = buffer(self, "log_decay", _retention_rates, inputs.k.shape[2:3], ("kv_heads",))
        q = inputs.q.astype(jnp.float32) * inputs.q.shape[-1] ** -0.5
        o, cache = _run(inputs, cache, q, inputs.k, inputs.v, log_decay=log_decay, chunk=self.chunk)
        features = o.shape[-1:]
        o = layer_norm(o, jnp.ones(features, jnp.float32), jnp.zeros(features, jnp.float32), self.eps)
        return _gated(o, inputs), cache


def _retention_rates(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """log(1 - 2^(-5-h)) for each head h."""
    return jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(shape[0], dtype=dtype)))


class GLAMixer(GatedMixer):
    """Linear attention in which each feature of a key decays by a gate of its own that depends on the token.

    The decay is `sigmoid(x A B + b)^(1/16)`, with A `[D, R]` and B `[R, K H]`. Outputs of a head are normalised (RMS, with a
    scale), and multiplied by silu(gate). There is no rotation by positions.

    Cost: that of `linear` without the normaliser, log2(C) exponentials per feature for chunks of C tokens, and the projections
    of gates and decays. The cache has H^2 numbers per key head.

    References: Yang et al. 2023, "Gated linear attention transformers with hardware-efficient training", arXiv 2312.06635,
    eq. 3 and sec. 4.4. Keys of the paper are half as wide as its values; here both have width H.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True),
        "k": Projection("kv_heads", norm=True),
        "v": Projection("kv_heads"),
        "gate": Projection("heads"),
    }

    rank: int = option(16, "Inner size R of the projection of the decay.", least=1)
    eps: float = _eps_option()

    @nn.compact
    def mixed(self, inputs: MixerInputs, cache: PyTree) -> tuple[jax.Array, Any]:
        """Gated linear attention; see `GatedMixer.mixed`.

        Args:
          inputs: x, q, k, v and the projection "gate".
          cache: A LinearState, or None.

        Returns:
          `(o, the cache with these tokens, or None)`.
        """
        assert inputs.x is not None and inputs.q is not None and inputs.k is not None and inputs.v is not None
        features = inputs.k.shape[2] * inputs.k.shape[3]
        low = Dense(self.rank, ("embed", "rank"), name="decay_down")(inputs.x)
        logits = Dense(features, ("rank", "kv_heads"), use_bias=True, name="decay_up")(low)
        log_decay = nn.log_sigmoid(logits.astype(jnp.float32)).reshape(inputs.k.shape) / TEMPERATURE
        q = inputs.q.astype(jnp.float32) * inputs.q.shape[-1] ** -0.5
        o, cache = _run(inputs, cache, q, inputs.k, inputs.v, log_decay=log_decay, chunk=self.chunk)
        return _normalized_and_gated(self, o, inputs, self.eps), cache


def _gated(o: jax.Array, inputs: MixerInputs) -> jax.Array:
    """Float32 outputs times silu(gate), in the dtype of the projections."""
    gate = inputs.projections["gate"]
    return (o * nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def _normalized_and_gated(module: nn.Module, o: jax.Array, inputs: MixerInputs, eps: float) -> jax.Array:
    """RMS norm of the outputs of each head, with a scale that all heads share, times silu(gate)."""
    scale = param(module, "scale", nn.initializers.ones, o.shape[-1:], ("head_dim",))
    return _gated(rms_norm(o, scale, eps), inputs)


class GatedDeltaMixer(GatedMixer):
    """A state of associations from keys to values, each of which a later token with the same key replaces.

    `S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T` and `o_t = S_t^T q_t / sqrt(H)`. Queries, keys and values
    pass through a causal depthwise convolution and silu; queries and keys then have length 1. `beta = sigmoid(.)` and
    `alpha = exp(-a softplus(. + b))` are projections of the hidden states, with a rate a and a bias b for each key head.
    Outputs of a head are normalised (RMS, with a scale), and multiplied by silu(gate). There is no rotation by positions.

    Cost: that of `linear` without the normaliser, and a triangular system of C equations for each chunk and head. The cache has
    H^2 numbers per key head, and W - 1 tokens.

    References: Yang et al. 2024, "Gated delta networks", arXiv 2412.06464, eq. 10 and fig. 1.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads"),
        "k": Projection("kv_heads"),
        "v": Projection("kv_heads"),
        "gate": Projection("heads"),
        "alpha": Projection("kv_heads", width=1),
        "beta": Projection("kv_heads", width=1),
    }

    conv: int = option(4, "Number of tokens W of the convolutions; 0 for none.", least=0, most=MAX_CONV)
    eps: float = _eps_option()

    @nn.compact
    def mixed(self, inputs: MixerInputs, cache: PyTree) -> tuple[jax.Array, Any]:
        """The gated delta rule; see `GatedMixer.mixed`.

        Args:
          inputs: q, k, v and the projections "gate", "alpha" and "beta".
          cache: `{"state": LinearState, "q", "k", "v": the last W - 1 tokens before the convolution}`, or None.

        Returns:
          `(o, the cache with these tokens, or None)`.
        """
        arrays: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        tails: dict[str, Any] = {}
        if self.conv:
            for name, x in arrays.items():
                axes = ("taps", self.needs[name].axis, "head_dim")
                init = nn.initializers.normal(self.conv**-0.5)
                taps = param(self, f"{name}_taps", init, (self.conv, *x.shape[2:]), axes)
                arrays[name], tails[name] = _convolved(x, taps, inputs, None if cache is None else cache[name])
        q, k, v = (nn.silu(x.astype(jnp.float32)) for x in arrays.values())
        q, k = _unit_vectors(q) * q.shape[-1] ** -0.5, _unit_vectors(k)
        heads = k.shape[2:3]
        rate = param(self, "log_rate", _log_rates, heads, ("kv_heads",))
        bias = param(self, "step_bias", _step_biases, heads, ("kv_heads",))
        alpha, beta = (inputs.projections[name][..., 0].astype(jnp.float32) for name in ("alpha", "beta"))
        log_decay = -jnp.exp(rate)[None, None] * nn.softplus(alpha + bias[None, None])
        options = {"log_decay": log_decay, "beta": nn.sigmoid(beta), "chunk": self.chunk}
        o, state = _run(inputs, None if cache is None else cache["state"], q, k, v, **options)
        o = _normalized_and_gated(self, o, inputs, self.eps)
        return o, None if state is None else {"state": state, **tails}


def _unit_vectors(x: jax.Array) -> jax.Array:
    """float32 vectors of length 1 along the last axis."""
    size = x.shape[-1]
    return rms_norm(x.astype(jnp.float32), jnp.full(size, size**-0.5, jnp.float32), 1e-6 / size)


def _log_rates(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Logarithms of rates that are uniform in [0, LARGEST_RATE]."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1e-4, LARGEST_RATE))


def _step_biases(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Biases whose softplus is log-uniform in STEPS."""
    least, largest = (jnp.log(jnp.asarray(step, dtype)) for step in STEPS)
    return jnp.log(jnp.expm1(jnp.exp(jax.random.uniform(key, shape, dtype, least, largest))))


def _convolved(x: jax.Array, taps: jax.Array, inputs: MixerInputs, tail: jax.Array | None) -> tuple[jax.Array, Any]:
    """The causal convolution of heads `[B, T, N, H]`, and the last W - 1 tokens for the cache, or None."""
    width, (batch, length, *heads) = taps.shape[0], x.shape
    x, taps = x.reshape(batch, length, -1), taps.reshape(width, -1)
    if tail is not None:
        x = jnp.concatenate([tail, x], axis=1)
        y = causal_conv(x.astype(jnp.float32), taps)[:, width - 1 :]
        return y.reshape(batch, length, *heads), x[:, x.shape[1] - (width - 1) :]
    y = causal_conv(x.astype(jnp.float32), taps, inputs.segment_ids).reshape(batch, length, *heads)
    if inputs.capacity is None:
        return y, None
    return y, last_tokens(x, inputs.lengths(), width - 1)
