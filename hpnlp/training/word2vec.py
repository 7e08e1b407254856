"""Fast training of word vectors on the CPU: skip-gram and CBOW with negative sampling, outside of the training loop.

`hpnlp.tasks.word_embeddings` trains the same objectives, with every output layer, as a run that resumes and reports.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.embeddings.word2vec import WordBlock, keep_probabilities, merge_tables, noise_table, train_blocks
from hpnlp.types import InputError, check_options, option

# Blocks that a worker trains between two merges; a merge costs as much as training about as many words as the table has rows.
_BLOCKS = 1024


@dataclasses.dataclass(frozen=True)
class Word2VecConfig:
    """Training of word vectors."""

    objective: str = option("skip_gram", '"skip_gram" or "cbow".')
    dim: int = option(128, "Features of a vector, D.", least=1)
    window: int = option(5, "Largest distance of a context word; each centre draws its width from 1 to this number.")
    negatives: float = option(5.0, "Noise words of each prediction.")
    noise: int = option(16, "Noise words that the centres of a block share, K.")
    centres: int = option(32, "Centre words of a block, T. Large blocks with high rates diverge.")
    noise_power: float = option(0.75, "Noise is drawn by the counts to this power.")
    subsample: float = option(1e-3, "Threshold of subsampling; 0 keeps all words.")
    subsample_form: str = option("c", '"c" for sqrt(t/f) + t/f as the C program, "paper" for sqrt(t/f).')
    epochs: int = option(5, "Passes over the text.", least=1)
    learning_rate: float = option(0.025, "First learning rate; it falls linearly.", above=0)
    min_learning_rate: float = option(1e-4, "Last learning rate.", above=0)
    workers: int = option(
        0,
        "Threads, which train copies of the tables and merge them again and again; 0 for one per core, at most 2, as with "
        "more of them a word changes its vector less.",
        least=0,
    )
    seed: int = option(0, "Seed of the initial vectors and of all draws.", least=0)

    def __post_init__(self) -> None:
        check_options(self)
        self.block()
        if self.min_learning_rate > self.learning_rate:
            rates = f"learning_rate={self.learning_rate}, min_learning_rate={self.min_learning_rate}"
            raise InputError(f"{rates}: expected the first to be the larger")

    def block(self) -> WordBlock:
        """Sizes and objective of a block."""
        return WordBlock(self.objective, self.window, self.centres, self.noise, self.negatives)


def sentence_ids(
    sentences: Iterable[Sequence[str]], least: int = 5, vocab: int | None = None
) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Makes a vocabulary of sentences, and ids of their words.

    Args:
      sentences: Words of each sentence.
      least: Words with fewer occurrences are left out, so that windows reach over them.
      vocab: Largest number of words; None for no limit.

    Returns:
      `(ids, words, counts)`: ids int32 with -1 after each sentence, and the words by falling frequency with their occurrences.

    Raises:
      InputError: No word occurs as often.
    """
    kept = [list(sentence) for sentence in sentences]
    occurrences = collections.Counter(word for sentence in kept for word in sentence)
    ranked = sorted(
        (word for word, n in occurrences.items() if n >= least), key=lambda word: (-occurrences[word], word)
    )
    words = ranked[:vocab]
    if not words:
        raise InputError(f"least={least}: none of {len(occurrences):,} words occurs as often: lower it, or add text")
    rows = {word: row for row, word in enumerate(words)}
    ids = [row for sentence in kept for row in (*(rows[word] for word in sentence if word in rows), -1)]
    return np.array(ids, np.int32), words, np.array([occurrences[word] for word in words])


def train_word_vectors(
    tokens: np.ndarray,
    counts: np.ndarray,
    config: Word2VecConfig = Word2VecConfig(),  # noqa: B008  (frozen)
    log: Callable[[str], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Trains word vectors.

    Args:
      tokens: [N] ids of the words of a text; -1 ends a sentence, over which no context extends.
      counts: [V] occurrences of the words.
      config: Objective, sizes and rates.
      log: Called with a line after each epoch.

    Returns:
      `(input vectors, output vectors)`, float32 [V, D]. The input vectors are the word vectors. The result depends on the
      number of workers, and is otherwise the same each time.

    Raises:
      InputError: The text has no words, or ids beyond the counts; or the vectors are not finite after an epoch.
    """
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    if not (tokens >= 0).any():
        raise InputError("the text has no words: pass ids of words, with -1 after each sentence")
    if tokens.max() >= len(counts):
        raise InputError(
            f"the text has the id {tokens.max()}, and there are counts of {len(counts)} words: pass all counts"
        )
    keep = keep_probabilities(counts, config.subsample, config.subsample_form)
    table, draws = _initial(len(counts), config), jnp.asarray(noise_table(counts, config.noise_power))
    workers = config.workers or min(2, os.cpu_count() or 1)
    sizes = _sizes(float(keep[tokens[tokens >= 0]].sum()), config, workers)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for epoch in range(config.epochs):
            rng = np.random.default_rng([config.seed, epoch])
            words, segments = _subsampled(tokens, keep, rng)
            needed = -(-len(words) // (sizes.rounds * workers * config.centres))
            sizes = sizes._replace(steps=max(sizes.steps, needed))
            division = _Parts(words, segments, draws, config, epoch, sizes, rng)
            for index in range(sizes.rounds):
                if workers == 1:
                    table = division.train(table, index)
                    continue
                copies = [jnp.array(table) for _ in range(workers)]
                table = merge_tables(
                    table, list(pool.map(division.train, copies, range(index * workers, (index + 1) * workers)))
                )
            if not jnp.isfinite(table).all():
                raise InputError(
                    f"the vectors are not finite after epoch {epoch + 1}: lower learning_rate={config.learning_rate} or "
                    f"centres={config.centres}"
                )
            if log is not None:
                log(
                    f"epoch {epoch + 1} of {config.epochs}: {np.count_nonzero(tokens >= 0):,} words, {len(words):,} kept"
                )
    inputs, outputs = np.split(np.asarray(table), 2)
    return inputs, outputs


def _initial(vocab: int, config: Word2VecConfig) -> jax.Array:
    """Input vectors that are uniform over -1 / D to 1 / D, as those of gensim, and output vectors of 0, one below the other."""
    inputs = (2 * np.random.default_rng(config.seed).random((vocab, config.dim), np.float32) - 1) / config.dim
    return jnp.asarray(np.concatenate([inputs, np.zeros_like(inputs)]))


def _subsampled(tokens: np.ndarray, keep: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`(ids of the words that subsampling keeps, numbers of their sentences)`."""
    segments = np.cumsum(tokens < 0, dtype=np.int32)
    kept = (tokens >= 0) & (rng.random(len(tokens), np.float32) < keep[np.maximum(tokens, 0)])
    return tokens[kept].astype(np.int32), segments[kept]


class _Sizes(NamedTuple):
    """Number of workers, of rounds of an epoch, and of blocks of a worker in a round."""

    workers: int
    rounds: int
    steps: int


def _sizes(expected: float, config: Word2VecConfig, workers: int) -> _Sizes:
    """Sizes with room for the varying number of words that are kept."""
    expected += 4 * expected**0.5
    rounds = max(1, round(expected / (workers * _BLOCKS * config.centres)))
    return _Sizes(workers, rounds, -(-int(expected + 1) // (rounds * workers * config.centres)))


class _Parts:
    """The words of an epoch, divided into parts of equal size: those of the workers in the first round, and so on."""

    def __init__(
        self,
        words: np.ndarray,
        segments: np.ndarray,
        noise: jax.Array,
        config: Word2VecConfig,
        epoch: int,
        sizes: _Sizes,
        rng: np.random.Generator,
    ) -> None:
        workers, rounds, steps = sizes
        self.block, self.noise, self.steps = config.block(), noise, steps
        self.size = steps * config.centres  # centres of a part
        centres, margin = rounds * workers * self.size, config.window
        self.words = np.zeros(centres + 2 * margin, np.int32)
        self.segments = np.full(centres + 2 * margin, -1, np.int32)
        self.words[margin : margin + len(words)] = words
        self.segments[margin : margin + len(words)] = segments
        self.widths = rng.integers(1, margin + 1, centres, np.int32)
        self.seeds = rng.integers(0, 2**31, rounds * workers)
        done = (epoch + np.arange(rounds * steps) / (rounds * steps)) / config.epochs
        rates = config.learning_rate + (config.min_learning_rate - config.learning_rate) * done
        self.rates = np.repeat(rates.astype(np.float32).reshape(rounds, steps), workers, axis=0)

    def train(self, table: jax.Array, part: int) -> jax.Array:
        """Trains on a part; the table is donated."""
        centres = slice(part * self.size, (part + 1) * self.size)
        stream = slice(centres.start, centres.stop + 2 * self.block.window)
        draws = np.random.default_rng(self.seeds[part]).integers(0, self.noise.size, (self.steps, self.block.noise))
        rows = self.words[stream], self.segments[stream], self.widths[centres]
        return jax.block_until_ready(train_blocks(table, *rows, self.noise[draws], self.rates[part], self.block))
