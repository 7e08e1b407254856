"""Softmax attention over static patterns: the spec of each mixer in tests, and its reference."""

from hpnlp.ops import attention
from hpnlp.ops.attention import Full, reference

# Spec of a mixer with a static pattern -> its mask. The arguments are small, so that documents cut blocks and a few tokens fill
# the cache of a window.
EXACT = {
    "full": Full(),
    "blockwise(5)": attention.Blockwise(5),
    "window(2,1)": attention.Window(2, 1),
    "dilated(2,3)": attention.Dilated(2, 3),
    "strided(4)": attention.Window(4) | attention.Strided(4),
    "fixed(5,2,heads=4)": attention.PerHead((attention.Blockwise(5),) * 2 + (attention.Fixed(5, 2),) * 2),
    "random(3,2,seed=1)": attention.RandomBlocks(3, 2, 1) | attention.Window(0),
    "global(2)": attention.Global(2) | attention.Window(0),
    "longformer(4,1)": attention.Window(2) | attention.Global(1),
    "bigbird(2,3,1,1,among=2)": attention.bigbird(2, 3, 1, 1, among=2),
}
# The same of mixers that are softmax attention over a static pattern as long as they have no carry.
SOFTMAX = EXACT | {"segment_memory(3)": attention.Window(3, 0)}
EXAMPLES = {spec.partition("(")[0]: (spec,) for spec in SOFTMAX}


def exact(mixing, arrays, params, mask, segment_ids):
    """The reference of mixers that are softmax attention over all pairs that their pattern, the mask and the segments allow."""
    q, k, v = (arrays[name] for name in "qkv")
    operands = {"segment_ids": segment_ids, "kv_segment_ids": segment_ids}
    operands |= {"positions": mixing.positions, "kv_positions": mixing.positions}
    return reference(q, k, v, SOFTMAX[mixing.spec] & mask, **operands)


REFERENCES = dict.fromkeys(EXAMPLES, exact)
