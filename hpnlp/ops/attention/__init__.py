"""Exact attention: `attend` computes it, `merge` combines partial results, masks state which query sees which key."""

from typing import TYPE_CHECKING

from hpnlp.ops.attention.attend import attend, explain, merge
from hpnlp.ops.attention.block_sparse.flash import flash
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.patterns import (
    Blockwise,
    Causal,
    Dilated,
    Fixed,
    Global,
    GlobalAt,
    Prefix,
    RandomBlocks,
    Sinks,
    Strided,
    Where,
    Window,
)
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.pair_bias import BiasArrays
from hpnlp.ops.attention.positions.rope import Scaling, rope, yarn
from hpnlp.ops.attention.reference import reference
from hpnlp.table import exports

if TYPE_CHECKING:
    from hpnlp.ops.attention.masks.papers import (
        bigbird,
        longformer,
        sparse_transformer_fixed,
        sparse_transformer_strided,
    )
    from hpnlp.ops.attention.positions.bias import alibi, relative_shift, shaw, t5_bias, transformer_xl

__all__ = [
    "BiasArrays", "Blockwise", "Causal", "Dilated", "Fixed", "Full", "Global", "GlobalAt", "Mask", "Operands", "PerHead",
    "Prefix", "RandomBlocks", "Scaling", "Sinks", "Strided", "Where", "Window", "alibi", "attend", "bigbird", "explain",
    "flash", "longformer", "merge", "reference", "relative_shift", "rope", "shaw", "sparse_transformer_fixed",
    "sparse_transformer_strided", "t5_bias", "transformer_xl", "yarn",
]  # fmt: skip

__getattr__ = exports(
    __name__,
    {
        **dict.fromkeys(("bigbird", "longformer"), "masks.papers"),
        **dict.fromkeys(("sparse_transformer_fixed", "sparse_transformer_strided"), "masks.papers"),
        **dict.fromkeys(("alibi", "relative_shift", "shaw", "t5_bias", "transformer_xl"), "positions.bias"),
    },
)
