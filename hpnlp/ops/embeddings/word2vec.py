"""Word vectors by skip-gram and CBOW with negative sampling, trained block by block over a stream of words.

A block holds T centre words, their contexts (the T + 2 W words around them) and K noise words that the block shares. The
scores of a block are one matrix product, and so are the gradients of the inputs and of the outputs. A step of stochastic
gradient descent reads and writes the rows of these words only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError, check_options, option

SUBSAMPLING = ("c", "paper")
OBJECTIVES = ("skip_gram", "cbow")


@dataclasses.dataclass(frozen=True)
class WordBlock:
    """Sizes and objective of a block, static at trace time."""

    objective: str = option(
        "skip_gram",
        '"skip_gram": a centre predicts each word of its context. "cbow": the mean of the context predicts its centre.',
        among=OBJECTIVES,
    )
    window: int = option(5, "Largest distance W of a context word.", least=1)
    centres: int = option(32, "Centre words T of a block.", least=1)
    noise: int = option(16, "Noise words K that the centres of a block share.", least=1)
    negatives: float = option(
        5.0,
        "Weight of the noise: each prediction counts as many noise words, as if that number was drawn for it alone.",
        least=0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def contexts(self) -> int:
        """Words of a block: the centres, and W words on each side."""
        return self.centres + 2 * self.window


def keep_probabilities(counts: Int[Any, " V"], threshold: float = 1e-3, form: str = "c") -> np.ndarray:
    """Probability that subsampling keeps an occurrence of each word.

    With the frequency f of a word and the threshold t, "paper" keeps sqrt(t / f), and "c", the form of the C program and of
    gensim, keeps sqrt(t / f) + t / f; both at most 1.

    Args:
      counts: [V] occurrences of the words.
      threshold: t; 0 keeps all.
      form: "c" or "paper".

    Returns:
      float32 [V]; 1 for words without occurrences.

    Raises:
      InputError: The threshold is negative, or the form is unknown.

    References:
      Mikolov et al. 2013, "Distributed representations of words and phrases and their compositionality", eq. 5; word2vec.c.
    """
    if not threshold >= 0:
        raise InputError(f"threshold={threshold}: expected at least 0, where 0 keeps all words")
    if form not in SUBSAMPLING:
        raise InputError(f"form={form!r}: expected one of {', '.join(SUBSAMPLING)}")
    counts = np.asarray(counts, np.float64)
    if threshold == 0:
        return np.ones(counts.shape, np.float32)
    ratio = threshold * counts.sum() / np.maximum(counts, 1e-9)
    kept = np.sqrt(ratio) + (ratio if form == "c" else 0.0)
    return np.where(counts > 0, np.minimum(kept, 1.0), 1.0).astype(np.float32)


def noise_table(counts: Int[Any, " V"], power: float = 0.75, size: int = 1 << 20) -> np.ndarray:
    """Table of words in which each one has a share of count^power, so that a random entry is a draw of noise.

    Args:
      counts: [V] occurrences of the words.
      power: Exponent of the counts.
      size: Number of entries.

    Returns:
      int32 [size], ascending. Shares are rounded to 1 / size, so that very rare words may have no entry.

    Raises:
      InputError: No word occurs, or `size` is under 1.
    """
    weights = np.asarray(counts, np.float64) ** power * (np.asarray(counts) > 0)
    if size < 1 or weights.sum() <= 0:
        raise InputError(f"size={size}, {np.sum(counts)} occurrences: expected at least one entry and one occurrence")
    bounds = np.round(np.cumsum(weights) / weights.sum() * size).astype(np.int64)
    return np.repeat(np.arange(len(weights), dtype=np.int32), np.diff(bounds, prepend=0))


@array_op()
def pair_weights(segments: Int[Array, " C"], widths: Int[Array, " T"], block: WordBlock) -> Float[Array, "T C"]:
    """1 for each pair of a centre and a word of its context, otherwise 0.

    Args:
      segments: [T + 2 W] numbers of the sentences of a block's words; negative for padding.
      widths: [T] distance up to which each centre has a context, drawn from 1 to W for dynamic windows.
      block: Sizes of the block.

    Returns:
      [T, T + 2 W] float32.
    """
    distance = jnp.arange(block.contexts)[None, :] - block.window - jnp.arange(block.centres)[:, None]
    centre_segments = segments[block.window : block.window + block.centres, None]
    pairs = (
        (jnp.abs(distance) <= widths[:, None])
        & (distance != 0)
        & (segments[None, :] == centre_segments)
        & (centre_segments >= 0)
    )
    return pairs.astype(jnp.float32)


@array_op()
def block_loss(
    inputs: Float[Array, "I D"],
    outputs: Float[Array, "O D"],
    noise: Float[Array, "K D"],
    pairs: Float[Array, "T C"],
    block: WordBlock,
) -> Float[Array, ""]:
    """Negative-sampling loss of a block, in nats.

    Each prediction loses -log sigmoid(score of the word), and `negatives / K` times -log sigmoid(-score) of each noise word: in
    expectation the loss of `negatives` noise words that are drawn for this prediction. A noise word that is the predicted word
    counts as any other, while word2vec.c and gensim skip it.

    Args:
      inputs: Input vectors: [T, D] of the centres for skip-gram, [T + 2 W, D] of the contexts for CBOW.
      outputs: Output vectors: [T + 2 W, D] of the contexts for skip-gram, [T, D] of the centres for CBOW.
      noise: [K, D] output vectors of the noise words.
      pairs: [T, T + 2 W], see `pair_weights`.
      block: Sizes and objective.

    Returns:
      The sum over all predictions.

    Cost: 2 T (T + 2 W + K) D operations; their gradients twice as many.
    """
    h, count = _predictors(inputs, pairs, block)
    scale = count[:, None] * np.float32(block.negatives / block.noise)
    noise_loss = (scale * jax.nn.softplus(h @ noise.T)).sum()
    if block.objective == "skip_gram":
        return (pairs * jax.nn.softplus(-(h @ outputs.T))).sum() + noise_loss
    return (count * jax.nn.softplus(-(h * outputs).sum(axis=1))).sum() + noise_loss


def _predictors(inputs: Array, pairs: Array, block: WordBlock) -> tuple[Array, Array]:
    """`([T, D] vectors that predict, [T] predictions of each centre)`."""
    total = pairs.sum(axis=1)
    if block.objective == "skip_gram":
        return inputs, total
    return (pairs / jnp.maximum(total, 1)[:, None]) @ inputs, jnp.minimum(total, 1)


def _sigmoid(x: Array) -> Array:
    """The logistic function; on CPUs XLA computes it faster by tanh than by exp."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


@array_op()
def block_gradients(
    inputs: Float[Array, "I D"],
    outputs: Float[Array, "O D"],
    noise: Float[Array, "K D"],
    pairs: Float[Array, "T C"],
    block: WordBlock,
) -> tuple[Float[Array, "I D"], Float[Array, "O D"], Float[Array, "K D"]]:
    """Gradients of `block_loss` by its first three arguments, by two products.

    Arguments: see `block_loss`.

    Returns:
      Gradients of the input, output and noise vectors.
    """
    h, count = _predictors(inputs, pairs, block)
    scale = jnp.broadcast_to(count[:, None] * np.float32(block.negatives / block.noise), (block.centres, block.noise))
    if block.objective == "skip_gram":
        # One product for contexts and noise; the rows stay side by side.
        rows = jnp.concatenate([outputs, noise])
        is_noise = jnp.arange(rows.shape[0]) >= outputs.shape[0]
        g = jnp.concatenate([pairs, scale], axis=1) * (_sigmoid(h @ rows.T) - jnp.where(is_noise, 0.0, 1.0)[None, :])
        d_rows = g.T @ h
        return g @ rows, d_rows[: outputs.shape[0]], d_rows[outputs.shape[0] :]
    g_noise = scale * _sigmoid(h @ noise.T)
    g = count * (_sigmoid((h * outputs).sum(axis=1)) - 1.0)
    dh = g_noise @ noise + g[:, None] * outputs
    total = jnp.maximum(pairs.sum(axis=1), 1)[:, None]
    return (pairs / total).T @ dh, g[:, None] * h, g_noise.T @ h


@functools.partial(jax.jit, static_argnames=("block",), donate_argnums=(0,))
def train_blocks(
    table: Float[Array, "R D"],
    tokens: Int[Array, " L"],
    segments: Int[Array, " L"],
    widths: Int[Array, " M"],
    noise: Int[Array, "S K"],
    rates: Float[Array, " S"],
    block: WordBlock,
) -> Float[Array, "R D"]:
    """Trains by stochastic gradient descent, one step for each block, in one compiled program.

    Args:
      table: [2 V, D] input vectors, and below them the output vectors; donated, so that no step copies it.
      tokens: [2 W + S T] ids of a stream of words; the centres are all but the first and last W.
      segments: [2 W + S T] numbers of the sentences, negative for padding: contexts do not cross sentences.
      widths: [S T] width of each centre's window, 1 to W.
      noise: [S, K] ids of noise words.
      rates: [S] learning rate of each step.
      block: Sizes and objective.

    Returns:
      The table.

    Cost: for each word 6 (T + 2 W + K) D operations, and (2 T + 2 W + K) / T rows read and written.

    References:
      Mikolov et al. 2013; Ji et al. 2016, "Parallelizing word2vec in shared and distributed memory" (shared noise).
    """
    half = table.shape[0] // 2
    width, length = block.window, block.contexts
    is_skip_gram = block.objective == "skip_gram"

    def step(table: Array, inputs: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        start, draws, widths, rate = inputs
        words = jax.lax.dynamic_slice(tokens, (start,), (length,))
        pairs = pair_weights(jax.lax.dynamic_slice(segments, (start,), (length,)), widths, block)
        centres = words[width : width + block.centres]
        read, predicted = (centres, words) if is_skip_gram else (words, centres)
        ids = jnp.concatenate([read, predicted + half, draws + half])
        rows = table.at[ids].get(mode="promise_in_bounds")
        ends = (read.shape[0], read.shape[0] + predicted.shape[0])
        gradients = block_gradients(rows[: ends[0]], rows[ends[0] : ends[1]], rows[ends[1] :], pairs, block)
        return table.at[ids].add(-rate * jnp.concatenate(gradients), mode="promise_in_bounds"), None

    steps = noise.shape[0]
    starts = jnp.arange(steps, dtype=jnp.int32) * block.centres
    return jax.lax.scan(step, table, (starts, noise, widths.reshape(steps, -1), rates))[0]


@functools.partial(jax.jit, donate_argnums=(0,))
def merge_tables(table: Float[Array, "R D"], copies: list[Float[Array, "R D"]]) -> Float[Array, "R D"]:
    """Merges copies of a table that were trained on different parts of a text: each row moves by the sum of its changes.

    Where more than two copies have changed a row, the sum is scaled to that of two. If each copy moves a row by a share c of
    the way to its optimum, the sum of n copies leaves 1 - n c of the distance, which does not grow for n = 2; the mean would
    delay the first phase of training, in which all vectors are near 0.

    Args:
      table: [R, D] before the training; donated.
      copies: Copies of it, each after the training.

    Returns:
      [R, D]: the table plus the changes of each row.

    Cost: one pass over all copies.
    """
    changes = [copy - table for copy in copies]
    changed = sum(((change != 0).any(axis=1).astype(jnp.float32) for change in changes), jnp.zeros(table.shape[0]))
    return table + sum(changes[1:], changes[0]) * (2 / jnp.maximum(changed, 2))[:, None]


def reference_block_gradients(
    inputs: Float[Any, "I D"],
    outputs: Float[Any, "O D"],
    noise: Float[Any, "K D"],
    pairs: Float[Any, "T C"],
    block: WordBlock,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`block_gradients` by loops over pairs and noise words, in float64.

    Arguments: see `block_loss`.

    Returns:
      Gradients of the input, output and noise vectors.
    """
    inputs, outputs, noise = (np.asarray(x, np.float64) for x in (inputs, outputs, noise))
    d_inputs, d_outputs, d_noise = np.zeros_like(inputs), np.zeros_like(outputs), np.zeros_like(noise)

    def sigmoid(x: np.ndarray) -> Any:
        return 1 / (1 + np.exp(-x))

    for t in range(block.centres):
        context = np.flatnonzero(np.asarray(pairs)[t])
        if not len(context):
            continue
        is_skip_gram = block.objective == "skip_gram"
        # (rows of the inputs, row of the outputs) of each prediction
        for read, predicted in [([t], c) for c in context] if is_skip_gram else [(list(context), t)]:
            h = inputs[read].mean(axis=0)
            g = sigmoid(h @ outputs[predicted]) - 1
            dh = g * outputs[predicted]
            d_outputs[predicted] += g * h
            for k in range(block.noise):
                g = block.negatives / block.noise * sigmoid(h @ noise[k])
                dh = dh + g * noise[k]
                d_noise[k] += g * h
            d_inputs[read] += dh / len(read)
    return d_inputs, d_outputs, d_noise
