"""Attention from each query to blocks of keys that are chosen at run time."""

from hpnlp.ops.attention.selected_blocks.attend_blocks import ChosenBlocks, attend_blocks, attend_blocks_reference
from hpnlp.ops.attention.selected_blocks.blocks import (
    DocumentBlocks,
    block_summaries,
    choose_blocks,
    document_blocks,
    own_block_attention,
)
from hpnlp.ops.attention.selected_blocks.decode import BlockCache, attend_positions, block_positions, start_block_cache

__all__ = [
    "BlockCache", "ChosenBlocks", "DocumentBlocks", "attend_blocks", "attend_blocks_reference", "attend_positions",
    "block_positions", "block_summaries", "choose_blocks", "document_blocks", "own_block_attention", "start_block_cache",
]  # fmt: skip
