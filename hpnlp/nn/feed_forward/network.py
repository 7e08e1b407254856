"""The base class of feed-forward networks, the position-wise branches of Blocks."""

from __future__ import annotations

from typing import ClassVar

from hpnlp.model_interfaces.branch import Branch
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.nn.layers import Initializer, dense_init
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits


class FeedForward(Branch):
    """The position-wise branch of a Block. Entries of FEED_FORWARDS derive from it, or are functions that return one.

    A network may return statistics and have buffers, with the same members as a mixer. A statistic with an axis "mlp" holds
    one sum per column.

    Attributes:
      hidden: Number of columns F.
      use_bias: Biases on all projections.
      down_init: Initialiser of the projection to the residual stream.
      tensor_parallel: Division of the columns over devices.
    """

    hidden: int
    use_bias: bool = False
    down_init: Initializer = dense_init
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL

    # The network reads `MixerInputs.tokens`.
    reads_tokens: ClassVar[bool] = False
    # Experts may start as copies of the network.
    starts_experts: ClassVar[bool] = False

    @property
    def is_gated(self) -> bool:
        """Whether the network has a gate, a third matrix, so that fewer columns give the same number of weights."""
        return False

    @property
    def expert_count(self) -> int:
        """Number of experts, which a mesh may divide; 0 for a network without a router."""
        return 0

    @property
    def experts_per_token(self) -> int:
        """Number of experts that a token is multiplied with, on average; 0 for a network without a router."""
        return 0

    @property
    def needs_all_experts(self) -> str:
        """The reason why experts cannot be removed from a trained layer; "" where they can."""
        return ""

    @property
    def traits(self) -> MixerTraits:
        """Traits: the tokens that influence each other, and whether the network reads `MixerInputs.draws`."""
        return MixerTraits()

    def matrix_size(self, dim: int) -> int:
        """Number of weights that a token is multiplied with.

        Args:
          dim: Model size D.

        Returns:
          The number, without biases.
        """
        return (3 if self.is_gated else 2) * self.hidden * dim

    def __call__(self, inputs: MixerInputs) -> MixerOutput:
        """Transforms each token.

        Args:
          inputs: `x` `[B, T, D]`, the normalised hidden states of the tokens, with positions, segment_ids, ids, draws,
            deterministic and decoding; no projections.

        Returns:
          `o` `[B, T, D]`; under tensor parallelism only the tokens that this device keeps. The last product of a network sums
          and selects them by `tensor_parallel.reduce_output`, as `nn.layers.Dense` does; a network without such a product
          selects them by `tensor_parallel.local_tokens`.
        """
        raise NotImplementedError
