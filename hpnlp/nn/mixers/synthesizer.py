"""Synthesizers: softmax attention whose scores do not need products of queries and keys, and mixtures with such products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import param
from hpnlp.nn.mixers.checks import check_has_effect, dropout_option
from hpnlp.nn.mixers.low_rank import length_param
from hpnlp.ops.attention import Operands
from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.attention.pair_bias import weighted
from hpnlp.ops.attention.synthetic.attend import Factors, synthetic_attend, tiled_scores
from hpnlp.ops.attention.synthetic.factorized_dense import factorized_dense_attend
from hpnlp.ops.attention.synthetic.shared_scores import shared_scores_attend
from hpnlp.spec import did_you_mean
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection, option

DOT = "dot"
KINDS = ("dense", "random", "factorized_dense", "factorized_random")
# Terms that are functions of a token's projection; the others are the same for all sequences.
OF_TOKENS = (DOT, "dense", "factorized_dense")


class SynthesizerMixer(Mixer):
    """Softmax attention whose scores are a weighted sum of terms, for sequences of one length.

    A token's place in the sequence, and not its position in its document, chooses the columns and rows of learned scores.
    Shorter sequences than those of the parameters use the beginning of them.

    Attributes:
      terms: Terms of the scores, of which several are weighted by the softmax of learned numbers:
          "dense", `relu(q + c) W + b` with a matrix W [H, T] of each head;
          "random", learned scores [T, T] of each head, the same for all sequences;
          "factorized_dense", `relu(q + c) W_a` within blocks of `block` keys times `relu(q + c) W_b` for each block;
          "factorized_random", the product of two learned matrices [T, rank] of each head;
          "dot", products of queries and keys, scaled by H ** -0.5.

    Cost: as `attend` with a query and key width of H for "dense" and "dot", and of the rank for "factorized_random". "random"
    has N T^2 parameters; alone, it takes their exponentials once for all short sequences of a batch. Mixtures with
    "factorized_dense" make an array of B N T^2 scores.

    References: Tay et al. 2020, "Synthesizer: rethinking self-attention for transformer models", eqs. 2 to 7. The first layer
    of "dense" is the projection to queries, as in the authors' code, which mixtures share with products of queries and keys.
    """

    terms: tuple[str, ...] = ("dense",)
    rank: int = option(8, "Rank of factorized_random.", least=1)
    block: int = option(0, "Keys in a block of factorized_dense, 0 for the square root of the length.", least=0)
    dropout: float = dropout_option()

    traits: ClassVar[MixerTraits] = MixerTraits(any_length=False, decodes=False)

    @property
    def needs(self) -> Mapping[str, Projection]:
        """Queries where a term is a function of the tokens. Without keys, nothing is gained by fewer values than queries."""
        if DOT in self.terms:
            rotated = {
                "q": Projection("heads", norm=True, rope=True),
                "k": Projection("kv_heads", norm=True, rope=True),
            }
            return {**rotated, "v": Projection("kv_heads")}
        hidden = {"q": Projection("heads")} if set(self.terms) & set(OF_TOKENS) else {}
        return {**hidden, "v": Projection("heads")}

    @nn.compact
    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.v is not None
        mask, rate = self.within(mask), 0.0 if inputs.deterministic else self.dropout
        positions = None if mask.relative else inputs.positions
        operands: dict[str, Any] = {
            "segment_ids": inputs.segment_ids,
            "kv_segment_ids": inputs.segment_ids,
            "positions": positions,
            "kv_positions": positions,
            "dropout_rate": rate,
            "rng": inputs.rng if rate else None,
            "streams": inputs.streams if rate else None,
        }
        if self.terms == ("factorized_dense",) and mask.heads is None:
            a, b = self._tiles(inputs)
            return MixerOutput(factorized_dense_attend(inputs.v, a, b, cast(Mask, mask), Operands(**operands)))
        if self.terms == ("random",):
            del operands["kv_segment_ids"], operands["kv_positions"]
            scores = self._random_scores(inputs)
            return MixerOutput(shared_scores_attend(inputs.v, scores, mask, **operands))
        factors, scores, weights = self._scores(inputs)
        return MixerOutput(synthetic_attend(inputs.v, factors, scores, mask, weights, **operands))

    def within(self, mask: AnyMask) -> Any:
        """The mask itself: scores of all pairs are defined.

        Args:
          mask: A static Mask.

        Returns:
          The mask.
        """
        return mask

    def _scores(self, inputs: MixerInputs) -> tuple[list[Factors], list[jax.Array], list[Any]]:
        """The terms, as weighted factors whose products are scores, and as arrays of scores with their weights."""
        assert inputs.v is not None
        dtype = inputs.v.dtype
        weights: list[Any] = [None] * len(self.terms)
        if len(self.terms) > 1:
            logits = param(self, "mixture", nn.initializers.zeros, (len(self.terms),), ("ranks",))
            weights = list(jax.nn.softmax(logits))
        factors, scores, of_scores = [], [], []
        for term, weight in zip(self.terms, weights, strict=True):
            made, added = _TERMS[term](self, inputs)
            if made is not None:
                factors.append((weighted(made[0], weight).astype(dtype), made[1].astype(dtype)))
            if added is not None:
                by_pair = added.shape[2] > 1  # too large for an array of its products with the weight
                scores.append(added if by_pair else weighted(added, weight))
                of_scores.append(weight if by_pair else None)
        return factors, scores, of_scores

    def dot(self, inputs: MixerInputs) -> tuple[Factors | None, jax.Array | None]:
        """Scaled queries, and keys."""
        assert inputs.q is not None and inputs.k is not None
        return (inputs.q.astype(jnp.float32) * inputs.q.shape[-1] ** -0.5, inputs.k), None

    def dense(self, inputs: MixerInputs) -> tuple[Factors | None, jax.Array | None]:
        """The hidden layer, and the columns of the second one; with the biases of its outputs."""
        hidden = self._hidden("dense", inputs)
        length, heads, width = hidden.shape[1:]
        init = nn.initializers.normal((2 / width) ** 0.5)
        columns = length_param(self, "dense", init, (heads, length, width), ("heads", "positions", "head_dim"))
        bias = length_param(self, "dense_bias", nn.initializers.zeros, (heads, length), ("heads", "positions"))
        return (hidden, columns.transpose(1, 0, 2)[None]), bias[None, :, None]

    def random(self, inputs: MixerInputs) -> tuple[Factors | None, jax.Array | None]:
        """Learned scores of all pairs."""
        return None, self._random_scores(inputs)[None]

    def _random_scores(self, inputs: MixerInputs) -> jax.Array:
        """Learned scores of all pairs, [N, T, T]."""
        length, heads = self._sizes(inputs)
        axes = ("heads", "positions", "positions")
        return length_param(self, "random", nn.initializers.normal(1.0), (heads, length, length), axes)

    def factorized_dense(self, inputs: MixerInputs) -> tuple[Factors | None, jax.Array | None]:
        """Scores within blocks, times scores of blocks."""
        a, b = self._tiles(inputs)
        return None, tiled_scores(a, b, a.shape[1])

    def _tiles(self, inputs: MixerInputs) -> list[jax.Array]:
        """Scores within blocks [B, T, N, A], and of blocks [B, T, N, C], float32."""
        hidden = self._hidden("factorized_dense", inputs)
        length, heads, width = hidden.shape[1:]
        init = nn.initializers.normal((2 / width) ** 0.5)
        block = self.block or math.ceil(length**0.5)
        blocks = -(-length // block)
        stored: Any = [nn.meta.unbox(self.get_variable("params", name)) for name in ("within", "blocks")]
        if stored[0] is not None:  # for sequences of this length, or for longer ones
            block, blocks = (x.shape[2] for x in stored)
        axes = ("heads", "head_dim", "ranks")
        a = param(self, "within", init, (heads, width, block), axes)
        b = param(self, "blocks", init, (heads, width, blocks), axes)
        return [jnp.einsum("btnh,nhc->btnc", hidden, x) for x in (a, b)]

    def factorized_random(self, inputs: MixerInputs) -> tuple[Factors | None, jax.Array | None]:
        """Two learned matrices."""
        length, heads = self._sizes(inputs)
        init, shape = nn.initializers.normal(self.rank**-0.25), (heads, length, self.rank)
        made = (
            length_param(self, f"factor_{side}", init, shape, ("heads", "positions", "ranks")).transpose(1, 0, 2)[None]
            for side in ("queries", "keys")
        )
        return (next(made), next(made)), None

    def _hidden(self, term: str, inputs: MixerInputs) -> jax.Array:
        """The hidden layer of a term, float32 [B, T, N, H]."""
        assert inputs.q is not None
        bias = param(self, f"{term}_hidden", nn.initializers.zeros, inputs.q.shape[2:], ("heads", "head_dim"))
        return jax.nn.relu(inputs.q.astype(jnp.float32) + bias[None, None])

    def _sizes(self, inputs: MixerInputs) -> tuple[int, int]:
        """Tokens of a sequence, and heads."""
        assert inputs.v is not None
        x = inputs.v if inputs.q is None else inputs.q
        return x.shape[1], x.shape[2]


_TERMS: dict[str, Callable[..., tuple[Factors | None, jax.Array | None]]] = {
    DOT: SynthesizerMixer.dot,
    **{kind: getattr(SynthesizerMixer, kind) for kind in KINDS},
}


def synthesizer_dense(*, dropout: float = 0.0, name: str | None = None) -> SynthesizerMixer:
    """Entry of MIXERS: scores by two layers from each token.

    Args:
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.
    """
    return SynthesizerMixer(("dense",), dropout=dropout, name=name)


def synthesizer_random(*, dropout: float = 0.0, name: str | None = None) -> SynthesizerMixer:
    """Entry of MIXERS: learned scores, the same for all sequences.

    Args:
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.
    """
    return SynthesizerMixer(("random",), dropout=dropout, name=name)


def synthesizer_factorized_dense(block: int = 0, *, dropout: float = 0.0, name: str | None = None) -> SynthesizerMixer:
    """Entry of MIXERS: scores within blocks of keys times scores of blocks, both by two layers from each token.

    Args:
      block: Keys in a block, 0 for the square root of the length.
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: A negative block.
    """
    return SynthesizerMixer(("factorized_dense",), block=block, dropout=dropout, name=name)


def synthesizer_factorized_random(rank: int = 8, *, dropout: float = 0.0, name: str | None = None) -> SynthesizerMixer:
    """Entry of MIXERS: learned scores of low rank, the same for all sequences.

    Args:
      rank: Rank of the scores.
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: A rank below 1.
    """
    return SynthesizerMixer(("factorized_random",), rank, dropout=dropout, name=name)


def mixture(
    *terms: str, rank: int | None = None, block: int | None = None, dropout: float = 0.0, name: str | None = None
) -> SynthesizerMixer:
    """Entry of MIXERS: a learned mixture of products of queries and keys with synthesized scores.

    Args:
      *terms: Distinct terms beside the products: dense, random, factorized_dense, factorized_random. None for random.
      rank: Rank of factorized_random, 8 if None.
      block: Keys in a block of factorized_dense; 0 or None for the square root of the length.
      dropout: Rate of dropout on attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: An unknown or repeated term, a rank below 1, a negative block, or an argument of a term that is not there.
    """
    for term in terms:
        if term not in KINDS:
            raise InputError(f"model.mixer=mixture({term}): {did_you_mean(str(term), KINDS)}")
    if len(set(terms)) < len(terms):
        raise InputError(f"model.mixer=mixture({', '.join(terms)}): expected distinct terms")
    terms = terms or ("random",)
    for term, argument in (("factorized_random", {"rank": rank}), ("factorized_dense", {"block": block})):
        if term not in terms:
            check_has_effect("mixture", f"the terms {', '.join(terms)}", f"{term}, too", **argument)
    return SynthesizerMixer((DOT, *terms), 8 if rank is None else rank, block or 0, dropout=dropout, name=name)
