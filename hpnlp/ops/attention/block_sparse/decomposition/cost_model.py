"""Cost model of attention on CPUs: every tuning constant, and the estimates that are computed from them.

The unit of cost is one score: the dot product of one query with one key in one head, its exponential, and its share of the
product with the values, computed in tiles of 512 x 512. Costs choose among schedules that compute the same result: a constant
that is wrong for a machine costs time, not accuracy.

All constants were fitted by hand to `experiments/bench/attention.py` (N 8, H 64, float32, forward and backward, T from 512 to
65536) on two cores of an AMD EPYC and two cores of an Intel Xeon, with jax 0.10.2. To fit them to another machine, change one
at a time and run that benchmark.
"""

from __future__ import annotations

import fractions

import jax

# --- Tile sizes ------------------------------------------------------------------------------------------------------

# Candidate tiles (queries, keys), largest first. Large tiles cost less per score, small tiles follow the border of a mask more
# closely and compute fewer hidden scores.
TILE_SIZES = (1024, 1024), (512, 1024), (512, 512), (256, 256), (128, 128), (64, 64)

# Cost of a score by the smaller side of its tile: {least side: cost}, largest side first.
_SCORE_COSTS = {1024: 0.92, 512: 1.0, 256: 1.2, 128: 1.25, 0: 1.5}

# Query blocks, besides the first and the last, from which the number of active tiles of a mask is estimated. More query blocks
# make the estimate better and the choice of the tile size slower.
SAMPLED_QUERY_BLOCKS = 96


def tile_sizes() -> tuple[tuple[int, int], ...]:
    """Candidate tiles (queries, keys) on the default backend.

    Returns:
      All of TILE_SIZES on CPUs, where the executor loops over the heads; all but the largest elsewhere, where a tile has all
      heads at once.
    """
    return TILE_SIZES if jax.default_backend() == "cpu" else TILE_SIZES[1:]


def score_cost(block: int, key_block: int) -> float:
    """Cost of one score in tiles of `block` x `key_block`, relative to tiles of 512 x 512.

    Args:
      block: Queries in a tile.
      key_block: Keys in a tile.

    Returns:
      The cost, in scores.
    """
    return next(cost for least, cost in _SCORE_COSTS.items() if min(block, key_block) >= least)


# --- Steps of the executor's loop ------------------------------------------------------------------------------------

# Scores of one step, over all heads that run together: about what keeps all cores busy and still fits the caches. Smaller
# steps lose time to overhead, larger ones to cache misses.
STEP_SCORES = 1 << 20

# Elements of the queries (or keys) that are copied into blocks at a time, as long as at least one head is left. Copies of all
# heads at once are faster, but double the memory of long sequences: with this limit a window at T 65536 peaked at 1.85 GB
# instead of 2.41 GB and took 10 % longer.
MAX_COPIED_ELEMENTS = 1 << 23

# Most keys that one query block reads in one step. Wider steps have less overhead; narrower ones leave room for more query
# blocks in a step of STEP_SCORES scores.
MAX_STEP_KEYS = 1024

# Overhead of a step per query block, in keys, where the width of steps is chosen.
_STEP_OVERHEAD_KEYS = 48

# Fixed cost of a step of any size, in scores: slicing the operands and updating the running sums.
_STEP_COST = 1 << 17

# Additional cost of a score whose step evaluates the mask.
_EVALUATION_COST = 0.08

# A candidate schedule is considered if it computes at most this many times the scores of the candidate with the fewest: longer
# runs of query blocks may outweigh more padding.
MAX_SCORES_RATIO = fractions.Fraction(4, 3)

# Steps of two widths are used if they read less than this share of the keys that steps of the best single width read: a second
# loop must save more than 3 %.
MAX_TWO_WIDTHS_RATIO = 0.97

# Steps that evaluate the mask are separated from steps that do not, in loops of their own, if there are at least this many
# steps and less than half of them evaluate the mask. With fewer steps, a second loop costs more than it saves.
MIN_STEPS_TO_SPLIT = 16


def query_blocks_per_step(scores: int) -> int:
    """Number of query blocks that are computed together in one step.

    Args:
      scores: Scores of one query block in one step, over all heads.

    Returns:
      The largest power of two with which a step has at most STEP_SCORES scores, at least 1.
    """
    return 1 << max((STEP_SCORES // max(scores, 1)).bit_length() - 1, 0)


def step_keys(width: int, key_block: int) -> int:
    """Cost of one step for one of its query blocks, in keys read.

    Args:
      width: Key blocks that the query block reads in the step.
      key_block: Keys in a block.

    Returns:
      The keys, padding and overhead included.
    """
    return width * key_block + _STEP_OVERHEAD_KEYS


def tile_group_cost(steps: int, evaluated_steps: int, step_scores: int) -> float:
    """Cost of a group of equally large steps, in scores.

    Args:
      steps: Number of steps.
      evaluated_steps: Number of those steps that evaluate the mask.
      step_scores: Scores of one step, over all heads.

    Returns:
      The cost, in scores over all heads.
    """
    return steps * (_STEP_COST + step_scores) + _EVALUATION_COST * evaluated_steps * step_scores


# --- Decomposition of a mask into sub-masks --------------------------------------------------------------------------

# Cost of a query whose partial results are merged with those of other sub-masks, in scores per head.
MERGE_COST = 30

# Cost of moving a token to another position of the sequence and back, in scores per head.
PERMUTE_COST = 80

# A sub-mask runs on its own queries or keys alone if they are at most this many; keys also if they are at most half of all.
# The indices are constants of the program.
MAX_SELECTED_TOKENS = 2048


def sub_mask_overhead(merged_queries: int, permuted_tokens: float) -> float:
    """Cost of running a sub-mask apart from the others, per head, besides its scores.

    Args:
      merged_queries: Queries whose partial results are merged with those of other sub-masks.
      permuted_tokens: Tokens that are moved, the mean of the numbers of queries and keys.

    Returns:
      The cost, in scores.
    """
    return MERGE_COST * merged_queries + PERMUTE_COST * permuted_tokens


# --- Short sequences: statically unrolled query blocks ---------------------------------------------------------------

# Queries in a block; and in a block under a mask that hides no pair, where smaller blocks do not skip any: for T = S = 256 they
# read and copy the keys twice, which took 20 % longer.
UNROLLED_BLOCK = 128
UNROLLED_FULL_BLOCK = 256

# Most query blocks and most query-key pairs that are unrolled. Each block adds operations to the program and holds a
# gradient of the keys that it reads.
UNROLLED_MAX_BLOCKS = 8
UNROLLED_MAX_PAIRS = 1024 * 1024

# From UNROLLED_DENSE_PAIRS query-key pairs on, blocks are unrolled only where they compute at most UNROLLED_MAX_SHARE of the
# pairs. Unrolled causal attention of T = S = 512 and 1024 took 10 % to 20 % less time than the loop, dense attention 33 % more;
# with fewer pairs unrolled blocks were always faster.
UNROLLED_DENSE_PAIRS = 512 * 512
UNROLLED_MAX_SHARE = 0.75


# --- Evaluation of masks on the host ---------------------------------------------------------------------------------

# Query-key pairs for which `Mask.at` is evaluated in one call, where active tiles are searched pair by pair: bounds the
# memory of the search (1 byte per pair for the result, 8 bytes for an intermediate value such as q - k).
MAX_EVALUATED_PAIRS = 1 << 22
